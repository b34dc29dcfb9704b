//! Claims: pages in whose place one thread alone puts anything, or takes it out.

use std::time::Instant;

use sterna_protocol::layout::{ChunkIndex, PageIndex};
use sterna_protocol::pages::PageSet;

use super::{Pager, Waiter};
use crate::error::MigrateError;

/// Pages of a chunk that nobody else claims until this is dropped. Missing ones are missing as before then, unless they
/// [have arrived](Self::arrived).
pub(super) struct Claim<'a> {
    pager: &'a Pager,
    chunk: ChunkIndex,
    pub(super) pages: PageSet,
}

impl<'a> Claim<'a> {
    /// Those of these pages that are missing and that nobody has claimed; the others count as duplicates.
    pub(super) fn of_missing(pager: &'a Pager, chunk: ChunkIndex, wanted: &PageSet) -> Self {
        let mut state = pager.lock();
        let pages = wanted.and(state.whereabouts.away_in(chunk)).without(state.claimed.chunk(chunk));
        state.duplicate += wanted.without(&pages).len() as u64;
        state.claimed.insert_all(chunk, &pages);
        Self { pager, chunk, pages }
    }

    /// Those of these pages, which are here, that nobody has claimed.
    pub(super) fn of_present(pager: &'a Pager, chunk: ChunkIndex, wanted: &PageSet) -> Self {
        let mut state = pager.lock();
        let pages = wanted.without(state.claimed.chunk(chunk));
        state.claimed.insert_all(chunk, &pages);
        Self { pager, chunk, pages }
    }

    /// Notes that the pages are in the file. Returns those that somebody waits for.
    pub(super) fn arrived(&self) -> Result<Vec<(PageIndex, Vec<Waiter>)>, MigrateError> {
        let mut state = self.pager.lock();
        let noted = state.whereabouts.arrived(self.chunk, &self.pages);
        noted.map_err(MigrateError::host("writing down which pages have arrived"))?;
        let mut waited = Vec::new();
        if !state.waiting.is_empty() {
            for page in self.pages.iter().map(|page| PageIndex { chunk: self.chunk, page }) {
                waited.extend(state.waiting.remove(&page).map(|waiters| (page, waiters)));
            }
        }
        if state.whereabouts.away() == 0 {
            state.last = Some(Instant::now());
            self.pager.changed.notify_all();
        }
        Ok(waited)
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let mut state = self.pager.lock();
        let claimed = state.claimed.chunk_mut(self.chunk);
        *claimed = claimed.without(&self.pages);
    }
}
