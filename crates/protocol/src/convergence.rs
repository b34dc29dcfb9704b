//! When to stop the guest: a pure function of what was measured.

use std::time::Duration;

/// What the user asked for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Goal {
    /// The longest pause.
    pub downtime_limit: Duration,
    /// When to stop trying; never where `None`.
    pub timeout: Option<Duration>,
    /// What to do then.
    pub force_on_timeout: bool,
}

/// What was measured up to the end of a round.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Measured {
    /// Rounds done.
    pub rounds: u32,
    /// Since the migration began.
    pub elapsed: Duration,
    /// Pages to send if the guest stopped now.
    pub pages_left: u64,
    /// Pages this machine can send per second, by the rounds so far.
    pub pages_per_s: f64,
    /// What the devices took, or are expected to take.
    pub device_time: Duration,
    /// What the pause was predicted to be after the round before.
    pub previous_prediction: Option<Duration>,
}

/// What to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// Another round.
    Round,
    /// Stop the guest.
    Switchover,
    /// It does not converge, and the time is up.
    GiveUp,
}

/// Rounds beyond which a pause below the limit is not made still shorter.
pub const MAX_POLISHING_ROUNDS: u32 = 30;
/// A pause below this is not made shorter by another round: the devices take as long.
pub const SHORT_ENOUGH: Duration = Duration::from_millis(2);
/// A round that shortens the predicted pause by less than this share is the last.
pub const WORTHWHILE: f64 = 0.1;

/// The pause to expect if the guest stopped now: pages left ÷ measured throughput + the devices' time.
#[must_use]
pub fn predicted_downtime(measured: &Measured) -> Duration {
    let pages = if measured.pages_left == 0 { 0.0 } else { measured.pages_left as f64 / measured.pages_per_s.max(1.0) };
    Duration::from_secs_f64(pages.min(1e9)) + measured.device_time
}

/// Decides after a round.
///
/// 1. The predicted pause is within the limit: stop the guest, unless another round is likely to make the pause shorter still
///    (the last one did, by [`WORTHWHILE`]) and the pages take longer than [`SHORT_ENOUGH`].
/// 2. The time is up: stop it anyway, or give up, as asked.
/// 3. Else another round.
#[must_use]
pub fn decide(goal: &Goal, measured: &Measured) -> Decision {
    let predicted = predicted_downtime(measured);
    let timed_out = goal.timeout.is_some_and(|timeout| measured.elapsed >= timeout);
    if predicted <= goal.downtime_limit {
        let pages_time = predicted.saturating_sub(measured.device_time);
        let improving = measured
            .previous_prediction
            .is_none_or(|before| predicted.as_secs_f64() < before.as_secs_f64() * (1.0 - WORTHWHILE));
        let polish = improving && pages_time > SHORT_ENOUGH && measured.rounds < MAX_POLISHING_ROUNDS && !timed_out;
        return if polish { Decision::Round } else { Decision::Switchover };
    }
    match (timed_out, goal.force_on_timeout) {
        (false, _) => Decision::Round,
        (true, true) => Decision::Switchover,
        (true, false) => Decision::GiveUp,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOAL: Goal = Goal { downtime_limit: Duration::from_millis(300), timeout: None, force_on_timeout: false };

    fn measured(pages_left: u64, previous_ms: Option<u64>) -> Measured {
        Measured {
            rounds: 3,
            elapsed: Duration::from_secs(10),
            pages_left,
            pages_per_s: 30_000.0,
            device_time: Duration::from_millis(5),
            previous_prediction: previous_ms.map(Duration::from_millis),
        }
    }

    /// A guest that writes at a steady rate over a working set, on a simulated link and clock.
    fn simulate(
        goal: &Goal,
        write_pages_per_s: f64,
        working_set: f64,
        link_pages_per_s: f64,
    ) -> (Decision, Duration, u32) {
        let (mut left, mut elapsed, mut previous) = (262_144.0, Duration::ZERO, None);
        for rounds in 1..10_000 {
            let round = Duration::from_secs_f64(left / link_pages_per_s);
            elapsed += round;
            left = working_set * (1.0 - (-write_pages_per_s * round.as_secs_f64() / working_set).exp());
            let measured = Measured {
                rounds,
                elapsed,
                pages_left: left as u64,
                pages_per_s: link_pages_per_s,
                device_time: Duration::from_millis(5),
                previous_prediction: previous,
            };
            previous = Some(predicted_downtime(&measured));
            match decide(goal, &measured) {
                Decision::Round => {}
                decision => return (decision, previous.unwrap(), rounds),
            }
        }
        panic!("it never decides");
    }

    #[test]
    fn an_idle_guest_is_stopped_at_once() {
        assert_eq!(decide(&GOAL, &measured(10, None)), Decision::Switchover);
    }

    #[test]
    fn a_pause_within_the_limit_is_made_shorter_while_rounds_pay() {
        assert_eq!(decide(&GOAL, &measured(3_000, Some(2_000))), Decision::Round);
        assert_eq!(decide(&GOAL, &measured(3_000, Some(105))), Decision::Switchover);
    }

    #[test]
    fn a_slow_writer_ends_far_below_the_limit() {
        let (decision, pause, _) = simulate(&GOAL, 3_000.0, 60_000.0, 30_000.0);
        assert_eq!(decision, Decision::Switchover);
        assert!(pause < Duration::from_millis(10), "{pause:?}");
    }

    #[test]
    fn a_writer_above_the_link_rate_ends_by_timeout_as_asked() {
        let timeout = Some(Duration::from_secs(60));
        let cancel = Goal { timeout, ..GOAL };
        assert_eq!(simulate(&cancel, 120_000.0, 200_000.0, 30_000.0).0, Decision::GiveUp);
        let force = Goal { timeout, force_on_timeout: true, ..GOAL };
        assert_eq!(simulate(&force, 120_000.0, 200_000.0, 30_000.0).0, Decision::Switchover);
    }

    #[test]
    fn polishing_ends() {
        let (_, _, rounds) =
            simulate(&Goal { downtime_limit: Duration::from_secs(3600), ..GOAL }, 29_900.0, 1e9, 30_000.0);
        assert!(rounds <= MAX_POLISHING_ROUNDS + 1);
    }

    #[test]
    fn no_throughput_is_no_division_by_zero() {
        let stuck = Measured { pages_per_s: 0.0, ..measured(1 << 40, None) };
        assert!(predicted_downtime(&stuck) > Duration::from_secs(1_000_000));
        assert_eq!(decide(&GOAL, &stuck), Decision::Round);
    }
}
