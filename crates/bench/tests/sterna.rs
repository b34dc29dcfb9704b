//! Sterna moves a real guest between two hosts of a lab. Needs root, QEMU, the guest's image and the built programs.

use std::time::Duration;

use sterna_api::MigrateOptions;
use sterna_bench::load::memcached::LoadConfig;
use sterna_bench::trial::{self, Mover, Qemu, Setup};
use sterna_bench::{Guest, Lab, LabConfig, tools};

#[test]
fn sternas_migration_is_measured_as_qemus_own_is_and_the_guest_is_unharmed() {
    let needed =
        [tools::sternad(), tools::sterna(), tools::agent(), tools::kernel(), tools::initrd(), tools::qemu_7_2()];
    if let Some(error) = needed.iter().find_map(|found| found.as_ref().err()) {
        return eprintln!("skipped: {error}");
    }
    if !nix::unistd::Uid::effective().is_root() {
        return eprintln!("skipped: a lab needs root");
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
