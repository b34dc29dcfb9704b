//! Pages into RAM: bodies by writing the RAM file, zeros by giving memory back.

use std::io::ErrorKind;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use sterna_protocol::frame::packed::PackedFrame;
use sterna_protocol::frame::{ChunkFrame, Digester};
use sterna_protocol::layout::{ChunkIndex, Layout, PAGE_BYTES, PageIndex};
use sterna_protocol::pages::{PageMap, PageSet};

use crate::error::MigrateError;
use crate::host::DestinationHost;
use crate::memory::Memory;
use crate::paging::Pager;

/// Memory kept for the host: what is less is refused before the kernel has to kill somebody.
const RESERVE_BYTES: u64 = 64 << 20;
/// How often the host's room is looked at: every so many bytes placed.
const LOOK_EVERY_BYTES: u64 = 32 << 20;

/// Puts pages in their place; shared by all connections, which have chunks of their own.
pub struct Placer<'a> {
    ram: &'a dyn Memory,
    host: &'a dyn DestinationHost,
    pager: Option<&'a Pager>,
    digester: Digester,
    placed_bytes: AtomicU64,
    suspects: Mutex<PageMap>,
}

impl<'a> Placer<'a> {
    /// Into RAM that is holes all over. With a pager that has begun, pages are the guest's as soon as they are in their place.
    #[must_use]
    pub fn new(
        ram: &'a dyn Memory,
        host: &'a dyn DestinationHost,
        pager: Option<&'a Pager>,
        digester: Digester,
    ) -> Self {
        let (placed_bytes, suspects) = (AtomicU64::new(0), Mutex::new(PageMap::empty(ram.layout())));
        Self { ram, host, pager, digester, placed_bytes, suspects }
    }

    /// How the pages are digested.
    #[must_use]
    pub fn digester(&self) -> Digester {
        self.digester
    }

    /// The RAM that pages are put into.
    #[must_use]
    pub fn ram(&self) -> &dyn Memory {
        self.ram
    }

    /// The layout frames are checked against.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        self.ram.layout()
    }

    /// Puts a frame's bodies into RAM, and makes its zero pages holes. The frame fits the layout, and there are as many bodies and digests
    /// as it has full pages. A body that is not what was digested is placed all the same, and noted: the page comes again.
    ///
    /// # Errors
    /// [`MigrateError::OutOfMemory`], or what the kernel refused.
    pub fn place(&self, frame: &ChunkFrame, digests: &[u64], bodies: &[u8]) -> Result<(), MigrateError> {
        let wrong: PageSet = frame
            .full
            .iter()
            .zip(bodies.chunks_exact(PAGE_BYTES).zip(digests))
            .filter(|(_, (body, digest))| self.digester.page(body) != **digest)
            .map(|(page, _)| page)
            .collect();
        if let Some(pager) = self.begun_pager() {
            // The source's guest stands still: what is not what was digested was damaged on its way. It is missing still, and comes again.
            if !wrong.is_empty() {
                return Err(MigrateError::Damaged(wrong.len()));
            }
            let pages = [(&frame.full, bodies), (&PageSet::EMPTY, &[][..])];
            return self.page_in(pager, frame.chunk, pages, &frame.zero);
        }
        self.put(frame.chunk, &frame.zero, [(&frame.full, bodies)], &wrong)
    }

    /// Puts the bodies of a packed frame into RAM, those of its full pages and then those of its differences, which are checked already; and
    /// makes its zero pages holes. The frame fits the layout.
    ///
    /// # Errors
    /// As [`Placer::place`].
    pub fn place_packed(&self, frame: &PackedFrame, bodies: &[u8]) -> Result<(), MigrateError> {
        let (full, delta) = bodies.split_at(frame.full.len() * PAGE_BYTES);
        if let Some(pager) = self.begun_pager() {
            return self.page_in(pager, frame.chunk, [(&frame.full, full), (&frame.delta, delta)], &frame.zero);
        }
        self.put(frame.chunk, &frame.zero, [(&frame.full, full), (&frame.delta, delta)], &PageSet::EMPTY)
    }

    /// Gives pages to a guest that runs here. Where there is no room they are missing still, and their faults wait: the source comes again.
    fn page_in(
        &self,
        pager: &Pager,
        chunk: ChunkIndex,
        pages: [(&PageSet, &[u8]); 2],
        zero: &PageSet,
    ) -> Result<(), MigrateError> {
        self.ensure_room(pages.iter().map(|(_, bodies)| bodies.len() as u64).sum())?;
        pager.place(chunk, pages, zero).map_err(|error| self.placing(error))
    }

    /// What an error of placing pages is: one of many, or a host that is full.
    fn placing(&self, error: MigrateError) -> MigrateError {
        match error {
            MigrateError::Host { source, .. }
                if matches!(source.kind(), ErrorKind::StorageFull | ErrorKind::OutOfMemory) =>
            {
                MigrateError::OutOfMemory { room_bytes: self.host.room_bytes() }
            }
            error => error,
        }
    }

    /// Puts pages and their bodies, and zeros, into a chunk; notes which of them are not what they should be.
    fn put<const N: usize>(
        &self,
        chunk: ChunkIndex,
        zero: &PageSet,
        pages: [(&PageSet, &[u8]); N],
        wrong: &PageSet,
    ) -> Result<(), MigrateError> {
        self.ensure_room(pages.iter().map(|(_, bodies)| bodies.len() as u64).sum())?;
        if !zero.is_empty() {
            self.ram.discard(chunk, zero).map_err(MigrateError::host("giving back pages of zeros"))?;
        }
        let mut placed = *zero;
        for (set, bodies) in pages {
            let written = self.ram.write(chunk, set, bodies).map_err(MigrateError::host("writing the guest's RAM"));
            written.map_err(|error| self.placing(error))?;
            placed = placed.or(set);
        }
        let mut suspects = self.lock();
        let suspects = suspects.chunk_mut(chunk);
        *suspects = suspects.without(&placed).or(wrong);
        Ok(())
    }

    /// Pages to send again, at most so many.
    #[must_use]
    pub fn suspects(&self, most: usize) -> Vec<PageIndex> {
        let suspects = self.lock();
        suspects
            .iter()
            .flat_map(|(chunk, set)| set.iter().map(move |page| PageIndex { chunk, page }))
            .take(most)
            .collect()
    }

    fn begun_pager(&self) -> Option<&Pager> {
        self.pager.filter(|pager| pager.begun())
    }

    fn ensure_room(&self, bytes: u64) -> Result<(), MigrateError> {
        let before = self.placed_bytes.fetch_add(bytes, Ordering::Relaxed);
        if before == 0 || before / LOOK_EVERY_BYTES != (before + bytes) / LOOK_EVERY_BYTES {
            let room_bytes = self.host.room_bytes();
            if room_bytes < RESERVE_BYTES {
                return Err(MigrateError::OutOfMemory { room_bytes });
            }
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, PageMap> {
        self.suspects.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
