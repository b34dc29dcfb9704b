//! A machine's RAM on this host, addressed by chunk and page: what every kind of guest memory can do
//! ([`Memory`](crate::memory::Memory)), and what is common to all.
//!
//! All code that reads, writes or discards a guest's pages does so through [`Memory`](crate::memory::Memory). A second
//! kind of memory is therefore only a second implementation (`docs/design/memory.md`).

/// RAM in files that the VMM maps shared.
pub mod shared;

/// RAM in the private memory of the VMM's process.
pub mod private;

/// Parts of private RAM that a file stands behind.
pub mod areas;

/// What guests in private memory have in common.
pub mod common;

/// Huge pages under a guest's RAM.
pub mod huge;

/// How many mappings shared pages may take.
pub mod room;

/// Pages of pools that no guest needs any more.
pub mod unneeded;

/// What is kept of machines that have left.
pub mod kept;

/// The RAM of a machine, opened as the kind that it is.
pub mod kind;

/// The RAM by the guest's own addresses, for readers from outside.
pub mod physical;

/// Reading it where pages come and go.
pub mod elsewhere;

/// Errors of a machine's RAM.
pub mod fault;

/// Pages as runs of neighbours.
pub(crate) mod runs;

use std::fmt::{self, Debug, Formatter};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};

use sterna_protocol::frame::Digester;
use sterna_protocol::layout::{CHUNK_PAGES, ChunkIndex, Layout, PAGE_BYTES};
use sterna_protocol::pages::{PageMap, PageSet};
use sterna_protocol::spec::BlockSpec;
use sterna_sys::iovec::Outgoing;
use sterna_sys::pagemap::Pagemap;
use sterna_sys::userfaultfd::{Filled, Modes, Userfaultfd};

pub use self::runs::pages_of;
use crate::error::MigrateError;
use crate::inside::Inside;

/// A RAM block of a machine on this host.
#[derive(Debug)]
pub struct BlockFile {
    /// Its id, size and page size.
    pub spec: BlockSpec,
    /// Its backing file, open for reading and writing.
    pub file: File,
    /// The address where the VMM maps it; 0 where nobody needs it: at a destination whose guest starts only when all
    /// its pages are there, in files.
    pub address: u64,
    /// The process in whose private memory its pages are; `None` where they are in the file.
    pub process: Option<Holder>,
}

/// The VMM's process that has a machine's RAM in its private memory.
#[derive(Clone)]
pub struct Holder {
    /// Its number.
    pub pid: u32,
    /// Whoever gives the kernel advice in its name, and does nothing else.
    pub inside: Arc<Mutex<dyn Inside>>,
}

impl Debug for Holder {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_struct("Holder").field("pid", &self.pid).finish_non_exhaustive()
    }
}

/// Neighbouring pages of a chunk, and where their bodies lie in a pool, one after another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolRun {
    /// The first page.
    pub first: usize,
    /// The number of pages.
    pub pages: usize,
    /// Where the first page's body begins in the pool's file, bytes.
    pub offset: u64,
}

impl PoolRun {
    /// All pages of these runs.
    #[must_use]
    pub fn pages(runs: &[Self]) -> PageSet {
        let mut set = PageSet::EMPTY;
        runs.iter().for_each(|run| set.insert_run(run.first, run.pages));
        set
    }

    /// Copies the bodies of these runs out of their file, and shows those of each run.
    ///
    /// # Errors
    /// The file cannot be read, or the error of `show`.
    pub fn each_body(
        runs: &[Self],
        pool: &File,
        mut show: impl FnMut(&PageSet, &[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        runs.iter().try_for_each(|run| {
            let mut bodies = vec![0; run.pages * PAGE_BYTES];
            pool.read_exact_at(&mut bodies, run.offset)?;
            show(&Self::pages(&[*run]), &bodies)
        })
    }

    /// The parts of the run whose pages are in this set.
    pub fn within(self, set: &PageSet) -> impl Iterator<Item = Self> + use<> {
        let mut own = PageSet::EMPTY;
        own.insert_run(self.first, self.pages);
        own.and(set).runs().map(move |(first, pages)| {
            let offset = self.offset + ((first - self.first) * PAGE_BYTES) as u64;
            Self { first, pages, offset }
        })
    }
}

/// A machine's RAM: what is read here is what the guest wrote, and what is written here the guest reads.
///
/// A call names any number of pages of one chunk, because with some kinds of memory each call is expensive. Bodies lie
/// one after another, in the order of their pages. No call but [`write`](Self::write), [`discard`](Self::discard) and
/// [`install`](Self::install) changes what a page holds.
///
/// # Panics
/// Every method that takes pages panics where one of them is not in the layout.
pub trait Memory: Debug + Send + Sync {
    /// How the blocks lie.
    fn layout(&self) -> &Layout;

    /// Where the VMM maps each block, as addresses in its process, in the layout's order.
    fn spans(&self) -> Vec<Range<u64>>;

    /// Device and inode of the blocks' files, in the layout's order.
    ///
    /// # Errors
    /// A file cannot be looked at.
    fn files(&self) -> io::Result<Vec<(u64, u64)>>;

    /// Makes sure that no page was lost since the RAM was opened: then all reads until now yielded what the guest had.
    /// Code that relies on a read must call this, because RAM that was taken away looks like RAM that was never
    /// touched.
    ///
    /// # Errors
    /// [`RamFault`](fault::RamFault).
    fn intact(&self) -> io::Result<()>;

    /// Why the kernel could not read a page of this chunk.
    fn lost(&self, chunk: ChunkIndex) -> io::Error;

    /// Whether writes to this chunk are tracked by pages larger than 4,096 bytes.
    fn tracked_coarsely(&self, chunk: ChunkIndex) -> bool;

    /// The pages that have content: the others read as zeros, and the host has given no memory for them. Content that
    /// the guest has in common with others counts.
    ///
    /// # Errors
    /// The kernel does not tell.
    fn allocated(&self) -> io::Result<PageMap>;

    /// The pages of a chunk that have content.
    ///
    /// # Errors
    /// The kernel does not tell.
    fn allocated_in(&self, chunk: ChunkIndex) -> io::Result<PageSet>;

    /// The memory that the host has given for this RAM alone, bytes: not what it has in common with others.
    ///
    /// # Errors
    /// The kernel does not tell.
    fn allocated_bytes(&self) -> io::Result<u64>;

    /// The pages with content that can be taken from a guest that runs: at no moment does it see anything but what it
    /// left there, or zeros.
    ///
    /// # Errors
    /// The kernel does not tell.
    fn takeable(&self) -> io::Result<PageMap> {
        self.allocated()
    }

    /// Looks again for what the guest has in common with others. Whoever maps that for a guest calls this afterwards.
    /// Who watches its RAM calls it once the RAM is registered: from then on nothing changes there but by such a
    /// mapping.
    ///
    /// # Errors
    /// The kernel does not tell.
    fn look_at_areas(&self) -> io::Result<()> {
        Ok(())
    }

    /// Copies pages out as they are now; a guest that writes one meanwhile makes it dirty. The read gives memory to
    /// pages without content: ask for those only where that does not matter.
    ///
    /// # Errors
    /// [`RamFault`](fault::RamFault): from the first page on that could not be read, no further page is read.
    ///
    /// # Panics
    /// Where `bodies` is not exactly as long as the pages.
    fn read(&self, chunk: ChunkIndex, pages: &PageSet, bodies: &mut [u8]) -> io::Result<()>;

    /// Copies pages out without touching them: a page without content reads as zeros and stays without memory
    /// ([`read`](Self::read) would give it memory, or raise a signal where none is left).
    ///
    /// # Errors
    /// [`RamFault`](fault::RamFault), or the RAM cannot be read.
    ///
    /// # Panics
    /// Where `bodies` is not exactly as long as the pages.
    fn load(&self, chunk: ChunkIndex, pages: &PageSet, bodies: &mut [u8]) -> io::Result<()>;

    /// Copies bytes of a block out as [`load`](Self::load) does, for callers that do not work with pages.
    ///
    /// # Errors
    /// As [`load`](Self::load), or they are not all in the block's file.
    fn load_bytes(&self, block: usize, offset: u64, bytes: &mut [u8]) -> io::Result<()>;

    /// The memory of these pages, run by run, from which the kernel can send; `None` for any pages of a chunk whose
    /// bodies must be copied out first. The bytes sent were the pages' if the RAM [is intact](Self::intact) afterwards.
    fn in_place(&self, chunk: ChunkIndex, pages: &PageSet) -> Option<Vec<Outgoing<'_>>>;

    /// Puts bodies in the place of these pages.
    ///
    /// # Errors
    /// For example, no memory is left.
    ///
    /// # Panics
    /// Where there are fewer bodies than pages.
    fn write(&self, chunk: ChunkIndex, pages: &PageSet, bodies: &[u8]) -> io::Result<()>;

    /// Makes room for pages of a chunk that are about to be put in their place: most of it, so that it may be in a huge
    /// page. Returns how much memory was taken, bytes; none where the chunk is to be in small pages, or has its memory.
    fn make_room(&self, _chunk: ChunkIndex, _pages: &PageSet) -> u64 {
        0
    }

    /// Makes zeros of these pages: where they are in a huge page it stays whole, elsewhere their memory is [given
    /// back](Self::discard).
    ///
    /// # Errors
    /// As [`discard`](Self::discard) and [`write`](Self::write).
    fn clear(&self, chunk: ChunkIndex, pages: &PageSet) -> io::Result<()> {
        self.discard(chunk, pages)
    }

    /// Gives the memory of these pages back to the host: they read as zeros, here and for the guest.
    ///
    /// # Errors
    /// The kernel refuses, or the VMM does not answer.
    fn discard(&self, chunk: ChunkIndex, pages: &PageSet) -> io::Result<()>;

    /// The pages of a chunk that share their memory with others, of this machine or another one, as far as the kernel
    /// tells: a hint, which is out of date at once.
    ///
    /// # Errors
    /// The kernel does not tell.
    fn shared_in(&self, _chunk: ChunkIndex) -> io::Result<PageSet> {
        Ok(PageSet::EMPTY)
    }

    /// Makes pages of bodies that lie in this file, which nobody writes. The guest does not run yet. Where this kind of
    /// memory can, they are not copied: a write of the guest makes a copy. Else, and where the process has too many
    /// mappings already, they are copied.
    ///
    /// # Errors
    /// The file cannot be read, or the VMM does not answer; or as [`write`](Self::write).
    fn share(&self, chunk: ChunkIndex, from: &[PoolRun], pool: &File) -> io::Result<()> {
        PoolRun::each_body(from, pool, |pages, bodies| self.write(chunk, pages, bodies))
    }

    /// As [`share`](Self::share), for pages that a running guest waits for, or will: it has never seen them. A page
    /// that has come already stays as the guest has it.
    ///
    /// # Errors
    /// As [`share`](Self::share). Then the pages are still waited for.
    fn install_shared(&self, chunk: ChunkIndex, from: &[PoolRun], pool: &File) -> io::Result<()> {
        PoolRun::each_body(from, pool, |pages, bodies| self.install(chunk, pages, bodies))
    }

    /// Whether the VMM may still do what it was asked for by [`share`](Self::share) or
    /// [`install_shared`](Self::install_shared) and gave no answer to: what lies in that pool must stay there.
    fn may_map_later(&self) -> bool {
        false
    }

    /// Makes those of these pages missing that were [shared](Self::share): the guest's next access faults. The guest
    /// does not run yet.
    ///
    /// # Errors
    /// The VMM does not answer.
    fn unshare(&self, _pages: &PageMap) -> io::Result<()> {
        Ok(())
    }

    /// From now on, missing pages of this RAM wait for this userfaultfd.
    ///
    /// # Errors
    /// No descriptor left.
    fn wait_for(&self, _faults: &Userfaultfd) -> io::Result<()> {
        Ok(())
    }

    /// Puts bodies in the place of pages that the guest waits for, or will: it runs already, and has never seen them.
    /// They are mapped by [`map_written`](Mappings::map_written), if not before.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    ///
    /// # Panics
    /// As [`write`](Self::write).
    fn install(&self, chunk: ChunkIndex, pages: &PageSet, bodies: &[u8]) -> io::Result<()> {
        self.write(chunk, pages, bodies)
    }

    /// Makes zeros of such pages: they are mapped by [`map_zeros`](Mappings::map_zeros).
    ///
    /// # Errors
    /// As [`discard`](Self::discard).
    fn install_zeros(&self, chunk: ChunkIndex, pages: &PageSet) -> io::Result<()> {
        self.clear(chunk, pages)
    }

    /// The files that have its pages when the VMM has ended, open for reading only; `None` where the pages end with it.
    ///
    /// # Errors
    /// No descriptor left.
    fn outlasting(&self) -> io::Result<Option<Vec<File>>> {
        Ok(None)
    }

    /// The way in which pages of this kind of memory come into the VMM's page tables, and out of them.
    fn mappings(&self) -> &'static dyn Mappings;

    /// A digest of a chunk's pages as they are; both sides compute the same where their RAM is the same.
    ///
    /// # Errors
    /// As [`page_digests`](Self::page_digests).
    fn chunk_digest(&self, chunk: ChunkIndex, digester: Digester) -> io::Result<u64> {
        Ok(digester.pages(&self.page_digests(chunk, digester)?))
    }

    /// A digest of each page of a chunk; 0 for zeros.
    ///
    /// # Errors
    /// [`RamFault`](fault::RamFault), or the kernel does not tell which pages have content.
    fn page_digests(&self, chunk: ChunkIndex, digester: Digester) -> io::Result<Vec<u64>> {
        let mut digests = vec![0; self.layout().place(chunk).map_or(0, |place| place.pages)];
        let allocated = self.allocated_in(chunk)?;
        let read = |pages: &PageSet, bodies: &mut [u8]| self.read(chunk, pages, bodies);
        for_each_body(&allocated, read, |page, body| {
            if !is_zero(body) {
                digests[usize::from(page)] = digester.page(body);
            }
        })?;
        // RAM that was taken away has no content.
        self.intact()?;
        Ok(digests)
    }
}

/// How pages of one kind of memory come into the VMM's page tables, and out of them.
pub trait Mappings: Debug + Send + Sync {
    /// The faults that pages raise that are not mapped.
    fn modes(&self) -> Modes;

    /// Whether a page is mapped when its body [is put in its place](Memory::write), and the guest sees it from then on.
    fn maps_on_arrival(&self) -> bool;

    /// Takes care that an access to a stale page faults, in RAM that is registered for faults at these addresses:
    /// before the guest runs, and before its devices are loaded. The guest stands still meanwhile, so only a kind
    /// of memory that needs the stale pages takes the time to go through them.
    ///
    /// # Errors
    /// The VMM does not answer, or has ended.
    fn hold_back(
        &self,
        inside: &mut dyn Inside,
        pagemap: &Pagemap,
        spans: &[Range<u64>],
        stale: &mut dyn Iterator<Item = Range<u64>>,
    ) -> Result<(), MigrateError>;

    /// Whether the VMM may map its RAM by huge pages: then it must be [mapped small](huge::map_small) before its writes
    /// are watched.
    fn may_be_huge(&self) -> bool {
        false
    }

    /// Takes these addresses out of the VMM's page tables, so that the next access to each of their pages faults where
    /// they are registered for faults. The pages' content stays.
    ///
    /// # Errors
    /// The VMM does not answer, or the addresses are no RAM of its guest.
    fn drop_mappings(&self, inside: &mut dyn Inside, addresses: &[Range<u64>]) -> Result<(), MigrateError>;

    /// Maps pages that were [written](Memory::write) and that the VMM has not mapped, at addresses that are registered
    /// for faults, and wakes the threads that wait for them. The result says how far it got. Pages that are `armed`
    /// count as written, where writes are tracked, only once they are.
    ///
    /// # Errors
    /// `EFAULT`: a page without content is in the way.
    fn map_written(&self, faults: &Userfaultfd, addresses: Range<u64>, armed: bool) -> sterna_sys::Result<Filled>;

    /// Maps zeros to pages that the VMM has not mapped and that have no content, as [`map_written`](Self::map_written)
    /// does.
    ///
    /// # Errors
    /// For example, no memory is left.
    fn map_zeros(&self, faults: &Userfaultfd, addresses: Range<u64>) -> sterna_sys::Result<Filled>;
}

/// The most pages that are read at a time for a look at each: few enough that their bodies stay in the processor's
/// nearest cache.
pub const BATCH_PAGES: usize = 4;

/// The pages in batches of at most [`BATCH_PAGES`] neighbours.
pub fn batches(pages: &PageSet) -> impl Iterator<Item = PageSet> + use<> {
    let pages = *pages;
    let batches = (0..CHUNK_PAGES).step_by(BATCH_PAGES).map(move |first| {
        let mut batch = PageSet::EMPTY;
        batch.insert_run(first, BATCH_PAGES);
        batch.and(&pages)
    });
    batches.filter(|batch| !batch.is_empty())
}

/// Shows the bodies of these pages one after another. `read` reads them: it gets a batch of pages and a buffer of
/// exactly their size.
///
/// # Errors
/// The error of `read`. The batches before it have been shown.
pub fn for_each_body(
    pages: &PageSet,
    mut read: impl FnMut(&PageSet, &mut [u8]) -> io::Result<()>,
    mut show: impl FnMut(u8, &[u8; PAGE_BYTES]),
) -> io::Result<()> {
    let mut bodies = vec![0; pages.len().min(BATCH_PAGES) * PAGE_BYTES];
    for batch in batches(pages) {
        let bodies = &mut bodies[..batch.len() * PAGE_BYTES];
        read(&batch, bodies)?;
        batch.iter().zip(bodies.as_chunks().0).for_each(|(page, body)| show(page, body));
    }
    Ok(())
}

/// Whether a page holds zeros only.
#[must_use]
pub fn is_zero(body: &[u8; PAGE_BYTES]) -> bool {
    let (words, _) = body.as_chunks::<64>();
    words.iter().all(|line| line.iter().fold(0, |all, byte| all | byte) == 0)
}

/// Adds the pages of a byte range of a block; bytes outside the block are left out.
pub fn add_run(map: &mut PageMap, layout: &Layout, block: usize, run: Range<u64>) {
    for (chunk, pages) in pages_of(layout, block, run) {
        map.insert_all(chunk, &pages);
    }
}

#[cfg(test)]
pub mod not_in_place;

#[cfg(test)]
pub(crate) mod inside_here;

#[cfg(test)]
mod generic_tests;
