//! Memory hosts of which any one may go for good: of two chunks each is at another one, and their parity at a third.

use sterna_engine::error::MigrateError;
use sterna_engine::paging::whereabouts::Holder;
use sterna_engine::split::Parity;

use super::mirror::loses_all;
use super::*;

const STRIPE: u32 = 2;

/// Memory hosts with parity.
pub fn with_parity(hosts: &[LendingHost]) -> Vec<Lender> {
    hosts.iter().map(lender).collect()
}

fn lender(host: &LendingHost) -> Lender {
    Lender { parity: Some(Parity::new((STRIPE, 3), most_bytes(CHUNKS))), bytes: most_bytes(CHUNKS), ..host.lender() }
}

pub fn three() -> [LendingHost; 3] {
    [(); 3].map(|()| LendingHost::to_guests_of(2 * CHUNKS))
}

/// With each of three memory hosts once: it goes.
fn for_each(test: impl Fn(&Guest, &[LendingHost; 3], usize)) {
    if !tracking_works() {
        return;
    }
    for gone in 0..3 {
        test(&Guest::new(), &three(), gone);
    }
}

fn send_each(split: &Split) {
    for chunk in 0..CHUNKS {
        let _ = split.way_out().unwrap().send(ChunkIndex(chunk), 0);
    }
}

/// Any one memory host may go.
pub fn is_whole(split: &Split) {
    until("each page can be had without any one", || split.is_at_both());
}

fn all_comes(split: &Split) {
    until("all has come", || split.bring_back().is_ok());
}

fn kept(hosts: &[LendingHost]) -> u64 {
    hosts.iter().map(LendingHost::pages).sum()
}

/// What is known as copies goes, in the end.
fn keeps_nothing(split: &Arc<Split>, hosts: &[LendingHost]) {
    split.keep_to(Room::of(u64::MAX)).unwrap();
    until("no memory host has anything", || kept(hosts) == 0);
}

#[test]
fn pages_with_parity_take_half_as_much_again_and_come_back_from_where_they_are() {
    if !tracking_works() {
        return;
    }
    let (guest, hosts) = (Guest::new(), three());
    let split = guest.split_over(with_parity(&hosts));
    send_all(&split, 0);
    let full = PAGES / 4 * 3;
    assert_eq!((split.pager().missing(), split.account().out_pages), (full, full));
    assert_eq!(kept(&hosts), full + full / 2 + 2 * u64::from(CHUNKS), "with a note of each chunk at two hosts");
    let carried = || hosts.iter().map(|host| host.relay.carried()).sum::<u64>();
    let before = carried();
    split.bring_back().unwrap();
    assert!(carried() - before < full * 4096 * 5 / 4, "each page came once");
    guest.is_as_it_was();
    // Unchanged pages leave again without being sent.
    send_all(&split, 0);
    let account = split.account();
    assert_eq!((split.pager().missing(), account.out_pages, account.unsent_pages), (full, full, full));
    // And changed ones, for which what they were is folded out of the parity.
    split.bring_back().unwrap();
    let written = 300;
    guest.ram.mapping.copy_in(written * 4096 + 512, &[7; 16]).unwrap();
    send_all(&split, 0);
    assert_eq!((split.pager().missing(), split.account().out_pages), (full, full + 1));
    loses_all(&hosts[1]);
    hosts[1].relay.cut();
    all_comes(&split);
    guest.is_as_it_was();
    let mut found = [0; 16];
    guest.ram.mapping.copy_out(written * 4096 + 512..written * 4096 + 528, &mut found);
    assert_eq!(found, [7; 16]);
    split.end();
}

#[test]
fn another_daemon_goes_on_and_what_it_does_not_know_is_kept_no_longer() {
    for_each(|guest, hosts, gone| {
        let split = guest.split_over(with_parity(hosts));
        let checking = Checking::start(guest, 2);
        for _ in 0..3 {
            send_each(&split);
            checking.goes_on(200);
        }
        dies(split);
        hosts[gone].relay.cut();
        let split = guest.recover_over(with_parity(hosts)).unwrap();
        checking.goes_on(200);
        hosts[gone].relay.restore();
        all_comes(&split);
        checking.end();
        dies(split);
        let split = guest.recover_over(with_parity(hosts)).unwrap();
        keeps_nothing(&split, hosts);
        split.end();
    });
}

/// What it cannot be told because one of the two does not answer it is told later.
#[test]
fn what_the_next_daemon_does_not_know_is_given_up_once_all_answer() {
    for_each(|guest, hosts, gone| {
        let split = guest.split_over(with_parity(hosts));
        hosts[gone].relay.cut();
        until("all but what is for that one has left", || {
            send_each(&split);
            split.pager().missing() >= PAGES / 32 * 15
        });
        all_comes(&split);
        dies(split);
        let split = guest.recover_over(with_parity(hosts)).unwrap();
        let before = kept(hosts);
        split.keep_to(Room::of(u64::MAX)).unwrap();
        until("what the others alone have has gone", || kept(hosts) < before);
        hosts[gone].relay.restore();
        keeps_nothing(&split, hosts);
        split.end();
    });
}

#[test]
fn a_guest_goes_on_without_any_one_of_three() {
    for_each(|guest, hosts, gone| {
        let split = guest.split_over(with_parity(hosts));
        let checking = Checking::start(guest, 3);
        for _ in 0..4 {
            send_each(&split);
            checking.goes_on(100);
        }
        loses_all(&hosts[gone]);
        hosts[gone].relay.cut();
        // Whatever it touches can be had; what others have leaves as before, and what it has not written.
        checking.goes_on(300);
        for _ in 0..3 {
            send_each(&split);
            checking.goes_on(100);
        }
        all_comes(&split);
        assert_eq!(split.pager().missing(), 0);
        // It is back, with nothing: any one may go once it has what it should.
        hosts[gone].relay.restore();
        for _ in 0..3 {
            send_each(&split);
            checking.goes_on(20);
        }
        is_whole(&split);
        let next = (gone + 1) % 3;
        loses_all(&hosts[next]);
        hosts[next].relay.cut();
        checking.goes_on(300);
        all_comes(&split);
        checking.end();
        hosts[next].relay.restore();
        split.end();
    });
}

/// The third of its places is taken by another one, again and again: each time what it had is made anew from the
/// others.
#[test]
fn another_takes_the_place_of_one_that_has_gone_for_good() {
    if !tracking_works() {
        return;
    }
    let (guest, hosts) = (Guest::new(), [(); 6].map(|()| LendingHost::to_guests_of(2 * CHUNKS)));
    let mut lenders = with_parity(&hosts[..3]);
    let mut places = [0, 1, 2];
    let mut split = guest.split_over(lenders.clone());
    split.keep_to(Room::of(2 * CHUNK_BYTES as u64)).unwrap();
    let checking = Checking::start(&guest, 2);
    while hosts[0].pages() == 0 {
        checking.goes_on(20);
    }
    for newcomer in 3..6 {
        let number = newcomer % 3;
        is_whole(&split);
        loses_all(&hosts[places[number]]);
        hosts[places[number]].relay.cut();
        checking.goes_on(50);
        places[number] = newcomer;
        lenders[number] = lender(&hosts[newcomer]);
        let epoch = guest.epochs.raise().unwrap();
        let claim = Claim { guest: GUEST.0, key: GUEST.1, epoch };
        lenders[number].members().iter().for_each(|lender| borrow(lender, claim, CHUNKS).unwrap());
        split.take_place((number, 0), lenders[number].clone(), || Ok(())).unwrap();
        if newcomer == 4 {
            dies(split);
            split = guest.recover_over(lenders.clone()).unwrap();
            split.keep_to(Room::of(2 * CHUNK_BYTES as u64)).unwrap();
        }
        checking.goes_on(50);
        is_whole(&split);
        assert!(hosts[newcomer].pages() > 0);
    }
    split.merge(&|| Ok::<(), MigrateError>(())).unwrap();
    checking.end();
    split.end();
}

/// Somebody waits for it: its memory host's silence is not to cost one answer after the other.
#[test]
fn what_a_page_is_made_from_comes_while_the_parity_is_waited_for() {
    if !tracking_works() {
        return;
    }
    let (guest, hosts) = (Guest::new(), three());
    let split = guest.split_over(with_parity(&hosts));
    send_all(&split, 0);
    // The first chunk is at the second host, its parity at the first, and what else is in that at the third.
    hosts[1].relay.cut();
    hosts[0].relay.hold();
    let carried = || hosts[2].relay.carried();
    let before = carried();
    std::thread::scope(|scope| {
        let coming = scope.spawn(|| split.bring_back().unwrap());
        while carried() - before < PAGE_BYTES as u64 {
            assert!(!coming.is_finished(), "the parity was waited for first");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(split.pager().missing(), PAGES / 4 * 3);
        hosts[0].relay.restore();
    });
    guest.is_as_it_was();
    split.end();
}

/// What leaves while the parity's host is away makes its parity stand for what is no longer there; it is not believed
/// when it is back, by this daemon and by the next one.
#[test]
fn parity_that_was_left_behind_is_made_anew_before_anybody_relies_on_it() {
    for_each(|guest, hosts, gone| {
        let mut split = guest.split_over(with_parity(hosts));
        let checking = Checking::start(guest, 2);
        send_each(&split);
        for turn in 0..3 {
            is_whole(&split);
            hosts[gone].relay.cut();
            for _ in 0..4 {
                send_each(&split);
                checking.goes_on(100);
            }
            if turn == 1 {
                dies(split);
                split = guest.recover_over(with_parity(hosts)).unwrap();
                checking.goes_on(50);
            }
            hosts[gone].relay.restore();
            send_each(&split);
            is_whole(&split);
            let next = (gone + 1 + turn % 2) % 3;
            hosts[next].relay.cut();
            checking.goes_on(200);
            all_comes(&split);
            hosts[next].relay.restore();
        }
        checking.end();
        split.end();
    });
}

#[test]
fn what_leaves_without_the_parity_is_on_record_as_without_it_and_so_is_the_rest_of_its_stripe() {
    if !tracking_works() {
        return;
    }
    let (guest, hosts) = (Guest::new(), three());
    let split = guest.split_over(with_parity(&hosts));
    send_all(&split, 0);
    let alone = || [0, 1, 2].map(|chunk| split.pager().holder(ChunkIndex(chunk)).and_then(Holder::alone));
    assert_eq!(alone(), [None; 3]);
    // It has the parity of the first two chunks.
    hosts[0].relay.cut();
    guest.writes(0);
    let full = PAGES / 4 * 3;
    until("it has left", || {
        let _ = split.way_out().unwrap().send(ChunkIndex(0), 0);
        split.pager().missing() == full
    });
    assert_eq!(alone(), [Some(0), Some(0), None]);
    split.end();
}

#[test]
fn a_full_memory_host_gives_up_what_it_need_not_keep() {
    if !tracking_works() {
        return;
    }
    // Room for what is away once, and little more.
    let (guest, hosts) = (Guest::new(), [(); 3].map(|()| LendingHost::to_guests_of(CHUNKS)));
    let lenders = hosts.iter().map(|host| {
        let bytes = most_bytes(CHUNKS) / 2;
        Lender { bytes, parity: Some(Parity::new((STRIPE, 3), bytes)), ..host.lender() }
    });
    let split = guest.split_over(lenders.collect());
    let checking = Checking::start(&guest, 2);
    for _ in 0..8 {
        send_each(&split);
        checking.goes_on(100);
    }
    println!("{:?}", split.account());
    all_comes(&split);
    checking.end();
    split.end();
}

/// Any one is cut off amidst whatever is said, loses what it has, or is back, and the daemon dies, in any order: never
/// two at once.
#[test]
fn whatever_becomes_of_one_of_three_the_guest_finds_what_it_wrote() {
    if !tracking_works() {
        return;
    }
    let (guest, hosts) = (Guest::new(), three());
    let mut split = guest.split_over(with_parity(&hosts));
    let checking = Checking::start(&guest, 2);
    let mut random: u64 = std::env::var("STERNA_SEED").map_or(0x5eed, |seed| seed.parse().unwrap());
    let rounds = if std::env::var("STERNA_LONG").is_ok_and(|word| word == "1") { 2000 } else { 100 };
    let (mut left, mut cut, mut lost) = (0, None, 0);
    for round in 0..rounds {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let which = (random >> 20) as usize % 3;
        if cut.is_none() {
            is_whole(&split);
        }
        let amidst = random >> 24 & 0xf_ffff;
        match random % 6 {
            0 | 1 if cut.is_none() => cut = Some(which),
            2 => {
                hosts.iter().for_each(|host| host.relay.restore());
                cut = None;
            }
            3 => {
                dies(split);
                split = recovered(&guest, &hosts);
            }
            4 if cut.is_none() => {
                loses_all(&hosts[which]);
                lost += 1;
                // Where nobody asks it, nobody knows of it, and others must not be lost meanwhile.
                split.ask_whether_there(which);
                checking.goes_on(50);
                if random >> 30 & 1 == 0 {
                    all_comes(&split);
                }
            }
            _ => {}
        }
        // Cut after some of what is said, and not before it.
        let until = cut.map(|which| (which, hosts[which].relay.carried() + amidst));
        for _ in 0..6 {
            random = random.wrapping_mul(0x2545_f491_4f6c_dd1d) ^ random >> 31;
            let chunk = ChunkIndex((random >> 33) as u32 % CHUNKS);
            match split.way_out().unwrap().send(chunk, 0) {
                Ok(departed) => left += departed.away.len(),
                Err(SplitError::Host { .. }) => {}
                Err(other) => panic!("round {round}: {other}"),
            }
            if let Some((which, bytes)) = until
                && hosts[which].relay.carried() >= bytes
            {
                hosts[which].relay.cut();
            }
        }
        if let Some((which, _)) = until {
            hosts[which].relay.cut();
        }
        checking.goes_on(20);
    }
    println!("{left} pages left, {lost} times a host lost all, {:?}", split.account());
    assert!(left > 4 * CHUNK_PAGES, "{left} pages left");
    hosts.iter().for_each(|host| host.relay.restore());
    all_comes(&split);
    checking.end();
    assert_eq!(split.pager().missing(), 0);
    split.end();
}

/// The next daemon. An answer may be lost to a cut a moment ago.
fn recovered(guest: &Guest, hosts: &[LendingHost]) -> Arc<Split> {
    loop {
        match guest.recover_over(with_parity(hosts)) {
            Ok(split) => return split,
            Err(SplitError::Host { .. }) => {}
            Err(other) => panic!("{other}"),
        }
    }
}
