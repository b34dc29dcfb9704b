//! What holds of private memory that lies in a pool. This process is the VMM.

use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};

use sterna_protocol::spec::BlockSpec;
use sterna_sys::map::{Access, PrivateMapping};
use sterna_sys::userfaultfd::{self, Features, Modes, Userfaultfd};

use super::*;
use crate::inside::Inside;
use crate::memory::inside_here::{InsideHere, MapsItsWay};
use crate::memory::{BlockFile, Holder, Memory};

const PAGES: u64 = 512;
const PAGE: u64 = PAGE_BYTES as u64;
const CHUNK: ChunkIndex = ChunkIndex(0);

/// A guest's memory, and a pool whose page `n` holds the byte `100 + n`.
struct Rig {
    mapping: Arc<Vec<PrivateMapping>>,
    memory: PrivateMemory,
    pool: File,
}

fn rig() -> Rig {
    rig_with(|mapping| Arc::new(Mutex::new(InsideHere(mapping))))
}

fn rig_with(inside: impl FnOnce(Arc<Vec<PrivateMapping>>) -> Arc<Mutex<dyn Inside>>) -> Rig {
    let pool = tempfile::NamedTempFile::new_in("/dev/shm").expect("a file");
    (0..8).for_each(|page| pool.as_file().write_all_at(&[100 + page; PAGE_BYTES], u64::from(page) * PAGE).unwrap());
    let mapping = Arc::new(vec![PrivateMapping::new(PAGES * PAGE).expect("a mapping")]);
    let spec = BlockSpec { id: "ram".into(), bytes: PAGES * PAGE, page_bytes: PAGE, path: String::new() };
    let file = tempfile::tempfile_in("/dev/shm").expect("a file");
    let block = BlockFile { spec, file, address: mapping[0].addresses().start, process: None };
    let holder = Holder { pid: std::process::id(), inside: inside(Arc::clone(&mapping)) };
    let memory = PrivateMemory::open(&[block], holder, Access::ReadWrite).expect("RAM");
    Rig { mapping, memory, pool: pool.reopen().expect("the file again") }
}

fn set(pages: &[u8]) -> PageSet {
    pages.iter().copied().collect()
}

fn run(first: usize, pages: usize, at: u64) -> PoolRun {
    PoolRun { first, pages, offset: at * PAGE }
}

impl Rig {
    /// The guest's page.
    fn page(&self, page: u8) -> u8 {
        let mut bytes = [0; PAGE_BYTES];
        self.mapping[0].read(u64::from(page) * PAGE, &mut bytes);
        assert!(bytes.iter().all(|byte| *byte == bytes[0]), "half a page");
        bytes[0]
    }

    fn pages<const N: usize>(&self, pages: [u8; N]) -> [u8; N] {
        pages.map(|page| self.page(page))
    }

    fn guest_writes(&self, page: u8, byte: u8) {
        self.mapping[0].write(u64::from(page) * PAGE, &[byte; PAGE_BYTES]);
    }

    fn pool_is_as_it_was(&self) -> bool {
        let mut body = [0; PAGE_BYTES];
        (0..8).all(|page| {
            self.pool.read_exact_at(&mut body, u64::from(page) * PAGE).unwrap();
            body == [100 + page; PAGE_BYTES]
        })
    }

    /// How many mappings the guest's RAM lies in.
    fn mappings(&self) -> u64 {
        let ram = self.mapping[0].addresses();
        let mut mappings = 0;
        let count = |mapping: sterna_sys::process::Mapping| {
            mappings += u64::from(mapping.range.start < ram.end && ram.start < mapping.range.end);
        };
        sterna_sys::process::each_mapping(std::process::id(), count).expect("this process");
        mappings
    }

    /// The guest waits for each of these pages, which are put there while it does.
    fn waits_for<const N: usize>(&self, faults: &Userfaultfd, pages: [u8; N]) {
        let start = self.mapping[0].addresses().start;
        std::thread::scope(|scope| {
            let guest = scope.spawn(|| self.pages(pages));
            // Each access faults, one after the other, and sees what is put there and nothing else.
            for page in pages {
                let at = start + u64::from(page) * PAGE;
                while faults.read_events(&mut [userfaultfd::Event::default(); 1]).unwrap() == 0 {
                    std::thread::yield_now();
                }
                self.memory.install(CHUNK, &set(&[page]), &[page; PAGE_BYTES]).unwrap();
                faults.wake(at..at + PAGE).unwrap();
            }
            assert_eq!(guest.join().unwrap(), pages);
        });
    }

    /// Registers it for missing pages; `None`, and why, where the kernel does not.
    fn register(&self) -> Option<Userfaultfd> {
        if !sterna_sys::probe::missing().is_empty() {
            println!("skipped: {}", sterna_sys::probe::missing().join("; "));
            return None;
        }
        let faults = Userfaultfd::create(userfaultfd::open_device().expect("the device")).expect("a userfaultfd");
        faults.enable(Features::MISSING_SHMEM).expect("the features");
        faults.register(self.mapping[0].addresses(), Modes::MISSING).expect("registered");
        self.memory.wait_for(&faults).unwrap();
        Some(faults)
    }
}

#[test]
fn pages_of_a_pool_are_the_guests_until_it_writes_them_and_nobody_else_sees_what_it_writes() {
    let (rig, other) = (rig(), rig());
    rig.memory.share(CHUNK, &[run(10, 3, 2), run(20, 1, 0)], &rig.pool).unwrap();
    other.memory.share(CHUNK, &[run(10, 3, 2)], &rig.pool).unwrap();
    assert_eq!(rig.pages([9, 10, 11, 12, 13, 20]), [0, 102, 103, 104, 0, 100]);
    assert_eq!(rig.memory.allocated_in(CHUNK).unwrap(), set(&[10, 11, 12, 20]));
    rig.guest_writes(11, 7);
    rig.memory.write(CHUNK, &set(&[12, 13]), &[8; 2 * PAGE_BYTES]).unwrap();
    assert_eq!(rig.pages([10, 11, 12, 13]), [102, 7, 8, 8]);
    assert_eq!(other.pages([10, 11, 12]), [102, 103, 104]);
    assert!(rig.pool_is_as_it_was());
    let mut bodies = [0; 3 * PAGE_BYTES];
    rig.memory.load(CHUNK, &set(&[10, 11, 14]), &mut bodies).unwrap();
    assert_eq!([bodies[0], bodies[PAGE_BYTES], bodies[2 * PAGE_BYTES]], [102, 7, 0]);
}

#[test]
fn pages_that_lie_in_a_pool_count_as_shared_touched_or_not_and_a_copy_does_not() {
    let rig = rig();
    rig.memory.share(CHUNK, &[run(10, 4, 0)], &rig.pool).unwrap();
    assert_eq!(rig.page(11), 101);
    rig.guest_writes(12, 7);
    rig.guest_writes(30, 7);
    assert_eq!(rig.memory.shared_in(CHUNK).unwrap(), set(&[10, 11, 13]));
}

/// Fails where a page of a pool is filled as a missing page is: the kernel does not know it as registered.
#[test]
fn a_newer_body_and_a_missing_page_come_into_their_places_side_by_side() {
    let rig = rig();
    let Some(_faults) = rig.register() else { return };
    rig.memory.share(CHUNK, &[run(10, 2, 0)], &rig.pool).unwrap();
    assert_eq!(rig.pages([10, 11]), [100, 101], "nobody waits for a page of a pool");
    rig.memory.write(CHUNK, &set(&[9, 10, 12]), &[[1; PAGE_BYTES], [2; PAGE_BYTES], [3; PAGE_BYTES]].concat()).unwrap();
    assert_eq!(rig.pages([9, 10, 11, 12]), [1, 2, 101, 3]);
    assert!(rig.pool_is_as_it_was());
}

/// Fails where a stale page is only dropped: the guest would find the pool's body, and go on with it.
#[test]
fn a_page_that_leaves_its_pool_is_missing_and_waited_for() {
    let rig = rig();
    let Some(faults) = rig.register() else { return };
    rig.memory.share(CHUNK, &[run(10, 3, 0)], &rig.pool).unwrap();
    rig.guest_writes(10, 7);
    let mut stale = PageMap::empty(rig.memory.layout());
    stale.insert_all(CHUNK, &set(&[10, 11, 40]));
    rig.memory.unshare(&stale).unwrap();
    assert_eq!(rig.memory.allocated_in(CHUNK).unwrap(), set(&[12]));
    rig.waits_for(&faults, [10, 11]);
    assert_eq!(rig.page(12), 102);
}

#[test]
fn what_does_not_fit_into_the_mappings_a_process_may_have_is_copied() {
    let rig = rig();
    rig.memory.share(CHUNK, &[run(0, 1, 0)], &rig.pool).unwrap();
    rig.memory.room.set(5);
    rig.memory.share(CHUNK, &[run(10, 2, 1), run(14, 1, 5)], &rig.pool).unwrap();
    rig.memory.share(CHUNK, &[run(20, 2, 1)], &rig.pool).unwrap();
    assert_eq!(rig.pages([0, 10, 11, 14, 20, 21]), [100, 101, 102, 105, 101, 102]);
    assert_eq!(rig.memory.shared_in(CHUNK).unwrap(), set(&[0, 10, 11, 14]), "the last two are the guest's own");
}

/// Failed while nobody counted what leaves areas: what is kept for the VMM was used up, and its next mapping ended it.
#[test]
fn what_lies_between_stale_pages_is_copied_where_they_lie_in_more_runs_than_may_be_mappings() {
    for left in [10, 6, 2, 0] {
        let rig = rig();
        let Some(faults) = rig.register() else { return };
        rig.memory.share(CHUNK, &[run(10, 8, 0), run(30, 8, 0)], &rig.pool).unwrap();
        rig.memory.share(ChunkIndex(1), &[run(0, 8, 0)], &rig.pool).unwrap();
        // Between the stale pages: one that is newer than the pool, zeros in the pool's place, and the guest's own.
        rig.guest_writes(11, 7);
        rig.memory.discard(CHUNK, &set(&[13])).unwrap();
        rig.memory.write(CHUNK, &set(&[20, 21]), &[[9; PAGE_BYTES], [8; PAGE_BYTES]].concat()).unwrap();
        let mut stale = PageMap::empty(rig.memory.layout());
        stale.insert_all(CHUNK, &set(&[10, 12, 16, 21, 31]));
        stale.insert_all(ChunkIndex(1), &set(&[2]));
        rig.memory.room.set(left);
        let before = rig.mappings();
        rig.memory.unshare(&stale).unwrap();
        let more = rig.mappings().saturating_sub(before);
        assert!(more <= left, "{more} mappings more, and there was room for {left}");
        let there = rig.memory.allocated_in(CHUNK).unwrap().without(&set(&[21]));
        assert_eq!(there, set(&[11, 13, 14, 15, 17, 20, 30, 32, 33, 34, 35, 36, 37]), "with room for {left}");
        assert_eq!(rig.memory.allocated_in(ChunkIndex(1)).unwrap(), set(&[0, 1, 3, 4, 5, 6, 7]));
        assert_eq!(rig.pages([11, 13, 14, 15, 17, 20, 30, 32, 37]), [7, 0, 104, 105, 107, 9, 100, 102, 107]);
        rig.waits_for(&faults, [10, 12, 16, 31]);
        assert!(rig.pool_is_as_it_was());
    }
}

#[test]
fn parts_that_are_too_many_become_one_with_their_nearest_neighbours_of_the_same_block() {
    let (parts, spans) = ([0..2, 3..4, 8..9, 100..101, 101..102], [0..50, 100..200]);
    let few = |most| as_few(&parts, most, &spans);
    let one = |range: Range<u64>| vec![range];
    assert_eq!(few(5), (parts.to_vec(), vec![]));
    assert_eq!(few(4), (vec![0..2, 3..4, 8..9], one(100..102)));
    assert_eq!(few(3), (one(8..9), vec![0..4, 100..102]));
    for most in [2, 1, 0] {
        assert_eq!(few(most), (vec![], vec![0..9, 100..102]), "{most}");
    }
    assert_eq!(as_few(&[], 0, &spans), (vec![], vec![]));
}

#[test]
fn zeros_that_find_no_room_for_mappings_are_written() {
    let rig = rig();
    rig.memory.share(CHUNK, &[run(10, 3, 0)], &rig.pool).unwrap();
    rig.memory.room.set(1);
    let before = rig.mappings();
    rig.memory.discard(CHUNK, &set(&[11])).unwrap();
    assert_eq!(rig.pages([10, 11, 12]), [100, 0, 102]);
    assert_eq!(rig.mappings(), before);
    assert!(rig.pool_is_as_it_was());
}

/// Failed while a newer body was put into such a page: the request, carried out later, brought the older one back.
#[test]
fn nothing_is_put_where_a_request_to_map_may_still_be_carried_out() {
    let no_answer = |_: &mut InsideHere<_>, _: BorrowedFd<'_>, _: &[MapRun]| Err(MigrateError::Bug("no answer"));
    let rig = rig_with(|mapping| Arc::new(Mutex::new(MapsItsWay(InsideHere(mapping), Box::new(no_answer)))));
    assert!(!rig.memory.may_map_later());
    let refused = |done: io::Result<()>| done.expect_err("it is not known yet").to_string();
    let mut both = PageMap::empty(rig.memory.layout());
    both.insert_all(CHUNK, &set(&[10, 40]));
    rig.guest_writes(40, 9);
    rig.memory.share(CHUNK, &[run(10, 2, 0)], &rig.pool).unwrap_err();
    for done in [
        rig.memory.write(CHUNK, &set(&[9, 10]), &[7; 2 * PAGE_BYTES]),
        rig.memory.discard(CHUNK, &set(&[11, 40])),
        rig.memory.unshare(&both),
        rig.memory.share(CHUNK, &[run(8, 3, 0)], &rig.pool),
    ] {
        assert!(refused(done).contains("has not said"));
    }
    assert_eq!(rig.pages([8, 9, 10, 11, 40]), [0, 0, 0, 0, 9], "nothing was done");
    assert!(rig.memory.may_map_later(), "what lies in the pool must stay there");
    rig.memory.write(CHUNK, &set(&[12]), &[7; PAGE_BYTES]).expect("nobody was asked to map that");
    // Now it is carried out.
    rig.mapping[0].lay(10 * PAGE, &rig.pool, 0..2 * PAGE).expect("laid");
    rig.memory.write(CHUNK, &set(&[10]), &[7; PAGE_BYTES]).expect("it is in its place");
    assert_eq!(rig.pages([10, 11, 12]), [7, 101, 7]);
    assert!(!rig.memory.may_map_later());
    assert!(rig.pool_is_as_it_was());
}
