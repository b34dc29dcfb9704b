//! Placement of pages in RAM: bodies are written to the RAM file, and zeros become holes.

use std::io::ErrorKind;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use sterna_protocol::frame::Digester;
use sterna_protocol::layout::{Layout, PageIndex};
use sterna_protocol::pages::PageMap;

use super::arrival::Arrival;
use crate::error::MigrateError;
use crate::host::DestinationHost;
use crate::memory::Memory;
use crate::paging::Pager;

/// Memory that is kept for the host, bytes: pages are refused before the kernel has to kill a process.
const RESERVE_BYTES: u64 = 64 << 20;
/// How many bytes are placed between two looks at the host's free memory.
const LOOK_EVERY_BYTES: u64 = 32 << 20;

/// The placer of pages, shared by all connections, each of which has its own chunks.
pub struct Placer<'a> {
    ram: &'a dyn Memory,
    host: &'a dyn DestinationHost,
    pager: Option<&'a Pager>,
    digester: Digester,
    placed_bytes: AtomicU64,
    suspects: Mutex<PageMap>,
}

/// The RAM that pages are put into.
enum Target<'a> {
    /// Into the RAM of a guest that does not run yet.
    Still(&'a dyn Memory),
    /// Into the RAM of a guest that runs, by its pager.
    Running(&'a Pager),
}

impl Target<'_> {
    fn put(&self, arrival: &Arrival) -> Result<(), MigrateError> {
        match self {
            Self::Running(pager) => pager.place(arrival),
            Self::Still(ram) => {
                let Arrival { chunk, bodies, zero, .. } = arrival;
                if !zero.is_empty() {
                    ram.discard(*chunk, zero).map_err(MigrateError::host("giving back pages of zeros"))?;
                }
                bodies.iter().try_for_each(|(pages, bodies)| {
                    ram.write(*chunk, pages, bodies).map_err(MigrateError::host("writing the guest's RAM"))
                })
            }
        }
    }
}

impl<'a> Placer<'a> {
    /// A placer into RAM that has nothing but holes. With a pager that has begun, pages are the guest's as soon as they
    /// are in their place.
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

    /// The digester of the pages.
    #[must_use]
    pub fn digester(&self) -> Digester {
        self.digester
    }

    /// The RAM that pages are put into.
    #[must_use]
    pub fn ram(&self) -> &dyn Memory {
        self.ram
    }

    /// The layout that frames are checked against.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        self.ram.layout()
    }

    /// Puts pages that fit the layout in their place. A guest that runs already sees them then.
    ///
    /// Before the guest runs, a suspect page is placed all the same, and noted: it comes again. Afterwards it is
    /// refused: the source's guest stands still, so the body was damaged on its way. The page is still missing, and
    /// comes again. The same is true of pages for which there was no room: their faults wait.
    ///
    /// # Errors
    /// [`MigrateError::OutOfMemory`], [`MigrateError::Damaged`], or what the kernel refused.
    pub fn place(&self, arrival: &Arrival) -> Result<(), MigrateError> {
        let target = self.target();
        if matches!(target, Target::Running(_)) && !arrival.suspect.is_empty() {
            return Err(MigrateError::Damaged(arrival.suspect.len()));
        }
        self.ensure_room(arrival.body_bytes())?;
        target.put(arrival).map_err(|error| self.placing(error))?;
        if matches!(target, Target::Still(_)) {
            let mut suspects = self.lock();
            let suspects = suspects.chunk_mut(arrival.chunk);
            *suspects = suspects.without(&arrival.pages()).or(&arrival.suspect);
        }
        Ok(())
    }

    /// The error of placing pages, told apart from that of a full host.
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

    /// The pages to send again, at most this many.
    #[must_use]
    pub fn suspects(&self, most: usize) -> Vec<PageIndex> {
        let suspects = self.lock();
        suspects
            .iter()
            .flat_map(|(chunk, set)| set.iter().map(move |page| PageIndex { chunk, page }))
            .take(most)
            .collect()
    }

    fn target(&self) -> Target<'_> {
        self.pager.filter(|pager| pager.begun()).map_or(Target::Still(self.ram), Target::Running)
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
