//! Tests of what every kind of guest memory must do. Each kind has a real mapping in this process that stands for the
//! VMM's.
//!
//! A second implementation of [`Memory`] adds a line to [`rigs`], and every test here runs with it.

use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};

use proptest::prelude::*;
use sterna_sys::map::{Access, PrivateMapping, SharedMapping};
use sterna_sys::userfaultfd::Features;

use super::inside_here::{InsideHere, Mapped};
use super::not_in_place::NotInPlace;
use super::private::PrivateMemory;
use super::shared::SharedMemory;
use super::*;

/// The pages of the two blocks: there are whole chunks and chunks that are not whole.
const BLOCKS: [u64; 2] = [300, 20];

/// A guest's memory and the guest: this process is its VMM.
struct Rig {
    memory: Arc<dyn Memory>,
    inside: Box<dyn Inside>,
    guest: Box<dyn Guest>,
    /// The pages that hold [`COMMON`] at first, because the guest has them in common with others.
    common: &'static [Page],
}

/// What a page holds that a guest has in common with others.
const COMMON: u8 = 0xc7;

/// The guest's accesses, by block and byte.
trait Guest: Send + Sync {
    fn write(&self, block: usize, offset: u64, bytes: &[u8]);

    fn read(&self, block: usize, offset: u64, bytes: &mut [u8]);

    fn write_page(&self, page: Page, byte: u8) {
        self.write(page.block, page.offset(), &[byte; PAGE_BYTES]);
    }

    fn read_page(&self, page: Page) -> [u8; PAGE_BYTES] {
        let mut body = [0; PAGE_BYTES];
        self.read(page.block, page.offset(), &mut body);
        body
    }
}

impl Guest for Arc<Vec<SharedMapping>> {
    fn write(&self, block: usize, offset: u64, bytes: &[u8]) {
        self[block].copy_in(offset, bytes).expect("room");
    }

    fn read(&self, block: usize, offset: u64, bytes: &mut [u8]) {
        self[block].copy_out(offset..offset + bytes.len() as u64, bytes);
    }
}

impl Guest for Arc<Vec<PrivateMapping>> {
    fn write(&self, block: usize, offset: u64, bytes: &[u8]) {
        self[block].write(offset, bytes);
    }

    fn read(&self, block: usize, offset: u64, bytes: &mut [u8]) {
        self[block].read(offset, bytes);
    }
}

/// A page as the guest counts them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Page {
    block: usize,
    number: u64,
}

impl Page {
    const fn new(block: usize, number: u64) -> Self {
        Self { block, number }
    }

    fn offset(self) -> u64 {
        self.number * PAGE_BYTES as u64
    }

    /// Its chunk, and the set of this page alone.
    fn place(self, memory: &dyn Memory) -> (ChunkIndex, PageSet) {
        let page = memory.layout().page_at(self.block, self.offset()).expect("a page of the layout");
        (page.chunk, [page.page].into_iter().collect())
    }

    fn all() -> impl Iterator<Item = Self> {
        BLOCKS.into_iter().enumerate().flat_map(|(block, pages)| (0..pages).map(move |number| Self { block, number }))
    }
}

/// Every kind of memory that there is.
fn rigs() -> Vec<Rig> {
    vec![
        shared(|memory| Arc::new(memory)),
        shared(|memory| Arc::new(NotInPlace(memory, PageSet::EMPTY))),
        private(&[]),
        private(&PAGES_IN_AREAS),
    ]
}

fn shared(kind: fn(SharedMemory) -> Arc<dyn Memory>) -> Rig {
    let files: Vec<_> = BLOCKS.iter().map(|_| tempfile::tempfile_in("/dev/shm").expect("a file")).collect();
    let mut mappings = Vec::new();
    for (file, pages) in files.iter().zip(BLOCKS) {
        file.set_len(pages * 4096).expect("room");
        mappings.push(SharedMapping::new(file, pages * 4096, Access::ReadWrite).expect("a mapping"));
    }
    let blocks = blocks(&mappings, files);
    let memory = kind(SharedMemory::open(&blocks, Access::ReadWrite).expect("RAM"));
    let mappings = Arc::new(mappings);
    let inside = Box::new(InsideHere(Arc::clone(&mappings)));
    Rig { memory, inside, guest: Box::new(mappings), common: &[] }
}

/// Two areas in one block, and one in the other.
const PAGES_IN_AREAS: [Page; 25] = {
    let mut pages = [Page::new(1, 10); 25];
    let mut index = 0;
    while index < 24 {
        let number = if index < 16 { 100 + index } else { 286 + index - 16 };
        pages[index as usize] = Page::new(0, number);
        index += 1;
    }
    pages
};

fn private(common: &'static [Page]) -> Rig {
    let mappings = BLOCKS.iter().map(|pages| PrivateMapping::new(pages * 4096).expect("a mapping")).collect();
    let mappings: Arc<Vec<PrivateMapping>> = Arc::new(mappings);
    let template = tempfile::tempfile_in("/dev/shm").expect("a file");
    for page in common {
        template.write_all_at(&[COMMON; PAGE_BYTES], page.offset()).expect("room");
        let part = page.offset()..page.offset() + PAGE_BYTES as u64;
        mappings[page.block].lay(page.offset(), &template, part).expect("an area");
    }
    let files = BLOCKS.iter().map(|_| tempfile::tempfile_in("/dev/shm").expect("a file")).collect();
    let advice = Arc::new(Mutex::new(InsideHere(Arc::clone(&mappings))));
    let holder = Holder { pid: std::process::id(), inside: advice };
    let memory = PrivateMemory::open(&blocks(&mappings, files), holder, Access::ReadWrite).expect("RAM");
    let inside = Box::new(InsideHere(Arc::clone(&mappings)));
    Rig { memory: Arc::new(memory), inside, guest: Box::new(mappings), common }
}

fn blocks(mappings: &[impl Mapped], files: Vec<File>) -> Vec<BlockFile> {
    let blocks = files.into_iter().zip(BLOCKS).zip(mappings).enumerate().map(|(index, ((file, pages), mapping))| {
        let (id, path) = (format!("ram{index}"), String::new());
        let spec = BlockSpec { id, bytes: pages * 4096, page_bytes: 4096, path };
        BlockFile { spec, file, address: mapping.addresses().start, process: None }
    });
    blocks.collect()
}

/// Empties the VMM's page tables, where that loses nothing.
fn empty_page_tables(memory: &dyn Memory, inside: &mut dyn Inside) {
    let emptied = memory.mappings().drop_mappings(inside, &memory.spans());
    assert_eq!(emptied.is_err(), memory.mappings().maps_on_arrival(), "{emptied:?}");
}

/// Everything that leaves what pages hold as it is.
fn disturb(memory: &dyn Memory, inside: &mut dyn Inside) {
    empty_page_tables(memory, inside);
    memory.intact().unwrap();
    memory.files().unwrap();
    memory.allocated().unwrap();
    memory.allocated_bytes().unwrap();
    for chunk in memory.layout().iter() {
        let pages = PageSet::first(memory.layout().place(chunk).unwrap().pages);
        let there = memory.allocated_in(chunk).unwrap();
        let mut bodies = vec![0; pages.len() * PAGE_BYTES];
        memory.load(chunk, &pages, &mut bodies).unwrap();
        memory.read(chunk, &there, &mut bodies[..there.len() * PAGE_BYTES]).unwrap();
        memory.chunk_digest(chunk, Digester::UNSEEDED).unwrap();
        memory.page_digests(chunk, Digester::UNSEEDED).unwrap();
        drop(memory.in_place(chunk, &there));
        memory.tracked_coarsely(chunk);
        memory.write(chunk, &PageSet::EMPTY, &[]).unwrap();
        memory.discard(chunk, &PageSet::EMPTY).unwrap();
    }
    memory.load_bytes(0, 4090, &mut [0; 100]).unwrap();
    memory.takeable().unwrap();
    memory.look_at_areas().unwrap();
}

/// The bodies that are sent in place.
fn sent_from(memory: &dyn Memory, chunk: ChunkIndex, pages: &PageSet) -> Option<Vec<u8>> {
    let mut vectors = memory.in_place(chunk, pages)?;
    let mut out = vec![0; pages.len() * PAGE_BYTES];
    let (rest, copied) = sterna_sys::iovec::copy_out(&mut vectors, &mut out);
    assert!(rest.is_empty() && copied == out.len());
    Some(out)
}

#[test]
fn what_the_guest_wrote_is_read_in_every_way_and_what_is_written_the_guest_reads() {
    for Rig { memory, mut inside, guest, .. } in rigs() {
        let memory = memory.as_ref();
        let written = [Page::new(0, 0), Page::new(0, 255), Page::new(0, 256), Page::new(0, 299), Page::new(1, 19)];
        (1..).zip(written).for_each(|(byte, page)| guest.write_page(page, byte));
        for (byte, page) in (1..).zip(written) {
            let (chunk, only) = page.place(memory);
            let expected = [byte; PAGE_BYTES];
            let mut body = [9; PAGE_BYTES];
            memory.read(chunk, &only, &mut body).unwrap();
            assert_eq!(body, expected, "read of {page:?}");
            body.fill(9);
            memory.load(chunk, &only, &mut body).unwrap();
            assert_eq!(body, expected, "load of {page:?}");
            body.fill(9);
            memory.load_bytes(page.block, page.offset(), &mut body).unwrap();
            assert_eq!(body, expected, "bytes of {page:?}");
            assert!(sent_from(memory, chunk, &only).is_none_or(|sent| sent == expected), "in place, of {page:?}");
            let digests = memory.page_digests(chunk, Digester::UNSEEDED).unwrap();
            let digest = digests[usize::from(only.iter().next().unwrap())];
            assert_eq!(digest, Digester::UNSEEDED.page(&expected), "digest of {page:?}");
        }
        // Some pages the guest has touched, others not; its page tables are emptied in between.
        for page in [Page::new(0, 0), Page::new(0, 7), Page::new(1, 0)] {
            let (chunk, only) = page.place(memory);
            memory.write(chunk, &only, &[77; PAGE_BYTES]).unwrap();
            assert_eq!(guest.read_page(page), [77; PAGE_BYTES]);
            empty_page_tables(memory, inside.as_mut());
            assert_eq!(guest.read_page(page), [77; PAGE_BYTES]);
        }
    }
}

#[test]
fn several_pages_are_read_and_written_in_order_whatever_lies_between_them() {
    for Rig { memory, guest, common, .. } in rigs() {
        let pages: PageSet = [1, 2, 3, 9, 40, 41, 254, 255].into_iter().collect();
        let bodies: Vec<u8> = (1..=8).flat_map(|byte| [byte; PAGE_BYTES]).collect();
        memory.write(ChunkIndex(0), &pages, &bodies).unwrap();
        let mut back = vec![0; bodies.len()];
        memory.read(ChunkIndex(0), &pages, &mut back).unwrap();
        assert!(back == bodies);
        back.fill(0);
        memory.load(ChunkIndex(0), &pages, &mut back).unwrap();
        assert!(back == bodies);
        assert!(sent_from(memory.as_ref(), ChunkIndex(0), &pages).is_none_or(|sent| sent == bodies));
        assert_eq!(guest.read_page(Page::new(0, 41)), [6; PAGE_BYTES]);
        let before = content(memory.as_ref(), common);
        assert_eq!(memory.allocated_in(ChunkIndex(0)).unwrap(), pages.or(before.chunk(ChunkIndex(0))));
    }
}

#[test]
fn whether_bodies_can_be_sent_in_place_is_told_of_a_chunk_whichever_pages_are_asked_for() {
    for Rig { memory, .. } in rigs() {
        for chunk in memory.layout().iter() {
            let all = PageSet::first(memory.layout().place(chunk).unwrap().pages);
            let none = memory.in_place(chunk, &PageSet::EMPTY);
            assert_eq!(none.as_ref().map(Vec::len), memory.in_place(chunk, &all).is_some().then_some(0));
        }
    }
}

fn content(memory: &dyn Memory, pages: &[Page]) -> PageMap {
    let mut map = PageMap::empty(memory.layout());
    pages.iter().map(|page| page.place(memory)).for_each(|(chunk, only)| map.insert_all(chunk, &only));
    map
}

#[test]
fn a_page_has_content_from_its_first_write_until_it_is_discarded_and_nothing_else_gives_it_any() {
    for Rig { memory, mut inside, guest, common } in rigs() {
        let memory = memory.as_ref();
        let (kept, discarded, written) = (Page::new(0, 3), Page::new(0, 4), Page::new(0, 280));
        guest.write_page(kept, 1);
        guest.write_page(discarded, 2);
        let (chunk, only) = written.place(memory);
        memory.write(chunk, &only, &[0; PAGE_BYTES]).unwrap();
        let content = |pages: &[Page]| content(memory, &[pages, common].concat());
        disturb(memory, inside.as_mut());
        assert_eq!(memory.allocated().unwrap(), content(&[kept, discarded, written]));
        let before = memory.allocated_bytes().unwrap();
        let (chunk, only) = discarded.place(memory);
        memory.discard(chunk, &only).unwrap();
        disturb(memory, inside.as_mut());
        assert_eq!(memory.allocated().unwrap(), content(&[kept, written]));
        assert_eq!(before - memory.allocated_bytes().unwrap(), 4096);
        for chunk in memory.layout().iter() {
            assert_eq!(memory.allocated_in(chunk).unwrap(), *content(&[kept, written]).chunk(chunk));
        }
        // The guest finds zeros, whatever it had mapped, and nothing else is gone.
        assert_eq!(guest.read_page(discarded), [0; PAGE_BYTES]);
        assert_eq!(guest.read_page(kept), [1; PAGE_BYTES]);
        guest.write_page(discarded, 5);
        let mut body = [9; PAGE_BYTES];
        memory.read(chunk, &only, &mut body).unwrap();
        assert_eq!(body, [5; PAGE_BYTES]);
    }
}

#[test]
fn what_a_guest_has_in_common_with_others_is_read_like_its_own_and_ends_where_it_is_written_or_discarded() {
    for Rig { memory, mut inside, guest, common } in rigs() {
        let memory = memory.as_ref();
        let own = memory.allocated_bytes().unwrap();
        disturb(memory, inside.as_mut());
        for page in common {
            let (chunk, only) = page.place(memory);
            for read in [Memory::read, Memory::load] {
                let mut body = [9; PAGE_BYTES];
                read(memory, chunk, &only, &mut body).unwrap();
                assert_eq!(body, [COMMON; PAGE_BYTES], "{page:?}");
            }
            assert_eq!(guest.read_page(*page), [COMMON; PAGE_BYTES]);
        }
        assert_eq!(memory.allocated_bytes().unwrap(), own, "to read it took memory");
        for (index, page) in common.iter().enumerate() {
            let (chunk, only) = page.place(memory);
            match index % 3 {
                0 => memory.discard(chunk, &only).unwrap(),
                1 => memory.write(chunk, &only, &[1; PAGE_BYTES]).unwrap(),
                _ => guest.write_page(*page, 2),
            }
        }
        disturb(memory, inside.as_mut());
        for (index, page) in common.iter().enumerate() {
            assert_eq!(guest.read_page(*page), [(index % 3) as u8; PAGE_BYTES], "{page:?}");
        }
        let written: Vec<_> =
            common.iter().enumerate().filter(|(index, _)| index % 3 > 0).map(|(_, page)| *page).collect();
        assert_eq!(memory.allocated().unwrap(), content(memory, &written));
        assert_eq!(memory.allocated_bytes().unwrap() - own, (written.len() * PAGE_BYTES) as u64);
    }
}

#[test]
fn zeros_and_pages_without_content_have_the_same_digest_and_others_another() {
    for Rig { memory, guest, .. } in rigs() {
        let (digester, chunk) = (Digester::UNSEEDED, ChunkIndex(1));
        let empty = memory.chunk_digest(chunk, digester).unwrap();
        guest.write_page(Page::new(0, 256 + 5), 0);
        assert_eq!(memory.chunk_digest(chunk, digester).unwrap(), empty);
        guest.write_page(Page::new(0, 256 + 6), 1);
        assert_ne!(memory.chunk_digest(chunk, digester).unwrap(), empty);
        let digests = memory.page_digests(chunk, digester).unwrap();
        assert_eq!((digests.len(), digests[5], digests[6]), (44, 0, digester.page(&[1; PAGE_BYTES])));
        memory.discard(chunk, &[6].into_iter().collect()).unwrap();
        assert_eq!(memory.chunk_digest(chunk, digester).unwrap(), empty);
    }
}

#[test]
fn no_page_is_lost_by_any_call_that_is_not_a_discard_of_it_while_the_guest_keeps_writing() {
    // Each page holds a count, which the guest must find as it left it before it counts on; every other page is
    // discarded and written meanwhile.
    for Rig { memory, mut inside, guest, common } in rigs() {
        let memory = memory.as_ref();
        common.iter().filter(|page| page.number % 2 == 0).for_each(|page| guest.write_page(*page, 0));
        let of_guest: Vec<_> = Page::all().filter(|page| page.number % 2 == 0).collect();
        let others: Vec<_> = Page::all().filter(|page| page.number % 2 == 1).collect();
        let done = AtomicBool::new(false);
        let turns = std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                let mut turn = 0_u64;
                while turn < 8 || !done.load(Ordering::Acquire) {
                    for page in &of_guest {
                        let mut found = [0; 16];
                        guest.read(page.block, page.offset(), &mut found);
                        let found = u128::from_le_bytes(found);
                        assert_eq!(found, u128::from(turn), "{page:?} was lost");
                        guest.write(page.block, page.offset(), &(found + 1).to_le_bytes());
                    }
                    turn += 1;
                }
                turn
            });
            for _ in 0..20 {
                disturb(memory, inside.as_mut());
                for page in &others {
                    let (chunk, only) = page.place(memory);
                    memory.write(chunk, &only, &[3; PAGE_BYTES]).unwrap();
                    memory.discard(chunk, &only).unwrap();
                }
            }
            done.store(true, Ordering::Release);
            writer.join().expect("no page was lost")
        });
        for page in of_guest {
            let mut body = [0; PAGE_BYTES];
            let (chunk, only) = page.place(memory);
            memory.load(chunk, &only, &mut body).unwrap();
            assert_eq!(body.first_chunk(), Some(&u128::from(turns).to_le_bytes()));
        }
    }
}

#[test]
fn pages_that_a_guest_waits_for_are_mapped_as_they_were_written_and_holes_as_zeros() {
    if !sterna_sys::probe::missing().is_empty() {
        println!("skipped: {}", sterna_sys::probe::missing().join("; "));
        return;
    }
    for Rig { memory, mut inside, guest, .. } in rigs() {
        let faults = inside.open(Features::MISSING_SHMEM | Features::MINOR_SHMEM).unwrap();
        let span = memory.spans()[0].clone();
        faults.register(span.clone(), memory.mappings().modes()).unwrap();
        memory.wait_for(&faults).unwrap();
        let page = |number: u64| span.start + number * 4096..span.start + (number + 1) * 4096;
        memory.write(ChunkIndex(0), &[2].into_iter().collect(), &[8; PAGE_BYTES]).unwrap();
        let (held, empty) = std::thread::scope(|scope| {
            let held = scope.spawn(|| guest.read_page(Page::new(0, 2)));
            let empty = scope.spawn(|| guest.read_page(Page::new(0, 3)));
            let zeros = memory.mappings().map_zeros(&faults, page(3)).unwrap();
            let written = memory.mappings().map_written(&faults, page(2), false).unwrap();
            assert_eq!((zeros.bytes, written.bytes), (4096, 4096));
            // The kernel says so where the page is a hole of a file.
            let hole = memory.mappings().map_written(&faults, page(5), false);
            let told = hole.is_err_and(|error| error.errno() == Some(libc::EFAULT));
            assert_ne!(told, memory.mappings().maps_on_arrival());
            (held.join().unwrap(), empty.join().unwrap())
        });
        assert_eq!((held, empty), ([8; PAGE_BYTES], [0; PAGE_BYTES]));
        faults.unregister(span).unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// After any calls in any order, the guest and all ways of reading agree on what each page holds.
    #[test]
    fn all_agree_on_what_a_page_holds_whatever_was_done(
        steps in prop::collection::vec((0u8..5, 0u64..300, 1u8..255), 1..40),
    ) {
        for Rig { memory, mut inside, guest, common } in rigs() {
            let memory = memory.as_ref();
            let mut model = vec![None; BLOCKS[0] as usize];
            for page in common.iter().filter(|page| page.block == 0) {
                model[page.number as usize] = Some(COMMON);
            }
            for &(step, number, byte) in &steps {
                let page = Page::new(0, number);
                let (chunk, only) = page.place(memory);
                match step {
                    0 => guest.write_page(page, byte),
                    1 => memory.write(chunk, &only, &[byte; PAGE_BYTES]).unwrap(),
                    2 => memory.discard(chunk, &only).unwrap(),
                    3 => empty_page_tables(memory, inside.as_mut()),
                    _ => disturb(memory, inside.as_mut()),
                }
                match step {
                    0 | 1 => model[number as usize] = Some(byte),
                    2 => model[number as usize] = None,
                    _ => {}
                }
            }
            for (number, held) in model.iter().enumerate() {
                let page = Page::new(0, number as u64);
                let (chunk, only) = page.place(memory);
                let mut body = [9; PAGE_BYTES];
                memory.load(chunk, &only, &mut body).unwrap();
                prop_assert_eq!(body, [held.unwrap_or(0); PAGE_BYTES]);
                let there = !memory.allocated_in(chunk).unwrap().and(&only).is_empty();
                prop_assert_eq!(there, held.is_some());
                prop_assert_eq!(guest.read_page(page), body);
            }
        }
    }
}
