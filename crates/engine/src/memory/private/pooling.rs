//! Pages of private memory that lie in a gang's pool: areas whose file is the pool's.
//!
//! Only a destination makes them, and only before the guest runs or for pages that the guest waits for.
//!
//! # How pages come into the pool's areas and out of them
//! * **mapped**: whatever was there is gone, and so is the registration for faults. Nobody needs it: the pool has a
//!   body for every page that is mapped from it, so such a page is never missing
//! * **a newer body comes**: it is written as the guest would write it, which makes a copy of the VMM's own
//! * **it is missing again** (stale when the guest starts): anonymous memory takes its place, and is registered again
//!   where faults are waited for. To drop the page would show the pool's body
//!
//! # A VMM that does not answer
//! A request to map that got no answer may still be carried out, at any time. If its page had come in another way by
//! then, or as it is now in the place of what it was, that would be lost. So nothing is put there, nor taken away,
//! until the kernel lists the mapping: the page is *unsure*, and whoever brings it fails and comes again. Whether a
//! daemon that was started again has such a request of its predecessor before it cannot be told, and need not be: the
//! agent serves one request of each connection in turn, and by the second answer to the new daemon it has carried out
//! the one that the old daemon left.
//!
//! A process may have a bounded number of mappings (`vm.max_map_count`), of which every run takes up to two. What does
//! not fit any more is copied. Where more runs are to leave areas than may be mappings of their own, those with the
//! least between them leave together with what lies there, which is copied.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::{MutexGuard, PoisonError};

use sterna_protocol::layout::{ChunkIndex, PAGE_BYTES};
use sterna_protocol::pages::{PageMap, PageSet};
use sterna_sys::pagemap::Entry;

use super::{PrivateMappings, PrivateMemory, gone};
use crate::agent::{AddressRange, AgentError, MapRun};
use crate::error::MigrateError;
use crate::memory::areas::Area;
use crate::memory::runs::runs;
use crate::memory::{Mappings, Memory, PoolRun, pages_of};

impl PrivateMemory {
    /// As [`Memory::shared_in`]: pages that another page table has as well, and pages
    /// of a file that stands behind them, whether they are mapped now or not.
    pub(super) fn shared_pages(&self, chunk: ChunkIndex) -> io::Result<PageSet> {
        let mut shared = PageSet::EMPTY;
        let Some(place) = self.layout.place(chunk) else { return Ok(shared) };
        let start = self.blocks[place.block].address + place.offset;
        let addresses = start..start + (place.pages * PAGE_BYTES) as u64;
        let of_area = self.in_areas(chunk, &PageSet::first(place.pages))?;
        let mut entries = Vec::with_capacity(place.pages);
        self.pagemap.entries(addresses, &mut entries).map_err(gone)?;
        let untouched = |entry: Entry| !entry.present() && (!entry.swapped() || entry.marker());
        for (page, entry) in (0..=u8::MAX).zip(entries) {
            let of_file = entry.present() && entry.file() || untouched(entry) && of_area.contains(page);
            if of_file || entry.present() && !entry.exclusive() {
                shared.insert(page);
            }
        }
        Ok(shared)
    }

    /// As [`Memory::share`].
    pub(super) fn map_from_pool(&self, chunk: ChunkIndex, from: &[PoolRun], pool: &File) -> io::Result<()> {
        self.be_sure(chunk, &PoolRun::pages(from))?;
        if self.try_map(chunk, from, pool)? {
            return Ok(());
        }
        PoolRun::each_body(from, pool, |pages, bodies| self.put(chunk, pages, bodies))
    }

    /// As [`Memory::install_shared`].
    pub(super) fn install_from_pool(&self, chunk: ChunkIndex, from: &[PoolRun], pool: &File) -> io::Result<()> {
        // A page of an area has come: whoever brought it failed afterwards. The guest may have written it.
        let pages = PoolRun::pages(from);
        let missing = pages.without(&self.pages_of_areas(chunk, &pages)?);
        let from: Vec<_> = from.iter().flat_map(|run| run.within(&missing)).collect();
        if self.try_map(chunk, &from, pool)? {
            return Ok(());
        }
        PoolRun::each_body(&from, pool, |pages, bodies| self.install(chunk, pages, bodies))
    }

    /// Those of these pages that lie in areas.
    ///
    /// # Errors
    /// It is not known of all of them.
    pub(super) fn pages_of_areas(&self, chunk: ChunkIndex, pages: &PageSet) -> io::Result<PageSet> {
        self.be_sure(chunk, pages)?;
        self.in_areas(chunk, pages)
    }

    /// Looks whether the VMM has mapped those of these pages that it was asked to map and has not answered for.
    ///
    /// # Errors
    /// It has not, and still may.
    pub(super) fn be_sure(&self, chunk: ChunkIndex, pages: &PageSet) -> io::Result<()> {
        let mut unsure = self.unsure();
        if unsure.chunk(chunk).and(pages).is_empty() {
            return Ok(());
        }
        self.look_at_areas()?;
        let of_chunk = unsure.chunk_mut(chunk);
        *of_chunk = of_chunk.without(&self.in_areas(chunk, of_chunk)?);
        if of_chunk.and(pages).is_empty() {
            return Ok(());
        }
        Err(io::Error::other("QEMU has not said whether it has mapped shared pages"))
    }

    fn in_areas(&self, chunk: ChunkIndex, pages: &PageSet) -> io::Result<PageSet> {
        let areas = self.areas();
        if areas.is_empty() {
            return Ok(PageSet::EMPTY);
        }
        let place = self.layout.place(chunk).ok_or(io::ErrorKind::InvalidInput)?;
        let start = self.blocks[place.block].address + place.offset;
        let mut set = PageSet::EMPTY;
        for part in areas.within(start..start + (place.pages * PAGE_BYTES) as u64) {
            let first = (part.start - start) as usize / PAGE_BYTES;
            set.insert_run(first, (part.end - part.start) as usize / PAGE_BYTES);
        }
        Ok(set.and(pages))
    }

    /// As [`Memory::may_map_later`].
    pub(super) fn is_unsure(&self) -> bool {
        !self.unsure().is_empty()
    }

    fn unsure(&self) -> MutexGuard<'_, PageMap> {
        self.unsure.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Maps pages; `false` where they must be copied. Some may be mapped then.
    fn try_map(&self, chunk: ChunkIndex, from: &[PoolRun], pool: &File) -> io::Result<bool> {
        if from.is_empty() {
            return Ok(true);
        }
        let Some(_taken) = self.room.take(self.holder.pid, 2 * from.len() as u64)? else { return Ok(false) };
        match self.map(chunk, from, pool) {
            Ok(()) => Ok(true),
            Err(error) if was_refused(&error) => {
                tracing::warn!(%error, "shared pages cannot be mapped: they are copied");
                self.look_at_areas().map(|()| false)
            }
            Err(error) => {
                self.unsure().insert_all(chunk, &PoolRun::pages(from));
                Err(io::Error::other(error))
            }
        }
    }

    fn map(&self, chunk: ChunkIndex, from: &[PoolRun], pool: &File) -> Result<(), MigrateError> {
        let failed = MigrateError::host("looking at the gang's pool");
        let file = sterna_sys::file::id(pool).map_err(|error| failed(error.into()))?;
        let areas = from.iter().flat_map(|run| {
            let pages = PoolRun::pages(&[*run]);
            let addresses: Vec<_> = runs(&self.layout, chunk, &pages).map(|run| self.addresses(&run)).collect();
            addresses.into_iter().map(|addresses| Area { addresses, file, offset: run.offset })
        });
        let areas: Vec<_> = areas.collect();
        let mapped: Vec<_> = areas.iter().map(|area| MapRun { at: at(&area.addresses), offset: area.offset }).collect();
        self.holder.inside.lock().unwrap_or_else(PoisonError::into_inner).map(pool.as_fd(), &mapped)?;
        let mut known = self.areas.write().unwrap_or_else(PoisonError::into_inner);
        areas.into_iter().for_each(|area| known.put(area));
        Ok(())
    }

    /// As [`Memory::unshare`].
    ///
    /// Pages between those that leave may have to leave, too, and are put in place again. Nobody sees them meanwhile:
    /// the guest does not run, no device was loaded, and no round puts pages there any more. Where this fails half way,
    /// they are lost here, and the guest goes on at the source.
    pub(super) fn leave_areas(&self, pages: &PageMap) -> io::Result<()> {
        pages.iter().try_for_each(|(chunk, pages)| self.be_sure(chunk, pages))?;
        if self.areas().is_empty() {
            return Ok(());
        }
        let mut parts = Vec::new();
        for (chunk, pages) in pages.iter() {
            let areas = self.areas();
            parts.extend(self.addresses_of(chunk, pages)?.into_iter().flat_map(|run| areas.within(run)));
        }
        if parts.is_empty() {
            return Ok(());
        }
        let room = self.room.take_at_most(self.holder.pid, 2 * parts.len() as u64)?;
        let (alone, together) = as_few(&parts, room.mappings() as usize / 2, &self.spans());
        self.make_missing(&alone)?;
        if !together.is_empty() {
            tracing::warn!(
                runs = parts.len(),
                mappings = alone.len() + together.len(),
                "stale pages lie in more runs than QEMU may have mappings for: what is between them is copied"
            );
        }
        together.into_iter().try_for_each(|part| self.leave_together(part, pages))
    }

    /// Makes those of these `pages` missing that are among these addresses, of which all leave their areas.
    fn leave_together(&self, addresses: Range<u64>, pages: &PageMap) -> io::Result<()> {
        let spans = self.spans();
        let block = spans.iter().position(|span| span.contains(&addresses.start)).ok_or(io::ErrorKind::InvalidInput)?;
        let offsets = addresses.start - spans[block].start..addresses.end - spans[block].start;
        for (chunk, all) in pages_of(&self.layout, block, offsets) {
            self.be_sure(chunk, &all)?;
            let kept = all.without(pages.chunk(chunk)).and(&self.allocated_in(chunk)?);
            let mut bodies = vec![0; kept.len() * PAGE_BYTES];
            self.load(chunk, &kept, &mut bodies)?;
            self.make_missing(&self.addresses_of(chunk, &all)?)?;
            self.put(chunk, &kept, &bodies)?;
        }
        Ok(())
    }

    /// Makes missing pages of all that is at these addresses.
    fn make_missing(&self, parts: &[Range<u64>]) -> io::Result<()> {
        if parts.is_empty() {
            return Ok(());
        }
        let mut inside = self.holder.inside.lock().unwrap_or_else(PoisonError::into_inner);
        inside.map_missing(parts).map_err(io::Error::other)?;
        drop(inside);
        if let Some(faults) = self.faults.get() {
            for part in parts {
                faults.register(part.clone(), PrivateMappings.modes())?;
            }
        }
        let mut known = self.areas.write().unwrap_or_else(PoisonError::into_inner);
        parts.iter().for_each(|part| known.take_out(part));
        Ok(())
    }

    fn addresses_of(&self, chunk: ChunkIndex, pages: &PageSet) -> io::Result<Vec<Range<u64>>> {
        let place = self.layout.place(chunk).ok_or(io::ErrorKind::InvalidInput)?;
        if !pages.without(&PageSet::first(place.pages)).is_empty() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(runs(&self.layout, chunk, pages).map(|run| self.addresses(&run)).collect())
    }
}

/// These parts, in order, as `most` ranges where they are more: those with the least between them become one. But there
/// is one range for each of these spans that has parts. Returns the parts that stay alone, and what others became.
fn as_few(parts: &[Range<u64>], most: usize, spans: &[Range<u64>]) -> (Vec<Range<u64>>, Vec<Range<u64>>) {
    let of_one_span = |pair: &[Range<u64>]| spans.iter().any(|span| pair.iter().all(|part| span.contains(&part.start)));
    let between = parts.windows(2).enumerate().filter(|(_, pair)| of_one_span(pair));
    let mut between: Vec<_> = between.map(|(before, pair)| (pair[1].start - pair[0].end, before + 1)).collect();
    between.sort_unstable();
    let mut joins = vec![false; parts.len()];
    let too_many = parts.len().saturating_sub(most);
    between.iter().take(too_many).for_each(|(_, part)| joins[*part] = true);
    let mut few: Vec<(Range<u64>, bool)> = Vec::new();
    for (part, joins) in parts.iter().zip(joins) {
        match few.last_mut() {
            Some((last, several)) if joins => (last.end, *several) = (part.end, true),
            _ => few.push((part.clone(), false)),
        }
    }
    let (together, alone): (Vec<_>, Vec<_>) = few.into_iter().partition(|(_, several)| *several);
    let ranges = |few: Vec<(Range<u64>, bool)>| few.into_iter().map(|(range, _)| range).collect();
    (ranges(alone), ranges(together))
}

/// Whether the VMM's process has said no: then what it was asked for is not going to happen later.
fn was_refused(error: &MigrateError) -> bool {
    let MigrateError::Agent { source, .. } = error else { return false };
    matches!(source.downcast_ref::<AgentError>(), Some(AgentError::Refused { .. }))
}

fn at(addresses: &Range<u64>) -> AddressRange {
    AddressRange { address: addresses.start, length: addresses.end - addresses.start }
}

#[cfg(test)]
#[path = "pooling_tests.rs"]
mod tests;
