//! Write tracking on real mappings: what a scan sees, and what it does not.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::mm::Advice;
use sterna_sys::PAGE_BYTES;
use sterna_sys::file::punch;
use sterna_sys::map::{Access, SharedMapping};
use sterna_sys::pagemap::{Categories, Pagemap, Scan};
use sterna_sys::userfaultfd::Modes;

mod support;
use support::vmm::{Vmm, track};
use support::{PATIENCE, Ram, Tracker, ram_file, skip, userfaultfd};

const PAGES: u64 = 64;

/// One shared and one private mapping of a file whose even pages exist.
fn both_kinds() -> [(&'static str, Ram); 2] {
    [("shared", Ram::shared as fn(std::fs::File, u64) -> Ram), ("private", Ram::private)].map(|(kind, map)| {
        let file = ram_file(PAGES);
        let fill = Ram::shared(&file, PAGES);
        (0..PAGES).step_by(2).for_each(|page| fill.poke(page, 0, page));
        (kind, map(file, PAGES))
    })
}

#[test]
fn a_scan_returns_exactly_the_pages_written_since_the_last() {
    if skip() {
        return;
    }
    for (kind, ram) in both_kinds() {
        let mut tracker = Tracker::of(&ram);
        assert_eq!(tracker.written_and_arm(), (0..PAGES).collect::<Vec<_>>(), "{kind}: nothing was armed yet");
        assert_eq!(tracker.written_and_arm(), [], "{kind}: nothing was written");
        ram.poke(6, 3, 1);
        ram.poke(7, 511, 1);
        ram.poke(40, 0, 1);
        assert_eq!(tracker.written_and_arm(), [6, 7, 40], "{kind}: 7 is a hole of the file");
        assert_eq!(tracker.written_and_arm(), [], "{kind}: they are armed again");
        ram.poke(7, 0, 2);
        assert_eq!(tracker.written_and_arm(), [7], "{kind}");
    }
}

#[test]
fn reading_is_not_writing() {
    if skip() {
        return;
    }
    for (kind, ram) in both_kinds() {
        let mut tracker = Tracker::of(&ram);
        tracker.written_and_arm();
        (0..PAGES).for_each(|page| assert_eq!(ram.peek(page, 0), if page % 2 == 0 { page } else { 0 }, "{kind}"));
        assert_eq!(tracker.written_and_arm(), [], "{kind}: read, holes too");
    }
}

#[test]
fn a_look_without_arming_changes_nothing() {
    if skip() {
        return;
    }
    for (kind, ram) in both_kinds() {
        let mut tracker = Tracker::of(&ram);
        tracker.written_and_arm();
        ram.poke(9, 0, 1);
        assert_eq!(tracker.written(), [9], "{kind}");
        assert_eq!(tracker.written(), [9], "{kind}: still");
        ram.poke(10, 0, 1);
        assert_eq!(tracker.written(), [9, 10], "{kind}");
        assert_eq!(tracker.written_and_arm(), [9, 10], "{kind}");
        assert_eq!(tracker.written(), [], "{kind}");
    }
}

#[test]
fn a_silent_store_is_a_write() {
    if skip() {
        return;
    }
    for (kind, ram) in both_kinds() {
        let mut tracker = Tracker::of(&ram);
        tracker.written_and_arm();
        ram.poke(8, 0, ram.peek(8, 0));
        assert_eq!(tracker.written_and_arm(), [8], "{kind}");
    }
}

#[test]
fn arming_unregistered_memory_is_refused_and_not_passed_over() {
    if skip() {
        return;
    }
    let ram = Ram::shared(ram_file(PAGES), PAGES);
    let pagemap = Pagemap::of_this_process().unwrap();
    let error = pagemap.written_and_arm(ram.addresses(), &mut Vec::new()).unwrap_err();
    assert_eq!(error.errno(), Some(libc::EPERM));
    // Half of it is not enough either.
    let uffd = userfaultfd(sterna_sys::userfaultfd::Features::TRACKING);
    uffd.register(ram.pages(0..PAGES / 2), Modes::WP).unwrap();
    let error = pagemap.written_and_arm(ram.addresses(), &mut Vec::new()).unwrap_err();
    assert_eq!(error.errno(), Some(libc::EPERM));
}

#[test]
fn registering_anew_forgets_what_was_armed() {
    if skip() {
        return;
    }
    for (kind, ram) in both_kinds() {
        let mut tracker = Tracker::of(&ram);
        tracker.written_and_arm();
        tracker.uffd.unregister(ram.addresses()).unwrap();
        tracker.uffd.register(ram.addresses(), Modes::WP).unwrap();
        assert_eq!(tracker.written(), (0..PAGES).collect::<Vec<_>>(), "{kind}: as written as at the start");
    }
}

#[test]
fn regions_say_what_else_is_true_of_a_page() {
    if skip() {
        return;
    }
    for (kind, ram) in both_kinds() {
        let mut tracker = Tracker::of(&ram);
        tracker.written_and_arm();
        ram.poke(3, 0, 1);
        assert_eq!(tracker.present(), [3], "{kind}: arming maps nothing");
        let scan =
            Scan::of(Categories::WRITTEN).reporting(Categories::WRITTEN | Categories::PRESENT | Categories::FILE);
        let mut regions = Vec::new();
        tracker.pagemap.scan(ram.addresses(), scan, &mut regions).unwrap();
        assert_eq!(regions.len(), 1);
        assert_eq!((regions[0].range(), regions[0].pages()), (ram.pages(3..4), 1));
        let mut expected = Categories::WRITTEN | Categories::PRESENT;
        expected.set(Categories::FILE, kind == "shared");
        assert_eq!(regions[0].categories, expected, "{kind}: a written page of a private mapping is anonymous");
        // Armed holes look like swapped pages.
        let unwritten = Scan { inverted: Categories::WRITTEN, ..Scan::of(Categories::WRITTEN) };
        assert_eq!(tracker.scan(unwritten).len() as u64, PAGES - 1, "{kind}");
        assert_eq!(tracker.scan(Scan::of(Categories::SWAPPED)).len() as u64, PAGES - 1, "{kind}");
        let either = Scan { any: Categories::PRESENT | Categories::SWAPPED, ..Scan::of(Categories::empty()) };
        assert_eq!(tracker.scan(either).len() as u64, PAGES, "{kind}");
    }
}

#[test]
fn a_scan_with_more_regions_than_one_call_returns_is_complete() {
    if skip() {
        return;
    }
    // Every other page: one region each.
    let pages = 2 * (sterna_sys::pagemap::REGIONS_PER_CALL as u64 + 1000);
    let ram = Ram::private(ram_file(pages), pages);
    let mut tracker = Tracker::of(&ram);
    tracker.written_and_arm();
    (0..pages).step_by(2).for_each(|page| ram.poke(page, 0, 1));
    assert!(tracker.written_and_arm().into_iter().eq((0..pages).step_by(2)));
    assert_eq!(tracker.written_and_arm(), [], "the second call's pages were armed as well");
}

#[test]
fn another_process_is_tracked_from_outside() {
    if skip() {
        return;
    }
    for private in [false, true] {
        let file = ram_file(PAGES);
        let map = |file| if private { Ram::private(file, PAGES) } else { Ram::shared(file, PAGES) };
        let (mut vmm, uffd) = Vmm::start(|| map(&file));
        track(&uffd, &vmm);
        let pagemap = Pagemap::open(vmm.pid).unwrap();
        let mut tracker = Tracker::with(uffd, pagemap, vmm.addresses.clone());
        tracker.written_and_arm();
        vmm.poke(5, 1);
        vmm.poke(63, 1);
        assert_eq!(vmm.peek(20), 0);
        assert_eq!(tracker.written(), [5, 63]);
        assert_eq!(tracker.written_and_arm(), [5, 63]);
        vmm.poke(63, 2);
        assert_eq!(tracker.written_and_arm(), [63]);
    }
}

#[test]
fn scanning_a_process_that_has_ended_is_an_error_and_not_a_process_without_writes() {
    if skip() {
        return;
    }
    let file = ram_file(PAGES);
    let (mut vmm, uffd) = Vmm::start(|| Ram::shared(&file, PAGES));
    track(&uffd, &vmm);
    let pagemap = Pagemap::open(vmm.pid).unwrap();
    pagemap.written_and_arm(vmm.addresses.clone(), &mut Vec::new()).unwrap();
    vmm.poke(5, 1);
    vmm.pidfd.kill().unwrap();
    assert!(vmm.pidfd.wait(PATIENCE).unwrap());
    let error = pagemap.written_and_arm(vmm.addresses.clone(), &mut Vec::new()).unwrap_err();
    assert_eq!(error.errno(), Some(libc::ESRCH));
    pagemap.entries(vmm.addresses.clone(), &mut Vec::new()).unwrap_err();
}

/// Tracking is of one process's page table: each way around it must be handled by who relies on it.
#[test]
fn writes_through_another_mapping_or_the_file_are_not_seen() {
    if skip() {
        return;
    }
    let file = ram_file(PAGES);
    let ram = Ram::shared(&file, PAGES);
    let mut tracker = Tracker::of(&ram);
    tracker.written_and_arm();
    let other = SharedMapping::new(&file, PAGES * PAGE_BYTES, Access::ReadWrite).unwrap();
    other.copy_in(3 * PAGE_BYTES, &[7; 16]).unwrap();
    sterna_sys::file::write_at(&file, 4 * PAGE_BYTES, &[7; 16]).unwrap();
    assert_eq!(tracker.written_and_arm(), []);
    assert_eq!((ram.peek(3, 0), ram.peek(4, 1)), (0x0707_0707_0707_0707, 0x0707_0707_0707_0707));
}

#[test]
fn discarding_an_armed_page_is_not_seen() {
    if skip() {
        return;
    }
    let file = ram_file(PAGES);
    let ram = Ram::shared(&file, PAGES);
    (0..4).for_each(|page| ram.poke(page, 0, 1));
    let mut tracker = Tracker::of(&ram);
    tracker.written_and_arm();
    punch(&file, 0..PAGE_BYTES).unwrap();
    ram.advise(1..2, Advice::LinuxRemove).unwrap();
    ram.advise(2..3, Advice::LinuxDontNeed).unwrap();
    assert_eq!(tracker.written(), []);
    assert_eq!((ram.peek(0, 0), ram.peek(1, 0)), (0, 0), "yet two pages are zero now");
    assert_eq!(ram.peek(2, 0), 1, "the file kept this one");
    ram.poke(0, 0, 5);
    assert_eq!(tracker.written(), [0], "still armed: a write after the discard is seen");
}

/// Threads write all over a RAM file while it is scanned and copied, page by page, through a second mapping: after a
/// last scan without writers both are the same.
#[test]
fn scanning_and_copying_under_writers_loses_no_write() {
    if skip() {
        return;
    }
    const PAGES: u64 = 2048;
    let file = ram_file(PAGES);
    let ram = Ram::shared(&file, PAGES);
    let view = SharedMapping::new(&file, PAGES * PAGE_BYTES, Access::Read).unwrap();
    let mut copy = vec![0u8; (PAGES * PAGE_BYTES) as usize];
    let mut tracker = Tracker::of(&ram);
    let stop = AtomicBool::new(false);
    let mut copied = 0u64;
    let mut round = |tracker: &mut Tracker| {
        for page in tracker.written_and_arm() {
            let range = page * PAGE_BYTES..(page + 1) * PAGE_BYTES;
            view.copy_out(range.clone(), &mut copy[range.start as usize..range.end as usize]);
            copied += 1;
        }
        copied
    };
    std::thread::scope(|scope| {
        for seed in [0x9E37_79B9_7F4A_7C15u64, 0xD1B5_4A32_D192_ED03] {
            let (ram, stop) = (&ram, &stop);
            scope.spawn(move || {
                let mut state = seed;
                while !stop.load(Ordering::Relaxed) {
                    for _ in 0..256 {
                        state ^= state << 13;
                        state ^= state >> 7;
                        state ^= state << 17;
                        ram.poke(state % PAGES, (state >> 32) as usize % 512, state);
                    }
                }
            });
        }
        // For a while, and until the writers had their turn.
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(2)
            || (round(&mut tracker) <= 2 * PAGES && start.elapsed() < PATIENCE)
        {
            round(&mut tracker);
        }
        stop.store(true, Ordering::Relaxed);
    });
    round(&mut tracker);
    assert!(copied > 2 * PAGES, "the writers were at work: {copied} copies");
    let mut scratch = Vec::new();
    let differing = (0..PAGES).filter(|page| {
        let range = page * PAGE_BYTES..(page + 1) * PAGE_BYTES;
        let was = &copy[range.start as usize..range.end as usize];
        view.with_copy(range, &mut scratch, |is| is != was)
    });
    assert_eq!(differing.collect::<Vec<_>>(), [0u64; 0]);
}

#[test]
fn hugetlbfs_is_tracked_by_the_huge_page() {
    const HUGE: u64 = 2 << 20;
    if skip() {
        return;
    }
    let pools = sterna_sys::huge::pools().unwrap();
    if !pools.iter().any(|pool| pool.page_bytes == HUGE && pool.available_bytes() >= 2 * HUGE) {
        return eprintln!("skipped: this host's pool has no two free huge pages (vm.nr_hugepages)");
    }
    let flags = rustix::fs::MemfdFlags::HUGETLB | rustix::fs::MemfdFlags::HUGE_2MB;
    let file = std::fs::File::from(rustix::fs::memfd_create("ram", flags).unwrap());
    file.set_len(2 * HUGE).unwrap();
    assert_eq!(sterna_sys::file::backing(&file).unwrap().page_bytes, HUGE);
    let ram = Ram::shared(&file, 2 * HUGE / PAGE_BYTES);
    let mut tracker = Tracker::of(&ram);
    tracker.written_and_arm();
    ram.poke(700, 0, 1);
    assert_eq!(tracker.written(), (512..1024).collect::<Vec<_>>(), "all of the second huge page");
    assert_eq!(tracker.written_and_arm().len(), 512);
    assert_eq!(tracker.written_and_arm(), []);
    // The kernel knows no holes here, so what was never touched counts as content too.
    let runs = sterna_sys::file::allocated_runs(&file, 0..2 * HUGE).collect::<Result<Vec<_>, _>>().unwrap();
    assert_eq!(runs.len(), 1);
    assert_eq!(runs[0], 0..2 * HUGE);
    assert_eq!(tracker.present(), (512..1024).collect::<Vec<_>>(), "the page table knows better");
}
