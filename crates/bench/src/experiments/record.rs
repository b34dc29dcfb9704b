//! The record of what an experiment has found so far. It is written after each row, so that an experiment that is cut
//! short keeps its rows.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::error::Result;
use crate::kept::{Kept, Origin};
use crate::result::{Config, ResultFile, Run, Target, machine, rows};

/// How long a short run begins new rows: the last row must end before ten minutes are over.
const SHORT: Duration = Duration::from_secs(555);

/// The detail of a run that was not tried.
pub(super) const NOT_TRIED: &str = "not_tried";

/// The function that makes the targets, with their measured values, from the runs so far.
pub(super) type Judge = Box<dyn Fn(&[Run]) -> Result<Vec<Target>>>;

/// A round of a campaign, in which each row is tried once.
pub struct Round {
    /// What earlier campaigns have kept.
    pub kept: Kept,
    /// The directory in which it is kept.
    pub results: PathBuf,
    /// Where the round's runs are from.
    pub origin: Origin,
    /// The moment after which no row is begun.
    pub until: Instant,
}

/// The runs of an experiment, and where they are written.
pub(super) struct Record {
    id: String,
    directory: PathBuf,
    runs: Vec<Run>,
    judge: Judge,
    /// The moment after which no row is begun.
    late: Option<Instant>,
    /// Words of the rows to try; without any, all rows are tried.
    only: Vec<String>,
    round: Option<Round>,
    /// Whether a row was not begun because the round's time was over, or it was not asked for.
    cut_short: Cell<bool>,
}

impl Record {
    /// The record of the experiment of this name, whose results go to this directory. A short one ends in time.
    pub(super) fn new(id: &str, directory: PathBuf, quick: bool) -> Self {
        let late = quick.then(|| Instant::now() + SHORT);
        let judge: Judge = Box::new(|_| Ok(Vec::new()));
        let (runs, only, cut_short) = (Vec::new(), Vec::new(), Cell::new(false));
        Self { id: id.into(), directory, runs, judge, late, only, round: None, cut_short }
    }

    /// Goes on with a round of a campaign: rows that were tried in it are left out.
    pub(super) fn resume(&mut self, round: Round) {
        self.runs = round.kept.runs();
        self.round = Some(round);
    }

    /// The number of the first repetition of each row that is tried now.
    pub(super) fn first_repeat(&self) -> usize {
        self.round.as_ref().map_or(0, |round| round.kept.rounds)
    }

    /// Tries only rows whose words contain one of these, where there are some.
    pub(super) fn only(&mut self, words: Vec<String>) {
        self.only = words;
    }

    /// Sets how its targets are judged.
    pub(super) fn judge(&mut self, judge: Judge) {
        self.judge = judge;
    }

    /// The directory for plots.
    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    /// The runs so far.
    pub(super) fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// A name that no guest of an earlier row has: a guest that was left behind must not disturb the next one.
    pub(super) fn new_guest(&self) -> String {
        format!("guest{}", self.runs.len())
    }

    /// The reason why no more rows may begin, if there is one.
    pub(super) fn too_late(&self) -> Option<String> {
        let late = self.late.is_some_and(|late| Instant::now() >= late);
        late.then(|| format!("not tried: a short run begins no row after {} s", SHORT.as_secs()))
    }

    /// The reason why the row of these words and this set-up must not begin, if there is one.
    pub(super) fn not_tried(&self, words: &str, config: &Config) -> Option<String> {
        if !self.only.is_empty() && !self.only.iter().any(|only| words.contains(only.as_str())) {
            self.cut_short.set(true);
            return Some(format!("not tried: only rows with \"{}\" were asked for", self.only.join("\" or \"")));
        }
        if let Some(round) = &self.round {
            if round.kept.is_tried(config) {
                return Some("not tried: it was tried in this round".into());
            }
            if Instant::now() >= round.until {
                self.cut_short.set(true);
                return Some("not tried: the campaign's time is over".into());
            }
        }
        self.too_late()
    }

    /// Takes over what one of these other experiments has found of this row in the round under way.
    pub(super) fn take_over(&mut self, others: &[&str], config: &Config) {
        let Some(round) = self.round.as_mut().filter(|round| !round.kept.is_tried(config)) else { return };
        let others = others.iter().filter(|id| **id != self.id);
        let others = others.filter_map(|id| Kept::read(&round.results, id).ok());
        if let Some(run) = others.into_iter().find_map(|other| round.kept.take_over(&other, config)) {
            self.add([run]);
        }
    }

    /// Whether a run has its place in the results. A campaign's have no rows that were not tried: they come later.
    pub(super) fn has_place_for(&self, run: &Run) -> bool {
        self.round.is_none() || run.details[NOT_TRIED].is_null()
    }

    /// Adds runs and writes all.
    pub(super) fn add(&mut self, runs: impl IntoIterator<Item = Run>) {
        let runs: Vec<Run> = runs.into_iter().filter(|run| self.has_place_for(run)).collect();
        self.runs.extend(runs);
        self.show(&[]);
        self.keep();
    }

    /// Writes all, and beside it runs that are still under way: they are not kept.
    pub(super) fn show(&self, under_way: &[Run]) {
        let runs: Vec<Run> = self.runs.iter().chain(under_way).cloned().collect();
        // A write that fails now is repeated with the next row, or the experiment fails with it at its end.
        if let Err(error) = self.write(&runs) {
            eprintln!("the results so far could not be written: {error}");
        }
    }

    /// Derives figures that need more than one run.
    pub(super) fn derive(&mut self, derive: impl FnOnce(&mut Vec<Run>)) {
        derive(&mut self.runs);
        self.show(&[]);
        self.keep();
    }

    /// Keeps the runs for later campaigns, where this is one.
    fn keep(&mut self) {
        let Some(round) = &mut self.round else { return };
        let kept = (self.judge)(&self.runs).and_then(|targets| {
            round.kept.take_in(&self.runs, targets, &round.origin);
            round.kept.write(&round.results)
        });
        // As above: the next row brings another attempt.
        if let Err(error) = kept {
            eprintln!("the runs so far could not be kept: {error}");
        }
    }

    /// Ends the round, unless rows are left for the next campaign. Returns whether it is over.
    ///
    /// # Errors
    /// Where it cannot be written.
    pub(super) fn end_round(&mut self) -> Result<bool> {
        self.keep();
        let over = !self.cut_short.get();
        if let Some(round) = self.round.as_mut().filter(|_| over) {
            round.kept.end_round();
            round.kept.write(&round.results)?;
        }
        Ok(over)
    }

    /// Writes all and returns it.
    ///
    /// # Errors
    /// Where a file cannot be written.
    pub(super) fn finish(&self) -> Result<ResultFile> {
        self.write(&self.runs)
    }

    fn write(&self, runs: &[Run]) -> Result<ResultFile> {
        let targets = (self.judge)(runs)?;
        let result = ResultFile { experiment: self.id.clone(), rows: rows(runs), targets, machine: machine() };
        result.write(&self.directory, runs)?;
        Ok(result)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::sample;
    use super::*;
    use crate::baseline::{Method, Ram};
    use crate::trial::Mover;

    #[test]
    fn each_row_is_on_disk_with_its_targets_before_the_next_begins() {
        let directory = tempfile::tempdir().unwrap();
        let run = || sample("idle", &Mover::Qemu(Method::Vanilla, Ram::Plain), "10.0", &[("total_ms", 5.0)]);
        let read = || -> ResultFile {
            serde_json::from_slice(&std::fs::read(directory.path().join("result.json")).unwrap()).unwrap()
        };
        let mut record = Record::new("test", directory.path().into(), true);
        record.judge(Box::new(|runs| Ok(vec![Target::at_most("runs", 1.0, Some(runs.len() as f64))])));
        record.add([run()]);
        assert_eq!((read().rows.len(), read().targets[0].met), (1, true));
        record.show(&[run()]);
        assert_eq!(read().targets[0].measured, Some(2.0));
        assert_eq!(record.finish().unwrap().targets[0].measured, Some(1.0), "what is under way is not kept");
        assert!(record.too_late().is_none());
    }

    #[test]
    fn a_short_run_that_is_late_says_so_of_what_it_does_not_try() {
        let mut record = Record::new("test", "/nonexistent".into(), true);
        record.late = Some(Instant::now());
        assert!(record.too_late().unwrap().contains("not tried"));
        let mut record = Record::new("test", "/nonexistent".into(), false);
        assert!(record.too_late().is_none());
        record.only(vec!["hybrid".into(), "off".into()]);
        let config = Config::new();
        assert!(record.not_tried("sterna, mode hybrid, random", &config).is_none());
        assert!(record.not_tried("qemu precopy, random", &config).unwrap().contains("asked for"));
    }

    #[test]
    fn a_row_that_another_experiment_has_tried_is_not_tried_again_in_the_round() {
        let directory = tempfile::tempdir().unwrap();
        let results = directory.path().join("results");
        let run = sample("idle", &Mover::Qemu(Method::Vanilla, Ram::Plain), "10.0", &[("ms", 5.0)]);
        let record = |id: &str| {
            let origin = Origin { commit: "a".into(), date: "2026-11-26".into(), machine: Value::Null };
            let until = Instant::now() + Duration::from_secs(3600);
            let kept = Kept::read(&results, id).unwrap();
            let mut record = Record::new(id, directory.path().into(), false);
            record.resume(Round { kept, results: results.clone(), origin, until });
            record
        };
        record("first").add([run.clone()]);
        let mut second = record("second");
        second.take_over(&["third", "second"], &run.config);
        assert!(second.not_tried("idle", &run.config).is_none(), "neither has tried it");
        for _ in 0..2 {
            second.take_over(&["third", "second", "first"], &run.config);
        }
        assert!(second.not_tried("idle", &run.config).unwrap().contains("in this round"));
        assert_eq!(second.runs().len(), 1);
        assert_eq!(Kept::read(&results, "second").unwrap().runs()[0].metrics, run.metrics);
    }

    #[test]
    fn a_round_goes_on_with_the_rows_that_were_not_tried_and_is_over_when_all_were() {
        let directory = tempfile::tempdir().unwrap();
        let results = directory.path().join("results");
        let run = |workload: &str| sample(workload, &Mover::Qemu(Method::Vanilla, Ram::Plain), "10.0", &[("ms", 5.0)]);
        let (idle, busy) = (run("idle"), run("busy"));
        let origin = Origin { commit: "a".into(), date: "2026-11-26".into(), machine: Value::Null };
        let record = |until: Instant| {
            let kept = Kept::read(&results, "test").unwrap();
            let mut record = Record::new("test", directory.path().into(), false);
            record.resume(Round { kept, results: results.clone(), origin: origin.clone(), until });
            record
        };
        let later = Instant::now() + Duration::from_secs(3600);
        let mut first = record(later);
        assert!(first.not_tried("idle", &idle.config).is_none());
        first.add([idle.clone()]);
        // Its time is over before the second row.
        first.round.as_mut().unwrap().until = Instant::now();
        let mut left_out = busy.clone();
        left_out.details = json!({ NOT_TRIED: true });
        assert!(first.not_tried("busy", &busy.config).unwrap().contains("over"));
        first.add([left_out]);
        assert!(!first.end_round().unwrap());
        let mut other = record(later);
        other.only(vec!["calm".into()]);
        assert!(other.not_tried("busy", &busy.config).unwrap().contains("asked for"));
        assert!(!other.end_round().unwrap(), "what was not asked for is left to another campaign");
        let mut second = record(later);
        assert_eq!((second.first_repeat(), second.runs().len()), (0, 1));
        assert!(second.not_tried("idle", &idle.config).unwrap().contains("in this round"));
        assert!(second.not_tried("busy", &busy.config).is_none());
        second.add([busy.clone()]);
        assert!(second.end_round().unwrap());
        let third = record(later);
        assert_eq!((third.first_repeat(), third.runs().len()), (1, 2));
        assert!(third.not_tried("idle", &idle.config).is_none());
    }
}
