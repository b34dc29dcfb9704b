//! The thread that looks after one balloon.
//!
//! Each second, or each interval where that is shorter, it looks at the guest and does what
//! [`Policy`](sterna_protocol::balloon::Policy) says. QEMU serves one client at a time, so every look makes a
//! connection of its own, for a millisecond or two.
//!
//! While the machine is being moved away, the migration holds QEMU's connection. Until the switchover the thread takes
//! turns on it:
//!
//! - it never waits for the connection: if that is in use, the look is left out;
//! - it checks the migration's phase only once it holds the connection. The migration enters the switchover before it
//!   takes the connection for it. So either the thread sees the phase and returns the connection at once, or the rest
//!   of a look delays the guest's stop, while the guest still runs. Within the pause nothing is asked;
//! - each command may take a tenth of a second.
//!
//! While introspection takes free memory from the guest, the connection is shared in the same way.
//!
//! From the switchover on this thread does nothing more. The balloon's target travels in the device's state, the
//! setting in the machine's description, and the destination's daemon goes on once all of the guest's pages are there.
//! Until then the guest's driver can still take pages out by itself (`deflate-on-oom`).

use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use sterna_api::balloon::{Pressure, PressureSeen};
use sterna_api::{Balloon, BalloonMode, BalloonSetting, Phase};
use sterna_engine::monitor::Monitor;
use sterna_engine::vmm::VmmError;
use sterna_engine::vmm::qemu::{BalloonDevice, BalloonLook, SharedQmp, resize};
use sterna_engine::vmm::qmp::Qmp;
use sterna_protocol::balloon::{Decision, Policy, Sample};

use super::lending::Lending;
use crate::machines::control::Control;
use crate::machines::hold::{Connection, Hold};
use crate::machines::record::VmRecord;
use crate::machines::table::Machines;
use crate::metrics::Metrics;
use crate::process::Identity;

/// The size of a page, in which balloons are counted, bytes.
const PAGE_BYTES: u64 = sterna_protocol::layout::PAGE_BYTES as u64;
/// The longest time between two looks at the guest.
const LOOK: Duration = Duration::from_secs(1);
/// How long QEMU may take to accept a connection.
const CONNECT: Duration = Duration::from_secs(1);
/// How long QEMU may take for a command.
const COMMAND: Duration = Duration::from_secs(1);
/// How long QEMU may take for a command while a migration may need the connection.
const IN_BETWEEN: Duration = Duration::from_millis(100);
/// The longest time between two looks that counts as observed: in a longer one the thread was busy with something else.
const LOST_SIGHT: Duration = Duration::from_secs(3);

/// The keeper of one balloon.
#[derive(Debug)]
pub struct Keeper {
    pub(super) name: String,
    pub(super) process: Identity,
    setting: BalloonSetting,
    ram_bytes: u64,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    seen: Balloon,
    ended: bool,
}

/// The way to ask QEMU at present.
enum Reach {
    /// The machine is not here any more.
    Gone,
    /// QEMU must not be asked.
    Busy,
    /// Over a connection of its own.
    Own(PathBuf),
    /// Over the connection of a migration.
    Lent(SharedQmp, Arc<Monitor>),
}

/// The state that is kept from one look to the next.
struct Course {
    policy: Policy,
    device: Option<BalloonDevice>,
    looked: Instant,
}

impl Keeper {
    pub(super) fn new(record: &VmRecord) -> Self {
        let seen = Balloon { setting: record.balloon, ..Balloon::default() };
        Self {
            name: record.name.clone(),
            process: record.process,
            setting: record.balloon,
            ram_bytes: record.memory_bytes,
            state: Mutex::new(State { seen, ended: false }),
            changed: Condvar::new(),
        }
    }

    /// Ends the keeper. From now on it asks QEMU for nothing, except what it may be asking at this moment over a
    /// connection of its own.
    pub(super) fn end(&self) {
        self.state().ended = true;
        self.changed.notify_all();
    }

    /// The balloon as the last look saw it.
    pub(super) fn seen(&self) -> Balloon {
        self.state().seen.clone()
    }

    /// Waits for the guest's first statistics, or until `limit` has passed.
    pub(super) fn wait_for_report(&self, limit: Duration) {
        let silent = |state: &mut State| !state.ended && state.seen.guest_free_bytes.is_none();
        drop(self.changed.wait_timeout_while(self.state(), limit, silent));
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn has_ended(&self) -> bool {
        self.state().ended
    }

    pub(super) fn run(&self, machines: &Machines, lending: &Lending, metrics: &Metrics) {
        let interval = Duration::from_millis(self.setting.interval_ms);
        let pause = interval.min(LOOK);
        let mut course = Course { policy: Policy::new(self.ram_bytes, interval), device: None, looked: Instant::now() };
        while !self.has_ended() {
            match self.reach(machines, lending) {
                Reach::Gone => return,
                Reach::Busy => course.looked = Instant::now(),
                Reach::Own(path) => match Control::connect_within(&path, CONNECT) {
                    Ok(mut control) => self.look(metrics, &mut course, control.qmp(), COMMAND),
                    Err(problem) => self.note(Some(problem.message)),
                },
                Reach::Lent(qmp, monitor) => match qmp.try_lock() {
                    Err(TryLockError::WouldBlock) => {}
                    Err(TryLockError::Poisoned(poisoned)) => drop(poisoned),
                    Ok(mut qmp) if may_share(&monitor) => self.look(metrics, &mut course, &mut qmp, IN_BETWEEN),
                    Ok(_) => course.looked = Instant::now(),
                },
            }
            let ended = |state: &mut State| !state.ended;
            drop(self.changed.wait_timeout_while(self.state(), pause, ended));
        }
    }

    fn reach(&self, machines: &Machines, lending: &Lending) -> Reach {
        let (hold, qmp) = {
            let table = machines.table();
            let Some(entry) = table.get(&self.name) else { return Reach::Gone };
            match &entry.record {
                // While pages are missing the balloon is left alone: discarded pages would have to be told from missing
                // ones, and QEMU may itself wait for a page.
                Some(record) if record.process == self.process && record.paging.is_some() => return Reach::Busy,
                Some(record) if record.process == self.process => (entry.hold.clone(), record.qmp.clone()),
                _ => return Reach::Gone,
            }
        };
        // The connection is fetched before the activity's phase is checked: the activity enters the next phase first,
        // and takes its connection away then.
        let lent = lending.of(&self.name);
        match hold {
            Hold::Free => Reach::Own(qmp),
            Hold::Starting | Hold::Stopping => Reach::Busy,
            Hold::Busy(activity) => match (activity.connection(), lent) {
                (Connection::Free, _) => Reach::Own(qmp),
                (Connection::Lent { by, .. }, Some(lent)) => Reach::Lent(lent, by),
                (Connection::Lent { free_unless_lent: true, .. }, None) => Reach::Own(qmp),
                (Connection::Lent { .. }, None) | (Connection::Taken, _) => Reach::Busy,
            },
        }
    }

    fn look(&self, metrics: &Metrics, course: &mut Course, qmp: &mut Qmp, within: Duration) {
        // The setting may have been changed while this waited for the connection.
        if self.has_ended() {
            return;
        }
        match self.look_and_do(metrics, course, qmp, within) {
            Ok(()) => {}
            // Its QEMU ends: the thread that watches the process does the rest.
            Err(VmmError::Gone { .. }) => {}
            Err(error) => {
                course.device = None;
                self.note(Some(error.to_string()));
            }
        }
    }

    fn look_and_do(
        &self,
        metrics: &Metrics,
        course: &mut Course,
        qmp: &mut Qmp,
        within: Duration,
    ) -> Result<(), VmmError> {
        if course.device.is_none() {
            course.device = BalloonDevice::find(qmp, within)?;
            if let Some(device) = &course.device {
                device.ask_for_reports(qmp, true, within)?;
            }
        }
        let Some(device) = &course.device else {
            self.note(Some("it has no balloon device any more".into()));
            return Ok(());
        };
        let look = device.look(qmp, within)?;
        let elapsed = std::mem::replace(&mut course.looked, Instant::now()).elapsed();
        let asked = if self.setting.mode == BalloonMode::Auto {
            // A guest that stands still reports nothing, and needs nothing.
            let elapsed = elapsed.min(LOST_SIGHT);
            let sample = Sample { elapsed, guest_bytes: look.guest_bytes, report: look.report };
            if look.running { course.policy.step(&sample) } else { Decision::Leave }
        } else {
            let wanted = self.setting.memory_bytes.unwrap_or(self.ram_bytes);
            let asked_before = self.state().seen.target_bytes.is_some();
            if asked_before { Decision::Leave } else { Decision::Resize(wanted) }
        };
        if let Decision::Resize(bytes) | Decision::Relieve(bytes, _) = asked {
            resize(qmp, bytes, within)?;
            tracing::debug!(vm = %self.name, ?asked, guest_bytes = look.guest_bytes, "balloon");
        }
        if let Decision::Relieve(_, what) = asked {
            metrics.balloon_pressure(what);
            tracing::info!(vm = %self.name, ?what, "the guest needs memory: its balloon shrinks");
        }
        self.show(&look, device, asked, course.policy.backs_off());
        Ok(())
    }

    fn show(&self, look: &BalloonLook, device: &BalloonDevice, asked: Decision, backing_off: bool) {
        let mut state = self.state();
        let seen = &mut state.seen;
        seen.size_bytes = self.ram_bytes.saturating_sub(look.guest_bytes);
        seen.guest_free_bytes = look.report.and_then(|report| report.free_bytes);
        seen.guest_available_bytes = look.report.and_then(|report| report.available_bytes);
        seen.backing_off = backing_off;
        (seen.deflate_on_oom, seen.free_page_reporting) = (device.deflate_on_oom, device.free_page_reporting);
        if let Decision::Resize(bytes) | Decision::Relieve(bytes, _) = asked {
            // The target is in whole pages, as QEMU asks the guest for them: otherwise the balloon never has this size.
            seen.target_bytes = Some(self.ram_bytes.saturating_sub(bytes) / PAGE_BYTES * PAGE_BYTES);
        }
        if let Decision::Relieve(_, what) = asked {
            seen.last_pressure = Some(now(what));
            seen.pressures += 1;
        }
        drop(state);
        self.note(remark(look, device));
    }

    fn note(&self, note: Option<String>) {
        let mut state = self.state();
        if let Some(text) = note.as_ref().filter(|_| state.seen.note != note) {
            tracing::info!(vm = %self.name, "balloon: {text}");
        }
        state.seen.note = note;
        drop(state);
        self.changed.notify_all();
    }
}

/// Whether a migration is in a phase in which nobody waits for its connection to QEMU.
fn may_share(monitor: &Monitor) -> bool {
    matches!(monitor.progress().phase, Phase::Queued | Phase::Connect | Phase::Prepare | Phase::Precopy)
}

/// The remark on a balloon, for people.
fn remark(look: &BalloonLook, device: &BalloonDevice) -> Option<String> {
    let text = match look.report {
        None if look.running => "the guest's driver has not answered: is virtio_balloon loaded there?",
        Some(report) if report.free_bytes.is_none() => {
            "the guest's driver does not tell its free memory: its kernel is too old"
        }
        _ if !device.deflate_on_oom => {
            "without deflate-on-oom=on at its device the guest may run out of memory before the balloon gives some back"
        }
        _ => return None,
    };
    Some(text.into())
}

fn now(what: Pressure) -> PressureSeen {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    PressureSeen { what, at_ms: u64::try_from(since.as_millis()).unwrap_or(u64::MAX) }
}
