//! A program goes through memory of which a part is elsewhere: in a split guest at memory hosts, and in one that swaps
//! to a disk in another host's memory, as people do it today.
//!
//! The guest itself times each access. Of a swapping guest the program alone is limited; a split guest has its share of
//! the program's memory, and a little for everything else in it. While a split guest is measured its memory hosts are
//! asked for single pages without a pager, and its speed is compared with that of an ideal run.

mod look;
mod work;

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::json;
use sterna_guest_programs::writer::Pattern;

use self::look::Scene;
use self::work::{READS, Work};
use super::curves::Curves;
use super::gang_figures::Measured;
use super::ideal::{Ideal, wire_us};
use super::judge::{derive_quotient, least, ratio, worst};
use super::lenders::{self, MIB};
use super::movers::LINK_BYTES_PER_S;
use super::runner::{Attempt, Row, Site, done, figure, try_all};
use super::together;
use super::{Options, Plan, is};
use crate::bare::Bare;
use crate::baseline::{BaselineVm, MemoryDisk, Ram};
use crate::error::Result;
use crate::guest::{Guest, Swap};
use crate::lab::{Lab, METER};
use crate::meter::Meter;
use crate::result::{Config, Run, Target, rows, series};
use crate::stats::median;
use crate::sterna::SternaVm;
use crate::trial::Qemu;

/// The guest's memory, MiB.
const MEMORY_MIB: u64 = 512;
/// What a split guest has here for everything but its program, MiB.
const REST_MIB: u64 = 48;
/// What a guest has to swap to, MiB.
const DISK_MIB: u64 = 512;
/// The shares of the working set that may be here, percent.
const SHARES: [u64; 3] = [50, 25, 10];
/// What a split guest's speed is to be of an ideal run's, where that share is here.
const OF_IDEAL: [(u64, f64); 3] = [(50, 0.85), (25, 0.75), (10, 0.6)];

const WORDS: &str = "words_per_s";
const REQUESTS: &str = "requests_per_s";
const SORTS: &str = "sorts_per_min";
/// The longest that a client waited for an answer.
const LONGEST: &str = "longest_request_ms";
/// Its speed, whatever it does, as a share of a guest's of which all is here.
const TO_WHOLE: &str = "speed_per_whole";
const WAIT_P50: &str = "wait_p50_us";
const WAIT_P99: &str = "wait_p99_us";
const BARE_P50: &str = "bare_p50_us";
const BARE_P99: &str = "bare_p99_us";
/// How long the guest waits for a page, as a multiple of the median of bare requests.
const WAIT_P50_TO_BARE: &str = "wait_p50_to_bare";
const WAIT_P99_TO_BARE: &str = "wait_p99_to_bare";
/// Pages that come and that leave.
const IN: &str = "in_pages_per_s";
const OUT: &str = "out_pages_per_s";
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

/// Where the rest of its memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// There is none: all is here.
    Here,
    /// Likewise, and in no huge page.
    Small,
    /// At two memory hosts.
    MemoryHosts,
    /// On a disk in another host's memory; so many pages go together.
    Disk(u32),
}

impl Place {
    fn label(self) -> String {
        match self {
            Self::Here => "all of it here".into(),
            Self::Small => "all of it here, in small pages".into(),
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
    for work in Work::all() {
        let mut add = |place, shares: &[u64]| {
            attempts.push(Paging { work, place, shares: shares.to_vec(), qemu: qemu.clone() });
        };
        add(Place::Here, &[100]);
        add(Place::Small, &[100]);
        add(Place::MemoryHosts, shares);
        // What a guest may have of its memory is said when it boots.
        for cluster in work.clusters() {
            shares.iter().for_each(|share| add(Place::Disk(*cluster), &[*share]));
        }
    }
    attempts
}

fn workload(work: Work, share: u64) -> String {
    format!("{}, {share} % here", work.name())
}

impl Attempt for Paging {
    fn rows(&self) -> Vec<Row> {
        let row = |share: &u64| {
            let workload = workload(self.work, *share);
            let values = [
                ("mover", json!(self.place.label())),
                ("qemu", json!(self.qemu.label)),
                ("workload", json!(workload)),
                ("jobs", json!(self.work.jobs())),
                ("here_percent", json!(share)),
            ];
            let config: Config = values.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
            let words = format!("{}, {workload}", self.place.label());
            Row { words, config, baseline: self.place != Place::MemoryHosts }
        };
        self.shares.iter().map(row).collect()
    }

    fn guests(&self, lab: &Lab, name: &str) -> Vec<Guest> {
        let guest = Guest::new(lab, name, 10, &self.work.jobs());
        vec![Guest { memory_bytes: MEMORY_MIB * MIB, cpus: self.work.cpus(), ..guest }]
    }

    fn run(&self, site: &Site, runs: &mut [Run]) -> Result<()> {
        let meter = Meter::start(site.lab.host(METER)?)?;
        let scene = Scene { lab: site.lab, guest: site.guest()?, meter: &meter, work: self.work };
        match self.place {
            Place::Disk(page_cluster) => self.swapping(page_cluster, &scene, &mut runs[0]),
            Place::Here | Place::Small | Place::MemoryHosts => self.by_sterna(site, &scene, runs),
        }
    }

    fn tell(&self, run: &Run) -> String {
        let speed = format!("{} {}", self.work.metric(), figure(run, self.work.metric()));
        let [p50, p99] = [WAIT_P50, WAIT_P99].map(|name| figure(run, name));
        format!("{speed}; it waits for a page for {p50} µs, and {p99} µs in one of a hundred")
    }
}

impl Paging {
    fn by_sterna(&self, site: &Site, scene: &Scene, runs: &mut [Run]) -> Result<()> {
        let lab = site.lab;
        let options: &[&str] = if self.place == Place::Small { &["--huge-pages", "off"] } else { &[] };
        let vm = SternaVm::start_with(lab, "a", scene.guest, &self.qemu.path, options)?;
        scene.begin()?;
        let memory = lenders::lenders(lab)?;
        let peers = memory.each_ref().map(|(peer, _)| peer.clone());
        let split = self.place == Place::MemoryHosts;
        let mut bare = split.then(|| Bare::open(lab.host("a")?, &peers)).transpose()?;
        for at in site.order().into_iter().filter(|at| site.is_due(*at, &mut runs[*at])).collect::<Vec<_>>() {
            let mut measured = Measured::default();
            if split {
                let here = REST_MIB * MIB + self.work.share_bytes(self.shares[at]);
                measured.details = json!({ "split": vm.split(here, &memory, &[])? });
                measured.metrics.extend(self.work.least_misses(self.shares[at]).map(|of| (IDEAL_MISSES.into(), of)));
            }
            scene.look(bare.as_mut().map(|bare| (&vm, bare)), &mut measured)?;
            measured.note("huge_mib", vm.show()?.huge_bytes as f64 / MIB as f64);
            measured.put_into(&mut runs[at]);
            done(&mut runs[at]);
        }
        Ok(())
    }

    fn swapping(&self, page_cluster: u32, scene: &Scene, run: &mut Run) -> Result<()> {
        let disk = MemoryDisk::start(scene.lab.host("b")?, DISK_MIB * MIB)?;
        let limit_bytes = self.work.share_bytes(self.shares[0]);
        let swap = Some(Swap { file: disk.argument(), page_cluster, limit_bytes });
        let guest = Guest { swap, ..scene.guest.clone() };
        let _vm = BaselineVm::start(scene.lab, "a", &guest, &self.qemu.path, Ram::Plain)?;
        scene.begin()?;
        let mut measured = Measured::default();
        scene.look(None, &mut measured)?;
        measured.put_into(run);
        done(run);
        Ok(())
    }
}

/// Whether this is a run of that row.
fn is_row(run: &Run, work: Work, share: u64, place: Place) -> bool {
    is_of(run, work, share) && is(run, &[("mover", &place.label())])
}

/// Whether this is a run of that workload, wherever the memory is.
fn is_of(run: &Run, work: Work, share: u64) -> bool {
    is(run, &[("workload", &workload(work, share))])
}

/// How fast the guest of this run is at that.
fn speed(work: Work) -> impl Fn(&Run) -> Option<f64> + Copy {
    move |run| run.metrics.get(work.metric()).copied().filter(|speed| *speed > 0.0)
}

/// Adds what needs two rows of a repetition: the speed beside that of a guest of which all is here, and that of an
/// ideal run, of which that guest says what a word takes, and how near this one came. Rows that lack one of the figures
/// for it are left as they are.
fn derive(runs: &mut [Run]) {
    for work in Work::all() {
        let whole = runs.iter().filter(|run| is_row(run, work, 100, Place::Here));
        let whole: BTreeMap<usize, f64> = whole.filter_map(|run| Some((run.repeat, speed(work)(run)?))).collect();
        let of_work = |run: &Run| std::iter::once(&100).chain(&SHARES).any(|share| is_of(run, work, *share));
        for run in runs.iter_mut().filter(|run| of_work(run)) {
            let Some((whole, own)) = whole.get(&run.repeat).zip(speed(work)(run)) else { continue };
            let metrics = &mut run.metrics;
            metrics.insert(TO_WHOLE.into(), own / whole);
            let Some((misses, bare_us)) = metrics.get(IDEAL_MISSES).zip(metrics.get(BARE_P50)) else { continue };
            let ideal = Ideal {
                local_us: 1e6 / whole,
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
    for work in Work::all() {
        let against = work.clusters().iter().flat_map(|cluster| SHARES.map(|share| (*cluster, share)));
        let ratios = against
            .map(|(cluster, share)| ratio(runs, speed(work), own(work, share), row(work, share, Place::Disk(cluster))));
        let name = format!("{}: speed ÷ that of a guest that swaps, worst row", work.name());
        targets.push(Target::at_least(name, 2.0, least(ratios)));
    }
    // What is read in order comes many pages at once.
    let waiting = Work::all().filter(|work| matches!(work, Work::Reads(Pattern::Random | Pattern::HotSpot, _)));
    for work in waiting {
        for (wait, metric, most) in [("median", WAIT_P50_TO_BARE, 2.0), ("99th percentile", WAIT_P99_TO_BARE, 5.0)] {
            let name = format!("{}: {wait} of the waits for a page ÷ median of bare requests, worst row", work.name());
            targets.push(Target::at_most(name, most, worst(SHARES.map(|share| middle(metric, work, share)))));
        }
    }
    for (reads, by) in READS.into_iter().zip(["", ", two threads"]) {
        for (share, aim) in OF_IDEAL {
            let name = format!("{share} % here{by}: words per second ÷ those of an ideal run, worst row");
            targets.push(Target::at_least(name, aim, least(reads.map(|work| middle(TO_IDEAL, work, share)))));
        }
    }
    for cpus in [1, 2] {
        let work = Work::Cache(cpus);
        let name = format!("{}, 50 % here: speed ÷ that of a guest of which all is here", work.name());
        targets.push(Target::at_least(name, 0.9, middle(TO_WHOLE, work, 50)));
    }
    targets
}

fn plot(runs: &[Run], directory: &Path) -> Result<()> {
    let rows = rows(runs);
    for work in Work::all() {
        let beginning = format!("{}, ", work.name());
        // Where all is here it is so much faster that nothing else could be seen.
        let share = |workload: &str| {
            let share: f64 = workload.strip_prefix(&beginning)?.strip_suffix(" % here")?.parse().ok()?;
            (share < 100.0).then_some(share)
        };
        let (title, x_label, y_label) = (work.name(), "percent of its memory here", work.unit());
        Curves { title, x_label, y_label, metric: work.metric(), x: &share }.write(&rows, directory, &work.file())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A run of each row, with its speed and, where it is a split guest's, what it is compared with.
    fn sample() -> Vec<Run> {
        let qemu = Qemu { label: "10.0".into(), path: "/nonexistent".into() };
        let run = |attempt: &Paging, row: &Row, share: u64| {
            let mut run = row.run(0);
            let is_read = matches!(attempt.work, Work::Reads(..));
            let mut note = |name: &str, value: f64| run.metrics.insert(name.into(), value);
            let speed = match attempt.place {
                Place::Here | Place::Small => 1e6,
                Place::Disk(cluster) => 20.0 + f64::from(cluster),
                Place::MemoryHosts => 40.0 + share as f64,
            };
            note(attempt.work.metric(), speed);
            if is_read && attempt.place == Place::MemoryHosts {
                note(IDEAL_MISSES, 0.5);
                note(BARE_P50, 198.0);
                note(WAIT_P50_TO_BARE, 1.0 + share as f64 / 100.0);
                note(WAIT_P99_TO_BARE, 6.0);
            }
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
        let against = [[Some(speed); 9].as_slice(), &waits.repeat(4)].concat();
        let undone = [None; 8];
        assert_eq!(judged(&runs), [against.as_slice(), &undone].concat(), "what is not derived is not known");
        assert_eq!(judged(&runs[..runs.len() - 1])[8], None);
        assert_eq!(judged(&[]), [None; 25]);
    }

    #[test]
    fn an_ideal_run_is_derived_where_its_figures_are_there_and_from_the_same_repetition_alone() {
        let [[sequential, random, hot_spot], [_, by_two, _]] = READS;
        let mut runs = sample();
        runs.extend(runs.clone().into_iter().map(|run| Run { repeat: 1, ..run }));
        let is_split = |run: &Run, work, repeat| is_row(run, work, 50, Place::MemoryHosts) && run.repeat == repeat;
        // A row of before there were bare requests, and a repetition in which nothing was measured with all of it here.
        for run in &mut runs {
            if is_split(run, sequential, 0) {
                run.metrics.remove(BARE_P50);
            }
        }
        runs.retain(|run| !(is_row(run, hot_spot, 100, Place::Here) && run.repeat == 1));
        derive(&mut runs);
        let of = |work, repeat, metric: &str| {
            runs.iter().find(|run| is_split(run, work, repeat)).and_then(|run| run.metrics.get(metric)).copied()
        };
        assert_eq!(of(random, 0, IDEAL), Some(1e6 / 100.0));
        assert_eq!(of(by_two, 0, IDEAL), Some(1e6 / 50.5), "two threads wait beside each other");
        assert_eq!(of(random, 0, TO_IDEAL), Some(90.0 / 1e4));
        assert_eq!((of(sequential, 0, IDEAL), of(sequential, 0, TO_WHOLE)), (None, Some(90.0 / 1e6)));
        assert_eq!((of(hot_spot, 0, TO_IDEAL), of(hot_spot, 1, TO_IDEAL)), (Some(90.0 / 1e4), None));
        assert_eq!((of(Work::Sort, 0, TO_WHOLE), of(Work::Sort, 0, IDEAL)), (Some(90.0 / 1e6), None));
        // What comes in order is limited by the link alone.
        let us = 1e6 / of(sequential, 1, IDEAL).unwrap();
        assert!((us - 1.0 - wire_us(LINK_BYTES_PER_S) / 2.0).abs() < 1e-9, "{us}");
        assert!(runs.iter().filter(|run| run.baseline).all(|run| !run.metrics.contains_key(IDEAL)));
    }
}
