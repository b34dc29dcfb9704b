//! D-Track's figure 17: how much a guest that uses a database on another machine notices of its migration. The guest
//! runs YCSB's workload A against the PostgreSQL of the `client`.
//!
//! Latencies are the guest's own, as in the paper: its clock stands still in the pause, so that the requests of that
//! moment, one for each connection, seem as quick as others. The pause shows in `gap_ms`.

use std::path::Path;
use std::time::Duration;

use serde_json::json;
use sterna_guest_programs::histogram::Histogram;

use super::judge::{is_row, ratio, worst};
use super::{Case, Options, Plan, Watch, lab_name, qemus, timeline, try_each};
use crate::baseline::{Method, Ram};
use crate::error::{Error, Result};
use crate::lab::{CLIENT, Lab, LabConfig};
use crate::load::postgres::Postgres;
use crate::meter::Line;
use crate::result::{Run, Target};
use crate::sterna;
use crate::trial::{LIMIT, Mover, Qemu, Trial};

/// The guest's own figure.
const RATE: &str = "ops_per_s";
const P99: &str = "p99_us_during";
const ROWS: u32 = 10_000;
const CONNECTIONS: u32 = 4;
/// The time between two of the guest's lines, milliseconds.
const INTERVAL_MS: i64 = 500;
/// Sterna's rows as on its command line, with names for their plots; the first, the default, is judged.
const TRACKING: [(&str, &str); 2] = [("", "exact"), ("--fake-dirty dtrack-v2", "dtrack_v2")];
/// How long a guest is watched once it is moved.
const AFTER: Duration = Duration::from_secs(8);

pub(super) fn plan(options: &Options) -> Result<Plan> {
    let sizes: &[u64] = if options.quick { &[1024] } else { &[1024, 2048, 4096] };
    let repeats = options.repeat.unwrap_or(if options.quick { 3 } else { 5 });
    let newest = qemus()?.pop().ok_or_else(|| Error::Usage("no QEMU".into()))?;
    let judged = newest.clone();
    let plan = Plan::new(move |record| {
        let lab = Lab::up(LabConfig::pair(&lab_name()))?;
        let postgres = Postgres::start(lab.host(CLIENT)?)?;
        postgres.load_ycsb(ROWS)?;
        let cases = cases(sizes, &postgres, &newest)?;
        try_each(&lab, &cases, repeats, Watch::after(AFTER), record, |_, trial| {
            // The next guest finds the table as this one did, not with its dead rows.
            if let Err(error) = postgres.load_ycsb(ROWS) {
                eprintln!("the table was not made anew: {error}");
            }
            look(trial)
        });
        Ok(())
    });
    let plan = plan.judged(move |runs| targets(runs, sizes, &judged));
    Ok(plan.drawn(move |runs, directory| plot(runs, sizes, directory)))
}

fn workload(memory_mib: u64) -> String {
    format!("YCSB A, {CONNECTIONS} connections, {} GiB", memory_mib / 1024)
}

fn vanilla() -> Mover {
    Mover::Qemu(Method::Vanilla, Ram::Plain)
}

fn cases(sizes_mib: &[u64], postgres: &Postgres, qemu: &Qemu) -> Result<Vec<Case>> {
    let mut cases = Vec::new();
    for mib in sizes_mib {
        let mut movers = vec![vanilla()];
        for (options, _) in TRACKING {
            movers.push(Mover::Sterna(sterna::options(options)?));
        }
        // The client itself is small: idle memory beside it makes the migration as long as the size of RAM demands.
        let idle = mib / 2;
        cases.extend(movers.into_iter().map(|mover| Case {
            workload: workload(*mib),
            memory_bytes: mib << 20,
            jobs: format!(
                "idle:--mib,{idle};ycsb:--server,{},--rows,{ROWS},--connections,{CONNECTIONS},--interval-ms,{INTERVAL_MS}",
                postgres.address()
            ),
            ready: Some("IDLE ready"),
            load: None,
            mover,
            qemu: qemu.clone(),
            settle: Duration::from_secs(8),
            limit: LIMIT,
        }));
    }
    Ok(cases)
}

/// Adds throughput and latencies before, during and after the migration.
fn look(trial: &mut Trial) -> serde_json::Value {
    let rates = timeline::note(trial, "YCSB", RATE);
    let lines: Vec<&Line> = trial.lines.iter().filter(|line| line.text.starts_with("YCSB ok ")).collect();
    let errors: f64 = lines.iter().filter_map(|line| line.number("errors")).sum();
    // A line covers the interval before it; of the lines that overlap the migration, the last covers the pause.
    let spans = [
        ("before", trial.settled_us - 6_000_000, trial.settled_us),
        ("during", trial.begin_us, trial.end_us + INTERVAL_MS * 1000),
        ("after", trial.end_us + 1_000_000, i64::MAX),
    ];
    for (name, from, to) in spans {
        let mut latency = Histogram::default();
        let inside = lines.iter().filter(|line| (from..=to).contains(&line.at_us));
        inside.filter_map(|line| line.word("latency")?.parse().ok()).for_each(|part| latency.add(&part));
        for (quantile, share) in [("p50", 0.50), ("p99", 0.99)] {
            let value = latency.quantile(share).map(|value| (format!("{quantile}_us_{name}"), value));
            trial.metrics.extend(value);
        }
    }
    trial.metrics.insert("request_errors".into(), errors);
    let latencies: Vec<(f64, f64)> = lines
        .iter()
        .filter_map(|line| Some(((line.at_us - trial.begin_us) as f64 / 1e6, line.number("p99_us")? / 1e3)))
        .collect();
    json!({ "points": rates["points"], "end_s": rates["end_s"], "p99_ms": latencies })
}

fn targets(runs: &[Run], sizes_mib: &[u64], qemu: &Qemu) -> Result<Vec<Target>> {
    let exact = Mover::Sterna(sterna::options(TRACKING[0].0)?);
    let of = |workload: &str, mover: &Mover| {
        let (workload, mover) = (workload.to_owned(), mover.clone());
        move |run: &Run| is_row(run, &workload, &mover, &qemu.label)
    };
    let metric = |name: String| move |run: &Run| run.metrics.get(&name).copied();
    let workloads = || sizes_mib.iter().map(|mib| workload(*mib));
    // The inverse: the worst is the greatest.
    let slower = worst(workloads().map(|workload| {
        ratio(runs, metric(format!("{RATE}_during")), of(&workload, &vanilla()), of(&workload, &exact))
    }));
    let later = worst(
        workloads().map(|workload| ratio(runs, metric(P99.into()), of(&workload, &exact), of(&workload, &vanilla()))),
    );
    Ok(vec![
        Target::at_least(
            "requests/s during migration ÷ under QEMU's own, worst RAM size",
            0.98,
            slower.map(|slower| 1.0 / slower),
        ),
        Target::at_most("p99 latency during migration ÷ under QEMU's own, worst RAM size", 1.0, later),
    ])
}

/// As in the paper: throughput and latency, each technique beside QEMU's own migration.
fn plot(runs: &[Run], sizes_mib: &[u64], directory: &Path) -> Result<()> {
    for mib in sizes_mib {
        let workload = workload(*mib);
        for (options, name) in TRACKING {
            let own = Mover::Sterna(sterna::options(options)?);
            let (movers, size) = ([&vanilla(), &own], mib / 1024);
            let file = format!("requests_{name}_{size}gib");
            timeline::plot(runs, &workload, &movers, directory, &file, (&workload, "requests per second"))?;
            // The same runs with their other series.
            let latencies: Vec<Run> = runs.iter().map(with_latencies).collect();
            let file = format!("p99_{name}_{size}gib");
            timeline::plot(&latencies, &workload, &movers, directory, &file, (&workload, "p99 latency, ms"))?;
        }
    }
    Ok(())
}

fn with_latencies(run: &Run) -> Run {
    let mut run = run.clone();
    if let Some(seen) = run.details.get_mut("seen").filter(|seen| !seen.is_null()) {
        seen["points"] = seen["p99_ms"].take();
    }
    run
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::net::Ipv4Addr;

    #[test]
    fn latencies_of_intervals_are_added_up_before_a_quantile_is_taken() {
        let line = |at_us: i64, latency: &Histogram| Line {
            from: Ipv4Addr::LOCALHOST,
            at_us,
            text: format!("YCSB ok ops_per_s=1.0 errors=1 p99_us=5 latency={latency}"),
        };
        let quick = Histogram::from_iter([1000; 990]);
        let slow = Histogram::from_iter([50_000; 20]);
        let mut trial = Trial {
            lines: vec![
                line(9_000_000, &quick),
                line(11_000_000, &quick),
                line(12_400_000, &slow),
                line(20_000_000, &quick),
            ],
            settled_us: 9_500_000,
            begin_us: 10_000_000,
            end_us: 12_000_000,
            ..Trial::default()
        };
        look(&mut trial);
        let metric = |name: &str| trial.metrics[name];
        assert!((900.0..1100.0).contains(&metric("p50_us_during")));
        assert!((45_000.0..55_000.0).contains(&metric(P99)), "{}", metric(P99));
        assert!(metric("p99_us_before") < 1100.0 && metric("p99_us_after") < 1100.0);
        assert_eq!(metric("request_errors"), 4.0);
    }

    #[test]
    fn both_targets_are_judged_at_the_worst_size_and_unknown_where_one_is() {
        let qemu = Qemu { label: "10.0".into(), path: "/nonexistent".into() };
        let exact = Mover::Sterna(sterna::options("").unwrap());
        let run = |mover: &Mover, mib: u64, rate: f64, p99: f64| Run {
            config: [("workload", workload(mib)), ("mover", mover.label()), ("qemu", "10.0".into())]
                .into_iter()
                .map(|(name, value)| (name.to_owned(), value.into()))
                .collect(),
            baseline: mover.is_baseline(),
            repeat: 0,
            metrics: BTreeMap::from([(format!("{RATE}_during"), rate), (P99.to_owned(), p99)]),
            details: serde_json::Value::Null,
        };
        let runs = [
            run(&vanilla(), 1024, 100.0, 10.0),
            run(&exact, 1024, 100.0, 20.0),
            run(&vanilla(), 2048, 100.0, 10.0),
            run(&exact, 2048, 50.0, 5.0),
        ];
        let measured = |sizes: &[u64]| -> Vec<Option<f64>> {
            targets(&runs, sizes, &qemu).unwrap().into_iter().map(|target| target.measured).collect()
        };
        assert_eq!(measured(&[1024, 2048]), [Some(0.5), Some(2.0)]);
        assert_eq!(measured(&[1024, 4096]), [None, None]);
    }
}
