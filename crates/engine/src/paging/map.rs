//! Pages as they are mapped into the guest: what is current, and nothing else.

use std::io::ErrorKind;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use sterna_protocol::layout::{ChunkIndex, PAGE_BYTES, PageIndex};
use sterna_protocol::pages::PageSet;
use sterna_sys::pagemap::{Categories, Scan};
use sterna_sys::userfaultfd::Stopped;

use super::Pager;
use crate::error::MigrateError;
use crate::vmm::VmmError;

/// How long the VMM may be about to change its mappings: it takes moments, but for one in its guest's hands.
const CHANGING: Duration = Duration::from_secs(5);

impl Pager {
    /// Takes out what the VMM has mapped before its devices are loaded (where its memory is preallocated, for one): a stale page among it
    /// would raise no fault.
    pub(super) fn unmap_early(&self) -> Result<(), MigrateError> {
        let mut regions = Vec::new();
        let mut mapped = false;
        for span in &self.spans {
            let scanned = self.pagemap.scan(span.clone(), Scan::of(Categories::PRESENT), &mut regions);
            scanned.map_err(MigrateError::vmm_process("looking at what QEMU has mapped"))?;
            mapped |= !regions.is_empty();
        }
        if mapped {
            let mut inside = self.inside.lock().unwrap_or_else(PoisonError::into_inner);
            self.ram.drop_mappings(inside.as_mut(), &self.spans)?;
        }
        Ok(())
    }

    /// Maps what is current in the background, so that the guest faults less. Once, when it has begun to run.
    ///
    /// # Errors
    /// No thread left; it is not needed.
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
            let current = there.without(self.lock().missing.chunk(chunk));
            self.show(chunk, &current)?;
        }
        Ok(())
    }

    /// Maps pages of a chunk that are current, and wakes who waits for them. Holes among them stay: an access finds zeros.
    pub(super) fn show(&self, chunk: ChunkIndex, pages: &PageSet) -> Result<(), MigrateError> {
        let mut state = self.lock();
        if let Some(shown) = &mut state.shown {
            // Under the lock until it is mapped: afterwards the guest may write it, and nobody may take that for what it first saw.
            shown
                .note(self.ram.as_ref(), chunk, pages)
                .map_err(MigrateError::host("reading the guest's RAM to compare it"))?;
            return self.map(chunk, pages);
        }
        drop(state);
        self.map(chunk, pages)
    }

    pub(super) fn map(&self, chunk: ChunkIndex, pages: &PageSet) -> Result<(), MigrateError> {
        pages.runs().try_for_each(|(start, length)| self.map_run(self.addresses(chunk, start, length)))
    }

    pub(super) fn map_run(&self, mut range: Range<u64>) -> Result<(), MigrateError> {
        let failed = || MigrateError::vmm_process("mapping pages that have arrived");
        // One page at a time once the kernel has found a hole: it does not say where.
        let mut step = range.end - range.start;
        let mut changing = None;
        while range.start < range.end {
            let next = range.start..(range.start + step).min(range.end);
            match self.ram.map_written(&self.userfaultfd, next.clone()) {
                Ok(filled) => {
                    range.start += filled.bytes;
                    match filled.stopped {
                        None => {}
                        Some(Stopped::AlreadyThere) => {
                            self.wake(range.start)?;
                            range.start += PAGE_BYTES as u64;
                        }
                        Some(Stopped::MappingsChange) => self.wait_for_mappings(&mut changing)?,
                    }
                }
                Err(error) if error.errno() == Some(libc::EFAULT) => {
                    if next.end - next.start > PAGE_BYTES as u64 {
                        step = PAGE_BYTES as u64;
                    } else {
                        // A hole: zeros, or the guest gave the page back. Whoever waits finds that out by another fault.
                        self.wake(range.start)?;
                        range.start += PAGE_BYTES as u64;
                    }
                }
                Err(error) => return Err(failed()(error)),
            }
        }
        Ok(())
    }

    /// Maps a page of zeros where the file has a hole, and wakes who waits for it.
    pub(super) fn show_zero(&self, page: PageIndex) -> Result<(), MigrateError> {
        let mut only = PageSet::EMPTY;
        only.insert(page.page);
        let range = self.addresses(page.chunk, usize::from(page.page), 1);
        let mut state = self.lock();
        if let Some(shown) = &mut state.shown {
            shown
                .note(self.ram.as_ref(), page.chunk, &only)
                .map_err(MigrateError::host("reading the guest's RAM to compare it"))?;
        } else {
            drop(state);
        }
        let mut changing = None;
        loop {
            let filled = self.ram.map_zeros(&self.userfaultfd, range.clone());
            let filled = filled.map_err(MigrateError::vmm_process("giving the guest a page of zeros"))?;
            match filled.stopped {
                None => return Ok(()),
                // The file has it by now: the next fault says so.
                Some(Stopped::AlreadyThere) => return self.wake(range.start),
                Some(Stopped::MappingsChange) => self.wait_for_mappings(&mut changing)?,
            }
        }
    }

    /// The VMM is changing its mappings. `since` when, it says for whoever asks again and again.
    fn wait_for_mappings(&self, since: &mut Option<Instant>) -> Result<(), MigrateError> {
        if self.ended.load(Ordering::Acquire) || since.get_or_insert_with(Instant::now).elapsed() > CHANGING {
            return Err(VmmError::Mappings {
                doing: "mapping pages that have arrived",
                source: ErrorKind::TimedOut.into(),
            }
            .into());
        }
        std::thread::yield_now();
        Ok(())
    }

    pub(super) fn wake(&self, address: u64) -> Result<(), MigrateError> {
        let woken = self.userfaultfd.wake(address..address + PAGE_BYTES as u64);
        woken.map_err(MigrateError::vmm_process("waking a thread of the guest"))
    }

    /// The VMM's addresses of a run of pages.
    pub(super) fn addresses(&self, chunk: ChunkIndex, start: usize, length: usize) -> Range<u64> {
        let place = self.ram.layout().place(chunk).expect("a chunk of this layout");
        let first = self.spans[place.block].start + place.offset + (start * PAGE_BYTES) as u64;
        first..first + (length * PAGE_BYTES) as u64
    }

    /// The page at one of the VMM's addresses; `None` outside the guest's RAM.
    pub(super) fn page_at(&self, address: u64) -> Option<PageIndex> {
        let block = self.spans.iter().position(|span| span.contains(&address))?;
        self.ram.layout().page_at(block, address - self.spans[block].start)
    }
}
