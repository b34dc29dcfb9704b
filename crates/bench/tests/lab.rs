//! The lab leaves nothing behind, labs do not meet, links carry what was asked for. Needs root.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use sterna_bench::bare::Bare;
use sterna_bench::command::PATIENCE;
use sterna_bench::gang::lab_with;
use sterna_bench::lab::{self, LabConfig, cgroup, net, state};
use sterna_bench::load::transfer;
use sterna_bench::sterna::sterna;
use sterna_bench::{Lab, command, tools};

/// Whether this machine can have a lab; says why where it cannot.
fn can_have_a_lab() -> bool {
    let able = nix::unistd::Uid::effective().is_root()
        && command::run("ip", "-Version").is_ok()
        && command::run("tc", "-Version").is_ok();
    if !able {
        eprintln!("skipped: a lab needs root, ip and tc");
    }
    able
}

/// A lab without daemons, under a name of this test process.
fn config(name: &str) -> LabConfig {
    LabConfig { daemons: false, ..LabConfig::pair(&format!("{name}{}", std::process::id())) }
}

/// What exists of a lab, in words.
fn left_of(name: &str) -> Vec<String> {
    let mut left = net::existing(name).unwrap();
    left.extend(cgroup::existing(name).iter().map(|group| format!("{group:?}")));
    left.extend(state::directory(name).exists().then(|| "its directory".into()));
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    left.extend(mounts.lines().filter(|line| line.contains(&format!("/sterna-lab/{name}/"))).map(str::to_owned));
    left
}

#[test]
fn a_lab_leaves_no_namespace_group_mount_file_or_process() {
    if !can_have_a_lab() {
        return;
    }
    let config = config("gone");
    let name = config.name.clone();
    let lab = Lab::up(config).unwrap();
    let host = lab.host("a").unwrap();
    let mut child = host.spawn(host.command("sleep").arg("300"), "sleep").unwrap();
    let mount = host.directory.join("mount");
    std::fs::create_dir(&mount).unwrap();
    command::run("mount", &format!("-t tmpfs none {}", mount.display())).unwrap();
    assert_eq!(net::existing(&name).unwrap().len(), 5, "a, b, client, meter, switch");
    command::wait_for("the process in its group", PATIENCE, || Ok((!host.group.processes().is_empty()).then_some(())))
        .unwrap();

    drop(lab);
    assert!(!child.wait().unwrap().success(), "what ran on a host is ended");
    assert_eq!(left_of(&name), Vec::<String>::new());
    lab::down(&name).unwrap();
}

#[test]
fn a_lab_whose_owner_died_is_removed_and_one_whose_owner_lives_is_not() {
    if !can_have_a_lab() {
        return;
    }
    let kept = Lab::up(config("kept")).unwrap();
    let orphan = Lab::up(config("orphan")).unwrap();
    let name = orphan.name().to_owned();
    let mut dead = Command::new("true").spawn().unwrap();
    let mut record = orphan.state().clone();
    record.owner = sterna_bench::process::ProcessId::of(dead.id())
        .or(Some(sterna_bench::process::ProcessId { pid: dead.id(), start: 1 }));
    dead.wait().unwrap();
    record.save().unwrap();
    std::mem::forget(orphan);

    let gone = lab::down_orphans().unwrap();
    assert!(gone.contains(&name), "{gone:?}");
    assert!(!gone.contains(&kept.name().to_owned()));
    assert_eq!(left_of(&name), Vec::<String>::new());
    assert!(Path::new(&state::directory(kept.name())).exists());
}

#[test]
fn two_labs_with_equal_addresses_do_not_meet() {
    if !can_have_a_lab() {
        return;
    }
    let (one, other) = (Lab::up(config("one")).unwrap(), Lab::up(config("other")).unwrap());
    let b = one.host("b").unwrap();
    assert_eq!(b.address, other.host("b").unwrap().address);
    let b_here = net::inside(&b.namespace, || Ok(std::net::TcpListener::bind((b.address, 4000)).unwrap())).unwrap();
    let knock = |lab: &Lab, within: Duration| {
        let a = lab.host("a").unwrap();
        net::inside(
            &a.namespace,
            || Ok(std::net::TcpStream::connect_timeout(&(b.address, 4000).into(), within).is_ok()),
        )
        .unwrap()
    };
    assert!(knock(&one, PATIENCE));
    assert!(!knock(&other, Duration::from_secs(2)), "the listener of one lab must not answer in the other");
    drop(b_here);
}

#[test]
fn a_taken_name_and_impossible_hosts_are_refused_and_leave_nothing() {
    if !can_have_a_lab() {
        return;
    }
    let lab = Lab::up(config("twice")).unwrap();
    let error = Lab::up(LabConfig { name: lab.name().into(), ..config("x") }).unwrap_err().to_string();
    assert!(error.contains("is up already"), "{error}");
    assert_eq!(net::existing(lab.name()).unwrap().len(), 5, "the refused attempt must not take the first lab down");
    for hosts in [vec!["client"], vec!["a", "a"], vec!["../x"], vec![]] {
        let hosts = hosts.into_iter().map(str::to_owned).collect();
        let config = LabConfig { hosts, ..config("hosts") };
        let name = config.name.clone();
        assert!(Lab::up(config).is_err());
        assert_eq!(left_of(&name), Vec::<String>::new());
    }
    assert!(lab::down("../etc").is_err());
}

#[test]
fn a_link_carries_the_rate_that_was_asked_for_both_ways() {
    if !can_have_a_lab() {
        return;
    }
    // The timers of a fast link come late where others want the processors, so of that one it is only asked that it
    // carries more than the slow one.
    for (name, rate, least, words) in [
        ("slow", 12_500_000, 12_500_000.0 * 0.92, "rate 100Mbit "),
        ("fast", 125_000_000, 12_500_000.0 * 1.08, "rate 1Gbit "),
    ] {
        let lab = Lab::up(LabConfig { rate_bytes_per_s: Some(rate), ..config(name) }).unwrap();
        let (a, b, client) = (lab.host("a").unwrap(), lab.host("b").unwrap(), lab.host("client").unwrap());
        // Out of a host, and into a host from one that is not limited itself.
        for (from, to, at, device) in [(a, b, "a", "up0"), (client, a, "switch", "port-a")] {
            let says = limit(&net::namespace(lab.name(), at), device);
            assert!(says.contains(words), "{} to {}: {says}", from.name, to.name);
            // Who has to wait for a processor measures less, and what waited in a buffer is measured later: not each
            // time.
            let keeps_to_it = |_| {
                let measured = transfer::measure(from, to, Duration::from_millis(1500)).unwrap();
                println!("{} to {} at {rate} B/s: measured {measured:.0}", from.name, to.name);
                (least..=rate as f64 * 1.08).contains(&measured)
            };
            assert!((0..20).any(keeps_to_it), "{} to {} never carried {rate} B/s", from.name, to.name);
        }
    }
}

/// The limit of what leaves a device, in the kernel's words.
fn limit(namespace: &str, device: &str) -> String {
    let mut tc = Command::new("tc");
    command::output(tc.args(["-n", namespace, "qdisc", "show", "dev", device])).unwrap()
}

#[test]
fn a_memory_limit_holds_what_runs_on_the_host() {
    if !can_have_a_lab() {
        return;
    }
    let lab = Lab::up(LabConfig { memory_limit_bytes: Some(64 << 20), ..config("limit") }).unwrap();
    let file = lab.host("a").unwrap().directory.join("big");
    std::fs::create_dir(&file).unwrap();
    command::run("mount", &format!("-t tmpfs none {}", file.display())).unwrap();
    let fill = |host: &str| {
        lab.host(host)
            .unwrap()
            .output("dd", &["if=/dev/zero", &format!("of={}/{host}", file.display()), "bs=1M", "count=128"])
    };
    assert!(fill("a").is_err(), "128 MiB must not fit under 64 MiB");
    std::fs::remove_file(file.join("a")).ok();
    fill("client").unwrap();
}

#[test]
fn a_guests_tap_is_on_every_host_with_a_daemon() {
    if !can_have_a_lab() {
        return;
    }
    let lab = Lab::up(config("tap")).unwrap();
    lab.create_tap("tap0").unwrap();
    for host in ["a", "b"] {
        let link = lab.host(host).unwrap().output("ip", &["link", "show", "tap0"]).unwrap();
        assert!(link.contains("master br0"), "{link}");
    }
    assert!(lab.host("client").unwrap().output("ip", &["link", "show", "tap0"]).is_err());
    lab.delete_tap("tap0").unwrap();
    assert!(lab.create_tap("tap0").is_ok());
}

#[test]
fn a_link_without_a_rate_is_far_faster_than_any_that_has_one() {
    if !can_have_a_lab() {
        return;
    }
    let lab = Lab::up(LabConfig { rate_bytes_per_s: None, ..config("free") }).unwrap();
    let fast = |_| {
        let (a, b) = (lab.host("a").unwrap(), lab.host("b").unwrap());
        let measured = transfer::measure(a, b, Duration::from_secs(1)).unwrap();
        println!("{measured:.0} B/s");
        measured > 300e6
    };
    assert!((0..20).any(fast), "never faster");
}

#[test]
fn bare_requests_are_answered_and_what_was_lent_for_them_is_given_back() {
    if !can_have_a_lab() {
        return;
    }
    if let Err(error) = tools::sternad().and(tools::sterna()).and(tools::agent()) {
        return eprintln!("skipped: {error}");
    }
    let mut lab = lab_with(config("bare"), 1, "lend_memory = \"2M\"\n").unwrap();
    let from = lab.host("a").unwrap().clone();
    let peers = ["a", "b"].map(|name| lab.host(name).unwrap().listen());
    let borrowers = |lab: &Lab| {
        ["a", "b"].map(|name| {
            let text = command::output(sterna(lab.host(name).unwrap()).unwrap().args(["lent", "--json"])).unwrap();
            let lent: serde_json::Value = serde_json::from_str(&text).unwrap();
            lent["guests"].as_array().unwrap().len()
        })
    };
    let mut bare = Bare::open(&from, &peers).unwrap();
    assert_eq!(borrowers(&lab), [1, 1]);
    let took = bare.ask(Duration::from_millis(300)).unwrap();
    assert!((5..=60).contains(&took.count()), "{} requests, one every 5 ms", took.count());
    assert!(took.quantile(0.0).unwrap() > 1e3, "an answer comes over a network: {took}");
    drop(bare);
    assert_eq!(borrowers(&lab), [0, 0]);

    // Also where the connection breaks meanwhile.
    let mut bare = Bare::open(&from, &peers).unwrap();
    lab.kill_daemon("b");
    lab.start_daemon("b").unwrap();
    let error = bare.ask(Duration::from_secs(1)).unwrap_err().to_string();
    assert!(error.contains(&peers[1]), "{error}");
    assert_eq!(borrowers(&lab), [1, 1]);
    drop(bare);
    assert_eq!(borrowers(&lab), [0, 0]);
    lab.down().unwrap();
}
