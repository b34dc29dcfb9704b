//! Balloons: the setting that decides how much memory a guest keeps, and its changes.
//!
//! The setting is part of a machine's record and travels with the machine. Where it is not *off*, a thread
//! (`keeper.rs`) looks after the balloon from the daemon's start or the machine's arrival on.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sterna_api::{Balloon, BalloonMode, BalloonSetting, Blame, Code, Problem};
use sterna_engine::vmm::qemu::{BalloonDevice, resize};

use self::keeper::Keeper;
use self::lending::Lending;
use crate::machines::control::{Control, TIMEOUT, refused};
use crate::machines::hold::{Activity, Hold};
use crate::machines::record::VmRecord;
use crate::machines::table::Machines;
use crate::metrics::Metrics;
use crate::problems::{host, invalid};

/// Connections to QEMU that are lent.
pub mod lending;

/// The thread that looks after one balloon.
mod keeper;

/// How long an answer waits for the guest's first statistics.
const FIRST_LOOK: Duration = Duration::from_secs(2);

/// The hint how to add a balloon device.
const DEVICE_HINT: &str = "start it with 'sterna run --balloon', or with \
    '-device virtio-balloon-pci,deflate-on-oom=on,free-page-reporting=on' (on a microvm virtio-balloon-device) in QEMU's arguments";

/// The activity that changes the handling of a machine's balloon.
#[derive(Debug)]
struct Adjusting;

impl Activity for Adjusting {
    fn describe(&self) -> &'static str {
        "its balloon is being changed"
    }
}

/// The balloons that Sterna looks after.
#[derive(Debug)]
pub struct Balloons {
    machines: Arc<Machines>,
    metrics: Arc<Metrics>,
    lending: Arc<Lending>,
    keepers: Mutex<HashMap<String, Arc<Keeper>>>,
}

impl Balloons {
    /// The balloons of these machines; none is looked after yet.
    #[must_use]
    pub fn new(machines: Arc<Machines>, metrics: Arc<Metrics>, lending: Arc<Lending>) -> Self {
        Self { machines, metrics, lending, keepers: Mutex::default() }
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

    /// Changes how a machine's balloon is handled. With *off* the guest gets all of its memory back.
    ///
    /// # Errors
    /// A [`Problem`]: the machine is unknown or busy, the setting is invalid, there is no balloon device, or QEMU does
    /// not answer. Then nothing has changed.
    pub fn set(self: &Arc<Self>, name: &str, setting: BalloonSetting) -> Result<(), Problem> {
        let record = self.machines.claim(name, Hold::busy(Adjusting))?;
        let changed = self.change(&record, setting);
        self.machines.give_back(&record);
        match changed {
            Ok(changed) => {
                tracing::info!(vm = name, ?setting, "balloon");
                if let Some(keeper) = self.keep(&changed) {
                    keeper.wait_for_report(FIRST_LOOK);
                }
                Ok(())
            }
            Err(problem) => {
                self.keep(&record);
                Err(problem)
            }
        }
    }

    fn change(&self, record: &VmRecord, setting: BalloonSetting) -> Result<VmRecord, Problem> {
        setting.check(record.memory_bytes).map_err(invalid)?;
        // From here on the keeper asks for nothing more. If it holds the connection now, ours waits until it has ended.
        if let Some(keeper) = self.keepers().remove(&record.name) {
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
        self.machines.store(&changed).map_err(|error| host("cannot write the machine's record", &error))?;
        Ok(changed)
    }

    /// Starts a keeper for a machine's balloon, where the setting asks for one.
    pub fn keep(self: &Arc<Self>, record: &VmRecord) -> Option<Arc<Keeper>> {
        if record.balloon.mode == BalloonMode::Off {
            return None;
        }
        let mut keepers = self.keepers();
        if let Some(keeper) = keepers.get(&record.name).filter(|keeper| keeper.process == record.process) {
            return Some(Arc::clone(keeper));
        }
        let keeper = Arc::new(Keeper::new(record));
        if let Err(error) = self.start(&keeper) {
            tracing::error!(vm = %record.name, %error, "nobody looks after the machine's balloon");
            return None;
        }
        keepers.insert(record.name.clone(), Arc::clone(&keeper));
        Some(keeper)
    }

    fn start(self: &Arc<Self>, keeper: &Arc<Keeper>) -> std::io::Result<()> {
        let (balloons, keeper) = (Arc::clone(self), Arc::clone(keeper));
        let name = format!("balloon-{}", keeper.name);
        let run = move || {
            keeper.run(&balloons.machines, &balloons.lending, &balloons.metrics);
            let mut keepers = balloons.keepers();
            if keepers.get(&keeper.name).is_some_and(|known| Arc::ptr_eq(known, &keeper)) {
                keepers.remove(&keeper.name);
            }
        };
        std::thread::Builder::new().name(name).spawn(run).map(drop)
    }

    fn keepers(&self) -> MutexGuard<'_, HashMap<String, Arc<Keeper>>> {
        self.keepers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The problem of a machine without a balloon device.
#[must_use]
pub fn no_device(name: &str) -> Problem {
    Problem::new(Code::NoBalloon, Blame::Request, format!("'{name}' has no balloon device")).hint(DEVICE_HINT)
}
