//! Which pages of a machine are used, kept current from one moment on.
//!
//! A page is *used* once somebody has touched it, and *unused* again once its memory was taken because the guest held
//! it free. An unused page has no content anywhere: it reads as zeros, need not be sent, and takes no memory on any
//! host.
//!
//! # Invariants
//! 1. Every page of the machine is used or unused, never both. Anything that is no page of it is neither.
//! 2. The last thing that happened to a page decides: touched → used, taken → unused. Events of a page come in the
//!    order in which they took effect in its RAM: whoever takes a page tells it here before a writer that waited for
//!    the taking goes on, so the writer's touch comes after.
//! 3. A first touch is told once: until the page is taken again, further touches tell nothing new.
//! 4. The number of used pages is that of first touches less that of takings.
//!
//! # Where the map comes from
//! For a machine on one host nobody needs to report touches: its RAM file's allocation is the truth. A page has memory
//! in the file from its first touch until it is punched out, so the map is what `SEEK_DATA` says
//! ([`observe`](crate::usage::UsageMap::observe)). A touch that falls between two observations is seen by the second. A
//! touch between a taking and the next observation looks as if there was no taking at all, which does no harm.
//!
//! A machine that is split over hosts has pages whose memory is elsewhere, which are holes here and used. There the
//! first touch is a fault on a missing page ([`touch`](crate::usage::UsageMap::touch)), the taking is told by whoever
//! takes the page ([`take`](crate::usage::UsageMap::take)), and both happen under a lock of the page's chunk.

use crate::layout::PageIndex;
use crate::pages::PageMap;

/// A map of the pages of a machine that are used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UsageMap {
    used: PageMap,
}

/// What an observation showed that was not known before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    /// Pages that were unused and are used now.
    pub touched: PageMap,
    /// Pages that were used and are unused now.
    pub taken: PageMap,
}

impl UsageMap {
    /// A map with these pages used and no others.
    #[must_use]
    pub fn new(used: PageMap) -> Self {
        Self { used }
    }

    /// Records that somebody touches a page, and says whether that is its first touch.
    ///
    /// # Panics
    /// Where the machine has no such chunk.
    pub fn touch(&mut self, page: PageIndex) -> bool {
        let set = self.used.chunk_mut(page.chunk);
        let first = !set.contains(page.page);
        set.insert(page.page);
        first
    }

    /// Records that the memory of these pages was taken, because the guest held them free.
    pub fn take(&mut self, pages: &PageMap) {
        self.used.take_out(pages);
    }

    /// Brings the map up to date with the pages that have memory now, on the one host that the machine is on.
    pub fn observe(&mut self, allocated: PageMap) -> Seen {
        let (mut touched, mut taken) = (allocated.clone(), self.used.clone());
        touched.take_out(&self.used);
        taken.take_out(&allocated);
        self.used = allocated;
        Seen { touched, taken }
    }

    /// The pages that are used.
    #[must_use]
    pub fn used(&self) -> &PageMap {
        &self.used
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;
    use crate::layout::{ChunkIndex, Layout};
    use crate::spec::BlockSpec;

    /// A machine of three chunks, the last of them short.
    const PAGES: u16 = 2 * 256 + 7;

    fn layout() -> Layout {
        let bytes = u64::from(PAGES) * 4096;
        Layout::new(&[BlockSpec { id: "ram".into(), bytes, page_bytes: 4096, path: String::new() }]).unwrap()
    }

    fn page(number: u16) -> PageIndex {
        PageIndex { chunk: ChunkIndex(u32::from(number / 256)), page: (number % 256) as u8 }
    }

    fn map(pages: &BTreeSet<u16>) -> PageMap {
        let mut map = PageMap::empty(&layout());
        pages.iter().for_each(|&number| map.insert(page(number)));
        map
    }

    /// What can happen.
    #[derive(Debug, Clone)]
    enum Step {
        Touch(u16),
        Take(BTreeSet<u16>),
        Observe(BTreeSet<u16>),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let some = || prop::collection::btree_set(0..PAGES, 0..40);
        let step = prop_oneof![
            4 => (0..PAGES).prop_map(Step::Touch),
            1 => some().prop_map(Step::Take),
            1 => some().prop_map(Step::Observe),
        ];
        prop::collection::vec(step, 0..200)
    }

    proptest! {
        #[test]
        fn the_last_thing_that_happened_to_a_page_decides(
            first in prop::collection::btree_set(0..PAGES, 0..40),
            steps in steps(),
        ) {
            let mut usage = UsageMap::new(map(&first));
            let mut model = first;
            let (mut touched, mut taken) = (model.len() as u64, 0);
            for step in steps {
                match step {
                    Step::Touch(number) => {
                        let is_first = usage.touch(page(number));
                        prop_assert_eq!(is_first, model.insert(number));
                        touched += u64::from(is_first);
                        prop_assert!(!usage.touch(page(number)), "told once");
                    }
                    Step::Take(pages) => {
                        taken += pages.intersection(&model).count() as u64;
                        usage.take(&map(&pages));
                        model.retain(|number| !pages.contains(number));
                    }
                    Step::Observe(pages) => {
                        let seen = usage.observe(map(&pages));
                        prop_assert_eq!(&seen.touched, &map(&pages.difference(&model).copied().collect()));
                        prop_assert_eq!(&seen.taken, &map(&model.difference(&pages).copied().collect()));
                        touched += seen.touched.len();
                        taken += seen.taken.len();
                        model = pages;
                    }
                }
                prop_assert_eq!(usage.used(), &map(&model));
                prop_assert_eq!(usage.used().len(), touched - taken);
            }
        }
    }
}
