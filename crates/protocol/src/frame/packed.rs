//! Packed frames: pages of a chunk in blocks, each in an encoding of its own.
//!
//! ```text
//!   96         128                                                                        payload
//!   +----------+--------------------------------------------+---------------------------+------------------------
//!   | delta:   | digests: 8 bytes for each page of full,    | blocks: 8 bytes each      | the blocks' bytes, one
//!   | 256 bits | then for each of delta, in ascending order | codec 8 pages 16 bytes 32 | after another
//!   +----------+--------------------------------------------+---------------------------+------------------------
//! ```
//!
//! The header's `words` says how many words of 8 bytes lie between header and payload; the checksum covers them. The
//! blocks hold the pages of `full` in ascending order (plain or compressed, up to 16 pages together), then those of
//! `delta` (differences, `xbzrle.rs`). Digests are of the pages, not of their encodings: they cover what is placed,
//! whatever encoding lay between.

use super::FrameError;
use crate::hello::Features;
use crate::layout::{CHUNK_PAGES, ChunkIndex, PAGE_BYTES};
use crate::pages::PageSet;
use crate::xbzrle::MAX_DELTA_BYTES;

/// The most pages a plain or compressed block may have: 64 KiB, beyond which compression gains little.
pub const MAX_BLOCK_PAGES: usize = 16;
/// The most words a packed frame may have between header and payload: delta, a digest a page, a block a page.
pub const MAX_WORDS: usize = DELTA_WORDS + 2 * CHUNK_PAGES;
/// The most bytes a packed frame's payload may have: every page as a difference, none of which is longer than a page.
pub const MAX_PAYLOAD_BYTES: usize = CHUNK_PAGES * (2 + MAX_DELTA_BYTES);
const DELTA_WORDS: usize = 4;

/// The encoding of a block's pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Codec {
    /// The pages' bytes, unchanged.
    Plain = 0,
    /// One LZ4 block (no frame, no length).
    Lz4 = 1,
    /// One Zstandard frame.
    Zstd = 2,
    /// Differences to what the receiver holds of each page.
    Xbzrle = 3,
}

impl Codec {
    /// The codec with this number; `None` where there is none.
    #[must_use]
    pub const fn new(number: u8) -> Option<Self> {
        match number {
            0 => Some(Self::Plain),
            1 => Some(Self::Lz4),
            2 => Some(Self::Zstd),
            3 => Some(Self::Xbzrle),
            _ => None,
        }
    }

    /// The features on which both sides must have agreed.
    #[must_use]
    pub const fn features(self) -> Features {
        match self {
            Self::Plain => Features::PACKED,
            Self::Lz4 => Features::PACKED.and(Features::LZ4),
            Self::Zstd => Features::PACKED.and(Features::ZSTD),
            Self::Xbzrle => Features::PACKED.and(Features::XBZRLE),
        }
    }
}

/// Some pages of a packed frame, encoded together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// Their encoding.
    pub codec: Codec,
    /// The number of pages: the next ones of the frame.
    pub pages: u16,
    /// The bytes that they take in the payload.
    pub bytes: u32,
}

impl Block {
    fn word(self) -> u64 {
        self.codec as u64 | u64::from(self.pages) << 8 | u64::from(self.bytes) << 24
    }

    /// The block that a word describes, where the word is valid by itself.
    fn from_word(word: u64, chunk: ChunkIndex) -> Result<Self, FrameError> {
        let codec = Codec::new(word as u8).ok_or(FrameError::Codec(word as u8))?;
        let block = Self { codec, pages: (word >> 8) as u16, bytes: (word >> 24) as u32 };
        let (pages, bytes) = (usize::from(block.pages), block.bytes as usize);
        let fits = match codec {
            Codec::Plain => pages <= MAX_BLOCK_PAGES && bytes == pages * PAGE_BYTES,
            // What compression does not make smaller travels plain.
            Codec::Lz4 | Codec::Zstd => pages <= MAX_BLOCK_PAGES && (1..pages * PAGE_BYTES).contains(&bytes),
            Codec::Xbzrle => pages <= CHUNK_PAGES && (pages * 2..=pages * (2 + MAX_DELTA_BYTES)).contains(&bytes),
        };
        if pages == 0 || !fits || word >> 56 != 0 {
            return Err(FrameError::Blocks(chunk.0));
        }
        Ok(block)
    }
}

/// Pages of one chunk, as they were when they were encoded: copies, so that a body which does not fit its digest is
/// damage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackedFrame {
    /// The round's number.
    pub round: u32,
    /// The chunk of the pages.
    pub chunk: ChunkIndex,
    /// Pages that come whole.
    pub full: PageSet,
    /// Pages that come as differences to what the receiver holds of them.
    pub delta: PageSet,
    /// Pages that hold zeros only.
    pub zero: PageSet,
    /// The pages of `full`, then those of `delta`, in ascending order each.
    pub blocks: Vec<Block>,
}

impl PackedFrame {
    /// Bytes of the payload: the blocks, one after another.
    #[must_use]
    pub fn payload_bytes(&self) -> usize {
        self.blocks.iter().map(|block| block.bytes as usize).sum()
    }

    /// The pages in the order in which digests and blocks have them: those that come whole, then those that come as
    /// differences.
    pub fn pages(&self) -> impl Iterator<Item = u8> + use<> {
        self.full.iter().chain(self.delta.iter())
    }

    /// The words between header and payload. There is a digest for every page of [`PackedFrame::pages`].
    pub(super) fn words(&self, digests: &[u64]) -> Vec<u64> {
        debug_assert_eq!(digests.len(), self.full.len() + self.delta.len());
        let mut words = Vec::with_capacity(DELTA_WORDS + digests.len() + self.blocks.len());
        words.extend_from_slice(&self.delta.0);
        words.extend_from_slice(digests);
        words.extend(self.blocks.iter().map(|block| block.word()));
        words
    }

    /// The frame that header and words describe, and its digests; `pages` are those that the chunk has. Nothing in it
    /// contradicts anything else, and its payload has at most [`MAX_PAYLOAD_BYTES`].
    pub(super) fn read<'w>(
        (round, chunk): (u32, ChunkIndex),
        (full, zero): (PageSet, PageSet),
        words: &'w [u64],
        pages: &PageSet,
        agreed: Features,
    ) -> Result<(Self, &'w [u64]), FrameError> {
        let contradiction = FrameError::Contradiction(chunk.0);
        let (delta, words) = words.split_first_chunk::<DELTA_WORDS>().ok_or(contradiction.clone())?;
        let delta = PageSet(*delta);
        let bodies = full.or(&delta);
        if !bodies.or(&zero).without(pages).is_empty() {
            return Err(FrameError::Outside(chunk.0));
        }
        let apart = full.and(&delta).is_empty() && bodies.and(&zero).is_empty();
        if !apart || bodies.or(&zero).is_empty() {
            return Err(contradiction);
        }
        let (digests, words) = words.split_at_checked(bodies.len()).ok_or(contradiction)?;
        let blocks = words.iter().map(|word| Block::from_word(*word, chunk)).collect::<Result<Vec<_>, _>>()?;
        if let Some(block) = blocks.iter().find(|block| !agreed.contains(block.codec.features())) {
            return Err(FrameError::NotAgreed(block.codec.features().without(agreed)));
        }
        let count = |blocks: &[Block]| blocks.iter().map(|block| usize::from(block.pages)).sum::<usize>();
        let (whole, differences) =
            blocks.split_at(blocks.iter().position(|block| block.codec == Codec::Xbzrle).unwrap_or(blocks.len()));
        let sorted = differences.iter().all(|block| block.codec == Codec::Xbzrle);
        if !sorted || count(whole) != full.len() || count(differences) != delta.len() {
            return Err(FrameError::Blocks(chunk.0));
        }
        Ok((Self { round, chunk, full, delta, zero, blocks }, digests))
    }
}

#[cfg(test)]
mod tests;
