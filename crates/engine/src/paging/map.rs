//! Mapping of pages into the guest: current pages, and no others.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use sterna_protocol::layout::{ChunkIndex, PAGE_BYTES, PageIndex};
use sterna_protocol::pages::PageSet;
use sterna_sys::pagemap::{Categories, Scan};

use super::Pager;
use crate::error::MigrateError;

impl Pager {
    /// Takes out all pages that the VMM has mapped before its devices are loaded (for example where its memory is
    /// preallocated): a stale page among them would raise no fault.
    pub(super) fn unmap_early(&self) -> Result<(), MigrateError> {
        let mut regions = Vec::new();
        let mut mapped = false;
        for span in self.userfault.spans() {
            let scanned = self.pagemap.scan(span.clone(), Scan::of(Categories::PRESENT), &mut regions);
            scanned.map_err(MigrateError::vmm_process("looking at what QEMU has mapped"))?;
            mapped |= !regions.is_empty();
        }
        if mapped {
            let spans = self.userfault.spans();
            self.ram.mappings().drop_mappings(self.faults.inside().as_mut(), spans)?;
        }
        Ok(())
    }

    /// Maps current pages in the background, so that the guest faults less. Call it once, when the guest has begun to
    /// run.
    ///
    /// # Errors
    /// No thread left; the guest can do without.
    pub fn map_ahead(self: &Arc<Self>) -> Result<(), MigrateError> {
        self.spawn("map-ahead", |pager| {
            if let Err(error) = pager.map_current() {
                tracing::warn!(%error, "cannot map pages ahead: each is mapped when it is touched");
            }
        })
    }

    fn map_current(&self) -> Result<(), MigrateError> {
        for chunk in self.ram.layout().iter() {
            if self.ended.load(Ordering::Acquire) {
                break;
            }
            let there =
                self.ram.allocated_in(chunk).map_err(MigrateError::host("looking for holes in the guest's RAM"))?;
            let current = there.without(self.lock().whereabouts.away_in(chunk));
            self.show(chunk, &current)?;
        }
        Ok(())
    }

    /// Maps pages of a chunk that are current, and wakes the threads that wait for them. Holes among them stay: an
    /// access finds zeros. Returns whether none was fenced in.
    pub(super) fn show(&self, chunk: ChunkIndex, pages: &PageSet) -> Result<bool, MigrateError> {
        let mut state = self.lock();
        if let Some(shown) = &mut state.shown {
            // The lock is held until the page is mapped: afterwards the guest may write it, and the digest must be of
            // what the guest first saw.
            shown
                .note(self.ram.as_ref(), chunk, pages)
                .map_err(MigrateError::host("reading the guest's RAM to compare it"))?;
            return self.map(chunk, pages);
        }
        drop(state);
        self.map(chunk, pages)
    }

    fn map(&self, chunk: ChunkIndex, pages: &PageSet) -> Result<bool, MigrateError> {
        let mut runs = pages.runs();
        runs.try_fold(true, |all, (start, length)| Ok(all & self.userfault.show(self.addresses(chunk, start, length))?))
    }

    /// Maps a page of zeros where the file has a hole, and wakes the threads that wait for it. Returns whether it was
    /// not fenced in.
    pub(super) fn show_zero(&self, page: PageIndex) -> Result<bool, MigrateError> {
        let mut only = PageSet::EMPTY;
        only.insert(page.page);
        let mut state = self.lock();
        if let Some(shown) = &mut state.shown {
            shown
                .note(self.ram.as_ref(), page.chunk, &only)
                .map_err(MigrateError::host("reading the guest's RAM to compare it"))?;
        } else {
            drop(state);
        }
        self.userfault.show_zero(self.addresses(page.chunk, usize::from(page.page), 1).start)
    }

    /// The VMM's addresses of a run of pages.
    fn addresses(&self, chunk: ChunkIndex, start: usize, length: usize) -> Range<u64> {
        let place = self.ram.layout().place(chunk).expect("a chunk of this layout");
        let first = self.userfault.spans()[place.block].start + place.offset + (start * PAGE_BYTES) as u64;
        first..first + (length * PAGE_BYTES) as u64
    }

    /// The page at one of the VMM's addresses; `None` outside the guest's RAM.
    pub(super) fn page_at(&self, address: u64) -> Option<PageIndex> {
        let spans = self.userfault.spans();
        let block = spans.iter().position(|span| span.contains(&address))?;
        self.ram.layout().page_at(block, address - spans[block].start)
    }
}
