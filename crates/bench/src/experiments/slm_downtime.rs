//! Section IV.B and IV.D of sharing-aware migration: how long the guests of a gang stand still, at rest and while one
//! of them sends, one after the other and all at the same time. The floor of the last is how long as many QEMUs take
//! that hand their devices over at the same time, to others on the same memory, and do nothing else.

use std::path::Path;

use serde_json::json;

use super::floor::{self, Floor};
use super::judge::worst;
use super::runner::{Attempt, Row, try_all};
use super::together::{self, MODES, Together, Work, is_filled, is_row, middle, sterna};
use super::{Options, Plan, is};
use crate::baseline::Ram;
use crate::error::Result;
use crate::gang::Mover;
use crate::plot::BarPlot;
use crate::result::{Run, Target, rows, series};
use crate::stats::median;
use crate::trial::Qemu;

/// The share of eight guests' pages that merging saves, percent.
const SHARED_PERCENT: u64 = 60;
/// The name of the floor's row.
const FLOOR: &str = "qemu alone, devices of all at once";

pub(super) fn plan(options: &Options) -> Result<Plan> {
    let repeats = options.repeat.unwrap_or(if options.quick { 1 } else { 5 });
    let (guests, memory_mib) = if options.quick { (2, 256) } else { (together::MOST_GUESTS, 1024) };
    let qemu = together::newest()?;
    let movers = together::all_movers(&qemu)?;
    let gang = move |work, mover: &Mover| gang(guests, memory_mib, work, mover, &qemu);
    let mut gangs: Vec<Together> = Vec::new();
    for work in [Work::Rest, Work::Sends] {
        gangs.extend(movers.iter().map(|mover| gang(work, mover)));
    }
    for mode in MODES {
        gangs.push(gang(Work::Rest, &paused_at_once(mode)?));
    }
    let all_at_once = gang(Work::Rest, &together::QEMU_PRECOPY);
    let plan = Plan::new(move |record| {
        let lab = together::lab(guests)?;
        together::try_gangs(&lab, &gangs, repeats, record);
        let floor = Floor {
            row: floor_row(&all_at_once),
            guests: &|lab, name| all_at_once.guests(lab, name),
            qemu: &all_at_once.qemu,
            ready: &is_filled,
        };
        try_all(&lab, &[floor], repeats, record);
        Ok(())
    });
    let name = move |work| gang(work, &together::QEMU_PRECOPY).workload();
    Ok(plan.judged(move |runs| targets(runs, &name)).drawn(plot))
}

fn gang(guests: usize, memory_mib: u64, work: Work, mover: &Mover, qemu: &Qemu) -> Together {
    let (mover, qemu) = (mover.clone(), qemu.clone());
    let shared_percent = SHARED_PERCENT;
    Together { guests, memory_mib, shared_percent, limited: false, work, watched: false, mover, qemu }
}

/// Sterna with shared pages that stay shared, and pauses at the same time.
fn paused_at_once(mode: &str) -> Result<Mover> {
    sterna(&format!("{mode} --gang-pauses together"), true)
}

/// The floor's row, of guests as those of this gang.
fn floor_row(gang: &Together) -> Row {
    let Row { mut config, .. } = gang.rows().remove(0);
    config.insert("mover".into(), json!(FLOOR));
    config.insert("options".into(), json!({ "times": floor::TIMES, "ram": Ram::SharedFile }));
    let words = format!("{FLOOR} on QEMU {}, {}", gang.qemu.label, gang.workload());
    Row { words, config, baseline: true }
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
    let at_once = MODES.iter().map(|mode| paused_at_once(mode)).collect::<Result<Vec<_>>>()?;
    let longest = worst(at_once.iter().map(|mover| middle(runs, &row, mover, "downtime_ms")));
    let floor = median(&series(runs, "downtime_ms", |run| is(run, &[("workload", &row), ("mover", FLOOR)])));
    let ratio = longest.zip(floor).map(|(longest, floor)| longest / floor);
    targets.push(Target::at_most("pauses together: the longest downtime ÷ the floor of the same run", 1.0, ratio));
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
            for (mover, ms) in [(paused_at_once(MODES[0]).unwrap(), 60.0), (paused_at_once(MODES[1]).unwrap(), 90.0)] {
                let gang = gang(2, 256, Work::Rest, &mover, &qemu);
                runs.push(together::sample(&gang, repeat, &[("downtime_ms", ms)]));
            }
            let mut run = floor_row(&gang(2, 256, Work::Rest, &together::QEMU_PRECOPY, &qemu)).run(repeat);
            run.metrics.insert("downtime_ms".into(), 60.0);
            runs.push(run);
        }
        let name = |work| gang(2, 256, work, &together::QEMU_PRECOPY, &qemu).workload();
        let targets = targets(&runs, &name).unwrap();
        let judged: Vec<_> = targets.iter().map(|target| (target.measured, target.met)).collect();
        assert_eq!(judged, [(Some(0.5), true), (None, false), (Some(21.0), false), (Some(1.5), false)]);
    }
}
