//! Memory hosts: a daemon keeps pages of a guest that runs elsewhere.
//!
//! A connection of the role [`Store`](crate::hello::Role::Store) is about one guest. Its first request is
//! [`Open`](crate::store::StoreRequest::Open) or [`Reopen`](crate::store::StoreRequest::Reopen); then requests and
//! replies take turns, in the form of messages ([`message`](crate::message)). Where a request or a reply has pages, a
//! chunk frame ([`frame`](crate::frame)) follows it.
//!
//! **A store never decides who owns a guest.** It knows the guest's number, a key that only the guest's owners know,
//! and the *epoch* of the present owner, which rises whenever the guest changes hands. Who opens with a higher epoch
//! fences off everybody before: their connections are refused at their next request, and nothing that they sent is
//! written after that. (A fencing token, as for locks that outlive their holders.)
//!
//! **Versions.** The owner numbers what it sends of a chunk. A store has one version of a chunk, takes only a higher
//! one (or the same again, where the answer was lost), and gives nothing but what it was asked for. So an answer that
//! was lost, and a request that comes twice, do no harm.
//!
//! **Parity.** Opened with [`OpenParity`](crate::store::StoreRequest::OpenParity) a store keeps no pages, but *folds*
//! together those that other stores have: of so many chunks in a row, a *stripe*, one after the other, the bodies of
//! pages at the same place are XORed into one. It notes what it has of each chunk as it would of pages that it kept.
//! Folding is undone by folding in the same body once more, so what is *unfolded* comes with its bodies; those are
//! compared with the digests that were noted. Whoever has lost a chunk gets the stripe's
//! [sum](crate::store::StoreRequest::Sum), and folds out of it what the others have.

/// What a store has of a guest: which request changes what.
mod holdings;

use std::hash::Hasher;

use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

pub use self::holdings::{Held, Holdings, Put, SLOT_BYTES, Sum};
use crate::layout::{CHUNK_PAGES, ChunkIndex};
use crate::pages::PageSet;

/// The most chunks that one [`StoreReply::Inventory`] names.
pub const MAX_INVENTORY: usize = 16_384;

/// The most chunks of a stripe.
pub const MAX_STRIPE: u32 = 16;

/// Who asks, and for which guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    /// The guest's number, drawn at random by its first owner.
    pub guest: u128,
    /// Known to the guest's owners alone, drawn likewise, and handed on with the guest. Digests are seeded with its
    /// lower half.
    pub key: u128,
    /// How often the guest has changed hands.
    pub epoch: u64,
}

/// Requests of a guest's owner.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum StoreRequest {
    /// Asks for memory, or comes back to what was granted.
    Open {
        /// Who asks.
        claim: Claim,
        /// How much the store may be asked to keep, bytes. What was granted before is changed to it.
        bytes: u64,
        /// The guest's chunks: their number.
        chunks: u32,
    },
    /// A chunk frame follows: keep these pages.
    Put {
        /// The chunk.
        chunk: ChunkIndex,
        /// What the store has afterwards.
        version: u64,
        /// What it must have now, and keeps beside the frame's pages. Without it the frame's pages are all that it
        /// keeps.
        base: Option<u64>,
    },
    /// Asks for pages.
    Get {
        /// The chunk.
        chunk: ChunkIndex,
        /// The version that the store must have.
        version: u64,
        /// The set's bytes ([`PageSet::from_bytes`]).
        pages: [u8; PageSet::BYTES],
    },
    /// These pages are not needed any more, where the store has this version or an older one.
    Release {
        /// The chunk.
        chunk: ChunkIndex,
        /// The version.
        version: u64,
        /// The set's bytes.
        pages: [u8; PageSet::BYTES],
    },
    /// Asks what the store has, from this chunk on.
    Inventory {
        /// The first chunk.
        first: ChunkIndex,
        /// Of how many chunks at most.
        most: u32,
    },
    /// Asks whether the store is ready for the guest to rely on it: its answer sums up all that it has.
    Prepare,
    /// Nothing is needed any more: what was granted is given back.
    Close,
    /// Comes back to what was granted: where nothing is, nothing becomes so. Only to a store that knows
    /// [`REOPENS`](crate::hello::Features::REOPENS).
    Reopen {
        /// Who asks.
        claim: Claim,
        /// The guest's chunks: their number.
        chunks: u32,
    },
    /// As `Open`, for the parity of the guest's chunks. What follows is about parity then: a `Put` adds pages that are
    /// not in it yet, and a `Get` or `Release` may not come. Only to a store that knows
    /// [`PARITY`](crate::hello::Features::PARITY).
    OpenParity {
        /// Who asks.
        claim: Claim,
        /// How much the store may be asked to keep, bytes.
        bytes: u64,
        /// The guest's chunks: their number.
        chunks: u32,
        /// Of how many chunks, one after the other, a stripe is made: 2 to [`MAX_STRIPE`].
        stripe: u32,
    },
    /// A chunk frame follows: these pages of a chunk, as they were put, are in the parity no more.
    Unfold {
        /// The chunk.
        chunk: ChunkIndex,
        /// The version that the store must have.
        version: u64,
    },
    /// Asks for the parity of pages of a chunk, and of which other chunks there is something in it.
    Sum {
        /// The chunk.
        chunk: ChunkIndex,
        /// The set's bytes.
        pages: [u8; PageSet::BYTES],
    },
    /// Nothing counts any more of the stripe of this chunk.
    Reset {
        /// Any of the stripe's chunks.
        chunk: ChunkIndex,
    },
}

impl StoreRequest {
    /// The request's name, for messages.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Open { .. } => "open",
            Self::Put { .. } => "put",
            Self::Get { .. } => "get",
            Self::Release { .. } => "release",
            Self::Inventory { .. } => "inventory",
            Self::Prepare => "prepare",
            Self::Close => "close",
            Self::Reopen { .. } => "reopen",
            Self::OpenParity { .. } => "open for parity",
            Self::Unfold { .. } => "unfold",
            Self::Sum { .. } => "sum",
            Self::Reset { .. } => "reset",
        }
    }
}

/// Replies of a store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum StoreReply {
    /// To `Open`: it is granted.
    Opened {
        /// The host's name.
        host: String,
        /// The chunks of which the store has anything.
        held: u32,
    },
    /// To `Put`: it is kept, in memory that outlives the daemon.
    Kept {
        /// The digests of the pages with a body, in order, as they are kept: the guest may have changed them on their
        /// way.
        digests: Vec<u64>,
    },
    /// To `Get`: a chunk frame with the pages follows.
    Pages,
    /// To `Release`.
    Released,
    /// To `Inventory`: the chunks of which the store has anything, in order, as many as were asked for and at most
    /// [`MAX_INVENTORY`]. None: there are no more.
    Inventory(Vec<InventoryEntry>),
    /// To `Prepare`.
    Prepared(Summary),
    /// To `Close`.
    Closed,
    /// To any request: it was not done.
    Refused(Refusal),
    /// To `Unfold` and `Reset`.
    Unfolded,
    /// To `Sum`: a chunk frame with the parity of the pages that have a body follows, and the others as zeros.
    Summed {
        /// The digests of those pages themselves, in order, as they were put.
        digests: Vec<u64>,
        /// Other chunks of the stripe that are in that parity, and which of these pages (a set's bytes).
        others: Vec<(ChunkIndex, [u8; PageSet::BYTES])>,
    },
}

/// What a store has of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct InventoryEntry {
    /// The chunk.
    pub chunk: ChunkIndex,
    /// The version.
    pub version: u64,
    /// The set's bytes, pages of zeros included.
    pub pages: [u8; PageSet::BYTES],
}

/// All that a store has, for the owner to compare with what it sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Summary {
    /// The epoch of the owner that asks.
    pub epoch: u64,
    /// The pages, those of zeros included.
    pub pages: u64,
    /// The digest of chunks, versions, pages and their digests ([`Summing`]).
    pub digest: u64,
}

/// Why a store did not do what it was asked to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Refusal {
    /// This host lends no memory.
    #[error("it lends no memory")]
    LendsNothing,
    /// The budget is used up.
    #[error("it has {left_bytes} bytes left to lend")]
    Budget {
        /// What can be granted at most, bytes.
        left_bytes: u64,
    },
    /// More than was granted.
    #[error("no more than the {granted_bytes} bytes that were granted")]
    Full {
        /// What was granted, bytes.
        granted_bytes: u64,
    },
    /// The guest's number is known and the key is another.
    #[error("the guest has another owner")]
    Stranger,
    /// There is nothing of this guest, or no longer.
    #[error("nothing is lent to this guest")]
    Closed,
    /// The guest has changed hands.
    #[error("the guest has changed hands: epoch {current} is in force")]
    Fenced {
        /// The epoch in force.
        current: u64,
    },
    /// The store has another version of the chunk, or none.
    #[error("it has {} of the chunk", .has.map_or_else(|| "nothing".into(), |version| format!("version {version}")))]
    Version {
        /// What it has.
        has: Option<u64>,
    },
    /// The store does not have all these pages.
    #[error("it does not have all these pages")]
    Absent,
    /// A request that may not come now, or that contradicts itself.
    #[error("a request that may not come: {0}")]
    Request(String),
    /// The store's own files cannot be read or written.
    #[error("its memory failed: {0}")]
    Memory(String),
}

/// Sums up what a store has: chunks in order.
pub struct Summing {
    hash: XxHash3_64,
    pages: u64,
}

impl Summing {
    /// Nothing yet, for the guest with this key.
    #[must_use]
    pub fn new(key: u128) -> Self {
        Self { hash: XxHash3_64::with_seed(key as u64), pages: 0 }
    }

    /// Adds a chunk; `digests` are those of its pages with a body, in order.
    pub fn add(&mut self, chunk: ChunkIndex, held: &Held, digests: impl Iterator<Item = u64>) {
        self.hash.write(&chunk.0.to_le_bytes());
        self.hash.write(&held.version.to_le_bytes());
        self.hash.write(&held.full.to_bytes());
        self.hash.write(&held.zero.to_bytes());
        digests.for_each(|digest| self.hash.write(&digest.to_le_bytes()));
        self.pages += held.pages().len() as u64;
    }

    /// The sum.
    #[must_use]
    pub fn end(self, epoch: u64) -> Summary {
        Summary { epoch, pages: self.pages, digest: self.hash.finish() }
    }
}

/// The most bytes that a guest of so many chunks can need at a store.
#[must_use]
pub fn most_bytes(chunks: u32) -> u64 {
    u64::from(chunks) * (SLOT_BYTES + CHUNK_PAGES as u64 * crate::layout::PAGE_BYTES as u64)
}
