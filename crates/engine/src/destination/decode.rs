//! Decoding of a packed frame: its blocks become a buffer of bodies. Each is checked against its digest before any is
//! placed.
//!
//! Memory for each connection is bounded whatever the peer sends: the bodies of one chunk, a page, and Zstandard's
//! context (some 160 KiB: frames are decompressed in one step into a buffer of known size, so no window is kept).
//!
//! A delta is a difference to what RAM holds here. The source knows that content: before the guest runs, only the
//! placing of pages writes this RAM, a chunk always takes the same connection, and a connection's frames are decoded
//! and placed one after the other. Where the two sides disagree all the same, the page's digest does not fit.

use sterna_protocol::frame::Digester;
use sterna_protocol::frame::packed::{Codec, PackedFrame};
use sterna_protocol::layout::{ChunkIndex, PAGE_BYTES};
use sterna_protocol::xbzrle;
use zstd::bulk::Decompressor;

use super::undecodable::DecodeError;
use crate::error::MigrateError;
use crate::memory::Memory;

/// Decodes the packed frames of one connection.
pub struct Decoder {
    digester: Digester,
    bodies: Vec<u8>,
    zstd: Decompressor<'static>,
}

impl std::fmt::Debug for Decoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Decoder").field("bytes", &self.bodies.len()).finish_non_exhaustive()
    }
}

impl Decoder {
    /// A decoder of pages with digests of this kind.
    #[must_use]
    pub fn new(digester: Digester) -> Self {
        Self { digester, bodies: Vec::new(), zstd: Decompressor::default() }
    }

    /// The bodies of [`PackedFrame::pages`], one after another. `payload` and `digests` are as long as the frame says.
    /// The frame fits the layout of `ram`, to whose pages the deltas apply. Nothing is placed.
    ///
    /// # Errors
    /// [`MigrateError::Decode`], or RAM cannot be read.
    pub fn decode(
        &mut self,
        frame: &PackedFrame,
        digests: &[u64],
        payload: &[u8],
        ram: &dyn Memory,
    ) -> Result<&[u8], MigrateError> {
        let bytes = (frame.full.len() + frame.delta.len()) * PAGE_BYTES;
        // The buffer grows to a chunk at most, and never shrinks: bytes of earlier frames are overwritten before they
        // are read.
        if self.bodies.len() < bytes {
            self.bodies.resize(bytes, 0);
        }
        let bodies = &mut self.bodies[..bytes];
        let pages: Vec<u8> = frame.pages().collect();
        let (mut rest, mut payload, mut ahead) = (&mut *bodies, payload, pages.as_slice());
        for block in &frame.blocks {
            let (encoded, later) = payload.split_at(block.bytes as usize);
            let (these, others) = ahead.split_at(usize::from(block.pages));
            let (into, onward) = rest.split_at_mut(these.len() * PAGE_BYTES);
            if block.codec == Codec::Xbzrle {
                apply(frame.chunk, these, encoded, into, ram)?;
            } else {
                let wrong = |why| DecodeError::Block { chunk: frame.chunk, page: these[0], why };
                unpack(&mut self.zstd, block.codec, encoded, into).map_err(wrong)?;
            }
            (rest, payload, ahead) = (onward, later, others);
        }
        for ((page, digest), body) in pages.iter().zip(digests).zip(bodies.chunks_exact(PAGE_BYTES)) {
            if self.digester.page(body) != *digest {
                let (chunk, page) = (frame.chunk, *page);
                return Err(DecodeError::Digest { chunk, page, delta: frame.delta.contains(page) }.into());
            }
        }
        Ok(bodies)
    }
}

/// Fills `into` with a plain or compressed block's pages, and writes nowhere else. A block that does not fill all of it
/// is refused.
fn unpack(zstd: &mut Decompressor<'static>, codec: Codec, encoded: &[u8], into: &mut [u8]) -> Result<(), String> {
    let expected = into.len();
    let got = match codec {
        Codec::Lz4 => lz4_flex::block::decompress_into(encoded, into).map_err(|error| error.to_string())?,
        Codec::Zstd => zstd.decompress_to_buffer(encoded, into).map_err(|error| error.to_string())?,
        Codec::Plain | Codec::Xbzrle => {
            into.copy_from_slice(encoded);
            expected
        }
    };
    if got == expected { Ok(()) } else { Err(format!("it has {got} bytes where {expected} must come")) }
}

/// Makes pages from RAM's content of them and a block of deltas.
fn apply(
    chunk: ChunkIndex,
    pages: &[u8],
    mut encoded: &[u8],
    into: &mut [u8],
    ram: &dyn Memory,
) -> Result<(), MigrateError> {
    for (&page, body) in pages.iter().zip(into.as_chunks_mut().0) {
        let wrong = |why| DecodeError::Delta { chunk, page, why };
        let delta = xbzrle::take(&mut encoded).map_err(wrong)?;
        ram.load(chunk, &[page].into_iter().collect(), body).map_err(MigrateError::host("reading the guest's RAM"))?;
        xbzrle::decode(body, delta).map_err(wrong)?;
    }
    if !encoded.is_empty() {
        let why = format!("{} bytes follow its last page", encoded.len());
        return Err(DecodeError::Block { chunk, page: pages[0], why }.into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use sterna_protocol::frame::packed::Block;
    use sterna_protocol::pages::PageSet;
    use sterna_protocol::spec::BlockSpec;
    use sterna_sys::map::Access;

    use super::*;
    use crate::memory::BlockFile;
    use crate::memory::shared::SharedMemory;

    /// RAM of one chunk whose page 0 holds ones.
    fn ram() -> SharedMemory {
        let file = tempfile::tempfile_in("/dev/shm").expect("a file on tmpfs");
        file.set_len(1 << 20).expect("room for the file");
        let spec = BlockSpec { id: "ram".into(), bytes: 1 << 20, page_bytes: 4096, path: String::new() };
        let ram = SharedMemory::open(&[BlockFile { spec, file, address: 0, process: None }], Access::ReadWrite)
            .expect("a mapping");
        ram.write(ChunkIndex(0), &PageSet::first(1), &[1; PAGE_BYTES]).expect("room");
        ram
    }

    fn frame(codec: Codec, pages: usize, bytes: usize) -> PackedFrame {
        let (none, some) = (PageSet::EMPTY, PageSet::first(pages));
        let (full, delta) = if codec == Codec::Xbzrle { (none, some) } else { (some, none) };
        let blocks = vec![Block { codec, pages: pages as u16, bytes: bytes as u32 }];
        PackedFrame { round: 0, chunk: ChunkIndex(0), full, delta, zero: none, blocks }
    }

    #[test]
    fn differences_are_against_what_is_here_and_change_nothing_of_it() {
        let (ram, mut new) = (ram(), [1; PAGE_BYTES]);
        new[77] = 7;
        let mut block = Vec::new();
        assert!(xbzrle::push(&[1; PAGE_BYTES], &new, &mut block, 64));
        let frame = frame(Codec::Xbzrle, 1, block.len());
        let mut decoder = Decoder::new(Digester::UNSEEDED);
        assert_eq!(decoder.decode(&frame, &[Digester::UNSEEDED.page(&new)], &block, &ram).expect("it fits"), new);
        let mut here = [0; PAGE_BYTES];
        ram.load(ChunkIndex(0), &[0].into_iter().collect(), &mut here).expect("RAM");
        assert_eq!(here, [1; PAGE_BYTES]);
        // Applied to other content, the same delta makes another page.
        ram.write(ChunkIndex(0), &PageSet::first(1), &[2; PAGE_BYTES]).expect("room");
        let error =
            decoder.decode(&frame, &[Digester::UNSEEDED.page(&new)], &block, &ram).expect_err("it does not fit");
        assert!(matches!(error, MigrateError::Decode(DecodeError::Digest { page: 0, delta: true, .. })), "{error:?}");
    }

    proptest! {
        #[test]
        fn garbage_is_refused_and_nothing_panics(
            codec in prop::sample::select(vec![Codec::Plain, Codec::Lz4, Codec::Zstd, Codec::Xbzrle]),
            pages in 1usize..16,
            mut payload in prop::collection::vec(any::<u8>(), 2..6000),
        ) {
            match codec {
                Codec::Plain => payload.resize(pages * PAGE_BYTES, 3),
                // It begins with the magic number of a frame of Zstandard.
                Codec::Zstd if payload.len() > 6 => payload[..4].copy_from_slice(&0xfd2f_b528_u32.to_le_bytes()),
                _ => {}
            }
            let digests = vec![12345; pages];
            let (mut decoder, frame) = (Decoder::new(Digester::UNSEEDED), frame(codec, pages, payload.len()));
            let result = decoder.decode(&frame, &digests, &payload, &ram());
            prop_assert!(matches!(result, Err(MigrateError::Decode(_))));
        }
    }
}
