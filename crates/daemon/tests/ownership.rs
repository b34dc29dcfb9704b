//! Who has a guest, and who may say so: daemons that are asked what they do not know, QEMUs that do not let a guest run
//! when they should, and a person's word. The records of a source are put as a daemon leaves them that is killed just
//! before its last word.

mod support;

use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, fcntl_lock};
use rustix::process::Signal;
use serde_json::{Value, json};
use sterna_engine::host::{MigrationId, Verdict};
use sterna_engine::source::ask_verdict;
use support::{BARE, Host, cannot_run, eventually, run_request, runs, signal};

/// The migration's number.
const ID: u64 = 7;

/// Waits for what takes several of QEMU's time limits.
fn patiently(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(120);
    while !holds() {
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The number of a host's state directory; that of a daemon that knows none is 0.
fn identity(host: &Host) -> u128 {
    let text = std::fs::read_to_string(host.state().join("identity")).unwrap_or_default();
    u128::from_str_radix(text.trim(), 16).unwrap_or(0)
}

fn write_stage(host: &Host, stage: &str) {
    // By hand: a JSON value cannot hold numbers as wide as these.
    let boot = sterna_daemon::process::boot_id().unwrap();
    let record = format!(r#"{{"id":{ID},"vm":"m","stage":{stage},"at_s":4000000000,"boot":{boot}}}"#);
    std::fs::write(host.state().join(format!("migrations/{ID:032x}.json")), record).unwrap();
}

/// A source whose daemon was killed after it had handed `m` over to the daemon of this identity, which it looks for at
/// `peer`.
fn handed_over(peer: &str, daemon: u128) -> (Host, u32) {
    let mut host = Host::start();
    host.run("m");
    let pid = host.pid_of("m");
    host.kill_daemon();
    let path = host.state().join("vms/m/vm.json");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace(r#""here""#, &format!(r#"{{ "outgoing": {ID} }}"#))).unwrap();
    write_stage(&host, &format!(r#"{{"handing-over":{{"peer":"{peer}","daemon":{daemon}}}}}"#));
    host.start_daemon();
    (host, pid)
}

fn note(host: &Host) -> String {
    host.get("/v1/vms/m")["note"].to_string()
}

/// It waits, stopped, and says this.
fn waits_because(host: &Host, words: &str) {
    eventually("it says what was answered", || note(host).contains(words));
    assert_eq!(host.state_of("m"), "waiting-for-peer", "{}", note(host));
}

/// A daemon that gave up once its first rollback had failed left the guest standing still for ever, and took it for one
/// that belongs here: `lost` as long as its QEMU hung, then `paused`. (Seen so.)
#[test]
fn a_guest_whose_qemu_hangs_at_the_switchover_runs_on_by_itself_when_it_goes_on() {
    if cannot_run() {
        return;
    }
    let (mut a, mut b) = (Host::start(), Host::start());
    a.run("m");
    let pid = a.pid_of("m");
    let slow = json!({ "mode": "stop-and-copy", "bandwidth_bytes_per_s": 96 << 10 });
    let id = a.migrate(&["m"], &b.address(), slow);
    let switchover = || {
        let vm = a.get("/v1/vms/m");
        vm["migration"]["phase"] == "switchover" && vm["migration"]["bytes_on_wire"].as_u64() > Some(0)
    };
    eventually("its pages go and it stands still", switchover);
    // As storage does that hangs: it answers nobody.
    signal(pid, Signal::STOP);
    b.kill_daemon();
    patiently("the migration ends", || a.get(&format!("/v1/migrations/{id}"))["ended"] == true);
    let report = &a.get(&format!("/v1/migrations/{id}"))["migrations"][0];
    assert_eq!((&report["status"], &report["error"]["guest"]), (&json!("failed"), &json!("paused")), "{report}");
    for restarted in [false, true] {
        if restarted {
            a.kill_daemon();
            a.start_daemon();
        }
        assert_eq!(a.state_of("m"), "resuming", "{}", note(&a));
        assert!(note(&a).contains("being given back"), "{}", note(&a));
        assert!(a.get("/v1/vms")[0]["note"].as_str().unwrap().contains("being given back"), "`ps` says so, too");
        assert_eq!(a.refused("DELETE", "/v1/vms/m", &Value::Null), "vm-busy");
        assert_eq!(a.refused("POST", "/v1/migrations", &json!({ "vms": ["m"], "to": "h:1" })), "vm-busy");
        assert_eq!(a.refused("POST", "/v1/vms/m/resume", &json!({ "to": "h:1" })), "not-migrating");
    }
    signal(pid, Signal::CONT);
    let (status, problem) = a.ask("POST", "/v1/vms/m/resume", Some(&json!({})));
    assert_eq!(status, 202, "at once by a person's hand: {problem}");
    patiently("it runs on", || a.state_of("m") == "running");
    assert_eq!(a.pid_of("m"), pid);
    assert!(a.get("/v1/vms/m")["note"].is_null());
    b.start_daemon();
    let reports = a.ended(a.migrate(&["m"], &b.address(), json!({ "verify": true })));
    assert_eq!(reports[0]["status"], "completed", "{}", reports[0]);
}

#[test]
fn a_guest_that_is_being_given_back_can_be_given_up() {
    if cannot_run() {
        return;
    }
    let mut host = Host::start();
    host.run("m");
    let pid = host.pid_of("m");
    host.kill_daemon();
    let path = host.state().join("vms/m/vm.json");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace(r#""here""#, &format!(r#"{{ "outgoing": {ID} }}"#))).unwrap();
    signal(pid, Signal::STOP);
    host.start_daemon();
    assert_eq!(host.state_of("m"), "resuming");
    let (status, problem) = host.ask("DELETE", "/v1/vms/m?force=true", None);
    assert_eq!(status, 204, "{problem}");
    assert!(host.names().is_empty() && !runs(pid));
    assert_eq!(host.ram_files(), 0);
}

/// Each of them said *aborted* and was believed: two guests on one disk. (Seen so: it ran.)
#[test]
fn a_daemon_that_did_not_take_a_guest_is_not_believed_whatever_it_says() {
    if cannot_run() {
        return;
    }
    let (b, mut c) = (Host::start(), Host::start());
    write_stage_of_restarted(&mut c, r#""aborted""#);
    // B took it, and it was looked for where C is.
    let (a, pid) = handed_over(&c.address(), identity(&b));
    waits_because(&a, "another daemon");
    write_stage_of_restarted(&mut c, r#""committed""#);
    let resume = |to: &str| {
        let (status, problem) = a.ask("POST", "/v1/vms/m/resume", Some(&json!({ "to": to })));
        assert_eq!(status, 202, "{problem}");
    };
    resume(&c.address());
    std::thread::sleep(Duration::from_secs(1));
    waits_because(&a, "another daemon");
    assert!(runs(pid), "nor does a stranger's word end it");
    // Itself.
    resume(&a.address());
    waits_because(&a, &format!("handed over to {}", a.address()));
    waits_because(&a, "another daemon");
    // The right one, which has lost its records.
    resume(&b.address());
    waits_because(&a, "never heard of");
    assert!(a.log().contains("never heard of"));
}

fn write_stage_of_restarted(host: &mut Host, stage: &str) {
    host.stop_daemon();
    write_stage(host, stage);
    host.start_daemon();
}

#[test]
fn a_daemon_that_took_a_guest_and_never_ran_it_gives_it_back_wherever_it_is_by_now() {
    if cannot_run() {
        return;
    }
    let mut b = Host::start();
    write_stage_of_restarted(&mut b, r#""aborted""#);
    let (a, pid) = handed_over("127.0.0.1:1", identity(&b));
    let (status, problem) = a.ask("POST", "/v1/vms/m/resume", Some(&json!({ "to": b.address() })));
    assert_eq!(status, 202, "{problem}");
    eventually("it runs here", || a.state_of("m") == "running");
    assert_eq!(a.pid_of("m"), pid);
    assert!(std::fs::read_dir(a.state().join("migrations")).unwrap().next().is_none(), "nobody needs its record");
}

/// It asked itself, turned its own record into *aborted*, and let the guest run. (Seen so.)
#[test]
fn a_source_that_is_sent_to_itself_settles_nothing() {
    if cannot_run() {
        return;
    }
    // Also where nobody knows who took it.
    let (mut a, _) = handed_over("127.0.0.1:1", 0);
    a.kill_daemon();
    write_stage(&a, &format!(r#"{{"handing-over":{{"peer":"{}"}}}}"#, a.address()));
    a.start_daemon();
    waits_because(&a, "is the source");
    let record = std::fs::read_to_string(a.state().join(format!("migrations/{ID:032x}.json"))).unwrap();
    assert!(record.contains("handing-over"), "{record}");
}

#[test]
fn a_person_may_say_that_the_destination_is_off_for_good_and_it_is_logged_who_did() {
    if cannot_run() {
        return;
    }
    let (a, pid) = handed_over("127.0.0.1:1", 5);
    assert_eq!(a.state_of("m"), "waiting-for-peer");
    let fenced = |host: &str| json!({ "fenced": host });
    assert_eq!(a.refused("POST", "/v1/vms/m/resume", &fenced("another-host")), "not-its-destination");
    let both = json!({ "fenced": "127.0.0.1", "to": "h:1" });
    assert_eq!(a.refused("POST", "/v1/vms/m/resume", &both), "invalid-request");
    assert_eq!(a.state_of("m"), "waiting-for-peer");
    let (status, problem) = a.ask("POST", "/v1/vms/m/resume", Some(&fenced("127.0.0.1")));
    assert_eq!(status, 202, "{problem}");
    eventually("it runs here", || a.state_of("m") == "running");
    assert_eq!(a.pid_of("m"), pid);
    let said = format!("user 0, process {}", std::process::id());
    assert!(a.log().contains("BY A PERSON'S WORD") && a.log().contains(&said), "{said}");
    assert_eq!(a.refused("POST", "/v1/vms/m/resume", &fenced("127.0.0.1")), "not-migrating");
}

/// It was told that the guest had ended, by a daemon that had never seen it, and gave the only copy of its missing
/// pages up. (Seen so: nothing was left of the machine.)
#[test]
fn pages_that_follow_a_guest_go_to_nobody_else_and_are_kept_whatever_others_say() {
    if cannot_run() {
        return;
    }
    let (a, mut b, c) = (Host::start(), Host::start(), Host::start());
    a.run("m");
    let slowly = json!({ "mode": "postcopy", "prepaging": "linear", "postcopy_bandwidth_bytes_per_s": 96 << 10 });
    let id = a.migrate(&["m"], &b.address(), slowly);
    eventually("its pages follow it", || a.get("/v1/vms/m")["migration"]["phase"] == "postcopy");
    eventually("it belongs there", || b.get("/v1/vms/m")["arriving"].is_object());
    b.kill_daemon();
    for other in [c.address(), a.address()] {
        let (status, problem) = a.ask("POST", "/v1/vms/m/resume", Some(&json!({ "to": other })));
        assert_eq!(status, 202, "{problem}");
        let waits = || a.get("/v1/vms/m")["migration"]["waiting_for"].to_string();
        eventually("it says who answered", || waits().contains(&other) && waits().contains("another daemon"));
    }
    let there = b.address();
    let fenced = json!({ "fenced": there.split(':').next() });
    assert_eq!(a.refused("POST", "/v1/vms/m/resume", &fenced), "runs-there");
    let (status, problem) = a.ask("POST", "/v1/vms/m/resume", Some(&json!({ "to": b.address() })));
    assert_eq!(status, 202, "{problem}");
    b.start_daemon();
    eventually("all its pages are there", || b.get("/v1/vms/m")["arriving"].is_null());
    assert_eq!(a.ended(id)[0]["status"], "completed");
    eventually("nothing is left at its source", || a.names().is_empty());
}

/// It lived on, with the guest's disks, until its session noticed. (Seen so: *aborted*, and it ran.)
#[test]
fn a_destination_says_aborted_only_when_its_qemu_has_ended() {
    if cannot_run() {
        return;
    }
    let (a, b) = (Host::start(), Host::start());
    a.run("m");
    let id = a.migrate(&["m"], &b.address(), json!({ "bandwidth_bytes_per_s": 96 << 10 }));
    eventually("it is on its way", || a.get("/v1/vms/m")["migration"]["phase"] == "precopy");
    let pid = b.pid_of("m");
    assert!(runs(pid));
    let record = std::fs::read_dir(b.state().join("migrations")).unwrap().next().unwrap().unwrap().path();
    let number = u128::from_str_radix(record.file_stem().unwrap().to_str().unwrap(), 16).unwrap();
    let verdict = ask_verdict(MigrationId(number), &b.address(), None, None).unwrap();
    assert_eq!((verdict, runs(pid)), (Verdict::Aborted, false));
    assert_eq!(a.ended(id)[0]["status"], "failed");
    assert_eq!(a.state_of("m"), "running");
    eventually("nothing is left of it there", || b.names().is_empty() && b.ram_files() == 0);
    assert!(std::fs::read_to_string(record).unwrap().contains("aborted"));
}

/// Each was answered *aborted*, and left a record, with two fsyncs. (Seen so.)
#[test]
fn questions_from_outside_leave_nothing_behind() {
    if cannot_run() {
        return;
    }
    let host = Host::start();
    for number in 0..100 {
        let error = ask_verdict(MigrationId(number), &host.address(), None, None).expect_err("it cannot know");
        assert_eq!(error.problem().code, "not-known-here");
    }
    assert!(std::fs::read_dir(host.state().join("migrations")).unwrap().next().is_none());
}

/// It was `paused` for ever: the guest belonged there, and nobody let it run. (Seen so.)
#[test]
fn a_guest_whose_disk_is_held_up_runs_where_it_belongs_as_soon_as_it_is_free() {
    if cannot_run() {
        return;
    }
    let (a, b) = (Host::start(), Host::start());
    let disk = a.path("disk");
    std::fs::write(&disk, vec![0; 1 << 20]).unwrap();
    let drive = format!("file={},format=raw,if=virtio", disk.display());
    let (status, vm) = a.ask("POST", "/v1/vms", Some(&run_request("m", &[&BARE[..], &["-drive", &drive]].concat())));
    assert_eq!(status, 201, "{vm}");
    let id = a.migrate(&["m"], &b.address(), json!({ "bandwidth_bytes_per_s": 96 << 10 }));
    eventually("it is on its way", || a.get("/v1/vms/m")["migration"]["phase"] == "precopy");
    let pid = b.pid_of("m");
    // As a storage server does that has not noticed yet that the source has let go: whoever wants to write the disk now
    // is refused.
    let held = std::fs::File::open(&disk).unwrap();
    fcntl_lock(&held, FlockOperation::NonBlockingLockShared).expect("both read it at most");
    let report = &a.ended(id)[0];
    assert!(report["error"].to_string().contains("lock"), "{}", report["error"]);
    eventually("it is the destination's alone", || a.names().is_empty());
    drop(held);
    eventually("it runs", || b.state_of("m") == "running");
    assert_eq!(b.pid_of("m"), pid);
}

/// It was let run once and never again, and whoever connected to its QEMU then waited for ever. (Seen so: no request
/// about it was answered.)
#[test]
fn a_committed_guest_whose_qemu_hangs_when_its_daemon_comes_back_runs_when_it_goes_on() {
    if cannot_run() {
        return;
    }
    let mut host = Host::start();
    let (status, vm) = host.ask("POST", "/v1/vms", Some(&run_request("m", &[&BARE[..], &["-S"]].concat())));
    assert_eq!(status, 201, "{vm}");
    let pid = host.pid_of("m");
    host.kill_daemon();
    let path = host.state().join("vms/m/vm.json");
    let text = std::fs::read_to_string(&path).unwrap();
    let text = text.replace(r#""here""#, &format!(r#"{{ "incoming": {ID} }}"#));
    std::fs::write(&path, text.replace(r#""running": false"#, r#""running": true"#)).unwrap();
    write_stage(&host, r#""committed""#);
    signal(pid, Signal::STOP);
    for _ in 0..2 {
        host.start_daemon();
        assert_eq!(host.state_of("m"), "resuming", "{}", note(&host));
        assert!(note(&host).contains("it came here and is stopped"), "{}", note(&host));
        assert_eq!(host.refused("POST", "/v1/migrations", &json!({ "vms": ["m"], "to": "h:1" })), "vm-busy");
        host.kill_daemon();
    }
    host.start_daemon();
    signal(pid, Signal::CONT);
    patiently("it runs", || host.state_of("m") == "running");
    assert_eq!(host.pid_of("m"), pid);
}

#[test]
fn many_requests_for_the_same_machines_at_once_move_each_machine_once() {
    if cannot_run() {
        return;
    }
    let (a, b) = (Host::start(), Host::start());
    a.run("m1");
    a.run("m2");
    let gangs = [["m1", "m2"], ["m2", "m1"]];
    let accepted: Vec<u64> = std::thread::scope(|scope| {
        let ask = |turn: usize| {
            let (a, b) = (&a, &b);
            move || {
                let request = json!({ "vms": gangs[turn % 2], "to": b.address() });
                let (status, answer) = a.ask("POST", "/v1/migrations", Some(&request));
                assert!(status == 202 || answer["code"] == "vm-busy" || answer["code"] == "unknown-vm", "{answer}");
                answer["id"].as_u64()
            }
        };
        let asked: Vec<_> = (0..12).map(|turn| scope.spawn(ask(turn))).collect();
        asked.into_iter().filter_map(|asked| asked.join().unwrap()).collect()
    });
    assert!(accepted.len() <= 1, "{accepted:?}");
    // Two that take from each other what they need may both be refused; then nothing of it is left.
    let id = accepted.first().copied().unwrap_or_else(|| a.migrate(&["m1", "m2"], &b.address(), json!({})));
    let reports = a.ended(id);
    assert!(reports.len() == 2 && reports.iter().all(|report| report["status"] == "completed"), "{reports:?}");
    assert_eq!((a.names().len(), b.names()), (0, vec!["m1".to_owned(), "m2".to_owned()]));
}
