use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::{Duration, SystemTime};

use serde_json::json;

use super::commands::{COMMAND_TIMEOUT, SLOW_COMMAND_TIMEOUT, SharedQmp, guest_status, lock, processor_threads};
use super::log::ErrorLog;
use super::migration::{failure, pass_socket, wait_migration, withdraw_socket};
use super::network::{cards, set_link};
use super::process::QemuProcess;
use super::settings::Settings;
use crate::vmm::qmp::{Qmp, Version};
use crate::vmm::{Destination, EventTime, VmmError};

/// The name of the descriptor in QEMU.
const SOCKET: &str = "sterna-destination";

/// The first QEMU that can be told to live on and say why when it refuses device state.
const KNOWS_EXIT_ON_ERROR: Version = Version(9, 1, 0);

/// How long a QEMU that refused device state has to end, so that its log is complete.
const LAST_WORDS_TIMEOUT: Duration = Duration::from_secs(1);

/// A QEMU, started with `-incoming defer -S`, whose guest is moved here.
#[derive(Debug)]
pub struct QemuDestination {
    qmp: SharedQmp,
    process: QemuProcess,
    log: Option<ErrorLog>,
    stays_paused: bool,
    /// Its guest is a clone.
    clone: Option<Clone>,
}

/// What becomes of a clone's network.
#[derive(Debug, Clone, Copy)]
struct Clone {
    /// Its cards are connected, because its user said to what.
    connected: bool,
}

impl QemuDestination {
    /// Drives the QEMU at the other end of `qmp`, whose process is `process` and whose standard error goes to `log`.
    pub fn new(qmp: SharedQmp, process: QemuProcess, log: Option<ErrorLog>) -> Self {
        Self { qmp, process, log, stays_paused: false, clone: None }
    }

    /// Its guest was paused by its user, and is not let run when it has come.
    #[must_use]
    pub fn staying_paused(self) -> Self {
        Self { stays_paused: true, ..self }
    }

    /// Its guest is a clone of one that runs on: unless it is `connected`, by its user's word, its network cards have
    /// no link. QEMU announces its addresses once, before that: to what a card is connected to, which is nothing else.
    #[must_use]
    pub fn as_clone(self, connected: bool) -> Self {
        Self { clone: Some(Clone { connected }), ..self }
    }

    /// `error` with QEMU's last words, where it left some: then it says why it failed rather than that it is gone.
    fn explain(&self, error: VmmError) -> VmmError {
        self.process.wait(LAST_WORDS_TIMEOUT);
        let Some(words) = self.log.as_ref().and_then(ErrorLog::last_lines) else {
            return error;
        };
        match error {
            VmmError::Migration { reason } if reason.contains(&words) => VmmError::Migration { reason },
            VmmError::Migration { reason } => VmmError::Migration { reason: format!("{reason} ({words})") },
            VmmError::Gone { guest_off: false } => VmmError::Migration { reason: words },
            error => error,
        }
    }
}

impl Destination for QemuDestination {
    fn prepare(&mut self) -> Result<UnixStream, VmmError> {
        let mut qmp = lock(&self.qmp);
        Settings::for_destination(&mut qmp, self.stays_paused)?;
        if self.clone.is_some() {
            Settings::announce_once(&mut qmp)?;
        }
        qmp.drop_events()?;
        let stream = pass_socket(&mut qmp, SOCKET)?;
        let mut incoming = json!({ "uri": format!("fd:{SOCKET}") });
        if qmp.version() >= KNOWS_EXIT_ON_ERROR {
            incoming["exit-on-error"] = json!(false);
        }
        if let Err(error) = qmp.execute("migrate-incoming", incoming, COMMAND_TIMEOUT) {
            withdraw_socket(&mut qmp, SOCKET);
            // It would keep QEMU reading, were the descriptor in use after all.
            let _ = stream.shutdown(Shutdown::Both);
            return Err(error);
        }
        Ok(stream)
    }

    fn loaded(&mut self, timeout: Duration) -> Result<(), VmmError> {
        let mut qmp = lock(&self.qmp);
        let error = match wait_migration(&mut qmp, "completed", timeout) {
            Ok(Some(event)) if event.migration_status() == Some("completed") => {
                // Whether there is a link is part of a card's state.
                return if self.clone.is_some_and(|clone| !clone.connected) { cut_links(&mut qmp) } else { Ok(()) };
            }
            Ok(Some(event)) => failure(&mut qmp, event.migration_status().unwrap_or_default()),
            Ok(None) => {
                return Err(VmmError::Silent { waiting_for: "device state".to_owned(), seconds: timeout.as_secs() });
            }
            Err(error) => error,
        };
        drop(qmp);
        Err(self.explain(error))
    }

    fn alive(&mut self) -> Result<(), VmmError> {
        // A process that was killed takes milliseconds to end, with so much memory to let go; it answers nothing from
        // the first of them.
        let answer = guest_status(&mut lock(&self.qmp));
        answer.map(drop).map_err(|error| self.explain(error))
    }

    fn process(&self) -> Option<u32> {
        self.process.pid()
    }

    fn processor_threads(&mut self) -> Result<Vec<u32>, VmmError> {
        processor_threads(&mut lock(&self.qmp))
    }

    fn start(&mut self) -> Result<EventTime, VmmError> {
        let mut qmp = lock(&self.qmp);
        qmp.drop_events()?;
        qmp.execute("cont", json!({}), SLOW_COMMAND_TIMEOUT)?;
        if let Some(event) = resumed(&mut qmp, Duration::ZERO)? {
            return Ok(event.time);
        }
        // A guest that sleeps (ACPI S3) comes without an event from some versions.
        match guest_status(&mut qmp)? {
            (status, running) if running || status == "suspended" => match resumed(&mut qmp, Duration::ZERO)? {
                Some(event) => Ok(event.time),
                None => Ok(now()),
            },
            (status, _) => Err(VmmError::Refused {
                command: "cont".to_owned(),
                reason: format!("the guest does not run, its state is '{status}'"),
            }),
        }
    }

    fn quit(&mut self) {
        self.process.end(&self.qmp);
    }
}

fn cut_links(qmp: &mut Qmp) -> Result<(), VmmError> {
    cards(qmp)?.iter().try_for_each(|card| set_link(qmp, &card.name, false))
}

fn resumed(qmp: &mut Qmp, timeout: Duration) -> Result<Option<crate::vmm::qmp::Event>, VmmError> {
    qmp.wait_event(|event| event.name == "RESUME", timeout)
}

fn now() -> EventTime {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    EventTime(u64::try_from(since.as_micros()).unwrap_or(u64::MAX))
}
