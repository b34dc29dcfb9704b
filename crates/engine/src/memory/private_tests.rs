//! What holds of private memory alone. This process is the VMM.

use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sterna_protocol::spec::BlockSpec;
use sterna_sys::map::PrivateMapping;
use sterna_sys::userfaultfd::{self, Features};

use super::*;
use crate::memory::inside_here::InsideHere;

const PAGES: u64 = 64;
const CHUNK: ChunkIndex = ChunkIndex(0);

struct Rig {
    mappings: Arc<Vec<PrivateMapping>>,
    memory: PrivateMemory,
}

fn rig() -> Rig {
    let mappings = Arc::new(vec![PrivateMapping::new(PAGES * PAGE).expect("a mapping")]);
    let memory = open(std::process::id(), &mappings);
    Rig { mappings, memory }
}

/// The memory at this mapping's address in a process.
fn open(pid: u32, mappings: &Arc<Vec<PrivateMapping>>) -> PrivateMemory {
    let spec = BlockSpec { id: "ram".into(), bytes: PAGES * PAGE, page_bytes: PAGE, path: String::new() };
    let file = tempfile::tempfile_in("/dev/shm").expect("a file");
    let block = BlockFile { spec, file, address: mappings[0].addresses().start, process: None };
    let inside = Arc::new(Mutex::new(InsideHere(Arc::clone(mappings))));
    PrivateMemory::open(&[block], Holder { pid, inside }, Access::ReadWrite).expect("RAM")
}

fn only(page: u8) -> PageSet {
    [page].into_iter().collect()
}

impl Rig {
    fn mapping(&self) -> &PrivateMapping {
        &self.mappings[0]
    }

    /// The guest's page.
    fn page(&self, page: u8) -> u8 {
        let mut bytes = [0; PAGE_BYTES];
        self.mapping().read(u64::from(page) * PAGE, &mut bytes);
        assert!(bytes.iter().all(|byte| *byte == bytes[0]), "half a page");
        bytes[0]
    }

    fn set(&self, page: u8, byte: u8) {
        self.mapping().write(u64::from(page) * PAGE, &[byte; PAGE_BYTES]);
    }

    /// Registers it for missing pages; `false`, and why, where the kernel does not.
    fn register(&self, features: Features, modes: Modes) -> Option<Userfaultfd> {
        if !sterna_sys::probe::missing().is_empty() {
            println!("skipped: {}", sterna_sys::probe::missing().join("; "));
            return None;
        }
        let faults = Userfaultfd::create(userfaultfd::open_device().expect("the device")).expect("a userfaultfd");
        faults.enable(features).expect("the features");
        faults.register(self.mapping().addresses(), modes).expect("registered");
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
    pagemap.written_and_arm(rig.mapping().addresses(), &mut Vec::new()).unwrap();
    let mut entries = Vec::new();
    pagemap.entries(rig.mapping().addresses(), &mut entries).unwrap();
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
    let start = rig.mapping().addresses().start;
    let stale = [start + 2 * PAGE..start + 4 * PAGE, start + 6 * PAGE..start + 7 * PAGE];
    let pagemap = Pagemap::of_this_process().unwrap();
    let mut inside = InsideHere(Arc::clone(&rig.mappings));
    rig.memory.mappings().hold_back(&mut inside, &pagemap, &rig.memory.spans(), &mut stale.into_iter()).unwrap();
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
    let memory = open(child.id(), &rig.mappings);
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

/// Areas of the rig: these pages, which hold [`COMMON`].
const AREA: Range<u8> = 20..40;
const COMMON: u8 = 0xc7;

/// A rig that has an area, and the file behind it.
fn rig_with_area() -> (Rig, File) {
    let rig = rig();
    let file = tempfile::tempfile_in("/dev/shm").expect("a file");
    file.write_all_at(&[COMMON; 64 * PAGE_BYTES], 0).expect("room");
    let (from, to) = (u64::from(AREA.start) * PAGE, u64::from(AREA.end) * PAGE);
    rig.mapping().lay(from, &file, from..to).expect("an area");
    (rig, file)
}

#[test]
fn an_area_is_known_once_it_was_looked_for_and_a_part_that_was_replaced_is_none() {
    let (rig, file) = rig_with_area();
    assert!(rig.memory.areas().is_empty());
    rig.memory.look_at_areas().unwrap();
    let start = rig.mapping().addresses().start;
    let id = sterna_sys::file::id(&file).unwrap();
    let known: Vec<_> = rig.memory.areas().iter().cloned().collect();
    let (from, to) = (u64::from(AREA.start) * PAGE, u64::from(AREA.end) * PAGE);
    assert_eq!(known, [areas::Area { addresses: start + from..start + to, file: id, offset: from }]);
    rig.mapping().renew(from..from + PAGE).unwrap();
    assert!(rig.memory.allocated_in(CHUNK).unwrap().contains(AREA.start), "a list that is older says more");
    rig.memory.look_at_areas().unwrap();
    assert!(!rig.memory.allocated_in(CHUNK).unwrap().contains(AREA.start));
    assert_eq!(areas::content_bytes(std::process::id(), rig.mapping().addresses()).unwrap(), 19 * PAGE);
}

/// Fails where a page that is armed and untouched counts as a hole: it has only a marker.
#[test]
fn an_armed_page_of_an_area_is_content_and_its_write_is_seen() {
    let (rig, _file) = rig_with_area();
    let Some(faults) = rig.register(Features::TRACKING, Modes::WP) else { return };
    rig.memory.look_at_areas().unwrap();
    assert_eq!(rig.page(AREA.start), COMMON);
    let (pagemap, mut written) = (Pagemap::of_this_process().unwrap(), Vec::new());
    pagemap.written_and_arm(rig.mapping().addresses(), &mut written).unwrap();
    let pages: PageSet = AREA.collect();
    assert_eq!(rig.memory.allocated_in(CHUNK).unwrap(), pages);
    assert_eq!(rig.memory.allocated_bytes().unwrap(), 0);
    let mut bodies = [0; 20 * PAGE_BYTES];
    rig.memory.read(CHUNK, &pages, &mut bodies).unwrap();
    assert!(bodies.iter().all(|byte| *byte == COMMON));
    pagemap.written_and_arm(rig.mapping().addresses(), &mut written).unwrap();
    assert_eq!(written, [], "to read is not to write");
    [20, 25].into_iter().for_each(|page| rig.set(page, 1));
    rig.memory.write(CHUNK, &only(30), &[2; PAGE_BYTES]).unwrap();
    pagemap.written_and_arm(rig.mapping().addresses(), &mut written).unwrap();
    let place = |region: &Region| (region.start - rig.mapping().addresses().start) / PAGE;
    assert_eq!(written.iter().map(place).collect::<Vec<_>>(), [20, 25, 30]);
    assert_eq!(rig.memory.allocated_in(CHUNK).unwrap(), pages);
    assert_eq!(rig.memory.allocated_bytes().unwrap(), 3 * PAGE);
    drop(faults);
}

#[test]
fn a_discarded_page_of_an_area_is_zeros_where_missing_pages_are_waited_for() {
    let (rig, _file) = rig_with_area();
    let Some(faults) = rig.register(Features::MISSING_SHMEM, Modes::MISSING) else { return };
    rig.memory.look_at_areas().unwrap();
    rig.memory.wait_for(&faults).unwrap();
    assert_eq!(rig.page(21), COMMON);
    rig.set(22, 1);
    // One page was never touched, one was read, one written.
    let discarded: PageSet = [20, 21, 22].into_iter().collect();
    rig.memory.discard(CHUNK, &discarded).unwrap();
    let registered = rig.mapping().addresses();
    assert_eq!([20, 21, 22, 23].map(|page| rig.page(page)), [0, 0, 0, COMMON]);
    assert_eq!(rig.memory.allocated_in(CHUNK).unwrap(), AREA.filter(|page| *page > 22).collect());
    // The guest may have seen it: what comes now comes too late.
    rig.memory.install_zeros(CHUNK, &only(24)).unwrap();
    rig.memory.install(CHUNK, &only(24), &[1; PAGE_BYTES]).unwrap();
    assert_eq!(rig.page(24), COMMON);
    rig.memory.install_zeros(CHUNK, &only(41)).unwrap();
    assert_eq!(Areas::of(std::process::id(), &[registered]).unwrap(), *rig.memory.areas(), "nothing was replaced");
    faults.unregister(rig.mapping().addresses()).expect("all of it is registered");
}

#[test]
fn nothing_is_taken_of_an_area_and_a_stale_page_leaves_it_first() {
    let (rig, _file) = rig_with_area();
    rig.memory.look_at_areas().unwrap();
    [3, 4, 20, 30].into_iter().for_each(|page| rig.set(page, 1));
    let takeable = rig.memory.takeable().unwrap();
    assert_eq!(*takeable.chunk(CHUNK), [3, 4].into_iter().collect());
    let start = rig.mapping().addresses().start;
    let pagemap = Pagemap::of_this_process().unwrap();
    let mut stale = PageMap::empty(rig.memory.layout());
    stale.insert_all(CHUNK, &[3, 30, 31].into_iter().collect());
    rig.memory.unshare(&stale).unwrap();
    let pages = [3, 30, 31].map(|page: u64| start + page * PAGE..start + (page + 1) * PAGE);
    let mut inside = InsideHere(Arc::clone(&rig.mappings));
    let mappings = rig.memory.mappings();
    mappings.hold_back(&mut inside, &pagemap, &rig.memory.spans(), &mut pages.into_iter()).unwrap();
    assert_eq!([3, 4, 29, 30, 31, 32].map(|page| rig.page(page)), [0, 1, COMMON, 0, 0, COMMON]);
    assert_eq!(Areas::of(std::process::id(), &rig.memory.spans()).unwrap(), *rig.memory.areas());
}
