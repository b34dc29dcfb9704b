//! FCtrans' figures 7 and 8: the free memory of a guest whose memcached is at work is given back to the host, by
//! looking into its kernel from outside and by its balloon: how long it takes, and what the clients notice.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna_api::ReclaimMethod;

use super::judge::{KEPT, ratio, worst};
use super::runner::{Attempt, Row, Site, done, figure, try_all};
use super::{Options, Plan, is, lab_name, qemus};
use crate::error::{Error, Result};
use crate::guest::{Balloon, Guest};
use crate::lab::{CLIENT, Lab, LabConfig};
use crate::load::memcached::{Load, LoadConfig};
use crate::plot::LinePlot;
use crate::result::{Config, Run, Target};
use crate::sterna::SternaVm;
use crate::trial::{MEMCACHED_PORT, Qemu};

/// How long a guest may take to start and to use the memory that it then frees.
const START: Duration = Duration::from_secs(120);
/// What memcached may take.
const CACHE_MIB: u32 = 128;
/// How long the clients are watched before and after.
const WATCH: Duration = Duration::from_secs(4);
const METHODS: [(ReclaimMethod, &str); 2] = [(ReclaimMethod::Vmi, "vmi"), (ReclaimMethod::Balloon, "balloon")];
const SEED: u64 = 7;
/// Share of the guest's RAM that was used and freed, in eighths.
const EIGHTHS: &str = "freed_eighths";

pub(super) fn plan(options: &Options) -> Result<Plan> {
    let (memory_mib, eighths): (u64, &[u64]) =
        if options.quick { (2048, &[1, 6]) } else { (4096, &[1, 2, 3, 4, 5, 6]) };
    let repeats = options.repeat.unwrap_or(if options.quick { 2 } else { 3 });
    let qemu = qemus()?.into_iter().next().ok_or_else(|| Error::Usage("no QEMU".into()))?;
    let share = |&eighths: &u64| METHODS.map(|(method, _)| Taking { method, memory_mib, eighths, qemu: qemu.clone() });
    let attempts: Vec<Taking> = eighths.iter().flat_map(share).collect();
    let plan = Plan::new(move |record| {
        let lab = Lab::up(LabConfig::pair(&lab_name()))?;
        try_all(&lab, &attempts, repeats, record);
        Ok(())
    });
    Ok(plan.judged(|runs| Ok(targets(runs, eighths))).drawn(plot))
}

/// One reclaim of a fresh guest's memory.
struct Taking {
    method: ReclaimMethod,
    memory_mib: u64,
    eighths: u64,
    qemu: Qemu,
}

impl Attempt for Taking {
    fn rows(&self) -> Vec<Row> {
        let workload = format!("memcached of {CACHE_MIB} MiB, one set in ten requests of 1 KiB, 4 clients");
        let Self { memory_mib, eighths, .. } = self;
        let words = format!("{} on QEMU {}, {eighths}/8 of {memory_mib} MiB, {workload}", self.word(), self.qemu.label);
        let values = [
            ("method", json!(self.word())),
            ("qemu", json!(self.qemu.label)),
            ("workload", json!(workload)),
            ("memory_mib", json!(memory_mib)),
            (EIGHTHS, json!(eighths)),
            ("freed_mib", json!(self.freed_mib())),
            ("seed", json!(SEED)),
        ];
        let config: Config = values.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        vec![Row { words, config, baseline: self.method == ReclaimMethod::Balloon }]
    }

    fn guests(&self, lab: &Lab, name: &str) -> Vec<Guest> {
        let freed_mib = self.freed_mib();
        let jobs = format!("memcached:-m,{CACHE_MIB},-t,2;toucher:--mib,1,--rate,1,--freed-mib,{freed_mib}");
        let mut guest = Guest::new(lab, name, 10, &jobs);
        guest.memory_bytes = self.memory_mib << 20;
        guest.balloon = Balloon::Idle;
        vec![guest]
    }

    fn run(&self, site: &Site, runs: &mut [Run]) -> Result<()> {
        for run in runs {
            let (metrics, details) = self.take(site.lab, site.guest()?)?;
            run.metrics.extend(metrics);
            run.details = details;
            done(run);
        }
        Ok(())
    }

    fn tell(&self, run: &Run) -> String {
        let [mib, ms, kept] = ["reclaimed_mib", "reclaim_ms", KEPT].map(|name| figure(run, name));
        format!("{mib} MiB in {ms} ms, throughput kept {kept}")
    }
}

impl Taking {
    fn word(&self) -> &'static str {
        METHODS.iter().find(|(method, _)| *method == self.method).map_or("", |(_, word)| word)
    }

    fn freed_mib(&self) -> u64 {
        self.memory_mib * self.eighths / 8
    }

    fn take(&self, lab: &Lab, guest: &Guest) -> Result<(BTreeMap<String, f64>, Value)> {
        let vm = SternaVm::start(lab, "a", guest, &self.qemu.path)?;
        guest.wait_until_up(START)?;
        guest.wait_until_says("TOUCHER ready", START)?;
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
        let done = done.ok_or_else(|| Error::Usage("no memory was taken".into()))?;
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let reclaimed_mib = mib(done.reclaimed_bytes);
        let metrics = [
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
            // A drift affects both sides alike.
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
        let taking = Taking { method, memory_mib: 2048, eighths, qemu };
        let Row { config, baseline, .. } = taking.rows().remove(0);
        let metrics = [("reclaim_ms".to_owned(), ms), (KEPT.to_owned(), kept)].into_iter().collect();
        Run { config, baseline, repeat, metrics, details: Value::Null }
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
