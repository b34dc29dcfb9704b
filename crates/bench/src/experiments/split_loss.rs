//! A part of a guest's memory is at memory hosts, and one of them goes at the busiest moment: it is killed, or says
//! nothing any more. With each page at two (`copies=2`), or with parity, the guest is to go on; without, it stands
//! until that host is back, and says so.

use std::path::Path;
use std::process::Child;
use std::time::Duration;

use serde_json::{Value, json};
use sterna_api::split::Split;

use super::gang_figures::{Measured, measure};
use super::lenders::{self, MIB, PROGRAM};
use super::runner::{Attempt, Row, Site, figure, try_all};
use super::timeline::{rate, totals};
use super::together::{self, REST};
use super::{Options, Plan, is};
use crate::command::{PATIENCE, output, wait_for};
use crate::error::Result;
use crate::guest::Guest;
use crate::lab::{Host, Lab, METER};
use crate::load::now_us;
use crate::meter::{Line, Meter};
use crate::plot::LinePlot;
use crate::result::{Run, Target, series};
use crate::stats::median;
use crate::sterna::SternaVm;
use crate::trial::Qemu;

/// The guest's memory, and what of it may be here, MiB.
const MEMORY_MIB: u64 = 512;
const HERE_MIB: u64 = 192;
/// What each memory host lends, MiB.
const LENT_MIB: u64 = 400;
/// How long its work is measured before, and without, the memory host.
const BEFORE_US: i64 = 5_000_000;
const WITHOUT_US: i64 = 10_000_000;
/// How long it has afterwards to be at work again.
const AFTER_US: i64 = 5_000_000;

/// Work that was not done, in seconds of what was done before.
const LOST: &str = "lost_work_s";
/// The longest access while the memory host was away, milliseconds.
const LONGEST: &str = "longest_access_ms";
/// Words per second before, and in the last second without the memory host.
const FULL: &str = "words_per_s_before";
const WITHOUT: &str = "words_per_s_without";
/// How long it took until each page could be had without any one memory host again, seconds.
const MENDED: &str = "mended_s";
/// Whether the guest stood and its daemon said for whom: 1 or 0.
const STANDS: &str = "stands_and_says_so";

pub(super) fn plan(options: &Options) -> Result<Plan> {
    let repeats = options.repeat.unwrap_or(if options.quick { 1 } else { 5 });
    let attempts = attempts(&together::newest()?);
    let plan = Plan::new(move |record| {
        try_all(&lenders::lab_to_move_in(1, LENT_MIB)?, &attempts, repeats, record);
        Ok(())
    });
    Ok(plan.judged(|runs| Ok(targets(runs))).drawn(plot))
}

fn attempts(qemu: &Qemu) -> Vec<Loss> {
    let redundant = [COPIES, PARITY].into_iter().flat_map(|each| [(each, Access::Read), (each, Access::Write)]);
    let each = redundant.chain([(NONE, Access::Read)]);
    let each = each.flat_map(|(redundancy, access)| [End::Killed, End::Silent].map(|end| (redundancy, access, end)));
    each.map(|(redundancy, access, end)| Loss { redundancy, access, end, qemu: qemu.clone() }).collect()
}

/// What the guest does with words of 192 MiB at random, of which it finds about half here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Access {
    Read,
    Write,
}

impl Access {
    fn word(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
        }
    }

    /// It checks what it writes in 16 MiB more.
    fn jobs(self) -> String {
        let toucher =
            format!("toucher:--mib,192,--access,{},--pattern,random,--bytes,8,--interval-ms,100", self.word());
        format!("checker:--mib,16,--rate,4;{toucher}")
    }
}

/// How the memory host ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// Its daemon is killed: whoever asks it is refused at once.
    Killed,
    /// Its link goes, as when a host loses power: nobody answers.
    Silent,
}

impl End {
    fn label(self) -> &'static str {
        match self {
            Self::Killed => "its daemon is killed",
            Self::Silent => "it says nothing",
        }
    }
}

/// The loss of a memory host.
#[derive(Debug, Clone)]
struct Loss {
    redundancy: &'static str,
    access: Access,
    end: End,
    qemu: Qemu,
}

/// The name of a row's workload.
fn workload(access: Access, end: End) -> String {
    match access {
        Access::Read => end.label().into(),
        Access::Write => format!("{}, the guest writes", end.label()),
    }
}

/// At how many memory hosts each page is, as `--redundancy` has it.
const NONE: &str = "none";
const COPIES: &str = "copies=2";
const PARITY: &str = "parity";

impl Attempt for Loss {
    fn rows(&self) -> Vec<Row> {
        let (redundancy, workload) = (self.redundancy, workload(self.access, self.end));
        let values = [
            ("mover", json!(format!("sterna split, {redundancy}"))),
            ("qemu", json!(self.qemu.label)),
            ("workload", json!(workload)),
            ("jobs", json!(self.access.jobs())),
            ("here_mib", json!(HERE_MIB)),
        ];
        let config = values.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        vec![Row { words: format!("{redundancy}, {workload}"), config, baseline: false }]
    }

    fn guests(&self, lab: &Lab, name: &str) -> Vec<Guest> {
        vec![Guest { memory_bytes: MEMORY_MIB * MIB, ..Guest::new(lab, name, 10, &self.access.jobs()) }]
    }

    fn run(&self, site: &Site, runs: &mut [Run]) -> Result<()> {
        let meter = Meter::start(site.lab.host(METER)?)?;
        let guest = site.guest()?;
        measure(runs, |measured| self.lose(site.lab, guest, &meter, measured))
    }

    fn tell(&self, run: &Run) -> String {
        let [lost, longest, full, without] = [LOST, LONGEST, FULL, WITHOUT].map(|name| figure(run, name));
        format!("{lost} s of work lost, the longest access {longest} ms; {full} a second before, {without} without")
    }
}

impl Loss {
    fn lose(&self, lab: &Lab, guest: &Guest, meter: &Meter, measured: &mut Measured) -> Result<()> {
        let vm = SternaVm::start(lab, "a", guest, &self.qemu.path)?;
        lenders::is_at_work(guest)?;
        let lost = lab.host("b")?;
        let words = ["--redundancy", self.redundancy];
        let mut lending = lenders::lending(lab, LENT_MIB)?.to_vec();
        if self.redundancy == PARITY {
            lending.push((lab.host("d")?.listen(), LENT_MIB * MIB));
        }
        let report = vm.split(HERE_MIB * MIB, &lending, &words)?;
        let before_us = now_us() + REST.as_micros() as i64;
        std::thread::sleep(REST + Duration::from_micros(BEFORE_US.unsigned_abs()));

        let gone = Gone::begin(lost, self.end)?;
        let gone_us = now_us();
        std::thread::sleep(Duration::from_micros(WITHOUT_US.unsigned_abs()));
        let back_us = now_us();
        let split = vm.show()?.split;
        let _daemon = gone.comes_back()?;
        if self.redundancy != NONE {
            wait_for("each page to be had without any one memory host", PATIENCE, || {
                let is_whole = |split: &Split| split.alone_pages == 0 && split.silent.is_empty();
                Ok(vm.show()?.split.is_none_or(|split| is_whole(&split)).then_some(()))
            })?;
            measured.note(MENDED, (now_us() - back_us) as f64 / 1e6);
        }
        std::thread::sleep(Duration::from_micros(AFTER_US.unsigned_abs()));
        // What it has written and reads again is as it was.
        guest.wait_until_well(PATIENCE)?;

        measured.details = json!({ "split": report, "without": split });
        let lines = meter.lines(guest.address(), PROGRAM);
        note(&lines, (before_us, gone_us, back_us), split.as_ref(), &lost.listen(), measured);
        Ok(())
    }
}

/// A memory host that is away.
struct Gone<'a> {
    host: &'a Host,
    silent: bool,
}

impl<'a> Gone<'a> {
    fn begin(host: &'a Host, end: End) -> Result<Self> {
        let gone = Self { host, silent: end == End::Silent };
        if gone.silent {
            gone.link("down")?;
        } else {
            host.group.processes().iter().for_each(crate::process::ProcessId::kill);
        }
        Ok(gone)
    }

    fn link(&self, state: &str) -> Result<()> {
        output(self.host.command("ip").args(["link", "set", "up0", state])).map(drop)
    }

    /// It is as it was; its daemon, where that was killed.
    fn comes_back(&self) -> Result<Option<Child>> {
        if self.silent { self.link("up").map(|()| None) } else { self.host.start_daemon(None).map(Some) }
    }
}

/// Notes what the guest has done; the moments are the beginning, the loss and the return.
fn note(
    lines: &[Line],
    (before_us, gone_us, back_us): (i64, i64, i64),
    split: Option<&Split>,
    lost: &str,
    measured: &mut Measured,
) {
    let totals = totals(lines);
    let rate = |from_us: i64, to_us: i64| rate(&totals, from_us, to_us);
    let Some(full) = rate(before_us, gone_us).filter(|full| *full > 0.0) else { return };
    measured.note(FULL, full);
    let stands = split.is_some_and(|split| split.waiting.iter().any(|waiting| waiting.peer == lost));
    measured.note(STANDS, f64::from(u8::from(stands)));
    let seconds = (back_us - gone_us) as f64 / 1e6;
    if let Some(kept) = rate(gone_us, back_us) {
        measured.note(LOST, seconds * (1.0 - kept / full).max(0.0));
    }
    if let Some(without) = rate(back_us - 1_000_000, back_us) {
        measured.note(WITHOUT, without);
    }
    // A line tells of the time since the one before.
    let meanwhile = lines.iter().filter(|line| line.at_us > gone_us).take_while(|line| line.at_us < back_us + AFTER_US);
    if let Some(longest) = meanwhile.filter_map(|line| line.number("longest_us")).reduce(f64::max) {
        measured.note(LONGEST, longest / 1e3);
    }
    let points = totals.windows(2).filter(|pair| pair[1].0 > pair[0].0).map(|pair| {
        let per_s = (pair[1].1 - pair[0].1) / ((pair[1].0 - pair[0].0) as f64 / 1e6);
        ((pair[1].0 - gone_us) as f64 / 1e6, per_s)
    });
    measured.details["points"] = json!(points.filter(|(at, _)| *at > -5.0).collect::<Vec<_>>());
}

fn targets(runs: &[Run]) -> Vec<Target> {
    let of = |name: &str, redundancy: &str, workload: &str| {
        let mover = format!("sterna split, {redundancy}");
        median(&series(runs, name, |run| is(run, &[("mover", &mover), ("workload", workload)])))
    };
    let mut targets = Vec::new();
    for (redundancy, access) in
        [COPIES, PARITY].into_iter().flat_map(|each| [(each, Access::Read), (each, Access::Write)])
    {
        for workload in [End::Killed, End::Silent].map(|end| workload(access, end)) {
            let lost = of(LOST, redundancy, &workload);
            targets.push(Target::at_most(format!("{redundancy}, {workload}: work lost, s"), 0.5, lost));
        }
    }
    for end in [End::Killed, End::Silent] {
        let name = format!("none, {}: the guest stands, and who is waited for is said", end.label());
        targets.push(Target::at_least(name, 1.0, of(STANDS, NONE, end.label())));
    }
    targets
}

fn plot(runs: &[Run], directory: &Path) -> Result<()> {
    let line = |loss: &Loss| {
        let row = loss.rows().remove(0);
        let run = runs.iter().find(|run| {
            ["mover", "workload"].iter().all(|key| run.config.get(*key) == row.config.get(*key))
                && run.details["points"].is_array()
        })?;
        let point = |point: &Value| Some((point[0].as_f64()?, point[1].as_f64()?));
        let points = run.details["points"].as_array()?.iter().filter_map(point).collect();
        Some((row.words, points))
    };
    let lines: Vec<_> =
        attempts(&Qemu { label: String::new(), path: Default::default() }).iter().filter_map(line).collect();
    if lines.is_empty() {
        return Ok(());
    }
    LinePlot {
        title: "a memory host goes at second 0, and is back at second 10".into(),
        x_label: "seconds".into(),
        y_label: "words a second".into(),
        lines,
        spans: Vec::new(),
    }
    .write(directory, "words")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 1,000 reads a second; none for two of the ten seconds without the memory host.
    #[test]
    fn what_a_guest_did_not_do_without_its_memory_host_is_told_in_seconds_of_its_work() {
        let mut total = 0.0;
        let line = |tenth: i64| {
            let at_us = tenth * 100_000;
            let stands = (10_000_001..=12_000_000).contains(&at_us);
            total += if stands { 0.0 } else { 100.0 };
            let longest = if at_us == 12_100_000 { 2_000_000 } else { 900 };
            let text = format!("TOUCHER ok longest_us={longest} total={total}");
            Line { from: std::net::Ipv4Addr::LOCALHOST, at_us, text }
        };
        let lines: Vec<Line> = (0..250).map(line).collect();
        let mut measured = Measured { details: json!({}), ..Measured::default() };
        note(&lines, (5_000_000, 10_000_000, 20_000_000), None, "b:1", &mut measured);
        let of = |name: &str| measured.metrics[name];
        assert_eq!((of(FULL), of(WITHOUT), of(LONGEST), of(STANDS)), (1000.0, 1000.0, 2000.0, 0.0));
        assert!((of(LOST) - 2.0).abs() < 1e-6, "{}", of(LOST));
        // A guest that says nothing has no figures.
        let mut measured = Measured { details: json!({}), ..Measured::default() };
        note(&[], (0, 1, 2), None, "b:1", &mut measured);
        assert!(measured.metrics.is_empty());
    }

    #[test]
    fn what_was_not_measured_is_not_met() {
        assert!(targets(&[]).iter().all(|target| target.measured.is_none() && !target.met));
        assert_eq!(targets(&[]).len(), 10);
    }
}
