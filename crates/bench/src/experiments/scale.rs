//! How time grows with memory: idle guests of one to sixteen GiB, and guests that have used three quarters of their RAM
//! and given it back to their own kernel, with and without skipping of free pages.

use std::path::Path;
use std::time::Duration;

use super::judge::{is_row, metric, ratio, time_ms, worst};
use super::{Case, Options, Plan, lab_name, movers, qemus, try_all};
use crate::baseline::{Method, Ram};
use crate::error::{Error, Result};
use crate::lab::{Lab, LabConfig};
use crate::plot::LinePlot;
use crate::result::{Row, Run, Target, rows};
use crate::stats::line;
use crate::trial::{self, Mover, Qemu};

/// Time of one scan over one GiB of RAM.
const SCAN: &str = "scan_ms_per_gib";
/// Bodies sent and what travels with them, in pages.
const WIRE: &str = "pages_on_wire";
/// Sterna with its defaults, and without skipping of free pages.
const STERNA: [&str; 2] = ["", "--skip-free off"];

/// The past of a guest of a given size in GiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Past {
    Idle,
    /// It has filled three quarters of its RAM and given them back.
    Used,
}

impl Past {
    fn workload(self, gib: u64) -> String {
        match self {
            Self::Idle => format!("idle, {gib} GiB"),
            Self::Used => format!("{} MiB of {gib} GiB used before and free", Self::freed_mib(gib)),
        }
    }

    fn freed_mib(gib: u64) -> u64 {
        gib * 768
    }

    /// Its jobs, and the line that it prints when they are done.
    fn jobs(self, gib: u64) -> (String, Option<&'static str>) {
        match self {
            Self::Idle => ("idle".into(), None),
            Self::Used => {
                let jobs = format!("toucher:--mib,1,--access,read,--rate,1,--freed-mib,{}", Self::freed_mib(gib));
                (jobs, Some("TOUCHER ready"))
            }
        }
    }
}

/// Sizes in GiB.
struct Sizes {
    idle: &'static [u64],
    /// Sizes of guests whose RAM is full: two of them have to fit here at once, and QEMU has to move one within the
    /// limit.
    used: &'static [u64],
}

impl Sizes {
    fn of(quick: bool) -> Self {
        if quick {
            Self { idle: &[1, 2, 4], used: &[4] }
        } else {
            Self { idle: &[1, 2, 4, 8, 16], used: &[1, 2, 4, 8] }
        }
    }
}

pub(super) fn plan(options: &Options) -> Result<Plan> {
    let sizes = Sizes::of(options.quick);
    let repeats = options.repeat.unwrap_or(if options.quick { 2 } else { 5 });
    let qemu = qemus()?.pop().ok_or_else(|| Error::Usage("no QEMU".into()))?;
    let cases = cases(&sizes, &qemu)?;
    let plan = Plan::new(move |record| {
        let lab = Lab::up(LabConfig::pair(&lab_name()))?;
        try_all(&lab, &cases, repeats, record, |case, metrics| {
            let gib = case.memory_bytes as f64 / f64::from(1 << 30);
            let scans = metrics.get("scans").copied().filter(|scans| *scans > 0.0);
            if let (Some(ms), Some(scans)) = (metrics.get("scan_ms"), scans) {
                metrics.insert(SCAN.into(), ms / scans / gib);
            }
            let wire = metrics.get("bytes_on_wire").map(|bytes| bytes / 4096.0);
            metrics.extend(wire.map(|pages| (WIRE.into(), pages)));
        });
        Ok(())
    });
    Ok(plan.judged(move |runs| targets(runs, &sizes, &qemu.label)).drawn(plot))
}

fn vanilla() -> Mover {
    Mover::Qemu(Method::Vanilla, Ram::SharedFile)
}

fn cases(sizes: &Sizes, qemu: &Qemu) -> Result<Vec<Case>> {
    let case = |past: Past, gib: u64, mover: Mover| {
        let (jobs, ready) = past.jobs(gib);
        Case {
            workload: past.workload(gib),
            memory_bytes: gib << 30,
            jobs,
            ready,
            load: None,
            mover,
            qemu: qemu.clone(),
            settle: Duration::from_secs(4),
            limit: trial::LIMIT,
        }
    };
    let mut cases = Vec::new();
    for (past, sizes) in [(Past::Idle, sizes.idle), (Past::Used, sizes.used)] {
        for gib in sizes {
            for options in STERNA {
                cases.push(case(past, *gib, movers::sterna(options)?));
            }
            cases.push(case(past, *gib, vanilla()));
        }
    }
    Ok(cases)
}

/// (GiB of RAM, MiB in use, total time in ms) of each idle guest that this one moved, the smallest first.
fn points(rows: &[Row], mover: &Mover) -> Vec<(f64, f64, f64)> {
    let label = mover.label();
    let point = |row: &Row| {
        let gib = row.config.get("memory_mib")?.as_f64()? / 1024.0;
        Some((gib, row.metrics.get("nonzero_pages")?.median / 256.0, row.metrics.get("total_ms")?.median))
    };
    let idle = rows.iter().filter(|row| row.word("mover") == label && row.word("workload").starts_with("idle"));
    idle.filter_map(point).collect()
}

fn targets(runs: &[Run], sizes: &Sizes, qemu: &str) -> Result<Vec<Target>> {
    let rows = rows(runs);
    let (default, without) = (movers::sterna(STERNA[0])?, movers::sterna(STERNA[1])?);
    let points = points(&rows, &default);
    let fit = line(&points.iter().map(|(_, used, ms)| (*used, *ms)).collect::<Vec<_>>());
    // The cost of a MiB in use must not depend on the size of the RAM around it.
    let per_mib = |(_, used, ms): &(f64, f64, f64)| ms / used;
    let growth = points
        .first()
        .zip(points.last())
        .filter(|_| points.len() > 1)
        .map(|(first, last)| per_mib(last) / per_mib(first));
    let scan = rows.iter().filter_map(|row| Some(row.metrics.get(SCAN)?.median)).reduce(f64::max);
    let of = |past: Past, gib: u64, mover: &Mover| {
        let (name, mover, qemu) = (past.workload(gib), mover.clone(), qemu.to_owned());
        move |run: &Run| is_row(run, &name, &mover, &qemu)
    };
    // A guest that never used the rest of its RAM has the same memory in use as this one.
    let wire_or_need = |run: &Run| metric(if is_used(run) { WIRE } else { "nonzero_pages" })(run);
    let to_need = worst(
        sizes
            .used
            .iter()
            .map(|gib| ratio(runs, wire_or_need, of(Past::Used, *gib, &default), of(Past::Idle, *gib, &default))),
    );
    let to_qemu = worst(
        sizes
            .used
            .iter()
            .map(|gib| ratio(runs, time_ms, of(Past::Used, *gib, &default), of(Past::Used, *gib, &vanilla()))),
    );
    let to_without = worst(
        sizes
            .idle
            .iter()
            .map(|gib| ratio(runs, time_ms, of(Past::Idle, *gib, &default), of(Past::Idle, *gib, &without))),
    );
    Ok(vec![
        Target::at_least("time over memory in use: R²", 0.95, fit.map(|(_, _, r_squared)| r_squared)),
        Target::at_most("time per MiB in use, largest RAM ÷ smallest", 1.1, growth),
        Target::at_most("scan, ms per GiB", 2.0, scan),
        Target::at_most(
            "three quarters used before and free: bytes on the wire ÷ pages in use, worst size",
            1.05,
            to_need,
        ),
        Target::at_most("three quarters used before and free: total time ÷ QEMU's, worst size", 1.0, to_qemu),
        Target::at_most("idle: total time ÷ without skipping free pages, worst size", 1.01, to_without),
    ])
}

fn is_used(run: &Run) -> bool {
    run.config.get("workload").and_then(|name| name.as_str()).is_some_and(|name| name.ends_with("free"))
}

fn plot(runs: &[Run], directory: &Path) -> Result<()> {
    let rows = rows(runs);
    let lines = [("sterna", movers::sterna(STERNA[0])?), ("qemu", vanilla())].map(|(name, mover)| {
        let seconds = points(&rows, &mover).iter().map(|(gib, _, ms)| (*gib, ms / 1e3)).collect();
        (name.to_owned(), seconds)
    });
    LinePlot {
        title: "Idle guests at 1 Gbit".into(),
        x_label: "RAM, GiB".into(),
        y_label: "total time, seconds".into(),
        lines: lines.to_vec(),
        spans: Vec::new(),
    }
    .write(directory, "total_time")
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;

    #[test]
    fn what_travels_of_a_guest_that_freed_most_of_its_ram_is_judged_by_one_that_never_used_it() {
        let sizes = Sizes { idle: &[4], used: &[4] };
        let [default, without] = STERNA.map(|options| movers::sterna(options).unwrap());
        let run = |past: Past, mover: &Mover, ms: f64, pages: f64| {
            let metrics = [("total_ms", ms), (WIRE, pages), ("nonzero_pages", 40_000.0)];
            sample(&past.workload(4), mover, "10.0", &metrics)
        };
        let mut runs = vec![
            run(Past::Idle, &default, 990.0, 1.0),
            run(Past::Idle, &without, 1000.0, 1.0),
            run(Past::Used, &default, 1000.0, 41_000.0),
            run(Past::Used, &without, 9000.0, 800_000.0),
            run(Past::Used, &vanilla(), 10_000.0, 800_000.0),
        ];
        let measured =
            |runs: &[Run]| targets(runs, &sizes, "10.0").unwrap()[3..].iter().map(|t| t.measured).collect::<Vec<_>>();
        assert_eq!(measured(&runs), [Some(1.025), Some(0.1), Some(0.99)]);
        runs.remove(0);
        assert_eq!(measured(&runs), [None, Some(0.1), None], "what was not measured is not met");
    }
}
