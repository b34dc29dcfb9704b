use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use serde_json::json;
use sterna_introspect::PageTables;

use super::commands::{COMMAND_TIMEOUT, SLOW_COMMAND_TIMEOUT, SharedQmp, guest_status, lock, processor_threads};
use super::migration::{failure, has_ended, migration_status, pass_socket, wait_migration, withdraw_socket};
use super::process::QemuProcess;
use super::settings::{self, Settings};
use super::{disks, inspect, memory_map, past, registers};
use crate::vmm::qmp::{Qmp, Version};
use crate::vmm::{EventTime, MappedRam, Source, Stopped, Untracked, VmmError};

/// The name of the descriptor in QEMU.
const SOCKET: &str = "sterna-source";

/// How long QEMU's own small blocks may take to get below its downtime limit before the guest is stopped all the same.
const CONVERGENCE_TIMEOUT: Duration = Duration::from_secs(3);

/// How long QEMU may take to call off a migration.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(30);

/// How long QEMU may take to save its devices into a broken stream before it is cancelled all the same.
const SAVING_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a cancelled migration may keep the guest stopped before it is taken for one that waits in its pause.
const STUCK_AFTER: Duration = Duration::from_millis(20);

/// How often QEMU's state is looked at while it calls off a migration.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// How QEMU calls a guest that sleeps (ACPI S3).
const SUSPENDED: &str = "suspended";

/// The first QEMU that gives a sleeping guest back asleep.
const KEEPS_SUSPENDED: Version = Version(8, 2, 0);

/// A QEMU whose guest is moved away.
#[derive(Debug)]
pub struct QemuSource {
    qmp: SharedQmp,
    process: QemuProcess,
    /// QEMU's migration settings before `prepare`.
    former: Option<Settings>,
    /// The switchover under way.
    begun: Option<Begun>,
    /// Whether the guest may run guests of its own; `None` before it was asked.
    may_nest: Option<bool>,
    /// Block nodes of disks, and those of the overlays that they go on with once the guest has stopped.
    overlays: Vec<(String, String)>,
}

#[derive(Debug)]
struct Begun {
    /// Whether the guest ran.
    ran: bool,
    at: Instant,
    /// Whether QEMU was told to stop at any cost.
    forced: bool,
    stopped: Option<Stopped>,
    /// Whether QEMU was told to save its devices: it may be about to, whatever state it says it is in.
    saving: bool,
    /// Our end of the stream of device state, to break it by; absent after a restart, which broke it.
    stream: Option<UnixStream>,
}

impl Begun {
    fn new(ran: bool, stream: Option<UnixStream>) -> Self {
        Self { ran, at: Instant::now(), forced: false, stopped: None, saving: false, stream }
    }
}

impl QemuSource {
    /// Drives the QEMU at the other end of `qmp`, whose process is `process`.
    pub fn new(qmp: SharedQmp, process: QemuProcess) -> Self {
        Self { qmp, process, former: None, begun: None, may_nest: None, overlays: Vec::new() }
    }

    /// Drives a QEMU whose daemon died amid a switchover. `rollback` calls that off, and lets the guest run where `ran`
    /// says that it did. Only for a guest that is certain not to run elsewhere.
    pub fn recover(qmp: SharedQmp, process: QemuProcess, ran: bool) -> Self {
        Self { qmp, process, former: None, begun: Some(Begun::new(ran, None)), may_nest: None, overlays: Vec::new() }
    }
}

impl QemuSource {
    /// Has disks go on with overlays from the guest's stop on: each a block node and that of its overlay, which is
    /// open. All do or none, when the guest's I/O is drained and before its devices are saved: nobody writes the images
    /// afterwards. Should the devices not be saved, or the answer not come, the guest may run on with the overlays.
    pub fn onto_overlays(&mut self, disks: Vec<(String, String)>) {
        self.overlays = disks;
    }
}

impl Source for QemuSource {
    fn prepare(&mut self) -> Result<(), VmmError> {
        if self.former.is_some() {
            return Ok(());
        }
        let mut qmp = lock(&self.qmp);
        let status = migration_status(&mut qmp)?;
        if !has_ended(&status) {
            return Err(refused(format!("another migration of this guest is under way, its status is '{status}'")));
        }
        self.former = Some(Settings::for_source(&mut qmp)?);
        Ok(())
    }

    fn running(&mut self) -> Result<bool, VmmError> {
        let (status, running) = guest_status(&mut lock(&self.qmp))?;
        match status.as_str() {
            "shutdown" => Err(VmmError::Gone { guest_off: true }),
            // Nobody stopped it: at the destination it has to be let go, too.
            SUSPENDED => Ok(true),
            _ => Ok(running),
        }
    }

    fn processor_threads(&mut self) -> Result<Vec<u32>, VmmError> {
        processor_threads(&mut lock(&self.qmp))
    }

    fn process(&self) -> Option<u32> {
        self.process.pid()
    }

    fn memory_map(&mut self) -> Result<Vec<MappedRam>, VmmError> {
        memory_map::memory_map(&mut lock(&self.qmp))
    }

    fn page_tables(&mut self) -> Result<Vec<PageTables>, VmmError> {
        registers::page_tables(&mut lock(&self.qmp))
    }

    fn was_reset(&mut self) -> Result<bool, VmmError> {
        let mut qmp = lock(&self.qmp);
        let mut reset = false;
        // QEMU tells of it before a processor runs again.
        while qmp.wait_event(|event| event.name == "RESET", Duration::ZERO)?.is_some() {
            reset = true;
        }
        Ok(reset)
    }

    fn writes_untracked(&mut self) -> Result<Untracked, VmmError> {
        let mut qmp = lock(&self.qmp);
        let nodes = inspect::block_nodes(&mut qmp)?;
        if !nodes.foreign.is_empty() {
            return Err(refused(format!("others than QEMU write its RAM, unseen ({})", nodes.foreign.join(", "))));
        }
        if !nodes.unknown.is_empty() {
            return Ok(Untracked::Others);
        }
        let may_nest = match self.may_nest {
            Some(may_nest) => may_nest,
            None => *self.may_nest.insert(inspect::may_nest(&mut qmp)?),
        };
        if may_nest && registers::nests(&mut qmp)? {
            return Ok(Untracked::Others);
        }
        let Some(files) = self.process.pid().and_then(|pid| sterna_sys::process::open_files(pid).ok()) else {
            return Ok(Untracked::Others);
        };
        let files = past::files(&files);
        if nodes.direct.is_empty() && files.is_empty() {
            return Ok(Untracked::Nobody);
        }
        let by_calls = past::are_read_by_calls(&files) && !inspect::passes_commands(&mut qmp)?;
        Ok(if by_calls { Untracked::Reads } else { Untracked::Others })
    }

    fn begin(&mut self) -> Result<UnixStream, VmmError> {
        if self.begun.is_some() {
            return Err(refused("a switchover of this guest is under way already".to_owned()));
        }
        self.prepare()?;
        let ran = self.running()?;
        let mut qmp = lock(&self.qmp);
        // Before 8.2 a rollback would leave it neither asleep nor awake.
        if ran && qmp.version() < KEEPS_SUSPENDED && guest_status(&mut qmp)?.0 == SUSPENDED {
            return Err(refused("the guest sleeps (ACPI S3), which this QEMU cannot move: wake it first".to_owned()));
        }
        // An earlier migration's end must not be taken for this one's.
        qmp.drop_events()?;
        let stream = pass_socket(&mut qmp, SOCKET)?;
        let ours = stream
            .try_clone()
            .map_err(|source| VmmError::Connection { doing: "making the device state's sockets".to_owned(), source })?;
        // Noted first: a command without an answer in time may have begun all the same.
        self.begun = Some(Begun::new(ran, Some(ours)));
        let migrate = json!({ "uri": format!("fd:{SOCKET}") });
        if let Err(error) = qmp.execute("migrate", migrate, COMMAND_TIMEOUT) {
            if matches!(error, VmmError::Refused { .. }) {
                self.begun = None;
                withdraw_socket(&mut qmp, SOCKET);
            }
            return Err(error);
        }
        Ok(stream)
    }

    fn stopped(&mut self, timeout: Duration) -> Result<Option<Stopped>, VmmError> {
        let begun = self.begun.as_mut().ok_or_else(not_begun)?;
        if begun.stopped.is_some() {
            return Ok(begun.stopped);
        }
        let mut qmp = lock(&self.qmp);
        let deadline = Instant::now() + timeout;
        loop {
            let now = Instant::now();
            let force_at = begun.at + CONVERGENCE_TIMEOUT;
            if !begun.forced && now >= force_at {
                begun.forced = true;
                settings::stop_at_any_cost(&mut qmp)?;
            }
            let until = if begun.forced { deadline } else { deadline.min(force_at) };
            let event = wait_migration(&mut qmp, "pre-switchover", until.saturating_duration_since(now))?;
            // Under -no-shutdown a guest that switches itself off leaves QEMU and its migration alive.
            if let Some(error) = qmp.ended() {
                return Err(error);
            }
            match event {
                Some(event) if event.migration_status() == Some("pre-switchover") => {
                    begun.stopped =
                        Some(Stopped { stop: last_stop(&mut qmp)?.unwrap_or(event.time), ready: event.time });
                    return Ok(begun.stopped);
                }
                Some(event) => return Err(failure(&mut qmp, event.migration_status().unwrap_or_default())),
                None if Instant::now() >= deadline => return Ok(None),
                None => {}
            }
        }
    }

    fn save_devices(&mut self) -> Result<(), VmmError> {
        let begun = self.begun.as_mut().filter(|begun| begun.stopped.is_some()).ok_or_else(not_begun)?;
        // Now, because QEMU gives its disks away when it has saved the devices. A QEMU 7.2 that was told afterwards was
        // seen to refuse to let the guest run, for a lock of its own.
        disks::onto_overlays(&mut lock(&self.qmp), &std::mem::take(&mut self.overlays))?;
        // Noted first: a command without an answer in time may have had its effect all the same.
        begun.saving = true;
        let state = json!({ "state": "pre-switchover" });
        lock(&self.qmp).execute("migrate-continue", state, COMMAND_TIMEOUT).map(drop)
    }

    fn saved(&mut self, timeout: Duration) -> Result<(), VmmError> {
        if self.begun.is_none() {
            return Err(not_begun());
        }
        let mut qmp = lock(&self.qmp);
        match wait_migration(&mut qmp, "completed", timeout)? {
            Some(event) if event.migration_status() == Some("completed") => Ok(()),
            Some(event) => Err(failure(&mut qmp, event.migration_status().unwrap_or_default())),
            None => Err(VmmError::Silent { waiting_for: "device state".to_owned(), seconds: timeout.as_secs() }),
        }
    }

    fn rollback(&mut self) -> Result<(), VmmError> {
        let mut qmp = lock(&self.qmp);
        if let Some(begun) = &self.begun {
            let status = call_off(&mut qmp, begun)?;
            give_back(&mut qmp, &status, begun.ran)?;
            // Where QEMU never came to use it.
            withdraw_socket(&mut qmp, SOCKET);
            self.begun = None;
        }
        if let Some(former) = self.former.take() {
            former.put_back(&mut qmp);
        }
        Ok(())
    }

    fn resumed(&mut self) -> Option<EventTime> {
        let mut qmp = lock(&self.qmp);
        let event = qmp.wait_event(|event| event.name == "RESUME", Duration::ZERO);
        event.ok().flatten().map(|event| event.time)
    }

    fn ended(&mut self) -> Option<VmmError> {
        let ended = lock(&self.qmp).ended();
        ended.or_else(|| self.process.has_ended().then_some(VmmError::Gone { guest_off: false }))
    }

    fn quit(&mut self) {
        self.process.end(&self.qmp);
    }
}

/// The latest stop of the guest among the events, where there is one; all are taken out.
fn last_stop(qmp: &mut Qmp) -> Result<Option<EventTime>, VmmError> {
    let mut last = None;
    while let Some(event) = qmp.wait_event(|event| event.name == "STOP", Duration::ZERO)? {
        last = Some(event.time);
    }
    Ok(last)
}

/// Ends QEMU's migration and waits until QEMU has dealt with its end. Returns the guest's state.
///
/// It races with the migration's own end: whichever comes first, the state afterwards is one that `give_back` knows.
/// Three more races are QEMU's own:
/// - A `migrate_cancel` that meets a QEMU saving its devices: 7.2 can then let the guest run with its disks still given
///   away, and aborts at the guest's next write or the next migration (`!(bs->open_flags & BDRV_O_INACTIVE)`). So in
///   that state the stream is broken instead, and QEMU's own handling of the error takes the disks back. A QEMU that
///   was told to save may still say `pre-switchover`, and save by the time that a cancel comes: so that counts as
///   saving, too.
/// - A `migrate_cancel` just before `pre-switchover`: 7.2 stays `cancelling`, its guest stopped, and waits for the
///   `migrate-continue` of a pause that it never announced.
/// - The same in later versions: `pre-switchover` overwrites `cancelling`, and the cancel is lost. So it is said again.
fn call_off(qmp: &mut Qmp, begun: &Begun) -> Result<String, VmmError> {
    let began = Instant::now();
    let mut kick_at = began + STUCK_AFTER;
    let may_save = |migration: &str| migration == "device" || begun.saving && migration == "pre-switchover";
    loop {
        let migration = migration_status(qmp)?;
        let (guest, _) = guest_status(qmp)?;
        let stopped_by_qemu = guest == "finish-migrate";
        match migration.as_str() {
            // QEMU reports the end a moment before it decides on the guest.
            ended if has_ended(ended) => {
                if !stopped_by_qemu {
                    return Ok(guest);
                }
            }
            "cancelling" => {
                if stopped_by_qemu && Instant::now() >= kick_at {
                    // Refused where it has moved on; one wake-up too many does no harm, the next pause begins by eating
                    // it.
                    tracing::debug!("waking a cancelled migration that waits in its pause");
                    let _ = qmp.execute("migrate-continue", json!({ "state": "cancelling" }), COMMAND_TIMEOUT);
                    kick_at = Instant::now() + STUCK_AFTER;
                }
            }
            migration if may_save(migration) && began.elapsed() < SAVING_TIMEOUT => {
                if let Some(stream) = &begun.stream {
                    let _ = stream.shutdown(Shutdown::Both);
                }
            }
            _ => {
                qmp.execute("migrate_cancel", json!({}), COMMAND_TIMEOUT)?;
            }
        }
        if began.elapsed() >= CANCEL_TIMEOUT {
            let waiting_for = format!("migrate_cancel, its migration being '{migration}' and its guest '{guest}'");
            return Err(VmmError::Silent { waiting_for, seconds: CANCEL_TIMEOUT.as_secs() });
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Brings the guest back into the state it had, from the `status` that the end of the migration left it in.
fn give_back(qmp: &mut Qmp, status: &str, ran: bool) -> Result<(), VmmError> {
    match (status, ran) {
        // A guest stopped by its own doing or its disk (`io-error`, `guest-panicked`, `shutdown`, …) stays as it is.
        ("paused" | "postmigrate" | "prelaunch", true) => {
            qmp.execute("cont", json!({}), SLOW_COMMAND_TIMEOUT)?;
        }
        // QEMU refuses to migrate a guest from `postmigrate`, and only running leads out of it: a paused guest lives
        // for the fraction of a millisecond between these two.
        ("postmigrate", false) => {
            qmp.execute("cont", json!({}), SLOW_COMMAND_TIMEOUT)?;
            qmp.execute("stop", json!({}), SLOW_COMMAND_TIMEOUT)?;
        }
        _ => {}
    }
    Ok(())
}

fn refused(reason: String) -> VmmError {
    VmmError::Refused { command: "migrate".to_owned(), reason }
}

fn not_begun() -> VmmError {
    refused("no switchover stands where this could follow".to_owned())
}
