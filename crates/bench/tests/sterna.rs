//! Sterna moves a real guest between two hosts of a lab. Needs root, QEMU, the guest's image and the built programs.

use std::collections::HashSet;
use std::time::Duration;

use sterna_api::MigrateOptions;
use sterna_bench::demo;
use sterna_bench::load::memcached::LoadConfig;
use sterna_bench::trial::{self, Mover, Qemu, Setup};
use sterna_bench::{Guest, Lab, LabConfig, tools};

/// Whether a guest can be moved here; the reason is said where it cannot.
fn can_run() -> bool {
    let needed =
        [tools::sternad(), tools::sterna(), tools::agent(), tools::kernel(), tools::initrd(), tools::qemu_7_2()];
    let absent = needed.iter().find_map(|found| found.as_ref().err());
    absent.iter().for_each(|error| eprintln!("skipped: {error}"));
    let is_root = nix::unistd::Uid::effective().is_root();
    if !is_root {
        eprintln!("skipped: a lab needs root");
    }
    absent.is_none() && is_root
}

#[test]
fn a_guest_that_goes_on_as_eleven_finds_eleven_answers_with_what_it_had_computed() {
    if !can_run() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("report.json");
    assert!(demo::fork::run(Some(&file)).unwrap(), "an answer is wrong");
    let report: serde_json::Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let seen = &report["fork"];
    let of = |key: &str| seen["answers"].as_array().unwrap().iter().map(|one| one[key].to_string()).collect();
    let [guests, numbers]: [HashSet<String>; 2] = ["guest", "from"].map(of);
    assert_eq!((guests.len(), numbers.len()), (11, 11), "{seen:#}");
    let bytes = |key: &str| seen[key].as_u64().unwrap();
    assert!(bytes("all_bytes") < 3 * bytes("one_bytes"), "eleven take as much as three would: {seen:#}");
    assert!(seen["report"]["pause_ms"].as_f64().unwrap() > 0.0);
}

#[test]
fn sternas_migration_is_measured_as_qemus_own_is_and_the_guest_is_unharmed() {
    if !can_run() {
        return;
    }
    let lab = Lab::up(LabConfig::pair(&format!("sterna{}", std::process::id()))).unwrap();
    let mut guest = Guest::new(&lab, "g", 7, "checker:--mib,16,--rate,8;memcached:-m,64");
    guest.memory_bytes = 512 << 20;
    let trial = trial::run(&Setup {
        lab: &lab,
        guest,
        ready: Some("CHECKER ready"),
        mover: &Mover::Sterna(MigrateOptions { verify: true, ..MigrateOptions::default() }),
        qemu: &Qemu { label: "7.2".into(), path: tools::qemu_7_2().unwrap() },
        load: Some(LoadConfig { connections: 1, keys: 100, ..LoadConfig::mixed(1) }),
        settle: Duration::from_secs(3),
        working_set: Duration::ZERO,
        after: Duration::from_secs(3),
        limit: trial::LIMIT,
        say: &|step| println!("{step}"),
    })
    .unwrap();
    println!("{:#?}", trial.metrics);

    let report = trial.sterna.unwrap();
    assert!(report.verify.checked && report.verify.mismatches == 0, "{:?}", report.verify);
    let metric = |name: &str| *trial.metrics.get(name).unwrap_or_else(|| panic!("no {name} in {:?}", trial.metrics));
    assert!(metric("link_bytes") > 0.95 * metric("bytes_on_wire"), "what the report says went over the link did");
    assert!(metric("gap_ms") + 1.0 > metric("downtime_ms") * 0.9, "{:?}", trial.metrics);
    assert!(metric("requests_per_s_before") > 0.0);
    let after = trial.checker.iter().filter(|line| line.at_us > trial.end_us);
    assert_eq!(after.filter_map(|line| line.number("bad")).next_back(), Some(0.0), "{:?}", trial.checker);
    let name = lab.name().to_owned();
    lab.down().unwrap();
    assert!(!sterna_bench::lab::state::directory(&name).exists());
}
