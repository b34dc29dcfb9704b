//! Pages that the guest holds free: they need not travel. Introspection of the guest's kernel finds them
//! (`docs/design/introspection.md`).
//!
//! # Why no page is lost
//!
//! The order is the whole reason. **Tracking is armed (or pages are collected, which arms them again), and the look
//! comes only then.** A page that a look names was free at an instant after the look began. So it has one of two fates:
//!
//! - Nobody writes it after that instant. Then nobody relies on its content: before the guest's kernel gives a page to
//!   somebody, it clears the page, which is a write, or the new owner writes before he reads. So it does not matter
//!   what the destination has there. (A kernel with `init_on_free` expects zeros; the destination has zeros. The
//!   clearing was the write that made the page outstanding.)
//! - Somebody writes it after that instant. The page was armed before, so the next collection yields it. Then it does
//!   not count as free any more, and goes like any other.
//!
//! Every collection therefore takes its pages out of the set of free pages
//! ([`LeftOut::collected`](crate::source::left_out::LeftOut::collected)) before anything else is done with them.
//!
//! For each race, why no page is lost:
//!
//! * **written between the collection and the look**: it was armed: the next collection yields it
//! * **free at the look, written before its turn in the round**: left out of the round, and yielded by the next
//!   collection
//! * **free in the last look while the guest runs, written until it stops**: yielded by the collection at the stop
//! * **sent before, freed, and free in the look**: the destination holds the old content: the page is sent as zeros, a
//!   bit
//! * **a look is misled by a page that changed under it ([`sterna_introspect`] says how)**: with the guest stopped, all
//!   pages that are left out are looked at once more, and those that are not free then are sent
//! * **direct I/O writes it past the page tables**: the page belongs to somebody from before the I/O until after it, so
//!   it is not free in between; pinning it is a write fault, which is seen
//! * **the guest starts another kernel**: pages that were free in the earlier one matter to the later one only after it
//!   has written them
//!
//! The map from the guest's addresses to blocks is asked for once. RAM that is plugged or unplugged moves no other RAM.
//! A machine whose RAM has changed since the beginning does not fit its destination, and the migration fails with the
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

/// The least share of the outstanding pages that a look must find free, or there are no more looks.
const LEAST_SHARE: f64 = 0.01;
/// With the guest stopped, pages are looked at only where sending them would take at least this many times as long.
const CLEARLY: u32 = 2;

/// The looks for free pages of one migration. Where looks fail, or fail later, no page is skipped and the account says
/// why.
pub struct FreePages {
    asked: Option<Asked>,
    eye: Option<Eye>,
    account: report::Introspection,
    /// The time that the last look at all RAM took.
    whole: Duration,
    /// The share of the outstanding pages that the last look found free; `None` before the first.
    share: Option<f64>,
    /// The longest time for the look with the guest stopped, and the expected one.
    stop_limit: Duration,
    stop_time: Duration,
    trusts_first_look: bool,
}

/// The VMM's answers about a guest whose kernel is not found yet.
struct Asked {
    memory: GuestPhysical,
    processors: Vec<PageTables>,
}

/// A kernel that was found, and the RAM it is read from.
struct Eye {
    memory: GuestPhysical,
    kernel: Introspection,
}

/// The result of a look.
#[derive(Debug)]
pub enum Looked {
    /// No look: it would not pay, or the guest was too busy. What was known is still true.
    LeftOut,
    /// The kernel is not there any more, or is unreadable: what was known cannot be checked again.
    Lost,
    /// These pages were free at an instant after it began.
    Found(PageMap),
}

impl FreePages {
    /// The looks that the options ask for. `stop_limit` is the most that the last look may take of the pause. The
    /// kernel is not found yet.
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

    /// Finds the kernel. That may take a while, so it goes on while the destination prepares. Each look checks whether
    /// that kernel still runs.
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
        tracing::info!(%error, "the guest's free pages are unknown");
        self.account.reason = Some(reason(error));
    }

    /// Sets [`Outgoing::trust_first_look`](super::Outgoing).
    pub(super) fn trust_first_look(&mut self) {
        self.trusts_first_look = true;
    }

    /// Whether pages that were free once are left out for ever.
    pub(super) fn trusts_first_look(&self) -> bool {
        self.trusts_first_look
    }

    /// Looks at a guest that runs, after all pages were armed or collected. `outstanding` are the pages that it could
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
                // A guest that is too busy for its counters to agree may be less busy next time.
                if matches!(error.downcast_ref(), Some(Unfit::CountersDisagree { .. })) {
                    return Looked::LeftOut;
                }
                self.eye = None;
                Looked::Lost
            }
        }
    }

    /// The page tables that the guest's processors use, for [`look_stopped`](Self::look_stopped); none where no look
    /// will follow, or the VMM does not tell.
    pub fn processors(&self, vmm: &mut dyn vmm::Source) -> Vec<PageTables> {
        if self.eye.is_none() || self.share.is_none() {
            return Vec::new();
        }
        vmm.page_tables().unwrap_or_default()
    }

    /// Looks at a guest that is stopped, after the last collection. Returns which of the pages that are left out are
    /// free, and where it pays, which of the others; `None` where the look fails.
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
        // The kernel does not run any more. Pages that were free in it before need not travel; pages that seem free in
        // it now may belong to another kernel.
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

    /// The account of the looks.
    #[must_use]
    pub fn account(&self) -> &report::Introspection {
        &self.account
    }

    /// Whether a look pays: sending the pages that it would save must take longer than this many looks.
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
        // This comes after the arming: a processor's page tables tell which kernel runs now.
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

    /// Estimates the time to look at these pages again. A chunk that is free as a whole costs next to nothing: its
    /// blocks are big. Where the others are too many for the pause, they do not count as free.
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

/// The pages that a guest holds free now, by one look. Only for callers that move nothing, to whom an error does no
/// harm.
///
/// # Errors
/// The reason why the look fails.
pub fn free_now(vmm: &mut dyn vmm::Source, ram: &Arc<dyn Memory>) -> Result<PageMap, Box<dyn Error>> {
    let Asked { memory, processors } = Asked::ask(vmm, ram)?;
    let look = Introspection::find(&memory, &processors)?.look(&memory, &processors)?;
    Ok(memory.pages(ram.layout(), &look.free))
}

/// The clean pages of a guest's page cache, by one look: its kernel could read them again. Experimental; they travel
/// all the same.
///
/// # Errors
/// The reason why the look fails.
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
        // Free are one whole chunk, the short one at the end, and a page of a third: one of three costs something.
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
