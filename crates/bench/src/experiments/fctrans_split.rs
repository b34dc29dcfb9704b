//! A guest moves to a host that has room for a quarter of it; the rest goes straight to two memory hosts. After
//! FCtrans's figures 10 to 12: right after its boot, by the size of its RAM, and by how much of that is in use; beside
//! it the same where nobody knows what is in use.

use std::path::Path;

use serde_json::{Value, json};
use sterna_api::Unused;

use super::gang_figures::{Measured, measure};
use super::judge::{ratio, worst};
use super::lenders::{self, MIB, PROGRAM};
use super::runner::{Attempt, Row, Site, figure, try_all};
use super::together::{self, REST};
use super::{Options, Plan, is};
use crate::command::PATIENCE;
use crate::error::Result;
use crate::guest::Guest;
use crate::lab::Lab;
use crate::plot::LinePlot;
use crate::result::{Run, Target};
use crate::stats::{line, median};
use crate::sterna::SternaVm;
use crate::trial::Qemu;

/// The part of a guest's RAM that its new host has room for: one divided by this.
const MAIN: u64 = 4;
/// Guests up to this size move also with what they do not use, GiB; and so do those that use these eighths.
const IGNORED_GIB: u64 = 4;
const IGNORED_EIGHTHS: [u64; 3] = [1, 3, 7];
/// The size of guests that use a part of it, MiB.
const USED_OF_MIB: u64 = 2048;

/// From the request until the guest runs there, milliseconds; and of that until what leaves has left.
const TOTAL: &str = "total_ms";
const LEAVING: &str = "leaving_ms";
const DOWNTIME: &str = "downtime_ms";
/// Pages for which its first host had memory, those that went on the wire, and the quotient.
const IN_USE: &str = "pages_in_use";
const WIRE: &str = "pages_on_wire";
const QUOTIENT: &str = "wire_per_use";
/// Pages that its memory hosts have in the end.
const AWAY: &str = "pages_away";

pub(super) fn boot(options: &Options) -> Result<Plan> {
    let sizes: &[u64] = if options.quick { &[1, 2, 4] } else { &[1, 2, 4, 8, 16] };
    let qemu = together::newest()?;
    let with = |unused| {
        let sizes = sizes.iter().filter(move |gib| unused == Unused::Track || **gib <= IGNORED_GIB);
        let qemu = qemu.clone();
        sizes.map(move |gib| Split { memory_mib: gib * 1024, used_mib: None, unused, qemu: qemu.clone() })
    };
    Ok(plan(options, with(Unused::Track).chain(with(Unused::Ignore)).collect(), boot_targets))
}

pub(super) fn used(options: &Options) -> Result<Plan> {
    let eighths: &[u64] = if options.quick { &[1, 3, 5, 7] } else { &[1, 2, 3, 4, 5, 6, 7] };
    let qemu = together::newest()?;
    let with = |unused| {
        let eighths = eighths.iter().filter(move |eighth| unused == Unused::Track || IGNORED_EIGHTHS.contains(eighth));
        let qemu = qemu.clone();
        eighths.map(move |eighth| {
            let used_mib = Some(USED_OF_MIB / 8 * eighth);
            Split { memory_mib: USED_OF_MIB, used_mib, unused, qemu: qemu.clone() }
        })
    };
    Ok(plan(options, with(Unused::Track).chain(with(Unused::Ignore)).collect(), used_targets).drawn(plot))
}

fn plan(options: &Options, splits: Vec<Split>, targets: fn(&[Run]) -> Vec<Target>) -> Plan {
    let repeats = options.repeat.unwrap_or(if options.quick { 1 } else { 5 });
    let largest = splits.iter().map(|split| split.memory_mib).max().unwrap_or(0);
    let plan = Plan::new(move |record| {
        try_all(&lenders::lab_to_move_in(1, Split::lent_mib(largest))?, &splits, repeats, record);
        Ok(())
    });
    plan.judged(move |runs| Ok(targets(runs)))
}

/// A guest that is split over three other hosts.
#[derive(Debug, Clone)]
struct Split {
    memory_mib: u64,
    /// What a program of its has filled; an idle guest has just been booted.
    used_mib: Option<u64>,
    unused: Unused,
    qemu: Qemu,
}

impl Split {
    /// What each of two memory hosts lends to a guest of this size, MiB: what leaves of it until an eighth of the room
    /// for the rest is free, and their notes.
    fn lent_mib(memory_mib: u64) -> u64 {
        (memory_mib - memory_mib / MAIN * 7 / 8).div_ceil(2) * 129 / 128 + 2
    }

    fn mover(&self) -> &'static str {
        mover(self.unused)
    }

    fn workload(&self) -> String {
        match self.used_mib {
            None => format!("idle, {} GiB", self.memory_mib / 1024),
            Some(used) => format!("{used} MiB of {} in use", self.memory_mib),
        }
    }

    fn jobs(&self) -> String {
        match self.used_mib {
            None => "checker:--mib,16,--rate,4".into(),
            Some(used) => format!("checker:--mib,16,--rate,4;toucher:--mib,{used},--access,read,--rate,1"),
        }
    }
}

impl Attempt for Split {
    fn rows(&self) -> Vec<Row> {
        let workload = self.workload();
        let values = [
            ("mover", json!(self.mover())),
            ("qemu", json!(self.qemu.label)),
            ("workload", json!(workload)),
            ("jobs", json!(self.jobs())),
            ("memory_mib", json!(self.memory_mib)),
            ("used_mib", json!(self.used_mib)),
        ];
        let config = values.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        vec![Row {
            words: format!("{} on QEMU {}, {workload}", self.mover(), self.qemu.label),
            config,
            baseline: self.unused == Unused::Ignore,
        }]
    }

    fn guests(&self, lab: &Lab, name: &str) -> Vec<Guest> {
        vec![Guest { memory_bytes: self.memory_mib * MIB, ..Guest::new(lab, name, 10, &self.jobs()) }]
    }

    fn run(&self, site: &Site, runs: &mut [Run]) -> Result<()> {
        let guest = site.guest()?;
        measure(runs, |measured| self.leave(site.lab, guest, measured))
    }

    fn tell(&self, run: &Run) -> String {
        let [total, leaving, downtime, quotient] = [TOTAL, LEAVING, DOWNTIME, QUOTIENT].map(|name| figure(run, name));
        format!("{total} ms, {leaving} of them until the rest had left; paused {downtime} ms; wire ÷ use {quotient}")
    }
}

impl Split {
    fn leave(&self, lab: &Lab, guest: &Guest, measured: &mut Measured) -> Result<()> {
        let mut vm = SternaVm::start(lab, "a", guest, &self.qemu.path)?;
        guest.wait_until_up(PATIENCE)?;
        if self.used_mib.is_some() {
            guest.wait_until_says(&format!("{PROGRAM} ready"), PATIENCE)?;
        }
        std::thread::sleep(REST);
        let memory = lenders::lending(lab, Self::lent_mib(self.memory_mib))?;
        let words = lenders::unused_words(self.unused);
        let report = vm.split_to(lab, "d", self.memory_mib * MIB / MAIN, &memory, words)?;
        guest.wait_until_well(PATIENCE)?;
        measured.details = json!({ "split": report });
        let Some(moved) = &report.migration else { return Ok(()) };
        let in_use = report.allocated_before_bytes as f64 / 4096.0;
        let wire = report.out_pages as f64 + moved.bytes_on_wire as f64 / 4096.0;
        measured.note(TOTAL, report.ms);
        measured.note(LEAVING, report.ms - moved.total_ms);
        measured.note(DOWNTIME, moved.downtime_ms);
        measured.note(IN_USE, in_use);
        measured.note(WIRE, wire);
        measured.note(QUOTIENT, wire / in_use);
        measured.note(AWAY, report.away_pages as f64);
        Ok(())
    }
}

fn mover(unused: Unused) -> &'static str {
    match unused {
        Unused::Track => "sterna split --main",
        Unused::Ignore => "sterna split --main --unused ignore",
    }
}

/// The medians of each workload's two figures, of the runs that know what is in use.
fn medians(runs: &[Run], across: &str, up: &str) -> Vec<Option<(f64, f64)>> {
    medians_of(Unused::Track, runs, across, up)
}

fn medians_of(unused: Unused, runs: &[Run], across: &str, up: &str) -> Vec<Option<(f64, f64)>> {
    let runs: Vec<&Run> = runs.iter().filter(|run| is(run, &[("mover", mover(unused))])).collect();
    let mut workloads: Vec<_> = runs.iter().filter_map(|run| run.config.get("workload")).collect();
    workloads.dedup();
    let of = |workload: &Value, name: &str| {
        let same = runs.iter().filter(|run| run.config.get("workload") == Some(workload));
        median(&same.filter_map(|run| run.metrics.get(name).copied()).collect::<Vec<_>>())
    };
    workloads.iter().map(|workload| Some((of(workload, across)?, of(workload, up)?))).collect()
}

fn each(runs: &[Run], name: &str) -> Option<f64> {
    worst(medians(runs, TOTAL, name).into_iter().map(|pair| Some(pair?.1)).chain(runs.is_empty().then_some(None)))
}

fn boot_targets(runs: &[Run]) -> Vec<Target> {
    let totals: Option<Vec<f64>> = medians(runs, IN_USE, TOTAL).into_iter().map(|pair| Some(pair?.1)).collect();
    let totals = totals.filter(|totals| totals.len() > 1);
    let off = totals.and_then(|totals| {
        let middle = median(&totals).filter(|middle| *middle > 0.0)?;
        totals.iter().map(|total| 100.0 * (total / middle - 1.0).abs()).reduce(f64::max)
    });
    vec![
        Target::at_most("bytes ÷ pages in use, each size", 1.05, each(runs, QUOTIENT)),
        Target::at_most("time of a size, off the median of all, %", 10.0, off),
        Target::at_most("pause, each size, ms", 20.0, each(runs, DOWNTIME)),
        Target::at_most("time ÷ that where unused memory is ignored, worst size", 0.25, to_ignored(runs)),
    ]
}

/// The time of each guest that also moved with what it does not use, divided by the time of that.
fn to_ignored(runs: &[Run]) -> Option<f64> {
    let row = |unused| move |run: &Run| is(run, &[("mover", mover(unused))]);
    let ignored = runs.iter().filter(|run| row(Unused::Ignore)(run));
    let mut workloads: Vec<_> = ignored.filter_map(|run| run.config.get("workload")).collect();
    workloads.dedup();
    let time = |run: &Run| run.metrics.get(TOTAL).copied();
    let own = |workload: &Value| {
        let same = |unused| move |run: &Run| row(unused)(run) && run.config.get("workload") == Some(workload);
        ratio(runs, time, same(Unused::Track), same(Unused::Ignore))
    };
    worst(workloads.into_iter().map(own))
}

fn used_targets(runs: &[Run]) -> Vec<Target> {
    let points: Option<Vec<(f64, f64)>> = medians(runs, IN_USE, TOTAL).into_iter().collect();
    let fit = points.and_then(|points| line(&points).filter(|_| points.len() > 2));
    vec![
        Target::at_least("time against pages in use: R²", 0.98, fit.map(|(_, _, r_squared)| r_squared)),
        Target::at_most("bytes ÷ pages in use, each row", 1.05, each(runs, QUOTIENT)),
        Target::at_most("pause, each row, ms", 20.0, each(runs, DOWNTIME)),
    ]
}

fn plot(runs: &[Run], directory: &Path) -> Result<()> {
    let of = |unused: Unused, name: &str| {
        let points = medians_of(unused, runs, IN_USE, name).into_iter().flatten();
        points.map(|(pages, ms)| (pages * 4096.0 / MIB as f64, ms / 1e3)).collect::<Vec<_>>()
    };
    let lines = [
        ("until it runs there", Unused::Track, TOTAL),
        ("until the rest has left", Unused::Track, LEAVING),
        ("the same, unused memory ignored", Unused::Ignore, TOTAL),
    ];
    let lines = lines.map(|(label, unused, name)| (label.to_owned(), of(unused, name)));
    let lines: Vec<_> = lines.into_iter().filter(|(_, points)| !points.is_empty()).collect();
    if lines.is_empty() {
        return Ok(());
    }
    LinePlot {
        title: "a guest of 2 GiB moves over three hosts".into(),
        x_label: "MiB in use".into(),
        y_label: "seconds".into(),
        lines,
        spans: Vec::new(),
    }
    .write(directory, "split-used")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(workload: &str, figures: &[(&str, f64)]) -> Run {
        Run {
            config: [("workload", workload), ("mover", mover(Unused::Track))]
                .map(|(name, value)| (name.to_owned(), json!(value)))
                .into_iter()
                .collect(),
            baseline: false,
            repeat: 0,
            metrics: figures.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect(),
            details: json!({}),
        }
    }

    #[test]
    fn what_was_not_measured_is_not_met_and_the_worst_row_counts() {
        for targets in [boot_targets(&[]), used_targets(&[])] {
            assert!(targets.iter().all(|target| target.measured.is_none() && !target.met), "{targets:?}");
        }
        let row = |workload: &str, use_: f64, total: f64, wire: f64| {
            run(workload, &[(IN_USE, use_), (TOTAL, total), (QUOTIENT, wire), (DOWNTIME, 10.0)])
        };
        let runs = [row("a", 100.0, 1000.0, 1.0), row("b", 200.0, 2000.0, 1.04), row("c", 300.0, 3000.0, 1.2)];
        let measured = |targets: Vec<Target>| targets.into_iter().map(|target| target.measured).collect::<Vec<_>>();
        assert_eq!(measured(used_targets(&runs)), [Some(1.0), Some(1.2), Some(10.0)]);
        assert_eq!(measured(boot_targets(&runs)), [Some(1.2), Some(50.0), Some(10.0), None]);
        let ignored = |workload: &str, total: f64| {
            let mut run = run(workload, &[(TOTAL, total)]);
            run.config.insert("mover".into(), json!(mover(Unused::Ignore)));
            run
        };
        let beside = [runs.as_slice(), &[ignored("a", 4000.0), ignored("b", 5000.0)]].concat();
        assert_eq!(measured(boot_targets(&beside)), [Some(1.2), Some(50.0), Some(10.0), Some(0.4)]);
        // A row without figures is one that was not measured.
        assert_eq!(measured(boot_targets(&[runs.as_slice(), &[run("d", &[])]].concat())), [None; 4]);
    }

    #[test]
    fn memory_hosts_lend_enough_for_what_has_no_room() {
        for mib in [1024, 2048, 16 * 1024] {
            let chunks = 2 * (Split::lent_mib(mib) * MIB / (MIB + 4096));
            assert!(mib / MAIN * 7 / 8 + chunks >= mib, "{mib}");
        }
    }
}
