//! The ideal run of a program of whose memory a part is elsewhere: nobody replaces pages better, the link is never idle
//! while it could carry what is missing, and a page that has to be waited for costs a bare request and no more.

use std::collections::BTreeSet;
use std::ops::Range;

/// A page's body, and its digest in the frame that carries it.
const PAGE_BYTES: f64 = 4096.0 + 8.0;
/// A full packet on an Ethernet, and what TCP carries in it.
const PACKET_BYTES: f64 = 1514.0;
const PAYLOAD_BYTES: f64 = 1448.0;

/// How long a page takes on a link of that rate, microseconds: a page among others, whose packets are full.
pub(super) fn wire_us(link_bytes_per_s: u64) -> f64 {
    PAGE_BYTES * PACKET_BYTES / PAYLOAD_BYTES / link_bytes_per_s as f64 * 1e6
}

/// How many of the `counted` accesses find their page missing where so many pages have room, there is none at first,
/// and the page that is wanted last makes room each time, by what all `accesses` want: no replacement has fewer
/// misses (Belady).
pub(super) fn least_misses(accesses: &[u32], room: usize, counted: Range<usize>) -> usize {
    let next = next_accesses(accesses);
    // Each page that is here, by the place of the next access to it.
    let mut here = BTreeSet::new();
    let mut misses = 0;
    for (at, next) in next.into_iter().enumerate() {
        if !here.remove(&at) {
            misses += usize::from(counted.contains(&at));
            if here.len() >= room {
                here.pop_last();
            }
        }
        here.insert(next);
    }
    misses
}

/// The place of the next access to each access's page. Where there is none it is behind all of them, and no other's.
fn next_accesses(accesses: &[u32]) -> Vec<usize> {
    let pages = accesses.iter().max().map_or(0, |last| *last as usize + 1);
    let mut known = vec![None; pages];
    let mut next: Vec<usize> = (accesses.len()..2 * accesses.len()).collect();
    for (at, page) in accesses.iter().enumerate().rev() {
        if let Some(later) = known[*page as usize].replace(at) {
            next[at] = later;
        }
    }
    next
}

/// What an ideal run is made of, for each word that it reads.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ideal {
    /// The time where all is here, microseconds.
    pub(super) local_us: f64,
    /// Words whose page is missing, of all.
    pub(super) misses: f64,
    /// Those of them that cannot be asked for before the word before is there.
    pub(super) dependent: f64,
    /// How long a page takes on the link.
    pub(super) wire_us: f64,
    /// How long a bare request takes.
    pub(super) bare_us: f64,
}

impl Ideal {
    /// The time of a word, microseconds.
    pub(super) fn us(&self) -> f64 {
        self.local_us + (self.misses * self.wire_us).max(self.dependent * self.bare_us)
    }
}

#[cfg(test)]
mod tests {
    use sterna_guest_programs::random::Random;

    use super::*;

    fn all(accesses: &[u32], room: usize) -> usize {
        least_misses(accesses, room, 0..accesses.len())
    }

    /// The fewest misses of any choice of pages that make room.
    fn by_trying(accesses: &[u32], room: usize, here: &[u32]) -> usize {
        let Some((page, rest)) = accesses.split_first() else { return 0 };
        if here.contains(page) {
            return by_trying(rest, room, here);
        }
        let with = |without: Option<usize>| -> Vec<u32> {
            let kept = here.iter().enumerate().filter(|(at, _)| Some(*at) != without).map(|(_, page)| *page);
            kept.chain([*page]).collect()
        };
        let choices: Vec<Option<usize>> =
            if here.len() < room { vec![None] } else { (0..here.len()).map(Some).collect() };
        1 + choices.into_iter().map(|gone| by_trying(rest, room, &with(gone))).min().unwrap_or(0)
    }

    /// Those of one that takes room from what was not used for longest.
    fn by_age(accesses: &[u32], room: usize) -> usize {
        let (mut here, mut misses): (Vec<u32>, usize) = (Vec::new(), 0);
        for page in accesses {
            match here.iter().position(|known| known == page) {
                Some(at) => drop(here.remove(at)),
                None => {
                    misses += 1;
                    if here.len() >= room {
                        here.remove(0);
                    }
                }
            }
            here.push(*page);
        }
        misses
    }

    fn drawn(random: &mut Random, pages: usize, length: usize) -> Vec<u32> {
        (0..length).map(|_| random.below(pages) as u32).collect()
    }

    #[test]
    fn no_choice_of_pages_has_fewer_misses() {
        let mut random = Random::new(1);
        for _ in 0..300 {
            let (pages, room) = (2 + random.below(4), 1 + random.below(3));
            let accesses = drawn(&mut random, pages, 10);
            assert_eq!(all(&accesses, room), by_trying(&accesses, room, &[]), "{accesses:?}, room for {room}");
        }
    }

    #[test]
    fn age_is_never_the_better_choice_and_more_room_never_the_worse() {
        let mut random = Random::new(2);
        for _ in 0..50 {
            let accesses = drawn(&mut random, 40, 400);
            let least: Vec<usize> = (1..=40).map(|room| all(&accesses, room)).collect();
            assert!(least.iter().zip(1..).all(|(misses, room)| *misses <= by_age(&accesses, room)), "{least:?}");
            assert!(least.is_sorted_by(|less, more| less >= more), "{least:?}");
            let distinct = accesses.iter().collect::<BTreeSet<_>>().len();
            assert_eq!(least.last(), Some(&distinct), "where all have room each is missing once");
        }
    }

    #[test]
    fn a_circle_of_pages_misses_the_share_that_has_no_room_and_by_age_all_of_it() {
        let (pages, rounds) = (100, 20);
        let accesses: Vec<u32> = (0..pages * rounds).map(|at| at % pages).collect();
        let counted = 5 * pages as usize..15 * pages as usize;
        let share = least_misses(&accesses, 25, counted.clone()) as f64 / counted.len() as f64;
        // Of the pages without room one has it each time, which is why it is not by all of them.
        assert!((share - 75.0 / 99.0).abs() < 0.01, "{share}");
        assert_eq!(by_age(&accesses, 25), accesses.len());
    }

    #[test]
    fn only_what_is_counted_counts_and_what_comes_after_it_is_known() {
        let accesses = [1, 2, 1, 2, 3, 1];
        assert_eq!(all(&accesses, 2), 3);
        assert_eq!(least_misses(&accesses, 2, 2..5), 1);
        assert_eq!(least_misses(&accesses, 2, 5..6), 0, "2 has made room for 3, as 1 is wanted again");
        assert_eq!(all(&[], 2), 0);
    }

    #[test]
    fn the_link_limits_what_can_be_asked_for_ahead_and_the_bare_request_what_cannot() {
        let ahead = Ideal { local_us: 2.0, misses: 0.5, dependent: 0.0, wire_us: 34.0, bare_us: 150.0 };
        assert_eq!(ahead.us(), 19.0);
        assert_eq!(Ideal { dependent: 0.5, ..ahead }.us(), 77.0);
        assert_eq!(Ideal { dependent: 0.1, ..ahead }.us(), 19.0);
        assert!((34.0..35.0).contains(&wire_us(125_000_000)), "{}", wire_us(125_000_000));
    }
}
