//! What the experiments after D-Track have in common: a memcached that fills the guest, and sets all over it.

use std::path::Path;
use std::time::Duration;

use super::movers::LINK_BYTES_PER_S;
use super::{Case, Options};
use crate::error::Result;
use crate::load::memcached::LoadConfig;
use crate::plot::{BarPlot, LinePlot};
use crate::result::{Row, Run, rows};
use crate::trial::{LIMIT, Mover, Qemu};

/// Sets per second over the whole cache. Each writes about SET_PAGES different pages (the item, its neighbours' links,
/// the table), so that the guest writes about half of what the link carries; the real rate is in each row.
const SETS_PER_S: f64 = 3000.0;
/// The share of RAM that is memcached's, percent; less where that would not leave the guest's kernel and memcached's
/// own tables what they need.
const CACHE_PERCENT: u64 = 90;
const BESIDE_MIB: u64 = 220;
const SEED: u64 = 14;

/// The RAM sizes of the paper that fit here, MiB.
pub(super) fn sizes_mib(options: &Options) -> &'static [u64] {
    if options.quick { &[1024] } else { &[1024, 2048, 4096, 8192] }
}

/// The guest of the paper's section 6.4: memcached has 90 % of RAM, all of it full, and clients do nothing but set.
pub(super) fn memcached(memory_mib: u64, mover: Mover, qemu: &Qemu) -> Case {
    let cache_mib = cache_mib(memory_mib);
    Case {
        workload: workload(memory_mib),
        memory_bytes: memory_mib << 20,
        jobs: format!("memcached:-m,{cache_mib},-t,4"),
        ready: None,
        load: Some(LoadConfig::full_cache(u32::try_from(cache_mib).unwrap_or(u32::MAX), SETS_PER_S, SEED)),
        mover,
        qemu: qemu.clone(),
        settle: Duration::from_secs(4),
        limit: limit(memory_mib),
    }
}

fn cache_mib(memory_mib: u64) -> u64 {
    (memory_mib * CACHE_PERCENT / 100).min(memory_mib.saturating_sub(BESIDE_MIB))
}

/// The name of the workload of [`memcached`].
pub(super) fn workload(memory_mib: u64) -> String {
    format!("memcached: {} MiB of {memory_mib}, {SETS_PER_S} sets/s", cache_mib(memory_mib))
}

/// The limit: the time in which the link carries the RAM four times, and no less than usual.
fn limit(memory_mib: u64) -> Duration {
    LIMIT.max(Duration::from_secs(4 * (memory_mib << 20) / LINK_BYTES_PER_S))
}

/// Plots total times as the paper does: over the size of RAM, or as bars where there is one size. Only movers that
/// `chosen` accepts.
pub(super) fn plot(
    runs: &[Run],
    directory: &Path,
    name: &str,
    title: &str,
    chosen: impl Fn(&Row) -> bool,
) -> Result<()> {
    let rows: Vec<Row> = rows(runs).into_iter().filter(chosen).collect();
    let mut lines: Vec<(String, Vec<(f64, f64)>)> = Vec::new();
    for row in &rows {
        let label = row.mover_and_qemu();
        let gib = row.config.get("memory_mib").and_then(|value| value.as_f64()).unwrap_or_default() / 1024.0;
        let Some(total) = row.metrics.get("total_ms") else { continue };
        let point = (gib, total.median / 1e3);
        match lines.iter_mut().find(|(line, _)| *line == label) {
            Some((_, points)) => points.push(point),
            None => lines.push((label, vec![point])),
        }
    }
    let label = "total time, seconds".to_owned();
    if lines.iter().all(|(_, points)| points.len() <= 1) {
        let bars = lines.into_iter().filter_map(|(line, points)| Some((line, points.first()?.1))).collect();
        return BarPlot { title: title.into(), label, bars }.write(directory, name);
    }
    LinePlot { title: title.into(), x_label: "RAM, GiB".into(), y_label: label, lines, spans: Vec::new() }
        .write(directory, name)
}
