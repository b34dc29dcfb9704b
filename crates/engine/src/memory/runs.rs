//! Pages of a chunk as runs of neighbours, each with its part of the pages' bodies.

use std::ops::Range;

use sterna_protocol::layout::{CHUNK_PAGES, ChunkIndex, Layout, PAGE_BYTES};
use sterna_protocol::pages::PageSet;

/// Neighbouring pages of a block.
#[derive(Debug)]
pub(crate) struct Run {
    /// The block, by its position in the layout.
    pub block: usize,
    /// The range of the block's bytes.
    pub range: Range<u64>,
}

impl Run {
    /// The run's addresses where its block begins at this one.
    pub fn at(&self, address: u64) -> Range<u64> {
        address + self.range.start..address + self.range.end
    }

    fn bytes(&self) -> usize {
        (self.range.end - self.range.start) as usize
    }
}

/// The pages of a byte range of a block, chunk by chunk; bytes outside the block are left out.
pub fn pages_of(layout: &Layout, block: usize, run: Range<u64>) -> impl Iterator<Item = (ChunkIndex, PageSet)> {
    let mut offset = run.start / PAGE_BYTES as u64 * PAGE_BYTES as u64;
    std::iter::from_fn(move || {
        if offset >= run.end {
            return None;
        }
        let first = layout.page_at(block, offset)?;
        let start = usize::from(first.page);
        let wanted = (run.end - offset).div_ceil(PAGE_BYTES as u64);
        let length = wanted.min((CHUNK_PAGES - start) as u64) as usize;
        let last = layout.place(first.chunk).map_or(0, |place| place.pages);
        let mut pages = PageSet::EMPTY;
        pages.insert_run(start, length.min(last - start));
        offset += (length * PAGE_BYTES) as u64;
        Some((first.chunk, pages))
    })
}

/// The runs of these pages, in their order.
///
/// # Panics
/// Where a page is not in the layout, when its run is asked for.
pub(crate) fn runs(layout: &Layout, chunk: ChunkIndex, pages: &PageSet) -> impl Iterator<Item = Run> {
    pages.runs().map(move |(start, length)| {
        let place = layout.place(chunk).expect("a chunk of this layout");
        assert!(start + length <= place.pages, "page {start} of chunk {} is not in the layout", chunk.0);
        let offset = place.offset + (start * PAGE_BYTES) as u64;
        Run { block: place.block, range: offset..offset + (length * PAGE_BYTES) as u64 }
    })
}

/// The runs of these pages, each with the bodies that are to be put in their place.
///
/// # Panics
/// As [`runs`], and where no bodies are left for a run when it is asked for.
pub(super) fn runs_from<'a>(
    layout: &Layout,
    chunk: ChunkIndex,
    pages: &PageSet,
    bodies: &'a [u8],
) -> impl Iterator<Item = (Run, &'a [u8])> {
    with_parts(runs(layout, chunk, pages), bodies, <[u8]>::split_at)
}

/// The runs of these pages, each with the room for its bodies.
///
/// # Panics
/// As [`runs`], and at once where `bodies` is not exactly as long as the pages.
pub(super) fn runs_into<'a>(
    layout: &Layout,
    chunk: ChunkIndex,
    pages: &PageSet,
    bodies: &'a mut [u8],
) -> impl Iterator<Item = (Run, &'a mut [u8])> {
    assert_eq!(bodies.len(), pages.len() * PAGE_BYTES, "room for exactly these pages");
    with_parts(runs(layout, chunk, pages), bodies, <[u8]>::split_at_mut)
}

/// Gives each run its part of the bodies, which lie one after another in the runs' order.
fn with_parts<B: Default>(
    runs: impl Iterator<Item = Run>,
    bodies: B,
    split: fn(B, usize) -> (B, B),
) -> impl Iterator<Item = (Run, B)> {
    let mut rest = bodies;
    runs.map(move |run| {
        let (own, after) = split(std::mem::take(&mut rest), run.bytes());
        rest = after;
        (run, own)
    })
}
