//! A gang that comes back, and moves on: three moves in a row. What the second costs, because one host has most of the
//! pages already (VeCycle, Middleware '15); what sharing is left after the third; and how long KSM needs to merge again
//! what was not kept. Beside it one guest in shared memory, which shares with nobody. The hosts keep what the memory of
//! guests was that have left.

use std::path::Path;
use std::time::Instant;

use serde_json::{Value, json};

use super::gang_figures::{Measured, SETTLED, Source, measure};
use super::judge::worst;
use super::runner::{Attempt, Row, Site, figure, try_all};
use super::together::{self, MODES, Together, Work, middle, sterna};
use super::{Options, Plan};
use crate::error::{Error, Result};
use crate::footprint;
use crate::gang::Mover;
use crate::guest::Guest;
use crate::ksm::Ksm;
use crate::lab::Lab;
use crate::plot::BarPlot;
use crate::result::{Run, Target, rows};
use crate::sterna::SternaVm;
use crate::trial::Qemu;

/// The share of eight guests' pages that merging saves, percent.
const SHARED_PERCENT: u64 = 60;
/// The hosts to which the gang moves in turn.
const HOPS: [&str; 3] = ["b", "a", "b"];
/// The bytes of the way back ÷ those of the first.
const RETURN: &str = "return_to_first_bytes";
/// How long it takes after the last move until the guests share as much as they did at first: none where they still do,
/// else the time that KSM needs at its fastest, milliseconds.
const BACK: &str = "sharing_back_ms";
/// Frames ÷ those at first, up to which the guests share as much as they did.
const SAME: f64 = 1.02;

pub(super) fn plan(options: &Options) -> Result<Plan> {
    let repeats = options.repeat.unwrap_or(if options.quick { 1 } else { 3 });
    let (guests, memory_mib) = if options.quick { (2, 256) } else { (4, 1024) };
    let qemu = together::newest()?;
    let movers = together::all_movers(&qemu)?;
    let mut hops: Vec<Hops> = movers.iter().map(|mover| hops(guests, memory_mib, mover, &qemu)).collect();
    for mode in MODES {
        hops.push(alone(memory_mib, &sterna(mode, false)?, &qemu));
    }
    let plan = Plan::new(move |record| {
        let lab = together::lab_that_keeps(guests)?;
        try_all(&lab, &hops, repeats, record);
        Ok(())
    });
    let judge = move |runs: &[Run]| targets(runs, &hops_name(guests, memory_mib, &qemu), &alone_name(memory_mib));
    Ok(plan.judged(judge).drawn(plot))
}

/// A gang that moves three times, or one guest in shared memory.
struct Hops {
    together: Together,
    alone: bool,
}

fn hops(guests: usize, memory_mib: u64, mover: &Mover, qemu: &Qemu) -> Hops {
    let (mover, qemu) = (mover.clone(), qemu.clone());
    let shared_percent = SHARED_PERCENT;
    let (limited, work, watched) = (false, Work::Rest, false);
    let together = Together { guests, memory_mib, shared_percent, limited, work, watched, mover, qemu };
    Hops { together, alone: false }
}

fn alone(memory_mib: u64, mover: &Mover, qemu: &Qemu) -> Hops {
    Hops { alone: true, ..hops(1, memory_mib, mover, qemu) }
}

fn alone_name(memory_mib: u64) -> String {
    format!("1 guest of {memory_mib} MiB in shared memory")
}

fn hops_name(guests: usize, memory_mib: u64, qemu: &Qemu) -> String {
    hops(guests, memory_mib, &together::QEMU_PRECOPY, qemu).together.workload()
}

impl Attempt for Hops {
    fn rows(&self) -> Vec<Row> {
        let mut rows = self.together.rows();
        if self.alone {
            let (name, mode) = (alone_name(self.together.memory_mib), self.together.mover.label());
            for row in &mut rows {
                row.config.insert("workload".into(), json!(name));
                row.words = format!("{mode} on QEMU {}, {name}", self.together.qemu.label);
            }
        }
        rows
    }

    fn guests(&self, lab: &Lab, name: &str) -> Vec<Guest> {
        self.together.guests(lab, name)
    }

    fn run(&self, site: &Site, runs: &mut [Run]) -> Result<()> {
        measure(runs, |measured| match self.alone {
            true => self.move_alone(site.lab, site.guest()?, measured),
            false => self.move_on(site.lab, site.guests, measured),
        })
    }

    fn tell(&self, run: &Run) -> String {
        let [bytes, settled, back] = [RETURN, SETTLED, BACK].map(|name| figure(run, name));
        format!("bytes of the way back {bytes}, frames after three moves {settled}, shared again after {back} ms")
    }
}

impl Hops {
    /// Moves the gang three times. Figures that were measured until an error are kept.
    fn move_on(&self, lab: &Lab, guests: &[Guest], measured: &mut Measured) -> Result<()> {
        let Self { together, .. } = self;
        let ksm = Ksm::take()?;
        let (mut gang, source, _warm) = together.start(lab, guests, &ksm, measured)?;
        let memory_bytes = together.memory_mib << 20;
        let (mut bytes, mut reports) = (Vec::new(), Vec::new());
        for (number, to) in (1..).zip(HOPS) {
            let (there, moved) = gang.migrate(lab, to, &together.mover, together::LIMIT)?;
            gang = there;
            std::thread::sleep(together::REST);
            let frames = footprint::of(&gang.rams(memory_bytes)?)?;
            measured.note(&format!("frames_after_{number}"), frames.frames as f64);
            measured.note_settled(frames, &source);
            bytes.push(moved.iter().map(|one| one.bytes_on_wire).sum::<u64>() as f64);
            measured.note(&format!("bytes_on_wire_{number}"), bytes[number - 1]);
            measured.note(&format!("total_ms_{number}"), moved.iter().map(|one| one.total_ms).fold(0.0, f64::max));
            reports.push(moved.into_iter().map(|one| one.report).collect::<Vec<Value>>());
            measured.details = json!({ "moves": reports });
        }
        measured.note(RETURN, bytes[1] / bytes[0].max(1.0));
        let rams = gang.rams(memory_bytes)?;
        self.share_again(&ksm, &source, &rams, measured)
    }

    /// Moves one guest in shared memory three times.
    fn move_alone(&self, lab: &Lab, guest: &Guest, measured: &mut Measured) -> Result<()> {
        let Together { mover: Mover::Sterna { options, .. }, qemu, .. } = &self.together else {
            return Err(Error::Usage("only Sterna moves a guest of hosts that keep something".into()));
        };
        let mut vm = SternaVm::start(lab, "a", guest, &qemu.path)?;
        together::is_filled(guest)?;
        std::thread::sleep(together::REST);
        let (mut bytes, mut reports) = (Vec::new(), Vec::new());
        for (number, to) in (1..).zip(HOPS) {
            let report = vm.migrate(lab, to, options)?;
            std::thread::sleep(together::REST);
            bytes.push(report.bytes_on_wire as f64);
            measured.note(&format!("bytes_on_wire_{number}"), report.bytes_on_wire as f64);
            measured.note(&format!("total_ms_{number}"), report.total_ms);
            measured.note(&format!("setup_ms_{number}"), report.setup_ms);
            reports.push(json!(report));
            measured.details = json!({ "moves": reports });
        }
        measured.note(RETURN, bytes[1] / bytes[0].max(1.0));
        Ok(())
    }

    /// Notes how long it takes until the guests share as they did at first.
    fn share_again(&self, ksm: &Ksm, source: &Source, rams: &[footprint::Ram], measured: &mut Measured) -> Result<()> {
        if footprint::of(rams)?.frames as f64 <= source.footprint.frames as f64 * SAME {
            measured.note(BACK, 0.0);
            return Ok(());
        }
        let begin = Instant::now();
        ksm.settle(together::MERGING, || Ok(footprint::of(rams)?.frames))?;
        measured.note(BACK, begin.elapsed().as_secs_f64() * 1e3);
        Ok(())
    }
}

fn targets(runs: &[Run], workload: &str, alone: &str) -> Result<Vec<Target>> {
    let of_all = |sharing| MODES.iter().map(|mode| sterna(mode, sharing)).collect::<Result<Vec<Mover>>>();
    let (shared, single) = (of_all(true)?, of_all(false)?);
    let most = |metric: &str| worst(shared.iter().map(|mover| middle(runs, workload, mover, metric)));
    let of_one = worst(single.iter().map(|mover| middle(runs, alone, mover, RETURN)));
    Ok(vec![
        Target::at_most("sharing on: bytes of the way back ÷ those of the first, worse mode", 0.5, most(RETURN)),
        Target::at_most("sharing on: frames after three moves ÷ those at first, worse mode", SAME, most(SETTLED)),
        Target::at_most("sharing on: time until sharing is back after three moves, ms, worse mode", 0.0, most(BACK)),
        Target::at_most(
            "one guest, shared memory: bytes of the way back ÷ those of the first, worse mode",
            0.5,
            of_one,
        ),
    ])
}

fn plot(runs: &[Run], directory: &Path) -> Result<()> {
    let rows = rows(runs);
    for (metric, label) in [(RETURN, "bytes of the way back ÷ those of the first"), (BACK, "ms until sharing is back")]
    {
        let bars = rows.iter().filter_map(|row| Some((row.mover_and_qemu(), row.metrics.get(metric)?.median)));
        let title = "a gang that comes back and moves on".to_owned();
        BarPlot { title, label: label.into(), bars: bars.collect() }.write(directory, metric)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worse_mode_is_judged_and_qemus_rows_are_not() {
        let qemu = Qemu { label: "10.0".into(), path: "/nonexistent".into() };
        let run = |mover: &Mover, back: f64| {
            let metrics = [(RETURN, back), (SETTLED, 1.0 + back), (BACK, back * 1e4)];
            together::sample(&hops(2, 256, mover, &qemu).together, 0, &metrics)
        };
        let own = |mode: usize, back| run(&sterna(MODES[mode], true).unwrap(), back);
        let single = |mode: usize, back| {
            let mut run = alone(256, &sterna(MODES[mode], false).unwrap(), &qemu).rows().remove(0).run(0);
            run.metrics.insert(RETURN.into(), back);
            run
        };
        let runs = [run(&together::QEMU_PRECOPY, 1.0), own(0, 0.0), own(1, 0.25), single(0, 0.125), single(1, 0.625)];
        let judged = targets(&runs, &hops_name(2, 256, &qemu), &alone_name(256)).unwrap();
        let measured: Vec<_> = judged.iter().map(|target| target.measured).collect();
        assert_eq!(measured, [0.25, 1.25, 2500.0, 0.625].map(Some));
        assert_eq!(judged.iter().map(|target| target.met).collect::<Vec<_>>(), [true, false, false, false]);
    }
}
