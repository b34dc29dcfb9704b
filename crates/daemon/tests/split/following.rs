//! The rest of a machine's pages follow it where it moves, while others of them are at memory hosts.

use std::io::Write;
use std::os::unix::net::UnixStream;

use super::onward::{answered, away, merged, moves};
use super::parity::{is_whole, with_parity};
use super::redundancy::run_fuller;
use super::*;

/// How far the rest of the machine is that runs here.
fn to_come(host: &Host) -> Option<u64> {
    host.ask("GET", "/v1/vms/m", None).1["arriving"]["missing_pages"].as_u64()
}

/// A host's daemon is killed, and started again.
fn another_daemon(host: &mut Host) {
    host.kill_daemon();
    host.start_daemon();
}

#[test]
fn pages_follow_a_machine_and_what_is_at_its_memory_hosts_stays_there() {
    if cannot_run() {
        return;
    }
    let (first, second, lenders) = (Host::start(), Host::start(), [lender(64), lender(64), lender(64)]);
    first.run_full("m");
    let before = content(&first);
    done(&first, SPLIT, &with_parity(16, &lenders.each_ref()));
    is_whole(&first);
    for (turn, mode) in ["postcopy", "hybrid", "postcopy", "hybrid"].into_iter().enumerate() {
        let (from, to) = if turn % 2 == 0 { (&first, &second) } else { (&second, &first) };
        let stays = away(from);
        let report = moves(from, to, json!({ "mode": mode, "verify": true }));
        assert_eq!(report["status"], "completed", "{report}\n{}\n{}", from.log(), to.log());
        let (verify, all) = (&report["verify"], number(&report["ram"], "total_pages"));
        let compared = number(verify, "pages") + number(verify, "away_pages");
        assert!(verify["checked"] == true && number(verify, "mismatches") == 0 && compared == all, "{report}");
        // Nothing writes, so nothing may be left after a round of a hybrid.
        let follow = number(&report["postcopy"], "residue_pages");
        assert!((follow > 0 || mode == "hybrid") && stays > 0 && away(to) > 0, "{report}");
        assert!(from.names().is_empty() && from.ram_files() == 0, "{:?}", from.names());
        eventually("all has come", || to_come(to).is_none());
        is_whole(to);
    }
    merged(&first);
    is_as_before(&first, &before);
    is_paid(&first, &lenders.each_ref());
    is_paid(&second, &lenders.each_ref());
    assert_eq!((first.ram_files(), second.ram_files()), (1, 0));
}

/// Whoever dies while pages follow, they come once it is back, and nothing is done with the machine before.
#[test]
fn pages_follow_a_machine_on_whoevers_daemon_is_killed_meanwhile() {
    if cannot_run() {
        return;
    }
    let (mut first, mut second, mut lenders) = (Host::start(), Host::start(), [lender(64), lender(64)]);
    first.run_full("m");
    let before = content(&first);
    done(&first, SPLIT, &request(16, &[&lenders[0], &lenders[1]]));
    let slowly = json!({ "mode": "postcopy", "postcopy_bandwidth_bytes_per_s": 3_000_000 });
    first.migrate(&["m"], &second.address(), slowly);
    eventually("its pages follow it", || to_come(&second).is_some_and(|pages| pages > 0));
    for victim in [0, 1, 2] {
        // It is slow enough that some are left each time.
        let refused = second.ask("POST", MERGE, None);
        assert!(refused.0 >= 400 && refused.1["code"] == "still-arriving", "{refused:?}");
        assert!(away(&second) > 0 && to_come(&second) > Some(0), "{}", second.get("/v1/vms/m"));
        another_daemon([&mut second, &mut first, &mut lenders[0]][victim]);
        let before = to_come(&second).expect("it is arriving");
        eventually("more has come", || to_come(&second).is_none_or(|now| now < before));
    }
    eventually("all has come, and nothing is left behind", || to_come(&second).is_none() && first.ram_files() == 0);
    eventually("nobody has it but its new host", || first.names().is_empty());
    merged(&second);
    is_as_before(&second, &before);
    is_paid(&second, &[&lenders[0], &lenders[1]]);
    assert_eq!(second.ram_files(), 1);
}

/// All of it is there, and goes to a host that may have no more than a part of it.
#[test]
fn a_machine_goes_first_and_what_is_too_much_leaves_from_there() {
    if cannot_run() {
        return;
    }
    let (first, second, lenders) = (Host::start(), Host::start(), [lender(64), lender(64)]);
    run_fuller(&first);
    let before = content(&first);
    let mut asked = request(16, &[&lenders[0], &lenders[1]]);
    asked["mode"] = "postcopy".into();
    let (status, problem) = first.ask("POST", SPLIT, Some(&asked));
    assert!(status >= 400 && problem.to_string().contains("'main'"), "{problem}");
    asked["main"] = second.address().into();
    // There is another machine of this name.
    second.run("m");
    let (status, report) = first.ask("POST", SPLIT, Some(&asked));
    assert_eq!((status, report["status"].as_str()), (200, Some("failed")), "{report}");
    assert_eq!((first.get("/v1/vms/m")["split"].clone(), first.state_of("m").as_str()), (Value::Null, "running"));
    is_paid(&first, &[&lenders[0], &lenders[1]]);
    assert_eq!(second.ask("DELETE", "/v1/vms/m?force=true", None).0, 204);

    let report = done(&first, SPLIT, &asked);
    assert!(number(&report, "out_pages") == 0 && number(&report["migration"]["postcopy"], "residue_pages") > 0);
    assert!(first.names().is_empty() && first.ram_files() == 0);
    answered(&second);
    assert!(away(&second) > 0);
    merged(&second);
    is_as_before(&second, &before);
    is_paid(&second, &[&lenders[0], &lenders[1]]);
}

/// Asks a host to split its machine, and does not wait for that.
fn begins(host: &Host, request: &Value) -> UnixStream {
    let (body, mut stream) = (request.to_string(), UnixStream::connect(host.socket()).expect("the daemon listens"));
    let head = format!("POST {SPLIT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n");
    let sent = write!(stream, "{head}content-length: {}\r\n\r\n{body}", body.len());
    sent.expect("a request");
    stream
}

/// It goes first, to a host that may have a part of it, and the rest goes straight to memory hosts.
#[test]
fn what_goes_past_a_machines_next_host_is_as_it_was_whoevers_daemon_is_killed_meanwhile() {
    if cannot_run() {
        return;
    }
    for victim in 0..3 {
        let (mut first, mut second) = (Host::configured("bandwidth = \"4MB\""), Host::start());
        let mut lenders = [lender(64), lender(64)];
        run_fuller(&first);
        let before = content(&first);
        let mut asked = request(16, &[&lenders[0], &lenders[1]]);
        (asked["mode"], asked["main"]) = ("postcopy".into(), second.address().into());
        let _answer = begins(&first, &asked);
        let arrives = || to_come(&second).is_some_and(|pages| pages > 0);
        eventually("a part of it is at a memory host, and more is to come", || arrives() && away(&second) > 0);
        let here = number(&second.get("/v1/vms/m"), "allocated_bytes");
        assert!(here < 15 * MIB, "{here} bytes: they came here, and left");
        another_daemon([&mut second, &mut first, &mut lenders[0]][victim]);
        eventually("all has come, and nothing is left behind", || to_come(&second).is_none() && first.ram_files() == 0);
        eventually("nobody has it but its new host", || first.names().is_empty());
        merged(&second);
        is_as_before(&second, &before);
        is_paid(&second, &[&lenders[0], &lenders[1]]);
        assert_eq!(second.ram_files(), 1);
    }
}
