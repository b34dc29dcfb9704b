//! RAM in files that the VMM maps shared: the same files are mapped here.
//!
//! A page has content where its file has no hole. Content belongs to the file, not to a process's page tables: the
//! VMM's may be emptied at any time ([`drop_mappings`](crate::memory::Mappings::drop_mappings)), and the RAM outlives
//! the VMM.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};

use sterna_protocol::layout::{CHUNK_PAGES, ChunkIndex, Layout, PAGE_BYTES};
use sterna_protocol::pages::{PageMap, PageSet};
use sterna_sys::file;
use sterna_sys::iovec::Outgoing;
use sterna_sys::map::{Access, SharedMapping};
use sterna_sys::pagemap::{Categories, Pagemap, Scan};
use sterna_sys::userfaultfd::{Filled, Modes, Userfaultfd};

use super::fault::{RamError, RamFault};
use super::huge::HugePages;
use super::runs::{runs, runs_from, runs_into};
use super::{BlockFile, Mappings, Memory, add_run};
use crate::agent::Advice;
use crate::error::MigrateError;
use crate::inside::Inside;

/// So many pages of a chunk that come at once are worth a huge page: what the guest had in one where it comes from.
/// At most an eighth of it is memory that the guest did not have.
const DENSE_PAGES: usize = CHUNK_PAGES - CHUNK_PAGES / 8;

/// A machine's RAM in files, mapped shared.
#[derive(Debug)]
pub struct SharedMemory {
    layout: Layout,
    blocks: Vec<Block>,
}

#[derive(Debug)]
struct Block {
    id: String,
    file: File,
    mapping: SharedMapping,
    address: u64,
    page_bytes: u64,
    /// Where memory comes in huge pages; `None` where the file system has none, or nothing is written.
    huge: Option<HugePages>,
}

impl SharedMemory {
    /// Maps the blocks. The files must be open for reading and writing with any `access` of the mapping.
    ///
    /// # Errors
    /// [`RamError`].
    pub fn open(files: &[BlockFile], access: Access) -> Result<Self, RamError> {
        let specs: Vec<_> = files.iter().map(|block| block.spec.clone()).collect();
        let layout = Layout::new(&specs)?;
        let mut blocks = Vec::with_capacity(files.len());
        for BlockFile { spec, file, address, .. } in files {
            let map = |source| RamError::Map { id: spec.id.clone(), source };
            let file = file.try_clone().map_err(map)?;
            let file_bytes = file.metadata().map_err(map)?.len();
            if file_bytes < spec.bytes {
                return Err(RamFault::CutShort { id: spec.id.clone(), file_bytes, bytes: spec.bytes }.into());
            }
            let mapping = SharedMapping::new(&file, spec.bytes, access).map_err(|error| map(error.into()))?;
            let (id, address, page_bytes) = (spec.id.clone(), *address, spec.page_bytes);
            let huge = if access == Access::ReadWrite { HugePages::of(&file, spec.bytes) } else { None };
            blocks.push(Block { id, file, mapping, address, page_bytes, huge });
        }
        Ok(Self { layout, blocks })
    }

    /// What a failed read of the file means.
    fn read_failed(&self, chunk: ChunkIndex, error: io::Error) -> io::Error {
        if error.kind() == io::ErrorKind::UnexpectedEof { self.lost(chunk) } else { error }
    }
}

impl Memory for SharedMemory {
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

    fn intact(&self) -> io::Result<()> {
        self.blocks.iter().try_for_each(|block| {
            let broken = block.mapping.is_broken() || block.file.metadata()?.len() < block.mapping.bytes();
            if broken { Err(block.fault()) } else { Ok(()) }
        })
    }

    fn lost(&self, chunk: ChunkIndex) -> io::Error {
        let none = || io::Error::from(io::ErrorKind::UnexpectedEof);
        self.layout.place(chunk).map_or_else(none, |place| self.blocks[place.block].fault())
    }

    fn tracked_coarsely(&self, chunk: ChunkIndex) -> bool {
        self.layout.place(chunk).is_some_and(|place| self.blocks[place.block].page_bytes > PAGE_BYTES as u64)
    }

    fn allocated(&self) -> io::Result<PageMap> {
        let mut map = PageMap::empty(&self.layout);
        for (index, (block, spec)) in self.blocks.iter().zip(self.layout.blocks()).enumerate() {
            for run in file::allocated_runs(&block.file, 0..spec.bytes) {
                add_run(&mut map, &self.layout, index, run?);
            }
        }
        Ok(map)
    }

    fn allocated_in(&self, chunk: ChunkIndex) -> io::Result<PageSet> {
        let Some(place) = self.layout.place(chunk) else { return Ok(PageSet::EMPTY) };
        let block = &self.blocks[place.block];
        let range = |first: usize, pages: usize| {
            let start = place.offset + (first * PAGE_BYTES) as u64;
            start..start + (pages * PAGE_BYTES) as u64
        };
        // The file's own answer is for what is not in memory alone. To find where a part with content ends the kernel
        // goes through it page by page, beyond this chunk, up to the next hole: for all chunks of a file without holes
        // that would take a time that grows with the square of its size (5 s for 1 GiB).
        let mut in_memory = [0; CHUNK_PAGES];
        block.mapping.in_memory(range(0, place.pages), &mut in_memory[..place.pages])?;
        let mut set: PageSet = (0..=u8::MAX).filter(|page| in_memory[usize::from(*page)] & 1 == 1).collect();
        for (first, pages) in PageSet::first(place.pages).without(&set).runs() {
            for run in file::allocated_runs(&block.file, range(first, pages)) {
                let run = run?;
                let start = (run.start - place.offset) as usize / PAGE_BYTES;
                set.insert_run(start, (run.end - place.offset).div_ceil(PAGE_BYTES as u64) as usize - start);
            }
        }
        Ok(set)
    }

    fn allocated_bytes(&self) -> io::Result<u64> {
        let bytes = self.blocks.iter().map(|block| file::allocated_bytes(&block.file));
        Ok(bytes.sum::<Result<u64, _>>()?)
    }

    fn read(&self, chunk: ChunkIndex, pages: &PageSet, bodies: &mut [u8]) -> io::Result<()> {
        for (run, bodies) in runs_into(&self.layout, chunk, pages, bodies) {
            let block = &self.blocks[run.block];
            block.mapping.copy_out(run.range, bodies);
            if block.mapping.is_broken() {
                return Err(block.fault());
            }
        }
        Ok(())
    }

    /// Reads the file, not the mapping: no page table is filled for it.
    fn load(&self, chunk: ChunkIndex, pages: &PageSet, bodies: &mut [u8]) -> io::Result<()> {
        for (run, bodies) in runs_into(&self.layout, chunk, pages, bodies) {
            let read = self.blocks[run.block].file.read_exact_at(bodies, run.range.start);
            read.map_err(|error| self.read_failed(chunk, error))?;
        }
        Ok(())
    }

    fn load_bytes(&self, block: usize, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.blocks[block].file.read_exact_at(bytes, offset)
    }

    fn in_place(&self, chunk: ChunkIndex, pages: &PageSet) -> Option<Vec<Outgoing<'_>>> {
        let runs = runs(&self.layout, chunk, pages);
        Some(runs.map(|run| self.blocks[run.block].mapping.outgoing(run.range)).collect())
    }

    /// Writes the file, not the mapping: a page that had no memory yet is filled as it is allocated, without a fault
    /// and without being cleared first (`docs/design/receiving.md`).
    fn write(&self, chunk: ChunkIndex, pages: &PageSet, bodies: &[u8]) -> io::Result<()> {
        for (run, bodies) in runs_from(&self.layout, chunk, pages, bodies) {
            let block = &self.blocks[run.block];
            if block.page_bytes == PAGE_BYTES as u64 {
                file::write_at(&block.file, run.range.start, bodies)?;
            } else {
                // hugetlbfs has no write(2).
                block.mapping.copy_in(run.range.start, bodies)?;
            }
        }
        Ok(())
    }

    fn make_room(&self, chunk: ChunkIndex, pages: &PageSet) -> u64 {
        let Some(place) = self.layout.place(chunk) else { return 0 };
        match &self.blocks[place.block].huge {
            Some(huge) if pages.len() >= DENSE_PAGES => huge.make(place.offset),
            _ => 0,
        }
    }

    /// A hole in a huge page would split it, so zeros are written there; not where all of it is zeros, as of memory
    /// that the guest gives back. Only these pages are touched: somebody else may write others at this moment.
    fn clear(&self, chunk: ChunkIndex, pages: &PageSet) -> io::Result<()> {
        let place = self.layout.place(chunk);
        let huge =
            place.and_then(|place| Some((place, self.blocks[place.block].huge.as_ref()?.page_at(place.offset)?)));
        let Some((place, huge)) = huge else { return self.discard(chunk, pages) };
        let block = &self.blocks[place.block];
        let end = place.offset + (place.pages * PAGE_BYTES) as u64;
        let rest_is_zero =
            || [huge.start..place.offset, end..huge.end].into_iter().all(|rest| block.mapping.is_zero(rest));
        if pages.len() == place.pages && rest_is_zero() {
            return self.discard(chunk, pages);
        }
        for run in runs(&self.layout, chunk, pages) {
            for start in run.range.step_by(PAGE_BYTES) {
                if !block.mapping.is_zero(start..start + PAGE_BYTES as u64) {
                    file::write_at(&block.file, start, &[0; PAGE_BYTES])?;
                }
            }
        }
        if block.mapping.is_broken() { Err(block.fault()) } else { Ok(()) }
    }

    /// Punches holes.
    fn discard(&self, chunk: ChunkIndex, pages: &PageSet) -> io::Result<()> {
        for run in runs(&self.layout, chunk, pages) {
            file::punch(&self.blocks[run.block].file, run.range)?;
        }
        Ok(())
    }

    fn outlasting(&self) -> io::Result<Option<Vec<File>>> {
        let readers = self.blocks.iter().map(|block| file::reader(&block.file));
        Ok(Some(readers.collect::<Result<_, _>>()?))
    }

    fn mappings(&self) -> &'static dyn Mappings {
        &SharedMappings
    }
}

/// Pages that the VMM maps out of a shared file: they are in the file whether it maps them or not.
#[derive(Debug, Clone, Copy)]
pub struct SharedMappings;

impl Mappings for SharedMappings {
    fn modes(&self) -> Modes {
        Modes::MISSING | Modes::MINOR
    }

    fn maps_on_arrival(&self) -> bool {
        false
    }

    fn may_be_huge(&self) -> bool {
        true
    }

    /// Takes out all pages that the VMM has mapped before its devices are loaded (for example where its memory is
    /// preallocated): a stale page among them would raise no fault. The current ones are mapped again when they are
    /// touched.
    fn hold_back(
        &self,
        inside: &mut dyn Inside,
        pagemap: &Pagemap,
        spans: &[Range<u64>],
        _: &mut dyn Iterator<Item = Range<u64>>,
    ) -> Result<(), MigrateError> {
        let (mut regions, mut mapped) = (Vec::new(), false);
        for span in spans {
            let scanned = pagemap.scan(span.clone(), Scan::of(Categories::PRESENT), &mut regions);
            scanned.map_err(MigrateError::vmm_process("looking at what QEMU has mapped"))?;
            mapped |= !regions.is_empty();
        }
        if mapped { self.drop_mappings(inside, spans) } else { Ok(()) }
    }

    /// Advises `MADV_DONTNEED`, which in a shared mapping touches page tables alone.
    fn drop_mappings(&self, inside: &mut dyn Inside, addresses: &[Range<u64>]) -> Result<(), MigrateError> {
        inside.advise(Advice::DontNeed, addresses)
    }

    /// Maps what the file holds (`UFFDIO_CONTINUE`).
    fn map_written(&self, faults: &Userfaultfd, addresses: Range<u64>, armed: bool) -> sterna_sys::Result<Filled> {
        if armed { faults.continue_protected(addresses) } else { faults.continue_(addresses) }
    }

    /// Adds a page of zeros to the file for each.
    fn map_zeros(&self, faults: &Userfaultfd, addresses: Range<u64>) -> sterna_sys::Result<Filled> {
        faults.zeropage(addresses)
    }
}

impl Block {
    /// Why a page of the block could not be read. The file's length tells: an access to a page before its end fails
    /// only where no memory is left.
    fn fault(&self) -> io::Error {
        let (id, bytes) = (self.id.clone(), self.mapping.bytes());
        match self.file.metadata().map(|file| file.len()) {
            Ok(file_bytes) if file_bytes < bytes => io::Error::other(RamFault::CutShort { id, file_bytes, bytes }),
            Ok(_) => io::Error::other(RamFault::NoMemory { id }),
            Err(error) => error,
        }
    }
}
