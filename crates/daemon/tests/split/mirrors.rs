//! Machines each page of which is at two memory hosts: one of them goes down for good, and another takes its place.

use super::*;

/// Two have the same pages. One goes down for good, and the next daemon of the guest's host does without it, too.
#[test]
fn a_machine_with_mirrored_pages_does_without_either_memory_host() {
    if cannot_run() {
        return;
    }
    for gone in 0..2 {
        let (mut host, mut lenders) = (Host::start(), [lender(64), lender(64), lender(64), lender(64)]);
        host.run_full("m");
        let before = content(&host);
        done(&host, SPLIT, &mirrored(16, &[&lenders[0], &lenders[1]]));
        each_page_is_at_both(&host, [&lenders[0], &lenders[1]]);
        assert_eq!(host.get("/v1/vms/m")["split"]["redundancy"], "copies=2");
        lenders[gone].kill_daemon();
        let peer = lenders[gone].address();
        if gone == 0 {
            host.kill_daemon();
            host.start_daemon();
            eventually("the other one has answered", || {
                host.ask("POST", SPLIT, Some(&request(20, &[]))).1["status"] == "completed"
            });
        }
        // Two others take their place; without a word about it each page is at two again.
        done(&host, SPLIT, &request(16, &[&lenders[2], &lenders[3]]));
        let shown = host.get("/v1/vms/m");
        assert_eq!((&shown["split"]["redundancy"], &shown["split"]["silent"]), (&json!("copies=2"), &json!([])));
        each_page_is_at_both(&host, [&lenders[2], &lenders[3]]);
        // One of these goes down for good as well.
        lenders[2].kill_daemon();
        done(&host, MERGE, &Value::Null);
        is_as_before(&host, &before);
        // Whoever comes back is told that it has its memory back.
        for (which, lending) in lenders.iter_mut().enumerate() {
            if which == gone || which == 2 {
                lending.start_daemon();
            }
        }
        println!("{peer} had gone");
        is_paid(&host, &lenders.each_ref());
    }
}

/// Of two that have the same pages one goes down for good. Another takes its place, named by a person or as a spare,
/// and then the first of the two may go as well.
#[test]
fn another_takes_the_place_of_one_of_two_that_has_gone() {
    if cannot_run() {
        return;
    }
    for (gone, by_itself) in [(0, false), (1, false), (0, true), (1, true)] {
        let mut lenders = [lender(64), lender(64), lender(64)];
        // One that is not there, one that lends nothing, and one that does.
        let none = Host::start();
        let spares = [none.address(), lenders[2].address()];
        let spares =
            format!("spare_memory_hosts = ['127.0.0.1:1', '{}', '{}']\nspare_after = '0s'", spares[0], spares[1]);
        let mut host = if by_itself { Host::configured(&spares) } else { Host::start() };
        host.run_full("m");
        let before = content(&host);
        done(&host, SPLIT, &mirrored(16, &[&lenders[0], &lenders[1]]));
        each_page_is_at_both(&host, [&lenders[0], &lenders[1]]);
        let stays = 1 - gone;
        lenders[gone].kill_daemon();
        if by_itself {
            eventually("the spare is one of the two", || {
                let memory = host.get("/v1/vms/m")["split"]["memory"].clone();
                memory[gone]["peer"] == lenders[2].address().as_str()
            });
        } else {
            let two = [&lenders[stays], &lenders[2]];
            let (status, refused) = host.ask("POST", SPLIT, Some(&mirrored(16, &[two[0], &none])));
            assert!(status >= 400 && refused["code"] == "loan-refused", "{status} {refused}");
            done(&host, SPLIT, &mirrored(16, &two));
        }
        each_page_is_at_both(&host, [&lenders[stays], &lenders[2]]);
        assert_eq!(host.get("/v1/vms/m")["split"]["redundancy"], "copies=2");
        // The next daemon knows the two.
        host.kill_daemon();
        lenders[stays].kill_daemon();
        host.start_daemon();
        eventually("the newcomer has answered", || {
            host.ask("POST", SPLIT, Some(&request(20, &[]))).1["status"] == "completed"
        });
        done(&host, MERGE, &Value::Null);
        is_as_before(&host, &before);
        lenders[..2].iter_mut().for_each(Host::start_daemon);
        is_paid(&host, &lenders.each_ref());
        assert_eq!(lent(&none), (0, 0));
    }
}

/// Whoever is to take a place says nothing, and the daemon that has asked it dies.
#[test]
fn a_daemon_that_dies_while_another_is_asked_to_take_a_place_leaves_the_two_as_they_were() {
    if cannot_run() {
        return;
    }
    let (mut host, mut lenders) = (Host::start(), [lender(64), lender(64)]);
    host.run_full("m");
    let before = content(&host);
    done(&host, SPLIT, &mirrored(16, &[&lenders[0], &lenders[1]]));
    lenders[1].kill_daemon();
    let mute = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let mute_one = mute.local_addr().expect("an address").to_string();
    let mut asked = mirrored(16, &[&lenders[0], &lenders[1]]);
    asked["memory"][1]["peer"] = mute_one.as_str().into();
    let asking = asking(&host, &asked);
    let two = vec![lenders[0].address(), lenders[1].address()];
    eventually("it is being asked", || memory_of(&host) == (two.clone(), vec![mute_one.clone()]));
    host.kill_daemon();
    drop((asking, mute));
    host.start_daemon();
    eventually("it is not one of them", || memory_of(&host) == (two.clone(), vec![]));
    lenders[1].start_daemon();
    eventually("it can be merged", || host.ask("POST", MERGE, None).0 == 200);
    is_as_before(&host, &before);
    eventually("both have their memory back", || lenders.iter().all(|lender| lent(lender) == (0, 0)));
}

#[test]
fn how_often_each_page_is_there_can_be_changed() {
    if cannot_run() {
        return;
    }
    let (host, lenders) = (Host::start(), [lender(128), lender(128)]);
    let both = [&lenders[0], &lenders[1]];
    host.run_full("m");
    let before = content(&host);
    done(&host, SPLIT, &request(16, &both));
    let twice = json!({ "here_bytes": 16 * MIB, "redundancy": "copies=2" });
    done(&host, SPLIT, &twice);
    assert_eq!(host.get("/v1/vms/m")["split"]["redundancy"], "copies=2");
    each_page_is_at_both(&host, both);
    done(&host, SPLIT, &json!({ "here_bytes": 16 * MIB, "redundancy": "none" }));
    assert_eq!(host.get("/v1/vms/m")["split"]["redundancy"], "none");
    done(&host, MERGE, &Value::Null);
    is_as_before(&host, &before);
    is_paid(&host, &both);
}
