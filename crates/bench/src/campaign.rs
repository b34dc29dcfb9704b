//! A campaign: all experiments, measured for hours. Each row of an experiment is tried once in a round; the experiments
//! with the fewest rounds come first, and a round that a campaign did not end is gone on with by the next one.

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::command::output;
use crate::error::{Error, Result};
use crate::experiments::{self, ALL, Round};
use crate::kept::{Kept, Origin};
use crate::result::{machine, targets_table};
use crate::tools;

/// Options of a campaign.
#[derive(Debug, Clone)]
pub struct Options {
    /// How long new rows are begun.
    pub length: Duration,
    /// The experiments; all where none is named.
    pub ids: Vec<String>,
    /// Words of the rows to measure, once each; all rows, where there are none.
    pub only: Vec<String>,
    /// The directory with what is kept.
    pub results: PathBuf,
    /// The directory for each experiment's last results, as `run` writes them.
    pub out: PathBuf,
}

/// The directory in which campaigns keep results, unless asked otherwise.
#[must_use]
pub fn results() -> PathBuf {
    tools::repository("docs/experiments/results")
}

/// Measures until the time is over, and prints each experiment's targets.
///
/// # Errors
/// Where an experiment is unknown, what was kept cannot be read, or an experiment could not go on: the others are
/// measured before that is said.
pub fn run(options: &Options) -> Result<()> {
    let until = Instant::now() + options.length;
    let commit = commit()?;
    let mut left = chosen(&options.ids)?;
    let mut failed = Vec::new();
    while let Some(id) = next(&left, options)?.filter(|_| Instant::now() < until) {
        let kept = Kept::read(&options.results, id)?;
        eprintln!("{id}: round {}", kept.rounds + 1);
        let date = output(Command::new("date").args(["-u", "+%F"]))?.trim().to_owned();
        let origin = Origin { commit: commit.clone(), date, machine: machine() };
        let round = Round { kept, results: options.results.clone(), origin, until };
        match experiments::run_round(id, &options.out, &options.only, round) {
            Ok(_) if !options.only.is_empty() => left.retain(|other| *other != id),
            Ok(true) => {}
            Ok(false) => break,
            Err(error) => {
                eprintln!("{id} could not go on: {error}");
                failed.push(format!("{id} ({error})"));
                left.retain(|other| *other != id);
            }
        }
    }
    for id in chosen(&options.ids)? {
        let kept = Kept::read(&options.results, id)?;
        println!("# {id}: {} rounds, {} runs\n\n{}", kept.rounds, kept.runs.len(), targets_table(&kept.targets));
    }
    println!("kept in {}; `./x bench pages` takes them into the documents", options.results.display());
    if failed.is_empty() {
        return Ok(());
    }
    Err(Error::Usage(format!("could not go on with {}", failed.join(", "))))
}

/// The names of the experiments that are asked for.
fn chosen(ids: &[String]) -> Result<Vec<&'static str>> {
    ids.iter().try_for_each(|id| experiments::find(id).map(drop))?;
    let all = ALL.iter().map(|experiment| experiment.id);
    Ok(all.filter(|id| ids.is_empty() || ids.iter().any(|asked| asked == id)).collect())
}

/// The experiment that has had the fewest rounds. Of several it is one whose round was begun, else the first.
fn next<'a>(left: &[&'a str], options: &Options) -> Result<Option<&'a str>> {
    let mut known = Vec::new();
    for id in left {
        let kept = Kept::read(&options.results, id)?;
        let begun = kept.runs.iter().any(|run| run.run.repeat == kept.rounds);
        known.push((kept.rounds, !begun, *id));
    }
    // `min_by_key` takes the first of equals.
    Ok(known.into_iter().min_by_key(|(rounds, not_begun, _)| (*rounds, *not_begun)).map(|(_, _, id)| id))
}

/// The commit that is measured. Documents may differ from it: a campaign itself changes them.
fn commit() -> Result<String> {
    let git = |arguments: &[&str]| output(Command::new("git").arg("-C").arg(tools::repository(".")).args(arguments));
    let failed = |error: Error| {
        Error::Usage(format!("a campaign keeps the commit with each row, and git does not say which it is: {error}"))
    };
    let commit = git(&["rev-parse", "--short=7", "HEAD"]).map_err(failed)?;
    let changed = git(&["status", "--porcelain", "--", ".", ":!docs"]).map_err(failed)?;
    Ok(format!("{}{}", commit.trim(), if changed.is_empty() { "" } else { "+" }))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::Value;

    use super::*;
    use crate::result::{Config, Run};

    #[test]
    fn the_least_measured_experiment_is_next_and_a_round_that_was_begun_is_ended_first() {
        let directory = tempfile::tempdir().unwrap();
        let options = Options {
            length: Duration::ZERO,
            ids: Vec::new(),
            only: Vec::new(),
            results: directory.path().into(),
            out: directory.path().join("out"),
        };
        let left = ["first-flight", "throughput", "scale"];
        assert_eq!(next(&left, &options).unwrap(), Some("first-flight"));
        let write = |id: &str, rounds: usize, begun: bool| {
            let run = Run {
                config: Config::new(),
                baseline: false,
                repeat: rounds,
                metrics: BTreeMap::new(),
                details: Value::Null,
            };
            let mut kept = Kept { experiment: id.into(), rounds, ..Kept::default() };
            let origin = Origin { commit: "a".into(), date: "2026-11-26".into(), machine: Value::Null };
            kept.take_in(if begun { std::slice::from_ref(&run) } else { &[] }, Vec::new(), &origin);
            kept.write(directory.path()).unwrap();
        };
        write("first-flight", 1, false);
        write("scale", 0, true);
        assert_eq!(next(&left, &options).unwrap(), Some("scale"));
        write("scale", 1, true);
        assert_eq!(next(&left, &options).unwrap(), Some("throughput"));
        write("throughput", 1, false);
        assert_eq!(next(&left, &options).unwrap(), Some("scale"));
        assert_eq!(next(&[], &options).unwrap(), None);
    }

    #[test]
    fn only_known_experiments_are_measured_in_their_own_order() {
        let ids = ["scale", "throughput"].map(str::to_owned);
        assert_eq!(chosen(&ids).unwrap(), ["throughput", "scale"]);
        assert_eq!(chosen(&[]).unwrap().len(), ALL.len());
        assert!(chosen(&["sky".to_owned()]).unwrap_err().to_string().contains("there is no experiment sky"));
    }
}
