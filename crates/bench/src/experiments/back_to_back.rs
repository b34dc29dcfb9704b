//! The post-copy paper's figures 7 and 8: a guest moves back and forth between two hosts with pauses of five seconds
//! while it compiles, or sends. The work that it did from the first request to the end of the last pause would have
//! taken less time without migrations; the difference is what the migrations added.
//!
//! Its speed without migrations is measured just before and just after, in the same guest.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use super::judge::{is_row, metric, ratio, worst};
use super::runner::{Attempt, Row, Site, done, figure, try_all};
use super::{Options, Plan, movers, qemus};
use crate::baseline::{BaselineVm, Method, Ram};
use crate::command::wait_for;
use crate::error::{Error, Result};
use crate::guest::Guest;
use crate::lab::{CLIENT, Lab, METER};
use crate::load::iperf::IperfServer;
use crate::load::now_us;
use crate::meter::{Line, Meter};
use crate::plot::BarPlot;
use crate::result::{Config, Run, Target, rows};
use crate::stats::median;
use crate::sterna::SternaVm;
use crate::trial::{Mover, Qemu};

/// The pause between two migrations, as the paper's.
const PAUSE: Duration = Duration::from_secs(5);
/// How long a guest may take to start, on a machine that has other work too.
const START: Duration = Duration::from_secs(90);
/// How long it works before anything is measured.
const SETTLE: Duration = Duration::from_secs(3);
/// When a migration that does not end is given up, and the series with it.
const LIMIT: Duration = Duration::from_secs(60);
/// The guest's RAM.
const MEMORY_MIB: u64 = 512;

/// The number of units that the guest compiles before it begins again, where its own report of it was lost.
const UNITS: f64 = 13.0;

const PRECOPY: &str = "--mode precopy";
const POSTCOPY: &str = "--mode postcopy";
const ADDED: &str = "added_s_per_migration";

/// What the guest does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Work {
    Compile,
    Send,
}

const WORK: [Work; 2] = [Work::Compile, Work::Send];

impl Work {
    fn name(self) -> &'static str {
        match self {
            Self::Compile => "compile",
            Self::Send => "iperf3",
        }
    }
}

/// The mover of the guest; nobody moves it in one row, which shows how even its work is by itself.
#[derive(Clone)]
enum Who {
    Nobody,
    Mover(Mover),
}

impl Who {
    fn label(&self) -> String {
        match self {
            Self::Nobody => "nobody".into(),
            Self::Mover(mover) => mover.label(),
        }
    }
}

pub(super) fn plan(options: &Options) -> Result<Plan> {
    let repeats = options.repeat.unwrap_or(if options.quick { 1 } else { 3 });
    let newest = qemus()?.pop().ok_or_else(|| Error::Usage("no QEMU".into()))?;
    let series = Series {
        migrations: if options.quick { 4 } else { 20 },
        undisturbed: Duration::from_secs(if options.quick { 6 } else { 20 }),
    };
    let movers = of_all(options.quick, &newest)?;
    let judged = newest.label.clone();
    let attempt = move |work, who: &Who| ToAndFro { work, who: who.clone(), qemu: newest.clone(), series };
    let attempts: Vec<_> =
        WORK.into_iter().flat_map(|work| movers.iter().map(|who| attempt(work, who)).collect::<Vec<_>>()).collect();
    let plan = Plan::new(move |record| {
        let lab = Lab::up(movers::lab_config())?;
        try_all(&lab, &attempts, repeats, record);
        Ok(())
    });
    Ok(plan.judged(move |runs| targets(runs, &judged)).drawn(plot))
}

fn of_all(quick: bool, newest: &Qemu) -> Result<Vec<Who>> {
    let (sterna, methods): (&[&str], &[Method]) = if quick {
        (&[POSTCOPY, PRECOPY], &[Method::Vanilla, Method::PurePostcopyPreempt])
    } else {
        let all = &[Method::Vanilla, Method::PurePostcopy, Method::PurePostcopyPreempt, Method::PostcopyPreempt];
        (&[POSTCOPY, PRECOPY, "--mode hybrid", ""], all)
    };
    let mut movers = if quick { Vec::new() } else { vec![Who::Nobody] };
    for row in sterna {
        movers.push(Who::Mover(movers::sterna(row)?));
    }
    movers.extend(movers::known(newest, methods)?.into_iter().map(Who::Mover));
    Ok(movers)
}

/// How a guest is moved again and again.
#[derive(Debug, Clone, Copy)]
struct Series {
    migrations: u32,
    /// How long it is measured before and after.
    undisturbed: Duration,
}

/// The guest while somebody runs it.
enum Running {
    Sterna(SternaVm),
    Qemu(Box<BaselineVm>),
}

/// The figures of one migration of a series.
struct Moved {
    total_ms: f64,
    downtime_ms: f64,
}

impl Running {
    /// Moves it. A migration that is given up ends the series.
    fn migrate(self, lab: &Lab, to: &str, mover: &Mover) -> Result<(Self, Moved)> {
        let given_up = |vm: &str| Error::Migration {
            vm: vm.into(),
            status: "was given up".into(),
            reason: format!("it had not ended after {} s", LIMIT.as_secs()),
        };
        match (self, mover) {
            (Self::Sterna(mut vm), Mover::Sterna(options)) => {
                let mut options = options.clone();
                options.timeout_ms.get_or_insert(LIMIT.as_secs_f64() * 1e3);
                let report = vm.migrate(lab, to, &options)?;
                if report.status != sterna_api::Status::Completed {
                    return Err(given_up(&report.vm));
                }
                let moved = Moved { total_ms: report.total_ms, downtime_ms: report.downtime_ms };
                Ok((Self::Sterna(vm), moved))
            }
            (Self::Qemu(vm), Mover::Qemu(method, _)) => {
                let (vm, report) = vm.migrate(lab, to, *method, LIMIT)?;
                let pause = report.pause.filter(|_| !report.given_up).ok_or_else(|| given_up("guest"))?;
                Ok((Self::Qemu(Box::new(vm)), Moved { total_ms: report.with_start_ms, downtime_ms: pause.downtime_ms }))
            }
            _ => Err(Error::Usage("a guest can be moved only by the program that runs it".into())),
        }
    }
}

/// One series.
struct ToAndFro {
    work: Work,
    who: Who,
    qemu: Qemu,
    series: Series,
}

impl Attempt for ToAndFro {
    fn rows(&self) -> Vec<Row> {
        let options = match &self.who {
            Who::Nobody => Value::Null,
            Who::Mover(mover) => mover.options(),
        };
        let values = [
            ("mover", json!(self.who.label())),
            ("qemu", json!(self.qemu.label)),
            ("workload", json!(self.work.name())),
            ("migrations", json!(self.series.migrations)),
            ("memory_mib", json!(MEMORY_MIB)),
            ("options", options),
            ("seed", json!(1)),
        ];
        let config: Config = values.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        let words = format!("{} on QEMU {}, {}", self.who.label(), self.qemu.label, self.work.name());
        vec![Row { words, config, baseline: matches!(self.who, Who::Mover(Mover::Qemu(..))) }]
    }

    fn guests(&self, lab: &Lab, name: &str) -> Vec<Guest> {
        let client = lab.host(CLIENT).map(|host| host.address.to_string()).unwrap_or_default();
        let jobs = match self.work {
            // The builder reports a line for each unit of work.
            Work::Compile => "builder:--interval-ms,0".to_owned(),
            Work::Send => format!("iperf3:-c,{client},-t,86400"),
        };
        let mut guest = Guest::new(lab, name, 10, &jobs);
        guest.memory_bytes = MEMORY_MIB << 20;
        vec![guest]
    }

    fn run(&self, site: &Site, runs: &mut [Run]) -> Result<()> {
        for run in runs {
            self.move_to_and_fro(site.lab, site.guest()?, &mut run.metrics)?;
            done(run);
        }
        Ok(())
    }

    fn tell(&self, run: &Run) -> String {
        format!("{} s added by each of {} migrations", figure(run, ADDED), self.series.migrations)
    }
}

impl ToAndFro {
    /// Fills in the metrics as it goes on: a series that breaks off keeps what was measured until then.
    fn move_to_and_fro(&self, lab: &Lab, guest: &Guest, metrics: &mut BTreeMap<String, f64>) -> Result<()> {
        let Self { work, who, qemu, series } = self;
        let meter = Meter::start(lab.host(METER)?)?;
        let server = if *work == Work::Send { Some(IperfServer::start(lab.host(CLIENT)?)?) } else { None };
        let mut vm = match who {
            Who::Nobody | Who::Mover(Mover::Sterna(_)) => {
                Running::Sterna(SternaVm::start(lab, "a", guest, &qemu.path)?)
            }
            Who::Mover(Mover::Qemu(_, ram)) => {
                Running::Qemu(Box::new(BaselineVm::start(lab, "a", guest, &qemu.path, *ram)?))
            }
        };
        guest.wait_until_up(START)?;
        let lines = || meter.lines(guest.address(), "BUILDER");
        let ready = |line: &Line| line.text.starts_with("BUILDER ready").then(|| line.number("units"))?;
        let compiled = || Compiled::of(&lines(), lines().iter().find_map(ready).unwrap_or(UNITS) as usize);
        let progress = |undisturbed: &[(i64, i64)]| match &server {
            Some(server) => {
                let samples = server.samples();
                let sizes = samples
                    .windows(2)
                    .map(|pair| (pair[1].at_us, pair[1].per_s * (pair[1].at_us - pair[0].at_us) as f64 / 1e6));
                Progress::of(sizes.collect::<Vec<_>>())
            }
            None => compiled().progress(undisturbed),
        };
        // The first units are slower, because nothing that they need was used before.
        wait_for("the guest's work", START, || Ok((progress(&[]).0.len() > 15).then_some(())))?;
        let settled = now_us();
        std::thread::sleep(SETTLE);

        let start = now_us();
        std::thread::sleep(series.undisturbed);
        let begin = now_us();
        let mut moved = Vec::new();
        for number in 0..series.migrations {
            if let Who::Mover(mover) = who {
                let (there, took) = vm.migrate(lab, if number % 2 == 0 { "b" } else { "a" }, mover)?;
                vm = there;
                moved.push(took);
                note_moved(metrics, &moved);
            }
            std::thread::sleep(PAUSE);
        }
        let end = now_us();
        std::thread::sleep(series.undisturbed);
        let last = now_us();
        let progress = progress(&[(settled, begin), (end, last)]);
        drop(vm);
        let rates = [(start, begin), (end, last)].map(|(from, to)| progress.rate(from, to));
        let [Some(before), Some(after)] = rates else {
            return Err(Error::Usage("the guest's work stood still".into()));
        };
        let took_s = (end - begin) as f64 / 1e6;
        let done = progress.between(begin, end).ok_or_else(|| Error::Usage("the guest's work stood still".into()))?;
        let added_s = took_s - done / ((before + after) / 2.0);
        metrics.extend([
            ("series_s".to_owned(), took_s),
            ("added_s".to_owned(), added_s),
            (ADDED.to_owned(), added_s / f64::from(series.migrations)),
            ("rate_before".to_owned(), before),
            ("rate_after".to_owned(), after),
            // The added time is known no better than to this share of the series.
            ("drift".to_owned(), (after / before - 1.0).abs()),
        ]);
        Ok(())
    }
}

/// Notes what the migrations of a series took so far.
fn note_moved(metrics: &mut BTreeMap<String, f64>, moved: &[Moved]) {
    let middle = |value: fn(&Moved) -> f64| median(&moved.iter().map(value).collect::<Vec<_>>());
    metrics.insert("migrations_done".into(), moved.len() as f64);
    metrics.extend(middle(|moved| moved.total_ms).map(|ms| ("total_ms".to_owned(), ms)));
    metrics.extend(middle(|moved| moved.downtime_ms).map(|ms| ("downtime_ms".to_owned(), ms)));
}

/// The work of a compile. It keeps how long each unit of a round takes in a guest that is left alone, and how many of
/// these seconds of work were done by when. Units differ, and too few are compiled in the measured time for a count of
/// them to say much.
struct Compiled {
    /// Moments and the numbers of units done by then, both ascending. A line that was lost, perhaps on a full link, is
    /// one moment less.
    done: Vec<(i64, usize)>,
    /// The number of units before it begins again.
    round: usize,
}

impl Compiled {
    fn of(lines: &[Line], round: usize) -> Self {
        let done = lines.iter().filter_map(|line| Some((line.at_us, line.number("total")? as usize)));
        Self { done: done.collect(), round: round.max(1) }
    }

    /// The seconds of each unit of a round, from the units that were compiled within these spans; the others count as
    /// the mean of those.
    fn weights(&self, undisturbed: &[(i64, i64)]) -> Vec<f64> {
        let mut sums = vec![(0.0, 0.0); self.round];
        for pair in self.done.windows(2) {
            let ((from_us, before), (to_us, after)) = (pair[0], pair[1]);
            let inside = undisturbed.iter().any(|(from, to)| (*from..=*to).contains(&from_us) && to_us <= *to);
            if inside && after == before + 1 {
                let (seconds, count) = &mut sums[before % self.round];
                *seconds += (to_us - from_us) as f64 / 1e6;
                *count += 1.0;
            }
        }
        let seen: Vec<f64> = sums.iter().filter(|(_, n)| *n > 0.0).map(|(seconds, n)| seconds / n).collect();
        let other = seen.iter().sum::<f64>() / seen.len().max(1) as f64;
        sums.iter().map(|(seconds, n)| if *n > 0.0 { seconds / n } else { other }).collect()
    }

    fn progress(&self, undisturbed: &[(i64, i64)]) -> Progress {
        let weights = self.weights(undisturbed);
        let mut before = self.done.first().map_or(0, |(_, total)| total.saturating_sub(1));
        let part = |(at_us, total): &(i64, usize)| {
            let part = (before..*total).map(|unit| weights[unit % self.round]).sum();
            before = before.max(*total);
            (*at_us, part)
        };
        Progress::of(self.done.iter().map(part).collect::<Vec<_>>())
    }
}

/// The progress of the work: moments, microseconds since 1970, and sums, both ascending.
struct Progress(Vec<(i64, f64)>);

impl Progress {
    /// The progress made of moments and the work since the moment before.
    fn of(parts: impl IntoIterator<Item = (i64, f64)>) -> Self {
        let mut sum = 0.0;
        let add = |(at_us, part): (i64, f64)| {
            sum += part;
            (at_us, sum)
        };
        Self(parts.into_iter().map(add).collect())
    }

    /// The work done by a moment, as if it were even between two looks.
    fn at(&self, at_us: i64) -> Option<f64> {
        let next = self.0.partition_point(|(at, _)| *at < at_us);
        let (before, after) = (self.0.get(next.checked_sub(1)?)?, self.0.get(next));
        // Work goes on after the last look, but nobody knows how much.
        let after = after.unwrap_or(before);
        let span = (after.0 - before.0).max(1) as f64;
        Some(before.1 + (after.1 - before.1) * ((at_us - before.0) as f64 / span).min(1.0))
    }

    fn between(&self, from_us: i64, to_us: i64) -> Option<f64> {
        Some(self.at(to_us)? - self.at(from_us)?)
    }

    /// The work per second, from the first to the last look within some time.
    fn rate(&self, from_us: i64, to_us: i64) -> Option<f64> {
        let inside: Vec<_> = self.0.iter().filter(|(at, _)| (from_us..=to_us).contains(at)).collect();
        let (first, last) = (inside.first()?, inside.last()?);
        (last.1 > first.1).then(|| (last.1 - first.1) / ((last.0 - first.0) as f64 / 1e6))
    }
}

fn targets(runs: &[Run], qemu: &str) -> Result<Vec<Target>> {
    let target = |name: &str, own: &str, method: Method| {
        let (own, other) = (movers::sterna(own)?, Mover::Qemu(method, Ram::Plain));
        let ratios = WORK.map(|work| {
            let of = |mover| move |run: &Run| is_row(run, work.name(), mover, qemu);
            ratio(runs, metric(ADDED), of(&own), of(&other))
        });
        Ok(Target::at_most(format!("{name}: added time ÷ QEMU's, worst work"), 0.5, worst(ratios)))
    };
    Ok(vec![
        target("post-copy (QEMU's with preempt)", POSTCOPY, Method::PurePostcopyPreempt)?,
        target("pre-copy", PRECOPY, Method::Vanilla)?,
    ])
}

fn plot(runs: &[Run], directory: &Path) -> Result<()> {
    let rows = rows(runs);
    for work in WORK {
        let bars = rows.iter().filter(|row| row.config.get("workload") == Some(&json!(work.name())));
        let bars = bars.filter_map(|row| {
            Some((row.config.get("mover")?.as_str()?.to_owned(), row.metrics.get(ADDED)?.median.max(0.0)))
        });
        BarPlot {
            title: format!("{} in a guest that moves back and forth", work.name()),
            label: "seconds that each migration adds".into(),
            bars: bars.collect(),
        }
        .write(directory, &format!("added_{}", work.name()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;

    #[test]
    fn work_between_two_moments_is_taken_as_even_between_two_looks() {
        let progress = Progress::of((1..=10).map(|second| (second * 1_000_000, 4.0)));
        assert_eq!(progress.between(2_500_000, 4_000_000), Some(6.0));
        assert_eq!(progress.rate(2_500_000, 8_200_000), Some(4.0));
        assert_eq!(progress.at(500_000), None, "before the first look nothing is known");
        assert_eq!(progress.rate(9_100_000, 9_200_000), None);
        assert_eq!(progress.at(20_000_000), Some(40.0));
    }

    #[test]
    fn units_count_by_the_time_they_take_undisturbed_and_lost_lines_count_too() {
        let line = |second: i64, total: u32| Line {
            from: [10, 0, 0, 1].into(),
            at_us: second * 1_000_000,
            text: format!("BUILDER ok units_per_s=1 units=1 kib=1 bad=0 total={total}"),
        };
        // Three units of one, two and four seconds; the line of the eighth unit is lost, and the ninth takes long.
        let ends = [(1, 1), (3, 2), (7, 3), (8, 4), (10, 5), (14, 6), (15, 7), (40, 9), (41, 10)];
        let lines = ends.map(|(second, total)| line(second, total));
        let compiled = Compiled::of(&lines, 3);
        let undisturbed = [(0, 15_000_000)];
        assert_eq!(compiled.weights(&undisturbed), [1.0, 2.0, 4.0]);
        let progress = compiled.progress(&undisturbed);
        assert_eq!(progress.between(7_000_000, 15_000_000), Some(8.0));
        assert_eq!(progress.between(15_000_000, 41_000_000), Some(7.0));
        assert_eq!(Compiled::of(&[], 3).progress(&undisturbed).between(0, 1), None);
    }

    #[test]
    fn each_mode_is_judged_against_qemus_own_at_the_work_that_suffers_most() {
        let row = |work: Work, mover: &Mover, added: f64| sample(work.name(), mover, "10.0", &[(ADDED, added)]);
        let (post, pre) = (movers::sterna(POSTCOPY).unwrap(), movers::sterna(PRECOPY).unwrap());
        let preempt = Mover::Qemu(Method::PurePostcopyPreempt, Ram::Plain);
        let runs = [
            row(Work::Compile, &post, 0.2),
            row(Work::Compile, &preempt, 1.0),
            row(Work::Send, &post, 0.4),
            row(Work::Send, &preempt, 1.0),
            row(Work::Compile, &pre, 0.1),
            row(Work::Compile, &Mover::Qemu(Method::Vanilla, Ram::Plain), 1.0),
        ];
        let targets = targets(&runs, "10.0").unwrap();
        assert_eq!(targets.iter().map(|target| target.measured).collect::<Vec<_>>(), [Some(0.4), None]);
    }
}
