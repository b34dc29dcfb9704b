//! Encoded pages from end to end, in one process: every hash, compressor and delta, on several connections, under a
//! guest that writes on.

#[path = "support/pair/mod.rs"]
#[allow(dead_code, reason = "each test program uses its own part")]
mod pair;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use pair::destination::Destination;
use pair::guest::{GuestRam, Writers};
use pair::inside::InsideSelf;
use pair::source::{Source, SourceVmm};
use pair::{outgoing, tracking_works};
use sterna_api::options::{Compress, ContentHash, Delta, FakeDirty, HotPages, OnTimeout};
use sterna_api::report::{Report, Status};
use sterna_api::{Code, MigrateOptions};
use sterna_engine::monitor::Monitor;
use sterna_engine::source::{Fate, Outcome, migrate};

const MIB: u64 = 1 << 20;
const HASHES: [ContentHash; 6] = [
    ContentHash::Off,
    ContentHash::Xxh3,
    ContentHash::Sha1,
    ContentHash::Md5,
    ContentHash::Murmur3,
    ContentHash::Blake3,
];
const COMPRESSORS: [(Compress, Option<i32>); 4] =
    [(Compress::Off, None), (Compress::Lz4, None), (Compress::Zstd, None), (Compress::Zstd, Some(3))];

/// A guest's RAM: a third noise, a third text, a third zeros and holes.
fn guest_ram() -> GuestRam {
    let ram = GuestRam::new(8 * MIB + 4096);
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    for page in 0..700 {
        let body: Vec<u8> = std::iter::repeat_with(|| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random.to_le_bytes()
        })
        .take(512)
        .flatten()
        .collect();
        ram.mapping.copy_in(page * 4096, &body).unwrap();
    }
    (700..1400).for_each(|page| ram.write_page(page, page as u8));
    (1400..1500).for_each(|page| ram.write_page(page, 0));
    ram
}

fn run(ram: &GuestRam, vmm: SourceVmm, options: &MigrateOptions) -> (Arc<Destination>, Outcome) {
    let (host, peer) = Destination::serve();
    let outgoing = outgoing(ram, vmm, InsideSelf::default());
    let outcome = migrate(outgoing, &peer, options, &Source::default(), &Monitor::new("guest"));
    (host, outcome)
}

fn completed(host: &Destination, ram: &GuestRam, outcome: &Outcome) {
    assert_eq!(outcome.report.status, Status::Completed, "{:?}", outcome.report.error);
    assert_eq!((outcome.report.verify.checked, outcome.report.verify.mismatches), (true, 0));
    host.assert_same(ram);
    let pages = &outcome.report.pages;
    assert_eq!(pages.sent, pages.full + pages.delta);
    for round in &outcome.report.rounds {
        assert_eq!(
            round.dirty_pages,
            round.sent_pages + round.skipped_pages,
            "every page is in one counter: {round:?}"
        );
    }
}

#[test]
fn a_guest_that_keeps_writing_arrives_whole_with_every_encoding() {
    if !tracking_works() {
        return;
    }
    let mut deltas = 0;
    for (at, hash) in HASHES.into_iter().enumerate() {
        for (compress, compress_level) in COMPRESSORS {
            for delta in [Delta::Off, Delta::Xbzrle] {
                let ram = guest_ram();
                let writers = Writers::start(&ram, 600..900, Duration::from_micros(50));
                // Rounds until time is up: a page goes as a difference from its third sending on.
                let options = MigrateOptions {
                    content_hash: hash,
                    compress,
                    compress_level,
                    delta,
                    streams: 1 + at as u32 % 3,
                    fake_dirty: if at % 2 == 0 { FakeDirty::Off } else { FakeDirty::Exact },
                    hot_pages: HotPages::Send,
                    downtime_limit_ms: 0.001,
                    timeout_ms: Some(250.0),
                    on_timeout: OnTimeout::Force,
                    verify: true,
                    ..MigrateOptions::default()
                };
                let (host, outcome) = run(&ram, SourceVmm::new(Some(writers)), &options);
                completed(&host, &ram, &outcome);
                let Report { encoding, pages, .. } = &outcome.report;
                deltas += pages.delta;
                let slow = !matches!(hash, ContentHash::Off | ContentHash::Xxh3);
                let encoded = slow || compress != Compress::Off || delta != Delta::Off;
                assert_eq!(encoding.threads > 0, encoded);
                assert_eq!(encoding.cpu_s > 0.0, encoded);
                assert_eq!(encoding.hash_bytes_per_page, if slow { 24 } else { 8 });
                assert_eq!(pages.delta > 0, encoding.delta.hits > encoding.delta.overflows);
                if compress_level.is_some() {
                    assert!(encoding.compression.pages >= 100, "what shrinks is compressed: {encoding:?}");
                    assert!(encoding.compression.plain_pages >= 600, "what does not is sent as it is: {encoding:?}");
                }
            }
        }
    }
    assert!(deltas > 0, "no page went as a difference in any of them");
}

#[test]
fn a_page_written_with_what_was_there_is_left_out_where_that_is_asked_for() {
    if !tracking_works() {
        return;
    }
    for hash in HASHES {
        let ram = Arc::new(guest_ram());
        let mut vmm = SourceVmm::new(None);
        let writing = Arc::clone(&ram);
        vmm.faults.at_stop = Some(Box::new(move || {
            (800..900).for_each(|page| writing.write_page(page, page as u8));
            writing.write_page(900, 77);
        }));
        let options = MigrateOptions { content_hash: hash, verify: true, ..MigrateOptions::default() };
        let (host, outcome) = run(&ram, vmm, &options);
        completed(&host, &ram, &outcome);
        let (unchanged, sent) = if hash == ContentHash::Off { (0, 101) } else { (100, 1) };
        let last = outcome.report.rounds.iter().rfind(|round| round.dirty_pages > 0).unwrap();
        assert_eq!((outcome.report.pages.fake_dirty_content, last.sent_pages), (unchanged, sent), "{hash:?}");
    }
}

/// Two different blocks of 128 bytes with the same MD5 (Wang, Feng, Lai and Yu, 2004); so pages that go on alike have,
/// too.
const COLLIDING: [&str; 2] = [
    "d131dd02c5e6eec4693d9a0698aff95c2fcab58712467eab4004583eb8fb7f8955ad340609f4b30283e488832571415a085125e8f7cdc99fd91dbdf280373c5b\
     d8823e3156348f5bae6dacd436c919c6dd53e2b487da03fd02396306d248cda0e99f33420f577ee8ce54b67080a80d1ec69821bcb6a8839396f9652b6ff72a70",
    "d131dd02c5e6eec4693d9a0698aff95c2fcab50712467eab4004583eb8fb7f8955ad340609f4b30283e4888325f1415a085125e8f7cdc99fd91dbd7280373c5b\
     d8823e3156348f5bae6dacd436c919c6dd53e23487da03fd02396306d248cda0e99f33420f577ee8ce54b67080280d1ec69821bcb6a8839396f965ab6ff72a70",
];

fn colliding(which: usize) -> Vec<u8> {
    let digits = COLLIDING[which].as_bytes();
    digits
        .as_chunks::<2>()
        .0
        .iter()
        .map(|pair| u8::from_str_radix(str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect()
}

/// Replaces a page by one of the same MD5 when the guest stops.
fn collide(content_hash: ContentHash) -> Outcome {
    let ram = Arc::new(guest_ram());
    ram.mapping.copy_in(33 * 4096, &[0; 4096]).unwrap();
    ram.mapping.copy_in(33 * 4096, &colliding(0)).unwrap();
    let mut vmm = SourceVmm::new(None);
    let (writing, rolled_back) = (Arc::clone(&ram), Arc::clone(&vmm.rolled_back));
    vmm.faults.at_stop = Some(Box::new(move || writing.mapping.copy_in(33 * 4096, &colliding(1)).unwrap()));
    let options = MigrateOptions { content_hash, verify: true, ..MigrateOptions::default() };
    let (host, outcome) = run(&ram, vmm, &options);
    assert_eq!(rolled_back.load(Ordering::Acquire), outcome.fate == Fate::Here);
    assert_eq!(host.running.load(Ordering::Acquire), outcome.fate == Fate::There);
    outcome
}

#[test]
fn a_guest_that_forges_a_hash_is_found_out_by_the_comparison_and_stays() {
    if !tracking_works() {
        return;
    }
    let forged = collide(ContentHash::Md5);
    assert_eq!(forged.fate, Fate::Here, "the page was taken for unchanged");
    assert_eq!(forged.report.error.map(|problem| problem.code), Some(Code::VerifyMismatch));
    assert_eq!((forged.report.verify.mismatches, forged.report.pages.fake_dirty_content), (1, 1));
    for strong in [ContentHash::Sha1, ContentHash::Blake3, ContentHash::Xxh3, ContentHash::Off] {
        assert_eq!(collide(strong).report.error, None, "{strong:?}");
    }
}

#[test]
fn what_is_compressed_is_less_on_the_wire() {
    if !tracking_works() {
        return;
    }
    for (compress, compress_level) in [(Compress::Lz4, None), (Compress::Zstd, Some(-1))] {
        let ram = GuestRam::new(8 * MIB);
        (0..2000).for_each(|page| ram.write_page(page, page as u8 | 1));
        // So slow a link that compressing is worth it whatever the machine is busy with.
        let options = MigrateOptions {
            compress,
            compress_level,
            bandwidth_bytes_per_s: Some(4 << 20),
            streams: 2,
            verify: true,
            ..MigrateOptions::default()
        };
        let (host, outcome) = run(&ram, SourceVmm::new(None), &options);
        completed(&host, &ram, &outcome);
        let report = &outcome.report;
        assert_eq!((report.pages.full, report.bytes_raw), (2000, 2000 * 4096));
        assert!(report.bytes_on_wire < report.bytes_raw / 4, "{} of {}", report.bytes_on_wire, report.bytes_raw);
        assert!(report.encoding.compression.bytes < report.bytes_on_wire);
    }
}

#[test]
fn a_destination_that_fails_ends_the_threads_and_the_guest_stays() {
    if !tracking_works() {
        return;
    }
    for streams in [1, 3] {
        let (host, peer) = Destination::serve();
        host.room_bytes.store(0, Ordering::Release);
        let ram = guest_ram();
        let options = MigrateOptions {
            compress: Compress::Lz4,
            delta: Delta::Xbzrle,
            content_hash: ContentHash::Sha1,
            streams,
            ..MigrateOptions::default()
        };
        let outgoing = outgoing(&ram, SourceVmm::new(None), InsideSelf::default());
        let outcome = migrate(outgoing, &peer, &options, &Source::default(), &Monitor::new("guest"));
        assert_eq!((outcome.report.status, outcome.fate), (Status::Failed, Fate::Here));
        assert_eq!(outcome.report.error.map(|problem| problem.code), Some(Code::OutOfMemory));
    }
}

#[test]
fn cancelling_ends_the_threads_and_the_guest_stays() {
    if !tracking_works() {
        return;
    }
    let (_host, peer) = Destination::serve();
    let ram = guest_ram();
    let options = MigrateOptions {
        compress: Compress::Zstd,
        compress_level: Some(3),
        streams: 3,
        bandwidth_bytes_per_s: Some(64 << 10),
        ..MigrateOptions::default()
    };
    let monitor = Monitor::new("guest");
    let outgoing = outgoing(&ram, SourceVmm::new(None), InsideSelf::default());
    let outcome = std::thread::scope(|scope| {
        scope.spawn(|| {
            while monitor.progress().bytes_on_wire == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
            assert!(monitor.cancel());
        });
        migrate(outgoing, &peer, &options, &Source::default(), &monitor)
    });
    assert_eq!((outcome.report.status, outcome.fate), (Status::Cancelled, Fate::Here));
}
