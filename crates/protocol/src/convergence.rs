//! When to stop the guest, and what to do about one that writes faster than its pages go.

use std::time::Duration;

use sterna_api::options::OnTimeout;

use crate::throughput::Speed;

/// The limits that the user asked for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Goal {
    /// The longest pause.
    pub downtime_limit: Duration,
    /// The longest pause accepted where rounds do not reach the limit; the limit itself where `None`.
    pub downtime_ramp: Option<Duration>,
    /// The most of the guest's processor time that may be taken away, percent; none where `None`.
    pub throttle_percent: Option<u8>,
    /// When to stop trying; never where `None`.
    pub timeout: Option<Duration>,
    /// What to do when the timeout has passed.
    pub on_timeout: OnTimeout,
    /// Whether the rest of the pages may follow after the switchover, where rounds do not reach the limit.
    pub postcopy: bool,
    /// The number of rounds after which the other pages follow, whatever the rounds reached; none where `None`.
    pub rounds: Option<u32>,
}

impl Goal {
    /// Whether pages follow as soon as rounds are in vain: nothing else was asked for that may help them.
    #[must_use]
    pub fn turns_at_once(&self) -> bool {
        self.postcopy && self.rounds.is_none() && self.downtime_ramp.is_none() && self.throttle_percent.is_none()
    }
}

/// Measurements up to the end of a round.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Measured {
    /// The number of rounds done.
    pub rounds: u32,
    /// The time since the migration began.
    pub elapsed: Duration,
    /// Pages that would have to be sent if the guest stopped now, with those held back as hot and those skipped because
    /// they were written again.
    pub pages_left: u64,
    /// The speed at which they would go.
    pub speed: Speed,
    /// Whether rounds have shown the link's speed by now; else it is assumed.
    pub speed_is_known: bool,
    /// The time that the devices took, or are expected to take.
    pub device_time: Duration,
    /// Whether the guest is known to be too fast for rounds ([`Foresight`](crate::foresight::Foresight)).
    pub too_fast: bool,
}

impl Measured {
    /// The pause to expect if the guest stopped now: for the pages left, at the measured speed, and for the devices.
    #[must_use]
    pub fn predicted_downtime(&self) -> Duration {
        self.speed.time_for(self.pages_left) + self.device_time
    }
}

/// What to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// Another round. It takes at least `at_least`, up to the moment when written pages are collected.
    Round {
        /// Not zero where rounds move little and nothing improves: a stalled migration must not spin looking and
        /// arming.
        at_least: Duration,
    },
    /// Take this share of the guest's processor time away, then do another round.
    Throttle {
        /// Percent; more than was taken before, and at most the ceiling.
        percent: u8,
    },
    /// Stop the guest.
    Switchover,
    /// Stop the guest, and send the pages that are left once it runs at the destination.
    Postcopy(Because),
    /// Give up: the rounds do not converge, and the time is up.
    GiveUp,
}

/// Why the rest of the pages follows after the switchover.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Because {
    /// The user asked for it, after a number of rounds.
    Asked,
    /// The pause would be within the limit, and is shorter without them; rounds do not shorten it any more.
    Shorter,
    /// The guest writes so fast that rounds cannot reach the limit ([`Foresight`](crate::foresight::Foresight)).
    Foreseen,
    /// Rounds did not come nearer to the limit, and nothing else was left to try.
    Stalled,
    /// The time was up.
    TimedOut,
}

/// The most rounds in which a pause that is below the limit is made still shorter.
pub const MAX_POLISHING_ROUNDS: u32 = 30;
/// A pause below this is not made shorter by another round: the devices take as long.
pub const SHORT_ENOUGH: Duration = Duration::from_millis(2);
/// Pages that take longer than this follow a guest rather than have it stand still for them, where rounds do not make
/// them fewer: a user notices a request that takes so much longer.
pub const FOLLOWS: Duration = Duration::from_millis(20);
/// The share by which the pause must get shorter to count as progress.
pub const WORTHWHILE: f64 = 0.1;
/// Rounds without progress that make a stall. The round after a burst of writes makes up for it; after a third such
/// round it is no burst.
pub const STALL_ROUNDS: u32 = 3;
/// Rounds without progress that make a stall where the one before led to a step: the round after it ran under the step
/// from its beginning to its end, and shows whether it was enough.
pub const STEP_ROUNDS: u32 = 1;
/// Time without progress that makes a stall. Short rounds show only how the scheduler behaved.
pub const STALL_TIME: Duration = Duration::from_secs(2);
/// The least time of a round where nothing improves.
pub const STALLED_ROUND: Duration = Duration::from_millis(50);
/// The first step of throttling, percent. A smaller one hardly slows a guest that writes faster than the link carries.
pub const FIRST_THROTTLE: u8 = 20;
/// Each further step, percent.
pub const MORE_THROTTLE: u8 = 10;

/// The policy, with one `step` after each round. It has no clock, and knows only what it is told.
///
/// 1. Nothing is left: stop the guest, whatever the devices take.
/// 2. The predicted pause is within the accepted limit: stop it, unless another round is likely to make the pause
///    shorter still (the last one did, by [`WORTHWHILE`]), the pages take longer than [`SHORT_ENOUGH`], and neither the
///    time nor [`MAX_POLISHING_ROUNDS`] are up. Pages that then still take longer than [`FOLLOWS`] follow it, where
///    that is known and allowed.
/// 3. The time is up: do what the user asked for in this case. Or the rounds that the user asked for are done: the rest
///    follows in post-copy.
/// 4. Rounds are known to be in vain, and nothing is left to try but post-copy: the rest follows at once.
/// 5. A stall: the best predicted pause is no shorter, by [`WORTHWHILE`], for [`STALL_ROUNDS`] rounds (or
///    [`STEP_ROUNDS`]) and [`STALL_TIME`]. Progress counts and not time: a large guest on a slow link may take hours
///    and converge. Each stall leads to one step, while steps are left:
///    - the accepted limit is doubled until the shortest pause seen is within it, or until it is at the ramp's ceiling
///      (a limit below that pause would change nothing);
///    - then the guest is throttled by [`FIRST_THROTTLE`], then by [`MORE_THROTTLE`] more each time, up to its ceiling.
///
///    After that the rest follows in post-copy where that is allowed; else the rounds go on until the time is up.
///    Pauses from before a stall are no measure for later ones: a guest that became busier is compared with itself as
///    it is now.
/// 6. Else do another round.
#[derive(Debug, Clone, PartialEq)]
pub struct Convergence {
    goal: Goal,
    limit: Duration,
    throttle: u8,
    stalls: u32,
    stepped: bool,
    previous: Option<Duration>,
    best: Duration,
    window: Window,
}

/// What was seen since the last progress or stall.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Window {
    rounds: u32,
    at: Duration,
    shortest: Duration,
}

impl Window {
    fn starting(measured: &Measured, predicted: Duration) -> Self {
        Self { rounds: measured.rounds, at: measured.elapsed, shortest: predicted }
    }
}

impl Convergence {
    /// A policy that has measured nothing yet.
    #[must_use]
    pub fn new(goal: Goal) -> Self {
        Self {
            goal,
            limit: goal.downtime_limit,
            throttle: 0,
            stalls: 0,
            stepped: false,
            previous: None,
            best: Duration::MAX,
            window: Window { rounds: 0, at: Duration::ZERO, shortest: Duration::MAX },
        }
    }

    /// The pause that is accepted now.
    #[must_use]
    pub fn limit(&self) -> Duration {
        self.limit
    }

    /// The share of the guest's processor time that it wants taken away, percent.
    #[must_use]
    pub fn throttle_percent(&self) -> u8 {
        self.throttle
    }

    /// The pause that was predicted after the last round.
    #[must_use]
    pub fn predicted(&self) -> Option<Duration> {
        self.previous
    }

    /// The number of stalls so far.
    #[must_use]
    pub fn stalls(&self) -> u32 {
        self.stalls
    }

    /// Decides after a round.
    pub fn step(&mut self, measured: &Measured) -> Decision {
        let predicted = measured.predicted_downtime();
        let improved = self.previous.replace(predicted).is_none_or(|before| is_shorter(predicted, before));
        let stalled = self.has_stalled(measured, predicted);
        let timed_out = self.goal.timeout.is_some_and(|timeout| measured.elapsed >= timeout);
        if let Some(rounds) = self.goal.rounds {
            return match (measured.rounds >= rounds, timed_out) {
                (true, _) => Decision::Postcopy(Because::Asked),
                (false, true) => self.time_is_up(),
                (false, false) => Decision::Round { at_least: Duration::ZERO },
            };
        }
        if measured.pages_left == 0 {
            return Decision::Switchover;
        }
        if predicted <= self.limit {
            let pages_time = predicted.saturating_sub(measured.device_time);
            let polish = improved && pages_time > SHORT_ENOUGH && measured.rounds < MAX_POLISHING_ROUNDS && !timed_out;
            let follows = pages_time > FOLLOWS && measured.speed_is_known && self.goal.turns_at_once();
            return if polish {
                Decision::Round { at_least: Duration::ZERO }
            } else if follows {
                Decision::Postcopy(Because::Shorter)
            } else {
                Decision::Switchover
            };
        }
        if timed_out {
            return self.time_is_up();
        }
        if measured.too_fast && self.goal.turns_at_once() {
            return Decision::Postcopy(Because::Foreseen);
        }
        if stalled {
            return self.stall(measured, predicted);
        }
        Decision::Round { at_least: if improved { Duration::ZERO } else { STALLED_ROUND } }
    }

    fn time_is_up(&self) -> Decision {
        match self.goal.on_timeout {
            OnTimeout::Force => Decision::Switchover,
            OnTimeout::Cancel => Decision::GiveUp,
            OnTimeout::Postcopy => Decision::Postcopy(Because::TimedOut),
        }
    }

    /// Whether there has been no progress for a while.
    fn has_stalled(&mut self, measured: &Measured, predicted: Duration) -> bool {
        self.window.shortest = self.window.shortest.min(predicted);
        if is_shorter(predicted, self.best) {
            (self.best, self.stepped) = (predicted, false);
            self.window = Window::starting(measured, predicted);
            return false;
        }
        let rounds = if self.stepped { STEP_ROUNDS } else { STALL_ROUNDS };
        measured.rounds.saturating_sub(self.window.rounds) >= rounds
            && measured.elapsed.saturating_sub(self.window.at) >= STALL_TIME
    }

    /// Takes the next step, if one is left.
    fn stall(&mut self, measured: &Measured, predicted: Duration) -> Decision {
        self.stalls = self.stalls.saturating_add(1);
        self.stepped = true;
        self.best = self.window.shortest;
        self.window = Window::starting(measured, predicted);
        let ramp = self.goal.downtime_ramp.unwrap_or(self.limit);
        if self.limit < ramp {
            loop {
                self.limit = self.limit.saturating_mul(2).max(Duration::from_millis(1)).min(ramp);
                if self.limit >= self.best || self.limit >= ramp {
                    break;
                }
            }
            let holds = predicted <= self.limit;
            return if holds { Decision::Switchover } else { Decision::Round { at_least: Duration::ZERO } };
        }
        let ceiling = self.goal.throttle_percent.unwrap_or(0);
        if self.throttle < ceiling {
            let next = if self.throttle == 0 { FIRST_THROTTLE } else { self.throttle.saturating_add(MORE_THROTTLE) };
            self.throttle = next.min(ceiling);
            return Decision::Throttle { percent: self.throttle };
        }
        if self.goal.postcopy {
            return Decision::Postcopy(Because::Stalled);
        }
        Decision::Round { at_least: STALLED_ROUND }
    }
}

fn is_shorter(now: Duration, before: Duration) -> bool {
    now.as_secs_f64() < before.as_secs_f64() * (1.0 - WORTHWHILE)
}

#[cfg(test)]
#[path = "convergence_tests.rs"]
pub(crate) mod tests;
