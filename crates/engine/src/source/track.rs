//! Tracking: which pages the guest writes.

use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_protocol::layout::{ChunkIndex, Layout, PAGE_BYTES};
use sterna_protocol::pages::{PageMap, PageSet};
use sterna_protocol::spec::BlockSpec;
use sterna_sys::pagemap::{Pagemap, Region};

use crate::agent::{Discards, UnderWay};
use crate::error::MigrateError;
use crate::faults::seal::Seal;
use crate::faults::{GuestFaults, User, Userfault};
use crate::inside::Inside;
use crate::memory::{Memory, add_run, huge};

/// How long a read may take until it is noted.
const BEING_NOTED: Duration = Duration::from_millis(20);

/// What tracking has cost so far.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Cost {
    /// The number of looks at the page tables.
    pub scans: u64,
    /// The time they took.
    pub scan_time: Duration,
    /// The writes that were seen: the guest took a fault for each.
    pub write_faults: u64,
    /// The pages that the guest discarded.
    pub discarded_pages: u64,
    /// What was mapped by huge pages when watching began, bytes.
    pub huge_bytes: u64,
    /// The time it took to map that page by page.
    pub map_small_time: Duration,
}

/// The tracker of a machine's writes. Another implementation may read KVM's own dirty log.
pub trait Tracker: Send {
    /// Begins to watch: every write from now on is seen.
    ///
    /// # Errors
    /// The kernel or the VMM refuses; then nothing is watched.
    fn arm(&mut self, ram: &dyn Memory) -> Result<(), MigrateError>;

    /// Adds the pages written and those discarded since the last call (or since `arm`), and watches them again.
    ///
    /// A page is watched again before the caller reads it, so that a write after the reading is seen by the next call.
    ///
    /// # Errors
    /// The kernel or the VMM fails. Writes may have been lost, so the migration must end.
    fn collect(&mut self, ram: &dyn Memory, written: &mut PageMap, discarded: &mut PageMap)
    -> Result<(), MigrateError>;

    /// Adds the pages that something was being read into past the page tables when they were last watched anew, by
    /// [`arm`](Self::arm) or [`collect`](Self::collect): such a read holds its pages, and what lands in them later is
    /// in no map. One that begins later is a write that is seen. To be called after each of these; `false` where not
    /// all of them are told of, since tracking began.
    ///
    /// # Errors
    /// The VMM does not answer.
    fn reads(&mut self, _ram: &dyn Memory, _into: &mut PageMap) -> Result<bool, MigrateError> {
        Ok(false)
    }

    /// A way to look at what is written, for as long as this tracker watches; `None` where it does not watch or offers
    /// no look.
    fn watch(&self) -> Option<Arc<dyn Watch>>;

    /// Ends what this process takes of the guest's memory, and lets nothing more be taken until this tracker is
    /// dropped: what is taken after the last call of [`collect`](Self::collect) would be in no map.
    fn seal(&mut self);

    /// Ends watching; the guest pays nothing more. May be called whenever, and more than once.
    fn disarm(&mut self);

    /// The cost so far.
    fn cost(&self) -> Cost;
}

/// A way to look at what is written now. A look changes nothing, and [`Tracker::collect`] yields the same pages again.
pub trait Watch: Send + Sync + Debug {
    /// The pages of a chunk that were written since they were last collected.
    ///
    /// # Errors
    /// For example, the VMM's process has ended.
    fn written_in(&self, ram: &Layout, chunk: ChunkIndex) -> Result<PageSet, MigrateError>;

    /// Adds the pages of all RAM that were written since they were last collected to `written`.
    ///
    /// # Errors
    /// As [`Self::written_in`].
    fn written(&self, ram: &Layout, written: &mut PageMap) -> Result<(), MigrateError>;
}

/// The tracker that write-protects pages asynchronously (userfaultfd's `WP_ASYNC`) and reads the page tables of the
/// VMM's process (`PAGEMAP_SCAN`): see the kernel's `Documentation/admin-guide/mm/{userfaultfd,pagemap}.rst`.
///
/// What this does not see: writes through other mappings of the RAM (the daemon refuses such guests), writes into pages
/// that were pinned before they were armed (the agent tells which reads do that; otherwise
/// [`changed_untracked`](super::select::changed_untracked)), and discarded pages, which keep their mark: the agent logs
/// those.
pub struct WriteProtect {
    faults: Arc<GuestFaults>,
    pagemap: Arc<Pagemap>,
    /// Of private memory, only pages of the process's own are watched.
    own_pages: bool,
    armed: Option<Armed>,
    seal: Option<Seal>,
    regions: Vec<Region>,
    cost: Cost,
}

struct Armed {
    userfault: Arc<Userfault>,
    spans: Vec<Range<u64>>,
    /// Device and inode of each block's file.
    files: Vec<(u64, u64)>,
}

impl WriteProtect {
    /// The tracker of the VMM's process, which `inside` acts for.
    ///
    /// # Errors
    /// The process's page tables cannot be opened.
    pub fn new(pid: u32, inside: impl Inside + 'static) -> Result<Self, MigrateError> {
        Self::of(pid, GuestFaults::of(inside))
    }

    /// The tracker of the VMM's process, beside other users of the guest's userfaultfd.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn of(pid: u32, faults: Arc<GuestFaults>) -> Result<Self, MigrateError> {
        let pagemap = Pagemap::open(pid).map_err(MigrateError::vmm_process("opening QEMU's page tables"))?;
        let (pagemap, own_pages) = (Arc::new(pagemap), false);
        Ok(Self { faults, pagemap, own_pages, armed: None, seal: None, regions: Vec::new(), cost: Cost::default() })
    }

    /// The same, of private memory of which only pages of the process's own matter: what is a file's changes by no
    /// write, because the first write to a page makes one of the process's own of it, and that is seen. So nothing else
    /// is watched, and beginning takes as long as there are such pages, however much RAM there is. There is no look at
    /// what is written now.
    #[must_use]
    pub fn for_own_pages(mut self) -> Self {
        self.own_pages = true;
        self
    }
}

impl WriteProtect {
    /// Has RAM mapped page by page that may be mapped by huge pages; where that is.
    fn map_small(&mut self, ram: &dyn Memory) -> Result<Vec<Range<u64>>, MigrateError> {
        if !ram.mappings().may_be_huge() {
            return Ok(Vec::new());
        }
        let small_pages = |(_, block): &(_, &BlockSpec)| block.page_bytes == PAGE_BYTES as u64;
        let spans: Vec<_> = ram.spans().into_iter().zip(ram.layout().blocks()).filter(small_pages).collect();
        let spans: Vec<_> = spans.into_iter().map(|(span, _)| span).collect();
        let began = Instant::now();
        self.cost.huge_bytes = huge::map_small(&self.faults, &self.pagemap, &spans)?;
        self.cost.map_small_time = began.elapsed();
        tracing::debug!(bytes = self.cost.huge_bytes, time = ?self.cost.map_small_time, "huge pages are mapped small");
        Ok(spans)
    }
}

impl Tracker for WriteProtect {
    fn arm(&mut self, ram: &dyn Memory) -> Result<(), MigrateError> {
        self.disarm();
        let files = ram.files().map_err(MigrateError::host("looking at the guest's RAM files"))?;
        let spans = ram.spans();
        let small = self.map_small(ram)?;
        let userfault = self.faults.begin(User::Tracking, spans.clone(), ram.mappings())?;
        self.armed = Some(Armed { userfault, spans, files });
        // Only now: before the userfaultfd was open the VMM's process could still have made areas smaller. Since then
        // it leaves them as they are, so that what is seen here stays true until tracking ends.
        ram.look_at_areas().map_err(MigrateError::host("looking at what the guest's RAM has in common with others"))?;
        // The first scan arms every page, holes included, or every page of the process's own. Its result is not used:
        // the caller sends all allocated pages, or looks for those.
        let (mut all, mut given_back) = (PageMap::empty(ram.layout()), PageMap::empty(ram.layout()));
        self.collect(ram, &mut all, &mut given_back)?;
        self.cost.write_faults = 0;
        // Nothing has been sent yet, so that a write between the scan and this protection is lost to nobody.
        let armed = self.armed.as_ref().map(|armed| Arc::clone(&armed.userfault));
        if let Some(userfault) = armed {
            huge::left_huge(&self.pagemap, &small)?.into_iter().try_for_each(|range| userfault.protect(range))?;
        }
        Ok(())
    }

    fn collect(
        &mut self,
        ram: &dyn Memory,
        written: &mut PageMap,
        discarded: &mut PageMap,
    ) -> Result<(), MigrateError> {
        let Some(armed) = &self.armed else { return Ok(()) };
        let began = Instant::now();
        for (block, span) in armed.spans.iter().enumerate() {
            self.regions.clear();
            let scanned = match self.own_pages {
                true => self.pagemap.own_written_and_arm(span.clone(), &mut self.regions),
                false => self.pagemap.written_and_arm(span.clone(), &mut self.regions),
            };
            scanned.map_err(MigrateError::vmm_process("reading which pages the guest wrote"))?;
            for region in &self.regions {
                self.cost.write_faults += region.pages();
                add_run(written, ram.layout(), block, region.start - span.start..region.end - span.start);
            }
        }
        self.cost.scans += 1;
        self.cost.scan_time += began.elapsed();
        // The discards are read after the scan: a page written and then discarded is in both, and the look for a hole
        // decides.
        let before = discarded.len();
        let (logged, holes) = armed.userfault.given_back(User::Tracking, self.faults.inside().as_mut());
        match logged {
            Discards::Ranges(ranges) => {
                for range in ranges {
                    if let Some(block) = armed.files.iter().position(|file| *file == (range.device, range.inode)) {
                        add_run(
                            discarded,
                            ram.layout(),
                            block,
                            range.offset..range.offset.saturating_add(range.length),
                        );
                    }
                }
            }
            // The log overflowed: any page may have been discarded.
            Discards::Everything => {
                for (block, span) in armed.spans.iter().enumerate() {
                    add_run(discarded, ram.layout(), block, 0..span.end - span.start);
                }
            }
        }
        // What this daemon took: it is in no log.
        for (block, hole) in holes {
            add_run(discarded, ram.layout(), block, hole);
        }
        self.cost.discarded_pages += discarded.len() - before;
        written.add(discarded);
        Ok(())
    }

    fn reads(&mut self, ram: &dyn Memory, into: &mut PageMap) -> Result<bool, MigrateError> {
        let Some(armed) = &self.armed else { return Ok(false) };
        let until = Instant::now() + BEING_NOTED;
        loop {
            let under_way = self.faults.inside().under_way()?;
            match under_way {
                UnderWay::Ranges(ranges) => {
                    for read in ranges {
                        for (block, span) in armed.spans.iter().enumerate() {
                            let (start, end) = (read.start.max(span.start), read.end.min(span.end));
                            if start < end {
                                add_run(into, ram.layout(), block, start - span.start..end - span.start);
                            }
                        }
                    }
                    return Ok(true);
                }
                // One is being noted at this moment, which takes its thread as long as it waits for a processor.
                UnderWay::Anything if Instant::now() < until => std::thread::yield_now(),
                UnderWay::Anything | UnderWay::Lost | UnderWay::Untold => return Ok(false),
            }
        }
    }

    fn watch(&self) -> Option<Arc<dyn Watch>> {
        let spans = self.armed.as_ref().filter(|_| !self.own_pages)?.spans.clone();
        Some(Arc::new(WrittenPages { pagemap: Arc::clone(&self.pagemap), spans }))
    }

    fn seal(&mut self) {
        self.seal.get_or_insert_with(|| self.faults.seal());
    }

    fn disarm(&mut self) {
        if self.armed.take().is_some() {
            // Ending clears every mark.
            self.faults.end(User::Tracking);
        }
    }

    fn cost(&self) -> Cost {
        self.cost
    }
}

/// A look into the same page tables that arms nothing. Once watching has ended, every page counts as written.
#[derive(Debug)]
struct WrittenPages {
    pagemap: Arc<Pagemap>,
    spans: Vec<Range<u64>>,
}

impl WrittenPages {
    fn look(&self, range: Range<u64>) -> Result<Vec<Region>, MigrateError> {
        let mut regions = Vec::new();
        let looked = self.pagemap.written(range, &mut regions);
        looked.map_err(MigrateError::vmm_process("looking at which pages the guest wrote"))?;
        Ok(regions)
    }
}

impl Watch for WrittenPages {
    fn written_in(&self, ram: &Layout, chunk: ChunkIndex) -> Result<PageSet, MigrateError> {
        let mut set = PageSet::EMPTY;
        let Some((place, span)) = ram.place(chunk).and_then(|place| Some((place, self.spans.get(place.block)?))) else {
            return Ok(set);
        };
        let start = span.start + place.offset;
        for region in self.look(start..start + (place.pages * PAGE_BYTES) as u64)? {
            // A huge page reaches beyond its chunk.
            let first = region.start.saturating_sub(start) as usize / PAGE_BYTES;
            let end = (region.end - start) as usize / PAGE_BYTES;
            set.insert_run(first, end - first);
        }
        Ok(set)
    }

    fn written(&self, ram: &Layout, written: &mut PageMap) -> Result<(), MigrateError> {
        for (block, span) in self.spans.iter().enumerate() {
            for region in self.look(span.clone())? {
                add_run(written, ram, block, region.start - span.start..region.end - span.start);
            }
        }
        Ok(())
    }
}

impl Drop for WriteProtect {
    fn drop(&mut self) {
        self.disarm();
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::vmm::VmmError;

    #[test]
    fn a_process_that_has_ended_is_said_to_have_ended_and_not_the_kernel_to_have_failed() {
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        // Its parent may go on before the child has left the parent's memory (`vfork`): a page map opened then is that
        // of this process, which has not ended. So QEMU's is opened only when it has answered.
        let program = || std::fs::read_link(format!("/proc/{}/exe", child.id())).ok();
        while program() == std::env::current_exe().ok() {
            std::thread::yield_now();
        }
        let watch = WrittenPages { pagemap: Arc::new(Pagemap::open(child.id()).unwrap()), spans: Vec::new() };
        child.kill().unwrap();
        child.wait().unwrap();
        let error = watch.look(0x10000..0x20000).unwrap_err();
        assert!(matches!(error, MigrateError::Vmm(VmmError::Gone { guest_off: false })), "{error:?}");
    }
}
