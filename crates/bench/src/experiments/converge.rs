//! Guests that write from a tenth to eight times what the link carries: which mover can move them, how long they stand
//! still, and what happens to those that cannot be moved as asked.

use std::path::Path;
use std::time::Duration;

use serde_json::json;

use super::curves::Curves;
use super::floor::{self, Floor};
use super::judge::{
    TO_LIMIT, best_choice, derive_limit, derive_quotient, derive_shares, is_row, metric, middle, ratio, time_ms, worst,
};
use super::{Case, Options, Plan, Record, is, movers, qemus, runner, try_all};
use crate::baseline::{Method, Ram};
use crate::command::PATIENCE;
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

pub(super) fn plan(options: &Options) -> Result<Plan> {
    let repeats = options.repeat.unwrap_or(if options.quick { 1 } else { 3 });
    let quick = options.quick;
    let cases = cases(quick)?;
    let newest = cases.first().map(|case| case.qemu.label.clone()).unwrap_or_default();
    let judged = workloads(quick);
    let plan = Plan::new(move |record| {
        let lab = Lab::up(movers::lab_config())?;
        let alone = floors(&cases);
        let floors: Vec<Floor> = alone.iter().map(Alone::floor).collect();
        let try_floors = |record: &mut Record| runner::try_all(&lab, &floors, repeats, record);
        if quick {
            try_floors(record);
        }
        try_all(&lab, &cases, repeats, record, |_, metrics| {
            derive_shares(&lab, metrics);
            derive_quotient(metrics, PREDICTION, "downtime_ms", "predicted_downtime_ms");
            derive_limit(movers::LINK_BYTES_PER_S, metrics);
        });
        if !quick {
            try_floors(record);
        }
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
                guest.wait_until_says(case.ready.unwrap_or_default(), PATIENCE)
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

/// The movers, in the order in which they are tried. In a short run those come first by which most is judged.
fn movers_in_order<'a>(quick: bool, newest: &'a Qemu, older: &'a [Qemu]) -> Result<Vec<(Mover, &'a Qemu)>> {
    let own = |rows: &[&str]| rows.iter().map(|row| movers::sterna(row)).collect::<Result<Vec<_>>>();
    let mut all = Vec::new();
    if quick {
        all.extend(own(&[HYBRID, POSTCOPY])?);
        all.extend(movers::known(newest, &[Method::PostcopyPreempt])?);
        all.extend(own(&[AUTO, PRECOPY, FORCE, "--mode precopy --throttle 99"])?);
        all.extend(movers::known(newest, &[Method::Vanilla, Method::Postcopy, Method::AutoConverge])?);
    } else {
        all.extend(own(&STERNA)?);
        all.extend(movers::known(newest, &QEMU)?);
    }
    let mut all: Vec<(Mover, &Qemu)> = all.into_iter().map(|mover| (mover, newest)).collect();
    for qemu in older.iter().filter(|_| !quick) {
        all.extend(movers::known(qemu, &[Method::Postcopy])?.into_iter().map(|mover| (mover, qemu)));
    }
    Ok(all)
}

fn cases(quick: bool) -> Result<Vec<Case>> {
    let mut qemus = qemus()?;
    let newest = qemus.pop().ok_or_else(|| Error::Usage("no QEMU".into()))?;
    let movers = movers_in_order(quick, &newest, &qemus)?;
    let workloads = workloads(quick);
    // What is compared is tried close together; a short run would not come to its second workload on a slow machine.
    let in_order: Vec<_> = if quick {
        movers.iter().flat_map(|mover| workloads.iter().map(move |workload| (workload, mover))).collect()
    } else {
        workloads.iter().flat_map(|workload| movers.iter().map(move |mover| (workload, mover))).collect()
    };
    let case = |(&(pattern, share), (mover, qemu)): (&(&str, f64), &(Mover, &Qemu))| {
        let mib_per_s = share * movers::LINK_BYTES_PER_S as f64 / f64::from(1 << 20);
        Case {
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
        }
    };
    Ok(in_order.into_iter().map(case).collect())
}

fn targets(runs: &[Run], workloads: &[(&str, f64)], qemu: &str) -> Result<Vec<Target>> {
    let names: Vec<String> = workloads.iter().map(|(pattern, share)| name(pattern, *share)).collect();
    let [auto, precopy, forced] = [AUTO, PRECOPY, FORCE].map(movers::sterna);
    let (auto, precopy, forced) = (auto?, precopy?, forced?);
    let following = [movers::sterna(HYBRID)?, movers::sterna(POSTCOPY)?];
    let [hybrid, postcopy] = &following;
    let of = |workload: &str, mover: &Mover, name: &str| middle(runs, workload, mover, qemu, metric(name));
    let worst_of = |value: &dyn Fn(&str, &Mover) -> Option<f64>, movers: &[Mover]| {
        let values = names.iter().flat_map(|workload| movers.iter().map(move |mover| value(workload, mover)));
        worst(values.collect::<Vec<_>>())
    };
    let beyond_floor = |workload: &str, mover: &Mover| {
        let floor = median(&series(runs, "downtime_ms", |run| is(run, &[("workload", workload), ("mover", FLOOR)])));
        of(workload, mover, "downtime_ms").zip(floor).map(|(own, floor)| own - floor)
    };
    let preempt = Mover::Qemu(Method::PostcopyPreempt, Ram::Plain);
    let to_preempt = |value: fn(&Run) -> Option<f64>| {
        let preempt = &preempt;
        move |workload: &str, mover: &Mover| {
            let own = |run: &Run| is_row(run, workload, mover, qemu);
            ratio(runs, value, own, |run| is_row(run, workload, preempt, "10.0"))
        }
    };
    let (gap_to, time_to) = (to_preempt(|run| metric("gap_ms")(run)), to_preempt(time_ms));
    let beside = |name: &str, compare: fn(f64, f64) -> f64| {
        let regret = |workload: &str, auto: &Mover| {
            let [precopy, hybrid, postcopy] = [&precopy, hybrid, postcopy].map(|mover| of(workload, mover, name));
            Some(compare(of(workload, auto, name)?, best_choice(precopy, hybrid, postcopy)?))
        };
        worst_of(&regret, std::slice::from_ref(&auto))
    };
    // Only runs that the timeout ended count: a guest that converged was not forced.
    let forced = forced.label();
    let forced = |run: &Run| {
        let timed_out = run.metrics.get("total_ms").is_some_and(|ms| *ms >= 15_000.0);
        timed_out && run.config.get("mover").and_then(|mover| mover.as_str()) == Some(forced.as_str())
    };
    let predictions = series(runs, PREDICTION, forced);
    let downtime = worst_of(&|workload, mover| of(workload, mover, "downtime_ms"), &following);
    let to_limit = worst_of(&|workload, mover| of(workload, mover, TO_LIMIT), std::slice::from_ref(postcopy));
    Ok(vec![
        Target::at_most("hybrid, post-copy: downtime by events, ms, worst row", 8.0, downtime),
        Target::at_most(
            "hybrid, post-copy: downtime beyond the floor of the same run, ms, worst row",
            2.0,
            worst_of(&beyond_floor, &following),
        ),
        Target::at_most(
            "hybrid, post-copy: downtime at the meter ÷ QEMU 10.0's post-copy with preempt, worst row",
            0.25,
            worst_of(&gap_to, &following),
        ),
        Target::at_most("post-copy: total time less set-up ÷ (RAM in use ÷ link), worst row", 1.05, to_limit),
        Target::at_most(
            "post-copy: total time ÷ QEMU 10.0's post-copy with preempt, worst row",
            0.70,
            worst_of(&time_to, std::slice::from_ref(postcopy)),
        ),
        Target::at_most("forced: downtime ÷ predicted, most", 1.2, predictions.iter().copied().reduce(f64::max)),
        Target::at_least("forced: downtime ÷ predicted, least", 0.8, predictions.iter().copied().reduce(f64::min)),
        Target::at_most(
            "auto: total time ÷ the best choice's, worst row",
            1.05,
            beside("total_ms", |own, other| own / other),
        ),
        Target::at_most(
            "auto: bytes on the wire ÷ the best choice's, worst row",
            1.05,
            beside("bytes_on_wire", |own, other| own / other),
        ),
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
        assert_eq!(targets(&runs, &workloads(true), "10.0").unwrap().len(), 10);
        let of = |name| measured(&runs, &workloads(true), name);
        assert_eq!(of("forced: downtime ÷ predicted, most"), Some(1.3));
        assert_eq!(of("forced: downtime ÷ predicted, least"), Some(0.9));
    }

    #[test]
    fn the_worst_row_of_both_modes_is_judged_and_none_where_one_is_missing() {
        let row = |mover: &str, downtime_ms: f64, gap_ms: f64, total_ms: f64| {
            let metrics = [("downtime_ms", downtime_ms), ("gap_ms", gap_ms), ("total_ms", total_ms), (TO_LIMIT, 1.02)];
            run(&movers::sterna(mover).unwrap(), &metrics)
        };
        let preempt = Mover::Qemu(Method::PostcopyPreempt, Ram::Plain);
        let qemu = run(&preempt, &[("total_ms", 4000.0), ("gap_ms", 40.0)]);
        let runs = [qemu, row(HYBRID, 7.0, 12.0, 4000.0), row(POSTCOPY, 6.0, 8.0, 2000.0)];
        let names = [
            "hybrid, post-copy: downtime by events",
            "hybrid, post-copy: downtime at",
            "post-copy: total time less",
            "post-copy: total time ÷",
        ];
        let of = |runs: &[Run], workloads: &[(&str, f64)]| names.map(|name| measured(runs, workloads, name));
        assert_eq!(of(&runs, &[("random", 4.0)]), [7.0, 0.3, 1.02, 0.5].map(Some));
        assert_eq!(of(&runs, &[("random", 4.0), ("random", 8.0)]), [None; 4]);
        assert_eq!(of(&runs[..2], &[("random", 4.0)]), [None; 4], "post-copy's row is missing");
    }

    #[test]
    fn a_pause_is_judged_against_the_floor_of_its_own_workload() {
        let hybrid = movers::sterna(HYBRID).unwrap();
        let floor = |share: f64, ms: f64| {
            let mut run = sample(&name("random", share), &hybrid, "10.0", &[("downtime_ms", ms)]);
            run.config.insert("mover".into(), json!(FLOOR));
            run
        };
        let own =
            |mover: &Mover, share: f64, ms: f64| sample(&name("random", share), mover, "10.0", &[("downtime_ms", ms)]);
        let postcopy = movers::sterna(POSTCOPY).unwrap();
        let runs = [
            own(&hybrid, 0.5, 7.0),
            own(&postcopy, 0.5, 6.0),
            floor(0.5, 5.5),
            own(&hybrid, 4.0, 30.0),
            own(&postcopy, 4.0, 30.0),
            floor(4.0, 29.0),
        ];
        let judged = |runs: &[Run]| measured(runs, &workloads(true), "hybrid, post-copy: downtime beyond");
        assert_eq!(judged(&runs), Some(1.5), "the worst of the differences, not of the pauses");
        assert_eq!(judged(&runs[..5]), None, "a row without its floor is not judged");
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
    fn a_short_run_tries_first_what_most_targets_need() {
        let Ok(cases) = cases(true) else { return eprintln!("skipped: there is no QEMU") };
        let words: Vec<_> = cases.iter().map(|case| (case.mover.label(), case.workload.clone())).collect();
        let hybrid = movers::sterna(HYBRID).unwrap().label();
        let of = |share: f64| (hybrid.clone(), name("random", share));
        assert_eq!(words[..2], [of(0.5), of(4.0)]);
        assert!(words.iter().enumerate().all(|(at, row)| !words[..at].contains(row)), "{words:?}");
    }

    #[test]
    fn every_row_of_sterna_is_one_that_the_api_takes() {
        assert!(STERNA.iter().all(|row| movers::sterna(row).is_ok()));
    }
}
