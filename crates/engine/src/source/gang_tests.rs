//! What a gang names, on memory that says which of its pages are shared.

use std::fs::File;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::mm::Advice;
use sterna_protocol::frame::Digester;
use sterna_protocol::spec::BlockSpec;
use sterna_sys::ksm::Ksm;
use sterna_sys::map::{Access, PrivateMapping, SharedMapping};
use sterna_sys::pagemap::Pagemap;

use super::super::content::Content;
use super::super::select::{Keep, Wanted, select};
use super::super::sent::SentTable;
use super::*;
use crate::memory::inside_here::InsideHere;
use crate::memory::not_in_place::NotInPlace;
use crate::memory::private::PrivateMemory;
use crate::memory::shared::SharedMemory;
use crate::memory::{BlockFile, Holder};

const CHUNK: ChunkIndex = ChunkIndex(0);
const BYTES: u64 = 1 << 20;

/// A machine: its RAM, in which pages 0 to 99 look shared, and what it has sent.
struct Machine {
    frames: Frames,
    ram: Box<dyn Memory>,
    sent: SentTable,
    member: Member,
}

fn machine(gang: &Arc<Gang>, index: u16) -> Machine {
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.set_len(BYTES).unwrap();
    let ram = SharedMemory::open(&[block(&file, 0)], Access::ReadWrite).unwrap();
    Machine::of(gang, index, Frames::File(Arc::new(file)), ram)
}

/// A machine whose RAM is this, in private memory.
fn private_machine(gang: &Arc<Gang>, index: u16, mapping: &Arc<Vec<PrivateMapping>>) -> Machine {
    let (start, file) = (mapping[0].addresses().start, tempfile::tempfile_in("/dev/shm").unwrap());
    let inside = Arc::new(Mutex::new(InsideHere(Arc::clone(mapping))));
    let holder = Holder { pid: std::process::id(), inside };
    let ram = PrivateMemory::open(&[block(&file, start)], holder, Access::ReadWrite).unwrap();
    Machine::of(gang, index, Frames::At(start), ram)
}

fn block(file: &File, address: u64) -> BlockFile {
    let spec = BlockSpec { id: "ram".into(), bytes: BYTES, page_bytes: 4096, path: String::new() };
    BlockFile { spec, file: file.try_clone().unwrap(), address, process: None }
}

impl Machine {
    fn of(gang: &Arc<Gang>, index: u16, frames: Frames, ram: impl Memory + 'static) -> Self {
        let (sent, member) = (SentTable::new(ram.layout(), Digester::UNSEEDED), Member::new(gang, index, ram.layout()));
        Self { frames, ram: Box::new(NotInPlace(ram, PageSet::first(100))), sent, member }
    }

    fn write(&self, page: u8, byte: u8) {
        self.ram.write(CHUNK, &[page].into_iter().collect(), &[byte; PAGE_BYTES]).unwrap();
    }

    /// One round of these pages: those that are pooled, those that refer to others, and those that go alone.
    fn round(&self, pages: &[u8]) -> (Vec<u8>, Vec<(u8, Origin)>, Vec<u8>) {
        let none = PageSet::EMPTY;
        let pages = pages.iter().copied().collect();
        let wanted = Wanted { chunk: CHUNK, pages, discarded: none, free: none, again: none };
        let mut copies = Copies::default();
        let mut selected =
            select(self.ram.as_ref(), &self.sent, &Content::Digest, &wanted, &mut copies, Keep::Full).unwrap();
        let before = selected.counts.pages();
        let shared = self.member.share(self.ram.as_ref(), (0, CHUNK), &mut selected, &mut copies).unwrap();
        assert_eq!(selected.counts.pages(), before, "each page is in one of the counters");
        assert_eq!((selected.full.len(), selected.digests.len()), (selected.held.len(), selected.held.len()));
        assert_eq!(copies.bodies().len(), selected.full.len() * PAGE_BYTES);
        for (page, (body, digest)) in
            selected.full.iter().zip(copies.bodies().chunks(PAGE_BYTES).zip(&selected.digests))
        {
            assert_eq!(*digest, Digester::UNSEEDED.page(body), "page {page} goes with its own digest");
        }
        let pooled = shared.as_ref().map_or(none, |frame| frame.pooled);
        let references = shared.iter().flat_map(|frame| &frame.references).flat_map(|run| run.each()).collect();
        (pooled.iter().collect(), references, selected.full.without(&pooled).iter().collect())
    }
}

fn origin(member: u16, page: u8) -> Origin {
    Origin { member, page: PageIndex { chunk: CHUNK, page } }
}

#[test]
fn a_body_goes_once_whichever_machine_has_it_and_what_is_not_shared_goes_alone() {
    let gang = Gang::new("g", 2, Together::default());
    let (a, b) = (machine(&gang, 0), machine(&gang, 1));
    for (page, byte) in [(1, 1), (2, 2), (3, 1), (200, 1)] {
        a.write(page, byte);
    }
    for (page, byte) in [(7, 2), (8, 3), (200, 2)] {
        b.write(page, byte);
    }
    assert_eq!(a.round(&[1, 2, 3, 200]), (vec![1, 2], vec![(3, origin(0, 1))], vec![200]));
    assert_eq!(b.round(&[7, 8, 200]), (vec![8], vec![(7, origin(0, 2))], vec![200]));
}

#[test]
fn a_page_that_was_written_is_named_by_what_it_holds_now_and_is_an_origin_once() {
    let gang = Gang::new("g", 2, Together::default());
    let (a, b) = (machine(&gang, 0), machine(&gang, 1));
    a.write(1, 1);
    assert_eq!(a.round(&[1]).0, [1]);
    a.write(1, 2);
    assert_eq!(a.round(&[1]), (vec![], vec![], vec![1]), "the pool has another body under its name");
    b.write(5, 1);
    assert_eq!(b.round(&[5]).1, [(5, origin(0, 1))], "which stays there for the others");
    b.write(5, 2);
    assert_eq!(b.round(&[5]).0, [5], "nobody else has sent this one to be shared");
    a.write(9, 2);
    assert_eq!(a.round(&[9]).1, [(9, origin(1, 5))]);
}

/// Failed while names outlived their pool: later members referred to bodies that were in the former one.
#[test]
fn what_went_into_a_former_pool_goes_again_and_what_is_offered_is_asked_anew() {
    let gang = Gang::new("g", 3, Together::default());
    let (a, b, c) = (machine(&gang, 0), machine(&gang, 1), machine(&gang, 2));
    let mut asked = 0;
    let mut take_offers = || {
        gang.take_offers(|_, _| {
            asked += 1;
            Ok::<_, ()>(Vec::new())
        })
        .expect("nothing");
        asked
    };
    [&a, &b, &c].iter().for_each(|machine| machine.write(1, 1));
    gang.joined(7);
    assert_eq!((take_offers(), a.round(&[1]).0), (1, vec![1]));
    gang.joined(7);
    assert_eq!((take_offers(), b.round(&[1]).1), (1, vec![(1, origin(0, 1))]));
    gang.joined(8);
    assert_eq!((take_offers(), c.round(&[1]).0), (2, vec![1]));
}

#[test]
fn what_the_destination_has_already_goes_as_a_reference_also_where_it_is_nobody_elses_here() {
    let gang = Gang::new("g", 1, Together::default());
    let a = machine(&gang, 0);
    let names = |bytes: &[u8]| bytes.iter().map(|byte| name(&gang.key, &[*byte; PAGE_BYTES])).collect::<Vec<_>>();
    let broken = gang.take_offers(|_, first| if first == 0 { Ok(names(&[9])) } else { Err("the link") });
    assert_eq!(broken, Err("the link"));
    a.write(1, 9);
    assert_eq!(a.round(&[1]), (vec![1], vec![], vec![]), "what was half told is not believed");
    let mut asked = Vec::new();
    let offer = |key: &Key, first| {
        assert_eq!(key, &gang.key);
        asked.push(first);
        Ok::<_, ()>(if first == 0 { names(&[1, 2]) } else { names(&[3])[first as usize - 2..].to_vec() })
    };
    gang.take_offers(offer).unwrap();
    assert_eq!(asked, [0, 2, 3]);
    gang.take_offers(|_, _| Err("it is asked once")).unwrap();
    for (page, byte) in [(2, 3), (3, 4), (200, 2), (201, 4), (202, 5)] {
        a.write(page, byte);
    }
    let references = vec![(2, Origin::offered(2)), (200, Origin::offered(1)), (201, origin(0, 3))];
    assert_eq!(a.round(&[2, 3, 200, 201, 202]), (vec![3], references, vec![202]));
    a.member.give_up();
    a.write(9, 1);
    assert_eq!(a.round(&[9]).1, [(9, Origin::offered(0))], "what is there stays there");
}

#[test]
fn clones_of_one_machine_send_each_page_once_whatever_the_kernel_says_of_it() {
    let gang = Gang::alike("", 4, Together::default());
    let [a, b, c, d] = [0, 1, 2, 3].map(|index| machine(&gang, index));
    for clone in [&a, &b, &c, &d] {
        // Two pages have the same in them, and 200 does not look shared.
        [(1, 1), (2, 2), (3, 1), (200, 4)].into_iter().for_each(|(page, byte)| clone.write(page, byte));
    }
    gang.take_offers(|_, _| Err("where no content is looked at, none is asked for")).unwrap();
    assert_eq!(a.round(&[1, 200]), (vec![1, 200], vec![], vec![]));
    let references = vec![(1, origin(0, 1)), (200, origin(0, 200))];
    assert_eq!(b.round(&[1, 2, 3, 200]), (vec![2, 3], references, vec![]));
    let references = vec![(1, origin(0, 1)), (2, origin(1, 2)), (3, origin(1, 3)), (200, origin(0, 200))];
    assert_eq!(c.round(&[1, 2, 3, 200]), (vec![], references, vec![]));
    b.member.give_up();
    assert_eq!(
        d.round(&[1, 2]),
        (vec![2], vec![(1, origin(0, 1))], vec![]),
        "what may never arrive is not referred to"
    );
}

#[test]
fn what_was_missed_once_comes_with_its_body() {
    let gang = Gang::new("g", 1, Together::default());
    let a = machine(&gang, 0);
    a.write(1, 1);
    a.write(2, 1);
    assert_eq!(a.round(&[1, 2]).1, [(2, origin(0, 1))]);
    a.sent.suspect(CHUNK, 2);
    assert_eq!(a.round(&[2]), (vec![], vec![], vec![2]));
}

#[test]
fn a_member_that_fails_takes_its_names_back() {
    let gang = Gang::new("g", 2, Together::default());
    let (a, b) = (machine(&gang, 0), machine(&gang, 1));
    a.write(1, 1);
    b.write(1, 2);
    assert_eq!((a.round(&[1]).0, b.round(&[1]).0), (vec![1], vec![1]));
    a.member.give_up();
    b.write(3, 1);
    b.write(4, 2);
    assert_eq!(b.round(&[3, 4]), (vec![3], vec![(4, origin(1, 1))], vec![]));
}

#[test]
fn digests_of_two_gangs_have_nothing_in_common() {
    let gangs = [Gang::new("g", 1, Together::default()), Gang::new("g", 1, Together::default())];
    assert!(gangs[0].spec.id != gangs[1].spec.id && gangs[0].key != gangs[1].key);
    assert_ne!(name(&gangs[0].key, &[1; PAGE_BYTES]), name(&gangs[1].key, &[1; PAGE_BYTES]));
}

/// A guest can make these pages without the gang's key: whoever told bodies apart by a part of them, by a sum, or by a
/// CRC-32 would give one machine another's content.
#[test]
fn pages_that_are_forged_to_look_alike_are_never_taken_for_one_another() {
    let gang = Gang::new("g", 2, Together::default());
    let (victim, forger) = (machine(&gang, 0), machine(&gang, 1));
    let body: [u8; PAGE_BYTES] = std::array::from_fn(|at| (at * 7 + at / 256) as u8);
    let mut forged = [body; 5];
    for (forged, at) in forged.iter_mut().zip([0, PAGE_BYTES / 2, PAGE_BYTES - 1]) {
        forged[at] ^= 1;
    }
    forged[3].swap(8, 4000);
    // A multiple of the CRC's polynomial, in the order in which it takes the bits of a byte.
    for bit in (0..33).filter(|bit| 0x1_04C1_1DB7_u64 >> (32 - bit) & 1 == 1) {
        forged[4][800 + bit / 8] ^= 1 << (bit % 8);
    }
    let write = |machine: &Machine, page: u8, body| machine.ram.write(CHUNK, &[page].into_iter().collect(), body);
    write(&victim, 1, &body).unwrap();
    for (page, body) in (1..).zip(&forged) {
        write(&forger, page, body).unwrap();
    }
    write(&forger, 6, &body).unwrap();
    assert_eq!(victim.round(&[1]).0, [1]);
    let all = (vec![1, 2, 3, 4, 5], vec![(6, origin(0, 1))], vec![]);
    assert_eq!(forger.round(&[1, 2, 3, 4, 5, 6]), all, "only what is equal");
}

/// The frames of a machine's RAM.
#[derive(Debug, Clone)]
enum Frames {
    /// It lies in this file.
    File(Arc<File>),
    /// It is this process's memory from this address on.
    At(u64),
}

impl Frames {
    /// The frame in which a page lies; `None` where this process may not know.
    fn of(&self, page: u8) -> Option<u64> {
        let at = u64::from(page) * PAGE_BYTES as u64;
        match self {
            Self::File(file) => {
                let mapping = SharedMapping::new(file, BYTES, Access::Read).expect("a mapping");
                // The entry is made by a look.
                mapping.copy_out(at..at + PAGE_BYTES as u64, &mut [0; PAGE_BYTES]);
                frame_at(mapping.addresses().start + at)
            }
            Self::At(start) => frame_at(start + at),
        }
    }
}

/// The frame of what this process has at an address.
fn frame_at(address: u64) -> Option<u64> {
    let mut entries = Vec::new();
    let pagemap = Pagemap::open(std::process::id()).expect("this process");
    pagemap.entries(address..address + PAGE_BYTES as u64, &mut entries).expect("entries");
    entries.first()?.frame()
}

/// The frame of a member's page, as the kernel tells it at this moment.
#[derive(Debug, Default)]
pub struct FrameOf(Arc<OnceLock<[Frames; 2]>>);

impl FrameOf {
    pub fn name(&self, member: u16, page: u8) -> Name {
        let frames = self.0.get().expect("both machines are there");
        let frame = frames[usize::from(member)].of(page).expect("a frame");
        let mut name = Name::default();
        name[..8].copy_from_slice(&frame.to_le_bytes());
        name
    }
}

/// A gang, and how its bodies are named where that is by frames, once the machines are known.
fn gang_named(naming: impl Fn(FrameOf) -> Naming) -> (Arc<Gang>, impl Fn([&Machine; 2])) {
    let frames = FrameOf::default();
    let known = Arc::clone(&frames.0);
    let gang = Gang::of("g", 2, Together::default(), naming(frames));
    (gang, move |machines: [&Machine; 2]| known.set(machines.map(|machine| machine.frames.clone())).expect("once"))
}

/// Two machines, of which the second has in a page what the first does not have, in the frame in which the first one's
/// page lay when it was looked at. Returns what that page goes as. `None` where the kernel does not tell frames.
fn with_a_frame_used_again(naming: impl Fn(FrameOf) -> Naming) -> Option<(Vec<u8>, Vec<Origin>)> {
    // The kernel gives a frame that was freed to the next who needs one, mostly.
    for _ in 0..1000 {
        let (gang, know) = gang_named(&naming);
        let (a, b) = (machine(&gang, 0), machine(&gang, 1));
        know([&a, &b]);
        a.write(1, 1);
        let frame = a.frames.of(1)?;
        assert_eq!(a.round(&[1]).0, [1]);
        a.ram.discard(CHUNK, &[1].into_iter().collect()).expect("given back");
        let is_there = |page: &u8| {
            b.write(*page, 2);
            b.frames.of(*page) == Some(frame)
        };
        if let Some(page) = (0..100).find(is_there) {
            let (pooled, references, _) = b.round(&[page]);
            return Some((pooled, references.into_iter().map(|(_, origin)| origin).collect()));
        }
    }
    panic!("the kernel has used no frame again");
}

/// What names bodies by their frame, as the paper does, sends a reference to the wrong body: with digests switched off
/// this is seen to go wrong.
#[test]
fn a_frame_that_is_used_again_between_two_looks_changes_no_reference() {
    let Some((_, references)) = with_a_frame_used_again(Naming::Frame) else {
        return println!("skipped: the kernel tells frames to root only");
    };
    assert_eq!(references, [origin(0, 1)], "by its frame it is taken for another");
    let (pooled, references) = with_a_frame_used_again(|_| Naming::Content).expect("frames");
    assert_eq!((pooled.len(), references), (1, vec![]), "another content, another body");
}

/// Waits until KSM, which scans, has merged what is asked for; whether it has, in twenty of its scans.
fn merges(ksm: &Ksm, is_merged: impl Fn() -> bool) -> bool {
    let scans = || ksm.scans().unwrap_or(u64::MAX);
    let (last, late) = (scans().saturating_add(20), Instant::now() + Duration::from_secs(120));
    while !is_merged() {
        if scans() > last || Instant::now() > late {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    true
}

/// RAM that KSM may merge, of which pages 0 to 99 are full of bytes from 1 on.
fn mergeable() -> Arc<Vec<PrivateMapping>> {
    let mapping = PrivateMapping::new(BYTES).expect("memory");
    let at = mapping.addresses().start as *mut core::ffi::c_void;
    // SAFETY: memory of this process, of which nothing changes by it.
    unsafe { rustix::mm::madvise(at, BYTES as usize, Advice::LinuxMergeable) }.expect("KSM takes it");
    (0..100_u8).for_each(|page| mapping.write(u64::from(page) * PAGE_BYTES as u64, &[page + 1; PAGE_BYTES]));
    Arc::new(vec![mapping])
}

/// A machine is looked at, and KSM merges its pages with those of another, so that they stay in their frames, which
/// both have now. Then both write one of them, and its frame is used again, by a machine that has another content in
/// it. Returns the page that it was in, and what the other page goes as; `None` where the kernel tells no frames.
fn with_a_frame_that_ksm_had_merged(
    ksm: &Ksm,
    naming: impl Fn(FrameOf) -> Naming,
) -> Option<(u8, Vec<u8>, Vec<Origin>)> {
    for attempt in 0..20 {
        let (gang, know) = gang_named(&naming);
        let mut both = [mergeable(), mergeable()];
        // KSM looks at what lies lower first, and keeps the frame of the page that it finds to be equal later, mostly.
        both.sort_by_key(|mapping| mapping[0].addresses().start);
        if attempt % 2 == 1 {
            both.reverse();
        }
        let [twin, own] = both;
        let later = Arc::new(vec![PrivateMapping::new(BYTES).expect("memory")]);
        let (a, b) = (private_machine(&gang, 0, &own), private_machine(&gang, 1, &later));
        know([&a, &b]);
        let all: Vec<u8> = (0..100).collect();
        let frames: Vec<u64> = all.iter().map(|page| a.frames.of(*page)).collect::<Option<_>>()?;
        assert_eq!(a.round(&all).0, all, "the first sight of each");
        let twins = Frames::At(twin[0].addresses().start);
        let merged = || all.iter().filter(|page| a.frames.of(**page) == twins.of(**page));
        assert!(merges(ksm, || merged().count() == all.len()), "KSM has merged {} pages", merged().count());
        for page in all.iter().copied().filter(|page| a.frames.of(*page) == Some(frames[usize::from(*page)])) {
            let at = u64::from(page) * PAGE_BYTES as u64;
            [&own, &twin].iter().for_each(|mapping| mapping[0].write(at, &[200; PAGE_BYTES]));
            later[0].write(at, &[201; PAGE_BYTES]);
            if b.frames.of(page) == Some(frames[usize::from(page)]) {
                let (pooled, references, _) = b.round(&[page]);
                return Some((page, pooled, references.into_iter().map(|(_, origin)| origin).collect()));
            }
        }
    }
    panic!("the kernel has used no frame again");
}

/// As above, with the kernel's own merging between the two looks.
#[test]
fn a_frame_that_ksm_merges_after_the_first_look_and_that_is_used_again_changes_no_reference() {
    let scanning = Ksm::try_take().and_then(|ksm| ksm.scan(&[("pages_to_scan", "20000")]).map(|()| ksm));
    let ksm = match scanning {
        Ok(ksm) => ksm,
        Err(why) => return println!("skipped: KSM cannot be used: {}", std::io::Error::from(why)),
    };
    let Some((page, _, references)) = with_a_frame_that_ksm_had_merged(&ksm, Naming::Frame) else {
        return println!("skipped: the kernel tells frames to root only");
    };
    assert_eq!(references, [origin(0, page)], "by its frame it is taken for another");
    let (page, pooled, references) = with_a_frame_that_ksm_had_merged(&ksm, |_| Naming::Content).expect("frames");
    assert_eq!((pooled, references), (vec![page], vec![]), "another content, another body");
}
