//! Frames on the connections that carry pages.
//!
//! ```text
//!   0      4    5   6       8       12      16                     48                     80             88         96
//!   +------+----+---+-------+-------+-------+----------------------+----------------------+--------------+----------+
//!   | STRF |kind| 0 | words | round | chunk | full: 256 bits       | zero: 256 bits       | sequence     | checksum |
//!   +------+----+---+-------+-------+-------+----------------------+----------------------+--------------+----------+
//!   then, for a chunk frame: a digest ([`Digester`]) for each full page, in order, 8 bytes each
//!                            · the bodies, 4,096 bytes each
//!         for a packed frame: `words` words of 8 bytes · the blocks (packed.rs)
//!         for a shared frame: `words` words of 8 bytes (shared.rs)
//! ```
//!
//! All numbers are little-endian. `words` is 0 except in packed and shared frames. The checksum (XXH3-64, seeded with
//! the session's key) covers the header before it and the words after it, so a frame that is out of place, cut or
//! changed is found before a byte of it is used. `sequence` counts the frames of a connection from 0.
//!
//! The bodies of a chunk frame go from guest RAM to the socket and from the socket to guest RAM, while the guest may be
//! writing the page. Then the body does not fit its digest. The receiver notes such a page as *suspect*; the write made
//! it dirty, so it comes again. A page that is still suspect when a round ends is asked for again. A page that is
//! suspect three times in a row with the guest stopped fails the migration.
//!
//! A packed frame holds copies. A page of it that does not fit its digest was damaged, or its sender is at fault; it
//! fails the migration.

/// Blocks of encoded pages.
pub mod packed;

/// Pages that a gang shares.
pub mod shared;

use std::hash::Hasher;

use twox_hash::XxHash3_64;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use self::packed::{MAX_WORDS, PackedFrame};
use self::shared::SharedFrame;
use crate::hello::{Features, Version};
use crate::layout::{ChunkIndex, Layout, PAGE_BYTES};
use crate::pages::PageSet;

/// Bytes of a frame's header.
pub const HEADER_BYTES: usize = 96;
const CHECKED_BYTES: usize = HEADER_BYTES - 8;
const MAGIC: [u8; 4] = *b"STRF";
/// The minor version since which digests are seeded.
const SEEDED_SINCE: u16 = 1;
const KIND_CHUNK: u8 = 1;
const KIND_ROUND_END: u8 = 2;
const KIND_CLOSE: u8 = 3;
const KIND_PACKED: u8 = 4;
const KIND_SHARED: u8 = 5;

/// The header as it lies on the wire.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Raw {
    magic: [u8; 4],
    kind: u8,
    reserved: u8,
    words: U16,
    round: U32,
    chunk: U32,
    full: [U64; 4],
    zero: [U64; 4],
    sequence: U64,
    checksum: U64,
}

const _: () = assert!(size_of::<Raw>() == HEADER_BYTES);

/// A frame: its kind, and what its header and words say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Frame {
    /// Pages of a chunk.
    Chunk(ChunkFrame),
    /// Pages of a chunk in blocks.
    Packed(PackedFrame),
    /// Pages of a chunk that a gang shares.
    Shared(SharedFrame),
    /// This connection has sent all that it sends in this round.
    RoundEnd {
        /// The round's number.
        round: u32,
    },
    /// The connection ends: no frame follows.
    Close,
}

/// Pages of one chunk, as they are in this round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkFrame {
    /// The round's number.
    pub round: u32,
    /// The chunk of the pages.
    pub chunk: ChunkIndex,
    /// Pages whose bodies follow.
    pub full: PageSet,
    /// Pages that hold zeros only.
    pub zero: PageSet,
}

impl ChunkFrame {
    /// Bytes of the bodies.
    #[must_use]
    pub fn body_bytes(&self) -> usize {
        self.full.len() * PAGE_BYTES
    }
}

/// A frame that is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// It does not begin with the magic of a frame.
    #[error("no frame begins where one must begin")]
    Magic,
    /// Header or words differ from what was sent.
    #[error("frame {0} arrived damaged: its checksum does not fit")]
    Checksum(u64),
    /// A frame is missing, or came twice.
    #[error("frame {got} arrived where frame {expected} must come")]
    Sequence {
        /// The number of the frame that must come.
        expected: u64,
        /// The number of the frame that came.
        got: u64,
    },
    /// A kind that this version does not know and did not agree to.
    #[error("frame of unknown kind {0}")]
    Kind(u8),
    /// More words than any frame has.
    #[error("frame with {0} words behind its header: at most {MAX_WORDS} are allowed")]
    Words(u16),
    /// A kind or an encoding that both sides did not agree on.
    #[error("frame that needs a feature which was not agreed on: {0}")]
    NotAgreed(Features),
    /// An encoding that this version does not know.
    #[error("block of unknown encoding {0}")]
    Codec(u8),
    /// Blocks that are too large or too small, out of order, or not those of the frame's pages.
    #[error("frame for chunk {0} whose blocks do not make up its pages")]
    Blocks(u32),
    /// Pages that the machine does not have.
    #[error("frame for pages of chunk {0} that this machine does not have")]
    Outside(u32),
    /// A page is in more than one of the sets zero, full and delta, or the frame has no pages.
    #[error("frame for chunk {0} contradicts itself")]
    Contradiction(u32),
}

/// How the pages of one migration are digested: by XXH3-64 with a seed that no guest knows.
///
/// Whoever knows how pages are digested can make two contents with the same digest; with XXH3 this takes no computing
/// power. Inside a guest anybody who controls one page can do it, for example by an uploaded file in the page cache.
/// The second content would count as unchanged, also in the comparison of both sides, and the moved guest would have
/// the first content again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Digester {
    seed: u64,
}

impl Digester {
    /// Digests without a seed, as peers of version 1.0 make them.
    pub const UNSEEDED: Self = Self { seed: 0 };

    /// The digester of a migration whose sides both speak this version. The seed is the lower half of the migration's
    /// number, in all its sessions.
    #[must_use]
    pub fn of(version: Version, migration: u128) -> Self {
        if version.minor < SEEDED_SINCE { Self::UNSEEDED } else { Self { seed: migration as u64 } }
    }

    /// The digest of a page's body.
    #[must_use]
    pub fn page(self, body: &[u8]) -> u64 {
        XxHash3_64::oneshot_with_seed(self.seed, body)
    }

    /// The digest of several pages' digests.
    #[must_use]
    pub fn pages(self, digests: &[u64]) -> u64 {
        let mut hash = XxHash3_64::with_seed(self.seed);
        digests.iter().for_each(|digest| hash.write(&digest.to_le_bytes()));
        hash.finish()
    }
}

/// Writes the headers of one connection.
#[derive(Debug)]
pub struct FrameWriter {
    key: u64,
    sequence: u64,
}

impl FrameWriter {
    /// A writer for a connection of the session with this key.
    #[must_use]
    pub fn new(key: u64) -> Self {
        Self { key, sequence: 0 }
    }

    /// The beginning of the next frame, which its checksum covers: header and words. Its bodies or blocks follow.
    /// `digests` are those of its bodies: of a chunk frame's full pages, or of a packed frame's [`PackedFrame::pages`].
    #[must_use]
    pub fn head(&mut self, frame: &Frame, digests: &[u64]) -> Vec<u8> {
        let none = PageSet::EMPTY;
        let (kind, round, chunk, full, zero) = match frame {
            Frame::Chunk(f) => (KIND_CHUNK, f.round, f.chunk.0, f.full, f.zero),
            Frame::Packed(f) => (KIND_PACKED, f.round, f.chunk.0, f.full, f.zero),
            Frame::Shared(f) => (KIND_SHARED, f.round, f.chunk.0, f.pooled, f.referring()),
            Frame::RoundEnd { round } => (KIND_ROUND_END, *round, 0, none, none),
            Frame::Close => (KIND_CLOSE, 0, 0, none, none),
        };
        let own = match frame {
            Frame::Packed(packed) => Some(packed.words(digests)),
            Frame::Shared(shared) => Some(shared.words()),
            Frame::Chunk(_) | Frame::RoundEnd { .. } | Frame::Close => None,
        };
        let mut raw = Raw {
            magic: MAGIC,
            kind,
            reserved: 0,
            words: own.as_ref().map_or(0, |words| words.len() as u16).into(),
            round: round.into(),
            chunk: chunk.into(),
            full: full.0.map(U64::new),
            zero: zero.0.map(U64::new),
            sequence: self.sequence.into(),
            checksum: U64::ZERO,
        };
        self.sequence += 1;
        let words = own.as_deref().unwrap_or(digests);
        raw.checksum = checksum(self.key, &raw, words).into();
        let mut head = Vec::with_capacity(HEADER_BYTES + words.len() * 8);
        head.extend_from_slice(raw.as_bytes());
        words.iter().for_each(|word| head.extend_from_slice(&word.to_le_bytes()));
        head
    }
}

fn checksum(key: u64, raw: &Raw, words: &[u64]) -> u64 {
    let mut hash = XxHash3_64::with_seed(key);
    hash.write(&raw.as_bytes()[..CHECKED_BYTES]);
    for word in words {
        hash.write(&word.to_le_bytes());
    }
    hash.finish()
}

/// Reads the headers of one connection. Reading is total, and nothing is believed before its checksum fits.
#[derive(Debug)]
pub struct FrameReader {
    key: u64,
    agreed: Features,
    sequence: u64,
}

/// A header whose words are not read yet: nobody may act on the frame before [`FrameReader::accept`].
#[derive(Debug)]
pub struct Pending {
    raw: Raw,
    words: usize,
}

impl Pending {
    /// The number of words of 8 bytes that follow the header, at most [`MAX_WORDS`].
    #[must_use]
    pub fn words(&self) -> usize {
        self.words
    }
}

impl FrameReader {
    /// A reader for a connection of the session with this key, whose sides agreed on these features.
    #[must_use]
    pub fn new(key: u64, agreed: Features) -> Self {
        Self { key, agreed, sequence: 0 }
    }

    /// Takes a header and says how many words to read next.
    ///
    /// # Errors
    /// [`FrameError::Magic`], [`FrameError::Words`].
    pub fn header(&self, bytes: &[u8; HEADER_BYTES]) -> Result<Pending, FrameError> {
        let raw: Raw = zerocopy::transmute!(*bytes);
        if raw.magic != MAGIC {
            return Err(FrameError::Magic);
        }
        let words = match raw.kind {
            KIND_CHUNK => PageSet(raw.full.map(U64::get)).len(),
            KIND_PACKED | KIND_SHARED => usize::from(raw.words.get()),
            _ => 0,
        };
        if words > MAX_WORDS {
            return Err(FrameError::Words(raw.words.get()));
        }
        Ok(Pending { raw, words })
    }

    /// Takes the words and yields the frame, checked against the machine's layout, and the digests of its bodies.
    ///
    /// # Errors
    /// [`FrameError`]: the connection is useless from then on.
    pub fn accept<'w>(
        &mut self,
        pending: &Pending,
        words: &'w [u64],
        layout: &Layout,
    ) -> Result<(Frame, &'w [u64]), FrameError> {
        let raw = &pending.raw;
        if checksum(self.key, raw, words) != raw.checksum.get() {
            return Err(FrameError::Checksum(self.sequence));
        }
        if raw.sequence.get() != self.sequence {
            return Err(FrameError::Sequence { expected: self.sequence, got: raw.sequence.get() });
        }
        self.sequence += 1;
        let (round, chunk) = (raw.round.get(), ChunkIndex(raw.chunk.get()));
        match raw.kind {
            KIND_ROUND_END => return Ok((Frame::RoundEnd { round }, &[])),
            KIND_CLOSE => return Ok((Frame::Close, &[])),
            KIND_CHUNK => {}
            KIND_PACKED if self.agreed.contains(Features::PACKED) => {}
            KIND_PACKED => return Err(FrameError::NotAgreed(Features::PACKED)),
            KIND_SHARED if self.agreed.contains(Features::SHARING) => {}
            KIND_SHARED => return Err(FrameError::NotAgreed(Features::SHARING)),
            kind => return Err(FrameError::Kind(kind)),
        }
        let (full, zero) = (PageSet(raw.full.map(U64::get)), PageSet(raw.zero.map(U64::get)));
        let place = layout.place(chunk).ok_or(FrameError::Outside(chunk.0))?;
        let pages = PageSet::first(place.pages);
        if raw.kind == KIND_PACKED {
            let (frame, digests) = PackedFrame::read((round, chunk), (full, zero), words, &pages, self.agreed)?;
            return Ok((Frame::Packed(frame), digests));
        }
        if raw.kind == KIND_SHARED {
            return Ok((Frame::Shared(SharedFrame::read((round, chunk), (full, zero), words, &pages)?), &[]));
        }
        if !full.or(&zero).without(&pages).is_empty() {
            return Err(FrameError::Outside(chunk.0));
        }
        if !full.and(&zero).is_empty() || full.or(&zero).is_empty() {
            return Err(FrameError::Contradiction(chunk.0));
        }
        Ok((Frame::Chunk(ChunkFrame { round, chunk, full, zero }), words))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::spec::BlockSpec;

    fn layout() -> Layout {
        Layout::new(&[BlockSpec { id: "ram".into(), bytes: (7 << 20) + 4096, page_bytes: 4096, path: String::new() }])
            .unwrap()
    }

    /// Reads what a writer wrote, as the receiver does.
    fn read(reader: &mut FrameReader, head: &[u8]) -> Result<Frame, FrameError> {
        let (header, words) = head.split_first_chunk().unwrap();
        let words: Vec<u64> = words.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect();
        let pending = reader.header(header)?;
        if pending.words() != words.len() {
            return Err(FrameError::Checksum(0)); // The stream would go on elsewhere.
        }
        reader.accept(&pending, &words, &layout()).map(|(frame, _)| frame)
    }

    fn reader(key: u64) -> FrameReader {
        FrameReader::new(key, Features::NONE)
    }

    proptest! {
        #[test]
        fn a_frame_arrives_as_it_was_sent(round: u32, chunk in 0u32..7, full: [u64; 4], zero: [u64; 4]) {
            let (full, zero) = (PageSet(full), PageSet(zero).without(&PageSet(full)));
            prop_assume!(!full.or(&zero).is_empty());
            let frame = Frame::Chunk(ChunkFrame { round, chunk: ChunkIndex(chunk), full, zero });
            let digests: Vec<u64> = (0..full.len() as u64).collect();
            let head = FrameWriter::new(9).head(&frame, &digests);
            prop_assert_eq!(read(&mut reader(9), &head), Ok(frame));
        }

        #[test]
        fn any_changed_byte_is_found(at in 0usize..HEADER_BYTES + 3 * 8, flip in 1u8..) {
            let (chunk, full) = (ChunkIndex(2), PageSet::first(3));
            let frame = Frame::Chunk(ChunkFrame { round: 1, chunk, full, zero: PageSet::EMPTY });
            let mut head = FrameWriter::new(9).head(&frame, &[1, 2, 3]);
            head[at] ^= flip;
            prop_assert!(read(&mut reader(9), &head).is_err());
        }

        #[test]
        fn garbage_is_refused_and_nothing_panics(bytes: [u8; HEADER_BYTES], words: Vec<u64>) {
            let mut bytes = bytes;
            bytes[..4].copy_from_slice(&MAGIC);
            let mut reader = reader(1);
            let result = reader.header(&bytes).and_then(|pending| reader.accept(&pending, &words, &layout()).map(drop));
            prop_assert!(result.is_err());
        }
    }

    #[test]
    fn a_lost_or_repeated_frame_is_found() {
        let (mut writer, mut reader) = (FrameWriter::new(1), reader(1));
        let first = writer.head(&Frame::RoundEnd { round: 0 }, &[]);
        let _lost = writer.head(&Frame::RoundEnd { round: 1 }, &[]);
        let third = writer.head(&Frame::RoundEnd { round: 2 }, &[]);
        assert!(read(&mut reader, &first).is_ok());
        assert_eq!(read(&mut reader, &third), Err(FrameError::Sequence { expected: 1, got: 2 }));
        assert_eq!(read(&mut reader, &first), Err(FrameError::Sequence { expected: 1, got: 0 }));
    }

    #[test]
    fn pages_outside_the_machine_are_refused() {
        for (chunk, page) in [(7, 1), (8, 0), (u32::MAX, 0)] {
            let frame = ChunkFrame {
                round: 0,
                chunk: ChunkIndex(chunk),
                full: [page].into_iter().collect(),
                zero: PageSet::EMPTY,
            };
            let head = FrameWriter::new(1).head(&Frame::Chunk(frame), &[0]);
            assert_eq!(read(&mut reader(1), &head), Err(FrameError::Outside(chunk)));
        }
    }

    #[test]
    fn frames_of_another_session_are_refused() {
        let head = FrameWriter::new(1).head(&Frame::Close, &[]);
        assert_eq!(read(&mut reader(2), &head), Err(FrameError::Checksum(0)));
    }
}
