//! Guests that run at the destination before all their pages are there, as both daemons show and keep them: also over
//! their sudden deaths.

mod support;

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};

use rustix::process::Signal;
use serde_json::{Value, json};
use support::pools::fork;
use support::{BARE, FULL, Host, cannot_run, eventually, run_request, runs, signal};

/// A source and a destination where `m` runs while its pages still follow, for as long as the source does not
/// [hurry](Host::hurry); the migration's number.
fn pages_follow() -> (Host, Host, u64) {
    let (a, b) = (Host::configured("bandwidth = '800Kbit'"), Host::start());
    a.run_full("m");
    let slowly = json!({ "mode": "postcopy", "prepaging": "linear", "streams": 1 });
    let id = a.migrate(&["m"], &b.address(), slowly);
    eventually("its pages follow it", || a.get("/v1/vms/m")["migration"]["phase"] == "postcopy");
    eventually("it belongs there", || b.get("/v1/vms/m")["arriving"].is_object());
    (a, b, id)
}

fn missing(host: &Host) -> u64 {
    host.get("/v1/vms/m")["arriving"]["missing_pages"].as_u64().expect("pages are missing")
}

/// `m` is whole at `b`, and nothing of it is left at `a`.
fn whole_at(b: &Host, a: &Host) {
    eventually("all its pages are there", || b.get("/v1/vms/m")["arriving"].is_null());
    eventually("nothing is left at its source", || a.names().is_empty());
    assert_eq!((a.ram_files(), b.ram_files()), (0, 1), "its RAM alone, without a map");
    assert_eq!(b.state_of("m"), "running");
}

#[test]
fn both_ends_say_that_pages_follow_and_let_nothing_come_between() {
    if cannot_run() {
        return;
    }
    let (a, b, id) = pages_follow();
    let note = b.get("/v1/vms/m")["note"].to_string();
    assert!(note.contains("runs here") && note.contains("still at"), "{note}");
    assert_eq!(b.refused("POST", "/v1/migrations", &json!({ "vms": ["m"], "to": "h:1" })), "still-arriving");
    assert_eq!(a.refused("POST", "/v1/vms/m/cancel", &Value::Null), "too-late");
    assert_eq!(a.refused("DELETE", "/v1/vms/m", &Value::Null), "serving-pages");
    assert_eq!(b.refused("POST", "/v1/vms/m/resume", &json!({})), "not-migrating");
    a.hurry();
    let report = &a.ended(id)[0];
    assert_eq!((&report["status"], &report["pages"]["duplicate"]), (&json!("completed"), &json!(0)), "{report}");
    assert_eq!(report["partial"], false);
    whole_at(&b, &a);
    // As any other machine from now on.
    let back = b.ended(b.migrate(&["m"], &a.address(), json!({ "mode": "hybrid", "verify": true })));
    assert_eq!((&back[0]["status"], &back[0]["verify"]["mismatches"]), (&json!("completed"), &json!(0)), "{}", back[0]);
}

/// A QEMU that waits for a page itself answers nobody.
#[test]
fn a_guest_whose_qemu_does_not_answer_while_pages_follow_is_not_said_to_be_lost() {
    if cannot_run() {
        return;
    }
    let (a, b, id) = pages_follow();
    signal(b.pid_of("m"), Signal::STOP);
    let shown = b.get("/v1/vms/m");
    assert_eq!((&shown["state"], shown["arriving"].is_object()), (&json!("running"), true), "{shown}");
    assert!(shown["note"].to_string().contains("does not answer"), "{shown}");
    signal(b.pid_of("m"), Signal::CONT);
    a.hurry();
    assert_eq!(a.ended(id)[0]["status"], "completed");
    whole_at(&b, &a);
}

#[test]
fn a_source_daemon_that_is_killed_while_pages_follow_sends_the_rest_when_it_is_back() {
    if cannot_run() {
        return;
    }
    let (mut a, b, _) = pages_follow();
    a.kill_daemon();
    eventually("it says what it waits for", || b.get("/v1/vms/m")["note"].to_string().contains("waiting for"));
    assert!(missing(&b) > 0 && b.state_of("m") == "running");
    a.start_daemon();
    a.hurry();
    whole_at(&b, &a);
    let report = &a.latest_ended()[0];
    assert_eq!((&report["status"], &report["partial"]), (&json!("completed"), &json!(true)), "{report}");
}

#[test]
fn a_destination_daemon_that_is_killed_while_pages_follow_takes_the_rest_when_it_is_back() {
    if cannot_run() {
        return;
    }
    let (a, mut b, id) = pages_follow();
    let pid = b.pid_of("m");
    b.kill_daemon();
    eventually("its source says what it waits for", || {
        a.get("/v1/vms/m")["migration"]["waiting_for"].to_string().contains(&b.address())
    });
    b.start_daemon();
    // A QEMU that waits for a page itself says how its guest is once that has come.
    eventually("it says that it runs", || b.state_of("m") == "running");
    assert_eq!(b.pid_of("m"), pid);
    assert!(missing(&b) > 0);
    a.hurry();
    let report = &a.ended(id)[0];
    assert_eq!(report["status"], "completed", "{report}");
    assert!(report["postcopy"]["interruptions"].as_u64() > Some(0), "{report}");
    whole_at(&b, &a);
}

#[test]
fn a_guest_that_is_stopped_before_its_last_page_ends_at_both_hosts() {
    if cannot_run() {
        return;
    }
    let (a, b, id) = pages_follow();
    let (source, destination) = (a.pid_of("m"), b.pid_of("m"));
    assert_eq!(b.ask("DELETE", "/v1/vms/m?force=true", None).0, 204);
    assert!(b.names().is_empty() && !runs(destination));
    let report = &a.ended(id)[0];
    assert_eq!((&report["status"], &report["error"]["guest"]), (&json!("failed"), &json!("gone")), "{report}");
    eventually("nothing is left at its source", || a.names().is_empty() && !runs(source));
    assert_eq!((a.ram_files(), b.ram_files()), (0, 0));
}

#[test]
fn pages_that_are_given_up_at_the_source_leave_the_guest_waiting_and_it_can_be_stopped() {
    if cannot_run() {
        return;
    }
    let (a, b, id) = pages_follow();
    assert_eq!(a.ask("DELETE", "/v1/vms/m?force=true", None).0, 204);
    assert!(a.names().is_empty());
    assert_eq!(a.ram_files(), 0);
    assert_eq!(a.ended(id)[0]["error"]["code"], "given-up");
    eventually("it waits", || b.get("/v1/vms/m")["arriving"]["waiting_ms"].is_number());
    assert_eq!(b.ask("DELETE", "/v1/vms/m?force=true", None).0, 204);
    assert_eq!(b.ram_files(), 0);
}

/// Starts a machine, fills its RAM and forks it, so that it is in private memory. Returns the file that it and its
/// clone have in common.
fn run_forked(host: &Host, name: &str, clone: &str) -> File {
    // A card that QEMU adds by itself cannot be told in a clone.
    let request = run_request(name, &[&BARE[..], &["-nodefaults"]].concat());
    let (status, vm) = host.ask("POST", "/v1/vms", Some(&request));
    assert_eq!(status, 201, "{vm}");
    host.fill(name);
    let ram = File::open(host.ram_of(name)).expect("its RAM");
    fork(host, name, &json!({ "names": [clone] }));
    ram
}

/// Has a machine write what it reads in a part of its RAM, which it has in common with others: it has a copy then.
fn rewrite(pid: u32, ram: &File, offset: u64, bytes: usize) {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).expect("its mappings");
    let number = |digits| u64::from_str_radix(digits, 16).expect("a number");
    let address = maps.lines().find_map(|line| {
        let words: Vec<_> = line.split_ascii_whitespace().collect();
        let ((start, end), at) = (words[0].split_once('-').expect("a range"), number(words[2]));
        let part = at..at + (number(end) - number(start));
        let is_it = words[4] == ram.metadata().expect("its file").ino().to_string() && part.contains(&offset);
        is_it.then(|| number(start) + offset - at)
    });
    let memory = File::options().read(true).write(true).open(format!("/proc/{pid}/mem")).expect("its memory");
    let (address, mut body) = (address.expect("it is mapped there"), vec![0; bytes]);
    memory.read_exact_at(&mut body, address).expect("it is there");
    memory.write_all_at(&body, address).expect("it is its own");
}

/// Fails where one guest that waits for pages has everything stay that no guest of its host needs any more.
#[test]
fn what_no_guest_needs_any_more_is_given_back_while_another_guest_waits_for_pages() {
    const PART: usize = 2 << 20;
    if cannot_run() {
        return;
    }
    let (a, mut b) = (Host::configured("bandwidth = '800Kbit'"), Host::start());
    drop(run_forked(&a, "m", "of-it"));
    let common = run_forked(&b, "n", "of-it");
    let id = a.migrate(&["m"], &b.address(), json!({ "mode": "postcopy", "streams": 1 }));
    eventually("its pages follow it", || a.get("/v1/vms/m")["migration"]["phase"] == "postcopy");
    eventually("it belongs there", || b.get("/v1/vms/m")["arriving"].is_object());
    let before = common.metadata().unwrap().blocks();
    let mut written = 0;
    let mut both_write_a_part = |host: &Host| {
        let offset = FULL.start + written * PART as u64;
        ["n", "of-it"].iter().for_each(|name| rewrite(host.pid_of(name), &common, offset, PART));
        written += 1;
        let left = before - written * PART as u64 / 512;
        eventually("what both have written is given back", || common.metadata().unwrap().blocks() <= left);
        assert!(missing(host) > 0, "it waits still");
    };
    both_write_a_part(&b);
    // By the next daemon as well, once the agent of the guest that waits has answered to it.
    b.kill_daemon();
    b.start_daemon();
    both_write_a_part(&b);
    a.hurry();
    assert_eq!(a.ended(id)[0]["status"], "completed");
}
