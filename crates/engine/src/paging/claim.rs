//! Claims: pages in whose place one thread alone puts anything, or takes it out.

use std::time::Instant;

use sterna_protocol::layout::{ChunkIndex, PageIndex};
use sterna_protocol::pages::PageSet;

use super::supplier::Whose;
use super::whereabouts::{Holder, Whereabouts};
use super::{Pager, State, Waiter};
use crate::error::MigrateError;

/// Pages of a chunk that nobody else claims until this is dropped. Missing ones are missing as before then, unless they
/// [have arrived](Self::arrived).
pub(super) struct Claim<'a> {
    pager: &'a Pager,
    chunk: ChunkIndex,
    pub(super) pages: PageSet,
}

impl<'a> Claim<'a> {
    /// Those of these pages that are missing, of this side, and that nobody has claimed; the others are duplicates.
    pub(super) fn of_missing(pager: &'a Pager, whose: Whose, chunk: ChunkIndex, wanted: &PageSet) -> Self {
        let mut state = pager.lock();
        let missing = match whose {
            Whose::Source => state.whereabouts.at_source_in(chunk),
            Whose::MemoryHosts => state.whereabouts.at_hosts_in(chunk),
        };
        let pages = wanted.and(&missing).without(state.claimed.chunk(chunk));
        state.duplicate += wanted.without(&pages).len() as u64;
        state.claimed.insert_all(chunk, &pages);
        Self { pager, chunk, pages }
    }

    /// Those of these pages that are here and that nobody has claimed. What follows the guest is not here, although the
    /// file may have it as a round brought it.
    pub(super) fn of_present(pager: &'a Pager, chunk: ChunkIndex, wanted: &PageSet) -> Self {
        let mut state = pager.lock();
        let here = wanted.without(state.whereabouts.away_in(chunk));
        let pages = here.without(state.claimed.chunk(chunk));
        state.claimed.insert_all(chunk, &pages);
        Self { pager, chunk, pages }
    }

    /// Notes that the pages are in the file. Returns those that somebody waits for.
    pub(super) fn arrived(&self) -> Result<Vec<(PageIndex, Vec<Waiter>)>, MigrateError> {
        let mut state = self.pager.lock();
        self.note(&mut state, |whereabouts| whereabouts.arrived(self.chunk, &self.pages))?;
        let mut waited = Vec::new();
        if !state.waiting.is_empty() {
            for page in self.pages.iter().map(|page| PageIndex { chunk: self.chunk, page }) {
                waited.extend(state.waiting.remove(&page).map(|waiters| (page, waiters)));
            }
        }
        Ok(waited)
    }

    /// Notes that the pages, which were at the source, are at a memory host.
    pub(super) fn left_source(&self, holder: Holder) -> Result<(), MigrateError> {
        let note = |whereabouts: &mut Whereabouts| whereabouts.left_source(self.chunk, &self.pages, holder);
        self.note(&mut self.pager.lock(), note)
    }

    fn note(
        &self,
        state: &mut State,
        note: impl FnOnce(&mut Whereabouts) -> std::io::Result<()>,
    ) -> Result<(), MigrateError> {
        let to_come = state.whereabouts.to_come();
        let noted = note(&mut state.whereabouts);
        noted.map_err(MigrateError::host("writing down which pages have arrived"))?;
        if to_come > 0 && state.whereabouts.to_come() == 0 {
            state.last = Some(Instant::now());
            self.pager.changed.notify_all();
        }
        Ok(())
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let mut state = self.pager.lock();
        let claimed = state.claimed.chunk_mut(self.chunk);
        *claimed = claimed.without(&self.pages);
    }
}
