//! Guests that belong to this host after a migration and do not run yet, because their QEMU has not let them run: at
//! the source after a migration that failed, at the destination after one that was committed. The daemon tries until it
//! works or a person gives up.
//!
//! Most causes pass: storage that hangs, a disk's lock that the other side has not released yet, a QEMU that answers
//! too late. The next daemon goes on with the attempts (`recover.rs`): at the source the machine's record says *being
//! moved away* and its migration has no record, at the destination the machine's record says *being moved here* and its
//! migration is committed. Meanwhile nobody else can begin anything with the machine: a guest that is let run by
//! mistake after it has gone elsewhere would run twice.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sterna_api::{Problem, VmState};
use sterna_engine::host::MigrationId;

use super::onward;
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
    /// It stays here: QEMU's migration is cancelled first.
    GiveBack,
    /// It has come here.
    LetRun,
    /// It stays in its own QEMU, and was to go to another one of this host.
    GiveBackHere,
    /// It has come to another QEMU of this host.
    LetRunHere,
}

#[derive(Debug)]
struct Tried {
    /// Why the last attempt failed, once one has.
    why: Option<String>,
    at_once: bool,
}

impl Resuming {
    /// The state of the attempts, for people: what is tried, for how long, and why it has not worked yet.
    fn tell(&self) -> String {
        let what = match self.what {
            What::GiveBack => "stopped, being given back after a migration",
            What::LetRun => "it came here and is stopped, being let run",
            What::GiveBackHere => "stopped, being given back to its QEMU",
            What::LetRunHere => "stopped in its new QEMU, being let run",
        };
        let why = self.lock().why.as_ref().map_or(String::new(), |why| format!(", which has not worked yet: {why}"));
        format!("{what} for {} s{why}", self.since.elapsed().as_secs())
    }

    /// Tries again at once.
    pub fn hurry(&self) {
        self.lock().at_once = true;
        self.hurried.notify_all();
    }

    /// Waits before the next attempt, unless somebody called [`hurry`](Self::hurry). Returns whether somebody did.
    fn pause(&self, pause: Duration) -> bool {
        let (mut tried, _) = self
            .hurried
            .wait_timeout_while(self.lock(), pause, |tried| !tried.at_once)
            .unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut tried.at_once)
    }

    fn attempt(&self, machines: &Machines, record: &VmRecord) -> Result<(), Problem> {
        match self.what {
            What::GiveBack | What::GiveBackHere => control::give_back(record),
            What::LetRun | What::LetRunHere => control::let_run(record, &machines.dir(&record.name)),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Tried> {
        self.tried.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The activity of a machine whose guest belongs to this host after a migration, and whose QEMU has not let it run yet.
impl Activity for Resuming {
    fn describe(&self) -> &'static str {
        "its QEMU is being asked to let it run"
    }

    fn show(&self) -> Shown {
        Shown::As { state: VmState::Resuming, note: Some(self.tell()), progress: None }
    }
}

/// Lets a guest run on here that certainly does not run elsewhere, as soon as its QEMU does so. `failed` is the reason
/// of an attempt that failed before. A clone was never to run here: it is forgotten.
pub fn give_back(
    machines: &Arc<Machines>,
    records: &Records,
    record: &VmRecord,
    id: MigrationId,
    failed: Option<String>,
) {
    // From here on a restarted daemon gives it back, too.
    records.remove(id);
    if record.image {
        return machines.forget_clone(record);
    }
    onward::stays(machines, record, false);
    begin(machines, record, as_it_is, (What::GiveBack, failed));
}

/// Lets a guest run that has come here for good, as soon as its QEMU does so. `failed` is the reason of the first
/// failed attempt.
pub fn let_run(machines: &Arc<Machines>, record: &VmRecord, failed: String) {
    begin(machines, record, as_it_is, (What::LetRun, Some(failed)));
}

/// Lets a guest run whose QEMU was to be replaced, as soon as its QEMU does so: `replaced` says whether that is the new
/// one. `failed` is the reason of the first failed attempt.
pub fn go_on_here(machines: &Arc<Machines>, record: &VmRecord, replaced: bool, failed: String) {
    let what = if replaced { What::LetRunHere } else { What::GiveBackHere };
    begin(machines, record, as_it_is, (what, Some(failed)));
}

/// As [`go_on_here`] of a machine of which `known` tells what it is, once that can be told.
pub fn go_on_once_known(
    machines: &Arc<Machines>,
    record: &VmRecord,
    known: impl Fn(&Machines, &VmRecord) -> Result<VmRecord, Problem> + Send + 'static,
    failed: String,
) {
    begin(machines, record, known, (What::GiveBackHere, Some(failed)));
}

/// A machine of which all is known.
fn as_it_is(_: &Machines, record: &VmRecord) -> Result<VmRecord, Problem> {
    Ok(record.clone())
}

fn begin(
    machines: &Arc<Machines>,
    record: &VmRecord,
    known: impl Fn(&Machines, &VmRecord) -> Result<VmRecord, Problem> + Send + 'static,
    (what, why): (What, Option<String>),
) {
    let tried = Mutex::new(Tried { why, at_once: false });
    let resuming = Arc::new(Resuming { what, since: Instant::now(), tried, hurried: Condvar::new() });
    machines.hold(&record.name, Hold::shared(&resuming));
    let (machines, record) = (Arc::clone(machines), record.clone());
    let name = format!("run-{}", record.name);
    let spawned = std::thread::Builder::new().name(name).spawn(move || try_on(&machines, record, &known, &resuming));
    if let Err(error) = spawned {
        tracing::error!(%error, "cannot start the thread that lets a guest run: the next daemon does");
    }
}

fn try_on(
    machines: &Machines,
    mut record: VmRecord,
    known: &dyn Fn(&Machines, &VmRecord) -> Result<VmRecord, Problem>,
    resuming: &Resuming,
) {
    let mut pauses = Pauses::default();
    let mut wait = resuming.lock().why.is_some();
    while is_resuming(machines, &record) {
        if wait {
            let hurried = resuming.pause(pauses.next());
            pauses.over(hurried, resuming.since.elapsed());
            wait = false;
            continue;
        }
        if record.process.open().is_none() {
            return belongs_here(machines, &record);
        }
        let attempt = known(machines, &record).and_then(|now| {
            record = now;
            resuming.attempt(machines, &record)
        });
        match attempt {
            Ok(()) => {
                tracing::info!(
                    vm = %record.name, after_s = resuming.since.elapsed().as_secs(),
                    "it runs here again"
                );
                return belongs_here(machines, &record);
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

/// Notes that the machine is as any other, unless somebody ends it at this moment.
fn belongs_here(machines: &Machines, record: &VmRecord) {
    machines.try_store(&VmRecord { lifecycle: Lifecycle::Here, begins: false, succession: None, ..record.clone() });
    if is_resuming(machines, record) {
        machines.release(&record.name);
    }
    machines.forget_if_ended(record);
}
