//! QEMUs that are in their guests' hands: what they do to their own RAM and descriptors costs their own guest, is said
//! to be their doing, and leaves this process and every other guest alone.

#[path = "support/mounted.rs"]
mod mounted;
#[path = "support/pair/mod.rs"]
#[allow(dead_code, reason = "each test program uses its own part")]
mod pair;

use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use mounted::Mount;
use pair::destination::Destination;
use pair::guest::GuestRam;
use pair::inside::InsideSelf;
use pair::source::{Source, SourceVmm};
use pair::{outgoing, tracking_works};
use sterna_api::options::Compress;
use sterna_api::report::Status;
use sterna_api::{Blame, MigrateOptions, Mode, Problem};
use sterna_engine::monitor::Monitor;
use sterna_engine::source::{Fate, Outcome, migrate};
use sterna_sys::file::HugePolicy;
use sterna_sys::map::{Access, SharedMapping};

const MIB: u64 = 1 << 20;
const PAGES: u64 = 2048;

fn guest() -> GuestRam {
    let ram = GuestRam::new(PAGES * 4096);
    (0..PAGES).for_each(|page| ram.write_page(page, 5));
    ram
}

fn run(outgoing: sterna_engine::source::Outgoing, peer: &str, options: &MigrateOptions) -> Outcome {
    migrate(outgoing, peer, options, &Source::default(), &Monitor::new("guest"))
}

fn problem(outcome: &Outcome) -> &Problem {
    outcome.report.error.as_ref().expect("it fails")
}

/// Another guest can be moved, now.
fn another_guest_is_moved() {
    let (host, peer) = Destination::serve();
    let ram = guest();
    let options = MigrateOptions { verify: true, ..MigrateOptions::default() };
    let outcome = run(outgoing(&ram, SourceVmm::new(None), InsideSelf::default()), &peer, &options);
    assert_eq!(outcome.report.status, Status::Completed, "{:?}", outcome.report.error);
    host.assert_same(&ram);
}

/// Every way in which a source reads guest RAM.
fn ways() -> Vec<MigrateOptions> {
    let plain = MigrateOptions { verify: true, ..MigrateOptions::default() };
    vec![
        plain.clone(),
        MigrateOptions { streams: 2, ..plain.clone() },
        MigrateOptions { compress: Compress::Lz4, ..plain.clone() },
        MigrateOptions { mode: Mode::StopAndCopy, ..plain },
    ]
}

/// Seen to fail: with the handler taken out the process ends with "signal: 7, SIGBUS".
#[test]
fn a_qemu_that_cuts_its_ram_file_short_costs_its_own_guest_a_migration() {
    if !tracking_works() {
        return;
    }
    for options in ways() {
        let (host, peer) = Destination::serve();
        let ram = guest();
        let mut vmm = SourceVmm::new(None);
        let (file, touched) = (ram.file.try_clone().unwrap(), Arc::clone(&ram.mapping));
        vmm.faults.at_stop = Some(Box::new(move || {
            (0..PAGES).for_each(|page| touched.copy_in(page * 4096, &[6; 4096]).unwrap());
        }));
        // They have been collected, and are read next.
        vmm.faults.while_saving = Some(Box::new(move || file.set_len(MIB).unwrap()));
        let outcome = run(outgoing(&ram, vmm, InsideSelf::default()), &peer, &options);
        let problem = problem(&outcome);
        assert_eq!((problem.code.as_str(), problem.blame), ("ram-cut-short", Blame::Qemu), "{problem:?}");
        assert_eq!(outcome.fate, Fate::Here);
        assert!(!host.running.load(Ordering::Acquire), "a guest that lost its RAM runs at the destination");
    }
    another_guest_is_moved();
}

/// What is behind the end looks like a hole: nothing is read there. Seen to fail without the look at the file's length:
/// the migration succeeded, with zeros.
#[test]
fn a_file_that_was_cut_short_is_not_taken_for_one_of_holes() {
    if !tracking_works() {
        return;
    }
    for mode in [Mode::Precopy, Mode::StopAndCopy, Mode::Postcopy] {
        let (host, peer) = Destination::serve();
        host.postcopy.store(true, Ordering::Release);
        let ram = guest();
        let mut vmm = SourceVmm::new(None);
        let file = ram.file.try_clone().unwrap();
        vmm.faults.at_stop = Some(Box::new(move || file.set_len(MIB).unwrap()));
        let options = MigrateOptions { mode, ..MigrateOptions::default() };
        let outcome = run(outgoing(&ram, vmm, InsideSelf::default()), &peer, &options);
        assert_ne!(outcome.report.status, Status::Completed);
        assert_eq!((problem(&outcome).blame, outcome.fate), (Blame::Qemu, Fate::Here), "{:?}", problem(&outcome));
        assert!(!host.running.load(Ordering::Acquire));
    }
}

/// Seen to fail: with nobody looking at the file's length it was a "verify-mismatch" and our fault.
#[test]
fn a_destination_whose_qemu_cuts_its_ram_file_short_blames_it() {
    if !tracking_works() {
        return;
    }
    let (host, peer) = Destination::serve();
    let ram = guest();
    let mut vmm = SourceVmm::new(None);
    let there = Arc::clone(&host);
    vmm.faults.while_saving = Some(Box::new(move || there.ram.lock().unwrap().as_ref().unwrap().set_len(MIB).unwrap()));
    let options = MigrateOptions { verify: true, ..MigrateOptions::default() };
    let outcome = run(outgoing(&ram, vmm, InsideSelf::default()), &peer, &options);
    let problem = problem(&outcome);
    assert_eq!((problem.code.as_str(), problem.blame), ("ram-cut-short", Blame::Qemu), "{problem:?}");
    assert!(problem.message.starts_with("at the destination"), "{problem:?}");
    assert_eq!(outcome.fate, Fate::Here);
    assert!(!host.running.load(Ordering::Acquire));
    another_guest_is_moved();
}

/// A page that the guest gave back between the collection and its reading, on a file system that is full: it cannot be
/// filled to be read. Nobody in QEMU is to blame. Seen to fail: with the handler taken out the process ends with
/// "signal: 7, SIGBUS".
#[test]
fn a_full_ram_file_system_is_the_hosts_fault() {
    if !tracking_works() {
        return;
    }
    let (host, peer) = Destination::serve();
    let directory = tempfile::tempdir().unwrap();
    let mut ram = guest();
    let (_mount, full) = full_tmpfs(directory.path());
    full.set_len(PAGES * 4096).unwrap();
    ram.mapping = Arc::new(SharedMapping::new(&full, PAGES * 4096, Access::ReadWrite).unwrap());
    ram.file = full;
    (0..PAGES).for_each(|page| ram.write_page(page, 5));
    let mut vmm = SourceVmm::new(None);
    let (file, touched) = (ram.file.try_clone().unwrap(), Arc::clone(&ram.mapping));
    let ballast = directory.path().join("ballast");
    vmm.faults.at_stop = Some(Box::new(move || {
        (0..PAGES).for_each(|page| touched.copy_in(page * 4096, &[6; 4096]).unwrap());
        // Given back, unsaid: it is written, and so it is to be sent. What it had is taken at once.
        sterna_sys::file::punch(&file, 0..MIB).unwrap();
        std::fs::write(ballast, vec![1; MIB as usize]).unwrap();
    }));
    let outcome = run(outgoing(&ram, vmm, InsideSelf::default()), &peer, &MigrateOptions::default());
    let problem = problem(&outcome);
    assert_eq!((problem.code.as_str(), problem.blame), ("ram-full", Blame::Host), "{problem:?}");
    assert_eq!(outcome.fate, Fate::Here);
    assert!(!host.running.load(Ordering::Acquire));
}

/// A file on a tmpfs that has room for exactly the guest.
fn full_tmpfs(directory: &Path) -> (Mount, File) {
    let mount = Mount::new(directory, Some(PAGES * 4096), HugePolicy::Never).expect("a mount");
    let mut options = File::options();
    (mount, options.read(true).write(true).create_new(true).open(directory.join("ram")).unwrap())
}
