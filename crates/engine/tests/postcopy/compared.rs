//! Comparisons that go on while the guest runs, where every page came before its start.

use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use sterna_api::problem::Whereabouts;
use sterna_api::report::Status;
use sterna_api::{Mode, Report};
use sterna_engine::source::Fate;
use sterna_protocol::hello::Features;

use crate::fixture::{PAGES, PATIENCE, filled_ram, options, run};
use crate::pair::destination::Destination;
use crate::pair::guest::{GuestRam, Writers};
use crate::pair::source::SourceVmm;
use crate::pair::tracking_works;
use crate::relay::Relay;

/// The modes in which no page follows the guest over a fast link.
const WHOLE: [Mode; 3] = [Mode::Precopy, Mode::StopAndCopy, Mode::Auto];

/// A guest that from its first moment on overwrites its pages, each as soon as it has looked at it. It says which of
/// them it found wrong.
fn overwrites(host: &Destination, ram: &GuestRam) -> Receiver<Vec<u64>> {
    let (say, seen) = mpsc::channel();
    let here = Arc::clone(&ram.mapping);
    *host.at_start.lock().unwrap() = Some(Box::new(move |there| {
        std::thread::spawn(move || {
            let (mut wrong, mut ours, mut theirs) = (Vec::new(), [0; 4096], [0; 4096]);
            for page in (0..PAGES).map(|step| step * 1237 % PAGES) {
                there.copy_out(page * 4096..(page + 1) * 4096, &mut theirs);
                here.copy_out(page * 4096..(page + 1) * 4096, &mut ours);
                if ours != theirs {
                    wrong.push(page);
                }
                there.copy_in(page * 4096, &[0xfe; 4096]).unwrap();
            }
            let _ = say.send(wrong);
        });
    }));
    seen
}

/// Compared, outside the pause.
fn compared(report: &Report) {
    assert_eq!((report.status, &report.error), (Status::Completed, &None));
    let verify = &report.verify;
    assert_eq!((verify.checked, verify.mismatches, verify.pages), (true, 0, PAGES), "{verify:?}");
    assert_eq!((report.downtime.verify_ms, &verify.reason), (0.0, &None));
    assert!(verify.ms > 0.0, "{verify:?}");
}

#[test]
fn a_guest_that_overwrites_its_pages_from_its_first_moment_on_is_compared_as_it_was_when_it_stopped() {
    if !tracking_works() {
        return;
    }
    for mode in WHOLE {
        let ram = filled_ram();
        let (host, peer) = Destination::serve();
        host.postcopy.store(true, Ordering::Release);
        let seen = overwrites(&host, &ram);
        let writers = Writers::start(&ram, 0..PAGES, Duration::from_micros(200));
        let outcome = run(&ram, SourceVmm::new(Some(writers)), &peer, &options(mode));
        assert_eq!(outcome.report.postcopy.residue_pages, 0, "{mode:?}: no page follows over so fast a link");
        compared(&outcome.report);
        let wrong = seen.recv_timeout(PATIENCE).expect("the guest went through its pages");
        assert!(wrong.is_empty(), "{mode:?}: {wrong:?}");
        let there = host.ram.lock().unwrap().as_ref().unwrap().try_clone().unwrap();
        let mut found = [0; 4096];
        for page in 0..PAGES {
            there.read_exact_at(&mut found, page * 4096).unwrap();
            assert!(found == [0xfe; 4096], "{mode:?}: what the guest wrote is lost, page {page}");
        }
    }
}

#[test]
fn a_page_that_came_otherwise_is_found_while_the_guest_runs_and_said_to_be_there() {
    if !tracking_works() {
        return;
    }
    // One that has a body, and one that is a hole.
    for (mode, page) in [(Mode::Precopy, 77), (Mode::StopAndCopy, 77), (Mode::Precopy, 5)] {
        let ram = filled_ram();
        let (host, peer) = Destination::serve();
        host.postcopy.store(true, Ordering::Release);
        let at = Arc::clone(&host);
        *host.at_start.lock().unwrap() = Some(Box::new(move |_| {
            let file = at.ram.lock().unwrap().as_ref().unwrap().try_clone().unwrap();
            file.write_all_at(&[9], page * 4096 + 123).unwrap();
        }));
        let outcome = run(&ram, SourceVmm::new(None), &peer, &options(mode));
        let report = &outcome.report;
        assert_eq!((report.status, outcome.fate, report.verify.mismatches), (Status::Failed, Fate::There, 1));
        let problem = report.error.as_ref().expect("a page differs");
        assert_eq!((problem.code.as_str(), problem.guest), ("verify-mismatch", Whereabouts::Destination));
        assert!(host.running.load(Ordering::Acquire));
    }
}

#[test]
fn a_destination_that_cannot_note_pages_or_does_not_know_how_is_compared_with_in_the_pause() {
    if !tracking_works() {
        return;
    }
    for (can, knows, why) in [(false, true, "this host cannot"), (true, false, "too old")] {
        for mode in WHOLE {
            let ram = filled_ram();
            let (host, peer) = Destination::serve();
            host.postcopy.store(can, Ordering::Release);
            let unknown = if knows { Features::NONE } else { Features::VERIFY_AFTER };
            let relay = Relay::without(&peer, unknown);
            let outcome = run(&ram, SourceVmm::new(None), &relay.address, &options(mode));
            let report = &outcome.report;
            assert_eq!((report.status, report.verify.checked), (Status::Completed, true), "{:?}", report.error);
            assert!(report.downtime.verify_ms > 0.0, "{:?}", report.downtime);
            let reason = report.verify.reason.as_deref().expect("why the guest stood still for it");
            assert!(reason.contains(why), "{reason}");
            host.assert_same(&ram);
        }
    }
}

#[test]
fn a_link_that_is_lost_before_the_comparison_costs_nothing_but_the_comparison() {
    if !tracking_works() {
        return;
    }
    let ram = filled_ram();
    let (host, peer) = Destination::serve();
    host.postcopy.store(true, Ordering::Release);
    let relay = Arc::new(Relay::to(&peer, u64::MAX));
    let (cutting, cut) = (Arc::clone(&relay), Arc::new(AtomicBool::new(false)));
    let was_cut = Arc::clone(&cut);
    *host.at_start.lock().unwrap() = Some(Box::new(move |_| {
        cutting.cut();
        cutting.restore();
        was_cut.store(true, Ordering::Release);
    }));
    let outcome = run(&ram, SourceVmm::new(None), &relay.address, &options(Mode::Precopy));
    let report = &outcome.report;
    assert!(cut.load(Ordering::Acquire));
    assert_eq!((report.status, outcome.fate), (Status::Completed, Fate::There), "{:?}", report.error);
    assert!(!report.verify.checked && report.verify.reason.is_some(), "{:?}", report.verify);
    // Its guest waits for nothing.
    host.assert_same(&ram);
}
