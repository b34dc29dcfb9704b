//! What is known of a chunk: where its pages are, and what those are of which there are copies.

use sterna_protocol::frame::Digester;
use sterna_protocol::layout::{CHUNK_PAGES, PAGE_BYTES};
use sterna_protocol::pages::PageSet;
use sterna_protocol::split::Whereabouts;

use super::lender::MEMBERS;

/// What a memory host has copies of, in a chunk.
#[derive(Debug)]
pub(super) struct Copies {
    number: usize,
    /// What the pages are there; of those that are no copies it means nothing.
    digests: Box<[u64; CHUNK_PAGES]>,
}

/// What is known of a chunk at one memory host.
#[derive(Debug, Default)]
pub(super) struct Known {
    /// Where its pages are.
    pub at: Whereabouts,
    /// What the memory host has is not known.
    pub unsure: bool,
    /// Pages have left since it was last asked, of which it had copies then: it may have lost them.
    pub unasked: bool,
}

impl Known {
    /// Pages leave without it, for its mirror: what it has of the chunk counts no more.
    pub fn left_behind(&mut self) {
        let held = self.at.held();
        self.at = Whereabouts::default();
        self.at.seen(held);
        self.unasked = true;
    }
}

/// What is known of a chunk.
#[derive(Debug, Default)]
pub(super) struct Chunk {
    /// At the memory host that has it, and at its mirror or in the parity.
    pub members: [Known; MEMBERS],
    /// What its pages are that came back.
    pub copies: Option<Copies>,
    /// The guest's source is putting it at a memory host (`straight.rs`): nothing of it leaves here.
    pub entrusted: bool,
}

impl Chunk {
    /// Notes that pages came back from a memory host that is one of `count`, what they are, and which are zeros;
    /// `digests` are those of the others, in order.
    pub fn came(&mut self, (number, count): (usize, usize), (full, zero): (&PageSet, &PageSet), digests: &[u64]) {
        for known in &mut self.members[..count] {
            // One that is behind has none of them.
            known.at.comes(&full.or(zero).and(&known.at.away()));
            known.at.released(zero);
        }
        let copies = self.copies.get_or_insert_with(|| Copies { number, digests: Box::new([0; CHUNK_PAGES]) });
        copies.number = number;
        full.iter().zip(digests).for_each(|(page, digest)| copies.digests[usize::from(page)] = *digest);
    }

    /// Notes that a memory host of a guest with parity was given pages: copies, until they are away. `digests` are
    /// theirs, in order.
    pub fn given(&mut self, (number, which): (usize, usize), full: &PageSet, digests: &[u64]) {
        self.members[which].at.comes(full);
        let copies = self.copies.get_or_insert_with(|| Copies { number, digests: Box::new([0; CHUNK_PAGES]) });
        copies.number = number;
        full.iter().zip(digests).for_each(|(page, digest)| copies.digests[usize::from(page)] = *digest);
    }

    /// The memory host that has copies of its pages.
    pub fn copies_at(&self) -> Option<usize> {
        let has_any = self.members.iter().any(|known| !known.at.copied().is_empty());
        self.copies.as_ref().filter(|_| has_any).map(|copies| copies.number)
    }

    /// What the copy of a page at a memory host is.
    pub fn digest(&self, which: usize, page: u8) -> Option<u64> {
        let copies = self.copies.as_ref().filter(|_| self.members[which].at.copied().contains(page))?;
        Some(copies.digests[usize::from(page)])
    }

    /// Those of these pages that are as their copies at a memory host; `bodies` are theirs, in order.
    pub fn unchanged(&self, which: usize, pages: &PageSet, bodies: &[u8], digester: Digester) -> PageSet {
        let each = pages.iter().zip(bodies.as_chunks::<PAGE_BYTES>().0);
        let like = |page: u8, body: &[u8]| self.digest(which, page).is_some_and(|digest| digest == digester.page(body));
        each.filter(|(page, body)| like(*page, *body)).map(|(page, _)| page).collect()
    }

    /// No copy counts any more.
    pub fn forget_copies(&mut self) {
        for known in &mut self.members {
            let copied = known.at.copied();
            known.at.released(&copied);
        }
        self.copies = None;
    }
}
