//! Section IV.B and IV.D of sharing-aware migration: how long the guests of a gang stand still, at rest and while one
//! of them sends.

use std::path::Path;

use super::judge::worst;
use super::together::{self, MODES, Together, Work, is_row, middle, sterna};
use super::{Options, Record};
use crate::error::Result;
use crate::gang::Mover;
use crate::plot::BarPlot;
use crate::result::{Run, Target, rows};
use crate::stats::median;
use crate::trial::Qemu;

/// The share of eight guests' pages that merging saves, percent.
const SHARED_PERCENT: u64 = 60;

pub(super) fn run(options: &Options, record: &mut Record) -> Result<()> {
    let repeats = options.repeat.unwrap_or(if options.quick { 1 } else { 5 });
    let (guests, memory_mib) = if options.quick { (2, 256) } else { (together::MOST_GUESTS, 1024) };
    let qemu = together::newest()?;
    let movers = together::all_movers(&qemu)?;
    let gang = move |work, mover: &Mover| gang(guests, memory_mib, work, mover, &qemu);
    let each = [Work::Rest, Work::Sends].into_iter().flat_map(|work| movers.iter().map(move |mover| (work, mover)));
    let gangs: Vec<Together> = each.map(|(work, mover)| gang(work, mover)).collect();
    let lab = together::lab(guests)?;
    let name = move |work| gang(work, &together::QEMU_PRECOPY).workload();
    record.judge(move |runs| targets(runs, &name));
    together::try_gangs(&lab, &gangs, repeats, record);
    plot(record.runs(), record.directory())
}

fn gang(guests: usize, memory_mib: u64, work: Work, mover: &Mover, qemu: &Qemu) -> Together {
    let (mover, qemu) = (mover.clone(), qemu.clone());
    let shared_percent = SHARED_PERCENT;
    Together { guests, memory_mib, shared_percent, limited: false, work, watched: false, mover, qemu }
}

fn targets(runs: &[Run], workload: &dyn Fn(Work) -> String) -> Result<Vec<Target>> {
    let mut targets = Vec::new();
    for (words, work) in [("at rest", Work::Rest), ("one sends", Work::Sends)] {
        let row = workload(work);
        let added = MODES.iter().map(|mode| added_ms(runs, &row, mode)).collect::<Result<Vec<_>>>()?;
        let name = format!("{words}: what sharing adds to the median downtime, ms, worse mode");
        targets.push(Target::at_most(name, 1.0, worst(added)));
    }
    let row = workload(Work::Rest);
    let shared = MODES.iter().map(|mode| sterna(mode, true)).collect::<Result<Vec<_>>>()?;
    let longest = worst(shared.iter().map(|mover| middle(runs, &row, mover, "downtime_ms")));
    targets.push(Target::at_most("at rest: the longest downtime of a gang, one by one, ms, worse mode", 20.0, longest));
    // Nothing can be asked to pause all guests at the same time yet.
    targets.push(Target::at_most("pauses together: the longest downtime ÷ the floor of the same run", 1.0, None));
    Ok(targets)
}

/// What sharing adds to the guests' median downtime, milliseconds: the median of the pairs' differences.
fn added_ms(runs: &[Run], workload: &str, mode: &str) -> Result<Option<f64>> {
    let (on, off) = (sterna(mode, true)?, sterna(mode, false)?);
    let of = |repeat, mover: &Mover| {
        let run = runs.iter().find(|run| run.repeat == repeat && is_row(run, workload, mover))?;
        run.metrics.get("downtime_median_ms").copied()
    };
    let Some(last) = runs.iter().map(|run| run.repeat).max() else { return Ok(None) };
    let added: Vec<f64> = (0..=last).filter_map(|repeat| Some(of(repeat, &on)? - of(repeat, &off)?)).collect();
    Ok(median(&added))
}

fn plot(runs: &[Run], directory: &Path) -> Result<()> {
    let rows = rows(runs);
    for (name, sends, words) in [("downtime_at_rest", false, "at rest"), ("downtime_sending", true, "one sends")] {
        let chosen = rows.iter().filter(|row| row.word("workload").ends_with("one sends") == sends);
        let bars = chosen.flat_map(|row| {
            [("by events", "downtime_median_ms"), ("at the meter", "gap_median_ms")].into_iter().filter_map(
                |(by, metric)| Some((format!("{}, {by}", row.mover_and_qemu()), row.metrics.get(metric)?.median)),
            )
        });
        let bars = bars.collect();
        let title = format!("how long guests of a gang stand still, {words}");
        BarPlot { title, label: "median of the guests, ms".into(), bars }.write(directory, name)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_sharing_adds_is_a_difference_of_pairs_and_the_longest_pause_is_judged() {
        let qemu = Qemu { label: "10.0".into(), path: "/nonexistent".into() };
        let mut runs = Vec::new();
        for (repeat, off_ms, on_ms) in [(0, 9.0, 9.5), (1, 30.0, 30.5), (2, 9.0, 20.0)] {
            for (sharing, ms) in [(false, off_ms), (true, on_ms)] {
                for mode in MODES {
                    let gang = gang(2, 256, Work::Rest, &sterna(mode, sharing).unwrap(), &qemu);
                    let metrics = [("downtime_median_ms", ms), ("downtime_ms", ms + 1.0)];
                    runs.push(together::sample(&gang, repeat, &metrics));
                }
            }
        }
        let name = |work| gang(2, 256, work, &together::QEMU_PRECOPY, &qemu).workload();
        let targets = targets(&runs, &name).unwrap();
        let judged: Vec<_> = targets.iter().map(|target| (target.measured, target.met)).collect();
        assert_eq!(judged, [(Some(0.5), true), (None, false), (Some(21.0), false), (None, false)]);
    }
}
