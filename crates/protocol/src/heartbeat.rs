//! Signs of life between the two hosts while a guest's pages follow it: when the source gives one, and when the
//! destination misses them.
//!
//! The source asks the destination how far it is, about twice a second, beside the windows of its push. A destination
//! that does not answer is a lost link: a guest there may be waiting for a page. A source that has not asked for a
//! while is not there: then people are told that the guest's pages wait for it.
//!
//! There is no clock here: the caller says what time it is, counted from any moment that stays the same.

use std::time::Duration;

/// How often the destination is asked how far it is.
const PERIOD: Duration = Duration::from_millis(500);
/// How long it may take to say so. A link that is lost should be noticed soon.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// A source that has said nothing for so long is not there.
const SILENCE: Duration = Duration::from_secs(3);

/// The source's signs of life.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Heartbeat {
    last: Duration,
}

impl Heartbeat {
    /// The session began now: that was a sign of life.
    #[must_use]
    pub fn new(now: Duration) -> Self {
        Self { last: now }
    }

    /// Whether the destination is to be asked.
    #[must_use]
    pub fn is_due(&self, now: Duration) -> bool {
        now.saturating_sub(self.last) >= PERIOD
    }

    /// The destination has answered.
    pub fn answered(&mut self, now: Duration) {
        self.last = now;
    }

    /// How long the source may sleep that has something else to do after `other`.
    #[must_use]
    pub fn sleep(other: Duration) -> Duration {
        other.min(PERIOD)
    }
}

/// For how long the destination has been alone with a guest that misses pages, where its source said something last so
/// long ago; `None` where the source is there. One that is not `attached` has ended its session.
#[must_use]
pub fn alone(silent: Duration, attached: bool) -> Option<Duration> {
    (!attached || silent > SILENCE).then_some(silent)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: Duration = Duration::from_millis(1);
    /// The longest window of a push.
    const WINDOW: Duration = Duration::from_millis(400);

    /// A source, on a simulated clock: its windows are so long, and the destination's answers take so long, both in
    /// turns. It is lost at a moment. When the destination heard it.
    fn heard(windows: &[Duration], answers: &[Duration], lost: Duration) -> Vec<Duration> {
        let (mut now, mut heartbeat, mut heard) =
            (Duration::ZERO, Heartbeat::new(Duration::ZERO), vec![Duration::ZERO]);
        let (mut windows, mut answers) = (windows.iter().cycle(), answers.iter().cycle());
        loop {
            now += Heartbeat::sleep(*windows.next().unwrap());
            if now >= lost {
                return heard;
            }
            if heartbeat.is_due(now) {
                heard.push(now);
                now += *answers.next().unwrap();
                heartbeat.answered(now);
            }
        }
    }

    /// The first moment at which the destination says that it is alone.
    fn said_alone(heard: &[Duration]) -> Duration {
        let misses = |pair: &[Duration]| alone(pair[1] - pair[0], true).is_some();
        let last = heard.windows(2).find(|pair| misses(pair)).map_or(*heard.last().unwrap(), |pair| pair[0]);
        last + SILENCE + Duration::from_nanos(1)
    }

    #[test]
    fn a_destination_that_answers_at_once_is_asked_about_twice_a_second() {
        let heard = heard(&[20 * MS], &[MS], Duration::from_secs(100));
        assert!((185..=200).contains(&heard.len()), "{}", heard.len());
    }

    #[test]
    fn it_is_asked_at_the_end_of_the_period_and_not_a_moment_earlier() {
        let heartbeat = Heartbeat::new(MS);
        assert!(!heartbeat.is_due(MS), "the clock stands still");
        assert!(!heartbeat.is_due(Duration::ZERO), "the clock is behind");
        assert!(!heartbeat.is_due(MS + PERIOD - Duration::from_nanos(1)));
        assert!(heartbeat.is_due(MS + PERIOD));
    }

    #[test]
    fn who_overslept_asks_once_and_makes_up_for_nothing() {
        let mut heartbeat = Heartbeat::new(Duration::ZERO);
        let late = Duration::from_secs(3600);
        assert!(heartbeat.is_due(late));
        heartbeat.answered(late);
        assert!(!heartbeat.is_due(late + PERIOD - MS));
    }

    #[test]
    fn a_destination_that_takes_its_time_to_answer_is_not_asked_again_the_moment_it_has() {
        let slow = heard(&[MS], &[4000 * MS], Duration::from_secs(100));
        assert!(slow.windows(2).skip(1).all(|pair| pair[1] - pair[0] >= PERIOD + 4000 * MS), "{slow:?}");
    }

    #[test]
    fn no_window_of_a_push_is_slept_through_for_longer_than_a_period() {
        assert_eq!(Heartbeat::sleep(Duration::from_secs(10)), PERIOD);
        assert_eq!(Heartbeat::sleep(MS), MS);
        assert_eq!(Heartbeat::sleep(Duration::ZERO), Duration::ZERO, "a window that is over is seen to at once");
    }

    #[test]
    fn a_source_is_missed_after_its_silence_and_at_once_where_its_session_has_ended() {
        assert_eq!(alone(Duration::ZERO, true), None);
        assert_eq!(alone(SILENCE, true), None);
        let missed = SILENCE + Duration::from_nanos(1);
        assert_eq!(alone(missed, true), Some(missed));
        assert_eq!(alone(Duration::ZERO, false), Some(Duration::ZERO));
    }

    #[test]
    fn a_destination_notices_a_lost_source_before_the_source_would_have_given_it_up() {
        let last = Duration::from_secs(60);
        let heard = heard(&[20 * MS], &[MS], last);
        assert!(said_alone(&heard) < last + ANSWER_TIMEOUT);
    }

    proptest! {
        #[test]
        fn a_source_that_is_there_is_never_missed_and_one_that_is_lost_is_soon(
            windows in prop::collection::vec(0u64..=400_000, 1..20),
            answers in prop::collection::vec(0u64..2_000_000, 1..20),
            lost in 1u64..60_000_000,
        ) {
            let micros = |times: &[u64]| times.iter().map(|time| Duration::from_micros(*time + 1)).collect::<Vec<_>>();
            let lost = Duration::from_micros(lost);
            let heard = heard(&micros(&windows), &micros(&answers), lost);
            let said = said_alone(&heard);
            prop_assert!(said > lost, "{said:?} of {lost:?}: {heard:?}");
            let longest = PERIOD + WINDOW + Duration::from_secs(2) + MS;
            prop_assert!(said <= lost + SILENCE + MS && lost <= heard.last().copied().unwrap() + longest);
        }
    }
}
