//! Machines a part of whose memory is at memory hosts: what is shown of them, what they refuse, and who gives back what
//! was lent. `system-tests` has guests that write meanwhile.

/// Pages that are at two memory hosts each.
mod mirrors;

/// Memory hosts with parity.
mod parity;
/// Their redundancy is changed.
mod redundancy;

/// The rest of their pages follows them.
mod following;
/// Machines that move while a part of their memory stays where it is.
mod onward;

#[path = "../support/mod.rs"]
mod support;

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;

use serde_json::{Value, json};
use sterna_engine::agent::Agent;
use support::{BARE, Host, PATIENCE, cannot_run, end_machine, eventually, run_request};

const MIB: u64 = 1 << 20;
/// Where a full machine has memory no page of which is like another; its firmware writes behind it.
const FULL: std::ops::Range<u64> = 32 * MIB..46 * MIB;
const SPLIT: &str = "/v1/vms/m/split";
const MERGE: &str = "/v1/vms/m/merge";

/// A host that lends so many MiB.
fn lender(mib: u64) -> Host {
    Host::configured(&format!("lend_memory = \"{mib}M\""))
}

/// The request to leave so many MiB here, and have each of these hosts take 50.
fn request(here_mib: u64, lenders: &[&Host]) -> Value {
    let memory = |host: &&Host| json!({ "peer": host.address(), "bytes": 50 * (MIB + 4096) });
    json!({ "here_bytes": here_mib * MIB, "memory": lenders.iter().map(memory).collect::<Vec<_>>() })
}

/// The same, with each page at two of them.
fn mirrored(here_mib: u64, lenders: &[&Host]) -> Value {
    let mut request = request(here_mib, lenders);
    request["redundancy"] = "copies=2".into();
    request
}

fn done(host: &Host, path: &str, request: &Value) -> Value {
    let (status, report) = host.ask("POST", path, Some(request));
    assert_eq!((status, report["status"].as_str()), (200, Some("completed")), "{report}\n{}", host.log());
    report
}

fn number(value: &Value, name: &str) -> u64 {
    value[name].as_u64().unwrap_or_else(|| panic!("no {name}: {value}"))
}

/// Asks for a split, and does not wait for the answer. Who hangs up calls it off.
fn asking(host: &Host, request: &Value) -> UnixStream {
    let asked = request.to_string();
    let mut asking = UnixStream::connect(host.socket()).expect("the daemon listens");
    let head = "content-type: application/json\r\nhost: x";
    let words = format!("POST {SPLIT} HTTP/1.1\r\n{head}\r\ncontent-length: {}\r\n\r\n{asked}", asked.len());
    asking.write_all(words.as_bytes()).expect("a request");
    asking
}

/// What a host has lent, bytes: granted and in use.
fn lent(host: &Host) -> (u64, u64) {
    let lent = host.get("/v1/host/lent");
    (number(&lent, "granted_bytes"), number(&lent, "used_bytes"))
}

/// What is in the full part of the machine's RAM file: holes where pages are away.
fn content(host: &Host) -> Vec<u8> {
    let files = std::fs::read_dir(host.state().join("ram")).expect("RAM files").flatten();
    let is_ram = |path: &std::path::PathBuf| std::fs::metadata(path).is_ok_and(|about| about.len() == 64 * MIB);
    let path = files.map(|file| file.path()).find(is_ram).expect("its RAM");
    let mut bytes = vec![0; (FULL.end - FULL.start) as usize];
    File::open(path).expect("its RAM").read_exact_at(&mut bytes, FULL.start).expect("its RAM");
    bytes
}

/// The content is as it was before.
fn is_as_before(host: &Host, before: &[u8]) {
    let now = content(host);
    let pages = now.chunks(4096).zip(before.chunks(4096)).enumerate();
    let differ: Vec<usize> = pages.filter(|(_, (now, before))| now != before).map(|(page, _)| page).collect();
    assert!(differ.is_empty(), "pages {differ:?} of {FULL:?} are other than before");
}

/// Each page of the machine that is away is at both of its memory hosts, as its host knows it. One may have more than
/// the other one, if that was gone for a while: copies of what has come back.
fn each_page_is_at_both(host: &Host, lenders: [&Host; 2]) {
    eventually("each page is at both", || {
        let split = host.get("/v1/vms/m")["split"].clone();
        let known = (&split["silent"], &split["alone_pages"]) == (&json!([]), &json!(0));
        known && number(&split, "away_pages") > 0 && lenders.iter().all(|lender| lent(lender).1 > 0)
    });
}

/// Nothing is owed to a memory host, and this one has all of its memory.
fn is_paid(host: &Host, lenders: &[&Host]) {
    eventually("all that was lent is given back", || {
        let owed = std::fs::read_dir(host.state().join("owed")).expect("a directory").count();
        owed == 0 && lenders.iter().all(|lender| lent(lender) == (0, 0))
    });
}

#[test]
fn a_part_of_a_machine_leaves_is_shown_and_comes_back_as_it_was() {
    if cannot_run() {
        return;
    }
    let (host, lenders) = (Host::start(), [lender(64), lender(64)]);
    let both = [&lenders[0], &lenders[1]];
    host.run_full("m");
    let before = content(&host);
    let report = done(&host, SPLIT, &request(16, &both));
    assert!(number(&report, "allocated_after_bytes") <= 16 * MIB, "{report}");
    assert!(number(&report, "allocated_before_bytes") > 16 * MIB && number(&report, "out_pages") > 0, "{report}");
    assert!(lenders.iter().all(|lender| lent(lender).0 == 50 * (MIB + 4096)), "both were asked");
    assert!(lenders.iter().any(|lender| lent(lender).1 > 0), "pages are there");

    let shown = host.get("/v1/vms/m");
    assert_eq!((shown["state"].as_str(), number(&shown["split"], "here_bytes")), (Some("running"), 16 * MIB));
    assert!(number(&shown["split"], "away_pages") > 0 && shown["split"]["waiting"] == json!([]), "{shown}");
    assert!(shown["note"].as_str().is_some_and(|note| note.contains("at memory hosts")), "{shown}");
    let metrics = host.ask_raw("GET", "/metrics", "").1.to_string();
    assert!(metrics.contains("sterna_split_vms 1") && !metrics.contains("sterna_split_away_bytes 0"), "{metrics}");

    // What looks at all of a guest's memory would see zeros in the place of what is away.
    for (path, body) in [("replace", json!({})), ("fork", json!({ "names": ["n"] }))] {
        assert_eq!(host.refused("POST", &format!("/v1/vms/m/{path}"), &body), "split");
    }
    // What is here would travel, and no page may follow it.
    let question = "/v1/vms/m/estimate?bandwidth_bytes_per_s=10000000&duration_ms=200";
    let estimate = host.get(question);
    let modes: Vec<_> = estimate["ways"].as_array().expect("ways").iter().map(|way| way["mode"].clone()).collect();
    assert!(modes.contains(&json!("precopy")) && !modes.contains(&json!("postcopy")), "{estimate}");
    assert!(number(&estimate["observed"], "allocated_pages") * 4096 <= 16 * MIB, "{estimate}");
    assert_eq!(host.ask("POST", "/v1/vms/m/continue", None).0, 204, "it needs no memory for that");

    // How much is here can be changed, with or without naming the hosts.
    assert_eq!(number(&done(&host, SPLIT, &request(30, &both)), "here_bytes"), 30 * MIB);
    let report = done(&host, SPLIT, &request(16, &[]));
    assert!(number(&report, "allocated_after_bytes") <= 16 * MIB, "{report}");
    assert!(content(&host) != before, "some of it is not here");

    let report = done(&host, MERGE, &Value::Null);
    assert_eq!((number(&report, "away_pages"), number(&report, "here_bytes")), (0, 64 * MIB), "{report}");
    assert_eq!(host.get("/v1/vms/m")["split"], Value::Null);
    is_as_before(&host, &before);
    assert_eq!(host.refused("POST", MERGE, &Value::Null), "not-split");
    is_paid(&host, &both);
    assert_eq!(host.ram_files(), 1, "the map of its pages is gone");

    // A second time, with another number: nothing of the first time is in the way.
    done(&host, SPLIT, &request(16, &both));
    done(&host, MERGE, &Value::Null);
    is_as_before(&host, &before);
    assert_eq!(host.ask("DELETE", "/v1/vms/m?force=true", None).0, 204);
    is_paid(&host, &both);
    assert_eq!(host.ram_files(), 0);
}

#[test]
fn requests_that_cannot_be_are_refused_with_their_reason_and_change_nothing() {
    if cannot_run() {
        return;
    }
    let (host, rich, poor) = (Host::start(), lender(64), Host::start());
    assert_eq!(host.refused("POST", SPLIT, &request(20, &[&rich])), "unknown-vm");
    host.run_full("m");
    let before = content(&host);
    let wrong = |request: &Value, code: &str, words: &str| {
        let (status, problem) = host.ask("POST", SPLIT, Some(request));
        let text = problem.to_string();
        assert!(status >= 400 && problem["code"] == code && text.contains(words), "{request}: {status} {text}");
        assert_eq!(host.get("/v1/vms/m")["split"], Value::Null);
    };
    wrong(&request(20, &[&rich, &rich]), "invalid-request", "named twice");
    wrong(&request(20, &[&host]), "invalid-request", "this host");
    wrong(&request(13, &[&rich]), "invalid-request", "the least");
    wrong(&request(64, &[&rich]), "invalid-request", "nothing would leave");
    wrong(&request(20, &[]), "invalid-request", "less than");
    // 50 MiB there and 13.9 here.
    let mut little = request(20, &[&rich]);
    little["memory"][0]["bytes"] = (40 * (MIB + 4096)).into();
    wrong(&little, "invalid-request", "less than");
    little["memory"][0]["bytes"] = 4096.into();
    wrong(&little, "invalid-request", "asked for 4096 bytes");
    little["memory"][0]["peer"] = "nowhere".into();
    wrong(&little, "invalid-request", "HOST:PORT");
    wrong(&json!({ "here": 1 }), "invalid-request", "here");
    wrong(&mirrored(20, &[&rich]), "invalid-request", "even number");
    let mut unlike = mirrored(20, &[&rich, &poor]);
    unlike["memory"][1]["bytes"] = (60 * MIB).into();
    wrong(&unlike, "invalid-request", "must lend the same");
    // Both of a pair have the same pages: together they have room for those of one.
    let mut small = mirrored(16, &[&rich, &poor]);
    small["memory"][0]["bytes"] = (40 * MIB).into();
    small["memory"][1]["bytes"] = (40 * MIB).into();
    wrong(&small, "invalid-request", "less than");
    wrong(&mirrored(20, &[&rich, &poor]), "loan-refused", "lends no memory");
    is_paid(&host, &[&rich]);
    // Memory hosts are asked before anything else begins. One that has granted it already has it back.
    wrong(&request(20, &[&rich, &poor]), "loan-refused", "lends no memory");
    is_paid(&host, &[&rich]);
    let mut much = request(20, &[&rich]);
    much["memory"][0]["bytes"] = (80 * MIB).into();
    wrong(&much, "loan-refused", "left to lend");
    let mut away = request(20, &[&rich, &poor]);
    away["memory"][1]["peer"] = "127.0.0.1:1".into();
    wrong(&away, "peer-unreachable", "memory host 127.0.0.1:1");
    // Nobody was reached there, so nothing is owed there.
    is_paid(&host, &[&rich]);
    is_as_before(&host, &before);
    assert_eq!(host.ram_files(), 1);
    assert_eq!(host.ask("DELETE", "/v1/vms/m?force=true", None).0, 204);

    // Memory that is private, and devices that write past the page tables.
    let run = |change: &dyn Fn(&mut Value)| {
        let mut asked = run_request("m", &BARE);
        change(&mut asked);
        let (status, vm) = host.ask("POST", "/v1/vms", Some(&asked));
        assert_eq!(status, 201, "{vm}");
    };
    run(&|asked| asked["memory_mode"] = "private".into());
    wrong(&request(20, &[&rich]), "private-memory", "private");
    assert_eq!(host.ask("DELETE", "/v1/vms/m?force=true", None).0, 204);
    let image = host.path("disk.img");
    // With data: into a hole QEMU would read by another way.
    std::fs::write(&image, vec![0; MIB as usize]).unwrap();
    // The agent tells what QEMU reads by calls; of what io_uring reads it does not.
    let disk = format!("file={},format=raw,if=virtio,cache=none,aio=io_uring", image.display());
    run(&|asked| asked["arguments"].as_array_mut().unwrap().extend(["-drive".into(), disk.clone().into()]));
    let agent = host.state().join("vms/m/run/agent.sock");
    let mut agent = Agent::connect(&agent, PATIENCE).unwrap();
    let reads = agent.transfers().unwrap();
    eventually("the firmware has read the disk", || !reads.is_complete().unwrap());
    wrong(&request(20, &[&rich]), "direct-io", "past the page tables");
    is_paid(&host, &[&rich]);
    let description = host.get("/openapi.json");
    for path in ["split", "merge"] {
        assert_eq!(description["paths"][format!("/v1/vms/{{name}}/{path}")]["post"]["operationId"], path);
    }
}

#[test]
fn a_daemon_that_comes_back_goes_on_with_a_split_machine_once_its_memory_hosts_answer() {
    if cannot_run() {
        return;
    }
    let (mut host, mut lenders) = (Host::start(), [lender(64), lender(64)]);
    host.run_full("m");
    let before = content(&host);
    done(&host, SPLIT, &request(16, &[&lenders[0], &lenders[1]]));
    let pid = host.pid_of("m");
    for ends in [true, false] {
        host.kill_daemon();
        if ends {
            lenders[1].kill_daemon();
        }
        host.start_daemon();
        let shown = host.get("/v1/vms/m");
        assert!(number(&shown["split"], "away_pages") > 0, "{shown}");
        if ends {
            eventually("it says who does not answer", || {
                let (status, problem) = host.ask("POST", MERGE, None);
                let text = problem.to_string();
                assert!(status >= 400 && problem["code"] == "peer-unreachable", "{text}");
                text.contains(&lenders[1].address())
            });
            lenders[1].start_daemon();
        }
    }
    // Its memory hosts are asked in the background.
    eventually("it can be merged", || host.ask("POST", MERGE, None).0 == 200);
    is_as_before(&host, &before);
    assert_eq!(host.pid_of("m"), pid);
    is_paid(&host, &[&lenders[0], &lenders[1]]);
    assert_eq!(host.ram_files(), 1);
}

/// Also where no daemon saw it end, and where the memory host does not answer at first.
#[test]
fn what_was_lent_to_a_machine_that_has_ended_is_given_back() {
    if cannot_run() {
        return;
    }
    let (mut host, mut lending) = (Host::start(), lender(128));
    let split = |host: &Host, lending: &Host| {
        host.run_full("m");
        done(host, SPLIT, &request(16, &[lending]));
        assert!(lent(lending).1 > 0);
        host.pid_of("m")
    };
    split(&host, &lending);
    assert_eq!(host.ask("DELETE", "/v1/vms/m?force=true", None).0, 204);
    is_paid(&host, &[&lending]);

    end_machine(split(&host, &lending));
    eventually("the daemon has seen its end", || host.state_of("m") == "none");
    is_paid(&host, &[&lending]);

    let pid = split(&host, &lending);
    host.kill_daemon();
    end_machine(pid);
    host.start_daemon();
    is_paid(&host, &[&lending]);
    eventually("its end is seen", || host.state_of("m") == "none");

    // It is owed over restarts, until the memory host can be told.
    split(&host, &lending);
    lending.kill_daemon();
    assert_eq!(host.ask("DELETE", "/v1/vms/m?force=true", None).0, 204);
    host.kill_daemon();
    host.start_daemon();
    let owed = std::fs::read_dir(host.state().join("owed")).unwrap().count();
    assert_eq!(owed, 1);
    lending.start_daemon();
    is_paid(&host, &[&lending]);
    assert_eq!(host.ram_files(), 0);
}

/// The memory hosts of the machine, and those that are leaving it.
fn memory_of(host: &Host) -> (Vec<String>, Vec<String>) {
    let split = &host.get("/v1/vms/m")["split"];
    let peers = |list: &Value| -> Vec<String> {
        let hosts = list.as_array().into_iter().flatten();
        hosts.map(|host| host["peer"].as_str().unwrap_or_default().to_owned()).collect()
    };
    (peers(&split["memory"]), peers(&split["leaving"]))
}

#[test]
fn memory_hosts_are_exchanged_and_those_that_leave_have_their_memory_back() {
    if cannot_run() {
        return;
    }
    let (mut host, mut lenders) = (Host::start(), [lender(64), lender(64), lender(64), lender(64)]);
    host.run_full("m");
    let before = content(&host);
    done(&host, SPLIT, &request(16, &[&lenders[0], &lenders[1]]));
    // One stays, one goes, one comes.
    let report = done(&host, SPLIT, &request(16, &[&lenders[1], &lenders[2]]));
    assert!(number(&report, "allocated_after_bytes") <= 16 * MIB, "{report}");
    assert_eq!(memory_of(&host), (vec![lenders[1].address(), lenders[2].address()], vec![]));
    is_paid(&host, &[&lenders[0]]);
    assert!(lent(&lenders[1]).0 > 0 && lent(&lenders[2]).0 > 0);
    // Who has gone is not asked when a daemon comes back.
    lenders[0].kill_daemon();
    host.kill_daemon();
    host.start_daemon();
    eventually("its memory hosts have answered", || {
        host.ask("POST", SPLIT, Some(&request(20, &[]))).1["status"] == "completed"
    });
    // All others at once, and one that has gone comes again.
    lenders[0].start_daemon();
    done(&host, SPLIT, &request(16, &[&lenders[3], &lenders[0]]));
    is_paid(&host, &[&lenders[1], &lenders[2]]);
    assert!(lent(&lenders[0]).1 + lent(&lenders[3]).1 > 0, "its pages are at those that came");
    done(&host, MERGE, &Value::Null);
    is_as_before(&host, &before);
    is_paid(&host, &[&lenders[0], &lenders[3]]);
    assert_eq!(host.ram_files(), 1);
}

#[test]
fn an_exchange_that_cannot_be_is_refused_and_changes_nothing() {
    if cannot_run() {
        return;
    }
    let (host, lenders, poor) = (Host::start(), [lender(64), lender(64)], Host::start());
    host.run_full("m");
    let before = content(&host);
    done(&host, SPLIT, &request(16, &[&lenders[0]]));
    let wrong = |request: &Value, code: &str, words: &str| {
        let (status, problem) = host.ask("POST", SPLIT, Some(request));
        let text = problem.to_string();
        assert!(status >= 400 && problem["code"] == code && text.contains(words), "{request}: {status} {text}");
        assert_eq!(memory_of(&host), (vec![lenders[0].address()], vec![]));
    };
    // The one that could come has what it granted back.
    wrong(&request(16, &[&lenders[1], &poor]), "loan-refused", "lends no memory");
    is_paid(&host, &[&lenders[1]]);
    let mut unknown = request(16, &[&lenders[1], &poor]);
    unknown["memory"][1]["peer"] = "127.0.0.1:1".into();
    wrong(&unknown, "peer-unreachable", "memory host 127.0.0.1:1");
    is_paid(&host, &[&lenders[1]]);
    let mut other = request(16, &[&lenders[0]]);
    other["memory"][0]["bytes"] = (60 * MIB).into();
    wrong(&other, "split", "lends");
    let mut little = request(16, &[&lenders[1]]);
    little["memory"][0]["bytes"] = (40 * MIB).into();
    wrong(&little, "invalid-request", "less than");
    let many = (1..=16).map(|port| json!({ "peer": format!("127.0.0.1:{port}"), "bytes": 50 * MIB }));
    let many: Vec<Value> = many.collect();
    wrong(&json!({ "here_bytes": 16 * MIB, "memory": many }), "invalid-request", "more memory hosts than");
    done(&host, MERGE, &Value::Null);
    is_as_before(&host, &before);
    is_paid(&host, &[&lenders[0]]);
}

/// A memory host that is being emptied and is away: the work waits for it, and a daemon that comes back goes on.
#[test]
fn an_exchange_goes_on_where_a_daemon_left_it() {
    if cannot_run() {
        return;
    }
    let (mut host, mut lenders) = (Host::start(), [lender(64), lender(64)]);
    host.run_full("m");
    let before = content(&host);
    done(&host, SPLIT, &request(16, &[&lenders[0]]));
    lenders[0].kill_daemon();
    // Who goes away calls it off, so who asked stays until the daemon is dead.
    let asking = asking(&host, &request(16, &[&lenders[1]]));
    eventually("the first one is leaving", || {
        memory_of(&host) == (vec![lenders[1].address()], vec![lenders[0].address()])
    });
    // Its QEMU may wait for a page, which says something else until it is known whom it waits for.
    eventually("people are told", || {
        host.get("/v1/vms/m")["note"].as_str().is_some_and(|note| note.contains("is being emptied"))
    });
    host.kill_daemon();
    drop(asking);
    host.start_daemon();
    assert_eq!(memory_of(&host).1, [lenders[0].address()]);
    lenders[0].start_daemon();
    eventually("it has left", || memory_of(&host) == (vec![lenders[1].address()], vec![]));
    is_paid(&host, &[&lenders[0]]);
    eventually("it can be merged", || host.ask("POST", MERGE, None).0 == 200);
    is_as_before(&host, &before);
    is_paid(&host, &[&lenders[1]]);
}

/// Who calls it off has both.
#[test]
fn an_exchange_that_is_called_off_leaves_a_machine_with_those_that_came_and_those_that_were_there() {
    if cannot_run() {
        return;
    }
    let (host, mut lenders) = (Host::start(), [lender(64), lender(64)]);
    host.run_full("m");
    let before = content(&host);
    done(&host, SPLIT, &request(16, &[&lenders[0]]));
    lenders[0].kill_daemon();
    let asked = request(16, &[&lenders[1]]);
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| host.ask("POST", SPLIT, Some(&asked)));
        eventually("the first one is leaving", || memory_of(&host).1 == [lenders[0].address()]);
        assert_eq!(host.ask("POST", "/v1/vms/m/cancel", None).0, 202);
        assert_eq!(asking.join().expect("an answer").1["status"], "cancelled");
    });
    assert_eq!(memory_of(&host), (vec![lenders[0].address(), lenders[1].address()], vec![]));
    lenders[0].start_daemon();
    done(&host, MERGE, &Value::Null);
    is_as_before(&host, &before);
    is_paid(&host, &[&lenders[0], &lenders[1]]);
}
