//! Both sides of a split guest that moves are compared as they were when it stopped, while it writes at its next host
//! and its pages leave and come back.

use sterna_api::MigrateOptions;
use sterna_api::problem::Whereabouts;
use sterna_api::report::{Report, Status};
use sterna_engine::source::Fate;

use super::onward::{Here, IN_USE, Moving, OWNERS, Way, arrived, next, options, pages_go_and_come, room, run_with};
use super::pair::source::SourceVmm;
use super::*;

fn verified() -> MigrateOptions {
    MigrateOptions { verify: true, ..options() }
}

/// Compared outside the pause, and no page differs.
fn is_compared(report: &Report) {
    assert_eq!((report.status, &report.error), (Status::Completed, &None));
    let verify = &report.verify;
    assert_eq!((verify.checked, verify.mismatches, &verify.reason), (true, 0, &None), "{verify:?}");
    assert_eq!((verify.pages + verify.away_pages, report.downtime.verify_ms), (PAGES, 0.0), "{verify:?}");
    assert!(verify.away_pages > 0 && verify.pages > 0, "{verify:?}");
}

/// All but its first three chunks.
fn most_leaves(split: &Split) {
    let mut way = split.way_out().unwrap();
    for chunk in 3..CHUNKS {
        way.send(ChunkIndex(chunk), 0).unwrap();
    }
}

#[test]
fn a_guest_is_compared_while_it_writes_and_its_pages_leave_and_come() {
    if !tracking_works() {
        return;
    }
    let (guest, lending) = (Guest::new(), [LendingHost::new(), LendingHost::new()]);
    let split = guest.split(&[&lending[0], &lending[1]]);
    split.keep_to(room()).unwrap();
    let (mut here, mut checking) = (Here::of(&guest, &split), Checking::start_in(&guest, 3, IN_USE));
    let mut way = Way::of(&guest, &lending);
    for turn in 1..=4 {
        pages_go_and_come(&here.split, &checking);
        let ((host, peer), moving) = (next(&way), Moving::new(checking));
        // It runs, and many of its pages have left and come back, when the source asks for the first digest.
        let (starting, running) = (moving.clone(), moving.clone());
        *host.at_start.lock().unwrap() = Some(Box::new(move |mapping| starting.starts_at(&mapping)));
        *host.with_split.lock().unwrap() = Some(Box::new(move |split| {
            split.keep_to(room()).unwrap();
            running.while_it_runs(|checking| {
                while split.account().out_pages < 300 || split.account().in_pages < 300 {
                    checking.goes_on(20);
                }
            });
        }));
        let (fate, report) = run_with(here.outgoing(moving.vmm()), &peer, &verified());
        assert_eq!(fate, Fate::There);
        is_compared(&report);
        println!("turn {turn}: {:?}", report.verify);
        let former = std::mem::replace(&mut here, arrived(&host));
        checking = moving.runs();
        former.split.end();
        way.epochs = Counter(Arc::new(AtomicU64::new(turn * OWNERS)));
    }
    here.split.merge(&|| Ok(())).unwrap();
    checking.end();
    here.split.end();
}

#[test]
fn to_compare_brings_no_page_and_gives_memory_to_none() {
    if !tracking_works() {
        return;
    }
    let (guest, lending) = (Guest::new(), [LendingHost::new()]);
    let split = guest.split(&[&lending[0]]);
    send_all(&split, 0);
    // Two chunks are here again, and one of them is written.
    (0..2 * CHUNK_PAGES as u64).for_each(|page| assert_eq!(guest.word(page), expected(page)));
    (0..CHUNK_PAGES as u64).for_each(|page| guest.writes(page));
    let way = Way::of(&guest, &lending);
    let (here, (host, peer)) = (Here::of(&guest, &split), next(&way));
    host.touched.lock().unwrap().clear();
    let (before, away) = (guest.pages_here(&split), split.pager().missing());
    let (fate, report) = run_with(here.outgoing(SourceVmm::new(None)), &peer, &verified());
    assert_eq!(fate, Fate::There);
    is_compared(&report);
    println!("{:?}", report.verify);
    assert_eq!((guest.pages_here(&split), split.pager().missing()), (before, away));
    let there = arrived(&host);
    let pager = there.split.pager();
    assert_eq!((pager.missing(), there.split.account().in_pages), (report.verify.away_pages, 0));
    assert_eq!(pager.ram().allocated().unwrap().len(), report.pages.full, "nothing but what travelled");
    there.split.bring_back().unwrap();
    dies(split);
    there.split.end();
}

#[test]
fn a_page_that_is_damaged_on_the_way_is_found_while_the_guest_runs_there_and_goes_on() {
    if !tracking_works() {
        return;
    }
    // One that has content, and one that was never touched.
    for damaged in [77, 201] {
        let (guest, lending) = (Guest::new(), [LendingHost::new()]);
        let split = guest.split(&[&lending[0]]);
        most_leaves(&split);
        let way = Way::of(&guest, &lending);
        let (here, (host, peer)) = (Here::of(&guest, &split), next(&way));
        let at = Arc::clone(&host);
        *host.at_start.lock().unwrap() = Some(Box::new(move |_| {
            let file = at.ram.lock().unwrap().as_ref().unwrap().try_clone().unwrap();
            file.write_all_at(&[9], damaged * 4096 + 123).unwrap();
        }));
        let (fate, report) = run_with(here.outgoing(SourceVmm::new(None)), &peer, &verified());
        assert_eq!((report.status, fate, report.verify.mismatches), (Status::Failed, Fate::There, 1));
        let problem = report.error.as_ref().expect("a page differs");
        assert_eq!((problem.code.as_str(), problem.guest), ("verify-mismatch", Whereabouts::Destination));
        let there = arrived(&host);
        assert!(there.split.pager().missing() > 0);
        // The source has said so and gone; the destination hears it.
        while there.split.pager().digester().is_some() {
            std::thread::yield_now();
        }
        there.is_whole();
        dies(split);
        there.split.end();
    }
}

/// Nobody notes what the guest sees once all of it is there, and the source may not have asked by then.
#[test]
fn a_guest_that_comes_together_at_once_is_compared_as_it_came() {
    if !tracking_works() {
        return;
    }
    let (guest, lending) = (Guest::new(), [LendingHost::new()]);
    let split = guest.split(&[&lending[0]]);
    most_leaves(&split);
    let checking = Checking::start_in(&guest, 2, IN_USE);
    let way = Way::of(&guest, &lending);
    let (here, (host, peer), moving) = (Here::of(&guest, &split), next(&way), Moving::new(checking));
    let (starting, running) = (moving.clone(), moving.clone());
    *host.at_start.lock().unwrap() = Some(Box::new(move |mapping| starting.starts_at(&mapping)));
    *host.with_split.lock().unwrap() = Some(Box::new(move |split| {
        split.merge(&|| Ok(())).unwrap();
        split.end();
        running.while_it_runs(|checking| checking.goes_on(20 * PAGES));
    }));
    let (fate, report) = run_with(here.outgoing(moving.vmm()), &peer, &verified());
    assert_eq!(fate, Fate::There);
    is_compared(&report);
    assert_eq!(arrived(&host).split.pager().missing(), 0);
    moving.runs().end();
    dies(split);
}
