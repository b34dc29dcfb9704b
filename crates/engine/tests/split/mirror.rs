//! Two memory hosts that have the same pages: either may go for good.

use std::time::{Duration, Instant};

use sterna_engine::error::MigrateError;

use super::*;

pub fn pair(hosts: [&LendingHost; 2]) -> Lender {
    Lender { mirror: Some(hosts[1].relay.address.clone()), ..hosts[0].lender() }
}

/// As when its host goes down for good: what it has is lost.
pub fn loses_all(host: &LendingHost) {
    for loan in host.store.loans() {
        host.store.close(loan.guest, None).unwrap();
    }
}

/// No page is at one of them alone.
fn are_alike(hosts: [&LendingHost; 2]) {
    assert_eq!(hosts[0].pages(), hosts[1].pages());
}

/// With a guest and two hosts that are each other's mirrors, once for either: it goes.
fn for_either(test: impl Fn(&Guest, [&LendingHost; 2], usize)) {
    if !tracking_works() {
        return;
    }
    for gone in 0..2 {
        let hosts = [LendingHost::new(), LendingHost::new()];
        test(&Guest::new(), hosts.each_ref(), gone);
    }
}

#[test]
fn each_page_leaves_for_both_and_comes_back_from_one() {
    if !tracking_works() {
        return;
    }
    let (guest, hosts) = (Guest::new(), [LendingHost::new(), LendingHost::new()]);
    let hosts = [&hosts[0], &hosts[1]];
    let split = guest.split_over(vec![pair(hosts)]);
    send_all(&split, 0);
    let full = PAGES / 4 * 3;
    assert_eq!((split.pager().missing(), split.account().out_pages), (full, full));
    assert!(hosts.iter().all(|host| host.pages() == full + u64::from(CHUNKS)));
    let carried = || hosts.map(|host| host.relay.carried());
    let before = carried();
    split.bring_back().unwrap();
    let bytes = before.iter().zip(carried()).map(|(before, now)| now - before);
    assert!(bytes.sum::<u64>() < full * 4096 * 5 / 4, "each page came once");
    guest.is_as_it_was();
    // Unchanged pages leave again without being sent.
    send_all(&split, 0);
    let account = split.account();
    assert_eq!((split.pager().missing(), account.out_pages, account.unsent_pages), (full, full, full));
    split.bring_back().unwrap();
    guest.is_as_it_was();
    are_alike(hosts);
    dies(split);
    let split = guest.recover_over(vec![pair(hosts)]).unwrap();
    assert_eq!(hosts[0].pages() + hosts[1].pages(), 0, "the next daemon gives copies up");
    split.end();
}

#[test]
fn a_guest_goes_on_without_either_of_two_that_have_the_same_pages() {
    for_either(|guest, hosts, gone| {
        let split = guest.split_over(vec![pair(hosts)]);
        let checking = Checking::start(guest, 3);
        for turn in 0..4 * CHUNKS {
            split.way_out().unwrap().send(ChunkIndex(turn % CHUNKS), 0).unwrap();
        }
        loses_all(hosts[gone]);
        hosts[gone].relay.cut();
        // Whatever it touches comes from the other one, and what it has not written since may leave again.
        checking.goes_on(300);
        for chunk in 0..CHUNKS {
            let _ = split.way_out().unwrap().send(ChunkIndex(chunk), 0);
        }
        checking.goes_on(100);
        split.bring_back().unwrap();
        assert_eq!((split.pager().missing(), split.failing(0)), (0, None));
        // It is back, with nothing: pages leave for both again.
        hosts[gone].relay.restore();
        while split.pager().missing() == 0 {
            let _ = split.way_out().unwrap().send(ChunkIndex(0), 0);
            checking.goes_on(1);
        }
        split.bring_back().unwrap();
        checking.end();
        split.end();
    });
}

/// Sends all chunks, to one of two that does not answer and to the other, until those are known.
fn send_all_without(split: &Split) {
    while split.silent().is_empty() {
        let _ = split.way_out().unwrap().send(ChunkIndex(0), 0);
    }
    for chunk in 0..CHUNKS {
        split.way_out().unwrap().send(ChunkIndex(chunk), 0).unwrap();
    }
}

/// A guest that reads goes on as before: what both have leaves again. What one of them has not, or has as it was
/// before, stays, or its return would have it believed.
#[test]
fn while_one_of_two_does_not_answer_pages_leave_that_both_have_and_no_others() {
    for_either(|guest, hosts, gone| {
        let split = guest.split_over(vec![pair(hosts)]);
        send_all(&split, 0);
        let full = split.pager().missing();
        split.bring_back().unwrap();
        // With room for all nothing leaves by itself; but what memory hosts need not keep is gone through.
        split.keep_to(Room::of(2 * PAGES * 4096)).unwrap();
        hosts[gone].relay.cut();
        send_all_without(&split);
        assert_eq!(split.pager().missing(), full, "whoever found out that it is silent left the copies alone");
        split.bring_back().unwrap();
        std::thread::sleep(Duration::from_millis(200));
        send_all_without(&split);
        assert_eq!(split.pager().missing(), full);
        // A word of page 260, behind the one that tells the page.
        let at = 260 * 4096 + 512;
        let mapping = &guest.ram.mapping;
        let chunk = |page: u64| ChunkIndex((page / CHUNK_PAGES as u64) as u32);
        for turn in 1..=3_u64 {
            split.bring_back().unwrap();
            mapping.copy_in(at, &turn.to_le_bytes().repeat(2)).unwrap();
            send_all_without(&split);
            let away = split.pager().missing();
            assert_eq!(away, full - 1);
            assert!(!split.pager().away_in(chunk(260)).contains((260 % CHUNK_PAGES as u64) as u8), "it was written");
            assert_eq!((guest.word(300), split.failing(0)), (content(300), None));
        }
        // The other way round: what is away is at each of them.
        hosts[gone].relay.restore();
        hosts[1 - gone].relay.cut();
        while split.bring_back().is_err() {}
        hosts[1 - gone].relay.restore();
        guest.is_as_it_was();
        // And leaves for both again.
        while split.pager().missing() < full {
            (0..CHUNKS).for_each(|chunk| drop(split.way_out().unwrap().send(ChunkIndex(chunk), 0)));
        }
        dies(split);
        hosts[1 - gone].relay.cut();
        let split = guest.recover_over(vec![pair(hosts)]).unwrap();
        split.bring_back().unwrap();
        guest.is_as_it_was();
        let mut words = [0; 16];
        mapping.copy_out(at..at + 16, &mut words);
        assert_eq!(words[..], 3_u64.to_le_bytes().repeat(2));
        split.end();
    });
}

#[test]
fn another_daemon_goes_on_with_one_of_two_that_have_the_same_pages() {
    for_either(|guest, hosts, gone| {
        let split = guest.split_over(vec![pair(hosts)]);
        send_all(&split, 0);
        dies(split);
        // With neither there is nothing to go on with.
        hosts.iter().for_each(|host| host.relay.cut());
        assert!(matches!(guest.recover_over(vec![pair(hosts)]), Err(SplitError::Host { .. })));
        hosts[1 - gone].relay.restore();
        let split = guest.recover_over(vec![pair(hosts)]).unwrap();
        assert_eq!(guest.word(300), content(300));
        hosts[gone].relay.restore();
        split.bring_back().unwrap();
        guest.is_as_it_was();
        // What it has still of those pages counts no more, and is found out about.
        send_all(&split, 0);
        are_alike(hosts);
        split.bring_back().unwrap();
        guest.is_as_it_was();
        split.end();
    });
}

#[test]
fn pages_that_one_of_two_has_lost_come_from_the_other_and_are_lost_where_both_have_lost_them() {
    if !tracking_works() {
        return;
    }
    let (guest, hosts) = (Guest::new(), [LendingHost::new(), LendingHost::new()]);
    let hosts = [&hosts[0], &hosts[1]];
    let split = guest.split_over(vec![pair(hosts)]);
    send_all(&split, 0);
    dies(split);
    loses_all(hosts[0]);
    let split = guest.recover_over(vec![pair(hosts)]).unwrap();
    // A chunk of which the other one alone has pages is added to by nobody.
    assert_eq!(guest.word(300), content(300));
    guest.writes(450);
    assert!(split.way_out().unwrap().send(ChunkIndex(0), 0).unwrap().away.is_empty());
    split.bring_back().unwrap();
    send_all(&split, 0);
    are_alike(hosts);
    dies(split);
    hosts.iter().for_each(|host| loses_all(host));
    assert!(matches!(guest.recover_over(vec![pair(hosts)]), Err(SplitError::Lost { pages: 192, .. })));
    let _ = guest.record.set_len(0);
}

/// One of the two has gone for good: pages leave it and its mirror for two others, and each is at two hosts again.
#[test]
fn two_others_take_the_place_of_two_one_of_which_has_gone() {
    if !tracking_works() {
        return;
    }
    let (guest, hosts) = (Guest::new(), [(); 4].map(|()| LendingHost::new()));
    let hosts = hosts.each_ref();
    let split = guest.split_over(vec![pair([hosts[0], hosts[1]])]);
    split.keep_to(Room::of(2 * CHUNK_BYTES as u64)).unwrap();
    let checking = Checking::start(&guest, 2);
    while hosts[0].pages() == 0 {
        checking.goes_on(20);
    }
    loses_all(hosts[1]);
    hosts[1].relay.cut();
    split.add(1, pair([hosts[2], hosts[3]])).unwrap();
    split.leave_out(0, true);
    split.empty(0, &|| Ok::<(), MigrateError>(())).unwrap();
    loses_all(hosts[0]);
    hosts[0].relay.cut();
    while !split.has_pages(1) {
        checking.goes_on(20);
    }
    checking.goes_on(100);
    split.merge(&|| Ok(())).unwrap();
    checking.end();
    split.end();
}

/// Either is cut off, loses what it has, or is back, and the daemon dies, in any order: never both at once.
#[test]
fn whatever_becomes_of_one_of_two_the_guest_finds_what_it_wrote() {
    if !tracking_works() {
        return;
    }
    let (guest, hosts) = (Guest::new(), [LendingHost::new(), LendingHost::new()]);
    let hosts = [&hosts[0], &hosts[1]];
    let mut split = guest.split_over(vec![pair(hosts)]);
    let checking = Checking::start(&guest, 2);
    let mut random: u64 = 0x5eed;
    let (mut left, mut cut) = (0, None);
    for round in 0..60 {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let which = (random >> 20 & 1) as usize;
        match random % 5 {
            0 if cut.is_none() => {
                hosts[which].relay.cut();
                cut = Some(which);
            }
            1 => {
                hosts.iter().for_each(|host| host.relay.restore());
                cut = None;
            }
            2 => {
                dies(split);
                split = loop {
                    // An answer may be lost to a cut a moment ago.
                    match guest.recover_over(vec![pair(hosts)]) {
                        Ok(split) => break split,
                        Err(SplitError::Host { .. }) => {}
                        Err(other) => panic!("round {round}: {other}"),
                    }
                };
            }
            3 if cut.is_none() => {
                loses_all(hosts[which]);
                checking.goes_on(50);
                // All that was there is at the other one alone: it comes here before that one may lose anything.
                while split.bring_back().is_err() {}
            }
            _ => {}
        }
        for _ in 0..6 {
            random = random.wrapping_mul(0x2545_f491_4f6c_dd1d) ^ random >> 31;
            let chunk = ChunkIndex((random >> 33) as u32 % CHUNKS);
            match split.way_out().unwrap().send(chunk, 0) {
                Ok(departed) => left += departed.away.len(),
                Err(SplitError::Host { .. }) => {}
                Err(other) => panic!("round {round}: {other}"),
            }
        }
        checking.goes_on(20);
    }
    assert!(left > 4 * CHUNK_PAGES, "{left} pages left");
    hosts.iter().for_each(|host| host.relay.restore());
    while split.bring_back().is_err() {}
    checking.end();
    assert_eq!(split.pager().missing(), 0);
    split.end();
}

/// One loses its power: nothing says that it has gone. Its mirror is asked long before a memory host that is alone is
/// given up.
#[test]
fn nobody_waits_long_for_one_of_two_that_says_nothing() {
    for_either(|guest, hosts, gone| {
        let split = guest.split_over(vec![pair(hosts)]);
        send_all(&split, 0);
        // Whoever brings pages has asked it, and goes on doing so.
        assert_eq!(guest.word(5), content(5));
        hosts[gone].relay.hush();
        let asked = Instant::now();
        for chunk in 1..u64::from(CHUNKS) {
            assert_eq!(guest.word(chunk * 256), content(chunk * 256));
        }
        // That of one that is alone is 30 s; what one touch waits, it waits once.
        assert!(asked.elapsed() < Duration::from_secs(20), "{:?}", asked.elapsed());
        hosts[gone].relay.restore();
        split.bring_back().unwrap();
        guest.is_as_it_was();
        split.end();
    });
}
