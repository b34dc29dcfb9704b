//! Machines whose memory hosts have parity: any one of three goes down for good, and another takes its place.

use super::*;

/// The request to leave so many MiB here, and have these hosts take the rest, with parity.
pub fn with_parity(here_mib: u64, lenders: &[&Host]) -> Value {
    let mut request = request(here_mib, lenders);
    request["redundancy"] = "parity".into();
    request
}

/// Whatever is away can be had without any one memory host, as the guest's host knows it.
pub fn is_whole(host: &Host) {
    eventually("any one may go", || {
        let split = host.get("/v1/vms/m")["split"].clone();
        (&split["silent"], &split["alone_pages"]) == (&json!([]), &json!(0)) && number(&split, "away_pages") > 0
    });
}

#[test]
fn a_machine_with_parity_does_without_any_one_memory_host() {
    if cannot_run() {
        return;
    }
    for gone in 0..3 {
        let (mut host, mut lenders) = (Host::start(), [lender(64), lender(64), lender(64)]);
        host.run_full("m");
        let before = content(&host);
        done(&host, SPLIT, &with_parity(16, &lenders.each_ref()));
        is_whole(&host);
        let shown = host.get("/v1/vms/m")["split"].clone();
        assert_eq!((&shown["redundancy"], &shown["memory"][2]["bytes"]), (&json!("parity"), &json!(50 * (MIB + 4096))));
        // Each lends for pages and for parity.
        assert!(lenders.iter().all(|lender| lent(lender).0 == 50 * (MIB + 4096)));
        // And copies of what has come back.
        eventually("there is half as much again at least", || {
            let away = number(&host.get("/v1/vms/m")["split"], "away_pages") * 4096;
            lenders.iter().map(|lender| lent(lender).1).sum::<u64>() >= away + away / 2
        });
        lenders[gone].kill_daemon();
        if gone == 0 {
            host.kill_daemon();
            host.start_daemon();
            eventually("the others have answered", || {
                host.ask("POST", SPLIT, Some(&json!({ "here_bytes": 20 * MIB }))).1["status"] == "completed"
            });
        }
        eventually("it is said who is silent", || {
            host.get("/v1/vms/m")["split"]["silent"] == json!([lenders[gone].address()])
        });
        done(&host, MERGE, &Value::Null);
        is_as_before(&host, &before);
        lenders[gone].start_daemon();
        is_paid(&host, &lenders.each_ref());
    }
}

/// Another takes the place of one that has gone, named by a person or as a spare; then any other may go as well.
#[test]
fn another_takes_the_place_of_one_of_three_that_has_gone() {
    if cannot_run() {
        return;
    }
    for (gone, by_itself) in [(0, false), (1, true), (2, false)] {
        let mut lenders = [lender(64), lender(64), lender(64), lender(64)];
        let spares = format!("spare_memory_hosts = ['127.0.0.1:1', '{}']\nspare_after = '0s'", lenders[3].address());
        let mut host = if by_itself { Host::configured(&spares) } else { Host::start() };
        host.run_full("m");
        let before = content(&host);
        done(&host, SPLIT, &with_parity(16, &[&lenders[0], &lenders[1], &lenders[2]]));
        is_whole(&host);
        let mut three = [0, 1, 2];
        three[gone] = 3;
        let wanted = |here| with_parity(here, &three.map(|which| &lenders[which]));
        if !by_itself {
            let (status, refused) = host.ask("POST", SPLIT, Some(&wanted(16)));
            assert!(status >= 400 && refused["code"] == "loan-refused", "it answers still: {status} {refused}");
        }
        lenders[gone].kill_daemon();
        let wanted = with_parity(16, &three.map(|which| &lenders[which]));
        if by_itself {
            eventually("the spare is one of them", || {
                host.get("/v1/vms/m")["split"]["memory"][gone]["peer"] == lenders[3].address().as_str()
            });
        } else {
            done(&host, SPLIT, &wanted);
        }
        is_whole(&host);
        assert!(lent(&lenders[3]).1 > 0);
        // The next daemon knows the three.
        let next = (gone + 1) % 3;
        host.kill_daemon();
        lenders[next].kill_daemon();
        host.start_daemon();
        eventually("the newcomer has answered", || {
            host.ask("POST", SPLIT, Some(&json!({ "here_bytes": 20 * MIB }))).1["status"] == "completed"
        });
        done(&host, MERGE, &Value::Null);
        is_as_before(&host, &before);
        lenders[gone].start_daemon();
        lenders[next].start_daemon();
        is_paid(&host, &lenders.each_ref());
    }
}

#[test]
fn what_parity_cannot_do_is_refused_with_what_helps() {
    if cannot_run() {
        return;
    }
    let (host, lenders, small) = (Host::start(), [lender(64), lender(64), lender(64), lender(64)], lender(20));
    host.run_full("m");
    let all = lenders.each_ref();
    let refused = |request: &Value, code: &str, words: &str| {
        let (status, refused) = host.ask("POST", SPLIT, Some(request));
        let message = refused["message"].as_str().unwrap_or_default();
        assert!(status >= 400 && refused["code"] == code && message.contains(words), "{status} {refused}");
    };
    refused(&with_parity(16, &all[..2]), "invalid-request", "three memory hosts");
    let mut unlike = with_parity(16, &all[..3]);
    unlike["memory"][1]["bytes"] = (49 * (MIB + 4096)).into();
    refused(&unlike, "invalid-request", "lend the same");
    refused(&with_parity(16, &[all[0], all[1], &small]), "loan-refused", "left to lend");
    is_paid(&host, &all);
    done(&host, SPLIT, &with_parity(16, &all[..3]));
    is_whole(&host);
    // For a while they would lend what both need.
    refused(&with_parity(16, &[all[0], all[1], all[3]]), "loan-refused", "left to lend");
    let mut once = request(16, &[all[0]]);
    once["redundancy"] = "none".into();
    refused(&once, "loan-refused", "left to lend");
    // It goes on as it was.
    done(&host, SPLIT, &with_parity(20, &all[..3]));
    done(&host, MERGE, &Value::Null);
    is_paid(&host, &all);
    // What has come together can be split anew, otherwise.
    done(&host, SPLIT, &request(16, &all[..1]));
    done(&host, MERGE, &Value::Null);
}
