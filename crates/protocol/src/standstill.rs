//! When a peer that is waited for counts as standing still: a slow one is waited for as long as it gets on.
//!
//! There is no clock here: the caller says what time it is, counted from any moment that stays the same.

use std::time::Duration;

/// A wait for a peer, as a count shows that it gets on: of bytes it has taken, or of frames that came from it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standstill {
    /// The least by which the count must grow to be progress.
    step: u64,
    limit: Duration,
    /// The count at the latest progress, and when that was.
    seen: u64,
    since: Duration,
}

impl Standstill {
    /// A wait that begins now, with the count where it is, for as long as it grows by `step` within each `limit`.
    #[must_use]
    pub fn new(step: u64, limit: Duration, count: u64, now: Duration) -> Self {
        Self { step, limit, seen: count, since: now }
    }

    /// Whether there was no progress for longer than the limit, the count being this now.
    #[must_use]
    pub fn is_over(&mut self, count: u64, now: Duration) -> bool {
        if count >= self.seen.saturating_add(self.step) {
            (self.seen, self.since) = (count, now);
            return false;
        }
        now.saturating_sub(self.since) > self.limit
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(30);
    const LOOK: Duration = Duration::from_millis(100);
    const STEP: u64 = 64 << 10;

    /// How long a peer is waited for on a simulated clock that takes in so many bytes per second, and has
    /// answered after `answers`.
    fn waits(bytes_per_s: u64, answers: Duration) -> Result<Duration, Duration> {
        let (mut now, mut stall) = (Duration::ZERO, Standstill::new(STEP, LIMIT, 0, Duration::ZERO));
        while now < answers {
            now += LOOK;
            if stall.is_over((bytes_per_s as f64 * now.as_secs_f64()) as u64, now) {
                return Err(now);
            }
        }
        Ok(now)
    }

    #[test]
    fn a_slow_peer_is_waited_for_as_long_as_it_gets_on() {
        assert_eq!(waits(10_000, Duration::from_secs(86_400)), Ok(Duration::from_secs(86_400)));
    }

    #[test]
    fn a_byte_at_a_time_is_no_progress() {
        assert_eq!(waits(1000, Duration::from_secs(86_400)), Err(LIMIT + LOOK));
    }

    #[test]
    fn who_stands_still_is_given_up_after_the_limit_and_not_in_the_instant_in_which_it_ends() {
        let mut stall = Standstill::new(1, LIMIT, 7, LOOK);
        assert!(!stall.is_over(7, LOOK), "the clock stands still");
        assert!(!stall.is_over(7, Duration::ZERO), "the clock is behind");
        assert!(!stall.is_over(7, LOOK + LIMIT), "the end in the same instant");
        assert!(stall.is_over(7, LOOK + LIMIT + Duration::from_nanos(1)));
    }

    #[test]
    fn progress_in_the_same_look_as_the_end_of_the_limit_counts() {
        let mut stall = Standstill::new(1, LIMIT, 0, Duration::ZERO);
        let tomorrow = Duration::from_secs(86_400);
        assert!(!stall.is_over(1, tomorrow), "the clock has jumped, and there is progress");
        assert!(!stall.is_over(1, tomorrow + LIMIT));
        assert!(stall.is_over(1, tomorrow + LIMIT * 2));
    }

    #[test]
    fn progress_is_counted_from_the_latest_and_not_from_look_to_look() {
        let mut stall = Standstill::new(10, LIMIT, 0, Duration::ZERO);
        for second in 1..=30 {
            assert!(!stall.is_over(second / 4, Duration::from_secs(second)));
        }
        assert!(!stall.is_over(10, Duration::from_secs(31)), "ten in all");
        assert!(!stall.is_over(19, Duration::from_secs(61)));
        assert!(stall.is_over(19, Duration::from_secs(62)));
    }

    #[test]
    fn a_count_that_ends_at_its_largest_or_falls_is_no_progress() {
        let mut stall = Standstill::new(STEP, LIMIT, u64::MAX - 1, Duration::ZERO);
        assert!(stall.is_over(u64::MAX - 1, LIMIT * 2));
        assert!(stall.is_over(0, LIMIT * 2));
    }

    proptest! {
        #[test]
        fn it_is_over_exactly_where_the_limit_passes_without_a_step(
            looks in prop::collection::vec((0u64..20_000, 0u64..100_000), 1..100),
        ) {
            let (mut now, mut count) = (Duration::ZERO, 0);
            let mut stall = Standstill::new(STEP, LIMIT, 0, now);
            let (mut latest, mut at) = (0, now);
            for (ms, more) in looks {
                (now, count) = (now + Duration::from_millis(ms), count + more);
                let progress = count - latest >= STEP;
                if progress {
                    (latest, at) = (count, now);
                }
                prop_assert_eq!(stall.is_over(count, now), !progress && now - at > LIMIT);
            }
        }
    }
}
