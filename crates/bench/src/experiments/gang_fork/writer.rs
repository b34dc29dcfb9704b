//! A guest that writes all the time is forked: what it can write in each second afterwards, when the first write to a
//! page copies it. The clone is held, so that it takes no processor time.

use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use sterna_api::Forked;

use super::super::gang_figures::{Measured, mib};
use super::super::timeline::{Total, rate, totals};
use super::super::together::REST;
use super::{FIRST_MS, LAST_MS, More, PAUSE};
use crate::error::Result;
use crate::guest::Guest;
use crate::lab::Lab;
use crate::load::now_us;
use crate::meter::Meter;
use crate::plot::LinePlot;
use crate::result::Run;

/// Seconds before a fork whose throughput is the full one, and seconds after it that are shown; of these the first have
/// a figure of their own.
const BEFORE: i64 = 5;
const AFTER: i64 = 8;
const NOTED: i64 = 3;
const SECOND: i64 = 1_000_000;
/// The first moments, in which most of the copies are made.
const MOMENTS: i64 = 200_000;
/// The forks: from shared memory, and when the guest has written all of its working set since.
const FORKS: [&str; 2] = ["first", "again"];

impl More {
    /// Forks the guest twice, and looks at its writes.
    pub(super) fn writer(&self, lab: &Lab, guest: &Guest, meter: &Meter, measured: &mut Measured) -> Result<()> {
        let vm = self.start(lab, guest)?;
        for fork in FORKS {
            std::thread::sleep(Duration::from_secs(BEFORE.unsigned_abs()) + REST);
            let asked_us = now_us();
            let (forked, clones) = vm.fork(&[format!("{}{fork}", guest.name)], &["--paused"])?;
            std::thread::sleep(Duration::from_secs(AFTER.unsigned_abs()) + REST);
            // Until then the source ran, and its pause begins.
            let begin_us = asked_us + (forked.prepare_ms * 1e3) as i64;
            note(fork, &forked, &totals(&meter.lines(guest.address(), "DIRTIER")), begin_us, measured);
            drop(clones);
        }
        Ok(())
    }
}

fn note(fork: &str, forked: &Forked, totals: &[Total], begin_us: i64, measured: &mut Measured) {
    measured.note(&format!("pause_{fork}_ms"), forked.pause_ms);
    measured.note(&format!("copied_{fork}_mib"), mib(forked.copied_bytes));
    measured.note(&format!("copied_{fork}_in_pause_mib"), mib(forked.copied_in_pause_bytes));
    if fork == FORKS[0] {
        measured.note(PAUSE, forked.pause_ms);
        [FIRST_MS, LAST_MS].iter().for_each(|name| measured.note(name, forked.ms));
    }
    let Some(full) = rate(totals, begin_us - BEFORE * SECOND, begin_us).filter(|full| *full > 0.0) else { return };
    measured.note(&format!("pages_per_s_before_{fork}"), full);
    let mut note_kept = |name: String, from_us: i64, for_us: i64| {
        let kept = rate(totals, from_us, from_us + for_us).map(|pages| pages / full);
        kept.into_iter().for_each(|kept| measured.note(&format!("kept_{fork}_{name}"), kept));
    };
    note_kept("moments".into(), begin_us, MOMENTS);
    (1..=NOTED).for_each(|second| note_kept(format!("second_{second}"), begin_us + (second - 1) * SECOND, SECOND));
    let seconds = |at_us: i64| (at_us - begin_us) as f64 / 1e6;
    let shown = totals
        .windows(2)
        .filter(|pair| (-(BEFORE as f64)..=AFTER as f64).contains(&seconds(pair[1].0)) && pair[1].0 > pair[0].0);
    let point = |pair: &[Total]| {
        (seconds(pair[1].0), (pair[1].1 - pair[0].1) / ((pair[1].0 - pair[0].0) as f64 / 1e6) / full * 100.0)
    };
    measured.details[fork] = json!({ "report": forked, "points": shown.map(point).collect::<Vec<_>>() });
}

/// Plots what the writer of the first run with points could write around each fork.
pub(super) fn plot(runs: &[&Run], directory: &Path) -> Result<()> {
    let points = |run: &&Run, fork: &str| -> Option<Vec<(f64, f64)>> {
        let point = |point: &Value| Some((point[0].as_f64()?, point[1].as_f64()?));
        run.details[fork]["points"].as_array().map(|points| points.iter().filter_map(point).collect())
    };
    let Some(run) = runs.iter().find(|run| points(run, FORKS[0]).is_some()) else { return Ok(()) };
    let line = |fork: &&str| Some((format!("forked: {fork}"), points(run, fork)?));
    LinePlot {
        title: "a guest that writes 64 MiB all the time, around a fork".into(),
        x_label: "seconds since it was stopped for the fork".into(),
        y_label: "pages written, % of before".into(),
        lines: FORKS.iter().filter_map(line).collect(),
        spans: Vec::new(),
    }
    .write(directory, "throughput")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_second_after_a_fork_is_compared_with_the_seconds_before() {
        // 100 pages a second; none in the first half second after the fork, then half as many for half a second.
        let mut written = 0.0;
        let totals: Vec<Total> = (0..200)
            .map(|tenth: i64| {
                let at_us = tenth * 100_000;
                written += match at_us {
                    10_000_001..=10_500_000 => 0.0,
                    10_500_001..=11_000_000 => 5.0,
                    _ => 10.0,
                };
                (at_us, written)
            })
            .collect();
        let mut measured = Measured::default();
        let forked = Forked { pause_ms: 9.0, copied_bytes: 2 << 20, ..Forked::default() };
        note("first", &forked, &totals, 10_000_000, &mut measured);
        let of = |name: &str| measured.metrics[name];
        assert_eq!((of("pages_per_s_before_first"), of(PAUSE), of("copied_first_mib")), (100.0, 9.0, 2.0));
        assert_eq!((of("kept_first_second_1"), of("kept_first_second_2")), (0.25, 1.0));
        assert_eq!(of("kept_first_moments"), 0.0);
        let points = measured.details["first"]["points"].as_array().unwrap();
        assert!(points.contains(&json!([0.5, 0.0])) && points.contains(&json!([1.0, 50.0])), "{points:?}");
        // A guest that says nothing has no throughput.
        let mut measured = Measured::default();
        note("again", &forked, &[], 0, &mut measured);
        assert!(!measured.metrics.contains_key("pages_per_s_before_again"));
    }
}
