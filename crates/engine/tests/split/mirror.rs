//! Two memory hosts that have the same pages: either may go for good.

use std::time::Instant;

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

/// Writes a word of page 260, behind the one that tells the page, that is `turn`.
const WRITTEN: u64 = 260;

fn write_turn(guest: &Guest, turn: u64) {
    guest.ram.mapping.copy_in(WRITTEN * 4096 + 512, &turn.to_le_bytes().repeat(2)).unwrap();
}

fn turn_of(guest: &Guest) -> u64 {
    let (at, mut words) = (WRITTEN * 4096 + 512, [0; 16]);
    guest.ram.mapping.copy_out(at..at + 16, &mut words);
    u64::from_le_bytes(*words.first_chunk().unwrap())
}

fn is_away(split: &Split) -> bool {
    let chunk = ChunkIndex((WRITTEN / CHUNK_PAGES as u64) as u32);
    split.pager().away_in(chunk).contains((WRITTEN % CHUNK_PAGES as u64) as u8)
}

/// The next daemon. An answer may be lost to a cut a moment ago.
fn recovered(guest: &Guest, hosts: [&LendingHost; 2]) -> Arc<Split> {
    loop {
        match guest.recover_over(vec![pair(hosts)]) {
            Ok(split) => return split,
            Err(SplitError::Host { .. }) => {}
            Err(other) => panic!("{other}"),
        }
    }
}

/// Each page is at both of two.
fn are_both_given_all(split: &Split) {
    while !split.is_at_both() {
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A guest that reads goes on as before: what both have leaves again for both.
#[test]
fn while_one_of_two_does_not_answer_pages_leave_for_both_that_both_have() {
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
        assert_eq!((split.pager().missing(), split.at_one_alone()), (full, 0));
        assert_eq!((guest.word(300), split.failing(0)), (content(300), None));
        // The other way round: what is away is at each of them.
        hosts[gone].relay.restore();
        hosts[1 - gone].relay.cut();
        while split.bring_back().is_err() {}
        hosts[1 - gone].relay.restore();
        guest.is_as_it_was();
        split.end();
    });
}

/// What the guest has written leaves for one; the other one, which has the page as it was before, is given it once it
/// is back, and not believed before.
#[test]
fn what_leaves_for_one_of_two_is_at_both_once_the_other_answers_again() {
    for_either(|guest, hosts, gone| {
        let split = guest.split_over(vec![pair(hosts)]);
        send_all(&split, 0);
        let full = split.pager().missing();
        for turn in 1..=3 {
            split.bring_back().unwrap();
            hosts[gone].relay.cut();
            write_turn(guest, turn);
            send_all_without(&split);
            assert!(!is_away(&split), "what both have leaves first");
            send_all_without(&split);
            assert_eq!((split.pager().missing(), is_away(&split)), (full, true));
            assert_eq!(split.at_one_alone(), 192, "the chunk's, and of no other");
            assert_eq!(turn_of(guest), turn);
            send_all_without(&split);
            if turn == 2 {
                loses_all(hosts[gone]);
            }
            hosts[gone].relay.restore();
            are_both_given_all(&split);
            assert!(hosts[gone].pages() >= split.pager().missing() + u64::from(CHUNKS));
            hosts[1 - gone].relay.cut();
            while split.bring_back().is_err() {}
            assert_eq!(turn_of(guest), turn);
            hosts[1 - gone].relay.restore();
            are_both_given_all(&split);
        }
        guest.is_as_it_was();
        split.end();
    });
}

/// The next daemon does not believe it either, whoever of the two answers.
#[test]
fn another_daemon_knows_which_of_two_has_pages_as_they_were_before() {
    for_either(|guest, hosts, gone| {
        let split = guest.split_over(vec![pair(hosts)]);
        send_all(&split, 0);
        split.bring_back().unwrap();
        hosts[gone].relay.cut();
        write_turn(guest, 1);
        while !is_away(&split) {
            send_all_without(&split);
        }
        dies(split);
        hosts[gone].relay.restore();
        hosts[1 - gone].relay.cut();
        let split = recovered(guest, hosts);
        assert!(matches!(split.bring_back(), Err(SplitError::Host { .. })));
        assert!(is_away(&split), "it waits for the one that has it");
        hosts[1 - gone].relay.restore();
        are_both_given_all(&split);
        dies(split);
        // Now both are to be believed, for the one after it, too.
        hosts[1 - gone].relay.cut();
        let split = recovered(guest, hosts);
        split.bring_back().unwrap();
        assert_eq!(turn_of(guest), 1);
        guest.is_as_it_was();
        hosts[1 - gone].relay.restore();
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
        are_both_given_all(&split);
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
    // It is given them again, whether or not anybody asks for them.
    assert_eq!(guest.word(300), content(300));
    are_both_given_all(&split);
    assert!(hosts[0].pages() > 0);
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

/// The two once another one is in the place of one of them.
fn instead(pair: &Lender, which: usize, other: &LendingHost) -> Lender {
    let (mut lender, mut once) = (pair.clone(), pair.once.clone());
    let names = [pair.peer.clone(), pair.mirror.clone().unwrap()];
    once[1 - which].get_or_insert(names[which].clone());
    once[which] = None;
    match which {
        0 => lender.peer = other.relay.address.clone(),
        _ => lender.mirror = Some(other.relay.address.clone()),
    }
    Lender { once, ..lender }
}

/// One of the two has gone for good, and another takes its place, again and again: each time it is given what the other
/// one has, and then that one may go.
#[test]
fn another_takes_the_place_of_one_of_two_that_has_gone() {
    if !tracking_works() {
        return;
    }
    let (guest, hosts) = (Guest::new(), [(); 6].map(|()| LendingHost::new()));
    let mut two = [&hosts[0], &hosts[1]];
    let mut pair = pair(two);
    let mut split = guest.split_over(vec![pair.clone()]);
    split.keep_to(Room::of(2 * CHUNK_BYTES as u64)).unwrap();
    let checking = Checking::start(&guest, 2);
    while hosts[0].pages() == 0 {
        checking.goes_on(20);
    }
    for (turn, newcomer) in hosts[2..].iter().enumerate() {
        let which = [0, 1, 1, 0][turn];
        loses_all(two[which]);
        two[which].relay.cut();
        checking.goes_on(50);
        pair = instead(&pair, which, newcomer);
        // As long as it is not on record, nothing has changed.
        let refused = split.take_place((0, which), pair.clone(), || {
            Err(sterna_api::Problem::new(sterna_api::Code::OutOfMemory, sterna_api::Blame::Host, "no"))
        });
        assert!(refused.is_err());
        checking.goes_on(20);
        split.take_place((0, which), pair.clone(), || Ok(())).unwrap();
        two[which] = newcomer;
        if turn == 2 {
            // The next daemon knows the two as they are, and goes on.
            dies(split);
            split = guest.recover_over(vec![pair.clone()]).unwrap();
            split.keep_to(Room::of(2 * CHUNK_BYTES as u64)).unwrap();
        }
        checking.goes_on(50);
        are_both_given_all(&split);
    }
    split.merge(&|| Ok(())).unwrap();
    checking.end();
    split.end();
}

/// What is at one alone goes with it: no other takes its place until its mirror has all, too.
#[test]
fn none_takes_the_place_of_one_that_alone_has_pages() {
    for_either(|guest, hosts, gone| {
        let (split, newcomer) = (guest.split_over(vec![pair(hosts)]), LendingHost::new());
        send_all(&split, 0);
        split.bring_back().unwrap();
        hosts[1 - gone].relay.cut();
        write_turn(guest, 1);
        while !is_away(&split) {
            send_all_without(&split);
        }
        hosts[gone].relay.cut();
        let taken = split.take_place((0, gone), instead(&pair(hosts), gone, &newcomer), || panic!("it is refused"));
        assert!(taken.unwrap_err().message.contains("alone has 192 pages"));
        hosts.iter().for_each(|host| host.relay.restore());
        are_both_given_all(&split);
        hosts[gone].relay.cut();
        split.take_place((0, gone), instead(&pair(hosts), gone, &newcomer), || Ok(())).unwrap();
        are_both_given_all(&split);
        assert!(newcomer.pages() >= split.pager().missing());
        hosts[1 - gone].relay.cut();
        while split.bring_back().is_err() {}
        assert_eq!(turn_of(guest), 1);
        guest.is_as_it_was();
        split.end();
    });
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
        if cut.is_none() {
            // What one has alone, it must not lose before the other one has it, too.
            are_both_given_all(&split);
        }
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
                split = recovered(&guest, hosts);
            }
            3 if cut.is_none() => {
                loses_all(hosts[which]);
                checking.goes_on(50);
                // Nobody knows of it before it is asked. What has come here is not lost with the other one.
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
