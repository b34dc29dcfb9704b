//! Memory that a guest takes anew waits for room, where it takes it faster than pages leave.
//!
//! Two ways lead to more memory here: the guest touches a page for the first time, or one comes back. While less is
//! here than may be, neither waits. Beyond that a page is let in as another leaves, in the order in which they came:
//! the guest gets on as fast as its pages leave, and this host keeps its memory. No access waits for a particular page
//! to leave, and none longer than [`LONGEST`]: where nothing leaves, because the memory hosts are away or full, the
//! guest becomes slow, and never hangs.
//!
//! A guest that has just been split has much more here than may be. Until it has come down to its room it may take half
//! of what leaves, so both go on.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use sterna_protocol::layout::{PAGE_BYTES, PageIndex};

use super::room::Room;
use super::{Split, lock};
use crate::error::MigrateError;
use crate::vmm::VmmError;

/// The longest that a page waits for room.
pub(super) const LONGEST: Duration = Duration::from_millis(100);
/// How often it is looked whether there is room.
const STEP: Duration = Duration::from_millis(1);

/// Pages that wait for room, and those that did.
#[derive(Debug)]
pub(super) struct Pace {
    /// More is not here, but for pages that have waited too long. Bytes.
    ceiling: AtomicU64,
    waiting: Mutex<VecDeque<Touch>>,
    called: Condvar,
    paced: AtomicU64,
    forced: AtomicU64,
    longest_us: AtomicU64,
}

/// The first access to a page.
#[derive(Debug, Clone, Copy)]
struct Touch {
    page: PageIndex,
    since: Instant,
}

/// Pages that waited for room.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Paced {
    /// How many.
    pub pages: u64,
    /// Those of them that were let in although there was none.
    pub forced: u64,
    /// The longest wait.
    pub longest: Duration,
}

impl Pace {
    /// Nothing waits.
    pub fn new() -> Self {
        let count = || AtomicU64::new(0);
        let (waiting, called) = (Mutex::default(), Condvar::new());
        Self {
            ceiling: AtomicU64::new(u64::MAX),
            waiting,
            called,
            paced: count(),
            forced: count(),
            longest_us: count(),
        }
    }

    /// So much may be here from now on, where so much is.
    pub fn bound(&self, room: Room, here: u64) {
        self.ceiling.store(room.most().max(here), Ordering::Relaxed);
    }

    /// So much has left: the ceiling comes down with what is here, until it is the room's.
    pub fn left(&self, room: Room, bytes: u64) {
        let lower = |ceiling: u64| Some(ceiling.saturating_sub(bytes / 2).max(room.most()));
        let _ = self.ceiling.fetch_update(Ordering::Relaxed, Ordering::Relaxed, lower);
    }

    /// Whether there is room for so many pages where so much is here.
    fn has_room(&self, pages: usize, here: impl FnOnce() -> u64) -> bool {
        let ceiling = self.ceiling.load(Ordering::Relaxed);
        ceiling == u64::MAX || here().saturating_add((pages * PAGE_BYTES) as u64) <= ceiling
    }

    fn passed(&self, waited: Duration, forced: bool) {
        self.paced.fetch_add(1, Ordering::Relaxed);
        self.forced.fetch_add(u64::from(forced), Ordering::Relaxed);
        self.longest_us.fetch_max(waited.as_micros() as u64, Ordering::Relaxed);
    }

    /// What waited so far.
    pub fn paced(&self) -> Paced {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let longest = Duration::from_micros(load(&self.longest_us));
        Paced { pages: load(&self.paced), forced: load(&self.forced), longest }
    }

    /// Wakes who lets pages in, for it to look whether this is the end.
    pub fn end(&self) {
        let _waiting = lock(&self.waiting);
        self.called.notify_all();
    }
}

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

    /// Waits until there is room for a page that is to come back, and no longer than [`LONGEST`].
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
        self.pace.has_room(pages, || self.pager.ram().allocated_bytes().unwrap_or(0))
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
            match self.pager.let_in(touch.page) {
                Ok(()) | Err(MigrateError::Vmm(VmmError::Gone { .. })) => {}
                // Most likely no memory is left. The thread faults again.
                Err(error) => tracing::warn!(%error, "a page cannot be given to the guest: trying again"),
            }
            self.pace.passed(waited, !room);
            // Last, so that nobody overtakes.
            lock(&self.pace.waiting).pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ceiling_comes_down_by_half_of_what_leaves_until_it_is_the_rooms() {
        let (pace, page) = (Pace::new(), PAGE_BYTES as u64);
        assert!(pace.has_room(1, || u64::MAX), "no bound");
        let room = Room::of(4 * page);
        pace.bound(room, 12 * page);
        let fits = |pages: u64| pace.has_room(1, || pages * page);
        assert!(fits(11) && !fits(12));
        pace.left(room, 4 * page);
        // 8 are here, and 2 more may be.
        assert!(fits(9) && !fits(10));
        pace.left(room, 100 * page);
        assert!(fits(3) && !fits(4));
        pace.bound(room, page);
        assert!(fits(3) && !fits(4));
        pace.bound(Room::ALL, page);
        assert!(fits(1 << 40));
    }

    #[test]
    fn what_waited_is_counted() {
        let pace = Pace::new();
        assert_eq!(pace.paced(), Paced::default());
        pace.passed(Duration::from_millis(7), false);
        pace.passed(Duration::from_millis(3), true);
        assert_eq!(pace.paced(), Paced { pages: 2, forced: 1, longest: Duration::from_millis(7) });
    }
}
