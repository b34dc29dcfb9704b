//! What a peer can say in a packed frame, and what is believed of it.

use proptest::prelude::*;

use super::*;
use crate::frame::{Frame, FrameReader, FrameWriter};
use crate::layout::Layout;
use crate::spec::BlockSpec;

const BODY: u32 = PAGE_BYTES as u32;

fn layout() -> Layout {
    Layout::new(&[BlockSpec { id: "ram".into(), bytes: (7 << 20) + 4096, page_bytes: 4096, path: String::new() }])
        .unwrap()
}

/// Sends a frame, by the right digests, to a reader that agreed to these features.
fn pass(frame: &PackedFrame, agreed: Features) -> Result<PackedFrame, FrameError> {
    let digests: Vec<u64> = frame.pages().map(|page| u64::from(page) + 1000).collect();
    let head = FrameWriter::new(9).head(&Frame::Packed(frame.clone()), &digests);
    let mut reader = FrameReader::new(9, agreed);
    let (header, words) = head.split_first_chunk().unwrap();
    let words: Vec<u64> = words.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect();
    let pending = reader.header(header)?;
    assert_eq!(pending.words(), words.len());
    let (read, read_digests) = reader.accept(&pending, &words, &layout())?;
    assert_eq!(read_digests, digests);
    let Frame::Packed(read) = read else { panic!("not a packed frame: {read:?}") };
    Ok(read)
}

fn block(codec: Codec, pages: u16, bytes: u32) -> Block {
    Block { codec, pages, bytes }
}

/// A frame of chunk 2 with pages 0 to `full` whole, and 100 to `100 + delta` as differences.
fn frame(full: usize, delta: u8, blocks: Vec<Block>) -> PackedFrame {
    let (full, delta) = (PageSet::first(full), (100..100 + delta).collect());
    PackedFrame { round: 3, chunk: ChunkIndex(2), full, delta, zero: [200].into_iter().collect(), blocks }
}

/// Blocks of these pages as an encoder might cut them: `sizes` decide.
fn cut(full: usize, delta: usize, sizes: &[(u8, u16, u32)]) -> Vec<Block> {
    let mut sizes = sizes.iter().copied().cycle();
    let (mut full, mut delta, mut blocks) = (full, delta, Vec::new());
    while full > 0 {
        let (codec, pages, bytes) = sizes.next().unwrap();
        let pages = (pages % 16 + 1).min(full as u16);
        let raw = u32::from(pages) * BODY;
        blocks.push(match codec % 3 {
            0 => block(Codec::Plain, pages, raw),
            1 => block(Codec::Lz4, pages, 1 + bytes % (raw - 1)),
            _ => block(Codec::Zstd, pages, 1 + bytes % (raw - 1)),
        });
        full -= usize::from(pages);
    }
    while delta > 0 {
        let (_, pages, bytes) = sizes.next().unwrap();
        let pages = (pages % 256 + 1).min(delta as u16);
        blocks.push(block(Codec::Xbzrle, pages, u32::from(pages) * 2 + bytes % (u32::from(pages) * BODY + 1)));
        delta -= usize::from(pages);
    }
    blocks
}

proptest! {
    #[test]
    fn a_packed_frame_arrives_as_it_was_sent(
        round: u32, chunk in 0u32..7, full: [u64; 4], delta: [u64; 4], zero: [u64; 4],
        sizes in prop::collection::vec(any::<(u8, u16, u32)>(), 1..20),
    ) {
        let full = PageSet(full);
        let delta = PageSet(delta).without(&full);
        let zero = PageSet(zero).without(&full.or(&delta));
        prop_assume!(!full.or(&delta).or(&zero).is_empty());
        let blocks = cut(full.len(), delta.len(), &sizes);
        let frame = PackedFrame { round, chunk: ChunkIndex(chunk), full, delta, zero, blocks };
        prop_assert!(frame.payload_bytes() <= MAX_PAYLOAD_BYTES);
        prop_assert_eq!(pass(&frame, Features::KNOWN), Ok(frame));
    }

    #[test]
    fn any_changed_byte_is_found(at in 0usize..96 + 8 * (4 + 7 + 2), flip in 1u8..) {
        let frame = frame(5, 2, vec![block(Codec::Lz4, 5, 900), block(Codec::Xbzrle, 2, 40)]);
        let mut head = FrameWriter::new(9).head(&Frame::Packed(frame), &[1, 2, 3, 4, 5, 6, 7]);
        head[at] ^= flip;
        let mut reader = FrameReader::new(9, Features::KNOWN);
        let (header, words) = head.split_first_chunk().unwrap();
        let words: Vec<u64> = words.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect();
        let result = reader.header(header).and_then(|pending| reader.accept(&pending, &words, &layout()).map(drop));
        prop_assert!(result.is_err());
    }

    #[test]
    fn whatever_a_peer_says_is_refused_or_makes_sense(
        full: [u64; 4], delta: [u64; 4], zero: [u64; 4], words in prop::collection::vec(any::<u64>(), 0..600),
    ) {
        let pages = PageSet::first(256);
        let words = [&delta[..], &words].concat();
        let sets = (PageSet(full), PageSet(zero));
        let read = PackedFrame::read((0, ChunkIndex(0)), sets, &words, &pages, Features::KNOWN);
        if let Ok((frame, digests)) = read {
            prop_assert_eq!(digests.len(), frame.full.len() + frame.delta.len());
            prop_assert!(frame.payload_bytes() <= MAX_PAYLOAD_BYTES);
        }
    }
}

#[test]
fn the_largest_frame_there_can_be_is_within_its_bounds() {
    let blocks = (0..256).map(|_| block(Codec::Xbzrle, 1, 2 + BODY)).collect();
    let all = PageSet::first(256);
    let largest =
        PackedFrame { round: 0, chunk: ChunkIndex(0), full: PageSet::EMPTY, delta: all, zero: PageSet::EMPTY, blocks };
    assert_eq!(largest.payload_bytes(), MAX_PAYLOAD_BYTES);
    assert_eq!(pass(&largest, Features::KNOWN), Ok(largest));
}

#[test]
fn more_words_than_a_frame_can_have_are_refused_before_they_are_read() {
    let blocks = vec![block(Codec::Plain, 1, BODY); MAX_WORDS];
    assert_eq!(pass(&frame(1, 0, blocks), Features::KNOWN), Err(FrameError::Words(MAX_WORDS as u16 + 4 + 1)));
}

#[test]
fn blocks_that_are_not_those_of_the_pages_are_refused() {
    use Codec::{Lz4, Plain, Xbzrle, Zstd};
    let wrong: &[(usize, u8, &[Block])] = &[
        (2, 0, &[]),
        (2, 0, &[block(Plain, 1, BODY)]),
        (2, 0, &[block(Plain, 3, 3 * BODY)]),
        (2, 0, &[block(Plain, 2, 2 * BODY), block(Plain, 0, 0)]),
        (1, 0, &[block(Plain, 1, BODY - 1)]),
        (1, 0, &[block(Lz4, 1, 0)]),
        (1, 0, &[block(Lz4, 1, BODY)]),
        (1, 0, &[block(Zstd, 1, u32::MAX)]),
        (17, 0, &[block(Zstd, 17, 100)]),
        (17, 0, &[block(Plain, 17, 17 * BODY)]),
        (1, 0, &[block(Xbzrle, 1, 8)]),
        (0, 1, &[block(Lz4, 1, 8)]),
        (0, 1, &[block(Xbzrle, 1, 1)]),
        (0, 1, &[block(Xbzrle, 1, BODY + 3)]),
        (0, 2, &[block(Xbzrle, 1, 8)]),
        (0, 2, &[block(Xbzrle, 300, 800)]),
        // Differences come last.
        (1, 1, &[block(Xbzrle, 1, 8), block(Plain, 1, BODY)]),
        (2, 1, &[block(Plain, 1, BODY), block(Xbzrle, 1, 8), block(Plain, 1, BODY)]),
    ];
    for (full, delta, blocks) in wrong {
        let frame = frame(*full, *delta, blocks.to_vec());
        assert_eq!(pass(&frame, Features::KNOWN), Err(FrameError::Blocks(2)), "{full} {delta} {blocks:?}");
    }
    let right = frame(2, 1, vec![block(Plain, 1, BODY), block(Zstd, 1, 8), block(Xbzrle, 1, 8)]);
    assert_eq!(pass(&right, Features::KNOWN), Ok(right));
}

#[test]
fn a_page_is_in_one_set_only_and_exists() {
    let plain = |pages: u16| vec![block(Codec::Plain, pages, u32::from(pages) * BODY)];
    let page: PageSet = [200].into_iter().collect();
    let mut both = frame(1, 0, plain(2));
    both.full.insert(200);
    assert_eq!(pass(&both, Features::KNOWN), Err(FrameError::Contradiction(2)));
    let mut both = PackedFrame { delta: page, ..frame(1, 0, plain(1)) };
    both.blocks.push(block(Codec::Xbzrle, 1, 8));
    assert_eq!(pass(&both, Features::KNOWN), Err(FrameError::Contradiction(2)));
    let mut both = PackedFrame { zero: PageSet::EMPTY, ..frame(0, 1, plain(1)) };
    both.full.insert(100);
    both.blocks.push(block(Codec::Xbzrle, 1, 8));
    assert_eq!(pass(&both, Features::KNOWN), Err(FrameError::Contradiction(2)));
    let none = PackedFrame { zero: PageSet::EMPTY, ..frame(0, 0, vec![]) };
    assert_eq!(pass(&none, Features::KNOWN), Err(FrameError::Contradiction(2)));
    for chunk in [7, 8, u32::MAX] {
        let outside = PackedFrame { chunk: ChunkIndex(chunk), ..frame(2, 0, plain(2)) };
        assert_eq!(pass(&outside, Features::KNOWN), Err(FrameError::Outside(chunk)));
    }
}

#[test]
fn an_unknown_encoding_is_refused_by_its_number() {
    let frame = frame(1, 0, vec![block(Codec::Plain, 1, BODY)]);
    let mut words = frame.words(&[1]);
    let last = words.last_mut().unwrap();
    *last += 77;
    let (full, zero) = (frame.full, frame.zero);
    let read = PackedFrame::read((0, frame.chunk), (full, zero), &words, &PageSet::first(256), Features::KNOWN);
    assert_eq!(read, Err(FrameError::Codec(77)));
    // What a word has beyond its three numbers must be 0.
    *words.last_mut().unwrap() = frame.blocks[0].word() | 1 << 56;
    let read = PackedFrame::read((0, frame.chunk), (full, zero), &words, &PageSet::first(256), Features::KNOWN);
    assert_eq!(read, Err(FrameError::Blocks(2)));
}

#[test]
fn what_was_not_agreed_on_is_refused() {
    let cases = [
        (Codec::Plain, BODY, Features::PACKED),
        (Codec::Lz4, 9, Features::LZ4),
        (Codec::Zstd, 9, Features::ZSTD),
        (Codec::Xbzrle, 9, Features::XBZRLE),
    ];
    for (codec, bytes, feature) in cases {
        let delta = u8::from(codec == Codec::Xbzrle);
        let frame = frame(usize::from(1 - delta), delta, vec![block(codec, 1, bytes)]);
        let others = Features::KNOWN.without(feature);
        assert_eq!(pass(&frame, others), Err(FrameError::NotAgreed(feature)));
        assert_eq!(pass(&frame, Features::PACKED.and(feature)), Ok(frame));
    }
    assert_eq!(pass(&frame(0, 0, vec![]), Features::NONE), Err(FrameError::NotAgreed(Features::PACKED)));
}
