//! Gangs that share nothing, little and much: what keeping pages shared costs where there is nothing to gain, and what
//! it gains elsewhere. Real machines share less than 15 % (Barker et al., ATC '12).

use std::path::Path;

use super::curves::Curves;
use super::judge::{ratio, worst};
use super::together::{self, MODES, Together, Work, is_row, sterna};
use super::{Options, Plan};
use crate::error::Result;
use crate::gang::Mover;
use crate::result::{Run, Target, rows};
use crate::trial::Qemu;

/// The shares of the pages that merging saves, percent, and the aim for time and processor time ÷ without sharing.
const LEVELS: [(u64, Option<f64>); 3] = [(0, Some(1.02)), (15, Some(0.90)), (60, None)];

pub(super) fn plan(options: &Options) -> Result<Plan> {
    let repeats = options.repeat.unwrap_or(if options.quick { 1 } else { 5 });
    let (guests, memory_mib) = if options.quick { (2, 256) } else { (together::MOST_GUESTS, 1024) };
    let qemu = together::newest()?;
    let movers = together::all_movers(&qemu)?;
    let gang = move |percent, mover: &Mover| gang(guests, memory_mib, percent, mover, &qemu);
    let mut gangs: Vec<Together> = Vec::new();
    // A guest of 256 MiB is little more than the image, most of which is equal: it cannot share little.
    for (percent, _) in LEVELS.into_iter().filter(|(percent, _)| !options.quick || *percent != 15) {
        gangs.extend(movers.iter().map(|mover| gang(percent, mover)));
    }
    let plan = Plan::new(move |record| {
        let lab = together::lab(guests)?;
        together::try_gangs(&lab, &gangs, repeats, record);
        Ok(())
    });
    let name = move |percent| gang(percent, &together::QEMU_PRECOPY).workload();
    Ok(plan.judged(move |runs| targets(runs, &name)).drawn(plot))
}

fn gang(guests: usize, memory_mib: u64, shared_percent: u64, mover: &Mover, qemu: &Qemu) -> Together {
    let (mover, qemu) = (mover.clone(), qemu.clone());
    Together { guests, memory_mib, shared_percent, limited: false, work: Work::Rest, watched: false, mover, qemu }
}

/// For each level that has an aim: time and processor time with sharing ÷ without, paired run by run, worse mode.
fn targets(runs: &[Run], workload: &dyn Fn(u64) -> String) -> Result<Vec<Target>> {
    let mut targets = Vec::new();
    for (percent, aim) in LEVELS {
        for (words, metric) in [("total time", "total_ms"), ("processor time", "cpu_added_s")] {
            let mut ratios = Vec::new();
            for mode in MODES {
                let (on, off) = (sterna(mode, true)?, sterna(mode, false)?);
                let row = workload(percent);
                let value = |run: &Run| run.metrics.get(metric).copied();
                ratios.push(ratio(runs, value, |run| is_row(run, &row, &on), |run| is_row(run, &row, &off)));
            }
            let name = format!("{percent} % shared: {words} with sharing on ÷ off, worse mode");
            targets.extend(aim.map(|aim| Target::at_most(name, aim, worst(ratios))));
        }
    }
    Ok(targets)
}

fn plot(runs: &[Run], directory: &Path) -> Result<()> {
    let rows = rows(runs);
    let level = |workload: &str| workload.split_once(" % shared")?.0.rsplit(' ').next()?.parse().ok();
    for (metric, y_label) in [("total_ms", "total time of the gang, ms"), ("cpu_added_s", "processor time, s")] {
        let title = "guests that move together, by what they share".to_owned();
        Curves { title, x_label: "pages that merging saves, %", y_label, metric, x: &level }
            .write(&rows, directory, metric)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_level_is_judged_by_time_and_processor_time_against_the_same_without_sharing() {
        let qemu = Qemu { label: "10.0".into(), path: "/nonexistent".into() };
        let mut runs = Vec::new();
        for (sharing, total_ms, cpu_s) in [(false, 100.0, 10.0), (true, 88.0, 10.1)] {
            for mode in MODES {
                let gang = gang(8, 1024, 15, &sterna(mode, sharing).unwrap(), &qemu);
                runs.push(together::sample(&gang, 0, &[("total_ms", total_ms), ("cpu_added_s", cpu_s)]));
            }
        }
        let name = |percent| gang(8, 1024, percent, &together::QEMU_PRECOPY, &qemu).workload();
        let targets = targets(&runs, &name).unwrap();
        let judged: Vec<_> = targets.iter().map(|target| (target.measured, target.met)).collect();
        assert_eq!(judged, [(None, false), (None, false), (Some(0.88), true), (Some(1.01), false)]);
    }
}
