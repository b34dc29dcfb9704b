//! How fast pages move where no link limits them, and the processor time that this costs.

use std::path::Path;
use std::time::Duration;

use sterna_api::MigrateOptions;

use super::{Case, Options, Plan, is, lab_name, qemus, try_all};
use crate::baseline::{Method, Ram};
use crate::error::Result;
use crate::lab::{Lab, LabConfig};
use crate::plot::BarPlot;
use crate::result::{Run, Target, rows, series};
use crate::stats::median;
use crate::trial::{self, Mover};

/// The metric that is judged: page bytes over the time in which pages moved.
const SPEED: &str = "gb_per_s";
/// Processor seconds of both hosts per GiB moved.
const COST: &str = "cpu_s_per_gib";

pub(super) fn plan(options: &Options) -> Result<Plan> {
    let repeats = options.repeat.unwrap_or(if options.quick { 3 } else { 5 });
    let cases = cases(options.quick)?;
    let plan = Plan::new(move |record| {
        let lab = Lab::up(LabConfig { rate_bytes_per_s: None, ..LabConfig::pair(&lab_name()) })?;
        try_all(&lab, &cases, repeats, record, |_, metrics| {
            let get = |name: &str| metrics.get(name).copied().unwrap_or(f64::NAN);
            let (bytes, total_s) = (get("bytes_on_wire"), get("total_ms") / 1e3);
            let moving_s = total_s - metrics.get("setup_ms").map_or(0.0, |setup| setup / 1e3);
            let (speed, cost) = (bytes / 1e9 / moving_s, get("cpu_s") / (bytes / f64::from(1 << 30)));
            metrics.insert(SPEED.into(), speed);
            metrics.insert("gb_per_s_with_setup".into(), bytes / 1e9 / total_s);
            metrics.insert(COST.into(), cost);
        });
        Ok(())
    });
    Ok(plan.judged(|runs| Ok(targets(runs))).drawn(plot))
}

fn cases(quick: bool) -> Result<Vec<Case>> {
    let filled_mib: u64 = if quick { 768 } else { 2048 };
    let mut cases = Vec::new();
    for qemu in qemus()? {
        let case = |mover: Mover| Case {
            workload: format!("idle, {filled_mib} MiB of noise"),
            memory_bytes: (filled_mib + 512) << 20,
            jobs: format!("idle:--mib,{filled_mib}"),
            ready: Some("IDLE ready"),
            load: None,
            mover,
            qemu: qemu.clone(),
            settle: Duration::from_secs(2),
            limit: trial::LIMIT,
        };
        // A short run has only the newest QEMU, which is the fastest.
        if quick && qemu.label == "7.2" && super::qemus()?.len() > 1 {
            continue;
        }
        for streams in [1, 2, 4] {
            cases.push(case(Mover::Sterna(MigrateOptions { streams, ..MigrateOptions::default() })));
        }
        cases.push(case(Mover::Qemu(Method::Vanilla, Ram::Plain)));
        cases.push(case(Mover::Qemu(Method::Multifd(2), Ram::Plain)));
        if !quick {
            cases.push(case(Mover::Qemu(Method::Vanilla, Ram::SharedFile)));
            cases.push(case(Mover::Qemu(Method::Multifd(4), Ram::Plain)));
        }
    }
    Ok(cases)
}

fn targets(runs: &[Run]) -> Vec<Target> {
    let mut targets = Vec::new();
    for streams in ["sterna, 1 stream", "sterna, 2 streams"] {
        let ratio = |metric: &str, best: fn(f64, f64) -> f64| judged(runs, streams, metric, best);
        targets.push(Target::at_least(format!("{streams}: GB/s ÷ best QEMU row"), 1.3, ratio(SPEED, f64::max)));
        targets.push(Target::at_most(format!("{streams}: CPU s per GiB ÷ best QEMU row"), 1.0, ratio(COST, f64::min)));
    }
    targets
}

/// The median over repetitions of Sterna's value divided by the best of QEMU's in the same repetition.
fn judged(runs: &[Run], mover: &str, metric: &str, best: fn(f64, f64) -> f64) -> Option<f64> {
    let repeats = 1 + runs.iter().map(|run| run.repeat).max()?;
    let ratios = (0..repeats).filter_map(|repeat| {
        let own = series(runs, metric, |run| run.repeat == repeat && is(run, &[("mover", mover)]))
            .into_iter()
            .reduce(best)?;
        let theirs = series(runs, metric, |run| run.repeat == repeat && run.baseline).into_iter().reduce(best)?;
        Some(own / theirs)
    });
    median(&ratios.collect::<Vec<_>>())
}

fn plot(runs: &[Run], directory: &Path) -> Result<()> {
    for (metric, label) in [(SPEED, "GB/s"), (COST, "processor seconds per GiB")] {
        let bar = |row: &crate::result::Row| Some((row.mover_and_qemu(), row.metrics.get(metric)?.median));
        let bars = rows(runs).iter().filter_map(bar).collect();
        BarPlot { title: "Incompressible RAM, no link limit".into(), label: label.into(), bars }
            .write(directory, metric)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn a_run_is_judged_against_the_best_baseline_of_its_own_repetition() {
        let run = |mover: &str, baseline, repeat, speed| Run {
            config: [("mover".to_owned(), mover.into())].into_iter().collect(),
            baseline,
            repeat,
            metrics: BTreeMap::from([(SPEED.to_owned(), speed)]),
            details: serde_json::Value::Null,
        };
        let sterna = "sterna, 1 stream";
        let runs = [
            run(sterna, false, 0, 3.0),
            run("q1", true, 0, 1.0),
            run("q2", true, 0, 2.0),
            run("q1", true, 1, 1.0),
            run(sterna, false, 1, 1.7),
        ];
        assert_eq!(judged(&runs, sterna, SPEED, f64::max), Some(1.6));
        assert_eq!(judged(&runs, "sterna, 2 streams", SPEED, f64::max), None);
    }
}
