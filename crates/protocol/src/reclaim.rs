//! The pace at which free memory is taken from a running guest: in portions, with pauses between them.
//!
//! While a portion is taken its pages are write-protected, so a guest that allocates one of them waits until the
//! portion is done. Rules bound what that may cost, whatever the guest does:
//!
//! - **One wait** is bounded by about [`LONG_WORK`](crate::reclaim::LONG_WORK). The next portion is smaller where the
//!   work on a portion took longer, or where somebody waited for it; nobody waits longer than that work takes.
//! - **All waits together** take [`WAIT_SHARE`](crate::reclaim::WAIT_SHARE) of the time: the pause after a portion
//!   follows from the waits seen in it.
//! - **The work beside the guest** takes [`WORK_SHARE`](crate::reclaim::WORK_SHARE) of the host's processors: the pause
//!   after a portion is a multiple of the work on it.
//!
//! There is no clock here: the caller says how long things took.

use std::time::Duration;

/// Pages of the smallest portion.
pub const LEAST_PAGES: u64 = 128;
/// Pages of the largest portion: 16 MiB.
pub const MOST_PAGES: u64 = 4096;
/// Pages of the first portion.
pub const FIRST_PAGES: u64 = 512;
/// The cost of a run beside its pages, in pages: each run is protected, discarded and released by calls of its own.
pub const RUN_PAGES: u64 = 16;
/// The most work on a portion; a portion with more work is followed by a smaller one.
pub const LONG_WORK: Duration = Duration::from_millis(8);
/// The share of the time that all waits together may take.
pub const WAIT_SHARE: f64 = 0.05;
/// The share of all of the host's processors that the work may take. Where all of them work for guests, the guests lose
/// this share. With many processors one of them does the work, and still rests.
pub const WORK_SHARE: f64 = 0.08;
/// The least pause after a portion, as a multiple of the work on it.
pub const LEAST_REST: f64 = 0.5;
/// The longest pause.
pub const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// A portion: what was seen of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Portion {
    /// The time of the work on it, without waiting.
    pub worked: Duration,
    /// The number of writes that waited for it.
    pub waits: u64,
    /// The longest of these waits.
    pub longest_wait: Duration,
}

/// The size of portions and the pauses between them.
#[derive(Debug, Clone, PartialEq)]
pub struct Rate {
    pages: u64,
    /// The pause after a portion, as a multiple of the work on it.
    rest: f64,
}

impl Rate {
    /// A pace for a host with this many processors.
    #[must_use]
    pub fn new(processors: usize) -> Self {
        let rest = 1.0 / (WORK_SHARE * processors.max(1) as f64) - 1.0;
        Self { pages: FIRST_PAGES, rest: rest.max(LEAST_REST) }
    }

    /// The largest size of the next portion: pages, where each run counts [`RUN_PAGES`] more.
    #[must_use]
    pub fn portion(&self) -> u64 {
        self.pages
    }

    /// Takes in what was seen of a portion, and says how long to pause before the next.
    pub fn after(&mut self, portion: &Portion) -> Duration {
        let smaller = portion.waits > 0 || portion.worked > LONG_WORK;
        self.pages = if smaller { self.pages / 2 } else { self.pages * 2 }.clamp(LEAST_PAGES, MOST_PAGES);
        let waited = portion.longest_wait.as_secs_f64() * portion.waits as f64;
        let pause = (portion.worked.as_secs_f64() * self.rest).max(waited / WAIT_SHARE);
        Duration::from_secs_f64(pause.min(LONGEST_PAUSE.as_secs_f64()))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// A guest on a simulated clock: a portion takes 1 ms and 1 µs a page, and each page has the chance to be wanted
    /// meanwhile.
    struct Guest {
        rate: Rate,
        now: Duration,
        waited: Duration,
        taken: u64,
        chance: f64,
        owed: f64,
    }

    impl Guest {
        fn new(chance: f64) -> Self {
            let (now, waited) = (Duration::ZERO, Duration::ZERO);
            Self { rate: Rate::new(64), now, waited, taken: 0, chance, owed: 0.0 }
        }

        fn run(mut self, until: Duration) -> Self {
            while self.now < until {
                let pages = self.rate.portion();
                let held = MS + Duration::from_micros(pages);
                self.owed += self.chance * pages as f64;
                let waits = self.owed as u64;
                self.owed -= waits as f64;
                self.waited += held * waits as u32;
                self.taken += pages;
                self.now += held + self.rate.after(&Portion { worked: held, waits, longest_wait: held });
            }
            self
        }
    }

    #[test]
    fn a_quiet_guest_loses_its_free_memory_quickly_and_a_busy_one_little_time() {
        let quiet = Guest::new(0.0).run(Duration::from_secs(1));
        assert_eq!((quiet.waited, quiet.rate.portion()), (Duration::ZERO, MOST_PAGES));
        assert!(quiet.taken > 400_000, "a GiB takes less than a second: {} pages", quiet.taken);
        for chance in [0.000_1, 0.001, 0.01, 0.1] {
            let busy = Guest::new(chance).run(Duration::from_secs(60));
            let share = busy.waited.as_secs_f64() / busy.now.as_secs_f64();
            assert!(share < WAIT_SHARE * 1.1, "{chance}: {share} of the time");
            assert!(busy.taken > 0 && busy.taken < quiet.taken * 60, "{chance}: {}", busy.taken);
        }
    }

    #[test]
    fn portions_shrink_where_they_take_long_and_grow_again() {
        let mut rate = Rate::new(1);
        for _ in 0..20 {
            rate.after(&Portion { worked: LONG_WORK * 2, waits: 0, longest_wait: Duration::ZERO });
        }
        assert_eq!(rate.portion(), LEAST_PAGES);
        for _ in 0..20 {
            rate.after(&Portion { worked: MS, waits: 0, longest_wait: Duration::ZERO });
        }
        assert_eq!(rate.portion(), MOST_PAGES);
    }

    #[test]
    fn work_takes_a_share_of_the_processors_and_one_of_many_rests_still() {
        let pause = |processors| {
            let mut rate = Rate::new(processors);
            rate.after(&Portion { worked: 8 * MS, waits: 0, longest_wait: Duration::ZERO })
        };
        assert_eq!([1, 2, 8].map(|processors| pause(processors).as_millis()), [92, 42, 4]);
        assert_eq!((pause(0), pause(64)), (pause(1), 4 * MS));
    }

    proptest! {
        #[test]
        fn whatever_is_seen_portions_and_pauses_stay_within_their_bounds(
            seen in prop::collection::vec((any::<u64>(), any::<u64>(), any::<u64>()), 1..50)
        ) {
            let mut rate = Rate::new(4);
            for (worked, waits, longest_wait) in seen {
                let worked = Duration::from_nanos(worked);
                let pause = rate.after(&Portion { worked, waits, longest_wait: Duration::from_nanos(longest_wait) });
                prop_assert!((LEAST_PAGES..=MOST_PAGES).contains(&rate.portion()));
                prop_assert!(pause <= LONGEST_PAUSE);
                prop_assert!(pause == LONGEST_PAUSE || pause.as_secs_f64() >= worked.as_secs_f64() * LEAST_REST);
            }
        }
    }
}
