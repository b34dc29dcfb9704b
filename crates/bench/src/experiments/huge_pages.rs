//! Huge pages: the speed of a reader and of a sort over half a GiB at rest, while their guest's writes are watched,
//! after that was cancelled, and where the guest has come; beside QEMU, whose plain RAM the kernel has in huge pages.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::json;
use sterna_api::options::OnTimeout;
use sterna_api::{MigrateOptions, Mode, Report, Status};

use super::judge::{least, worst};
use super::runner::{Attempt, FAILED, Row, Site, done, fail, figure, try_all};
use super::timeline::samples;
use super::{Options, Plan, is, lab_name, qemus};
use crate::baseline::{BaselineVm, Method, Ram};
use crate::command::{PATIENCE, wait_for};
use crate::error::{Error, Result};
use crate::gang::lab_with;
use crate::guest::Guest;
use crate::lab::{Lab, LabConfig, METER};
use crate::load::{mean_between, now_us};
use crate::meter::Meter;
use crate::plot::BarPlot;
use crate::result::{Run, Target, series};
use crate::sterna::SternaVm;
use crate::trial::{LIMIT, Qemu};

/// How long a speed is measured.
const MEASURED: Duration = Duration::from_secs(10);
/// How long what is done at rest has until a speed is measured again: what the target grants.
const GRANTED: Duration = Duration::from_secs(60);
/// So slowly does a migration go that is to be cancelled, bytes per second: its pages last until then.
const SLOW_BYTES_PER_S: u64 = 16 << 20;
const MIB: f64 = (1 << 20) as f64;

const STERNA: &str = "sterna";
const ALONE: &str = "QEMU alone, plain RAM";

/// What the guest does: its jobs, the program that reports, and what of it is its speed.
struct Work {
    name: &'static str,
    jobs: &'static str,
    ready: Option<&'static str>,
    program: &'static str,
    speed: &'static str,
}

const WORKS: [Work; 2] = [
    Work {
        name: "random reads over 512 MiB",
        jobs: "toucher:--mib,512,--access,read,--pattern,random,--bytes,8,--interval-ms,500",
        ready: Some("TOUCHER ready"),
        program: "TOUCHER",
        speed: "touches_per_s",
    },
    Work {
        name: "a sort of 512 MiB",
        jobs: "quicksort:--mib,512,--interval-ms,500",
        ready: None,
        program: "QUICKSORT",
        speed: "visits_per_s",
    },
];

/// When the speed is measured, by the metric's name.
const AT_REST: &str = "speed_at_rest";
const WATCHED: &str = "speed_watched";
const CANCELLED: &str = "speed_after_cancel";
const ARRIVED: &str = "speed_after_arrival";

pub(super) fn plan(options: &Options) -> Result<Plan> {
    let repeats = options.repeat.unwrap_or(if options.quick { 1 } else { 3 });
    let qemu = qemus()?.pop().ok_or_else(|| Error::Usage("no QEMU".into()))?;
    let granted = if options.quick { GRANTED / 3 } else { GRANTED };
    let works: Vec<Both> = WORKS.iter().map(|work| Both { work, qemu: qemu.clone(), granted }).collect();
    let plan = Plan::new(move |record| {
        let lab = lab_with(LabConfig::pair(&lab_name()), 1, "huge_pages = true\n")?;
        try_all(&lab, &works, repeats, record);
        Ok(())
    });
    Ok(plan.judged(|runs| Ok(targets(runs))).drawn(plot))
}

/// One work, in a guest of Sterna's and in one of QEMU's.
struct Both {
    work: &'static Work,
    qemu: Qemu,
    granted: Duration,
}

impl Attempt for Both {
    fn rows(&self) -> Vec<Row> {
        [STERNA, ALONE].map(|mover| self.row(mover)).into()
    }

    fn guests(&self, lab: &Lab, name: &str) -> Vec<Guest> {
        vec![Guest::new(lab, name, 10, self.work.jobs)]
    }

    fn run(&self, site: &Site, runs: &mut [Run]) -> Result<()> {
        for at in site.order() {
            if !site.is_due(at, &mut runs[at]) {
                continue;
            }
            let guest = site.guest()?;
            let measured = match at {
                0 => self.by_sterna(site.lab, guest, &mut runs[at]),
                _ => self.alone(site.lab, guest, &mut runs[at]),
            };
            match measured {
                Ok(()) => done(&mut runs[at]),
                Err(error) => fail(&mut runs[at], &error.to_string()),
            }
            let _ = std::fs::remove_file(&guest.console);
            site.show(runs);
        }
        Ok(())
    }

    fn tell(&self, run: &Run) -> String {
        let [rest, watched, cancelled, arrived] = [AT_REST, WATCHED, CANCELLED, ARRIVED].map(|name| figure(run, name));
        format!("{rest} a second at rest, {watched} watched, {cancelled} after a cancel, {arrived} after it came")
    }
}

/// What its guest reports, as the meter hears it.
struct Ear<'a> {
    meter: Meter,
    guest: &'a Guest,
    work: &'a Work,
}

impl<'a> Ear<'a> {
    fn of(lab: &Lab, guest: &'a Guest, work: &'a Work) -> Result<Self> {
        Ok(Self { meter: Meter::start(lab.host(METER)?)?, guest, work })
    }

    /// Waits until the guest is at its work.
    fn wait(&self) -> Result<()> {
        self.guest.wait_until_up(PATIENCE)?;
        if let Some(ready) = self.work.ready {
            self.guest.wait_until_says(ready, PATIENCE)?;
        }
        let speeds = || Ok((!self.speeds().is_empty()).then_some(()));
        wait_for("the guest's first report", PATIENCE, speeds)
    }

    fn speeds(&self) -> Vec<crate::load::Sample> {
        samples(&self.meter.all_lines(self.guest.address()), self.work.program, self.work.speed)
    }

    /// The mean speed between two moments.
    fn speed(&self, from_us: i64, to_us: i64) -> Option<f64> {
        mean_between(&self.speeds(), from_us, to_us)
    }

    /// Its speed from now on.
    fn measure(&self, run: &mut Run, name: &str) {
        let from = now_us();
        std::thread::sleep(MEASURED);
        run.metrics.extend(self.speed(from, now_us()).map(|speed| (name.to_owned(), speed)));
    }

    /// The longest that one of its reads took between two moments, milliseconds; nothing of a program that does not
    /// say.
    fn longest_ms(&self, from_us: i64, to_us: i64) -> Option<f64> {
        let lines = self.meter.lines(self.guest.address(), self.work.program);
        let inside = lines.iter().filter(|line| (from_us..=to_us).contains(&line.at_us));
        inside.filter_map(|line| line.number("longest_us")).reduce(f64::max).map(|us| us / 1e3)
    }
}

impl Both {
    fn row(&self, mover: &str) -> Row {
        let Self { work, qemu, granted } = self;
        let values = [
            ("mover", json!(mover)),
            ("qemu", json!(qemu.label)),
            ("workload", json!(work.name)),
            ("granted_s", json!(granted.as_secs())),
        ];
        Row {
            words: format!("{mover}, {}", work.name),
            config: values.into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
            baseline: mover == ALONE,
        }
    }

    fn by_sterna(&self, lab: &Lab, guest: &Guest, run: &mut Run) -> Result<()> {
        let ear = Ear::of(lab, guest, self.work)?;
        let mut vm = SternaVm::start(lab, "a", guest, &self.qemu.path)?;
        ear.wait()?;
        std::thread::sleep(self.granted);
        let at_rest = vm.show()?.huge_bytes as f64;
        ear.measure(run, AT_REST);
        let before = now_us();
        let report = self.watched(lab, &mut vm, &ear, run)?;
        let own = ear.longest_ms(before - MEASURED.as_micros() as i64, before);
        let tracking = &report.tracking;
        run.metrics.insert("huge_mib_at_rest".into(), at_rest / MIB);
        run.metrics.insert("huge_mib_at_departure".into(), tracking.huge_bytes as f64 / MIB);
        if tracking.huge_bytes > 0 {
            let per_gib = tracking.map_small_ms / (tracking.huge_bytes as f64 / MIB / 1024.0);
            run.metrics.insert("map_small_ms_per_gib".into(), per_gib);
        }
        run.metrics.extend(own.map(|ms| ("longest_at_rest_ms".into(), ms)));
        std::thread::sleep(self.granted);
        run.metrics.insert("huge_mib_after_cancel".into(), vm.show()?.huge_bytes as f64 / MIB);
        ear.measure(run, CANCELLED);
        let options = MigrateOptions { timeout_ms: Some(LIMIT.as_secs_f64() * 1e3), ..MigrateOptions::default() };
        let report = vm.migrate(lab, "b", &options)?;
        completed(&report)?;
        std::thread::sleep(self.granted);
        run.metrics.insert("huge_mib_after_arrival".into(), vm.show()?.huge_bytes as f64 / MIB);
        ear.measure(run, ARRIVED);
        Ok(())
    }

    /// A migration that is cancelled before its pages have gone: its guest is watched meanwhile.
    fn watched(&self, lab: &Lab, vm: &mut SternaVm, ear: &Ear<'_>, run: &mut Run) -> Result<Report> {
        let options = MigrateOptions {
            mode: Mode::Precopy,
            bandwidth_bytes_per_s: Some(SLOW_BYTES_PER_S),
            timeout_ms: Some((MEASURED + Duration::from_secs(2)).as_secs_f64() * 1e3),
            on_timeout: OnTimeout::Cancel,
            ..MigrateOptions::default()
        };
        let (from, began) = (now_us(), Instant::now());
        let report = vm.migrate(lab, "b", &options)?;
        if report.status != Status::Cancelled {
            let reason = format!("a migration that was to be cancelled ended after {:.0?}", began.elapsed());
            return Err(Error::Usage(reason));
        }
        let to = now_us();
        run.metrics.extend(ear.speed(from + 1_000_000, to).map(|speed| (WATCHED.to_owned(), speed)));
        // Its RAM is mapped page by page within the first second.
        let longest = ear.longest_ms(from, from + 2_000_000);
        run.metrics.extend(longest.map(|ms| ("longest_at_departure_ms".into(), ms)));
        Ok(report)
    }

    fn alone(&self, lab: &Lab, guest: &Guest, run: &mut Run) -> Result<()> {
        let ear = Ear::of(lab, guest, self.work)?;
        let vm = BaselineVm::start(lab, "a", guest, &self.qemu.path, Ram::Plain)?;
        ear.wait()?;
        std::thread::sleep(self.granted);
        ear.measure(run, AT_REST);
        let (_vm, report) = vm.migrate(lab, "b", Method::Vanilla, LIMIT)?;
        if report.given_up {
            return Err(Error::Usage("QEMU did not move its guest in time".into()));
        }
        std::thread::sleep(self.granted);
        ear.measure(run, ARRIVED);
        Ok(())
    }
}

fn completed(report: &Report) -> Result<()> {
    match report.status {
        Status::Completed => Ok(()),
        status => Err(Error::Usage(format!("the guest was not moved: {status:?}"))),
    }
}

/// The median of a figure of one mover and work.
fn of(runs: &[Run], name: &str, mover: &str, work: &Work) -> Option<f64> {
    crate::stats::median(&series(runs, name, |run| {
        is(run, &[("mover", mover), ("workload", work.name)]) && run.metrics.get(FAILED) == Some(&0.0)
    }))
}

fn targets(runs: &[Run]) -> Vec<Target> {
    let mut targets = Vec::new();
    for (name, own, other) in
        [("at rest", AT_REST, AT_REST), ("after a cancel", CANCELLED, AT_REST), ("after it came", ARRIVED, ARRIVED)]
    {
        for work in &WORKS {
            let ratio = of(runs, own, STERNA, work).zip(of(runs, other, ALONE, work)).map(|(own, other)| own / other);
            targets.push(Target::at_least(format!("{}: speed {name} ÷ QEMU's", work.name), 0.98, ratio));
        }
    }
    let each = |name: &str| WORKS.iter().map(|work| of(runs, name, STERNA, work)).collect::<Vec<_>>();
    let cost = worst(each("map_small_ms_per_gib"));
    targets.push(Target::at_most("departure: ms for each GiB that is mapped page by page", 40.0, cost));
    let longest = of(runs, "longest_at_departure_ms", STERNA, &WORKS[0]);
    targets.push(Target::at_most("departure: the longest that one read took, ms", 2.0, longest));
    let came = WORKS.iter().map(|work| {
        let (there, here) =
            (of(runs, "huge_mib_after_arrival", STERNA, work), of(runs, "huge_mib_at_rest", STERNA, work));
        there.zip(here.filter(|here| *here > 0.0)).map(|(there, here)| there / here)
    });
    targets.push(Target::at_least("RAM in huge pages where it came ÷ before", 0.95, least(came)));
    targets
}

fn plot(runs: &[Run], directory: &Path) -> Result<()> {
    for (work, name) in WORKS.iter().zip(["reads", "sort"]) {
        let mut bars = Vec::new();
        for (mover, metrics) in [(STERNA, &[AT_REST, WATCHED, CANCELLED, ARRIVED][..]), (ALONE, &[AT_REST, ARRIVED])] {
            for metric in metrics {
                let words = metric.trim_start_matches("speed_").replace('_', " ");
                bars.extend(of(runs, metric, mover, work).map(|speed| (format!("{mover}, {words}"), speed)));
            }
        }
        if !bars.is_empty() {
            let (title, label) = (work.name.to_owned(), work.speed.replace("_per_s", " a second"));
            BarPlot { title, label, bars }.write(directory, name)?;
        }
    }
    Ok(())
}
