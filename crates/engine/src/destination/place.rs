//! Placement of pages in RAM: bodies are written to the RAM file, and zeros become holes.

use std::io::ErrorKind;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use sterna_protocol::frame::Digester;
use sterna_protocol::frame::shared::References;
use sterna_protocol::layout::{ChunkIndex, Layout, PAGE_BYTES, PageIndex};
use sterna_protocol::pages::{PageMap, PageSet};

use super::arrival::{Arrival, Pooled};
use super::awaited::Membership;
use super::pool::{Found, PoolError};
use super::target::Target;
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
    membership: Option<Membership>,
    placed_bytes: AtomicU64,
    suspects: Mutex<PageMap>,
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
        membership: Option<Membership>,
    ) -> Self {
        let (placed_bytes, suspects) = (AtomicU64::new(0), Mutex::new(PageMap::empty(ram.layout())));
        Self { ram, host, pager, digester, membership, placed_bytes, suspects }
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
        if arrival.body_bytes() > 0 {
            let taken = self.ram.make_room(arrival.chunk, &arrival.pages());
            self.ensure_room(taken.saturating_sub(arrival.body_bytes()))?;
        }
        self.put(&target, arrival)
    }

    /// Puts pages in their place of which some bodies are shared: those get into the gang's pool first, and from there
    /// into this machine and all that wait for them.
    ///
    /// # Errors
    /// As [`place`](Self::place); the machine is no member of a gang, or the peer contradicts itself. Nothing damaged
    /// gets into the pool.
    pub fn place_shared(&self, arrival: &Arrival, shared: &PageSet) -> Result<(), MigrateError> {
        let Membership { pool, member, .. } = self.membership()?;
        let all: PageSet = arrival.bodies.iter().fold(PageSet::EMPTY, |all, (pages, _)| all.or(pages));
        if !shared.without(&all).is_empty() {
            return Err(MigrateError::Request("shared pages without their bodies"));
        }
        if !arrival.suspect.is_empty() {
            return Err(MigrateError::Damaged(arrival.suspect.len()));
        }
        self.ensure_room(arrival.body_bytes())?;
        let bodies: Vec<_> = arrival.bodies_of(*shared).map(|(_, body)| body).collect();
        let runs = pool.put(*member, arrival.chunk, shared, &bodies).map_err(|error| self.pooling(error))?;
        let rest: Vec<_> = arrival.bodies_of(all.without(shared)).collect();
        let rest: Vec<_> = rest.iter().map(|(page, body)| ([*page].into_iter().collect(), *body)).collect();
        let pooled = Some(Pooled { runs: &runs, pool: pool.reader() });
        self.put(&self.target(), &Arrival { bodies: &rest, pooled, ..*arrival })
    }

    /// Puts pages in their place that refer to shared bodies. Those whose body is still to come get it when it comes.
    ///
    /// # Errors
    /// As [`place_shared`](Self::place_shared).
    pub fn refer(&self, chunk: ChunkIndex, references: &[References]) -> Result<(), MigrateError> {
        let membership = self.membership()?;
        // Memory that cannot map them copies them.
        self.ensure_room(References::pages(references).len() as u64 * PAGE_BYTES as u64)?;
        let found = membership.find(chunk, references).map_err(|error| self.pooling(error))?;
        let target = self.target();
        for Found { pool, runs } in &found {
            self.put(&target, &Arrival::pooled(chunk, Pooled { runs, pool }))?;
        }
        if let Target::Running(pager) = target {
            // A thread that waits for a page does not wait for its body as well.
            pager.ask_once_more(chunk, &References::pages(references));
        }
        Ok(())
    }

    /// Waits for the bodies that pages refer to. Those that nobody brings are asked for: as suspect pages, or where the
    /// guest runs already, as those that it waits for.
    pub fn settle(&self) {
        let Some(membership) = &self.membership else { return };
        let left = membership.settle();
        match self.target() {
            Target::Still(..) => self.lock().add(&left),
            Target::Running(pager) => pager.fetch(&left),
        }
    }

    fn membership(&self) -> Result<&Membership, MigrateError> {
        self.membership.as_ref().ok_or(MigrateError::Request("shared pages of a machine that has joined no gang"))
    }

    fn put(&self, target: &Target, arrival: &Arrival) -> Result<(), MigrateError> {
        target.put(arrival).map_err(|error| self.placing(error))?;
        if matches!(target, Target::Still(..)) {
            let mut suspects = self.lock();
            let suspects = suspects.chunk_mut(arrival.chunk);
            *suspects = suspects.without(&arrival.pages()).or(&arrival.suspect);
        }
        Ok(())
    }

    /// The error of the gang's pool.
    fn pooling(&self, error: PoolError) -> MigrateError {
        match error {
            PoolError::Peer(why) => MigrateError::Request(why),
            PoolError::File(source) => self.placing(MigrateError::host("writing the gang's pool")(source)),
        }
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

    /// The pages to send again, at most this many, and whether these are all.
    #[must_use]
    pub fn suspects(&self, most: usize) -> (Vec<PageIndex>, bool) {
        let suspects = self.lock();
        let mut each = suspects.iter().flat_map(|(chunk, set)| set.iter().map(move |page| PageIndex { chunk, page }));
        let named = each.by_ref().take(most).collect();
        (named, each.next().is_none())
    }

    fn target(&self) -> Target<'_> {
        Target::of(self.ram, self.pager)
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
