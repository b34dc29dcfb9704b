//! D-Track's figure 14 and table 1: how long the migration of a guest takes whose memory is a cache under sets, by
//! every technique alone and combined.

use std::path::Path;

use super::judge::{TO_LIMIT, best_choice, derive_limit, derive_shares, is_row, metric, middle, ratio, time_ms, worst};
use super::{Case, Options, Plan, dtrack, is, movers, qemus, try_all};
use crate::baseline::Method;
use crate::error::{Error, Result};
use crate::lab::Lab;
use crate::result::{Row, Run, Target};

/// The tracked kinds of fake dirty pages, alone and with each encoding.
const TRACKING: [&str; 4] = ["exact", "dtrack-v1", "dtrack-v2", "adaptive"];
const ENCODINGS: [&str; 4] = ["", "--delta xbzrle", "--compress lz4", "--compress zstd"];
/// The options that are judged beside the defaults.
const ZSTD: &str = "--compress zstd";
/// The modes that `auto`, the default, chooses between.
const PRECOPY: &str = "--mode precopy";
const FOLLOWING: [&str; 2] = ["--mode hybrid", "--mode postcopy"];
/// The default without looks for free pages, of which there are hardly any here.
const WITHOUT_SKIPPING: &str = "--skip-free off";
/// The paper's own technique alone; and no technique at all.
const PLAIN: [&str; 2] = [
    "--fake-dirty dtrack-v1 --content-hash off --hot-pages send --skip-free off",
    "--fake-dirty off --content-hash off --hot-pages send --skip-free off",
];

pub(super) fn plan(options: &Options) -> Result<Plan> {
    let sizes = dtrack::sizes_mib(options);
    // Filling a cache takes most of a trial: a short run has one of each, so that it is done in ten minutes.
    let repeats = options.repeat.unwrap_or(if options.quick { 1 } else { 3 });
    let quick = options.quick;
    let cases = cases(sizes, quick)?;
    let newest = cases.first().map(|case| case.qemu.label.clone()).unwrap_or_default();
    let plan = Plan::new(move |record| {
        let lab = Lab::up(movers::lab_config())?;
        try_all(&lab, &cases, repeats, record, |_, metrics| {
            derive_shares(&lab, metrics);
            derive_limit(movers::LINK_BYTES_PER_S, metrics);
        });
        Ok(())
    });
    Ok(plan.judged(move |runs| targets(runs, sizes, quick, &newest)).drawn(plot))
}

/// Sterna's rows, as on the command line; the first is the default.
fn rows_of_sterna(quick: bool) -> Vec<String> {
    let row = |tracking: &str, encoding: &str| {
        let tracking = if tracking == TRACKING[0] { String::new() } else { format!("--fake-dirty {tracking} ") };
        format!("{tracking}{encoding}").trim().to_owned()
    };
    let all = TRACKING.iter().flat_map(|tracking| ENCODINGS.iter().map(move |encoding| (*tracking, *encoding)));
    // A short run has each tracking bare, and each encoding with the default tracking.
    let chosen = all.filter(|(tracking, encoding)| !quick || *tracking == TRACKING[0] || encoding.is_empty());
    let mut rows: Vec<String> = chosen.map(|(tracking, encoding)| row(tracking, encoding)).collect();
    rows.extend([PRECOPY, FOLLOWING[0], FOLLOWING[1], WITHOUT_SKIPPING].map(str::to_owned));
    if !quick {
        rows.extend(PLAIN.map(str::to_owned));
    }
    rows
}

fn cases(sizes_mib: &[u64], quick: bool) -> Result<Vec<Case>> {
    let mut qemus = qemus()?;
    let newest = qemus.pop().ok_or_else(|| Error::Usage("no QEMU".into()))?;
    let own = [Method::Vanilla, Method::Xbzrle(64), Method::MultifdZstd(2), Method::AutoConverge];
    let mut cases = Vec::new();
    for mib in sizes_mib {
        for mover in movers::known(&newest, &own)? {
            cases.push(dtrack::memcached(*mib, mover, &newest));
        }
        for options in rows_of_sterna(quick) {
            cases.push(dtrack::memcached(*mib, movers::sterna(&options)?, &newest));
        }
        // These are methods that newer versions have dropped.
        for older in qemus.iter().filter(|_| !quick) {
            for mover in movers::known(older, &[Method::Vanilla, Method::Compress(2)])? {
                cases.push(dtrack::memcached(*mib, mover, older));
            }
        }
    }
    Ok(cases)
}

fn targets(runs: &[Run], sizes_mib: &[u64], quick: bool, newest: &str) -> Result<Vec<Target>> {
    let to_vanilla = |options: &str| -> Result<Option<f64>> {
        let (own, vanilla) = (movers::sterna(options)?, movers::vanilla());
        Ok(worst(sizes_mib.iter().map(|mib| {
            let workload = dtrack::workload(*mib);
            let (own, vanilla) = (&own, &vanilla);
            ratio(
                runs,
                time_ms,
                |run| is_row(run, &workload, own, newest),
                |run| is_row(run, &workload, vanilla, newest),
            )
        })))
    };
    let (default, without) = (movers::sterna("")?, movers::sterna(WITHOUT_SKIPPING)?);
    let to_without = worst(sizes_mib.iter().map(|mib| {
        let workload = dtrack::workload(*mib);
        let of = |mover| {
            let workload = &workload;
            move |run: &Run| is_row(run, workload, mover, newest)
        };
        ratio(runs, time_ms, of(&default), of(&without))
    }));
    let zstd = movers::sterna(ZSTD)?;
    let to_every_qemu = worst(sizes_mib.iter().flat_map(|mib| {
        let workload = dtrack::workload(*mib);
        let zstd = &zstd;
        rivals(runs, &workload).into_iter().map(move |(mover, qemu)| {
            let rival = [("workload", workload.as_str()), ("mover", mover.as_str()), ("qemu", qemu.as_str())];
            ratio(runs, time_ms, |run| is_row(run, &workload, zstd, newest), |run| run.baseline && is(run, &rival))
        })
    }));
    let of = |mib: u64, options: &str, name: &str| -> Result<Option<f64>> {
        Ok(middle(runs, &dtrack::workload(mib), &movers::sterna(options)?, newest, metric(name)))
    };
    let worst_of = |rows: &[String], name: &str| -> Result<Option<f64>> {
        let each = sizes_mib.iter().flat_map(|mib| rows.iter().map(move |row| (*mib, row)));
        Ok(worst(each.map(|(mib, row)| of(mib, row, name)).collect::<Result<Vec<_>>>()?))
    };
    let regret = |name: &str| -> Result<Option<f64>> {
        let mut ratios = Vec::new();
        for mib in sizes_mib {
            let [hybrid, postcopy] = FOLLOWING.map(|row| of(*mib, row, name));
            let best = best_choice(of(*mib, PRECOPY, name)?, hybrid?, postcopy?);
            ratios.push(of(*mib, "", name)?.zip(best).map(|(own, best)| own / best));
        }
        Ok(worst(ratios))
    };
    let following = FOLLOWING.map(str::to_owned);
    Ok(vec![
        Target::at_most(
            "hybrid, post-copy: total time less set-up ÷ (pages in use ÷ link), worst row",
            1.05,
            worst_of(&following, TO_LIMIT)?,
        ),
        Target::at_most("pre-copy: total time ÷ QEMU's, worst RAM size", 0.88, to_vanilla(PRECOPY)?),
        Target::at_most("with zstd: total time ÷ QEMU's, worst RAM size", 0.40, to_vanilla(ZSTD)?),
        Target::at_most("with zstd: total time ÷ the best QEMU row's, worst RAM size", 0.97, to_every_qemu),
        Target::at_most("downtime by events, ms, worst row", 20.0, worst_of(&rows_of_sterna(quick), "downtime_ms")?),
        Target::at_most("default options: total time ÷ without skipping free pages, worst RAM size", 1.01, to_without),
        Target::at_most("auto: total time ÷ the best choice's, worst RAM size", 1.05, regret("total_ms")?),
        Target::at_most("auto: bytes on the wire ÷ the best choice's, worst RAM size", 1.05, regret("bytes_on_wire")?),
    ])
}

/// Mover and QEMU of every baseline row of a workload that did not fail each time.
fn rivals(runs: &[Run], workload: &str) -> Vec<(String, String)> {
    let word = |run: &Run, name: &str| run.config.get(name).and_then(|value| value.as_str()).map(str::to_owned);
    let mut rivals = Vec::new();
    for run in runs.iter().filter(|run| run.baseline && is(run, &[("workload", workload)]) && time_ms(run).is_some()) {
        if let Some(rival) = word(run, "mover").zip(word(run, "qemu")).filter(|rival| !rivals.contains(rival)) {
            rivals.push(rival);
        }
    }
    rivals
}

fn plot(runs: &[Run], directory: &Path) -> Result<()> {
    let vanilla = movers::vanilla().label();
    let combined = |row: &Row| ["delta", "compress"].iter().any(|word| row.word("mover").contains(word));
    dtrack::plot(runs, directory, "total_time_qemu", "QEMU's own techniques, and Sterna's defaults", |row| {
        row.baseline || row.word("mover") == "sterna, 1 stream"
    })?;
    dtrack::plot(runs, directory, "total_time_bare", "Fake dirty pages", |row| {
        row.word("mover") == vanilla || !row.baseline && !combined(row)
    })?;
    dtrack::plot(runs, directory, "total_time_combined", "Exact fake dirty pages, with deltas and compression", |row| {
        let other_tracking = row.word("mover").contains("fake-dirty");
        row.word("mover") == vanilla || !row.baseline && !other_tracking
    })
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;
    use crate::trial::Mover;

    fn run(mover: &Mover, mib: u64, qemu: &str, metric: &str, ms: f64) -> Run {
        sample(&dtrack::workload(mib), mover, qemu, &[(metric, ms)])
    }

    #[test]
    fn every_row_of_the_experiment_is_a_different_one_and_the_first_is_the_default() {
        for quick in [true, false] {
            let movers: Vec<String> =
                rows_of_sterna(quick).iter().map(|row| movers::sterna(row).unwrap().label()).collect();
            assert_eq!(movers[0], "sterna, 1 stream");
            assert!(movers.iter().enumerate().all(|(at, mover)| !movers[..at].contains(mover)), "{movers:?}");
            assert_eq!(movers.len(), if quick { 11 } else { 22 });
        }
    }

    #[test]
    fn the_worst_size_is_judged_and_a_baseline_that_was_given_up_counts_what_it_was_tried() {
        let (default, zstd) = (movers::sterna("").unwrap(), movers::sterna(ZSTD).unwrap());
        let precopy = movers::sterna(PRECOPY).unwrap();
        let compress = Mover::Qemu(Method::Compress(2), crate::baseline::Ram::Plain);
        let runs = [
            run(&movers::vanilla(), 1024, "10.0", "total_ms", 1000.0),
            run(&default, 1024, "10.0", "total_ms", 500.0),
            run(&movers::sterna(WITHOUT_SKIPPING).unwrap(), 1024, "10.0", "total_ms", 400.0),
            run(&movers::sterna(WITHOUT_SKIPPING).unwrap(), 2048, "10.0", "total_ms", 6300.0),
            run(&zstd, 1024, "10.0", "total_ms", 300.0),
            run(&movers::vanilla(), 2048, "10.0", "given_up_ms", 9000.0),
            run(&precopy, 1024, "10.0", "total_ms", 500.0),
            run(&precopy, 2048, "10.0", "total_ms", 6300.0),
            run(&default, 2048, "10.0", "total_ms", 6300.0),
            run(&zstd, 2048, "10.0", "total_ms", 900.0),
            run(&compress, 2048, "7.2", "total_ms", 600.0),
        ];
        let measured = |runs: &[Run], sizes: &[u64]| -> Vec<_> {
            targets(runs, sizes, true, "10.0").unwrap().into_iter().map(|target| target.measured).collect()
        };
        let [_, to_qemu, zstd, best, _, skipping, time, bytes] = measured(&runs, &[1024, 2048]).try_into().unwrap();
        assert_eq!([to_qemu, zstd, best, skipping, time], [Some(0.7), Some(0.3), Some(1.5), Some(1.25), Some(1.0)]);
        assert_eq!(bytes, None);
        assert_eq!(measured(&[], &[1024]), [None; 8], "what was not measured is not met");
    }
}
