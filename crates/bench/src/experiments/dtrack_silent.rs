//! D-Track's section 2.2.1: stores that write what is there already make unchanged pages dirty. A writer does so with a
//! share of its pages; which pages are sent again?
//!
//! The number of pages that had to be sent again is known without the mover's report. The writer's silent pages and its
//! changing ones are disjoint, its stores are the same in every run, and its lines tell how many it has done: so a
//! repetition of these stores counts the pages that it really changed in each round's time. A page that changed in a
//! round's time has to be sent at most once because of that, in any round. The bound by which a mover is judged is
//! their sum over all rounds, plus the pages that are sent again of an otherwise equal guest without a writer (the
//! kernel's own, and those of its other programs).

use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use sterna_api::Report;
use sterna_guest_programs::writer::{Changed, Pattern, Silent, Stores};

use super::judge::worst;
use super::{Case, Options, Plan, Watch, is, lab_name, qemus, try_each};
use crate::baseline::{Method, Ram};
use crate::error::{Error, Result};
use crate::lab::{Lab, LabConfig};
use crate::load::Sample;
use crate::meter::{self, Line};
use crate::plot::LinePlot;
use crate::result::{Run, Target, rows, series};
use crate::stats::median;
use crate::sterna;
use crate::trial::{LIMIT, Mover, Qemu, Trial};

/// Shares of silent stores, percent: none, the range that was found in programs, and more.
const SHARES: [u32; 5] = [0, 20, 50, 68, 95];
/// The writer's pages, MiB, and how fast it writes them: about a third of what the link carries.
const WRITER_MIB: usize = 128;
const RATE_MIB: u32 = 40;
/// The workload without a writer, with as much memory in use.
const CONTROL: &str = "no writer";
/// Pages sent again, beside the first time that each had to be sent.
const AGAIN: &str = "pages_sent_again";
/// Pages that the writer changed, each counted once for each round in whose time it changed.
const CHANGED: &str = "pages_changed";
/// The first divided by the second, after the control's pages sent again were added to the second.
const EXCESS: &str = "sent_again_per_changed";

pub(super) fn plan(options: &Options) -> Result<Plan> {
    let repeats = options.repeat.unwrap_or(if options.quick { 1 } else { 5 });
    let newest = qemus()?.pop().ok_or_else(|| Error::Usage("no QEMU".into()))?;
    let cases = cases(options.quick, &newest)?;
    let default = Mover::Sterna(sterna::options("")?);
    let judged = default.clone();
    let plan = Plan::new(move |record| {
        let lab = Lab::up(LabConfig::pair(&lab_name()))?;
        try_each(&lab, &cases, repeats, Watch::default(), record, look);
        record.derive(|runs| derive(runs, &default));
        Ok(())
    });
    Ok(plan.judged(move |runs| Ok(targets(runs, &judged))).drawn(plot))
}

fn workload(share: u32) -> String {
    format!("{RATE_MIB} MiB/s over {WRITER_MIB} MiB, {share} % silent")
}

fn cases(quick: bool, qemu: &Qemu) -> Result<Vec<Case>> {
    let case = |workload: String, jobs: String, ready, mover: Mover| Case {
        workload,
        memory_bytes: 1 << 30,
        jobs,
        ready: Some(ready),
        load: None,
        mover,
        qemu: qemu.clone(),
        settle: Duration::from_secs(3),
        limit: LIMIT,
    };
    // The idle memory makes the first round long enough for each page to be written in it.
    let idle_mib = if quick { 128 } else { 384 };
    let default = Mover::Sterna(sterna::options("")?);
    let control = format!("idle:--mib,{}", idle_mib + WRITER_MIB);
    let mut cases = vec![case(CONTROL.into(), control, "IDLE ready", default.clone())];
    for share in SHARES {
        let jobs = format!(
            "idle:--mib,{idle_mib};dirtier:--mib,{WRITER_MIB},--rate,{RATE_MIB},--silent,{share},--silent-of,pages,--interval-ms,100"
        );
        let movers = [
            default.clone(),
            Mover::Sterna(sterna::options("--content-hash off")?),
            Mover::Qemu(Method::Vanilla, Ram::Plain),
        ];
        cases.extend(movers.into_iter().map(|mover| case(workload(share), jobs.clone(), "DIRTIER ready", mover)));
    }
    Ok(cases)
}

/// The share that a workload's name stands for.
fn share_of(workload: &str) -> Option<u32> {
    SHARES.into_iter().find(|share| self::workload(*share) == workload)
}

/// Counts the pages that were sent again, and those that had to be.
fn look(case: &Case, trial: &mut Trial) -> Value {
    let Some(report) = &trial.sterna else { return Value::Null };
    // A page's first sending is not one of these, in whatever round it is: one that was written again before its turn
    // in the first round goes for the first time in a later one. Each page that is not zeros when the migration begins
    // goes once; a page that becomes so later counts here.
    let again = trial.metrics.get("nonzero_pages").map(|once| (report.pages.sent as f64 - once).max(0.0));
    let silent: u64 = report.pages.fake_dirty_content;
    let gap = meter::longest_gap(&trial.arrivals, trial.begin_us, trial.end_us + 1_000_000);
    let changed = share_of(&case.workload).zip(gap).and_then(|(share, gap)| {
        let written = written(&trial.lines);
        let stores = Stores::new(WRITER_MIB << 8, Pattern::Random, Silent::Pages(share));
        let marks: Option<Vec<u64>> =
            starts(report, gap.from_us).into_iter().map(|at| written_at(&written, at)).collect();
        Some(changed_between(stores, &marks?))
    });
    trial.metrics.extend(again.map(|again| (AGAIN.to_owned(), again)));
    trial.metrics.insert("pages_found_silent".into(), silent as f64);
    if let Some(changed) = &changed {
        trial.metrics.insert(CHANGED.into(), changed.iter().sum::<usize>() as f64);
    }
    json!({ "pages_changed_in_round": changed })
}

/// When each round began, microseconds since 1970: counted back from the guest's stop, which the last round follows.
fn starts(report: &Report, stopped_us: i64) -> Vec<i64> {
    let mut at = stopped_us;
    let mut starts = vec![at];
    for round in report.rounds.iter().rev().skip(1) {
        at -= (round.ms * 1e3) as i64;
        starts.push(at);
    }
    starts.reverse();
    starts
}

/// How many stores the writer had done at each of its lines.
fn written(lines: &[Line]) -> Vec<Sample> {
    let own = lines.iter().filter(|line| line.text.starts_with("DIRTIER ok "));
    own.filter_map(|line| Some(Sample { at_us: line.at_us, per_s: line.number("total")? })).collect()
}

/// How many stores it had done at a moment: as many as the line before says, continued at that speed, but no more than
/// the line after says. `None` for a moment that no two lines enclose.
fn written_at(written: &[Sample], at_us: i64) -> Option<u64> {
    let after = written.iter().position(|sample| sample.at_us >= at_us).filter(|after| *after >= 1)?;
    let (last, next) = (written[after - 1], written[after]);
    // A line may be lost, and the guest may have stood still between these two: the speed is that of the lines before,
    // where there are any.
    let (one, other) = if after >= 2 { (written[after - 2], last) } else { (last, next) };
    let speed = (other.per_s - one.per_s) / (other.at_us - one.at_us).max(1) as f64;
    Some((last.per_s + speed * (at_us - last.at_us) as f64).min(next.per_s) as u64)
}

/// How many pages the stores between each two of `marks` change.
fn changed_between(mut stores: Stores, marks: &[u64]) -> Vec<usize> {
    let mut changed = Changed::new(WRITER_MIB << 8);
    let mut counts = Vec::new();
    let mut done = 0;
    for mark in marks {
        let until = mark.saturating_sub(done) as usize;
        stores.by_ref().take(until).for_each(|store| changed.note(store));
        done = done.max(*mark);
        counts.push(changed.mark());
    }
    // The first count is of the time before the first mark.
    counts.split_off(1.min(counts.len()))
}

/// Adds [`EXCESS`] to the runs that have what it needs.
fn derive(runs: &mut [Run], default: &Mover) {
    let label = default.label();
    let control = median(&series(runs, AGAIN, |run| is(run, &[("workload", CONTROL), ("mover", &label)])));
    let Some(control) = control else { return };
    for run in runs {
        let pair = run.metrics.get(AGAIN).copied().zip(run.metrics.get(CHANGED).copied());
        let excess = pair.map(|(again, changed)| again / (changed + control).max(1.0));
        run.metrics.extend(excess.map(|excess| (EXCESS.to_owned(), excess)));
    }
}

fn targets(runs: &[Run], default: &Mover) -> Vec<Target> {
    let label = default.label();
    let of = |metric: &str, share: u32| {
        median(&series(runs, metric, |run| is(run, &[("workload", &workload(share)), ("mover", &label)])))
    };
    let steps = SHARES.windows(2).map(|pair| Some(of(AGAIN, pair[1])? / of(AGAIN, pair[0])?.max(1.0)));
    vec![
        Target::at_most(
            "exact, xxh3: pages sent again ÷ those at the next smaller silent share, worst step",
            1.0,
            worst(steps),
        ),
        Target::at_most(
            "exact, xxh3: pages sent again ÷ pages really changed, worst share",
            1.05,
            worst(SHARES.map(|share| of(EXCESS, share))),
        ),
    ]
}

/// Pages sent over the silent share, by mover.
fn plot(runs: &[Run], directory: &Path) -> Result<()> {
    for (metric, label) in [("pages_sent", "pages sent"), (AGAIN, "pages sent again")] {
        let mut lines: Vec<(String, Vec<(f64, f64)>)> = Vec::new();
        let mut add = |line: &str, point: (f64, f64)| match lines.iter_mut().find(|(name, _)| name == line) {
            Some((_, points)) => points.push(point),
            None => lines.push((line.to_owned(), vec![point])),
        };
        for row in rows(runs) {
            let Some(share) = share_of(row.word("workload")) else { continue };
            let metric_at = |metric: &str| row.metrics.get(metric).map(|value| (f64::from(share), value.median));
            metric_at(metric).into_iter().for_each(|point| add(row.word("mover"), point));
            if metric == AGAIN {
                metric_at(CHANGED)
                    .into_iter()
                    .for_each(|point| add(&format!("really changed: {}", row.word("mover")), point));
            }
        }
        LinePlot {
            title: format!("Silent stores, {RATE_MIB} MiB/s over {WRITER_MIB} MiB"),
            x_label: "silent stores, percent".into(),
            y_label: label.into(),
            lines,
            spans: Vec::new(),
        }
        .write(directory, metric)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;
    use std::net::Ipv4Addr;
    use sterna_api::report::Round;

    #[test]
    fn rounds_are_counted_back_from_the_stop() {
        let round = |ms: f64| Round { ms, ..Round::default() };
        let report = Report { rounds: vec![round(2000.0), round(500.0), round(3.0)], ..Report::default() };
        assert_eq!(starts(&report, 10_000_000), [7_500_000, 9_500_000, 10_000_000]);
        assert_eq!(starts(&Report::default(), 5), [5]);
    }

    #[test]
    fn stores_done_by_a_moment_follow_the_lines_and_never_pass_the_next() {
        let line = |at_ms: i64, total: u32| Line {
            from: Ipv4Addr::LOCALHOST,
            at_us: at_ms * 1000,
            text: format!("DIRTIER ok writes=1 total={total}"),
        };
        let written = written(&[line(100, 1000), line(200, 2000), line(400, 2500)]);
        let at = |ms: i64| written_at(&written, ms * 1000);
        assert_eq!(at(150), Some(1500));
        assert_eq!(at(200), Some(2000));
        assert_eq!(at(230), Some(2300), "it went on as before until it was stopped");
        assert_eq!(at(390), Some(2500), "and then stood still");
        assert_eq!((at(50), at(500)), (None, None));
    }

    #[test]
    fn a_page_counts_once_in_each_round_in_whose_time_it_changed() {
        let stores = || Stores::new(WRITER_MIB << 8, Pattern::Random, Silent::Pages(50));
        let counts = changed_between(stores(), &[1000, 50_000, 50_100, 50_100]);
        assert_eq!((counts.len(), counts[2]), (3, 0));
        let distinct = |from: usize, to: usize| {
            let changing = stores().skip(from).take(to - from).filter(|store| !store.silent);
            changing.map(|store| store.page).collect::<std::collections::BTreeSet<_>>().len()
        };
        assert_eq!(counts[..2], [distinct(1000, 50_000), distinct(50_000, 50_100)]);
    }

    fn run(workload: &str, again: f64, changed: f64) -> Run {
        let mover = Mover::Sterna(sterna::options("").unwrap());
        sample(workload, &mover, "10.0", &[(AGAIN, again), (CHANGED, changed)])
    }

    #[test]
    fn the_worst_share_is_judged_with_what_the_control_was_sent_again() {
        let default = Mover::Sterna(sterna::options("").unwrap());
        let mut runs: Vec<Run> = SHARES
            .into_iter()
            .map(|share| run(&workload(share), 1000.0 - f64::from(share), 900.0 - f64::from(share)))
            .collect();
        runs.push(run(CONTROL, 100.0, 0.0));
        derive(&mut runs, &default);
        let judged: Vec<(Option<f64>, bool)> = targets(&runs, &default).iter().map(|t| (t.measured, t.met)).collect();
        assert_eq!(judged[1], (Some(1.0), true));
        assert!(judged[0].1 && judged[0].0.is_some_and(|step| step < 1.0), "{judged:?}");
        runs.remove(2);
        assert!(targets(&runs, &default).iter().all(|target| target.measured.is_none() && !target.met));
    }

    #[test]
    fn every_share_is_found_by_its_name_and_every_row_is_a_different_one() {
        let qemu = Qemu { label: "10.0".into(), path: "/nonexistent".into() };
        let cases = cases(true, &qemu).unwrap();
        assert_eq!(cases.len(), 1 + 3 * SHARES.len());
        assert_eq!(cases.iter().filter_map(|case| share_of(&case.workload)).count(), 3 * SHARES.len());
        let names: Vec<_> = cases.iter().map(|case| (case.workload.clone(), case.mover.label())).collect();
        assert!(names.iter().enumerate().all(|(at, name)| !names[..at].contains(name)), "{names:?}");
    }
}
