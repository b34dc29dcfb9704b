//! A running guest goes on as several: when the clones run, how long their source stands still, what its writes cost
//! afterwards, and the host's memory. Beside it as many guests that boot, and QEMU alone, which writes a guest to a
//! file and loads it. A small and a large guest: nothing may grow with memory.

/// The ways to more guests, each measured.
mod ways;

/// What the writes of a guest cost after a fork.
mod writer;

use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use super::gang_figures::{TO_FRAMES, measure, mib};
use super::judge::worst;
use super::runner::{Attempt, FAILED, Row, Site, figure, try_all};
use super::{Options, Plan, is, movers, together};
use crate::error::{Error, Result};
use crate::gang;
use crate::guest::Guest;
use crate::lab::{Lab, LabConfig, METER};
use crate::meter::Meter;
use crate::plot::{BarPlot, LinePlot};
use crate::result::{Run, Target, rows, series};
use crate::stats::median;
use crate::trial::Qemu;
use crate::warm;

/// The number of clones that are made at once.
const CLONES: usize = 20;
/// The guests' memory, and what of it they fill, MiB; in a short run the large one fills less.
const SMALL: (u64, u64) = (512, 128);
const LARGE: (u64, u64) = (4096, 3072);
const LARGE_QUICK: (u64, u64) = (4096, 1024);
/// What a guest takes beside what it fills, MiB: its kernel and files, and its QEMU.
const BESIDE: u64 = 256;
/// How much a guest writes after a fork that is to be forked again: a few MiB.
const CHECKED: &str = "checker:--mib,4,--rate,1";
/// The working set of the guest that writes all the time.
const WRITER: &str = "dirtier:--mib,64,--interval-ms,100";
/// The time between two heartbeats: guests at rest take little of the processors.
const BEAT: Duration = Duration::from_millis(10);

/// When the first and the last of the guests ran, milliseconds since the request.
const FIRST_MS: &str = "first_guest_ms";
const LAST_MS: &str = "last_guest_ms";
/// How long the source stood still, milliseconds.
const PAUSE: &str = "pause_ms";
/// Host memory of all guests' RAM ÷ that of one.
const TO_ONE: &str = "memory_to_one_guest";

pub(super) fn plan(options: &Options) -> Result<Plan> {
    let repeats = options.repeat.unwrap_or(if options.quick { 1 } else { 3 });
    let attempts = attempts(options.quick, &together::newest()?);
    let plan = Plan::new(move |record| {
        let hosts = ["a", "b", "c"].map(str::to_owned).into();
        let lab = gang::lab_of_clones(LabConfig { hosts, ..movers::lab_config() }, CLONES)?;
        try_all(&lab, &attempts, repeats, record);
        Ok(())
    });
    Ok(plan.judged(|runs| Ok(targets(runs))).drawn(plot))
}

fn attempts(quick: bool, qemu: &Qemu) -> Vec<More> {
    let times = if quick { 3 } else { 5 };
    let boots = if quick { 6 } else { CLONES };
    let sizes = [SMALL, if quick { LARGE_QUICK } else { LARGE }];
    let more = |way, (memory_mib, filled_mib): (u64, u64)| {
        let moved = way == Way::Gang(CLONES) && (!quick || memory_mib == SMALL.0);
        More { way, memory_mib, filled_mib, times, moved, qemu: qemu.clone() }
    };
    let both = [Way::First, Way::Again, Way::Gang(CLONES), Way::File];
    let each = both.into_iter().flat_map(|way| sizes.map(|size| more(way, size)));
    let once = [Way::Away(CLONES), Way::Writer, Way::Boots(boots)].map(|way| more(way, SMALL));
    each.chain(once).collect()
}

/// The way to more guests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// One clone of a guest that never was forked, whose RAM is a shared file.
    First,
    /// One clone of a guest that was forked before, and has written a few MiB since.
    Again,
    /// So many clones by one command.
    Gang(usize),
    /// So many clones by one command, on two other hosts in turn.
    Away(usize),
    /// So many guests that boot.
    Boots(usize),
    /// One clone by QEMU alone, which writes a file and loads it.
    File,
    /// One clone, which is held, of a guest that writes all the time.
    Writer,
}

impl Way {
    fn label(self) -> String {
        match self {
            Self::First => "sterna fork, first time".into(),
            Self::Again => "sterna fork, again".into(),
            Self::Gang(count) => format!("sterna fork, {count} clones"),
            Self::Away(count) => format!("sterna fork, {count} clones on two other hosts"),
            Self::Boots(count) => format!("{count} boots"),
            Self::File => "qemu alone, through a file".into(),
            Self::Writer => "sterna fork of a writer".into(),
        }
    }

    /// Whether its guests can be cloned by Sterna.
    fn is_fork(self) -> bool {
        !matches!(self, Self::Boots(_) | Self::File)
    }

    /// The number of guests it begins with.
    fn guests(self) -> usize {
        if let Self::Boots(count) = self { count } else { 1 }
    }

    /// The most guests' memory that it takes of the host at the same time.
    fn memories(self) -> u64 {
        match self {
            // Where it moves, two hosts have it.
            Self::First | Self::Again | Self::Writer | Self::Gang(_) => 3,
            Self::Away(_) => 4,
            Self::Boots(count) => count as u64,
            // The guest, the file and the clone.
            Self::File => 3,
        }
    }
}

/// A way to more guests, with guests of one size.
#[derive(Debug, Clone)]
struct More {
    way: Way,
    memory_mib: u64,
    filled_mib: u64,
    /// How often one clone is made in a run.
    times: usize,
    /// Whether the clones move together to another host in the end.
    moved: bool,
    qemu: Qemu,
}

impl More {
    fn jobs(&self) -> String {
        let idle = format!("idle:--mib,{}", self.filled_mib);
        match self.way {
            Way::First | Way::Again | Way::Away(_) => format!("{idle};{CHECKED}"),
            Way::Writer => format!("{idle};{WRITER}"),
            _ => idle,
        }
    }

    fn memory_bytes(&self) -> u64 {
        self.memory_mib << 20
    }

    /// Fails where the host has no room: better no figures than those of a host that has run out of memory.
    fn has_room(&self) -> Result<()> {
        let (needed, there) = (self.way.memories() * (self.filled_mib + BESIDE), mib(warm::available_bytes()?) as u64);
        if needed <= there {
            return Ok(());
        }
        Err(Error::Usage(format!("this row needs {needed} MiB of memory, and the host has {there} MiB to give")))
    }
}

impl Attempt for More {
    fn rows(&self) -> Vec<Row> {
        let (way, workload) = (self.way.label(), format!("{} MiB, {} filled", self.memory_mib, self.filled_mib));
        let words = format!("{way} on QEMU {}, {workload}", self.qemu.label);
        let values = [
            ("mover", json!(way)),
            ("qemu", json!(self.qemu.label)),
            ("workload", json!(workload)),
            ("memory_mib", json!(self.memory_mib)),
            ("jobs", json!(self.jobs())),
            ("times", json!(if matches!(self.way, Way::First | Way::Again | Way::File) { self.times } else { 1 })),
            ("moved", json!(self.moved)),
        ];
        let config = values.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        vec![Row { words, config, baseline: !self.way.is_fork() }]
    }

    fn guests(&self, lab: &Lab, name: &str) -> Vec<Guest> {
        let guest = |number: u8| {
            let mut guest = Guest::new(lab, &format!("{name}n{number}"), number, &self.jobs());
            guest.memory_bytes = self.memory_bytes();
            guest.beat = BEAT;
            guest.typed_at = self.way.is_fork();
            guest
        };
        (10..).take(self.way.guests()).map(guest).collect()
    }

    fn run(&self, site: &Site, runs: &mut [Run]) -> Result<()> {
        self.has_room()?;
        let meter = Meter::start(site.lab.host(METER)?)?;
        let guest = site.guest()?;
        measure(runs, |measured| match self.way {
            Way::First => self.first(site.lab, guest, measured),
            Way::Again => self.again(site.lab, guest, measured),
            Way::Gang(count) => self.gang(site.lab, guest, count, measured),
            Way::Away(count) => self.away(site.lab, guest, count, measured),
            Way::Boots(_) => self.boots(site.lab, site.guests, measured),
            Way::File => self.through_file(site.lab, guest, measured),
            Way::Writer => self.writer(site.lab, guest, &meter, measured),
        })
    }

    fn tell(&self, run: &Run) -> String {
        let [first, last, pause, memory] = [FIRST_MS, LAST_MS, PAUSE, TO_ONE].map(|name| figure(run, name));
        format!("the first ran after {first} ms, the last after {last} ms; paused {pause} ms; memory {memory} × one")
    }
}

fn targets(runs: &[Run]) -> Vec<Target> {
    let of = |name: &str, way: Way, (memory_mib, _): (u64, u64)| {
        let size = |run: &Run| run.config.get("memory_mib").and_then(Value::as_u64) == Some(memory_mib);
        median(&series(runs, name, |run| is(run, &[("mover", &way.label())]) && size(run)))
    };
    let twenty = Way::Gang(CLONES);
    let mut targets = Vec::new();
    for size in [SMALL, LARGE] {
        let mib = size.0;
        let one = worst([Way::First, Way::Again].map(|way| of(FIRST_MS, way, size)));
        targets.push(Target::at_most(
            format!("{mib} MiB: from the request until one clone runs, ms, worse row"),
            100.0,
            one,
        ));
        let all = of(LAST_MS, twenty, size);
        targets.push(Target::at_most(format!("{mib} MiB: until {CLONES} clones run, ms"), 2500.0, all));
        let pause = worst([Way::First, Way::Again, twenty].map(|way| of(PAUSE, way, size)));
        targets.push(Target::at_most(format!("{mib} MiB: source paused, ms, worst row"), 15.0, pause));
        let memory = of(TO_ONE, twenty, size);
        targets.push(Target::at_most(format!("{mib} MiB: host memory of all while idle ÷ of one"), 2.0, memory));
    }
    for (name, way, what) in [
        (FIRST_MS, Way::First, "until the first clone runs"),
        (LAST_MS, twenty, "until all clones run"),
        (PAUSE, Way::First, "pause"),
    ] {
        let ratio = of(name, way, LARGE).zip(of(name, way, SMALL)).map(|(large, small)| large / small);
        targets.push(Target::at_most(format!("{what}: {} MiB ÷ {} MiB", LARGE.0, SMALL.0), 1.1, ratio));
    }
    // A short run moves the small ones only.
    let bytes = [SMALL, LARGE].into_iter().filter_map(|size| of(TO_FRAMES, twenty, size)).reduce(f64::max);
    targets.push(Target::at_most(
        format!("{CLONES} moved as a gang: bytes on the wire ÷ distinct frames"),
        1.05,
        bytes,
    ));
    let away = of(LAST_MS, Way::Away(CLONES), SMALL);
    targets.push(Target::at_most(format!("until {CLONES} clones run on two other hosts, ms"), 1000.0, away));
    targets
}

fn plot(runs: &[Run], directory: &Path) -> Result<()> {
    let name = |run: &Run| {
        let word = |key: &str| run.config.get(key).and_then(Value::as_str).unwrap_or_default();
        format!("{}, {}", word("mover"), word("workload"))
    };
    let mut firsts: Vec<&Run> = Vec::new();
    for run in runs.iter().filter(|run| run.metrics.get(FAILED) == Some(&0.0)) {
        if firsts.iter().all(|first| name(first) != name(run)) {
            firsts.push(run);
        }
    }
    let ran = |run: &&Run| {
        let times = run.details["ran_ms"].as_array()?.iter();
        let seconds: Vec<f64> = times.filter_map(|ms| Some(ms.as_f64()? / 1e3)).collect();
        (seconds.len() > 1).then(|| (name(run), seconds))
    };
    let ran: Vec<(String, Vec<f64>)> = firsts.iter().filter_map(ran).collect();
    let end = ran.iter().flat_map(|(_, seconds)| seconds).copied().fold(0.0, f64::max);
    let line = |(name, seconds): (String, Vec<f64>)| (name, steps(&seconds, end));
    LinePlot {
        title: "more guests: clones of one that runs, beside guests that boot".into(),
        x_label: "seconds since the request".into(),
        y_label: "guests that run".into(),
        lines: ran.into_iter().map(line).collect(),
        spans: Vec::new(),
    }
    .write(directory, "running")?;
    let rows = rows(runs);
    let bar = |row: &crate::result::Row| {
        Some((format!("{}, {}", row.word("mover"), row.word("workload")), row.metrics.get(PAUSE)?.median))
    };
    let bars = rows.iter().filter_map(bar).collect();
    BarPlot { title: "a running guest becomes several".into(), label: "pause of the source, ms".into(), bars }
        .write(directory, PAUSE)?;
    writer::plot(&firsts, directory)
}

/// A line that rises by one at each of these moments, from 0 to the end.
fn steps(seconds: &[f64], end: f64) -> Vec<(f64, f64)> {
    let rise = (0..).zip(seconds).flat_map(|(count, at)| [(*at, f64::from(count)), (*at, f64::from(count) + 1.0)]);
    std::iter::once((0.0, 0.0)).chain(rise).chain([(end, seconds.len() as f64)]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn qemu() -> Qemu {
        Qemu { label: "10.0".into(), path: "/nonexistent".into() }
    }

    fn run(way: Way, (memory_mib, filled_mib): (u64, u64), figures: &[(&str, f64)]) -> Run {
        let more = More { way, memory_mib, filled_mib, times: 1, moved: false, qemu: qemu() };
        let mut run = more.rows().remove(0).run(0);
        run.metrics.extend(figures.iter().map(|(name, value)| ((*name).to_owned(), *value)));
        run
    }

    #[test]
    fn the_worse_row_of_a_size_is_judged_and_what_was_not_measured_is_not_met() {
        let twenty = Way::Gang(CLONES);
        let mut runs = Vec::new();
        for (size, times) in [(SMALL, 1.0), (LARGE, 1.05)] {
            runs.push(run(Way::First, size, &[(FIRST_MS, 80.0 * times), (PAUSE, 8.0 * times)]));
            runs.push(run(Way::Again, size, &[(FIRST_MS, 70.0), (PAUSE, 9.0)]));
            runs.push(run(twenty, size, &[(LAST_MS, 2000.0 * times), (PAUSE, 20.0), (TO_ONE, 1.5)]));
        }
        runs[2].metrics.insert(TO_FRAMES.into(), 1.02);
        let of = |runs: &[Run]| -> Vec<(Option<f64>, bool)> {
            targets(runs).iter().map(|target| (target.measured, target.met)).collect()
        };
        let found = of(&runs);
        assert_eq!(found[..4], [(Some(80.0), true), (Some(2000.0), true), (Some(20.0), false), (Some(1.5), true)]);
        assert_eq!((found[4], found[5]), ((Some(84.0), true), (Some(2100.0), true)));
        assert_eq!(found[8..11], [(Some(1.05), true); 3]);
        assert_eq!(found[11..], [(Some(1.02), true), (None, false)]);
        assert!(of(&[]).iter().all(|target| *target == (None, false)));
        // A row that is not there may be the worst.
        runs.remove(1);
        assert_eq!(of(&runs)[0], (None, false));
    }

    #[test]
    fn guests_that_run_stay_in_the_plot_until_its_end() {
        assert_eq!(steps(&[0.5, 0.7], 9.0), [(0.0, 0.0), (0.5, 0.0), (0.5, 1.0), (0.7, 1.0), (0.7, 2.0), (9.0, 2.0)]);
    }

    #[test]
    fn each_row_is_tried_once_and_only_sternas_are_judged() {
        for quick in [true, false] {
            let rows: Vec<Row> = attempts(quick, &qemu()).iter().flat_map(Attempt::rows).collect();
            let baselines = rows.iter().filter(|row| row.baseline).count();
            assert_eq!((rows.len(), baselines), (11, 3));
            let mut words: Vec<&str> = rows.iter().map(|row| row.words.as_str()).collect();
            words.sort_unstable();
            words.dedup();
            assert_eq!(words.len(), rows.len());
        }
    }
}
