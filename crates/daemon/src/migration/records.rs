//! What became of migrations: durable, because the other end's decision rests on it.
//!
//! A record of the source says that the guest may run elsewhere; one of the destination is the verdict the source may ask for.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use sterna_api::MigrateOptions;
use sterna_engine::host::{MigrationId, Verdict};

use crate::process::boot_id;
use crate::state::{Outlives, read_record, replace_record};

/// Records older than this that nobody can need any more are removed, seconds.
const KEEP_S: u64 = 30 * 24 * 3600;
/// At most so many are kept.
const KEEP_COUNT: usize = 10_000;

/// How far a migration has come, as far as it must not be forgotten.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stage {
    /// Source: the peer may run the guest from now on.
    HandingOver {
        /// The destination daemon, where it is to be found now.
        peer: String,
        /// The migration's options, where the guest there still needs pages of here.
        #[serde(default)]
        postcopy: Option<Box<MigrateOptions>>,
    },
    /// Destination: its QEMU waits for the guest.
    Preparing,
    /// Destination: the guest belongs here.
    Committed,
    /// Destination: it never will.
    Aborted,
}

/// What has become of pages that come after their guest's start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Pages {
    /// Some are still to come.
    Coming,
    /// All are here.
    Here,
    /// The guest ended before they were.
    Gone,
}

/// A migration's record.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MigrationRecord {
    /// The migration.
    pub id: MigrationId,
    /// The machine's name, where it is known.
    pub vm: Option<String>,
    /// How far it has come.
    pub stage: Stage,
    /// When this was written, seconds since the epoch.
    pub at_s: u64,
    /// The host's boot in which it was written.
    #[serde(default)]
    pub boot: u128,
    /// Destination: the daemon it is from, where that showed a certificate. Nobody else may ask for the verdict.
    #[serde(default)]
    pub from: Option<String>,
    /// Destination: the pages that come after the guest's start, where some do.
    #[serde(default)]
    pub pages: Option<Pages>,
}

/// All records of this host.
#[derive(Debug)]
pub struct Records {
    dir: PathBuf,
    boot: u128,
    table: Mutex<HashMap<MigrationId, MigrationRecord>>,
}

impl Records {
    /// Reads what is there, and removes what is too old or too much.
    ///
    /// # Errors
    /// Where the directory cannot be read. A file that cannot counts as a commit, and is logged.
    pub fn load(dir: &Path) -> io::Result<Self> {
        let mut table = HashMap::new();
        for entry in std::fs::read_dir(dir)? {
            let path = entry?.path();
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            match read_record::<MigrationRecord>(&path) {
                Ok(Some(record)) => {
                    table.insert(record.id, record);
                }
                Ok(None) => {}
                Err(error) => {
                    tracing::error!(path = %path.display(), %error, "cannot read a migration's record");
                    // A host that went down can leave a commit's record torn: nobody may take that for a guest that never came.
                    if let Some(id) = path.file_stem().and_then(|stem| u128::from_str_radix(stem.to_str()?, 16).ok()) {
                        let id = MigrationId(id);
                        table.insert(
                            id,
                            MigrationRecord {
                                id,
                                vm: None,
                                stage: Stage::Committed,
                                at_s: now_s(),
                                boot: 0,
                                from: None,
                                pages: None,
                            },
                        );
                    }
                }
            }
        }
        let records = Self { dir: dir.into(), boot: boot_id()?, table: Mutex::new(table) };
        records.prune();
        Ok(records)
    }

    /// The stage a migration has reached.
    #[must_use]
    pub fn stage(&self, id: MigrationId) -> Option<Stage> {
        self.lock().get(&id).map(|record| record.stage.clone())
    }

    /// Writes a stage down.
    ///
    /// # Errors
    /// Where it could not be written; then the old stage stands.
    pub fn write(&self, id: MigrationId, vm: Option<&str>, stage: Stage) -> io::Result<()> {
        let mut table = self.lock();
        let from = table.get(&id).and_then(|record| record.from.clone());
        let record = self.fresh(id, vm.map(String::from), stage);
        self.put(&mut table, MigrationRecord { from, ..record })
    }

    /// Writes down that a machine comes here, and from whom.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn prepare(&self, id: MigrationId, vm: &str, from: Option<&str>) -> io::Result<()> {
        let record = self.fresh(id, Some(vm.into()), Stage::Preparing);
        self.put(&mut self.lock(), MigrationRecord { from: from.map(String::from), ..record })
    }

    /// Moves from [`Stage::Preparing`] to [`Stage::Committed`]: only where nobody was told before that it was aborted. With `postcopy`
    /// pages are still to come.
    ///
    /// # Errors
    /// Where it is not being prepared (any more), or could not be written.
    pub fn commit(&self, id: MigrationId, postcopy: bool) -> io::Result<()> {
        let mut table = self.lock();
        match table.get(&id).cloned() {
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

    /// What has become of the pages that were to come after the guest's start; `None` where none were.
    #[must_use]
    pub fn pages(&self, id: MigrationId) -> Option<Pages> {
        self.lock().get(&id).and_then(|record| record.pages)
    }

    /// The migrations whose pages are still to come.
    #[must_use]
    pub fn coming(&self) -> Vec<MigrationId> {
        let coming = |record: &&MigrationRecord| record.pages == Some(Pages::Coming);
        self.lock().values().filter(coming).map(|record| record.id).collect()
    }

    /// Pages that were still to come are here, or needed no more. Does nothing where none were.
    pub fn pages_are(&self, id: MigrationId, pages: Pages) {
        let mut table = self.lock();
        let Some(record) = table.get(&id).filter(|record| record.pages == Some(Pages::Coming)).cloned() else { return };
        let record = MigrationRecord { pages: Some(pages), ..record };
        if let Err(error) = self.put(&mut table, record.clone()) {
            // In memory it stands: a daemon started anew finds it out again by the machine, or that there is none.
            tracing::error!(%id, %error, "cannot write down what became of a guest's pages");
            table.insert(id, record);
        }
    }

    /// Whether the daemon that asks may know of a migration: the one that began it, or any where that showed no certificate.
    #[must_use]
    pub fn may_ask(&self, id: MigrationId, asks: Option<&str>) -> bool {
        may_ask(&self.lock(), id, asks)
    }

    /// The verdict for the daemon that asks; `None`, and nothing is settled, where the migration is another's.
    pub fn verdict_for(&self, id: MigrationId, asks: Option<&str>) -> Option<Verdict> {
        let mut table = self.lock();
        may_ask(&table, id, asks).then(|| self.verdict_locked(&mut table, id))
    }

    /// The verdict on a migration, given once and for all: one that is not committed never will be.
    pub fn verdict(&self, id: MigrationId) -> Verdict {
        self.verdict_locked(&mut self.lock(), id)
    }

    fn verdict_locked(&self, table: &mut HashMap<MigrationId, MigrationRecord>, id: MigrationId) -> Verdict {
        let record = table.get(&id).cloned();
        match &record {
            Some(MigrationRecord { stage: Stage::Committed, .. }) => return Verdict::Committed,
            // The host went down while the guest was on its way: it may have run here, and what it did then is out in the world. It went
            // down with the host; letting it run again from before would be a second life.
            Some(MigrationRecord { stage: Stage::Preparing, boot, .. }) if *boot != self.boot => {
                return Verdict::Committed;
            }
            _ => {}
        }
        let record = record.unwrap_or_else(|| self.fresh(id, None, Stage::Aborted));
        let record = MigrationRecord { stage: Stage::Aborted, ..record };
        if let Err(error) = self.put(table, record.clone()) {
            // In memory it stands: until a restart it binds, and a restart aborts what was not committed.
            tracing::error!(%id, %error, "cannot write a verdict down");
            table.insert(id, record);
        }
        Verdict::Aborted
    }

    /// Forgets a migration whose end nobody can ask for.
    pub fn remove(&self, id: MigrationId) {
        let mut table = self.lock();
        table.remove(&id);
        let _ = std::fs::remove_file(self.path(id));
    }

    /// Forgets the verdicts that are too old or too many. What the source still waits for stays.
    pub fn prune(&self) {
        let table = self.lock();
        let mut done: Vec<(u64, MigrationId)> = table
            .values()
            .filter(|record| matches!(record.stage, Stage::Committed | Stage::Aborted))
            .filter(|record| record.pages != Some(Pages::Coming))
            .map(|record| (record.at_s, record.id))
            .collect();
        drop(table);
        done.sort_unstable_by_key(|(at_s, _)| std::cmp::Reverse(*at_s));
        let oldest = now_s().saturating_sub(KEEP_S);
        for (index, (at_s, id)) in done.into_iter().enumerate() {
            if index >= KEEP_COUNT || at_s < oldest {
                self.remove(id);
            }
        }
    }

    /// A record of this moment.
    fn fresh(&self, id: MigrationId, vm: Option<String>, stage: Stage) -> MigrationRecord {
        MigrationRecord { id, vm, stage, at_s: now_s(), boot: self.boot, from: None, pages: None }
    }

    fn put(&self, table: &mut HashMap<MigrationId, MigrationRecord>, record: MigrationRecord) -> io::Result<()> {
        let record = MigrationRecord { at_s: now_s(), boot: self.boot, ..record };
        // What is written while the guest is stopped outlives the daemon only, because a disk takes its time. When the source's host goes
        // down, so does the guest that must not run there; and that a guest was on its way here outlives the host, see `verdict`.
        let outlives = match record.stage {
            Stage::HandingOver { .. } | Stage::Committed => Outlives::Daemon,
            Stage::Preparing | Stage::Aborted => Outlives::Host,
        };
        replace_record(&self.path(record.id), &record, outlives)?;
        table.insert(record.id, record);
        Ok(())
    }

    fn path(&self, id: MigrationId) -> PathBuf {
        self.dir.join(format!("{id}.json"))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<MigrationId, MigrationRecord>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn may_ask(table: &HashMap<MigrationId, MigrationRecord>, id: MigrationId, asks: Option<&str>) -> bool {
    let from = table.get(&id).and_then(|record| record.from.as_deref());
    from.is_none() || from == asks
}

fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::write_record;

    const ID: MigrationId = MigrationId(7);

    #[test]
    fn a_verdict_once_given_binds_even_after_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let records = Records::load(dir.path()).unwrap();
        records.write(ID, Some("vm"), Stage::Preparing).unwrap();
        assert_eq!(records.verdict(ID), Verdict::Aborted);
        assert!(records.commit(ID, false).is_err(), "the source was told that it may run the guest");
        let again = Records::load(dir.path()).unwrap();
        assert!(again.commit(ID, false).is_err());
        assert_eq!(again.verdict(ID), Verdict::Aborted);
    }

    #[test]
    fn a_committed_migration_stays_committed() {
        let dir = tempfile::tempdir().unwrap();
        let records = Records::load(dir.path()).unwrap();
        records.write(ID, Some("vm"), Stage::Preparing).unwrap();
        records.commit(ID, false).unwrap();
        assert_eq!(records.verdict(ID), Verdict::Committed);
        assert_eq!(Records::load(dir.path()).unwrap().verdict(ID), Verdict::Committed);
    }

    #[test]
    fn only_the_daemon_it_is_from_learns_a_migrations_verdict() {
        let dir = tempfile::tempdir().unwrap();
        let records = Records::load(dir.path()).unwrap();
        records.prepare(ID, "vm", Some("a.example")).unwrap();
        assert_eq!(records.verdict_for(ID, Some("b.example")), None);
        assert_eq!(records.verdict_for(ID, None), None);
        records.commit(ID, false).expect("the questions settled nothing");
        let again = Records::load(dir.path()).unwrap();
        assert_eq!(again.verdict_for(ID, Some("b.example")), None, "nor after a restart");
        assert_eq!(again.verdict_for(ID, Some("a.example")), Some(Verdict::Committed));
        let unknown = MigrationId(8);
        assert_eq!(again.verdict_for(unknown, Some("b.example")), Some(Verdict::Aborted));
    }

    #[test]
    fn a_migration_never_heard_of_can_not_be_committed_later() {
        let dir = tempfile::tempdir().unwrap();
        let records = Records::load(dir.path()).unwrap();
        assert_eq!(records.verdict(ID), Verdict::Aborted);
        assert!(records.commit(ID, false).is_err());
    }

    #[test]
    fn a_guest_that_was_on_its_way_when_the_host_went_down_is_never_given_back() {
        let dir = tempfile::tempdir().unwrap();
        let before = MigrationRecord {
            id: ID,
            vm: Some("vm".into()),
            stage: Stage::Preparing,
            at_s: now_s(),
            boot: 1,
            from: None,
            pages: None,
        };
        write_record(&dir.path().join(format!("{ID}.json")), &before).unwrap();
        assert_eq!(Records::load(dir.path()).unwrap().verdict(ID), Verdict::Committed);
    }

    #[test]
    fn a_torn_record_is_not_taken_for_a_guest_that_never_came() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(format!("{ID}.json")), "").unwrap();
        assert_eq!(Records::load(dir.path()).unwrap().verdict(ID), Verdict::Committed);
    }

    #[test]
    fn old_verdicts_go_and_open_questions_stay() {
        let dir = tempfile::tempdir().unwrap();
        let old = |id, stage| {
            let record =
                MigrationRecord { id: MigrationId(id), vm: None, stage, at_s: 1, boot: 1, from: None, pages: None };
            write_record(&dir.path().join(format!("{}.json", record.id)), &record).unwrap();
        };
        old(1, Stage::Aborted);
        old(2, Stage::HandingOver { peer: "b:1".into(), postcopy: None });
        let records = Records::load(dir.path()).unwrap();
        assert_eq!(records.stage(MigrationId(1)), None);
        assert!(records.stage(MigrationId(2)).is_some());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn records_of_daemons_that_knew_no_postcopy_are_understood() {
        let dir = tempfile::tempdir().unwrap();
        let write = |id: u128, stage: &str| {
            let text = format!(r#"{{"id":{id},"vm":"m","stage":{stage},"at_s":4000000000,"boot":5,"from":null}}"#);
            std::fs::write(dir.path().join(format!("{}.json", MigrationId(id))), text).unwrap();
        };
        write(1, r#""committed""#);
        write(2, r#"{"handing-over":{"peer":"b:1"}}"#);
        let records = Records::load(dir.path()).unwrap();
        assert_eq!((records.stage(MigrationId(1)), records.pages(MigrationId(1))), (Some(Stage::Committed), None));
        let handed_over = Stage::HandingOver { peer: "b:1".into(), postcopy: None };
        assert_eq!(records.stage(MigrationId(2)), Some(handed_over));
    }

    #[test]
    fn pages_that_are_to_come_are_known_to_the_next_daemon() {
        let dir = tempfile::tempdir().unwrap();
        let records = Records::load(dir.path()).unwrap();
        records.prepare(ID, "vm", Some("a.example")).unwrap();
        records.commit(ID, true).unwrap();
        let again = Records::load(dir.path()).unwrap();
        assert_eq!((again.verdict(ID), again.pages(ID)), (Verdict::Committed, Some(Pages::Coming)));
        assert!(again.may_ask(ID, Some("a.example")) && !again.may_ask(ID, Some("b.example")));
        again.pages_are(ID, Pages::Here);
        again.pages_are(ID, Pages::Gone);
        assert_eq!(Records::load(dir.path()).unwrap().pages(ID), Some(Pages::Here), "what ended once stays so");
    }

    #[test]
    fn the_options_of_a_guest_that_needs_pages_of_here_outlive_the_daemon() {
        let dir = tempfile::tempdir().unwrap();
        let records = Records::load(dir.path()).unwrap();
        let options =
            MigrateOptions { verify: true, postcopy_bandwidth_bytes_per_s: Some(1 << 20), ..Default::default() };
        let stage = Stage::HandingOver { peer: "b:1".into(), postcopy: Some(Box::new(options)) };
        records.write(ID, Some("vm"), stage.clone()).unwrap();
        assert_eq!(Records::load(dir.path()).unwrap().stage(ID), Some(stage));
    }

    #[test]
    fn a_record_whose_pages_are_still_to_come_is_never_too_old() {
        let dir = tempfile::tempdir().unwrap();
        for (id, pages) in [(1, Pages::Coming), (2, Pages::Here)] {
            let (id, stage) = (MigrationId(id), Stage::Committed);
            let record = MigrationRecord { id, vm: None, stage, at_s: 1, boot: 1, from: None, pages: Some(pages) };
            write_record(&dir.path().join(format!("{id}.json")), &record).unwrap();
        }
        let records = Records::load(dir.path()).unwrap();
        assert_eq!(records.pages(MigrationId(1)), Some(Pages::Coming));
        assert_eq!(records.stage(MigrationId(2)), None);
    }
}
