//! QEMU moves a real guest by itself between two hosts of a lab. Needs root, QEMU and the guest's image.

use std::time::Duration;

use sterna_bench::baseline::{Method, Ram};
use sterna_bench::load::memcached::LoadConfig;
use sterna_bench::trial::{self, Mover, Qemu, Setup};
use sterna_bench::{Guest, Lab, LabConfig, tools};

#[test]
fn qemus_own_migration_is_measured_from_every_side() {
    let (Ok(path), Ok(_), Ok(_)) = (tools::qemu_7_2(), tools::kernel(), tools::initrd()) else {
        return eprintln!("skipped: QEMU or the guest's image is absent");
    };
    if !nix::unistd::Uid::effective().is_root() {
        return eprintln!("skipped: a lab needs root");
    }
    let config = LabConfig { daemons: false, ..LabConfig::pair(&format!("base{}", std::process::id())) };
    let lab = Lab::up(config).unwrap();
    let mut guest = Guest::new(&lab, "g", 7, "idle:--mib,32;checker:--mib,8,--rate,4;memcached:-m,64");
    guest.memory_bytes = 512 << 20;
    let trial = trial::run(&Setup {
        lab: &lab,
        guest,
        ready: Some("IDLE ready"),
        mover: &Mover::Qemu(Method::Vanilla, Ram::SharedFile),
        qemu: &Qemu { label: "7.2".into(), path },
        load: Some(LoadConfig { connections: 1, keys: 100, ..LoadConfig::mixed(1) }),
        settle: Duration::from_secs(3),
        after: Duration::from_secs(2),
    })
    .unwrap();

    let metric = |name: &str| *trial.metrics.get(name).unwrap_or_else(|| panic!("no {name} in {:?}", trial.metrics));
    let (nonzero, wire) = (metric("nonzero_pages") * 4096.0, metric("bytes_on_wire"));
    assert!(nonzero > 40e6, "32 MiB of noise and a kernel: {nonzero}");
    assert!(wire > 0.8 * nonzero && wire < 2.0 * nonzero + 100e6, "{wire} bytes for {nonzero} in use");
    assert!(metric("link_bytes") > 0.9 * wire);
    assert!(metric("downtime_ms") > 0.1 && metric("downtime_ms") < 5000.0);
    assert!(metric("gap_ms") >= 1.0 && metric("gap_ms") < 5000.0);
    assert!(metric("total_ms") > 8.0 * wire / 1e6, "no faster than the link: {:?}", trial.metrics);
    assert!(metric("cpu_s") > 0.0);
    assert!(metric("requests_per_s_before") > 10.0);
    let after = trial.checker.iter().filter(|line| line.at_us > trial.end_us);
    assert!(after.filter_map(|line| line.number("bad")).last() == Some(0.0), "{:?}", trial.checker);
    println!("{:#?}", trial.metrics);
}
