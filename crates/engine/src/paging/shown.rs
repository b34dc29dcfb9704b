//! Pages as the guest first saw them, for the comparison with the source's pages, which do not change. The guest here
//! writes its pages afterwards.

use std::collections::VecDeque;
use std::io;

use sterna_protocol::frame::Digester;
use sterna_protocol::layout::{CHUNK_PAGES, ChunkIndex, Layout, PAGE_BYTES};
use sterna_protocol::pages::{PageMap, PageSet};

use crate::memory::{Memory, for_each_body, is_zero};

/// Pages to be digested while others may come.
#[derive(Debug, Clone, Copy)]
pub(super) struct Due {
    chunk: ChunkIndex,
    pages: PageSet,
    digester: Digester,
}

impl Due {
    /// Digests them as they are now.
    ///
    /// # Errors
    /// RAM cannot be read.
    pub(super) fn digest(&self, ram: &dyn Memory) -> io::Result<Vec<u64>> {
        let mut digests = Vec::with_capacity(self.pages.len());
        let load = |pages: &PageSet, bodies: &mut [u8]| ram.load(self.chunk, pages, bodies);
        for_each_body(&self.pages, load, |_, body| digests.push(digest(self.digester, body)))?;
        Ok(digests)
    }
}

/// The digest of a page, 0 for zeros.
fn digest(digester: Digester, body: &[u8; PAGE_BYTES]) -> u64 {
    if is_zero(body) { 0 } else { digester.page(body) }
}

/// A digest for each page: 8 bytes a page, and two bits.
#[derive(Debug)]
pub(super) struct Shown {
    known: PageMap,
    digests: Vec<u64>,
    /// Pages that came since they were last noted, and the chunks that have some.
    forgotten: PageMap,
    due: VecDeque<ChunkIndex>,
    /// Pages that somebody digests now, without holding this, and that have not come again since.
    being_noted: Option<(ChunkIndex, PageSet)>,
    pub(super) digester: Digester,
}

impl Shown {
    /// The guest has seen nothing.
    pub(super) fn nothing(layout: &Layout, digester: Digester) -> Self {
        let digests = vec![0; layout.chunks() as usize * CHUNK_PAGES];
        let [known, forgotten] = std::array::from_fn(|_| PageMap::empty(layout));
        Self { known, digests, forgotten, due: VecDeque::new(), being_noted: None, digester }
    }

    /// Forgets these pages, whose content has just changed. They are due to be noted.
    pub(super) fn forget(&mut self, chunk: ChunkIndex, pages: &PageSet) {
        if self.forgotten.chunk(chunk).is_empty() && !pages.is_empty() {
            self.due.push_back(chunk);
        }
        let known = self.known.chunk_mut(chunk);
        *known = known.without(pages);
        self.forgotten.insert_all(chunk, pages);
        if let Some((_, still)) = self.being_noted.as_mut().filter(|(of, _)| *of == chunk) {
            *still = still.without(pages);
        }
        pages.iter().for_each(|page| self.digests[chunk.index() * CHUNK_PAGES + usize::from(page)] = 0);
    }

    /// Forgets these pages, which are missing from now on. They are noted when they come, and not before: what is in
    /// their place is a hole.
    pub(super) fn missing(&mut self, chunk: ChunkIndex, pages: &PageSet) {
        self.forget(chunk, pages);
        let forgotten = self.forgotten.chunk_mut(chunk);
        *forgotten = forgotten.without(pages);
    }

    /// These pages are not compared: they count as zeros, whatever the guest sees of them. Nothing was noted of them.
    pub(super) fn leave_out(&mut self, pages: &PageMap) {
        self.known.add(pages);
    }

    /// What the guest has not seen and is not noted is a page of zeros, and is noted as that.
    pub(super) fn note_rest(&mut self, layout: &Layout) {
        layout.iter().for_each(|chunk| self.known.insert_all(chunk, &PageSet::of_chunk(layout, chunk)));
    }

    /// The pages of a chunk that are noted.
    #[cfg(test)]
    pub(super) fn noted(&self, chunk: ChunkIndex) -> &PageSet {
        self.known.chunk(chunk)
    }

    /// The pages of a chunk that are due. They are digested without holding this, so that nobody who puts pages in
    /// their place waits, and given to [`note_due`](Self::note_due).
    pub(super) fn next_due(&mut self) -> Option<Due> {
        let chunk = self.due.pop_front()?;
        let pages = std::mem::replace(self.forgotten.chunk_mut(chunk), PageSet::EMPTY);
        self.being_noted = Some((chunk, pages));
        Some(Due { chunk, pages, digester: self.digester })
    }

    /// Notes the digests of what was due, except of pages that have come again, are missing, or were noted by now.
    pub(super) fn note_due(&mut self, due: &Due, digests: &[u64]) {
        if let Some((_, still)) = self.being_noted.take() {
            self.note_new(due, &still, digests);
        }
    }

    /// Those of these pages of a chunk that are not noted, to be digested without holding this. The guest runs, and has
    /// seen none of them: one that it sees meanwhile is noted before.
    pub(super) fn unseen(&self, chunk: ChunkIndex, pages: &PageSet) -> Due {
        Due { chunk, pages: pages.without(self.known.chunk(chunk)), digester: self.digester }
    }

    /// Notes the digests of pages that were [unseen](Self::unseen), except of those that were noted by now.
    pub(super) fn note_unseen(&mut self, due: &Due, digests: &[u64]) {
        self.note_new(due, &due.pages, digests);
    }

    fn note_new(&mut self, due: &Due, still: &PageSet, digests: &[u64]) {
        let new = still.without(self.known.chunk(due.chunk));
        for (page, digest) in due.pages.iter().zip(digests).filter(|(page, _)| new.contains(*page)) {
            self.digests[due.chunk.index() * CHUNK_PAGES + usize::from(page)] = *digest;
        }
        self.known.insert_all(due.chunk, &new);
    }

    /// The guest is about to run, and to write: what is being digested is not noted.
    pub(super) fn nothing_is_due(&mut self) {
        self.being_noted = None;
    }

    /// Notes these pages as they are in the file now, except those that were noted before. The guest must not see them
    /// until this returns.
    pub(super) fn note(&mut self, ram: &dyn Memory, chunk: ChunkIndex, pages: &PageSet) -> io::Result<()> {
        let unseen = self.unseen(chunk, pages);
        let digests = unseen.digest(ram)?;
        self.note_unseen(&unseen, &digests);
        Ok(())
    }

    /// Notes these bodies of pages, except those that were noted before.
    pub(super) fn note_bodies(&mut self, chunk: ChunkIndex, pages: &PageSet, bodies: &[u8]) {
        let new = pages.without(self.known.chunk(chunk));
        for (page, body) in pages.iter().zip(bodies.as_chunks().0).filter(|(page, _)| new.contains(*page)) {
            self.digests[chunk.index() * CHUNK_PAGES + usize::from(page)] = digest(self.digester, body);
        }
        self.known.insert_all(chunk, &new);
    }

    /// The digests of a chunk's pages, 0 for zeros, as [`Memory::page_digests`] has them: as they were noted, and zeros
    /// where they were not.
    pub(super) fn page_digests(&self, layout: &Layout, chunk: ChunkIndex) -> Vec<u64> {
        let pages = layout.place(chunk).map_or(0, |place| place.pages);
        let first = chunk.index() * CHUNK_PAGES;
        self.digests.get(first..first + pages).unwrap_or_default().to_vec()
    }

    /// A digest of the chunk, as [`Memory::chunk_digest`] has it.
    pub(super) fn chunk_digest(&self, layout: &Layout, chunk: ChunkIndex) -> u64 {
        self.digester.pages(&self.page_digests(layout, chunk))
    }
}
