//! Pages of a split guest that need not travel when it moves: those that are away, and those that are here and at their
//! memory host as they came back. The guest's next host finds both where they are.

use std::sync::MutexGuard;

use sterna_protocol::layout::{CHUNK_PAGES, ChunkIndex, PAGE_BYTES};
use sterna_protocol::pages::PageSet;

use super::chunk::Chunk;
use super::{Split, lock};
use crate::error::MigrateError;
use crate::paging::whereabouts::Holder;

/// A chunk none of whose pages goes or comes until this is dropped.
pub struct Holding<'a> {
    split: &'a Split,
    chunk: ChunkIndex,
    state: MutexGuard<'a, Chunk>,
}

impl Split {
    /// Keeps a chunk's pages where they are; `None` where some are on their way, unless this is to wait for them.
    pub(crate) fn hold(&self, chunk: ChunkIndex, wait: bool) -> Option<Holding<'_>> {
        let state = if wait { lock(&self.chunks[chunk.index()]) } else { self.free_chunk(chunk.index())? };
        Some(Holding { split: self, chunk, state })
    }
}

impl Holding<'_> {
    /// The pages that are away.
    pub(crate) fn away(&self) -> PageSet {
        self.split.pager.away_in(self.chunk)
    }

    /// Who has copies of pages that are here, and of which pages; nobody where that is not sure, or where one of two
    /// that have the same pages has not all of them.
    pub(crate) fn copies(&self) -> Option<(Holder, PageSet)> {
        let number = self.state.copies_at().filter(|number| !self.split.lenders.is_leaving(*number))?;
        let holder = Holder::host(number)?;
        if self.split.pager.holder(self.chunk).is_some_and(|other| other != holder) {
            return None;
        }
        let members = self.split.members(self.chunk, number);
        let known = members.iter().map(|member| &self.state.members[member.which]);
        let sure = known.clone().all(|known| !known.unsure && !known.unasked);
        let copied = known.fold(PageSet::first(CHUNK_PAGES), |pages, known| pages.and(&known.at.copied()));
        sure.then(|| (holder, copied.without(&self.away())))
    }

    /// Those of these pages of which there are copies, and that are as these.
    ///
    /// # Errors
    /// The guest's RAM cannot be read.
    pub(crate) fn unchanged(&self, pages: &PageSet) -> Result<PageSet, MigrateError> {
        let Some((_, copied)) = self.copies() else { return Ok(PageSet::EMPTY) };
        let pages = copied.and(pages);
        let mut bodies = vec![0; pages.len() * PAGE_BYTES];
        let read = self.split.pager.ram().load(self.chunk, &pages, &mut bodies);
        read.map_err(MigrateError::host("reading pages of which memory hosts have copies"))?;
        Ok(self.state.unchanged(0, &pages, &bodies, self.split.digester))
    }
}
