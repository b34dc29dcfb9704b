//! The table of this host's machines.
//!
//! One table holds them all. Whoever begins something with a machine claims it first (`Hold`); nothing slow happens
//! under the table's lock.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sterna_api::{Blame, Code, Problem};
use sterna_engine::split::Split;

use super::files::remove_files;
use super::hold::Hold;
use super::missing::{Bringer, still_arriving};
use super::overlay::Overlay;
use super::record::{Lifecycle, VmRecord};
use super::split::{Remote, is_split};
use crate::problems::{busy, unknown_vm};
use crate::process::Identity;
use crate::qemu::launch::{last_lines, log_file};
use crate::state::{Outlives, StateDir, replace_record};

/// How long something that gives way to others may take for that.
const GIVE_WAY_TIMEOUT: Duration = Duration::from_secs(30);
/// How often it is looked whether it has.
const GIVE_WAY_POLL: Duration = Duration::from_millis(5);

/// A machine in the table.
#[derive(Debug, Clone)]
pub struct Entry {
    /// What is known of it; nothing while it is being started.
    pub record: Option<VmRecord>,
    /// What is being done with it.
    pub hold: Hold,
    /// More on it, for people.
    pub note: Option<String>,
    /// What brings its pages, where it runs here before all of them are here.
    pub pager: Option<Bringer>,
    /// What is elsewhere of it, where a part of its memory is at memory hosts.
    pub remote: Option<Arc<Remote>>,
    /// How often somebody has begun something with it.
    pub begun: u64,
    /// Held while its record is written.
    writing: Arc<Mutex<()>>,
    /// Held while something short is done with it that nobody sees: see `Machines::while_free`.
    resting: Arc<Mutex<()>>,
}

impl Entry {
    /// A machine with which this is being done.
    #[must_use]
    pub fn new(record: Option<VmRecord>, hold: Hold) -> Self {
        let (writing, resting) = (Arc::default(), Arc::default());
        Self { record, hold, note: None, pager: None, remote: None, begun: 0, writing, resting }
    }

    /// Whether this is still the machine of the record: its name may be another's by now.
    #[must_use]
    pub fn is(&self, record: &VmRecord) -> bool {
        self.runs_as(record.process)
    }

    /// The same, or it is being started and has no record yet.
    fn is_or_becomes(&self, record: &VmRecord) -> bool {
        self.record.is_none() || self.is(record)
    }

    fn runs_as(&self, process: Identity) -> bool {
        self.record.as_ref().is_some_and(|known| known.process == process)
    }
}

/// Counts that something begins with a machine, which is on hold already, and waits for what is done with it while it
/// is free. That looks at the table under its lock: so this is waited for without the table.
fn wait_for_rest(mut table: MutexGuard<'_, Table>, name: &str) {
    let Some(entry) = table.get_mut(name) else { return };
    entry.begun += 1;
    let resting = Arc::clone(&entry.resting);
    drop(table);
    drop(resting.lock().unwrap_or_else(PoisonError::into_inner));
}

/// The machines, by name.
pub type Table = HashMap<String, Entry>;

/// The machine of the table, another than this one, that has RAM in a file of this one's. Some day machines may share
/// files that none of them writes: those are for this to let pass.
#[must_use]
pub fn shares_ram(table: &Table, record: &VmRecord) -> Option<String> {
    let others = table.values().filter_map(|entry| entry.record.as_ref()).filter(|other| other.name != record.name);
    let shares = |other: &&VmRecord| other.backings().any(|a| record.backings().any(|b| a.file() == b.file()));
    others.into_iter().find(shares).map(|other| other.name.clone())
}

/// The machines of this host.
pub struct Machines {
    state: Arc<StateDir>,
    table: Mutex<Table>,
    forgotten: Box<dyn Fn(&VmRecord) + Send + Sync>,
}

impl fmt::Debug for Machines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Machines").field("table", &self.table).finish_non_exhaustive()
    }
}

impl Machines {
    /// No machines yet. `forgotten` hears of each machine that leaves the table because it has ended, before its files
    /// go.
    #[must_use]
    pub fn new(state: Arc<StateDir>, forgotten: impl Fn(&VmRecord) + Send + Sync + 'static) -> Self {
        Self { state, table: Mutex::default(), forgotten: Box::new(forgotten) }
    }

    /// The machines, to look at or change; nothing slow may happen while this is held.
    pub fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A machine's directory.
    #[must_use]
    pub fn dir(&self, name: &str) -> PathBuf {
        self.state.vm(name)
    }

    /// What is known of a machine at this moment.
    ///
    /// # Errors
    /// A [`Problem`] where there is none of this name.
    pub fn entry(&self, name: &str) -> Result<Entry, Problem> {
        self.table().get(name).cloned().ok_or_else(|| unknown_vm(name))
    }

    /// A machine's record as it is now; the one that is known where it is not on the list any more.
    #[must_use]
    pub fn now(&self, known: &VmRecord) -> VmRecord {
        let now = self.table().get(&known.name).filter(|entry| entry.is(known)).and_then(|entry| entry.record.clone());
        now.unwrap_or_else(|| known.clone())
    }

    /// What is elsewhere of a machine; `None` where all of it is here.
    pub fn remote(&self, name: &str) -> Option<Arc<Remote>> {
        self.table().get(name)?.remote.clone()
    }

    /// The same of a machine that is split.
    ///
    /// # Errors
    /// A [`Problem`]: this daemon could not go on with what is elsewhere.
    pub fn reach(&self, name: &str) -> Result<Arc<Remote>, Problem> {
        self.remote(name).ok_or_else(|| {
            let message = format!("nothing can bring the pages of '{name}' that are at memory hosts");
            Problem::new(Code::PagingLost, Blame::Host, message)
                .hint(format!("'sterna show {name}' says why; 'sterna stop {name} --force' ends it"))
        })
    }

    /// What brings and sends a machine's pages, where it is split.
    ///
    /// # Errors
    /// As [`reach`](Self::reach), or not all of its memory hosts have answered yet.
    pub fn split_of(&self, record: &VmRecord) -> Result<Option<Arc<Split>>, Problem> {
        let split = || Ok(Arc::clone(self.reach(&record.name)?.split()?));
        record.split.is_some().then(split).transpose()
    }

    /// Claims a machine that nobody else is busy with, or with something that gives way; then it takes as long as that.
    /// One whose pages are still to come can be stopped and nothing else; with one that is split nothing is done that
    /// looks at its memory.
    ///
    /// # Errors
    /// A [`Problem`]: unknown, or busy and with what.
    pub fn claim(&self, name: &str, hold: Hold) -> Result<VmRecord, Problem> {
        let deadline = Instant::now() + GIVE_WAY_TIMEOUT;
        loop {
            match self.claim_free(name, hold.clone()) {
                Err(_) if self.gives_way(name) && Instant::now() < deadline => std::thread::sleep(GIVE_WAY_POLL),
                claimed => return claimed,
            }
        }
    }

    fn gives_way(&self, name: &str) -> bool {
        self.table().get(name).is_some_and(|entry| entry.hold.gives_way())
    }

    fn claim_free(&self, name: &str, hold: Hold) -> Result<VmRecord, Problem> {
        let mut table = self.table();
        let entry = table.get_mut(name).ok_or_else(|| unknown_vm(name))?;
        match (&entry.hold, &entry.record) {
            (Hold::Free, Some(record)) => {
                if let Some(paging) = &record.paging
                    && !matches!(hold, Hold::Stopping)
                {
                    return Err(still_arriving(name, paging, entry.pager.as_ref()));
                }
                if record.split.is_some() && !hold.may_be_split() {
                    return Err(is_split(name));
                }
                let record = record.clone();
                entry.hold = hold;
                wait_for_rest(table, name);
                Ok(record)
            }
            (hold, _) => Err(busy(name, hold.describe())),
        }
    }

    /// Has something else be done with a machine that is claimed already.
    pub fn hold(&self, name: &str, hold: Hold) {
        let mut table = self.table();
        if let Some(entry) = table.get_mut(name) {
            let free = matches!(hold, Hold::Free);
            entry.hold = hold;
            if !free {
                wait_for_rest(table, name);
            }
        }
    }

    /// Does something short with a machine that belongs here, with which nobody does anything and whose pages are all
    /// here; `None` where it is not so. Whoever begins something with it meanwhile waits for the end of this, so what
    /// is done must not wait for anybody.
    pub fn while_free<T>(&self, name: &str, act: impl FnOnce(&VmRecord) -> T) -> Option<T> {
        let resting = Arc::clone(&self.table().get(name)?.resting);
        let _held = resting.lock().unwrap_or_else(PoisonError::into_inner);
        let free = |entry: &&Entry| matches!(entry.hold, Hold::Free) && Arc::ptr_eq(&entry.resting, &resting);
        let record = self.table().get(name).filter(free).and_then(|entry| entry.record.clone());
        let whole = |record: &VmRecord| record.paging.is_none() && record.split.is_none();
        let is_here = |record: &VmRecord| whole(record) && record.lifecycle == Lifecycle::Here;
        record.filter(is_here).map(|record| act(&record))
    }

    /// Gives a claimed machine back.
    pub fn release(&self, name: &str) {
        self.hold(name, Hold::Free);
    }

    /// Gives a claimed machine back. Its process may have ended meanwhile, seen by nobody: then it is forgotten.
    pub fn give_back(&self, record: &VmRecord) {
        self.release(&record.name);
        self.forget_if_ended(record);
    }

    /// Cancels what is being done with a machine: its migration, its estimate, or the taking of its free memory.
    ///
    /// # Errors
    /// A [`Problem`]: unknown, nothing to cancel, or past the point of no return.
    pub fn cancel(&self, name: &str) -> Result<(), Problem> {
        let hold = self.entry(name)?.hold;
        hold.cancel(name)
    }

    /// Writes a machine's record, to disk and then into the table.
    ///
    /// # Errors
    /// Where the disk refuses; the table then is unchanged.
    pub fn store(&self, record: &VmRecord) -> io::Result<()> {
        self.write(record, |entry| entry.is_or_becomes(record), Outlives::Host)
    }

    /// Writes the record of a machine that is being started as [`store`](Self::store) does, without waiting for the
    /// disk.
    ///
    /// # Errors
    /// As [`store`](Self::store).
    pub fn store_started(&self, record: &VmRecord) -> io::Result<()> {
        self.write(record, |entry| entry.is_or_becomes(record), Outlives::Daemon)
    }

    /// Writes the record of a machine as [`store`](Self::store) does, without waiting for the disk: what it says is of
    /// interest only for as long as its QEMU lives, and no QEMU outlives the host.
    ///
    /// # Errors
    /// As [`store`](Self::store).
    pub fn store_for_daemon(&self, record: &VmRecord) -> io::Result<()> {
        self.store_succession(record.process, record)
    }

    /// Writes the record of a machine whose QEMU is, or was until now, this process. It need not outlive the host: no
    /// QEMU does.
    ///
    /// # Errors
    /// As [`store`](Self::store).
    pub fn store_succession(&self, former: Identity, record: &VmRecord) -> io::Result<()> {
        self.write(record, |entry| entry.runs_as(former), Outlives::Daemon)
    }

    /// Writes a machine's record where `is_its` says that the name is still the machine's.
    fn write(&self, record: &VmRecord, is_its: impl Fn(&Entry) -> bool, outlives: Outlives) -> io::Result<()> {
        let gone = || io::Error::other("the machine is not on the list any more");
        let writing = self.table().get(&record.name).map(|entry| Arc::clone(&entry.writing)).ok_or_else(gone)?;
        // What is written last is what is in the table; and nothing is written while the machine's directory goes.
        let _alone = writing.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.table().get(&record.name).is_some_and(is_its) {
            return Err(gone());
        }
        replace_record(&self.dir(&record.name).join("vm.json"), record, outlives)?;
        if let Some(entry) = self.table().get_mut(&record.name) {
            entry.record = Some(record.clone());
        }
        Ok(())
    }

    /// Writes a machine's record, where nothing but the log can be told of a failure; whether it is on disk. In the
    /// table it stands either way, and goes to disk with whatever is written next; a daemon started anew finds out
    /// again.
    pub fn try_store(&self, record: &VmRecord) -> bool {
        let stored = self.store(record);
        if let Err(error) = &stored {
            tracing::error!(vm = %record.name, %error, "cannot write the machine's record");
            let mut table = self.table();
            let is_same = |known: &VmRecord| known.process == record.process;
            let known = table.get_mut(&record.name).and_then(|entry| entry.record.as_mut());
            if let Some(known) = known.filter(|known| is_same(known)) {
                *known = record.clone();
            }
        }
        stored.is_ok()
    }

    /// Gives up what cannot be looked after any more, for a reason that people should see.
    pub fn mark(&self, name: &str, note: impl Into<String>) {
        if let Some(entry) = self.table().get_mut(name) {
            entry.note = Some(note.into());
        }
    }

    /// Removes a machine that ended from the list, with its files. Does nothing where the name belongs to another by
    /// now.
    pub fn forget(&self, name: &str, process: Identity) {
        let (record, pager, remote, writing) = {
            let mut table = self.table();
            match table.get_mut(name) {
                Some(entry) if entry.runs_as(process) => {
                    // The name stays reserved until the files are gone.
                    entry.hold = Hold::Stopping;
                    let (pager, remote) = (entry.pager.take(), entry.remote.take());
                    (entry.record.clone(), pager, remote, Arc::clone(&entry.writing))
                }
                _ => return,
            }
        };
        if let Some(Bringer(pager)) = pager {
            pager.end();
        }
        if let Some(remote) = remote {
            // It may wait for a memory host that is silent, and nothing here waits for it.
            let ending = Arc::clone(&remote);
            let spawned = std::thread::Builder::new().name("end-split".into()).spawn(move || ending.end());
            if spawned.is_err() {
                remote.end();
            }
        }
        // Whoever writes its record now writes none into the directory of the next of its name.
        let _alone = writing.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(record) = record {
            (self.forgotten)(&record);
            self.remove_files_of(&record);
        }
        self.table().remove(name);
    }

    /// A clone that was to run on another host never ran: nothing of it stays, and of its overlays none that is empty.
    pub fn forget_clone(&self, record: &VmRecord) {
        record.overlays.iter().for_each(Overlay::remove);
        self.forget(&record.name, record.process);
    }

    fn remove_files_of(&self, record: &VmRecord) {
        let dir = self.dir(&record.name);
        for line in last_lines(&log_file(&dir), 3) {
            tracing::info!(vm = %record.name, "QEMU said: {line}");
        }
        remove_files(&dir, &record.own_files(), &self.state.logs());
    }

    /// A machine's process has ended. Whoever is moving or stopping it sees that itself.
    pub fn ended(&self, name: &str, process: Identity) {
        let free =
            self.table().get(name).is_some_and(|entry| entry.runs_as(process) && matches!(entry.hold, Hold::Free));
        if free {
            tracing::info!(vm = name, pid = process.pid, "QEMU has ended");
            self.forget(name, process);
        }
    }

    /// After a claim was released: the process may have ended meanwhile, seen by nobody.
    pub fn forget_if_ended(&self, record: &VmRecord) {
        if record.process.open().is_none() {
            self.ended(&record.name, record.process);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
    use std::time::Duration;

    use super::super::hold::InPlace;
    use super::*;

    /// The machines of a state directory of their own.
    pub(crate) struct List {
        pub(crate) machines: Arc<Machines>,
        pub(crate) state: Arc<StateDir>,
        pub(crate) directory: tempfile::TempDir,
    }

    impl List {
        /// `None` where this user may have none.
        pub(crate) fn new() -> Option<Self> {
            let directory = tempfile::tempdir().unwrap();
            let opened = StateDir::open(directory.path(), true);
            let state = Arc::new(opened.inspect_err(|error| println!("skipped: {error}")).ok()?);
            Some(Self { machines: Arc::new(Machines::new(Arc::clone(&state), |_| {})), state, directory })
        }
    }

    impl Drop for List {
        fn drop(&mut self) {
            self.state.unmount_if_empty();
        }
    }

    /// Fails where whoever begins something does not wait: then what is done at rest goes on beside it.
    #[test]
    fn nothing_is_done_at_rest_with_a_machine_once_somebody_has_begun_something() {
        let Some(list) = List::new() else { return };
        let machines = &list.machines;
        assert!(VmRecord::sample().huge_pages, "a guest of an earlier daemon may be in huge pages");
        machines.table().insert("m".into(), Entry::new(Some(VmRecord::sample()), Hold::Free));
        let (at_work, steps, ended) = (AtomicBool::new(false), AtomicU32::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !ended.load(Ordering::Acquire) {
                    machines.while_free("m", |_| {
                        at_work.store(true, Ordering::Release);
                        steps.fetch_add(1, Ordering::AcqRel);
                        std::thread::sleep(Duration::from_millis(2));
                        at_work.store(false, Ordering::Release);
                    });
                }
            });
            for turn in 1..=20 {
                let before = steps.load(Ordering::Acquire);
                while steps.load(Ordering::Acquire) == before {
                    std::thread::yield_now();
                }
                machines.claim("m", Hold::shared(&InPlace::new("it is being tried"))).expect("it is free");
                for _ in 0..20 {
                    assert!(!at_work.load(Ordering::Acquire), "something is done beside who has claimed it");
                    std::thread::sleep(Duration::from_micros(100));
                }
                assert_eq!(machines.entry("m").expect("it is there").begun, turn);
                machines.release("m");
            }
            ended.store(true, Ordering::Release);
        });
    }

    #[test]
    fn nothing_is_done_at_rest_with_a_machine_whose_pages_still_come_or_that_is_not_here() {
        let Some(list) = List::new() else { return };
        let machines = &list.machines;
        let id = sterna_engine::host::MigrationId(1);
        let paging = super::super::record::Paging { id, from: "b".into(), map: "/m".into(), held_back: false };
        let arriving = VmRecord { paging: Some(paging), ..VmRecord::sample() };
        let leaving = VmRecord { lifecycle: Lifecycle::Outgoing(id), ..VmRecord::sample() };
        for (record, may) in [(arriving, false), (leaving, false), (VmRecord::sample(), true)] {
            machines.table().insert("m".into(), Entry::new(Some(record), Hold::Free));
            assert_eq!(machines.while_free("m", |_| ()).is_some(), may);
        }
        assert!(machines.while_free("another", |_| ()).is_none());
    }

    #[test]
    fn a_record_is_looked_up_for_as_long_as_the_name_is_the_machines() {
        let Some(list) = List::new() else { return };
        let machines = &list.machines;
        let known = VmRecord::sample();
        assert_eq!(machines.now(&known), known);
        let stopped = VmRecord { waits_for_room: true, ..known.clone() };
        machines.table().insert("m".into(), Entry::new(Some(stopped.clone()), Hold::Free));
        assert_eq!(machines.now(&known), stopped);
        let another = VmRecord { process: Identity::nobody(), ..stopped };
        machines.table().insert("m".into(), Entry::new(Some(another), Hold::Free));
        assert_eq!(machines.now(&known), known, "another has its name");
    }
}
