//! Parts of the residue: the map of pages that are not at the destination, or stale there, when the guest starts.
//!
//! A part holds the sets of consecutive chunks, 32 bytes each, compressed by LZ4. For each GiB of RAM this is 32 KiB
//! before compression, and next to nothing after it where large areas are alike. Parts are bounded, so that a map of
//! any machine fits into messages.

use serde::{Deserialize, Serialize};

use crate::layout::{ChunkIndex, Layout};
use crate::pages::{PageMap, PageSet};

/// A part of a map of pages: the pages of `chunks` chunks from `first` on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResiduePart {
    /// The first chunk.
    pub first: ChunkIndex,
    /// The number of chunks.
    pub chunks: u32,
    /// The sets of their pages, compressed.
    pub bits: Vec<u8>,
}

/// The most chunks of a part: 2 MiB of sets, which fit a message whatever they hold.
pub const MAX_PART_CHUNKS: u32 = 1 << 16;

/// A part that is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ResidueError {
    /// It has chunks that the machine does not have, or no chunks.
    #[error("a part of a map of pages for {chunks} chunks from {first} on, which this machine does not have")]
    Outside {
        /// The first chunk.
        first: u32,
        /// The number of chunks.
        chunks: u32,
    },
    /// Its bits do not make up its chunks.
    #[error("a part of a map of pages that cannot be decompressed")]
    Damaged,
    /// It names pages that the machine does not have.
    #[error("a part of a map of pages that names pages of chunk {0} that this machine does not have")]
    Pages(u32),
}

/// The part of `map` that begins at `first`: [`MAX_PART_CHUNKS`] chunks, or as many as follow. `None` past the end.
#[must_use]
pub fn part(map: &PageMap, layout: &Layout, first: ChunkIndex) -> Option<ResiduePart> {
    let chunks = layout.chunks().checked_sub(first.0).filter(|left| *left > 0)?.min(MAX_PART_CHUNKS);
    let mut sets = Vec::with_capacity(chunks as usize * PageSet::BYTES);
    for chunk in first.0..first.0 + chunks {
        sets.extend_from_slice(&map.chunk(ChunkIndex(chunk)).to_bytes());
    }
    Some(ResiduePart { first, chunks, bits: lz4_flex::block::compress(&sets) })
}

/// Adds the pages that a part names to `map`.
///
/// # Errors
/// [`ResidueError`]: the part may come from a peer. Then `map` is as it was.
pub fn add(part: &ResiduePart, layout: &Layout, map: &mut PageMap) -> Result<(), ResidueError> {
    let ResiduePart { first, chunks, bits } = part;
    let inside = first.0.checked_add(*chunks).is_some_and(|end| end <= layout.chunks());
    if !inside || *chunks == 0 || *chunks > MAX_PART_CHUNKS {
        return Err(ResidueError::Outside { first: first.0, chunks: *chunks });
    }
    let mut sets = vec![0; *chunks as usize * PageSet::BYTES];
    let whole = lz4_flex::block::decompress_into(bits, &mut sets).is_ok_and(|bytes| bytes == sets.len());
    if !whole {
        return Err(ResidueError::Damaged);
    }
    let sets: Vec<PageSet> = sets.as_chunks().0.iter().map(PageSet::from_bytes).collect();
    let fits = |(chunk, set): (u32, &PageSet)| {
        let pages = layout.place(ChunkIndex(chunk)).map_or(0, |place| place.pages);
        set.without(&PageSet::first(pages)).is_empty()
    };
    if let Some((chunk, _)) = (first.0..).zip(&sets).find(|(chunk, set)| !fits((*chunk, set))) {
        return Err(ResidueError::Pages(chunk));
    }
    for (chunk, set) in (first.0..).zip(&sets) {
        map.insert_all(ChunkIndex(chunk), set);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::spec::BlockSpec;

    fn layout() -> Layout {
        let block = |id: &str, bytes| BlockSpec { id: id.into(), bytes, page_bytes: 4096, path: String::new() };
        Layout::new(&[block("a", (300 << 20) + 4096), block("b", 5 << 20)]).unwrap()
    }

    proptest! {
        #[test]
        fn a_map_arrives_as_it_was_sent(chunks in prop::collection::btree_map(0u32..306, any::<[u64; 4]>(), 0..50)) {
            let layout = layout();
            let mut map = PageMap::empty(&layout);
            for (chunk, set) in chunks {
                let chunk = ChunkIndex(chunk);
                let pages = layout.place(chunk).unwrap().pages;
                map.insert_all(chunk, &PageSet(set).and(&PageSet::first(pages)));
            }
            let mut arrived = PageMap::empty(&layout);
            add(&part(&map, &layout, ChunkIndex(0)).unwrap(), &layout, &mut arrived).unwrap();
            prop_assert_eq!(arrived, map);
        }

        #[test]
        fn garbage_is_refused_and_changes_nothing(first: u32, chunks: u32, bits: Vec<u8>) {
            let layout = layout();
            let mut map = PageMap::empty(&layout);
            let part = ResiduePart { first: ChunkIndex(first % 400), chunks: chunks % 400, bits };
            if add(&part, &layout, &mut map).is_err() {
                prop_assert!(map.is_empty());
            }
        }
    }

    #[test]
    fn a_page_that_the_machine_does_not_have_is_refused() {
        let (layout, larger) = (layout(), {
            let block = BlockSpec { id: "a".into(), bytes: 400 << 20, page_bytes: 4096, path: String::new() };
            Layout::new(&[block]).unwrap()
        });
        let mut map = PageMap::empty(&larger);
        map.insert_all(ChunkIndex(300), &PageSet::first(2));
        let mut part = part(&map, &larger, ChunkIndex(0)).unwrap();
        let mut here = PageMap::empty(&layout);
        assert!(matches!(add(&part, &layout, &mut here), Err(ResidueError::Outside { .. })));
        let mut cut = PageMap::empty(&larger);
        cut.insert_all(ChunkIndex(300), &PageSet::first(2));
        let sets: Vec<u8> = (0..301).flat_map(|c| cut.chunk(ChunkIndex(c)).0.map(u64::to_le_bytes)).flatten().collect();
        part = ResiduePart { first: ChunkIndex(0), chunks: 301, bits: lz4_flex::block::compress(&sets) };
        assert_eq!(add(&part, &layout, &mut here), Err(ResidueError::Pages(300)));
        assert!(here.is_empty());
    }

    #[test]
    fn an_empty_or_uniform_map_of_a_large_machine_is_small() {
        let block = BlockSpec { id: "a".into(), bytes: 64 << 30, page_bytes: 4096, path: String::new() };
        let layout = Layout::new(&[block]).unwrap();
        let mut map = PageMap::empty(&layout);
        assert!(part(&map, &layout, ChunkIndex(0)).unwrap().bits.len() < 10_000);
        layout.iter().for_each(|chunk| map.insert_all(chunk, &PageSet::first(256)));
        assert!(part(&map, &layout, ChunkIndex(0)).unwrap().bits.len() < 10_000);
        assert_eq!(part(&map, &layout, ChunkIndex(layout.chunks())), None);
    }
}
