//! D-Track's figures 8 and 11 to 13: the cost of finding silent stores by a hash of the content, for each hash, alone
//! and combined.

use std::path::Path;
use std::time::Duration;

use super::judge::{derive_shares, is_row, ratio, time_ms, worst};
use super::{Case, Options, Plan, dtrack, movers, qemus, try_all};
use crate::error::{Error, Result};
use crate::lab::Lab;
use crate::result::{Run, Target};
use crate::trial::{LIMIT, Mover, Qemu};

/// The hashes; the paper has the first three.
const HASHES: [&str; 6] = ["sha1", "md5", "murmur3", "xxh3", "blake3", "off"];
/// The options that they are combined with: first none that skip pages, then all that do, then compression as well.
const ALONE: &str = "--fake-dirty off --hot-pages send";
const EXACT: &str = "";
const ZSTD: &str = "--compress zstd";
/// Every store of this workload changes its page, all bytes of it.
const NOTHING_SILENT: &str = "40 MiB/s over 384 MiB, nothing silent";

pub(super) fn plan(options: &Options) -> Result<Plan> {
    let sizes = dtrack::sizes_mib(options);
    let repeats = options.repeat.unwrap_or(if options.quick { 1 } else { 3 });
    let qemu = qemus()?.pop().ok_or_else(|| Error::Usage("no QEMU".into()))?;
    let quick = options.quick;
    let cases = cases(sizes, quick, &qemu)?;
    let plan = Plan::new(move |record| {
        let lab = Lab::up(movers::lab_config())?;
        try_all(&lab, &cases, repeats, record, |_, metrics| derive_shares(&lab, metrics));
        Ok(())
    });
    Ok(plan.judged(move |runs| targets(runs, sizes, quick, &qemu)).drawn(plot))
}

/// Sterna with a hash and the options it is combined with.
fn mover(hash: &str, combined: &str) -> Result<Mover> {
    movers::sterna(&format!("--content-hash {hash} {combined}"))
}

/// A short run combines the paper's hash and the default one only.
fn combinations(quick: bool) -> Vec<(&'static str, &'static str)> {
    let all = [ALONE, EXACT, ZSTD].into_iter().flat_map(|combined| HASHES.map(|hash| (hash, combined)));
    all.filter(|(hash, combined)| !quick || *combined == ALONE || *combined == ZSTD && ["sha1", "xxh3"].contains(hash))
        .collect()
}

fn cases(sizes_mib: &[u64], quick: bool, qemu: &Qemu) -> Result<Vec<Case>> {
    let mut cases = Vec::new();
    for mib in sizes_mib {
        cases.push(dtrack::memcached(*mib, movers::vanilla(), qemu));
        for (hash, combined) in combinations(quick) {
            cases.push(dtrack::memcached(*mib, mover(hash, combined)?, qemu));
        }
    }
    for hash in ["off", "xxh3"] {
        cases.push(Case {
            workload: NOTHING_SILENT.into(),
            memory_bytes: 1 << 30,
            jobs: "idle:--mib,256;dirtier:--mib,384,--rate,40,--silent,0".into(),
            ready: Some("DIRTIER ready"),
            load: None,
            mover: mover(hash, ALONE)?,
            qemu: qemu.clone(),
            settle: Duration::from_secs(3),
            limit: LIMIT,
        });
    }
    Ok(cases)
}

fn targets(runs: &[Run], sizes_mib: &[u64], quick: bool, qemu: &Qemu) -> Result<Vec<Target>> {
    let between = |workload: &str, own: &Mover, other: &Mover| {
        ratio(
            runs,
            time_ms,
            |run| is_row(run, workload, own, &qemu.label),
            |run| is_row(run, workload, other, &qemu.label),
        )
    };
    let mut to_vanilla = Vec::new();
    for (hash, combined) in combinations(quick).into_iter().filter(|(hash, _)| *hash != "off") {
        let own = mover(hash, combined)?;
        to_vanilla.extend(sizes_mib.iter().map(|mib| between(&dtrack::workload(*mib), &own, &movers::vanilla())));
    }
    let xxh3 = between(NOTHING_SILENT, &mover("xxh3", ALONE)?, &mover("off", ALONE)?);
    Ok(vec![
        Target::at_most("any hash, alone or combined: total time ÷ QEMU's, worst row", 1.0, worst(to_vanilla)),
        Target::at_most("nothing silent: total time with xxh3 ÷ without a hash", 1.01, xxh3),
    ])
}

fn plot(runs: &[Run], directory: &Path) -> Result<()> {
    let vanilla = movers::vanilla().label();
    for (name, title, combined) in [
        ("total_time_alone", "Hashes alone", ALONE),
        ("total_time_exact", "Hashes and exact fake dirty pages", EXACT),
        ("total_time_zstd", "Hashes, exact fake dirty pages and zstd", ZSTD),
    ] {
        let movers = HASHES.iter().map(|hash| Ok(mover(hash, combined)?.label())).collect::<Result<Vec<_>>>()?;
        let chosen = |row: &crate::result::Row| {
            let mover = row.word("mover");
            row.word("workload") != NOTHING_SILENT && (mover == vanilla || movers.iter().any(|known| known == mover))
        };
        dtrack::plot(runs, directory, name, title, chosen)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn the_slowest_hash_is_judged_and_the_default_one_against_none() {
        let qemu = Qemu { label: "10.0".into(), path: "/nonexistent".into() };
        let run = |workload: &str, mover: &Mover, ms: f64| Run {
            config: [("workload", workload), ("mover", &mover.label()), ("qemu", "10.0")]
                .into_iter()
                .map(|(name, value)| (name.to_owned(), value.into()))
                .collect(),
            baseline: mover.is_baseline(),
            repeat: 0,
            metrics: BTreeMap::from([("total_ms".to_owned(), ms)]),
            details: serde_json::Value::Null,
        };
        let memcached = dtrack::workload(1024);
        let mut runs = vec![
            run(&memcached, &movers::vanilla(), 1000.0),
            run(NOTHING_SILENT, &mover("off", ALONE).unwrap(), 1000.0),
            run(NOTHING_SILENT, &mover("xxh3", ALONE).unwrap(), 1005.0),
        ];
        for (hash, combined) in combinations(true) {
            // Without a hash it may take any time: that is no hash's fault.
            let ms = if hash == "off" {
                2000.0
            } else if hash == "sha1" && combined == ALONE {
                1100.0
            } else {
                500.0
            };
            runs.push(run(&memcached, &mover(hash, combined).unwrap(), ms));
        }
        let measured: Vec<_> =
            targets(&runs, &[1024], true, &qemu).unwrap().iter().map(|t| (t.measured, t.met)).collect();
        assert_eq!(measured, [(Some(1.1), false), (Some(1.005), true)]);
        runs.pop();
        assert_eq!(targets(&runs, &[1024], true, &qemu).unwrap()[0].measured, None, "a row that failed");
    }

    #[test]
    fn each_combination_is_one_of_its_own() {
        let labels: Vec<String> =
            combinations(false).iter().map(|(hash, combined)| mover(hash, combined).unwrap().label()).collect();
        assert!(labels.iter().enumerate().all(|(at, label)| !labels[..at].contains(label)), "{labels:?}");
    }
}
