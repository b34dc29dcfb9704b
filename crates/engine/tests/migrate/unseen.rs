//! Changes of RAM that tracking does not see: discards, writes past the page tables.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use sterna_api::report::Status;
use sterna_api::{MigrateOptions, Mode, Problem};
use sterna_engine::agent::{Discard, UnderWay};
use sterna_engine::source::Outcome;
use sterna_engine::vmm::Untracked;

use crate::fixture::{MIB, code, run, verified};
use crate::pair::destination::Destination;
use crate::pair::guest::GuestRam;
use crate::pair::inside::InsideSelf;
use crate::pair::source::SourceVmm;
use crate::pair::{outgoing, tracking_works};

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
    vmm.faults.writes_untracked = if told == Told::WhenAsked { Untracked::Reads } else { Untracked::Nobody };
    vmm.faults.at_stop = Some(Box::new(move || {
        std::os::unix::fs::FileExt::write_all_at(&file, &[8; 4096], 77 * 4096).unwrap();
    }));
    let mut outgoing = outgoing(&ram, vmm, InsideSelf::default());
    outgoing.untracked = if told == Told::Before { Untracked::Reads } else { Untracked::Nobody };
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
    outgoing.untracked = Untracked::Reads;
    let report = run(outgoing, &peer, &verified(1)).report;
    assert_eq!((report.status, report.tracking.untracked_writes), (Status::Completed, 1));
    assert_eq!(sterna_sys::file::allocated_bytes(&ram.file).unwrap(), 1001 * 4096, "looking at the holes filled them");
    host.assert_same(&ram);
}

/// The page that something is read into past the page tables.
const READ_INTO: u64 = 77;

/// Moves a guest whose process tells of its reads by `tells`, given the look's number and the address of that page;
/// `lands` writes that page past the page tables, and is called at the stop where `tells` has not called it before.
fn told(
    untracked: Untracked,
    mut tells: impl FnMut(u32, u64, &mut dyn FnMut()) -> UnderWay + Send + 'static,
) -> Outcome {
    let (host, peer) = Destination::serve();
    let ram = GuestRam::new(8 * MIB);
    (0..2000).for_each(|page| ram.write_page(page, 5));
    let write = {
        let file = Arc::new(ram.file.try_clone().unwrap());
        move || std::os::unix::fs::FileExt::write_all_at(&*file, &[8; 4096], READ_INTO * 4096).unwrap()
    };
    let has_landed = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let lands = {
        let has_landed = Arc::clone(&has_landed);
        move || {
            if !has_landed.swap(true, Ordering::AcqRel) {
                write();
            }
        }
    };
    let address = ram.mapping.addresses().start + READ_INTO * 4096;
    let (mut looks, mut at_look) = (0, lands.clone());
    let inside = InsideSelf {
        under_way: Some(Box::new(move || {
            looks += 1;
            tells(looks, address, &mut at_look)
        })),
        ..InsideSelf::default()
    };
    let mut vmm = SourceVmm::new(None);
    vmm.faults.at_stop = Some(Box::new(lands));
    let mut outgoing = outgoing(&ram, vmm, inside);
    outgoing.untracked = untracked;
    let outcome = run(outgoing, &peer, &verified(1));
    assert!(has_landed.load(Ordering::Acquire));
    if outcome.report.error.is_none() {
        host.assert_same(&ram);
    }
    outcome
}

fn at(address: u64) -> UnderWay {
    UnderWay::Ranges(std::iter::once(address..address + 4096).collect())
}

fn nothing() -> UnderWay {
    UnderWay::Ranges(Vec::new())
}

/// Its content shows that it has landed: in the next round, or with the guest stopped. Nothing else is compared.
#[test]
fn a_read_that_was_under_way_when_its_page_was_watched_anew_is_followed_until_it_has_landed() {
    if !tracking_works() {
        return;
    }
    let of = |outcome: Outcome| (outcome.report.status, outcome.report.tracking.untracked_writes);
    let while_it_runs = told(Untracked::Reads, |look, address, lands| match look {
        1 => at(address),
        _ => {
            lands();
            nothing()
        }
    });
    assert_eq!(of(while_it_runs), (Status::Completed, 1));
    // Until the last look before the stop: it lands when the guest stops, and is in no table afterwards.
    let stopped = Arc::new(std::sync::atomic::AtomicU32::new(0));
    let looks = Arc::clone(&stopped);
    let count = told(Untracked::Reads, move |look, _, _| {
        looks.store(look, Ordering::Release);
        nothing()
    });
    assert_eq!(code(&count), "verify-mismatch", "the test would pass without what it is told");
    let last = stopped.load(Ordering::Acquire);
    let when_stopped =
        told(Untracked::Reads, move |look, address, _| if look < last { at(address) } else { nothing() });
    assert_eq!(of(when_stopped), (Status::Completed, 1));
}

/// Where one look does not tell, where something is under way although the guest stands still, and where others than
/// reads write past the page tables, all pages are compared.
#[test]
fn where_not_every_read_is_told_of_content_tells() {
    if !tracking_works() {
        return;
    }
    let of = |outcome: Outcome| (outcome.report.status, outcome.report.tracking.untracked_writes);
    let lost = |look, _, _: &mut dyn FnMut()| if look == 2 { UnderWay::Lost } else { nothing() };
    assert_eq!(of(told(Untracked::Reads, lost)), (Status::Completed, 1));
    let anything = |look, _, _: &mut dyn FnMut()| if look == 1 { UnderWay::Anything } else { nothing() };
    assert_eq!(
        code(&told(Untracked::Reads, anything)),
        "verify-mismatch",
        "one that is being noted is looked for again"
    );
    let always = |_, _, _: &mut dyn FnMut()| UnderWay::Anything;
    assert_eq!(of(told(Untracked::Reads, always)), (Status::Completed, 1));
    let elsewhere = |_, address: u64, _: &mut dyn FnMut()| at(address + 4096);
    assert_eq!(of(told(Untracked::Reads, elsewhere)), (Status::Completed, 1));
    assert_eq!(of(told(Untracked::Others, |_, _, _| nothing())), (Status::Completed, 1));
}
