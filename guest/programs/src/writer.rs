use std::str::FromStr;

use crate::random::{Random, mix};

/// A hot spot: this share of the writes goes to …
const HOT_WRITES_PERCENT: u32 = 90;
/// … this share of the pages.
const HOT_PAGES_PERCENT: usize = 10;

/// Which page is written next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// One after the other, round and round.
    Sequential,
    /// Any, each as likely.
    Random,
    /// Nine writes of ten to the first tenth of the pages.
    HotSpot,
}

/// What is silent: stores that write what is there already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Silent {
    /// This percentage of the stores, wherever they go.
    Stores(u32),
    /// All stores to this percentage of the pages, and no other.
    Pages(u32),
}

impl FromStr for Pattern {
    type Err = &'static str;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        match name {
            "sequential" => Ok(Self::Sequential),
            "random" => Ok(Self::Random),
            "hot-spot" => Ok(Self::HotSpot),
            _ => Err("is none of sequential, random, hot-spot"),
        }
    }
}

impl Pattern {
    fn next(self, last: usize, pages: usize, random: &mut Random) -> usize {
        match self {
            Self::Sequential => (last + 1) % pages,
            Self::Random => random.below(pages),
            Self::HotSpot if random.percent(HOT_WRITES_PERCENT) => {
                random.below((pages * HOT_PAGES_PERCENT / 100).max(1))
            }
            Self::HotSpot => random.below(pages),
        }
    }
}

impl Silent {
    /// From an amount and the name of what it is a percentage of.
    ///
    /// # Errors
    /// A name that is neither `stores` nor `pages`.
    pub fn new(percent: u32, of: &str) -> Result<Self, &'static str> {
        match of {
            "stores" => Ok(Self::Stores(percent)),
            "pages" => Ok(Self::Pages(percent)),
            _ => Err("is neither stores nor pages"),
        }
    }

    fn next(self, page: usize, random: &mut Random) -> bool {
        match self {
            Self::Stores(percent) => random.percent(percent),
            // The silent pages lie scattered, the same ones in every run.
            Self::Pages(percent) => mix(page as u64 + 1) % 100 < u64::from(percent),
        }
    }
}

/// One store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Store {
    /// The page it goes to.
    pub page: usize,
    /// Whether it writes what is there already.
    pub silent: bool,
}

/// The stores of `dirtier`, in order and without end: the same in every run, so that whoever knows how many were done
/// knows which pages they changed.
#[derive(Debug)]
pub struct Stores {
    pages: usize,
    pattern: Pattern,
    silent: Silent,
    random: Random,
    last: usize,
}

impl Stores {
    /// To so many pages, at least one.
    #[must_use]
    pub fn new(pages: usize, pattern: Pattern, silent: Silent) -> Self {
        Self { pages: pages.max(1), pattern, silent, random: Random::new(1), last: 0 }
    }
}

impl Iterator for Stores {
    type Item = Store;

    fn next(&mut self) -> Option<Store> {
        self.last = self.pattern.next(self.last, self.pages, &mut self.random);
        Some(Store { page: self.last, silent: self.silent.next(self.last, &mut self.random) })
    }
}

/// Counts pages whose content was changed since a mark, each once.
#[derive(Debug)]
pub struct Changed {
    /// The mark after which each page was changed last; 0 for never.
    after: Vec<u32>,
    mark: u32,
    count: usize,
}

impl Changed {
    /// None of so many pages.
    #[must_use]
    pub fn new(pages: usize) -> Self {
        Self { after: vec![0; pages], mark: 1, count: 0 }
    }

    /// A store was done.
    pub fn note(&mut self, store: Store) {
        if !store.silent && self.after[store.page] != self.mark {
            self.after[store.page] = self.mark;
            self.count += 1;
        }
    }

    /// How many since the last mark; this is the next one.
    pub fn mark(&mut self) -> usize {
        self.mark += 1;
        std::mem::take(&mut self.count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stores(pattern: Pattern, silent: Silent) -> Vec<Store> {
        Stores::new(1000, pattern, silent).take(50_000).collect()
    }

    fn share(stores: &[Store], of: impl Fn(&Store) -> bool) -> f64 {
        stores.iter().filter(|store| of(store)).count() as f64 / stores.len() as f64
    }

    #[test]
    fn each_pattern_goes_where_its_name_says() {
        let silent = Silent::Stores(0);
        let in_turn = stores(Pattern::Sequential, silent);
        assert!(in_turn.windows(2).all(|pair| pair[1].page == (pair[0].page + 1) % 1000));
        let first_tenth = |pattern| share(&stores(pattern, silent), |store| store.page < 100);
        assert!((0.08..0.12).contains(&first_tenth(Pattern::Random)));
        assert!((0.89..0.93).contains(&first_tenth(Pattern::HotSpot)));
    }

    #[test]
    fn the_silent_share_is_met_by_stores_and_by_pages() {
        for percent in [0, 20, 50, 68, 95, 100] {
            for silent in [Silent::Stores(percent), Silent::Pages(percent)] {
                let found = 100.0 * share(&stores(Pattern::Random, silent), |store| store.silent);
                assert!((found - f64::from(percent)).abs() < 3.0, "{silent:?}: {found}");
            }
        }
    }

    #[test]
    fn a_page_that_is_silent_is_always_silent() {
        let mut kinds = vec![None; 1000];
        for store in stores(Pattern::Random, Silent::Pages(50)) {
            assert_eq!(*kinds[store.page].get_or_insert(store.silent), store.silent);
        }
    }

    #[test]
    fn the_same_stores_come_again() {
        let silent = Silent::Stores(20);
        assert_eq!(stores(Pattern::HotSpot, silent), stores(Pattern::HotSpot, silent));
    }

    #[test]
    fn changed_pages_count_once_between_two_marks_and_silent_stores_not_at_all() {
        let mut changed = Changed::new(3);
        for (page, silent) in [(0, false), (0, false), (1, true), (2, false)] {
            changed.note(Store { page, silent });
        }
        assert_eq!(changed.mark(), 2);
        changed.note(Store { page: 0, silent: false });
        assert_eq!(changed.mark(), 1);
        assert_eq!(changed.mark(), 0);
    }
}
