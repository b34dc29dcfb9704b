//! What self-ballooning does to migrations: a guest has used most of its RAM and given it back to its own kernel, whose
//! free memory still has the old content. It is moved before and after Sterna has taken that memory, beside QEMU's own
//! migration of the same guest.

use std::path::Path;
use std::time::Duration;

use super::judge::{derive_quotient, is_row, metric, ratio, time_ms};
use super::{Case, Options, Plan, Watch, movers, qemus, try_each};
use crate::baseline::Method;
use crate::error::{Error, Result};
use crate::guest::{Balloon, Guest};
use crate::lab::Lab;
use crate::plot::BarPlot;
use crate::result::{Row, Run, Target, rows};
use crate::trial::{Mover, Qemu};

/// What the guest works on, MiB, and how fast, MiB/s: pre-copy converges.
const WORKING_SET_MIB: u64 = 64;
const RATE_MIB: u64 = 8;
/// The end of the name of a guest whose balloon has settled.
const SETTLED: &str = ", balloon settled before";
/// Sterna's rows, as on the command line, each with QEMU's similar way. Free pages that are not in the balloon are not
/// skipped: this is about the balloon.
const MODES: [(&str, Method); 2] = [
    ("--mode precopy --skip-free off", Method::Vanilla),
    ("--mode postcopy --skip-free off", Method::PurePostcopyPreempt),
];
/// Page bodies sent, as a share of the pages that were not zeros just before.
const SENT_TO_NONZERO: &str = "sent_to_nonzero";

/// The sizes of the guest's memory, MiB.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    memory_mib: u64,
    freed_mib: u64,
}

impl Sizes {
    fn of(quick: bool) -> Self {
        if quick { Self { memory_mib: 1024, freed_mib: 640 } } else { Self { memory_mib: 2048, freed_mib: 1536 } }
    }

    fn workload(self, settled: bool) -> String {
        let Self { memory_mib, freed_mib } = self;
        format!("{freed_mib} of {memory_mib} MiB used before and free{}", if settled { SETTLED } else { "" })
    }
}

pub(super) fn plan(options: &Options) -> Result<Plan> {
    let repeats = options.repeat.unwrap_or(if options.quick { 1 } else { 5 });
    let newest = qemus()?.pop().ok_or_else(|| Error::Usage("no QEMU".into()))?;
    let sizes = Sizes::of(options.quick);
    let cases = cases(sizes, &newest)?;
    let plan = Plan::new(move |record| {
        let lab = Lab::up(movers::lab_config())?;
        let watch = Watch { fit, ..Watch::default() };
        try_each(&lab, &cases, repeats, watch, record, |_, trial| {
            derive_quotient(&mut trial.metrics, SENT_TO_NONZERO, "pages_sent", "nonzero_pages");
            serde_json::Value::Null
        });
        Ok(())
    });
    Ok(plan.judged(move |runs| targets(runs, sizes, &newest.label)).drawn(plot))
}

/// Every guest has the device; nothing is in it unless the case says so.
fn fit(case: &Case, guest: &mut Guest) {
    guest.balloon = if case.workload.ends_with(SETTLED) { Balloon::Settled } else { Balloon::Idle };
}

fn cases(sizes: Sizes, qemu: &Qemu) -> Result<Vec<Case>> {
    let case = |mover: Mover, settled: bool| Case {
        workload: sizes.workload(settled),
        memory_bytes: sizes.memory_mib << 20,
        jobs: format!(
            "toucher:--mib,{WORKING_SET_MIB},--access,write,--rate,{RATE_MIB},--freed-mib,{}",
            sizes.freed_mib
        ),
        ready: Some("TOUCHER ready"),
        load: None,
        mover,
        qemu: qemu.clone(),
        settle: Duration::from_secs(2),
        limit: Duration::from_secs(60),
    };
    let mut cases = Vec::new();
    for (mode, method) in MODES {
        let own = movers::sterna(mode)?;
        cases.extend([case(own.clone(), false), case(own, true)]);
        cases.extend(movers::known(qemu, &[method])?.into_iter().map(|mover| case(mover, false)));
    }
    Ok(cases)
}

/// The targets. Nobody has set an aim for these rows, except that the balloon must make nothing worse.
fn targets(runs: &[Run], sizes: Sizes, qemu: &str) -> Result<Vec<Target>> {
    let (before, after) = (sizes.workload(false), sizes.workload(true));
    let mut targets = Vec::new();
    for (mode, _) in MODES {
        let mover = movers::sterna(mode)?;
        let to_before = |value: &dyn Fn(&Run) -> Option<f64>| {
            ratio(runs, value, |run| is_row(run, &after, &mover, qemu), |run| is_row(run, &before, &mover, qemu))
        };
        let name = mode.split_whitespace().nth(1).unwrap_or(mode);
        let target = |what: &str, measured| {
            Target::at_most(format!("{name}: {what} after the balloon settled ÷ without"), 1.0, measured)
        };
        targets.push(target("total time", to_before(&time_ms)));
        targets.push(target("bytes on the wire", to_before(&metric("bytes_on_wire"))));
        targets.push(target("pages sent", to_before(&metric("pages_sent"))));
    }
    Ok(targets)
}

fn plot(runs: &[Run], directory: &Path) -> Result<()> {
    const METRICS: [(&str, &str); 3] =
        [("total_ms", "total time, ms"), ("bytes_on_wire", "bytes on the wire"), ("downtime_ms", "downtime, ms")];
    let rows = rows(runs);
    for (metric, label) in METRICS {
        let bar = |row: &Row| {
            let settled = if row.word("workload").ends_with(SETTLED) { SETTLED } else { "" };
            Some((format!("{}{settled}", row.word("mover")), row.metrics.get(metric)?.median))
        };
        let bars = rows.iter().filter_map(bar).collect();
        BarPlot { title: "a guest whose free memory was used".into(), label: label.into(), bars }
            .write(directory, metric)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;

    #[test]
    fn a_guest_is_judged_against_itself_without_the_balloon_and_by_the_same_mode() {
        let sizes = Sizes::of(true);
        let run = |mode: &str, settled: bool, ms: f64, bytes: f64| {
            let mover = movers::sterna(mode).unwrap();
            let metrics = [("total_ms", ms), ("bytes_on_wire", bytes), ("pages_sent", bytes / 4096.0)];
            sample(&sizes.workload(settled), &mover, "10.0", &metrics)
        };
        let runs = [
            run(MODES[0].0, false, 6000.0, 800e6),
            run(MODES[0].0, true, 1500.0, 200e6),
            run(MODES[1].0, true, 1000.0, 100e6),
        ];
        let measured: Vec<_> = targets(&runs, sizes, "10.0").unwrap().iter().map(|target| target.measured).collect();
        assert_eq!(measured, [Some(0.25), Some(0.25), Some(0.25), None, None, None]);
    }

    #[test]
    fn only_the_rows_that_say_so_have_a_balloon_that_settled() {
        let Ok(path) = crate::tools::qemu_7_2() else { return eprintln!("skipped: QEMU 7.2 is absent") };
        let cases = cases(Sizes::of(true), &Qemu { label: "7.2".into(), path }).unwrap();
        let settled: Vec<_> = cases.iter().filter(|case| case.workload.ends_with(SETTLED)).collect();
        assert_eq!(settled.len(), MODES.len());
        assert!(settled.iter().all(|case| !case.mover.is_baseline()), "the balloon is Sterna's");
    }
}
