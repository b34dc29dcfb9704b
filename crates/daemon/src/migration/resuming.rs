//! Guests that are this host's after a migration and do not run yet, because their QEMU has not done what it takes: at
//! the source after a migration that failed, at the destination after one that was committed. It is tried until it
//! works or a person gives up.
//!
//! Storage that hangs, a disk's lock that the other side has not let go of yet, a QEMU that answers too late: most of
//! what stands in the way passes. The next daemon goes on with it (`recover.rs`): at the source the machine's record
//! says *being moved away* and its migration has none, at the destination it says *being moved here* and its migration
//! is committed. Meanwhile nobody else can begin anything with the machine: what is let run by mistake after it has
//! gone elsewhere would run twice.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sterna_api::{Problem, VmState};
use sterna_engine::host::MigrationId;

use super::pauses::Pauses;
use super::records::Records;
use crate::machines::control;
use crate::machines::hold::{Activity, Hold, Shown};
use crate::machines::record::{Lifecycle, VmRecord};
use crate::machines::table::{Entry, Machines};

/// A guest on its way to running here.
#[derive(Debug)]
pub struct Resuming {
    what: What,
    since: Instant,
    tried: Mutex<Tried>,
    hurried: Condvar,
}

#[derive(Debug, Clone, Copy)]
enum What {
    /// It stays here: what QEMU has under way is called off first.
    GiveBack,
    /// It has come here.
    LetRun,
}

#[derive(Debug)]
struct Tried {
    /// Why the last attempt failed, once one has.
    why: Option<String>,
    at_once: bool,
}

impl Resuming {
    /// What is being done, why it is not done yet, and for how long, for people.
    fn tell(&self) -> String {
        let what = match self.what {
            What::GiveBack => "stopped, being given back after a migration",
            What::LetRun => "it came here and is stopped, being let run",
        };
        let why = self.lock().why.as_ref().map_or(String::new(), |why| format!(", which has not worked yet: {why}"));
        format!("{what} for {} s{why}", self.since.elapsed().as_secs())
    }

    /// Tries again at once.
    pub fn hurry(&self) {
        self.lock().at_once = true;
        self.hurried.notify_all();
    }

    /// Waits before the next attempt, unless somebody is in a hurry: whether somebody is.
    fn pause(&self, pause: Duration) -> bool {
        let (mut tried, _) = self
            .hurried
            .wait_timeout_while(self.lock(), pause, |tried| !tried.at_once)
            .unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut tried.at_once)
    }

    fn attempt(&self, machines: &Machines, record: &VmRecord) -> Result<(), Problem> {
        match self.what {
            What::GiveBack => control::give_back(record),
            What::LetRun => control::let_run(record, &machines.dir(&record.name)),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Tried> {
        self.tried.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The guest is this host's after a migration, and its QEMU has not let it run yet.
impl Activity for Resuming {
    fn describe(&self) -> &'static str {
        "it is stopped after a migration, and being let run"
    }

    fn show(&self) -> Shown {
        Shown::As { state: VmState::Resuming, note: Some(self.tell()), progress: None }
    }
}

/// Lets a guest run on here that is certain not to run elsewhere, as soon as its QEMU does what that takes. `failed` is
/// why an attempt has failed that was made already.
pub fn give_back(
    machines: &Arc<Machines>,
    records: &Records,
    record: &VmRecord,
    id: MigrationId,
    failed: Option<String>,
) {
    // From here on a daemon that is started anew gives it back, too.
    records.remove(id);
    begin(machines, record, What::GiveBack, failed);
}

/// Lets a guest run that has come here for good, as soon as its QEMU does that: it has `failed` once.
pub fn let_run(machines: &Arc<Machines>, record: &VmRecord, failed: String) {
    begin(machines, record, What::LetRun, Some(failed));
}

fn begin(machines: &Arc<Machines>, record: &VmRecord, what: What, why: Option<String>) {
    let tried = Mutex::new(Tried { why, at_once: false });
    let resuming = Arc::new(Resuming { what, since: Instant::now(), tried, hurried: Condvar::new() });
    machines.hold(&record.name, Hold::shared(&resuming));
    let (machines, record) = (Arc::clone(machines), record.clone());
    let name = format!("run-{}", record.name);
    let spawned = std::thread::Builder::new().name(name).spawn(move || try_on(&machines, &record, &resuming));
    if let Err(error) = spawned {
        tracing::error!(%error, "cannot start the thread that lets a guest run: the next daemon does");
    }
}

fn try_on(machines: &Machines, record: &VmRecord, resuming: &Resuming) {
    let mut pauses = Pauses::default();
    let mut wait = resuming.lock().why.is_some();
    while is_resuming(machines, record) {
        if wait {
            let hurried = resuming.pause(pauses.next());
            pauses.over(hurried, resuming.since.elapsed());
            wait = false;
            continue;
        }
        if record.process.open().is_none() {
            return belongs_here(machines, record);
        }
        match resuming.attempt(machines, record) {
            Ok(()) => {
                tracing::info!(
                    vm = %record.name, after_s = resuming.since.elapsed().as_secs(),
                    "it runs here after its migration"
                );
                return belongs_here(machines, record);
            }
            Err(problem) => {
                let why = problem.with_causes();
                tracing::warn!(vm = %record.name, "it does not run here yet: {why}");
                resuming.lock().why = Some(why);
                wait = true;
            }
        }
    }
}

/// Whether nobody has given it up meanwhile.
fn is_resuming(machines: &Machines, record: &VmRecord) -> bool {
    let resuming = |entry: &Entry| entry.hold.is::<Resuming>() && entry.is(record);
    machines.table().get(&record.name).is_some_and(resuming)
}

/// As any other machine, unless somebody ends it at this very moment.
fn belongs_here(machines: &Machines, record: &VmRecord) {
    machines.try_store(&VmRecord { lifecycle: Lifecycle::Here, ..record.clone() });
    if is_resuming(machines, record) {
        machines.release(&record.name);
    }
    machines.forget_if_ended(record);
}
