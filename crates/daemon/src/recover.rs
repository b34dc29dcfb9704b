//! Recovery: what a restarted daemon finds, and what it does about it.
//!
//! By the machine's record and its migration's record:
//!
//! * **here**: the machine is looked after as before; write tracking that an observation left on ends, and a balloon
//!   that was inflated for a while is deflated
//! * **being moved away; nothing**: it is given back: QEMU's migration is cancelled and the guest runs again; this is
//!   tried until it works
//! * **being moved away; handing over**: it waits for the peer's verdict
//! * **being moved away; handing over, pages to follow**: the same, with or without its QEMU; where the peer has the
//!   guest, its pages are sent
//! * **being moved here; preparing or aborted**: QEMU is ended and its files are removed; the verdict is *aborted*
//! * **being moved here; committed**: it belongs here: it runs, if it ran at the source; this is tried until it works
//! * **here, or being moved here and committed; pages to come; all here**: the same, and its userfaultfd ends
//! * **the same; some are still to come**: the agent's userfaultfd and the map of missing pages are taken over; it
//!   runs, and waits for its source
//! * **the same, and they cannot be taken over; some are still to come**: it is stopped, and its userfaultfd stays
//!   open: otherwise pages would read as zeros
//!
//! * **here; split; nothing has left yet**: it is as any other
//! * **the same; pages may be away**: as with pages that are to come, and it waits for its memory hosts
//!
//! * **here; another QEMU was to have its guest, and has it not**: that QEMU is ended, and the guest given back
//! * **here; its guest is in another QEMU than before**: the former one is ended, and the guest let run
//!
//! * **here; being forked**: its RAM is looked at: private by now, or as it was; QEMU is asked which images it has;
//!   then the guest is let run. Overlays that were made, and that nobody uses, are removed
//!
//! * **here; it begins**: a clone that is whole: it is let run
//! * **held ready**: it is held on where its template is there, else ended. One that was being taken is held as long
//!   as its directory has its former name, and let run where it has the new one
//!
//! A machine whose QEMU is gone leaves the list. A directory without a record is a start that was never finished. A
//! directory whose record is unusable ([`load`](crate::machines::load)) is left alone, with all that may belong to it.

use std::collections::HashSet;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use sterna_api::{MemoryMode, Problem};
use sterna_engine::haste;
use sterna_engine::host::MigrationId;
use sterna_engine::memory::unneeded;
use sterna_engine::source::throttle::release_left_over;
use sterna_sys::file::{FileId, device_of};
use sterna_sys::path::Place;

use crate::care::Care;
use crate::disk_images;
use crate::fork;
use crate::fork::warm::WarmPools;
use crate::link::new_mac;
use crate::machines::backing::Backing;
use crate::machines::control::{end_other, give_back, let_run, quit_unknown, stop_tracking};
use crate::machines::files::remove_files;
use crate::machines::hold::Hold;
use crate::machines::images::Images;
use crate::machines::load::{Found, read_machines};
use crate::machines::overlay::Overlay;
use crate::machines::record::{Lifecycle, VmRecord};
use crate::machines::succession::Succession;
use crate::machines::table::{Entry, Machines};
use crate::migration::departures::Departures;
use crate::migration::paging::Pages;
use crate::migration::records::{Records, Stage};
use crate::migration::resuming;
use crate::migration::waiting::wait_for_verdict;
use crate::qemu::launch::qmp_socket;
use crate::reclaim::by_balloon::deflate_left_over;
use crate::several;
use crate::split::loans::Loans;
use crate::split::{self, Splits};
use crate::state::StateDir;

/// The parts that are needed to take up what an earlier daemon left.
#[derive(Debug)]
pub struct Recovery<'a> {
    /// The state directory.
    pub state: &'a StateDir,
    /// The machines, and their care.
    pub care: &'a Care,
    /// The pages that come after their guest.
    pub pages: &'a Arc<Pages>,
    /// This host as a source.
    pub departures: &'a Arc<Departures>,
    /// The files that RAM consists of once it was forked.
    pub images: &'a Arc<Images>,
    /// What clones can be made of, and those that are held ready.
    pub warm: &'a WarmPools,
    /// The part that splits machines.
    pub splits: &'a Arc<Splits>,
    /// What memory hosts have lent, and is to be given back.
    pub loans: &'a Loans,
}

impl Recovery<'_> {
    fn machines(&self) -> &Arc<Machines> {
        &self.care.machines
    }

    fn records(&self) -> &Records {
        &self.departures.records
    }

    /// Takes up what an earlier daemon left in the state directory.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn recover(&self) -> std::io::Result<()> {
        let nobodys = self.warm.templates.load()?;
        let Found { records, unfinished, unread } = read_machines(&self.state.vms())?;
        several::map(unfinished, |dir| self.clear_unfinished(&dir));
        // The records are as the disk has them: files that a full disk keeps from being recorded are still needed by
        // the next daemon.
        let overlays = records.iter().flat_map(fork::overlays::answered_for).cloned().chain(nobodys);
        let overlays: Vec<Overlay> = overlays.collect();
        let mut arguments: Vec<Vec<String>> = records.iter().map(|record| record.arguments.clone()).collect();
        arguments.push(self.warm.templates.named());
        let named = records.iter().flat_map(VmRecord::own_files).map(|file| file.path).collect();
        self.loans.load(&records);
        several::map(records, |record| self.recover_machine(record));
        if unread.is_empty() {
            fork::overlays::forget_unused(self.machines(), &overlays, &arguments);
            self.pages.forget_pages_of_nobody();
        }
        self.warm.templates.tidy();
        self.remove_stray_ram(&named, &unread);
        self.mark_what_is_common();
        Ok(())
    }

    /// Has pages given back of what private RAM consists of: an earlier daemon may have made it common, and died before
    /// it said so of the file. By now whatever needs a page maps it, or has a record that keeps it.
    fn mark_what_is_common(&self) {
        let pids: Vec<u32> = {
            let table = self.machines().table();
            let records = table.values().filter_map(|entry| entry.record.as_ref());
            let private = records.filter(|record| record.memory_mode == MemoryMode::Private);
            private.map(|record| record.process.pid).collect()
        };
        let marked = device_of(&self.state.ram())
            .map_err(io::Error::from)
            .and_then(|device| pids.into_iter().try_for_each(|pid| unneeded::mark_mapped(pid, device)));
        if let Err(error) = marked {
            tracing::warn!(%error, "some of what forks have made common stays when nobody needs it any more");
        }
    }

    fn recover_machine(&self, record: VmRecord) {
        let name = record.name.clone();
        let succession = record.succession.clone();
        if let Some(succession) = &succession {
            let dir = self.state.vm(&name);
            end_other(succession, &dir);
            succession.tidy(&name, &dir, &self.state.logs());
        }
        let running = record.process.open().is_some();
        self.machines().table().insert(name.clone(), Entry::new(Some(record.clone()), Hold::Stopping));
        tracing::info!(vm = %name, running, lifecycle = ?record.lifecycle, "found");
        if running {
            // The daemon may have died in its pause.
            haste::give_back(record.process.pid);
        }
        // A throttled guest must not stay throttled, and the control group of one that is gone must not stay.
        if matches!(record.lifecycle, Lifecycle::Outgoing(_)) {
            release_left_over(record.process.pid);
        }
        if !running && self.holds_pages(&record) {
            // Its guest may run elsewhere and need its pages: they are in its RAM files, with or without its QEMU.
            tracing::warn!(vm = %name, "its QEMU ended while the daemon was away, its RAM is still there");
        } else if !running {
            if let Lifecycle::Incoming(id) = record.lifecycle
                && self.records().stage(id) != Some(Stage::Committed)
            {
                self.records().abort(id);
            }
            if record.image && !self.may_be_handed_over(&record) {
                tracing::warn!(vm = %name, "a clone was on its way to another host, and never ran");
                return self.machines().forget_clone(&record);
            }
            if matches!(record.lifecycle, Lifecycle::Outgoing(_)) && !self.may_be_handed_over(&record) {
                // It was this host's, and so is what it was lent.
                let here = VmRecord { lifecycle: Lifecycle::Here, ..record.clone() };
                self.machines().table().insert(name.clone(), Entry::new(Some(here), Hold::Stopping));
            }
            tracing::warn!(vm = %name, "its QEMU ended while the daemon was away");
            if record.held.is_some() {
                return self.machines().forget_clone(&record);
            }
            return self.machines().forget(&name, record.process);
        }
        if record.split.is_some()
            && let Lifecycle::Incoming(id) = record.lifecycle
            && self.records().stage(id) != Some(Stage::Committed)
        {
            return self.recover_incoming(&record, id);
        }
        // First of all: what is away must not read as zeros, and QEMU itself may wait for it, and answer nobody.
        // Of a guest that was handed over, and whose QEMU has ended, its RAM files are all that is needed.
        let record = match running {
            true => split::recover::recover(self.splits, &record, self.may_be_handed_over(&record)),
            false => record,
        };
        if record.split.is_some() {
            return match record.lifecycle {
                Lifecycle::Here if record.paging.is_some() => self.pages.recover(&record, false),
                Lifecycle::Here => self.care.settle(&record),
                Lifecycle::Outgoing(id) => self.recover_outgoing(&record, id),
                Lifecycle::Incoming(id) => self.recover_incoming(&record, id),
            };
        }
        if let Some(succession) = succession
            && let Err(problem) = self.go_on(&record, &succession)
        {
            tracing::error!(vm = %name, "it does not run yet: {}", problem.message);
            return self.care.watch(&record);
        }
        if record.forking.is_some() {
            return self.recover_forking(&record);
        }
        if let Some(held) = &record.held {
            return self.warm.recover(&record, held);
        }
        // Those that were made for a pause that never came.
        if let Err(problem) = fork::overlays::recover(&record) {
            tracing::warn!(vm = %name, "it may have an overlay open that it does not use: {}", problem.with_causes());
        }
        let record = match disk_images::recover(self.machines(), &record) {
            Ok(record) => record,
            Err(problem) => {
                tracing::error!(vm = %name, "{}", problem.with_causes());
                self.machines().mark(&name, "which images its disks are cannot be told: restart sternad to ask again");
                return self.care.watch(&record);
            }
        };
        if record.begins && !self.runs(&record) {
            return;
        }
        match record.lifecycle {
            Lifecycle::Here if record.paging.is_some() => self.pages.recover(&record, false),
            Lifecycle::Here => {
                if let Err(problem) = record.check_template() {
                    tracing::error!(vm = %name, "{}", problem.message);
                }
                // The daemon may have died while it observed the machine, or took memory from its guest.
                stop_tracking(&record);
                let begun = !record.new_cards.is_empty();
                self.care.settle(&deflate_left_over(record));
                if begun {
                    new_mac::go_on_later(self.machines(), &name);
                }
            }
            Lifecycle::Outgoing(id) => self.recover_outgoing(&record, id),
            Lifecycle::Incoming(id) => self.recover_incoming(&record, id),
        }
    }

    /// Lets the guest of a machine run on that was being forked.
    fn recover_forking(&self, forking: &VmRecord) {
        let record = match fork::end_of_fork(self.machines(), self.images, forking) {
            Ok(record) => record,
            Err(problem) => {
                tracing::error!(vm = %forking.name, "it was being forked: {}", problem.with_causes());
                self.care.watch(forking);
                return fork::go_on_once_known(self.machines(), self.images, forking, problem.with_causes());
            }
        };
        if let Err(problem) = give_back(&record) {
            self.care.watch(&record);
            return resuming::go_on_here(self.machines(), &record, false, problem.with_causes());
        }
        self.care.settle(&record);
    }

    /// Lets the guest of a machine run on whose QEMU was being replaced.
    fn go_on(&self, record: &VmRecord, succession: &Succession) -> Result<(), Problem> {
        let replaced = matches!(succession, Succession::Done { .. });
        let runs = if replaced { let_run(record, &self.state.vm(&record.name)) } else { give_back(record) };
        runs.inspect_err(|problem| resuming::go_on_here(self.machines(), record, replaced, problem.with_causes()))
    }

    /// Whether its guest was handed over and may still need pages that only this host has.
    fn holds_pages(&self, record: &VmRecord) -> bool {
        let Lifecycle::Outgoing(id) = record.lifecycle else { return false };
        matches!(self.records().stage(id), Some(Stage::HandingOver { postcopy: Some(_), .. }))
    }

    /// Whether something is known of its being handed over.
    fn may_be_handed_over(&self, record: &VmRecord) -> bool {
        matches!(record.lifecycle, Lifecycle::Outgoing(id) if self.records().stage(id).is_some())
    }

    fn recover_outgoing(&self, record: &VmRecord, id: MigrationId) {
        match self.records().stage(id) {
            Some(Stage::HandingOver { peer, .. }) => {
                self.care.watch(record);
                return wait_for_verdict(self.departures, record, id, &peer);
            }
            None => {}
            // No source writes this stage, so the record was unreadable. The guest may run elsewhere.
            Some(stage) => {
                tracing::error!(vm = %record.name, %id, ?stage, "it may have been handed over: it stays stopped");
                self.machines().mark(
                    &record.name,
                    "its migration's record cannot be read: it may run elsewhere, and must not run here",
                );
                self.care.watch(record);
                return wait_for_verdict(self.departures, record, id, "an unknown host");
            }
        }
        if let Err(problem) = give_back(record) {
            self.care.watch(record);
            return resuming::give_back(self.machines(), self.records(), record, id, Some(problem.with_causes()));
        }
        self.care.settle(record);
    }

    /// Lets the guest of a machine run that belongs here. Where that does not work at once, it is tried until it does.
    fn runs(&self, record: &VmRecord) -> bool {
        let Err(problem) = let_run(record, &self.state.vm(&record.name)) else { return true };
        tracing::error!(vm = %record.name, "cannot let it run: {}", problem.message);
        self.care.watch(record);
        resuming::let_run(self.machines(), record, problem.with_causes());
        false
    }

    fn recover_incoming(&self, record: &VmRecord, id: MigrationId) {
        if self.records().stage(id) == Some(Stage::Committed) {
            if record.paging.is_some() {
                return self.pages.recover(record, true);
            }
            if self.runs(record) {
                self.care.settle(record);
            }
            return;
        }
        self.records().abort(id);
        if let Some(process) = record.process.open() {
            process.kill();
        }
        self.machines().forget(&record.name, record.process);
    }

    /// Removes a start that was never finished: its QEMU, if there is one, belongs to nobody.
    fn clear_unfinished(&self, dir: &std::path::Path) {
        tracing::warn!(dir = %dir.display(), "removing a machine whose start was never finished");
        // Earlier daemons had the socket beside the record.
        for socket in [qmp_socket(dir), dir.join("qmp.sock")] {
            quit_unknown(&socket);
        }
        remove_files(dir, &[], &self.state.logs());
    }

    /// Removes RAM files that belong to no machine: no record has them, neither by identity nor by name (`named`), and
    /// their name does not begin with that of a machine whose record is `unread`.
    fn remove_stray_ram(&self, named: &HashSet<PathBuf>, unread: &[String]) {
        let files: HashSet<FileId> = {
            let table = self.machines().table();
            let records = table.values().filter_map(|entry| entry.record.as_ref());
            records.flat_map(VmRecord::backings).map(Backing::file).collect()
        };
        for entry in std::fs::read_dir(self.state.ram()).into_iter().flatten().flatten() {
            let path = entry.path();
            let name = entry.file_name().to_string_lossy().into_owned();
            let may_be_of =
                |machine: &String| name.strip_prefix(machine.as_str()).is_some_and(|rest| rest.starts_with('-'));
            // An image's file has a rule of its own, and what is lent is another part's.
            if Images::is_name(&name) || path == self.state.lent() {
                continue;
            }
            let stray = match Place::at(&path).and_then(|place| place.id()) {
                Ok(file) => !named.contains(&path) && !files.contains(&file),
                // A file that cannot be looked at may belong to a machine.
                Err(_) => false,
            };
            if !stray {
                continue;
            }
            if let Some(machine) = unread.iter().find(|machine| may_be_of(machine)) {
                tracing::warn!(
                    path = %path.display(), machine,
                    "left alone: it may be RAM of a machine whose record cannot be used"
                );
                continue;
            }
            tracing::warn!(path = %path.display(), "removing a RAM file of no machine");
            let _ = std::fs::remove_file(&path);
        }
    }
}
