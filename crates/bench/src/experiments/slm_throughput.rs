//! The figures 6 and 7 of sharing-aware migration: the throughput of a guest that sends, and of guests that serve
//! Redis, while their gang moves.

use std::path::Path;

use serde_json::Value;

use super::gang_figures::BELOW;
use super::judge::{ratio, worst};
use super::together::{self, MODES, Together, Work, is_row, sterna};
use super::{Options, Plan};
use crate::error::Result;
use crate::gang::Mover;
use crate::plot::LinePlot;
use crate::result::{Run, Target};
use crate::trial::Qemu;

/// The share of eight guests' pages that merging saves, percent.
const SHARED_PERCENT: u64 = 60;

pub(super) fn iperf(options: &Options) -> Result<Plan> {
    plan(options, Work::Sends, "MB per second")
}

pub(super) fn redis(options: &Options) -> Result<Plan> {
    plan(options, Work::Serves, "million requests per second")
}

fn plan(options: &Options, work: Work, unit: &'static str) -> Result<Plan> {
    let repeats = options.repeat.unwrap_or(if options.quick { 1 } else { 3 });
    let (guests, memory_mib) = if options.quick { (3, 256) } else { (together::MOST_GUESTS, 1024) };
    let qemu = together::newest()?;
    let movers = together::all_movers(&qemu)?;
    let gangs: Vec<Together> = movers.iter().map(|mover| gang(guests, memory_mib, work, mover, &qemu)).collect();
    let judged = gang(guests, memory_mib, work, &together::QEMU_PRECOPY, &qemu).workload();
    let plan = Plan::new(move |record| {
        let lab = together::lab(guests)?;
        together::try_gangs(&lab, &gangs, repeats, record);
        Ok(())
    });
    let plan = plan.judged(move |runs| targets(runs, &judged));
    Ok(plan.drawn(move |runs, directory| plot(runs, &movers, unit, directory)))
}

fn gang(guests: usize, memory_mib: u64, work: Work, mover: &Mover, qemu: &Qemu) -> Together {
    let (mover, qemu) = (mover.clone(), qemu.clone());
    let shared_percent = SHARED_PERCENT;
    Together { guests, memory_mib, shared_percent, limited: false, work, watched: false, mover, qemu }
}

fn targets(runs: &[Run], workload: &str) -> Result<Vec<Target>> {
    let below = |run: &Run| run.metrics.get(BELOW).copied();
    let mut ratios = Vec::new();
    for (mode, qemu) in MODES.iter().zip([together::QEMU_PRECOPY, together::QEMU_POSTCOPY]) {
        let own = sterna(mode, true)?;
        ratios.push(ratio(runs, below, |run| is_row(run, workload, &own), |run| is_row(run, workload, &qemu)));
    }
    let name = "sharing on: time below full throughput ÷ QEMU's in the same mode, worse mode";
    Ok(vec![Target::at_most(name, 0.5, worst(ratios))])
}

/// Plots the first run of each mover, with the time in which it moved the gang.
fn plot(runs: &[Run], movers: &[Mover], unit: &str, directory: &Path) -> Result<()> {
    for (name, word) in [("throughput_precopy", "precopy"), ("throughput_postcopy", "postcopy")] {
        let mut lines = Vec::new();
        for label in movers.iter().map(Mover::label).filter(|label| label.contains(word)) {
            let of = |run: &&Run| run.config.get("mover").and_then(Value::as_str) == Some(label.as_str());
            let points = runs.iter().filter(of).find_map(|run| points(&run.details["throughput"]));
            lines.extend(points.map(|points| (label, points)));
        }
        if !lines.is_empty() {
            let title = "guests at work while their gang moves".to_owned();
            let (x_label, y_label) = ("seconds since the request".to_owned(), unit.to_owned());
            LinePlot { title, x_label, y_label, lines, spans: Vec::new() }.write(directory, name)?;
        }
    }
    Ok(())
}

fn points(value: &Value) -> Option<Vec<(f64, f64)>> {
    value.as_array()?.iter().map(|point| Some((point.get(0)?.as_f64()?, point.get(1)?.as_f64()?))).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_disturbance_is_judged_against_qemus_in_the_same_mode() {
        let qemu = Qemu { label: "10.0".into(), path: "/nonexistent".into() };
        let run = |mover: &Mover, ms| together::sample(&gang(2, 256, Work::Sends, mover, &qemu), 0, &[(BELOW, ms)]);
        let own = |mode: &str| sterna(mode, true).unwrap();
        let runs = [
            run(&together::QEMU_PRECOPY, 4000.0),
            run(&together::QEMU_POSTCOPY, 2000.0),
            run(&own(MODES[0]), 1000.0),
            run(&own(MODES[1]), 1200.0),
        ];
        let workload = gang(2, 256, Work::Sends, &together::QEMU_PRECOPY, &qemu).workload();
        assert_eq!(targets(&runs, &workload).unwrap()[0].measured, Some(0.6));
        assert_eq!(targets(&runs[1..], &workload).unwrap()[0].measured, None);
    }

    #[test]
    fn points_are_read_as_they_were_kept() {
        assert_eq!(points(&json!([[0.5, 10.0], [1.0, 0.0]])), Some(vec![(0.5, 10.0), (1.0, 0.0)]));
        assert_eq!(points(&Value::Null), None);
    }
}
