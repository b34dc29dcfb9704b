//! What is being done with a machine. Whoever begins something with one puts it on hold first.

use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use sterna_api::{Blame, Code, Problem, Progress, VmState};
use sterna_engine::monitor::Monitor;

/// What is being done with a machine.
#[derive(Debug, Clone)]
pub enum Hold {
    /// Nothing: it belongs here and may be stopped or moved.
    Free,
    /// It is being started or taken over.
    Starting,
    /// It is being stopped.
    Stopping,
    /// Something else, which says itself what it is.
    Busy(Arc<dyn Activity>),
}

impl Hold {
    /// A machine that is busy with this.
    pub fn busy(activity: impl Activity) -> Self {
        Self::Busy(Arc::new(activity))
    }

    /// A machine that is busy with this, which others have a part in.
    #[must_use]
    pub fn shared<T: Activity>(activity: &Arc<T>) -> Self {
        Self::Busy(Arc::<T>::clone(activity))
    }

    /// What the machine is busy with, where it is an activity of this kind.
    #[must_use]
    pub fn activity<T: Activity>(&self) -> Option<&T> {
        let Self::Busy(activity) = self else { return None };
        let activity: &dyn Any = activity.as_ref();
        activity.downcast_ref()
    }

    /// Whether the machine is busy with an activity of this kind.
    #[must_use]
    pub fn is<T: Activity>(&self) -> bool {
        self.activity::<T>().is_some()
    }

    /// Asks what the machine is busy with to end for somebody who wants it; whether it does, soon.
    #[must_use]
    pub fn gives_way(&self) -> bool {
        matches!(self, Self::Busy(activity) if activity.gives_way())
    }

    /// What the machine is busy with, for people who want something else of it.
    #[must_use]
    pub fn describe(&self) -> &'static str {
        match self {
            Self::Free => "it is busy",
            Self::Starting => "it is being started",
            Self::Stopping => "it is being stopped",
            Self::Busy(activity) => activity.describe(),
        }
    }

    /// Whether it can be done with a machine a part of whose memory is at memory hosts.
    #[must_use]
    pub fn may_be_split(&self) -> bool {
        match self {
            Self::Busy(activity) => activity.may_be_split(),
            Self::Free | Self::Starting | Self::Stopping => true,
        }
    }

    /// Cancels what is being done with the machine of this name.
    ///
    /// # Errors
    /// A [`Problem`]: nothing that can be cancelled, or not any more.
    pub fn cancel(&self, name: &str) -> Result<(), Problem> {
        match self {
            Self::Busy(activity) => activity.cancel(name),
            Self::Free | Self::Starting | Self::Stopping => Err(not_migrating(name)),
        }
    }
}

/// Something that a machine is busy with.
pub trait Activity: Any + Debug + Send + Sync {
    /// What the machine is busy with, for people who want something else of it.
    fn describe(&self) -> &'static str;

    /// Cancels it.
    ///
    /// # Errors
    /// A [`Problem`] where it cannot be cancelled, or not any more.
    fn cancel(&self, name: &str) -> Result<(), Problem> {
        Err(not_migrating(name))
    }

    /// Asks it to end for somebody who wants the machine; whether it does, soon.
    fn gives_way(&self) -> bool {
        false
    }

    /// Whether it can be done with a machine a part of whose memory is at memory hosts. Whoever looks at that part sees
    /// zeros.
    fn may_be_split(&self) -> bool {
        false
    }

    /// How the machine is shown meanwhile.
    fn show(&self) -> Shown {
        Shown::Asked
    }

    /// Who has the machine's one connection to QEMU meanwhile.
    fn connection(&self) -> Connection {
        Connection::Taken
    }
}

/// Something that is done with a machine whose guest stays on this host, and is shown as its user left it.
#[derive(Debug)]
pub struct InPlace {
    what: &'static str,
    may_be_split: bool,
    /// Its user has paused the guest.
    paused: AtomicBool,
}

impl InPlace {
    /// This, for people; the guest counts as running until [`found`](Self::found) says otherwise.
    #[must_use]
    pub fn new(what: &'static str) -> Arc<Self> {
        Arc::new(Self { what, may_be_split: false, paused: AtomicBool::new(false) })
    }

    /// The same of something that looks at none of the guest's memory.
    #[must_use]
    pub fn beside_memory(what: &'static str) -> Arc<Self> {
        Arc::new(Self { what, may_be_split: true, paused: AtomicBool::new(false) })
    }

    /// The guest was found running, or paused by its user.
    pub fn found(&self, running: bool) {
        self.paused.store(!running, Ordering::Relaxed);
    }
}

impl Activity for InPlace {
    fn describe(&self) -> &'static str {
        self.what
    }

    fn may_be_split(&self) -> bool {
        self.may_be_split
    }

    fn show(&self) -> Shown {
        let state = if self.paused.load(Ordering::Relaxed) { VmState::Paused } else { VmState::Running };
        Shown::As { state, note: Some(self.what.into()), progress: None }
    }
}

/// How a machine that is busy is shown.
#[derive(Debug)]
pub enum Shown {
    /// As QEMU says when it is asked.
    Asked,
    /// Without asking QEMU.
    As {
        /// In this state.
        state: VmState,
        /// With this note, where nothing else is noted of the machine.
        note: Option<String>,
        /// With this migration.
        progress: Option<Box<Progress>>,
    },
}

impl Shown {
    /// In this state, and nothing else.
    #[must_use]
    pub fn state(state: VmState) -> Self {
        Self::As { state, note: None, progress: None }
    }
}

/// Who has a machine's one connection to QEMU: QEMU serves one client at a time.
#[derive(Debug)]
pub enum Connection {
    /// Nobody: whoever has a question connects.
    Free,
    /// The activity, which may lend it, as far as its phase allows that.
    Lent {
        /// What shows the phase.
        by: Arc<Monitor>,
        /// Nobody has the connection while it is not lent.
        free_unless_lent: bool,
    },
    /// The activity alone.
    Taken,
}

fn not_migrating(name: &str) -> Problem {
    Problem::new(Code::NotMigrating, Blame::Request, format!("'{name}' is not being moved"))
}

/// Cancels what `monitor` shows, where that is still possible.
///
/// # Errors
/// A [`Problem`] where it is not.
pub fn cancel(monitor: &Monitor, name: &str) -> Result<(), Problem> {
    if monitor.cancel() { Ok(()) } else { Err(not_migrating(name)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Painting;
    #[derive(Debug)]
    struct Washing;

    impl Activity for Painting {
        fn describe(&self) -> &'static str {
            "it is being painted"
        }
    }

    impl Activity for Washing {
        fn describe(&self) -> &'static str {
            "it is being washed"
        }
    }

    #[test]
    fn an_activity_is_found_by_its_kind_and_no_other() {
        let hold = Hold::busy(Painting);
        assert!(hold.is::<Painting>() && !hold.is::<Washing>());
        assert!(!Hold::Free.is::<Painting>());
        assert_eq!(hold.describe(), "it is being painted");
        assert_eq!(hold.cancel("x").unwrap_err().code, Code::NotMigrating);
    }
}
