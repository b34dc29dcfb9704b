//! Estimates as the daemon makes them: of machines that run on, one thing at a time, and nothing left behind.

mod support;

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use serde_json::json;
use sterna_engine::agent::Agent;
use sterna_engine::inside::{Inside, InsideQemu};
use sterna_sys::userfaultfd::{Features, Modes};
use support::{Host, cannot_run, eventually};

fn question(duration_ms: u64) -> String {
    format!("/v1/vms/m/estimate?bandwidth_bytes_per_s=100000000&duration_ms={duration_ms}")
}

/// Whether the kernel watches writes of a process (`uw`: userfaultfd's write protection, in `smaps`).
fn watched(pid: u32) -> bool {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/smaps")).expect("QEMU's mappings");
    maps.lines().any(|line| line.starts_with("VmFlags:") && line.split_whitespace().any(|flag| flag == "uw"))
}

/// Asks without waiting for the answer.
fn ask_for(host: &Host, duration_ms: u64) -> UnixStream {
    let mut stream = UnixStream::connect(host.socket()).expect("the daemon listens");
    let request = format!("GET {} HTTP/1.1\r\nhost: x\r\n\r\n", question(duration_ms));
    stream.write_all(request.as_bytes()).expect("a request");
    stream
}

#[test]
fn a_machine_is_estimated_and_then_moves() {
    if cannot_run() {
        return;
    }
    let (a, b) = (Host::start(), Host::start());
    a.run("m");
    let estimate = a.get(&question(400));
    let modes: Vec<_> = estimate["ways"].as_array().expect("ways").iter().map(|way| way["mode"].as_str()).collect();
    assert_eq!(modes[..2], [Some("stop-and-copy"), Some("precopy")], "{estimate}");
    assert!(estimate["observed"]["allocated_pages"].as_u64() > Some(0), "{estimate}");
    assert_eq!((a.state_of("m").as_str(), watched(a.pid_of("m"))), ("running", false));
    let reports = a.ended(a.migrate(&["m"], &b.address(), json!({})));
    assert_eq!(reports[0]["status"], "completed", "{}", reports[0]);
}

#[test]
fn questions_that_cannot_be_are_refused() {
    if cannot_run() {
        return;
    }
    let host = Host::start();
    assert_eq!(host.refused("GET", &question(400), &json!(null)), "unknown-vm");
    host.run("m");
    for query in [
        "",
        "bandwidth_bytes_per_s=0",
        "bandwidth_bytes_per_s=100000000&duration_ms=1",
        "bandwidth_bytes_per_s=100000000&duration_ms=3600000",
        "bandwidth_bytes_per_s=100000000&downtime_limit_ms=-1",
        "bandwidth_bytes_per_s=100000000&downtime_limit_ms=NaN",
        "bandwidth_bytes_per_s=100000000&mode=precopy",
    ] {
        let code = host.refused("GET", &format!("/v1/vms/m/estimate?{query}"), &json!(null));
        assert_eq!(code, "invalid-request", "{query}");
    }
    assert_eq!(host.state_of("m"), "running");
}

#[test]
fn a_machine_that_is_observed_is_not_moved_and_a_cancel_ends_the_observation() {
    if cannot_run() {
        return;
    }
    let host = Host::start();
    host.run("m");
    let pid = host.pid_of("m");
    std::thread::scope(|scope| {
        let asked = scope.spawn(|| host.ask("GET", &question(60_000), None));
        eventually("it is observed", || watched(pid));
        assert_eq!(host.state_of("m"), "running");
        let request = json!({ "vms": ["m"], "to": "127.0.0.1:9" });
        assert_eq!(host.refused("POST", "/v1/migrations", &request), "vm-busy");
        assert_eq!(host.refused("GET", &question(400), &json!(null)), "vm-busy");
        assert_eq!(host.ask("POST", "/v1/vms/m/cancel", None).0, 202);
        let (status, problem) = asked.join().expect("an answer");
        assert_eq!((status, problem["code"].as_str()), (400, Some("cancelled")), "{problem}");
    });
    assert!(!watched(pid));
    assert_eq!(host.ask("DELETE", "/v1/vms/m?force=true", None).0, 204, "it is free again");
}

#[test]
fn a_caller_that_goes_away_ends_the_observation() {
    if cannot_run() {
        return;
    }
    let host = Host::start();
    host.run("m");
    let pid = host.pid_of("m");
    let caller = ask_for(&host, 60_000);
    eventually("it is observed", || watched(pid));
    drop(caller);
    eventually("nothing watches it any more", || !watched(pid));
    eventually("it is free again", || host.ask("GET", &question(200), None).0 == 200);
}

#[test]
fn a_daemon_that_ends_or_dies_meanwhile_leaves_nothing_watched() {
    if cannot_run() {
        return;
    }
    let mut host = Host::start();
    host.run("m");
    let pid = host.pid_of("m");
    let caller = ask_for(&host, 60_000);
    eventually("it is observed", || watched(pid));
    assert!(host.stop_daemon().success());
    assert!(!watched(pid), "a daemon that is told to end ends its observations");
    drop(caller);
    host.start_daemon();
    let caller = ask_for(&host, 60_000);
    eventually("it is observed again", || watched(pid));
    host.kill_daemon();
    drop(caller);
    eventually("its death ends it: nobody else has the descriptor", || !watched(pid));
    watched_by_an_earlier_version(&host);
    assert!(watched(pid), "the agent keeps the descriptor: else this test shows nothing");
    host.start_daemon();
    eventually("the next daemon ends it", || !watched(pid));
    assert_eq!(host.state_of("m"), "running");
}

/// Leaves what a daemon of before left that died while it tracked: there the agent kept a duplicate.
fn watched_by_an_earlier_version(host: &Host) {
    let agent = host.state().join("vms/m/run/agent.sock");
    let mut agent = Agent::connect(&agent, Duration::from_secs(60)).expect("the agent answers");
    let blocks = agent.blocks().expect("its guest's RAM");
    let userfaultfd = InsideQemu::new(agent).open(Features::TRACKING).expect("a userfaultfd");
    for block in blocks {
        let all = block.address..block.address + block.length;
        userfaultfd.register(all, Modes::WP).expect("nobody else has it");
    }
}
