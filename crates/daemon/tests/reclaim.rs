//! Free memory, as the daemon refuses to take it: of machines that cannot be looked into, and for requests that cannot
//! be. `system-tests` has guests of which some is taken.

mod support;

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use serde_json::{Value, json};
use support::{BARE, Host, cannot_run, run_request};

const PATH: &str = "/v1/vms/m/reclaim";

fn refused(host: &Host, method: &str, status: u16, code: &str) -> Value {
    let (answered, problem) = host.ask("POST", PATH, Some(&json!({ "method": method })));
    assert_eq!((answered, problem["code"].as_str()), (status, Some(code)), "{problem}");
    problem
}

/// Whether the kernel holds writes of a process up, or watches them (`uw`, in `smaps`).
fn registered(pid: u32) -> bool {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/smaps")).expect("QEMU's mappings");
    maps.lines().any(|line| line.starts_with("VmFlags:") && line.split_whitespace().any(|flag| flag == "uw"))
}

#[test]
fn a_guest_that_is_no_linux_keeps_its_memory_and_the_reason_is_told() {
    if cannot_run() {
        return;
    }
    let host = Host::start();
    host.run("m");
    let problem = refused(&host, "vmi", 409, "guest-unfit");
    let text = problem.to_string();
    assert!(text.contains("VMCOREINFO") && problem["hint"].is_string() && problem["blame"] == "guest", "{text}");
    let problem = refused(&host, "balloon", 400, "no-balloon");
    assert!(problem["hint"].as_str().unwrap().contains("virtio-balloon"), "{problem}");
    assert_eq!((host.state_of("m").as_str(), registered(host.pid_of("m"))), ("running", false));
    assert_eq!(host.ask("DELETE", "/v1/vms/m?force=true", None).0, 204, "it is free again");
}

#[test]
fn a_balloon_that_cannot_be_used_is_left_alone() {
    if cannot_run() {
        return;
    }
    let host = Host::start();
    let mut request = run_request("m", &BARE);
    request["balloon"] = true.into();
    assert_eq!(host.ask("POST", "/v1/vms", Some(&request)).0, 201);
    let problem = refused(&host, "balloon", 409, "balloon-silent");
    assert!(problem["hint"].as_str().unwrap().contains("virtio_balloon"), "{problem}");
    assert_eq!(host.ask("PUT", "/v1/vms/m/balloon", Some(&json!({ "mode": "auto" }))).0, 200);
    refused(&host, "balloon", 409, "balloon-in-use");
    assert_eq!(host.state_of("m"), "running");
}

/// QEMU talks to one client at a time. Who looks at a machine waits for it in vain while another one is talked to, here
/// a stranger; who takes the machine's memory meanwhile waits, too.
#[test]
fn a_machine_that_is_taken_in_hand_while_somebody_looks_at_it_is_not_lost() {
    if cannot_run() {
        return;
    }
    let host = Host::start();
    host.run("m");
    let mut stranger = UnixStream::connect(host.state().join("vms/m/run/qmp.sock")).expect("QEMU's socket");
    stranger.read_exact(&mut [0]).expect("QEMU greets it");
    std::thread::scope(|scope| {
        let look = scope.spawn(|| host.get("/v1/vms/m"));
        std::thread::sleep(Duration::from_millis(500));
        let taking = scope.spawn(|| host.ask("POST", PATH, Some(&json!({ "method": "vmi" }))));
        let shown = look.join().expect("it is shown");
        assert_eq!(shown["state"], "running", "{shown}");
        assert!(shown["note"].as_str().is_some_and(|note| note.contains("is being taken")), "{shown}");
        drop(stranger);
        assert_ne!(taking.join().expect("it ends").0, 200);
    });
    assert_eq!(host.state_of("m"), "running");
}

#[test]
fn requests_that_cannot_be_are_refused() {
    if cannot_run() {
        return;
    }
    let host = Host::start();
    assert_eq!(host.refused("POST", PATH, &json!({})), "unknown-vm");
    host.run("m");
    for wrong in [json!({ "method": "swap" }), json!({ "pages": 1 }), json!(1)] {
        assert_eq!(host.refused("POST", PATH, &wrong), "invalid-request");
    }
    assert_eq!(host.get("/openapi.json")["paths"][PATH.replace("/m/", "/{name}/")]["post"]["operationId"], "reclaim");
}
