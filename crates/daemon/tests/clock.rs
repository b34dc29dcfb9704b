//! A guest that is let run after a while: its clock is set where it has a guest agent, and nobody waits for that.

mod support;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::mpsc::channel;
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};
use support::pools::{fork, held, hold, take};
use support::{BARE, Host, PATIENCE, cannot_run, eventually, run_request};

/// Starts the machine `a` with a guest agent's channel in this directory, and no agent behind it.
fn run(host: &Host, dir: &Path) {
    let chardev = format!("socket,id=q,path={}/{{name}}.qga,server=on,wait=off", dir.display());
    let words = ["-nodefaults", "-chardev", &chardev, "-device", "virtio-serial"];
    let device = ["-device", "virtserialport,chardev=q,name=org.qemu.guest_agent.0"];
    let request = run_request("a", &[&BARE[..], &words, &device].concat());
    let (status, answer) = host.ask("POST", "/v1/vms", Some(&request));
    assert_eq!(status, 201, "{answer}");
}

/// Whether the daemon has heard nothing of this guest's agent, which it has asked for.
fn is_asked(host: &Host, name: &str) -> bool {
    let log = host.log();
    log.lines().any(|line| line.contains("has not set its clock") && line.contains(&format!("vm=\"{name}\"")))
}

#[test]
fn the_clock_of_a_clone_out_of_a_pool_is_set_whether_it_was_held_ready_or_not() {
    if cannot_run() {
        return;
    }
    let (host, dir) = (Host::start(), tempfile::tempdir().unwrap());
    run(&host, dir.path());
    fork(&host, "a", &json!({ "hold": 1 }));
    take(&host, "a", "b");
    eventually("b's agent is asked", || is_asked(&host, "b"));
    hold(&host, "a", 0);
    eventually("none is held any more", || held(&host).is_empty());
    take(&host, "a", "c");
    eventually("c's agent is asked", || is_asked(&host, "c"));
}

#[test]
fn a_held_clone_s_clock_is_set_when_it_is_let_run_and_one_without_an_agent_runs_at_once() {
    if cannot_run() {
        return;
    }
    let (host, dir) = (Host::start(), tempfile::tempdir().unwrap());
    run(&host, dir.path());
    let request = json!({ "names": ["b", "c"], "paused": true });
    let (status, answer) = host.ask("POST", "/v1/vms/a/fork", Some(&request));
    assert_eq!(status, 200, "{answer}");
    assert_eq!([host.state_of("b"), host.state_of("c")], ["paused", "paused"]);

    // In the place of the program in the guest, which this machine has not.
    let path = dir.path().join("b.qga");
    std::fs::remove_file(&path).unwrap();
    let listener = UnixListener::bind(&path).unwrap();
    let (tell, told) = channel();
    let agent = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        let mut question = || -> Value {
            let mut line = Vec::new();
            reader.read_until(b'\n', &mut line).unwrap();
            serde_json::from_slice(line.strip_prefix(&[0xFF]).unwrap_or(&line)).unwrap()
        };
        let sync = question();
        stream.write_all(&[0xFF]).unwrap();
        writeln!(stream, "{}", json!({ "return": sync["arguments"]["id"] })).unwrap();
        tell.send(question()).unwrap();
        writeln!(stream, "{}", json!({ "return": {} })).unwrap();
    });
    assert_eq!(host.ask("POST", "/v1/vms/b/continue", None).0, 204);
    let question = told.recv_timeout(PATIENCE).unwrap();
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_nanos() as u64;
    assert_eq!(question["execute"], "guest-set-time");
    let off = now.abs_diff(question["arguments"]["time"].as_u64().unwrap());
    assert!(off < Duration::from_secs(600).as_nanos() as u64, "{question}");
    agent.join().unwrap();
    eventually("its daemon has heard", || host.log().contains("its clock is set"));
    assert_eq!(host.state_of("b"), "running");

    // Nobody answers behind this one's channel: it runs all the same.
    assert_eq!(host.ask("POST", "/v1/vms/c/continue", None).0, 204);
    assert_eq!(host.state_of("c"), "running");
    eventually("its daemon gives up", || host.log().contains("its guest agent has not set its clock"));
    assert_eq!(host.ask("POST", "/v1/vms/c/continue", None).0, 204, "it runs already");
    assert_eq!(host.refused("POST", "/v1/vms/x/continue", &Value::Null), "unknown-vm");
}
