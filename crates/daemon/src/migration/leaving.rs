//! A machine that is being moved away, as other requests see it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sterna_api::{Blame, Code, Phase, Problem, VmState};
use sterna_engine::monitor::Monitor;

use crate::machines::hold::{Activity, Connection, Shown};

/// The activity of being moved away.
#[derive(Debug)]
pub struct Leaving {
    /// The monitor of its migration.
    pub monitor: Arc<Monitor>,
    /// The destination's address.
    pub to: String,
    /// Whether it waits for its turn, and nothing is done with it.
    waits: Mutex<bool>,
}

impl Leaving {
    /// It does not wait for its turn yet.
    #[must_use]
    pub fn new(monitor: Arc<Monitor>, to: &str) -> Self {
        Self { monitor, to: to.into(), waits: Mutex::new(false) }
    }

    /// Notes that it waits for its turn from now on, or does no longer. Whoever [does something](Self::at_rest) with it
    /// meanwhile ends that first.
    pub fn set_waits(&self, waits: bool) {
        *self.lock() = waits;
    }

    /// For somebody who does something short with the machine while it waits for its turn, perhaps for hours: that does
    /// not come while this is held. `None` where it does not wait.
    #[must_use]
    pub fn at_rest(&self) -> Option<MutexGuard<'_, bool>> {
        Some(self.lock()).filter(|waits| **waits)
    }

    fn lock(&self) -> MutexGuard<'_, bool> {
        self.waits.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Activity for Leaving {
    fn describe(&self) -> &'static str {
        "it is being moved away"
    }

    fn cancel(&self, name: &str) -> Result<(), Problem> {
        if self.monitor.cancel() {
            return Ok(());
        }
        Err(too_late(
            name,
            match self.monitor.progress().phase {
                Phase::Postcopy => "runs at its destination already, and the rest of its pages follow",
                _ => HANDED_OVER,
            },
        ))
    }

    fn show(&self) -> Shown {
        let progress = self.monitor.progress();
        let left = progress.pages_left;
        let note = (progress.phase == Phase::Postcopy)
            .then(|| format!("it runs at its destination, {left} pages of it are still here"));
        Shown::As { state: VmState::MigratingOut, note, progress: Some(Box::new(progress)) }
    }

    /// What is at memory hosts stays there, or the machine is refused.
    fn may_be_split(&self) -> bool {
        true
    }

    fn connection(&self) -> Connection {
        // In the queue it waits for its turn, perhaps for hours.
        let free_unless_lent = self.monitor.progress().phase == Phase::Queued;
        Connection::Lent { by: Arc::clone(&self.monitor), free_unless_lent }
    }
}

/// The reason why a machine's migration cannot be cancelled.
pub const HANDED_OVER: &str = "has been handed over";

/// The problem of a migration that is past the point of no return.
#[must_use]
pub fn too_late(name: &str, why: &str) -> Problem {
    Problem::new(Code::TooLate, Blame::Request, format!("'{name}' {why}: its migration cannot be cancelled"))
}
