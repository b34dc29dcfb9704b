//! What a restarted daemon makes of a migration that its predecessor died in, at the point of no return: the records
//! are put as a daemon leaves them that is killed there.

mod support;

use std::fs::File;

use serde_json::{Value, json};
use sterna_engine::paging::whereabouts::Whereabouts;
use sterna_protocol::layout::{ChunkIndex, Layout};
use sterna_protocol::pages::{PageMap, PageSet};
use sterna_protocol::spec::BlockSpec;
use sterna_sys::precedence::{Precedence, give_back};
use support::{BARE, Host, cannot_run, eventually, run_request, runs};

/// The migration's number, small enough for every JSON reader.
const ID: u64 = 7;

fn change_record(host: &Host, name: &str, change: impl FnOnce(&mut Value)) {
    let path = host.state().join("vms").join(name).join("vm.json");
    // Read as text where numbers may be wider than a reader's: only the last fields are changed.
    let text = std::fs::read_to_string(&path).unwrap();
    let (wide, rest) = text.split_once("\"qmp\"").unwrap();
    let mut record: Value = serde_json::from_str(&format!("{{\"qmp\"{rest}")).unwrap();
    change(&mut record);
    let changed = record.to_string();
    std::fs::write(&path, format!("{wide}{}", changed.strip_prefix('{').unwrap())).unwrap();
}

fn write_stage(host: &Host, stage: &Value) {
    write_stage_and_pages(host, stage, &Value::Null);
}

fn write_stage_and_pages(host: &Host, stage: &Value, pages: &Value) {
    // By hand: a JSON value cannot hold a number as wide as the boot's.
    let boot = sterna_daemon::process::boot_id().unwrap();
    let record = format!(r#"{{"id":{ID},"vm":"m","stage":{stage},"at_s":4000000000,"boot":{boot},"pages":{pages}}}"#);
    std::fs::write(host.state().join(format!("migrations/{ID:032x}.json")), record).unwrap();
}

/// A source whose daemon was killed after it had handed `m` over to `peer`.
fn handed_over(peer: &str) -> (Host, u32) {
    let mut host = Host::start();
    host.run("m");
    let pid = host.pid_of("m");
    host.kill_daemon();
    change_record(&host, "m", |record| record["lifecycle"] = json!({ "outgoing": ID }));
    write_stage(&host, &json!({ "handing-over": { "peer": peer } }));
    host.start_daemon();
    (host, pid)
}

#[test]
fn a_guest_that_was_handed_over_does_not_come_back_before_the_peer_has_answered() {
    if cannot_run() {
        return;
    }
    let (host, pid) = handed_over("127.0.0.1:1");
    assert_eq!(host.state_of("m"), "waiting-for-peer");
    let note = host.get("/v1/vms/m")["note"].to_string();
    assert!(note.contains("127.0.0.1:1"), "{note}");
    assert_eq!(host.refused("DELETE", "/v1/vms/m", &Value::Null), "vm-busy");
    assert_eq!(host.refused("POST", "/v1/vms/m/cancel", &Value::Null), "too-late");
    assert_eq!(host.refused("POST", "/v1/migrations", &json!({ "vms": ["m"], "to": "h:1" })), "vm-busy");
    let (status, _) = host.ask("DELETE", "/v1/vms/m?force=true", None);
    assert_eq!(status, 204, "its user may give it up");
    assert!(host.names().is_empty() && !runs(pid));
}

#[test]
fn a_peer_that_never_committed_gives_the_guest_back() {
    if cannot_run() {
        return;
    }
    let mut peer = Host::start();
    peer.stop_daemon();
    write_stage(&peer, &json!("aborted"));
    peer.start_daemon();
    let (host, pid) = handed_over(&peer.address());
    eventually("it belongs here again", || host.state_of("m") == "running");
    assert_eq!(host.pid_of("m"), pid);
    let reports = host.ended(host.migrate(&["m"], &peer.address(), json!({ "verify": true })));
    assert_eq!(reports[0]["status"], "completed", "{}", reports[0]);
}

#[test]
fn a_peer_that_committed_keeps_the_guest() {
    if cannot_run() {
        return;
    }
    let mut peer = Host::start();
    peer.stop_daemon();
    write_stage(&peer, &json!("committed"));
    peer.start_daemon();
    let (host, pid) = handed_over(&peer.address());
    eventually("it is the peer's alone", || host.names().is_empty());
    assert!(!runs(pid));
    assert_eq!(host.ram_files(), 0);
}

/// The same, and `m`'s guest may need pages of here.
fn handed_over_with_pages(peer: &str, end_qemu: bool) -> (Host, u32) {
    let mut host = Host::start();
    host.run("m");
    let pid = host.pid_of("m");
    host.kill_daemon();
    if end_qemu {
        support::end_machine(pid);
        eventually("its QEMU ends", || !runs(pid));
    }
    change_record(&host, "m", |record| record["lifecycle"] = json!({ "outgoing": ID }));
    write_stage(&host, &json!({ "handing-over": { "peer": peer, "postcopy": { "mode": "postcopy" } } }));
    host.start_daemon();
    (host, pid)
}

#[test]
fn pages_that_the_guest_elsewhere_needs_stay_until_they_are_needed_no_more() {
    if cannot_run() {
        return;
    }
    // The peer's host has been restarted since: the guest that it took has ended there.
    let mut peer = Host::start();
    peer.stop_daemon();
    write_stage_and_pages(&peer, &json!("committed"), &json!("coming"));
    for end_qemu in [false, true] {
        // Nobody answers at first.
        let (host, pid) = handed_over_with_pages(&peer.address(), end_qemu);
        assert_eq!(host.state_of("m"), "waiting-for-peer");
        assert_eq!((host.ram_files(), runs(pid)), (1, !end_qemu), "its RAM may be needed, with its QEMU or without");
        assert_eq!(host.refused("DELETE", "/v1/vms/m", &Value::Null), "vm-busy");
        peer.start_daemon();
        eventually("nothing is left of it", || host.names().is_empty());
        assert!(!runs(pid));
        assert_eq!(host.ram_files(), 0);
        let report = &host.latest_ended()[0];
        assert_eq!((&report["status"], &report["error"]["guest"]), (&json!("failed"), &json!("gone")), "{report}");
        peer.stop_daemon();
    }
}

#[test]
fn a_guest_that_was_to_run_elsewhere_without_its_pages_and_never_did_runs_on() {
    if cannot_run() {
        return;
    }
    let mut peer = Host::start();
    peer.stop_daemon();
    write_stage(&peer, &json!("aborted"));
    peer.start_daemon();
    // Its user says where the destination is: nobody answers where it was.
    let (host, pid) = handed_over_with_pages("127.0.0.1:1", false);
    assert_eq!(host.state_of("m"), "waiting-for-peer");
    assert_eq!(host.refused("POST", "/v1/vms/m/resume", &json!({ "to": "nowhere" })), "invalid-request");
    let (status, problem) = host.ask("POST", "/v1/vms/m/resume", Some(&json!({ "to": peer.address() })));
    assert_eq!(status, 202, "{problem}");
    eventually("it belongs here again", || host.state_of("m") == "running");
    assert_eq!(host.pid_of("m"), pid);
    assert_eq!(host.refused("POST", "/v1/vms/m/resume", &json!({})), "not-migrating");
}

/// A destination whose daemon was killed while `m` came, at this stage.
fn arriving(stage: &str) -> (Host, u32) {
    let mut host = Host::start();
    let mut arguments = BARE.to_vec();
    arguments.push("-S");
    let (status, vm) = host.ask("POST", "/v1/vms", Some(&run_request("m", &arguments)));
    assert_eq!(status, 201, "{vm}");
    let pid = host.pid_of("m");
    host.kill_daemon();
    change_record(&host, "m", |record| {
        record["lifecycle"] = json!({ "incoming": ID });
        record["running"] = true.into();
    });
    write_stage(&host, &json!(stage));
    host.start_daemon();
    (host, pid)
}

#[test]
fn a_committed_guest_runs_after_the_destination_daemon_came_back() {
    if cannot_run() {
        return;
    }
    let (host, pid) = arriving("committed");
    assert_eq!((host.state_of("m"), host.pid_of("m")), ("running".into(), pid));
}

#[test]
fn a_guest_that_was_not_committed_never_runs_at_the_destination() {
    if cannot_run() {
        return;
    }
    let (host, pid) = arriving("preparing");
    assert!(host.names().is_empty() && !runs(pid));
    assert_eq!(host.ram_files(), 0);
    let record = std::fs::read_to_string(host.state().join(format!("migrations/{ID:032x}.json"))).unwrap();
    assert!(record.contains("aborted"), "the source must learn it: {record}");
}

/// A destination whose daemon was killed while `m` ran there and so many of its first pages were still to come.
fn without_all_pages(missing: usize) -> (Host, u32) {
    without_all_pages_on(Host::start(), missing, |_| ())
}

/// The same on this host; `before`: what is done before its daemon starts again.
fn without_all_pages_on(mut host: Host, missing: usize, before: impl FnOnce(&Host)) -> (Host, u32) {
    host.run("m");
    let pid = host.pid_of("m");
    host.kill_daemon();
    let map = host.state().join("ram/m-missing");
    change_record(&host, "m", |record| {
        let ram: Vec<BlockSpec> = record["blocks"].as_array().unwrap().iter().map(block_spec).collect();
        let layout = Layout::new(&ram).unwrap();
        let file = File::options().read(true).write(true).create_new(true).open(&map).unwrap();
        let mut pages = PageMap::empty(&layout);
        pages.insert_all(ChunkIndex(0), &PageSet::first(missing));
        Whereabouts::all_here(file, &layout).begin(pages, &layout).unwrap();
        record["paging"] = json!({ "id": ID, "from": "the-source", "map": map });
    });
    write_stage_and_pages(&host, &json!("committed"), &json!("coming"));
    before(&host);
    host.start_daemon();
    (host, pid)
}

/// Failed before: the map of missing pages was removed though nothing could be written down, the daemon after that
/// missed it, and the guest was stopped for ever.
#[test]
fn a_guest_whose_last_page_came_when_the_disk_was_full_runs_on_after_every_restart() {
    if cannot_run() {
        return;
    }
    let filling = |host: &Host| host.state().join("filling");
    let (mut host, pid) = without_all_pages_on(support::small_host(), 0, |host| support::fill(&filling(host)));
    for full in [true, true, false, false] {
        assert_eq!((host.state_of("m"), host.pid_of("m")), ("running".into(), pid), "{}", host.log());
        assert!(host.get("/v1/vms/m")["note"].is_null());
        host.kill_daemon();
        if !full {
            let _ = std::fs::remove_file(filling(&host));
        }
        host.start_daemon();
    }
    assert_eq!(host.ram_files(), 1, "its RAM without a map");
    assert!(migration_record(&host).contains(r#""pages": "here""#));
}

fn block_spec(block: &Value) -> BlockSpec {
    let number = |field: &str| block[field].as_u64().unwrap();
    BlockSpec {
        id: block["id"].as_str().unwrap().into(),
        bytes: number("bytes"),
        page_bytes: number("page_bytes"),
        path: String::new(),
    }
}

#[test]
fn a_guest_whose_missing_pages_nothing_can_bring_is_stopped_and_never_runs_on_zeros() {
    if cannot_run() {
        return;
    }
    // Its agent keeps no userfaultfd: what was missing reads as zeros by now.
    let (mut host, pid) = without_all_pages(10);
    for _ in 0..2 {
        eventually("it is stopped", || host.state_of("m") == "paused");
        let vm = host.get("/v1/vms/m");
        assert!(vm["note"].as_str().unwrap().contains("cannot be brought"), "{vm}");
        assert_eq!((&vm["arriving"]["missing_pages"], &vm["arriving"]["from"]), (&json!(10), &json!("the-source")));
        let elsewhere = json!({ "vms": ["m"], "to": "h:1" });
        assert_eq!(host.refused("POST", "/v1/migrations", &elsewhere), "still-arriving");
        let estimate = "/v1/vms/m/estimate?bandwidth_bytes_per_s=125000000";
        assert_eq!(host.refused("GET", estimate, &Value::Null), "still-arriving");
        host.kill_daemon();
        host.start_daemon();
    }
    let (status, _) = host.ask("DELETE", "/v1/vms/m?force=true", None);
    assert_eq!(status, 204);
    assert!(host.names().is_empty() && !runs(pid));
    assert_eq!(host.ram_files(), 0, "the map goes with the machine");
    assert!(migration_record(&host).contains(r#""pages": "gone""#), "the source must learn it");
}

#[test]
fn a_guest_whose_last_page_had_come_is_as_any_other_after_a_restart() {
    if cannot_run() {
        return;
    }
    let (host, pid) = without_all_pages(0);
    assert_eq!((host.state_of("m"), host.pid_of("m")), ("running".into(), pid));
    let vm = host.get("/v1/vms/m");
    assert!(vm["arriving"].is_null() && vm["note"].is_null(), "{vm}");
    assert_eq!(host.ram_files(), 1, "its RAM without a map");
    assert!(migration_record(&host).contains(r#""pages": "here""#));
}

#[test]
fn a_machine_whose_daemon_died_in_its_pause_has_its_threads_as_they_were() {
    if cannot_run() {
        return;
    }
    let mut host = Host::start();
    host.run("m");
    let pid = host.pid_of("m");
    let raise = || {
        let precedence = Precedence::begin().unwrap();
        precedence.process(pid, |_| true).map(|()| std::mem::forget(precedence))
    };
    if let Err(error) = raise() {
        return println!("skipped: {error}");
    }
    assert!(give_back(pid) > 0, "threads are raised, and found again");
    raise().unwrap();
    host.kill_daemon();
    host.start_daemon();
    eventually("it is looked after", || host.state_of("m") == "running");
    assert_eq!(give_back(pid), 0, "the new daemon has given back what was left");
}

fn migration_record(host: &Host) -> String {
    std::fs::read_to_string(host.state().join(format!("migrations/{ID:032x}.json"))).unwrap()
}
