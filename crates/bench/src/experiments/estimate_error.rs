//! The error of `sterna estimate`: a guest's migration is estimated, and the guest is moved at once, at the same rate.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::json;
use sterna_api::estimate::Way;
use sterna_api::options::Compress;
use sterna_api::{Estimate, MigrateOptions, Mode, Report};

use super::runner::{Attempt, Row, Site, done, figure, try_all};
use super::{Options, Plan, lab_name, qemus};
use crate::error::{Error, Result};
use crate::guest::Guest;
use crate::lab::{Lab, LabConfig};
use crate::result::{Config, Run};
use crate::sterna::SternaVm;
use crate::trial::Qemu;
use crate::warm::Touched;

/// The bandwidth. It is below that of the lab's links, so that it is the limit.
const BYTES_PER_S: u64 = 100_000_000;
/// How long a guest may take to start, on a machine that has other work too.
const START: Duration = Duration::from_secs(90);
/// How long it runs before it is observed.
const SETTLE: Duration = Duration::from_secs(5);
/// When a migration that does not converge is ended, with a long pause.
const FORCE_AFTER_MS: f64 = 30_000.0;

/// A workload: its name, its jobs, and the line by which the guest says that its memory is filled.
type Workload = (&'static str, &'static str, Option<&'static str>);

const WORKLOADS: &[Workload] = &[
    ("idle", "idle", None),
    ("20 MiB/s over 128 MiB", "dirtier:--mib,128,--rate,20", Some("DIRTIER ready")),
    ("50 MiB/s over 128 MiB", "dirtier:--mib,128,--rate,50", Some("DIRTIER ready")),
    ("hot spot, 50 MiB/s over 128 MiB", "dirtier:--mib,128,--rate,50,--pattern,hot-spot", Some("DIRTIER ready")),
];

/// Each guest is moved by each mode in turn, to the host where it is not.
const TRIPS: [(Mode, &str); 5] = [
    (Mode::Precopy, "precopy"),
    (Mode::StopAndCopy, "stop-and-copy"),
    (Mode::Hybrid, "hybrid"),
    (Mode::Postcopy, "postcopy"),
    (Mode::Auto, "auto"),
];

pub(super) fn plan(options: &Options) -> Result<Plan> {
    let repeats = options.repeat.unwrap_or(if options.quick { 2 } else { 10 });
    let qemu = qemus()?.pop().ok_or_else(|| Error::Usage("no QEMU".into()))?;
    let attempts: Vec<_> = WORKLOADS.iter().map(|workload| Trips { workload, qemu: qemu.clone() }).collect();
    Ok(Plan::new(move |record| {
        let lab = Lab::up(LabConfig::pair(&lab_name()))?;
        try_all(&lab, &attempts, repeats, record);
        Ok(())
    }))
}

/// One guest, estimated and moved by each mode. A trip that fails is the last of its guest.
struct Trips {
    workload: &'static Workload,
    qemu: Qemu,
}

impl Attempt for Trips {
    fn rows(&self) -> Vec<Row> {
        let (name, jobs, _) = self.workload;
        let row = |(_, mode): (Mode, &str)| {
            let values = [
                ("mover", json!("sterna")),
                ("qemu", json!(self.qemu.label)),
                ("workload", json!(name)),
                ("mode", json!(mode)),
                ("bandwidth_bytes_per_s", json!(BYTES_PER_S)),
                ("memory_mib", json!(1024)),
                ("jobs", json!(jobs)),
                ("seed", json!(1)),
            ];
            let config: Config = values.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
            Row { words: format!("sterna, {mode} on QEMU {}, {name}", self.qemu.label), config, baseline: false }
        };
        TRIPS.map(row).into()
    }

    fn guests(&self, lab: &Lab, name: &str) -> Vec<Guest> {
        let mut guest = Guest::new(lab, name, 10, self.workload.1);
        guest.memory_bytes = 1 << 30;
        vec![guest]
    }

    fn run(&self, site: &Site, runs: &mut [Run]) -> Result<()> {
        let guest = site.guest()?;
        let mut vm = start(site.lab, guest, self.workload, &self.qemu)?;
        for at in site.order() {
            let run = &mut runs[at];
            if !site.is_due(at, run) {
                continue;
            }
            let (mode, name) = TRIPS[at];
            let to = if vm.host().name == "a" { "b" } else { "a" };
            let (estimate, report) = estimate_and_move(site.lab, &mut vm, guest, mode, to)?;
            let way = estimate.ways.iter().find(|way| json!(way.mode) == name && way.compress == Compress::Off);
            run.metrics.extend(way.map(|way| errors(way, &report)).unwrap_or_default());
            run.details = json!({ "estimate": estimate, "report": report });
            done(run);
        }
        Ok(())
    }

    fn tell(&self, run: &Run) -> String {
        let names = ["total_ms", "estimated_total_ms", "downtime_ms", "estimated_downtime_ms"];
        let [total, estimated_total, downtime, estimated_downtime] = names.map(|name| figure(run, name));
        format!(
            "total {total} ms, {estimated_total} were estimated; downtime {downtime} ms, {estimated_downtime} were estimated"
        )
    }
}

fn start(lab: &Lab, guest: &Guest, workload: &Workload, qemu: &Qemu) -> Result<SternaVm> {
    let vm = SternaVm::start(lab, "a", guest, &qemu.path)?;
    guest.wait_until_up(START)?;
    if let Some(ready) = workload.2 {
        guest.wait_until_says(ready, START)?;
    }
    std::thread::sleep(SETTLE);
    Ok(vm)
}

fn estimate_and_move(lab: &Lab, vm: &mut SternaVm, guest: &Guest, mode: Mode, to: &str) -> Result<(Estimate, Report)> {
    let warm = Touched::new(guest.memory_bytes + (256 << 20))?;
    let estimate = vm.estimate(BYTES_PER_S)?;
    drop(warm);
    // The others do not wait for rounds to converge.
    let live = mode == Mode::Precopy;
    let options = MigrateOptions {
        mode,
        bandwidth_bytes_per_s: Some(BYTES_PER_S),
        timeout_ms: live.then_some(FORCE_AFTER_MS),
        on_timeout: if live { sterna_api::options::OnTimeout::Force } else { sterna_api::options::OnTimeout::Cancel },
        ..MigrateOptions::default()
    };
    let report = vm.migrate(lab, to, &options)?;
    // Just after its start elsewhere a guest does not work as usual.
    std::thread::sleep(SETTLE);
    Ok((estimate, report))
}

/// The estimate, the real figures, and the share by which the estimate was too high.
fn errors(way: &Way, report: &Report) -> BTreeMap<String, f64> {
    let pairs = [
        ("total_ms", way.total_ms, report.total_ms),
        ("downtime_ms", way.downtime_ms, report.downtime_ms),
        ("bytes_on_wire", way.bytes_on_wire as f64, report.bytes_on_wire as f64),
    ];
    let mut metrics = BTreeMap::from([
        ("setup_ms".to_owned(), report.setup_ms),
        ("rounds".to_owned(), report.rounds.len() as f64),
        ("estimated_rounds".to_owned(), f64::from(way.rounds)),
        ("estimated_within_limit".to_owned(), f64::from(u8::from(way.reaches_downtime_limit))),
    ]);
    for (name, estimated, took) in pairs {
        metrics.insert(name.to_owned(), took);
        metrics.insert(format!("estimated_{name}"), estimated);
        if took > 0.0 {
            metrics.insert(format!("error_of_{name}"), estimated / took - 1.0);
        }
    }
    metrics
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_the_share_by_which_the_estimate_is_too_high() {
        let way = Way { total_ms: 1100.0, bytes_on_wire: 50, ..Way::default() };
        let metrics = errors(&way, &Report { total_ms: 1000.0, bytes_on_wire: 100, ..Report::default() });
        assert!((metrics["error_of_total_ms"] - 0.1).abs() < 1e-9);
        assert!((metrics["error_of_bytes_on_wire"] + 0.5).abs() < 1e-9);
        assert!(!metrics.contains_key("error_of_downtime_ms"), "nothing is divided by 0");
    }
}
