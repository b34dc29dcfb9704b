//! Pauses between two attempts at work that must succeed in the end.

use std::time::Duration;

/// The first pause between two attempts; each is twice as long as the one before.
pub const FIRST_PAUSE: Duration = Duration::from_millis(250);
/// The longest pause in the first minute: a guest that was taken runs there, and waits for pages from here until the
/// answer is known.
const LONGEST_AT_FIRST: Duration = Duration::from_millis(500);
/// How long that limit is in force.
const AT_FIRST: Duration = Duration::from_secs(60);
/// The longest pause afterwards.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// The pause after one of this length, when the attempts have gone on for this long.
#[must_use]
pub fn longer(pause: Duration, tried_for: Duration) -> Duration {
    (pause * 2).min(if tried_for < AT_FIRST { LONGEST_AT_FIRST } else { LONGEST_PAUSE })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_that_is_back_within_a_minute_is_asked_within_half_a_second() {
        let (mut asked_for, mut pause) = (Duration::ZERO, FIRST_PAUSE);
        while asked_for < AT_FIRST {
            assert!(pause <= Duration::from_millis(500), "{pause:?} after {asked_for:?}");
            asked_for += pause;
            pause = longer(pause, asked_for);
        }
        for _ in 0..6 {
            pause = longer(pause, asked_for);
        }
        assert_eq!(pause, LONGEST_PAUSE, "nobody is asked twice a second for days");
    }
}
