//! A program goes through memory of which a part is elsewhere: in a split guest at memory hosts, and in one that swaps
//! to a disk in another host's memory, as people do it today.
//!
//! The guest itself times each access. Of a swapping guest the program alone is limited; a split guest has its share of
//! the program's memory, and a little for everything else in it.

use std::path::Path;
use std::time::Duration;

use serde_json::json;
use sterna_guest_programs::histogram::Histogram;

use super::curves::Curves;
use super::gang_figures::Measured;
use super::judge::{least, ratio};
use super::lenders::{self, MIB, PROGRAM};
use super::runner::{Attempt, Row, Site, done, figure, try_all};
use super::timeline::{rate, totals};
use super::together::{self, REST};
use super::{Options, Plan, is};
use crate::baseline::{BaselineVm, MemoryDisk, Ram};
use crate::error::Result;
use crate::guest::{Guest, Swap};
use crate::lab::{Lab, METER};
use crate::load::now_us;
use crate::meter::{Line, Meter};
use crate::result::{Config, Run, Target, rows};
use crate::sterna::SternaVm;
use crate::trial::Qemu;

/// The guest's memory, and what its program goes through, MiB.
const MEMORY_MIB: u64 = 512;
const WORKING_SET_MIB: u64 = 256;
/// What a split guest has here for everything but its program, MiB.
const REST_MIB: u64 = 48;
/// How often the program reports, and how long it is measured.
const INTERVAL_MS: i64 = 100;
const MEASURED_US: i64 = 8_000_000;
/// An access that takes so long has waited for a page; others take a few microseconds at most.
const WAIT_NS: u64 = 50_000;
/// The shares of the working set that may be here, percent.
const SHARES: [u64; 3] = [50, 25, 10];
/// Pages that a swapping guest's kernel moves together: 2 to the power of that.
const CLUSTERS: [u32; 2] = [0, 3];

const WORDS: &str = "words_per_s";
const WAIT_P50: &str = "wait_p50_us";
const WAIT_P99: &str = "wait_p99_us";

pub(super) fn plan(options: &Options) -> Result<Plan> {
    let repeats = options.repeat.unwrap_or(if options.quick { 1 } else { 5 });
    let attempts = attempts(&together::newest()?, options.quick);
    let plan = Plan::new(move |record| {
        try_all(&lenders::lab()?, &attempts, repeats, record);
        Ok(())
    });
    Ok(plan.judged(|runs| Ok(targets(runs))).drawn(plot))
}

/// What the program does with its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Work {
    /// It reads a word of each page, one after another.
    Sequential,
    /// Of any page.
    Random,
    /// Nine times of ten of a page of the first tenth.
    HotSpot,
}

const WORKS: [Work; 3] = [Work::Sequential, Work::Random, Work::HotSpot];

impl Work {
    fn word(self) -> &'static str {
        match self {
            Self::Sequential => "sequential",
            Self::Random => "random",
            Self::HotSpot => "hot-spot",
        }
    }
}

/// Where the rest of its memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// There is none: all is here.
    Here,
    /// At two memory hosts.
    MemoryHosts,
    /// On a disk in another host's memory; so many pages go together.
    Disk(u32),
}

impl Place {
    fn label(self) -> String {
        match self {
            Self::Here => "all of it here".into(),
            Self::MemoryHosts => "sterna split".into(),
            Self::Disk(cluster) => format!("swap on NBD, page-cluster {cluster}"),
        }
    }
}

/// The rows that are tried in one guest.
#[derive(Debug, Clone)]
struct Paging {
    work: Work,
    place: Place,
    /// Percent of the working set that may be here.
    shares: Vec<u64>,
    qemu: Qemu,
}

fn attempts(qemu: &Qemu, quick: bool) -> Vec<Paging> {
    let shares: &[u64] = if quick { &SHARES[..2] } else { &SHARES };
    let mut attempts = Vec::new();
    for work in WORKS {
        let mut add = |place, shares: &[u64]| {
            attempts.push(Paging { work, place, shares: shares.to_vec(), qemu: qemu.clone() });
        };
        add(Place::Here, &[100]);
        add(Place::MemoryHosts, shares);
        // What a guest may have of its memory is said when it boots.
        for cluster in CLUSTERS {
            shares.iter().for_each(|share| add(Place::Disk(cluster), &[*share]));
        }
    }
    attempts
}

fn workload(work: Work, share: u64) -> String {
    format!("{} reads, {share} % here", work.word())
}

impl Attempt for Paging {
    fn rows(&self) -> Vec<Row> {
        let row = |share: &u64| {
            let workload = workload(self.work, *share);
            let values = [
                ("mover", json!(self.place.label())),
                ("qemu", json!(self.qemu.label)),
                ("workload", json!(workload)),
                ("jobs", json!(self.jobs())),
                ("here_percent", json!(share)),
            ];
            let config: Config = values.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
            let words = format!("{}, {workload}", self.place.label());
            Row { words, config, baseline: self.place != Place::MemoryHosts }
        };
        self.shares.iter().map(row).collect()
    }

    fn guests(&self, lab: &Lab, name: &str) -> Vec<Guest> {
        vec![Guest { memory_bytes: MEMORY_MIB * MIB, ..Guest::new(lab, name, 10, &self.jobs()) }]
    }

    fn run(&self, site: &Site, runs: &mut [Run]) -> Result<()> {
        let meter = Meter::start(site.lab.host(METER)?)?;
        let (lab, guest) = (site.lab, site.guest()?);
        if let Place::Disk(page_cluster) = self.place {
            let disk = MemoryDisk::start(lab.host("b")?, WORKING_SET_MIB * 2 * MIB)?;
            let limit_bytes = share_bytes(self.shares[0]);
            let guest =
                Guest { swap: Some(Swap { file: disk.argument(), page_cluster, limit_bytes }), ..guest.clone() };
            let _vm = BaselineVm::start(lab, "a", &guest, &self.qemu.path, Ram::Plain)?;
            lenders::is_at_work(&guest)?;
            return look(&guest, &meter, &mut runs[0]);
        }
        let vm = SternaVm::start(lab, "a", guest, &self.qemu.path)?;
        lenders::is_at_work(guest)?;
        for at in site.order().into_iter().filter(|at| site.is_due(*at, &mut runs[*at])).collect::<Vec<_>>() {
            if self.place == Place::MemoryHosts {
                let here = REST_MIB * MIB + share_bytes(self.shares[at]);
                runs[at].details = json!({ "split": vm.split(here, &lenders::lenders(lab)?, &[])? });
            }
            look(guest, &meter, &mut runs[at])?;
        }
        Ok(())
    }

    fn tell(&self, run: &Run) -> String {
        let [words, p50, p99] = [WORDS, WAIT_P50, WAIT_P99].map(|name| figure(run, name));
        format!("{words} words a second; it waits for a page for {p50} µs, and {p99} µs in one of a hundred")
    }
}

impl Paging {
    fn jobs(&self) -> String {
        let pattern = self.work.word();
        let way = format!("--access,read,--pattern,{pattern},--bytes,8,--interval-ms,{INTERVAL_MS}");
        format!("toucher:--mib,{WORKING_SET_MIB},{way}")
    }
}

/// What of the working set may be here, bytes.
fn share_bytes(share: u64) -> u64 {
    WORKING_SET_MIB * MIB * share / 100
}

/// Lets the guest settle, and notes what it does then.
fn look(guest: &Guest, meter: &Meter, run: &mut Run) -> Result<()> {
    std::thread::sleep(REST);
    let from_us = now_us();
    // The last line of the time tells of what came before it.
    std::thread::sleep(Duration::from_micros((MEASURED_US + 3 * INTERVAL_MS * 1000).unsigned_abs()));
    let mut measured = Measured::default();
    note(&meter.lines(guest.address(), PROGRAM), (from_us, from_us + MEASURED_US), &mut measured);
    run.metrics.extend(measured.metrics);
    done(run);
    Ok(())
}

fn note(lines: &[Line], (from_us, to_us): (i64, i64), measured: &mut Measured) {
    let Some(words) = rate(&totals(lines), from_us, to_us) else { return };
    measured.note(WORDS, words);
    let mut all = Histogram::default();
    let inside = lines.iter().filter(|line| (from_us..=to_us).contains(&line.at_us));
    inside.filter_map(|line| line.word("latency_ns")?.parse::<Histogram>().ok()).for_each(|latency| all.add(&latency));
    let waits = all.from(WAIT_NS);
    measured.note("waits_per_s", waits.count() as f64 / ((to_us - from_us) as f64 / 1e6));
    for (name, quantile) in [(WAIT_P50, 0.5), (WAIT_P99, 0.99)] {
        if let Some(ns) = waits.quantile(quantile) {
            measured.note(name, ns / 1e3);
        }
    }
}

fn targets(runs: &[Run]) -> Vec<Target> {
    let words = |run: &Run| run.metrics.get(WORDS).copied();
    let row = |work, share, place: Place| {
        move |run: &Run| is(run, &[("workload", &workload(work, share)), ("mover", &place.label())])
    };
    let own = |work, share| row(work, share, Place::MemoryHosts);
    let mut targets = Vec::new();
    for work in WORKS {
        let against = CLUSTERS.into_iter().flat_map(|cluster| SHARES.map(|share| (cluster, share)));
        let ratios = against
            .map(|(cluster, share)| ratio(runs, words, own(work, share), row(work, share, Place::Disk(cluster))));
        let name = format!("{} reads: words per second ÷ those of a guest that swaps, worst row", work.word());
        targets.push(Target::at_least(name, 2.0, least(ratios)));
    }
    targets
}

fn plot(runs: &[Run], directory: &Path) -> Result<()> {
    let rows = rows(runs);
    for work in WORKS {
        let beginning = format!("{} reads, ", work.word());
        let share = |workload: &str| workload.strip_prefix(&beginning)?.strip_suffix(" % here")?.parse().ok();
        let title = format!("{} reads of {WORKING_SET_MIB} MiB", work.word());
        let (x_label, y_label) = ("percent of it here", "words a second");
        let curves = Curves { title, x_label, y_label, metric: WORDS, x: &share };
        curves.write(&rows, directory, work.word())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn what_a_guest_waits_is_told_apart_from_its_other_accesses() {
        let latency: Histogram = [1_000; 90].into_iter().chain([200_000; 10]).collect();
        let line = |tenth: i64| {
            let text = format!("TOUCHER ok touches=100 total={} latency_ns={latency}", tenth * 100);
            Line { from: Ipv4Addr::LOCALHOST, at_us: tenth * 100_000, text }
        };
        let lines: Vec<Line> = (0..100).map(line).collect();
        let mut measured = Measured::default();
        note(&lines, (1_000_000, 9_000_000), &mut measured);
        let of = |name: &str| measured.metrics[name];
        assert_eq!(of(WORDS), 1000.0);
        assert!((of("waits_per_s") - 100.0).abs() < 2.0, "{}", of("waits_per_s"));
        assert!((of(WAIT_P50) / 200.0 - 1.0).abs() < 1.0 / 16.0, "{}", of(WAIT_P50));
        let mut measured = Measured::default();
        note(&[], (0, 1), &mut measured);
        assert!(measured.metrics.is_empty());
    }

    #[test]
    fn the_worst_row_is_judged_and_none_where_one_is_missing() {
        let qemu = Qemu { label: "10.0".into(), path: "/nonexistent".into() };
        let words = |attempt: &Paging, share: u64| match attempt.place {
            Place::Here => 100.0,
            Place::MemoryHosts => 40.0 + share as f64,
            Place::Disk(0) => 20.0,
            Place::Disk(_) => 25.0,
        };
        let runs: Vec<Run> = attempts(&qemu, false)
            .iter()
            .flat_map(|attempt| {
                attempt.rows().into_iter().zip(attempt.shares.clone()).map(|(row, share)| {
                    let mut run = row.run(0);
                    run.metrics.insert(WORDS.into(), words(attempt, share));
                    run
                })
            })
            .collect();
        let judged = |runs: &[Run]| -> Vec<_> { targets(runs).iter().map(|target| target.measured).collect() };
        assert_eq!(judged(&runs), [Some(2.0); 3]);
        assert_eq!(judged(&runs[..runs.len() - 1])[2], None);
        assert_eq!(judged(&[]), [None; 3]);
    }
}
