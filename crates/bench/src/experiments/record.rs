//! The record of what an experiment has found so far. It is written after each row, so that an experiment that is cut
//! short keeps its rows.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::error::Result;
use crate::result::{ResultFile, Run, Target, machine, rows};

/// How long a short run begins new rows: the last row must end before ten minutes are over.
const SHORT: Duration = Duration::from_secs(555);

/// The function that makes the targets, with their measured values, from the runs so far.
pub(super) type Judge = Box<dyn Fn(&[Run]) -> Result<Vec<Target>>>;

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
}

impl Record {
    /// The record of the experiment of this name, whose results go to this directory. A short one ends in time.
    pub(super) fn new(id: &str, directory: PathBuf, quick: bool) -> Self {
        let late = quick.then(|| Instant::now() + SHORT);
        Self { id: id.into(), directory, runs: Vec::new(), judge: Box::new(|_| Ok(Vec::new())), late, only: Vec::new() }
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

    /// The reason why the row of these words must not begin, if there is one.
    pub(super) fn not_tried(&self, words: &str) -> Option<String> {
        if !self.only.is_empty() && !self.only.iter().any(|only| words.contains(only.as_str())) {
            return Some(format!("not tried: only rows with \"{}\" were asked for", self.only.join("\" or \"")));
        }
        self.too_late()
    }

    /// Adds runs and writes all.
    pub(super) fn add(&mut self, runs: impl IntoIterator<Item = Run>) {
        self.runs.extend(runs);
        self.show(&[]);
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
        assert!(record.not_tried("sterna, mode hybrid, random").is_none());
        assert!(record.not_tried("qemu precopy, random").unwrap().contains("asked for"));
    }
}
