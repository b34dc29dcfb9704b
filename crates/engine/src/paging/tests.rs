//! The pager on real mappings: this process is also the VMM, its threads are the guest, and the tests place the
//! "source's" pages themselves.

use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::AtomicU64;

use sterna_protocol::frame::Digester;
use sterna_protocol::layout::ChunkIndex;
use sterna_protocol::pages::PageSet;
use sterna_protocol::spec::BlockSpec;
use sterna_sys::map::{Access, SharedMapping};
use sterna_sys::userfaultfd::{self, Features, Userfaultfd};

use super::supplier::{Supplier, Whose};
use super::whereabouts::Holder;
use super::*;
use crate::agent::{Advice, Discard, Discards};
use crate::destination::arrival::Arrival;
use crate::memory::BlockFile;
use crate::memory::shared::SharedMemory;

const PAGES: u64 = 1024;

/// Whether this kernel and this user can run the tests; where not, it prints why they are skipped.
fn works() -> bool {
    let missing = sterna_sys::probe::missing();
    if !missing.is_empty() {
        println!("skipped: {}", missing.join("; "));
    }
    missing.is_empty()
}

/// This process as the VMM; it keeps a duplicate as the agent does.
#[derive(Clone)]
struct Here {
    kept: Arc<Mutex<Option<OwnedFd>>>,
    mapping: Arc<SharedMapping>,
    log: Arc<Mutex<Vec<Discard>>>,
}

impl Inside for Here {
    fn open(&mut self, features: Features) -> Result<Userfaultfd, MigrateError> {
        let made = Userfaultfd::create(userfaultfd::open_device().unwrap()).unwrap();
        made.enable(features).unwrap();
        *self.kept.lock().unwrap() = Some(made.as_fd().try_clone_to_owned().unwrap());
        Ok(made)
    }

    fn open_alone(&mut self, _: Features) -> Result<Userfaultfd, MigrateError> {
        unreachable!("a pager never asks for it")
    }

    fn log_discards(&mut self) -> Result<(), MigrateError> {
        Ok(())
    }

    fn lend(&mut self) -> Result<(), MigrateError> {
        *self.kept.lock().unwrap() = None;
        Ok(())
    }

    fn reopen(&mut self) -> Result<Option<Userfaultfd>, MigrateError> {
        Ok(self.kept.lock().unwrap().as_ref().map(|kept| kept.try_clone().unwrap().into()))
    }

    fn advise(&mut self, _: Advice, ranges: &[Range<u64>]) -> Result<(), MigrateError> {
        let base = self.mapping.addresses().start;
        ranges.iter().for_each(|range| self.mapping.dont_need(range.start - base..range.end - base).unwrap());
        Ok(())
    }

    fn pid(&self) -> u32 {
        std::process::id()
    }

    fn discards(&mut self) -> Discards {
        Discards::Ranges(std::mem::take(&mut *self.log.lock().unwrap()))
    }

    fn close(&mut self) {
        *self.kept.lock().unwrap() = None;
    }
}

struct Guest {
    here: Here,
    file: File,
    map: File,
}

impl Guest {
    fn new() -> Self {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(PAGES * 4096).unwrap();
        let mapping = Arc::new(SharedMapping::new(&file, PAGES * 4096, Access::ReadWrite).unwrap());
        let map = tempfile::tempfile_in("/dev/shm").unwrap();
        Self { here: Here { kept: Arc::default(), mapping, log: Arc::default() }, file, map }
    }

    fn blocks(&self) -> Vec<BlockFile> {
        let spec = BlockSpec { id: "ram".into(), bytes: PAGES * 4096, page_bytes: 4096, path: String::new() };
        vec![BlockFile {
            spec,
            file: self.file.try_clone().unwrap(),
            address: self.here.mapping.addresses().start,
            process: None,
        }]
    }

    fn means(&self) -> PagingMeans {
        PagingMeans { inside: Box::new(self.here.clone()), missing: self.map.try_clone().unwrap() }
    }

    fn ram(&self) -> Arc<dyn Memory> {
        Arc::new(SharedMemory::open(&self.blocks(), Access::ReadWrite).unwrap())
    }

    fn pager(&self, verify: bool) -> Arc<Pager> {
        Pager::open(self.ram(), self.means(), verify.then_some(Digester::UNSEEDED)).unwrap()
    }

    /// Writes a page as an earlier round would have done.
    fn round(&self, page: u64, byte: u8) {
        std::os::unix::fs::FileExt::write_all_at(&self.file, &[byte; 4096], page * 4096).unwrap();
    }

    /// Discards a page, as QEMU does it for the guest and the agent logs it.
    fn gives_back(&self, page: u64) {
        let range = page * 4096..(page + 1) * 4096;
        sterna_sys::file::punch(&self.file, range.clone()).unwrap();
        self.here.mapping.dont_need(range.clone()).unwrap();
        let file = self.file.metadata().unwrap();
        let (device, inode) = (file.dev(), file.ino());
        self.here.log.lock().unwrap().push(Discard { device, inode, offset: range.start, length: 4096 });
    }

    /// Starts a thread of the guest that reads a page; it returns what it found.
    fn looks(&self, page: u64) -> JoinHandle<[u8; 16]> {
        let mapping = Arc::clone(&self.here.mapping);
        std::thread::spawn(move || {
            let mut found = [0; 16];
            mapping.copy_out(page * 4096..page * 4096 + 16, &mut found);
            found
        })
    }
}

fn at(page: u64) -> PageIndex {
    PageIndex { chunk: ChunkIndex((page / 256) as u32), page: (page % 256) as u8 }
}

fn residue(pager: &Pager, pages: impl IntoIterator<Item = u64>) -> PageMap {
    let mut map = PageMap::empty(pager.ram().layout());
    pages.into_iter().for_each(|page| map.insert(at(page)));
    map
}

fn arrives(pager: &Pager, page: u64, byte: u8) {
    come(pager, at(page).chunk, (&[at(page).page], &[byte; 4096]), &[]);
}

/// Lets pages arrive: some with their bodies, others as zeros.
fn come(pager: &Pager, chunk: ChunkIndex, (pages, bodies): (&[u8], &[u8]), zero: &[u8]) {
    let set = |pages: &[u8]| pages.iter().copied().collect::<PageSet>();
    let at_hosts = !pager.away_in(chunk).and(&set(pages).or(&set(zero))).is_empty();
    let whose = if at_hosts { Whose::MemoryHosts } else { Whose::Source };
    let bodies = [(set(pages), bodies)];
    let arrival = Arrival { chunk, bodies: &bodies, zero: set(zero), pooled: None, suspect: PageSet::EMPTY };
    pager.place(whose, &arrival).unwrap();
}

fn waits_for(pager: &Pager, page: u64) {
    while !pager.lock().waiting.contains_key(&at(page)) {
        std::thread::yield_now();
    }
}

#[test]
fn the_guest_waits_for_what_is_missing_and_sees_neither_zeros_nor_what_an_earlier_round_left() {
    if !works() {
        return;
    }
    let guest = Guest::new();
    let pager = guest.pager(false);
    guest.round(3, 1);
    guest.round(4, 1);
    pager.begin(residue(&pager, [3, 7, 8])).unwrap();
    let (stale, hole, zero) = (guest.looks(3), guest.looks(7), guest.looks(8));
    let (current, empty) = (guest.looks(4), guest.looks(5));
    assert_eq!((current.join().unwrap(), empty.join().unwrap()), ([1; 16], [0; 16]));
    [3, 7, 8].into_iter().for_each(|page| waits_for(&pager, page));
    assert!([&stale, &hole, &zero].iter().all(|thread| !thread.is_finished()));
    assert_eq!((pager.missing(), pager.fault_count()), (3, 3));
    arrives(&pager, 3, 2);
    arrives(&pager, 7, 3);
    come(&pager, at(8).chunk, (&[], &[]), &[8]);
    assert_eq!(stale.join().unwrap(), [2; 16]);
    assert_eq!(hole.join().unwrap(), [3; 16]);
    assert_eq!(zero.join().unwrap(), [0; 16]);
    let faults = pager.faults();
    assert_eq!((pager.missing(), faults.count, faults.local), (0, 3, 2));
    assert!(pager.wait(Duration::ZERO) && faults.blocktime_ms > 0.0 && faults.blocktime_by_thread.len() == 3);
    pager.end();
    assert!(guest.here.kept.lock().unwrap().is_none());
}

#[test]
fn a_page_that_was_stale_and_is_zeros_now_is_zeros_for_the_guest() {
    if !works() {
        return;
    }
    let guest = Guest::new();
    let pager = guest.pager(false);
    guest.round(9, 1);
    pager.begin(residue(&pager, [9])).unwrap();
    come(&pager, at(9).chunk, (&[], &[]), &[9]);
    assert_eq!(guest.looks(9).join().unwrap(), [0; 16]);
    pager.end();
}

#[test]
fn a_body_that_comes_twice_does_not_undo_what_the_guest_wrote() {
    if !works() {
        return;
    }
    let guest = Guest::new();
    let pager = guest.pager(false);
    pager.begin(residue(&pager, [2, 3])).unwrap();
    arrives(&pager, 2, 1);
    guest.here.mapping.copy_in(2 * 4096, &[9; 16]).unwrap();
    // The page comes again, with a new one beside it.
    come(&pager, at(2).chunk, (&[2, 3], &[5; 8192]), &[]);
    come(&pager, at(2).chunk, (&[], &[]), &[2, 3]);
    assert_eq!(guest.looks(2).join().unwrap(), [9; 16]);
    assert_eq!(guest.looks(3).join().unwrap(), [5; 16]);
    // A page that was never missing belongs to the guest, too.
    arrives(&pager, 100, 7);
    assert_eq!(guest.looks(100).join().unwrap(), [0; 16]);
    assert_eq!(pager.duplicate(), 4);
    pager.end();
}

#[test]
fn another_daemon_goes_on_where_the_last_one_died_and_the_guest_only_waits() {
    if !works() {
        return;
    }
    let guest = Guest::new();
    let pager = guest.pager(false);
    guest.round(1, 1);
    guest.round(2, 1);
    pager.begin(residue(&pager, [1, 2, 3])).unwrap();
    arrives(&pager, 2, 2);
    let waiting = guest.looks(1);
    waits_for(&pager, 1);
    // The daemon dies: its thread does not read any more, and nothing is unregistered.
    pager.userfault.die();
    drop(pager);
    let also = guest.looks(3);
    std::thread::sleep(Duration::from_millis(20));
    assert!(!waiting.is_finished() && !also.is_finished());

    let pager = Pager::recover(guest.ram(), guest.means()).unwrap();
    assert_eq!(pager.missing(), 2);
    assert!(pager.alone().is_some() && pager.digester().is_none());
    waits_for(&pager, 1);
    waits_for(&pager, 3);
    arrives(&pager, 1, 4);
    arrives(&pager, 3, 5);
    assert_eq!((waiting.join().unwrap(), also.join().unwrap()), ([4; 16], [5; 16]));
    assert_eq!(guest.looks(2).join().unwrap(), [2; 16]);
    pager.end();
}

#[test]
fn without_what_the_last_daemon_left_nothing_is_recovered() {
    if !works() {
        return;
    }
    let guest = Guest::new();
    assert!(Pager::recover(guest.ram(), guest.means()).is_err());
    let pager = guest.pager(false);
    pager.begin(residue(&pager, [1])).unwrap();
    pager.end();
    // Its map says that a page is missing, and QEMU keeps no descriptor: that page cannot be brought.
    assert!(Pager::recover(guest.ram(), guest.means()).is_err());
}

#[test]
fn what_was_mapped_before_the_residue_was_known_is_taken_out_again() {
    if !works() {
        return;
    }
    let guest = Guest::new();
    let pager = guest.pager(false);
    guest.round(6, 1);
    assert_eq!(guest.looks(6).join().unwrap(), [1; 16]);
    pager.begin(residue(&pager, [6])).unwrap();
    let stale = guest.looks(6);
    waits_for(&pager, 6);
    arrives(&pager, 6, 2);
    assert_eq!(stale.join().unwrap(), [2; 16]);
    pager.end();
}

#[test]
fn both_sides_are_compared_by_what_the_guest_first_saw() {
    if !works() {
        return;
    }
    let guest = Guest::new();
    let pager = guest.pager(true);
    [1, 2, 300].into_iter().for_each(|page| guest.round(page, 1));
    pager.begin(residue(&pager, [2, 5])).unwrap();
    let expected = {
        let source = Guest::new();
        [(1, 1), (2, 2), (5, 3), (300, 1)].into_iter().for_each(|(page, byte)| source.round(page, byte));
        let ram = SharedMemory::open(&source.blocks(), Access::Read).unwrap();
        ram.layout().iter().map(|chunk| ram.chunk_digest(chunk, Digester::UNSEEDED).unwrap()).collect::<Vec<_>>()
    };
    arrives(&pager, 2, 2);
    arrives(&pager, 5, 3);
    // The guest changes pages that it has, and pages that were zeros.
    [2, 1, 5, 700].into_iter().for_each(|page| guest.here.mapping.copy_in(page * 4096, &[77; 16]).unwrap());
    let seen: Vec<_> = pager.ram().layout().iter().map(|chunk| pager.chunk_digest(chunk).unwrap()).collect();
    assert_eq!(seen, expected);
    pager.end();
}

#[test]
fn a_page_that_the_guest_gave_back_stays_a_hole_whatever_comes_for_it() {
    if !works() {
        return;
    }
    let guest = Guest::new();
    let pager = guest.pager(true);
    guest.round(1, 1);
    pager.begin(residue(&pager, [1, 2, 3])).unwrap();
    guest.gives_back(1);
    guest.gives_back(2);
    std::thread::sleep(Duration::from_millis(10));
    // The guest touches one of them again, and waits for it as for any other.
    let again = guest.looks(2);
    waits_for(&pager, 2);
    come(&pager, at(1).chunk, (&[1, 2, 3], &[5; 3 * 4096]), &[]);
    assert_eq!(again.join().unwrap(), [0; 16]);
    assert_eq!(pager.missing(), 0);
    assert!(!pager.ram().allocated_in(at(1).chunk).unwrap().contains(1), "memory for what nobody wants");
    guest.here.mapping.copy_in(4096, &[9; 16]).unwrap();
    arrives(&pager, 1, 6);
    assert_eq!((guest.looks(1).join().unwrap(), guest.looks(3).join().unwrap()), ([9; 16], [5; 16]));
    assert_eq!(pager.given_back(at(1).chunk).iter().collect::<Vec<_>>(), [1, 2]);
    pager.end();
}

#[test]
fn what_was_given_back_before_the_residue_was_known_is_still_to_come() {
    if !works() {
        return;
    }
    let guest = Guest::new();
    let pager = guest.pager(false);
    guest.gives_back(4);
    pager.begin(residue(&pager, [4])).unwrap();
    std::thread::sleep(Duration::from_millis(10));
    arrives(&pager, 4, 3);
    assert_eq!(guest.looks(4).join().unwrap(), [3; 16]);
    pager.end();
}

#[test]
fn a_page_given_back_in_part_is_brought_and_one_of_another_file_is_not_ours() {
    if !works() {
        return;
    }
    let guest = Guest::new();
    let pager = guest.pager(false);
    pager.begin(residue(&pager, [1, 2, 3])).unwrap();
    let file = guest.file.metadata().unwrap();
    let (device, inode) = (file.dev(), file.ino());
    guest.here.log.lock().unwrap().extend([
        Discard { device, inode, offset: 4096 + 512, length: 8192 },
        Discard { device, inode: inode + 1, offset: 0, length: 1 << 20 },
        Discard { device, inode, offset: u64::MAX - 4096, length: u64::MAX },
        Discard { device, inode, offset: 3 * 4096, length: 4095 },
    ]);
    assert_eq!(pager.given_back(at(1).chunk).iter().collect::<Vec<_>>(), [2]);
    [1, 2, 3].into_iter().for_each(|page| arrives(&pager, page, 7));
    assert_eq!([1, 2, 3].map(|page| guest.looks(page).join().unwrap()[0]), [7, 0, 7]);
    pager.end();
}

#[test]
fn a_guest_that_gives_back_and_takes_again_what_is_coming_finds_nothing_but_its_own_or_zeros() {
    if !works() {
        return;
    }
    for verify in [false, true] {
        let guest = Guest::new();
        let pager = guest.pager(verify);
        (0..PAGES).step_by(2).for_each(|page| guest.round(page, 1));
        pager.begin(residue(&pager, 0..PAGES)).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| (0..PAGES).for_each(|page| arrives(&pager, page, 2)));
            for share in 0..2 {
                let guest = &guest;
                scope.spawn(move || {
                    for page in (0..PAGES).rev().skip(share).step_by(2) {
                        let (at, mut found) = (page * 4096, [0; 16]);
                        guest.gives_back(page);
                        guest.here.mapping.copy_out(at..at + 16, &mut found);
                        assert!(found == [0; 16] || found == [2; 16], "page {page}: {found:?}");
                        guest.here.mapping.copy_in(at, &[100; 16]).unwrap();
                    }
                });
            }
        });
        assert_eq!(pager.missing(), 0);
        for page in 0..PAGES {
            assert_eq!(guest.looks(page).join().unwrap(), [100; 16], "what the guest wrote last stays, page {page}");
        }
        pager.end();
    }
}

#[test]
fn pages_mapped_ahead_faulted_and_arriving_at_once_are_all_right() {
    if !works() {
        return;
    }
    for verify in [false, true] {
        let guest = Guest::new();
        let pager = guest.pager(verify);
        // Every third page is missing and stale, every third current, every third a hole.
        (0..PAGES).filter(|page| page % 3 != 2).for_each(|page| guest.round(page, 1));
        pager.begin(residue(&pager, (0..PAGES).step_by(3))).unwrap();
        pager.map_ahead(false).unwrap();
        let next = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    // The pages come one by one; some of them on two connections.
                    loop {
                        let page = next.fetch_add(1, Ordering::Relaxed) / 2 * 3;
                        if page >= PAGES {
                            break;
                        }
                        arrives(&pager, page, 2);
                    }
                });
            }
            for seed in 1..4_u64 {
                let mapping = &guest.here.mapping;
                scope.spawn(move || {
                    for step in 0..PAGES {
                        let page = step * (seed * 2 + 1) * 37 % PAGES;
                        let mut found = [0; 16];
                        mapping.copy_out(page * 4096..page * 4096 + 16, &mut found);
                        let first = [2, 1, 0][(page % 3) as usize];
                        assert!(found == [first; 16] || found == [100; 16], "page {page}: {found:?}");
                        mapping.copy_in(page * 4096, &[100; 16]).unwrap();
                    }
                });
            }
        });
        assert_eq!(pager.missing(), 0);
        pager.end();
        for page in 0..PAGES {
            assert_eq!(guest.looks(page).join().unwrap(), [100; 16], "what the guest wrote last stays, page {page}");
        }
    }
}

/// A VMM that a hostile guest controls.
mod hostile;

/// A host without memory for the pages that come.
mod full;

/// Pages that are fenced in while others follow their guest.
mod fenced;

/// Pages that are all here before the guest runs.
mod whole;

/// Pages of a split guest.
mod elsewhere;
