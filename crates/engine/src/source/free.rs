//! Pages that the guest holds free: they need not travel. Found by looking into the guest's kernel from outside
//! (`docs/design/introspection.md`).
//!
//! # Why no page is lost
//!
//! The order is all of it. **Tracking is armed (or pages are collected, which arms them again), and only then is
//! looked.** What a look names was free at an instant after it began. So each page of it has one of two fates:
//!
//! - Nobody writes it after that instant. Then nobody relies on what it holds: what the guest's kernel gives to
//!   somebody it has cleared first, which is a write, or it is for somebody who writes before he reads. It does not
//!   matter what the destination has there. (A kernel with `init_on_free` expects zeros; zeros are what the destination
//!   has. To clear the page was the write that made it outstanding.)
//! - It is written after that instant. The page was armed before, so the next collection yields it, it is taken for
//!   free no more, and it goes like any other.
//!
//! Every collection therefore takes what it yields out of the set of free pages
//! ([`LeftOut::collected`](crate::source::left_out::LeftOut::collected)), before anything else is done with it.
//!
//! For each race, why no page is lost:
//!
//! * **written between the collection and the look**: it was armed: the next collection yields it
//! * **free at the look, written before its turn in the round**: left out of the round, and yielded by the next
//!   collection
//! * **free in the last look while the guest runs, written until it stops**: yielded by the collection at the stop
//! * **sent before, freed, and free in the look**: the destination holds what it was: it is told zeros, a bit
//! * **a look is misled by a page that changed under it ([`sterna_introspect`] says how)**: all that is left out is
//!   looked at once more with the guest stopped, and what is not free then is sent
//! * **direct I/O writes it past the page tables**: the page is somebody's from before the I/O until after it, so it is
//!   not free in between; to pin it is a write fault, which is seen
//! * **the guest starts another kernel**: pages that were free in the earlier one matter to the later one once it has
//!   written them
//!
//! The map from the guest's addresses to blocks is asked for once. RAM that is plugged in or out moves no other RAM; a
//! machine that has other RAM than at the beginning does not fit its destination, and the migration fails with the
//! guest here.

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_api::options::SkipFree;
use sterna_api::units::milliseconds as ms;
use sterna_api::{Blame, Code, Problem, report};
use sterna_introspect::{Introspection, PAGE_BYTES, PageTables, Unfit};
use sterna_protocol::layout::Layout;
use sterna_protocol::pages::{PageMap, PageSet};
use sterna_protocol::throughput::Speed;

use crate::memory::physical::GuestPhysical;
use crate::memory::{Memory, add_run};
use crate::vmm;

/// Looks stop where the last one found a smaller share of what was outstanding.
const LEAST_SHARE: f64 = 0.01;
/// With the guest stopped, pages are looked at whose sending would take so many times as long.
const CLEARLY: u32 = 2;

/// Looks for free pages over one migration. Where it cannot, or not any more, nothing is skipped and the account says
/// why.
pub struct FreePages {
    asked: Option<Asked>,
    eye: Option<Eye>,
    account: report::Introspection,
    /// What a look at all RAM took last.
    whole: Duration,
    /// The share of the outstanding pages that the last look found free; `None` before the first.
    share: Option<f64>,
    /// What the look with the guest stopped may take at most, and what it is expected to.
    stop_limit: Duration,
    stop_time: Duration,
    trusts_first_look: bool,
}

/// What the VMM says of a guest whose kernel is still to be found.
struct Asked {
    memory: GuestPhysical,
    processors: Vec<PageTables>,
}

/// A kernel that was found.
struct Eye {
    memory: GuestPhysical,
    kernel: Introspection,
}

/// What a look did.
#[derive(Debug)]
pub enum Looked {
    /// Nothing: it would not pay, or the guest was too busy. What was known holds.
    LeftOut,
    /// The kernel is not there any more, or cannot be read: what was known cannot be looked at again.
    Lost,
    /// These pages were free at an instant after it began.
    Found(PageMap),
}

impl FreePages {
    /// As it was asked for. `stop_limit`: how much of the pause the last look may take at most. The kernel is not found
    /// yet.
    pub fn new(skip_free: SkipFree, vmm: &mut dyn vmm::Source, ram: &Arc<dyn Memory>, stop_limit: Duration) -> Self {
        let mut free = Self {
            asked: None,
            eye: None,
            account: report::Introspection::default(),
            whole: Duration::ZERO,
            share: None,
            stop_limit,
            stop_time: Duration::ZERO,
            trusts_first_look: false,
        };
        if skip_free == SkipFree::Vmi {
            match Asked::ask(vmm, ram) {
                Ok(asked) => free.asked = Some(asked),
                Err(error) => free.account.reason = Some(reason(&*error)),
            }
        }
        free
    }

    /// Finds the kernel, which may take a while, and so goes on while the destination prepares. Each look asks whether
    /// it is still the one that runs.
    pub fn find(&mut self) {
        let Some(Asked { memory, processors }) = self.asked.take() else { return };
        let began = Instant::now();
        let found = Introspection::find(&memory, &processors);
        self.account.find_ms = ms(began.elapsed());
        match found {
            Ok(kernel) => {
                self.account.kernel = Some(kernel.release().to_owned());
                self.eye = Some(Eye { memory, kernel });
            }
            Err(error) => self.cannot(&error),
        }
    }

    fn cannot(&mut self, error: &(dyn Error + 'static)) {
        tracing::info!(%error, "the guest's free pages cannot be told");
        self.account.reason = Some(reason(error));
    }

    /// As [`Outgoing::trust_first_look`](super::Outgoing) has it.
    pub(super) fn trust_first_look(&mut self) {
        self.trusts_first_look = true;
    }

    /// Whether what was free once is left out for ever.
    pub(super) fn trusts_first_look(&self) -> bool {
        self.trusts_first_look
    }

    /// Looks at a guest that runs, after all pages were armed or collected. `outstanding`: how many pages it could
    /// save.
    pub fn look(&mut self, vmm: &mut dyn vmm::Source, layout: &Layout, outstanding: &PageMap, speed: &Speed) -> Looked {
        let pages = outstanding.len();
        let again = self.trusts_first_look && self.share.is_some();
        if self.eye.is_none() || pages == 0 || again || !self.pays(pages, speed, 1) {
            return Looked::LeftOut;
        }
        match self.try_look(vmm, layout, pages) {
            Ok(None) => Looked::LeftOut,
            Ok(Some(mut found)) => {
                (self.account.used, self.account.reason) = (true, None);
                let mut saved = found.clone();
                saved.keep(outstanding);
                self.share = Some(saved.len() as f64 / pages as f64);
                self.expect_stop(layout, &mut found);
                Looked::Found(found)
            }
            Err(error) => {
                self.cannot(&*error);
                // A guest that is too busy to be counted may be less so next time.
                if matches!(error.downcast_ref(), Some(Unfit::CountersDisagree { .. })) {
                    return Looked::LeftOut;
                }
                self.eye = None;
                Looked::Lost
            }
        }
    }

    /// The page tables that the guest's processors use, for [`look_stopped`](Self::look_stopped); none where nothing
    /// will be looked at, or the VMM does not tell.
    pub fn processors(&self, vmm: &mut dyn vmm::Source) -> Vec<PageTables> {
        if self.eye.is_none() || self.share.is_none() {
            return Vec::new();
        }
        vmm.page_tables().unwrap_or_default()
    }

    /// Looks at a guest that is stopped, after the last collection: which of the pages that are left out are free, and
    /// where it pays, which of the others. `None` where that cannot be told.
    pub fn look_stopped(
        &mut self,
        processors: &[PageTables],
        layout: &Layout,
        left_out: &PageMap,
        outstanding: &PageMap,
        speed: &Speed,
    ) -> Option<PageMap> {
        if self.trusts_first_look {
            return Some(left_out.clone());
        }
        let pays = self.pays(outstanding.len(), speed, CLEARLY);
        let Eye { memory, kernel } = self.eye.as_ref()?;
        let mut wanted = left_out.clone();
        if pays {
            wanted.add(outstanding);
        }
        if wanted.is_empty() {
            return Some(wanted);
        }
        let began = Instant::now();
        let found = kernel.look_around(memory, &memory.frames(layout, &wanted));
        let runs = kernel.still_runs(memory, processors).is_ok();
        let mut found = match found {
            Ok(runs) => Some(memory.pages(layout, &runs)),
            Err(error) => {
                self.account.reason = Some(reason(&error));
                None
            }
        };
        // What was free before in a kernel that runs no more need not travel; what seems free in it now may be
        // another's.
        if let Some(found) = found.as_mut().filter(|_| !runs) {
            found.keep(left_out);
        }
        let took = began.elapsed();
        self.account.looks += 1;
        self.account.look_ms += ms(took);
        self.account.stop_look_ms += ms(took);
        found
    }

    /// How long the look with the guest stopped is expected to take.
    #[must_use]
    pub fn stop_time(&self) -> Duration {
        self.stop_time
    }

    /// What was done.
    #[must_use]
    pub fn account(&self) -> &report::Introspection {
        &self.account
    }

    /// Whether to look: not where sending what it would save takes less than so many looks.
    fn pays(&self, outstanding: u64, speed: &Speed, times: u32) -> bool {
        let Some(share) = self.share else { return true };
        let saved = outstanding as f64 * share / speed.bodies_per_s.max(1.0);
        share >= LEAST_SHARE && saved > (self.whole * times).as_secs_f64()
    }

    /// `None` where the guest counts so few free pages that looking does not pay.
    fn try_look(
        &mut self,
        vmm: &mut dyn vmm::Source,
        layout: &Layout,
        outstanding: u64,
    ) -> Result<Option<PageMap>, Box<dyn Error>> {
        let Some(Eye { memory, kernel }) = &self.eye else { return Ok(None) };
        // After the arming: a processor's page tables tell which kernel runs now.
        let processors = vmm.page_tables()?;
        let counted = kernel.counted_pages(memory, &processors)?;
        if (counted as f64) < outstanding as f64 * LEAST_SHARE {
            self.share = Some(0.0);
            return Ok(None);
        }
        let began = Instant::now();
        let look = kernel.look(memory, &processors);
        self.whole = began.elapsed();
        self.account.looks += 1;
        self.account.look_ms += ms(self.whole);
        let look = look?;
        self.account.free_pages = look.free_pages;
        Ok(Some(memory.pages(layout, &look.free)))
    }

    /// Estimates what it takes to look at these pages again. A chunk that is free as a whole costs next to nothing: its
    /// blocks are big. Where the others are too many for the pause, they are not taken for free.
    fn expect_stop(&mut self, layout: &Layout, found: &mut PageMap) {
        let is_whole = |found: &PageMap, chunk| {
            let pages = layout.place(chunk).map_or(0, |place| place.pages);
            *found.chunk(chunk) == PageSet::first(pages)
        };
        let parts = layout.iter().filter(|&chunk| !found.chunk(chunk).is_empty() && !is_whole(found, chunk)).count();
        let costly = layout.iter().filter(|&chunk| !is_whole(found, chunk)).count();
        self.stop_time = self.whole.mul_f64(parts as f64 / costly.max(1) as f64);
        if self.stop_time > self.stop_limit {
            self.stop_time = Duration::ZERO;
            for chunk in layout.iter() {
                if !is_whole(found, chunk) {
                    *found.chunk_mut(chunk) = PageSet::EMPTY;
                }
            }
        }
    }
}

/// What a guest holds free now, by one look, for whoever moves nothing and loses nothing where it is wrong.
///
/// # Errors
/// Why that cannot be told.
pub fn free_now(vmm: &mut dyn vmm::Source, ram: &Arc<dyn Memory>) -> Result<PageMap, Box<dyn Error>> {
    let Asked { memory, processors } = Asked::ask(vmm, ram)?;
    let look = Introspection::find(&memory, &processors)?.look(&memory, &processors)?;
    Ok(memory.pages(ram.layout(), &look.free))
}

/// Clean pages of a guest's page cache, in the same way: its kernel could read them again. Experimental; they travel
/// all the same.
///
/// # Errors
/// Why that cannot be told.
pub fn page_cache_now(vmm: &mut dyn vmm::Source, ram: &Arc<dyn Memory>) -> Result<PageMap, Box<dyn Error>> {
    let Asked { memory, processors } = Asked::ask(vmm, ram)?;
    let cache = Introspection::find(&memory, &processors)?.page_cache(&memory, &processors)?;
    Ok(memory.pages(ram.layout(), &cache.clean))
}

impl Asked {
    fn ask(vmm: &mut dyn vmm::Source, ram: &Arc<dyn Memory>) -> Result<Self, Box<dyn Error>> {
        let memory = GuestPhysical::new(&vmm.memory_map()?, Arc::clone(ram))?;
        Ok(Self { memory, processors: vmm.page_tables()? })
    }
}

impl GuestPhysical {
    /// Page frames as pages of the machine.
    fn pages(&self, layout: &Layout, frames: &[std::ops::Range<u64>]) -> PageMap {
        let mut map = PageMap::empty(layout);
        for run in frames {
            for (block, bytes) in self.locate(run.start * PAGE_BYTES..run.end * PAGE_BYTES) {
                add_run(&mut map, layout, block, bytes);
            }
        }
        map
    }

    /// The page frames of the chunks that have pages in the map.
    fn frames(&self, layout: &Layout, map: &PageMap) -> Vec<std::ops::Range<u64>> {
        let mut frames = Vec::new();
        for (chunk, _) in map.iter() {
            let Some(place) = layout.place(chunk) else { continue };
            let bytes = place.offset..place.offset + place.pages as u64 * PAGE_BYTES;
            let addresses = self.addresses(place.block, bytes);
            frames.extend(addresses.map(|run| run.start / PAGE_BYTES..run.end.div_ceil(PAGE_BYTES)));
        }
        frames
    }
}

/// An error with what caused it.
fn reason(error: &dyn Error) -> String {
    Problem::from_error(Code::GuestUnfit, Blame::Guest, error).with_causes()
}

#[cfg(test)]
mod tests {
    use sterna_protocol::layout::{ChunkIndex, PageIndex};
    use sterna_protocol::spec::BlockSpec;

    use super::*;

    fn looked(share: f64, whole_ms: u64, limit_ms: u64) -> FreePages {
        let ms = Duration::from_millis;
        FreePages {
            asked: None,
            eye: None,
            account: report::Introspection::default(),
            whole: ms(whole_ms),
            share: Some(share),
            stop_limit: ms(limit_ms),
            stop_time: Duration::ZERO,
            trusts_first_look: false,
        }
    }

    #[test]
    fn a_look_pays_where_sending_what_it_would_save_takes_longer() {
        let speed = Speed { bodies_per_s: 10_000.0, light_per_s: 1e6, body_share: 1.0 };
        // 1,000 of 10,000 pages: 100 ms.
        assert!(looked(0.1, 40, 0).pays(10_000, &speed, 1) && looked(0.1, 40, 0).pays(10_000, &speed, 2));
        assert!(looked(0.1, 60, 0).pays(10_000, &speed, 1) && !looked(0.1, 60, 0).pays(10_000, &speed, 2));
        assert!(!looked(0.1, 110, 0).pays(10_000, &speed, 1));
        assert!(!looked(0.009, 0, 0).pays(1 << 30, &speed, 1), "too small a share");
        assert!(FreePages { share: None, ..looked(0.0, 9, 0) }.pays(1, &speed, 1), "the first always does");
    }

    #[test]
    fn what_cannot_be_looked_at_again_in_the_pause_is_not_taken_for_free() {
        let block = BlockSpec { id: "ram".into(), bytes: (4 << 20) + 8192, page_bytes: 4096, path: String::new() };
        let layout = Layout::new(&[block]).unwrap();
        let mut found = PageMap::empty(&layout);
        // One chunk as a whole, the short one at the end too, a page of a third: one of three that cost something.
        *found.chunk_mut(ChunkIndex(1)) = PageSet::first(256);
        *found.chunk_mut(ChunkIndex(4)) = PageSet::first(2);
        found.insert(PageIndex { chunk: ChunkIndex(2), page: 9 });
        let (mut quick, mut slow) = (looked(0.1, 30, 10), looked(0.1, 33, 10));
        let mut kept = found.clone();
        quick.expect_stop(&layout, &mut kept);
        assert_eq!((&kept, quick.stop_time()), (&found, Duration::from_millis(10)));
        slow.expect_stop(&layout, &mut kept);
        assert_eq!((kept.len(), slow.stop_time()), (258, Duration::ZERO));
        assert!(kept.chunk(ChunkIndex(2)).is_empty());
    }
}
