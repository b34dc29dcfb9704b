//! Frames on a connection that carries pages: headers as they come, and headers whose checksum fits.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sterna_protocol::frame::{Frame, FrameReader, HEADER_BYTES};
use sterna_protocol::layout::{CHUNK_PAGES, Layout};
use sterna_protocol::pages::PageSet;
use sterna_protocol::spec::BlockSpec;
use xxhash_rust::xxh3::Xxh3;

const KEY: u64 = 7;
const MAGIC: &[u8; 4] = b"STRF";
const CHECKED: usize = HEADER_BYTES - 8;

fuzz_target!(|bytes: &[u8]| {
    let layout = layout();
    let (mut strict, mut mended) = (FrameReader::new(KEY), FrameReader::new(KEY));
    for (number, frame) in bytes.chunks(HEADER_BYTES).enumerate() {
        let mut header = [0; HEADER_BYTES];
        header[..frame.len()].copy_from_slice(frame);
        read(&mut strict, &header, &layout);
        // What a peer that knows the session's key can say: magic, sequence and checksum are right.
        header[..4].copy_from_slice(MAGIC);
        header[CHECKED - 8..CHECKED].copy_from_slice(&(number as u64).to_le_bytes());
        let Ok(pending) = strict.header(&header) else { unreachable!("the magic is right") };
        let mut hash = Xxh3::with_seed(KEY);
        hash.update(&header[..CHECKED]);
        (0..pending.digests() as u64).for_each(|digest| hash.update(&digest.to_le_bytes()));
        header[CHECKED..].copy_from_slice(&hash.digest().to_le_bytes());
        if !read(&mut mended, &header, &layout) {
            return;
        }
    }
});

/// Reads a frame as the receiver does; whether it was believed.
fn read(reader: &mut FrameReader, header: &[u8; HEADER_BYTES], layout: &Layout) -> bool {
    let Ok(pending) = reader.header(header) else { return false };
    assert!(pending.digests() <= CHUNK_PAGES);
    let digests: Vec<u64> = (0..pending.digests() as u64).collect();
    match reader.accept(&pending, &digests, layout) {
        Ok(Frame::Chunk(frame)) => {
            let place = layout.place(frame.chunk).expect("believed, so it exists");
            assert!(frame.full.or(&frame.zero).without(&PageSet::first(place.pages)).is_empty());
            assert!(frame.full.and(&frame.zero).is_empty());
            assert_eq!(frame.full.len(), digests.len());
            true
        }
        Ok(Frame::RoundEnd { .. } | Frame::Close) => true,
        Err(_) => false,
    }
}

/// Two blocks, neither a whole number of chunks.
fn layout() -> Layout {
    let block = |id: &str, bytes| BlockSpec { id: id.into(), bytes, page_bytes: 4096, path: String::new() };
    Layout::new(&[block("a", (3 << 20) + 4096), block("b", 8192)]).expect("a layout")
}
