//! How long a guest waits for a page in post-copy, with each mover, as the guest itself sees it: a program reads random
//! pages of a working set and times each access.
//!
//! A mover reports how many faults had to wait for the network, and the same number of the guest's longest accesses
//! count as those. So other causes of slowness in a guest (its timer, a busy processor) count for all movers alike, and
//! so do faults that a mover answers quickly. Waits in the pause are not seen, because the guest's clock stands still
//! meanwhile.

use std::path::Path;
use std::time::Duration;

use sterna_guest_programs::histogram::Histogram;

use super::judge::{is_row, metric, ratio};
use super::{Case, Options, Plan, Watch, movers, qemus, try_each};
use crate::baseline::{Method, Ram};
use crate::error::{Error, Result};
use crate::lab::Lab;
use crate::plot::BarPlot;
use crate::result::{Run, Target, rows};
use crate::trial::{Mover, NETWORK_FAULTS, Qemu, Trial};

/// The working set that is read, MiB.
const WORKING_SET_MIB: u64 = 512;
/// The rate, MiB of pages per second: a little of each page is read, so that the reader waits only for pages.
const RATE_MIB: u64 = 16;
/// How often the guest reports, milliseconds.
const INTERVAL_MS: i64 = 250;
const WORKLOAD: &str = "random reads over 512 MiB, 4,096 pages/s";

const POSTCOPY: &str = "--mode postcopy";
/// Sterna's rows, as on the command line.
const STERNA: [&str; 4] =
    [POSTCOPY, "--mode postcopy --prepaging linear", "--mode postcopy --prepaging off", "--mode hybrid"];
const QEMU: [Method; 2] = [Method::PurePostcopy, Method::PurePostcopyPreempt];

/// The median of the longest accesses, microseconds.
const P50: &str = "guest_wait_p50_us";
/// Their 99th percentile.
const P99: &str = "guest_wait_p99_us";

pub(super) fn plan(options: &Options) -> Result<Plan> {
    let repeats = options.repeat.unwrap_or(if options.quick { 3 } else { 10 });
    let mut qemus = qemus()?;
    let newest = qemus.pop().ok_or_else(|| Error::Usage("no QEMU".into()))?;
    let cases = cases(options.quick, &newest, &qemus)?;
    let plan = Plan::new(move |record| {
        let lab = Lab::up(movers::lab_config())?;
        try_each(&lab, &cases, repeats, Watch::default(), record, |_, trial| {
            look(trial);
            serde_json::Value::Null
        });
        Ok(())
    });
    Ok(plan.judged(move |runs| targets(runs, &newest.label)).drawn(plot))
}

fn cases(quick: bool, newest: &Qemu, older: &[Qemu]) -> Result<Vec<Case>> {
    let mut movers: Vec<(Mover, &Qemu)> = Vec::new();
    // Without a push the reader gets its pages one by one, which takes more than a minute.
    for row in STERNA.into_iter().filter(|row| !quick || !row.contains("prepaging")) {
        movers.push((movers::sterna(row)?, newest));
    }
    movers.extend(movers::known(newest, &QEMU)?.into_iter().map(|mover| (mover, newest)));
    for qemu in older.iter().filter(|_| !quick) {
        movers.extend(movers::known(qemu, &[Method::PurePostcopy])?.into_iter().map(|mover| (mover, qemu)));
    }
    let case = |(mover, qemu): (Mover, &Qemu)| Case {
        workload: WORKLOAD.into(),
        memory_bytes: 1 << 30,
        jobs: format!(
            "toucher:--mib,{WORKING_SET_MIB},--pattern,random,--bytes,8,--rate,{RATE_MIB},--interval-ms,{INTERVAL_MS}"
        ),
        ready: Some("TOUCHER ready"),
        load: None,
        mover,
        qemu: qemu.clone(),
        settle: Duration::from_secs(3),
        limit: Duration::from_secs(60),
    };
    Ok(movers.into_iter().map(case).collect())
}

/// Adds what the guest's program saw before the migration and during it.
fn look(trial: &mut Trial) {
    let interval_us = INTERVAL_MS * 1000;
    let histogram = |from_us: i64, to_us: i64| {
        let mut sum = Histogram::default();
        // A line covers the interval before it.
        let inside = trial.lines.iter().filter(|line| line.at_us > from_us && line.at_us - interval_us < to_us);
        let own = inside.filter(|line| line.text.starts_with("TOUCHER ok"));
        own.filter_map(|line| line.word("latency_ns")?.parse().ok()).for_each(|line: Histogram| sum.add(&line));
        sum
    };
    let before = histogram(trial.settled_us - 2_000_000 + interval_us, trial.settled_us - interval_us);
    let during = histogram(trial.begin_us, trial.end_us);
    let mut note = |name: &str, ns: Option<f64>| trial.metrics.extend(ns.map(|ns| (name.to_owned(), ns / 1e3)));
    note("access_p99_us_before", before.quantile(0.99));
    note("access_p50_us", during.quantile(0.5));
    note("access_p99_us", during.quantile(0.99));
    note("access_max_us", during.quantile(1.0));
    let Some(faults) = trial.metrics.get(NETWORK_FAULTS).copied() else { return };
    let accesses = during.count() as f64;
    let mut note = |name: &str, ns: Option<f64>| trial.metrics.extend(ns.map(|ns| (name.to_owned(), ns / 1e3)));
    note(P50, longest(&during, faults, 0.5));
    note(P99, longest(&during, faults, 0.99));
    trial.metrics.insert("accesses".into(), accesses);
}

/// A quantile of the `count` longest values; `None` where `count` is 0, or there are fewer values.
fn longest(histogram: &Histogram, count: f64, quantile: f64) -> Option<f64> {
    let share = count / histogram.count() as f64;
    (share > 0.0 && share <= 1.0).then(|| histogram.quantile(1.0 - share * (1.0 - quantile)))?
}

fn targets(runs: &[Run], qemu: &str) -> Result<Vec<Target>> {
    let own = movers::sterna(POSTCOPY)?;
    let preempt = Mover::Qemu(Method::PurePostcopyPreempt, Ram::Plain);
    let target = |name: &str, value: &str| {
        let measured = ratio(
            runs,
            metric(value),
            |run| is_row(run, WORKLOAD, &own, qemu),
            |run| is_row(run, WORKLOAD, &preempt, "10.0"),
        );
        Target::at_most(format!("{name} of a guest's wait for a page ÷ under QEMU 10.0 with preempt"), 0.5, measured)
    };
    Ok(vec![target("median", P50), target("99th percentile", P99)])
}

fn plot(runs: &[Run], directory: &Path) -> Result<()> {
    let rows = rows(runs);
    for (metric, label, name) in [(P50, "median", "wait_p50"), (P99, "99th percentile", "wait_p99")] {
        let bar = |row: &crate::result::Row| Some((row.mover_and_qemu(), row.metrics.get(metric)?.median));
        let bars = rows.iter().filter_map(bar).collect();
        BarPlot {
            title: format!("{label} of waits for a page, {WORKLOAD}"),
            label: "microseconds, timed in the guest".into(),
            bars,
        }
        .write(directory, name)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::meter::Line;

    #[test]
    fn as_many_of_the_longest_accesses_are_waits_as_there_were_faults() {
        let line = |at_us: i64, text: String| Line { from: Ipv4Addr::LOCALHOST, at_us, text };
        let quick = Histogram::from_iter([1_000; 900]);
        let slow = Histogram::from_iter((1..=100).map(|value| value * 10_000));
        let mut trial = Trial {
            lines: vec![
                line(9_000_000, format!("TOUCHER ok touches=900 latency_ns={quick}")),
                line(11_000_000, format!("TOUCHER ok touches=900 latency_ns={quick}")),
                line(11_250_000, format!("TOUCHER ok touches=100 latency_ns={slow}")),
                line(12_900_000, format!("TOUCHER ok touches=100 latency_ns={slow}")),
                line(11_300_000, format!("OTHER ok latency_ns={slow}")),
            ],
            settled_us: 9_500_000,
            begin_us: 10_000_000,
            end_us: 12_000_000,
            ..Trial::default()
        };
        trial.metrics.insert(NETWORK_FAULTS.into(), 100.0);
        look(&mut trial);
        let metric = |name: &str| trial.metrics[name];
        assert_eq!(metric("accesses"), 1000.0);
        assert!((450.0..560.0).contains(&metric(P50)) && (930.0..1070.0).contains(&metric(P99)), "{:?}", trial.metrics);
        assert!(metric("access_p50_us") < 1.1 && metric("access_p99_us_before") < 1.1);
        assert_eq!(longest(&quick, 901.0, 0.5), None);
        assert_eq!(longest(&Histogram::default(), 1.0, 0.5), None);
    }
}
