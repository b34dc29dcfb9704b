//! Hot pages: those that the guest wrote in each of the last rounds (the writable working set). They are held back
//! until they cool down or the guest has stopped, so that rounds carry what stays sent.

use sterna_protocol::layout::{ChunkIndex, Layout};
use sterna_protocol::pages::{PageMap, PageSet};

use super::skip::Skip;

/// The set of hot pages. A page is hot when each of the last three collections yielded it.
#[derive(Debug)]
pub struct HotPages {
    /// The pages of the last collections, the latest first. Empty where no page is to be held back.
    last: [PageMap; 3],
    holds: bool,
}

impl HotPages {
    /// An empty set. It stays empty where no page is to be held back.
    #[must_use]
    pub fn new(layout: &Layout, holds: bool) -> Self {
        Self { last: std::array::from_fn(|_| PageMap::empty(layout)), holds }
    }
}

impl Skip for HotPages {
    fn collected(&mut self, written: &PageMap) {
        if self.holds {
            self.last.rotate_right(1);
            self.last[0].clone_from(written);
        }
    }

    /// The hot pages of a chunk. They are no part of a round: only a collection changes what is hot.
    fn before_round(&self, chunk: ChunkIndex) -> PageSet {
        let [first, second, third] = &self.last;
        first.chunk(chunk).and(second.chunk(chunk)).and(third.chunk(chunk))
    }
}

#[cfg(test)]
mod tests {
    use sterna_protocol::layout::PageIndex;
    use sterna_protocol::spec::BlockSpec;

    use super::*;

    fn layout() -> Layout {
        Layout::new(&[BlockSpec { id: "ram".into(), bytes: 1 << 20, page_bytes: 4096, path: String::new() }]).unwrap()
    }

    fn map(pages: &[u8]) -> PageMap {
        let mut map = PageMap::empty(&layout());
        pages.iter().for_each(|&page| map.insert(PageIndex { chunk: ChunkIndex(0), page }));
        map
    }

    #[test]
    fn a_page_is_hot_when_it_was_written_in_each_of_three_rounds_and_cools_down_when_it_was_not() {
        let mut hot = HotPages::new(&layout(), true);
        let holds = |hot: &HotPages| hot.before_round(ChunkIndex(0)).iter().collect::<Vec<_>>();
        hot.collected(&map(&[1, 2, 3]));
        hot.collected(&map(&[1, 2]));
        assert!(holds(&hot).is_empty());
        hot.collected(&map(&[2, 1, 9]));
        assert_eq!(holds(&hot), [1, 2]);
        hot.collected(&map(&[2]));
        assert_eq!(holds(&hot), [2]);
        hot.collected(&map(&[]));
        assert!(holds(&hot).is_empty());
    }

    #[test]
    fn where_nothing_is_held_nothing_is_hot() {
        let mut hot = HotPages::new(&layout(), false);
        (0..5).for_each(|_| hot.collected(&map(&[1])));
        assert!(hot.before_round(ChunkIndex(0)).is_empty());
    }
}
