//! Balloons: the setting, who refuses it and why, and what outlives what. The guests here have no driver;
//! `system-tests` has some.

mod support;

use serde_json::{Value, json};
use support::{BARE, Host, cannot_run, eventually, run_request};

const PATH: &str = "/v1/vms/m/balloon";

fn with_balloon() -> Host {
    let host = Host::start();
    let mut request = run_request("m", &BARE);
    request["balloon"] = true.into();
    let (status, vm) = host.ask("POST", "/v1/vms", Some(&request));
    assert_eq!(status, 201, "{vm}\n{}", host.log());
    host
}

fn set(host: &Host, setting: Value) -> Value {
    // While its guest's firmware is at work on a busy machine, QEMU may answer nobody for seconds.
    let (status, vm) = host.ask_while("PUT", PATH, &setting, |answer| answer["code"] == "qmp-unreachable");
    assert_eq!(status, 200, "{vm}");
    vm["balloon"].clone()
}

fn balloon(host: &Host) -> Value {
    host.get("/v1/vms/m")["balloon"].clone()
}

#[test]
fn a_machine_without_a_balloon_device_is_refused_and_told_what_to_add() {
    if cannot_run() {
        return;
    }
    let host = Host::start();
    host.run("m");
    let (status, problem) = host.ask("PUT", PATH, Some(&json!({ "mode": "auto" })));
    assert_eq!((status, &problem["code"]), (400, &"no-balloon".into()), "{problem}");
    assert!(problem["hint"].as_str().unwrap().contains("-device virtio-balloon-pci,deflate-on-oom=on"), "{problem}");
    assert!(set(&host, json!({ "mode": "off" })).is_null(), "there is nothing to leave alone");
    assert_eq!(host.state_of("m"), "running");
}

#[test]
fn a_driver_that_does_not_answer_is_told_and_the_setting_outlives_the_daemon() {
    if cannot_run() {
        return;
    }
    let mut host = with_balloon();
    assert!(balloon(&host).is_null(), "off unless asked for");
    let seen = set(&host, json!({ "mode": "auto", "interval_ms": 200 }));
    assert!(seen["note"].as_str().unwrap().contains("virtio_balloon"), "{seen}");
    assert_eq!((&seen["size_bytes"], &seen["deflate_on_oom"]), (&0.into(), &true.into()), "{seen}");
    for wrong in [json!({ "mode": "auto", "interval_ms": 0 }), json!({ "mode": "target" }), json!({ "mode": "x" })] {
        assert_eq!(host.refused("PUT", PATH, &wrong), "invalid-request");
    }
    host.kill_daemon();
    host.start_daemon();
    eventually("it is looked after again", || {
        balloon(&host)["note"].as_str().is_some_and(|note| note.contains("virtio"))
    });
    assert_eq!(balloon(&host)["setting"], json!({ "mode": "auto", "interval_ms": 200, "memory_bytes": null }));
    assert!(set(&host, json!({ "mode": "off" })).is_null());
    host.kill_daemon();
    host.start_daemon();
    assert!(balloon(&host).is_null());
}

#[test]
fn a_record_of_a_daemon_that_knew_no_balloons_is_read() {
    if cannot_run() {
        return;
    }
    let mut host = with_balloon();
    set(&host, json!({ "mode": "auto" }));
    host.kill_daemon();
    let path = host.state().join("vms/m/vm.json");
    // As text: a JSON value cannot hold a number as wide as the boot's.
    let text = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = text.split_once("\"balloon\"").expect("it was kept");
    let (_, after) = rest.split_once("},").unwrap();
    std::fs::write(&path, format!("{before}{after}")).unwrap();
    host.start_daemon();
    assert_eq!(host.state_of("m"), "running");
    assert!(balloon(&host).is_null());
}

#[test]
fn the_setting_and_the_target_travel_with_the_machine_which_is_looked_after_all_the_way() {
    if cannot_run() {
        return;
    }
    let (source, destination) = (with_balloon(), Host::start());
    let target = json!({ "mode": "target", "memory_bytes": 32 << 20 });
    assert_eq!(set(&source, target)["target_bytes"], 32 << 20);
    let id = source.migrate(&["m"], &destination.address(), json!({ "verify": true }));
    let reports = source.ended(id);
    assert_eq!(reports[0]["status"], "completed", "{}", reports[0]);
    eventually("the destination looks after it", || balloon(&destination)["target_bytes"] == 32 << 20);
    assert_eq!(balloon(&destination)["setting"]["mode"], "target");
}

#[test]
fn a_balloon_of_the_users_own_and_one_of_sternas_are_one_too_many() {
    if cannot_run() {
        return;
    }
    let host = Host::start();
    let mut request = run_request("m", &["-machine", "microvm", "-accel", "tcg", "-display", "none"]);
    request["balloon"] = true.into();
    assert_eq!(host.ask("POST", "/v1/vms", Some(&request)).0, 201, "{}", host.log());
    assert!(!set(&host, json!({ "mode": "auto" })).is_null());
    let mut twice = run_request("n", &[&BARE[..], &["-device", "virtio-balloon-pci"]].concat());
    twice["balloon"] = true.into();
    assert_eq!(host.refused("POST", "/v1/vms", &twice), "argument-conflict");
}
