//! Memory that a guest takes anew waits for room, where it takes it faster than pages leave.
//!
//! Two ways lead to more memory here: the guest touches a page for the first time, or one comes back. While less is
//! here than may be, neither waits. Beyond that a page is let in as another leaves, in the order in which they came:
//! the guest gets on as fast as its pages leave, and this host keeps its memory. No access waits for a particular page
//! to leave, and none longer than 100 ms: where nothing leaves, because the memory hosts are away or full, the
//! guest becomes slow, and never hangs.
//!
//! A guest that has just been split has much more here than may be. Until it has come down to its room it may take half
//! of what leaves, so both go on.

use std::collections::VecDeque;
use std::sync::PoisonError;
use std::time::Instant;

use sterna_protocol::layout::PageIndex;
use sterna_protocol::pages::PageSet;

use super::pace::{LONGEST, STEP, Touch};
use super::{Split, lock};
use crate::error::MigrateError;
use crate::vmm::VmmError;

impl Split {
    /// Lets pages in that wait, until the end.
    pub(super) fn pace_touches(&self) {
        while self.somebody_waits() {
            self.let_in_who_may();
            std::thread::sleep(STEP);
        }
    }

    /// Whether a page that is touched for the first time may have memory at once. Where not, it waits for its turn.
    pub(super) fn admits_touch(&self, page: PageIndex) -> bool {
        let mut waiting = lock(&self.pace.waiting);
        // Nobody overtakes.
        if self.has_ended() || waiting.is_empty() && self.has_room(1) {
            return true;
        }
        waiting.push_back(Touch { page, since: Instant::now() });
        self.pace.called.notify_one();
        false
    }

    /// The pages that a guest which goes through memory that it has never used is about to touch: they have memory with
    /// the one that it touches, where there is room for all of them and nobody waits. What it does not use after all is
    /// zeros, and leaves without being sent.
    pub(super) fn touched_ahead(&self, page: PageIndex, here: &PageSet) -> PageSet {
        let ahead = lock(&self.touched).wanted(page, here);
        if ahead.is_empty() || !lock(&self.pace.waiting).is_empty() || !self.has_room(ahead.len()) {
            return PageSet::EMPTY;
        }
        ahead
    }

    /// Waits until there is room for a page that is to come back, and no longer than 100 ms.
    pub(super) fn wait_for_room(&self) {
        if self.has_room(1) {
            return;
        }
        let since = Instant::now();
        let mut room = false;
        while !room && !self.has_ended() && since.elapsed() < LONGEST {
            std::thread::sleep(STEP);
            room = self.has_room(1);
        }
        self.pace.passed(since.elapsed(), !room);
    }

    /// Whether so many pages more may be here.
    pub(super) fn has_room(&self, pages: usize) -> bool {
        // Where it cannot be told, whoever makes room says why.
        self.pace.has_room(pages, || self.here_bytes().unwrap_or(0))
    }

    /// Waits for a page that waits; `false` at the end.
    fn somebody_waits(&self) -> bool {
        let idle = |waiting: &mut VecDeque<Touch>| waiting.is_empty() && !self.has_ended();
        drop(self.pace.called.wait_while(lock(&self.pace.waiting), idle).unwrap_or_else(PoisonError::into_inner));
        !self.has_ended()
    }

    fn let_in_who_may(&self) {
        loop {
            let Some(touch) = lock(&self.pace.waiting).front().copied() else { return };
            let (waited, room) = (touch.since.elapsed(), self.has_room(1));
            if !room && waited < LONGEST {
                return;
            }
            // Before whoever waited goes on.
            self.pace.passed(waited, !room);
            match self.pager.let_in(touch.page) {
                Ok(()) | Err(MigrateError::Vmm(VmmError::Gone { .. })) => {}
                // Most likely no memory is left. The thread faults again.
                Err(error) => tracing::warn!(%error, "a page cannot be given to the guest: trying again"),
            }
            // Last, so that nobody overtakes.
            lock(&self.pace.waiting).pop_front();
        }
    }
}
