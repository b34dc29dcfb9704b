//! Guests that arrive whole, and what is counted on the way.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use sterna_api::report::Status;
use sterna_api::{MigrateOptions, Mode};
use sterna_engine::source::Fate;

use crate::fixture::{MIB, run, verified};
use crate::pair::destination::Destination;
use crate::pair::guest::{GuestRam, Writers};
use crate::pair::inside::InsideSelf;
use crate::pair::source::SourceVmm;
use crate::pair::{outgoing, tracking_works};

#[test]
fn a_guest_that_keeps_writing_arrives_whole() {
    if !tracking_works() {
        return;
    }
    for streams in [1, 2, 4] {
        let (host, peer) = Destination::serve();
        let ram = GuestRam::new(64 * MIB + 4096);
        (0..9000).for_each(|page| ram.write_page(page, page as u8));
        let writers = Writers::start(&ram, 0..12_000, Duration::ZERO);
        let outcome =
            run(outgoing(&ram, SourceVmm::new(Some(writers)), InsideSelf::default()), &peer, &verified(streams));
        assert_eq!(outcome.report.status, Status::Completed, "{:?}", outcome.report.error);
        assert_eq!(outcome.fate, Fate::There);
        assert!(host.running.load(Ordering::Acquire));
        assert!(outcome.report.rounds.len() > 1, "the writers left nothing to do");
        assert_eq!((outcome.report.verify.checked, outcome.report.verify.mismatches), (true, 0));
        host.assert_same(&ram);
    }
}

#[test]
fn stop_and_copy_moves_everything_in_the_pause() {
    if !tracking_works() {
        return;
    }
    let (host, peer) = Destination::serve();
    let ram = GuestRam::new(8 * MIB);
    (0..500).for_each(|page| ram.write_page(page, 1));
    let options = MigrateOptions { mode: Mode::StopAndCopy, ..verified(2) };
    let outcome = run(outgoing(&ram, SourceVmm::new(None), InsideSelf::default()), &peer, &options);
    assert_eq!(outcome.report.status, Status::Completed, "{:?}", outcome.report.error);
    assert_eq!(outcome.report.mode, "stop-and-copy");
    assert_eq!(outcome.report.pages.full, 500);
    host.assert_same(&ram);
}

#[test]
fn every_page_is_counted_once_and_holes_and_zeros_cost_nothing() {
    if !tracking_works() {
        return;
    }
    let (host, peer) = Destination::serve();
    let ram = GuestRam::new(16 * MIB);
    (0..100).for_each(|page| ram.write_page(page, 9));
    (100..300).for_each(|page| ram.write_page(page, 0));
    let outcome = run(outgoing(&ram, SourceVmm::new(None), InsideSelf::default()), &peer, &verified(1));
    let pages = &outcome.report.pages;
    assert_eq!((pages.full, pages.zero, pages.unallocated), (100, 200, 4096 - 300));
    assert!(outcome.report.bytes_on_wire < 100 * 4096 * 102 / 100);
    let round = &outcome.report.rounds[0];
    assert_eq!(round.dirty_pages, round.sent_pages + round.skipped_pages);
    host.assert_same(&ram);
}

#[test]
fn a_page_that_becomes_zero_is_zero_at_the_destination() {
    if !tracking_works() {
        return;
    }
    let (host, peer) = Destination::serve();
    let ram = Arc::new(GuestRam::new(8 * MIB));
    (0..2000).for_each(|page| ram.write_page(page, 5));
    let mut vmm = SourceVmm::new(None);
    let clearing = Arc::clone(&ram);
    vmm.faults.at_stop = Some(Box::new(move || (10..20).for_each(|page| clearing.write_page(page, 0))));
    let outcome = run(outgoing(&ram, vmm, InsideSelf::default()), &peer, &verified(2));
    assert_eq!(outcome.report.status, Status::Completed, "{:?}", outcome.report.error);
    host.assert_same(&ram);
}

#[test]
fn a_hole_that_is_filled_after_arming_is_sent() {
    if !tracking_works() {
        return;
    }
    let (host, peer) = Destination::serve();
    let ram = Arc::new(GuestRam::new(8 * MIB));
    ram.write_page(0, 1);
    let mut vmm = SourceVmm::new(None);
    let filling = Arc::clone(&ram);
    vmm.faults.at_stop = Some(Box::new(move || filling.write_page(1999, 3)));
    let outcome = run(outgoing(&ram, vmm, InsideSelf::default()), &peer, &MigrateOptions::default());
    assert_eq!(outcome.report.pages.full, 2);
    host.assert_same(&ram);
}

#[test]
fn the_bandwidth_limit_holds_over_all_streams() {
    if !tracking_works() {
        return;
    }
    let (_host, peer) = Destination::serve();
    let ram = GuestRam::new(32 * MIB);
    (0..8192).for_each(|page| ram.write_page(page, 5));
    let options = MigrateOptions { bandwidth_bytes_per_s: Some(32_000_000), streams: 4, ..MigrateOptions::default() };
    let outcome = run(outgoing(&ram, SourceVmm::new(None), InsideSelf::default()), &peer, &options);
    let rate = outcome.report.bytes_on_wire as f64 / outcome.report.rounds[0].ms * 1e3;
    assert!(rate < 35e6, "{rate} bytes/s");
}
