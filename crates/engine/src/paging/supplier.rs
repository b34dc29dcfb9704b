//! Suppliers: who brings pages that are not here, when they are asked for.
//!
//! The pager knows where its pages are and who waits for them; how they are asked for, and how they come, is the
//! supplier's. In post-copy there is one supplier, the guest's source, which comes and goes with its connections and
//! ends with the last page. Pages wait for whoever comes next.

use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sterna_protocol::heartbeat;
use sterna_protocol::layout::PageIndex;

use super::Pager;

/// Who brings pages that are not here.
pub trait Supplier: Send + Sync {
    /// Asks for a page that this thread of the VMM waits for. Where the way there is lost the page goes on waiting: the
    /// next supplier is asked for it.
    fn ask(&self, page: PageIndex, thread: u32);

    /// When it said something last.
    fn heard(&self) -> Instant;

    /// Ends all its connections, from elsewhere: whoever waits for one of them wakes.
    fn hang_up(&self);

    /// Lets it know, without haste, that it is asked for nothing more.
    fn dismiss(&self);
}

impl Pager {
    /// A supplier is there: it is asked for what is waited for, and whoever was there before is hung up on.
    pub(crate) fn attach(&self, supplier: &Arc<dyn Supplier>) {
        // First: who asks on a way that takes nothing any more keeps the others from asking.
        let before = self.lock().supplier.clone();
        if let Some(before) = before {
            before.hang_up();
        }
        // A fault that comes meanwhile either is among those that wait, or asks afterwards.
        let _asking = self.asking();
        let (before, waiting) = {
            let mut state = self.lock();
            let pages = state.waiting.iter().filter_map(|(page, waiters)| Some((*page, waiters.first()?.thread)));
            let waiting: Vec<_> = pages.collect();
            (state.supplier.replace(Arc::clone(supplier)), waiting)
        };
        if let Some(before) = before {
            before.hang_up();
        }
        for (page, thread) in waiting {
            supplier.ask(page, thread);
        }
    }

    /// This supplier has gone, if it is still the one.
    pub(crate) fn detach(&self, supplier: &Arc<dyn Supplier>) {
        let mut state = self.lock();
        if state.supplier.as_ref().is_some_and(|current| Arc::ptr_eq(current, supplier)) {
            (state.supplier, state.heard) = (None, supplier.heard());
        }
    }

    /// Asks for a page, where somebody is there to bring it.
    pub(super) fn ask(&self, page: PageIndex, thread: u32) {
        let _asking = self.asking();
        let supplier = self.lock().supplier.clone();
        if let Some(supplier) = supplier {
            supplier.ask(page, thread);
        }
    }

    /// For how long there has been no supplier to bring pages; `None` where there is one, or nothing is missing.
    #[must_use]
    pub fn alone(&self) -> Option<Duration> {
        let state = self.lock();
        let heard = state.supplier.as_ref().map_or(state.heard, |supplier| supplier.heard());
        let alone = heartbeat::alone(heard.elapsed(), state.supplier.is_some());
        alone.filter(|_| state.begun && state.whereabouts.away() > 0)
    }

    /// One at a time asks, on a way that may be slow. Locked before the state.
    fn asking(&self) -> MutexGuard<'_, ()> {
        self.asking.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
