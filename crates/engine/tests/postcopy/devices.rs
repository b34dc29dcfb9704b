//! Pages and the devices' state at the same time.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use sterna_api::Mode;
use sterna_api::report::Status;
use sterna_engine::source::Fate;

use crate::fixture::{PAGES, Program, adds_up, destination, filled_ram, nothing_wrong, options, run, until};
use crate::pair::destination::Destination;
use crate::pair::guest::GuestRam;
use crate::pair::source::SourceVmm;
use crate::pair::tracking_works;

#[test]
fn loading_the_devices_may_want_pages_that_have_not_come() {
    if !tracking_works() {
        return;
    }
    let ram = filled_ram();
    let (host, peer, seen) = destination(&ram, Program::Ascending);
    *host.touched.lock().unwrap() = vec![0, 1, 3, 5, 1000, PAGES - 1];
    let outcome = run(&ram, SourceVmm::new(None), &peer, &options(Mode::Postcopy));
    nothing_wrong(&seen);
    adds_up(&outcome.report);
    // Those of them that were not holes, and did not come as another's neighbour.
    assert!(outcome.report.pages.faulted >= 3, "{:?}", outcome.report.pages);
    host.assert_same(&ram);
}

/// A VMM that writes pages while it saves its devices, when the destination has begun to load them.
fn writes_while_saving(ram: &GuestRam, host: &Arc<Destination>, pages: std::ops::Range<u64>) -> SourceVmm {
    writes(ram, host, pages, |_, _| [0xee; 4096])
}

/// The same, with what `content` makes of the page's number and of what it holds.
fn writes(
    ram: &GuestRam,
    host: &Arc<Destination>,
    pages: std::ops::Range<u64>,
    content: fn(u64, [u8; 4096]) -> [u8; 4096],
) -> SourceVmm {
    let (mapping, host) = (Arc::clone(&ram.mapping), Arc::clone(host));
    let mut vmm = SourceVmm::new(None);
    vmm.faults.while_saving = Some(Box::new(move || {
        until("the destination knows what is missing", || {
            let length = |file: &std::fs::File| file.metadata().expect("a file").len();
            host.missing.lock().unwrap().as_ref().is_some_and(|file| length(file) > 0)
        });
        for page in pages {
            let mut before = [0; 4096];
            mapping.copy_out(page * 4096..(page + 1) * 4096, &mut before);
            mapping.copy_in(page * 4096, &content(page, before)).expect("inside the mapping");
        }
    }));
    vmm
}

#[test]
fn pages_written_while_the_devices_are_saved_go_as_they_are_then() {
    if !tracking_works() {
        return;
    }
    let ram = filled_ram();
    let (host, peer, seen) = destination(&ram, Program::Ascending);
    let vmm = writes_while_saving(&ram, &host, 102..105);
    let outcome = run(&ram, vmm, &peer, &options(Mode::Postcopy));
    nothing_wrong(&seen);
    adds_up(&outcome.report);
    host.assert_same(&ram);
}

#[test]
fn a_page_written_while_the_devices_are_saved_that_the_destination_may_have_seen_leaves_the_guest_where_it_was() {
    if !tracking_works() {
        return;
    }
    let ram = filled_ram();
    let (host, peer, seen) = destination(&ram, Program::Ascending);
    let vmm = writes_while_saving(&ram, &host, 100..103);
    let rolled_back = Arc::clone(&vmm.rolled_back);
    // A round has sent all of them.
    let outcome = run(&ram, vmm, &peer, &options(Mode::Hybrid));
    assert_eq!((outcome.fate, outcome.report.status), (Fate::Here, Status::Failed));
    assert_eq!(outcome.report.error.unwrap().code, "written-while-saving");
    assert!(rolled_back.load(Ordering::Acquire));
    assert!(seen.try_recv().is_err(), "it ran there");
    let outcome = run(&ram, SourceVmm::new(None), &peer, &options(Mode::Hybrid));
    nothing_wrong(&seen);
    adds_up(&outcome.report);
    host.assert_same(&ram);
}

/// As KSM makes pages look that it merges in the pause.
#[test]
fn pages_that_look_written_in_the_pause_and_have_the_content_that_a_round_sent_keep_nobody_here() {
    if !tracking_works() {
        return;
    }
    let ram = filled_ram();
    let (host, peer, seen) = destination(&ram, Program::Ascending);
    let vmm = writes(&ram, &host, 100..103, |_, before| before);
    let outcome = run(&ram, vmm, &peer, &options(Mode::Hybrid));
    nothing_wrong(&seen);
    adds_up(&outcome.report);
    host.assert_same(&ram);
}

#[test]
fn state_that_is_refused_after_pages_were_served_leaves_the_guest_where_it_was() {
    if !tracking_works() {
        return;
    }
    let ram = filled_ram();
    let (host, peer, _) = destination(&ram, Program::Ascending);
    *host.touched.lock().unwrap() = vec![7, 2000];
    host.refuse_state.store(true, Ordering::Release);
    let vmm = SourceVmm::new(None);
    let rolled_back = Arc::clone(&vmm.rolled_back);
    let outcome = run(&ram, vmm, &peer, &options(Mode::Postcopy));
    assert_eq!((outcome.fate, outcome.report.status), (Fate::Here, Status::Failed));
    assert!(rolled_back.load(Ordering::Acquire));
    // And a second attempt succeeds.
    host.refuse_state.store(false, Ordering::Release);
    let outcome = run(&ram, SourceVmm::new(None), &peer, &options(Mode::Postcopy));
    adds_up(&outcome.report);
    host.assert_same(&ram);
}
