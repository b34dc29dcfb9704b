//! Private memory of this process.

use std::ops::Range;
use std::os::fd::AsFd;
use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::copy_changing;
use crate::error::{Error, Result};

/// How all of it is mapped.
const ACCESS: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

/// Private memory of this process, anonymous at first, as a VMM has it for its guest; unmapped when dropped. Ranges are
/// offsets, bytes. Others may change it meanwhile ([`ProcessMemory`](crate::process::ProcessMemory), userfaultfd): it
/// is never lent as a slice.
#[derive(Debug)]
pub struct PrivateMapping {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it owns its mapping, which is valid on every thread; accesses are volatile, never references.
unsafe impl Send for PrivateMapping {}
// SAFETY: as above: another thread may write there, and no access assumes that the memory stays as it is.
unsafe impl Sync for PrivateMapping {}

impl PrivateMapping {
    /// Maps `bytes`, whole pages, in small pages. Nothing is allocated.
    ///
    /// # Errors
    /// `EINVAL`: `bytes` is 0; `ENOMEM`: no address space left.
    pub fn new(bytes: u64) -> Result<Self> {
        let failed = |error: std::io::Error| Error::new("map private memory", error);
        let length = usize::try_from(bytes).map_err(|_| failed(std::io::ErrorKind::OutOfMemory.into()))?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: the kernel chooses an address where nothing is mapped.
        let base = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), length, ACCESS, flags) };
        let base = base.map_err(|error| failed(error.into()))?;
        let base = NonNull::new(base.cast()).ok_or_else(|| failed(std::io::ErrorKind::OutOfMemory.into()))?;
        let mapping = Self { base, bytes: length };
        mapping.keep_small(0..bytes);
        Ok(mapping)
    }

    /// Where it lies in this process.
    #[must_use]
    pub fn addresses(&self) -> Range<u64> {
        let base = self.base.as_ptr() as u64;
        base..base + self.bytes as u64
    }

    /// Copies what is at `offset` and behind as it is now.
    ///
    /// # Panics
    /// If that is not within the mapping.
    pub fn read(&self, offset: u64, out: &mut [u8]) {
        let from = self.within(offset..offset + out.len() as u64);
        // SAFETY: `from` is within the mapping, and so is all that is read from there on.
        unsafe { copy_changing(from, out) }
    }

    /// Copies `bytes` to `offset` and behind.
    ///
    /// # Panics
    /// If that is not within the mapping.
    pub fn write(&self, offset: u64, bytes: &[u8]) {
        let to = self.within(offset..offset + bytes.len() as u64);
        for (index, byte) in bytes.iter().enumerate() {
            // SAFETY: a byte within the mapping.
            unsafe { to.add(index).write_volatile(*byte) }
        }
    }

    /// Gives pages back to the kernel (`MADV_DONTNEED`): they read as zeros, or as the file that was
    /// mapped there.
    ///
    /// # Errors
    /// `EINVAL`: the range is locked or not aligned to pages.
    ///
    /// # Panics
    /// If `range` is not within the mapping.
    pub fn discard(&self, range: Range<u64>) -> Result<()> {
        self.advise(range, Advice::LinuxDontNeed, "give private memory back")
    }

    /// Maps a part of a file privately from `offset` on, as a VMM's RAM begins as a template: what is written there
    /// stays this process's own.
    ///
    /// # Errors
    /// The file cannot be mapped.
    ///
    /// # Panics
    /// If that is not within the mapping, or not whole pages.
    pub fn lay(&self, offset: u64, file: impl AsFd, part: Range<u64>) -> Result<()> {
        let at = self.whole_pages(offset..offset + (part.end - part.start));
        let (length, flags) = ((part.end - part.start) as usize, MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: in the place of a part of this mapping, into which there are no references.
        let mapped = unsafe { rustix::mm::mmap(at.cast(), length, ACCESS, flags | MapFlags::FIXED, file, part.start) };
        mapped.map_err(|error| Error::new("map a file over private memory", error))?;
        self.keep_small(offset..offset + length as u64);
        Ok(())
    }

    /// Makes anonymous memory of a part, in one step: it reads as zeros, and no file stands behind it.
    ///
    /// # Errors
    /// `ENOMEM`: there are too many mappings.
    ///
    /// # Panics
    /// As [`lay`](Self::lay).
    pub fn renew(&self, range: Range<u64>) -> Result<()> {
        let (at, length) = (self.whole_pages(range.clone()), (range.end - range.start) as usize);
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: as in `lay`.
        let mapped = unsafe { rustix::mm::mmap_anonymous(at.cast(), length, ACCESS, flags) };
        mapped.map_err(|error| Error::new("map private memory", error))?;
        self.keep_small(range);
        Ok(())
    }

    /// A kernel without huge pages refuses, and has none to give.
    fn keep_small(&self, range: Range<u64>) {
        let _ = self.advise(range, Advice::LinuxNoHugepage, "refuse huge pages");
    }

    fn whole_pages(&self, range: Range<u64>) -> *mut u8 {
        let whole = range.start.is_multiple_of(crate::PAGE_BYTES) && range.end.is_multiple_of(crate::PAGE_BYTES);
        assert!(whole, "{range:?} is not whole pages");
        self.within(range)
    }

    fn advise(&self, range: Range<u64>, advice: Advice, doing: &'static str) -> Result<()> {
        let (at, bytes) = (self.within(range.clone()), (range.end - range.start) as usize);
        // SAFETY: the range is of this mapping, into which there are no references.
        unsafe { rustix::mm::madvise(at.cast(), bytes, advice) }.map_err(|error| Error::new(doing, error))
    }

    fn within(&self, range: Range<u64>) -> *mut u8 {
        let inside = range.start <= range.end && range.end <= self.bytes as u64;
        assert!(inside, "{range:?} is not within a mapping of {} bytes", self.bytes);
        self.base.as_ptr().wrapping_add(range.start as usize)
    }
}

impl Drop for PrivateMapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is of exactly this extent, and nothing points into it.
        let result = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
        debug_assert!(result.is_ok(), "unmapping a mapping of one's own succeeds");
    }
}
