//! Stopping machines, and what happens when one ends.
//!
//! When a guest switches itself off or its QEMU dies, the machine leaves the list: its RAM file and directory go, what QEMU said last
//! stays as `STATE/logs/NAME.log`.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use sterna_api::{Blame, Code, Phase, Problem};
use sterna_engine::monitor::Monitor;

use super::control::Control;
use super::paging::{self, Bringer};
use super::record::VmRecord;
use super::run::remove_files;
use super::{Daemon, Hold};
use crate::migration::records::Pages;
use crate::problems::{busy, unknown_vm};
use crate::process::Identity;
use crate::qemu::launch::{last_lines, log_file};

/// How long a guest has to switch itself off.
const POWERDOWN_TIMEOUT: Duration = Duration::from_secs(30);
/// How long QEMU has to end when it is told to.
const QUIT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a migration that was given up has to end.
const GIVE_UP_TIMEOUT: Duration = Duration::from_secs(30);

impl Daemon {
    /// Stops a machine: asks the guest to switch itself off, or with `force` ends QEMU at once. Of a machine whose guest runs elsewhere
    /// and still needs pages of here only `force` ends what is left.
    ///
    /// # Errors
    /// A [`Problem`]: unknown, busy, or the guest does not react.
    pub fn stop(&self, name: &str, force: bool) -> Result<(), Problem> {
        if let Some((to, monitor)) = self.serves_pages(name) {
            return self.give_up(name, force, &to, &monitor);
        }
        let record = self.claim_to_stop(name, force)?;
        if force {
            self.end_qemu(&record);
        } else if let Err(problem) = self.power_down(&record) {
            self.release(name);
            self.forget_if_ended(&record);
            return Err(match self.waits_for_pages(name) {
                Some(why) => problem.hint(format!("{why}; 'sterna stop --force' ends it at once")),
                None => problem,
            });
        }
        self.forget(name, record.process);
        Ok(())
    }

    /// What a machine waits for that runs here before all its pages are here, where their host is away.
    fn waits_for_pages(&self, name: &str) -> Option<String> {
        let (arriving, why) = self.table().get(name).and_then(paging::describe)?;
        arriving.waiting_ms.map(|_| why)
    }

    /// Where a machine's guest runs, if it runs elsewhere and still needs pages of here, and the migration that sends them.
    fn serves_pages(&self, name: &str) -> Option<(String, Arc<Monitor>)> {
        let monitor = match &self.table().get(name)?.hold {
            Hold::Leaving(monitor) => Arc::clone(monitor),
            _ => return None,
        };
        let serves = monitor.progress().phase == Phase::Postcopy;
        serves.then(|| (self.jobs.peer_of(&monitor).unwrap_or_default(), monitor))
    }

    /// Ends what is left of a machine whose guest runs elsewhere and still needs pages of here.
    fn give_up(&self, name: &str, force: bool, to: &str, monitor: &Monitor) -> Result<(), Problem> {
        let pages = monitor.progress().pages_left;
        let process = self.table().get(name).and_then(|entry| entry.record.as_ref()).map(|record| record.process);
        if !force {
            let message = format!("'{name}' runs at {to} and needs {pages} pages that only this host has");
            let hint = format!(
                "stop it there. '--force' here gives them up: the guest at {to} loses its missing pages, and waits for them for ever"
            );
            return Err(Problem::new(Code::ServingPages, Blame::Request, message).hint(hint));
        }
        tracing::warn!(vm = name, to, pages, "its user gives up the pages that its guest there still needs");
        monitor.give_up();
        let deadline = Instant::now() + GIVE_UP_TIMEOUT;
        while self.table().get(name).is_some_and(|entry| entry.record.as_ref().map(|record| record.process) == process)
        {
            if Instant::now() > deadline {
                let message = format!("the pages of '{name}' are given up, but its migration has not ended yet");
                let hint = format!("'sterna show {name}' says how far it is");
                return Err(Problem::new(Code::StillEnding, Blame::Ours, message).hint(hint));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// A machine whose peer never answers can be given up by force: that is the user's decision alone.
    fn claim_to_stop(&self, name: &str, force: bool) -> Result<VmRecord, Problem> {
        let (waiting, stays) = {
            let table = self.table();
            let entry = table.get(name).ok_or_else(|| unknown_vm(name))?;
            let stays = matches!(entry.hold, Hold::Resuming(_));
            let waits = matches!(entry.hold, Hold::WaitingForPeer { .. });
            ((waits || stays).then(|| entry.record.clone()).flatten(), stays)
        };
        match waiting {
            Some(record) if force => Ok(record),
            Some(_) if stays => Err(busy(name, "it is stopped after a migration, and being let run").hint(format!(
                "'sterna show {name}' says why that has not worked yet; 'stop --force' ends the guest as it is"
            ))),
            Some(_) => Err(busy(name, "it was handed over to a peer that has not answered yet").hint(
                "ask there first; 'stop --force' gives this side up, and with it pages that the guest there may still need",
            )),
            None => self.claim(name, Hold::Stopping),
        }
    }

    fn power_down(&self, record: &VmRecord) -> Result<(), Problem> {
        let Some(process) = record.process.open() else { return Ok(()) };
        let mut control = Control::connect(&record.qmp)?;
        let status = control.status()?;
        if status != "running" {
            return Err(Problem::new(
                Code::NotRunning,
                Blame::Guest,
                format!("'{}' cannot switch itself off: QEMU says '{status}'", record.name),
            )
            .hint("'sterna stop --force' ends it at once"));
        }
        control.send("system_powerdown")?;
        if process.wait(Some(POWERDOWN_TIMEOUT)) {
            return Ok(());
        }
        let seconds = POWERDOWN_TIMEOUT.as_secs();
        Err(Problem::new(
            Code::GuestIgnoresPowerdown,
            Blame::Guest,
            format!("'{}' did not switch itself off within {seconds} s", record.name),
        )
        .hint("it may still do so; 'sterna stop --force' ends it at once"))
    }

    /// Ends a machine's QEMU: told to, then killed.
    pub fn end_qemu(&self, record: &VmRecord) {
        let Some(process) = record.process.open() else { return };
        let told = Control::connect(&record.qmp).and_then(|mut control| control.send("quit"));
        if told.is_err() || !process.wait(Some(QUIT_TIMEOUT)) {
            process.kill();
        }
    }

    /// Removes a machine that ended from the list, with its files. Does nothing where the name belongs to another by now.
    pub fn forget(&self, name: &str, process: Identity) {
        let (record, pager, writing) = {
            let mut table = self.table();
            match table.get_mut(name) {
                Some(entry) if entry.record.as_ref().is_some_and(|record| record.process == process) => {
                    // The name stays reserved until the files are gone.
                    entry.hold = Hold::Stopping;
                    (entry.record.clone(), entry.pager.take(), Arc::clone(&entry.writing))
                }
                _ => return,
            }
        };
        if let Some(Bringer(pager)) = pager {
            pager.end();
        }
        // Whoever writes its record now writes none into the directory of the next of its name.
        let _alone = writing.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(record) = record {
            if let Some(paging) = &record.paging {
                // Whoever still holds pages of it learns that nobody needs them.
                self.records.pages_are(paging.id, Pages::Gone);
            }
            self.remove_files_of(&record);
        }
        self.table().remove(name);
    }

    /// Removes a machine's files.
    pub fn remove_files_of(&self, record: &VmRecord) {
        let dir = self.state.vm(&record.name);
        for line in last_lines(&log_file(&dir), 3) {
            tracing::info!(vm = %record.name, "QEMU said: {line}");
        }
        remove_files(&dir, &record.own_files(), &self.state.logs());
    }

    /// Looks after a machine's process for as long as it lives, and after its balloon.
    pub fn watch(self: &Arc<Self>, record: &VmRecord) {
        let (daemon, name, process) = (Arc::clone(self), record.name.clone(), record.process);
        let watch = move || {
            if let Some(handle) = process.open() {
                let _ = handle.wait(None);
            }
            daemon.ended(&name, process);
        };
        let spawned = std::thread::Builder::new().name(format!("watch-{}", record.name)).spawn(watch);
        if let Err(error) = spawned {
            tracing::error!(vm = %record.name, %error, "cannot watch the machine's process");
        }
        self.keep_balloon(record);
    }

    /// A machine's process has ended. Whoever is moving or stopping it sees that itself.
    fn ended(&self, name: &str, process: Identity) {
        let free = self.table().get(name).is_some_and(|entry| {
            entry.record.as_ref().is_some_and(|record| record.process == process) && matches!(entry.hold, Hold::Free)
        });
        if free {
            tracing::info!(vm = name, pid = process.pid, "QEMU has ended");
            self.forget(name, process);
        }
    }

    /// After a claim was released: the process may have ended meanwhile, unseen by [`Daemon::watch`].
    pub fn forget_if_ended(&self, record: &VmRecord) {
        if record.process.open().is_none() {
            self.ended(&record.name, record.process);
        }
    }

    /// Gives up what cannot be looked after any more, for a reason that people should see.
    pub fn mark(&self, name: &str, note: impl Into<String>) {
        if let Some(entry) = self.table().get_mut(name) {
            entry.note = Some(note.into());
        }
    }
}
