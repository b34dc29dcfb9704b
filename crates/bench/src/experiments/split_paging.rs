//! A program goes through memory of which a part is elsewhere: in a split guest at memory hosts, and in one that swaps
//! to a disk in another host's memory, as people do it today.
//!
//! The guest itself times each access. Of a swapping guest the program alone is limited; a split guest has its share of
//! the program's memory, and a little for everything else in it. While a split guest is measured its memory hosts are
//! asked for single pages without a pager, and its speed is compared with that of an ideal run.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use serde_json::json;
use sterna_guest_programs::histogram::Histogram;
use sterna_guest_programs::writer::{Pattern, Silent, Stores};

use super::curves::Curves;
use super::gang_figures::Measured;
use super::ideal::{Ideal, least_misses, wire_us};
use super::judge::{derive_quotient, least, ratio, worst};
use super::lenders::{self, MIB, PROGRAM};
use super::movers::LINK_BYTES_PER_S;
use super::runner::{Attempt, Row, Site, done, figure, try_all};
use super::timeline::{rate, totals};
use super::together::{self, REST};
use super::{Options, Plan, is};
use crate::bare::Bare;
use crate::baseline::{BaselineVm, MemoryDisk, Ram};
use crate::error::Result;
use crate::guest::{Guest, Swap};
use crate::lab::{Lab, METER};
use crate::load::now_us;
use crate::meter::{Line, Meter};
use crate::result::{Config, Run, Target, rows, series};
use crate::stats::median;
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
/// What a split guest's speed is to be of an ideal run's, where that share is here.
const OF_IDEAL: [(u64, f64); 3] = [(50, 0.85), (25, 0.75), (10, 0.6)];
/// The words of an ideal run whose misses are counted, and those before and after them: so many for each page of the
/// working set. Nine pages of ten are read once in eleven words for each page where there is a hot spot.
const SETTLING: usize = 32;
/// Pages that a swapping guest's kernel moves together: 2 to the power of that.
const CLUSTERS: [u32; 2] = [0, 3];

const WORDS: &str = "words_per_s";
const WAIT_P50: &str = "wait_p50_us";
const WAIT_P99: &str = "wait_p99_us";
const BARE_P50: &str = "bare_p50_us";
const BARE_P99: &str = "bare_p99_us";
/// How long the guest waits for a page, as a multiple of the median of bare requests.
const WAIT_P50_TO_BARE: &str = "wait_p50_to_bare";
const WAIT_P99_TO_BARE: &str = "wait_p99_to_bare";
/// Words of an ideal run whose page is missing, of all.
const IDEAL_MISSES: &str = "ideal_misses_per_word";
/// The speed of an ideal run, and the guest's as a share of it.
const IDEAL: &str = "ideal_words_per_s";
const TO_IDEAL: &str = "speed_per_ideal";

pub(super) fn plan(options: &Options) -> Result<Plan> {
    let repeats = options.repeat.unwrap_or(if options.quick { 1 } else { 5 });
    let attempts = attempts(&together::newest()?, options.quick);
    let plan = Plan::new(move |record| {
        try_all(&lenders::lab()?, &attempts, repeats, record);
        record.derive(|runs| derive(runs));
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

    fn pattern(self) -> Pattern {
        match self {
            Self::Sequential => Pattern::Sequential,
            Self::Random => Pattern::Random,
            Self::HotSpot => Pattern::HotSpot,
        }
    }

    /// The pages that the program reads, from its first word on. They are not recorded: it draws them with a seed of
    /// its own, which is the same in every guest, so the same generator says here what it read.
    fn accesses(self, count: usize) -> Vec<u32> {
        let stores = Stores::new(pages(WORKING_SET_MIB * MIB), self.pattern(), Silent::Stores(0));
        stores.take(count).map(|store| store.page as u32).collect()
    }

    /// Words whose page is missing at best, of all, where that share of the pages has room. The guest is measured in
    /// the middle of a long work, and for a time in which it does not come to all pages. So these are the misses in the
    /// middle of its sequence, where what was there at the beginning has no effect, nor has the end.
    fn least_misses(self, share: u64) -> f64 {
        let words = SETTLING * pages(WORKING_SET_MIB * MIB);
        let misses = least_misses(&self.accesses(3 * words), pages(share_bytes(share)), words..2 * words);
        misses as f64 / words as f64
    }

    /// Words that cannot be asked for before the word before is there, of those that are missing: of what is read in
    /// order it is known what comes.
    fn dependent(self) -> f64 {
        match self {
            Self::Sequential => 0.0,
            Self::Random | Self::HotSpot => 1.0,
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
            return look(&guest, &meter, None, &mut runs[0]);
        }
        let vm = SternaVm::start(lab, "a", guest, &self.qemu.path)?;
        lenders::is_at_work(guest)?;
        let memory = lenders::lenders(lab)?;
        let peers = memory.each_ref().map(|(peer, _)| peer.clone());
        let split = self.place == Place::MemoryHosts;
        let mut bare = split.then(|| Bare::open(lab.host("a")?, &peers)).transpose()?;
        for at in site.order().into_iter().filter(|at| site.is_due(*at, &mut runs[*at])).collect::<Vec<_>>() {
            let share = self.shares[at];
            if split {
                let here = REST_MIB * MIB + share_bytes(share);
                runs[at].details = json!({ "split": vm.split(here, &memory, &[])? });
            }
            look(guest, &meter, bare.as_mut(), &mut runs[at])?;
            if split {
                runs[at].metrics.insert(IDEAL_MISSES.into(), self.work.least_misses(share));
            }
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

/// So many bytes in pages.
fn pages(bytes: u64) -> usize {
    (bytes / 4096) as usize
}

/// Lets the guest settle, and notes what it does then, and beside it bare requests.
fn look(guest: &Guest, meter: &Meter, bare: Option<&mut Bare>, run: &mut Run) -> Result<()> {
    std::thread::sleep(REST);
    let from_us = now_us();
    // The last line of the time tells of what came before it.
    let length = Duration::from_micros((MEASURED_US + 3 * INTERVAL_MS * 1000).unsigned_abs());
    let mut measured = Measured::default();
    match bare {
        Some(bare) => note_quantiles(&bare.ask(length)?, [(BARE_P50, 0.5), (BARE_P99, 0.99)], &mut measured),
        None => std::thread::sleep(length),
    }
    note(&meter.lines(guest.address(), PROGRAM), (from_us, from_us + MEASURED_US), &mut measured);
    for (name, wait) in [(WAIT_P50_TO_BARE, WAIT_P50), (WAIT_P99_TO_BARE, WAIT_P99)] {
        derive_quotient(&mut measured.metrics, name, wait, BARE_P50);
    }
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
    note_quantiles(&waits, [(WAIT_P50, 0.5), (WAIT_P99, 0.99)], measured);
}

/// Notes quantiles of nanoseconds, in microseconds.
fn note_quantiles(of: &Histogram, wanted: [(&str, f64); 2], measured: &mut Measured) {
    for (name, quantile) in wanted {
        if let Some(ns) = of.quantile(quantile) {
            measured.note(name, ns / 1e3);
        }
    }
}

/// Whether this is a run of that row.
fn is_row(run: &Run, work: Work, share: u64, place: Place) -> bool {
    is(run, &[("workload", &workload(work, share)), ("mover", &place.label())])
}

fn words(run: &Run) -> Option<f64> {
    run.metrics.get(WORDS).copied().filter(|words| *words > 0.0)
}

/// Adds what needs two rows of a repetition: how fast an ideal run is, of which the row in which all is here says what
/// a word takes, and how near the guest came. Rows that lack one of the figures for it are left as they are.
fn derive(runs: &mut [Run]) {
    for work in WORKS {
        let whole = runs.iter().filter(|run| is_row(run, work, 100, Place::Here));
        let local_us: BTreeMap<usize, f64> = whole.filter_map(|run| Some((run.repeat, 1e6 / words(run)?))).collect();
        let of_work = |run: &Run| SHARES.iter().any(|share| is_row(run, work, *share, Place::MemoryHosts));
        for run in runs.iter_mut().filter(|run| of_work(run)) {
            let metrics = &mut run.metrics;
            let figures = local_us.get(&run.repeat).zip(metrics.get(IDEAL_MISSES)).zip(metrics.get(BARE_P50));
            let Some(((local_us, misses), bare_us)) = figures else { continue };
            let ideal = Ideal {
                local_us: *local_us,
                misses: *misses,
                dependent: misses * work.dependent(),
                wire_us: wire_us(LINK_BYTES_PER_S),
                bare_us: *bare_us,
            };
            metrics.insert(IDEAL.into(), 1e6 / ideal.us());
            derive_quotient(metrics, TO_IDEAL, WORDS, IDEAL);
        }
    }
}

fn targets(runs: &[Run]) -> Vec<Target> {
    let row = |work, share, place: Place| move |run: &Run| is_row(run, work, share, place);
    let own = |work, share| row(work, share, Place::MemoryHosts);
    let middle = |metric, work, share| median(&series(runs, metric, own(work, share)));
    let mut targets = Vec::new();
    for work in WORKS {
        let against = CLUSTERS.into_iter().flat_map(|cluster| SHARES.map(|share| (cluster, share)));
        let ratios = against
            .map(|(cluster, share)| ratio(runs, words, own(work, share), row(work, share, Place::Disk(cluster))));
        let name = format!("{} reads: words per second ÷ those of a guest that swaps, worst row", work.word());
        targets.push(Target::at_least(name, 2.0, least(ratios)));
    }
    // What is read in order comes many pages at once.
    for work in [Work::Random, Work::HotSpot] {
        for (wait, metric, most) in [("median", WAIT_P50_TO_BARE, 2.0), ("99th percentile", WAIT_P99_TO_BARE, 5.0)] {
            let name =
                format!("{} reads: {wait} of the waits for a page ÷ median of bare requests, worst row", work.word());
            targets.push(Target::at_most(name, most, worst(SHARES.map(|share| middle(metric, work, share)))));
        }
    }
    for (share, aim) in OF_IDEAL {
        let name = format!("{share} % here: words per second ÷ those of an ideal run, worst row");
        targets.push(Target::at_least(name, aim, least(WORKS.map(|work| middle(TO_IDEAL, work, share)))));
    }
    targets
}

fn plot(runs: &[Run], directory: &Path) -> Result<()> {
    let rows = rows(runs);
    for work in WORKS {
        let beginning = format!("{} reads, ", work.word());
        // Where all is here it is so much faster that nothing else could be seen.
        let share = |workload: &str| {
            let share: f64 = workload.strip_prefix(&beginning)?.strip_suffix(" % here")?.parse().ok()?;
            (share < 100.0).then_some(share)
        };
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

    /// A run of each row, with its words per second and, where it is a split guest's, what it is compared with.
    fn sample() -> Vec<Run> {
        let qemu = Qemu { label: "10.0".into(), path: "/nonexistent".into() };
        let run = |attempt: &Paging, row: &Row, share: u64| {
            let mut run = row.run(0);
            let mut note = |name: &str, value: f64| run.metrics.insert(name.into(), value);
            match attempt.place {
                Place::Here => note(WORDS, 1e6),
                Place::Disk(cluster) => note(WORDS, 20.0 + f64::from(cluster)),
                Place::MemoryHosts => {
                    note(IDEAL_MISSES, 0.5);
                    note(BARE_P50, 198.0);
                    note(WAIT_P50_TO_BARE, 1.0 + share as f64 / 100.0);
                    note(WAIT_P99_TO_BARE, 6.0);
                    note(WORDS, 40.0 + share as f64)
                }
            };
            run
        };
        let runs = |attempt: &Paging| -> Vec<Run> {
            attempt.rows().iter().zip(&attempt.shares).map(|(row, share)| run(attempt, row, *share)).collect()
        };
        attempts(&qemu, false).iter().flat_map(runs).collect()
    }

    fn judged(runs: &[Run]) -> Vec<Option<f64>> {
        targets(runs).iter().map(|target| target.measured).collect()
    }

    #[test]
    fn the_worst_row_is_judged_and_none_where_one_is_missing() {
        let runs = sample();
        let (speed, waits) = (50.0 / 23.0, [Some(1.5), Some(6.0)]);
        let against = [[Some(speed); 3].as_slice(), &waits, &waits].concat();
        assert_eq!(judged(&runs), [against.as_slice(), &[None; 3]].concat(), "none is ideal before it is derived");
        assert_eq!(judged(&runs[..runs.len() - 1])[2], None);
        assert_eq!(judged(&[]), [None; 10]);
    }

    #[test]
    fn an_ideal_run_is_derived_where_its_figures_are_there_and_from_the_same_repetition_alone() {
        let mut runs = sample();
        runs.extend(runs.clone().into_iter().map(|run| Run { repeat: 1, ..run }));
        let is_split = |run: &Run, work, repeat| is_row(run, work, 50, Place::MemoryHosts) && run.repeat == repeat;
        // A row of before there were bare requests, and a repetition in which nothing was measured with all of it here.
        for run in &mut runs {
            if is_split(run, Work::Sequential, 0) {
                run.metrics.remove(BARE_P50);
            }
        }
        runs.retain(|run| !(is_row(run, Work::HotSpot, 100, Place::Here) && run.repeat == 1));
        derive(&mut runs);
        let of = |work, repeat, metric: &str| {
            runs.iter().find(|run| is_split(run, work, repeat)).and_then(|run| run.metrics.get(metric)).copied()
        };
        assert_eq!(of(Work::Random, 0, IDEAL), Some(1e6 / 100.0));
        assert_eq!(of(Work::Random, 0, TO_IDEAL), Some(90.0 / 1e4));
        assert_eq!(of(Work::Sequential, 0, IDEAL), None);
        assert_eq!((of(Work::HotSpot, 0, TO_IDEAL), of(Work::HotSpot, 1, TO_IDEAL)), (Some(90.0 / 1e4), None));
        // What comes in order is limited by the link alone.
        let us = 1e6 / of(Work::Sequential, 1, IDEAL).unwrap();
        assert!((us - 1.0 - wire_us(LINK_BYTES_PER_S) / 2.0).abs() < 1e-9, "{us}");
        assert!(runs.iter().filter(|run| run.baseline).all(|run| !run.metrics.contains_key(IDEAL)));
    }

    #[test]
    fn a_program_is_known_by_the_pages_that_it_reads() {
        let count = pages(WORKING_SET_MIB * MIB);
        assert_eq!(Work::Sequential.accesses(3), [1, 2, 3]);
        assert!(Work::Random.accesses(count).iter().all(|page| (*page as usize) < count));
        assert_eq!(Work::HotSpot.accesses(1000), Work::HotSpot.accesses(1000));
        // Of pages in a circle those without room are missing, of pages at random fewer: it is known which come soon.
        for (work, share, expected) in
            [(Work::Sequential, 25, 0.75), (Work::Random, 50, 0.187), (Work::HotSpot, 25, 0.0434)]
        {
            let least = work.least_misses(share);
            assert!((least / expected - 1.0).abs() < 0.01, "{work:?}: {least}");
        }
    }
}
