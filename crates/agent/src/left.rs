//! Mappings that are moved out of the way while the guest stands still, to be unmapped when it runs.
//!
//! To unmap RAM the kernel goes through all of its page tables, and frees its pages. To move it takes a fraction of
//! that time: whole tables at once, or without freeing anything. Nobody else knows where it is then.

use core::ffi::c_void;

use libc::c_int;

use crate::private::SMALL_PAGE;
use crate::raw::{self, errno};

/// What a page table of each level covers, bytes: a mapping moves table by table where both places lie alike in one.
const TABLES: [u64; 2] = [1 << 30, 2 << 20];

/// Address space for what is moved out of the way; unmapped when this is dropped.
pub struct Left {
    start: u64,
    length: u64,
    /// What address 0 would be moved to.
    by: u64,
}

impl Left {
    /// Address space for mappings among these addresses. The error is an `errno`.
    pub fn reserve(like: u64, length: u64) -> Result<Self, c_int> {
        let table = TABLES.into_iter().find(|table| length >= *table).unwrap_or(SMALL_PAGE);
        let all = length.checked_add(table).ok_or(libc::EINVAL)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe { raw::mmap(core::ptr::null_mut(), all as usize, libc::PROT_NONE, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(errno());
        }
        let start = start as u64;
        // A table covers a power of two.
        let first = start.wrapping_add(like.wrapping_sub(start) & table.wrapping_sub(1));
        Ok(Self { start, length: all, by: first.wrapping_sub(like) })
    }

    /// Moves a mapping here, all or nothing of it. The error is an `errno`.
    ///
    /// # Safety
    /// Nobody uses the addresses, which are among those that this was reserved for, until something else is mapped
    /// there. They lie in one mapping, or in mappings that are registered with a userfaultfd: of several others the
    /// kernel might move some.
    pub unsafe fn take(&self, address: u64, length: u64) -> Result<(), c_int> {
        // SAFETY: the caller's promise; the other place is reserved.
        unsafe { raw::move_mapping(address, length as usize, address.wrapping_add(self.by)) }
    }

    /// Moves back what was moved here from there; what is mapped there meanwhile goes. The error is an `errno`.
    ///
    /// # Safety
    /// As [`take`](Self::take), and it was taken.
    pub unsafe fn give_back(&self, address: u64, length: u64) -> Result<(), c_int> {
        // SAFETY: the caller's promise.
        unsafe { raw::move_mapping(address.wrapping_add(self.by), length as usize, address) }
    }
}

impl Drop for Left {
    fn drop(&mut self) {
        // SAFETY: address space of this library's own, which nobody else knows.
        unsafe { raw::munmap(self.start as *mut c_void, self.length as usize) };
    }
}
