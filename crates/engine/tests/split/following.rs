//! A split guest runs at its next host before all that was here has come: pages come from its source, leave for memory
//! hosts and come back from there at the same time, and it finds what it wrote last.

use sterna_api::report::{Report, Status};
use sterna_api::{MigrateOptions, Mode};
use sterna_engine::source::Fate;

use super::onward::{Here, IN_USE, Moving, OWNERS, Way, arrived, next, options, pages_go_and_come, room, run_with};
use super::pair::destination::Destination;
use super::pair::source::SourceVmm;
use super::parity::{three, with_parity};
use super::*;

fn by(mode: Mode) -> MigrateOptions {
    // A hybrid that has had one round goes on behind its guest.
    MigrateOptions { mode, precopy_rounds: (mode == Mode::Hybrid).then_some(1), verify: true, ..options() }
}

/// Has the guest start there before anything else is done, and its pages leave.
fn starts_at_once(host: &Destination, moving: &Moving) {
    let starting = moving.clone();
    *host.at_start.lock().unwrap() = Some(Box::new(move |mapping| starting.starts_at(&mapping)));
    *host.with_split.lock().unwrap() = Some(Box::new(move |split| split.keep_to(room()).unwrap()));
}

/// Pages followed it, and no page differs. After a round of a hybrid there may be none left.
fn followed(report: &Report, mode: Mode) {
    assert_eq!((report.status, &report.error), (Status::Completed, &None));
    let verify = &report.verify;
    assert_eq!((verify.checked, verify.mismatches, &verify.reason), (true, 0, &None), "{verify:?}");
    assert_eq!(verify.pages + verify.away_pages, PAGES, "{verify:?}");
    let follow = report.postcopy.residue_pages > 0 || mode == Mode::Hybrid;
    assert!(verify.away_pages > 0 && follow, "{verify:?}");
}

#[test]
fn pages_follow_a_guest_that_is_split_while_others_leave_and_come() {
    if !tracking_works() {
        return;
    }
    let (guest, hosts) = (Guest::new(), [LendingHost::new(), LendingHost::new()]);
    follow(&guest, Way::of(&guest, &hosts));
}

#[test]
fn pages_follow_a_guest_whose_memory_hosts_have_parity() {
    if !tracking_works() {
        return;
    }
    let (guest, hosts) = (Guest::new(), three());
    let here = follow(&guest, Way::over(&guest, with_parity(&hosts)));
    assert_eq!(here.split.pager().missing(), 0);
}

fn follow(guest: &Guest, mut way: Way) -> Here {
    let split = guest.split_over(way.lenders.clone());
    split.keep_to(room()).unwrap();
    let (mut here, mut checking) = (Here::of(guest, &split), Checking::start_in(guest, 3, IN_USE));
    for turn in 1..=8 {
        pages_go_and_come(&here.split, &checking);
        let ((host, peer), moving) = (next(&way), Moving::new(checking));
        starts_at_once(&host, &moving);
        let mode = if turn % 2 == 0 { Mode::Hybrid } else { Mode::Postcopy };
        let (fate, report) = run_with(here.outgoing(moving.vmm()), &peer, &by(mode));
        assert_eq!(fate, Fate::There, "{mode:?}: {:?}", report.error);
        followed(&report, mode);
        println!("turn {turn}, {mode:?}: {:?}", report.verify);
        let former = std::mem::replace(&mut here, arrived(&host));
        checking = moving.runs();
        former.split.end();
        assert_eq!(here.split.pager().to_come(), 0);
        way.epochs = Counter(Arc::new(AtomicU64::new(turn * OWNERS)));
    }
    here.split.merge(&|| Ok(())).unwrap();
    checking.end();
    here.split.end();
    here
}

#[test]
fn a_link_that_breaks_while_pages_follow_a_split_guest_costs_it_nothing_but_time() {
    if !tracking_works() {
        return;
    }
    let (guest, hosts) = (Guest::new(), [LendingHost::new(), LendingHost::new()]);
    let mut way = Way::of(&guest, &hosts);
    let split = guest.split_over(way.lenders.clone());
    split.keep_to(room()).unwrap();
    let (mut here, mut checking) = (Here::of(&guest, &split), Checking::start_in(&guest, 3, IN_USE));
    let (mut stayed, mut gone, mut carried) = (0, 0, 3 << 20);
    for turn in 1..=24u64 {
        checking.goes_on(200);
        let ((host, peer), moving) = (next(&way), Moving::new(checking));
        starts_at_once(&host, &moving);
        let relay = Relay::to(&peer, carried * turn / 24);
        let (fate, report) = run_with(here.outgoing(moving.vmm()), &relay.address, &by(Mode::Postcopy));
        if fate == Fate::There {
            gone += 1;
            carried = relay.carried();
            followed(&report, Mode::Postcopy);
            let former = std::mem::replace(&mut here, arrived(&host));
            checking = moving.runs();
            former.split.end();
            way.epochs = Counter(Arc::new(AtomicU64::new(turn * OWNERS)));
        } else {
            assert_eq!(fate, Fate::Here, "{:?}", report.error);
            stayed += 1;
            moving.starts_at(&here.mapping);
            checking = moving.runs();
        }
        here.split.keep_to(room()).unwrap();
    }
    println!("{stayed} attempts came to nothing, {gone} did not");
    assert!(gone > 0);
    here.split.merge(&|| Ok(())).unwrap();
    checking.end();
    here.split.end();
}

/// A guest of which nothing is away goes to another host, which has room for a part of it: what is left of it here, the
/// guest there, and the report.
fn goes_first(
    guest: &Guest,
    hosts: &[LendingHost],
    moving: &Moving,
    options: &MigrateOptions,
) -> (Arc<Split>, Here, Report) {
    let way = Way::of(guest, hosts);
    let split = guest.split_over(way.lenders.clone());
    let (here, (host, peer)) = (Here::of(guest, &split), next(&way));
    starts_at_once(&host, moving);
    let (fate, report) = run_with(here.outgoing(moving.vmm()), &peer, options);
    assert_eq!((fate, &report.error), (Fate::There, &None));
    (split, arrived(&host), report)
}

/// All of it was here, and its next host has room for a part.
#[test]
fn a_guest_of_which_nothing_is_away_goes_to_a_host_that_is_too_small_for_it() {
    if !tracking_works() {
        return;
    }
    let (guest, hosts) = (Guest::new(), [LendingHost::new(), LendingHost::new()]);
    let moving = Moving::new(Checking::start_in(&guest, 3, PAGES));
    let (split, there, _) = goes_first(&guest, &hosts, &moving, &by(Mode::Postcopy));
    while there.split.here_bytes().unwrap() > 3 * CHUNK_BYTES as u64 {
        std::thread::yield_now();
    }
    let checking = moving.runs();
    checking.goes_on(500);
    split.end();
    there.split.merge(&|| Ok(())).unwrap();
    checking.end();
    there.split.end();
}

/// A guest that waits for a page of its source's is not helped by its memory hosts, nor the other way round.
#[test]
fn what_is_at_memory_hosts_comes_while_the_source_is_away() {
    if !tracking_works() {
        return;
    }
    let (guest, hosts) = (Guest::new(), [LendingHost::new()]);
    let split = guest.split(&[&hosts[0]]);
    let mut out = split.way_out().unwrap();
    for chunk in 4..CHUNKS {
        out.send(ChunkIndex(chunk), 0).unwrap();
    }
    drop(out);
    // Of one chunk half is here.
    (4 * 256..4 * 256 + 128).for_each(|page| assert_eq!(guest.word(page), expected(page)));
    guest.writes(4 * 256 + 3);
    let way = Way::of(&guest, &hosts);
    let (here, (host, peer)) = (Here::of(&guest, &split), next(&way));
    host.touched.lock().unwrap().clear();
    let relay = Relay::to(&peer, u64::MAX);
    let cut = Arc::new(relay);
    let (at_start, found) = (Arc::clone(&cut), Arc::new(AtomicU64::new(0)));
    let seen = Arc::clone(&found);
    *host.at_start.lock().unwrap() = Some(Box::new(move |mapping| {
        at_start.hold();
        let look = move || {
            for page in 5 * 256..6 * 256 {
                assert_eq!(word(&mapping, page), expected(page));
                seen.fetch_add(1, Ordering::Release);
            }
        };
        std::thread::spawn(look);
    }));
    let restored = Arc::clone(&cut);
    let (looking, seen) = (Arc::clone(&host), Arc::clone(&found));
    let waits = std::thread::spawn(move || {
        while seen.load(Ordering::Acquire) < 256 {
            std::thread::yield_now();
        }
        let split = looking.split.lock().unwrap().as_ref().map(Arc::clone);
        let to_come = split.map_or(1, |split| split.pager().to_come());
        restored.restore();
        to_come
    });
    let (fate, report) = run_with(here.outgoing(SourceVmm::new(None)), &cut.address, &by(Mode::Postcopy));
    assert_eq!(fate, Fate::There, "{:?}", report.error);
    assert!(waits.join().unwrap() > 0, "pages of the source's were still to come");
    let there = arrived(&host);
    assert_eq!(there.split.pager().to_come(), 0);
    there.split.bring_back().unwrap();
    (0..PAGES).filter(|page| *page != 4 * 256 + 3).for_each(|page| {
        assert_eq!(word(&there.mapping, page), expected(page), "page {page}");
    });
    dies(split);
    there.split.end();
}

/// The pages that a guest uses of which much is too much for its next host.
const FEW: u64 = 2 * CHUNK_PAGES as u64;

/// A link slow enough that what can go past a host does.
fn slowly() -> MigrateOptions {
    MigrateOptions { mode: Mode::Postcopy, postcopy_bandwidth_bytes_per_s: Some(16 << 20), ..options() }
}

/// What was put at memory hosts is there for the guest's owner, and takes no memory here; what the guest uses comes.
#[test]
fn what_is_too_much_for_a_guests_next_host_goes_straight_to_memory_hosts() {
    if !tracking_works() {
        return;
    }
    let (guest, hosts) = (Guest::new(), [LendingHost::new(), LendingHost::new()]);
    let moving = Moving::using(Checking::start_in(&guest, 2, FEW), FEW);
    let (split, there, report) = goes_first(&guest, &hosts, &moving, &slowly());
    let pages = &report.pages;
    println!("{} pages pushed, {} asked for, {} straight", pages.pushed, pages.faulted, pages.straight);
    assert!(pages.straight >= 192, "{pages:?}");
    assert_eq!(there.split.pager().to_come(), 0);
    assert!(hosts.iter().map(LendingHost::pages).sum::<u64>() >= pages.straight);
    let checking = moving.runs();
    checking.goes_on(500);
    split.end();
    there.split.merge(&|| Ok(())).unwrap();
    checking.end();
    (FEW..PAGES).for_each(|page| assert_eq!(word(&there.mapping, page), expected(page), "page {page}"));
    there.split.end();
}

/// The link to its source, and that to one of its memory hosts, in turn.
#[test]
fn whatever_link_breaks_while_pages_go_straight_the_guest_finds_what_it_wrote() {
    if !tracking_works() {
        return;
    }
    let mut straight = 0;
    for turn in 0..8u64 {
        // One that uses all of it touches what is on its way, too.
        let in_use = if turn % 4 < 2 { FEW } else { PAGES };
        let (guest, hosts) = (Guest::new(), [LendingHost::new(), LendingHost::new()]);
        let breaks = Relay::to(&hosts[0].lender().peer, if turn % 2 == 0 { u64::MAX } else { turn * 150_000 });
        let lenders = vec![Lender { peer: breaks.address.clone(), ..hosts[0].lender() }, hosts[1].lender()];
        let way = Way::over(&guest, lenders);
        let split = guest.split_over(way.lenders.clone());
        let (here, (host, peer)) = (Here::of(&guest, &split), next(&way));
        let moving = Moving::using(Checking::start_in(&guest, 2, in_use), in_use);
        starts_at_once(&host, &moving);
        // The devices and what is asked for at once have come by then.
        let relay = Relay::to(&peer, if turn % 2 == 0 { 200_000 + turn * 250_000 } else { u64::MAX });
        let (fate, report) = run_with(here.outgoing(moving.vmm()), &relay.address, &slowly());
        if fate != Fate::There {
            println!("turn {turn}: {:?}", report.error);
            continue;
        }
        straight += report.pages.straight;
        let there = arrived(&host);
        assert_eq!(there.split.pager().to_come(), 0);
        let checking = moving.runs();
        checking.goes_on(200);
        split.end();
        there.split.merge(&|| Ok(())).unwrap();
        checking.end();
        (in_use..PAGES).for_each(|page| {
            assert_eq!(word(&there.mapping, page), expected(page), "turn {turn}, page {page}");
        });
        there.split.end();
    }
    println!("{straight} pages went straight");
    assert!(straight > 0);
}
