//! The post-copy paper's figures 4 to 6 and table 2: a guest of 2 GiB that reads or writes a working set again and
//! again, one page after another, moved by every mode; the rest of its memory is free, and in some rows was used
//! before.

use std::path::Path;
use std::time::Duration;

use super::curves::Curves;
use super::judge::{derive_quotient, is_row, metric, middle, ratio, time_ms, worst};
use super::{Case, Options, Plan, movers, qemus, try_all};
use crate::baseline::Method;
use crate::error::{Error, Result};
use crate::lab::Lab;
use crate::result::{Run, Target, rows};
use crate::trial::{Mover, NETWORK_FAULTS, Qemu};

/// The paper's working sets, MiB.
const SIZES_MIB: [u64; 7] = [8, 16, 32, 64, 128, 256, 512];
/// The guest's RAM, MiB.
const MEMORY_MIB: u64 = 2048;
/// The memory that some guests have used and freed before, MiB.
const FREED_MIB: u64 = 1024;

const POSTCOPY: &str = "--mode postcopy";
const STOP_AND_COPY: &str = "--mode stop-and-copy";
/// Sterna's rows for guests that have used and freed memory, which still has its old content.
const WITHOUT_SKIPPING: [&str; 2] = ["--mode stop-and-copy --skip-free off", "--mode postcopy --skip-free off"];
/// Sterna's rows, as on the command line.
const STERNA: [&str; 6] = [
    STOP_AND_COPY,
    "--mode precopy",
    POSTCOPY,
    "--mode hybrid",
    "--mode postcopy --prepaging linear",
    "--mode postcopy --prepaging off",
];
const QEMU: [Method; 5] =
    [Method::StopAndCopy, Method::Vanilla, Method::PurePostcopy, Method::PurePostcopyPreempt, Method::PostcopyPreempt];

/// Faults that had to wait for the network, as a share of the working set's pages.
const FAULT_SHARE: &str = "network_faults_to_working_set";
/// Page bodies sent, as a share of the pages that were not zeros, free in the guest or not.
const SENT_TO_NEEDED: &str = "sent_to_needed";

/// What the guest does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Workload {
    access: &'static str,
    mib: u64,
    freed_mib: u64,
}

impl Workload {
    fn name(&self) -> String {
        let freed =
            if self.freed_mib > 0 { format!(", {} MiB used before and free", self.freed_mib) } else { String::new() };
        format!("sequential {} over {} MiB{freed}", self.access, self.mib)
    }

    fn jobs(&self) -> String {
        format!("toucher:--mib,{},--access,{},--freed-mib,{}", self.mib, self.access, self.freed_mib)
    }

    fn pages(&self) -> f64 {
        (self.mib << 8) as f64
    }

    /// Whether a short run has this row.
    fn is_quick(&self, sterna: Option<&str>, method: Option<Method>) -> bool {
        let needed = sterna.is_some_and(|row| [POSTCOPY, STOP_AND_COPY].contains(&row))
            || method == Some(Method::PurePostcopyPreempt);
        // The larger writer shows the differences between modes; the other workloads have only the rows that the
        // targets need. Where nothing is pushed beside faults, the writer takes longer than a short run allows.
        needed
            || self.access == "write"
                && self.mib == 256
                && !sterna.is_some_and(|row| row.contains("off"))
                && !matches!(method, Some(Method::PurePostcopy | Method::PostcopyPreempt))
    }
}

fn workloads(quick: bool) -> Vec<Workload> {
    let plain = |access, mib| Workload { access, mib, freed_mib: 0 };
    let freed = |mib| Workload { freed_mib: FREED_MIB, ..plain("write", mib) };
    if quick {
        return vec![plain("write", 64), plain("write", 256), plain("read", 256), freed(64)];
    }
    let all = ["read", "write"].into_iter().flat_map(|access| SIZES_MIB.map(|mib| plain(access, mib)));
    all.chain([freed(64), freed(512)]).collect()
}

pub(super) fn plan(options: &Options) -> Result<Plan> {
    let repeats = options.repeat.unwrap_or(if options.quick { 1 } else { 3 });
    let mut qemus = qemus()?;
    let newest = qemus.pop().ok_or_else(|| Error::Usage("no QEMU".into()))?;
    let workloads = workloads(options.quick);
    let cases = cases(&workloads, options.quick, &newest, &qemus)?;
    let judged = workloads.clone();
    let plan = Plan::new(move |record| {
        let lab = Lab::up(movers::lab_config())?;
        try_all(&lab, &cases, repeats, record, |case, metrics| {
            let workload = workloads.iter().find(|workload| workload.name() == case.workload);
            let share = workload.and_then(|workload| Some(metrics.get(NETWORK_FAULTS)? / workload.pages()));
            metrics.extend(share.map(|share| (FAULT_SHARE.into(), share)));
            if case.mover.is_baseline() {
                return;
            }
            derive_quotient(metrics, SENT_TO_NEEDED, "pages_sent", "nonzero_pages");
        });
        Ok(())
    });
    Ok(plan.judged(move |runs| targets(runs, &judged, &newest.label)).drawn(plot))
}

fn cases(workloads: &[Workload], quick: bool, newest: &Qemu, older: &[Qemu]) -> Result<Vec<Case>> {
    let mut cases = Vec::new();
    for workload in workloads {
        let mut add = |mover: Mover, qemu: &Qemu| {
            cases.push(Case {
                workload: workload.name(),
                memory_bytes: MEMORY_MIB << 20,
                jobs: workload.jobs(),
                ready: Some("TOUCHER ready"),
                load: None,
                mover,
                qemu: qemu.clone(),
                settle: Duration::from_secs(2),
                limit: Duration::from_secs(if quick { 20 } else { 60 }),
            });
        };
        for row in STERNA.iter().filter(|row| !quick || workload.is_quick(Some(row), None)) {
            add(movers::sterna(row)?, newest);
        }
        for row in WITHOUT_SKIPPING.iter().filter(|_| workload.freed_mib > 0) {
            add(movers::sterna(row)?, newest);
        }
        let methods: Vec<Method> =
            QEMU.into_iter().filter(|method| !quick || workload.is_quick(None, Some(*method))).collect();
        movers::known(newest, &methods)?.into_iter().for_each(|mover| add(mover, newest));
        for qemu in older.iter().filter(|_| !quick) {
            movers::known(qemu, &[Method::PurePostcopy])?.into_iter().for_each(|mover| add(mover, qemu));
        }
    }
    Ok(cases)
}

fn targets(runs: &[Run], workloads: &[Workload], qemu: &str) -> Result<Vec<Target>> {
    let (postcopy, stopped) = (movers::sterna(POSTCOPY)?, movers::sterna(STOP_AND_COPY)?);
    let worst_of = |name: &str| {
        worst(workloads.iter().map(|workload| middle(runs, &workload.name(), &postcopy, qemu, metric(name))))
    };
    let [_, everything] = WITHOUT_SKIPPING.map(movers::sterna);
    let everything = everything?;
    // Where free pages are skipped, fewer pages are needed than those that are not zeros: such rows show less.
    let sent = worst(workloads.iter().map(|workload| {
        let mover = if workload.freed_mib > 0 { &everything } else { &postcopy };
        middle(runs, &workload.name(), mover, qemu, metric(SENT_TO_NEEDED))
    }));
    let to_stopped = worst(workloads.iter().map(|workload| {
        let name = workload.name();
        let of = |mover| {
            let name = name.clone();
            move |run: &Run| is_row(run, &name, mover, qemu)
        };
        ratio(runs, time_ms, of(&postcopy), of(&stopped))
    }));
    Ok(vec![
        Target::at_most("post-copy: network faults ÷ pages of the working set, worst row", 0.01, worst_of(FAULT_SHARE)),
        Target::at_most("post-copy: downtime by events, ms, worst row", 8.0, worst_of("downtime_ms")),
        Target::at_most("post-copy: downtime at the meter, ms, worst row", 12.0, worst_of("gap_ms")),
        Target::at_most("post-copy: pages sent ÷ pages needed, worst row", 1.001, sent),
        Target::at_most("post-copy: total time ÷ stop-and-copy's, worst row", 1.05, to_stopped),
        Target::at_most("post-copy: pages that came twice, worst row", 0.0, worst_of("duplicate_pages")),
    ])
}

/// Plots as the paper's figures 4, 5 and 6 and its table 2, over the working set, readers and writers apart.
fn plot(runs: &[Run], directory: &Path) -> Result<()> {
    const METRICS: [(&str, &str); 4] = [
        ("total_ms", "total time, ms"),
        ("downtime_ms", "downtime, ms"),
        ("pages_sent", "pages sent"),
        (FAULT_SHARE, "network faults ÷ pages of the working set"),
    ];
    let rows = rows(runs);
    for access in ["read", "write"] {
        for (metric, y_label) in METRICS {
            let name = |mib| Workload { access, mib, freed_mib: 0 }.name();
            Curves {
                title: format!("sequential {access}s in {} GiB", MEMORY_MIB / 1024),
                x_label: "working set, MiB",
                y_label,
                metric,
                x: &|workload| SIZES_MIB.into_iter().find(|mib| workload == name(*mib)).map(|mib| mib as f64),
            }
            .write(&rows, directory, &format!("{metric}_{access}"))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;

    #[test]
    fn every_target_is_judged_at_the_worst_workload() {
        let two = [workloads(true)[0], workloads(true)[3]];
        let (postcopy, stopped) = (movers::sterna(POSTCOPY).unwrap(), movers::sterna(STOP_AND_COPY).unwrap());
        let run = |workload: &Workload, mover: &Mover, total: f64, faults: f64| {
            let metrics = [
                ("total_ms", total),
                (FAULT_SHARE, faults),
                ("downtime_ms", 7.0),
                ("gap_ms", 13.0),
                (SENT_TO_NEEDED, 1.0),
                ("duplicate_pages", 0.0),
            ];
            sample(&workload.name(), mover, "10.0", &metrics)
        };
        let mut runs = vec![
            run(&two[0], &stopped, 1000.0, 0.0),
            run(&two[0], &postcopy, 1010.0, 0.005),
            run(&two[1], &stopped, 1000.0, 0.0),
            run(&two[1], &movers::sterna(WITHOUT_SKIPPING[1]).unwrap(), 5000.0, 0.5),
            run(&two[1], &postcopy, 1100.0, 0.02),
        ];
        let measured = |runs: &[Run]| -> Vec<_> {
            targets(runs, &two, "10.0").unwrap().iter().map(|target| (target.measured, target.met)).collect()
        };
        let expected = [(0.02, false), (7.0, true), (13.0, false), (1.0, true), (1.1, false), (0.0, true)];
        assert_eq!(measured(&runs), expected.map(|(value, met)| (Some(value), met)));
        runs.pop();
        let mut expected = [(None, false); 6];
        expected[3] = (Some(1.0), true);
        assert_eq!(measured(&runs), expected, "a row that was not measured is not left out");
    }

    #[test]
    fn a_short_run_has_what_the_targets_need_and_few_rows_more() {
        let Ok(path) = crate::tools::qemu_7_2() else { return eprintln!("skipped: QEMU 7.2 is absent") };
        let installed = Qemu { label: "10.0".into(), path };
        let cases = cases(&workloads(true), true, &installed, &[]).unwrap();
        for workload in workloads(true) {
            let has = |row: &str| {
                let label = movers::sterna(row).unwrap().label();
                cases.iter().any(|case| case.workload == workload.name() && case.mover.label() == label)
            };
            assert!(has(POSTCOPY) && has(STOP_AND_COPY), "{workload:?}");
        }
        // Each takes 24 s at most, and two are tried for 20 s in vain.
        assert!(cases.len() <= 20, "{}", cases.len());
    }
}
