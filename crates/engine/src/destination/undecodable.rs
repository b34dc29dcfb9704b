//! Pages that cannot be made of what arrived.

use sterna_protocol::layout::ChunkIndex;
use sterna_protocol::xbzrle::DeltaError;

/// Pages that cannot be had from what arrived, though the frame around them is whole: the sender is at fault, or what
/// lies between.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// A block that is none, or has another number of bytes than its pages.
    #[error("the block that begins with page {page} of chunk {} cannot be decoded: {why}", .chunk.0)]
    Block {
        /// The chunk.
        chunk: ChunkIndex,
        /// The block's first page.
        page: u8,
        /// What the codec says.
        why: String,
    },
    /// A difference that is none.
    #[error("page {page} of chunk {} cannot be made from what is here: {why}", .chunk.0)]
    Delta {
        /// The chunk.
        chunk: ChunkIndex,
        /// The page.
        page: u8,
        /// What is wrong with it.
        why: DeltaError,
    },
    /// A page that is not what its sender digested.
    #[error(
        "page {page} of chunk {} is not what its digest says{}",
        .chunk.0, if *.delta { ": it came as a difference, perhaps to other content than is here" } else { "" }
    )]
    Digest {
        /// The chunk.
        chunk: ChunkIndex,
        /// The page.
        page: u8,
        /// Whether it came as a difference.
        delta: bool,
    },
}
