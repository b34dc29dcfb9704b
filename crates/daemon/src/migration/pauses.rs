//! Pauses between two attempts at work that must succeed in the end.

use std::time::Duration;

/// The first pause between two attempts; each is twice as long as the one before.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
/// The longest in the first minute: where the guest was taken it runs there, and waits for pages of here until the
/// answer is known.
const LONGEST_AT_FIRST: Duration = Duration::from_millis(500);
/// How long that limit is in force.
const AT_FIRST: Duration = Duration::from_secs(60);
/// The longest pause afterwards.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// The pauses between attempts. Times are counted from the first attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pauses {
    next: Duration,
}

impl Default for Pauses {
    fn default() -> Self {
        Self { next: FIRST_PAUSE }
    }
}

impl Pauses {
    /// The pause before the next attempt; a person who is in a hurry ends it early.
    #[must_use]
    pub fn next(&self) -> Duration {
        self.next
    }

    /// A pause has ended, because of a hurry or by itself. Who is in a hurry expects the attempt to work: should it
    /// fail, another follows as soon as at first.
    pub fn over(&mut self, hurried: bool, tried_for: Duration) {
        let longest = if tried_for < AT_FIRST { LONGEST_AT_FIRST } else { LONGEST_PAUSE };
        self.next = if hurried { FIRST_PAUSE } else { (self.next * 2).min(longest) };
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// When attempts were made on a simulated clock, each of which takes `cost`, up to the first that is made `until`
    /// or later. Hurries come at their moments; one that comes during an attempt ends the pause behind it.
    fn attempts(until: Duration, cost: Duration, hurries: &[Duration]) -> Vec<Duration> {
        let (mut now, mut pauses, mut made) = (Duration::ZERO, Pauses::default(), Vec::new());
        let mut hurries = hurries.iter().copied().peekable();
        loop {
            made.push(now);
            if now >= until {
                return made;
            }
            now += cost;
            let end = now + pauses.next();
            let hurry = hurries.next_if(|at| *at < end);
            now = hurry.map_or(end, |at| at.max(now));
            while hurries.next_if(|at| *at <= now).is_some() {}
            pauses.over(hurry.is_some(), now);
        }
    }

    #[test]
    fn a_peer_that_is_back_within_a_minute_is_asked_within_half_a_second() {
        let (mut asked_for, mut pauses) = (Duration::ZERO, Pauses::default());
        while asked_for < AT_FIRST {
            assert!(pauses.next() <= Duration::from_millis(500), "{pauses:?} after {asked_for:?}");
            asked_for += pauses.next();
            pauses.over(false, asked_for);
        }
        for _ in 0..6 {
            pauses.over(false, asked_for);
        }
        assert_eq!(pauses.next(), LONGEST_PAUSE, "nobody is asked twice a second for days");
    }

    #[test]
    fn a_clock_that_jumps_lengthens_a_pause_no_more_than_time_that_passes() {
        let mut pauses = Pauses::default();
        pauses.over(false, Duration::from_secs(86_400));
        assert_eq!(pauses.next(), FIRST_PAUSE * 2);
        for _ in 0..100 {
            pauses.over(false, Duration::ZERO);
        }
        assert_eq!(pauses.next(), LONGEST_AT_FIRST, "the clock stands still");
    }

    #[test]
    fn who_is_in_a_hurry_is_served_at_once_and_waits_little_afterwards() {
        let day = Duration::from_secs(86_400);
        let hurry = day - Duration::from_secs(1);
        let made = attempts(day, Duration::ZERO, &[hurry]);
        let served = made.iter().position(|at| *at == hurry).expect("at once");
        assert_eq!(made[served + 1] - hurry, FIRST_PAUSE);
    }

    proptest! {
        #[test]
        fn whoever_comes_back_is_asked_soon_and_nobody_is_asked_all_the_time(
            back in 0u64..100_000_000, cost in 0u64..2_000_000,
            hurries in prop::collection::vec(0u64..100_000_000, 0..4),
        ) {
            let (back, cost) = (Duration::from_micros(back), Duration::from_micros(cost));
            let mut hurries: Vec<_> = hurries.into_iter().map(Duration::from_micros).collect();
            hurries.sort();
            let made = attempts(back, cost, &hurries);
            let late = *made.last().unwrap() - back;
            let longest = if back < AT_FIRST { LONGEST_AT_FIRST } else { LONGEST_PAUSE };
            prop_assert!(late <= longest + cost, "{late:?} after {back:?}: {made:?}");
            let soon = made.windows(2).filter(|pair| pair[1] - pair[0] < FIRST_PAUSE).count();
            prop_assert!(soon <= hurries.len(), "{made:?} with {hurries:?}");
        }
    }
}
