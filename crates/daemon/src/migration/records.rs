//! Records of what became of migrations. They are durable, because the other end's decision depends on them.
//!
//! A record of the source says that the guest may run elsewhere; one of the destination is the verdict that the source
//! may ask for.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use sterna_api::MigrateOptions;
use sterna_engine::host::{DaemonId, MigrationId, Verdict};

use crate::machines::record::VmRecord;
use crate::process::boot_id;
use crate::state::{Outlives, read_record, replace_record};

/// The most aborted migrations that are remembered. A peer that may send machines here can abort as many as it likes
/// before they arrive.
const KEEP_ABORTED: usize = 10_000;
/// The most committed migrations, with all pages here, that are remembered, 200 bytes each. Each was a guest that ran
/// here.
const KEEP_COMMITTED: usize = 100_000;

/// The stage of a migration, as far as it must be remembered.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stage {
    /// Source: the peer may run the guest from now on.
    HandingOver {
        /// The destination daemon's present address.
        peer: String,
        /// The migration's options, where the guest there still needs pages from here.
        #[serde(default)]
        postcopy: Option<Box<MigrateOptions>>,
        /// The daemon that accepted the guest, at whatever address: only its word counts. `None` where it was too old
        /// to say who it is.
        #[serde(default)]
        daemon: Option<DaemonId>,
    },
    /// Destination: its QEMU waits for the guest.
    Preparing,
    /// Destination: the guest belongs here.
    Committed,
    /// Destination: the guest never belongs here.
    Aborted,
}

/// The state of pages that come after their guest's start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Pages {
    /// Some pages are missing.
    Coming,
    /// All pages are here.
    Here,
    /// The guest ended before all pages were here.
    Gone,
}

/// A migration's record.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MigrationRecord {
    /// The migration.
    pub id: MigrationId,
    /// The machine's name, where it is known.
    pub vm: Option<String>,
    /// Its stage.
    pub stage: Stage,
    /// When this was written, seconds since the epoch; for people alone, because clocks jump.
    pub at_s: u64,
    /// The serial number of this record among all that this host has written.
    #[serde(default)]
    pub number: u64,
    /// The host's boot in which it was written.
    #[serde(default)]
    pub boot: u128,
    /// Destination: the daemon that sends the machine, where it showed a certificate. Only that one may ask for the
    /// verdict.
    #[serde(default)]
    pub from: Option<String>,
    /// Destination: the state of the pages that come after the guest's start, where some do.
    #[serde(default)]
    pub pages: Option<Pages>,
}

/// Why a daemon that asks for a verdict gets none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoVerdict {
    /// The migration was begun by another daemon than the one that asks.
    AnotherDaemons,
    /// The migration was begun here: this host is its source, and has no verdict on it.
    BegunHere,
    /// The migration is unknown.
    Unknown,
}

/// All records of this host.
///
/// A record that was forgotten, because there were too many, is answered as an unknown one, and the daemon that asks
/// goes on waiting. So forgetting never gives a guest a second life, and the bound on records costs at worst a person's
/// time.
#[derive(Debug)]
pub struct Records {
    dir: PathBuf,
    boot: u128,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    records: HashMap<MigrationId, MigrationRecord>,
    /// The serial number of the next record.
    next: u64,
}

impl Records {
    /// Reads the records that are there, and removes those that are too many.
    ///
    /// # Errors
    /// The directory cannot be read. An unreadable file counts as a commit, and is logged.
    pub fn load(dir: &Path) -> io::Result<Self> {
        let mut records = HashMap::new();
        for entry in std::fs::read_dir(dir)? {
            let path = entry?.path();
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            match read_record::<MigrationRecord>(&path) {
                Ok(Some(record)) => {
                    records.insert(record.id, record);
                }
                Ok(None) => {}
                Err(error) => {
                    tracing::error!(path = %path.display(), %error, "cannot read a migration's record");
                    // A host that went down can leave a commit's record damaged: it must not count as a guest that
                    // never came.
                    if let Some(id) = path.file_stem().and_then(|stem| u128::from_str_radix(stem.to_str()?, 16).ok()) {
                        let id = MigrationId(id);
                        let torn = MigrationRecord {
                            id,
                            vm: None,
                            stage: Stage::Committed,
                            at_s: now_s(),
                            number: 0,
                            boot: 0,
                            from: None,
                            pages: None,
                        };
                        records.insert(id, torn);
                    }
                }
            }
        }
        let next = records.values().map(|record: &MigrationRecord| record.number).max().map_or(0, |last| last + 1);
        let records = Self { dir: dir.into(), boot: boot_id()?, table: Mutex::new(Table { records, next }) };
        records.prune(&mut records.lock(), KEEP_ABORTED, KEEP_COMMITTED);
        Ok(records)
    }

    /// The stage a migration has reached.
    #[must_use]
    pub fn stage(&self, id: MigrationId) -> Option<Stage> {
        self.lock().records.get(&id).map(|record| record.stage.clone())
    }

    /// The daemon that took the guest that was handed over, where that is known.
    #[must_use]
    pub fn accepted_by(&self, id: MigrationId) -> Option<DaemonId> {
        match self.stage(id) {
            Some(Stage::HandingOver { daemon, .. }) => daemon,
            _ => None,
        }
    }

    /// The address of the destination of a guest that was handed over.
    #[must_use]
    pub fn peer_now(&self, id: MigrationId) -> Option<String> {
        match self.stage(id) {
            Some(Stage::HandingOver { peer, .. }) => Some(peer),
            _ => None,
        }
    }

    /// Notes that a machine has ended here. A source that still holds its pages learns that nobody needs them.
    pub fn machine_ended(&self, machine: &VmRecord) {
        if let Some(paging) = &machine.paging {
            self.pages_are(paging.id, Pages::Gone);
        }
    }

    /// Writes a stage down.
    ///
    /// # Errors
    /// The stage could not be written; then the old one stands.
    pub fn write(&self, id: MigrationId, vm: Option<&str>, stage: Stage) -> io::Result<()> {
        let mut table = self.lock();
        let from = table.records.get(&id).and_then(|record| record.from.clone());
        let record = self.fresh(id, vm.map(String::from), stage);
        self.put(&mut table, MigrationRecord { from, ..record })
    }

    /// Records that a machine comes here, and from whom. This call comes first for every migration that this host
    /// remembers as its destination.
    ///
    /// # Errors
    /// As [`write`](Self::write); [`AlreadyExists`](io::ErrorKind::AlreadyExists) where a migration of that number is
    /// on record.
    pub fn prepare(&self, id: MigrationId, vm: &str, from: Option<&str>) -> io::Result<()> {
        let mut table = self.lock();
        if table.records.contains_key(&id) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        self.prune(&mut table, KEEP_ABORTED, KEEP_COMMITTED);
        let record = self.fresh(id, Some(vm.into()), Stage::Preparing);
        self.put(&mut table, MigrationRecord { from: from.map(String::from), ..record })
    }

    /// Forgets a machine that was refused after all, before its source was told yes: a source that was not told yes
    /// never asks. Where somebody asked all the same, the record of the answer stays.
    pub fn refused(&self, id: MigrationId) {
        let mut table = self.lock();
        if table.records.get(&id).is_some_and(|record| record.stage == Stage::Preparing) {
            self.remove_from(&mut table, id);
        }
    }

    /// Moves from [`Stage::Preparing`] to [`Stage::Committed`]: only where nobody was told before that it was aborted.
    /// With `postcopy` pages are missing.
    ///
    /// # Errors
    /// The migration is not being prepared (any more), or the record could not be written.
    pub fn commit(&self, id: MigrationId, postcopy: bool) -> io::Result<()> {
        let mut table = self.lock();
        match table.records.get(&id).cloned() {
            Some(record) if record.stage == Stage::Preparing => {
                let pages = postcopy.then_some(Pages::Coming);
                self.put(&mut table, MigrationRecord { stage: Stage::Committed, pages, ..record })
            }
            Some(MigrationRecord { stage: Stage::Committed, .. }) => Ok(()),
            other => {
                let stage = other.map(|record| record.stage);
                Err(io::Error::other(format!("the migration cannot be committed: {stage:?}")))
            }
        }
    }

    /// The state of the pages that come after the guest's start; `None` where none do, or the record was forgotten.
    #[must_use]
    pub fn pages(&self, id: MigrationId) -> Option<Pages> {
        let table = self.lock();
        let record = table.records.get(&id)?;
        if self.went_down(record) { Some(Pages::Gone) } else { record.pages }
    }

    /// The migrations with missing pages.
    #[must_use]
    pub fn coming(&self) -> Vec<MigrationId> {
        let coming = |record: &&MigrationRecord| record.pages == Some(Pages::Coming);
        self.lock().records.values().filter(coming).map(|record| record.id).collect()
    }

    /// Notes that the missing pages are here, or not needed any more. Does nothing where none were missing.
    pub fn pages_are(&self, id: MigrationId, pages: Pages) {
        let mut table = self.lock();
        let coming = table.records.get(&id).filter(|record| record.pages == Some(Pages::Coming));
        let Some(record) = coming.cloned() else { return };
        let record = MigrationRecord { pages: Some(pages), ..record };
        if let Err(error) = self.put(&mut table, record.clone()) {
            // The change is in force in memory: a restarted daemon finds it out again from the machine, or from its
            // absence.
            tracing::error!(%id, %error, "cannot write down what became of a guest's pages");
            table.records.insert(id, record);
        }
    }

    /// Whether the daemon that asks may know of a migration: the one that began it may, or any daemon where that one
    /// showed no certificate.
    #[must_use]
    pub fn may_ask(&self, id: MigrationId, asks: Option<&str>) -> bool {
        may_ask(&self.lock(), id, asks)
    }

    /// The verdict for the daemon that asks. It is final: a migration that is not committed now never will be.
    ///
    /// # Errors
    /// [`NoVerdict`]: such a question settles and writes nothing.
    pub fn verdict_for(&self, id: MigrationId, asks: Option<&str>) -> Result<Verdict, NoVerdict> {
        let mut table = self.lock();
        let record = table.records.get(&id).ok_or(NoVerdict::Unknown)?;
        if matches!(record.stage, Stage::HandingOver { .. }) {
            return Err(NoVerdict::BegunHere);
        }
        if !may_ask(&table, id, asks) {
            return Err(NoVerdict::AnotherDaemons);
        }
        Ok(self.settle(&mut table, id))
    }

    /// Ends a migration to here for good, unless it is committed. Returns which of both it is. A migration that is not
    /// on record leaves no record.
    pub fn abort(&self, id: MigrationId) -> Verdict {
        self.settle(&mut self.lock(), id)
    }

    fn settle(&self, table: &mut Table, id: MigrationId) -> Verdict {
        let Some(record) = table.records.get(&id).cloned() else { return Verdict::Aborted };
        match &record.stage {
            Stage::Committed => return Verdict::Committed,
            // The host went down while the guest was on its way. The guest may have run here, and others may have seen
            // its actions. It went down with the host; letting it run again from an earlier state would be a second
            // life.
            Stage::Preparing if self.went_down(&record) => return Verdict::Committed,
            Stage::Preparing => {}
            // This was the answer before; or the record is a source's, which says nothing about this migration's end
            // here.
            Stage::Aborted | Stage::HandingOver { .. } => return Verdict::Aborted,
        }
        let record = MigrationRecord { stage: Stage::Aborted, ..record };
        if let Err(error) = self.put(table, record.clone()) {
            // The verdict is in force in memory: it binds until a restart, and a restart aborts what was not committed.
            tracing::error!(%id, %error, "cannot write a verdict down");
            table.records.insert(id, record);
        }
        Verdict::Aborted
    }

    /// Whether a machine was on its way here when the host went down.
    fn went_down(&self, record: &MigrationRecord) -> bool {
        record.stage == Stage::Preparing && record.boot != self.boot
    }

    /// Forgets a migration whose end nobody can ask for.
    pub fn remove(&self, id: MigrationId) {
        self.remove_from(&mut self.lock(), id);
    }

    fn remove_from(&self, table: &mut Table, id: MigrationId) {
        table.records.remove(&id);
        let path = self.path(id);
        // In memory it is gone all the same. The next daemon finds the file and asks again, or remembers one verdict
        // more.
        if let Err(error) = std::fs::remove_file(&path)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::error!(path = %path.display(), %error, "cannot remove a migration's record");
        }
    }

    /// Forgets the verdicts that are too many, the oldest first. Migrations with missing pages stay, and so do those
    /// that this host itself waits for.
    fn prune(&self, table: &mut Table, aborted: usize, committed: usize) {
        for (stage, keep) in [(Stage::Aborted, aborted), (Stage::Committed, committed)] {
            let done = |record: &&MigrationRecord| record.stage == stage && record.pages != Some(Pages::Coming);
            let records = table.records.values().filter(done);
            let mut done: Vec<(u64, u64, MigrationId)> =
                records.map(|record| (record.number, record.at_s, record.id)).collect();
            let surplus = done.len().saturating_sub(keep);
            if surplus > 0 {
                done.sort_unstable_by_key(|(number, at_s, _)| (*number, *at_s));
                done[..surplus].iter().for_each(|(_, _, id)| self.remove_from(table, *id));
            }
        }
    }

    /// A record of this moment.
    fn fresh(&self, id: MigrationId, vm: Option<String>, stage: Stage) -> MigrationRecord {
        MigrationRecord { id, vm, stage, at_s: now_s(), number: 0, boot: self.boot, from: None, pages: None }
    }

    fn put(&self, table: &mut Table, record: MigrationRecord) -> io::Result<()> {
        let record = MigrationRecord { at_s: now_s(), number: table.next, boot: self.boot, ..record };
        // A record that is written while the guest is stopped outlives only the daemon, because a disk is slow. When
        // the source's host goes down, the guest that must not run there goes down too. And the record that a guest was
        // on its way here outlives the host, see `verdict`.
        let outlives = match record.stage {
            Stage::HandingOver { .. } | Stage::Committed => Outlives::Daemon,
            Stage::Preparing | Stage::Aborted => Outlives::Host,
        };
        replace_record(&self.path(record.id), &record, outlives)?;
        table.next += 1;
        table.records.insert(record.id, record);
        Ok(())
    }

    fn path(&self, id: MigrationId) -> PathBuf {
        self.dir.join(format!("{id}.json"))
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn may_ask(table: &Table, id: MigrationId, asks: Option<&str>) -> bool {
    let from = table.records.get(&id).and_then(|record| record.from.as_deref());
    from.is_none() || from == asks
}

fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
#[path = "records_tests.rs"]
mod tests;
