//! How time grows with memory: idle guests of one to sixteen GiB.

use std::path::Path;
use std::time::Duration;

use sterna_api::MigrateOptions;

use super::{Case, Options, Record, lab_name, qemus, try_all};
use crate::baseline::{Method, Ram};
use crate::error::Result;
use crate::lab::{Lab, LabConfig};
use crate::plot::LinePlot;
use crate::result::{Row, Run, Target, rows};
use crate::stats::line;
use crate::trial::{self, Mover};

/// Time of one scan over one GiB of RAM.
const SCAN: &str = "scan_ms_per_gib";

pub(super) fn run(options: &Options, record: &mut Record) -> Result<()> {
    let sizes: &[u64] = if options.quick { &[1, 2, 4] } else { &[1, 2, 4, 8, 16] };
    let repeats = options.repeat.unwrap_or(if options.quick { 2 } else { 5 });
    record.judge(|runs| Ok(targets(runs)));
    let lab = Lab::up(LabConfig::pair(&lab_name()))?;
    try_all(&lab, &cases(sizes)?, repeats, record, |case, metrics| {
        let gib = case.memory_bytes as f64 / f64::from(1 << 30);
        if let (Some(ms), Some(scans)) = (metrics.get("scan_ms"), metrics.get("scans").filter(|scans| **scans > 0.0)) {
            metrics.insert(SCAN.into(), ms / scans / gib);
        }
    });
    plot(record.runs(), record.directory())
}

fn cases(sizes: &[u64]) -> Result<Vec<Case>> {
    let qemu = qemus()?.pop().ok_or_else(|| crate::Error::Usage("no QEMU".into()))?;
    let movers = [Mover::Sterna(MigrateOptions::default()), Mover::Qemu(Method::Vanilla, Ram::SharedFile)];
    let case = |gib: u64, mover: &Mover| Case {
        workload: format!("idle, {gib} GiB"),
        memory_bytes: gib << 30,
        jobs: "idle".into(),
        ready: None,
        load: None,
        mover: mover.clone(),
        qemu: qemu.clone(),
        settle: Duration::from_secs(4),
        limit: trial::LIMIT,
    };
    Ok(sizes
        .iter()
        .flat_map(|gib| movers.iter().map(move |mover| (*gib, mover)))
        .map(|(gib, mover)| case(gib, mover))
        .collect())
}

/// (GiB of RAM, MiB in use, total time in ms) of each size, the smallest first.
fn points(rows: &[Row], baseline: bool) -> Vec<(f64, f64, f64)> {
    let point = |row: &Row| {
        let gib = row.config.get("memory_mib")?.as_f64()? / 1024.0;
        Some((gib, row.metrics.get("nonzero_pages")?.median / 256.0, row.metrics.get("total_ms")?.median))
    };
    rows.iter().filter(|row| row.baseline == baseline).filter_map(point).collect()
}

fn targets(runs: &[Run]) -> Vec<Target> {
    let rows = rows(runs);
    let points = points(&rows, false);
    let fit = line(&points.iter().map(|(_, used, ms)| (*used, *ms)).collect::<Vec<_>>());
    // What a MiB in use costs must not depend on how much RAM lies around it.
    let per_mib = |(_, used, ms): &(f64, f64, f64)| ms / used;
    let growth = points
        .first()
        .zip(points.last())
        .filter(|_| points.len() > 1)
        .map(|(first, last)| per_mib(last) / per_mib(first));
    let scan = rows.iter().filter_map(|row| Some(row.metrics.get(SCAN)?.median)).reduce(f64::max);
    vec![
        Target::at_least("time over memory in use: R²", 0.95, fit.map(|(_, _, r_squared)| r_squared)),
        Target::at_most("time per MiB in use, largest RAM ÷ smallest", 1.1, growth),
        Target::at_most("scan, ms per GiB", 2.0, scan),
    ]
}

fn plot(runs: &[Run], directory: &Path) -> Result<()> {
    let rows = rows(runs);
    let lines = [("sterna", false), ("qemu", true)].map(|(name, baseline)| {
        let seconds = points(&rows, baseline).iter().map(|(gib, _, ms)| (*gib, ms / 1e3)).collect();
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
