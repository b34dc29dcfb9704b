//! Guests that run at the destination before all their pages are there: with real faults, over links that break.

#[path = "support/pair.rs"]
#[allow(dead_code, reason = "each test program uses its own part")]
mod pair;

#[path = "support/relay.rs"]
#[allow(dead_code, reason = "each test program uses its own part")]
mod relay;

use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use pair::{Destination, GuestRam, InsideSelf, Source, SourceVmm, Writers, outgoing, tracking_works};
use relay::Relay;
use sterna_api::options::{Compress, OnTimeout, Prepaging};
use sterna_api::problem::Whereabouts;
use sterna_api::report::Status;
use sterna_api::{MigrateOptions, Mode, Phase, Report};
use sterna_engine::agent::Discard;
use sterna_engine::host::{DaemonId, SourceHost};
use sterna_engine::monitor::Monitor;
use sterna_engine::source::{self, Fate, Left, Outcome, migrate};
use sterna_sys::map::{Access, SharedMapping};

/// Ends a hopeless wait, and nothing else: no result depends on it.
const PATIENCE: Duration = Duration::from_secs(300);
const MIB: u64 = 1 << 20;
const PAGES: u64 = 4096;
/// Every so many pages is one of zeros, and one that was never touched.
const SPARSE: u64 = 16;

fn byte(page: u64) -> u8 {
    (page % 251) as u8 + 1
}

/// Full but for a page of zeros and a hole here and there.
fn filled_ram() -> GuestRam {
    let ram = GuestRam::new(PAGES * 4096);
    for page in 0..PAGES {
        match page % SPARSE {
            3 => ram.write_page(page, 0),
            5 => {}
            _ => ram.write_page(page, byte(page)),
        }
    }
    ram
}

fn options(mode: Mode) -> MigrateOptions {
    MigrateOptions { mode, verify: true, ..MigrateOptions::default() }
}

/// A destination that can, whose guest looks at every page of its RAM, in an order of its own, and says what it found
/// wrong.
fn destination(ram: &GuestRam, program: Program) -> (Arc<Destination>, String, Receiver<Vec<u64>>) {
    let (host, peer) = Destination::serve();
    host.postcopy.store(true, Ordering::Release);
    let seen = reader(&host, ram, program);
    (host, peer, seen)
}

#[derive(Clone, Copy)]
enum Program {
    Ascending,
    Scattered,
}

fn reader(host: &Destination, ram: &GuestRam, program: Program) -> Receiver<Vec<u64>> {
    let (say, seen) = mpsc::channel();
    let here = Arc::clone(&ram.mapping);
    *host.guest.lock().unwrap() = Some(Box::new(move |there| {
        let mut wrong = Vec::new();
        let (mut ours, mut theirs) = ([0; 4096], [0; 4096]);
        for step in 0..PAGES {
            let page = match program {
                Program::Ascending => step,
                Program::Scattered => step * 1237 % PAGES,
            };
            there.copy_out(page * 4096..(page + 1) * 4096, &mut theirs);
            here.copy_out(page * 4096..(page + 1) * 4096, &mut ours);
            if ours != theirs {
                wrong.push(page);
            }
        }
        let _ = say.send(wrong);
    }));
    seen
}

fn run(ram: &GuestRam, vmm: SourceVmm, peer: &str, options: &MigrateOptions) -> Outcome {
    run_with(ram, vmm, peer, options, &Source::default(), &Monitor::new("guest"))
}

fn run_with(
    ram: &GuestRam,
    vmm: SourceVmm,
    peer: &str,
    options: &MigrateOptions,
    host: &dyn SourceHost,
    monitor: &Monitor,
) -> Outcome {
    migrate(outgoing(ram, vmm, InsideSelf::default()), peer, options, host, monitor)
}

fn nothing_wrong(seen: &Receiver<Vec<u64>>) {
    let wrong = seen.recv_timeout(PATIENCE).expect("the guest looked at all its pages");
    assert!(wrong.is_empty(), "{} pages are wrong: {wrong:?}", wrong.len());
}

/// Over a link that did not break: each page went once, and what the report says of them fits.
fn adds_up(report: &Report) {
    assert_eq!(report.status, Status::Completed, "{:?}", report.error);
    let pages = &report.pages;
    assert_eq!(pages.faulted + pages.pushed, report.postcopy.residue_pages, "{pages:?}");
    assert_eq!((pages.duplicate, report.postcopy.interruptions), (0, 0));
    assert_eq!(pages.sent, pages.full + pages.delta);
    assert!(report.faults.count >= pages.faulted, "{:?}, {pages:?}", report.faults);
    assert!(report.postcopy.residue_bytes > 0 && report.postcopy.ms > 0.0, "{:?}", report.postcopy);
    assert!(report.total_ms >= report.postcopy.ms && report.resume_ms > 0.0, "{report:?}");
    assert_eq!((report.verify.mismatches, report.verify.checked), (0, report.options.verify));
}

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
    for (precopy_rounds, direct_io) in [(1, false), (3, false), (2, true)] {
        let ram = filled_ram();
        let (host, peer, seen) = destination(&ram, Program::Scattered);
        let writers = Writers::start(&ram, 0..PAGES / 2, Duration::ZERO);
        let options = MigrateOptions { precopy_rounds: Some(precopy_rounds), streams: 2, ..options(Mode::Hybrid) };
        let mut going = outgoing(&ram, SourceVmm::new(Some(writers)), InsideSelf::default());
        going.direct_io = direct_io;
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

/// The guest gives back every other page as soon as it runs, and takes a part of them again.
fn gives_back(host: &Arc<Destination>, overflows: bool) -> Receiver<Vec<u64>> {
    let at = Arc::clone(host);
    *host.at_start.lock().unwrap() = Some(Box::new(move |there| {
        at.overflow.store(overflows, Ordering::Release);
        let file = at.ram.lock().unwrap().as_ref().unwrap().try_clone().unwrap();
        let about = file.metadata().unwrap();
        for page in (0..PAGES).step_by(2) {
            let range = page * 4096..(page + 1) * 4096;
            sterna_sys::file::punch(&file, range.clone()).unwrap();
            there.dont_need(range.clone()).unwrap();
            let discard = Discard { device: about.dev(), inode: about.ino(), offset: range.start, length: 4096 };
            at.discards.lock().unwrap().push(discard);
        }
    }));
    let (say, seen) = mpsc::channel();
    *host.guest.lock().unwrap() = Some(Box::new(move |there| {
        let (mut wrong, mut found) = (Vec::new(), [0; 16]);
        for page in (0..PAGES).step_by(4) {
            there.copy_out(page * 4096..page * 4096 + 16, &mut found);
            if found != [0; 16] && found != [byte(page); 16] {
                wrong.push(page);
            }
            there.copy_in(page * 4096, &[0xfe; 16]).unwrap();
        }
        let _ = say.send(wrong);
    }));
    seen
}

#[test]
fn pages_that_the_guest_gives_back_on_arrival_are_left_out_of_the_comparison_and_no_others() {
    if !tracking_works() {
        return;
    }
    for (mode, overflows) in [(Mode::Hybrid, false), (Mode::Postcopy, false), (Mode::Hybrid, true)] {
        let ram = filled_ram();
        let (host, peer) = Destination::serve();
        host.postcopy.store(true, Ordering::Release);
        let seen = gives_back(&host, overflows);
        let options = MigrateOptions { postcopy_bandwidth_bytes_per_s: Some(16 * MIB), ..options(mode) };
        // Some pages follow, whatever the mode.
        let writers = Writers::start(&ram, PAGES / 2..PAGES, Duration::ZERO);
        let outcome = run(&ram, SourceVmm::new(Some(writers)), &peer, &options);
        let report = &outcome.report;
        assert_eq!((report.status, &report.error), (Status::Completed, &None), "{mode:?}");
        let verify = &report.verify;
        println!("{mode:?}: {verify:?}, {:?}", report.postcopy);
        assert!(verify.checked && verify.mismatches == 0, "{verify:?}");
        assert!((PAGES / 4..=PAGES / 2).contains(&verify.excluded_free_pages), "{verify:?}");
        assert_eq!(verify.pages + verify.excluded_free_pages, PAGES);
        let wrong = seen.recv_timeout(PATIENCE).expect("the guest went through its pages");
        assert!(wrong.iter().all(|page| *page >= PAGES / 2), "{wrong:?}");
        let mut found = [0; 16];
        let guard = host.ram.lock().unwrap();
        let there = SharedMapping::new(guard.as_ref().unwrap(), ram.bytes, Access::Read).unwrap();
        for page in (0..PAGES).step_by(4) {
            there.copy_out(page * 4096..page * 4096 + 16, &mut found);
            assert_eq!(found, [0xfe; 16], "what the guest wrote anew, page {page}");
        }
    }
}

#[test]
fn zeros_that_the_guest_did_not_make_are_found_by_the_comparison() {
    if !tracking_works() {
        return;
    }
    let ram = filled_ram();
    let (host, peer) = Destination::serve();
    host.postcopy.store(true, Ordering::Release);
    // A page vanishes, and no log says that the guest gave it back.
    let lost = Arc::clone(&host);
    *host.at_start.lock().unwrap() = Some(Box::new(move |_| {
        let file = lost.ram.lock().unwrap().as_ref().unwrap().try_clone().unwrap();
        sterna_sys::file::punch(&file, (PAGES - 2) * 4096..(PAGES - 1) * 4096).unwrap();
    }));
    let outcome = run(&ram, SourceVmm::new(None), &peer, &options(Mode::Hybrid));
    let verify = &outcome.report.verify;
    assert_eq!((verify.mismatches, verify.excluded_free_pages), (1, 0), "{verify:?}");
    let problem = outcome.report.error.expect("a page is lost");
    assert_eq!((problem.code.as_str(), problem.guest), ("verify-mismatch", Whereabouts::Destination));
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

#[test]
fn rounds_that_do_not_come_down_turn_into_post_copy() {
    if !tracking_works() {
        return;
    }
    for (mode, timeout_ms, on_timeout) in
        [(Mode::Auto, None, OnTimeout::Cancel), (Mode::Precopy, Some(1500.0), OnTimeout::Postcopy)]
    {
        let ram = filled_ram();
        let (host, peer, seen) = destination(&ram, Program::Scattered);
        let writers = Writers::start(&ram, 0..PAGES, Duration::ZERO);
        let options = MigrateOptions {
            bandwidth_bytes_per_s: Some(24 * MIB),
            downtime_limit_ms: 50.0,
            timeout_ms,
            on_timeout,
            ..options(mode)
        };
        let outcome = run(&ram, SourceVmm::new(Some(writers)), &peer, &options);
        nothing_wrong(&seen);
        adds_up(&outcome.report);
        assert_eq!(outcome.report.mode, "hybrid");
        let reason = outcome.report.postcopy.reason.expect("it was not asked for");
        assert!(reason.contains("a pause of 50 ms"), "{reason}");
        host.assert_same(&ram);
    }
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
    let (mapping, host) = (Arc::clone(&ram.mapping), Arc::clone(host));
    let mut vmm = SourceVmm::new(None);
    vmm.faults.while_saving = Some(Box::new(move || {
        until("the destination knows what is missing", || {
            let length = |file: &std::fs::File| file.metadata().expect("a file").len();
            host.missing.lock().unwrap().as_ref().is_some_and(|file| length(file) > 0)
        });
        for page in pages {
            mapping.copy_in(page * 4096, &[0xee; 4096]).expect("inside the mapping");
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

#[test]
fn wherever_the_link_is_cut_the_guest_is_on_one_host_and_its_pages_are_right() {
    if !tracking_works() {
        return;
    }
    let (mut stayed, mut went) = (0, 0);
    // The whole takes 15 MB; the first hundreds of KB are all that comes before the guest's start.
    for cut_after in [500, 2_000, 150_000, 300_000, 301_500, 302_000, 302_500, 400_000, 3 << 20, 9 << 20, 13 << 20] {
        let ram = filled_ram();
        let (host, peer, seen) = destination(&ram, Program::Scattered);
        *host.touched.lock().unwrap() = vec![77, 3001];
        let relay = Relay::to(&peer, cut_after);
        let vmm = SourceVmm::new(None);
        let (quit, rolled_back) = (Arc::clone(&vmm.quit), Arc::clone(&vmm.rolled_back));
        let options = MigrateOptions { streams: 2, ..options(Mode::Postcopy) };
        let outcome = run(&ram, vmm, &relay.address, &options);
        let report = &outcome.report;
        match outcome.fate {
            Fate::There => {
                assert_eq!(report.status, Status::Completed, "cut after {cut_after}: {:?}", report.error);
                assert!(report.postcopy.interruptions >= 1, "cut after {cut_after} of {}", relay.carried());
                // (What was in flight may come twice: then the second is dropped, or pages would be wrong.)
                nothing_wrong(&seen);
                host.assert_same(&ram);
                assert!(quit.load(Ordering::Acquire) && !rolled_back.load(Ordering::Acquire));
                went += 1;
            }
            Fate::Here => {
                assert!(!host.running.load(Ordering::Acquire), "cut after {cut_after}: it runs on both hosts");
                assert!(!quit.load(Ordering::Acquire));
                stayed += 1;
            }
            fate => panic!("cut after {cut_after}: {fate:?}"),
        }
    }
    assert!(stayed >= 2 && went >= 3, "{stayed} stayed, {went} went");
}

/// Waits until something is so.
fn until(what: &str, so: impl Fn() -> bool) {
    let began = Instant::now();
    while !so() {
        assert!(began.elapsed() < PATIENCE, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_lost_link_is_waited_for_and_the_destination_is_found_elsewhere() {
    if !tracking_works() {
        return;
    }
    let ram = filled_ram();
    let (host, peer, seen) = destination(&ram, Program::Scattered);
    let relay = Relay::to(&peer, u64::MAX);
    let (source, monitor) = (Source::default(), Monitor::new("guest"));
    let options = MigrateOptions { postcopy_bandwidth_bytes_per_s: Some(8 * MIB), ..options(Mode::Postcopy) };
    let outcome = std::thread::scope(|scope| {
        let going = scope.spawn(|| run_with(&ram, SourceVmm::new(None), &relay.address, &options, &source, &monitor));
        until("post-copy", || monitor.progress().phase == Phase::Postcopy);
        assert!(!monitor.cancel(), "there is no way back");
        relay.cut();
        until("it waits", || monitor.progress().waiting_for.is_some());
        assert!(monitor.progress().waiting_for.unwrap().contains(&relay.address));
        std::thread::sleep(Duration::from_millis(300));
        assert!(monitor.progress().waiting_ms.unwrap() > 0.0);
        *source.peer_now.lock().unwrap() = Some(peer.clone());
        going.join().unwrap()
    });
    nothing_wrong(&seen);
    let report = outcome.report;
    assert_eq!((report.status, report.postcopy.interruptions), (Status::Completed, 1), "{:?}", report.error);
    assert!(report.postcopy.interrupted_ms >= 300.0, "{:?}", report.postcopy);
    assert_eq!(monitor.progress().waiting_for, None);
    host.assert_same(&ram);
}

#[test]
fn a_source_that_begins_anew_goes_on_with_what_is_missing() {
    if !tracking_works() {
        return;
    }
    let ram = filled_ram();
    let (host, peer, seen) = destination(&ram, Program::Scattered);
    let relay = Relay::to(&peer, u64::MAX);
    let (source, monitor) = (Source::default(), Monitor::new("guest"));
    let options = MigrateOptions { postcopy_bandwidth_bytes_per_s: Some(8 * MIB), ..options(Mode::Postcopy) };
    let going = outgoing(&ram, SourceVmm::new(None), InsideSelf::default());
    let id = going.id;
    let blocks = going.blocks.iter().map(|block| sterna_engine::memory::BlockFile {
        spec: block.spec.clone(),
        file: block.file.try_clone().unwrap(),
        address: block.address,
    });
    let left = Left {
        id,
        vm: going.spec.name.clone(),
        daemon: Some(DaemonId(0)),
        blocks: blocks.collect(),
        bandwidth: Arc::default(),
        here: sterna_api::report::Host::default(),
    };
    let outcome = std::thread::scope(|scope| {
        let going = scope.spawn(|| migrate(going, &relay.address, &options, &source, &monitor));
        until("post-copy", || monitor.progress().phase == Phase::Postcopy);
        until("some pages went", || monitor.progress().pages_left < PAGES * 3 / 4);
        relay.cut();
        until("it waits", || monitor.progress().waiting_for.is_some());
        monitor.give_up();
        going.join().unwrap()
    });
    let problem = outcome.report.error.expect("it was given up");
    assert_eq!((problem.code.as_str(), problem.guest), ("given-up", Whereabouts::Gone));
    let options = MigrateOptions { postcopy_bandwidth_bytes_per_s: None, ..options };
    let report = source::serve(left, &peer, &options, &source, &Monitor::new("guest")).unwrap();
    assert_eq!(report.status, Status::Completed, "{:?}", report.error);
    assert_eq!(report.mode, "postcopy");
    assert!(report.partial && !outcome.report.partial, "what came before is not in it");
    let sent = outcome.report.pages.full + report.pages.full;
    assert!(report.pages.full > 0 && outcome.report.pages.full > 0 && sent < PAGES + 200, "{sent} bodies");
    nothing_wrong(&seen);
    host.assert_same(&ram);
}

#[test]
fn a_guest_that_ends_at_the_destination_ends_the_migration() {
    if !tracking_works() {
        return;
    }
    let ram = filled_ram();
    let (host, peer, _seen) = destination(&ram, Program::Ascending);
    let relay = Relay::to(&peer, u64::MAX);
    let (source, monitor) = (Source::default(), Monitor::new("guest"));
    let options = MigrateOptions { postcopy_bandwidth_bytes_per_s: Some(4 * MIB), ..options(Mode::Postcopy) };
    let outcome = std::thread::scope(|scope| {
        let going = scope.spawn(|| run_with(&ram, SourceVmm::new(None), &relay.address, &options, &source, &monitor));
        until("post-copy", || monitor.progress().phase == Phase::Postcopy);
        host.guest_gone.store(true, Ordering::Release);
        relay.cut();
        relay.restore();
        going.join().unwrap()
    });
    let problem = outcome.report.error.expect("its guest is gone");
    assert_eq!((problem.code.as_str(), problem.guest), ("guest-gone", Whereabouts::Gone));
    assert_eq!((outcome.fate, outcome.report.status), (Fate::There, Status::Failed));
}
