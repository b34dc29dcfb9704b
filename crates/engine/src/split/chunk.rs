//! What is known of a chunk: where its pages are, and what those are of which there are copies.

use sterna_protocol::frame::Digester;
use sterna_protocol::layout::{CHUNK_PAGES, PAGE_BYTES};
use sterna_protocol::pages::PageSet;
use sterna_protocol::split::Whereabouts;

/// What a memory host has copies of, in a chunk.
#[derive(Debug)]
pub(super) struct Copies {
    number: usize,
    /// What the pages are there; of those that are no copies it means nothing.
    digests: Box<[u64; CHUNK_PAGES]>,
}

/// What is known of a chunk.
#[derive(Debug, Default)]
pub(super) struct Chunk {
    /// Where its pages are.
    pub at: Whereabouts,
    /// What the memory host has is not known.
    pub unsure: bool,
    /// What its pages are that came back.
    pub copies: Option<Copies>,
}

impl Chunk {
    /// Notes what pages are that came back from a memory host; `digests` are theirs, in order.
    pub fn came(&mut self, number: usize, pages: &PageSet, digests: &[u64]) {
        let copies = self.copies.get_or_insert_with(|| Copies { number, digests: Box::new([0; CHUNK_PAGES]) });
        copies.number = number;
        pages.iter().zip(digests).for_each(|(page, digest)| copies.digests[usize::from(page)] = *digest);
    }

    /// The memory host that has copies of its pages.
    pub fn copies_at(&self) -> Option<usize> {
        self.copies.as_ref().filter(|_| !self.at.copied().is_empty()).map(|copies| copies.number)
    }

    /// What the copy of a page is.
    pub fn digest(&self, page: u8) -> Option<u64> {
        let copies = self.copies.as_ref().filter(|_| self.at.copied().contains(page))?;
        Some(copies.digests[usize::from(page)])
    }

    /// Those of these pages that are as their copies; `bodies` are theirs, in order.
    pub fn unchanged(&self, pages: &PageSet, bodies: &[u8], digester: Digester) -> PageSet {
        let each = pages.iter().zip(bodies.as_chunks::<PAGE_BYTES>().0);
        let like = |page: u8, body: &[u8]| self.digest(page).is_some_and(|digest| digest == digester.page(body));
        each.filter(|(page, body)| like(*page, *body)).map(|(page, _)| page).collect()
    }

    /// No copy counts any more.
    pub fn forget_copies(&mut self) {
        let copied = self.at.copied();
        self.at.released(&copied);
        self.copies = None;
    }
}
