//! The one way in which experiments try their rows: order, `--only`, time limits, the guests' devices, failures and the
//! output are the same everywhere.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::record::{NOT_TRIED, Record};
use crate::error::{Error, Result};
use crate::guest::{Guest, plugged};
use crate::lab::Lab;
use crate::result::{Config, Run, show_number};

/// The metric that says whether a run failed: 1 or 0.
pub(super) const FAILED: &str = "failed";

/// A row that is to be tried.
pub(super) struct Row {
    /// The words that `--only` looks at and that are printed.
    pub(super) words: String,
    /// Its set-up.
    pub(super) config: Config,
    /// Whether it is one of those that others are compared with.
    pub(super) baseline: bool,
}

impl Row {
    /// A run of this row, without figures yet.
    pub(super) fn run(&self, repeat: usize) -> Run {
        Run {
            config: self.config.clone(),
            baseline: self.baseline,
            repeat,
            metrics: BTreeMap::new(),
            details: Value::Null,
        }
    }
}

/// Rows that are tried together, in the same guests: mostly one row in one guest.
pub(super) trait Attempt {
    /// Its rows.
    fn rows(&self) -> Vec<Row>;

    /// Its guests, fresh ones of names that begin with `name`. The runner makes and removes their network devices and
    /// consoles.
    fn guests(&self, lab: &Lab, name: &str) -> Vec<Guest>;

    /// Tries the rows. Each ends with [`done`] or [`fail`]; a row with neither when this returns has failed for the
    /// returned reason.
    ///
    /// # Errors
    /// The reason why it could not go on. Figures that were measured until then are kept.
    fn run(&self, site: &Site, runs: &mut [Run]) -> Result<()>;

    /// The experiments that try rows like these in the same way. In a campaign a row of the same set-up is tried once
    /// for all of them.
    fn experiments(&self) -> &'static [&'static str] {
        &[]
    }

    /// A row's figures, in words.
    fn tell(&self, run: &Run) -> String;
}

/// The site where rows are tried.
pub(super) struct Site<'a> {
    /// The hosts.
    pub(super) lab: &'a Lab,
    /// The guests, with their network devices in place.
    pub(super) guests: &'a [Guest],
    /// Whether this repetition goes backwards.
    backwards: bool,
    record: &'a Record,
    rows: &'a [Row],
}

impl Site<'_> {
    /// The only guest.
    ///
    /// # Errors
    /// The attempt has no guest.
    pub(super) fn guest(&self) -> Result<&Guest> {
        self.guests.first().ok_or_else(|| Error::Usage("the attempt has no guest".into()))
    }

    /// The rows' places, forwards and backwards in turn.
    pub(super) fn order(&self) -> Vec<usize> {
        let places = 0..self.rows.len();
        if self.backwards { places.rev().collect() } else { places.collect() }
    }

    /// Whether the row at this place must still be tried; where not, its run says why.
    pub(super) fn is_due(&self, at: usize, run: &mut Run) -> bool {
        let Row { words, config, .. } = &self.rows[at];
        if let Some(reason) = self.record.not_tried(words, config) {
            fail(run, &reason);
            run.details[NOT_TRIED] = json!(true);
        }
        !run.metrics.contains_key(FAILED)
    }

    /// Writes the results with these runs as they are now.
    pub(super) fn show(&self, runs: &[Run]) {
        let mut runs = runs.to_vec();
        runs.iter_mut().for_each(|run| fail_unless_ended(run, "was cut short"));
        self.record.show(&runs);
    }
}

/// Notes that a row has all its figures.
pub(super) fn done(run: &mut Run) {
    run.metrics.insert(FAILED.into(), 0.0);
}

/// Notes why a row lacks figures; the first of several reasons is kept.
pub(super) fn fail(run: &mut Run, reason: &str) {
    run.metrics.insert(FAILED.into(), 1.0);
    if !run.details.is_object() {
        run.details = json!({});
    }
    if run.details["error"].is_null() {
        run.details["error"] = json!(reason);
    }
}

fn fail_unless_ended(run: &mut Run, reason: &str) {
    if !run.metrics.contains_key(FAILED) {
        fail(run, reason);
    }
}

/// A metric as it is printed.
pub(super) fn figure(run: &Run, name: &str) -> String {
    run.metrics.get(name).map_or_else(|| "-".into(), |value| show_number(*value))
}

/// Tries every attempt `repeats` times, forwards and backwards in turn, so that a drift affects both sides of a pair
/// alike. A row that fails or is not tried is in the results too: no experiment hides any.
pub(super) fn try_all<A: Attempt>(lab: &Lab, attempts: &[A], repeats: usize, record: &mut Record) {
    let all = repeats * attempts.iter().map(|attempt| attempt.rows().len()).sum::<usize>();
    let mut tried = 0;
    let first = record.first_repeat();
    for repeat in first..first + repeats {
        let backwards = repeat % 2 == 1;
        let order: Vec<&A> = if backwards { attempts.iter().rev().collect() } else { attempts.iter().collect() };
        for attempt in order {
            let rows = attempt.rows();
            rows.iter().for_each(|row| record.take_over(attempt.experiments(), &row.config));
            let runs = try_one(lab, attempt, &rows, repeat, backwards, record);
            for (row, run) in rows.iter().zip(&runs) {
                tried += 1;
                if !record.has_place_for(run) {
                    continue;
                }
                let error = run.details["error"].as_str().map(|error| format!(": {error}")).unwrap_or_default();
                eprintln!("[{tried}/{all}] {}: {}{error}", row.words, attempt.tell(run));
            }
            record.add(runs);
        }
    }
}

fn try_one<A: Attempt>(
    lab: &Lab,
    attempt: &A,
    rows: &[Row],
    repeat: usize,
    backwards: bool,
    record: &Record,
) -> Vec<Run> {
    let mut runs: Vec<Run> = rows.iter().map(|row| row.run(repeat)).collect();
    let guests = attempt.guests(lab, &record.new_guest());
    let site = Site { lab, guests: &guests, backwards, record, rows };
    let due = site.order().into_iter().filter(|&at| site.is_due(at, &mut runs[at])).count();
    if due == 0 {
        return runs;
    }
    let reason = match plugged(lab, &guests, || attempt.run(&site, &mut runs)) {
        Ok(()) => "it has no figures".to_owned(),
        Err(error) => {
            lab.end_machines();
            error.to_string()
        }
    };
    runs.iter_mut().for_each(|run| fail_unless_ended(run, &reason));
    runs
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::lab::LabConfig;

    /// Two rows; the second fails.
    struct Two;

    impl Attempt for Two {
        fn rows(&self) -> Vec<Row> {
            ["first", "second"]
                .map(|word| Row {
                    words: word.into(),
                    config: Config::from_iter([("workload".to_owned(), json!(word))]),
                    baseline: false,
                })
                .into()
        }

        fn guests(&self, _: &Lab, _: &str) -> Vec<Guest> {
            Vec::new()
        }

        fn run(&self, site: &Site, runs: &mut [Run]) -> Result<()> {
            for at in site.order() {
                if site.is_due(at, &mut runs[at]) {
                    runs[at].metrics.insert("tried".into(), 1.0);
                    if at == 1 {
                        return Err(Error::Usage("it broke".into()));
                    }
                    done(&mut runs[at]);
                }
            }
            Ok(())
        }

        fn tell(&self, run: &Run) -> String {
            figure(run, "tried")
        }
    }

    fn tried(repeats: usize, only: &[&str]) -> Option<Vec<(f64, bool, Option<String>)>> {
        if !nix::unistd::Uid::effective().is_root() {
            eprintln!("skipped: a lab needs root");
            return None;
        }
        // The tests of one process run beside each other.
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("run{}n{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let lab = Lab::up(LabConfig { daemons: false, ..LabConfig::pair(&name) }).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let mut record = Record::new("two", directory.path().into(), false);
        record.only(only.iter().map(|&word| word.to_owned()).collect());
        try_all(&lab, &[Two], repeats, &mut record);
        let seen = |run: &Run| {
            let error = run.details["error"].as_str().map(str::to_owned);
            (run.metrics[FAILED], run.metrics.contains_key("tried"), error)
        };
        Some(record.runs().iter().map(seen).collect())
    }

    #[test]
    fn rows_go_forwards_and_backwards_and_one_that_fails_takes_the_rest_of_its_guest_with_it() {
        let Some(runs) = tried(2, &[]) else { return };
        let broke = Some("it broke".to_owned());
        let [first, second, again, other] = runs.try_into().unwrap();
        assert_eq!((first, second), ((0.0, true, None), (1.0, true, broke.clone())));
        // This repetition goes backwards: the second row comes first, and no guest is left for the first row.
        assert_eq!((again, other), ((1.0, false, broke.clone()), (1.0, true, broke)));
    }

    #[test]
    fn a_row_that_was_not_asked_for_is_in_the_results_with_that_reason() {
        let Some(runs) = tried(1, &["first"]) else { return };
        assert_eq!(runs[0], (0.0, true, None));
        assert_eq!((runs[1].0, runs[1].1), (1.0, false));
        assert!(runs[1].2.as_ref().unwrap().contains("asked for"));
    }
}
