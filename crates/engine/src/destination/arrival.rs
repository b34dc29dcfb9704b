//! Arrival: pages of a chunk as they came off the wire, checked, and not in their place yet.
//!
//! A frame of any kind becomes an arrival, and there is one way from here to the guest's RAM
//! ([`place`](crate::destination::place)). A page comes with a body or is zeros. Pages that come as references to
//! content that is here already would be a third set.

use sterna_protocol::frame::{ChunkFrame, Digester};
use sterna_protocol::layout::{ChunkIndex, PAGE_BYTES};
use sterna_protocol::pages::PageSet;

/// Pages of a chunk, to be placed.
#[derive(Debug, Clone, Copy)]
pub struct Arrival<'a> {
    /// The chunk.
    pub chunk: ChunkIndex,
    /// Sets of pages, each with its pages' bodies, one after another. No page is in two sets.
    pub bodies: &'a [(PageSet, &'a [u8])],
    /// Pages that become zeros.
    pub zero: PageSet,
    /// Pages whose body does not fit the source's digest.
    pub suspect: PageSet,
}

impl<'a> Arrival<'a> {
    /// The arrival of a frame whose bodies travelled plain. The frame fits the layout, and there are as many bodies and
    /// digests as it has full pages.
    #[must_use]
    pub fn plain(
        frame: &ChunkFrame,
        digests: &[u64],
        digester: Digester,
        bodies: &'a [(PageSet, &'a [u8]); 1],
    ) -> Self {
        let [(full, each)] = bodies;
        let each = each.chunks_exact(PAGE_BYTES).zip(digests);
        let wrong = full.iter().zip(each).filter(|(_, (body, digest))| digester.page(body) != **digest);
        Self { chunk: frame.chunk, bodies, zero: frame.zero, suspect: wrong.map(|(page, _)| page).collect() }
    }

    /// All pages of the arrival.
    #[must_use]
    pub fn pages(&self) -> PageSet {
        self.bodies.iter().fold(self.zero, |all, (pages, _)| all.or(pages))
    }

    /// The size of its bodies, bytes.
    #[must_use]
    pub fn body_bytes(&self) -> u64 {
        self.bodies.iter().map(|(_, bodies)| bodies.len() as u64).sum()
    }
}
