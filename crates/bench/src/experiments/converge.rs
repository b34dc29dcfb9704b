//! Guests that write from a tenth to eight times what the link carries: which mover can move them, how long they stand
//! still, and what happens to those that cannot be moved as asked.

use std::path::Path;
use std::time::Duration;

use serde_json::json;

use super::curves::Curves;
use super::floor::{self, Floor};
use super::judge::{derive_quotient, derive_shares, is_row, metric, middle, ratio, time_ms, worst};
use super::{Case, Options, Plan, is, movers, qemus, runner, try_all};
use crate::baseline::{Method, Ram};
use crate::command::{PATIENCE, wait_for};
use crate::error::{Error, Result};
use crate::guest::Guest;
use crate::lab::Lab;
use crate::result::{Run, Target, rows, series};
use crate::stats::median;
use crate::trial::{Mover, Qemu};

/// What the guest writes to, MiB of its 1 GiB.
const WORKING_SET_MIB: u64 = 256;
/// What lies idle beside it, MiB.
const IDLE_MIB: u64 = 512;
const PATTERNS: [&str; 3] = ["sequential", "random", "hot-spot"];
/// The requested rates of writes, as shares of the link. The rate that the guest reached is in each row.
const SHARES: [f64; 7] = [0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0];

/// The options of Sterna's rows that stop the guest however long the pause will be.
const FORCE: &str = "--mode precopy --timeout 15s --on-timeout force";
/// One pass, then post-copy.
const HYBRID: &str = "--mode hybrid";
/// Post-copy from the first page on.
const POSTCOPY: &str = "--mode postcopy";
/// Decides for itself whether pages follow the guest.
const AUTO: &str = "";
/// Pre-copy that is given up where it does not end.
const PRECOPY: &str = "--mode precopy --timeout 15s";
/// Sterna's rows, as on the command line.
const STERNA: [&str; 8] = [
    AUTO,
    PRECOPY,
    FORCE,
    "--mode precopy --throttle 99",
    "--mode precopy --downtime-ramp 5s",
    "--mode precopy --compress zstd --timeout 15s --on-timeout force",
    HYBRID,
    POSTCOPY,
];
const QEMU: [Method; 4] = [Method::Vanilla, Method::AutoConverge, Method::Postcopy, Method::PostcopyPreempt];

/// The name of the floors' rows.
const FLOOR: &str = "qemu alone, devices only";

/// The pause that came, as a share of the one that was predicted.
const PREDICTION: &str = "downtime_to_predicted";
/// Total time, as a share of the time that the link needs for the RAM in use.
const TO_LIMIT: &str = "total_to_link_limit";

pub(super) fn plan(options: &Options) -> Result<Plan> {
    let repeats = options.repeat.unwrap_or(if options.quick { 1 } else { 3 });
    let cases = cases(options.quick)?;
    let newest = cases.first().map(|case| case.qemu.label.clone()).unwrap_or_default();
    let judged = workloads(options.quick);
    let plan = Plan::new(move |record| {
        let lab = Lab::up(movers::lab_config())?;
        try_all(&lab, &cases, repeats, record, |_, metrics| {
            derive_shares(&lab, metrics);
            derive_quotient(metrics, PREDICTION, "downtime_ms", "predicted_downtime_ms");
            let link = movers::LINK_BYTES_PER_S as f64;
            let used_ms = metrics.get("nonzero_pages").map(|pages| pages * 4096.0 / link * 1e3);
            let limit = metrics.get("total_ms").zip(used_ms).map(|(total, used)| total / used);
            metrics.extend(limit.map(|limit| (TO_LIMIT.into(), limit)));
        });
        let alone = floors(&cases);
        runner::try_all(&lab, &alone.iter().map(Alone::floor).collect::<Vec<_>>(), repeats, record);
        Ok(())
    });
    Ok(plan.judged(move |runs| targets(runs, &judged, &newest)).drawn(plot))
}

/// Boots the guests of a row.
type Begin<'a> = Box<dyn Fn(&Lab, &str) -> Vec<Guest> + 'a>;

/// Waits until a guest is what is measured.
type Ready<'a> = Box<dyn Fn(&Guest) -> Result<()> + 'a>;

/// The floor of a workload: QEMU alone hands the devices of the same guest over.
struct Alone<'a> {
    case: &'a Case,
    guests: Begin<'a>,
    ready: Ready<'a>,
}

impl Alone<'_> {
    fn floor(&self) -> Floor<'_> {
        Floor {
            row: self.case.row_of(FLOOR, json!({ "times": floor::TIMES, "ram": Ram::SharedFile })),
            guests: &*self.guests,
            qemu: &self.case.qemu,
            ready: &*self.ready,
        }
    }
}

/// One floor for each workload, in the QEMU whose rows are judged.
fn floors(cases: &[Case]) -> Vec<Alone<'_>> {
    let mut floors: Vec<Alone> = Vec::new();
    for case in cases {
        if floors.iter().all(|floor| floor.case.workload != case.workload) {
            let ready = move |guest: &Guest| {
                guest.wait_until_up(PATIENCE)?;
                let words = case.ready.unwrap_or_default();
                let said = || Ok(guest.console_text().contains(words).then_some(()));
                wait_for("a guest's filled memory", PATIENCE, said)
            };
            let guests = move |lab: &Lab, name: &str| vec![case.guest(lab, name)];
            floors.push(Alone { case, guests: Box::new(guests), ready: Box::new(ready) });
        }
    }
    floors
}

/// Patterns and shares that are tried: in a short run two rates, one that pre-copy can follow and one that nothing can.
fn workloads(quick: bool) -> Vec<(&'static str, f64)> {
    let all = PATTERNS.iter().flat_map(|pattern| SHARES.iter().map(move |share| (*pattern, *share)));
    all.filter(|(pattern, share)| !quick || *pattern == "random" && [0.5, 4.0].contains(share)).collect()
}

fn name(pattern: &str, share: f64) -> String {
    format!("{pattern}, {share} × link over {WORKING_SET_MIB} MiB")
}

/// Sterna's movers.
fn movers_of_sterna(quick: bool) -> Result<Vec<Mover>> {
    let short = [AUTO, PRECOPY, FORCE, "--mode precopy --throttle 99", HYBRID, POSTCOPY];
    STERNA.iter().filter(|row| !quick || short.contains(row)).map(|row| movers::sterna(row)).collect()
}

fn cases(quick: bool) -> Result<Vec<Case>> {
    let mut qemus = qemus()?;
    let newest = qemus.pop().ok_or_else(|| Error::Usage("no QEMU".into()))?;
    let mut movers: Vec<(Mover, &Qemu)> = movers_of_sterna(quick)?.into_iter().map(|mover| (mover, &newest)).collect();
    movers.extend(movers::known(&newest, &QEMU)?.into_iter().map(|mover| (mover, &newest)));
    for older in qemus.iter().filter(|_| !quick) {
        movers.extend(movers::known(older, &[Method::Postcopy])?.into_iter().map(|mover| (mover, older)));
    }
    let mut cases = Vec::new();
    for (pattern, share) in workloads(quick) {
        let mib_per_s = share * movers::LINK_BYTES_PER_S as f64 / f64::from(1 << 20);
        for (mover, qemu) in &movers {
            cases.push(Case {
                workload: name(pattern, share),
                memory_bytes: 1 << 30,
                jobs: format!(
                    "idle:--mib,{IDLE_MIB};dirtier:--mib,{WORKING_SET_MIB},--rate,{mib_per_s:.1},--pattern,{pattern}"
                ),
                // This program fills more memory, and so is ready last.
                ready: Some("IDLE ready"),
                load: None,
                mover: mover.clone(),
                qemu: (*qemu).clone(),
                settle: Duration::from_secs(2),
                limit: Duration::from_secs(if quick { 20 } else { 60 }),
            });
        }
    }
    Ok(cases)
}

fn targets(runs: &[Run], workloads: &[(&str, f64)], qemu: &str) -> Result<Vec<Target>> {
    let hybrid = movers::sterna(HYBRID)?;
    let names: Vec<String> = workloads.iter().map(|(pattern, share)| name(pattern, *share)).collect();
    let worst_hybrid =
        |name: &str| worst(names.iter().map(|workload| middle(runs, workload, &hybrid, qemu, metric(name))));
    let beyond_floor = worst(names.iter().map(|workload| {
        let floor = median(&series(runs, "downtime_ms", |run| is(run, &[("workload", workload), ("mover", FLOOR)])));
        middle(runs, workload, &hybrid, qemu, metric("downtime_ms")).zip(floor).map(|(own, floor)| own - floor)
    }));
    // What `auto` is measured by: pre-copy where that ends, else what is better of hybrid and post-copy.
    let [auto, precopy, postcopy] = [AUTO, PRECOPY, POSTCOPY].map(movers::sterna);
    let (auto, precopy, postcopy) = (auto?, precopy?, postcopy?);
    let beside = |name: &str, compare: fn(f64, f64) -> f64| {
        worst(names.iter().map(|workload| {
            let of = |mover: &Mover| middle(runs, workload, mover, qemu, metric(name));
            let better = || Some(of(&hybrid)?.min(of(&postcopy)?));
            Some(compare(of(&auto)?, of(&precopy).or_else(better)?))
        }))
    };
    let regret = |name| beside(name, |own, other| own / other);
    let preempt = Mover::Qemu(Method::PostcopyPreempt, Ram::Plain);
    let to_preempt = worst(names.iter().map(|workload| {
        let own = |run: &Run| is_row(run, workload, &hybrid, qemu);
        ratio(runs, time_ms, own, |run| is_row(run, workload, &preempt, "10.0"))
    }));
    // Only runs that the timeout ended count: a guest that converged was not forced.
    let forced = movers::sterna(FORCE)?.label();
    let forced = |run: &Run| {
        let timed_out = run.metrics.get("total_ms").is_some_and(|ms| *ms >= 15_000.0);
        timed_out && run.config.get("mover").and_then(|mover| mover.as_str()) == Some(forced.as_str())
    };
    let predictions = series(runs, PREDICTION, forced);
    Ok(vec![
        Target::at_most("hybrid: downtime by events, ms, worst row", 8.0, worst_hybrid("downtime_ms")),
        Target::at_most("hybrid: downtime at the meter, ms, worst row", 12.0, worst_hybrid("gap_ms")),
        Target::at_most("hybrid: total time ÷ (RAM in use ÷ link), worst row", 1.1, worst_hybrid(TO_LIMIT)),
        Target::at_most("hybrid: total time ÷ QEMU 10.0's post-copy with preempt, worst row", 0.75, to_preempt),
        Target::at_most("forced: downtime ÷ predicted, most", 1.2, predictions.iter().copied().reduce(f64::max)),
        Target::at_least("forced: downtime ÷ predicted, least", 0.8, predictions.iter().copied().reduce(f64::min)),
        Target::at_most("hybrid: downtime beyond the floor of the same run, ms, worst row", 2.0, beyond_floor),
        Target::at_most("auto: total time ÷ the best choice's, worst row", 1.05, regret("total_ms")),
        Target::at_most("auto: bytes on the wire ÷ the best choice's, worst row", 1.05, regret("bytes_on_wire")),
        Target::at_most(
            "auto: downtime beyond the best choice's, ms, worst row",
            2.0,
            beside("downtime_ms", |own, other| own - other),
        ),
    ])
}

/// Plots downtime and total time over the rate of writes, a line per mover, for each pattern.
fn plot(runs: &[Run], directory: &Path) -> Result<()> {
    let rows = rows(runs);
    for pattern in PATTERNS {
        for (metric, y_label) in [("downtime_ms", "downtime, ms"), ("total_ms", "total time, ms")] {
            Curves {
                title: format!("{pattern} writes over {WORKING_SET_MIB} MiB of 1 GiB: those that ended"),
                x_label: "asked rate of writes ÷ link",
                y_label,
                metric,
                x: &|workload| SHARES.into_iter().find(|share| workload == name(pattern, *share)),
            }
            .write(&rows, directory, &format!("{metric}_{pattern}"))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;

    fn run(mover: &Mover, metrics: &[(&str, f64)]) -> Run {
        sample(&name("random", 4.0), mover, "10.0", metrics)
    }

    #[test]
    fn only_guests_that_were_forced_judge_the_prediction() {
        let force = movers::sterna(FORCE).unwrap();
        let runs = [
            run(&force, &[("total_ms", 3_000.0), (PREDICTION, 5.0)]),
            run(&force, &[("total_ms", 16_000.0), (PREDICTION, 1.3)]),
            run(&force, &[("total_ms", 17_000.0), (PREDICTION, 0.9)]),
        ];
        let targets = targets(&runs, &workloads(true), "10.0").unwrap();
        assert_eq!(targets.len(), 10, "the eight of the list, and the two bounds of the prediction");
        assert_eq!((targets[4].measured, targets[4].met), (Some(1.3), false));
        assert_eq!((targets[5].measured, targets[5].met), (Some(0.9), true));
    }

    #[test]
    fn hybrid_is_judged_at_its_worst_row_and_not_at_all_where_one_is_missing() {
        let hybrid = movers::sterna(HYBRID).unwrap();
        let metrics = [("downtime_ms", 7.0), ("gap_ms", 11.0), (TO_LIMIT, 1.05), ("total_ms", 3000.0)];
        let qemu = run(&Mover::Qemu(Method::PostcopyPreempt, Ram::Plain), &[("total_ms", 4000.0)]);
        let runs = [qemu, run(&hybrid, &metrics)];
        let measured = |workloads: &[(&str, f64)]| -> Vec<_> {
            targets(&runs, workloads, "10.0").unwrap()[..4].iter().map(|target| target.measured).collect()
        };
        assert_eq!(measured(&[("random", 4.0)]), [7.0, 11.0, 1.05, 0.75].map(Some));
        assert_eq!(measured(&[("random", 4.0), ("random", 8.0)]), [None; 4]);
    }

    #[test]
    fn a_pause_is_judged_against_the_floor_of_its_own_workload() {
        let hybrid = movers::sterna(HYBRID).unwrap();
        let floor = |share: f64, ms: f64| {
            let mut run = sample(&name("random", share), &hybrid, "10.0", &[("downtime_ms", ms)]);
            run.config.insert("mover".into(), json!(FLOOR));
            run
        };
        let own = |share: f64, ms: f64| sample(&name("random", share), &hybrid, "10.0", &[("downtime_ms", ms)]);
        let runs = [own(0.5, 7.0), floor(0.5, 5.5), own(4.0, 30.0), floor(4.0, 29.0)];
        let judged = |runs: &[Run]| measured(runs, &workloads(true), "hybrid: downtime beyond");
        assert_eq!(judged(&runs), Some(1.5), "the worst of the differences, not of the pauses");
        assert_eq!(judged(&runs[..3]), None, "a row without its floor is not judged");
    }

    /// What a target's runs measured, by the beginning of its name.
    fn measured(runs: &[Run], workloads: &[(&str, f64)], name: &str) -> Option<f64> {
        let targets = targets(runs, workloads, "10.0").unwrap();
        targets.iter().find(|target| target.name.starts_with(name)).expect("a target of that name").measured
    }

    #[test]
    fn auto_is_judged_by_pre_copy_where_that_ends_and_else_by_the_better_of_the_others() {
        let row = |mover: &str, ms: f64| run(&movers::sterna(mover).unwrap(), &[("total_ms", ms)]);
        let mut runs = vec![row(AUTO, 900.0), row(HYBRID, 1_000.0), row(POSTCOPY, 800.0)];
        let judged = |runs: &[Run]| measured(runs, &[("random", 4.0)], "auto: total time");
        assert_eq!(judged(&runs), Some(1.125));
        // It was given up: it has no time.
        runs.push(run(&movers::sterna(PRECOPY).unwrap(), &[("given_up_ms", 15_000.0)]));
        assert_eq!(judged(&runs), Some(1.125));
        runs.push(row(PRECOPY, 1_800.0));
        assert_eq!(judged(&runs), Some(0.5));
        assert_eq!(judged(&runs[..2]), None);
    }

    #[test]
    fn every_row_of_sterna_is_one_that_the_api_takes() {
        assert_eq!(movers_of_sterna(false).unwrap().len(), STERNA.len());
    }
}
