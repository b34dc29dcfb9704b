//! Skips: reasons that leave outstanding pages to a later round while the guest runs, because sending them now is in
//! vain.
//!
//! Why no skip loses a page, whatever it says: skipped pages stay outstanding. [`Rounds`] puts them into the next round
//! itself and does not rely on the tracker to report them again, and with the guest stopped no skip is asked. A wrong
//! skip sends a page in vain, or later than it could have gone.
//!
//! A new reason is a file with an implementation, a line in [`Rounds::new`], and a counter in the report. Two kinds of
//! pages are no skips, because a round is done with them for good: free pages, which go as zeros
//! ([`free`](crate::source::free)), and pages whose content the destination has ([`content`](crate::source::content)).
//! [`select`](crate::source::select) decides about those page by page, and they do not come again.
//!
//! [`Rounds`]: crate::source::rounds::Rounds
//! [`Rounds::new`]: crate::source::rounds::Rounds::new

use std::fmt::Debug;
use std::time::Duration;

use sterna_protocol::layout::{ChunkIndex, Layout};
use sterna_protocol::pages::{PageMap, PageSet};

use crate::error::MigrateError;

/// One reason. The threads that send ask it at the same time, each about chunks of its own.
pub trait Skip: Debug + Send + Sync {
    /// Takes note of the pages that a collection has just yielded; every page is watched anew.
    fn collected(&mut self, written: &PageMap);

    /// The pages of a chunk that are no part of a round that begins now. The answer stays the same until the next
    /// collection.
    fn before_round(&self, _chunk: ChunkIndex) -> PageSet {
        PageSet::EMPTY
    }

    /// The pages of a chunk that are better left to the next round, asked by the thread that is about to read them.
    ///
    /// # Errors
    /// For example, the VMM's process has ended.
    fn before_turn(&self, _chunk: ChunkIndex) -> Result<PageSet, MigrateError> {
        Ok(PageSet::EMPTY)
    }

    /// The number of looks at the guest so far, and the time they took.
    fn looks(&self) -> (u64, Duration) {
        (0, Duration::ZERO)
    }
}

/// All reasons that a migration knows.
#[derive(Debug)]
pub struct Skips(Vec<Box<dyn Skip>>);

impl Skips {
    /// These reasons together: a page that any of them skips is skipped.
    #[must_use]
    pub fn of(reasons: Vec<Box<dyn Skip>>) -> Self {
        Self(reasons)
    }

    /// Takes note of the pages that a collection has just yielded.
    pub fn collected(&mut self, written: &PageMap) {
        self.0.iter_mut().for_each(|skip| skip.collected(written));
    }

    /// Takes the pages that are no part of a round that begins now out of the outstanding ones, and returns them.
    pub fn hold(&self, layout: &Layout, outstanding: &mut PageMap) -> PageMap {
        let mut held = PageMap::empty(layout);
        for chunk in layout.iter() {
            let skipped = self.0.iter().fold(PageSet::EMPTY, |all, skip| all.or(&skip.before_round(chunk)));
            let outstanding = outstanding.chunk_mut(chunk);
            let skipped = outstanding.and(&skipped);
            *outstanding = outstanding.without(&skipped);
            *held.chunk_mut(chunk) = skipped;
        }
        held
    }

    /// The pages of a chunk that are better left to the next round, asked just before they are read.
    ///
    /// # Errors
    /// As [`Skip::before_turn`].
    pub fn before_turn(&self, chunk: ChunkIndex) -> Result<PageSet, MigrateError> {
        self.0.iter().try_fold(PageSet::EMPTY, |all, skip| Ok(all.or(&skip.before_turn(chunk)?)))
    }

    /// The number of looks at the guest, and the time they took.
    #[must_use]
    pub fn looks(&self) -> (u64, Duration) {
        let looks = self.0.iter().map(|skip| skip.looks());
        looks.fold((0, Duration::ZERO), |(count, time), (looks, took)| (count + looks, time + took))
    }
}

#[cfg(test)]
mod tests {
    use sterna_protocol::layout::PageIndex;
    use sterna_protocol::spec::BlockSpec;

    use super::*;

    #[derive(Debug)]
    struct Always {
        before_round: u8,
        before_turn: u8,
    }

    impl Skip for Always {
        fn collected(&mut self, written: &PageMap) {
            self.before_round += written.len() as u8;
        }

        fn before_round(&self, _: ChunkIndex) -> PageSet {
            [self.before_round].into_iter().collect()
        }

        fn before_turn(&self, _: ChunkIndex) -> Result<PageSet, MigrateError> {
            Ok([self.before_turn].into_iter().collect())
        }

        fn looks(&self) -> (u64, Duration) {
            (1, Duration::from_millis(2))
        }
    }

    #[test]
    fn what_any_reason_skips_is_held_and_what_is_held_was_outstanding() {
        let block = BlockSpec { id: "ram".into(), bytes: 1 << 20, page_bytes: 4096, path: String::new() };
        let layout = Layout::new(&[block]).unwrap();
        let (first, second) = (Always { before_round: 1, before_turn: 7 }, Always { before_round: 2, before_turn: 8 });
        let mut skips = Skips::of(vec![Box::new(first), Box::new(second)]);
        let mut outstanding = PageMap::empty(&layout);
        *outstanding.chunk_mut(ChunkIndex(0)) = [2, 3, 4].into_iter().collect();
        let pages = |map: &PageMap| map.chunk(ChunkIndex(0)).iter().collect::<Vec<_>>();
        let held = skips.hold(&layout, &mut outstanding);
        assert_eq!((pages(&held), pages(&outstanding)), (vec![2], vec![3, 4]));
        let mut written = PageMap::empty(&layout);
        written.insert(PageIndex { chunk: ChunkIndex(0), page: 0 });
        skips.collected(&written);
        let held = skips.hold(&layout, &mut outstanding);
        assert_eq!((pages(&held), pages(&outstanding)), (vec![3], vec![4]));
        assert_eq!(skips.before_turn(ChunkIndex(0)).unwrap().iter().collect::<Vec<_>>(), [7, 8]);
        assert_eq!(skips.looks(), (2, Duration::from_millis(4)));
    }
}
