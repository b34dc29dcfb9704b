//! A short look at a guest of threads, with real mappings and real write tracking: what is seen, and that nothing stays
//! behind.

#[path = "support/pair/mod.rs"]
#[allow(dead_code, reason = "each test program uses a part of it")]
mod pair;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pair::guest::{GuestRam, Writers};
use pair::inside::InsideSelf;
use pair::source::SourceVmm;
use pair::{outgoing, tracking_works};
use sterna_api::Mode;
use sterna_api::options::Compress;
use sterna_engine::error::MigrateError;
use sterna_engine::memory::Memory;
use sterna_engine::memory::shared::SharedMemory;
use sterna_engine::monitor::Monitor;
use sterna_engine::source::estimate::estimate;
use sterna_engine::source::observe::{Observation, observe};
use sterna_protocol::layout::{ChunkIndex, PageIndex};
use sterna_protocol::pages::PageMap;
use sterna_sys::map::Access;
use sterna_sys::pagemap::{Categories, Pagemap, Scan};

const MIB: u64 = 1 << 20;
const A_WHILE: Duration = Duration::from_millis(600);
/// Pages that the guest holds free: its first.
const FREE: u8 = 16;

fn look(ram: &GuestRam, duration: Duration, monitor: &Monitor) -> Result<Observation, MigrateError> {
    let mut machine = outgoing(ram, SourceVmm::new(None), InsideSelf::default());
    let mapped = SharedMemory::open(&machine.blocks, Access::Read).expect("the RAM's file");
    let mut free = PageMap::empty(mapped.layout());
    (0..FREE).for_each(|page| free.insert(PageIndex { chunk: ChunkIndex(0), page }));
    let result = observe(&mapped, machine.tracker.as_mut(), &free, duration, monitor);
    // With the tracker still there: it is the observation that must end the watching.
    assert!(!watched(ram), "the guest's pages are still watched");
    result
}

/// Whether any of the guest's pages is registered for write tracking.
fn watched(ram: &GuestRam) -> bool {
    let mut regions = Vec::new();
    let pagemap = Pagemap::of_this_process().expect("our own page map");
    pagemap.scan(ram.mapping.addresses(), Scan::of(Categories::TRACKED), &mut regions).expect("a scan");
    !regions.is_empty()
}

fn holes(ram: &GuestRam) -> u64 {
    use std::os::unix::fs::MetadataExt;
    ram.bytes / 4096 - ram.file.metadata().expect("the file's size").blocks() / 8
}

#[test]
fn the_working_set_of_writers_is_seen_with_what_it_costs_and_nothing_stays_watched() {
    if !tracking_works() {
        return;
    }
    let ram = GuestRam::new(32 * MIB);
    (0..4096).for_each(|page| ram.write_page(page, if page < 1024 { 0 } else { page as u8 }));
    let (writers, before) = (Writers::start(&ram, 2000..3000, Duration::ZERO), holes(&ram));
    let seen = look(&ram, A_WHILE, &Monitor::new("guest")).expect("an observation");
    drop(writers);
    assert_eq!((seen.total_pages, seen.allocated_pages), (8192, 4096));
    assert_eq!((seen.free_pages, seen.guest.used_pages), (u64::from(FREE), 4096 - u64::from(FREE)));
    assert!((0.2..0.3).contains(&seen.guest.zero_share), "a quarter is zeros: {}", seen.guest.zero_share);
    let most = seen.written.iter().map(|(_, pages)| *pages).max();
    assert_eq!(most, Some(1000), "the writers write all of these: {:?}", seen.written);
    // When the looks come depends on the machine: in all of the time each page is written again.
    assert!(seen.guest.again.at(seen.duration.as_secs_f64()) > 0.9 && seen.guest.silent_share < 0.1, "{seen:?}");
    assert!((1000..=3000).contains(&seen.write_faults), "a fault for each page and half: {}", seen.write_faults);
    assert!(seen.looks > 5 && seen.duration >= A_WHILE);
    assert!(seen.sampled.pages <= 4096, "few pages are read: {}", seen.sampled.pages);
    // Repetitions of a byte, and in a third of the pages words at random.
    let ratios = [seen.sampled.lz4, seen.sampled.zstd].map(|tried| tried.expect("something to compress").ratio);
    assert!(ratios.iter().all(|ratio| (0.001..0.7).contains(ratio)), "{ratios:?}");
    assert_eq!(holes(&ram), before, "looking must not fill holes");
}

#[test]
fn a_guest_that_stands_still_writes_nothing() {
    if !tracking_works() {
        return;
    }
    let ram = GuestRam::new(8 * MIB);
    (0..100).for_each(|page| ram.write_page(page, 1));
    let seen = look(&ram, A_WHILE, &Monitor::new("guest")).expect("an observation");
    assert_eq!((seen.write_faults, seen.guest.written.at(1e6) as u64), (0, 0));
    let empty = GuestRam::new(8 * MIB);
    let seen = look(&empty, A_WHILE, &Monitor::new("guest")).expect("an observation");
    assert_eq!((seen.allocated_pages, seen.guest.used_pages, seen.sampled.lz4), (0, 0, None));
}

#[test]
fn pages_written_with_what_was_there_are_told_from_others() {
    if !tracking_works() {
        return;
    }
    let ram = GuestRam::new(8 * MIB);
    (0..2000).for_each(|page| ram.write_page(page, page as u8 | 1));
    let stop = Arc::new(AtomicBool::new(false));
    let (mapping, stopped) = (Arc::clone(&ram.mapping), Arc::clone(&stop));
    // Every fourth page changes.
    let writer = std::thread::spawn(move || {
        for turn in 0_u64.. {
            for page in 0..2000_u64 {
                let byte = if page % 4 == 0 { turn as u8 } else { page as u8 } | 1;
                mapping.copy_in(page * 4096, &[byte; 16]).expect("inside the mapping");
            }
            if stopped.load(Ordering::Acquire) {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    let seen = look(&ram, A_WHILE, &Monitor::new("guest"));
    stop.store(true, Ordering::Release);
    writer.join().expect("the writer");
    let share = seen.expect("an observation").guest.silent_share;
    assert!((0.65..=1.0).contains(&share) && share < 0.95, "three quarters are silent: {share}");
}

#[test]
fn an_observation_that_is_cancelled_ends_soon_and_leaves_nothing_watched() {
    if !tracking_works() {
        return;
    }
    let ram = GuestRam::new(8 * MIB);
    let monitor = Monitor::new("guest");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !watched(&ram) {
                std::thread::sleep(Duration::from_millis(1));
            }
            monitor.cancel();
        });
        let result = look(&ram, Duration::from_secs(3600), &monitor);
        assert!(matches!(result, Err(MigrateError::Cancelled)), "{result:?}");
    });
}

#[test]
fn the_estimate_has_every_mode_and_every_compressor() {
    if !tracking_works() {
        return;
    }
    let ram = GuestRam::new(32 * MIB);
    (0..4096).for_each(|page| ram.write_page(page, page as u8 | 1));
    let seen = look(&ram, A_WHILE, &Monitor::new("guest")).expect("an observation");
    let estimate = estimate("guest", &seen, 100 * MIB, Duration::from_millis(300));
    let ways: Vec<_> = estimate.ways.iter().map(|way| (way.mode, way.compress)).collect();
    let expected = [
        (Mode::StopAndCopy, Compress::Off),
        (Mode::Precopy, Compress::Off),
        (Mode::Precopy, Compress::Lz4),
        (Mode::Precopy, Compress::Zstd),
        (Mode::Hybrid, Compress::Off),
        (Mode::Postcopy, Compress::Off),
        (Mode::Auto, Compress::Off),
    ];
    assert_eq!(ways, expected);
    let bodies = (4096 - u64::from(FREE)) * 4096;
    assert_eq!((estimate.observed.allocated_pages, estimate.observed.free_pages), (4096, u64::from(FREE)));
    assert!((bodies..bodies + bodies / 50).contains(&estimate.ways[0].bytes_on_wire), "{:?}", estimate.ways[0]);
    assert!(estimate.ways[0].downtime_ms > 100.0 && estimate.ways[1].downtime_ms < 20.0, "{:?}", estimate.ways);
    assert!(estimate.ways[2].bytes_on_wire < bodies / 10, "{:?}", estimate.ways[2]);
    assert!((bodies..bodies + bodies / 50).contains(&estimate.ways[5].bytes_on_wire), "{:?}", estimate.ways[5]);
    assert!(estimate.ways[4..].iter().all(|way| way.downtime_ms < 20.0), "{:?}", estimate.ways);
}
