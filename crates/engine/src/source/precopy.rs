//! Phase *precopy*: rounds while the guest runs, until the predicted pause is short.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use sterna_api::units::milliseconds as ms;
use sterna_api::{MigrateOptions, Mode, Phase, report};
use sterna_protocol::convergence::{Because, Convergence, Decision, Goal, Measured};

use super::departure::Departure;
use super::foresight::Foresight;
use super::link::Link;
use super::pauses::Place;
use super::prepare::Prepared;
use super::rounds::Rounds;
use super::throttle::Throttle;
use crate::error::MigrateError;
use crate::monitor::Monitor;
use crate::vmm::{self, VmmError};

/// The time for saving, moving and loading the devices, as measured on QEMU 7.2 and 10.0.
pub const DEVICE_TIME: Duration = Duration::from_millis(6);
/// How often the VMM is asked whether its guest is still there.
const ENDED_LOOK: Duration = Duration::from_millis(100);
/// How often the throttle checks whether the guest has processors' threads that are not slowed down.
const THREADS_LOOK: Duration = Duration::from_secs(1);
/// How often a wait between two rounds checks for cancellation; and how long one lasts at least while the guest waits
/// for its turn to stop, or for the link to become empty.
const WAIT_STEP: Duration = Duration::from_millis(10);

/// The way in which rounds end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// The rest of the pages goes in the pause.
    Switchover,
    /// The rest goes after the guest's start at the destination.
    Postcopy(Because),
}

/// Sends rounds until [`Convergence`] says to stop the guest, or no rounds where the options want none, and then until
/// it is the machine's turn to stand still, where others leave with it. The pages of the first round are outstanding
/// already. The account says what was done to make the migration converge, also where it fails.
///
/// # Errors
/// The link's or this host's error, [`MigrateError::NotConverging`], [`MigrateError::OutOfTime`] or
/// [`MigrateError::Cancelled`].
pub fn precopy(departure: &mut Departure, link: &mut Link, prepared: &mut Prepared) -> Result<Ending, MigrateError> {
    let options = departure.options.resolved();
    if options.mode == Mode::Postcopy || !options.has_rounds() {
        while !departure.pause.may_stop(Instant::now()) {
            wait(departure.monitor, Instant::now() + WAIT_STEP)?;
        }
        if prepared.rounds.hush() {
            wait(departure.monitor, Instant::now() + WAIT_STEP)?;
        }
        let postcopy = options.mode == Mode::Postcopy;
        return Ok(if postcopy { Ending::Postcopy(Because::Asked) } else { Ending::Switchover });
    }
    let Departure { vmm, tracker, throttle, monitor, account, pause, .. } = departure;
    let (vmm, rounds) = (&mut **vmm, &mut prepared.rounds);
    monitor.enter(Phase::Precopy);
    // `precopy` with `--on-timeout postcopy` waits until the time is over.
    let goal = goal(&options, prepared.begun.is_some() && options.mode != Mode::Precopy);
    let until =
        goal.timeout.and_then(|timeout| Instant::now().checked_add(timeout.saturating_sub(monitor.under_way())));
    let mut brake = Brake::new(&mut **throttle, monitor, &mut account.report.convergence);
    let mut policy = Convergence::new(goal);
    // Who leaves with others has a share of the link that grows as they end: its rounds may become faster.
    let mut foresight = Foresight::of(&goal, DEVICE_TIME).filter(|_| pause.is_alone());
    let mut at_least = Duration::ZERO;
    // How the rounds end, once that is decided and others stand still or are not ready.
    let mut decided = None;
    let (mut hushed, mut all_sent) = (false, false);
    loop {
        rounds.untracked.ask(vmm)?;
        let began = Instant::now();
        let cut = foresight.as_ref().and_then(Foresight::cut).filter(|_| decided.is_none());
        let complete = watched(vmm, monitor, || rounds.send(link, until, cut))?;
        wait(monitor, began + at_least)?;
        let collected = rounds.collect(*tracker)?;
        all_sent |= complete;
        if !complete {
            rounds.go_on();
        }
        let dirty_rate = collected.per_s();
        if let Some(round) = rounds.done.last_mut() {
            round.dirty_rate_pages_per_s = dirty_rate;
        }
        rounds.skip_free(vmm);
        if let Some(ending) = decided {
            if !rounds.untold && may_stop(pause, rounds, &mut hushed) {
                return Ok(ending);
            }
            continue;
        }
        let too_fast = foresight.as_mut().map_or(Ok(false), |foresight| foresight.step(rounds, &collected))?;
        let measured = Measured {
            rounds: rounds.done.len() as u32,
            elapsed: monitor.under_way(),
            pages_left: rounds.left(),
            speed: rounds.throughput.speed(),
            speed_is_known: rounds.throughput.known().is_some(),
            // The last look for free pages goes on while the devices are saved.
            device_time: DEVICE_TIME.max(rounds.free_pages().stop_time()),
            too_fast,
        };
        let decision = policy.step(&measured);
        let predicted_ms = ms(measured.predicted_downtime());
        brake.account.stalls = policy.stalls();
        brake.account.downtime_limit_ms = ms(policy.limit());
        monitor.update(|progress| {
            progress.dirty_rate_pages_per_s = dirty_rate;
            progress.predicted_downtime_ms = Some(predicted_ms);
        });
        tracing::debug!(round = measured.rounds, left = measured.pages_left, predicted_ms, ?decision, "round");
        at_least = match decision {
            Decision::Round { at_least } => at_least,
            Decision::Throttle { percent } => {
                brake.set(percent, vmm);
                Duration::ZERO
            }
            Decision::Switchover | Decision::Postcopy(_) if rounds.untold => Duration::ZERO,
            Decision::Switchover | Decision::Postcopy(_) => {
                let ending = match decision {
                    Decision::Postcopy(because) => Ending::Postcopy(because),
                    _ => Ending::Switchover,
                };
                if matches!(ending, Ending::Switchover | Ending::Postcopy(Because::Shorter)) {
                    brake.account.predicted_downtime_ms = Some(predicted_ms);
                }
                if may_stop(pause, rounds, &mut hushed) {
                    return Ok(ending);
                }
                decided = Some(ending);
                WAIT_STEP
            }
            Decision::GiveUp if !all_sent => {
                let (elapsed_s, left_pages) = (measured.elapsed.as_secs_f64(), measured.pages_left);
                return Err(MigrateError::OutOfTime { elapsed_s, left_pages });
            }
            Decision::GiveUp => {
                return Err(MigrateError::NotConverging {
                    elapsed_s: measured.elapsed.as_secs_f64(),
                    predicted_ms,
                    limit_ms: ms(policy.limit()),
                    tried: brake.tried(),
                });
            }
        };
        brake.follow(vmm);
    }
}

/// Whether the guest may stop now: it is its turn among those that leave with it, and the link is empty. Where others
/// had begun to send something, another round goes first: `hushed` is set then, and the answer to the next question is
/// yes.
fn may_stop(pause: &mut Place, rounds: &Rounds, hushed: &mut bool) -> bool {
    if *hushed {
        return true;
    }
    *hushed = pause.may_stop(Instant::now());
    *hushed && !rounds.hush()
}

/// The throttle of the guest, and the account of its use.
pub struct Brake<'a> {
    throttle: &'a mut dyn Throttle,
    monitor: &'a Monitor,
    account: &'a mut report::Convergence,
    /// The percentage that is set, and when the threads were last looked up.
    set: Option<(u8, Instant)>,
    failure: Option<MigrateError>,
}

impl<'a> Brake<'a> {
    /// A brake that is not used yet.
    pub fn new(throttle: &'a mut dyn Throttle, monitor: &'a Monitor, account: &'a mut report::Convergence) -> Self {
        Self { throttle, monitor, account, set: None, failure: None }
    }

    /// Slows the guest down. The throttle worked in the trial at the beginning: if it fails now, the migration goes on
    /// without it, and says so if it does not converge.
    fn set(&mut self, percent: u8, vmm: &mut dyn vmm::Source) {
        self.set = Some((percent, Instant::now()));
        let done = vmm.processor_threads().map_err(MigrateError::from);
        match done.and_then(|threads| self.throttle.set(percent, &threads)) {
            Ok(()) => {
                self.failure = None;
                self.account.throttle_percent = self.account.throttle_percent.max(percent);
                self.monitor.update(|progress| progress.throttle_percent = percent);
            }
            Err(error) => {
                tracing::warn!(percent, %error, "cannot slow the guest down");
                self.failure = Some(error);
            }
        }
    }

    /// Slows down also the threads of processors that were plugged meanwhile.
    fn follow(&mut self, vmm: &mut dyn vmm::Source) {
        if let Some((percent, at)) = self.set
            && at.elapsed() >= THREADS_LOOK
        {
            self.set(percent, vmm);
        }
    }

    fn tried(&self) -> String {
        let (percent, failure) = (self.account.throttle_percent, self.failure.as_ref());
        let taken = (percent > 0).then(|| format!(", although {percent} % of its processor time were taken away"));
        let failed = failure.map(|error| {
            let reason = std::error::Error::source(error).map(|source| format!(": {source}")).unwrap_or_default();
            format!(" (in the end that failed: {error}{reason})")
        });
        taken.unwrap_or_default() + &failed.unwrap_or_default()
    }
}

fn goal(options: &MigrateOptions, postcopy: bool) -> Goal {
    let duration = |ms: f64| Duration::try_from_secs_f64(ms / 1e3).unwrap_or(Duration::MAX);
    Goal {
        downtime_limit: duration(options.downtime_limit_ms),
        downtime_ramp: options.downtime_ramp_ms.map(duration),
        throttle_percent: options.throttle_percent,
        timeout: options.timeout_ms.map(duration),
        on_timeout: options.on_timeout,
        postcopy,
        rounds: options.precopy_rounds,
    }
}

/// Does `work`, which checks the monitor, and meanwhile watches the VMM: a round can take minutes, which are in vain
/// once the guest has switched itself off.
fn watched<T>(
    vmm: &mut dyn vmm::Source,
    monitor: &Monitor,
    work: impl FnOnce() -> Result<T, MigrateError>,
) -> Result<T, MigrateError> {
    let (done, is_done) = mpsc::channel::<()>();
    let (result, ended) = std::thread::scope(|scope| {
        let looking = scope.spawn(move || -> Option<VmmError> {
            // The last look comes after the work: if the VMM ended meanwhile, the next round must not begin.
            while is_done.recv_timeout(ENDED_LOOK) == Err(RecvTimeoutError::Timeout) {
                if let Some(ended) = vmm.ended() {
                    monitor.interrupt();
                    return Some(ended);
                }
            }
            vmm.ended()
        });
        let result = work();
        drop(done);
        (result, looking.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    });
    // If the VMM is gone, that is why the work was interrupted or failed.
    ended.map_or(result, |ended| Err(ended.into()))
}

/// Waits until a moment, if it has not passed.
fn wait(monitor: &Monitor, until: Instant) -> Result<(), MigrateError> {
    loop {
        monitor.check()?;
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        std::thread::sleep(left.min(WAIT_STEP));
    }
}
