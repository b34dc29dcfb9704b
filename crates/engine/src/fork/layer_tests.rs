//! Layers of this process's private memory, which a thread writes meanwhile.

use std::os::unix::fs::FileExt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use sterna_protocol::spec::BlockSpec;
use sterna_sys::map::{Access, PrivateMapping};

use super::*;
use crate::memory::inside_here::InsideHere;
use crate::memory::{BlockFile, Holder, kind};
use crate::source::track::{Cost, Watch, WriteProtect};

const P: u64 = PAGE_BYTES as u64;
const PAGES: u64 = 2048;

fn pages(ranges: &[Range<u64>]) -> Vec<Range<u64>> {
    ranges.iter().map(|range| range.start * P..range.end * P).collect()
}

#[test]
fn near_runs_become_one_until_there_are_few_enough_and_never_across_blocks() {
    let ram = pages(&[0..100, 100..200]);
    let own = pages(&[0..1, 2..3, 6..8, 20..30, 98..100, 100..101]);
    let runs = |most| near_ones_together(&own, &ram, 0, most);
    assert_eq!(runs(10), own);
    assert_eq!(runs(5), pages(&[0..3, 6..8, 20..30, 98..100, 100..101]));
    assert_eq!(runs(4), pages(&[0..8, 20..30, 98..100, 100..101]));
    assert_eq!(runs(1), pages(&[0..100, 100..101]), "as few as there are blocks");
    assert_eq!(near_ones_together(&[], &ram, 0, 1), []);
    let near = near_ones_together(&own, &ram, 3 * P, 10);
    assert_eq!(near, pages(&[0..8, 20..30, 98..100, 100..101]), "what is near enough is one from the start");
    let apart = near_ones_together(&pages(&[98..99, 101..102]), &ram, 0, 1);
    assert_eq!(apart, pages(&[98..99, 101..102]), "neither begins a block");
    let (ram, own) = (pages(&[100..200, 0..100]), pages(&[101..102, 150..151, 3..4, 5..6]));
    assert_eq!(near_ones_together(&own, &ram, 0, 2), pages(&[101..151, 3..6]), "in whatever order they lie");
}

/// A guest of two blocks in this process, and a layer of it in the making.
struct Rig {
    mappings: Arc<Vec<PrivateMapping>>,
    memory: Arc<dyn Memory>,
    /// What the guest has where it has written nothing.
    under: Vec<u8>,
    /// Pages that were discarded, as the agent's log would have them.
    log: Log,
}

type Log = Arc<Mutex<Vec<Range<u64>>>>;

/// A tracker to which this log belongs.
struct Logged(WriteProtect, Log);

impl Tracker for Logged {
    fn arm(&mut self, ram: &dyn Memory) -> Result<(), MigrateError> {
        self.0.arm(ram)
    }

    fn collect(
        &mut self,
        ram: &dyn Memory,
        written: &mut PageMap,
        discarded: &mut PageMap,
    ) -> Result<(), MigrateError> {
        self.0.collect(ram, written, discarded)?;
        for pages in self.1.lock().unwrap().drain(..) {
            add_run(discarded, ram.layout(), 0, pages.start * P..pages.end * P);
        }
        written.add(discarded);
        Ok(())
    }

    fn watch(&self) -> Option<Arc<dyn Watch>> {
        self.0.watch()
    }

    fn seal(&mut self) {
        self.0.seal();
    }

    fn disarm(&mut self) {
        self.0.disarm();
    }

    fn cost(&self) -> Cost {
        self.0.cost()
    }
}

impl Rig {
    /// `None`, and why, where the kernel does not track.
    fn new() -> Option<Self> {
        Self::of(PAGES)
    }

    /// The same, with a file in the middle of each block, as after a fork.
    fn forked() -> Option<Self> {
        let mut rig = Self::new()?;
        for (block, mapping) in rig.mappings.iter().enumerate() {
            let (file, part) = (tempfile::tempfile_in("/dev/shm").expect("a file"), 100 * P..900 * P);
            file.write_all_at(&vec![9; part.end as usize], 0).expect("content");
            mapping.lay(part.start, &file, part.clone()).expect("the file, mapped");
            let first = block * rig.under.len() / 2;
            rig.under[first + part.start as usize..first + part.end as usize].fill(9);
        }
        Some(rig)
    }

    /// Of so many pages.
    fn of(all: u64) -> Option<Self> {
        if !sterna_sys::probe::missing().is_empty() {
            println!("skipped: {}", sterna_sys::probe::missing().join("; "));
            return None;
        }
        let mappings = [all / 2; 2].map(|pages| PrivateMapping::new(pages * P).expect("a mapping"));
        let mappings = Arc::new(Vec::from(mappings));
        let inside = Arc::new(Mutex::new(InsideHere(Arc::clone(&mappings))));
        let blocks = mappings.iter().enumerate().map(|(index, mapping)| BlockFile {
            spec: BlockSpec { id: format!("ram{index}"), bytes: all / 2 * P, page_bytes: P, path: String::new() },
            file: tempfile::tempfile_in("/dev/shm").expect("a file"),
            address: mapping.addresses().start,
            process: Some(Holder { pid: std::process::id(), inside: inside.clone() }),
        });
        let memory = kind::open(&blocks.collect::<Vec<_>>(), Access::Read).expect("RAM");
        Some(Self { mappings, memory, under: vec![0; (PAGES * P) as usize], log: Log::default() })
    }

    fn draft(&self, tracker: Box<dyn Tracker>) -> Draft {
        let file = tempfile::tempfile_in("/dev/shm").expect("a file");
        let draft = Draft::begin(std::process::id(), Arc::clone(&self.memory), tracker, file, Untracked::Nobody);
        draft.expect("a layer in the making")
    }

    fn tracker(&self) -> Box<dyn Tracker> {
        let inside = InsideHere(Arc::clone(&self.mappings));
        let tracker = WriteProtect::new(std::process::id(), inside).expect("a tracker").for_own_pages();
        Box::new(Logged(tracker, Arc::clone(&self.log)))
    }

    /// Discards pages of the first block.
    fn discard(&self, pages: Range<u64>) {
        self.mappings[0].discard(pages.start * P..pages.end * P).expect("discarded");
        self.log.lock().unwrap().push(pages);
    }

    /// Fills a page of the guest's.
    fn set(&self, page: u64, byte: u8) {
        let (block, page) = (page / (PAGES / 2), page % (PAGES / 2));
        self.mappings[block as usize].write(page * P, &[byte; PAGE_BYTES]);
    }

    /// What the guest has there.
    fn page(&self, page: u64) -> [u8; PAGE_BYTES] {
        let (block, page) = (page / (PAGES / 2), page % (PAGES / 2));
        let mut body = [0; PAGE_BYTES];
        self.mappings[block as usize].read(page * P, &mut body);
        body
    }

    /// The pages in which the layer is not what the guest has: what its runs show of the file.
    fn wrong(&self, draft: &mut Draft) -> Vec<u64> {
        let runs = draft.runs().expect("runs");
        draft.copy(&runs).expect("the last copies");
        let mut shown = self.under.clone();
        for MapRun { at, offset } in draft.placed(&runs) {
            let (start, end) = (offset as usize, (offset + at.length) as usize);
            draft.file.read_exact_at(&mut shown[start..end], offset).expect("the layer");
        }
        let (shown, _) = shown.as_chunks::<PAGE_BYTES>();
        (0..PAGES).filter(|page| self.page(*page) != shown[*page as usize]).collect()
    }
}

/// Does this again and again beside a guest that writes: pages of before, pages that were not there, and zeros in the
/// place of something. A hundred writes come after the beginning of each time.
fn while_it_writes(rig: &Rig, times: u32, mut act: impl FnMut(u32)) {
    let (stop, writes) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Acquire) {
                let number = writes.fetch_add(1, Ordering::AcqRel);
                rig.set(number.wrapping_mul(7919) % PAGES, (number % 5) as u8);
            }
        });
        for time in 0..times {
            let before = writes.load(Ordering::Acquire);
            act(time);
            while writes.load(Ordering::Acquire) < before + 100 {
                std::thread::yield_now();
            }
        }
        stop.store(true, Ordering::Release);
    });
}

#[test]
fn what_a_guest_writes_while_its_pages_are_copied_is_in_the_layer() {
    for rig in [Rig::new(), Rig::forked()] {
        let Some(rig) = rig else { return };
        all_it_writes_is_in_the_layer(&rig);
    }
}

fn all_it_writes_is_in_the_layer(rig: &Rig) {
    (0..PAGES).step_by(3).for_each(|page| rig.set(page, 1));
    let mut draft = rig.draft(rig.tracker());
    while_it_writes(rig, 20, |round| {
        draft.copy_ahead().expect("copied");
        if round == 10 {
            draft.ahead().expect("what another process maps");
        }
    });
    assert_eq!(rig.wrong(&mut draft), [0; 0]);
    let runs = draft.runs().expect("runs");
    assert!(!draft.mapped.is_empty());
    assert_eq!(without(&draft.mapped, in_order(&runs).into_iter()), [], "it shows what is not copied any more");
}

/// What a page is of a file by the first look, and the guest's own by a later write.
#[test]
fn a_page_of_a_file_that_is_written_after_it_was_copied_is_copied_again() {
    let Some(rig) = Rig::forked() else { return };
    [200, 202].into_iter().for_each(|page| rig.set(page, 7));
    let mut draft = rig.draft(rig.tracker());
    draft.copy_ahead().expect("copied");
    assert_eq!(draft.current.len(), 3, "with what lies between, which is the file's");
    [201, 202, 850].into_iter().for_each(|page| rig.set(page, 8));
    assert_eq!(rig.wrong(&mut draft), [0; 0]);
    assert_eq!(draft.current.len(), 4);
}

/// Eight MiB of page tables where all of RAM is watched.
#[test]
fn a_guest_with_much_ram_of_which_little_is_its_own_is_watched_in_few_page_tables() {
    const ALL: u64 = 1 << 20;
    let page_tables = || {
        let status = std::fs::read_to_string("/proc/self/status").expect("this process's status");
        let line = status.lines().find_map(|line| line.strip_prefix("VmPTE:")).expect("its page tables");
        line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number")
    };
    let Some(rig) = Rig::of(ALL) else { return };
    [5, 1000].into_iter().for_each(|page| rig.set(page, 7));
    let before = page_tables();
    let mut tracker = rig.tracker();
    tracker.arm(rig.memory.as_ref()).expect("watched");
    assert!(page_tables() < before + 4096, "{before} KiB before, {} now", page_tables());
    let layout = rig.memory.layout();
    let (mut written, mut discarded) = (PageMap::empty(layout), PageMap::empty(layout));
    [1000, 2000].into_iter().for_each(|page| rig.set(page, 8));
    tracker.collect(rig.memory.as_ref(), &mut written, &mut discarded).expect("collected");
    assert_eq!(written.len(), 2, "one that was its own, and one that was not there");
}

/// Seen to fail where a page that was copied before stays as it was copied.
#[test]
fn a_page_that_is_discarded_or_becomes_zero_after_it_was_copied_reads_as_zeros() {
    let Some(rig) = Rig::new() else { return };
    [10, 11, 12, 1500].into_iter().for_each(|page| rig.set(page, 7));
    let mut draft = rig.draft(rig.tracker());
    draft.copy_ahead().expect("copied");
    rig.set(11, 0);
    rig.discard(10..11);
    assert_eq!(rig.wrong(&mut draft), [0; 0]);
    rig.set(10, 9);
    assert_eq!(rig.wrong(&mut draft), [0; 0]);
}

/// What goes to other hosts is read by the file alone, and not by what of it is mapped.
#[test]
fn a_layer_of_all_of_ram_is_whole_in_its_file_whatever_was_written_or_discarded_meanwhile() {
    let Some(rig) = Rig::new() else { return };
    (0..PAGES).step_by(3).for_each(|page| rig.set(page, 1));
    let mut draft = rig.draft(rig.tracker()).whole();
    while_it_writes(&rig, 5, |_| draft.copy_ahead().expect("copied"));
    // Pages that the file has, far from any that stays.
    rig.discard(100..900);
    assert_eq!(rig.wrong(&mut draft), [0; 0]);
    let mut file = vec![0; (PAGES * P) as usize];
    draft.file().read_exact_at(&mut file, 0).expect("the layer");
    let (file, _) = file.as_chunks::<PAGE_BYTES>();
    let wrong: Vec<u64> = (0..PAGES).filter(|page| rig.page(*page) != file[*page as usize]).collect();
    assert_eq!(wrong, [0; 0]);
}

#[test]
fn zeros_take_no_memory_in_a_layer() {
    let Some(rig) = Rig::new() else { return };
    [(5, 0), (6, 1), (7, 0), (1030, 1)].into_iter().for_each(|(page, byte)| rig.set(page, byte));
    let mut draft = rig.draft(rig.tracker());
    assert_eq!(rig.wrong(&mut draft), [0; 0]);
    assert_eq!(sterna_sys::file::allocated_bytes(&draft.file).expect("allocated"), 2 * P);
}

/// The tests above can fail: a tracker that sees nothing loses writes.
#[test]
fn writes_that_nobody_tracks_are_missing_in_the_layer() {
    struct Blind;
    impl Tracker for Blind {
        fn arm(&mut self, _: &dyn Memory) -> Result<(), MigrateError> {
            Ok(())
        }
        fn collect(&mut self, _: &dyn Memory, _: &mut PageMap, _: &mut PageMap) -> Result<(), MigrateError> {
            Ok(())
        }
        fn watch(&self) -> Option<Arc<dyn Watch>> {
            None
        }
        fn seal(&mut self) {}
        fn disarm(&mut self) {}
        fn cost(&self) -> Cost {
            Cost::default()
        }
    }
    let Some(rig) = Rig::new() else { return };
    [1, 2, 3].into_iter().for_each(|page| rig.set(page, 1));
    let mut draft = rig.draft(Box::new(Blind));
    draft.copy_ahead().expect("copied");
    rig.set(2, 2);
    assert_eq!(rig.wrong(&mut draft), [2]);
}
