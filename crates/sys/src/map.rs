//! A RAM file mapped into this process while a guest writes to it.
//!
//! The guest, in another process, changes this memory at any time, so it is never lent as `&[u8]`: the compiler may
//! read a slice twice and rely on seeing the same bytes. Every access here is a volatile read or write of a machine
//! word, each done exactly once. The result is a copy that nobody changes, and each of its words was in the memory at
//! some moment. Bodies in bulk do not pass here at all: the kernel moves them between the mapping and a socket
//! ([`SharedMapping::outgoing`], [`SharedMapping::incoming`]).
//!
//! A direct access to a hole allocates a page. So read only where the file is allocated, and write only what
//! [`SharedMapping::populate_write`] has allocated or let the kernel write, which reports an error. Where the file
//! system has no memory left for a hole, or the file was cut short meanwhile, an access finds zeros, and the mapping is
//! [broken](SharedMapping::is_broken) from then on: check that after each access.

use std::ops::Range;
use std::os::fd::AsFd;
use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::error::{Error, Result};
use crate::iovec::{Incoming, Outgoing};

/// The word of an access: the widest that one instruction moves on every processor of the family.
#[cfg(target_arch = "x86_64")]
type Word = core::arch::x86_64::__m128i;
#[cfg(not(target_arch = "x86_64"))]
type Word = u64;

const WORD: usize = size_of::<Word>();

// Accesses to a page for which there is no file content or no memory.
mod fault;
use fault::Slot;

// Private memory.
mod own;
pub use own::PrivateMapping;

/// The accesses that a mapping allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Reading only.
    Read,
    /// Reading and writing.
    ReadWrite,
}

/// The first part of a file, mapped shared; unmapped when dropped. Ranges are offsets into the file, bytes.
#[derive(Debug)]
pub struct SharedMapping {
    base: NonNull<u8>,
    bytes: usize,
    access: Access,
    slot: &'static Slot,
}

// SAFETY: it owns its mapping, which is valid on every thread; accesses are volatile words or the kernel's, never
// references.
unsafe impl Send for SharedMapping {}
// SAFETY: as above: another thread or the guest may write there, and no access assumes that the memory stays as it is.
unsafe impl Sync for SharedMapping {}

impl SharedMapping {
    /// Maps the first `bytes` of `file`. Nothing is read or allocated.
    ///
    /// # Errors
    /// `EACCES`: the file is not open for that; `EINVAL`: `bytes` is 0 or no multiple of the file's page size;
    /// `ENOMEM`: no address space left; `ENFILE`: too many are mapped.
    pub fn new(file: impl AsFd, bytes: u64, access: Access) -> Result<Self> {
        let failed = |error: std::io::Error| Error::new("map a RAM file", error);
        let bytes = usize::try_from(bytes).map_err(|_| failed(std::io::ErrorKind::OutOfMemory.into()))?;
        let protection = match access {
            Access::Read => ProtFlags::READ,
            Access::ReadWrite => ProtFlags::READ | ProtFlags::WRITE,
        };
        let page_bytes = crate::file::page_bytes(&file)? as usize;
        // SAFETY: the kernel chooses an address where nothing is mapped.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, file, 0) }
            .map_err(|error| failed(error.into()))?;
        let base = NonNull::new(base.cast()).ok_or_else(|| failed(std::io::ErrorKind::OutOfMemory.into()))?;
        match Slot::take(base, bytes, page_bytes) {
            Ok(slot) => Ok(Self { base, bytes, access, slot }),
            Err(error) => {
                // SAFETY: it was mapped just now, and nobody else knows it.
                let _ = unsafe { rustix::mm::munmap(base.as_ptr().cast(), bytes) };
                Err(failed(error))
            }
        }
    }

    /// Whether any access ever met a page without content or memory: the file was cut short, or no memory was left to
    /// fill a hole. Then the bytes that were read are useless, and nothing more is read or written. Whoever reads
    /// checks this afterwards. The kernel, which moves bodies by itself, reports `EFAULT` instead, but only for a page
    /// that no access has met before.
    pub fn is_broken(&self) -> bool {
        self.slot.broken()
    }

    /// The mapping's first byte. The memory behind it changes at any time, so no reference to it may be made.
    pub fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Its length, bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    /// Its addresses in this process.
    pub fn addresses(&self) -> Range<u64> {
        let start = self.base.as_ptr() as u64;
        start..start + self.bytes as u64
    }

    /// Memory of the guest for the kernel to read.
    ///
    /// # Panics
    /// As an index into a slice: if `range` is not within the mapping.
    pub fn outgoing(&self, range: Range<u64>) -> Outgoing<'_> {
        let (at, bytes) = self.within(range);
        // SAFETY: mapped readable for as long as `self` is borrowed.
        unsafe { Outgoing::new(at, bytes) }
    }

    /// Memory of the guest for the kernel to write.
    ///
    /// # Panics
    /// As an index into a slice: if `range` is not within the mapping. It also panics if the mapping is not writable.
    pub fn incoming(&self, range: Range<u64>) -> Incoming<'_> {
        assert_eq!(self.access, Access::ReadWrite, "a mapping for reading takes nothing in");
        let (at, bytes) = self.within(range);
        // SAFETY: mapped writable for as long as `self` is borrowed; nobody has references into it.
        unsafe { Incoming::new(at, bytes) }
    }

    /// Whether all of `range` was zero when it was read, or the mapping [is broken](Self::is_broken). Both ends are
    /// multiples of 128.
    ///
    /// # Panics
    /// If `range` is not within the mapping, or not so aligned.
    pub fn is_zero(&self, range: Range<u64>) -> bool {
        const STEP: usize = 8 * WORD;
        let (at, bytes) = self.within(range);
        assert!((at as usize).is_multiple_of(WORD) && bytes.is_multiple_of(STEP), "the zero test takes whole steps");
        if self.is_broken() {
            return true;
        }
        (0..bytes / STEP).all(|step| {
            let at = at.wrapping_add(step * STEP).cast::<Word>();
            // SAFETY: eight aligned words within the mapping.
            let words = std::array::from_fn(|index| unsafe { at.add(index).read_volatile() });
            all_zero(words)
        })
    }

    /// Copies `range` as it is now into `out`, of the same length. Both ends of `range` are multiples of 16. Where the
    /// mapping [is broken](Self::is_broken), zeros.
    ///
    /// # Panics
    /// If `range` is not within the mapping, not so aligned, or not as long as `out`.
    pub fn copy_out(&self, range: Range<u64>, out: &mut [u8]) {
        let (from, bytes) = self.within(range);
        assert_eq!(bytes, out.len(), "as much is copied as there is room for");
        assert!((from as usize).is_multiple_of(WORD) && bytes.is_multiple_of(WORD), "copies take whole words");
        if self.is_broken() {
            return out.fill(0);
        }
        // SAFETY: `from` is within the mapping, and as long as `out`.
        unsafe { copy_changing(from, out) }
    }

    /// Lends a copy of `range` as it is now, made in `scratch`, which is grown as needed.
    ///
    /// # Panics
    /// As [`Self::copy_out`].
    pub fn with_copy<T>(&self, range: Range<u64>, scratch: &mut Vec<u8>, look: impl FnOnce(&[u8]) -> T) -> T {
        let bytes = (range.end - range.start) as usize;
        if scratch.len() < bytes {
            scratch.resize(bytes, 0);
        }
        let copy = &mut scratch[..bytes];
        self.copy_out(range, copy);
        look(copy)
    }

    /// Copies `bytes` to `offset`, whole words. The memory is allocated first, so running out of it is an error.
    ///
    /// # Errors
    /// As [`Self::populate_write`]; `EFAULT`: the mapping [is broken](Self::is_broken).
    ///
    /// # Panics
    /// As [`Self::copy_out`], or if the mapping is not writable.
    pub fn copy_in(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        assert_eq!(self.access, Access::ReadWrite, "a mapping for reading takes nothing in");
        let range = offset..offset + bytes.len() as u64;
        let (to, length) = self.within(range.clone());
        assert!((to as usize).is_multiple_of(WORD) && length.is_multiple_of(WORD), "copies take whole words");
        let page = crate::PAGE_BYTES;
        self.unbroken("write guest memory")?;
        self.populate_write(range.start / page * page..(range.end.div_ceil(page) * page).min(self.bytes()))?;
        let (from, to) = (bytes.as_ptr().cast::<Word>(), to.cast::<Word>());
        for index in 0..length / WORD {
            // SAFETY: `to` is aligned and within the mapping, `from` within `bytes`, wherever that is aligned.
            unsafe { to.add(index).write_volatile(from.add(index).read_unaligned()) }
        }
        self.unbroken("write guest memory")
    }

    /// Allocates the pages of `range` and maps them writable (`MADV_POPULATE_WRITE`); their content stays.
    ///
    /// # Errors
    /// `EFAULT`, `ENOMEM`: the file system, the cgroup or the host has no memory left; `EINVAL`: the mapping is not
    /// writable, or the kernel is older than 5.14.
    ///
    /// # Panics
    /// If `range` is not within the mapping.
    pub fn populate_write(&self, range: Range<u64>) -> Result<()> {
        loop {
            match self.advise(range.clone(), Advice::LinuxPopulateWrite, "allocate guest memory") {
                Err(error) if error.errno() == Some(libc::EINTR) => {}
                result => return result,
            }
        }
    }

    /// Removes the pages of `range` from this process's page table (`MADV_DONTNEED`); the file keeps them.
    ///
    /// # Errors
    /// `EINVAL`: the range is locked or not aligned to pages.
    ///
    /// # Panics
    /// If `range` is not within the mapping.
    pub fn dont_need(&self, range: Range<u64>) -> Result<()> {
        self.advise(range, Advice::LinuxDontNeed, "unmap guest memory")
    }

    /// Has memory that is allocated by an access to this mapping come in huge pages, as far as the file system allows
    /// it, or in small ones.
    ///
    /// # Errors
    /// `EINVAL`: the kernel has no huge pages.
    pub fn advise_huge(&self, huge: bool) -> Result<()> {
        let advice = if huge { Advice::LinuxHugepage } else { Advice::LinuxNoHugepage };
        self.advise(0..self.bytes(), advice, "choose the size of a guest's pages")
    }

    fn unbroken(&self, doing: &'static str) -> Result<()> {
        let fault = || Err(Error::new(doing, std::io::Error::from_raw_os_error(libc::EFAULT)));
        if self.is_broken() { fault() } else { Ok(()) }
    }

    /// Which pages of `range` are in memory, with a lowest bit of 1 for each that is. They have content; a page that is
    /// not may have been swapped out, or be in huge pages of hugetlbfs that nobody here has touched. Nothing is
    /// allocated by looking. Of a file that this process neither owns nor may write, the kernel says that all are. See
    /// mincore(2).
    ///
    /// # Errors
    /// `EAGAIN`, `ENOMEM`: the kernel has no memory left for the look.
    ///
    /// # Panics
    /// If `range` is not within the mapping, does not begin at a page, or has not one page for each of `pages`.
    pub fn in_memory(&self, range: Range<u64>, pages: &mut [u8]) -> Result<()> {
        let (at, bytes) = self.within(range);
        assert_eq!(bytes.div_ceil(rustix::param::page_size()), pages.len(), "a byte for each page");
        // SAFETY: the range is of this mapping, and the kernel writes a byte for each of its pages to `pages`.
        match unsafe { libc::mincore(at.cast(), bytes, pages.as_mut_ptr()) } {
            0 => Ok(()),
            _ => Err(Error::new("look which pages of a RAM file are in memory", std::io::Error::last_os_error())),
        }
    }

    fn advise(&self, range: Range<u64>, advice: Advice, doing: &'static str) -> Result<()> {
        let (at, bytes) = self.within(range);
        // SAFETY: the range is of this mapping. No advice that is used here changes its contents: it is shared, and the
        // file keeps them.
        unsafe { rustix::mm::madvise(at.cast(), bytes, advice) }.map_err(|error| Error::new(doing, error))
    }

    /// Address and length of `range`.
    fn within(&self, range: Range<u64>) -> (*mut u8, usize) {
        assert!(
            range.start <= range.end && range.end <= self.bytes as u64,
            "{range:?} is not within a mapping of {} bytes",
            self.bytes
        );
        (self.base.as_ptr().wrapping_add(range.start as usize), (range.end - range.start) as usize)
    }
}

impl Drop for SharedMapping {
    fn drop(&mut self) {
        self.slot.give_back();
        // SAFETY: the mapping is of exactly this extent, and everything that points into it borrows from `self`.
        let result = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
        debug_assert!(result.is_ok(), "unmapping a mapping of one's own succeeds");
    }
}

/// Copies memory that others may change meanwhile, each word read once, into all of `out`.
///
/// # Safety
/// As many bytes as `out` has are mapped readable from `from` on.
pub(crate) unsafe fn copy_changing(from: *const u8, out: &mut [u8]) {
    let ahead = from.align_offset(WORD).min(out.len());
    let (head, rest) = out.split_at_mut(ahead);
    let (words, tail) = rest.as_chunks_mut::<WORD>();
    let first = from.wrapping_add(ahead).cast::<Word>();
    let behind = first.wrapping_add(words.len()).cast::<u8>();
    for (index, word) in words.iter_mut().enumerate() {
        // SAFETY: an aligned word of the caller's memory, and a word's room wherever that is aligned.
        unsafe { word.as_mut_ptr().cast::<Word>().write_unaligned(first.add(index).read_volatile()) }
    }
    for (from, out) in [(from, head), (behind, tail)] {
        for (index, byte) in out.iter_mut().enumerate() {
            // SAFETY: a byte of the caller's memory, before its first whole word or behind its last.
            *byte = unsafe { from.add(index).read_volatile() };
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn all_zero(words: [Word; 8]) -> bool {
    use core::arch::x86_64::{_mm_cmpeq_epi8, _mm_movemask_epi8, _mm_or_si128, _mm_setzero_si128};
    let [a, b, c, d, e, f, g, h] = words;
    // SAFETY: SSE2, which these take, is part of every x86-64 processor.
    unsafe {
        let any = _mm_or_si128(
            _mm_or_si128(_mm_or_si128(a, b), _mm_or_si128(c, d)),
            _mm_or_si128(_mm_or_si128(e, f), _mm_or_si128(g, h)),
        );
        _mm_movemask_epi8(_mm_cmpeq_epi8(any, _mm_setzero_si128())) == 0xFFFF
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn all_zero(words: [Word; 8]) -> bool {
    words.into_iter().fold(0, |a, b| a | b) == 0
}
