//! What holds of private memory alone. This process is the VMM.

use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sterna_protocol::spec::BlockSpec;
use sterna_sys::map::PrivateMapping;
use sterna_sys::userfaultfd::{self, Features};

use super::*;
use crate::agent::Discards;

const PAGES: u64 = 64;
const CHUNK: ChunkIndex = ChunkIndex(0);

/// The process that holds the memory: this one.
struct Here(Arc<PrivateMapping>);

impl Inside for Here {
    fn open(&mut self, _: Features) -> Result<Userfaultfd, MigrateError> {
        unreachable!("memory only advises")
    }

    fn open_alone(&mut self, _: Features) -> Result<Userfaultfd, MigrateError> {
        unreachable!("memory only advises")
    }

    fn log_discards(&mut self) -> Result<(), MigrateError> {
        Ok(())
    }

    fn reopen(&mut self) -> Result<Option<Userfaultfd>, MigrateError> {
        Ok(None)
    }

    fn advise(&mut self, advice: Advice, ranges: &[Range<u64>]) -> Result<(), MigrateError> {
        assert_eq!(advice, Advice::DontNeed);
        let start = self.0.addresses().start;
        for range in ranges {
            self.0.discard(range.start - start..range.end - start).expect("pages given back");
        }
        Ok(())
    }

    fn pid(&self) -> u32 {
        std::process::id()
    }

    fn discards(&mut self) -> Discards {
        Discards::Ranges(Vec::new())
    }

    fn close(&mut self) {}
}

struct Rig {
    mapping: Arc<PrivateMapping>,
    memory: PrivateMemory,
}

fn rig() -> Rig {
    let mapping = Arc::new(PrivateMapping::new(PAGES * PAGE).expect("a mapping"));
    let memory = open(std::process::id(), mapping.addresses().start, Arc::new(Mutex::new(Here(Arc::clone(&mapping)))));
    Rig { mapping, memory }
}

fn open(pid: u32, address: u64, inside: Arc<Mutex<dyn Inside>>) -> PrivateMemory {
    let spec = BlockSpec { id: "ram".into(), bytes: PAGES * PAGE, page_bytes: PAGE, path: String::new() };
    let file = tempfile::tempfile_in("/dev/shm").expect("a file");
    let block = BlockFile { spec, file, address, process: None };
    PrivateMemory::open(&[block], Holder { pid, inside }, Access::ReadWrite).expect("RAM")
}

fn only(page: u8) -> PageSet {
    [page].into_iter().collect()
}

impl Rig {
    /// The guest's page.
    fn page(&self, page: u8) -> u8 {
        let mut bytes = [0; PAGE_BYTES];
        self.mapping.read(u64::from(page) * PAGE, &mut bytes);
        assert!(bytes.iter().all(|byte| *byte == bytes[0]), "half a page");
        bytes[0]
    }

    fn set(&self, page: u8, byte: u8) {
        self.mapping.write(u64::from(page) * PAGE, &[byte; PAGE_BYTES]);
    }

    /// Registers it for missing pages; `false`, and why, where the kernel does not.
    fn register(&self, features: Features, modes: Modes) -> Option<Userfaultfd> {
        if !sterna_sys::probe::missing().is_empty() {
            println!("skipped: {}", sterna_sys::probe::missing().join("; "));
            return None;
        }
        let faults = Userfaultfd::create(userfaultfd::open_device().expect("the device")).expect("a userfaultfd");
        faults.enable(features).expect("the features");
        faults.register(self.mapping.addresses(), modes).expect("registered");
        Some(faults)
    }
}

/// Fails where a body that comes twice is written twice: the guest may have written the page since the first.
#[test]
fn a_page_that_arrives_again_leaves_what_the_guest_wrote_since_and_a_round_overwrites_it() {
    let rig = rig();
    let Some(faults) = rig.register(Features::empty(), Modes::MISSING) else { return };
    rig.memory.wait_for(&faults).unwrap();
    let both: PageSet = [3, 4].into_iter().collect();
    rig.memory.install(CHUNK, &only(3), &[1; PAGE_BYTES]).unwrap();
    rig.set(3, 2);
    rig.memory.install(CHUNK, &both, &[5; 2 * PAGE_BYTES]).unwrap();
    assert_eq!((rig.page(3), rig.page(4)), (2, 5));
    rig.memory.write(CHUNK, &both, &[6; 2 * PAGE_BYTES]).unwrap();
    assert_eq!((rig.page(3), rig.page(4)), (6, 6));
}

#[test]
fn a_page_that_is_waited_for_reads_as_zeros_and_nobody_waits_for_the_read() {
    let rig = rig();
    let Some(faults) = rig.register(Features::empty(), Modes::MISSING) else { return };
    rig.memory.wait_for(&faults).unwrap();
    rig.memory.install(CHUNK, &only(1), &[1; PAGE_BYTES]).unwrap();
    rig.memory.install_zeros(CHUNK, &only(2)).unwrap();
    let pages: PageSet = [0, 1, 2].into_iter().collect();
    for read in [PrivateMemory::read, PrivateMemory::load] {
        let mut bodies = [9; 3 * PAGE_BYTES];
        read(&rig.memory, CHUNK, &pages, &mut bodies).unwrap();
        assert_eq!([bodies[0], bodies[PAGE_BYTES], bodies[2 * PAGE_BYTES]], [0, 1, 0]);
    }
    assert_eq!(rig.memory.allocated_in(CHUNK).unwrap(), only(1));
}

/// Fails where a marker counts as a page: it looks swapped out.
#[test]
fn neither_the_page_of_zeros_nor_a_marker_is_content() {
    let rig = rig();
    let Some(faults) = rig.register(Features::TRACKING, Modes::WP) else { return };
    rig.set(1, 1);
    assert_eq!(rig.page(2), 0, "the page of zeros is mapped");
    let pagemap = Pagemap::of_this_process().unwrap();
    pagemap.written_and_arm(rig.mapping.addresses(), &mut Vec::new()).unwrap();
    let mut entries = Vec::new();
    pagemap.entries(rig.mapping.addresses(), &mut entries).unwrap();
    assert!(entries[5].swapped() && entries[5].marker(), "the kernel left a marker: {:x}", entries[5].0);
    assert!(entries[1].present() && !entries[1].marker());
    assert_eq!(rig.memory.allocated_in(CHUNK).unwrap(), only(1));
    assert_eq!(rig.memory.allocated_bytes().unwrap(), PAGE);
    drop(faults);
}

#[test]
fn stale_pages_are_missing_once_they_are_held_back_and_the_others_are_there() {
    let rig = rig();
    let Some(faults) = rig.register(Features::empty(), Modes::MISSING) else { return };
    rig.memory.wait_for(&faults).unwrap();
    (0..8).for_each(|page| rig.memory.write(CHUNK, &only(page), &[page + 1; PAGE_BYTES]).unwrap());
    let start = rig.mapping.addresses().start;
    let stale = [start + 2 * PAGE..start + 4 * PAGE, start + 6 * PAGE..start + 7 * PAGE];
    let pagemap = Pagemap::of_this_process().unwrap();
    let mut inside = Here(Arc::clone(&rig.mapping));
    rig.memory.mappings().hold_back(&mut inside, &pagemap, &rig.memory.spans(), &stale).unwrap();
    let kept: PageSet = [0, 1, 4, 5, 7].into_iter().collect();
    assert_eq!(rig.memory.allocated_in(CHUNK).unwrap(), kept);
    let waited = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| rig.page(6));
        while faults.read_events(&mut [userfaultfd::Event::default(); 1]).unwrap() == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        rig.memory.install(CHUNK, &only(6), &[77; PAGE_BYTES]).unwrap();
        waiting.join().unwrap()
    });
    assert_eq!((waited, rig.page(5), rig.page(7)), (77, 6, 8));
}

#[test]
fn memory_that_ends_with_its_process_is_an_error_and_not_zeros() {
    let mut child = Command::new("sleep").arg("600").stdout(Stdio::null()).spawn().unwrap();
    while std::fs::read_link(format!("/proc/{}/exe", child.id())).ok() == std::env::current_exe().ok() {
        std::thread::yield_now();
    }
    let rig = rig();
    let memory = open(child.id(), rig.mapping.addresses().start, Arc::new(Mutex::new(Here(Arc::clone(&rig.mapping)))));
    memory.intact().unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    let gone = |result: io::Result<()>| {
        let error = MigrateError::host("reading")(result.unwrap_err());
        assert!(matches!(error, MigrateError::Vmm(crate::vmm::VmmError::Gone { .. })), "{error:?}");
    };
    gone(memory.intact());
    gone(memory.allocated().map(drop));
    gone(memory.read(CHUNK, &only(0), &mut [0; PAGE_BYTES]));
    gone(memory.load(CHUNK, &only(0), &mut [0; PAGE_BYTES]));
    gone(memory.write(CHUNK, &only(0), &[0; PAGE_BYTES]));
}
