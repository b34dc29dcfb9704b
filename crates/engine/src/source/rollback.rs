//! Phase *rollback*: the guest stays at the source and runs on.

use sterna_api::Phase;
use sterna_api::problem::Whereabouts;
use sterna_protocol::session::Owner;

use super::departure::Departure;
use super::fate::Fate;
use super::link::Link;
use crate::error::MigrateError;
use crate::vmm::VmmError;

/// The reason why a migration with a connection failed. The destination is told, and may know a better reason.
pub fn reason(departure: &mut Departure, link: &mut Link, error: MigrateError) -> MigrateError {
    // Once the guest was given away, the destination's verdict was final.
    let theirs = if link.control.owner() == Owner::Source { link.control.abort() } else { None };
    match (error, theirs) {
        (MigrateError::Link { .. }, Some(problem)) => MigrateError::Peer(problem),
        // The kernel says that the VMM is gone; the VMM may have said before that the guest switched itself off.
        (MigrateError::Vmm(VmmError::Gone { guest_off: false }), _) => {
            departure.vmm.ended().unwrap_or(VmmError::Gone { guest_off: false }).into()
        }
        (error, _) => error,
    }
}

/// Lets the guest run on here, and notes why in the report. Every failure before the point of no return leads here.
pub fn rollback(departure: &mut Departure, error: MigrateError) -> Fate {
    // The destination says so before the VMM is asked for anything: there is nothing to give back.
    if let MigrateError::Busy(problem) = error {
        departure.account.failed(problem);
        return Fate::NotYet;
    }
    tracing::warn!(vm = departure.spec.name, %error, "migration failed, the guest stays");
    departure.monitor.enter(Phase::Rollback);
    departure.account.rolled_back(&error);
    if let Some(split) = &departure.split {
        // Before the guest runs: it may need its pages at once.
        split.go_on();
    }
    let mut problem = error.problem_at_source();
    let fate = match departure.vmm.rollback() {
        Ok(()) => Fate::Here,
        Err(rollback) => {
            problem.cause.push(format!("and the guest could not be given back: {rollback}"));
            problem = problem.guest(match rollback {
                VmmError::Gone { .. } => Whereabouts::Gone,
                _ => Whereabouts::Paused,
            });
            // Also where the connection to the VMM ended: its process tells whether the VMM has ended.
            Fate::NotGivenBack
        }
    };
    departure.account.failed(problem);
    fate
}
