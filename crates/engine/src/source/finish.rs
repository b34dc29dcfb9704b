//! Phase *finish*: the source's VMM ends where the guest has left it, and the report is closed.

use sterna_api::Phase;

use super::departure::Departure;
use super::fate::Fate;

/// Ends the migration here; `fate` is where the guest is.
pub fn finish(departure: &mut Departure, fate: Fate) {
    if fate == Fate::There {
        departure.monitor.enter(Phase::Finish);
    }
    departure.throttle.release();
    departure.account.finish();
    if fate == Fate::There {
        // The guest has all of its pages: what is done now costs it nothing.
        if let Some(ram) = departure.ram.take() {
            departure.host.gone(ram.as_ref());
        }
        departure.vmm.quit();
    }
    departure.monitor.enter(if fate == Fate::NotYet { Phase::Queued } else { Phase::Done });
}
