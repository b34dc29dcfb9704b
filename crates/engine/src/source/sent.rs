//! What the destination holds of each page: the digest of what was last sent, 8 bytes a page (2 MiB per GiB of RAM).

use std::sync::atomic::{AtomicU64, Ordering};

use sterna_protocol::frame::Digester;
use sterna_protocol::layout::{CHUNK_PAGES, ChunkIndex, Layout, PAGE_BYTES};

const NEVER: u64 = 0;
const ZERO: u64 = 1;
const UNKNOWN: u64 = 2;

/// What the destination holds of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Last {
    /// Nothing was sent: the page reads as zeros there.
    Never,
    /// Zeros.
    Zero,
    /// A body was sent, and what arrived is not known.
    Unknown,
    /// Content of this digest.
    Content(u64),
}

/// The table of what was last sent of every page. The senders share it; each has chunks of its own.
#[derive(Debug)]
pub struct SentTable {
    pages: Vec<AtomicU64>,
    digester: Digester,
}

impl SentTable {
    /// An empty table: nothing was sent yet.
    #[must_use]
    pub fn new(layout: &Layout, digester: Digester) -> Self {
        Self { pages: (0..layout.chunks() as usize * CHUNK_PAGES).map(|_| AtomicU64::new(NEVER)).collect(), digester }
    }

    /// A body's digest, as this table and the destination have it.
    #[must_use]
    pub fn digest(&self, body: &[u8; PAGE_BYTES]) -> u64 {
        self.digester.page(body)
    }

    /// What was last sent of a page.
    #[must_use]
    pub fn last(&self, chunk: ChunkIndex, page: u8) -> Last {
        match self.entry(chunk, page).load(Ordering::Relaxed) {
            NEVER => Last::Never,
            ZERO => Last::Zero,
            UNKNOWN => Last::Unknown,
            digest => Last::Content(digest),
        }
    }

    /// Notes that content of this digest is sent.
    pub fn content(&self, chunk: ChunkIndex, page: u8, digest: u64) {
        self.entry(chunk, page).store(stored(digest), Ordering::Relaxed);
    }

    /// Notes that zeros are sent.
    pub fn zero(&self, chunk: ChunkIndex, page: u8) {
        self.entry(chunk, page).store(ZERO, Ordering::Relaxed);
    }

    /// Notes that the page arrived suspect.
    pub fn suspect(&self, chunk: ChunkIndex, page: u8) {
        self.entry(chunk, page).store(UNKNOWN, Ordering::Relaxed);
    }

    /// Whether content of this digest is what was last sent.
    #[must_use]
    pub fn holds(&self, chunk: ChunkIndex, page: u8, digest: u64) -> bool {
        self.last(chunk, page) == Last::Content(stored(digest))
    }

    fn entry(&self, chunk: ChunkIndex, page: u8) -> &AtomicU64 {
        &self.pages[chunk.index() * CHUNK_PAGES + usize::from(page)]
    }
}

/// A digest as the table has it: it differs from the values that mean something else.
pub(super) fn stored(digest: u64) -> u64 {
    digest.max(UNKNOWN + 1)
}
