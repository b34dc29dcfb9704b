//! Frames on a connection that carries pages: as they come, and with the checksum that fits.
#![no_main]

use std::hash::Hasher;

use libfuzzer_sys::fuzz_target;
use sterna_protocol::frame::packed::{MAX_PAYLOAD_BYTES, MAX_WORDS};
use sterna_protocol::frame::{Frame, FrameReader, HEADER_BYTES};
use sterna_protocol::hello::Features;
use sterna_protocol::layout::Layout;
use sterna_protocol::pages::PageSet;
use sterna_protocol::spec::BlockSpec;
use twox_hash::XxHash3_64;

const KEY: u64 = 7;
const MAGIC: &[u8; 4] = b"STRF";
const CHECKED: usize = HEADER_BYTES - 8;

fuzz_target!(|bytes: &[u8]| {
    let layout = layout();
    let reader = || FrameReader::new(KEY, Features::KNOWN);
    let (mut strict, mut mended, mut rest) = (reader(), reader(), bytes);
    for number in 0u64.. {
        let Some((header, words)) = rest.split_first_chunk::<HEADER_BYTES>() else { return };
        let mut header = *header;
        read(&mut strict, &header, words, &layout);
        // What a peer that knows the session's key can say: magic, sequence and checksum are right.
        header[..4].copy_from_slice(MAGIC);
        header[CHECKED - 8..CHECKED].copy_from_slice(&number.to_le_bytes());
        let Ok(pending) = strict.header(&header) else { return };
        let mut hash = XxHash3_64::with_seed(KEY);
        hash.write(&header[..CHECKED]);
        following(words, pending.words()).iter().for_each(|word| hash.write(&word.to_le_bytes()));
        header[CHECKED..].copy_from_slice(&hash.finish().to_le_bytes());
        if !read(&mut mended, &header, words, &layout) {
            return;
        }
        rest = words.get(pending.words() * 8..).unwrap_or_default();
    }
});

/// The next words of the stream; zeros behind its end.
fn following(bytes: &[u8], count: usize) -> Vec<u64> {
    let words = bytes.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes));
    words.chain(std::iter::repeat(0)).take(count).collect()
}

/// Reads a frame as the receiver does; whether it was believed.
fn read(reader: &mut FrameReader, header: &[u8; HEADER_BYTES], rest: &[u8], layout: &Layout) -> bool {
    let Ok(pending) = reader.header(header) else { return false };
    assert!(pending.words() <= MAX_WORDS);
    let words = following(rest, pending.words());
    match reader.accept(&pending, &words, layout) {
        Ok((Frame::Chunk(frame), digests)) => {
            let place = layout.place(frame.chunk).expect("believed, so it exists");
            assert!(frame.full.or(&frame.zero).without(&PageSet::first(place.pages)).is_empty());
            assert!(frame.full.and(&frame.zero).is_empty());
            assert_eq!(frame.full.len(), digests.len());
            true
        }
        Ok((Frame::Packed(frame), digests)) => {
            let place = layout.place(frame.chunk).expect("believed, so it exists");
            let all = frame.full.or(&frame.delta).or(&frame.zero);
            assert!(all.without(&PageSet::first(place.pages)).is_empty());
            assert_eq!(all.len(), frame.full.len() + frame.delta.len() + frame.zero.len());
            assert_eq!(frame.pages().count(), digests.len());
            assert_eq!(frame.blocks.iter().map(|block| usize::from(block.pages)).sum::<usize>(), digests.len());
            assert!(frame.payload_bytes() <= MAX_PAYLOAD_BYTES);
            true
        }
        Ok((Frame::Shared(frame), digests)) => {
            let referring = frame.referring();
            assert!(digests.is_empty() && referring.and(&frame.pooled).is_empty());
            assert!(!referring.or(&frame.pooled).is_empty());
            assert_eq!(frame.references.iter().flat_map(|run| run.each()).count(), referring.len());
            true
        }
        Ok((Frame::RoundEnd { .. } | Frame::Close, _)) => true,
        Err(_) => false,
    }
}

/// Two blocks, neither a whole number of chunks.
fn layout() -> Layout {
    let block = |id: &str, bytes| BlockSpec { id: id.into(), bytes, page_bytes: 4096, path: String::new() };
    Layout::new(&[block("a", (3 << 20) + 4096), block("b", 8192)]).expect("a layout")
}
