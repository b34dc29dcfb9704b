//! RAM in private memory of the VMM's process, so that pages can be shared with other guests until one is written.
//!
//! A page is in that process's page tables and nowhere else, or a file stands behind it
//! ([`areas`](crate::memory::areas)). So whatever takes a page out of them loses it, the RAM ends with the process, and
//! what is done to a page is done through the process: it is read and written by the process's addresses, and put in
//! place by the userfaultfd that its missing pages wait for. The files that the VMM was given stay empty; only their
//! identity matters, because discards are logged by it (`docs/design/memory.md`).

/// Pages that lie in a gang's pool.
mod pooling;

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::sync::{Mutex, OnceLock, PoisonError, RwLock, RwLockReadGuard};

use sterna_protocol::layout::{ChunkIndex, Layout, PAGE_BYTES};
use sterna_protocol::pages::{PageMap, PageSet};
use sterna_sys::iovec::Outgoing;
use sterna_sys::map::Access;
use sterna_sys::pagemap::{Pagemap, Region};
use sterna_sys::process::ProcessMemory;
use sterna_sys::userfaultfd::{Filled, Modes, Stopped, Userfaultfd};

use super::areas::{self, Areas};
use super::fault::{RamError, RamFault};
use super::room::Room;
use super::runs::{Run, runs, runs_from, runs_into};
use super::{BlockFile, Holder, Mappings, Memory, PoolRun, add_run, pages_of};
use crate::agent::Advice;
use crate::error::MigrateError;
use crate::inside::Inside;

const PAGE: u64 = PAGE_BYTES as u64;

/// How often a page is tried that cannot be put in place because the process changes its mappings. Each try may take
/// as long as the process's lock is held.
const TRIES: usize = 10_000;

/// A machine's RAM in the private memory of a process.
#[derive(Debug)]
pub struct PrivateMemory {
    layout: Layout,
    blocks: Vec<Block>,
    holder: Holder,
    memory: ProcessMemory,
    pagemap: Pagemap,
    /// What a file stands behind. It is never less than there is: see [`areas`].
    areas: RwLock<Areas>,
    /// What missing pages wait for, where they do.
    faults: OnceLock<Userfaultfd>,
    /// How many more mappings the process may have.
    room: Room,
    /// Pages of which nobody knows whether they are mapped from a pool.
    unsure: Mutex<PageMap>,
}

#[derive(Debug)]
struct Block {
    id: String,
    /// The file that the VMM was given.
    file: File,
    address: u64,
}

impl PrivateMemory {
    /// Opens the memory of the VMM's process, which has each block at its address. No file is read.
    ///
    /// # Errors
    /// [`RamError`].
    pub fn open(files: &[BlockFile], holder: Holder, access: Access) -> Result<Self, RamError> {
        let specs: Vec<_> = files.iter().map(|block| block.spec.clone()).collect();
        let layout = Layout::new(&specs)?;
        let process = holder.pid;
        let reach = |source: io::Error| RamError::Process { process, source };
        let memory = ProcessMemory::open(process, access).map_err(|error| reach(error.into()))?;
        let pagemap = Pagemap::open(process).map_err(|error| reach(error.into()))?;
        let mut blocks = Vec::with_capacity(files.len());
        for BlockFile { spec, file, address, .. } in files {
            let file = file.try_clone().map_err(reach)?;
            blocks.push(Block { id: spec.id.clone(), file, address: *address });
        }
        let areas = RwLock::default();
        let unsure = Mutex::new(PageMap::empty(&layout));
        let (faults, room) = (OnceLock::new(), Room::default());
        let opened = Self { layout, blocks, holder, memory, pagemap, areas, faults, room, unsure };
        opened.look_at_areas().map_err(reach)?;
        Ok(opened)
    }

    /// The run's addresses in the process.
    fn addresses(&self, run: &Run) -> Range<u64> {
        run.at(self.blocks[run.block].address)
    }

    /// The runs of pages with content among these addresses.
    fn with_content(&self, addresses: Range<u64>) -> io::Result<Vec<Range<u64>>> {
        areas::content(&self.pagemap, &self.areas(), addresses).map_err(gone)
    }

    /// The runs of pages among these addresses that are the process's own.
    fn own(&self, addresses: Range<u64>) -> io::Result<Vec<Region>> {
        let mut regions = Vec::new();
        self.pagemap.with_content(addresses, &mut regions).map_err(gone)?;
        Ok(regions)
    }

    fn areas(&self) -> RwLockReadGuard<'_, Areas> {
        self.areas.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The pages of those of these runs that `find` finds in the RAM.
    fn pages_in(&self, find: impl Fn(Range<u64>) -> io::Result<Vec<Range<u64>>>) -> io::Result<PageMap> {
        let mut map = PageMap::empty(&self.layout);
        for (index, span) in self.spans().into_iter().enumerate() {
            for range in find(span.clone())? {
                add_run(&mut map, &self.layout, index, range.start - span.start..range.end - span.start);
            }
        }
        Ok(map)
    }

    /// Reads one run. A page that is not there holds zeros; one that is there and cannot be read is an error.
    fn read_run(&self, mut addresses: Range<u64>, mut bodies: &mut [u8]) -> io::Result<()> {
        let mut again = false;
        loop {
            let read = self.memory.read(addresses.start, bodies).map_err(gone)?;
            let whole = read / PAGE_BYTES * PAGE_BYTES;
            (addresses.start, bodies) = (addresses.start + whole as u64, &mut bodies[whole..]);
            if bodies.is_empty() {
                return Ok(());
            }
            let there = !self.with_content(addresses.start..addresses.start + PAGE)?.is_empty();
            if there && again && whole == 0 {
                return Err(io::Error::other(RamFault::Unreadable { id: self.id_at(addresses.start) }));
            }
            // A page that is there by now came since the read.
            again = there;
            if !there {
                let (first, rest) = bodies.split_at_mut(PAGE_BYTES);
                first.fill(0);
                (addresses.start, bodies) = (addresses.start + PAGE, rest);
            }
        }
    }

    /// Puts bodies where the process has no pages, and passes each page that it has to `present`.
    fn fill(
        &self,
        faults: &Userfaultfd,
        addresses: Range<u64>,
        bodies: &[u8],
        mut present: impl FnMut(u64, &[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let (mut done, mut tries) = (0, 0);
        while done < bodies.len() {
            let at = addresses.start + done as u64;
            let filled = faults.copy(at, &bodies[done..], false).map_err(gone)?;
            done += filled.bytes as usize;
            tries = if filled.bytes > 0 { 0 } else { tries + 1 };
            match filled.stopped {
                None => {}
                Some(Stopped::AlreadyThere) => {
                    let at = addresses.start + done as u64;
                    present(at, &bodies[done..done + PAGE_BYTES])?;
                    done += PAGE_BYTES;
                }
                Some(Stopped::MappingsChange) if tries < TRIES => std::thread::yield_now(),
                Some(Stopped::MappingsChange) => return Err(io::ErrorKind::TimedOut.into()),
            }
        }
        Ok(())
    }

    /// Makes zeros of a part of an area that `MADV_DONTNEED` has emptied: its file's content shows there. Missing pages
    /// wait for this userfaultfd, so no mapping is replaced, and the guest does not run.
    fn hide(&self, faults: &Userfaultfd, addresses: Range<u64>) -> io::Result<()> {
        let (mut at, mut tries) = (addresses.start, 0);
        while at < addresses.end {
            // One call does not reach beyond a mapping. What is not registered is written as what is there.
            let filled = faults.zeropage(at..addresses.end).or_else(|_| faults.zeropage(at..at + PAGE));
            let unfilled = Filled { bytes: 0, stopped: Some(Stopped::AlreadyThere) };
            let Filled { bytes, stopped } = filled.unwrap_or(unfilled);
            at += bytes;
            tries = if bytes > 0 { 0 } else { tries + 1 };
            match stopped {
                None => {}
                Some(Stopped::AlreadyThere) => {
                    self.overwrite(at, &[0; PAGE_BYTES])?;
                    at += PAGE;
                }
                Some(Stopped::MappingsChange) if tries < TRIES => std::thread::yield_now(),
                Some(Stopped::MappingsChange) => return Err(io::ErrorKind::TimedOut.into()),
            }
        }
        Ok(())
    }

    /// Writes pages as the process would.
    fn overwrite(&self, address: u64, bodies: &[u8]) -> io::Result<()> {
        let written = self.memory.write(address, bodies).map_err(gone)?;
        // What the process itself could not write: no memory is left, for it or for its cgroup.
        if written == bodies.len() { Ok(()) } else { Err(io::ErrorKind::OutOfMemory.into()) }
    }

    /// Writes what is there as the process would, and puts in place what is missing and waited for.
    fn put(&self, chunk: ChunkIndex, pages: &PageSet, bodies: &[u8]) -> io::Result<()> {
        self.be_sure(chunk, pages)?;
        let Some(faults) = self.faults.get() else {
            let mut runs = runs_from(&self.layout, chunk, pages, bodies);
            return runs.try_for_each(|(run, bodies)| self.overwrite(self.addresses(&run).start, bodies));
        };
        // A page of an area that came after the registration is not registered, and never missing.
        let areas = self.areas();
        let of_area = |run: &Run| areas.within(self.addresses(run)).next().is_some();
        if !runs(&self.layout, chunk, pages).any(|run| of_area(&run)) {
            return runs_from(&self.layout, chunk, pages, bodies).try_for_each(|(run, bodies)| {
                self.fill(faults, self.addresses(&run), bodies, |at, body| self.overwrite(at, body))
            });
        }
        pages.iter().zip(bodies.chunks_exact(PAGE_BYTES)).try_for_each(|(page, body)| {
            runs(&self.layout, chunk, &[page].into_iter().collect()).try_for_each(|run| {
                let addresses = self.addresses(&run);
                if of_area(&run) {
                    return self.overwrite(addresses.start, body);
                }
                self.fill(faults, addresses, body, |at, body| self.overwrite(at, body))
            })
        })
    }

    fn id_at(&self, address: u64) -> String {
        let mut blocks = self.blocks.iter().zip(self.spans());
        blocks.find(|(_, span)| span.contains(&address)).map(|(block, _)| block.id.clone()).unwrap_or_default()
    }
}

/// What an error of a call for the process's memory means.
fn gone(error: sterna_sys::Error) -> io::Error {
    if error.errno() == Some(libc::ESRCH) { io::Error::other(RamFault::ProcessGone) } else { error.into() }
}

impl Memory for PrivateMemory {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn spans(&self) -> Vec<Range<u64>> {
        let blocks = self.blocks.iter().zip(self.layout.blocks());
        blocks.map(|(block, spec)| block.address..block.address + spec.bytes).collect()
    }

    fn files(&self) -> io::Result<Vec<(u64, u64)>> {
        self.blocks.iter().map(|block| block.file.metadata().map(|file| (file.dev(), file.ino()))).collect()
    }

    /// The process's memory is still there.
    fn intact(&self) -> io::Result<()> {
        self.pagemap.is_alive().map_err(gone)
    }

    fn lost(&self, _: ChunkIndex) -> io::Error {
        self.intact().err().unwrap_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }

    fn tracked_coarsely(&self, _: ChunkIndex) -> bool {
        false
    }

    fn allocated(&self) -> io::Result<PageMap> {
        self.pages_in(|span| self.with_content(span))
    }

    /// What lies in no area. A page of an area would show its file's content for a moment.
    fn takeable(&self) -> io::Result<PageMap> {
        let areas = self.areas();
        self.pages_in(|span| {
            let own = self.own(span)?;
            Ok(own.iter().flat_map(|region| areas.outside(region.range())).collect())
        })
    }

    fn look_at_areas(&self) -> io::Result<()> {
        let areas = Areas::of(self.holder.pid, &self.spans())?;
        // They were this process's, because it lives now: its number was not used again.
        self.intact()?;
        *self.areas.write().unwrap_or_else(PoisonError::into_inner) = areas;
        Ok(())
    }

    fn allocated_in(&self, chunk: ChunkIndex) -> io::Result<PageSet> {
        let Some(place) = self.layout.place(chunk) else { return Ok(PageSet::EMPTY) };
        let mut set = PageSet::EMPTY;
        let start = self.blocks[place.block].address + place.offset;
        for region in self.with_content(start..start + (place.pages * PAGE_BYTES) as u64)? {
            let pages = (region.end - region.start) as usize / PAGE_BYTES;
            set.insert_run((region.start - start) as usize / PAGE_BYTES, pages);
        }
        Ok(set)
    }

    fn allocated_bytes(&self) -> io::Result<u64> {
        self.spans().into_iter().map(|span| self.pagemap.content_bytes(span).map_err(gone)).sum()
    }

    /// A page without content becomes one of the page of zeros, which takes no memory; where such a page is waited for,
    /// it is left alone.
    fn read(&self, chunk: ChunkIndex, pages: &PageSet, bodies: &mut [u8]) -> io::Result<()> {
        let mut runs = runs_into(&self.layout, chunk, pages, bodies);
        runs.try_for_each(|(run, bodies)| self.read_run(self.addresses(&run), bodies))
    }

    fn load(&self, chunk: ChunkIndex, pages: &PageSet, bodies: &mut [u8]) -> io::Result<()> {
        runs_into(&self.layout, chunk, pages, bodies).try_for_each(|(run, bodies)| {
            bodies.fill(0);
            let addresses = self.addresses(&run);
            self.with_content(addresses.clone())?.into_iter().try_for_each(|region| {
                let own = (region.start - addresses.start) as usize..(region.end - addresses.start) as usize;
                self.read_run(region, &mut bodies[own])
            })
        })
    }

    fn load_bytes(&self, block: usize, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let behind = offset.checked_add(bytes.len() as u64).ok_or(io::ErrorKind::UnexpectedEof)?;
        if self.layout.blocks().nth(block).is_none_or(|spec| behind > spec.bytes) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let first = offset / PAGE * PAGE;
        for (chunk, pages) in pages_of(&self.layout, block, first..behind) {
            let mut bodies = vec![0; pages.len() * PAGE_BYTES];
            self.load(chunk, &pages, &mut bodies)?;
            let place = self.layout.place(chunk).expect("a chunk of this layout");
            let start = place.offset + pages.iter().next().map_or(0, |page| u64::from(page) * PAGE);
            let (from, to) = (offset.max(start), behind.min(start + bodies.len() as u64));
            bytes[(from - offset) as usize..(to - offset) as usize]
                .copy_from_slice(&bodies[(from - start) as usize..(to - start) as usize]);
        }
        Ok(())
    }

    fn in_place(&self, _: ChunkIndex, _: &PageSet) -> Option<Vec<Outgoing<'_>>> {
        None
    }

    fn write(&self, chunk: ChunkIndex, pages: &PageSet, bodies: &[u8]) -> io::Result<()> {
        self.put(chunk, pages, bodies)
    }

    fn shared_in(&self, chunk: ChunkIndex) -> io::Result<PageSet> {
        self.shared_pages(chunk)
    }

    fn share(&self, chunk: ChunkIndex, runs: &[PoolRun], pool: &File) -> io::Result<()> {
        self.map_from_pool(chunk, runs, pool)
    }

    fn install_shared(&self, chunk: ChunkIndex, runs: &[PoolRun], pool: &File) -> io::Result<()> {
        self.install_from_pool(chunk, runs, pool)
    }

    fn may_map_later(&self) -> bool {
        self.is_unsure()
    }

    fn unshare(&self, pages: &PageMap) -> io::Result<()> {
        self.leave_areas(pages)
    }

    /// `MADV_DONTNEED`, which the process alone can give, and which leaves zeros in anonymous memory. It is not asked
    /// where nothing is there. A part of an area becomes anonymous memory; where missing pages are waited for, zeros
    /// are put there after the file's content has come back, which nobody sees because the guest does not run.
    fn discard(&self, chunk: ChunkIndex, pages: &PageSet) -> io::Result<()> {
        self.be_sure(chunk, pages)?;
        let there = pages.and(&self.allocated_in(chunk)?);
        let addresses: Vec<_> = runs(&self.layout, chunk, &there).map(|run| self.addresses(&run)).collect();
        if addresses.is_empty() {
            return Ok(());
        }
        let (areas, own) = {
            let areas = self.areas();
            let within: Vec<_> = addresses.iter().flat_map(|run| areas.within(run.clone())).collect();
            let outside: Vec<_> = addresses.iter().flat_map(|run| areas.outside(run.clone())).collect();
            (within, outside)
        };
        let mut inside = self.holder.inside.lock().unwrap_or_else(PoisonError::into_inner);
        if !own.is_empty() {
            inside.advise(Advice::DontNeed, &own).map_err(io::Error::other)?;
        }
        match self.faults.get() {
            _ if areas.is_empty() => Ok(()),
            None => {
                let Some(_taken) = self.room.take(self.holder.pid, 2 * areas.len() as u64)? else {
                    drop(inside);
                    let zeros = |part: &Range<u64>| vec![0; (part.end - part.start) as usize];
                    return areas.iter().try_for_each(|part| self.overwrite(part.start, &zeros(part)));
                };
                inside.map_own(&areas).map_err(io::Error::other)?;
                let mut known = self.areas.write().unwrap_or_else(PoisonError::into_inner);
                areas.iter().for_each(|part| known.take_out(part));
                Ok(())
            }
            Some(faults) => {
                inside.advise(Advice::DontNeed, &areas).map_err(io::Error::other)?;
                areas.into_iter().try_for_each(|part| self.hide(faults, part))
            }
        }
    }

    fn wait_for(&self, faults: &Userfaultfd) -> io::Result<()> {
        let own = faults.duplicate()?;
        // A second one is the first one again: a guest has one userfaultfd.
        let _ = self.faults.set(own);
        Ok(())
    }

    /// A page that is there already came by a connection that was lost, or is the guest's own: it stays.
    fn install(&self, chunk: ChunkIndex, pages: &PageSet, bodies: &[u8]) -> io::Result<()> {
        let faults = self.faults.get().ok_or_else(|| io::Error::other("no page of this memory is missing"))?;
        let there = self.pages_of_areas(chunk, pages)?;
        if there.is_empty() {
            let mut runs = runs_from(&self.layout, chunk, pages, bodies);
            return runs.try_for_each(|(run, bodies)| self.fill(faults, self.addresses(&run), bodies, |_, _| Ok(())));
        }
        let missing = pages.iter().zip(bodies.chunks_exact(PAGE_BYTES)).filter(|(page, _)| !there.contains(*page));
        missing.into_iter().try_for_each(|(page, body)| {
            let only = [page].into_iter().collect();
            let mut runs = runs_from(&self.layout, chunk, &only, body);
            runs.try_for_each(|(run, body)| self.fill(faults, self.addresses(&run), body, |_, _| Ok(())))
        })
    }

    /// Nothing is there, which is zeros once somebody looks.
    fn install_zeros(&self, chunk: ChunkIndex, pages: &PageSet) -> io::Result<()> {
        self.pages_of_areas(chunk, pages).map(drop)
    }

    fn mappings(&self) -> &'static dyn Mappings {
        &PrivateMappings
    }
}

/// Pages that are in the VMM's page tables and nowhere else.
#[derive(Debug, Clone, Copy)]
pub struct PrivateMappings;

impl Mappings for PrivateMappings {
    /// Private anonymous memory has no minor faults.
    fn modes(&self) -> Modes {
        Modes::MISSING
    }

    fn maps_on_arrival(&self) -> bool {
        true
    }

    /// Always an error: a page that leaves the page tables is lost.
    fn drop_mappings(&self, _: &mut dyn Inside, _: &[Range<u64>]) -> Result<(), MigrateError> {
        Err(MigrateError::Bug("pages of private memory cannot be taken out of the VMM's page tables"))
    }

    /// Drops the stale pages: `MADV_DONTNEED`, which loses what they hold, and which nobody wants. None lies in an
    /// area, where its file's content would come back ([`unshare`](Memory::unshare)).
    fn hold_back(
        &self,
        inside: &mut dyn Inside,
        _: &Pagemap,
        _: &[Range<u64>],
        stale: &mut dyn Iterator<Item = Range<u64>>,
    ) -> Result<(), MigrateError> {
        let stale: Vec<_> = stale.collect();
        inside.advise(Advice::DontNeed, &stale)
    }

    /// They are mapped already, unarmed: they were put in place that way. What is left is to wake those who began to
    /// wait before.
    fn map_written(&self, faults: &Userfaultfd, addresses: Range<u64>, _: bool) -> sterna_sys::Result<Filled> {
        faults.wake(addresses.clone())?;
        Ok(Filled { bytes: addresses.end - addresses.start, stopped: None })
    }

    /// The page of zeros, which takes no memory.
    fn map_zeros(&self, faults: &Userfaultfd, addresses: Range<u64>) -> sterna_sys::Result<Filled> {
        faults.zeropage(addresses)
    }
}

#[cfg(test)]
#[path = "private_tests.rs"]
mod tests;
