//! Arrival: pages of a chunk as they came off the wire, checked, and not in their place yet.
//!
//! A frame of any kind becomes an arrival, and there is one way from here to the guest's RAM
//! ([`place`](crate::destination::place)). A page comes with a body, is zeros, or is one whose body
//! lies in the gang's pool.

use std::fs::File;

use sterna_protocol::frame::{ChunkFrame, Digester};
use sterna_protocol::layout::{ChunkIndex, PAGE_BYTES};
use sterna_protocol::pages::PageSet;

use crate::memory::PoolRun;

/// Pages of a chunk, to be placed.
#[derive(Debug, Clone, Copy)]
pub struct Arrival<'a> {
    /// The chunk.
    pub chunk: ChunkIndex,
    /// Sets of pages, each with its pages' bodies, one after another. No page is in two sets.
    pub bodies: &'a [(PageSet, &'a [u8])],
    /// Pages that become zeros.
    pub zero: PageSet,
    /// Pages whose bodies lie in the gang's pool.
    pub pooled: Option<Pooled<'a>>,
    /// Pages whose body does not fit the source's digest.
    pub suspect: PageSet,
}

/// Pages whose bodies lie in the gang's pool.
#[derive(Debug, Clone, Copy)]
pub struct Pooled<'a> {
    /// The pages, and where their bodies lie.
    pub runs: &'a [PoolRun],
    /// The pool's file.
    pub pool: &'a File,
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
        let suspect = wrong.map(|(page, _)| page).collect();
        Self { chunk: frame.chunk, bodies, zero: frame.zero, pooled: None, suspect }
    }

    /// The arrival of pages whose bodies are here already.
    #[must_use]
    pub fn pooled(chunk: ChunkIndex, pooled: Pooled<'a>) -> Self {
        Self { chunk, bodies: &[], zero: PageSet::EMPTY, pooled: Some(pooled), suspect: PageSet::EMPTY }
    }

    /// All pages of the arrival.
    #[must_use]
    pub fn pages(&self) -> PageSet {
        let pooled = self.pooled.map_or(PageSet::EMPTY, |pooled| PoolRun::pages(pooled.runs));
        self.bodies.iter().fold(self.zero.or(&pooled), |all, (pages, _)| all.or(pages))
    }

    /// The bodies of these pages, in order, each with its page; bodies of other pages are left out.
    pub fn bodies_of(&self, pages: PageSet) -> impl Iterator<Item = (u8, &'a [u8])> {
        let each = self.bodies.iter().flat_map(|(set, bodies)| set.iter().zip(bodies.chunks_exact(PAGE_BYTES)));
        each.filter(move |(page, _)| pages.contains(*page))
    }

    /// The size of its bodies, bytes.
    #[must_use]
    pub fn body_bytes(&self) -> u64 {
        self.bodies.iter().map(|(_, bodies)| bodies.len() as u64).sum()
    }
}
