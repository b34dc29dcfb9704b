//! Who is asked for pages that are not here: the guest's source for those that follow it, memory hosts for the others.

use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use sterna_protocol::heartbeat;
use sterna_protocol::layout::{ChunkIndex, PageIndex};
use sterna_protocol::pages::{PageMap, PageSet};

use super::supplier::{Supplier, Whose};
use super::whereabouts::Holder;
use super::{Pager, State};

impl State {
    /// Who has a page that is away.
    fn whose(&self, page: PageIndex) -> Whose {
        match self.whereabouts.at_source_in(page.chunk).contains(page.page) {
            true => Whose::Source,
            false => Whose::MemoryHosts,
        }
    }
}

impl Pager {
    /// A supplier is there: it is asked for what is waited for, and whoever was there before is hung up on.
    pub(crate) fn attach(&self, whose: Whose, supplier: &Arc<dyn Supplier>) {
        // First: who asks on a way that takes nothing any more keeps the others from asking.
        let before = self.lock().suppliers.of(whose).clone();
        if let Some(before) = before {
            before.hang_up();
        }
        // A fault that comes meanwhile either is among those that wait, or asks afterwards.
        let _asking = self.asking(whose);
        let (before, waiting) = {
            let mut state = self.lock();
            let theirs = state.waiting.iter().filter(|(page, _)| state.whose(**page) == whose);
            let pages = theirs.filter_map(|(page, waiters)| Some((*page, waiters.first()?.thread)));
            let waiting: Vec<_> = pages.collect();
            (state.suppliers.of(whose).replace(Arc::clone(supplier)), waiting)
        };
        if let Some(before) = before {
            before.hang_up();
        }
        for (page, thread) in waiting {
            supplier.ask(page, thread);
        }
    }

    /// The guest's source has gone, if this is still the one.
    pub(crate) fn detach(&self, source: &Arc<dyn Supplier>) {
        self.lock().suppliers.gone(source);
    }

    /// Asks for a page, where somebody is there to bring it.
    pub(super) fn ask(&self, page: PageIndex, thread: u32) {
        let whose = self.lock().whose(page);
        let _asking = self.asking(whose);
        let supplier = self.lock().suppliers.of(whose).clone();
        if let Some(supplier) = supplier {
            supplier.ask(page, thread);
        }
    }

    /// Asks again for those of these pages that are missing and that somebody waits for: what came in answer was not
    /// the page.
    pub(crate) fn ask_once_more(&self, chunk: ChunkIndex, pages: &PageSet) {
        let waiting: Vec<_> = {
            let state = self.lock();
            let of_these = state.waiting.iter().filter(|(page, _)| page.chunk == chunk && pages.contains(page.page));
            of_these.filter_map(|(page, waiters)| Some((*page, waiters.first()?.thread))).collect()
        };
        waiting.into_iter().for_each(|(page, thread)| self.ask(page, thread));
    }

    /// Asks for those of these pages that are missing, whether somebody waits for them or not.
    pub(crate) fn fetch(&self, pages: &PageMap) {
        for (chunk, pages) in pages.iter() {
            let missing = pages.and(self.lock().whereabouts.away_in(chunk));
            missing.iter().for_each(|page| self.ask(PageIndex { chunk, page }, 0));
        }
    }

    /// Returns once there is room for pages that come from the source, or has waited long enough for that. Those that
    /// somebody waits for come at once.
    pub(crate) fn wait_for_room(&self, chunk: ChunkIndex, pages: &PageSet) {
        let hosts = self.lock().suppliers.of(Whose::MemoryHosts).clone();
        if let Some(hosts) = hosts
            && self.waited_for_in(chunk).and(pages).is_empty()
        {
            hosts.make_way();
        }
    }

    /// Waits until nothing is at the source, at most so long. Whether nothing is.
    pub(crate) fn wait(&self, timeout: Duration) -> bool {
        let waited = self.changed.wait_timeout_while(self.lock(), timeout, |state| state.whereabouts.to_come() > 0);
        waited.unwrap_or_else(PoisonError::into_inner).0.whereabouts.to_come() == 0
    }

    /// For how long the source has not been there to bring pages; `None` where it is, or has none.
    #[must_use]
    pub fn alone(&self) -> Option<Duration> {
        let mut state = self.lock();
        let (heard, there) = (state.suppliers.source_heard(), state.suppliers.of(Whose::Source).is_some());
        let alone = heartbeat::alone(heard.elapsed(), there);
        alone.filter(|_| state.begun && state.whereabouts.to_come() > 0)
    }

    /// For how long threads have waited for pages of memory hosts, the longest for each of their numbers.
    #[must_use]
    pub fn longest_waits(&self) -> Vec<(usize, Duration)> {
        let state = self.lock();
        let mut longest: Vec<(usize, Duration)> = Vec::new();
        for (page, waiters) in state.waiting.iter().filter(|(page, _)| state.whose(**page) == Whose::MemoryHosts) {
            let waited = waiters.iter().map(|waiter| waiter.since.elapsed()).max();
            let number = state.whereabouts.holder(page.chunk).and_then(Holder::host_number);
            let (Some(number), Some(waited)) = (number, waited) else { continue };
            match longest.iter_mut().find(|(known, _)| *known == number) {
                Some((_, known)) => *known = waited.max(*known),
                None => longest.push((number, waited)),
            }
        }
        longest
    }

    /// One at a time asks each side, on a way that may be slow. Locked before the state.
    fn asking(&self, whose: Whose) -> MutexGuard<'_, ()> {
        self.asking[whose as usize].lock().unwrap_or_else(PoisonError::into_inner)
    }
}
