//! Pages, chunks, and how a machine's RAM blocks lie behind one another.
//!
//! A page is 4,096 bytes, a chunk 256 pages. Every block begins at a chunk of its own, so that a chunk belongs to one
//! block, and a chunk's number is enough: frames, bitmaps and the work of a connection are in chunks.

use std::hash::Hasher;

use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

use crate::spec::BlockSpec;

/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;
/// Pages of a chunk.
pub const CHUNK_PAGES: usize = 256;
/// Bytes of a chunk.
pub const CHUNK_BYTES: usize = PAGE_BYTES * CHUNK_PAGES;
/// The most blocks a machine may have.
pub const MAX_BLOCKS: usize = 64;
/// The most chunks a machine may have: 64 TiB.
pub const MAX_CHUNKS: u64 = 1 << 26;

/// A chunk of the machine's RAM, counted over all blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ChunkIndex(pub u32);

impl ChunkIndex {
    /// The chunk as an index of a table with one entry per chunk.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// A page of the machine's RAM: its chunk and its place in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PageIndex {
    /// The chunk of the page.
    pub chunk: ChunkIndex,
    /// The page in the chunk.
    pub page: u8,
}

/// Where a chunk lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The block, by its position in the layout.
    pub block: usize,
    /// Offset in the block, bytes.
    pub offset: u64,
    /// Pages of it that exist: 256, except in the last chunk of a block.
    pub pages: usize,
}

/// A layout that is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// Too many or no blocks.
    #[error("{0} RAM blocks: between 1 and {MAX_BLOCKS} can be moved")]
    Blocks(usize),
    /// A size that is not a positive multiple of the page size.
    #[error("RAM block '{id}' of {bytes} bytes is not a whole number of its pages of {page_bytes} bytes")]
    Size {
        /// The block's id.
        id: String,
        /// The block's size.
        bytes: u64,
        /// The block's page size.
        page_bytes: u64,
    },
    /// Two blocks have one name.
    #[error("two RAM blocks are called '{0}'")]
    Twice(String),
    /// The blocks have more than [`MAX_CHUNKS`] chunks.
    #[error("more than {} TiB of RAM", MAX_CHUNKS >> 20)]
    TooLarge,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Block {
    spec: BlockSpec,
    first: u32,
    chunks: u32,
}

/// A machine's RAM blocks, one behind the other, each from a chunk of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    blocks: Vec<Block>,
    chunks: u32,
}

impl Layout {
    /// Lays the blocks behind one another, in the order given.
    ///
    /// # Errors
    /// [`LayoutError`]: the blocks may come from a peer.
    pub fn new(specs: &[BlockSpec]) -> Result<Self, LayoutError> {
        if specs.is_empty() || specs.len() > MAX_BLOCKS {
            return Err(LayoutError::Blocks(specs.len()));
        }
        let mut blocks: Vec<Block> = Vec::with_capacity(specs.len());
        let mut first = 0u64;
        for spec in specs {
            let page_ok = spec.page_bytes.is_power_of_two() && spec.page_bytes >= PAGE_BYTES as u64;
            if !page_ok || spec.bytes == 0 || spec.bytes % spec.page_bytes != 0 {
                return Err(LayoutError::Size { id: spec.id.clone(), bytes: spec.bytes, page_bytes: spec.page_bytes });
            }
            if blocks.iter().any(|block| block.spec.id == spec.id) {
                return Err(LayoutError::Twice(spec.id.clone()));
            }
            let chunks = spec.bytes.div_ceil(CHUNK_BYTES as u64);
            if first + chunks > MAX_CHUNKS {
                return Err(LayoutError::TooLarge);
            }
            blocks.push(Block { spec: spec.clone(), first: first as u32, chunks: chunks as u32 });
            first += chunks;
        }
        Ok(Self { blocks, chunks: first as u32 })
    }

    /// So many whole chunks of one block, for who knows nothing else of a machine.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn of_chunks(chunks: u32) -> Result<Self, LayoutError> {
        let bytes = u64::from(chunks) * CHUNK_BYTES as u64;
        Self::new(&[BlockSpec { id: "ram".into(), bytes, page_bytes: PAGE_BYTES as u64, path: String::new() }])
    }

    /// The number of chunks.
    #[must_use]
    pub fn chunks(&self) -> u32 {
        self.chunks
    }

    /// All chunks in order.
    pub fn iter(&self) -> impl Iterator<Item = ChunkIndex> + use<> {
        (0..self.chunks).map(ChunkIndex)
    }

    /// The number of pages.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.blocks.iter().map(|block| block.spec.bytes / PAGE_BYTES as u64).sum()
    }

    /// The blocks in order.
    pub fn blocks(&self) -> impl Iterator<Item = &BlockSpec> {
        self.blocks.iter().map(|block| &block.spec)
    }

    /// Where a chunk lies; `None` where there is no such chunk.
    #[must_use]
    pub fn place(&self, chunk: ChunkIndex) -> Option<Place> {
        let block = self.blocks.partition_point(|block| block.first <= chunk.0).checked_sub(1)?;
        let Block { spec, first, chunks } = &self.blocks[block];
        let inside = chunk.0 - first;
        if inside >= *chunks {
            return None;
        }
        let offset = u64::from(inside) * CHUNK_BYTES as u64;
        let pages = ((spec.bytes - offset) / PAGE_BYTES as u64).min(CHUNK_PAGES as u64) as usize;
        Some(Place { block, offset, pages })
    }

    /// The page at a byte offset of a block; `None` outside the block.
    #[must_use]
    pub fn page_at(&self, block: usize, offset: u64) -> Option<PageIndex> {
        let Block { spec, first, .. } = self.blocks.get(block)?;
        if offset >= spec.bytes {
            return None;
        }
        let chunk = first + (offset / CHUNK_BYTES as u64) as u32;
        Some(PageIndex { chunk: ChunkIndex(chunk), page: (offset / PAGE_BYTES as u64 % CHUNK_PAGES as u64) as u8 })
    }

    /// A digest of ids, sizes and page sizes. Where both ends differ in it, the migration is refused.
    #[must_use]
    pub fn digest(&self) -> u64 {
        let mut hash = XxHash3_64::new();
        for Block { spec, .. } in &self.blocks {
            hash.write(&(spec.id.len() as u64).to_le_bytes());
            hash.write(spec.id.as_bytes());
            hash.write(&spec.bytes.to_le_bytes());
            hash.write(&spec.page_bytes.to_le_bytes());
        }
        hash.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(id: &str, bytes: u64) -> BlockSpec {
        BlockSpec { id: id.into(), bytes, page_bytes: 4096, path: String::new() }
    }

    #[test]
    fn every_block_begins_at_a_chunk_of_its_own() {
        let layout = Layout::new(&[block("a", (3 << 20) + 4096), block("b", 1 << 20)]).unwrap();
        assert_eq!(layout.chunks(), 5);
        assert_eq!(layout.place(ChunkIndex(3)), Some(Place { block: 0, offset: 3 << 20, pages: 1 }));
        assert_eq!(layout.place(ChunkIndex(4)), Some(Place { block: 1, offset: 0, pages: 256 }));
        assert_eq!(layout.place(ChunkIndex(5)), None);
        assert_eq!(layout.page_at(1, 8192), Some(PageIndex { chunk: ChunkIndex(4), page: 2 }));
        assert_eq!(layout.page_at(1, 1 << 20), None);
        assert_eq!(layout.pages(), 3 * 256 + 1 + 256);
    }

    #[test]
    fn layouts_that_cannot_be_are_refused() {
        assert_eq!(Layout::new(&[]), Err(LayoutError::Blocks(0)));
        assert_eq!(Layout::new(&[block("a", 4096), block("a", 4096)]), Err(LayoutError::Twice("a".into())));
        assert!(matches!(Layout::new(&[block("a", 0)]), Err(LayoutError::Size { .. })));
        assert!(matches!(Layout::new(&[block("a", 4097)]), Err(LayoutError::Size { .. })));
        assert_eq!(Layout::new(&[block("a", 1 << 62)]), Err(LayoutError::TooLarge));
    }
}
