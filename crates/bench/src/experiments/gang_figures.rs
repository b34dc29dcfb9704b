//! The figures of a gang's move: memory, time, bytes, pauses, costs.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};
use sterna_sys::process::{comm, cpu_time_of};

use super::movers;
use super::runner::done;
use crate::error::Result;
use crate::footprint::{Footprint, Peak};
use crate::gang::Moved;
use crate::lab::cgroup::Group;
use crate::lab::{Lab, net};
use crate::load::{Sample, mean_between};
use crate::result::Run;
use crate::stats::median;

/// The share of its throughput below which a guest that sends counts as disturbed.
const FULL: f64 = 0.9;

/// Total time ÷ the time that the link needs for the frames at the source that hold anything.
pub(super) const TO_LINK: &str = "total_to_link_limit";
/// Bytes on the wire ÷ those of the frames at the source that hold anything.
pub(super) const TO_FRAMES: &str = "bytes_to_nonzero_frames";
/// Frames at the destination, after the migration and at most during it, ÷ those at the source before.
pub(super) const SETTLED: &str = "settled_to_source";
pub(super) const PEAK: &str = "peak_to_source";
/// How long a guest that sends was disturbed, milliseconds.
pub(super) const BELOW: &str = "below_full_ms";
/// Whether all guests of a gang have arrived: 1 or 0.
pub(super) const COMPLETED: &str = "completed";

/// What was measured so far.
#[derive(Default)]
pub(super) struct Measured {
    pub(super) metrics: BTreeMap<String, f64>,
    pub(super) details: Value,
}

/// Makes each run by this trial. What it measured until an error is kept.
///
/// # Errors
/// The first trial's that fails.
pub(super) fn measure(runs: &mut [Run], mut trial: impl FnMut(&mut Measured) -> Result<()>) -> Result<()> {
    for run in runs {
        let mut measured = Measured::default();
        let ended = trial(&mut measured);
        measured.put_into(run);
        ended?;
        done(run);
    }
    Ok(())
}

/// The guests at the source.
pub(super) struct Source {
    pub(super) footprint: Footprint,
    pub(super) nonzero_frames: u64,
    /// The limit of the destination's memory, bytes.
    pub(super) room_bytes: u64,
}

/// The counters before the migration.
pub(super) struct Before {
    pub(super) cpu: Duration,
    /// What of that the daemons have taken, as far as they live.
    pub(super) daemons: Duration,
    pub(super) link: (u64, u64),
    /// How many processes at the destination the kernel has killed for their memory.
    pub(super) killed: u64,
}

impl Before {
    pub(super) fn read(lab: &Lab) -> Result<Self> {
        let (a, b) = (lab.host("a")?, lab.host("b")?);
        let cpu = a.group.cpu_time()? + b.group.cpu_time()?;
        let daemons = daemons_cpu_time(&a.group) + daemons_cpu_time(&b.group);
        Ok(Self { cpu, daemons, link: net::link_bytes(lab.name(), "a")?, killed: b.group.killed_for_memory()? })
    }
}

/// The processor time that the daemons in a control group have taken.
pub(super) fn daemons_cpu_time(group: &Group) -> Duration {
    let daemons = group.processes().into_iter().map(|process| process.pid);
    let daemons = daemons.filter(|pid| comm(*pid).is_ok_and(|name| name == "sternad"));
    daemons.filter_map(|pid| cpu_time_of(pid).ok()).sum()
}

/// Bytes in MiB.
pub(super) fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

impl Measured {
    /// Puts into a run what was measured.
    pub(super) fn put_into(self, run: &mut Run) {
        run.metrics.extend(self.metrics);
        run.details = self.details;
    }

    pub(super) fn note(&mut self, name: &str, value: f64) {
        self.metrics.insert(name.into(), value);
    }

    /// Notes the costs of both hosts: all of it, and what is more than the guests take anyway.
    pub(super) fn note_costs(&mut self, before: &Before, after: &Before, wall: Duration, idle: f64) {
        let cpu_s = after.cpu.saturating_sub(before.cpu).as_secs_f64();
        self.note("wall_ms", wall.as_secs_f64() * 1e3);
        self.note("cpu_s", cpu_s);
        self.note("daemons_cpu_s", after.daemons.saturating_sub(before.daemons).as_secs_f64());
        self.note("cpu_added_s", cpu_s - idle * wall.as_secs_f64());
        self.note("link_bytes", after.link.0.saturating_sub(before.link.0) as f64);
    }

    pub(super) fn note_peak(&mut self, peak: Option<Peak>, source: &Source) {
        let Some(peak) = peak else { return };
        self.note("peak_frames", peak.frames as f64);
        self.note("peak_counts", peak.counts as f64);
        self.note("peak_memory_mib", mib(peak.memory_bytes));
        self.note(PEAK, peak.frames as f64 / source.footprint.frames.max(1) as f64);
    }

    /// Notes the gang's figures: sums of what was sent, and the longest of each time.
    pub(super) fn note_moved(&mut self, moved: &[Moved], source: &Source) {
        let most = |value: fn(&Moved) -> f64| moved.iter().map(value).fold(0.0, f64::max);
        let sum = |value: fn(&Moved) -> u64| moved.iter().map(value).sum::<u64>() as f64;
        let (total_ms, bytes) = (most(|one| one.total_ms), sum(|one| one.bytes_on_wire));
        self.note("total_ms", total_ms);
        self.note("downtime_ms", most(|one| one.downtime_ms));
        let downtimes: Vec<f64> = moved.iter().map(|one| one.downtime_ms).collect();
        median(&downtimes).into_iter().for_each(|ms| self.note("downtime_median_ms", ms));
        self.note("bytes_on_wire", bytes);
        self.note("pages_sent", sum(|one| one.pages_sent));
        self.note("shared_references", sum(|one| one.shared_references));
        let needed = (source.nonzero_frames * 4096).max(1) as f64;
        self.note(TO_FRAMES, bytes / needed);
        self.note(TO_LINK, total_ms / (needed / movers::LINK_BYTES_PER_S as f64 * 1e3));
        let reports: Vec<&Value> = moved.iter().map(|one| &one.report).collect();
        self.details = json!({ "migrations": reports });
    }

    pub(super) fn note_settled(&mut self, there: Footprint, source: &Source) {
        self.note("destination_mib", mib(there.frames * 4096));
        self.note("destination_frames", there.frames as f64);
        self.note(SETTLED, there.frames as f64 / source.footprint.frames.max(1) as f64);
    }

    /// Notes the longest silence of each guest at the meter, milliseconds: the longest of all, and the median.
    pub(super) fn note_gaps(&mut self, gaps: &[f64]) {
        gaps.iter().copied().reduce(f64::max).into_iter().for_each(|ms| self.note("gap_ms", ms));
        median(gaps).into_iter().for_each(|ms| self.note("gap_median_ms", ms));
    }

    /// Notes how long guests at work had less than their full throughput between two moments, and plots' points:
    /// seconds since the first moment, millions per second (of bytes or requests).
    pub(super) fn note_throughput(&mut self, samples: &[Sample], settled_us: i64, begin_us: i64, end_us: i64) {
        let Some(full) = mean_between(samples, settled_us, begin_us) else { return };
        self.note("full_millions_per_s", full / 1e6);
        self.note(BELOW, below_ms(samples, full * FULL, begin_us, end_us));
        let point = |sample: &Sample| ((sample.at_us - begin_us) as f64 / 1e6, sample.per_s / 1e6);
        let points: Vec<(f64, f64)> = samples.iter().filter(|one| one.at_us >= settled_us).map(point).collect();
        if !self.details.is_object() {
            self.details = json!({});
        }
        self.details["throughput"] = json!(points);
    }
}

/// How long the throughput was below a rate between two moments, milliseconds: of the intervals that end between them,
/// and all the time after the last sample, where a guest was heard of no more.
fn below_ms(samples: &[Sample], rate: f64, from_us: i64, to_us: i64) -> f64 {
    let inside = samples.windows(2).filter(|pair| (from_us..=to_us).contains(&pair[1].at_us) && pair[1].per_s < rate);
    let heard_of: i64 = inside.map(|pair| pair[1].at_us - pair[0].at_us).sum();
    let unheard = samples.last().map_or(0, |last| to_us - last.at_us.max(from_us));
    (heard_of + unheard.max(0)) as f64 / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gangs_times_are_those_of_its_slowest_guest_and_its_bytes_are_a_sum() {
        let moved = |total_ms, downtime_ms| Moved {
            total_ms,
            downtime_ms,
            bytes_on_wire: 4096 * 100,
            pages_sent: 100,
            shared_references: 7,
            report: Value::Null,
        };
        let footprint = Footprint { frames: 200, pages: 400 };
        let source = Source { footprint, nonzero_frames: 160, room_bytes: 0 };
        let mut measured = Measured::default();
        measured.note_moved(&[moved(30.0, 5.0), moved(40.0, 9.0)], &source);
        measured.note_settled(Footprint { frames: 220, pages: 400 }, &source);
        let of = |name: &str| measured.metrics[name];
        assert_eq!((of("total_ms"), of("downtime_ms"), of("downtime_median_ms")), (40.0, 9.0, 7.0));
        assert_eq!((of("pages_sent"), of("shared_references"), of(TO_FRAMES)), (200.0, 14.0, 1.25));
        assert_eq!(of(SETTLED), 1.1);
    }

    #[test]
    fn a_sender_is_disturbed_for_as_long_as_it_sends_less_than_before() {
        let rates = [10.0, 10.0, 10.0, 5.0, 0.0, 8.9, 9.1, 10.0, 0.0];
        let samples: Vec<Sample> =
            rates.iter().zip(0..).map(|(rate, at)| Sample { at_us: at * 250_000, per_s: rate * 1e6 }).collect();
        let mut measured = Measured::default();
        measured.note_throughput(&samples, 0, 500_000, 1_750_000);
        assert_eq!((measured.metrics["full_millions_per_s"], measured.metrics[BELOW]), (10.0, 750.0));
        assert_eq!(measured.details["throughput"][3], json!([0.25, 5.0]));
        // One that is heard of no more sends nothing.
        measured.note_throughput(&samples[..5], 0, 500_000, 1_750_000);
        assert_eq!(measured.metrics[BELOW], 1250.0);
    }
}
