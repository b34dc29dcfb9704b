//! The commonest row: one guest, moved once.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};

use super::Record;
use super::runner::{Attempt, Row, Site, done, fail, figure};
use crate::error::Result;
use crate::guest::Guest;
use crate::lab::Lab;
use crate::load::memcached::LoadConfig;
use crate::result::{Config, Run};
use crate::trial::{self, Mover, Qemu, Setup, Trial};

/// One guest, moved once.
pub(super) struct Case {
    /// What the guest does, in words.
    pub(super) workload: String,
    pub(super) memory_bytes: u64,
    pub(super) jobs: String,
    /// The line by which the guest says that its memory is filled.
    pub(super) ready: Option<&'static str>,
    pub(super) load: Option<LoadConfig>,
    pub(super) mover: Mover,
    pub(super) qemu: Qemu,
    pub(super) settle: Duration,
    /// When a migration that does not end is given up.
    pub(super) limit: Duration,
}

impl Case {
    fn config(&self) -> Config {
        let seed = self.load.as_ref().map_or(1, |load| load.seed);
        let values = [
            ("mover", json!(self.mover.label())),
            ("qemu", json!(self.qemu.label)),
            ("workload", json!(self.workload)),
            ("memory_mib", json!(self.memory_bytes >> 20)),
            ("jobs", json!(self.jobs)),
            ("options", self.mover.options()),
            ("seed", json!(seed)),
        ];
        values.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }

    fn row(&self) -> Row {
        let Self { mover, qemu, workload, .. } = self;
        let words = format!("{} on QEMU {}, {workload}", mover.label(), qemu.label);
        Row { words, config: self.config(), baseline: mover.is_baseline() }
    }

    /// The row of a baseline of this name, which does something else with the same guest.
    pub(super) fn row_of(&self, name: &str, options: Value) -> Row {
        let mut config = self.config();
        config.insert("mover".into(), json!(name));
        config.insert("options".into(), options);
        Row { words: format!("{name} on QEMU {}, {}", self.qemu.label, self.workload), config, baseline: true }
    }

    /// Its guest.
    pub(super) fn guest(&self, lab: &Lab, name: &str) -> Guest {
        Guest { memory_bytes: self.memory_bytes, ..Guest::new(lab, name, 10, &self.jobs) }
    }
}

/// Adds the rows of these cases to the results, with the reason why none was tried.
pub(super) fn give_up(cases: &[Case], reason: &str, record: &mut Record) {
    let repeat = record.first_repeat();
    let rows = cases.iter().map(Case::row).filter(|row| record.not_tried(&row.words, &row.config).is_none());
    let runs = rows.map(|row| {
        let mut run = row.run(repeat);
        fail(&mut run, reason);
        run
    });
    record.add(runs.collect::<Vec<_>>());
}

/// How long a guest is watched.
#[derive(Clone, Copy)]
pub(super) struct Watch {
    /// How long its working set is watched before it is moved; zero for not at all.
    pub(super) working_set: Duration,
    /// How long it is watched once it is moved.
    pub(super) after: Duration,
    /// Gives the guest what this experiment needs beside the usual.
    pub(super) fit: fn(&Case, &mut Guest),
}

impl Watch {
    /// A watch of this length once the guest is moved.
    pub(super) fn after(after: Duration) -> Self {
        Self { working_set: Duration::ZERO, after, fit: |_, _| {} }
    }
}

impl Default for Watch {
    fn default() -> Self {
        Self::after(Duration::from_millis(1500))
    }
}

/// A case, how it is watched, and the function that looks at the trial: `look` adds to the metrics, and what it returns
/// is kept among the run's details as `seen`.
struct Watched<'a, L> {
    case: &'a Case,
    watch: Watch,
    look: &'a L,
}

/// Tries every case. `look` sees all of a trial that did not fail.
pub(super) fn try_each(
    lab: &Lab,
    cases: &[Case],
    repeats: usize,
    watch: Watch,
    record: &mut Record,
    look: impl Fn(&Case, &mut Trial) -> Value,
) {
    let attempts: Vec<_> = cases.iter().map(|case| Watched { case, watch, look: &look }).collect();
    super::runner::try_all(lab, &attempts, repeats, record);
}

/// Tries every case. `look` only derives metrics from metrics.
pub(super) fn try_all(
    lab: &Lab,
    cases: &[Case],
    repeats: usize,
    record: &mut Record,
    derive: impl Fn(&Case, &mut BTreeMap<String, f64>),
) {
    try_each(lab, cases, repeats, Watch::default(), record, |case, trial| {
        derive(case, &mut trial.metrics);
        Value::Null
    });
}

impl<L: Fn(&Case, &mut Trial) -> Value> Attempt for Watched<'_, L> {
    fn rows(&self) -> Vec<Row> {
        vec![self.case.row()]
    }

    fn guests(&self, lab: &Lab, name: &str) -> Vec<Guest> {
        let mut guest = self.case.guest(lab, name);
        (self.watch.fit)(self.case, &mut guest);
        vec![guest]
    }

    fn run(&self, site: &Site, runs: &mut [Run]) -> Result<()> {
        let case = self.case;
        let mut trial = trial::run_plugged(&Setup {
            lab: site.lab,
            guest: site.guest()?.clone(),
            ready: case.ready,
            mover: &case.mover,
            qemu: &case.qemu,
            load: case.load.clone(),
            settle: case.settle,
            working_set: self.watch.working_set,
            after: self.watch.after,
            limit: case.limit,
            say: &|_| {},
        })?;
        let seen = (self.look)(case, &mut trial);
        let Trial { metrics, report, load, .. } = trial;
        for run in runs {
            run.metrics.extend(metrics.clone());
            run.details = json!({ "report": report, "load": load, "seen": seen });
            done(run);
        }
        Ok(())
    }

    fn tell(&self, run: &Run) -> String {
        let given_up = run.metrics.get("completed") == Some(&0.0);
        let (ended, ms) = if given_up { ("given up after", "given_up_ms") } else { ("total", "total_ms") };
        let [ms, downtime, gap] = [ms, "downtime_ms", "gap_ms"].map(|name| figure(run, name));
        format!("{ended} {ms} ms, downtime {downtime} ms, gap {gap} ms")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LabConfig;
    use crate::baseline::{Method, Ram};

    #[test]
    fn a_trial_that_fails_is_a_row_with_its_reason_and_leaves_the_lab_usable() {
        if !nix::unistd::Uid::effective().is_root() {
            return eprintln!("skipped: a lab needs root");
        }
        let lab =
            Lab::up(LabConfig { daemons: false, ..LabConfig::pair(&format!("fail{}", std::process::id())) }).unwrap();
        let case = Case {
            workload: "idle".into(),
            memory_bytes: 1 << 30,
            jobs: "idle".into(),
            ready: None,
            load: None,
            mover: Mover::Qemu(Method::Vanilla, Ram::SharedFile),
            qemu: Qemu { label: "none".into(), path: "/nonexistent".into() },
            settle: Duration::ZERO,
            limit: trial::LIMIT,
        };
        let directory = tempfile::tempdir().unwrap();
        let mut record = Record::new("fail", directory.path().into(), false);
        try_all(&lab, &[case], 2, &mut record, |_, _| panic!("nothing is derived from a failed run"));
        let runs = record.runs();
        assert_eq!(runs.len(), 2);
        assert!(
            runs.iter()
                .all(|run| run.metrics["failed"] == 1.0
                    && run.details["error"].as_str().unwrap().contains("nonexistent"))
        );
        lab.create_tap("tap10").unwrap();
    }
}
