use sterna_protocol::layout::{CHUNK_PAGES, ChunkIndex};
use sterna_protocol::pages::PageSet;
use sterna_protocol::store::{Claim, Held, MAX_STRIPE, SLOT_BYTES};
use twox_hash::XxHash3_64;
use zerocopy::little_endian::{U32, U64, U128};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

const MAGIC: [u8; 8] = *b"STERNAST";
const FORMAT: u32 = 1;
/// Where the format's word says of how many chunks a stripe of parity is made; 0 where pages are kept.
const STRIPE_SHIFT: u32 = 16;

/// The first bytes of the file of slots: whose it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawHeader {
    magic: [u8; 8],
    format: U32,
    chunks: U32,
    guest: U128,
    key: U128,
    epoch: U64,
    granted_bytes: U64,
    checksum: U64,
}

/// Whose a shelf is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub claim: Claim,
    pub granted_bytes: u64,
    pub chunks: u32,
    /// Of how many chunks a stripe of parity is made; 1 where pages are kept.
    pub stripe: u32,
}

/// Bytes of a header.
pub(super) const HEADER_BYTES: usize = size_of::<RawHeader>();

impl Header {
    pub(super) fn encode(&self) -> [u8; HEADER_BYTES] {
        let stripe = if self.stripe > 1 { self.stripe << STRIPE_SHIFT } else { 0 };
        let mut raw = RawHeader {
            magic: MAGIC,
            format: (FORMAT | stripe).into(),
            chunks: self.chunks.into(),
            guest: self.claim.guest.into(),
            key: self.claim.key.into(),
            epoch: self.claim.epoch.into(),
            granted_bytes: self.granted_bytes.into(),
            checksum: U64::ZERO,
        };
        raw.checksum = raw.sum().into();
        zerocopy::transmute!(raw)
    }

    /// `None` where these bytes are no header, or one of another format.
    pub(super) fn decode(bytes: [u8; HEADER_BYTES]) -> Option<Self> {
        let raw: RawHeader = zerocopy::transmute!(bytes);
        let (format, stripe) = (raw.format.get() & ((1 << STRIPE_SHIFT) - 1), raw.format.get() >> STRIPE_SHIFT);
        let right = raw.magic == MAGIC && format == FORMAT && stripe <= MAX_STRIPE && raw.checksum.get() == raw.sum();
        right.then(|| Self {
            claim: Claim { guest: raw.guest.get(), key: raw.key.get(), epoch: raw.epoch.get() },
            granted_bytes: raw.granted_bytes.get(),
            chunks: raw.chunks.get(),
            stripe: stripe.max(1),
        })
    }
}

impl RawHeader {
    fn sum(&self) -> u64 {
        let checked = HEADER_BYTES - size_of::<U64>();
        XxHash3_64::oneshot(&self.as_bytes()[..checked])
    }
}

/// A chunk's slot as it lies in the file: within one page, so that nobody who is killed leaves half of it.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawSlot {
    version: U64,
    full: [U64; 4],
    zero: [U64; 4],
    digests: [U64; CHUNK_PAGES],
    checksum: U64,
}

/// What is noted of a chunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Slot {
    pub held: Held,
    /// The digests of its pages with a body, by page; the others are 0.
    pub digests: [u64; CHUNK_PAGES],
}

/// Bytes of a slot; it lies at the beginning of its [`SLOT_BYTES`].
pub(super) const NOTE_BYTES: usize = size_of::<RawSlot>();
const _: () = assert!(NOTE_BYTES as u64 <= SLOT_BYTES);

/// Where a chunk's slot lies: behind the header, which has a page of its own.
pub(super) fn offset(chunk: ChunkIndex) -> u64 {
    SLOT_BYTES * (1 + u64::from(chunk.0))
}

impl Slot {
    pub(super) const NOTHING: Self =
        Self { held: Held { version: 0, full: PageSet::EMPTY, zero: PageSet::EMPTY }, digests: [0; CHUNK_PAGES] };

    pub(super) fn encode(&self, chunk: ChunkIndex, key: u128) -> [u8; NOTE_BYTES] {
        let mut raw = RawSlot {
            version: self.held.version.into(),
            full: self.held.full.0.map(U64::new),
            zero: self.held.zero.0.map(U64::new),
            digests: self.digests.map(U64::new),
            checksum: U64::ZERO,
        };
        raw.checksum = raw.sum(chunk, key).into();
        zerocopy::transmute!(raw)
    }

    /// `None` where these bytes are no slot of this chunk and guest.
    pub(super) fn decode(bytes: [u8; NOTE_BYTES], chunk: ChunkIndex, key: u128) -> Option<Self> {
        let raw: RawSlot = zerocopy::transmute!(bytes);
        let (full, zero) = (PageSet(raw.full.map(U64::get)), PageSet(raw.zero.map(U64::get)));
        let right = raw.checksum.get() == raw.sum(chunk, key) && full.and(&zero).is_empty();
        right
            .then(|| Self { held: Held { version: raw.version.get(), full, zero }, digests: raw.digests.map(U64::get) })
    }
}

impl RawSlot {
    fn sum(&self, chunk: ChunkIndex, key: u128) -> u64 {
        let checked = NOTE_BYTES - size_of::<U64>();
        XxHash3_64::oneshot_with_seed((key as u64) ^ (u64::from(chunk.0) << 32 | 1), &self.as_bytes()[..checked])
    }
}

/// A change of parity that is under way, as it lies in the file.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawChange {
    chunk: U32,
    resets: U32,
    pages: [U64; 4],
    checksum: U64,
}

/// A change of parity that is under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Change {
    /// The chunk whose slot it changes.
    pub chunk: ChunkIndex,
    /// The pages whose parity lies beside.
    pub pages: PageSet,
    /// Nothing lies beside: the chunk's stripe is forgotten.
    pub resets: bool,
}

impl Change {
    pub(super) const BYTES: usize = size_of::<RawChange>();

    pub(super) fn encode(&self, key: u128) -> [u8; Self::BYTES] {
        let mut raw = RawChange {
            chunk: self.chunk.0.into(),
            resets: u32::from(self.resets).into(),
            pages: self.pages.0.map(U64::new),
            checksum: U64::ZERO,
        };
        raw.checksum = raw.sum(key).into();
        zerocopy::transmute!(raw)
    }

    /// `None` where these bytes are none of this guest.
    pub(super) fn decode(bytes: [u8; Self::BYTES], key: u128) -> Option<Self> {
        let raw: RawChange = zerocopy::transmute!(bytes);
        let (chunk, pages) = (ChunkIndex(raw.chunk.get()), PageSet(raw.pages.map(U64::get)));
        (raw.checksum.get() == raw.sum(key)).then(|| Self { chunk, pages, resets: raw.resets.get() != 0 })
    }
}

impl RawChange {
    fn sum(&self, key: u128) -> u64 {
        let checked = Change::BYTES - size_of::<U64>();
        // Bytes that were never written are no change.
        XxHash3_64::oneshot_with_seed((key as u64) ^ 1, &self.as_bytes()[..checked])
    }
}
