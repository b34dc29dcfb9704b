//! RAM in private memory of the VMM's process, so that pages can be shared with other guests until one is written.
//!
//! The pages are in that process's page tables and nowhere else. So whatever takes a page out of them loses it, the RAM
//! ends with the process, and what is done to a page is done through the process: it is read and written by the
//! process's addresses, and put in place by the userfaultfd that its missing pages wait for. The files that the VMM was
//! given stay empty; only their identity matters, because discards are logged by it (`docs/design/memory.md`).

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::sync::{OnceLock, PoisonError};

use sterna_protocol::layout::{ChunkIndex, Layout, PAGE_BYTES};
use sterna_protocol::pages::{PageMap, PageSet};
use sterna_sys::iovec::Outgoing;
use sterna_sys::map::Access;
use sterna_sys::pagemap::{Pagemap, Region};
use sterna_sys::process::ProcessMemory;
use sterna_sys::userfaultfd::{Filled, Modes, Stopped, Userfaultfd};

use super::fault::{RamError, RamFault};
use super::{BlockFile, Holder, Mappings, Memory, add_run, pages_of};
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
    /// What missing pages wait for, where they do.
    faults: OnceLock<Userfaultfd>,
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
        Ok(Self { layout, blocks, holder, memory, pagemap, faults: OnceLock::new() })
    }

    /// The runs of these pages, as addresses in the process.
    fn runs(&self, chunk: ChunkIndex, pages: &PageSet) -> impl Iterator<Item = Range<u64>> {
        pages.runs().map(move |(start, length)| {
            let place = self.layout.place(chunk).expect("a chunk of this layout");
            assert!(start + length <= place.pages, "page {start} of chunk {} is not in the layout", chunk.0);
            let first = self.blocks[place.block].address + place.offset + (start * PAGE_BYTES) as u64;
            first..first + (length * PAGE_BYTES) as u64
        })
    }

    /// The runs of these pages, each with its part of `bodies`.
    fn runs_into<'a>(
        &self,
        chunk: ChunkIndex,
        pages: &PageSet,
        bodies: &'a mut [u8],
    ) -> impl Iterator<Item = (Range<u64>, &'a mut [u8])> {
        assert_eq!(bodies.len(), pages.len() * PAGE_BYTES, "room for exactly these pages");
        let mut rest = bodies;
        self.runs(chunk, pages).map(move |run| {
            let (own, after) = std::mem::take(&mut rest).split_at_mut((run.end - run.start) as usize);
            rest = after;
            (run, own)
        })
    }

    /// The runs of pages with content among these addresses.
    fn with_content(&self, addresses: Range<u64>) -> io::Result<Vec<Region>> {
        let mut regions = Vec::new();
        self.pagemap.with_content(addresses, &mut regions).map_err(gone)?;
        Ok(regions)
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

    /// Writes pages as the process would.
    fn overwrite(&self, address: u64, bodies: &[u8]) -> io::Result<()> {
        let written = self.memory.write(address, bodies).map_err(gone)?;
        // What the process itself could not write: no memory is left, for it or for its cgroup.
        if written == bodies.len() { Ok(()) } else { Err(io::ErrorKind::OutOfMemory.into()) }
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
        let mut map = PageMap::empty(&self.layout);
        for (index, span) in self.spans().into_iter().enumerate() {
            for region in self.with_content(span.clone())? {
                add_run(&mut map, &self.layout, index, region.start - span.start..region.end - span.start);
            }
        }
        Ok(map)
    }

    fn allocated_in(&self, chunk: ChunkIndex) -> io::Result<PageSet> {
        let mut set = PageSet::EMPTY;
        let Some(place) = self.layout.place(chunk) else { return Ok(set) };
        let start = self.blocks[place.block].address + place.offset;
        for region in self.with_content(start..start + (place.pages * PAGE_BYTES) as u64)? {
            set.insert_run((region.start - start) as usize / PAGE_BYTES, region.pages() as usize);
        }
        Ok(set)
    }

    fn allocated_bytes(&self) -> io::Result<u64> {
        let mut pages = 0;
        for span in self.spans() {
            pages += self.with_content(span)?.iter().map(Region::pages).sum::<u64>();
        }
        Ok(pages * PAGE)
    }

    /// A page without content becomes one of the page of zeros, which takes no memory; where such a page is waited for,
    /// it is left alone.
    fn read(&self, chunk: ChunkIndex, pages: &PageSet, bodies: &mut [u8]) -> io::Result<()> {
        self.runs_into(chunk, pages, bodies).try_for_each(|(run, bodies)| self.read_run(run, bodies))
    }

    fn load(&self, chunk: ChunkIndex, pages: &PageSet, bodies: &mut [u8]) -> io::Result<()> {
        self.runs_into(chunk, pages, bodies).try_for_each(|(run, bodies)| {
            bodies.fill(0);
            self.with_content(run.clone())?.into_iter().try_for_each(|region| {
                let own = (region.start - run.start) as usize..(region.end - run.start) as usize;
                self.read_run(region.range(), &mut bodies[own])
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

    /// Writes what is there as the process would, and puts in place what is missing and waited for.
    fn write(&self, chunk: ChunkIndex, pages: &PageSet, mut bodies: &[u8]) -> io::Result<()> {
        for run in self.runs(chunk, pages) {
            let (own, rest) = bodies.split_at((run.end - run.start) as usize);
            match self.faults.get() {
                None => self.overwrite(run.start, own)?,
                Some(faults) => self.fill(faults, run, own, |at, body| self.overwrite(at, body))?,
            }
            bodies = rest;
        }
        Ok(())
    }

    /// `MADV_DONTNEED`, which the process alone can give, and which leaves zeros in anonymous memory. It is not asked
    /// where nothing is there.
    fn discard(&self, chunk: ChunkIndex, pages: &PageSet) -> io::Result<()> {
        let there = pages.and(&self.allocated_in(chunk)?);
        let runs: Vec<_> = self.runs(chunk, &there).collect();
        if runs.is_empty() {
            return Ok(());
        }
        let mut inside = self.holder.inside.lock().unwrap_or_else(PoisonError::into_inner);
        inside.advise(Advice::DontNeed, &runs).map_err(io::Error::other)
    }

    fn wait_for(&self, faults: &Userfaultfd) -> io::Result<()> {
        let own = faults.duplicate()?;
        // A second one is the first one again: a guest has one userfaultfd.
        let _ = self.faults.set(own);
        Ok(())
    }

    /// A page that is there already came by a connection that was lost, or is the guest's own: it stays.
    fn install(&self, chunk: ChunkIndex, pages: &PageSet, mut bodies: &[u8]) -> io::Result<()> {
        let faults = self.faults.get().ok_or_else(|| io::Error::other("no page of this memory is missing"))?;
        for run in self.runs(chunk, pages) {
            let (own, rest) = bodies.split_at((run.end - run.start) as usize);
            self.fill(faults, run, own, |_, _| Ok(()))?;
            bodies = rest;
        }
        Ok(())
    }

    /// Nothing is there, which is zeros once somebody looks.
    fn install_zeros(&self, _: ChunkIndex, _: &PageSet) -> io::Result<()> {
        Ok(())
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

    /// Drops the stale pages: `MADV_DONTNEED`, which loses what they hold, and which nobody wants.
    fn hold_back(
        &self,
        inside: &mut dyn Inside,
        _: &Pagemap,
        _: &[Range<u64>],
        stale: &[Range<u64>],
    ) -> Result<(), MigrateError> {
        inside.advise(Advice::DontNeed, stale)
    }

    /// They are mapped already: they were put in place that way. What is left is to wake those who began to wait
    /// before.
    fn map_written(&self, faults: &Userfaultfd, addresses: Range<u64>) -> sterna_sys::Result<Filled> {
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
