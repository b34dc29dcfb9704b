//! Another QEMU under a running guest: the pause and the whole, for a small and a large guest, beside QEMU alone, which
//! hands its devices to another QEMU on the same memory and does nothing else. That is the floor of every switchover.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::json;

use super::runner::{Attempt, Row, Site, done, fail, figure, try_all};
use super::{Options, Plan, is, lab_name, qemus};
use crate::baseline::{BaselineVm, Ram};
use crate::error::Result;
use crate::guest::Guest;
use crate::lab::{Lab, LabConfig, METER};
use crate::meter::Meter;
use crate::plot::BarPlot;
use crate::result::{Run, Target, rows, series};
use crate::stats::median;
use crate::sterna::SternaVm;
use crate::trial::Qemu;

/// How long anything may take, on a machine that has other work too.
const PATIENCE: Duration = Duration::from_secs(180);
/// How long a guest is left alone between two replacements.
const REST: Duration = Duration::from_millis(500);
/// The guests' memory, and what of it they fill, MiB.
const SIZES: [(u64, u64); 2] = [(1024, 512), (8192, 6144)];

const STERNA: &str = "sterna replace";
const ALONE: &str = "QEMU alone";

pub(super) fn plan(options: &Options) -> Result<Plan> {
    let times = if options.quick { 6 } else { 20 };
    let repeats = options.repeat.unwrap_or(if options.quick { 1 } else { 3 });
    let qemus = qemus()?;
    let sizes = |&(memory_mib, filled_mib): &(u64, u64)| Sizes { memory_mib, filled_mib, times, qemus: qemus.clone() };
    let attempts: Vec<Sizes> = SIZES.iter().map(sizes).collect();
    let plan = Plan::new(move |record| {
        let lab = Lab::up(LabConfig::pair(&lab_name()))?;
        try_all(&lab, &attempts, repeats, record);
        Ok(())
    });
    Ok(plan.judged(|runs| Ok(targets(runs))).drawn(plot))
}

/// A guest of one size, in both ways, to and fro between the QEMUs that there are.
struct Sizes {
    memory_mib: u64,
    filled_mib: u64,
    times: usize,
    qemus: Vec<Qemu>,
}

impl Attempt for Sizes {
    fn rows(&self) -> Vec<Row> {
        [STERNA, ALONE].map(|way| self.row(way)).into()
    }

    fn guests(&self, lab: &Lab, name: &str) -> Vec<Guest> {
        let mut guest = Guest::new(lab, name, 10, &format!("idle:--mib,{}", self.filled_mib));
        guest.memory_bytes = self.memory_mib << 20;
        // The same in every version; the richest is not.
        guest.cpu = "qemu64".into();
        vec![guest]
    }

    fn run(&self, site: &Site, runs: &mut [Run]) -> Result<()> {
        for at in site.order() {
            if !site.is_due(at, &mut runs[at]) {
                continue;
            }
            let guest = site.guest()?.clone();
            let measured = if at == 0 { self.by_sterna(site.lab, &guest) } else { self.alone(site.lab, &guest) };
            match measured {
                Ok(figures) => {
                    for (name, values) in figures {
                        if let Some(value) = median(&values) {
                            runs[at].metrics.insert(name.into(), value);
                        }
                    }
                    done(&mut runs[at]);
                }
                Err(error) => fail(&mut runs[at], &error.to_string()),
            }
            let _ = std::fs::remove_file(&guest.console);
            site.show(runs);
        }
        Ok(())
    }

    fn tell(&self, run: &Run) -> String {
        let [pause, whole, prepare] = ["pause_ms", "total_ms", "prepare_ms"].map(|name| figure(run, name));
        format!("paused {pause} ms, {whole} ms in all, {prepare} ms of them before the pause")
    }
}

type Figures = Vec<(&'static str, Vec<f64>)>;

impl Sizes {
    fn row(&self, way: &str) -> Row {
        let versions: Vec<&str> = self.qemus.iter().map(|qemu| qemu.label.as_str()).collect();
        let values = [
            ("mover", json!(way)),
            ("qemu", json!(versions.join(" and "))),
            ("workload", json!(format!("{} MiB, {} filled", self.memory_mib, self.filled_mib))),
            ("memory_mib", json!(self.memory_mib)),
            ("times", json!(self.times)),
        ];
        Row {
            words: format!("{way}, {} MiB", self.memory_mib),
            config: values.into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
            baseline: way == ALONE,
        }
    }

    /// The QEMU of each replacement, after that which the guest begins with.
    fn binaries(&self) -> impl Iterator<Item = &Path> {
        (1..=self.times).map(|number| self.qemus[number % self.qemus.len()].path.as_path())
    }

    fn by_sterna(&self, lab: &Lab, guest: &Guest) -> Result<Figures> {
        let _meter = Meter::start(lab.host(METER)?)?;
        let vm = SternaVm::start(lab, "a", guest, &self.qemus[0].path)?;
        filled(guest)?;
        let mut all = Vec::new();
        for binary in self.binaries() {
            std::thread::sleep(REST);
            all.push(vm.replace(binary)?);
        }
        let of = |value: &dyn Fn(&sterna_api::Replaced) -> f64| all.iter().map(value).collect::<Vec<f64>>();
        Ok(vec![
            ("pause_ms", of(&|one| one.pause_ms)),
            ("total_ms", of(&|one| one.ms)),
            ("prepare_ms", of(&|one| one.prepare_ms)),
            ("end_ms", of(&|one| one.end_ms)),
            ("more_bytes", of(&|one| one.allocated_after_bytes as f64 - one.allocated_before_bytes as f64)),
        ])
    }

    fn alone(&self, lab: &Lab, guest: &Guest) -> Result<Figures> {
        let guest = Guest { wired: false, ..guest.clone() };
        let mut vm = BaselineVm::start(lab, "a", &guest, &self.qemus[0].path, Ram::SharedFile)?;
        filled(&guest)?;
        let mut figures = ["pause_ms", "prepare_ms", "total_ms"].map(|name| (name, Vec::new()));
        for binary in self.binaries() {
            std::thread::sleep(REST);
            let begin = Instant::now();
            let next = vm.successor(lab, binary)?;
            let waited = begin.elapsed();
            let pause = vm.hand_over(next)?;
            let [waited_ms, ran_ms] = [waited, begin.elapsed()].map(|time| time.as_secs_f64() * 1e3);
            for (figure, value) in figures.iter_mut().zip([pause.downtime_ms, waited_ms, ran_ms]) {
                figure.1.push(value);
            }
        }
        Ok(figures.into())
    }
}

/// Waits until the guest has filled its memory.
fn filled(guest: &Guest) -> Result<()> {
    guest.wait_until_up(PATIENCE)?;
    guest.wait_until_says("IDLE ready", PATIENCE)
}

fn targets(runs: &[Run]) -> Vec<Target> {
    let of = |name: &str, way: &str, memory_mib: u64| {
        let fits = |run: &Run| {
            is(run, &[("mover", way)])
                && run.config.get("memory_mib").and_then(serde_json::Value::as_u64) == Some(memory_mib)
        };
        median(&series(runs, name, fits))
    };
    let mut targets = Vec::new();
    for (memory_mib, _) in SIZES {
        let gib = memory_mib >> 10;
        let pause = of("pause_ms", STERNA, memory_mib).zip(of("pause_ms", ALONE, memory_mib));
        let beyond = pause.map(|(own, floor)| own - floor);
        targets.push(Target::at_most(format!("{gib} GiB: pause beyond the floor of the same run, ms"), 1.0, beyond));
        let whole = of("total_ms", STERNA, memory_mib);
        targets.push(Target::at_most(format!("{gib} GiB: from the request until the guest runs, ms"), 100.0, whole));
        let start = of("prepare_ms", ALONE, memory_mib);
        let beside = whole.zip(start).map(|(whole, start)| whole - start);
        targets.push(Target::at_most(
            format!("{gib} GiB: the same without the time in which QEMU alone starts, ms"),
            100.0,
            beside,
        ));
        let more = of("more_bytes", STERNA, memory_mib).map(|bytes| bytes / 4096.0);
        targets.push(Target::at_most(format!("{gib} GiB: pages copied"), 0.0, more));
    }
    for (name, what) in [("pause_ms", "pause"), ("total_ms", "whole")] {
        let [small, large] = SIZES.map(|(memory_mib, _)| of(name, STERNA, memory_mib));
        let ratio = large.zip(small).map(|(large, small)| large / small);
        targets.push(Target::at_most(format!("{what} of 8 GiB ÷ of 1 GiB"), 1.1, ratio));
    }
    targets
}

fn plot(runs: &[Run], directory: &Path) -> Result<()> {
    let rows = rows(runs);
    for (metric, label) in [("pause_ms", "pause, ms"), ("total_ms", "from the request until the guest runs, ms")] {
        let bar = |row: &crate::result::Row| {
            Some((format!("{}, {}", row.word("mover"), row.word("workload")), row.metrics.get(metric)?.median))
        };
        let bars = rows.iter().filter_map(bar).collect();
        BarPlot { title: "another QEMU on the same memory".into(), label: label.into(), bars }
            .write(directory, metric)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_is_judged_against_the_floor_of_its_own_size() {
        let sizes = |memory_mib| Sizes { memory_mib, filled_mib: 1, times: 1, qemus: Vec::new() };
        let run = |way: &str, memory_mib: u64, figures: &[(&str, f64)]| {
            let mut run = sizes(memory_mib).row(way).run(0);
            run.metrics.extend(figures.iter().map(|(name, value)| ((*name).to_owned(), *value)));
            done(&mut run);
            run
        };
        let runs = [
            run(STERNA, 1024, &[("pause_ms", 9.0), ("total_ms", 120.0), ("more_bytes", 0.0)]),
            run(ALONE, 1024, &[("pause_ms", 8.5), ("prepare_ms", 70.0)]),
            run(STERNA, 8192, &[("pause_ms", 12.0), ("total_ms", 120.0), ("more_bytes", 4096.0)]),
            run(ALONE, 8192, &[("pause_ms", 8.5), ("prepare_ms", 70.0)]),
        ];
        let found: Vec<(Option<f64>, bool)> =
            targets(&runs).iter().map(|target| (target.measured, target.met)).collect();
        let expected = [
            (0.5, true),
            (120.0, false),
            (50.0, true),
            (0.0, true),
            (3.5, false),
            (120.0, false),
            (50.0, true),
            (1.0, false),
            (12.0 / 9.0, false),
            (1.0, true),
        ];
        assert_eq!(found, expected.map(|(measured, met)| (Some(measured), met)));
        assert!(targets(&[]).iter().all(|target| target.measured.is_none() && !target.met));
    }
}
