//! A machine moves while a part of its memory stays at its memory hosts.

use super::parity::{is_whole, with_parity};
use super::support::runs;
use super::*;

/// The migration's number, small enough for every JSON reader.
const ID: u64 = 7;

/// Has the machine move, and says how it ended.
pub fn moves(from: &Host, to: &Host, options: Value) -> Value {
    from.ended(from.migrate(&["m"], &to.address(), options)).remove(0)
}

/// The same, and both sides were compared.
fn moved(from: &Host, to: &Host) -> Value {
    let report = moves(from, to, json!({ "mode": "precopy", "verify": true }));
    assert_eq!(report["status"], "completed", "{report}\n{}\n{}", from.log(), to.log());
    let (verify, all) = (&report["verify"], number(&report["ram"], "total_pages"));
    assert!(verify["checked"] == true && number(verify, "mismatches") == 0, "{report}");
    assert!(
        number(verify, "away_pages") > 0 && number(verify, "pages") + number(verify, "away_pages") == all,
        "{report}"
    );
    report
}

/// How many pages of the machine are at memory hosts.
pub fn away(host: &Host) -> u64 {
    number(&host.get("/v1/vms/m")["split"], "away_pages")
}

/// Waits until the machine's memory hosts have answered the daemon that was started where it is.
pub fn answered(host: &Host) {
    eventually("its memory hosts have answered", || {
        host.ask("POST", SPLIT, Some(&request(16, &[]))).1["status"] == "completed"
    });
}

/// Brings the machine together, once its memory hosts have answered whoever has it now.
pub fn merged(host: &Host) {
    eventually("it can be merged", || {
        let (status, report) = host.ask("POST", MERGE, None);
        assert!(status != 200 || report["status"] == "completed", "{report}\n{}", host.log());
        status == 200
    });
}

#[test]
fn a_machine_moves_and_what_is_at_its_memory_hosts_stays_there() {
    if cannot_run() {
        return;
    }
    let (mut first, second, lenders) = (Host::start(), Host::start(), [lender(64), lender(64)]);
    let both = [&lenders[0], &lenders[1]];
    first.run_full("m");
    let before = content(&first);
    done(&first, SPLIT, &request(16, &both));
    for turn in 0..3 {
        let (from, to) = if turn % 2 == 0 { (&first, &second) } else { (&second, &first) };
        let stays = away(from);
        let report = moved(from, to);
        assert!(number(&report["pages"], "full") * 4096 <= 20 * MIB, "what is away does not travel: {report}");
        assert!(from.names().is_empty() && from.ram_files() == 0, "{:?}", from.names());
        assert!(stays > 0 && away(to) > 0, "{stays}");
        assert_eq!(memory_of(to), (vec![lenders[0].address(), lenders[1].address()], vec![]));
        assert_eq!(std::fs::read_dir(from.state().join("owed")).unwrap().count(), 0, "it owes nothing");
        assert_eq!(number(&to.get("/v1/vms/m")["split"], "here_bytes"), 16 * MIB);
    }
    assert!(lenders.iter().all(|lender| lent(lender).0 > 0));
    // A daemon that is started anew where it is now goes on, and one where it was has nothing to do with it.
    first.kill_daemon();
    first.start_daemon();
    let mut second = second;
    second.kill_daemon();
    second.start_daemon();
    answered(&second);
    merged(&second);
    is_as_before(&second, &before);
    is_paid(&second, &both);
    assert_eq!((first.ram_files(), second.ram_files()), (0, 1));
    // Whole, it moves as any other.
    let report = moves(&second, &first, json!({ "verify": true }));
    assert_eq!(report["status"], "completed", "{report}");
    is_as_before(&first, &before);
}

#[test]
fn a_machine_whose_pages_are_at_two_hosts_each_moves_while_one_of_them_is_gone() {
    if cannot_run() {
        return;
    }
    let (first, second, mut lenders) = (Host::start(), Host::start(), [lender(64), lender(64)]);
    first.run_full("m");
    let before = content(&first);
    done(&first, SPLIT, &mirrored(16, &[&lenders[0], &lenders[1]]));
    lenders[1].kill_daemon();
    moved(&first, &second);
    lenders[1].start_daemon();
    each_page_is_at_both(&second, [&lenders[0], &lenders[1]]);
    lenders[0].kill_daemon();
    let report = moves(&second, &first, json!({ "mode": "precopy" }));
    assert_eq!(report["status"], "completed", "{report}");
    merged(&first);
    is_as_before(&first, &before);
    lenders[0].start_daemon();
    is_paid(&first, &[&lenders[0], &lenders[1]]);
}

#[test]
fn a_machine_with_parity_moves_while_one_of_three_is_gone_and_another_takes_its_place_there() {
    if cannot_run() {
        return;
    }
    let (first, second) = (Host::start(), Host::start());
    let mut lenders = [lender(64), lender(64), lender(64), lender(64)];
    first.run_full("m");
    let before = content(&first);
    done(&first, SPLIT, &with_parity(16, &[&lenders[0], &lenders[1], &lenders[2]]));
    is_whole(&first);
    lenders[1].kill_daemon();
    moved(&first, &second);
    assert_eq!(second.get("/v1/vms/m")["split"]["redundancy"], "parity");
    eventually("it is said who is silent", || {
        second.get("/v1/vms/m")["split"]["silent"] == json!([lenders[1].address()])
    });
    done(&second, SPLIT, &with_parity(16, &[&lenders[0], &lenders[3], &lenders[2]]));
    is_whole(&second);
    // With a number that is free beside those three, and another one gone.
    lenders[0].kill_daemon();
    moved(&second, &first);
    merged(&first);
    is_as_before(&first, &before);
    lenders[0].start_daemon();
    lenders[1].start_daemon();
    is_paid(&first, &lenders.each_ref());
    is_paid(&second, &lenders.each_ref());
}

/// Both halves of a split, and two of three memory hosts are not there.
#[test]
fn a_machine_is_split_with_parity_as_it_moves_and_stays_where_two_of_three_are_gone() {
    if cannot_run() {
        return;
    }
    let (first, second, mut lenders) = (Host::start(), Host::start(), [lender(64), lender(64), lender(64)]);
    first.run_full("m");
    let before = content(&first);
    let mut request = with_parity(16, &lenders.each_ref());
    request["main"] = second.address().into();
    done(&first, SPLIT, &request);
    assert!(first.names().is_empty() && away(&second) > 0);
    is_whole(&second);
    lenders[0].kill_daemon();
    lenders[1].kill_daemon();
    let report = moves(&second, &first, json!({ "mode": "precopy" }));
    assert!(report["status"] == "failed" && report.to_string().contains("cannot use the memory of"), "{report}");
    lenders[0].start_daemon();
    merged(&second);
    is_as_before(&second, &before);
    lenders[1].start_daemon();
    is_paid(&second, &lenders.each_ref());
}

#[test]
fn what_cannot_be_is_refused_with_its_reason_and_the_machine_stays_as_it_is() {
    if cannot_run() {
        return;
    }
    let (host, other, mut lenders) = (Host::start(), lender(64), [lender(64), lender(64)]);
    host.run_full("m");
    let before = content(&host);
    done(&host, SPLIT, &request(16, &[&lenders[0], &lenders[1]]));
    let refused = |to: &Host, options: Value, words: &str| {
        let request = json!({ "vms": ["m"], "to": to.address(), "options": options });
        let (status, problem) = host.ask("POST", "/v1/migrations", Some(&request));
        assert!(status >= 400 && problem["code"] == "split" && problem.to_string().contains(words), "{problem}");
    };
    refused(&lenders[1], json!({}), "is one of these");
    // The destination says no: it does not reach a memory host, and here all goes on.
    lenders[0].kill_daemon();
    let report = moves(&host, &other, json!({}));
    assert!(report["status"] == "failed" && report.to_string().contains("cannot use the memory of"), "{report}");
    lenders[0].start_daemon();
    assert_eq!((host.state_of("m").as_str(), other.names().len(), other.ram_files()), ("running", 0, 0));
    merged(&host);
    is_as_before(&host, &before);
    is_paid(&host, &[&lenders[0], &lenders[1]]);
}

/// Whoever is killed while pages travel: the guest is where it was, with all of its memory.
#[test]
fn a_machine_stays_whole_where_either_daemon_is_killed_on_the_way() {
    if cannot_run() {
        return;
    }
    let (mut host, mut other, lending) = (Host::start(), Host::start(), lender(64));
    host.run_full("m");
    let before = content(&host);
    done(&host, SPLIT, &request(16, &[&lending]));
    for ours in [true, false, true] {
        let slowly = json!({ "mode": "precopy", "bandwidth_bytes_per_s": 500_000 });
        let pid = host.pid_of("m");
        let id = host.migrate(&["m"], &other.address(), slowly);
        eventually("it is on its way", || {
            host.get(&format!("/v1/migrations/{id}")).to_string().contains("\"precopy\"") && !other.names().is_empty()
        });
        if ours {
            host.kill_daemon();
            host.start_daemon();
            answered(&host);
        } else {
            other.kill_daemon();
            other.start_daemon();
            host.ended(id);
        }
        eventually("it runs where it was", || host.state_of("m") == "running" && host.pid_of("m") == pid);
        eventually("nothing of it is there", || other.names().is_empty() && other.ram_files() == 0);
        assert!(away(&host) > 0);
    }
    assert!(lent(&lending).1 > 0, "nobody has given it back");
    moved(&host, &other);
    merged(&other);
    is_as_before(&other, &before);
    is_paid(&other, &[&lending]);
}

/// Splits the machine, with so many MiB where its guest runs, and has it move to `main`.
fn split_and_moved(host: &Host, lenders: &[&Host], main: &Host, merge: bool) -> (u16, Value) {
    let mut asked = request(16, lenders);
    asked["main"] = main.address().into();
    asked["merge"] = merge.into();
    host.ask("POST", SPLIT, Some(&asked))
}

#[test]
fn a_machine_is_split_and_moves_in_one_and_stays_as_it_was_where_it_cannot_move() {
    if cannot_run() {
        return;
    }
    let (first, second, lenders) = (Host::start(), Host::start(), [lender(64), lender(64)]);
    let both = [&lenders[0], &lenders[1]];
    first.run_full("m");
    let before = content(&first);
    let (status, problem) = split_and_moved(&first, &both, &lenders[0], false);
    assert!(status >= 400 && problem.to_string().contains("cannot lend memory to it, too"), "{problem}");
    let (status, problem) = split_and_moved(&first, &both, &first, false);
    assert!(status >= 400 && problem.to_string().contains("this host"), "{problem}");
    // There is another machine of this name.
    second.run("m");
    let (status, report) = split_and_moved(&first, &both, &second, false);
    assert_eq!((status, report["status"].as_str()), (200, Some("failed")), "{report}");
    assert_eq!((first.get("/v1/vms/m")["split"].clone(), first.state_of("m").as_str()), (Value::Null, "running"));
    is_as_before(&first, &before);
    is_paid(&first, &both);
    assert_eq!(second.ask("DELETE", "/v1/vms/m?force=true", None).0, 204);

    let (status, report) = split_and_moved(&first, &both, &second, false);
    assert_eq!((status, report["status"].as_str()), (200, Some("completed")), "{report}");
    assert!(number(&report["migration"]["pages"], "full") * 4096 <= 20 * MIB && number(&report, "out_pages") > 0);
    assert!(first.names().is_empty() && away(&second) > 0);
    // It comes together where it came from: on its own.
    let together = json!({ "vms": ["m"], "to": first.address(), "merge": true });
    let (status, begun) = second.ask("POST", "/v1/migrations", Some(&together));
    assert_eq!(status, 202, "{begun}");
    let report = second.ended(number(&begun, "id")).remove(0);
    assert_eq!(report["status"], "completed", "{report}");
    eventually("it has come together", || first.get("/v1/vms/m")["split"] == Value::Null);
    is_as_before(&first, &before);
    is_paid(&first, &both);

    // In one, as a host is emptied.
    let (status, report) = split_and_moved(&first, &both, &second, true);
    assert_eq!((status, report["status"].as_str()), (200, Some("completed")), "{report}");
    eventually("it has come together", || second.get("/v1/vms/m")["split"] == Value::Null);
    is_as_before(&second, &before);
    is_paid(&second, &both);
    assert_eq!((first.ram_files(), second.ram_files()), (0, 1));
}

/// Puts the records as a daemon leaves them that is killed when it has handed the machine over to `peer`.
fn handed_over(host: &mut Host, peer: &str) {
    host.kill_daemon();
    let path = host.state().join("vms/m/vm.json");
    // Numbers may be wider than a JSON reader's.
    let text = std::fs::read_to_string(&path).unwrap();
    let changed = text.replacen("\"lifecycle\":\"here\"", &format!("\"lifecycle\":{{\"outgoing\":{ID}}}"), 1);
    let changed = changed.replacen("\"lifecycle\": \"here\"", &format!("\"lifecycle\": {{\"outgoing\": {ID}}}"), 1);
    assert_ne!(changed, text, "{text}");
    std::fs::write(&path, changed).unwrap();
    stage(host, &json!({ "handing-over": { "peer": peer } }));
    host.start_daemon();
}

fn stage(host: &Host, stage: &Value) {
    let boot = sterna_daemon::process::boot_id().unwrap();
    let record = format!(r#"{{"id":{ID},"vm":"m","stage":{stage},"at_s":4000000000,"boot":{boot},"pages":null}}"#);
    std::fs::write(host.state().join(format!("migrations/{ID:032x}.json")), record).unwrap();
}

/// Until the peer has answered nothing is asked of the memory hosts: the guest may be its own. Then this host goes on
/// where the guest never ran there, and owes nothing where it did.
#[test]
fn what_is_at_memory_hosts_is_left_alone_until_it_is_known_whose_the_guest_is() {
    if cannot_run() {
        return;
    }
    for committed in [false, true] {
        let (mut host, mut peer, lending) = (Host::start(), Host::start(), lender(64));
        host.run_full("m");
        let before = content(&host);
        done(&host, SPLIT, &request(16, &[&lending]));
        let pid = host.pid_of("m");
        peer.kill_daemon();
        let asked = epoch(&host);
        handed_over(&mut host, &peer.address());
        assert_eq!((host.state_of("m").as_str(), epoch(&host)), ("waiting-for-peer", asked));
        stage(&peer, &if committed { json!("committed") } else { json!("aborted") });
        peer.start_daemon();
        if committed {
            eventually("it is the peer's alone", || host.names().is_empty() && !runs(pid));
            assert_eq!(std::fs::read_dir(host.state().join("owed")).unwrap().count(), 0);
            assert!(lent(&lending).0 > 0, "it is the peer's to give back");
        } else {
            eventually("it runs here again", || host.state_of("m") == "running");
            assert_eq!(host.pid_of("m"), pid);
            merged(&host);
            is_as_before(&host, &before);
            is_paid(&host, &[&lending]);
        }
    }
}

/// The last epoch of the machine's owner.
fn epoch(host: &Host) -> u64 {
    let text = std::fs::read_to_string(host.state().join("vms/m/epoch.json")).expect("an epoch");
    text.trim().parse().expect("a number")
}

/// A person says that the destination is off for good: its memory hosts listen to this host from then on, whatever the
/// other one asked for.
#[test]
fn a_machine_that_runs_here_by_a_persons_word_has_its_memory_hosts_listen() {
    if cannot_run() {
        return;
    }
    let (mut host, lending) = (Host::start(), lender(64));
    host.run_full("m");
    let before = content(&host);
    done(&host, SPLIT, &request(16, &[&lending]));
    handed_over(&mut host, "127.0.0.1:1");
    assert_eq!(host.ask("POST", "/v1/vms/m/resume", Some(&json!({ "fenced": "127.0.0.1" }))).0, 202);
    eventually("it runs here again", || host.state_of("m") == "running");
    merged(&host);
    assert!(epoch(&host) > 2 << 40, "{}", epoch(&host));
    is_as_before(&host, &before);
    is_paid(&host, &[&lending]);
}
