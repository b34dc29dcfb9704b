//! The pool: the bodies that a gang shares, once each, in a file from which they are mapped copy-on-write into every
//! machine that has them.
//!
//! The file has no name, so it lives for as long as somebody has it open or mapped, whatever becomes of this daemon.
//! Each member has a part of it as large as its RAM, and a body lies where its origin lies in that RAM: so clones of
//! one another, and the machine that sent the bodies, have them in few mappings. What no body was put into takes no
//! memory.
//!
//! A body is written once and then never changes: guests that map it see it at once, and their writes make copies. The
//! VMMs get a descriptor that cannot write: what a VMM discards of its guest's RAM, it punches out of the file that it
//! holds.

use std::collections::HashMap;
use std::fmt::Debug;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use sterna_protocol::frame::shared::{Origin, References};
use sterna_protocol::layout::{CHUNK_BYTES, ChunkIndex, Layout, PAGE_BYTES, PageIndex};
use sterna_protocol::pages::{PageMap, PageSet};
use sterna_sys::file::{self, FileId};
use sterna_sys::host::random_u128;

use super::offers::Offers;
use crate::memory::PoolRun;
use crate::memory::unneeded::mark_as_pool;

/// The pool of one gang.
#[derive(Debug)]
pub struct Pool {
    file: File,
    id: FileId,
    number: u64,
    /// The same file, for VMMs.
    reader: File,
    state: Mutex<State>,
    /// What the gang may refer to besides.
    offers: OnceLock<Offers>,
    /// The number of bodies that have come: progress.
    bodies: AtomicU64,
}

/// Pages whose bodies are here, in one file.
#[derive(Debug)]
pub struct Found<'a> {
    /// The file, for a VMM to map.
    pub pool: &'a File,
    /// The pages, and where their bodies lie.
    pub runs: Vec<PoolRun>,
}

/// A machine whose pages may have to wait for bodies.
pub trait Waits: Debug + Send + Sync {
    /// These pages wait from now on, in the turn that is returned. The pool is locked: this does not take long. `None`
    /// where that are more than the machine can have: then none of them waits.
    #[must_use]
    fn expect(&self, chunk: ChunkIndex, pages: &PageSet) -> Option<u64>;

    /// Bodies that pages of this chunk wait for, or have waited for in this turn, are in the pool. Another machine's
    /// pages wait meanwhile: this does not take long.
    fn came(&self, turn: u64, chunk: ChunkIndex, runs: Vec<PoolRun>);
}

#[derive(Debug)]
struct State {
    /// The parts of the members that have come so far.
    parts: Vec<Option<Part>>,
    /// The end of the last part, bytes.
    end: u64,
    /// Who waits for a body that has not come.
    waiting: HashMap<Origin, Vec<Waiter>>,
}

/// A member's part of the pool.
#[derive(Debug)]
struct Part {
    /// Where it begins, bytes.
    start: u64,
    /// The chunks that the member has.
    chunks: u32,
    /// The bodies that are there, or are being written.
    taken: PageMap,
    /// The bodies that are there.
    there: PageMap,
}

impl Part {
    fn offset(&self, page: PageIndex) -> u64 {
        self.start + page.chunk.index() as u64 * CHUNK_BYTES as u64 + u64::from(page.page) * PAGE_BYTES as u64
    }
}

/// A page that waits for a body.
#[derive(Debug, Clone)]
struct Waiter {
    machine: Arc<dyn Waits>,
    /// In which of the machine's turns.
    turn: u64,
    page: PageIndex,
}

impl Waiter {
    /// What tells one machine from another.
    fn place(&self) -> usize {
        address(self.machine.as_ref())
    }

    /// What those have in common that get bodies at a time.
    fn together(&self) -> (usize, u64, ChunkIndex) {
        (self.place(), self.turn, self.page.chunk)
    }
}

fn address(machine: &dyn Waits) -> usize {
    std::ptr::from_ref(machine).addr()
}

/// Why something cannot be put into the pool.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// The peer names what cannot be.
    #[error("{0}")]
    Peer(&'static str),
    /// The pool's file fails.
    #[error("the gang's pool cannot be written")]
    File(#[from] io::Error),
}

impl Pool {
    /// An empty pool for so many members in this file, which lies on tmpfs and is empty.
    ///
    /// # Errors
    /// The file cannot be marked as a pool, or opened again for reading.
    pub fn new(file: File, members: u16) -> io::Result<Arc<Self>> {
        mark_as_pool(&file)?;
        let reader = file::reader(&file)?;
        let parts = (0..members).map(|_| None).collect();
        let state = State { parts, end: 0, waiting: HashMap::new() };
        let id = file::id(&file)?;
        let (state, offers, bodies) = (Mutex::new(state), OnceLock::new(), AtomicU64::new(0));
        let number = random_u128() as u64;
        Ok(Arc::new(Self { file, id, number, reader, state, offers, bodies }))
    }

    /// The number by which sources tell it from one that was there before it.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Makes room for what a member shares.
    ///
    /// # Errors
    /// There is no such member, or it has come already; or the file cannot grow.
    pub fn enter(&self, member: u16, layout: &Layout) -> Result<(), PoolError> {
        let mut state = self.lock();
        self.ensure_whole(&state)?;
        let (start, end) = (state.end, state.end + u64::from(layout.chunks()) * CHUNK_BYTES as u64);
        let part = state.parts.get_mut(usize::from(member)).ok_or(PoolError::Peer("a member that the gang has not"))?;
        if part.is_some() {
            return Err(PoolError::Peer("a member of the gang comes twice"));
        }
        self.file.set_len(end)?;
        let (taken, there) = (PageMap::empty(layout), PageMap::empty(layout));
        *part = Some(Part { start, chunks: layout.chunks(), taken, there });
        state.end = end;
        Ok(())
    }

    /// Puts bodies of a member's pages into the pool, in the order of the pages, and tells the machines that wait for
    /// them. Returns where they lie.
    ///
    /// # Errors
    /// [`PoolError`]: nobody has got anything.
    ///
    /// # Panics
    /// Where there are not as many bodies as pages.
    pub fn put(
        self: &Arc<Self>,
        member: u16,
        chunk: ChunkIndex,
        pages: &PageSet,
        bodies: &[&[u8]],
    ) -> Result<Vec<PoolRun>, PoolError> {
        let runs = self.take_places(member, chunk, pages)?;
        // Members do not wait for one another here: on a busy host whoever holds the lock may not run for a while.
        let mut rest = bodies;
        for run in &runs {
            let (these, others) = rest.split_at(run.pages);
            self.write(these, run.offset)?;
            rest = others;
        }
        // Only now: who finds a body finds all of it.
        let mut served: Vec<(Waiter, u64)> = Vec::new();
        let mut state = self.lock();
        if let Some(Some(part)) = state.parts.get_mut(usize::from(member)) {
            part.there.insert_all(chunk, pages);
        }
        if !state.waiting.is_empty() {
            for run in &runs {
                for index in 0..run.pages {
                    let page = PageIndex { chunk, page: (run.first + index) as u8 };
                    let waiters = state.waiting.remove(&Origin { member, page }).into_iter().flatten();
                    served.extend(waiters.map(|waiter| (waiter, run.offset + (index * PAGE_BYTES) as u64)));
                }
            }
        }
        drop(state);
        self.bodies.fetch_add(bodies.len() as u64, Ordering::Relaxed);
        serve(served);
        Ok(runs)
    }

    /// Takes the places of bodies that are about to be written.
    fn take_places(&self, member: u16, chunk: ChunkIndex, pages: &PageSet) -> Result<Vec<PoolRun>, PoolError> {
        let mut state = self.lock();
        self.ensure_whole(&state)?;
        let part = state.parts.get_mut(usize::from(member)).and_then(Option::as_mut);
        let part = part.ok_or(PoolError::Peer("a shared body of a machine that has not joined its gang"))?;
        if !part.taken.chunk(chunk).and(pages).is_empty() {
            return Err(PoolError::Peer("a shared body comes twice"));
        }
        part.taken.insert_all(chunk, pages);
        let place = |(first, pages)| {
            let at = PageIndex { chunk, page: first as u8 };
            PoolRun { first, pages, offset: part.offset(at) }
        };
        Ok(pages.runs().map(place).collect())
    }

    /// Nobody has cut the file short. Where somebody has, the next body behind the cut would make the file as long as
    /// before, and guests that map what was cut off would read zeros there. So nothing more is put there or mapped.
    fn ensure_whole(&self, state: &State) -> io::Result<()> {
        let is_whole = self.file.metadata()?.len() >= state.end;
        is_whole.then_some(()).ok_or_else(|| io::Error::other("its file was cut short"))
    }

    /// Writes neighbouring bodies.
    fn write(&self, bodies: &[&[u8]], offset: u64) -> io::Result<()> {
        let slices: Vec<_> = bodies.iter().map(|body| io::IoSlice::new(body)).collect();
        if rustix::io::pwritev(&self.file, &slices, offset).is_ok_and(|written| written == bodies.len() * PAGE_BYTES) {
            return Ok(());
        }
        // It was interrupted, or there is no room: then this says so.
        let offsets = (offset..).step_by(PAGE_BYTES);
        bodies.iter().zip(offsets).try_for_each(|(body, offset)| self.file.write_all_at(body, offset))
    }

    /// Finds the bodies that these pages refer to. Returns where those lie that are here; for the others the machine
    /// waits from now on, and gets them when they come.
    ///
    /// # Errors
    /// [`PoolError::Peer`]: an origin that the gang cannot have, or more references than pages. Then the machine waits
    /// for nothing more. [`PoolError::File`]: bodies are gone.
    pub fn find(
        &self,
        machine: &Arc<dyn Waits>,
        chunk: ChunkIndex,
        references: &[References],
    ) -> Result<Vec<Found<'_>>, PoolError> {
        let mut state = self.lock();
        self.ensure_whole(&state)?;
        let mut here: Vec<Found> = Vec::new();
        let mut missing = Vec::new();
        for (page, origin) in references.iter().flat_map(|run| run.each()) {
            if let Some(number) = origin.offer() {
                match self.offers.get().and_then(|offers| offers.find(number)) {
                    Some((pool, offset)) => found(&mut here, pool, page, offset),
                    // Another daemon's process offered it, before this one was started.
                    None => missing.push((page, origin)),
                }
                continue;
            }
            let part = state.parts.get(usize::from(origin.member));
            let part = part.ok_or(PoolError::Peer("a reference to a member that the gang has not"))?;
            match part {
                Some(part) if part.chunks <= origin.page.chunk.0 => {
                    return Err(PoolError::Peer("a reference to a page that its member has not"));
                }
                Some(part) if part.there.chunk(origin.page.chunk).contains(origin.page.page) => {
                    found(&mut here, &self.reader, page, part.offset(origin.page));
                }
                // The body, or the whole member, is still to come.
                _ => missing.push((page, origin)),
            }
        }
        // Each is remembered: a peer must not make this host remember more and more.
        let turn = machine.expect(chunk, &missing.iter().map(|(page, _)| *page).collect());
        let turn = turn.ok_or(PoolError::Peer("references to bodies that do not come, again and again"))?;
        for (page, origin) in missing {
            let waiter = Waiter { machine: Arc::clone(machine), turn, page: PageIndex { chunk, page } };
            state.waiting.entry(origin).or_default().push(waiter);
        }
        Ok(here)
    }

    /// Lets the gang refer to these pages, too; later offers change nothing.
    pub fn offer(&self, offers: Offers) {
        // A number that was named names one body for ever.
        let _ = self.offers.set(offers);
    }

    /// What the gang may refer to besides what it sends.
    #[must_use]
    pub fn offers(&self) -> Option<&Offers> {
        self.offers.get()
    }

    /// Forgets that this machine waits for anything.
    pub fn forget(&self, machine: &dyn Waits) {
        self.lock().waiting.retain(|_, waiters| {
            waiters.retain(|waiter| waiter.place() != address(machine));
            !waiters.is_empty()
        });
    }

    /// Whether all members have come.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.lock().parts.iter().all(Option::is_some)
    }

    /// Which file it is.
    #[must_use]
    pub fn id(&self) -> FileId {
        self.id
    }

    /// The memory that it takes, bytes; none where that cannot be told.
    #[must_use]
    pub fn allocated_bytes(&self) -> u64 {
        file::allocated_bytes(&self.file).unwrap_or(0)
    }

    /// The number of bodies that have come so far.
    #[must_use]
    pub fn bodies(&self) -> u64 {
        self.bodies.load(Ordering::Relaxed)
    }

    /// The pool's file, for a VMM to map: it cannot be written by this descriptor.
    #[must_use]
    pub fn reader(&self) -> &File {
        &self.reader
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Tells machines of bodies that their pages waited for, of as many at a time as follow one another.
fn serve(mut served: Vec<(Waiter, u64)>) {
    served.sort_by_key(|(waiter, _)| (waiter.together(), waiter.page));
    let mut rest = served.as_slice();
    while let Some((first, _)) = rest.first() {
        let same = |waiter: &Waiter| waiter.together() == first.together();
        let (these, others) = rest.split_at(rest.partition_point(|(waiter, _)| same(waiter)));
        let mut runs = Vec::new();
        these.iter().for_each(|(waiter, offset)| add(&mut runs, waiter.page.page, *offset));
        first.machine.came(first.turn, first.page.chunk, runs);
        rest = others;
    }
}

/// Adds a page to those of its file.
fn found<'a>(here: &mut Vec<Found<'a>>, pool: &'a File, page: u8, offset: u64) {
    let of_file = match here.iter().position(|found| std::ptr::eq(found.pool, pool)) {
        Some(known) => known,
        None => {
            here.push(Found { pool, runs: Vec::new() });
            here.len() - 1
        }
    };
    add(&mut here[of_file].runs, page, offset);
}

/// Adds a page to the last run, or as a new one.
fn add(runs: &mut Vec<PoolRun>, page: u8, offset: u64) {
    match runs.last_mut() {
        Some(last)
            if last.first + last.pages == usize::from(page)
                && last.offset + (last.pages * PAGE_BYTES) as u64 == offset =>
        {
            last.pages += 1;
        }
        _ => runs.push(PoolRun { first: page.into(), pages: 1, offset }),
    }
}

#[cfg(test)]
#[path = "pool_tests.rs"]
mod tests;
