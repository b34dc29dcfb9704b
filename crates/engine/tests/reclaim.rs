//! Free memory given back to the host, on real mappings with a real fence: the guest is a kernel made for it, with
//! nothing but a memory map, and what a test does to both.

#[path = "support/mounted.rs"]
mod mounted;
#[path = "support/pair/mod.rs"]
#[allow(dead_code, reason = "each test program uses its own part")]
mod pair;
#[path = "support/taking.rs"]
mod taking;
#[path = "support/toy.rs"]
#[allow(dead_code, reason = "each test program uses its own part")]
mod toy;

use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use mounted::Mount;
use pair::guest::GuestRam;
use pair::inside::InsideSelf;
use pair::tracking_works;
use sterna_api::Reclaimed;
use sterna_engine::destination::arrival::Arrival;
use sterna_engine::faults::GuestFaults;
use sterna_engine::faults::fence::Fence;
use sterna_engine::memory::Memory;
use sterna_engine::memory::shared::SharedMemory;
use sterna_engine::monitor::Monitor;
use sterna_engine::paging::supplier::Whose;
use sterna_engine::paging::{Pager, PagingMeans};
use sterna_engine::reclaim::ReclaimError;
use sterna_introspect::Unfit;
use sterna_introspect::toy::NOTE;
use sterna_protocol::layout::{ChunkIndex, PageIndex};
use sterna_protocol::pages::{PageMap, PageSet};
use sterna_sys::file::HugePolicy;
use sterna_sys::map::Access;
use taking::{Churn, Vmm, differing, faults_of, take_beside, take_but_for};
use toy::{PAGES, ToyGuest, USED};

fn take_with(mut vmm: Vmm, careless: bool, monitor: &Monitor) -> (Reclaimed, Result<(), ReclaimError>) {
    let (faults, kept) = faults_of(&vmm.guest);
    let (account, done) = take_beside(&faults, &mut vmm, careless, monitor);
    assert!(kept.lock().unwrap().is_none(), "nobody keeps a duplicate");
    (account, done)
}

fn take(guest: &Arc<ToyGuest>) -> Reclaimed {
    let (account, done) = take_with(Vmm::of(guest), false, &Monitor::new("guest"));
    done.unwrap_or_else(|error| panic!("{error:?}: {account:?}"));
    account
}

/// Pages of `pages` that have memory.
fn allocated(guest: &ToyGuest, pages: Range<u64>) -> Vec<u64> {
    let runs = sterna_sys::file::allocated_runs(&guest.ram.file, pages.start * 4096..pages.end * 4096);
    runs.flat_map(|run| run.map(|run| run.start / 4096..run.end / 4096).expect("the file's holes")).collect()
}

#[test]
fn what_the_guest_holds_free_is_given_back_and_nothing_else() {
    if !tracking_works() {
        return;
    }
    let guest = ToyGuest::new();
    guest.free(0x2000..0x2c00);
    guest.change(|toy| toy.free(0x2c10, 2));
    let account = take(&guest);
    assert_eq!((account.free_pages, account.candidate_pages), (3076, 3076), "{account:?}");
    assert_eq!((account.reclaimed_pages, account.put_back_pages, account.waits), (3076, 0, 0), "{account:?}");
    assert_eq!(account.allocated_before_bytes - account.allocated_after_bytes, 3076 * 4096);
    assert_eq!((account.kernel.as_deref(), account.gave_way, account.touched_pages), (Some("6.18.0-toy"), 0, 0));
    assert!(account.portions > 1 && account.looks == account.portions + 1 && account.longest_wait_ms == 0.0);
    let left: Vec<u64> = (0x2c00..0x2c10).chain(0x2c14..0x3400).collect();
    assert_eq!(allocated(&guest, USED), left);
    assert_eq!(differing(&guest, 0x2c14..0x3400, 7), Vec::<u64>::new());
    // Nothing is fenced in any more, and there is nothing left to take.
    guest.fill(USED, 8);
    guest.change(|toy| toy.allocate(0x2000, 10));
    let again = take(&guest);
    assert_eq!(again.reclaimed_pages, 2052, "what was written again although it is free is taken again: {again:?}");
    assert_eq!(differing(&guest, 0x2000..0x2400, 8), Vec::<u64>::new());
    assert_eq!(take(&guest).candidate_pages, 0);
}

/// A hole in a huge page that the guest uses splits it.
#[test]
fn huge_pages_are_taken_whole_or_in_large_parts_and_left_where_little_of_them_is_free() {
    if !tracking_works() {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let Some(_mount) = Mount::new(directory.path(), None, HugePolicy::Advise) else { return };
    let guest = ToyGuest::on(GuestRam::huge(PAGES * 4096, directory.path()));
    let huge = guest.ram.mapped_huge();
    if huge < (USED.end - USED.start) * 4096 {
        println!("skipped: {huge} bytes are in huge pages: this host has no more");
        return;
    }
    guest.free(0x2000..0x2400);
    guest.change(|toy| {
        toy.free(0x2420, 5);
        toy.free(0x2a00, 6);
    });
    let account = take(&guest);
    assert_eq!((account.candidate_pages, account.reclaimed_pages), (1024 + 32 + 64, 1024 + 64), "{account:?}");
    assert_eq!(account.left_huge_pages, 32, "{account:?}");
    assert_eq!(differing(&guest, 0x2400..0x2a00, 7), Vec::<u64>::new(), "also what is free and was left");
    assert_eq!(allocated(&guest, 0x2000..0x2400), Vec::<u64>::new());
    assert_eq!(huge - guest.ram.mapped_huge(), 3 << 21, "two that are gone, and one with a hole");
    // What is left with small pages is taken to the last.
    guest.change(|toy| toy.free(0x2a50, 2));
    assert_eq!(take(&guest).reclaimed_pages, 4);
}

#[test]
fn a_guest_whose_free_pages_cannot_be_told_keeps_them() {
    if !tracking_works() {
        return;
    }
    let guest = ToyGuest::new();
    guest.free(0x2000..0x2c00);
    guest.change(|toy| toy.ram.write(NOTE, &[0; 64]));
    let (account, done) = take_with(Vmm::of(&guest), false, &Monitor::new("guest"));
    let problem = done.unwrap_err().problem();
    assert_eq!(problem.code, "guest-unfit");
    assert!(problem.with_causes().contains("VMCOREINFO") && problem.hint.is_some(), "{problem:?}");
    assert_eq!((account.reclaimed_pages, differing(&guest, USED, 7)), (0, vec![]));
}

#[test]
fn a_guest_that_is_reset_on_the_way_loses_nothing_more() {
    if !tracking_works() {
        return;
    }
    let guest = ToyGuest::new();
    guest.free(0x2000..0x3400);
    // Asked twice before the first portion.
    let vmm = Vmm { at_question: Box::new(|questions| questions == 4), ..Vmm::of(&guest) };
    let (account, done) = take_with(vmm, false, &Monitor::new("guest"));
    assert!(matches!(done, Err(ReclaimError::Unfit(Unfit::Replaced { .. }))), "{done:?}");
    assert!(account.reclaimed_pages > 0 && account.portions == 2, "{account:?}");
    let taken = 0x2000 + account.reclaimed_pages;
    assert_eq!(allocated(&guest, USED), (taken..0x3400).collect::<Vec<_>>());
    assert_eq!(differing(&guest, taken..0x3400, 7), Vec::<u64>::new());
    guest.fill(USED, 8);
}

#[test]
fn a_kernel_that_counts_nothing_yet_is_not_believed() {
    if !tracking_works() {
        return;
    }
    // As if the same kernel had just been started in the same place: its memory map is the earlier one's.
    let guest = ToyGuest::new();
    guest.free(0x2000..0x2800);
    let starting = Arc::clone(&guest);
    let at_question = move |questions| {
        if questions == 2 {
            starting.change(|toy| toy.forget_counts());
        }
        false
    };
    let vmm = Vmm { at_question: Box::new(at_question), ..Vmm::of(&guest) };
    let (account, done) = take_with(vmm, false, &Monitor::new("guest"));
    done.unwrap();
    assert_eq!((account.reclaimed_pages, account.put_back_pages), (0, 2048), "{account:?}");
    assert_eq!(differing(&guest, USED, 7), Vec::<u64>::new());
}

#[test]
fn a_cancelled_run_stops_and_what_it_took_stays_taken() {
    if !tracking_works() {
        return;
    }
    let guest = ToyGuest::new();
    guest.free(0x2000..0x3400);
    let monitor = Arc::new(Monitor::new("guest"));
    let cancelling = Arc::clone(&monitor);
    let at_question = move |questions| {
        if questions == 3 {
            cancelling.cancel();
        }
        false
    };
    let vmm = Vmm { at_question: Box::new(at_question), ..Vmm::of(&guest) };
    let (account, done) = take_with(vmm, false, &monitor);
    assert!(matches!(done, Err(ReclaimError::Cancelled)), "{done:?}");
    assert!((1..=4096).contains(&account.reclaimed_pages), "{account:?}");
    assert_eq!(account.allocated_before_bytes - account.allocated_after_bytes, account.reclaimed_bytes);
    guest.fill(USED, 8);
}

#[test]
fn a_vmm_that_waits_for_a_fenced_page_itself_has_it_let_go() {
    if !tracking_works() {
        return;
    }
    let guest = ToyGuest::new();
    guest.free(0x2000..0x2400);
    let writing = Arc::clone(&guest);
    let at_question = move |questions| {
        // Its answer comes only after a write to what is fenced in.
        if questions == 2 {
            writing.fill(0x2000..0x2001, 9);
        }
        false
    };
    let vmm = Vmm { at_question: Box::new(at_question), ..Vmm::of(&guest) };
    // That it comes to an end shows that nobody waits for the other.
    let (account, done) = take_with(vmm, false, &Monitor::new("guest"));
    done.unwrap();
    assert_eq!((account.gave_way, account.waits), (1, 1), "{account:?}");
    assert!(account.longest_wait_ms > 0.0, "{account:?}");
    assert!(account.put_back_pages > 0 && account.reclaimed_pages > 0, "{account:?}");
    assert_eq!(differing(&guest, 0x2000..0x2001, 9), Vec::<u64>::new());
}

#[test]
fn a_fence_whose_owner_is_gone_holds_nobody() {
    if !tracking_works() {
        return;
    }
    let guest = ToyGuest::new();
    let addresses = guest.ram.mapping.addresses();
    let fence = Fence::new(GuestFaults::of(InsideSelf::default()), vec![addresses.clone()]).unwrap();
    let at = addresses.start + (USED.start << 12);
    let (page, written) = (at..at + 4096, Arc::new(AtomicBool::new(false)));
    // Never let go: only the end of the descriptor does.
    std::mem::forget(fence.close(vec![page], &fence.patience(Duration::MAX)).unwrap().expect("nobody waits yet"));
    let (writing, done) = (Arc::clone(&guest), Arc::clone(&written));
    let writer = std::thread::spawn(move || {
        writing.fill(USED.start..USED.start + 1, 9);
        done.store(true, Ordering::Release);
    });
    while fence.waits().unwrap() == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(!written.load(Ordering::Acquire), "it waits");
    assert_eq!(differing(&guest, USED, 7), Vec::<u64>::new(), "and who reads does not");
    fence.die();
    writer.join().expect("it goes on");
    assert_eq!(differing(&guest, USED.start..USED.start + 1, 9), Vec::<u64>::new());
}

/// Takes memory of a guest under churn again and again.
fn churned(careless: bool, times: u32) -> (u64, Vec<Reclaimed>) {
    let guest = ToyGuest::new();
    let churn = Churn::start(&guest);
    let mut accounts = Vec::new();
    for _ in 0..times {
        let (account, done) = take_with(Vmm::of(&guest), careless, &Monitor::new("guest"));
        match done {
            Ok(()) => accounts.push(account),
            // The toy frees and allocates much more of its memory meanwhile than a guest can.
            Err(ReclaimError::Unfit(Unfit::CountersDisagree { .. })) => {}
            Err(error) => panic!("{error:?}: {account:?}"),
        }
    }
    (churn.end(), accounts)
}

#[test]
fn a_guest_that_allocates_and_frees_all_the_time_loses_no_page() {
    if !tracking_works() {
        return;
    }
    let (bad, accounts) = churned(false, 100);
    let sum = |of: fn(&Reclaimed) -> u64| accounts.iter().map(of).sum::<u64>();
    println!(
        "{} runs: {} pages taken, {} put back, {} waits, {} portions let go",
        accounts.len(),
        sum(|account| account.reclaimed_pages),
        sum(|account| account.put_back_pages),
        sum(|account| account.waits),
        sum(|account| account.gave_way)
    );
    assert_eq!(bad, 0);
    assert!(sum(|account| account.reclaimed_pages) > 1000 && sum(|account| account.put_back_pages) > 0);
}

#[test]
fn what_was_free_once_and_is_taken_without_another_look_is_lost() {
    // Shows that the test above can fail.
    if tracking_works() {
        assert!((0..5).any(|_| churned(true, 100).0 > 0), "nothing was lost");
    }
}

/// The guest runs on here, and these pages are still to come: what its RAM has in their place is stale.
fn arriving(guest: &ToyGuest, away: impl Iterator<Item = u64>) -> Arc<Pager> {
    let inside = InsideSelf::default();
    inside.mappings.lock().unwrap().push(Arc::clone(&guest.ram.mapping));
    guest.ram.mapping.dont_need(0..guest.ram.bytes).unwrap();
    let ram = Arc::new(SharedMemory::open(&[guest.block()], Access::ReadWrite).unwrap());
    let mut residue = PageMap::empty(ram.layout());
    for page in away {
        guest.ram.file.write_all_at(&[0xee; 4096], page * 4096).unwrap();
        residue.insert(at(page));
    }
    let missing = tempfile::tempfile_in("/dev/shm").unwrap();
    let pager = Pager::open(ram, PagingMeans { inside: Box::new(inside), missing }, None).unwrap();
    pager.begin(residue).unwrap();
    pager
}

fn at(page: u64) -> PageIndex {
    PageIndex { chunk: ChunkIndex((page / 256) as u32), page: (page % 256) as u8 }
}

/// The bodies of these pages of a chunk come, each filled with `byte`.
fn come(pager: &Pager, chunk: ChunkIndex, pages: PageSet, byte: u8) {
    let bodies = vec![byte; pages.len() * 4096];
    let arrival =
        Arrival { chunk, bodies: &[(pages, &bodies)], zero: PageSet::EMPTY, pooled: None, suspect: PageSet::EMPTY };
    pager.place(Whose::Source, &arrival).unwrap();
}

/// Takes memory of a guest that runs before all its pages are here.
fn take_while_arriving(guest: &Arc<ToyGuest>, pager: &Pager) -> (Reclaimed, Result<(), ReclaimError>) {
    let (mut vmm, monitor) = (Vmm::of(guest), Monitor::new("guest"));
    take_but_for(pager.guest_faults(), &mut vmm, Some(pager.missing_pages()), false, &monitor)
}

#[test]
fn of_a_guest_whose_pages_follow_it_only_what_is_here_is_taken() {
    if !tracking_works() {
        return;
    }
    let guest = ToyGuest::new();
    guest.free(0x2000..0x2c00);
    let pager = arriving(&guest, (0x2010..0x2020).chain(0x2d00..0x2d10));
    let (account, done) = take_while_arriving(&guest, &pager);
    done.unwrap();
    assert_eq!((account.free_pages, account.candidate_pages, account.reclaimed_pages), (3072, 3056, 3056));
    assert_eq!(allocated(&guest, 0x2000..0x2c00), (0x2010..0x2020).collect::<Vec<_>>());
    assert_eq!(pager.missing(), 32);
    let sees = |page: u64| {
        let mapping = Arc::clone(&guest.ram.mapping);
        std::thread::spawn(move || {
            let mut body = [1; 4096];
            mapping.copy_out(page * 4096..(page + 1) * 4096, &mut body);
            body
        })
    };
    assert_eq!(sees(0x2000).join().unwrap(), [0; 4096], "what was taken is zeros, and nobody is asked for it");
    let (free, used) = (sees(0x2010), sees(0x2d00));
    while pager.fault_count() < 2 {
        std::thread::yield_now();
    }
    // Both sides are compared without what was taken.
    assert_eq!(pager.given_back(at(0x2000).chunk).without(pager.missing_pages().chunk(at(0x2000).chunk)).len(), 240);
    for page in [0x2010, 0x2d00] {
        let chunk = at(page).chunk;
        come(&pager, chunk, *pager.missing_pages().chunk(chunk), 9);
    }
    assert_eq!((free.join().unwrap(), used.join().unwrap()), ([9; 4096], [9; 4096]));
    assert_eq!(pager.missing(), 0);
    pager.end();
}

#[test]
fn nothing_is_taken_of_a_guest_whose_kernel_is_still_to_come() {
    if !tracking_works() {
        return;
    }
    let guest = ToyGuest::new();
    guest.free(0x2000..0x2c00);
    let pager = arriving(&guest, 0..0x2000);
    let (account, done) = take_while_arriving(&guest, &pager);
    assert!(matches!(done, Err(ReclaimError::Arriving)), "{done:?}");
    assert_eq!((account.reclaimed_pages, pager.missing(), pager.fault_count()), (0, 0x2000, 0));
    pager.end();
}

#[test]
fn free_memory_is_taken_while_pages_come_and_the_guest_writes_and_no_page_is_lost() {
    if !tracking_works() {
        return;
    }
    let guest = ToyGuest::new();
    let pager = arriving(&guest, USED.step_by(3));
    let churn = Churn::start(&guest);
    let stop = Arc::new(AtomicBool::new(false));
    let taking = {
        let (guest, pager, stop) = (Arc::clone(&guest), Arc::clone(&pager), Arc::clone(&stop));
        std::thread::spawn(move || {
            let mut taken = 0;
            while !stop.load(Ordering::Acquire) || taken == 0 {
                let (account, done) = take_while_arriving(&guest, &pager);
                taken += account.reclaimed_pages;
                // The toy frees and allocates much more of its memory meanwhile than a guest can.
                let churns = matches!(done, Err(ReclaimError::Unfit(Unfit::CountersDisagree { .. })));
                assert!(done.is_ok() || churns, "{done:?}: {account:?}");
            }
            taken
        })
    };
    for chunk in at(USED.start).chunk.0..=at(USED.end - 1).chunk.0 {
        let chunk = ChunkIndex(chunk);
        let missing = *pager.missing_pages().chunk(chunk);
        for page in missing.iter() {
            let mut one = PageSet::EMPTY;
            one.insert(page);
            come(&pager, chunk, one, 7);
            std::thread::sleep(Duration::from_micros(500));
        }
    }
    stop.store(true, Ordering::Release);
    assert!(taking.join().unwrap() > 0);
    assert_eq!((churn.end(), pager.missing()), (0, 0), "the guest lost pages");
    pager.end();
}
