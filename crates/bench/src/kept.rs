//! The runs that campaigns have kept of an experiment, each with its commit, machine and date:
//! `docs/experiments/results/ID.json`, a run on a line.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::error::{Context, Error, Result};
use crate::result::{Config, Run, Target};
use crate::tools;

/// How many rounds before the one under way are kept: a row that has had them all is judged by five runs at least.
pub const ROUNDS: usize = 5;

/// Details that no plot and no target needs, and that are long.
const LONG: [&str; 5] = ["report", "load", "migrations", "moves", "estimate"];

/// The commit, the machine and the day of runs.
#[derive(Debug, Clone, PartialEq)]
pub struct Origin {
    /// The commit of the programs that were measured; it ends with `+` where the sources differed from it.
    pub commit: String,
    /// The day, as `2026-11-26`.
    pub date: String,
    /// The machine, as in `result.json`.
    pub machine: Value,
}

/// A run, and where it is from.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct KeptRun {
    /// The commit of [`Origin`].
    pub commit: String,
    /// The day of [`Origin`].
    pub date: String,
    /// The machine's place in [`Kept::machines`].
    pub machine: usize,
    /// What was measured. Its `repeat` is the number of the round.
    #[serde(flatten)]
    pub run: Run,
}

/// What campaigns have kept of an experiment.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Kept {
    /// The experiment's name.
    pub experiment: String,
    /// How many rounds are over: in a round each row is tried once.
    pub rounds: usize,
    /// The machines.
    pub machines: Vec<Value>,
    /// The targets, judged by the runs.
    pub targets: Vec<Target>,
    /// The runs, in the order in which they were made.
    pub runs: Vec<KeptRun>,
}

impl Kept {
    /// What was kept in this directory of an experiment; nothing where there is no file.
    ///
    /// # Errors
    /// A file that cannot be read, or that is not of this form.
    pub fn read(directory: &Path, id: &str) -> Result<Self> {
        let file = file(directory, id);
        let text = match std::fs::read(&file) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Ok(Self { experiment: id.into(), ..Self::default() });
            }
            read => read.context(|| format!("reading {}", file.display()))?,
        };
        let kept: Self = serde_json::from_slice(&text)
            .map_err(|error| Error::Form { what: file.display().to_string(), reason: error.to_string() })?;
        if let Some(lost) = kept.runs.iter().find(|run| run.machine >= kept.machines.len()) {
            let reason = format!("a run names machine {} of {}", lost.machine, kept.machines.len());
            return Err(Error::Form { what: file.display().to_string(), reason });
        }
        Ok(kept)
    }

    /// Writes the file, whole or not at all.
    ///
    /// # Errors
    /// Where it cannot be written.
    pub fn write(&self, directory: &Path) -> Result<()> {
        let (file, new) = (file(directory, &self.experiment), directory.join(format!("{}.new", self.experiment)));
        let failed = || format!("writing {}", file.display());
        let text = self.text().map_err(std::io::Error::other).context(failed)?;
        std::fs::create_dir_all(directory).context(failed)?;
        std::fs::write(&new, text).and_then(|()| std::fs::rename(&new, &file)).context(failed)
    }

    /// The file's text: what is one thing is on one line, so that changes are easy to read.
    fn text(&self) -> serde_json::Result<String> {
        let Self { experiment, rounds, machines, targets, runs } = self;
        let (experiment, machines) = (serde_json::to_string(experiment)?, lines(machines)?);
        let (targets, runs) = (lines(targets)?, lines(runs)?);
        Ok(format!(
            "{{\n\"experiment\": {experiment},\n\"rounds\": {rounds},\n\"machines\": {machines},\n\
             \"targets\": {targets},\n\"runs\": {runs}\n}}\n"
        ))
    }

    /// The runs without their origins.
    #[must_use]
    pub fn runs(&self) -> Vec<Run> {
        self.runs.iter().map(|kept| kept.run.clone()).collect()
    }

    /// Whether the row of this set-up was tried in the round under way.
    #[must_use]
    pub fn is_tried(&self, config: &Config) -> bool {
        self.runs.iter().any(|kept| kept.run.repeat == self.rounds && kept.run.config == *config)
    }

    /// Takes in runs, and figures that were derived anew for those that are known, and how the targets are judged now.
    pub fn take_in(&mut self, runs: &[Run], targets: Vec<Target>, origin: &Origin) {
        let machine = self.machine(&origin.machine);
        for run in runs {
            let known = |kept: &&mut KeptRun| kept.run.repeat == run.repeat && kept.run.config == run.config;
            match self.runs.iter_mut().find(known) {
                Some(kept) => kept.run.metrics = rounded(run),
                None => {
                    let (commit, date) = (origin.commit.clone(), origin.date.clone());
                    let run = Run { metrics: rounded(run), details: without_long(&run.details), ..run.clone() };
                    self.add(KeptRun { commit, date, machine, run });
                }
            }
        }
        self.targets = targets;
    }

    /// Takes in what another experiment has of the row of this set-up in the round under way, with its origin, and
    /// returns it. Nothing where it has not tried the row in that round, or failed.
    pub fn take_over(&mut self, other: &Self, config: &Config) -> Option<Run> {
        let found = |kept: &&KeptRun| kept.run.repeat == self.rounds && kept.run.config == *config;
        let found = other.runs.iter().find(|kept| found(kept) && kept.run.details["error"].is_null())?;
        let machine = self.machine(other.machines.get(found.machine)?);
        self.add(KeptRun { machine, ..found.clone() });
        Some(found.run.clone())
    }

    /// The number of a machine in this file.
    fn machine(&mut self, machine: &Value) -> usize {
        self.machines.iter().position(|known| known == machine).unwrap_or_else(|| {
            self.machines.push(machine.clone());
            self.machines.len() - 1
        })
    }

    /// Adds a run. Only the newest of a row that did not fail keeps its details: a plot shows one.
    fn add(&mut self, new: KeptRun) {
        if new.run.details["error"].is_null() {
            let older = self.runs.iter_mut().filter(|kept| kept.run.config == new.run.config);
            older.for_each(|kept| kept.run.details = only_error(&kept.run.details));
        }
        self.runs.push(new);
    }

    /// Ends the round under way. Runs of rounds long ago are forgotten, and rows with them that are no more.
    pub fn end_round(&mut self) {
        self.rounds += 1;
        self.runs.retain(|kept| kept.run.repeat + ROUNDS >= self.rounds);
    }
}

fn file(directory: &Path, id: &str) -> PathBuf {
    directory.join(format!("{id}.json"))
}

/// Items as a JSON list, one on a line.
fn lines<T: Serialize>(items: &[T]) -> serde_json::Result<String> {
    let items = items.iter().map(serde_json::to_string).collect::<serde_json::Result<Vec<_>>>()?;
    Ok(if items.is_empty() { "[]".to_owned() } else { format!("[\n{}\n]", items.join(",\n")) })
}

/// The metrics in six digits, which is more than any repetition confirms.
fn rounded(run: &Run) -> std::collections::BTreeMap<String, f64> {
    let round = |value: f64| format!("{value:.5e}").parse().unwrap_or(value);
    run.metrics.iter().map(|(name, value)| (name.clone(), round(*value))).collect()
}

fn only_error(details: &Value) -> Value {
    if details["error"].is_null() { Value::Null } else { json!({ "error": details["error"] }) }
}

/// These details without their reports, and without the place where the repository is here.
fn without_long(details: &Value) -> Value {
    if let Some(text) = details.as_str() {
        return text.replace(&tools::repository("").display().to_string(), "").into();
    }
    let Some(parts) = details.as_object() else { return details.clone() };
    let short = parts.iter().filter(|(name, value)| !LONG.contains(&name.as_str()) && !value.is_null());
    let short: Config = short.map(|(name, value)| (name.clone(), without_long(value))).collect();
    if short.is_empty() { Value::Null } else { Value::Object(short) }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn run(row: &str, repeat: usize, ms: f64, details: Value) -> Run {
        let config = Config::from_iter([("workload".to_owned(), Value::from(row))]);
        Run { config, baseline: false, repeat, metrics: BTreeMap::from([("total_ms".to_owned(), ms)]), details }
    }

    fn origin(commit: &str) -> Origin {
        Origin { commit: commit.into(), date: "2026-11-26".into(), machine: json!({ "cpus": 2 }) }
    }

    #[test]
    fn what_was_kept_is_read_again_and_a_run_is_on_a_line() {
        let directory = tempfile::tempdir().unwrap();
        let mut kept = Kept::read(directory.path(), "scale").unwrap();
        assert_eq!((kept.experiment.as_str(), kept.rounds, kept.runs.len()), ("scale", 0, 0));
        let target = || vec![Target::at_most("time", 2.0, Some(1.5))];
        kept.take_in(&[run("idle", 0, 1.0 / 3.0, json!({ "seen": [1], "report": {} }))], target(), &origin("a"));
        kept.take_in(&[run("busy", 0, 2.0, Value::Null)], target(), &origin("b"));
        kept.write(directory.path()).unwrap();
        let read = Kept::read(directory.path(), "scale").unwrap();
        assert_eq!(read.text().unwrap(), kept.text().unwrap());
        assert_eq!((read.machines.len(), read.targets[0].met), (1, true));
        assert_eq!((read.runs[0].commit.as_str(), read.runs[1].commit.as_str()), ("a", "b"));
        assert_eq!(read.runs[0].run.metrics["total_ms"], 0.333333);
        assert_eq!(read.runs[0].run.details, json!({ "seen": [1] }));
        let text = std::fs::read_to_string(directory.path().join("scale.json")).unwrap();
        assert_eq!(text.lines().filter(|line| line.starts_with("{\"commit\"")).count(), 2, "{text}");
    }

    #[test]
    fn a_row_is_tried_once_in_a_round_and_old_rounds_are_forgotten() {
        let mut kept = Kept { experiment: "scale".into(), ..Kept::default() };
        for round in 0..9 {
            let run = run("idle", round, 1.0, Value::Null);
            assert!(!kept.is_tried(&run.config));
            kept.take_in(&[run.clone(), run.clone()], Vec::new(), &origin("a"));
            assert!(kept.is_tried(&run.config));
            kept.end_round();
        }
        let rounds: Vec<usize> = kept.runs.iter().map(|kept| kept.run.repeat).collect();
        assert_eq!(rounds, [4, 5, 6, 7, 8]);
    }

    #[test]
    fn a_row_that_another_experiment_has_tried_in_the_round_is_taken_over_with_its_origin() {
        let mut other = Kept::default();
        other.take_in(&[run("idle", 0, 1.0, json!({ "seen": [1] }))], Vec::new(), &origin("a"));
        other.take_in(&[run("busy", 0, 2.0, json!({ "error": "it broke" }))], Vec::new(), &origin("a"));
        let [idle, busy] = [0, 1].map(|at| other.runs[at].run.config.clone());
        let mut kept = Kept { machines: vec![Value::Null], ..Kept::default() };
        assert_eq!(kept.take_over(&other, &idle).unwrap().metrics["total_ms"], 1.0);
        assert!(kept.take_over(&other, &busy).is_none(), "it failed");
        assert!(kept.is_tried(&idle) && !kept.is_tried(&busy));
        assert_eq!((kept.runs[0].commit.as_str(), kept.runs[0].machine), ("a", 1));
        assert_eq!(kept.machines[1], other.machines[0]);
        kept.end_round();
        assert!(kept.take_over(&other, &idle).is_none(), "it is of another round");
    }

    #[test]
    fn only_the_newest_run_of_a_row_keeps_what_is_plotted_and_none_loses_why_it_failed() {
        let mut kept = Kept::default();
        let seen = || json!({ "seen": [1, 2] });
        let failed = || json!({ "error": "it broke", "seen": [1] });
        let runs = [run("idle", 0, 1.0, failed()), run("idle", 1, 1.0, seen()), run("idle", 2, 1.0, seen())];
        kept.take_in(&runs, Vec::new(), &origin("a"));
        kept.take_in(&[run("idle", 3, 1.0, failed())], Vec::new(), &origin("a"));
        let details: Vec<&Value> = kept.runs.iter().map(|kept| &kept.run.details).collect();
        assert_eq!(details, [&json!({ "error": "it broke" }), &Value::Null, &seen(), &failed()]);
    }

    #[test]
    fn why_a_run_failed_says_nothing_of_the_machine_s_folders() {
        let place = tools::repository("build/log/a.log");
        let mut kept = Kept::default();
        let failed = json!({ "error": format!("see {}", place.display()), "cause": { "file": place } });
        kept.take_in(&[run("idle", 0, 1.0, failed)], Vec::new(), &origin("a"));
        let details = json!({ "error": "see build/log/a.log", "cause": { "file": "build/log/a.log" } });
        assert_eq!(kept.runs[0].run.details, details);
    }

    #[test]
    fn a_file_of_another_form_is_an_error_that_names_it() {
        let directory = tempfile::tempdir().unwrap();
        for text in ["", "[]", "{\"experiment\":\"scale\"}"] {
            std::fs::write(directory.path().join("scale.json"), text).unwrap();
            assert!(Kept::read(directory.path(), "scale").unwrap_err().to_string().contains("scale.json"));
        }
    }
}
