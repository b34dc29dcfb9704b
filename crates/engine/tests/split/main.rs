//! A guest with a part of its pages at memory hosts, on real mappings and over real sockets: whatever leaves and comes
//! back, whoever is cut off or dies, it finds what it wrote last.

#[path = "../agent/fixture.rs"]
#[allow(dead_code, reason = "each test program uses its own part")]
mod fixture;
#[path = "../support/linux.rs"]
mod linux;
#[path = "../support/mounted.rs"]
mod mounted;
#[path = "../support/pair/mod.rs"]
#[allow(dead_code, reason = "each test program uses its own part")]
mod pair;
#[path = "../support/relay.rs"]
#[allow(dead_code, reason = "each test program uses its own part")]
mod relay;

#[path = "../support/taking.rs"]
#[allow(dead_code, reason = "each test program uses its own part")]
mod taking;
#[path = "../support/toy.rs"]
#[allow(dead_code, reason = "each test program uses its own part")]
mod toy;

/// A guest of threads that check what they read.
mod checking;
/// Killed at any step.
mod killed;
/// A Linux guest.
mod real;

/// Pages that are here and at their memory host.
mod copies;
/// Devices that write past the page tables.
mod device;
/// A guest in this process, and what outlives its daemon.
mod guest;
/// A host that lends.
mod lending;

/// Memory hosts that are exchanged.
mod hosts;
/// Which chunks leave.
mod hot;
/// The same, for others with another redundancy.
mod layouts;

/// A memory host that has not what it was given.
mod lost;

/// Two memory hosts that have the same pages.
mod mirror;

/// Memory hosts with parity.
mod parity;

/// A guest that moves on while its pages stay.
mod onward;
/// The same with parity.
mod parity_onward;

/// Both sides of such a guest are compared.
mod compared;

/// The rest of its pages follows it there.
mod following;

/// What goes past its host.
mod straight;

/// A guest that takes more memory than it has room for.
mod paced;

/// Pages that a guest holds free.
mod reclaimed;

/// Pages that a guest does not use.
mod unused;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use checking::{Checking, content, expected, word};
use guest::{Counter, Guest};
use lending::LendingHost;
use mounted::Mount;
use pair::guest::GuestRam;
use pair::inside::InsideSelf;
use pair::{block, tracking_works};
use relay::Relay;
use sterna_engine::agent::{Discard, UnderWay};
use sterna_engine::memory::{BlockFile, Memory, kind};
use sterna_engine::paging::{Pager, PagingMeans};
use sterna_engine::split::loans::borrow;
use sterna_engine::split::room::Room;
use sterna_engine::split::{Epochs, Lender, Split, SplitError};
use sterna_protocol::layout::{CHUNK_BYTES, CHUNK_PAGES, ChunkIndex, PAGE_BYTES};
use sterna_protocol::store::{Claim, most_bytes};
use sterna_sys::map::{Access, SharedMapping};

const CHUNKS: u32 = 8;
const PAGES: u64 = CHUNKS as u64 * CHUNK_PAGES as u64;
const GUEST: (u128, u128) = (7, 0x5eed);

fn send_all(split: &Split, host: usize) {
    let mut way = split.way_out().unwrap();
    for chunk in 0..CHUNKS {
        way.send(ChunkIndex(chunk), host).unwrap();
    }
}

/// To the first memory host and to the second in turn.
fn send_in_turn(split: &Split) {
    let mut way = split.way_out().unwrap();
    for chunk in 0..CHUNKS {
        way.send(ChunkIndex(chunk), (chunk % 2) as usize).unwrap();
    }
}

/// Waits until something is so.
fn until(what: &str, mut so: impl FnMut() -> bool) {
    fixture::eventually(what, || so().then_some(()));
}

/// As when the daemon is killed that has it.
fn dies(split: Arc<Split>) {
    split.stop();
    split.pager().die();
}

/// Memory hosts have nothing but copies of what is here: the next daemon gives them up.
fn leaves_nothing(guest: &Guest, split: Arc<Split>, hosts: &[&LendingHost]) {
    dies(split);
    let split = guest.recover(hosts).unwrap();
    assert_eq!(hosts.iter().map(|host| host.pages()).sum::<u64>(), 0);
    split.end();
}

#[test]
fn what_leaves_takes_no_memory_here_and_comes_back_as_it_was() {
    if !tracking_works() {
        return;
    }
    let (guest, lending) = (Guest::new(), LendingHost::new());
    let split = guest.split(&[&lending]);
    let full = PAGES / 4 * 3;
    assert_eq!(guest.pages_here(&split), full + PAGES / 8);
    send_all(&split, 0);
    let counted = (guest.pages_here(&split), split.pager().missing(), lending.pages());
    assert_eq!(counted, (0, full, full + u64::from(CHUNKS)));
    let account = split.account();
    assert_eq!((account.out_pages, account.zero_pages, account.kept_pages), (full, PAGES / 8, 0));
    // Nothing is away of what was zeros or never touched: nobody asks for it over the network.
    assert_eq!((guest.word(200), guest.word(201)), (0, 0));
    assert_eq!(split.account().in_pages, 0);
    // A page that is touched comes back.
    assert_eq!(guest.word(300), content(300));
    split.bring_back().unwrap();
    assert_eq!((split.pager().missing(), split.account().in_pages), (0, full));
    guest.is_as_it_was();
    // The same again.
    send_all(&split, 0);
    split.bring_back().unwrap();
    guest.is_as_it_was();
    split.end();
    assert!(guest.kept.lock().unwrap().is_none());
}

#[test]
fn a_guest_that_goes_on_reading_and_writing_finds_what_it_wrote_whatever_leaves() {
    if !tracking_works() {
        return;
    }
    let (guest, lending) = (Guest::new(), [LendingHost::new(), LendingHost::new()]);
    let split = guest.split(&[&lending[0], &lending[1]]);
    let checking = Checking::start(&guest, 3);
    {
        let mut way = split.way_out().unwrap();
        let mut turn = 0;
        while split.account().out_pages < 4 * PAGES || split.account().in_pages < 3 * PAGES {
            turn += 1;
            way.send(ChunkIndex(turn * 5 % CHUNKS), turn as usize / 3 % 2).unwrap();
            checking.goes_on(20);
        }
    }
    println!("{:?}", split.account());
    split.bring_back().unwrap();
    assert_eq!(split.pager().missing(), 0);
    checking.end();
    split.end();
}

#[test]
fn no_more_of_a_guest_is_here_than_it_has_room_for_and_what_it_uses_stays() {
    if !tracking_works() {
        return;
    }
    let (guest, lending) = (Guest::new(), [LendingHost::new(), LendingHost::new()]);
    let split = guest.split(&[&lending[0], &lending[1]]);
    // Two chunks are in use all the time, and there is room for more than twice as much.
    let checking = Checking::start_in(&guest, 2, 2 * CHUNK_PAGES as u64);
    let room = Room::of(5 * CHUNK_BYTES as u64);
    let here = || split.pager().ram().allocated_bytes().unwrap();
    split.keep_to(room).unwrap();
    let comes_down = || {
        while here() > room.high() {
            assert!(checking.is_well());
            std::thread::yield_now();
        }
    };
    comes_down();
    checking.goes_on(1000);
    println!("{:?}", split.account());
    // What came back meanwhile may be more for a moment.
    comes_down();
    assert!(lending.iter().all(|host| host.pages() > 0), "both lend");
    // With less room than it uses it runs on as well, now with one page and then with another.
    split.keep_to(Room::of(CHUNK_BYTES as u64)).unwrap();
    checking.goes_on(100);
    // With room for all of it, all of it comes back and stays.
    split.keep_to(Room::of(u64::MAX)).unwrap();
    split.bring_back().unwrap();
    checking.goes_on(100);
    while split.pager().missing() > 0 {
        split.bring_back().unwrap();
    }
    checking.end();
    split.end();
}

/// Fails where the host takes both names for one guest's: what it has under one of them is given back then, as pages
/// that its owner does not know.
#[test]
fn a_memory_host_that_is_named_twice_in_different_ways_keeps_what_it_was_given_under_each_name() {
    if !tracking_works() {
        return;
    }
    let (guest, lending) = (Guest::new(), LendingHost::to_guests_of(2 * CHUNKS));
    let other_name = Relay::to(&lending.relay.address, u64::MAX);
    let lender = |peer: &String| Lender {
        peer: peer.clone(),
        mirror: None,
        parity: None,
        once: Default::default(),
        credentials: None,
        bytes: most_bytes(CHUNKS),
        leaving: false,
    };
    let lenders = || vec![lender(&lending.relay.address), lender(&other_name.address)];
    let split = guest.split_over(lenders());
    send_in_turn(&split);
    dies(split);
    let split = guest.recover_over(lenders()).unwrap();
    guest.is_as_it_was();
    split.bring_back().unwrap();
    split.end();
}

#[test]
fn what_is_said_of_pages_that_cannot_leave_is_not_said_once_there_is_room_for_them() {
    if !tracking_works() {
        return;
    }
    let (guest, lending) = (Guest::new(), LendingHost::to_guests_of(1));
    let split = guest.split(&[&lending]);
    split.keep_to(Room::of(0)).unwrap();
    while split.stuck().is_none() {
        std::thread::yield_now();
    }
    split.keep_to(Room::of(u64::MAX)).unwrap();
    while split.stuck().is_some() {
        std::thread::yield_now();
    }
    split.bring_back().unwrap();
    guest.is_as_it_was();
    split.end();
}

#[test]
fn a_memory_host_without_room_is_passed_over() {
    if !tracking_works() {
        return;
    }
    let (guest, lending) = (Guest::new(), [LendingHost::to_guests_of(1), LendingHost::new()]);
    let split = guest.split(&[&lending[0], &lending[1]]);
    split.keep_to(Room::of(0)).unwrap();
    while split.pager().missing() < PAGES / 4 * 3 {
        std::thread::yield_now();
    }
    assert!(lending[0].pages() > 0 && lending[1].pages() > CHUNK_PAGES as u64);
    split.keep_to(Room::of(u64::MAX)).unwrap();
    split.bring_back().unwrap();
    guest.is_as_it_was();
    split.end();
}

#[test]
fn a_link_that_is_cut_again_and_again_costs_the_guest_nothing_but_time() {
    if !tracking_works() {
        return;
    }
    let (guest, lending) = (Guest::new(), LendingHost::new());
    let split = guest.split(&[&lending]);
    let checking = Checking::start(&guest, 2);
    let done = AtomicBool::new(false);
    let failures = std::thread::scope(|scope| {
        scope.spawn(|| {
            // After ever different amounts, so in the middle of everything that is said.
            let mut wait = 1000;
            while !done.load(Ordering::Acquire) {
                let until = lending.relay.carried() + wait;
                while lending.relay.carried() < until && !done.load(Ordering::Acquire) {
                    std::thread::yield_now();
                }
                lending.relay.cut();
                lending.relay.restore();
                wait = (wait * 7 + 4999) % 3_000_017;
            }
        });
        let mut way = split.way_out().unwrap();
        let (mut turn, mut failures) = (0, 0);
        while failures < 20 || split.account().in_pages < 2 * PAGES {
            turn += 1;
            match way.send(ChunkIndex(turn * 3 % CHUNKS), 0) {
                Ok(_) => checking.goes_on(10),
                Err(SplitError::Host { .. }) => failures += 1,
                Err(other) => panic!("{other}"),
            }
        }
        done.store(true, Ordering::Release);
        failures
    });
    println!("{failures} failures, {:?}", split.account());
    while split.bring_back().is_err() {}
    checking.end();
    assert_eq!(split.pager().missing(), 0);
    split.end();
}

#[test]
fn whoever_waits_for_a_memory_host_that_is_away_goes_on_when_it_is_back() {
    if !tracking_works() {
        return;
    }
    let (guest, lending) = (Guest::new(), [LendingHost::new(), LendingHost::new()]);
    let split = guest.split(&[&lending[0], &lending[1]]);
    let mut way = split.way_out().unwrap();
    way.send(ChunkIndex(0), 0).unwrap();
    way.send(ChunkIndex(1), 1).unwrap();
    lending[0].relay.cut();
    let waits = guest.reads(5);
    while split.pager().fault_count() == 0 {
        std::thread::yield_now();
    }
    // The other one's pages come meanwhile, and more leave.
    assert_eq!(guest.word(260), content(260));
    way.send(ChunkIndex(2), 1).unwrap();
    assert!(way.send(ChunkIndex(3), 0).is_err() && !waits.is_finished());
    lending[0].relay.restore();
    assert_eq!(waits.join().unwrap(), content(5));
    drop(way);
    split.bring_back().unwrap();
    guest.is_as_it_was();
    split.end();
}

#[test]
fn another_daemon_goes_on_with_a_guest_that_is_split_and_frees_what_the_last_one_did_not() {
    if !tracking_works() {
        return;
    }
    let (guest, lending) = (Guest::new(), [LendingHost::new(), LendingHost::new()]);
    let split = guest.split(&[&lending[0], &lending[1]]);
    send_in_turn(&split);
    // Pages of chunk 1 come back, but the memory host is not told.
    dies(split);
    let (waits, zero) = (guest.reads(3), guest.reads(200));
    // Killed after the record and before the punch, it leaves behind what the page held.
    guest.ram.file.write_all_at(&[0xee; 4096], 4 * 4096).unwrap();
    assert!(!waits.is_finished() && !zero.is_finished());

    let split = guest.recover(&[&lending[0], &lending[1]]).unwrap();
    assert_eq!((waits.join().unwrap(), zero.join().unwrap()), (content(3), 0));
    assert_eq!(guest.word(4), content(4));
    let checking = Checking::start(&guest, 2);
    {
        let mut way = split.way_out().unwrap();
        for turn in 0..40 {
            way.send(ChunkIndex(turn % CHUNKS), (turn % 2) as usize).unwrap();
            checking.goes_on(20);
        }
    }
    split.bring_back().unwrap();
    checking.end();
    leaves_nothing(&guest, split, &[&lending[0], &lending[1]]);
}
