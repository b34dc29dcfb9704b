//! RAM in huge pages: what is watched is exact to the page, and no write is lost on the way from huge to small and
//! back.

#[path = "support/mounted.rs"]
mod mounted;
#[path = "support/pair/mod.rs"]
#[allow(dead_code, reason = "each test program uses its own part")]
mod pair;

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use mounted::Mount;
use pair::destination::Destination;
use pair::guest::{GuestRam, Writers};
use pair::inside::InsideSelf;
use pair::source::{Source, SourceVmm};
use pair::{block, outgoing, tracking_works};
use sterna_api::report::Status;
use sterna_api::{MigrateOptions, Mode};
use sterna_engine::agent::{Advice, Discards};
use sterna_engine::error::MigrateError;
use sterna_engine::faults::GuestFaults;
use sterna_engine::inside::Inside;
use sterna_engine::memory::shared::SharedMemory;
use sterna_engine::memory::{BlockFile, Memory};
use sterna_engine::monitor::Monitor;
use sterna_engine::source::migrate;
use sterna_engine::source::track::{Tracker, WriteProtect};
use sterna_protocol::pages::PageMap;
use sterna_sys::file::{self, HugePolicy};
use sterna_sys::map::{Access, SharedMapping};
use sterna_sys::process::Pidfd;
use sterna_sys::userfaultfd::{Features, Userfaultfd};

const MIB: u64 = 1 << 20;
const HUGE: u64 = 2 * MIB;

/// RAM in huge pages, on a file system of its own; `None`, saying why, where there are none.
struct Huge {
    ram: GuestRam,
    _mount: Mount,
    directory: tempfile::TempDir,
}

impl Huge {
    fn new(bytes: u64) -> Option<Self> {
        if !tracking_works() {
            return None;
        }
        let directory = tempfile::tempdir().expect("a directory");
        let mount = Mount::new(directory.path(), None, HugePolicy::Advise)?;
        let ram = GuestRam::huge(bytes, directory.path());
        (0..bytes / 4096).for_each(|page| ram.write_page(page, page as u8));
        if ram.mapped_huge() < bytes {
            println!("skipped: of {bytes} bytes {} are in huge pages: this host has no more", ram.mapped_huge());
            return None;
        }
        Some(Self { ram, _mount: mount, directory })
    }

    fn inside(&self) -> InsideSelf {
        let inside = InsideSelf::default();
        inside.mappings.lock().unwrap().push(Arc::clone(&self.ram.mapping));
        inside
    }

    fn memory(&self) -> SharedMemory {
        let address = self.ram.mapping.addresses().start;
        let file = self.ram.file.try_clone().expect("a descriptor");
        SharedMemory::open(&[BlockFile { spec: block(self.ram.bytes), file, address, process: None }], Access::Read)
            .expect("the RAM, mapped")
    }

    fn tracker(&self, inside: impl Inside + 'static) -> WriteProtect {
        WriteProtect::of(std::process::id(), GuestFaults::of(inside)).expect("our own page tables")
    }

    /// As at rest again: huge pages are wanted, and made.
    fn rest(&self) -> sterna_sys::Result<()> {
        self.ram.mapping.advise_huge(true)?;
        let (this, span) = (Pidfd::open(std::process::id())?, self.ram.mapping.addresses());
        (span.start..span.end).step_by(HUGE as usize).try_for_each(|at| this.collapse(at..at + HUGE))
    }
}

fn collect(tracker: &mut WriteProtect, memory: &SharedMemory) -> PageMap {
    let (mut written, mut discarded) = (PageMap::empty(memory.layout()), PageMap::empty(memory.layout()));
    tracker.collect(memory, &mut written, &mut discarded).expect("a scan");
    written
}

/// 512 pages where RAM is not mapped small before it is watched.
#[test]
fn a_write_to_ram_in_huge_pages_counts_as_one_page_and_the_pages_are_huge_again_afterwards() {
    let Some(huge) = Huge::new(16 * MIB) else { return };
    let (memory, mut tracker) = (huge.memory(), huge.tracker(huge.inside()));
    for _ in 0..3 {
        tracker.arm(&memory).expect("watched");
        assert_eq!(huge.ram.mapped_huge(), 0);
        assert_eq!(tracker.cost().huge_bytes, huge.ram.bytes);
        for page in [5, 700, 701, 4095] {
            huge.ram.write_page(page, 3);
        }
        assert_eq!(collect(&mut tracker, &memory).len(), 4);
        huge.ram.write_page(5, 4);
        assert_eq!(collect(&mut tracker, &memory).len(), 1, "also when it is armed again");
        assert!(huge.rest().is_err(), "nothing is made huge while it is watched");
        tracker.disarm();
        huge.rest().expect("huge pages");
        assert_eq!(huge.ram.mapped_huge(), huge.ram.bytes);
    }
}

/// A VMM's process in which memory cannot be unmapped, as where it is locked, and small pages are not heard of.
struct Stubborn(InsideSelf);

impl Inside for Stubborn {
    fn open(&mut self, features: Features) -> Result<Userfaultfd, MigrateError> {
        self.0.open(features)
    }

    fn open_alone(&mut self, features: Features) -> Result<Userfaultfd, MigrateError> {
        self.0.open_alone(features)
    }

    fn lend(&mut self) -> Result<(), MigrateError> {
        self.0.lend()
    }

    fn log_discards(&mut self) -> Result<(), MigrateError> {
        self.0.log_discards()
    }

    fn reopen(&mut self) -> Result<Option<Userfaultfd>, MigrateError> {
        self.0.reopen()
    }

    fn advise(&mut self, advice: Advice, _: &[Range<u64>]) -> Result<(), MigrateError> {
        if advice == Advice::NoHugePage { Ok(()) } else { Err(MigrateError::Bug("locked memory stays mapped")) }
    }

    fn pid(&self) -> u32 {
        self.0.pid()
    }

    fn discards(&mut self) -> Discards {
        self.0.discards()
    }

    fn close(&mut self) {
        self.0.close();
    }
}

/// 512 pages where what is left huge is not protected entry by entry.
#[test]
fn ram_that_cannot_be_unmapped_is_watched_page_by_page_all_the_same() {
    let Some(huge) = Huge::new(8 * MIB) else { return };
    let (memory, mut tracker) = (huge.memory(), huge.tracker(Stubborn(huge.inside())));
    tracker.arm(&memory).expect("watched");
    huge.ram.write_page(9, 3);
    huge.ram.write_page(1500, 3);
    assert_eq!(collect(&mut tracker, &memory).len(), 2);
}

/// A copy that gets what was collected and nothing else, of a guest that writes all the time, while its RAM goes from
/// huge to small pages and back, again and again.
#[test]
fn no_write_is_lost_while_ram_goes_from_huge_to_small_pages_and_back() {
    let Some(huge) = Huge::new(32 * MIB) else { return };
    let (memory, pages) = (huge.memory(), huge.ram.bytes / 4096);
    let mut copy = vec![0; huge.ram.bytes as usize];
    let mut now = copy.clone();
    let mut tracker = huge.tracker(huge.inside());
    let (mut collected, mut rounds) = (0, 0);
    for turn in 0..6 {
        let mut writers: Vec<_> = (0..2).map(|_| Writers::start(&huge.ram, 0..pages, Duration::ZERO)).collect();
        tracker.arm(&memory).expect("watched");
        huge.ram.file.read_exact_at(&mut copy, 0).expect("read");
        let began = Instant::now();
        // The kernel refuses to make huge pages meanwhile, and nothing comes of it.
        while began.elapsed() < Duration::from_millis(400) || rounds < 10 * (turn + 1) {
            let _ = Pidfd::open(std::process::id()).and_then(|this| {
                let at = huge.ram.mapping.addresses().start + rounds % (huge.ram.bytes / HUGE) * HUGE;
                this.collapse(at..at + HUGE)
            });
            collected += update(&mut copy, &huge, &collect(&mut tracker, &memory));
            rounds += 1;
        }
        writers.iter_mut().for_each(Writers::stop);
        collected += update(&mut copy, &huge, &collect(&mut tracker, &memory));
        huge.ram.file.read_exact_at(&mut now, 0).expect("read");
        let stale = copy.chunks_exact(4096).zip(now.chunks_exact(4096)).filter(|(ours, its)| ours != its).count();
        assert_eq!(stale, 0, "pages were written and not collected");
        let writers = Writers::start(&huge.ram, 0..pages, Duration::ZERO);
        tracker.disarm();
        huge.rest().expect("huge pages, under a writer");
        drop(writers);
        assert_eq!(huge.ram.mapped_huge(), huge.ram.bytes);
    }
    println!("{rounds} rounds, {collected} pages collected");
    assert!(collected > 0);
}

fn update(copy: &mut [u8], huge: &Huge, written: &PageMap) -> u64 {
    for (chunk, pages) in written.iter() {
        for page in pages.iter() {
            let at = chunk.index() * 256 * 4096 + usize::from(page) * 4096;
            huge.ram.file.read_exact_at(&mut copy[at..at + 4096], at as u64).expect("read");
        }
    }
    written.len()
}

/// How much of the file would be mapped by huge pages, bytes, by somebody who asks for them.
fn huge_of(file: File, bytes: u64) -> u64 {
    let mapping = Arc::new(SharedMapping::new(&file, bytes, Access::ReadWrite).expect("a mapping"));
    mapping.advise_huge(true).expect("huge pages");
    let ram = GuestRam { file, mapping, bytes };
    (0..bytes).step_by(HUGE as usize).for_each(|at| ram.mapping.copy_out(at..at + 16, &mut [0; 16]));
    ram.mapped_huge()
}

/// In pre-copy, none is in huge pages where room is not made for dense chunks, and where zeros are holes.
#[test]
fn a_guest_in_huge_pages_arrives_whole_in_every_mode_and_huge_where_rounds_bring_it() {
    for mode in [Mode::Precopy, Mode::StopAndCopy, Mode::Hybrid, Mode::Postcopy] {
        let Some(huge) = Huge::new(64 * MIB) else { return };
        let (host, peer) = Destination::serve();
        host.postcopy.store(true, Ordering::Release);
        *host.huge.lock().unwrap() = Some(huge.directory.path().to_owned());
        // A guest's memory that has never been touched, and memory that is all zeros.
        for page in 8192..9216 {
            huge.ram.write_page(page, 0);
        }
        // What is written before its turn goes later, and not as a huge page: how much that is depends on the machine.
        let writers = Writers::start(&huge.ram, 0..2048, Duration::from_micros(5));
        let leaving = outgoing(&huge.ram, SourceVmm::new(Some(writers)), huge.inside());
        let options = MigrateOptions { mode, verify: true, ..MigrateOptions::default() };
        let outcome = migrate(leaving, &peer, &options, &Source::default(), &Monitor::new("guest"));
        assert_eq!(outcome.report.status, Status::Completed, "{mode:?}: {:?}", outcome.report.error);
        assert_eq!((outcome.report.verify.checked, outcome.report.verify.mismatches), (true, 0), "{mode:?}");
        host.assert_same(&huge.ram);
        let file = host.ram.lock().unwrap().as_ref().expect("a guest came").try_clone().expect("a descriptor");
        let arrived = huge_of(file, huge.ram.bytes);
        println!("{mode:?}: {} MiB of {} arrived in huge pages", arrived / MIB, huge.ram.bytes / MIB);
        // Pages that follow a guest come a few at a time.
        let expected = if mode == Mode::Postcopy { 0 } else { 52 * MIB };
        assert!(arrived >= expected, "{mode:?}: {arrived} of 60 MiB that are not all zeros, 8 of which are written");
    }
}

/// Two guests, one dense and one of which every other page is used: the second gets no memory that it did not have.
#[test]
fn what_is_not_dense_arrives_in_small_pages() {
    let Some(huge) = Huge::new(16 * MIB) else { return };
    let (host, peer) = Destination::serve();
    *host.huge.lock().unwrap() = Some(huge.directory.path().to_owned());
    let pages = huge.ram.bytes / 4096;
    (0..pages / 2)
        .map(|page| page * 2 * 4096)
        .for_each(|at| file::punch(&huge.ram.file, at..at + 4096).expect("a hole"));
    let leaving = outgoing(&huge.ram, SourceVmm::new(None), huge.inside());
    let outcome = migrate(leaving, &peer, &MigrateOptions::default(), &Source::default(), &Monitor::new("guest"));
    assert_eq!(outcome.report.status, Status::Completed, "{:?}", outcome.report.error);
    let there = host.ram.lock().unwrap().as_ref().expect("a guest came").try_clone().expect("a descriptor");
    // Before anybody looks: a look at a hole gives it memory.
    assert_eq!(file::allocated_bytes(&there).expect("its size"), huge.ram.bytes / 2);
    host.assert_same(&huge.ram);
}
