//! The post-copy paper's figure 11: the cost of self-ballooning to a compile in the guest, by its interval, and how
//! soon freed memory is taken.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna_api::Balloon;

use super::runner::{Attempt, Row, Site, done, fail, figure, try_all};
use super::{Options, Plan, lab_name, qemus};
use crate::command::wait_for;
use crate::error::{Error, Result};
use crate::guest::Guest;
use crate::lab::{Lab, LabConfig, METER};
use crate::load::now_us;
use crate::meter::{Line, Meter};
use crate::plot::LinePlot;
use crate::result::{Config, Run, Target};
use crate::stats::median;
use crate::sterna::SternaVm;
use crate::trial::Qemu;

/// How long anything may take, on a machine that has other work too.
const PATIENCE: Duration = Duration::from_secs(120);
/// How many times as long as at first a compile of everything may take, beside a fixed time.
const SLOWER: u32 = 4;
const MORE: Duration = Duration::from_secs(10);
/// How long a guest has had its memory back before it is measured without a balloon.
const RECOVER: Duration = Duration::from_secs(4);
/// The memory that the guest frees at once.
const FREED_BYTES: u64 = 256 << 20;
/// The share of freed memory that counts as all of it: 5 % of the free memory stay with the guest.
const REACHED: f64 = 0.9;
/// The port of the guest's shell.
const SHELL: u16 = 9001;
/// The interval whose cost is judged, milliseconds.
const JUDGED_MS: u64 = 5000;

pub(super) fn plan(options: &Options) -> Result<Plan> {
    // The judged intervals come first in a short run.
    let (intervals_ms, rounds): (&[u64], f64) = if options.quick {
        (&[5000, 10], 4.0)
    } else {
        (&[10, 50, 100, 500, 1000, 2000, 4000, 5000, 7000, 10_000], 12.0)
    };
    let repeats = options.repeat.unwrap_or(if options.quick { 2 } else { 5 });
    let qemu = qemus()?.into_iter().next().ok_or_else(|| Error::Usage("no QEMU".into()))?;
    let plan = Plan::new(move |record| {
        let lab = Lab::up(LabConfig::pair(&lab_name()))?;
        try_all(&lab, &[Intervals { intervals_ms, rounds, qemu }], repeats, record);
        Ok(())
    });
    Ok(plan.judged(|runs| Ok(targets(runs))).drawn(plot))
}

/// One guest: every interval in it.
struct Intervals {
    intervals_ms: &'static [u64],
    /// How often everything is compiled, with and without a balloon.
    rounds: f64,
    qemu: Qemu,
}

impl Attempt for Intervals {
    fn rows(&self) -> Vec<Row> {
        self.intervals_ms.iter().map(|interval_ms| row(*interval_ms, &self.qemu)).collect()
    }

    fn guests(&self, lab: &Lab, name: &str) -> Vec<Guest> {
        let mut guest = Guest::new(lab, name, 10, &format!("builder:--interval-ms,1;nc:-ll,-p,{SHELL},-e,sh"));
        guest.memory_bytes = 1 << 30;
        guest.balloon = crate::guest::Balloon::Idle;
        vec![guest]
    }

    fn run(&self, site: &Site, runs: &mut [Run]) -> Result<()> {
        let compile = Compile::start(site.lab, site.guest()?.clone(), &self.qemu)?;
        compile.costs(self.rounds, site, runs)?;
        compile.shell("killall builder")?;
        compile.reaches(site, runs)
    }

    fn tell(&self, run: &Run) -> String {
        let [slowdown, reach] = ["slowdown", "reach_intervals"].map(|name| figure(run, name));
        format!("{slowdown} slower, freed memory taken in {reach} intervals")
    }
}

/// A guest that compiles, and obeys a shell.
struct Compile {
    vm: SternaVm,
    meter: Meter,
    guest: Guest,
    /// How many units it compiles before it begins again.
    round: f64,
    /// How long that took the first time.
    first: Duration,
}

fn row(interval_ms: u64, qemu: &Qemu) -> Row {
    let workload = "a C compiler, 1 GiB";
    let values = [
        ("interval_ms", json!(interval_ms)),
        ("qemu", json!(qemu.label)),
        ("workload", json!(workload)),
        ("memory_mib", json!(1024)),
        ("seed", json!(1)),
    ];
    let config: Config = values.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    Row { words: format!("every {interval_ms} ms on QEMU {}, {workload}", qemu.label), config, baseline: false }
}

fn interval_ms(run: &Run) -> u64 {
    run.config.get("interval_ms").and_then(Value::as_u64).unwrap_or(0)
}

impl Compile {
    fn start(lab: &Lab, guest: Guest, qemu: &Qemu) -> Result<Self> {
        let meter = Meter::start(lab.host(METER)?)?;
        let vm = SternaVm::start(lab, "a", &guest, &qemu.path)?;
        guest.wait_until_up(PATIENCE)?;
        let told = || {
            let text = guest.console_text();
            let units = text.split("BUILDER ready units=").nth(1).and_then(|rest| rest.lines().next());
            Ok(units.and_then(|units| units.trim().parse::<f64>().ok()))
        };
        let round = wait_for("the compile's first words", PATIENCE, told)?;
        let begin = Instant::now();
        let mut compile = Self { vm, meter, guest, round, first: Duration::ZERO };
        let again = |line: &Line| line.number("total").is_some_and(|total| total > round);
        wait_for("the compile's second round", PATIENCE, || Ok(compile.lines().iter().any(again).then_some(())))?;
        compile.first = begin.elapsed();
        Ok(compile)
    }

    fn lines(&self) -> Vec<Line> {
        let lines = self.meter.lines(self.guest.address(), "BUILDER");
        lines.into_iter().filter(|line| line.number("total").is_some()).collect()
    }

    /// Units compiled per second from now on, until everything was compiled this many times.
    fn rate(&self, rounds: f64) -> Result<f64> {
        let from = now_us();
        wait_for("the compile's rounds", self.first * SLOWER * rounds as u32 + MORE, || {
            std::thread::sleep(Duration::from_millis(100));
            let lines: Vec<Line> = self.lines().into_iter().filter(|line| line.at_us >= from).collect();
            Ok(rate(&lines, self.round * rounds))
        })
    }

    /// Measures the cost of each interval between two measurements without a balloon, so that a drift affects both
    /// sides alike.
    fn costs(&self, rounds: f64, site: &Site, runs: &mut [Run]) -> Result<()> {
        let mut without = self.rate(rounds)?;
        for at in site.order() {
            if !site.is_due(at, &mut runs[at]) {
                continue;
            }
            without = match self.cost(rounds, &mut runs[at], without) {
                Ok(after) => after,
                Err(error) => {
                    fail(&mut runs[at], &error.to_string());
                    // Where even that fails, the guest is gone, and the rest of the rows cannot be measured.
                    self.vm.balloon(&["--off"])?;
                    std::thread::sleep(RECOVER);
                    self.rate(rounds)?
                }
            };
            site.show(runs);
        }
        Ok(())
    }

    /// Measures the cost of one interval. Returns the rate after it.
    fn cost(&self, rounds: f64, run: &mut Run, without: f64) -> Result<f64> {
        let ms = interval_ms(run);
        self.auto(ms)?;
        // The free memory goes first; the time after that is measured.
        std::thread::sleep(Duration::from_millis(2 * ms).max(Duration::from_secs(6)));
        let with = self.rate(rounds)?;
        let seen = self.balloon()?;
        self.vm.balloon(&["--off"])?;
        std::thread::sleep(RECOVER);
        let after = self.rate(rounds)?;
        let off = (without + after) / 2.0;
        let bad = self.lines().last().and_then(|line| line.number("bad")).unwrap_or(0.0);
        let metrics = [
            ("units_per_s_off", off),
            ("units_per_s_on", with),
            ("slowdown", off / with - 1.0),
            ("drift", (after / without - 1.0).abs()),
            ("balloon_mib", (seen.size_bytes >> 20) as f64),
            ("pressures", seen.pressures as f64),
            ("bad_units", bad),
        ];
        run.metrics.extend(metrics.map(|(name, value)| (name.to_owned(), value)));
        Ok(after)
    }

    /// Measures how soon freed memory is taken, at every interval.
    fn reaches(&self, site: &Site, runs: &mut [Run]) -> Result<()> {
        for at in site.order() {
            if !site.is_due(at, &mut runs[at]) {
                continue;
            }
            match self.reach(&mut runs[at]) {
                Ok(()) => done(&mut runs[at]),
                Err(error) => {
                    fail(&mut runs[at], &error.to_string());
                    self.vm.balloon(&["--off"])?;
                    self.shell("rm -f /tmp/freed")?;
                }
            }
            site.show(runs);
        }
        Ok(())
    }

    /// Measures how soon the balloon has memory that is freed while it is at rest.
    fn reach(&self, run: &mut Run) -> Result<()> {
        let ms = interval_ms(run);
        self.shell(&format!("dd if=/dev/zero of=/tmp/freed bs=1M count={}", FREED_BYTES >> 20))?;
        self.auto(ms)?;
        let rests = || {
            let balloon = self.balloon()?;
            Ok((balloon.size_bytes > 0 && balloon.target_bytes == Some(balloon.size_bytes)).then_some(balloon))
        };
        wait_for("a balloon at rest", PATIENCE, rests)?;
        // The balloon may be about to grow a little more.
        std::thread::sleep(Duration::from_millis(2 * ms).max(Duration::from_secs(4)));
        let before = self.balloon()?.size_bytes;
        self.shell("rm /tmp/freed")?;
        let freed = Instant::now();
        let enough = before + (FREED_BYTES as f64 * REACHED) as u64;
        let limit = Duration::from_millis(20 * ms).max(Duration::from_secs(30));
        wait_for("freed memory in the balloon", limit, || {
            std::thread::sleep(Duration::from_millis(100));
            Ok((self.balloon()?.size_bytes >= enough).then_some(()))
        })?;
        let reach_ms = freed.elapsed().as_secs_f64() * 1e3;
        self.vm.balloon(&["--off"])?;
        run.metrics.insert("reach_ms".into(), reach_ms);
        run.metrics.insert("reach_intervals".into(), reach_ms / ms as f64);
        Ok(())
    }

    fn auto(&self, interval_ms: u64) -> Result<()> {
        self.vm.balloon(&["--auto", "--interval", &format!("{interval_ms}ms")])
    }

    fn balloon(&self) -> Result<Balloon> {
        let vm = self.vm.show()?;
        vm.balloon.ok_or_else(|| Error::Form { what: "sterna show --json".into(), reason: "no balloon".into() })
    }

    /// Makes the guest run a command, and waits until it has.
    fn shell(&self, command: &str) -> Result<()> {
        let script = "exec 3<>\"/dev/tcp/$1/$2\"; echo \"$3 >/dev/null 2>&1 && echo done\" >&3; read -r word <&3; [ \"$word\" = done ]";
        let (address, port) = (self.guest.address().to_string(), SHELL.to_string());
        self.vm.host().output("timeout", &["60", "bash", "-c", script, "bash", &address, &port, command]).map(drop)
    }
}

/// Units per second from the first of these lines until this many more are done. Whole rounds are counted, because the
/// sources differ. Each unit has a line.
fn rate(lines: &[Line], units: f64) -> Option<f64> {
    let first = lines.first()?;
    let since = |line: &Line| Some(line.number("total")? - first.number("total")?);
    let last = lines.iter().find(|line| since(line).is_some_and(|done| done >= units))?;
    let seconds = (last.at_us - first.at_us) as f64 / 1e6;
    (seconds > 0.0).then_some(since(last)? / seconds)
}

fn medians(runs: &[Run], metric: &str) -> Vec<(u64, f64)> {
    let mut intervals: Vec<u64> = runs.iter().map(interval_ms).collect();
    intervals.sort_unstable();
    intervals.dedup();
    let of = |ms: u64| {
        let values =
            runs.iter().filter(|run| interval_ms(run) == ms).filter_map(|run| run.metrics.get(metric).copied());
        Some((ms, median(&values.collect::<Vec<_>>())?))
    };
    intervals.into_iter().filter_map(of).collect()
}

fn targets(runs: &[Run]) -> Vec<Target> {
    let at = |metric: &str| medians(runs, metric).into_iter().find(|(ms, _)| *ms == JUDGED_MS).map(|(_, value)| value);
    vec![
        Target::at_most("every 5 s: time of the compile ÷ without a balloon, less one", 0.01, at("slowdown")),
        Target::at_most(
            "every 5 s: intervals until 90 % of freed pages are in the balloon",
            2.0,
            at("reach_intervals"),
        ),
    ]
}

/// Plots as in the paper, over a scale of powers of ten.
fn plot(runs: &[Run], directory: &Path) -> Result<()> {
    let points = medians(runs, "slowdown").into_iter();
    let points = points.map(|(ms, slowdown)| ((ms as f64).log10(), (slowdown * 100.0).max(0.0))).collect();
    let plot = LinePlot {
        title: "what self-ballooning costs a compile".into(),
        x_label: "interval: 1 is 10 ms, 2 is 100 ms, 3 is 1 s, 4 is 10 s".into(),
        y_label: "% slower".into(),
        lines: vec![("compile, 1 GiB".into(), points)],
        spans: Vec::new(),
    };
    plot.write(directory, "slowdown")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(at_us: i64, total: u64) -> Line {
        let text = format!("BUILDER ok units_per_s=1 units=1 bad=0 total={total}");
        Line { from: [10, 0, 0, 1].into(), at_us, text }
    }

    #[test]
    fn a_rate_is_counted_over_so_many_units_as_were_asked_for() {
        let lines = [line(1_000_000, 10), line(2_000_000, 12), line(5_000_000, 30), line(5_100_000, 31)];
        assert_eq!(rate(&lines, 20.0), Some(5.0));
        assert_eq!(rate(&lines, 22.0), None);
        assert_eq!(rate(&[], 1.0), None);
    }

    #[test]
    fn five_seconds_are_judged_by_the_median_and_a_figure_that_is_missing_is_missed() {
        let qemu = Qemu { label: "7.2".into(), path: "/nonexistent".into() };
        let run = |ms: u64, repeat: usize, slowdown: f64| {
            let metrics = std::collections::BTreeMap::from([("slowdown".to_owned(), slowdown)]);
            Run { config: row(ms, &qemu).config, baseline: false, repeat, metrics, details: json!({}) }
        };
        let runs = [run(10, 0, 0.5), run(5000, 0, 0.004), run(5000, 1, 0.02), run(5000, 2, 0.006)];
        let [cost, reach] = targets(&runs).try_into().unwrap();
        assert_eq!((cost.measured, cost.met), (Some(0.006), true));
        assert_eq!((reach.measured, reach.met), (None, false));
    }
}
