//! Which pages follow, and when they are used.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use sterna_api::options::{Compress, FakeDirty, OnTimeout, Prepaging};
use sterna_api::report::Status;
use sterna_api::{MigrateOptions, Mode, Report};
use sterna_engine::error::MigrateError;
use sterna_engine::memory::Memory;
use sterna_engine::monitor::Monitor;
use sterna_engine::source::track::{Cost, Tracker, Watch};
use sterna_engine::source::{Fate, migrate};
use sterna_engine::vmm::Untracked;
use sterna_protocol::pages::PageMap;

use crate::fixture::{
    MIB, PAGES, Program, SPARSE, adds_up, byte, destination, filled_ram, nothing_wrong, options, run, until,
};
use crate::pair::destination::Destination;
use crate::pair::guest::{GuestRam, Writers};
use crate::pair::inside::InsideSelf;
use crate::pair::source::{Source, SourceVmm};
use crate::pair::{outgoing, tracking_works};

#[test]
fn a_guest_whose_pages_all_follow_finds_them_right_in_every_order_of_the_push() {
    if !tracking_works() {
        return;
    }
    for (prepaging, streams, program) in [
        (Prepaging::Bubble, 1, Program::Ascending),
        (Prepaging::Bubble, 4, Program::Scattered),
        (Prepaging::Linear, 3, Program::Scattered),
        (Prepaging::Off, 1, Program::Scattered),
    ] {
        let ram = filled_ram();
        let (host, peer, seen) = destination(&ram, program);
        let vmm = SourceVmm::new(None);
        let (quit, rolled_back) = (Arc::clone(&vmm.quit), Arc::clone(&vmm.rolled_back));
        // Slow enough that faults come before the push, also where processors are busy.
        let postcopy_bandwidth_bytes_per_s = Some(8 * MIB);
        let options = MigrateOptions { prepaging, streams, postcopy_bandwidth_bytes_per_s, ..options(Mode::Postcopy) };
        let outcome = run(&ram, vmm, &peer, &options);
        nothing_wrong(&seen);
        adds_up(&outcome.report);
        assert_eq!((outcome.fate, outcome.report.mode.as_str()), (Fate::There, "postcopy"));
        assert!(quit.load(Ordering::Acquire) && !rolled_back.load(Ordering::Acquire));
        let report = &outcome.report;
        assert!(report.rounds.is_empty() && report.pages.faulted > 0, "{:?}", report.pages);
        let allocated = PAGES - PAGES / SPARSE;
        assert_eq!(report.postcopy.residue_pages, allocated);
        assert_eq!((report.pages.zero, report.pages.full), (PAGES / SPARSE, allocated - PAGES / SPARSE));
        host.assert_same(&ram);
    }
}

#[test]
fn what_the_guest_writes_until_it_stops_follows_it() {
    if !tracking_works() {
        return;
    }
    for (precopy_rounds, untracked) in [(1, Untracked::Nobody), (3, Untracked::Nobody), (2, Untracked::Reads)] {
        let ram = filled_ram();
        let (host, peer, seen) = destination(&ram, Program::Scattered);
        let writers = Writers::start(&ram, 0..PAGES / 2, Duration::ZERO);
        let options = MigrateOptions { precopy_rounds: Some(precopy_rounds), streams: 2, ..options(Mode::Hybrid) };
        let mut going = outgoing(&ram, SourceVmm::new(Some(writers)), InsideSelf::default());
        going.untracked = untracked;
        let outcome = migrate(going, &peer, &options, &Source::default(), &Monitor::new("guest"));
        nothing_wrong(&seen);
        adds_up(&outcome.report);
        assert_eq!(outcome.report.mode, "hybrid");
        assert_eq!(outcome.report.rounds.len(), precopy_rounds as usize);
        assert!(outcome.report.postcopy.residue_pages > 0);
        assert_eq!(outcome.report.postcopy.reason, None, "it was asked for");
        host.assert_same(&ram);
    }
}

#[test]
fn a_guest_with_nothing_left_to_send_is_handed_over_all_the_same() {
    if !tracking_works() {
        return;
    }
    let ram = filled_ram();
    let (host, peer, seen) = destination(&ram, Program::Ascending);
    let outcome = run(&ram, SourceVmm::new(None), &peer, &options(Mode::Hybrid));
    nothing_wrong(&seen);
    assert_eq!((outcome.report.status, outcome.report.postcopy.residue_pages), (Status::Completed, 0));
    host.assert_same(&ram);
}

/// A tracker that does something just before it collects: what the guest's threads are to have done by then, however
/// they are scheduled.
struct Before<F> {
    tracker: Box<dyn Tracker>,
    collecting: F,
}

impl<F: FnMut() + Send> Tracker for Before<F> {
    fn arm(&mut self, ram: &dyn Memory) -> Result<(), MigrateError> {
        self.tracker.arm(ram)
    }
    fn collect(
        &mut self,
        ram: &dyn Memory,
        written: &mut PageMap,
        discarded: &mut PageMap,
    ) -> Result<(), MigrateError> {
        (self.collecting)();
        self.tracker.collect(ram, written, discarded)
    }
    fn reads(&mut self, ram: &dyn Memory, into: &mut PageMap) -> Result<bool, MigrateError> {
        self.tracker.reads(ram, into)
    }
    fn watch(&self) -> Option<Arc<dyn Watch>> {
        self.tracker.watch()
    }
    fn seal(&mut self) {
        self.tracker.seal();
    }
    fn disarm(&mut self) {
        self.tracker.disarm();
    }
    fn cost(&self) -> Cost {
        self.tracker.cost()
    }
}

/// The migration of a guest that writes nearly all of its pages from one collection to the next.
fn a_restless_guest_goes(options: &MigrateOptions) -> Report {
    let ram = filled_ram();
    let (host, peer, seen) = destination(&ram, Program::Scattered);
    let writers = Writers::start(&ram, 0..PAGES, Duration::ZERO);
    let count = writers.count();
    let mut going = outgoing(&ram, SourceVmm::new(Some(writers)), InsideSelf::default());
    going.tracker = Box::new(Before { tracker: going.tracker, collecting: move || count.wait_for(4 * PAGES) });
    let outcome = migrate(going, &peer, options, &Source::default(), &Monitor::new("guest"));
    nothing_wrong(&seen);
    adds_up(&outcome.report);
    host.assert_same(&ram);
    outcome.report
}

#[test]
fn rounds_that_do_not_come_down_turn_into_post_copy() {
    if !tracking_works() {
        return;
    }
    for (mode, timeout_ms, on_timeout) in
        [(Mode::Auto, None, OnTimeout::Cancel), (Mode::Precopy, Some(1500.0), OnTimeout::Postcopy)]
    {
        let options = MigrateOptions {
            bandwidth_bytes_per_s: Some(24 * MIB),
            downtime_limit_ms: 50.0,
            timeout_ms,
            on_timeout,
            ..options(mode)
        };
        let report = a_restless_guest_goes(&options);
        assert_eq!(report.mode, "hybrid");
        let reason = report.postcopy.reason.expect("it was not asked for");
        assert!(reason.contains("a pause of 50 ms"), "{reason}");
    }
}

#[test]
fn a_guest_too_fast_for_rounds_is_known_before_rounds_have_stalled() {
    if !tracking_works() {
        return;
    }
    // All pages take two seconds: no window is as long, also where processors are busy.
    let options = MigrateOptions {
        bandwidth_bytes_per_s: Some(8 * MIB),
        fake_dirty: FakeDirty::Off,
        downtime_limit_ms: 50.0,
        ..options(Mode::Auto)
    };
    let report = a_restless_guest_goes(&options);
    assert_eq!(report.mode, "hybrid");
    // Rounds that had stalled would be another reason.
    let reason = report.postcopy.reason.expect("it was not asked for");
    assert!(reason.contains("faster than rounds"), "{reason}");
}

/// Nothing that was sent before the cut goes again before the other pages have gone, whatever the guest writes.
#[test]
fn a_first_round_that_is_cut_to_look_at_the_guest_goes_on_as_if_it_had_not_been() {
    if !tracking_works() {
        return;
    }
    let ram = full_ram();
    let (host, peer, _) = destination(&ram, Program::Ascending);
    // So few that they fit into a pause also where busy processors make the link slow.
    let writers = Writers::start(&ram, 0..8, Duration::from_millis(1));
    let outcome = run(&ram, SourceVmm::new(Some(writers)), &peer, &slow_and_looked_at());
    goes_once_before_it_goes_again(&outcome.report);
    host.assert_same(&ram);
}

/// The same where one look is not enough: a burst is taken for a guest that is too fast until the next look, which
/// finds other pages. Seen to fail, what the burst wrote going again with the rest, while only what the last look
/// found was left to the next round.
#[test]
fn a_first_round_that_is_cut_twice_goes_on_as_if_it_had_not_been() {
    if !tracking_works() {
        return;
    }
    let ram = full_ram();
    let (host, peer, _) = destination(&ram, Program::Ascending);
    let mut burst = Some(Arc::clone(&ram.mapping));
    let collecting = move || {
        if let Some(mapping) = burst.take() {
            (0..HOT).for_each(|page| mapping.copy_in(page * 4096, &[0xfe; 4096]).expect("inside the mapping"));
        }
    };
    let mut going = outgoing(&ram, SourceVmm::new(None), InsideSelf::default());
    going.tracker = Box::new(Before { tracker: going.tracker, collecting });
    let outcome = migrate(going, &peer, &slow_and_looked_at(), &Source::default(), &Monitor::new("guest"));
    goes_once_before_it_goes_again(&outcome.report);
    host.assert_same(&ram);
}

/// The pages that a burst writes. They take longer than the window in which the link is measured, by far.
const HOT: u64 = 2000;

/// Each page has a body, so what is sent can be counted whatever the guest writes.
fn full_ram() -> GuestRam {
    let ram = GuestRam::new(PAGES * 4096);
    (0..PAGES).for_each(|page| ram.write_page(page, byte(page)));
    ram
}

fn slow_and_looked_at() -> MigrateOptions {
    MigrateOptions { bandwidth_bytes_per_s: Some(8 * MIB), fake_dirty: FakeDirty::Off, ..options(Mode::Auto) }
}

fn goes_once_before_it_goes_again(report: &Report) {
    assert_eq!((report.status, report.mode.as_str()), (Status::Completed, "precopy"));
    let rounds = &report.rounds;
    let gone = |count: usize| rounds[..count].iter().map(|round| round.sent_pages).sum::<u64>();
    assert!(rounds[0].sent_pages < PAGES / 2, "it was cut: {rounds:#?}");
    let swept = (1..rounds.len()).find(|count| gone(*count) + HOT >= PAGES).expect("all went");
    assert!(gone(swept) <= PAGES, "some went twice: {:?}", (1..=rounds.len()).map(gone).collect::<Vec<_>>());
}

#[test]
fn pushed_pages_are_compressed() {
    if !tracking_works() {
        return;
    }
    for compress in [Compress::Lz4, Compress::Zstd] {
        let ram = filled_ram();
        let (host, peer, seen) = destination(&ram, Program::Scattered);
        let options = MigrateOptions { compress, streams: 2, ..options(Mode::Postcopy) };
        let outcome = run(&ram, SourceVmm::new(None), &peer, &options);
        nothing_wrong(&seen);
        adds_up(&outcome.report);
        assert!(outcome.report.encoding.compression.pages > 0, "{:?}", outcome.report.encoding);
        host.assert_same(&ram);
    }
}

#[test]
fn a_destination_that_cannot_is_told_by_its_reason() {
    if !tracking_works() {
        return;
    }
    let ram = filled_ram();
    let (host, peer) = Destination::serve();
    let outcome = run(&ram, SourceVmm::new(None), &peer, &options(Mode::Auto));
    assert_eq!((outcome.report.status, outcome.report.mode.as_str()), (Status::Completed, "precopy"));
    assert!(outcome.report.postcopy.reason.unwrap().contains("this host cannot"));
    host.assert_same(&ram);
    let vmm = SourceVmm::new(None);
    let quit = Arc::clone(&vmm.quit);
    let outcome = run(&ram, vmm, &peer, &options(Mode::Postcopy));
    assert_eq!((outcome.fate, outcome.report.error.unwrap().code.as_str()), (Fate::Here, "no-postcopy"));
    assert!(!quit.load(Ordering::Acquire));
    until("the destination forgets it", || host.aborted.load(Ordering::Acquire));
}

#[test]
fn what_went_wrong_at_the_destination_is_still_learned_where_pages_might_have_followed() {
    if !tracking_works() {
        return;
    }
    let ram = filled_ram();
    let (host, peer, _) = destination(&ram, Program::Ascending);
    host.room_bytes.store(1, Ordering::Release);
    let outcome = run(&ram, SourceVmm::new(None), &peer, &options(Mode::Auto));
    assert_eq!((outcome.fate, outcome.report.error.unwrap().code.as_str()), (Fate::Here, "out-of-memory"));
}

/// A VMM on a busy host, whose guest has stopped when the VMM is not yet seen to have stopped it: what is sent until
/// the next look is sent in the pause. Seen to fail, nothing following, while that was a whole round.
#[test]
fn pages_that_go_until_a_guest_is_known_to_have_stopped_are_few_however_many_are_left() {
    if !tracking_works() {
        return;
    }
    let ram = Arc::new(filled_ram());
    let (host, peer) = Destination::serve();
    host.postcopy.store(true, Ordering::Release);
    let mut vmm = SourceVmm::new(None);
    vmm.faults.stop_is_told_late = true;
    let rewritten = Arc::clone(&ram);
    vmm.faults.at_stop = Some(Box::new(move || (0..PAGES / 2).for_each(|page| rewritten.write_page(page, 0xfe))));
    let bandwidth_bytes_per_s = Some(8 * MIB);
    let options = MigrateOptions { bandwidth_bytes_per_s, streams: 1, ..options(Mode::Hybrid) };
    let report = run(&ram, vmm, &peer, &options).report;
    assert_eq!((report.status, &report.error), (Status::Completed, &None));
    let residue = report.postcopy.residue_pages;
    assert!((PAGES / 4..=PAGES / 2).contains(&residue), "{residue} pages: {:?}", report.rounds);
    host.assert_same(&ram);
}
