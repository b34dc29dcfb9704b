//! A machine's RAM on this host: the blocks' files, mapped, and addressed by chunk and page.

/// The guest's view of it, for those who look in from outside.
pub mod physical;

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};

use sterna_protocol::frame::Digester;
use sterna_protocol::layout::{CHUNK_PAGES, ChunkIndex, Layout, LayoutError, PAGE_BYTES};
use sterna_protocol::pages::{PageMap, PageSet};
use sterna_protocol::spec::BlockSpec;
use sterna_sys::file;
use sterna_sys::iovec::Outgoing;
use sterna_sys::map::{Access, SharedMapping};

/// A RAM block of a machine on this host.
#[derive(Debug)]
pub struct BlockFile {
    /// Its id, size and page size.
    pub spec: BlockSpec,
    /// Its backing file, open for reading and writing.
    pub file: File,
    /// Where the VMM maps it; 0 at a destination whose guest runs only when all its pages are there.
    pub address: u64,
}

/// A machine's RAM, mapped shared: what is read here is what the guest wrote, and what is written here the guest reads.
#[derive(Debug)]
pub struct Ram {
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
}

/// RAM that could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum RamError {
    /// Its blocks are invalid.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// A file could not be mapped.
    #[error("cannot map RAM block '{id}'")]
    Map {
        /// The block.
        id: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A file is smaller than its block.
    #[error(transparent)]
    Fault(#[from] RamFault),
}

/// RAM that was there and is not any more. The [`io::Error`]s of this module carry it where it is so ([`RamFault::of`]).
#[derive(Debug, Clone, thiserror::Error)]
pub enum RamFault {
    /// Who runs the guest took it away: nobody else has the file open.
    #[error("QEMU has cut the file of RAM block '{id}' short: it has {file_bytes} bytes, the block {bytes}")]
    CutShort {
        /// The block.
        id: String,
        /// What is left.
        file_bytes: u64,
        /// The block's size.
        bytes: u64,
    },
    /// A page that the guest gave back was to be read, and there was no memory to read it into.
    #[error("the file system of RAM block '{id}' has no memory left for its pages")]
    NoMemory {
        /// The block.
        id: String,
    },
}

impl RamFault {
    /// What an error of this module says of the RAM itself.
    #[must_use]
    pub fn of(error: &io::Error) -> Option<&Self> {
        error.get_ref()?.downcast_ref()
    }
}

impl Ram {
    /// Maps the blocks.
    ///
    /// # Errors
    /// [`RamError`].
    pub fn open(files: &[BlockFile], access: Access) -> Result<Self, RamError> {
        let specs: Vec<_> = files.iter().map(|block| block.spec.clone()).collect();
        let layout = Layout::new(&specs)?;
        let mut blocks = Vec::with_capacity(files.len());
        for BlockFile { spec, file, address } in files {
            let map = |source| RamError::Map { id: spec.id.clone(), source };
            let file = file.try_clone().map_err(map)?;
            let file_bytes = file.metadata().map_err(map)?.len();
            if file_bytes < spec.bytes {
                return Err(RamFault::CutShort { id: spec.id.clone(), file_bytes, bytes: spec.bytes }.into());
            }
            let mapping = SharedMapping::new(&file, spec.bytes, access).map_err(|error| map(error.into()))?;
            let (id, address, page_bytes) = (spec.id.clone(), *address, spec.page_bytes);
            blocks.push(Block { id, file, mapping, address, page_bytes });
        }
        Ok(Self { layout, blocks })
    }

    /// How the blocks lie.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Where the VMM maps each block, as addresses in its process, in the layout's order.
    pub fn spans(&self) -> impl Iterator<Item = Range<u64>> {
        self.blocks.iter().zip(self.layout.blocks()).map(|(block, spec)| block.address..block.address + spec.bytes)
    }

    /// Device and inode of the blocks' files, in the layout's order.
    ///
    /// # Errors
    /// A file cannot be looked at.
    pub fn files(&self) -> io::Result<Vec<(u64, u64)>> {
        self.blocks.iter().map(|block| block.file.metadata().map(|file| (file.dev(), file.ino()))).collect()
    }

    /// Makes sure that no page was lost since the files were opened: what was read until now is what the guest had. To be asked where
    /// something is built on what was read, because a file that was cut short looks like one of holes.
    ///
    /// # Errors
    /// [`RamFault`].
    pub fn intact(&self) -> io::Result<()> {
        self.blocks.iter().try_for_each(|block| {
            let broken = block.mapping.is_broken() || block.file.metadata()?.len() < block.mapping.bytes();
            if broken { Err(block.fault()) } else { Ok(()) }
        })
    }

    /// Why the kernel could not read a page of this chunk.
    #[must_use]
    pub fn lost(&self, chunk: ChunkIndex) -> io::Error {
        let none = || io::Error::from(io::ErrorKind::UnexpectedEof);
        self.layout.place(chunk).map_or_else(none, |place| self.blocks[place.block].fault())
    }

    /// What a failed read of the file means.
    fn read_failed(&self, chunk: ChunkIndex, error: io::Error) -> io::Error {
        if error.kind() == io::ErrorKind::UnexpectedEof { self.lost(chunk) } else { error }
    }

    /// Whether writes are seen by pages larger than 4,096 bytes there.
    #[must_use]
    pub fn tracked_coarsely(&self, chunk: ChunkIndex) -> bool {
        self.layout.place(chunk).is_some_and(|place| self.blocks[place.block].page_bytes > PAGE_BYTES as u64)
    }

    /// Pages the host has given memory for.
    ///
    /// # Errors
    /// The file's holes cannot be read.
    pub fn allocated(&self) -> io::Result<PageMap> {
        allocated_pages(&self.layout, self.blocks.iter().map(|block| &block.file))
    }

    /// Pages of a chunk that the host has given memory for.
    ///
    /// # Errors
    /// The file's holes cannot be read.
    pub fn allocated_in(&self, chunk: ChunkIndex) -> io::Result<PageSet> {
        let Some(place) = self.layout.place(chunk) else { return Ok(PageSet::EMPTY) };
        let range = place.offset..place.offset + (place.pages * PAGE_BYTES) as u64;
        let mut set = PageSet::EMPTY;
        for run in file::allocated_runs(&self.blocks[place.block].file, range) {
            let run = run?;
            let start = (run.start - place.offset) as usize / PAGE_BYTES;
            set.insert_run(start, (run.end - place.offset).div_ceil(PAGE_BYTES as u64) as usize - start);
        }
        Ok(set)
    }

    /// Copies a page out, as it is now; a guest that writes it meanwhile makes it dirty.
    ///
    /// # Errors
    /// [`RamFault`]: from the first page on that could not be had no page is read any more, whichever it is.
    ///
    /// # Panics
    /// Where the page is not in the layout.
    pub fn read(&self, chunk: ChunkIndex, page: u8, body: &mut [u8; PAGE_BYTES]) -> io::Result<()> {
        let (block, offset) = self.locate(chunk, usize::from(page));
        block.mapping.copy_out(offset..offset + PAGE_BYTES as u64, body);
        if block.mapping.is_broken() { Err(block.fault()) } else { Ok(()) }
    }

    /// Copies a page out by reading the file: no page table is filled for it, and a hole reads as zeros and stays one (reading a hole through
    /// the mapping would give it memory, or where none is left a signal).
    ///
    /// # Errors
    /// [`RamFault`], or the file cannot be read.
    ///
    /// # Panics
    /// Where the page is not in the layout.
    pub fn load(&self, chunk: ChunkIndex, page: u8, body: &mut [u8; PAGE_BYTES]) -> io::Result<()> {
        let (block, offset) = self.locate(chunk, usize::from(page));
        block.file.read_exact_at(body, offset).map_err(|error| self.read_failed(chunk, error))
    }

    /// Copies pages out as [`load`](Self::load) does, in order, into `bodies`, which is cleared first.
    ///
    /// # Errors
    /// [`RamFault`], or the file cannot be read.
    ///
    /// # Panics
    /// Where a page is not in the layout.
    pub fn load_all(&self, chunk: ChunkIndex, pages: &PageSet, bodies: &mut Vec<u8>) -> io::Result<()> {
        bodies.resize(pages.len() * PAGE_BYTES, 0);
        let mut rest = bodies.as_mut_slice();
        for (block, range) in self.runs(chunk, pages) {
            let (run, after) = rest.split_at_mut((range.end - range.start) as usize);
            block.file.read_exact_at(run, range.start).map_err(|error| self.read_failed(chunk, error))?;
            rest = after;
        }
        Ok(())
    }

    /// The memory of these pages, run by run, to send from. What was sent is what was there if the RAM [is intact](Self::intact) afterwards.
    ///
    /// # Panics
    /// Where a page is not in the layout.
    #[must_use]
    pub fn outgoing(&self, chunk: ChunkIndex, pages: &PageSet) -> Vec<Outgoing<'_>> {
        self.runs(chunk, pages).map(|(block, range)| block.mapping.outgoing(range)).collect()
    }

    /// Puts bodies in the place of these pages, in order. Through the file, not the mapping: a page that had no memory yet is filled as it
    /// is allocated, without a fault and without being cleared first (`docs/design/receiving.md`).
    ///
    /// # Errors
    /// No memory is left, for one.
    ///
    /// # Panics
    /// Where a page is not in the layout, or there are fewer bodies than pages.
    pub fn write(&self, chunk: ChunkIndex, pages: &PageSet, mut bodies: &[u8]) -> io::Result<()> {
        for (block, range) in self.runs(chunk, pages) {
            let (run, rest) = bodies.split_at((range.end - range.start) as usize);
            if block.page_bytes == PAGE_BYTES as u64 {
                file::write_at(&block.file, range.start, run)?;
            } else {
                // hugetlbfs has no write(2).
                block.mapping.copy_in(range.start, run)?;
            }
            bodies = rest;
        }
        Ok(())
    }

    /// Gives the memory of these pages back to the host: they read as zeros.
    ///
    /// # Errors
    /// The file system refuses.
    ///
    /// # Panics
    /// Where a page is not in the layout.
    pub fn punch(&self, chunk: ChunkIndex, pages: &PageSet) -> io::Result<()> {
        for (block, range) in self.runs(chunk, pages) {
            file::punch(&block.file, range)?;
        }
        Ok(())
    }

    /// A digest of a chunk's pages as they are, holes as zeros; both sides compute the same where their RAM is the same.
    ///
    /// # Errors
    /// As [`page_digests`](Self::page_digests).
    pub fn chunk_digest(&self, chunk: ChunkIndex, digester: Digester) -> io::Result<u64> {
        Ok(digester.pages(&self.page_digests(chunk, digester)?))
    }

    /// A digest of each page of a chunk; 0 for zeros and holes.
    ///
    /// # Errors
    /// [`RamFault`], or the file's holes cannot be read.
    pub fn page_digests(&self, chunk: ChunkIndex, digester: Digester) -> io::Result<Vec<u64>> {
        let pages = self.layout.place(chunk).map_or(0, |place| place.pages);
        let allocated = self.allocated_in(chunk)?;
        let mut body = [0; PAGE_BYTES];
        let mut digests = vec![0; pages];
        for page in allocated.iter() {
            self.read(chunk, page, &mut body)?;
            if !is_zero(&body) {
                digests[usize::from(page)] = digester.page(&body);
            }
        }
        // A file that was cut short has holes only.
        self.intact()?;
        Ok(digests)
    }

    /// The runs of these pages, as byte ranges of their block.
    fn runs(&self, chunk: ChunkIndex, pages: &PageSet) -> impl Iterator<Item = (&Block, Range<u64>)> {
        pages.runs().map(move |(start, length)| {
            let (block, offset) = self.locate(chunk, start);
            (block, offset..offset + (length * PAGE_BYTES) as u64)
        })
    }

    fn locate(&self, chunk: ChunkIndex, page: usize) -> (&Block, u64) {
        let place = self.layout.place(chunk).expect("a chunk of this layout");
        assert!(page < place.pages, "page {page} of chunk {} is not in the layout", chunk.0);
        (&self.blocks[place.block], place.offset + (page * PAGE_BYTES) as u64)
    }
}

impl Block {
    /// Why a page of it could not be had. By the file's length: an access to a page that is not behind its end fails only where there is no memory.
    fn fault(&self) -> io::Error {
        let (id, bytes) = (self.id.clone(), self.mapping.bytes());
        match self.file.metadata().map(|file| file.len()) {
            Ok(file_bytes) if file_bytes < bytes => io::Error::other(RamFault::CutShort { id, file_bytes, bytes }),
            Ok(_) => io::Error::other(RamFault::NoMemory { id }),
            Err(error) => error,
        }
    }
}

/// Whether a page holds zeros only.
#[must_use]
pub fn is_zero(body: &[u8; PAGE_BYTES]) -> bool {
    let (words, _) = body.as_chunks::<64>();
    words.iter().all(|line| line.iter().fold(0, |all, byte| all | byte) == 0)
}

/// Pages that the host has given memory for, in the files of a layout's blocks, in its order.
///
/// # Errors
/// A file's holes cannot be read.
pub fn allocated_pages<'a>(layout: &Layout, files: impl IntoIterator<Item = &'a File>) -> io::Result<PageMap> {
    let mut map = PageMap::empty(layout);
    for (index, (file, spec)) in files.into_iter().zip(layout.blocks()).enumerate() {
        for run in file::allocated_runs(file, 0..spec.bytes) {
            add_run(&mut map, layout, index, run?);
        }
    }
    Ok(map)
}

/// Adds the pages of a byte range of a block; what lies outside is left out.
pub fn add_run(map: &mut PageMap, layout: &Layout, block: usize, run: Range<u64>) {
    let mut offset = run.start / PAGE_BYTES as u64 * PAGE_BYTES as u64;
    while offset < run.end {
        let Some(first) = layout.page_at(block, offset) else { return };
        let left_in_chunk = CHUNK_PAGES - usize::from(first.page);
        let wanted = (run.end - offset).div_ceil(PAGE_BYTES as u64);
        let length = wanted.min(left_in_chunk as u64) as usize;
        let last = layout.place(first.chunk).map_or(0, |place| place.pages);
        map.chunk_mut(first.chunk).insert_run(usize::from(first.page), length.min(last - usize::from(first.page)));
        offset += (length * PAGE_BYTES) as u64;
    }
}
