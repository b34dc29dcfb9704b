//! Frames on the connections that carry pages.
//!
//! ```text
//!   0       4    5    6       8       12      16                       48                       80              88         96
//!   +-------+----+----+-------+-------+-------+------------------------+------------------------+---------------+----------+
//!   | STRF  |kind| 0  |   0   | round | chunk | full: 256 bits         | zero: 256 bits         | sequence      | checksum |
//!   +-------+----+----+-------+-------+-------+------------------------+------------------------+---------------+----------+
//!   then, for a chunk frame: a digest (XXH3-64) for each full page, in order, 8 bytes each · the bodies, 4,096 bytes each
//! ```
//!
//! All numbers are little-endian. The checksum (XXH3-64, seeded with the session's key) covers the header before it and the
//! digests after it, so a frame out of place, cut or changed is found before a byte of it is used. `sequence` counts the frames of a
//! connection from 0.
//!
//! Bodies go from guest RAM to the socket and from the socket to guest RAM, while the guest may be writing the page: then the body is
//! not what was digested. The receiver notes such a page as *suspect*; the write made it dirty, so it comes again. A page still
//! suspect when a round ends is asked for again, and one that is suspect three times over with the guest stopped fails the migration.

use xxhash_rust::xxh3::{Xxh3, xxh3_64};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::layout::{CHUNK_PAGES, ChunkIndex, Layout, PAGE_BYTES};
use crate::pages::PageSet;

/// Bytes of a frame's header.
pub const HEADER_BYTES: usize = 96;
const CHECKED_BYTES: usize = HEADER_BYTES - 8;
const MAGIC: [u8; 4] = *b"STRF";
const KIND_CHUNK: u8 = 1;
const KIND_ROUND_END: u8 = 2;
const KIND_CLOSE: u8 = 3;

/// The header as it lies on the wire.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Raw {
    magic: [u8; 4],
    kind: u8,
    reserved: u8,
    reserved2: U16,
    round: U32,
    chunk: U32,
    full: [U64; 4],
    zero: [U64; 4],
    sequence: U64,
    checksum: U64,
}

const _: () = assert!(size_of::<Raw>() == HEADER_BYTES);

/// What a frame says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Frame {
    /// Pages of a chunk.
    Chunk(ChunkFrame),
    /// This connection has sent all it sends in this round.
    RoundEnd {
        /// The round.
        round: u32,
    },
    /// Nothing more comes.
    Close,
}

/// Pages of one chunk, as they are in this round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkFrame {
    /// The round.
    pub round: u32,
    /// The chunk.
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

/// A frame that must not be believed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// It does not begin as a frame does.
    #[error("the stream does not carry frames where one must begin")]
    Magic,
    /// Header or digests are not what was sent.
    #[error("frame {0} arrived damaged: its checksum does not fit")]
    Checksum(u64),
    /// A frame is missing, or came twice.
    #[error("frame {got} arrived where frame {expected} must come")]
    Sequence {
        /// The one that must come.
        expected: u64,
        /// The one that came.
        got: u64,
    },
    /// A kind that this version does not know and did not agree to.
    #[error("frame of unknown kind {0}")]
    Kind(u8),
    /// Pages that the machine does not have.
    #[error("frame for pages of chunk {0} that this machine does not have")]
    Outside(u32),
    /// A page that is to be both zero and full, or a chunk frame without pages.
    #[error("frame for chunk {0} contradicts itself")]
    Contradiction(u32),
}

/// The digest of a page's body.
#[must_use]
pub fn page_digest(body: &[u8]) -> u64 {
    xxh3_64(body)
}

/// Writes the headers of one connection.
#[derive(Debug)]
pub struct FrameWriter {
    key: u64,
    sequence: u64,
}

impl FrameWriter {
    /// For a connection of the session with this key.
    #[must_use]
    pub fn new(key: u64) -> Self {
        Self { key, sequence: 0 }
    }

    /// The header of the next frame; `digests` are those that will follow it.
    #[must_use]
    pub fn header(&mut self, frame: &Frame, digests: &[u64]) -> [u8; HEADER_BYTES] {
        let (kind, round, chunk, full, zero) = match frame {
            Frame::Chunk(f) => (KIND_CHUNK, f.round, f.chunk.0, f.full, f.zero),
            Frame::RoundEnd { round } => (KIND_ROUND_END, *round, 0, PageSet::EMPTY, PageSet::EMPTY),
            Frame::Close => (KIND_CLOSE, 0, 0, PageSet::EMPTY, PageSet::EMPTY),
        };
        let mut raw = Raw {
            magic: MAGIC,
            kind,
            reserved: 0,
            reserved2: U16::ZERO,
            round: round.into(),
            chunk: chunk.into(),
            full: full.0.map(U64::new),
            zero: zero.0.map(U64::new),
            sequence: self.sequence.into(),
            checksum: U64::ZERO,
        };
        self.sequence += 1;
        raw.checksum = checksum(self.key, &raw, digests).into();
        zerocopy::transmute!(raw)
    }
}

fn checksum(key: u64, raw: &Raw, digests: &[u64]) -> u64 {
    let mut hash = Xxh3::with_seed(key);
    hash.update(&raw.as_bytes()[..CHECKED_BYTES]);
    for digest in digests {
        hash.update(&digest.to_le_bytes());
    }
    hash.digest()
}

/// Reads the headers of one connection: total, and nothing is believed before its checksum fits.
#[derive(Debug)]
pub struct FrameReader {
    key: u64,
    sequence: u64,
}

/// A header that was read, its digests not yet: the frame is not to be acted on before [`FrameReader::accept`].
#[derive(Debug)]
pub struct Pending {
    raw: Raw,
    digests: usize,
}

impl Pending {
    /// How many digests follow the header.
    #[must_use]
    pub fn digests(&self) -> usize {
        self.digests
    }
}

impl FrameReader {
    /// For a connection of the session with this key.
    #[must_use]
    pub fn new(key: u64) -> Self {
        Self { key, sequence: 0 }
    }

    /// Takes a header and says how many digests to read next.
    ///
    /// # Errors
    /// [`FrameError::Magic`].
    pub fn header(&self, bytes: &[u8; HEADER_BYTES]) -> Result<Pending, FrameError> {
        let raw: Raw = zerocopy::transmute!(*bytes);
        if raw.magic != MAGIC {
            return Err(FrameError::Magic);
        }
        let digests = if raw.kind == KIND_CHUNK { PageSet(raw.full.map(U64::get)).len() } else { 0 };
        debug_assert!(digests <= CHUNK_PAGES);
        Ok(Pending { raw, digests })
    }

    /// Takes the digests and yields the frame, checked against the machine's layout.
    ///
    /// # Errors
    /// [`FrameError`]: the connection is of no use any more.
    pub fn accept(&mut self, pending: &Pending, digests: &[u64], layout: &Layout) -> Result<Frame, FrameError> {
        let raw = &pending.raw;
        if checksum(self.key, raw, digests) != raw.checksum.get() {
            return Err(FrameError::Checksum(self.sequence));
        }
        if raw.sequence.get() != self.sequence {
            return Err(FrameError::Sequence { expected: self.sequence, got: raw.sequence.get() });
        }
        self.sequence += 1;
        match raw.kind {
            KIND_ROUND_END => Ok(Frame::RoundEnd { round: raw.round.get() }),
            KIND_CLOSE => Ok(Frame::Close),
            KIND_CHUNK => {
                let chunk = ChunkIndex(raw.chunk.get());
                let (full, zero) = (PageSet(raw.full.map(U64::get)), PageSet(raw.zero.map(U64::get)));
                let place = layout.place(chunk).ok_or(FrameError::Outside(chunk.0))?;
                if !full.or(&zero).without(&PageSet::first(place.pages)).is_empty() {
                    return Err(FrameError::Outside(chunk.0));
                }
                if !full.and(&zero).is_empty() || full.or(&zero).is_empty() {
                    return Err(FrameError::Contradiction(chunk.0));
                }
                Ok(Frame::Chunk(ChunkFrame { round: raw.round.get(), chunk, full, zero }))
            }
            kind => Err(FrameError::Kind(kind)),
        }
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

    fn read(reader: &mut FrameReader, bytes: &[u8; HEADER_BYTES], digests: &[u64]) -> Result<Frame, FrameError> {
        let pending = reader.header(bytes)?;
        reader.accept(&pending, digests, &layout())
    }

    proptest! {
        #[test]
        fn a_frame_arrives_as_it_was_sent(round: u32, chunk in 0u32..7, full: [u64; 4], zero: [u64; 4]) {
            let (full, zero) = (PageSet(full), PageSet(zero).without(&PageSet(full)));
            prop_assume!(!full.or(&zero).is_empty());
            let frame = Frame::Chunk(ChunkFrame { round, chunk: ChunkIndex(chunk), full, zero });
            let digests: Vec<u64> = (0..full.len() as u64).collect();
            let bytes = FrameWriter::new(9).header(&frame, &digests);
            prop_assert_eq!(read(&mut FrameReader::new(9), &bytes, &digests), Ok(frame));
        }

        #[test]
        fn any_changed_byte_is_found(at in 0usize..HEADER_BYTES, flip in 1u8..) {
            let frame = Frame::Chunk(ChunkFrame { round: 1, chunk: ChunkIndex(2), full: PageSet::first(3), zero: PageSet::EMPTY });
            let digests = [1, 2, 3];
            let mut bytes = FrameWriter::new(9).header(&frame, &digests);
            bytes[at] ^= flip;
            let mut reader = FrameReader::new(9);
            let result = reader.header(&bytes).and_then(|pending| {
                let digests: Vec<u64> = (1..=pending.digests() as u64).collect();
                reader.accept(&pending, &digests, &layout())
            });
            prop_assert!(result.is_err());
        }

        #[test]
        fn garbage_is_refused_and_nothing_panics(bytes: [u8; HEADER_BYTES], digests: Vec<u64>) {
            let mut bytes = bytes;
            bytes[..4].copy_from_slice(&MAGIC);
            prop_assert!(read(&mut FrameReader::new(1), &bytes, &digests).is_err());
        }
    }

    #[test]
    fn a_lost_or_repeated_frame_is_found() {
        let (mut writer, mut reader) = (FrameWriter::new(1), FrameReader::new(1));
        let first = writer.header(&Frame::RoundEnd { round: 0 }, &[]);
        let _lost = writer.header(&Frame::RoundEnd { round: 1 }, &[]);
        let third = writer.header(&Frame::RoundEnd { round: 2 }, &[]);
        assert!(read(&mut reader, &first, &[]).is_ok());
        assert_eq!(read(&mut reader, &third, &[]), Err(FrameError::Sequence { expected: 1, got: 2 }));
        assert_eq!(read(&mut reader, &first, &[]), Err(FrameError::Sequence { expected: 1, got: 0 }));
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
            let bytes = FrameWriter::new(1).header(&Frame::Chunk(frame), &[0]);
            assert_eq!(read(&mut FrameReader::new(1), &bytes, &[0]), Err(FrameError::Outside(chunk)));
        }
    }

    #[test]
    fn frames_of_another_session_are_refused() {
        let bytes = FrameWriter::new(1).header(&Frame::Close, &[]);
        assert_eq!(read(&mut FrameReader::new(2), &bytes, &[]), Err(FrameError::Checksum(0)));
    }
}
