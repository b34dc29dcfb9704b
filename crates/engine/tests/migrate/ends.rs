//! Migrations that fail, are cancelled or do not converge.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use sterna_api::options::OnTimeout;
use sterna_api::report::Status;
use sterna_api::{Blame, Code, MigrateOptions, Problem};
use sterna_engine::monitor::Monitor;
use sterna_engine::source::{Fate, migrate};

use crate::fixture::{MIB, code, run, verified};
use crate::pair::destination::Destination;
use crate::pair::guest::{GuestRam, Writers};
use crate::pair::inside::InsideSelf;
use crate::pair::source::{Source, SourceVmm};
use crate::pair::{outgoing, tracking_works};

/// The destination loads the devices as soon as the last pages are in place, so a page that the VMM writes while it
/// saves them comes after they were loaded from what it was before. Seen to fail while such a page was sent all the
/// same: the migration completed.
#[test]
fn a_page_the_vmm_writes_while_it_saves_its_devices_keeps_the_guest_here() {
    if !tracking_works() {
        return;
    }
    let (host, peer) = Destination::serve();
    let ram = Arc::new(GuestRam::new(8 * MIB));
    (0..2).for_each(|page| ram.write_page(page, 1));
    let mut vmm = SourceVmm::new(None);
    let (writing, loaded, rolled_back) =
        (Arc::clone(&ram), Arc::clone(&host.loaded_from), Arc::clone(&vmm.rolled_back));
    vmm.faults.before_saved = Some(Box::new(move || {
        let deadline = Instant::now() + Duration::from_secs(60);
        while loaded.lock().unwrap().is_empty() {
            assert!(Instant::now() < deadline, "the devices were not loaded in 60 s");
            std::thread::sleep(Duration::from_millis(1));
        }
        writing.write_page(0, 3);
    }));
    *host.touched.lock().unwrap() = vec![0];
    let outcome = run(outgoing(&ram, vmm, InsideSelf::default()), &peer, &verified(1));
    assert_eq!(*host.loaded_from.lock().unwrap(), [1], "the destination has loaded from what the page was before");
    assert_eq!((code(&outcome), outcome.fate), ("written-while-saving", Fate::Here));
    assert!(rolled_back.load(Ordering::Acquire) && !host.running.load(Ordering::Acquire));
}

/// As KSM makes pages look that it merges in the pause. Seen to fail while what looks written counted as written:
/// guests whose pages were being merged stayed where they were, now and then.
#[test]
fn a_page_that_looks_written_in_the_pause_and_has_the_content_that_was_sent_keeps_nobody_here() {
    if !tracking_works() {
        return;
    }
    let (host, peer) = Destination::serve();
    let ram = Arc::new(GuestRam::new(8 * MIB));
    (0..2).for_each(|page| ram.write_page(page, 1));
    let mut vmm = SourceVmm::new(None);
    let writing = Arc::clone(&ram);
    vmm.faults.before_saved = Some(Box::new(move || {
        writing.write_page(0, 1);
        writing.write_page(5, 0);
    }));
    let outcome = run(outgoing(&ram, vmm, InsideSelf::default()), &peer, &verified(1));
    assert_eq!((outcome.report.status, outcome.fate), (Status::Completed, Fate::There), "{:?}", outcome.report.error);
    host.assert_same(&ram);
}

#[test]
fn a_failed_attempt_leaves_the_guest_here_and_the_next_succeeds() {
    if !tracking_works() {
        return;
    }
    let (host, peer) = Destination::serve();
    let ram = GuestRam::new(8 * MIB);
    (0..1000).for_each(|page| ram.write_page(page, 5));
    let attempt = |options: &MigrateOptions| {
        let vmm = SourceVmm::new(None);
        let rolled_back = Arc::clone(&vmm.rolled_back);
        let outcome = run(outgoing(&ram, vmm, InsideSelf::default()), &peer, options);
        (outcome, rolled_back.load(Ordering::Acquire))
    };
    *host.refuse.lock().unwrap() = Some(Problem::new("name-taken".into(), Blame::Request, "there is a 'guest' here"));
    let (refused, rolled_back) = attempt(&verified(1));
    assert_eq!((code(&refused), refused.fate, rolled_back), ("name-taken", Fate::Here, true));
    *host.refuse.lock().unwrap() = Some(Problem::new(Code::TooManyIncoming, Blame::Host, "it takes 1 at a time"));
    let (refused, rolled_back) = attempt(&verified(1));
    assert_eq!((code(&refused), refused.fate, rolled_back), ("too-many-incoming", Fate::NotYet, false));
    *host.refuse.lock().unwrap() = None;

    host.refuse_state.store(true, Ordering::Release);
    let (refused, rolled_back) = attempt(&verified(1));
    assert_eq!((code(&refused), refused.fate, rolled_back), ("qemu-failed", Fate::Here, true));
    host.refuse_state.store(false, Ordering::Release);

    host.dies_when_loaded.store(true, Ordering::Release);
    let (failed, rolled_back) = attempt(&verified(1));
    assert_eq!((failed.report.status, failed.fate, rolled_back), (Status::Failed, Fate::Here, true));
    host.dies_when_loaded.store(false, Ordering::Release);

    host.fail_commit.store(true, Ordering::Release);
    let (failed, rolled_back) = attempt(&verified(1));
    assert_eq!((code(&failed), failed.fate, rolled_back), ("disk-full", Fate::Here, true));
    host.fail_commit.store(false, Ordering::Release);

    host.room_bytes.store(1 << 20, Ordering::Release);
    let (failed, rolled_back) = attempt(&verified(2));
    assert_eq!((code(&failed), failed.fate, rolled_back), ("out-of-memory", Fate::Here, true));
    host.room_bytes.store(u64::MAX, Ordering::Release);

    assert!(!host.running.load(Ordering::Acquire), "the guest ran at the destination though every attempt failed");
    let (done, _) = attempt(&verified(1));
    assert_eq!(done.report.status, Status::Completed, "{:?}", done.report.error);
    host.assert_same(&ram);
}

#[test]
fn cancelling_gives_the_guest_back_in_every_phase() {
    if !tracking_works() {
        return;
    }
    let ram = GuestRam::new(16 * MIB);
    (0..4000).for_each(|page| ram.write_page(page, 5));
    for delay_ms in [0, 5, 20, 60, 100, 200] {
        let (host, peer) = Destination::serve();
        let monitor = Monitor::new("guest");
        let writers = Writers::start(&ram, 0..4000, Duration::ZERO);
        let options = MigrateOptions { bandwidth_bytes_per_s: Some(100_000_000), ..verified(2) };
        let outcome = std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(delay_ms));
                monitor.cancel();
            });
            migrate(
                outgoing(&ram, SourceVmm::new(Some(writers)), InsideSelf::default()),
                &peer,
                &options,
                &Source::default(),
                &monitor,
            )
        });
        match outcome.report.status {
            Status::Cancelled => {
                assert_eq!((outcome.fate, code(&outcome)), (Fate::Here, "cancelled"));
                assert!(!host.running.load(Ordering::Acquire));
            }
            status => assert_eq!(status, Status::Completed, "{:?}", outcome.report.error),
        }
    }
}

#[test]
fn a_guest_faster_than_the_link_ends_as_asked() {
    if !tracking_works() {
        return;
    }
    let ram = GuestRam::new(32 * MIB);
    for (on_timeout, expected) in [(OnTimeout::Cancel, "not-converging"), (OnTimeout::Force, "none")] {
        let (host, peer) = Destination::serve();
        let writers = Writers::start(&ram, 0..8192, Duration::ZERO);
        std::thread::sleep(Duration::from_millis(100));
        let options = MigrateOptions {
            bandwidth_bytes_per_s: Some(20_000_000),
            downtime_limit_ms: 20.0,
            timeout_ms: Some(1500.0),
            on_timeout,
            ..MigrateOptions::default()
        };
        let outcome = run(outgoing(&ram, SourceVmm::new(Some(writers)), InsideSelf::default()), &peer, &options);
        assert_eq!(code(&outcome), expected);
        let ended = if on_timeout == OnTimeout::Force { Status::Completed } else { Status::Cancelled };
        assert_eq!(outcome.report.status, ended);
        if on_timeout == OnTimeout::Force {
            host.assert_same(&ram);
        }
    }
}
