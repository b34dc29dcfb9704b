//! Guests that stay here after all and do not run yet: their QEMU has not done what it takes. It is tried until it works or a person gives up.
//!
//! Storage that hangs, a disk's lock that the other side has not let go of yet, a QEMU that answers too late: most of what makes a rollback fail
//! passes. Meanwhile the machine's record says *being moved away* and its migration has none, which is how the next daemon knows it, too
//! (`vms/recover.rs`).

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sterna_engine::host::MigrationId;

use super::waiting::{FIRST_PAUSE, longer};
use crate::vms::{Daemon, Hold, Lifecycle, VmRecord, control};

/// A guest on its way back to running here.
#[derive(Debug)]
pub struct GivingBack {
    since: Instant,
    tried: Mutex<Tried>,
    hurried: Condvar,
}

#[derive(Debug)]
struct Tried {
    /// Why the last attempt failed, once one has.
    why: Option<String>,
    at_once: bool,
}

impl GivingBack {
    fn new(why: Option<String>) -> Self {
        let tried = Tried { why, at_once: false };
        Self { since: Instant::now(), tried: Mutex::new(tried), hurried: Condvar::new() }
    }

    /// What is being done, why it is not done yet, and for how long, for people.
    #[must_use]
    pub fn show(&self) -> String {
        let tried = self.lock();
        let why = tried.why.as_ref().map_or(String::new(), |why| format!(", which has not worked yet: {why}"));
        format!("stopped, being given back after a migration for {} s{why}", self.since.elapsed().as_secs())
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

    fn lock(&self) -> MutexGuard<'_, Tried> {
        self.tried.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Lets a guest run on here that is certain not to run elsewhere, as soon as its QEMU does what that takes. `failed` is why an attempt has failed that was
/// made already.
pub fn give_back(daemon: &Arc<Daemon>, record: &VmRecord, id: MigrationId, failed: Option<String>) {
    // From here on a daemon that is started anew gives it back, too.
    daemon.records.remove(id);
    let giving = Arc::new(GivingBack::new(failed));
    if let Some(entry) = daemon.table().get_mut(&record.name) {
        entry.hold = Hold::GivingBack(Arc::clone(&giving));
    }
    let (daemon, record) = (Arc::clone(daemon), record.clone());
    let name = format!("back-{}", record.name);
    let spawned = std::thread::Builder::new().name(name).spawn(move || try_on(&daemon, &record, id, &giving));
    if let Err(error) = spawned {
        tracing::error!(%error, "cannot start the thread that gives a guest back: the next daemon does");
    }
}

fn try_on(daemon: &Daemon, record: &VmRecord, id: MigrationId, giving: &GivingBack) {
    let mut pause = FIRST_PAUSE;
    let mut wait = giving.lock().why.is_some();
    while is_being_given_back(daemon, record) {
        if wait {
            let hurried = giving.pause(pause);
            pause = if hurried { FIRST_PAUSE } else { longer(pause, giving.since.elapsed()) };
            wait = false;
            continue;
        }
        if record.process.open().is_none() {
            return belongs_here(daemon, record);
        }
        match control::give_back(record) {
            Ok(()) => {
                tracing::info!(vm = %record.name, %id, after_s = giving.since.elapsed().as_secs(), "it is given back");
                return belongs_here(daemon, record);
            }
            Err(problem) => {
                let why = problem.with_causes();
                tracing::warn!(vm = %record.name, %id, "it is not given back yet: {why}");
                giving.lock().why = Some(why);
                wait = true;
            }
        }
    }
}

/// Whether nobody has given it up meanwhile.
fn is_being_given_back(daemon: &Daemon, record: &VmRecord) -> bool {
    daemon.table().get(&record.name).is_some_and(|entry| {
        matches!(entry.hold, Hold::GivingBack(_))
            && entry.record.as_ref().is_some_and(|known| known.process == record.process)
    })
}

/// As it was before the migration, unless somebody ends it at this very moment.
fn belongs_here(daemon: &Daemon, record: &VmRecord) {
    daemon.try_store(&VmRecord { lifecycle: Lifecycle::Here, ..record.clone() });
    if is_being_given_back(daemon, record) {
        daemon.release(&record.name);
    }
    daemon.forget_if_ended(record);
}
