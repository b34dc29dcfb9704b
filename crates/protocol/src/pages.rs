//! Sets of pages: of one chunk (`PageSet`) and of a whole machine (`PageMap`).

use crate::layout::{CHUNK_PAGES, ChunkIndex, Layout, PageIndex};

/// A set of pages of one chunk, a bit each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct PageSet(pub [u64; 4]);

impl PageSet {
    /// The empty set.
    pub const EMPTY: Self = Self([0; 4]);
    /// The length of a set as bytes.
    pub const BYTES: usize = 32;

    /// The set as bytes: its words, little-endian.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        for (word, to) in self.0.iter().zip(bytes.as_chunks_mut().0) {
            *to = word.to_le_bytes();
        }
        bytes
    }

    /// The set with these bytes, as [`to_bytes`](Self::to_bytes) makes them.
    #[must_use]
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        let (words, _) = bytes.as_chunks();
        Self(std::array::from_fn(|word| u64::from_le_bytes(words[word])))
    }

    /// The set of the first `pages` pages.
    #[must_use]
    pub fn first(pages: usize) -> Self {
        let mut set = Self::EMPTY;
        set.insert_run(0, pages.min(CHUNK_PAGES));
        set
    }

    /// All pages of a chunk; none where there is no such chunk.
    #[must_use]
    pub fn of_chunk(layout: &Layout, chunk: ChunkIndex) -> Self {
        Self::first(layout.place(chunk).map_or(0, |place| place.pages))
    }

    /// Adds a page.
    pub fn insert(&mut self, page: u8) {
        self.0[usize::from(page) / 64] |= 1 << (page % 64);
    }

    /// Adds `length` pages from `start` on; what lies beyond the chunk is cut off.
    pub fn insert_run(&mut self, start: usize, length: usize) {
        let end = (start + length).min(CHUNK_PAGES);
        for word in 0..4 {
            let from = start.clamp(word * 64, word * 64 + 64) - word * 64;
            let to = end.clamp(word * 64, word * 64 + 64) - word * 64;
            if from < to {
                self.0[word] |= (u64::MAX >> (64 - (to - from))) << from;
            }
        }
    }

    /// Removes a page.
    pub fn remove(&mut self, page: u8) {
        self.0[usize::from(page) / 64] &= !(1 << (page % 64));
    }

    /// Whether the page is in the set.
    #[must_use]
    pub fn contains(&self, page: u8) -> bool {
        self.0[usize::from(page) / 64] >> (page % 64) & 1 == 1
    }

    /// The number of pages.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Whether there are no pages.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0 == [0; 4]
    }

    /// The pages in either set.
    #[must_use]
    pub fn or(&self, other: &Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i] | other.0[i]))
    }

    /// The pages in both sets.
    #[must_use]
    pub fn and(&self, other: &Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i] & other.0[i]))
    }

    /// The pages in this set and not in the other.
    #[must_use]
    pub fn without(&self, other: &Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i] & !other.0[i]))
    }

    /// The pages in order.
    pub fn iter(&self) -> impl Iterator<Item = u8> + use<> {
        let words = self.0;
        (0..4usize).flat_map(move |index| {
            let mut word = words[index];
            std::iter::from_fn(move || {
                (word != 0).then(|| {
                    let bit = word.trailing_zeros() as usize;
                    word &= word - 1;
                    (index * 64 + bit) as u8
                })
            })
        })
    }

    /// The runs of neighbouring pages in order, as first page and length.
    pub fn runs(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (set, mut from) = (*self, 0);
        std::iter::from_fn(move || {
            let start = set.first_from(from, true);
            from = set.first_from(start, false);
            (start < CHUNK_PAGES).then(|| (start, from - start))
        })
    }

    /// The first page from one on that is in the set, or that is not; [`CHUNK_PAGES`] where there is none.
    fn first_from(&self, from: usize, present: bool) -> usize {
        let word = |index: usize| if present { self.0[index] } else { !self.0[index] };
        let behind = |index: usize| if index == from / 64 { u64::MAX << (from % 64) } else { u64::MAX };
        let words = (from / 64..4).map(|index| (index, word(index) & behind(index)));
        let mut found = words.filter(|(_, word)| *word != 0);
        found.next().map_or(CHUNK_PAGES, |(index, word)| index * 64 + word.trailing_zeros() as usize)
    }
}

impl FromIterator<u8> for PageSet {
    fn from_iter<I: IntoIterator<Item = u8>>(pages: I) -> Self {
        let mut set = Self::EMPTY;
        pages.into_iter().for_each(|page| set.insert(page));
        set
    }
}

/// A set of pages of a whole machine: a [`PageSet`] per chunk, 32 bytes per MiB.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageMap {
    chunks: Vec<PageSet>,
}

impl PageMap {
    /// An empty map for a machine with this layout.
    #[must_use]
    pub fn empty(layout: &Layout) -> Self {
        Self { chunks: vec![PageSet::EMPTY; layout.chunks() as usize] }
    }

    /// The pages of one chunk.
    ///
    /// # Panics
    /// Where the chunk is not in the layout the map was made for.
    #[must_use]
    pub fn chunk(&self, chunk: ChunkIndex) -> &PageSet {
        &self.chunks[chunk.index()]
    }

    /// The pages of one chunk, to change.
    ///
    /// # Panics
    /// Where the chunk is not in the layout the map was made for.
    pub fn chunk_mut(&mut self, chunk: ChunkIndex) -> &mut PageSet {
        &mut self.chunks[chunk.index()]
    }

    /// Adds a page.
    ///
    /// # Panics
    /// Where the chunk is not in the layout the map was made for.
    pub fn insert(&mut self, page: PageIndex) {
        self.chunks[page.chunk.index()].insert(page.page);
    }

    /// Adds pages of one chunk.
    ///
    /// # Panics
    /// Where the chunk is not in the layout the map was made for.
    pub fn insert_all(&mut self, chunk: ChunkIndex, pages: &PageSet) {
        let set = self.chunk_mut(chunk);
        *set = set.or(pages);
    }

    /// Adds all pages of the other map, which is of the same layout.
    pub fn add(&mut self, other: &Self) {
        for (mine, theirs) in self.chunks.iter_mut().zip(&other.chunks) {
            *mine = mine.or(theirs);
        }
    }

    /// Removes all pages that are not in the other map, which is of the same layout.
    pub fn keep(&mut self, other: &Self) {
        for (mine, theirs) in self.chunks.iter_mut().zip(&other.chunks) {
            *mine = mine.and(theirs);
        }
    }

    /// Removes all pages of the other map, which is of the same layout.
    pub fn take_out(&mut self, other: &Self) {
        for (mine, theirs) in self.chunks.iter_mut().zip(&other.chunks) {
            *mine = mine.without(theirs);
        }
    }

    /// Removes all pages.
    pub fn clear(&mut self) {
        self.chunks.fill(PageSet::EMPTY);
    }

    /// The number of pages.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.chunks.iter().map(|set| set.len() as u64).sum()
    }

    /// Whether there are no pages.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.chunks.iter().all(PageSet::is_empty)
    }

    /// The chunks that have pages, in order.
    pub fn iter(&self) -> impl Iterator<Item = (ChunkIndex, &PageSet)> {
        self.chunks.iter().enumerate().filter(|(_, set)| !set.is_empty()).map(|(i, set)| (ChunkIndex(i as u32), set))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_set_gives_back_what_was_put_in(pages in prop::collection::btree_set(any::<u8>(), 0..256)) {
            let set: PageSet = pages.iter().copied().collect();
            prop_assert_eq!(set.len(), pages.len());
            prop_assert_eq!(set.iter().collect::<Vec<_>>(), pages.iter().copied().collect::<Vec<_>>());
            let in_runs = set.runs().flat_map(|(start, length)| start..start + length);
            let from_runs: Vec<u8> = in_runs.map(|page| page as u8).collect();
            prop_assert_eq!(from_runs, pages.iter().copied().collect::<Vec<_>>());
        }

        #[test]
        fn a_run_is_its_pages(start in 0usize..256, length in 0usize..300) {
            let mut set = PageSet::EMPTY;
            set.insert_run(start, length);
            let expected: PageSet = (start..(start + length).min(256)).map(|p| p as u8).collect();
            prop_assert_eq!(set, expected);
        }
    }
}
