//! How far `sterna estimate` is from what the migration then takes: a guest is estimated and moved at once, at the same rate.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};
use sterna_api::estimate::Way;
use sterna_api::options::Compress;
use sterna_api::{Estimate, MigrateOptions, Mode, Report};

use super::{Options, Record, lab_name, qemus};
use crate::command::wait_for;
use crate::error::{Error, Result};
use crate::guest::Guest;
use crate::lab::{Lab, LabConfig};
use crate::ram;
use crate::result::{Config, Run, show_number};
use crate::sterna::SternaVm;
use crate::trial::Qemu;

/// Below the lab's links, so that it is what limits.
const BYTES_PER_S: u64 = 100_000_000;
/// How long a guest may take to start, on a machine that has other work too.
const START: Duration = Duration::from_secs(90);
/// How long it runs before it is looked at.
const SETTLE: Duration = Duration::from_secs(5);
/// When a migration that does not converge is ended, with a long pause.
const FORCE_AFTER_MS: f64 = 30_000.0;

/// What a guest does: a name, its jobs, and the line by which it says that its memory is filled.
type Workload = (&'static str, &'static str, Option<&'static str>);

const WORKLOADS: &[Workload] = &[
    ("idle", "idle", None),
    ("20 MiB/s over 128 MiB", "dirtier:--mib,128,--rate,20", Some("DIRTIER ready")),
    ("50 MiB/s over 128 MiB", "dirtier:--mib,128,--rate,50", Some("DIRTIER ready")),
    ("hot spot, 50 MiB/s over 128 MiB", "dirtier:--mib,128,--rate,50,--pattern,hot-spot", Some("DIRTIER ready")),
];

/// Each guest goes to and fro by each mode in turn.
const TRIPS: [(Mode, &str, &str); 4] = [
    (Mode::Precopy, "b", "precopy"),
    (Mode::StopAndCopy, "a", "stop-and-copy"),
    (Mode::Hybrid, "b", "hybrid"),
    (Mode::Postcopy, "a", "postcopy"),
];

pub(super) fn run(options: &Options, record: &mut Record) -> Result<()> {
    let repeats = options.repeat.unwrap_or(if options.quick { 2 } else { 10 });
    let qemu = qemus()?.pop().ok_or_else(|| Error::Usage("no QEMU".into()))?;
    let lab = Lab::up(LabConfig::pair(&lab_name()))?;
    for repeat in 0..repeats {
        for workload in WORKLOADS {
            record.add(try_one(&lab, workload, &qemu, repeat));
        }
    }
    Ok(())
}

/// One guest, there and back. A trip that fails is a row too, and the last of its guest.
fn try_one(lab: &Lab, workload: &Workload, qemu: &Qemu, repeat: usize) -> Vec<Run> {
    let mut guest = Guest::new(lab, &format!("guest{repeat}"), 10, workload.1);
    guest.memory_bytes = 1 << 30;
    let mut runs = Vec::new();
    let mut tell = |mode: &str, found: Result<(Estimate, Report)>| {
        let run = row(workload, qemu, mode, repeat, found);
        let shown = |name: &str| run.metrics.get(name).map_or_else(|| "-".into(), |value| show_number(*value));
        eprintln!(
            "{}, {mode}: total {} ms, {} were estimated; downtime {} ms, {} were estimated{}",
            workload.0,
            shown("total_ms"),
            shown("estimated_total_ms"),
            shown("downtime_ms"),
            shown("estimated_downtime_ms"),
            run.details["error"].as_str().map(|error| format!(": {error}")).unwrap_or_default()
        );
        runs.push(run);
    };
    if let Err(error) = lab.create_tap(&guest.tap()) {
        tell(TRIPS[0].2, Err(error));
        return runs;
    }
    match start(lab, &guest, workload, qemu) {
        Err(error) => tell(TRIPS[0].2, Err(error)),
        Ok(mut vm) => {
            for (mode, to, name) in TRIPS {
                let found = estimate_and_move(lab, &mut vm, &guest, mode, to);
                let failed = found.is_err();
                tell(name, found);
                if failed {
                    break;
                }
            }
        }
    }
    if let Err(error) = lab.delete_tap(&guest.tap()) {
        eprintln!("the guest's network device stays: {error}");
    }
    // The next guest of the name must not find its words.
    let _ = std::fs::remove_file(&guest.console);
    runs
}

fn start(lab: &Lab, guest: &Guest, workload: &Workload, qemu: &Qemu) -> Result<SternaVm> {
    let vm = SternaVm::start(lab, "a", guest, &qemu.path)?;
    guest.wait_until_up(START)?;
    if let Some(ready) = workload.2 {
        wait_for(&format!("'{ready}' of the guest"), START, || Ok(guest.console_text().contains(ready).then_some(())))?;
    }
    std::thread::sleep(SETTLE);
    Ok(vm)
}

fn estimate_and_move(lab: &Lab, vm: &mut SternaVm, guest: &Guest, mode: Mode, to: &str) -> Result<(Estimate, Report)> {
    ram::warm(guest.memory_bytes + (256 << 20))?;
    let estimate = vm.estimate(BYTES_PER_S)?;
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
    // What a guest does just after its start elsewhere is not what it does.
    std::thread::sleep(SETTLE);
    Ok((estimate, report))
}

fn row((name, jobs, _): &Workload, qemu: &Qemu, mode: &str, repeat: usize, found: Result<(Estimate, Report)>) -> Run {
    let values = [
        ("mover", json!("sterna")),
        ("qemu", json!(qemu.label)),
        ("workload", json!(name)),
        ("mode", json!(mode)),
        ("bandwidth_bytes_per_s", json!(BYTES_PER_S)),
        ("memory_mib", json!(1024)),
        ("jobs", json!(jobs)),
        ("seed", json!(1)),
    ];
    let config: Config = values.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    let (mut metrics, details) = match found {
        Ok((estimate, report)) => {
            let way = estimate.ways.iter().find(|way| json!(way.mode) == mode && way.compress == Compress::Off);
            (way.map(|way| errors(way, &report)).unwrap_or_default(), json!({ "estimate": estimate, "report": report }))
        }
        Err(error) => (BTreeMap::new(), json!({ "error": error.to_string() })),
    };
    metrics.insert("failed".into(), f64::from(u8::from(details.get("error").is_some_and(Value::is_string))));
    Run { config, baseline: false, repeat, metrics, details }
}

/// What was estimated, what it took, and by which share the estimate was too high.
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
