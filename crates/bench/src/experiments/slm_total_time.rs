//! The figure 5 of sharing-aware migration: the time and the pages that gangs take.

use std::path::Path;

use super::curves::Curves;
use super::gang_figures::{TO_FRAMES, TO_LINK};
use super::judge::{ratio, worst};
use super::together::{self, MODES, Together, Work, is_row, middle, sterna};
use super::{Options, Plan};
use crate::error::Result;
use crate::gang::Mover;
use crate::result::{Run, Target, rows};
use crate::trial::Qemu;

/// The share of eight guests' pages that merging saves, percent.
const SHARED_PERCENT: u64 = 60;

pub(super) fn plan(options: &Options) -> Result<Plan> {
    let repeats = options.repeat.unwrap_or(if options.quick { 1 } else { 3 });
    let (guests, memory_mib): (&[usize], u64) = if options.quick { (&[2], 256) } else { (&[1, 2, 4, 6, 8], 1024) };
    let most = guests.iter().copied().max().unwrap_or(1);
    let qemu = together::newest()?;
    let movers = together::all_movers(&qemu)?;
    let sizes = guests.iter().flat_map(|guests| movers.iter().map(move |mover| (*guests, mover)));
    let gangs: Vec<Together> = sizes.map(|(guests, mover)| gang(guests, memory_mib, mover, &qemu)).collect();
    let judged = gang(most, memory_mib, &together::QEMU_PRECOPY, &qemu).workload();
    let plan = Plan::new(move |record| {
        let lab = together::lab(most)?;
        together::try_gangs(&lab, &gangs, repeats, record);
        Ok(())
    });
    Ok(plan.judged(move |runs| targets(runs, &judged)).drawn(plot))
}

fn gang(guests: usize, memory_mib: u64, mover: &Mover, qemu: &Qemu) -> Together {
    Together {
        guests,
        memory_mib,
        shared_percent: SHARED_PERCENT,
        limited: false,
        work: Work::Rest,
        // The rows are also those of other experiments, and tried once in a round of a campaign: the largest gang's of
        // `slm-downtime`, in which nobody counts frames meanwhile, and the others' of `slm-footprint`.
        watched: guests < together::MOST_GUESTS,
        mover: mover.clone(),
        qemu: qemu.clone(),
    }
}

/// The largest gang is judged, by the worse of both modes; a ratio is to QEMU's own migration in the same mode.
fn targets(runs: &[Run], judged: &str) -> Result<Vec<Target>> {
    let shared: Vec<Mover> = MODES.iter().map(|mode| sterna(mode, true)).collect::<Result<_>>()?;
    let most = |metric: &str| worst(shared.iter().map(|mover| middle(runs, judged, mover, metric)));
    let total_ms = |run: &Run| run.metrics.get("total_ms").copied();
    let pairs = shared.iter().zip([together::QEMU_PRECOPY, together::QEMU_POSTCOPY]);
    let ratios = pairs
        .map(|(own, other)| ratio(runs, total_ms, |run| is_row(run, judged, own), |run| is_row(run, judged, &other)));
    Ok(vec![
        Target::at_most("sharing on: bytes on the wire ÷ distinct non-zero frames, worse mode", 1.02, most(TO_FRAMES)),
        Target::at_most("sharing on: total time ÷ (those frames ÷ link), worse mode", 1.10, most(TO_LINK)),
        Target::at_most("sharing on: total time ÷ QEMU's in the same mode, worse mode", 0.35, worst(ratios)),
    ])
}

fn plot(runs: &[Run], directory: &Path) -> Result<()> {
    let rows = rows(runs);
    for (metric, y_label) in [("total_ms", "total time of the gang, ms"), ("pages_sent", "page bodies sent")] {
        let title = "guests that share and move together".to_owned();
        Curves { title, x_label: "guests", y_label, metric, x: &together::guests_of }
            .write(&rows, directory, metric)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worse_mode_is_judged_against_qemus_in_the_same_mode() {
        let qemu = Qemu { label: "10.0".into(), path: "/nonexistent".into() };
        let run = |mover: &Mover, total_ms| {
            let metrics = [("total_ms", total_ms), (TO_FRAMES, 1.01), (TO_LINK, total_ms / 10.0)];
            together::sample(&gang(2, 256, mover, &qemu), 0, &metrics)
        };
        let own = |mode: usize, total_ms| run(&sterna(MODES[mode], true).unwrap(), total_ms);
        let judged = gang(2, 256, &together::QEMU_PRECOPY, &qemu).workload();
        let mut runs = vec![run(&together::QEMU_PRECOPY, 40.0), own(0, 10.0), own(1, 11.0)];
        let measured =
            |runs: &[Run]| -> Vec<_> { targets(runs, &judged).unwrap().iter().map(|target| target.measured).collect() };
        assert_eq!(measured(&runs), [Some(1.01), Some(1.1), None], "QEMU's post-copy is missing");
        runs.push(run(&together::QEMU_POSTCOPY, 22.0));
        assert_eq!(measured(&runs)[2], Some(0.5));
    }
}
