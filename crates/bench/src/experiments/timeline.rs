//! A guest's reports of its own work, before, during and after its migration.

use std::path::Path;

use serde_json::{Value, json};

use super::is;
use crate::error::Result;
use crate::load::{Sample, mean_between};
use crate::meter::Line;
use crate::plot::LinePlot;
use crate::result::Run;
use crate::trial::{Mover, Trial};

/// A second, in microseconds.
const SECOND: i64 = 1_000_000;
/// Seconds before and after the migration that a plot shows.
const SHOWN: f64 = 8.0;

/// The rates that a program's lines carry under `key`, each over the interval since the line before.
pub(super) fn samples(lines: &[Line], program: &str, key: &str) -> Vec<Sample> {
    let own = lines.iter().filter(|line| line.text.split(' ').next() == Some(program));
    own.filter_map(|line| Some(Sample { at_us: line.at_us, per_s: line.number(key)? })).collect()
}

/// A moment, microseconds since 1970, and what the guest has done until then.
pub(super) type Total = (i64, f64);

/// What a guest has done in all, as its lines carry it.
pub(super) fn totals(lines: &[Line]) -> Vec<Total> {
    lines.iter().filter_map(|line| Some((line.at_us, line.number("total")?))).collect()
}

/// What it had done at a moment between two of the totals.
fn until(totals: &[Total], at_us: i64) -> Option<f64> {
    let pair = totals.windows(2).find(|pair| (pair[0].0..=pair[1].0).contains(&at_us))?;
    let [(from_us, from), (to_us, to)] = pair else { return None };
    let share = (at_us - from_us) as f64 / (to_us - from_us).max(1) as f64;
    Some(from + (to - from) * share)
}

/// What it did per second between two moments.
pub(super) fn rate(totals: &[Total], from_us: i64, to_us: i64) -> Option<f64> {
    Some((until(totals, to_us)? - until(totals, from_us)?) / ((to_us - from_us) as f64 / 1e6))
}

/// Adds the mean rate while the guest was left alone, while it was moved, and afterwards, as `KEY_before`, `_during`
/// and `_after`; and `KEY_kept`, the share of the first that was left. Returns the samples in seconds since the
/// request, and how long it took, for [`plot`].
pub(super) fn note(trial: &mut Trial, program: &str, key: &str) -> Value {
    let samples = samples(&trial.lines, program, key);
    let (begin, end) = (trial.begin_us, trial.end_us);
    let before = mean_between(&samples, trial.settled_us - 6 * SECOND, trial.settled_us);
    let during = mean_between(&samples, begin, end);
    // The mover clears up for a moment.
    let after = mean_between(&samples, end + SECOND, i64::MAX);
    let kept = during.zip(before).map(|(during, before)| during / before);
    for (name, value) in [("before", before), ("during", during), ("after", after), ("kept", kept)] {
        trial.metrics.extend(value.map(|value| (format!("{key}_{name}"), value)));
    }
    let seconds = |at_us: i64| (at_us - begin) as f64 / 1e6;
    let points: Vec<(f64, f64)> = samples.iter().map(|sample| (seconds(sample.at_us), sample.per_s)).collect();
    json!({ "points": points, "end_s": seconds(end) })
}

/// Plots the first run of each of `movers` over time, with the time in which it was moved, from what [`note`] returned.
pub(super) fn plot(
    runs: &[Run],
    workload: &str,
    movers: &[&Mover],
    directory: &Path,
    name: &str,
    labels: (&str, &str),
) -> Result<()> {
    let (mut lines, mut spans) = (Vec::new(), Vec::new());
    for mover in movers {
        let label = mover.label();
        let row = [("workload", workload), ("mover", label.as_str())];
        let Some(run) = runs.iter().find(|run| is(run, &row) && !run.details["seen"].is_null()) else { continue };
        let Some((points, end)) = seen(&run.details["seen"]) else { continue };
        let shown = |at: f64| (-SHOWN..=end + SHOWN).contains(&at);
        lines.push((label.clone(), points.into_iter().filter(|(at, _)| shown(*at)).collect()));
        spans.push((format!("moved by {label}"), 0.0, end));
    }
    let (title, y_label) = labels;
    LinePlot { title: title.into(), x_label: "seconds since the request".into(), y_label: y_label.into(), lines, spans }
        .write(directory, name)
}

/// Points and end, as [`note`] wrote them.
fn seen(value: &Value) -> Option<(Vec<(f64, f64)>, f64)> {
    let point = |point: &Value| Some((point[0].as_f64()?, point[1].as_f64()?));
    Some((value["points"].as_array()?.iter().filter_map(point).collect(), value["end_s"].as_f64()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    fn line(at_s: i64, text: &str) -> Line {
        Line { from: Ipv4Addr::LOCALHOST, at_us: at_s * SECOND, text: text.into() }
    }

    #[test]
    fn rates_are_taken_before_during_and_after_and_only_of_that_program() {
        let mut lines: Vec<Line> = (0..30)
            .map(|s| {
                line(s, &format!("QUICKSORT ok sorts_per_s={} sorts=1", if (10..20).contains(&s) { 1 } else { 4 }))
            })
            .collect();
        lines.push(line(15, "OTHER ok sorts_per_s=1000"));
        let mut trial =
            Trial { lines, settled_us: 8 * SECOND, begin_us: 10 * SECOND, end_us: 18 * SECOND, ..Trial::default() };
        let value = note(&mut trial, "QUICKSORT", "sorts_per_s");
        let metric = |name: &str| trial.metrics[&format!("sorts_per_s_{name}")];
        assert_eq!((metric("before"), metric("during"), metric("kept")), (4.0, 1.0, 0.25));
        assert_eq!(metric("after"), 4.0);
        let (points, end) = seen(&value).unwrap();
        assert_eq!((points.len(), points[0], end), (30, (-10.0, 4.0), 8.0));
    }

    #[test]
    fn a_guest_that_says_nothing_has_no_rates() {
        let mut trial = Trial::default();
        note(&mut trial, "QUICKSORT", "sorts_per_s");
        assert!(trial.metrics.is_empty());
    }
}
