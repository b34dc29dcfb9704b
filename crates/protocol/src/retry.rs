//! When a destination that was lost after the switchover is tried again, and when it counts as lost.
//!
//! The guest there waits for pages that only the source has, so it is tried for ever: soon at first, because most
//! breaks are short, and every other second later. Where the destination has every page already, only the farewell is
//! missing, and that is given up after a while.

use std::time::Duration;

/// The first pause between two attempts; each is twice as long as the one before.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// The longest pause.
pub const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// A destination that has not answered for this time counts as lost: a daemon that is started anew is there sooner.
pub const LOST: Duration = Duration::from_secs(3);
/// How long the source tries to say goodbye to a destination that has every page.
pub const FAREWELL: Duration = Duration::from_secs(20);

/// The attempts after one break. Times are counted from the break.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Retry {
    pause: Duration,
    lost: bool,
    all_there: bool,
}

/// What follows an attempt that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Failed {
    /// The pause before the next one; news of the destination ends it early.
    pub pause: Duration,
    /// Whether the destination counts as lost from now on. Said once.
    pub newly_lost: bool,
}

impl Retry {
    /// No attempt yet; `all_there` is whether the destination has every page.
    #[must_use]
    pub fn new(all_there: bool) -> Self {
        Self { pause: FIRST_PAUSE, lost: false, all_there }
    }

    /// Whether another attempt is worth making.
    #[must_use]
    pub fn goes_on(&self, since: Duration) -> bool {
        !self.all_there || since <= FAREWELL
    }

    /// An attempt has failed.
    pub fn failed(&mut self, since: Duration) -> Failed {
        let newly_lost = !self.lost && since >= LOST;
        self.lost |= newly_lost;
        let pause = self.pause;
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        Failed { pause, newly_lost }
    }

    /// Whether the destination counts as lost.
    #[must_use]
    pub fn lost(&self) -> bool {
        self.lost
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What was seen of one break on a simulated clock.
    #[derive(Debug, Default)]
    struct Seen {
        attempts: u32,
        lost_at: Vec<Duration>,
        resumed: Option<Duration>,
        gave_up: Option<Duration>,
    }

    /// A destination that answers again `away` after the break; an attempt that finds nobody takes `cost`.
    fn simulate(all_there: bool, away: Duration, cost: Duration) -> Seen {
        let (mut retry, mut now, mut seen) = (Retry::new(all_there), Duration::ZERO, Seen::default());
        loop {
            if !retry.goes_on(now) {
                seen.gave_up = Some(now);
                return seen;
            }
            seen.attempts += 1;
            if now >= away {
                seen.resumed = Some(now);
                return seen;
            }
            now += cost;
            let Failed { pause, newly_lost } = retry.failed(now);
            if newly_lost {
                seen.lost_at.push(now);
            }
            assert_eq!(retry.lost(), !seen.lost_at.is_empty());
            now += pause;
        }
    }

    #[test]
    fn a_break_of_a_tenth_of_a_second_costs_little_more_than_that() {
        let seen = simulate(false, Duration::from_millis(100), Duration::from_millis(1));
        assert!(seen.resumed.unwrap() < Duration::from_millis(200), "{seen:?}");
        assert!(seen.lost_at.is_empty());
    }

    #[test]
    fn a_farewell_is_not_tried_for_ever() {
        let seen = simulate(true, Duration::from_secs(3600), Duration::from_millis(10));
        assert!(seen.gave_up.unwrap() < FAREWELL + LONGEST_PAUSE + Duration::from_secs(1), "{seen:?}");
    }

    proptest! {
        #[test]
        fn however_long_it_is_away_it_is_found_again_soon(
            away in 0u64..100_000_000, cost in 0u64..5_000_000,
        ) {
            let (away, cost) = (Duration::from_micros(away), Duration::from_micros(cost));
            let seen = simulate(false, away, cost);
            let late = seen.resumed.expect("it is tried for ever") - away;
            prop_assert!(late <= LONGEST_PAUSE + cost, "{seen:?}");
            // Nor is it asked all the time.
            prop_assert!(f64::from(seen.attempts) <= 8.0 + away.as_secs_f64() / LONGEST_PAUSE.as_secs_f64());
            // It is said once that it is lost, and not before.
            prop_assert!(seen.lost_at.len() <= 1 && seen.lost_at.iter().all(|at| *at >= LOST));
            let long = away > LOST + LONGEST_PAUSE + cost;
            prop_assert!(!long || !seen.lost_at.is_empty(), "{seen:?}");
        }
    }
}
