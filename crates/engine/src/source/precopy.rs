//! Rounds while the guest runs, until a short pause is to be expected.

use std::time::Duration;

use sterna_api::MigrateOptions;
use sterna_api::options::OnTimeout;
use sterna_protocol::convergence::{Decision, Goal, Measured, decide, predicted_downtime};

use super::link::Link;
use super::rounds::Rounds;
use super::track::Tracker;
use crate::error::MigrateError;
use crate::vmm;

/// What saving, moving and loading the devices takes, as measured on QEMU 7.2 and 10.0.
const DEVICE_TIME: Duration = Duration::from_millis(6);
/// What a link is taken to carry before anything was measured: a tenth of 1 Gbit/s.
const UNKNOWN_PAGES_PER_S: f64 = 3_000.0;

/// Sends rounds until [`decide`] says to stop the guest. The first has been made outstanding.
///
/// # Errors
/// What went wrong on the way, [`MigrateError::NotConverging`] or [`MigrateError::Cancelled`].
pub fn precopy(
    rounds: &mut Rounds,
    link: &mut Link,
    tracker: &mut dyn Tracker,
    vmm: &mut dyn vmm::Source,
    options: &MigrateOptions,
) -> Result<(), MigrateError> {
    let goal = Goal {
        downtime_limit: Duration::from_secs_f64(options.downtime_limit_ms / 1e3),
        timeout: options.timeout_ms.map(|ms| Duration::from_secs_f64(ms / 1e3)),
        force_on_timeout: options.on_timeout == OnTimeout::Force,
    };
    let mut previous_prediction = None;
    loop {
        rounds.send(link)?;
        if let Some(ended) = vmm.ended() {
            return Err(ended.into());
        }
        let dirty_rate = rounds.collect(tracker)?;
        if let Some(round) = rounds.done.last_mut() {
            round.dirty_rate_pages_per_s = dirty_rate;
        }
        let measured = Measured {
            rounds: rounds.done.len() as u32,
            elapsed: rounds.monitor.elapsed(),
            pages_left: rounds.left(),
            pages_per_s: if rounds.pages_per_s() > 0.0 { rounds.pages_per_s() } else { UNKNOWN_PAGES_PER_S },
            device_time: DEVICE_TIME,
            previous_prediction,
        };
        let predicted = predicted_downtime(&measured);
        previous_prediction = Some(predicted);
        rounds.monitor.update(|progress| {
            progress.dirty_rate_pages_per_s = dirty_rate;
            progress.predicted_downtime_ms = Some(predicted.as_secs_f64() * 1e3);
        });
        match decide(&goal, &measured) {
            Decision::Round => {}
            Decision::Switchover => return Ok(()),
            Decision::GiveUp => {
                return Err(MigrateError::NotConverging {
                    elapsed_s: measured.elapsed.as_secs_f64(),
                    predicted_ms: predicted.as_secs_f64() * 1e3,
                });
            }
        }
    }
}
