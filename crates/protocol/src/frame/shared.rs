//! Shared frames: pages of a chunk that a gang of machines shares.
//!
//! ```text
//!   header's full: pooled pages, whose bodies follow in the chunk's next frame
//!   header's zero: pages that come as references, of which no body follows
//!   words: one for each run of references: first 8 bits · pages less one 8 · member 14 · page 8 · chunk 26
//! ```
//!
//! A body that several pages of a gang share travels once. It goes into the destination's pool, where its *origin*
//! names it: the page that it travelled as, of whichever member. Every other page with the same content travels as a
//! reference to the origin. A body that the destination had before is an *offered* page, and its origin is a number.
//! An origin names one body in the life of a gang's pool, and a body in the pool never changes: so a reference says the
//! same whenever it arrives.
//!
//! A shared frame comes right before the frame that has the bodies of its pooled pages, on the same connection.

use super::FrameError;
use crate::layout::{CHUNK_PAGES, ChunkIndex, PageIndex};
use crate::pages::PageSet;

/// The most machines of a gang whose pages can be named.
pub const MAX_MEMBERS: usize = MEMBER_BITS as usize;

/// The bits of a word that name a member.
const MEMBER_BITS: u16 = (1 << 14) - 1;

/// What stands for a member where the body is none's, but a page that the destination has offered.
const OFFERED: u16 = MEMBER_BITS;

/// The page as which a shared body travelled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Origin {
    /// The member of the gang whose page it is, counted from 0.
    pub member: u16,
    /// The page.
    pub page: PageIndex,
}

impl Origin {
    /// The offered page with this number.
    #[must_use]
    pub fn offered(number: u32) -> Self {
        Self { member: OFFERED, page: PageIndex { chunk: ChunkIndex(number >> 8), page: number as u8 } }
    }

    /// The number of the offered page, where it is one.
    #[must_use]
    pub fn offer(self) -> Option<u64> {
        let PageIndex { chunk, page } = self.page;
        (self.member == OFFERED).then_some(u64::from(chunk.0) << 8 | u64::from(page))
    }

    /// The origin `pages` pages further on in the same chunk; `None` where that chunk is too short.
    fn ahead(self, pages: usize) -> Option<Self> {
        let page = u8::try_from(usize::from(self.page.page) + pages).ok()?;
        Some(Self { page: PageIndex { page, ..self.page }, ..self })
    }
}

/// Neighbouring pages of a chunk that refer to neighbouring origins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct References {
    /// The first page.
    pub first: u8,
    /// The number of pages, at least 1.
    pub pages: u16,
    /// The origin of the first page's body. The others' follow it in the same chunk.
    pub origin: Origin,
}

impl References {
    /// References in runs as long as possible. The pages are in ascending order.
    #[must_use]
    pub fn runs(pages: impl IntoIterator<Item = (u8, Origin)>) -> Vec<Self> {
        let mut runs: Vec<Self> = Vec::new();
        for (page, origin) in pages {
            match runs.last_mut() {
                Some(last)
                    if usize::from(page) == last.end() && last.origin.ahead(last.pages.into()) == Some(origin) =>
                {
                    last.pages += 1;
                }
                _ => runs.push(Self { first: page, pages: 1, origin }),
            }
        }
        runs
    }

    /// All pages of these runs.
    #[must_use]
    pub fn pages(runs: &[Self]) -> PageSet {
        let mut set = PageSet::EMPTY;
        runs.iter().for_each(|run| set.insert_run(run.first.into(), run.pages.into()));
        set
    }

    /// Each page with its origin.
    pub fn each(self) -> impl Iterator<Item = (u8, Origin)> {
        (0..usize::from(self.pages))
            .filter_map(move |at| Some((u8::try_from(usize::from(self.first) + at).ok()?, self.origin.ahead(at)?)))
    }

    fn end(&self) -> usize {
        usize::from(self.first) + usize::from(self.pages)
    }

    fn word(self) -> u64 {
        let Origin { member, page } = self.origin;
        u64::from(self.first)
            | u64::from(self.pages - 1) << 8
            | u64::from(member) << 16
            | u64::from(page.page) << 30
            | u64::from(page.chunk.0) << 38
    }

    fn from_word(word: u64) -> Self {
        let page = PageIndex { chunk: ChunkIndex((word >> 38) as u32), page: (word >> 30) as u8 };
        let origin = Origin { member: (word >> 16) as u16 & MEMBER_BITS, page };
        Self { first: word as u8, pages: u16::from((word >> 8) as u8) + 1, origin }
    }
}

/// What a gang shares of one chunk's pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedFrame {
    /// The round's number.
    pub round: u32,
    /// The chunk of the pages.
    pub chunk: ChunkIndex,
    /// Pages whose bodies go into the pool: whole bodies of the chunk's next frame.
    pub pooled: PageSet,
    /// Pages that come as references, in ascending order.
    pub references: Vec<References>,
}

impl SharedFrame {
    /// The pages that come as references.
    #[must_use]
    pub fn referring(&self) -> PageSet {
        References::pages(&self.references)
    }

    /// The words behind the header.
    pub(super) fn words(&self) -> Vec<u64> {
        self.references.iter().map(|run| run.word()).collect()
    }

    /// The frame that header and words describe; `pages` are those that the chunk has. Nothing in it contradicts
    /// anything else. Whether the origins exist is for the pool to say.
    pub(super) fn read(
        (round, chunk): (u32, ChunkIndex),
        (pooled, referring): (PageSet, PageSet),
        words: &[u64],
        pages: &PageSet,
    ) -> Result<Self, FrameError> {
        let contradiction = FrameError::Contradiction(chunk.0);
        if !pooled.or(&referring).without(pages).is_empty() {
            return Err(FrameError::Outside(chunk.0));
        }
        let references: Vec<_> = words.iter().map(|word| References::from_word(*word)).collect();
        let apart = references.windows(2).all(|pair| pair[0].end() <= usize::from(pair[1].first));
        let inside = references.iter().all(|run| {
            run.end() <= CHUNK_PAGES && usize::from(run.origin.page.page) + usize::from(run.pages) <= CHUNK_PAGES
        });
        let frame = Self { round, chunk, pooled, references };
        let told = apart && inside && frame.referring() == referring;
        if !told || !pooled.and(&referring).is_empty() || pooled.or(&referring).is_empty() {
            return Err(contradiction);
        }
        Ok(frame)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn origin(member: u16, chunk: u32, page: u8) -> Origin {
        Origin { member, page: PageIndex { chunk: ChunkIndex(chunk), page } }
    }

    const AT: (u32, ChunkIndex) = (3, ChunkIndex(5));

    proptest! {
        #[test]
        fn references_arrive_as_they_were_made(
            pages in prop::collection::btree_map(any::<u8>(), (0u16..1 << 14, 0u32..1 << 26, any::<u8>()), 1..256),
            pooled: [u64; 4],
        ) {
            let each = pages.iter().map(|(page, (member, chunk, at))| (*page, origin(*member, *chunk, *at)));
            let each: Vec<_> = each.collect();
            let references = References::runs(each.iter().copied());
            let referring: PageSet = pages.keys().copied().collect();
            let pooled = PageSet(pooled).without(&referring);
            let frame = SharedFrame { round: AT.0, chunk: AT.1, pooled, references };
            prop_assert_eq!(frame.referring(), referring);
            let read = SharedFrame::read(AT, (pooled, referring), &frame.words(), &PageSet::first(CHUNK_PAGES));
            prop_assert_eq!(read.as_ref(), Ok(&frame));
            let back: Vec<_> = frame.references.iter().flat_map(|run| run.each()).collect();
            prop_assert_eq!(back, each);
        }

        #[test]
        fn whatever_words_come_nothing_panics_and_what_is_accepted_fits(
            words in prop::collection::vec(any::<u64>(), 0..8),
            pooled: [u64; 4], referring: [u64; 4], pages in 1usize..=256,
        ) {
            let (pooled, referring, pages) = (PageSet(pooled), PageSet(referring), PageSet::first(pages));
            if let Ok(frame) = SharedFrame::read(AT, (pooled, referring), &words, &pages) {
                prop_assert!(frame.referring().or(&frame.pooled).without(&pages).is_empty());
                prop_assert_eq!(frame.references.iter().flat_map(|run| run.each()).count(), referring.len());
            }
        }
    }

    #[test]
    fn an_offered_page_is_a_number_and_no_members_page() {
        for number in [0, 255, 256, u32::MAX] {
            let run = References { first: 0, pages: 1, origin: Origin::offered(number) };
            assert_eq!(References::from_word(run.word()).origin.offer(), Some(number.into()));
        }
        assert_eq!(origin(MAX_MEMBERS as u16 - 1, 0, 0).offer(), None);
        let two: Vec<_> = (255..257).map(|number| ((number - 250) as u8, Origin::offered(number))).collect();
        assert_eq!(References::runs(two.clone()).len(), 2, "an offered chunk ends as others do");
        assert!(References::runs(two).iter().all(|run| run.pages == 1));
    }

    #[test]
    fn neighbours_of_one_origin_are_one_run_and_a_chunk_of_clones_is_one_word() {
        let clone: Vec<_> = (0..=255).map(|page| (page, origin(1, 9, page))).collect();
        assert_eq!(References::runs(clone), [References { first: 0, pages: 256, origin: origin(1, 9, 0) }]);
        let broken = [(3, origin(1, 9, 7)), (4, origin(1, 9, 8)), (6, origin(1, 9, 9)), (7, origin(2, 9, 10))];
        let lengths: Vec<_> = References::runs(broken).iter().map(|run| run.pages).collect();
        assert_eq!(lengths, [2, 1, 1]);
    }

    #[test]
    fn references_that_contradict_the_header_or_each_other_are_refused() {
        let runs = References::runs([(3, origin(0, 0, 3)), (4, origin(0, 0, 4))]);
        let words: Vec<_> = runs.iter().map(|run| run.word()).collect();
        let (all, none) = (PageSet::first(CHUNK_PAGES), PageSet::EMPTY);
        let both: PageSet = [3, 4].into_iter().collect();
        let read = |pooled, referring, words: &[u64]| SharedFrame::read(AT, (pooled, referring), words, &all);
        assert!(read(none, both, &words).is_ok());
        let contradiction = Err(FrameError::Contradiction(5));
        assert_eq!(read(none, [3].into_iter().collect(), &words), contradiction);
        assert_eq!(read(both, both, &words), contradiction, "a body and a reference");
        assert_eq!(read(none, both, &[words[0], words[0]]), contradiction, "twice");
        assert_eq!(read(none, none, &[]), contradiction, "nothing");
        let behind = References { first: 250, pages: 10, origin: origin(0, 0, 0) };
        assert_eq!(read(none, all, &[behind.word()]), contradiction, "behind the chunk's end");
        let behind = References { first: 0, pages: 2, origin: origin(0, 0, 255) };
        let first_two = PageSet::first(2);
        assert_eq!(read(none, first_two, &[behind.word()]), contradiction, "behind the origin's chunk's end");
        let few = SharedFrame::read(AT, (none, both), &words, &PageSet::first(4));
        assert_eq!(few, Err(FrameError::Outside(5)));
    }
}
