//! The guest's stop at the source.

use std::time::{Duration, Instant};

use crate::error::MigrateError;
use crate::source::departure::Departure;
use crate::source::link::Link;
use crate::source::rounds::Rounds;
use crate::vmm::{Stopped, VmmError};

/// How long the VMM may take to stop the guest: a disk may drain slowly.
const STOP_TIMEOUT: Duration = Duration::from_secs(30);
/// How long the VMM may take to save or to load its devices.
pub(super) const DEVICE_TIMEOUT: Duration = Duration::from_secs(30);
/// How long one wait for the stop takes; if the stop takes longer, pages go for as long, and so on in turn.
const STOP_LOOK: Duration = Duration::from_millis(20);

/// Waits until the guest has stopped. A VMM that must move memory of its own first (a display's) takes a while, in
/// which the guest runs on: its pages go meanwhile. So does one on a busy host, whose guest may stop at any moment:
/// what is sent after that is sent in the pause, so only a part goes before the next look, not a whole round.
pub(super) fn stop(departure: &mut Departure, link: &mut Link, rounds: &mut Rounds) -> Result<Stopped, MigrateError> {
    let deadline = Instant::now() + STOP_TIMEOUT;
    loop {
        departure.monitor.check()?;
        if let Some(stopped) = departure.vmm.stopped(STOP_LOOK)? {
            return Ok(stopped);
        }
        if Instant::now() > deadline {
            return Err(VmmError::Silent { waiting_for: "stop".into(), seconds: STOP_TIMEOUT.as_secs() }.into());
        }
        if !rounds.done.is_empty() {
            rounds.collect(departure.tracker)?;
            rounds.untracked.ask(departure.vmm)?;
            rounds.send(link, Some(Instant::now() + STOP_LOOK), None)?;
        }
    }
}

/// The time from the stop until the VMM had drained its I/O, milliseconds.
pub(super) fn pause_ms(stopped: &Stopped) -> f64 {
    stopped.ready.0.saturating_sub(stopped.stop.0) as f64 / 1e3
}
