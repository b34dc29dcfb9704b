//! FCtrans' figures 7 and 8: the free memory of a guest whose memcached is at work is given back to the host, by looking into its kernel from outside and by its
//! balloon: how long it takes, and what the clients notice.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna_api::ReclaimMethod;

use super::judge::{KEPT, ratio, worst};
use super::{Options, Record, is, lab_name, qemus};
use crate::command::wait_for;
use crate::error::{Error, Result};
use crate::guest::{Balloon, Guest};
use crate::lab::{CLIENT, Lab, LabConfig};
use crate::load::memcached::{Load, LoadConfig};
use crate::plot::LinePlot;
use crate::result::{Config, Run, Target, show_number};
use crate::sterna::SternaVm;
use crate::trial::{MEMCACHED_PORT, Qemu};

/// How long a guest may take to start and to use what it frees.
const START: Duration = Duration::from_secs(120);
/// What memcached may take.
const CACHE_MIB: u32 = 128;
/// How long the clients are watched before and after.
const WATCH: Duration = Duration::from_secs(4);
const METHODS: [(ReclaimMethod, &str); 2] = [(ReclaimMethod::Vmi, "vmi"), (ReclaimMethod::Balloon, "balloon")];
const SEED: u64 = 7;
/// Share of the guest's RAM that was used and freed, in eighths.
const EIGHTHS: &str = "freed_eighths";

pub(super) fn run(options: &Options, record: &mut Record) -> Result<()> {
    let (memory_mib, eighths): (u64, &[u64]) =
        if options.quick { (2048, &[1, 6]) } else { (4096, &[1, 2, 3, 4, 5, 6]) };
    let repeats = options.repeat.unwrap_or(if options.quick { 2 } else { 3 });
    let qemu = qemus()?.into_iter().next().ok_or_else(|| Error::Usage("no QEMU".into()))?;
    let lab = Lab::up(LabConfig::pair(&lab_name()))?;
    let judged = eighths.to_vec();
    record.judge(move |runs| Ok(targets(runs, &judged)));
    for repeat in 0..repeats {
        let mut cases: Vec<Case> = eighths
            .iter()
            .flat_map(|&eighths| METHODS.map(|(method, _)| Case { method, memory_mib, eighths, qemu: qemu.clone() }))
            .collect();
        // What drifts meets both methods alike.
        if repeat % 2 == 1 {
            cases.reverse();
        }
        for case in &cases {
            let run = match record.too_late() {
                Some(reason) => case.failed(repeat, &reason),
                None => case.tried(&lab, &record.new_guest(), repeat),
            };
            let shown = |name: &str| run.metrics.get(name).map_or_else(|| "-".into(), |value| show_number(*value));
            eprintln!(
                "{}/8 of {} MiB by {}: {} MiB in {} ms, throughput kept {}{}",
                case.eighths,
                case.memory_mib,
                case.word(),
                shown("reclaimed_mib"),
                shown("reclaim_ms"),
                shown(KEPT),
                run.details["error"].as_str().map(|error| format!(": {error}")).unwrap_or_default()
            );
            record.add([run]);
        }
    }
    plot(record.runs(), record.directory())
}

/// One set-up.
struct Case {
    method: ReclaimMethod,
    memory_mib: u64,
    eighths: u64,
    qemu: Qemu,
}

impl Case {
    fn word(&self) -> &'static str {
        METHODS.iter().find(|(method, _)| *method == self.method).map_or("", |(_, word)| word)
    }

    fn freed_mib(&self) -> u64 {
        self.memory_mib * self.eighths / 8
    }

    fn config(&self) -> Config {
        let values = [
            ("method", json!(self.word())),
            ("qemu", json!(self.qemu.label)),
            ("workload", json!(format!("memcached of {CACHE_MIB} MiB, one set in ten requests of 1 KiB, 4 clients"))),
            ("memory_mib", json!(self.memory_mib)),
            (EIGHTHS, json!(self.eighths)),
            ("freed_mib", json!(self.freed_mib())),
            ("seed", json!(SEED)),
        ];
        values.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }

    fn run(&self, repeat: usize, metrics: BTreeMap<String, f64>, details: Value) -> Run {
        Run { config: self.config(), baseline: self.method == ReclaimMethod::Balloon, repeat, metrics, details }
    }

    fn failed(&self, repeat: usize, reason: &str) -> Run {
        self.run(repeat, BTreeMap::from([("failed".into(), 1.0)]), json!({ "error": reason }))
    }

    fn tried(&self, lab: &Lab, name: &str, repeat: usize) -> Run {
        let mut guest = Guest::new(
            lab,
            name,
            10,
            &format!("memcached:-m,{CACHE_MIB},-t,2;toucher:--mib,1,--rate,1,--freed-mib,{}", self.freed_mib()),
        );
        guest.memory_bytes = self.memory_mib << 20;
        guest.balloon = Balloon::Idle;
        let tried = lab.create_tap(&guest.tap()).and_then(|()| self.take(lab, &guest));
        if tried.is_err() {
            lab.end_machines();
        }
        let _ = lab.delete_tap(&guest.tap());
        let _ = std::fs::remove_file(&guest.console);
        match tried {
            Ok((metrics, details)) => self.run(repeat, metrics, details),
            Err(error) => self.failed(repeat, &error.to_string()),
        }
    }

    fn take(&self, lab: &Lab, guest: &Guest) -> Result<(BTreeMap<String, f64>, Value)> {
        let vm = SternaVm::start(lab, "a", guest, &self.qemu.path)?;
        guest.wait_until_up(START)?;
        let freed = || Ok(guest.console_text().contains("TOUCHER ready").then_some(()));
        wait_for("memory that was used and freed", START, freed)?;
        let config = LoadConfig { keys: CACHE_MIB * 512, ..LoadConfig::mixed(SEED) };
        let load = Load::start(lab.host(CLIENT)?, SocketAddr::from((guest.address(), MEMCACHED_PORT)), &config)?;
        // The cache fills.
        std::thread::sleep(WATCH);
        let rate = |watch: &mut dyn FnMut() -> Result<()>| -> Result<f64> {
            let (from, requests) = (Instant::now(), load.requests());
            watch()?;
            Ok((load.requests() - requests) as f64 / from.elapsed().as_secs_f64())
        };
        let mut idle = || {
            std::thread::sleep(WATCH);
            Ok(())
        };
        let before = rate(&mut idle)?;
        let mut done = None;
        let during = rate(&mut || {
            done = Some(vm.reclaim(self.word())?);
            Ok(())
        })?;
        let after = rate(&mut idle)?;
        let seen = load.finish();
        let done = done.ok_or_else(|| Error::Usage("nothing was taken".into()))?;
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let reclaimed_mib = mib(done.reclaimed_bytes);
        let metrics = [
            ("failed", 0.0),
            ("reclaim_ms", done.ms),
            ("reclaimed_mib", reclaimed_mib),
            ("reclaim_ms_per_gib", done.ms / reclaimed_mib * 1024.0),
            ("free_mib", mib(done.free_pages * 4096)),
            ("put_back_mib", mib(done.put_back_pages * 4096)),
            ("waits", done.waits as f64),
            ("longest_wait_ms", done.longest_wait_ms),
            ("gave_way", done.gave_way as f64),
            ("requests_per_s_before", before),
            ("requests_per_s_during", during),
            ("requests_per_s_after", after),
            // What drifts does so on both sides.
            (KEPT, 2.0 * during / (before + after)),
            ("load_errors", seen.errors as f64),
            ("longest_request_ms", seen.longest_us as f64 / 1e3),
        ];
        let metrics = metrics.into_iter().filter(|(_, value)| value.is_finite());
        Ok((metrics.map(|(name, value)| (name.to_owned(), value)).collect(), json!({ "report": done })))
    }
}

fn eighths(run: &Run) -> u64 {
    run.config.get(EIGHTHS).and_then(Value::as_u64).unwrap_or(0)
}

/// A row of that method and share.
fn is_row(run: &Run, method: &str, share: u64) -> bool {
    is(run, &[("method", method)]) && eighths(run) == share
}

fn medians(runs: &[Run], method: &str, share: u64, metric: &str) -> Option<f64> {
    let chosen = runs.iter().filter(|run| is_row(run, method, share));
    crate::stats::median(&chosen.filter_map(|run| run.metrics.get(metric).copied()).collect::<Vec<_>>())
}

fn targets(runs: &[Run], shares: &[u64]) -> Vec<Target> {
    let time = |run: &Run| run.metrics.get("reclaim_ms").copied();
    let to_balloon = shares
        .iter()
        .map(|&share| ratio(runs, time, |run| is_row(run, "vmi", share), |run| is_row(run, "balloon", share)));
    let dips = shares.iter().map(|&share| medians(runs, "vmi", share, KEPT).map(|kept| 1.0 - kept));
    vec![
        Target::at_most("time ÷ the balloon's, worst share", 0.2, worst(to_balloon)),
        Target::at_most("throughput lost while memory is taken, worst share", 0.1, worst(dips)),
    ]
}

fn plot(runs: &[Run], directory: &Path) -> Result<()> {
    let mut shares: Vec<u64> = runs.iter().map(eighths).collect();
    shares.sort_unstable();
    shares.dedup();
    let curve = |metric: &'static str, scale: f64| {
        METHODS.map(|(_, method)| {
            let point = |&share: &u64| Some((share as f64 / 8.0, medians(runs, method, share, metric)? * scale));
            (method.to_owned(), shares.iter().filter_map(point).collect())
        })
    };
    for (name, title, y_label, metric, scale) in [
        ("reclaim_ms", "time to give free memory back", "seconds", "reclaim_ms", 1e-3),
        (KEPT, "memcached meanwhile", "throughput, % of before and after", KEPT, 1e2),
    ] {
        let x_label = "share of RAM that was used and freed".to_owned();
        let lines = curve(metric, scale).to_vec();
        LinePlot { title: title.into(), x_label, y_label: y_label.into(), lines, spans: Vec::new() }
            .write(directory, name)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(method: ReclaimMethod, eighths: u64, repeat: usize, ms: f64, kept: f64) -> Run {
        let qemu = Qemu { label: "7.2".into(), path: "/nonexistent".into() };
        let case = Case { method, memory_mib: 2048, eighths, qemu };
        let metrics = [("reclaim_ms".to_owned(), ms), (KEPT.to_owned(), kept)];
        case.run(repeat, metrics.into_iter().collect(), Value::Null)
    }

    #[test]
    fn the_worst_share_is_judged_and_one_that_is_missing_is_missed() {
        use ReclaimMethod::{Balloon, Vmi};
        let runs = [
            run(Vmi, 1, 0, 100.0, 0.99),
            run(Balloon, 1, 0, 1000.0, 0.5),
            run(Vmi, 6, 0, 900.0, 0.93),
            run(Balloon, 6, 0, 6000.0, 0.5),
        ];
        let judge =
            |shares: &[u64]| -> Vec<_> { targets(&runs, shares).iter().map(|target| target.measured).collect() };
        let [time, dip] = judge(&[1, 6]).try_into().unwrap();
        assert_eq!(time, Some(0.15));
        assert!((dip.unwrap() - 0.07_f64).abs() < 1e-9);
        assert_eq!(judge(&[1, 3]), [None, None]);
    }
}
