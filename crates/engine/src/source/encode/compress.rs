//! Compression of pages, up to 16 together: 64 KiB compress a tenth better than single pages and in less time, and
//! larger blocks gain little more.

use sterna_protocol::frame::packed::{Block, Codec, MAX_BLOCK_PAGES};
use sterna_protocol::layout::PAGE_BYTES;
use zstd::zstd_safe::ResetDirective;

/// A block must become smaller than this share of its size, or it is sent plain: decompressing costs the destination
/// time.
const WORTH: (usize, usize) = (15, 16);
/// How many blocks in a row must not shrink before the next are left out.
const MISSES: u32 = 4;
/// The most blocks that are then left out between two tries. One try in 64 blocks costs 1.5 % of what trying all of
/// them would.
const MOST_LEFT_OUT: u32 = 63;

/// A compressor and its level.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// No compression.
    Plain,
    /// LZ4's one level.
    Lz4,
    /// Zstandard's level, −7 to 19.
    Zstd(i32),
}

impl Method {
    /// The level, for the report: Zstandard's; 1 for LZ4; 0 where nothing is compressed.
    #[must_use]
    pub fn level(self) -> i32 {
        match self {
            Self::Plain => 0,
            Self::Lz4 => 1,
            Self::Zstd(level) => level,
        }
    }
}

/// What a compressor has done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Did {
    /// Pages that were compressed.
    pub pages: u64,
    /// The bytes that they became.
    pub bytes: u64,
    /// Pages that went plain.
    pub plain_pages: u64,
}

impl std::ops::AddAssign for Did {
    fn add_assign(&mut self, other: Self) {
        self.pages += other.pages;
        self.bytes += other.bytes;
        self.plain_pages += other.plain_pages;
    }
}

/// A compressor for one thread. It keeps the contexts from block to block: making them anew for each block costs half
/// as much again.
pub struct Compressor {
    zstd: Option<zstd::bulk::Compressor<'static>>,
    zstd_level: i32,
    scratch: Vec<u8>,
    patience: Patience,
    did: Did,
}

impl Default for Compressor {
    fn default() -> Self {
        let scratch = vec![0; lz4_flex::block::get_maximum_output_size(MAX_BLOCK_PAGES * PAGE_BYTES)];
        Self { zstd: None, zstd_level: 0, scratch, patience: Patience::default(), did: Did::default() }
    }
}

impl Compressor {
    /// Appends pages to `payload`, and the blocks they make to `blocks`.
    ///
    /// # Errors
    /// No memory left for the compressor.
    ///
    /// # Panics
    /// Where `pages` are not whole pages.
    pub fn encode(
        &mut self,
        method: Method,
        pages: &[u8],
        blocks: &mut Vec<Block>,
        payload: &mut Vec<u8>,
    ) -> std::io::Result<()> {
        assert!(pages.len().is_multiple_of(PAGE_BYTES), "{} bytes are not whole pages", pages.len());
        for group in pages.chunks(MAX_BLOCK_PAGES * PAGE_BYTES) {
            let pages = (group.len() / PAGE_BYTES) as u16;
            let tried = method != Method::Plain && self.patience.tries();
            let compressed = if tried { self.compress(method, group)? } else { None };
            if tried {
                self.patience.saw(compressed.is_some());
            }
            let (codec, bytes) = match compressed {
                Some((codec, length)) => (codec, &self.scratch[..length]),
                None => (Codec::Plain, group),
            };
            blocks.push(Block { codec, pages, bytes: bytes.len() as u32 });
            payload.extend_from_slice(bytes);
            match codec {
                Codec::Plain => self.did.plain_pages += u64::from(pages),
                _ => {
                    self.did.pages += u64::from(pages);
                    self.did.bytes += bytes.len() as u64;
                }
            }
        }
        Ok(())
    }

    /// What it has done so far.
    #[must_use]
    pub fn did(&self) -> Did {
        self.did
    }

    /// Compresses into the scratch; `None` where that is not worth it.
    fn compress(&mut self, method: Method, group: &[u8]) -> std::io::Result<Option<(Codec, usize)>> {
        let most = group.len() * WORTH.0 / WORTH.1;
        let compressed = match method {
            Method::Plain => None,
            // LZ4 wants room for the worst case.
            Method::Lz4 => {
                lz4_flex::block::compress_into(group, &mut self.scratch).ok().map(|bytes| (Codec::Lz4, bytes))
            }
            Method::Zstd(level) => {
                let compressor = match &mut self.zstd {
                    Some(compressor) => {
                        if self.zstd_level != level {
                            // A block that did not fit leaves the compressor in the middle of a frame, where no level
                            // can be set.
                            let reset = compressor.context_mut().reset(ResetDirective::SessionOnly);
                            reset.map_err(|_| std::io::Error::other("the compressor cannot be begun anew"))?;
                            compressor.set_compression_level(level)?;
                        }
                        compressor
                    }
                    none => none.insert(zstd::bulk::Compressor::new(level)?),
                };
                self.zstd_level = level;
                // The compressor gives up as soon as its output does not fit any more: here an error means nothing
                // else.
                let room = &mut self.scratch[..most];
                compressor.compress_to_buffer(group, room).ok().map(|bytes| (Codec::Zstd, bytes))
            }
        };
        Ok(compressed.filter(|(_, bytes)| *bytes < most))
    }
}

/// The rule that stops tries: memory that does not shrink (compressed or encrypted already) comes in long stretches.
#[derive(Debug, Default)]
struct Patience {
    misses: u32,
    left_out: u32,
}

impl Patience {
    /// Whether to try the next block.
    fn tries(&mut self) -> bool {
        // After 4 misses in a row 1 is left out, after 5 it is 3, and so on.
        let leave_out = match self.misses.checked_sub(MISSES) {
            None => 0,
            Some(more) => MOST_LEFT_OUT.min((2 << more.min(8)) - 1),
        };
        if self.left_out < leave_out {
            self.left_out += 1;
            return false;
        }
        self.left_out = 0;
        true
    }

    /// Notes what became of a try.
    fn saw(&mut self, shrank: bool) {
        self.misses = if shrank { 0 } else { self.misses.saturating_add(1) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const METHODS: [Method; 6] =
        [Method::Lz4, Method::Zstd(-7), Method::Zstd(-1), Method::Zstd(1), Method::Zstd(6), Method::Zstd(19)];

    /// Pages of noise: nothing shrinks them.
    fn noise(pages: usize) -> Vec<u8> {
        let mut random = 0x2545_f491_4f6c_dd1d_u64;
        let words = std::iter::repeat_with(|| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random
        });
        words.take(pages * PAGE_BYTES / 8).flat_map(u64::to_le_bytes).collect()
    }

    /// Pages of something like text.
    fn text(pages: usize) -> Vec<u8> {
        let words = noise(1);
        let vocabulary: Vec<&[u8]> = words.chunks(7).collect();
        noise(pages).iter().flat_map(|byte| vocabulary[usize::from(*byte)].to_vec()).take(pages * PAGE_BYTES).collect()
    }

    fn encode(compressor: &mut Compressor, method: Method, pages: &[u8]) -> (Vec<Block>, Vec<u8>) {
        let (mut blocks, mut payload) = (Vec::new(), Vec::new());
        compressor.encode(method, pages, &mut blocks, &mut payload).unwrap();
        (blocks, payload)
    }

    fn decode(blocks: &[Block], mut payload: &[u8]) -> Vec<u8> {
        let mut pages = Vec::new();
        for block in blocks {
            let (bytes, rest) = payload.split_at(block.bytes as usize);
            let length = usize::from(block.pages) * PAGE_BYTES;
            match block.codec {
                Codec::Plain => pages.extend_from_slice(bytes),
                Codec::Lz4 => pages.extend(lz4_flex::block::decompress(bytes, length).unwrap()),
                Codec::Zstd => pages.extend(zstd::bulk::decompress(bytes, length).unwrap()),
                Codec::Xbzrle => panic!("a compressor tells no differences"),
            }
            payload = rest;
        }
        assert!(payload.is_empty());
        pages
    }

    #[test]
    fn the_level_can_change_after_pages_that_did_not_shrink() {
        let mut compressor = Compressor::default();
        let (mut blocks, mut payload) = (Vec::new(), Vec::new());
        for level in [1, 3, -5] {
            compressor.encode(Method::Zstd(level), &noise(16), &mut blocks, &mut payload).unwrap();
        }
        assert!(blocks.iter().all(|block| block.codec == Codec::Plain));
        compressor.encode(Method::Zstd(1), &[7; 16 * PAGE_BYTES], &mut blocks, &mut payload).unwrap();
        assert_eq!(blocks.last().unwrap().codec, Codec::Zstd);
    }

    #[test]
    fn pages_come_out_as_they_went_in() {
        for method in METHODS {
            let mut compressor = Compressor::default();
            for pages in [0, 1, 15, 16, 17, 100, 256] {
                for bodies in [text(pages), noise(pages), [text(pages), noise(40), vec![0; PAGE_BYTES]].concat()] {
                    let (blocks, payload) = encode(&mut compressor, method, &bodies);
                    assert!(decode(&blocks, &payload) == bodies, "{method:?}, {pages} pages");
                    assert!(payload.len() <= bodies.len());
                    assert!(blocks.iter().all(|block| (1..=16).contains(&block.pages)));
                }
            }
        }
    }

    #[test]
    fn a_level_may_change_from_block_to_block() {
        let (mut compressor, bodies) = (Compressor::default(), text(16));
        let sizes: Vec<usize> = [-7, 19, -7, 1]
            .map(|level| {
                let (blocks, payload) = encode(&mut compressor, Method::Zstd(level), &bodies);
                assert!(decode(&blocks, &payload) == bodies);
                payload.len()
            })
            .into();
        assert!(sizes[1] < sizes[0] && sizes[0] == sizes[2] && sizes[3] < sizes[0], "{sizes:?}");
    }

    #[test]
    fn what_does_not_shrink_goes_plain_and_is_tried_ever_more_rarely() {
        for method in METHODS {
            let mut patience = Patience::default();
            let tries = (0..1000).filter(|_| patience.tries().then(|| patience.saw(false)).is_some()).count();
            assert!((20..40).contains(&tries), "{tries} tries in 1,000 blocks");
            let mut compressor = Compressor::default();
            let (blocks, payload) = encode(&mut compressor, method, &noise(400));
            assert!(blocks.iter().all(|block| block.codec == Codec::Plain));
            assert_eq!(payload.len(), 400 * PAGE_BYTES);
            assert_eq!(compressor.did(), Did { pages: 0, bytes: 0, plain_pages: 400 });
            // It is noticed when memory shrinks again, within a bounded number of blocks.
            encode(&mut compressor, method, &text(64 * 16));
            let before = compressor.did();
            encode(&mut compressor, method, &text(64));
            assert_eq!(compressor.did().plain_pages, before.plain_pages);
        }
    }

    #[test]
    fn plain_is_plain() {
        let (mut compressor, bodies) = (Compressor::default(), text(20));
        let (blocks, payload) = encode(&mut compressor, Method::Plain, &bodies);
        assert!(payload == bodies);
        assert_eq!(blocks.iter().map(|block| block.pages).collect::<Vec<_>>(), [16, 4]);
    }
}
