//! Balloons: who decides how much memory a guest keeps, and how that is changed.
//!
//! The setting is part of a machine's record and travels with the machine. Where it is not *off*, a thread of its own looks after the
//! balloon (`keeper.rs`), from the daemon's start or the machine's arrival on.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sterna_api::{Balloon, BalloonMode, BalloonSetting, Blame, Code, Problem, Vm};
use sterna_engine::vmm::qemu::{BalloonDevice, SharedQmp, resize};

use self::keeper::Keeper;
use super::control::{Control, TIMEOUT, refused};
use super::record::VmRecord;
use super::{Daemon, Hold};
use crate::problems::{host, invalid};

/// The thread that looks after one balloon.
mod keeper;

/// How long an answer waits for the guest's first statistics.
const FIRST_LOOK: Duration = Duration::from_secs(2);

/// What makes a balloon device, for people.
const DEVICE_HINT: &str = "start it with 'sterna run --balloon', or with \
    '-device virtio-balloon-pci,deflate-on-oom=on,free-page-reporting=on' (on a microvm virtio-balloon-device) in QEMU's arguments";

/// The balloons that are looked after.
#[derive(Debug, Default)]
pub struct Balloons {
    keepers: Mutex<HashMap<String, Arc<Keeper>>>,
    /// Connections to QEMU that migrations hold, by the machine's name.
    lent: Mutex<HashMap<String, SharedQmp>>,
}

/// A migration's connection to QEMU that the balloon's thread may take turns on, until this is dropped.
#[derive(Debug)]
pub struct Lent<'a> {
    balloons: &'a Balloons,
    name: &'a str,
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        self.balloons.lent().remove(self.name);
    }
}

impl Balloons {
    /// Lets the balloon's thread use a migration's connection: QEMU serves one client at a time.
    pub fn lend<'a>(&'a self, name: &'a str, qmp: SharedQmp) -> Lent<'a> {
        self.lent().insert(name.into(), qmp);
        Lent { balloons: self, name }
    }

    /// A machine's balloon as it was seen last, where Sterna looks after it.
    #[must_use]
    pub fn show(&self, record: &VmRecord) -> Option<Balloon> {
        if record.balloon.mode == BalloonMode::Off {
            return None;
        }
        let keeper = self.keepers().get(&record.name).filter(|keeper| keeper.process == record.process).cloned();
        Some(keeper.map_or_else(
            || Balloon { setting: record.balloon, note: Some("it was not looked at yet".into()), ..Balloon::default() },
            |keeper| keeper.seen(),
        ))
    }

    fn lent(&self) -> MutexGuard<'_, HashMap<String, SharedQmp>> {
        self.lent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn keepers(&self) -> MutexGuard<'_, HashMap<String, Arc<Keeper>>> {
        self.keepers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Daemon {
    /// Changes how a machine's balloon is handled. With *off* the guest gets all of its memory back.
    ///
    /// # Errors
    /// A [`Problem`]: unknown, busy, a setting that cannot be, no balloon device, or QEMU does not answer. Then all is as it was.
    pub fn set_balloon(self: &Arc<Self>, name: &str, setting: BalloonSetting) -> Result<Vm, Problem> {
        let record = self.claim(name, Hold::Adjusting)?;
        let changed = self.change_balloon(&record, setting);
        self.release(name);
        self.forget_if_ended(&record);
        match changed {
            Ok(changed) => {
                tracing::info!(vm = name, ?setting, "balloon");
                if let Some(keeper) = self.keep_balloon(&changed) {
                    keeper.wait_for_report(FIRST_LOOK);
                }
                self.show(name)
            }
            Err(problem) => {
                self.keep_balloon(&record);
                Err(problem)
            }
        }
    }

    fn change_balloon(&self, record: &VmRecord, setting: BalloonSetting) -> Result<VmRecord, Problem> {
        setting.check(record.memory_bytes).map_err(invalid)?;
        // From here on it asks for nothing more: should it hold the connection now, ours waits for its end.
        if let Some(keeper) = self.balloons.keepers().remove(&record.name) {
            keeper.end();
        }
        let mut control = Control::connect(&record.qmp)?;
        let qmp = control.qmp();
        let device = BalloonDevice::find(qmp, TIMEOUT).map_err(|error| refused("tell its balloon", &error))?;
        match (&device, setting.mode) {
            (None, BalloonMode::Off) => {}
            (None, _) => return Err(no_device(&record.name)),
            (Some(device), BalloonMode::Off) => {
                let given_back = device
                    .ask_for_reports(qmp, false, TIMEOUT)
                    .and_then(|()| resize(qmp, record.memory_bytes, TIMEOUT));
                given_back.map_err(|error| refused("give the guest its memory back", &error))?;
            }
            (Some(_), BalloonMode::Auto | BalloonMode::Target) => {}
        }
        let changed = VmRecord { balloon: setting, ..record.clone() };
        self.store(&changed).map_err(|error| host("cannot write the machine's record", &error))?;
        Ok(changed)
    }

    /// Has a machine's balloon looked after from now on, where that is asked for.
    pub(super) fn keep_balloon(self: &Arc<Self>, record: &VmRecord) -> Option<Arc<Keeper>> {
        if record.balloon.mode == BalloonMode::Off {
            return None;
        }
        let mut keepers = self.balloons.keepers();
        if let Some(keeper) = keepers.get(&record.name).filter(|keeper| keeper.process == record.process) {
            return Some(Arc::clone(keeper));
        }
        let keeper = Arc::new(Keeper::new(record));
        if let Err(error) = Keeper::start(&keeper, self) {
            tracing::error!(vm = %record.name, %error, "nobody looks after the machine's balloon");
            return None;
        }
        keepers.insert(record.name.clone(), Arc::clone(&keeper));
        Some(keeper)
    }
}

pub(super) fn no_device(name: &str) -> Problem {
    Problem::new(Code::NoBalloon, Blame::Request, format!("'{name}' has no balloon device")).hint(DEVICE_HINT)
}
