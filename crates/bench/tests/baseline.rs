//! QEMU moves a real guest by itself between two hosts of a lab. Needs root, QEMU and the guest's image.

mod support;

use std::time::Duration;

use sterna_bench::baseline::{BaselineVm, Method, Ram, qemu};
use sterna_bench::command::PATIENCE;
use sterna_bench::load::memcached::LoadConfig;
use sterna_bench::trial::{self, Mover, Qemu, Setup, Trial};
use sterna_bench::{Guest, Lab, tools};

#[test]
fn every_method_and_back_end_of_every_qemu_moves_its_guest() {
    let Some(lab) = support::lab("ways", None) else { return };
    let mut qemus = vec![Qemu { label: "7.2".into(), path: tools::qemu_7_2().unwrap() }];
    match tools::qemu_10_0() {
        Ok(path) => qemus.push(Qemu { label: "10.0".into(), path }),
        Err(error) => eprintln!("without QEMU 10.0: {error}"),
    }
    // Every day half of the methods meet one of the two; with STERNA_LONG=1 each meets both.
    let long = std::env::var("STERNA_LONG").is_ok_and(|word| word == "1");
    for (turn, qemu) in qemus.iter().enumerate() {
        let known = qemu::capabilities(&qemu.path).unwrap();
        for (number, (method, ram)) in [
            (Method::Vanilla, Ram::Plain),
            (Method::Multifd(4), Ram::SharedFile),
            (Method::MultifdZstd(2), Ram::Plain),
            (Method::Xbzrle(64), Ram::Plain),
            (Method::Compress(2), Ram::Plain),
            (Method::AutoConverge, Ram::Plain),
        ]
        .into_iter()
        .enumerate()
        {
            // Compression is 7.2's alone, and its turn.
            if !long && number % 4 != 2 * turn {
                continue;
            }
            if let Some(absent) = method.capabilities().iter().find(|name| !known.iter().any(|known| known == *name)) {
                println!("skipped: QEMU {} has no {absent}", qemu.label);
                continue;
            }
            let mut guest = Guest::new(&lab, "g", 9, "idle:--mib,64");
            guest.memory_bytes = 320 << 20;
            let trial = trial::run(&Setup {
                lab: &lab,
                guest,
                ready: Some("IDLE ready"),
                mover: &Mover::Qemu(method, ram),
                qemu,
                load: None,
                settle: Duration::from_millis(500),
                working_set: Duration::ZERO,
                after: Duration::from_millis(500),
                limit: trial::LIMIT,
                say: &|_| {},
            })
            .unwrap();
            let version = trial.report["qemu"].as_str().unwrap();
            assert!(version.starts_with(&format!("{}.", qemu.label)), "{version}");
            assert!(trial.metrics["bytes_on_wire"] > 64e6, "{method:?}: {:?}", trial.metrics);
            assert_eq!(trial.metrics["completed"], 1.0);
            assert_eq!(trial.metrics.contains_key("nonzero_pages"), ram == Ram::SharedFile);
            println!("{version} {method:?} {ram:?}: {:?}", trial.metrics);
        }
    }
}

#[test]
fn a_clone_through_a_file_goes_on_beside_its_source_and_leaves_no_file() {
    let Some(lab) = support::lab("file", None) else { return };
    let qemus = [tools::qemu_7_2().ok(), tools::qemu_10_0().ok()];
    for (number, path) in qemus.into_iter().flatten().enumerate() {
        let mut guest = Guest::new(&lab, &format!("g{number}"), 9, "checker:--mib,16,--rate,8");
        (guest.memory_bytes, guest.wired) = (320 << 20, false);
        let mut vm = BaselineVm::start(&lab, "a", &guest, &path, Ram::Plain).unwrap();
        guest.wait_until_well(PATIENCE).unwrap();
        let clone = guest.clone_of_name(&format!("c{number}"));
        let (running, copied) = vm.copy_through_file(&lab, &clone).unwrap();
        println!("{}: {copied:?}", vm.version());
        assert!(copied.pause_ms > 0.0 && copied.clone_ms > copied.pause_ms, "{copied:?}");
        assert!(copied.file_bytes > 16 << 20, "{copied:?}");
        assert_ne!(running.pid(), vm.pid());
        [&guest, &clone].iter().for_each(|guest| guest.wait_until_well(PATIENCE).unwrap());
        let left = std::fs::read_dir(lab.host("a").unwrap().directory.join("ram")).unwrap().count();
        assert_eq!(left, 0);
    }
}

#[test]
fn qemus_own_migration_is_measured_from_every_side() {
    let Some(lab) = support::lab("base", Some(125_000_000)) else { return };
    let path = tools::qemu_7_2().unwrap();
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
        working_set: Duration::ZERO,
        after: Duration::from_secs(2),
        limit: trial::LIMIT,
        say: &|step| println!("{step}"),
    })
    .unwrap();

    let metric = |name: &str| *trial.metrics.get(name).unwrap_or_else(|| panic!("no {name} in {:?}", trial.metrics));
    let (nonzero, wire) = (metric("nonzero_pages") * 4096.0, metric("bytes_on_wire"));
    assert!(nonzero > 40e6, "32 MiB of noise and a kernel: {nonzero}");
    assert!(wire > 0.8 * nonzero && wire < 2.0 * nonzero + 100e6, "{wire} bytes for {nonzero} in use");
    assert!(metric("link_bytes") > 0.9 * wire);
    assert!(metric("downtime_ms") > 0.1 && metric("downtime_ms") < metric("total_ms"));
    assert!(metric("gap_ms") >= 1.0 && metric("gap_ms") < metric("total_ms"));
    assert!(metric("total_ms") > 8.0 * wire / 1e6, "no faster than the link: {:?}", trial.metrics);
    assert!(metric("cpu_s") > 0.0);
    assert!(metric("requests_per_s_before") > 0.0);
    let after = trial.checker.iter().filter(|line| line.at_us > trial.end_us);
    assert!(after.filter_map(|line| line.number("bad")).next_back() == Some(0.0), "{:?}", trial.checker);
    println!("{:#?}", trial.metrics);
}

/// A guest that writes faster than the link of [`lab`] carries, moved by `method`.
fn move_a_busy_guest(lab: &Lab, method: Method, limit: Duration) -> Trial {
    let mut guest = Guest::new(lab, "g", 8, "dirtier:--mib,96,--rate,60;checker:--mib,4,--rate,1");
    guest.memory_bytes = 320 << 20;
    let trial = trial::run(&Setup {
        lab,
        guest,
        ready: Some("DIRTIER ready"),
        mover: &Mover::Qemu(method, Ram::Plain),
        qemu: &Qemu { label: "7.2".into(), path: tools::qemu_7_2().unwrap() },
        load: None,
        settle: Duration::from_secs(1),
        working_set: Duration::ZERO,
        after: Duration::from_secs(2),
        limit,
        say: &|_| {},
    })
    .unwrap();
    println!("{:#?}", trial.metrics);
    let after = trial.checker.iter().filter(|line| line.at_us > trial.end_us);
    assert_eq!(after.filter_map(|line| line.number("bad")).next_back(), Some(0.0), "{:?}", trial.checker);
    trial
}

#[test]
fn a_migration_that_does_not_end_is_given_up_and_measured_and_the_guest_runs_on() {
    let Some(lab) = support::lab("endless", Some(25_000_000)) else { return };
    let trial = move_a_busy_guest(&lab, Method::Vanilla, Duration::from_secs(5));
    assert_eq!(trial.metrics["completed"], 0.0);
    assert!(!trial.metrics.contains_key("total_ms") && !trial.metrics.contains_key("downtime_ms"));
    assert!(trial.metrics["given_up_ms"] >= 5000.0 && trial.metrics["bytes_on_wire"] > 1e6, "{:?}", trial.metrics);
    assert_eq!(trial.report["query_migrate"]["status"], "active");
}

#[test]
fn post_copy_follows_the_first_pass_and_moves_a_guest_that_pre_copy_cannot() {
    let Some(lab) = support::lab("post", Some(25_000_000)) else { return };
    let trial = move_a_busy_guest(&lab, Method::Postcopy, trial::LIMIT);
    assert_eq!(trial.metrics["completed"], 1.0);
    let ram = &trial.report["query_migrate"]["ram"];
    assert!(ram["postcopy-bytes"].as_u64().unwrap() > 0 && ram["precopy-bytes"].as_u64().unwrap() > 0, "{ram}");
}
