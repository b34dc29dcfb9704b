//! A guest whose free memory is taken: its VMM, and what it does meanwhile.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use sterna_api::Reclaimed;
use sterna_engine::faults::GuestFaults;
use sterna_engine::monitor::Monitor;
use sterna_engine::reclaim::{Machine, ReclaimError, reclaim};
use sterna_engine::vmm::{MappedRam, Source, Stopped, VmmError};
use sterna_introspect::PageTables;
use sterna_protocol::pages::PageMap;

use crate::pair::inside::InsideSelf;
use crate::toy::{PAGES, ToyGuest};

/// What a test does when the VMM is asked for page tables, which is told how often that was before.
pub type AtQuestion = Box<dyn FnMut(u64) -> bool + Send>;

/// A VMM that answers what is asked while memory is taken, and nothing else.
pub struct Vmm {
    pub guest: Arc<ToyGuest>,
    pub questions: u64,
    /// Whether the guest was reset.
    pub at_question: AtQuestion,
    pub reset: bool,
}

impl Vmm {
    pub fn of(guest: &Arc<ToyGuest>) -> Self {
        Self { guest: Arc::clone(guest), questions: 0, at_question: Box::new(|_| false), reset: false }
    }
}

impl Source for Vmm {
    fn memory_map(&mut self) -> Result<Vec<MappedRam>, VmmError> {
        Ok(vec![MappedRam { guest_physical: 0..PAGES * 4096, block: "ram".into(), offset: 0 }])
    }

    fn page_tables(&mut self) -> Result<Vec<PageTables>, VmmError> {
        self.reset |= (self.at_question)(self.questions);
        self.questions += 1;
        Ok(self.guest.processors())
    }

    fn was_reset(&mut self) -> Result<bool, VmmError> {
        Ok(std::mem::take(&mut self.reset))
    }

    fn prepare(&mut self) -> Result<(), VmmError> {
        unreachable!()
    }

    fn running(&mut self) -> Result<bool, VmmError> {
        unreachable!()
    }

    fn processor_threads(&mut self) -> Result<Vec<u32>, VmmError> {
        unreachable!()
    }

    fn begin(&mut self) -> Result<UnixStream, VmmError> {
        unreachable!()
    }

    fn stopped(&mut self, _: Duration) -> Result<Option<Stopped>, VmmError> {
        unreachable!()
    }

    fn save_devices(&mut self) -> Result<(), VmmError> {
        unreachable!()
    }

    fn saved(&mut self, _: Duration) -> Result<(), VmmError> {
        unreachable!()
    }

    fn rollback(&mut self) -> Result<(), VmmError> {
        unreachable!()
    }

    fn ended(&mut self) -> Option<VmmError> {
        unreachable!()
    }

    fn quit(&mut self) {
        unreachable!()
    }
}

/// Takes memory beside whoever else wants to know of accesses to it.
pub fn take_beside(
    faults: &Arc<GuestFaults>,
    vmm: &mut Vmm,
    careless: bool,
    monitor: &Monitor,
) -> (Reclaimed, Result<(), ReclaimError>) {
    take_but_for(faults, vmm, None, careless, monitor)
}

/// The same of a guest some of whose pages are away.
pub fn take_but_for(
    faults: &Arc<GuestFaults>,
    vmm: &mut Vmm,
    away: Option<PageMap>,
    careless: bool,
    monitor: &Monitor,
) -> (Reclaimed, Result<(), ReclaimError>) {
    let (blocks, mut account) = ([vmm.guest.block()], Reclaimed::default());
    let faults = Arc::clone(faults);
    let machine = Machine { vmm, faults, blocks: &blocks, away, elsewhere: None, trust_first_look: careless };
    let done = reclaim(machine, monitor, &mut account);
    (account, done)
}

/// The faults of this guest's RAM, and where the agent would keep its duplicate.
pub fn faults_of(guest: &ToyGuest) -> (Arc<GuestFaults>, Arc<Mutex<Option<OwnedFd>>>) {
    let inside = InsideSelf::default();
    inside.mappings.lock().unwrap().push(Arc::clone(&guest.ram.mapping));
    let kept = Arc::clone(&inside.kept);
    (GuestFaults::of(inside), kept)
}

/// Pages of `pages` that hold anything but `byte`; reading them gives none memory.
pub fn differing(guest: &ToyGuest, pages: Range<u64>, byte: u8) -> Vec<u64> {
    let mut body = [0; 4096];
    let mut differs = |page: &u64| {
        guest.ram.file.read_exact_at(&mut body, page * 4096).expect("the guest's RAM");
        body != [byte; 4096]
    };
    pages.filter(|page| differs(page)).collect()
}

/// Pages of `pages` in which the guest itself sees anything but `byte`.
fn seen_otherwise(guest: &ToyGuest, pages: Range<u64>, byte: u8) -> u64 {
    let mut body = [0; 4096];
    let mut differs = |page: &u64| {
        guest.ram.mapping.copy_out(page * 4096..(page + 1) * 4096, &mut body);
        body != [byte; 4096]
    };
    pages.filter(|page| differs(page)).count() as u64
}

/// A guest that takes small blocks, fills them, checks them, and frees them, for ever.
pub struct Churn {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    bad: Arc<AtomicU64>,
}

/// Its blocks, of eight pages.
pub const BLOCKS: u64 = 640;

impl Churn {
    pub fn start(guest: &Arc<ToyGuest>) -> Self {
        let mut used: Vec<Option<u8>> = (0..BLOCKS).map(|block| (block % 2 == 0).then_some(7)).collect();
        guest
            .change(|toy| (0..BLOCKS).filter(|block| block % 2 == 1).for_each(|block| toy.free(0x2000 + block * 8, 3)));
        let (stop, bad) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stopped, found, guest) = (Arc::clone(&stop), Arc::clone(&bad), Arc::clone(guest));
        let thread = std::thread::spawn(move || {
            let (mut random, mut content) = (0x9e37_79b9_7f4a_7c15_u64, 0_u8);
            while !stopped.load(Ordering::Acquire) {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let block = (random >> 33) % BLOCKS;
                let frames = 0x2000 + block * 8..0x2008 + block * 8;
                let owner = &mut used[block as usize];
                *owner = match *owner {
                    Some(byte) => {
                        found.fetch_add(seen_otherwise(&guest, frames.clone(), byte), Ordering::Relaxed);
                        guest.change(|toy| toy.free(frames.start, 3));
                        None
                    }
                    None => {
                        guest.change(|toy| toy.allocate(frames.start, 3));
                        content = content.wrapping_add(1).max(1);
                        guest.fill(frames, content);
                        Some(content)
                    }
                };
            }
            for (block, byte) in (0..).zip(used) {
                let frames = 0x2000 + block * 8..0x2008 + block * 8;
                let lost = byte.map_or(0, |byte| seen_otherwise(&guest, frames, byte));
                found.fetch_add(lost, Ordering::Relaxed);
            }
        });
        Self { stop, thread: Some(thread), bad }
    }

    /// Pages that did not hold what was written to them.
    pub fn end(mut self) -> u64 {
        self.join();
        self.bad.load(Ordering::Relaxed)
    }

    fn join(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            assert!(thread.join().is_ok() || std::thread::panicking(), "the guest panicked");
        }
    }
}

impl Drop for Churn {
    fn drop(&mut self) {
        self.join();
    }
}
