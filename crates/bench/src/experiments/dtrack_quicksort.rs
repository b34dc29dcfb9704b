//! D-Track's figures 15 and 16, tables 2 and 3: the throughput that a sorting guest loses to its migration, for every
//! way to find pages that are written again.

use std::path::Path;
use std::time::Duration;

use super::judge::{is_row, ratio, worst};
use super::{Case, Options, Plan, Watch, lab_name, qemus, timeline, try_each};
use crate::baseline::{Method, Ram};
use crate::error::{Error, Result};
use crate::lab::{Lab, LabConfig};
use crate::result::{Run, Target};
use crate::sterna;
use crate::trial::{LIMIT, Mover, Qemu};

/// The guest's own figure.
const RATE: &str = "sorts_per_s";
/// Sterna's rows as on its command line, with names for their plots; the first, the default, is judged.
const TRACKING: [(&str, &str); 4] = [
    ("", "exact"),
    ("--fake-dirty dtrack-v1", "dtrack_v1"),
    ("--fake-dirty dtrack-v2", "dtrack_v2"),
    ("--fake-dirty adaptive", "adaptive"),
];
/// How long a guest is watched once it is moved.
const AFTER: Duration = Duration::from_secs(8);

pub(super) fn plan(options: &Options) -> Result<Plan> {
    let sizes: &[u64] = if options.quick { &[1024] } else { &[1024, 2048, 4096] };
    let repeats = options.repeat.unwrap_or(if options.quick { 2 } else { 5 });
    let newest = qemus()?.pop().ok_or_else(|| Error::Usage("no QEMU".into()))?;
    let quick = options.quick;
    let cases = cases(sizes, quick, &newest)?;
    let plan = Plan::new(move |record| {
        let lab = Lab::up(LabConfig::pair(&lab_name()))?;
        try_each(&lab, &cases, repeats, Watch::after(AFTER), record, |_, trial| {
            let bad = trial.lines.iter().filter(|line| line.text.starts_with("QUICKSORT BAD")).count();
            trial.metrics.insert("bad_sorts".into(), bad as f64);
            timeline::note(trial, "QUICKSORT", RATE)
        });
        Ok(())
    });
    let plan = plan.judged(move |runs| targets(runs, sizes, quick, &newest));
    Ok(plan.drawn(move |runs, directory| plot(runs, sizes, quick, directory)))
}

/// What a sort sorts, MiB: as in the paper, or half of it where time is short.
fn sorted_mib(quick: bool) -> u64 {
    if quick { 256 } else { 512 }
}

fn workload(memory_mib: u64, quick: bool) -> String {
    format!("sorts {} MiB in {} GiB", sorted_mib(quick), memory_mib / 1024)
}

fn vanilla() -> Mover {
    Mover::Qemu(Method::Vanilla, Ram::Plain)
}

fn cases(sizes_mib: &[u64], quick: bool, qemu: &Qemu) -> Result<Vec<Case>> {
    let mut cases = Vec::new();
    for mib in sizes_mib {
        let mut movers = vec![vanilla()];
        for (options, _) in TRACKING {
            movers.push(Mover::Sterna(sterna::options(options)?));
        }
        cases.extend(movers.into_iter().map(|mover| Case {
            workload: workload(*mib, quick),
            memory_bytes: mib << 20,
            jobs: format!("quicksort:--mib,{},--interval-ms,500", sorted_mib(quick)),
            ready: Some("QUICKSORT ready"),
            load: None,
            mover,
            qemu: qemu.clone(),
            // The settle time covers the filling and the first partitions: from then on the sort is even.
            settle: Duration::from_secs(if quick { 12 } else { 20 }),
            limit: LIMIT,
        }));
    }
    Ok(cases)
}

fn targets(runs: &[Run], sizes_mib: &[u64], quick: bool, qemu: &Qemu) -> Result<Vec<Target>> {
    let exact = Mover::Sterna(sterna::options(TRACKING[0].0)?);
    let during = |run: &Run| run.metrics.get(&format!("{RATE}_during")).copied();
    // The inverse: the worst is the greatest.
    let slower = worst(sizes_mib.iter().map(|mib| {
        let workload = workload(*mib, quick);
        let of = |mover: Mover| {
            let workload = workload.clone();
            move |run: &Run| is_row(run, &workload, &mover, &qemu.label)
        };
        ratio(runs, during, of(vanilla()), of(exact.clone()))
    }));
    let name = "exact: sorts/s during migration ÷ under QEMU's own, worst RAM size";
    Ok(vec![Target::at_least(name, 0.99, slower.map(|slower| 1.0 / slower))])
}

/// As in the paper: each technique beside QEMU's own migration.
fn plot(runs: &[Run], sizes_mib: &[u64], quick: bool, directory: &Path) -> Result<()> {
    for mib in sizes_mib {
        for (options, name) in TRACKING {
            let own = Mover::Sterna(sterna::options(options)?);
            let (workload, file) = (workload(*mib, quick), format!("sorts_{name}_{}gib", mib / 1024));
            let labels = (workload.as_str(), "sorts per second");
            timeline::plot(runs, &workload, &[&vanilla(), &own], directory, &file, labels)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;

    fn run(mover: &Mover, mib: u64, repeat: usize, rate: f64) -> Run {
        Run { repeat, ..sample(&workload(mib, true), mover, "10.0", &[(&format!("{RATE}_during"), rate)]) }
    }

    #[test]
    fn the_size_at_which_the_default_loses_most_is_judged() {
        let qemu = Qemu { label: "10.0".into(), path: "/nonexistent".into() };
        let exact = Mover::Sterna(sterna::options("").unwrap());
        let other = Mover::Sterna(sterna::options(TRACKING[1].0).unwrap());
        let mut runs = vec![
            run(&vanilla(), 1024, 0, 10.0),
            run(&exact, 1024, 0, 11.0),
            run(&vanilla(), 2048, 0, 10.0),
            run(&exact, 2048, 0, 8.0),
            run(&other, 2048, 0, 1.0),
        ];
        let target = targets(&runs, &[1024, 2048], true, &qemu).unwrap().remove(0);
        assert_eq!((target.measured, target.met), (Some(0.8), false));
        runs.remove(3);
        let target = targets(&runs, &[1024, 2048], true, &qemu).unwrap().remove(0);
        assert_eq!((target.measured, target.met), (None, false), "a size that was not measured is not left out");
    }

    #[test]
    fn every_row_is_a_different_one() {
        let qemu = Qemu { label: "10.0".into(), path: "/nonexistent".into() };
        let labels: Vec<String> = cases(&[1024], true, &qemu).unwrap().iter().map(|case| case.mover.label()).collect();
        assert!(labels.iter().enumerate().all(|(at, label)| !labels[..at].contains(label)), "{labels:?}");
    }
}
