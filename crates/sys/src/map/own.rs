//! Private memory of this process.

use std::ops::Range;
use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::copy_changing;
use crate::error::{Error, Result};

/// Private anonymous memory of this process, as a VMM has it for its guest; unmapped when dropped. Ranges are offsets,
/// bytes. Others may change it meanwhile ([`ProcessMemory`](crate::process::ProcessMemory), userfaultfd): it is never
/// lent as a slice.
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
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: the kernel chooses an address where nothing is mapped.
        let base = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), length, protection, flags) };
        let base = base.map_err(|error| failed(error.into()))?;
        let base = NonNull::new(base.cast()).ok_or_else(|| failed(std::io::ErrorKind::OutOfMemory.into()))?;
        let mapping = Self { base, bytes: length };
        // A kernel without huge pages refuses, and has none to give.
        let _ = mapping.advise(0..bytes, Advice::LinuxNoHugepage, "refuse huge pages");
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

    /// Gives pages back to the kernel (`MADV_DONTNEED`): they read as zeros.
    ///
    /// # Errors
    /// `EINVAL`: the range is locked or not aligned to pages.
    ///
    /// # Panics
    /// If `range` is not within the mapping.
    pub fn discard(&self, range: Range<u64>) -> Result<()> {
        self.advise(range, Advice::LinuxDontNeed, "give private memory back")
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
