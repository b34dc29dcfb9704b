//! Errands: what the source of a guest puts at memory hosts in the name of the guest's owner, while pages follow
//! (`docs/design/memory-hosts.md#straight-to-memory-hosts`).

use serde::{Deserialize, Serialize};

use crate::layout::ChunkIndex;
use crate::pages::PageSet;

/// The most chunks that are on their way straight to memory hosts.
pub const MAX_ERRANDS: usize = 8;

/// A chunk of which the source is to put what it has not sent yet at a memory host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Errand {
    /// The chunk. No page of it is at a memory host.
    pub chunk: ChunkIndex,
    /// The number of the memory host, as the map of missing pages names it.
    pub host: u8,
    /// The version that it has afterwards.
    pub version: u64,
}

/// What came of an errand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Put {
    /// Its chunk.
    pub chunk: ChunkIndex,
    /// The pages (`PageSet::from_bytes`) that the memory host has, and which are as they were when the guest stopped.
    pub pages: [u8; PageSet::BYTES],
    /// It did not take what it was to, or its answer was lost.
    pub failed: bool,
}
