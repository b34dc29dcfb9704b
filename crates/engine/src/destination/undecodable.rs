//! Errors of pages that cannot be decoded.

use sterna_protocol::layout::ChunkIndex;
use sterna_protocol::xbzrle::DeltaError;

/// A page that cannot be decoded although the frame around it is whole: the sender is at fault, or the network.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// A block that its codec cannot decode, or that has another number of bytes than its pages.
    #[error("the block that begins with page {page} of chunk {} cannot be decoded: {why}", .chunk.0)]
    Block {
        /// The chunk.
        chunk: ChunkIndex,
        /// The block's first page.
        page: u8,
        /// The codec's reason.
        why: String,
    },
    /// A delta that is invalid.
    #[error("page {page} of chunk {} cannot be made from what is here: {why}", .chunk.0)]
    Delta {
        /// The chunk.
        chunk: ChunkIndex,
        /// The page.
        page: u8,
        /// What is wrong with the delta.
        why: DeltaError,
    },
    /// A page that does not fit its sender's digest.
    #[error(
        "page {page} of chunk {} is not what its digest says{}",
        .chunk.0, if *.delta { ": it came as a difference, perhaps to other content than is here" } else { "" }
    )]
    Digest {
        /// The chunk.
        chunk: ChunkIndex,
        /// The page.
        page: u8,
        /// Whether it came as a delta.
        delta: bool,
    },
}
