//! A whole migration in one process: real sockets, real mappings, real write tracking, a guest of threads that keep
//! writing. What needs a VMM is in `qemu_driver.rs`; what needs hosts is in the whole-system tests.

#[path = "support/pair.rs"]
mod pair;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pair::{Destination, GuestRam, InsideSelf, Source, SourceVmm, Writers, outgoing, tracking_works};
use sterna_api::options::OnTimeout;
use sterna_api::report::Status;
use sterna_api::{Blame, Code, MigrateOptions, Mode, Problem};
use sterna_engine::agent::Discard;
use sterna_engine::monitor::Monitor;
use sterna_engine::source::{Fate, Outcome, migrate};
use sterna_protocol::hello::HELLO_BYTES;

const MIB: u64 = 1 << 20;

fn verified(streams: u32) -> MigrateOptions {
    MigrateOptions { streams, verify: true, ..MigrateOptions::default() }
}

fn run(outgoing: sterna_engine::source::Outgoing, peer: &str, options: &MigrateOptions) -> Outcome {
    migrate(outgoing, peer, options, &Source::default(), &Monitor::new("guest"))
}

fn code(outcome: &Outcome) -> &str {
    outcome.report.error.as_ref().map_or("none", |problem| problem.code.as_str())
}

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

/// Gives pages 10..20 back when the guest stops, logged as `discards` and `overflow` say; the error where the migration
/// failed.
fn discard_at_stop(log: bool, overflow: bool) -> Option<Problem> {
    let (host, peer) = Destination::serve();
    let ram = GuestRam::new(8 * MIB);
    (0..2000).for_each(|page| ram.write_page(page, 5));
    let inside = InsideSelf::default();
    let (discards, overflowed) = (Arc::clone(&inside.discards), Arc::clone(&inside.overflow));
    let file = ram.file.try_clone().unwrap();
    let mut vmm = SourceVmm::new(None);
    vmm.faults.at_stop = Some(Box::new(move || {
        use std::os::unix::fs::MetadataExt;
        sterna_sys::file::punch(&file, 10 * 4096..20 * 4096).unwrap();
        let meta = file.metadata().unwrap();
        if log {
            let discard = Discard { device: meta.dev(), inode: meta.ino(), offset: 10 * 4096, length: 10 * 4096 };
            discards.lock().unwrap().push(discard);
        }
        overflowed.store(overflow, Ordering::Release);
    }));
    let outcome = run(outgoing(&ram, vmm, inside), &peer, &verified(2));
    if outcome.report.error.is_none() {
        assert_eq!(
            sterna_sys::file::allocated_bytes(&ram.file).unwrap(),
            1990 * 4096,
            "looking at the holes filled them"
        );
        host.assert_same(&ram);
    }
    outcome.report.error
}

#[test]
fn a_discarded_page_reads_as_zeros_at_the_destination() {
    if tracking_works() {
        assert_eq!(discard_at_stop(true, false), None);
    }
}

#[test]
fn a_log_that_overflows_means_everything() {
    if tracking_works() {
        assert_eq!(discard_at_stop(false, true), None);
    }
}

#[test]
fn without_the_log_of_discards_the_comparison_catches_the_stale_pages() {
    // Shows that the two tests above can fail.
    if tracking_works() {
        let problem = discard_at_stop(false, false).expect("the destination keeps stale pages");
        assert_eq!(problem.code, "verify-mismatch");
    }
}

/// Who says that RAM is written past the page tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Told {
    Nobody,
    /// What is known before the migration.
    Before,
    /// The VMM, when it is asked while pages go.
    WhenAsked,
}

/// Fills 2,000 pages with 5, one of them with `before`, and writes that one past the page tables (through another
/// mapping of the file, as direct I/O does) when the guest stops.
fn untracked_write(mode: Mode, before: u8, told: Told) -> Outcome {
    let (host, peer) = Destination::serve();
    host.postcopy.store(true, Ordering::Release);
    let ram = GuestRam::new(8 * MIB);
    (0..2000).for_each(|page| ram.write_page(page, if page == 77 { before } else { 5 }));
    let file = ram.file.try_clone().unwrap();
    let mut vmm = SourceVmm::new(None);
    vmm.faults.writes_untracked = told == Told::WhenAsked;
    vmm.faults.at_stop = Some(Box::new(move || {
        std::os::unix::fs::FileExt::write_all_at(&file, &[8; 4096], 77 * 4096).unwrap();
    }));
    let mut outgoing = outgoing(&ram, vmm, InsideSelf::default());
    outgoing.direct_io = told == Told::Before;
    let outcome = run(outgoing, &peer, &MigrateOptions { mode, ..verified(1) });
    if told != Told::Nobody {
        host.assert_same(&ram);
    }
    outcome
}

#[test]
fn a_write_past_the_page_tables_is_found_by_content() {
    if tracking_works() {
        let report = untracked_write(Mode::Precopy, 5, Told::Before).report;
        assert_eq!((report.status, report.tracking.untracked_writes), (Status::Completed, 1));
        let missed = untracked_write(Mode::Precopy, 5, Told::Nobody);
        assert_eq!(code(&missed), "verify-mismatch", "the test would pass without the handling");
    }
}

/// A guest that reads a file into memory it has never used: its disk's direct I/O is still under way when the page
/// goes, as zeros, and lands after it. Failed with `verify-mismatch` while only pages that had been sent were compared:
/// zeros that nobody had sent before were not.
#[test]
fn a_write_past_the_page_tables_into_a_page_of_zeros_is_found_by_content() {
    if tracking_works() {
        for mode in [Mode::Precopy, Mode::Hybrid] {
            let report = untracked_write(mode, 0, Told::Before).report;
            assert_eq!((report.status, report.tracking.untracked_writes), (Status::Completed, 1), "{mode:?}");
        }
        for mode in [Mode::Postcopy, Mode::StopAndCopy] {
            let report = untracked_write(mode, 0, Told::Before).report;
            assert_eq!((report.status, report.verify.mismatches), (Status::Completed, 0), "{mode:?}");
        }
        assert_eq!(code(&untracked_write(Mode::Precopy, 0, Told::Nobody)), "verify-mismatch");
    }
}

/// A disk that came, or began to do direct I/O, while pages went. Seen to fail, a page differing, while that was asked
/// for once, before the first.
#[test]
fn a_writer_past_the_page_tables_that_comes_while_pages_go_is_found() {
    if tracking_works() {
        for mode in [Mode::Precopy, Mode::Hybrid] {
            let report = untracked_write(mode, 5, Told::WhenAsked).report;
            assert_eq!((report.status, report.tracking.untracked_writes), (Status::Completed, 1), "{mode:?}");
        }
    }
}

/// A page that had no memory when the migration began and that no look has ever named, either: whatever wrote it, it is
/// not zeros.
#[test]
fn a_hole_that_is_filled_past_the_page_tables_is_found_by_content() {
    if !tracking_works() {
        return;
    }
    let (host, peer) = Destination::serve();
    let ram = GuestRam::new(8 * MIB);
    (0..1000).for_each(|page| ram.write_page(page, 5));
    let file = ram.file.try_clone().unwrap();
    let mut vmm = SourceVmm::new(None);
    vmm.faults.at_stop = Some(Box::new(move || {
        std::os::unix::fs::FileExt::write_all_at(&file, &[8; 4096], 1500 * 4096).unwrap();
    }));
    let mut outgoing = outgoing(&ram, vmm, InsideSelf::default());
    outgoing.direct_io = true;
    let report = run(outgoing, &peer, &verified(1)).report;
    assert_eq!((report.status, report.tracking.untracked_writes), (Status::Completed, 1));
    assert_eq!(sterna_sys::file::allocated_bytes(&ram.file).unwrap(), 1001 * 4096, "looking at the holes filled them");
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

/// A peer that misbehaves: what it does with each connection is up to `act`.
fn misbehaving(act: impl Fn(TcpStream) + Send + Sync + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let act = Arc::new(act);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let act = Arc::clone(&act);
            std::thread::spawn(move || act(stream));
        }
    });
    address
}

#[test]
fn peers_that_are_absent_silent_strange_or_of_another_version_are_named() {
    if !tracking_works() {
        return;
    }
    let ram = GuestRam::new(MIB);
    let attempt = |peer: &str| {
        let vmm = SourceVmm::new(None);
        let rolled_back = Arc::clone(&vmm.rolled_back);
        let outcome = run(outgoing(&ram, vmm, InsideSelf::default()), peer, &MigrateOptions::default());
        assert_eq!((outcome.fate, rolled_back.load(Ordering::Acquire)), (Fate::Here, true));
        code(&outcome).to_string()
    };
    assert_eq!(attempt("127.0.0.1:1"), "peer-unreachable");
    assert_eq!(attempt("no.such.host.invalid:1"), "peer-unreachable");
    let silent = misbehaving(|stream| {
        let _ = (&stream).read_to_end(&mut Vec::new());
    });
    assert_eq!(attempt(&silent), "link-failed");
    let web_server = misbehaving(|mut stream| {
        let mut request = [0; 64];
        let _ = stream.read(&mut request);
        let _ = stream.write_all(&b"HTTP/1.1 400 Bad Request\r\n".repeat(4));
    });
    assert_eq!(attempt(&web_server), "not-sterna");
    let newer = misbehaving(|mut stream| {
        let mut hello = [0; 64];
        let _ = stream.read_exact(&mut hello);
        hello[8] = 99;
        let _ = stream.write_all(&hello);
    });
    assert_eq!(attempt(&newer), "peer-version");
    let babbling = misbehaving(|mut stream| {
        let mut hello = [0; 64];
        let _ = stream.read_exact(&mut hello);
        let _ = stream.write_all(&hello);
        let _ = stream.write_all(&[0x5a; 4096]);
        // Until it is hung up on: an end with something unread would take back what was said.
        let _ = stream.read_to_end(&mut Vec::new());
    });
    assert_eq!(attempt(&babbling), "peer-protocol");
}

/// Passes bytes on to `to` until `limit` bytes have gone from the source, over all connections; then cuts them all.
fn cutting_proxy(to: String, limit: u64) -> String {
    let left = Arc::new(AtomicU64::new(limit));
    let cut = Arc::new(AtomicBool::new(false));
    misbehaving(move |mut source| {
        if cut.load(Ordering::Acquire) {
            return;
        }
        let mut destination = TcpStream::connect(&to).unwrap();
        let (mut back_from, mut back_to) = (destination.try_clone().unwrap(), source.try_clone().unwrap());
        std::thread::spawn(move || {
            let _ = std::io::copy(&mut back_from, &mut back_to);
            let _ = back_to.shutdown(std::net::Shutdown::Both);
        });
        let mut buffer = [0; 65_536];
        source.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        loop {
            let read = match source.read(&mut buffer) {
                Ok(0) => break,
                Ok(read) => read,
                Err(_) if cut.load(Ordering::Acquire) => break,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => continue,
                Err(_) => break,
            };
            let before = left
                .fetch_update(Ordering::AcqRel, Ordering::Acquire, |left| Some(left.saturating_sub(read as u64)))
                .unwrap();
            let pass = read.min(before as usize);
            if destination.write_all(&buffer[..pass]).is_err() || pass < read || cut.load(Ordering::Acquire) {
                cut.store(true, Ordering::Release);
                break;
            }
        }
        let _ = source.shutdown(std::net::Shutdown::Both);
        let _ = destination.shutdown(std::net::Shutdown::Both);
    })
}

#[test]
fn a_link_cut_at_any_byte_leaves_the_guest_on_exactly_one_host() {
    if !tracking_works() {
        return;
    }
    let ram = GuestRam::new(4 * MIB);
    (0..600).for_each(|page| ram.write_page(page, 5));
    let whole = 64 * 4 + 600 * 4096 + pair::DEVICE_BYTES as u64;
    for limit in
        [0, 63, 64, 100, 400, 5_000, 300_000, whole / 2, whole - 50_000, whole - 100, whole + 4_000, whole + 20_000]
    {
        let (host, peer) = Destination::serve();
        let vmm = SourceVmm::new(None);
        let (rolled_back, quit) = (Arc::clone(&vmm.rolled_back), Arc::clone(&vmm.quit));
        let proxy = cutting_proxy(peer.clone(), limit);
        let source = Source::default();
        let outcome = migrate(
            outgoing(&ram, vmm, InsideSelf::default()),
            &proxy,
            &MigrateOptions::default(),
            &source,
            &Monitor::new("guest"),
        );
        let runs_there = host.running.load(Ordering::Acquire);
        match outcome.fate {
            Fate::Here => assert!(rolled_back.load(Ordering::Acquire) && !runs_there, "cut at {limit}"),
            Fate::There => assert!(quit.load(Ordering::Acquire) && runs_there, "cut at {limit}"),
            Fate::NotYet => panic!("cut at {limit}: nobody was full"),
            Fate::NotGivenBack => panic!("cut at {limit}: its VMM never refuses"),
            // Stopped here until the destination is asked on a link that works.
            Fate::Unknown => {
                assert!(
                    source.handed_over.load(Ordering::Acquire) && !rolled_back.load(Ordering::Acquire),
                    "cut at {limit}"
                );
            }
        }
        if !runs_there {
            let again = run(outgoing(&ram, SourceVmm::new(None), InsideSelf::default()), &peer, &verified(1));
            assert_eq!(again.report.status, Status::Completed, "after a cut at {limit}: {:?}", again.report.error);
            host.assert_same(&ram);
        }
    }
}

/// Passes bytes on to `to`, and flips one bit of the byte at `at`, counted over all that comes from the source in
/// order; `pages_only` counts the connections that carry pages alone.
fn damaging_proxy(to: String, at: u64, pages_only: bool) -> String {
    const ROLE_AT: usize = 12;
    const PAGES: u8 = 2;
    let passed = Arc::new(AtomicU64::new(0));
    misbehaving(move |mut source| {
        let mut hello = [0; HELLO_BYTES];
        let counts = source.peek(&mut hello).is_ok_and(|read| read > ROLE_AT && hello[ROLE_AT] == PAGES) || !pages_only;
        let mut destination = TcpStream::connect(&to).unwrap();
        let (mut back_from, mut back_to) = (destination.try_clone().unwrap(), source.try_clone().unwrap());
        std::thread::spawn(move || {
            let _ = std::io::copy(&mut back_from, &mut back_to);
            let _ = back_to.shutdown(std::net::Shutdown::Both);
        });
        let mut buffer = [0; 65_536];
        while let Ok(read @ 1..) = source.read(&mut buffer) {
            let before = passed.fetch_add(if counts { read as u64 } else { 0 }, Ordering::AcqRel);
            if counts && (before..before + read as u64).contains(&at) {
                buffer[(at - before) as usize] ^= 4;
            }
            if destination.write_all(&buffer[..read]).is_err() {
                break;
            }
        }
        let _ = destination.shutdown(std::net::Shutdown::Write);
    })
}

#[test]
fn a_body_damaged_on_its_way_comes_again() {
    if !tracking_works() {
        return;
    }
    let ram = GuestRam::new(4 * MIB);
    (0..600).for_each(|page| ram.write_page(page, 5));
    for mode in [Mode::Precopy, Mode::StopAndCopy] {
        let (host, peer) = Destination::serve();
        // Headers and digests are some kilobytes in all: far behind them lie bodies.
        let proxy = damaging_proxy(peer, 600 * 4096 / 2, true);
        let outcome = run(
            outgoing(&ram, SourceVmm::new(None), InsideSelf::default()),
            &proxy,
            &MigrateOptions { mode, ..verified(1) },
        );
        assert_eq!(outcome.report.status, Status::Completed, "{:?}", outcome.report.error);
        assert_eq!(outcome.report.pages.full, 601);
        host.assert_same(&ram);
    }
}

#[test]
fn a_damaged_header_fails_the_migration_at_once() {
    if !tracking_works() {
        return;
    }
    let (host, peer) = Destination::serve();
    let ram = GuestRam::new(4 * MIB);
    (0..600).for_each(|page| ram.write_page(page, 5));
    // Find the first frame's header: it follows the control connection's messages and the other connections' hellos.
    let codes: Vec<String> = (1..14)
        .map(|step| {
            let proxy = damaging_proxy(peer.clone(), step * 97, false);
            let outcome = run(outgoing(&ram, SourceVmm::new(None), InsideSelf::default()), &proxy, &verified(1));
            if outcome.report.status != Status::Completed {
                assert_eq!(outcome.fate, Fate::Here);
                assert!(!host.running.load(Ordering::Acquire));
            }
            host.running.store(false, Ordering::Release);
            code(&outcome).to_string()
        })
        .collect();
    assert!(codes.iter().any(|code| code == "peer-protocol"), "{codes:?}");
    assert!(codes.iter().all(|code| code != "verify-mismatch" && code != "out-of-memory"), "{codes:?}");
}

#[test]
fn callers_that_babble_do_not_hurt_the_destination() {
    if !tracking_works() {
        return;
    }
    let (host, peer) = Destination::serve();
    let mut state = 1u64;
    for length in [0, 1, 63, 64, 65, 300, 5000] {
        let garbage: Vec<u8> = (0..length)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 56) as u8
            })
            .collect();
        let mut stream = TcpStream::connect(&peer).unwrap();
        let _ = stream.write_all(&garbage);
        // A good hello, then garbage.
        let mut stream = TcpStream::connect(&peer).unwrap();
        let hello = sterna_protocol::hello::Hello {
            version: sterna_protocol::hello::VERSION,
            role: sterna_protocol::hello::Role::Control,
            features: sterna_protocol::hello::Features(0),
            needed: sterna_protocol::hello::Features(0),
            session: length as u128,
            key: 3,
        };
        let _ = stream.write_all(&hello.encode());
        let _ = stream.write_all(&garbage);
    }
    let ram = GuestRam::new(MIB);
    ram.write_page(3, 3);
    let outcome = run(outgoing(&ram, SourceVmm::new(None), InsideSelf::default()), &peer, &verified(1));
    assert_eq!(outcome.report.status, Status::Completed, "{:?}", outcome.report.error);
    host.assert_same(&ram);
}
