//! The cost of moving idle and busy guests, beside QEMU's own migration: bytes, downtime, total time, and the guest's
//! own throughput meanwhile.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use sterna_api::MigrateOptions;

use super::{Case, Options, Plan, is, lab_name, qemus, try_all};
use crate::baseline::{Method, Ram};
use crate::error::Result;
use crate::lab::{Lab, LabConfig};
use crate::load::memcached::LoadConfig;
use crate::plot::BarPlot;
use crate::result::{Row, Run, Target, rows, series};
use crate::stats::{median, paired_ratio};
use crate::trial::{self, Mover, Qemu};

const IDLE: &str = "idle";
const WIRE: &str = "wire_bytes_per_used_byte";
const THROUGHPUT: &str = "guest_throughput";
/// The share of the throughput just before the migration that was left during it.
const KEPT: &str = "guest_throughput_kept";
const SEED: u64 = 20;

/// What a guest does, and how its work is measured.
struct Workload {
    name: &'static str,
    jobs: &'static str,
    ready: Option<&'static str>,
    memcached: bool,
    /// Whether a short run has it.
    quick: bool,
}

const WORKLOADS: &[Workload] = &[
    Workload { name: IDLE, jobs: "idle", ready: None, memcached: false, quick: true },
    Workload {
        name: "20 MiB/s over 128 MiB",
        jobs: "dirtier:--mib,128,--rate,20",
        ready: Some("DIRTIER ready"),
        memcached: false,
        quick: false,
    },
    Workload {
        name: "50 MiB/s over 128 MiB",
        jobs: "dirtier:--mib,128,--rate,50",
        ready: Some("DIRTIER ready"),
        memcached: false,
        quick: true,
    },
    // The program has no rate: its own speed shows what tracking costs it. The set is small, so that QEMU's own
    // migration ends; idle memory beside it makes the migration longer.
    Workload {
        name: "full speed over 16 MiB",
        jobs: "idle:--mib,256;dirtier:--mib,16",
        ready: Some("DIRTIER ready"),
        memcached: false,
        quick: true,
    },
    Workload { name: "memcached, sets", jobs: "memcached:-m,256", ready: None, memcached: true, quick: true },
];

pub(super) fn plan(options: &Options) -> Result<Plan> {
    let repeats = options.repeat.unwrap_or(if options.quick { 3 } else { 5 });
    let cases = cases(options.quick)?;
    let plan = Plan::new(move |record| {
        let lab = Lab::up(LabConfig::pair(&lab_name()))?;
        try_all(&lab, &cases, repeats, record, |_, metrics| derive(metrics));
        Ok(())
    });
    Ok(plan.judged(|runs| Ok(targets(runs))).drawn(plot))
}

/// Adds the figures that are judged and drawn.
fn derive(metrics: &mut BTreeMap<String, f64>) {
    if let (Some(wire), Some(pages)) = (metrics.get("bytes_on_wire"), metrics.get("nonzero_pages")) {
        metrics.insert(WIRE.into(), wire / (pages * 4096.0));
    }
    let during = metrics.get("requests_per_s_during").or(metrics.get("writes_per_s_during")).copied();
    let before = metrics.get("requests_per_s_before").or(metrics.get("writes_per_s_before")).copied();
    metrics.extend(during.map(|during| (THROUGHPUT.into(), during)));
    metrics.extend(during.zip(before).map(|(during, before)| (KEPT.into(), during / before)));
}

fn cases(quick: bool) -> Result<Vec<Case>> {
    let qemus = qemus()?;
    let newest = qemus.last().map(|qemu| qemu.label.clone());
    let mut cases = Vec::new();
    for workload in WORKLOADS.iter().filter(|workload| workload.quick || !quick) {
        // In a short run busy guests are moved with the newest QEMU only.
        let chosen =
            qemus.iter().filter(|qemu| !quick || workload.name == IDLE || Some(&qemu.label) == newest.as_ref());
        for qemu in chosen {
            let mut movers = vec![Mover::Sterna(MigrateOptions::default()), Mover::Qemu(Method::Vanilla, Ram::Plain)];
            if !quick {
                movers.push(Mover::Qemu(Method::Vanilla, Ram::SharedFile));
                movers.push(Mover::Qemu(Method::Multifd(2), Ram::Plain));
            }
            cases.extend(movers.into_iter().map(|mover| case(workload, mover, qemu)));
        }
    }
    Ok(cases)
}

fn case(workload: &Workload, mover: Mover, qemu: &Qemu) -> Case {
    Case {
        workload: workload.name.into(),
        memory_bytes: 1 << 30,
        jobs: workload.jobs.into(),
        ready: workload.ready,
        load: workload.memcached.then(|| LoadConfig::set_only(SEED)),
        mover,
        qemu: qemu.clone(),
        settle: Duration::from_secs(5),
        limit: trial::LIMIT,
    }
}

fn targets(runs: &[Run]) -> Vec<Target> {
    let idle = |metric: &str| median(&series(runs, metric, |run| !run.baseline && is(run, &[("workload", IDLE)])));
    let mut targets = vec![
        Target::at_most("idle: bytes on wire ÷ non-zero bytes in use", 1.02, idle(WIRE)),
        Target::at_most("idle: downtime at the meter, ms", 15.0, idle("gap_ms")),
    ];
    let (mut times, mut pure_times, mut throughputs, mut kept) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for workload in WORKLOADS {
        let of = |metric: &str, qemu: &str, baseline: bool| {
            let row = [("workload", workload.name), ("qemu", qemu)];
            series(runs, metric, |run| run.baseline == baseline && plain(run) && is(run, &row))
        };
        let ratio = |metric: &str, qemu: &str| paired_ratio(&of(metric, qemu, false), &of(metric, qemu, true));
        times.extend(ratio("total_ms", "10.0"));
        let theirs = of("total_ms", "10.0", true).into_iter().zip(of("setup_ms", "10.0", true));
        let theirs: Vec<f64> = theirs.map(|(total, setup)| total - setup).collect();
        pure_times.extend(paired_ratio(&of("total_ms", "10.0", false), &theirs));
        throughputs.extend(["10.0", "7.2"].iter().find_map(|qemu| ratio(THROUGHPUT, qemu)));
        kept.extend(["10.0", "7.2"].iter().find_map(|qemu| ratio(KEPT, qemu)));
    }
    let (most, least) = (
        |values: Vec<f64>| values.into_iter().reduce(f64::max),
        |values: Vec<f64>| values.into_iter().reduce(f64::min),
    );
    targets.extend([
        Target::at_most("total time ÷ QEMU 10.0's, both with the destination's start, worst row", 1.0, most(times)),
        Target::at_most(
            "total time ÷ QEMU 10.0's own figure, which leaves its destination's start out, worst row",
            1.0,
            most(pure_times),
        ),
        Target::at_least("guest throughput during migration ÷ under QEMU's own, worst row", 0.97, least(throughputs)),
        Target::at_least(
            "share of its throughput that the guest keeps ÷ under QEMU's own, worst row",
            0.97,
            least(kept),
        ),
    ]);
    targets
}

/// Whether this is Sterna, or QEMU as users run it: these are compared pair by pair.
fn plain(run: &Run) -> bool {
    !run.baseline || is(run, &[("mover", &Mover::Qemu(Method::Vanilla, Ram::Plain).label())])
}

fn plot(runs: &[Run], directory: &Path) -> Result<()> {
    let rows = rows(runs);
    for (metric, label) in [
        ("total_ms", "total time, ms"),
        ("gap_ms", "silence at the meter, ms"),
        (THROUGHPUT, "guest operations per second"),
    ] {
        let bar = |row: &Row| {
            Some((format!("{}: {}", row.word("workload"), row.mover_and_qemu()), row.metrics.get(metric)?.median))
        };
        let bars = rows.iter().filter_map(bar).collect();
        BarPlot { title: "1 GiB guests at 1 Gbit".into(), label: label.into(), bars }.write(directory, metric)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;

    #[test]
    fn the_worst_row_is_the_one_that_is_judged() {
        let (sterna, qemu) = (Mover::Sterna(MigrateOptions::default()), Mover::Qemu(Method::Vanilla, Ram::Plain));
        let busy = WORKLOADS[2].name;
        let runs = [
            sample(IDLE, &sterna, "10.0", &[("total_ms", 900.0), (WIRE, 1.01), ("gap_ms", 12.0)]),
            sample(IDLE, &qemu, "10.0", &[("total_ms", 1000.0), ("setup_ms", 200.0)]),
            sample(IDLE, &sterna, "7.2", &[("total_ms", 5000.0)]),
            sample(IDLE, &qemu, "7.2", &[("total_ms", 1000.0)]),
            sample(busy, &sterna, "10.0", &[("total_ms", 1100.0), (THROUGHPUT, 95.0), (KEPT, 0.8)]),
            sample(busy, &qemu, "10.0", &[("total_ms", 1000.0), ("setup_ms", 0.0), (THROUGHPUT, 100.0), (KEPT, 0.8)]),
        ];
        let targets = targets(&runs);
        let found: Vec<(Option<f64>, bool)> = targets.iter().map(|target| (target.measured, target.met)).collect();
        let expected = [(1.01, true), (12.0, true), (1.1, false), (1.125, false), (0.95, false), (1.0, true)];
        assert_eq!(found, expected.map(|(measured, met)| (Some(measured), met)));
    }

    #[test]
    fn what_was_not_measured_is_a_target_that_is_not_met() {
        let targets = targets(&[]);
        assert_eq!(targets.len(), 6);
        assert!(targets.iter().all(|target| target.measured.is_none() && !target.met));
    }
}
