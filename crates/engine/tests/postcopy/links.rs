//! Links that break, peers that begin anew, guests that end.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use sterna_api::problem::Whereabouts;
use sterna_api::report::Status;
use sterna_api::{MigrateOptions, Mode, Phase};
use sterna_engine::host::DaemonId;
use sterna_engine::monitor::Monitor;
use sterna_engine::source::{self, Fate, Left, migrate};

use crate::fixture::{MIB, PAGES, Program, destination, filled_ram, nothing_wrong, options, run, run_with, until};
use crate::pair::inside::InsideSelf;
use crate::pair::source::{Source, SourceVmm};
use crate::pair::{outgoing, tracking_works};
use crate::relay::Relay;

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
        process: block.process.clone(),
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
        until("some pages went", || (1..PAGES * 3 / 4).contains(&monitor.progress().pages_left));
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
