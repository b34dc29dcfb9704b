//! Many machines at once: whose turn it is, what a full destination says, and a bandwidth that all share.

mod support;

use std::fs::File;
use std::os::unix::fs::FileExt;

use rustix::process::Signal;
use serde_json::{Value, json};
use support::{BARE, Host, cannot_run, eventually, run_request, signal};

/// Slow enough to be caught under way: a bare machine has some 700 KiB that are not zero.
fn slow() -> Value {
    json!({ "bandwidth_bytes_per_s": 96 * 1024 })
}

fn migration(host: &Host, name: &str) -> Value {
    host.get(&format!("/v1/vms/{name}"))["migration"].clone()
}

fn moving(host: &Host, name: &str) -> bool {
    migration(host, name)["phase"] == "precopy"
}

fn waits_for(host: &Host, name: &str, what: &str) -> bool {
    migration(host, name)["waiting_for"].as_str().is_some_and(|text| text.contains(what))
}

fn cancel(host: &Host, name: &str) {
    assert_eq!(host.ask("POST", &format!("/v1/vms/{name}/cancel"), None).0, 202);
}

/// With machines, of which the first is [full](Host::run_full).
fn host_with(config: &str, names: &[&str]) -> Host {
    let host = Host::configured(config);
    names.iter().take(1).for_each(|name| host.run_full(name));
    names.iter().skip(1).for_each(|name| drop(host.run(name)));
    host
}

#[track_caller]
fn all_completed(reports: &[Value]) {
    assert!(reports.iter().all(|report| report["status"] == "completed"), "{reports:?}");
}

#[test]
fn those_who_wait_know_their_place_and_are_counted() {
    if cannot_run() {
        return;
    }
    let (a, b) = (host_with("max_outgoing = 1", &["m1", "m2", "m3"]), Host::start());
    let first = a.migrate(&["m1"], &b.address(), slow());
    eventually("the first is on its way", || moving(&a, "m1"));
    let second = a.migrate(&["m2"], &b.address(), json!({}));
    let third = a.migrate(&["m3"], &b.address(), json!({}));
    let place = |name| (migration(&a, name)["queue_place"].clone(), migration(&a, name)["queue_length"].clone());
    eventually("both know their places", || (place("m2"), place("m3")) == ((json!(1), json!(2)), (json!(2), json!(2))));
    assert!(waits_for(&a, "m3", "other migrations of this host"));
    let metrics = a.get("/metrics").to_string();
    assert!(metrics.contains("sterna_migrations_queued 2"), "{metrics}");
    assert!(metrics.contains("sterna_migrations_running{direction=\\\"out\\\"} 1"), "{metrics}");
    assert!(b.get("/metrics").to_string().contains("direction=\\\"in\\\"} 1"));
    cancel(&a, "m2");
    assert_eq!(a.ended(second)[0]["status"], "cancelled");
    eventually("the third moves up", || place("m3") == (json!(1), json!(1)));
    cancel(&a, "m1");
    assert_eq!(a.ended(first)[0]["status"], "cancelled");
    let reports = a.ended(third);
    all_completed(&reports);
    assert!(reports[0]["queued_ms"].as_f64() > Some(0.0), "{}", reports[0]);
    assert_eq!(migration(&b, "m3"), Value::Null);
}

/// Failed while a machine that waits for its turn counted as one that is being moved: its guest wrote on. And once it
/// could be stopped, it stood still where it came, because its turn began with what was known of it at the request.
#[test]
fn whoever_waits_is_stopped_where_memory_gets_short_and_runs_where_it_arrives() {
    if cannot_run() {
        return;
    }
    let (mut a, b) = (host_with("max_outgoing = 1", &["m1"]), Host::start());
    let (dir, middle) = (tempfile::tempdir_in("/dev/shm").unwrap(), 48 << 20);
    let path = dir.path().join("template");
    let template = File::create(&path).unwrap();
    template.set_len(64 << 20).unwrap();
    template.write_all_at(&vec![7; 8 << 20], middle).unwrap();
    let mut request = run_request("m2", &BARE);
    (request["memory_mode"], request["memory_template"]) = ("private".into(), path.to_str().unwrap().into());
    assert_eq!(a.ask("POST", "/v1/vms", Some(&request)).0, 201);
    // From now on there is always too little memory.
    a.kill_daemon();
    a.configure("memory_floor = \"100T\"");
    a.start_daemon();
    let first = a.migrate(&["m1"], &b.address(), slow());
    eventually("the first is on its way", || moving(&a, "m1"));
    let second = a.migrate(&["m2"], &b.address(), json!({}));
    eventually("the second waits", || waits_for(&a, "m2", "other migrations of this host"));
    let pid = a.pid_of("m2");
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let line = maps.lines().find(|line| line.ends_with(path.to_str().unwrap())).expect("it is mapped");
    let words: Vec<&str> = line.split_whitespace().collect();
    let number = |digits: &str| u64::from_str_radix(digits, 16).unwrap();
    let begins = number(words[0].split('-').next().unwrap()) + middle - number(words[2]);
    let memory = File::options().write(true).open(format!("/proc/{pid}/mem")).unwrap();
    let mut pages = (0..2048).map(|page| begins + page * 4096);
    eventually("it is stopped", || {
        memory.write_all_at(&[8; 8], pages.next().expect("it has pages left")).unwrap();
        a.get("/v1/vms/m2")["note"].as_str().is_some_and(|note| note.contains("no memory left"))
    });
    assert_eq!(migration(&a, "m2")["phase"], "queued");
    cancel(&a, "m1");
    assert_eq!(a.ended(first)[0]["status"], "cancelled");
    all_completed(&a.ended(second));
    assert_eq!(b.state_of("m2"), "running");
}

#[test]
fn a_full_destination_keeps_them_waiting_and_holds_up_nobody_else() {
    if cannot_run() {
        return;
    }
    let a = host_with("max_outgoing = 2", &["m1", "m2", "m3", "m4"]);
    let (full, free) = (Host::configured("max_incoming = 1"), Host::start());
    let first = a.migrate(&["m1"], &full.address(), slow());
    eventually("the first is on its way", || moving(&a, "m1"));
    let second = a.migrate(&["m2"], &full.address(), json!({}));
    eventually("the second is put off", || waits_for(&a, "m2", "it takes 1 at a time"));
    assert!(waits_for(&a, "m2", &full.address()));
    let third = a.migrate(&["m3"], &full.address(), json!({}));
    all_completed(&a.ended(a.migrate(&["m4"], &free.address(), json!({}))));
    assert!(moving(&a, "m1"), "the other one passed while the first was on its way");
    cancel(&a, "m2");
    assert_eq!(a.ended(second)[0]["status"], "cancelled");
    assert_eq!(a.state_of("m2"), "running");
    cancel(&a, "m1");
    assert_eq!(a.ended(first)[0]["status"], "cancelled");
    all_completed(&a.ended(third));
    assert_eq!((full.names(), free.names()), (vec!["m3".to_owned()], vec!["m4".to_owned()]));
    let records = std::fs::read_dir(full.state().join("migrations")).unwrap().count();
    assert!(records <= 2, "what was put off leaves no records: {records}");
}

#[test]
fn two_hosts_that_empty_themselves_into_each_other_both_end() {
    if cannot_run() {
        return;
    }
    let limits = "max_outgoing = 1\nmax_incoming = 1";
    let (a, b) = (host_with(limits, &["a1", "a2"]), host_with(limits, &["b1", "b2"]));
    let there = [a.migrate(&["a1"], &b.address(), json!({})), a.migrate(&["a2"], &b.address(), json!({}))];
    let back = [b.migrate(&["b1"], &a.address(), json!({})), b.migrate(&["b2"], &a.address(), json!({}))];
    there.into_iter().for_each(|id| all_completed(&a.ended(id)));
    back.into_iter().for_each(|id| all_completed(&b.ended(id)));
    assert_eq!((a.names(), b.names()), (vec!["b1".into(), "b2".into()], vec!["a1".into(), "a2".into()]));
}

#[test]
fn a_gang_larger_than_every_limit_arrives() {
    if cannot_run() {
        return;
    }
    let names = ["m1", "m2", "m3"];
    let (a, b) = (host_with("max_outgoing = 2", &names), Host::configured("max_incoming = 1"));
    all_completed(&a.ended(a.migrate(&names, &b.address(), json!({}))));
    assert_eq!(b.names(), names);
}

#[test]
fn a_machine_whose_lost_destination_has_its_guest_holds_up_nobody_and_goes_on_when_that_is_back() {
    if cannot_run() {
        return;
    }
    let a = host_with("max_outgoing = 1\nbandwidth = '800Kbit'", &["m1", "m2"]);
    let (mut lost, free) = (Host::start(), Host::start());
    let follow = json!({ "mode": "postcopy", "streams": 1 });
    let first = a.migrate(&["m1"], &lost.address(), follow);
    eventually("its pages follow it", || migration(&a, "m1")["phase"] == "postcopy");
    lost.kill_daemon();
    a.hurry();
    let second = a.migrate(&["m2"], &free.address(), json!({}));
    eventually("the second waits", || waits_for(&a, "m2", "other migrations of this host"));
    all_completed(&a.ended(second));
    assert!(waits_for(&a, "m1", &lost.address()), "{}", migration(&a, "m1"));
    let running = |count| a.get("/metrics").to_string().contains(&format!("direction=\\\"out\\\"}} {count}"));
    assert!(running(0), "who waits is not under way");
    lost.start_daemon();
    eventually("it goes on", || running(1));
    all_completed(&a.ended(first));
    eventually("both places are free", || running(0));
    assert_eq!((lost.names(), free.names()), (vec!["m1".to_owned()], vec!["m2".to_owned()]));
}

#[test]
fn a_machine_that_ends_while_it_waits_leaves_the_queue() {
    if cannot_run() {
        return;
    }
    let (a, b) = (host_with("max_outgoing = 1", &["m1", "m2"]), Host::start());
    a.migrate(&["m1"], &b.address(), slow());
    eventually("the first is on its way", || moving(&a, "m1"));
    let second = a.migrate(&["m2"], &b.address(), json!({}));
    eventually("the second waits", || waits_for(&a, "m2", "other migrations"));
    signal(a.pid_of("m2"), Signal::KILL);
    let report = &a.ended(second)[0];
    assert_eq!((&report["status"], &report["error"]["guest"]), (&json!("failed"), &json!("gone")), "{report}");
    eventually("it is off the list", || a.names() == ["m1"]);
}

#[test]
fn a_restart_empties_the_queue_and_the_machines_run_on() {
    if cannot_run() {
        return;
    }
    let (mut a, b) = (host_with("max_outgoing = 1", &["m1", "m2"]), Host::start());
    a.migrate(&["m1"], &b.address(), slow());
    eventually("the first is on its way", || moving(&a, "m1"));
    a.migrate(&["m2"], &b.address(), json!({}));
    eventually("the second waits", || waits_for(&a, "m2", "other migrations"));
    a.kill_daemon();
    a.start_daemon();
    assert_eq!((a.state_of("m1"), a.state_of("m2")), ("running".into(), "running".into()));
    assert_eq!(migration(&a, "m2"), Value::Null);
}

#[test]
fn the_hosts_bandwidth_holds_for_all_and_can_be_changed_under_way() {
    if cannot_run() {
        return;
    }
    let (a, b) = (host_with("bandwidth = '800Kbit'", &["m1", "m2"]), Host::start());
    let path = "/v1/host/bandwidth";
    assert_eq!(a.get(path), json!({ "bandwidth_bytes_per_s": 100_000 }));
    assert_eq!(a.refused("PUT", path, &json!({ "bandwidth_bytes_per_s": 1000 })), "invalid-request");
    assert_eq!(a.refused("PUT", path, &json!({})), "invalid-request");
    let ids = ["m1", "m2"].map(|name| a.migrate(&[name], &b.address(), json!({ "streams": 4 })));
    eventually("both are held back", || moving(&a, "m1") && moving(&a, "m2"));
    let (status, answer) = a.ask("PUT", path, Some(&json!({ "bandwidth_bytes_per_s": null })));
    assert_eq!((status, answer), (200, json!({ "bandwidth_bytes_per_s": null })));
    ids.into_iter().for_each(|id| all_completed(&a.ended(id)));
}
