//! Suppliers: who brings pages that are not here, when they are asked for.
//!
//! The pager knows where its pages are and who waits for them; how they are asked for, and how they come, is the
//! supplier's. In post-copy that is the guest's source, which comes and goes with its connections and ends with the
//! last page; a split guest has its memory hosts. Where it is both, each brings its own. Pages wait for whoever comes
//! next.

use std::sync::Arc;
use std::time::Instant;

use sterna_protocol::errand::{Errand, Put};
use sterna_protocol::layout::PageIndex;
use sterna_protocol::pages::PageSet;

use crate::error::MigrateError;

/// Who brings pages that are not here.
pub trait Supplier: Send + Sync {
    /// Asks for a page that this thread of the VMM waits for. Where the way there is lost the page goes on waiting: the
    /// next supplier is asked for it.
    fn ask(&self, page: PageIndex, thread: u32);

    /// Whether a page that a thread of the guest touches for the first time may have memory now. Where not, the thread
    /// waits until the supplier lets the page in (`Pager::let_in`).
    fn admits(&self, _page: PageIndex) -> bool {
        true
    }

    /// Which of these pages of its chunk, that are not away, are to have memory with a page that was touched for the
    /// first time.
    fn touched_next(&self, _page: PageIndex, _here: &PageSet) -> PageSet {
        PageSet::EMPTY
    }

    /// Returns once there is room for pages that nobody waits for and that are about to come from elsewhere, or has
    /// waited long enough for that.
    fn make_way(&self) {}

    /// This thread of the VMM's has touched a page that is here and was not in its page tables. Whether the rest of its
    /// chunk is to be mapped at once.
    fn touched(&self, _page: PageIndex, _thread: u32) -> bool {
        false
    }

    /// The guest's source has put so much at memory hosts; what is to go there next, where anything `may`.
    ///
    /// # Errors
    /// [`MigrateError`]; what was not noted is the source's to send.
    fn straight(&self, put: &[Put], _may: bool) -> Result<Straight, MigrateError> {
        Ok(Straight::nothing(put))
    }

    /// What the source was to put at memory hosts does not count.
    fn nothing_goes_straight(&self) {}

    /// When it said something last.
    fn heard(&self) -> Instant;

    /// Ends all its connections, from elsewhere: whoever waits for one of them wakes.
    fn hang_up(&self);

    /// Lets it know, without haste, that it is asked for nothing more.
    fn dismiss(&self);
}

/// What goes straight to memory hosts.
#[derive(Debug, Default)]
pub struct Straight {
    /// Of each chunk that was put there, in order, the pages that are at the memory host from now on.
    pub taken: Vec<PageSet>,
    /// The epoch in which memory hosts are asked.
    pub epoch: u64,
    /// What is to go next.
    pub errands: Vec<Errand>,
}

impl Straight {
    /// Nothing was taken of so much, and nothing goes.
    #[must_use]
    pub fn nothing(put: &[Put]) -> Self {
        Self { taken: vec![PageSet::EMPTY; put.len()], ..Self::default() }
    }
}

/// Whose pages a supplier brings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Whose {
    /// Those that follow a guest from its source.
    Source,
    /// Those of a split guest that are at memory hosts.
    MemoryHosts,
}

/// The suppliers of one guest, as far as they are there.
pub(super) struct Suppliers {
    source: Option<Arc<dyn Supplier>>,
    hosts: Option<Arc<dyn Supplier>>,
    /// When the source was heard last, where it is not there.
    heard: Instant,
}

impl Suppliers {
    /// Nobody is there.
    pub(super) fn none() -> Self {
        Self { source: None, hosts: None, heard: Instant::now() }
    }

    /// The guest was let run, or is about to be: its source has not been away for longer than that.
    pub(super) fn begin(&mut self) {
        self.heard = Instant::now();
    }

    /// The one that brings such pages.
    pub(super) fn of(&mut self, whose: Whose) -> &mut Option<Arc<dyn Supplier>> {
        match whose {
            Whose::Source => &mut self.source,
            Whose::MemoryHosts => &mut self.hosts,
        }
    }

    /// The source has gone, if this is still the one.
    pub(super) fn gone(&mut self, source: &Arc<dyn Supplier>) {
        if let Some(source) = self.source.take_if(|current| Arc::ptr_eq(current, source)) {
            self.heard = source.heard();
        }
    }

    /// When the source was heard last.
    pub(super) fn source_heard(&self) -> Instant {
        self.source.as_ref().map_or(self.heard, |source| source.heard())
    }

    /// All that are there: nobody is any more.
    pub(super) fn take(&mut self) -> Vec<Arc<dyn Supplier>> {
        self.source.take().into_iter().chain(self.hosts.take()).collect()
    }
}
