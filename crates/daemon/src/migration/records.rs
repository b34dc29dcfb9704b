//! What became of migrations: durable, because the other end's decision rests on it.
//!
//! A record of the source says that the guest may run elsewhere; one of the destination is the verdict the source may ask for.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use sterna_engine::host::{MigrationId, Verdict};

use crate::process::boot_id;
use crate::state::{Outlives, read_record, replace_record};

/// Records older than this that nobody can need any more are removed, seconds.
const KEEP_S: u64 = 30 * 24 * 3600;
/// At most so many are kept.
const KEEP_COUNT: usize = 10_000;

/// How far a migration has come, as far as it must not be forgotten.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stage {
    /// Source: the peer may run the guest from now on.
    HandingOver {
        /// The destination daemon.
        peer: String,
    },
    /// Destination: its QEMU waits for the guest.
    Preparing,
    /// Destination: the guest belongs here.
    Committed,
    /// Destination: it never will.
    Aborted,
}

/// A migration's record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
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
        self.write_locked(&mut table, id, vm, stage)
    }

    /// Writes down that a machine comes here, and from whom.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn prepare(&self, id: MigrationId, vm: &str, from: Option<&str>) -> io::Result<()> {
        self.put(&mut self.lock(), id, Some(vm), Stage::Preparing, from.map(String::from))
    }

    /// Moves from [`Stage::Preparing`] to [`Stage::Committed`]: only where nobody was told before that it was aborted.
    ///
    /// # Errors
    /// Where it is not being prepared (any more), or could not be written.
    pub fn commit(&self, id: MigrationId) -> io::Result<()> {
        let mut table = self.lock();
        let record = table.get(&id).cloned();
        match record.map(|record| (record.stage, record.vm)) {
            Some((Stage::Preparing, vm)) => self.write_locked(&mut table, id, vm.as_deref(), Stage::Committed),
            Some((Stage::Committed, _)) => Ok(()),
            other => Err(io::Error::other(format!("the migration cannot be committed: {other:?}"))),
        }
    }

    /// The verdict for the daemon that asks; `None`, and nothing is settled, where the migration is another's.
    pub fn verdict_for(&self, id: MigrationId, asks: Option<&str>) -> Option<Verdict> {
        let mut table = self.lock();
        let from = table.get(&id).and_then(|record| record.from.as_deref());
        (from.is_none() || from == asks).then(|| self.verdict_locked(&mut table, id))
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
        let (vm, from) = record.map_or((None, None), |record| (record.vm, record.from));
        if let Err(error) = self.write_locked(table, id, vm.as_deref(), Stage::Aborted) {
            // In memory it stands: until a restart it binds, and a restart aborts what was not committed.
            tracing::error!(%id, %error, "cannot write a verdict down");
            table.insert(id, MigrationRecord { id, vm, stage: Stage::Aborted, at_s: now_s(), boot: self.boot, from });
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

    fn write_locked(
        &self,
        table: &mut HashMap<MigrationId, MigrationRecord>,
        id: MigrationId,
        vm: Option<&str>,
        stage: Stage,
    ) -> io::Result<()> {
        let from = table.get(&id).and_then(|record| record.from.clone());
        self.put(table, id, vm, stage, from)
    }

    fn put(
        &self,
        table: &mut HashMap<MigrationId, MigrationRecord>,
        id: MigrationId,
        vm: Option<&str>,
        stage: Stage,
        from: Option<String>,
    ) -> io::Result<()> {
        let record = MigrationRecord { id, vm: vm.map(String::from), stage, at_s: now_s(), boot: self.boot, from };
        // What is written while the guest is stopped outlives the daemon only, because a disk takes its time. When the source's host goes
        // down, so does the guest that must not run there; and that a guest was on its way here outlives the host, see `verdict`.
        let outlives = match record.stage {
            Stage::HandingOver { .. } | Stage::Committed => Outlives::Daemon,
            Stage::Preparing | Stage::Aborted => Outlives::Host,
        };
        replace_record(&self.path(id), &record, outlives)?;
        table.insert(id, record);
        Ok(())
    }

    fn path(&self, id: MigrationId) -> PathBuf {
        self.dir.join(format!("{id}.json"))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<MigrationId, MigrationRecord>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
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
        assert!(records.commit(ID).is_err(), "the source was told that it may run the guest");
        let again = Records::load(dir.path()).unwrap();
        assert!(again.commit(ID).is_err());
        assert_eq!(again.verdict(ID), Verdict::Aborted);
    }

    #[test]
    fn a_committed_migration_stays_committed() {
        let dir = tempfile::tempdir().unwrap();
        let records = Records::load(dir.path()).unwrap();
        records.write(ID, Some("vm"), Stage::Preparing).unwrap();
        records.commit(ID).unwrap();
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
        records.commit(ID).expect("the questions settled nothing");
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
        assert!(records.commit(ID).is_err());
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
            let record = MigrationRecord { id: MigrationId(id), vm: None, stage, at_s: 1, boot: 1, from: None };
            write_record(&dir.path().join(format!("{}.json", record.id)), &record).unwrap();
        };
        old(1, Stage::Aborted);
        old(2, Stage::HandingOver { peer: "b:1".into() });
        let records = Records::load(dir.path()).unwrap();
        assert_eq!(records.stage(MigrationId(1)), None);
        assert!(records.stage(MigrationId(2)).is_some());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
