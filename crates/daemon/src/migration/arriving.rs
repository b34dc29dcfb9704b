//! Machines that are being moved here, as other requests see them, and the limit on their number.

use sterna_api::{Blame, Code, Problem, VmState};
use sterna_engine::host::MigrationId;

use crate::machines::hold::{Activity, Shown};
use crate::machines::table::Table;

/// The activity of being moved here, by this migration.
#[derive(Debug)]
pub struct Arriving(pub MigrationId);

impl Activity for Arriving {
    fn describe(&self) -> &'static str {
        "it is being moved here"
    }

    fn cancel(&self, name: &str) -> Result<(), Problem> {
        let message = format!("'{name}' is being moved here: its migration is its source's to cancel");
        Err(Problem::new(Code::Arriving, Blame::Request, message))
    }

    fn show(&self) -> Shown {
        Shown::state(VmState::MigratingIn)
    }
}

/// The number of machines on their way here.
#[must_use]
pub fn arriving(table: &Table) -> usize {
    table.values().filter(|entry| entry.hold.is::<Arriving>()).count()
}

/// Checks that one more machine may come here, where at most `limit` may at a time.
///
/// # Errors
/// A [`Problem`] where `limit` machines are on their way already. The source gets it, and asks again later.
pub fn check_incoming(table: &Table, limit: usize) -> Result<(), Problem> {
    if arriving(table) < limit {
        return Ok(());
    }
    Err(Problem::new(Code::TooManyIncoming, Blame::Host, format!("it takes {limit} at a time")))
}
