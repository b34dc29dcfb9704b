//! Migrations as the daemon runs them: two daemons, machines without a guest system, faults at any time.

mod support;

use serde_json::{Value, json};
use support::{BARE, Host, cannot_run, eventually, run_request, runs};

/// Slow enough to be caught under way: a bare machine has some 700 KiB that are not zero.
fn slow() -> Value {
    json!({ "bandwidth_bytes_per_s": 96 * 1024 })
}

fn moving(host: &Host, name: &str) -> bool {
    host.get(&format!("/v1/vms/{name}"))["migration"]["phase"] == "precopy"
}

#[test]
fn a_machine_moves_to_and_fro_and_leaves_nothing_behind() {
    if cannot_run() {
        return;
    }
    let (a, b) = (Host::start(), Host::start());
    a.run("m");
    for turn in 0..4 {
        let (from, to) = if turn % 2 == 0 { (&a, &b) } else { (&b, &a) };
        let pid = from.pid_of("m");
        let options = json!({ "verify": true, "streams": 1 + turn });
        let reports = from.ended(from.migrate(&["m"], &to.address(), options));
        assert_eq!(reports[0]["status"], "completed", "{}", reports[0]);
        assert_eq!(reports[0]["verify"]["mismatches"], 0);
        assert!(from.names().is_empty() && !runs(pid));
        assert_eq!((from.ram_files(), to.ram_files()), (0, 1));
        assert_eq!(to.state_of("m"), "running");
    }
}

#[test]
fn a_paused_machine_arrives_paused() {
    if cannot_run() {
        return;
    }
    let (a, b) = (Host::start(), Host::start());
    let mut arguments = BARE.to_vec();
    arguments.push("-S");
    let (status, vm) = a.ask("POST", "/v1/vms", Some(&run_request("m", &arguments)));
    assert_eq!(status, 201, "{vm}");
    let reports = a.ended(a.migrate(&["m"], &b.address(), json!({})));
    assert_eq!(reports[0]["status"], "completed", "{}", reports[0]);
    assert_eq!(b.state_of("m"), "paused");
}

#[test]
fn a_gang_moves_together() {
    if cannot_run() {
        return;
    }
    let (a, b) = (Host::start(), Host::start());
    let names = ["m1", "m2", "m3"];
    names.iter().for_each(|name| drop(a.run(name)));
    let reports = a.ended(a.migrate(&names, &b.address(), json!({})));
    assert_eq!(reports.len(), 3);
    assert!(reports.iter().all(|report| report["status"] == "completed"), "{reports:?}");
    assert_eq!(b.names(), names);
}

/// Starts a machine in private memory and of this trust group.
fn run_private(host: &Host, name: &str, group: &str, more: &[&str]) {
    let mut request = run_request(name, &[&BARE[..], more].concat());
    request["memory_mode"] = "private".into();
    request["trust_group"] = group.into();
    let (status, vm) = host.ask("POST", "/v1/vms", Some(&request));
    assert_eq!(status, 201, "{vm}");
}

/// So the next daemon knows what is here of a gang, and asks for no room for that once more.
#[test]
fn the_records_of_machines_that_came_together_name_their_gang() {
    if cannot_run() {
        return;
    }
    let (a, b) = (Host::start(), Host::start());
    ["one", "two", "alone"].iter().for_each(|name| run_private(&a, name, "red", &[]));
    let came_with = |names: &[&str]| {
        let reports = a.ended(a.migrate(names, &b.address(), json!({ "preserve_sharing": "on" })));
        assert!(reports.iter().all(|report| report["status"] == "completed"), "{reports:?}");
        let record = |name| std::fs::read(b.state().join("vms").join(name).join("vm.json")).expect("its record");
        let gang = |name| serde_json::from_slice::<Value>(&record(name)).expect("a record")["came_with"].clone();
        names.iter().map(gang).collect::<Vec<_>>()
    };
    let together = came_with(&["one", "two"]);
    assert!(together[0]["id"].is_number() && together[0] == together[1], "{together:?}");
    assert_ne!(came_with(&["alone"])[0], together[0]);
}

#[test]
fn a_gang_that_cannot_go_as_one_is_refused_before_anything_begins_and_each_reason_is_named() {
    if cannot_run() {
        return;
    }
    let (a, b) = (Host::start(), Host::start());
    let private = |name: &str, group: &str, more: &[&str]| run_private(&a, name, group, more);
    private("one", "red", &[]);
    // QEMU itself refuses to move what writes a directory as if it were a disk.
    std::fs::create_dir(a.path("fat")).unwrap();
    let fat = format!("driver=vvfat,dir={},rw=on,node-name=fat", a.path("fat").display());
    private("two", "red", &["-blockdev", &fat]);
    private("three", "blue", &[]);
    a.run("four");
    let asked = |names: &[&str], options: Value| {
        let request = json!({ "vms": names, "to": b.address(), "options": options });
        let (status, answer) = a.ask("POST", "/v1/migrations", Some(&request));
        assert!(status >= 400, "{answer}");
        assert!(["one", "two", "three", "four"].iter().all(|name| a.state_of(name) == "running"));
        answer["message"].as_str().unwrap_or_default().to_owned()
    };
    let refused = |names: &[&str]| asked(names, json!({ "preserve_sharing": "on" }));
    let why = refused(&["one", "two", "three", "four"]);
    for reason in ["2 trust groups: blue, red", "'four' has its memory in a file", "'two' cannot be moved"] {
        assert!(why.contains(reason), "{why}");
    }
    let why = refused(&["one", "nobody", "nothing"]);
    assert!(why.contains("'nobody'") && why.contains("'nothing'"), "{why}");
    let why = refused(&["nobody", "two", "three"]);
    for reason in ["'nobody'", "2 trust groups: blue, red", "'two' cannot be moved"] {
        assert!(why.contains(reason), "{why}");
    }
    // Where each shares with whom it can, one that cannot be moved keeps all of them here, too.
    for options in [json!({}), json!({ "preserve_sharing": "off" })] {
        let why = asked(&["one", "two", "three", "four"], options);
        assert!(why.contains("'two' cannot be moved") && !why.contains("trust groups"), "{why}");
    }
    let reports = a.ended(a.migrate(&["three", "four"], &b.address(), json!({})));
    let shares = |report: &Value| (report["status"].clone(), report["options"]["preserve_sharing"].clone());
    assert_eq!(shares(&reports[0]), (json!("completed"), json!("on")), "{reports:?}");
    assert_eq!(shares(&reports[1]), (json!("completed"), json!("off")), "{reports:?}");
    let reports = a.ended(a.migrate(&["one"], &b.address(), json!({ "preserve_sharing": "on" })));
    assert_eq!(reports[0]["status"], "completed", "{}", reports[0]);
}

#[test]
fn more_machines_than_leave_at_one_time_cannot_stand_still_together() {
    if cannot_run() {
        return;
    }
    let (a, b) = (Host::configured("max_outgoing = 2"), Host::start());
    let names = ["m1", "m2", "m3"];
    names.iter().for_each(|name| drop(a.run(name)));
    let options = json!({ "gang_pauses": "together" });
    let request = json!({ "vms": names, "to": b.address(), "options": options });
    let (status, answer) = a.ask("POST", "/v1/migrations", Some(&request));
    assert!(status >= 400 && answer["message"].as_str().is_some_and(|why| why.contains("2 at most")), "{answer}");
    let reports = a.ended(a.migrate(&names[..2], &b.address(), options));
    assert!(reports.iter().all(|report| report["status"] == "completed"), "{reports:?}");
}

#[test]
fn no_machine_comes_where_less_than_the_floor_would_be_left() {
    if cannot_run() {
        return;
    }
    let (a, b) = (Host::start(), Host::configured("memory_floor = \"100T\""));
    a.run("m");
    let reports = a.ended(a.migrate(&["m"], &b.address(), json!({})));
    assert_eq!(
        (reports[0]["status"].as_str(), reports[0]["error"]["code"].as_str()),
        (Some("failed"), Some("out-of-memory"))
    );
    assert_eq!((a.state_of("m").as_str(), b.names().len()), ("running", 0));
    assert_eq!(b.refused("POST", "/v1/vms", &run_request("n", &BARE)), "out-of-memory", "none is started either");
}

#[test]
fn the_destination_refuses_early_and_the_guest_runs_on() {
    if cannot_run() {
        return;
    }
    let (a, b) = (Host::start(), Host::start());
    a.run("m");
    b.run("m");
    let failed = |reports: &[Value], code: &str| {
        assert_eq!(reports[0]["status"], "failed");
        assert_eq!(reports[0]["error"]["code"], code, "{}", reports[0]["error"]);
        assert_eq!(reports[0]["error"]["guest"], "source");
        assert_eq!(a.state_of("m"), "running");
    };
    failed(&a.ended(a.migrate(&["m"], &b.address(), json!({}))), "name-taken");
    failed(&a.ended(a.migrate(&["m"], "127.0.0.1:1", json!({}))), "peer-unreachable");
    let (status, _) = b.ask("DELETE", "/v1/vms/m?force=true", None);
    assert_eq!(status, 204);
    let reports = a.ended(a.migrate(&["m"], &b.address(), json!({})));
    assert_eq!(reports[0]["status"], "completed", "a later attempt succeeds: {}", reports[0]);
}

#[test]
fn a_missing_file_is_named_by_the_destination() {
    if cannot_run() {
        return;
    }
    let (a, b) = (Host::start(), Host::start());
    let disk = a.path("disk.img");
    std::fs::write(&disk, vec![0; 1 << 20]).unwrap();
    let drive = format!("file={},format=raw,if=virtio", disk.display());
    let mut arguments = BARE.to_vec();
    arguments.extend(["-drive", &drive]);
    let (status, vm) = a.ask("POST", "/v1/vms", Some(&run_request("m", &arguments)));
    assert_eq!(status, 201, "{vm}");
    std::fs::remove_file(&disk).unwrap();
    let reports = a.ended(a.migrate(&["m"], &b.address(), json!({})));
    assert_eq!(reports[0]["error"]["code"], "file-missing", "{}", reports[0]["error"]);
    assert!(reports[0]["error"]["message"].as_str().unwrap().contains("disk.img"));
    assert_eq!(b.ram_files(), 0);
}

#[test]
fn while_a_machine_moves_it_can_only_be_cancelled() {
    if cannot_run() {
        return;
    }
    let (a, b) = (Host::start(), Host::start());
    a.run_full("m");
    let id = a.migrate(&["m"], &b.address(), slow());
    eventually("it is on its way", || moving(&a, "m"));
    assert_eq!(a.state_of("m"), "migrating-out");
    assert_eq!(b.state_of("m"), "migrating-in");
    assert_eq!(a.refused("POST", "/v1/migrations", &json!({ "vms": ["m"], "to": b.address() })), "vm-busy");
    assert_eq!(a.refused("DELETE", "/v1/vms/m?force=true", &Value::Null), "vm-busy");
    assert_eq!(b.refused("DELETE", "/v1/vms/m?force=true", &Value::Null), "vm-busy");
    assert_eq!(b.refused("POST", "/v1/vms/m/cancel", &Value::Null), "arriving");
    let (status, _) = a.ask("POST", "/v1/vms/m/cancel", None);
    assert_eq!(status, 202);
    let reports = a.ended(id);
    assert_eq!(reports[0]["status"], "cancelled");
    assert_eq!(a.state_of("m"), "running");
    eventually("nothing is left at the destination", || b.names().is_empty() && b.ram_files() == 0);
    assert_eq!(a.refused("POST", "/v1/vms/m/cancel", &Value::Null), "not-migrating");
    let reports = a.ended(a.migrate(&["m"], &b.address(), json!({})));
    assert_eq!(reports[0]["status"], "completed", "{}", reports[0]);
}

#[test]
fn more_migrations_than_allowed_wait_their_turn() {
    if cannot_run() {
        return;
    }
    let (a, b) = (Host::configured("max_outgoing = 1"), Host::start());
    a.run_full("m1");
    a.run("m2");
    let first = a.migrate(&["m1"], &b.address(), slow());
    eventually("the first is on its way", || moving(&a, "m1"));
    let second = a.migrate(&["m2"], &b.address(), json!({}));
    let waiting = || a.get("/v1/vms/m2")["migration"].clone();
    eventually("the second says what it waits for", || waiting()["waiting_for"].is_string());
    assert_eq!(waiting()["phase"], "queued");
    let (status, _) = a.ask("POST", "/v1/vms/m1/cancel", None);
    assert_eq!(status, 202);
    assert_eq!(a.ended(first)[0]["status"], "cancelled");
    assert_eq!(a.ended(second)[0]["status"], "completed");
}

#[test]
fn a_source_daemon_killed_under_way_finds_the_guest_running_and_moves_it_later() {
    if cannot_run() {
        return;
    }
    let (mut a, b) = (Host::start(), Host::start());
    a.run_full("m");
    a.migrate(&["m"], &b.address(), slow());
    eventually("it is on its way", || moving(&a, "m"));
    let pid = a.pid_of("m");
    a.kill_daemon();
    a.start_daemon();
    assert_eq!((a.state_of("m"), a.pid_of("m")), ("running".into(), pid));
    eventually("nothing is left at the destination", || b.names().is_empty() && b.ram_files() == 0);
    let reports = a.ended(a.migrate(&["m"], &b.address(), json!({ "verify": true })));
    assert_eq!(reports[0]["status"], "completed", "{}", reports[0]);
}

#[test]
fn a_destination_daemon_killed_under_way_clears_up_when_it_comes_back() {
    if cannot_run() {
        return;
    }
    let (a, mut b) = (Host::start(), Host::start());
    a.run_full("m");
    let id = a.migrate(&["m"], &b.address(), slow());
    eventually("it is on its way", || moving(&a, "m"));
    let stranded = b.pid_of("m");
    b.kill_daemon();
    let reports = a.ended(id);
    assert_eq!((&reports[0]["status"], &reports[0]["error"]["guest"]), (&"failed".into(), &"source".into()));
    assert_eq!(a.state_of("m"), "running");
    b.start_daemon();
    assert!(b.names().is_empty() && !runs(stranded));
    assert_eq!(b.ram_files(), 0);
    let reports = a.ended(a.migrate(&["m"], &b.address(), json!({ "verify": true })));
    assert_eq!(reports[0]["status"], "completed", "{}", reports[0]);
}

#[test]
fn a_daemon_told_to_end_gives_back_what_is_on_its_way() {
    if cannot_run() {
        return;
    }
    let (mut a, b) = (Host::start(), Host::start());
    a.run_full("m");
    a.migrate(&["m"], &b.address(), slow());
    eventually("it is on its way", || moving(&a, "m"));
    assert!(a.stop_daemon().success());
    eventually("nothing is left at the destination", || b.names().is_empty() && b.ram_files() == 0);
    a.start_daemon();
    assert_eq!(a.state_of("m"), "running");
}
