//! How fast pages move where no link limits them, and the processor time that this costs.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use sterna_api::MigrateOptions;

use super::{Case, Options, Plan, is, lab_name, qemus, try_all};
use crate::baseline::{Method, Ram};
use crate::error::Result;
use crate::gang::lab_with;
use crate::lab::LabConfig;
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
    // A short run has only the pages that are fastest.
    let kinds: &[Pages] = if options.quick { &[Pages::Huge] } else { &Pages::ALL };
    let of = |pages: &Pages| Ok((*pages, cases(*pages, options.quick)?));
    let cases = kinds.iter().map(of).collect::<Result<Vec<_>>>()?;
    let plan = Plan::new(move |record| {
        for (pages, cases) in &cases {
            let config = LabConfig { rate_bytes_per_s: None, ..LabConfig::pair(&lab_name()) };
            let lab = lab_with(config, 1, &pages.settings())?;
            try_all(&lab, cases, repeats, record, |_, metrics| derive(metrics));
        }
        Ok(())
    });
    Ok(plan.judged(|runs| Ok(targets(runs))).drawn(plot))
}

/// What pages the hosts' guests are in. QEMU's own plain RAM is in huge ones, as the kernel sees fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pages {
    Huge,
    Small,
}

/// How the workload of guests in huge pages ends.
const HUGE: &str = ", huge pages";

impl Pages {
    const ALL: [Self; 2] = [Self::Huge, Self::Small];

    /// The hosts' settings.
    fn settings(self) -> String {
        format!("huge_pages = {}\n", self == Self::Huge)
    }

    /// What is said of them.
    fn words(self) -> &'static str {
        if self == Self::Huge { HUGE } else { "" }
    }

    /// What the workload is called.
    fn workload(self, filled_mib: u64) -> String {
        format!("idle, {filled_mib} MiB of noise{}", self.words())
    }

    /// Whether a run's guest was in them.
    fn has(self, run: &Run) -> bool {
        let workload = run.config.get("workload").and_then(|words| words.as_str()).unwrap_or_default();
        workload.ends_with(HUGE) == (self == Self::Huge)
    }
}

/// Speed and cost, from what a trial measures.
fn derive(metrics: &mut BTreeMap<String, f64>) {
    let get = |name: &str| metrics.get(name).copied().unwrap_or(f64::NAN);
    let (bytes, total_s) = (get("bytes_on_wire"), get("total_ms") / 1e3);
    let moving_s = total_s - metrics.get("setup_ms").map_or(0.0, |setup| setup / 1e3);
    let (speed, cost) = (bytes / 1e9 / moving_s, get("cpu_s") / (bytes / f64::from(1 << 30)));
    metrics.insert(SPEED.into(), speed);
    metrics.insert("gb_per_s_with_setup".into(), bytes / 1e9 / total_s);
    metrics.insert(COST.into(), cost);
}

fn cases(pages: Pages, quick: bool) -> Result<Vec<Case>> {
    let filled_mib: u64 = if quick { 768 } else { 2048 };
    let mut cases = Vec::new();
    for qemu in qemus()? {
        let case = |mover: Mover| Case {
            workload: pages.workload(filled_mib),
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
        for pages in Pages::ALL {
            let ratio = |metric: &str, best: fn(f64, f64) -> f64| judged(runs, (streams, pages), metric, best);
            let of = |what: &str| format!("{streams}{}: {what} ÷ best QEMU row", pages.words());
            targets.push(Target::at_least(of("GB/s"), 1.3, ratio(SPEED, f64::max)));
            targets.push(Target::at_most(of("CPU s per GiB"), 1.0, ratio(COST, f64::min)));
        }
    }
    targets
}

/// The median over repetitions of Sterna's value divided by the best of QEMU's in the same repetition.
fn judged(runs: &[Run], (mover, pages): (&str, Pages), metric: &str, best: fn(f64, f64) -> f64) -> Option<f64> {
    let repeats = 1 + runs.iter().map(|run| run.repeat).max()?;
    let ratios = (0..repeats).filter_map(|repeat| {
        let own = series(runs, metric, |run| run.repeat == repeat && pages.has(run) && is(run, &[("mover", mover)]))
            .into_iter()
            .reduce(best)?;
        let theirs = series(runs, metric, |run| run.repeat == repeat && pages.has(run) && run.baseline)
            .into_iter()
            .reduce(best)?;
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

    #[test]
    fn a_run_is_judged_against_the_best_baseline_of_its_own_repetition() {
        let run_in = |pages: Pages, mover: &str, baseline, repeat, speed| Run {
            config: [("mover", mover.into()), ("workload", pages.workload(1).into())]
                .into_iter()
                .map(|(name, value)| (name.to_owned(), value))
                .collect(),
            baseline,
            repeat,
            metrics: BTreeMap::from([(SPEED.to_owned(), speed)]),
            details: serde_json::Value::Null,
        };
        let run = |mover: &str, baseline, repeat, speed| run_in(Pages::Small, mover, baseline, repeat, speed);
        let sterna = "sterna, 1 stream";
        let runs = [
            run(sterna, false, 0, 3.0),
            run("q1", true, 0, 1.0),
            run("q2", true, 0, 2.0),
            run("q1", true, 1, 1.0),
            run(sterna, false, 1, 1.7),
            run_in(Pages::Huge, sterna, false, 0, 9.0),
            run_in(Pages::Huge, "q1", true, 0, 3.0),
        ];
        assert_eq!(judged(&runs, (sterna, Pages::Small), SPEED, f64::max), Some(1.6));
        assert_eq!(judged(&runs, (sterna, Pages::Huge), SPEED, f64::max), Some(3.0));
        assert_eq!(judged(&runs, ("sterna, 2 streams", Pages::Small), SPEED, f64::max), None);
    }
}
