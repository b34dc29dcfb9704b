//! Mapping of pages into the guest: current pages, and no others.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use sterna_protocol::layout::{CHUNK_PAGES, ChunkIndex, PAGE_BYTES, PageIndex};
use sterna_protocol::pages::{PageMap, PageSet};

use super::Pager;
use super::shown::Shown;
use super::supplier::Supplier;
use crate::error::MigrateError;
use crate::haste::Haste;
use crate::memory::PoolRun;

/// How many pages are mapped ahead at a time.
const AHEAD: usize = 32;

impl Pager {
    /// Takes care that the guest's first access to each page of the residue faults. Pages that are mapped and current
    /// are noted as the guest sees them, where that is wanted.
    pub(super) fn hold_back(&self, residue: &PageMap) -> Result<(), MigrateError> {
        self.ram.unshare(residue).map_err(MigrateError::host("making stale pages missing"))?;
        let mappings = self.ram.mappings();
        let mut stale = residue
            .iter()
            .flat_map(|(chunk, pages)| pages.runs().map(move |(start, length)| self.addresses(chunk, start, length)));
        mappings.hold_back(self.faults.inside().as_mut(), &self.pagemap, self.userfault.spans(), &mut stale)?;
        if !mappings.maps_on_arrival() {
            return Ok(());
        }
        let mut state = self.lock();
        let Some(shown) = &mut state.shown else { return Ok(()) };
        // What was noted of them is of an earlier round, or of the hole that is there since a moment ago. The thread
        // that notes rounds goes on until the pages are known to be missing.
        residue.iter().for_each(|(chunk, pages)| shown.missing(chunk, pages));
        self.ram.layout().iter().try_for_each(|chunk| {
            let there = self.allocated_in(chunk)?;
            let noted = shown.note(self.ram.as_ref(), chunk, &there.without(residue.chunk(chunk)));
            noted.map_err(MigrateError::host("reading the guest's RAM to compare it"))
        })
    }

    /// Notes, while the guest runs at the source, what the rounds have put in place so far, where the guest sees it as
    /// soon as it runs here. So little is left to note in the pause.
    pub(super) fn note_rounds(&self) {
        let mut state = self.lock();
        while !state.begun && !self.ended.load(Ordering::Acquire) {
            let Some(due) = state.shown.as_mut().and_then(Shown::next_due) else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(state);
            let digests = match due.digest(self.ram.as_ref()) {
                Ok(digests) => digests,
                // In the pause what is due is noted, or this error comes again.
                Err(error) => return tracing::warn!(%error, "pages cannot be noted ahead"),
            };
            state = self.lock();
            if let Some(shown) = &mut state.shown {
                shown.note_due(&due, &digests);
            }
        }
    }

    /// Says that pages of a round are in their place, whatever was there before. The guest does not run here yet.
    pub(crate) fn placed(&self, chunk: ChunkIndex, pages: &PageSet) {
        let mut state = self.lock();
        state.recency.came(chunk);
        if !self.ram.mappings().maps_on_arrival() {
            return;
        }
        if let Some(shown) = &mut state.shown {
            // After they were written: whoever noted one meanwhile may have seen half of it.
            shown.forget(chunk, pages);
            self.changed.notify_all();
        }
    }

    /// Maps current pages in the background, so that the guest faults less: those first that came last. Call it once,
    /// when the guest has begun to run. It touches all that it works with then, each page once: so for as long as that
    /// takes, and no longer than a pause may, its faults are settled before others have a processor, where the host
    /// may [hurry](Haste).
    ///
    /// # Errors
    /// No thread left; the guest can do without.
    pub fn map_ahead(self: &Arc<Self>, may_haste: bool) -> Result<(), MigrateError> {
        if self.ram.mappings().maps_on_arrival() {
            return Ok(());
        }
        let haste = Haste::of(self.crew(), may_haste);
        self.spawn("map-ahead", move |pager| {
            let _haste = haste;
            if let Err(error) = pager.map_current() {
                tracing::warn!(%error, "cannot map pages ahead: each is mapped when it is touched");
            }
        })
    }

    fn map_current(&self) -> Result<(), MigrateError> {
        let order = self.lock().recency.newest_first();
        for chunk in order {
            if self.ended.load(Ordering::Acquire) {
                break;
            }
            let there = self.allocated_in(chunk)?;
            // Few at a time, so that faults do not wait for long.
            for first in (0..CHUNK_PAGES).step_by(AHEAD) {
                let mut some = PageSet::EMPTY;
                some.insert_run(first, AHEAD);
                self.give_way();
                let current = there.and(&some).without(self.lock().whereabouts.away_in(chunk));
                self.note_unseen(chunk, &current)?;
                self.show(chunk, &current)?;
            }
        }
        Ok(())
    }

    /// Notes pages that are here and that the guest has not seen, where that is wanted. They are digested without the
    /// lock: a fault on one of them does not wait, and its digest is the one that counts.
    pub(super) fn note_unseen(&self, chunk: ChunkIndex, pages: &PageSet) -> Result<(), MigrateError> {
        let Some(due) = self.lock().shown.as_ref().map(|shown| shown.unseen(chunk, pages)) else { return Ok(()) };
        let digests = due.digest(self.ram.as_ref());
        let digests = digests.map_err(MigrateError::host("reading the guest's RAM to compare it"))?;
        if let Some(shown) = &mut self.lock().shown {
            shown.note_unseen(&due, &digests);
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

    /// Notes bodies that the guest will see as soon as they are in their place, where that is wanted.
    pub(super) fn note_bodies(&self, chunk: ChunkIndex, pages: &PageSet, bodies: &[u8]) {
        // Looked at first: every arrival comes by here, and most need no lock for it.
        if !self.ram.mappings().maps_on_arrival() {
            return;
        }
        if let Some(shown) = &mut self.lock().shown {
            shown.note_bodies(chunk, pages, bodies);
        }
    }

    /// Notes bodies of a pool that the guest will see as soon as they are mapped, where that is wanted.
    pub(super) fn note_pooled(&self, chunk: ChunkIndex, runs: &[PoolRun], pool: &File) -> Result<(), MigrateError> {
        if self.lock().shown.is_none() {
            return Ok(());
        }
        runs.iter().try_for_each(|run| {
            let mut bodies = vec![0; run.pages * PAGE_BYTES];
            let read = pool.read_exact_at(&mut bodies, run.offset);
            read.map_err(MigrateError::host("reading the gang's pool to compare it"))?;
            self.note_bodies(chunk, &PoolRun::pages(&[*run]), &bodies);
            Ok(())
        })
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

    /// Maps pages of zeros that the guest is about to touch for the first time, after this one, as its supplier has it.
    /// What is a hole and not away stays so meanwhile: `settling` is held.
    pub(super) fn show_zeros_ahead(&self, supplier: &dyn Supplier, page: PageIndex) -> Result<(), MigrateError> {
        let chunk = page.chunk;
        let here = PageSet::of_chunk(self.ram.layout(), chunk).without(self.lock().whereabouts.away_in(chunk));
        let next = supplier.touched_next(page, &here);
        if next.is_empty() {
            return Ok(());
        }
        let there = self.allocated_in(chunk)?;
        let holes = next.without(&there);
        // Once they are mapped the guest writes them without a fault.
        self.note_unseen(chunk, &holes)?;
        holes.runs().try_for_each(|(start, length)| self.userfault.show_zeros(self.addresses(chunk, start, length)))
    }

    /// Lets a page in that its supplier did not admit at once. Who waits for it goes on, or faults again.
    ///
    /// # Errors
    /// No memory is left, or the VMM has ended.
    pub(crate) fn let_in(&self, page: PageIndex) -> Result<(), MigrateError> {
        let address = self.addresses(page.chunk, usize::from(page.page), 1).start;
        let _settling = self.settling.lock().unwrap_or_else(PoisonError::into_inner);
        let is_away = self.lock().whereabouts.is_away(page.chunk, page.page);
        let shown = if is_away { Ok(false) } else { self.show_zero(page) };
        match shown {
            Ok(true) => Ok(()),
            // Away or fenced in by now, or there is no memory: the next fault finds out.
            other => self.userfault.wake(address).and(other.map(drop)),
        }
    }

    /// The VMM's addresses of a run of pages.
    pub(super) fn addresses(&self, chunk: ChunkIndex, start: usize, length: usize) -> Range<u64> {
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
