//! The libc functions that QEMU calls through this library.
//!
//! Each makes the real call and then notes what that meant for guest RAM; `errno` stays as the real call left it. For
//! [`private`] RAM, `mmap` and `madvise` do not do all that QEMU asks for. Some functions are not interposed, because
//! they take nothing from guest RAM: `posix_fallocate` (allocates), `posix_madvise` (libc ignores its DONTNEED),
//! `mremap` (QEMU does not move RAM).

use libc::{c_int, c_void, off_t};
use sterna_agent_protocol::MIN_BLOCK_BYTES;
use sterna_agent_protocol::message::{Block, PATH_BYTES};

use crate::blocks::BLOCKS;
use crate::private::{self, Plan};
use crate::raw::{self, KeepErrno};
use crate::{areas, discards, entry, remap, server, transfers};

/// `mmap(2)`.
///
/// # Safety
/// As `mmap(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn mmap(
    address: *mut c_void,
    length: usize,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> *mut c_void {
    if !entry::is_active() {
        // SAFETY: the caller's promise.
        return unsafe { raw::mmap(address, length, protection, flags, fd, offset) };
    }
    let block = guest_ram(length as u64, protection, flags, fd, offset as u64);
    let plan = block.as_ref().map_or(Plan::AsAsked, private::plan);
    // Before anything is changed, so that what was mapped there is as it was.
    if plan == Plan::Refuse {
        raw::set_errno(libc::EINVAL);
        return libc::MAP_FAILED;
    }
    if flags & libc::MAP_FIXED != 0 {
        remap::before_unmap(address as u64, whole_pages(length));
    }
    let map = if plan == Plan::Anonymous { private::map } else { raw::mmap };
    // SAFETY: the caller's promise.
    let mapped = unsafe { map(address, length, protection, flags, fd, offset) };
    if mapped != libc::MAP_FAILED
        && let Some(block) = block
    {
        let _keep = KeepErrno::new();
        BLOCKS.add(&match plan {
            Plan::Anonymous => private::mapped_at(mapped, &block),
            _ => Block { address: (mapped as u64).into(), ..block },
        });
        // Before anything is read into it.
        transfers::create();
        server::start();
    }
    mapped
}

/// `mmap(2)` under its name for large files.
///
/// # Safety
/// As `mmap(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn mmap64(
    address: *mut c_void,
    length: usize,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> *mut c_void {
    // SAFETY: the caller's promise.
    unsafe { mmap(address, length, protection, flags, fd, offset) }
}

/// `munmap(2)`.
///
/// # Safety
/// As `munmap(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn munmap(address: *mut c_void, length: usize) -> c_int {
    // The kernel refuses an address that is not at the border of a page, and then unmaps nothing.
    if entry::is_active() && (address as u64).is_multiple_of(SMALLEST_PAGE) {
        remap::before_unmap(address as u64, whole_pages(length));
    }
    // SAFETY: the caller's promise.
    unsafe { raw::munmap(address, length) }
}

/// `madvise(2)`.
///
/// # Safety
/// As `madvise(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn madvise(address: *mut c_void, length: usize, advice: c_int) -> c_int {
    if entry::is_active() && private::leaves_out(address as u64, whole_pages(length), advice) {
        return 0;
    }
    // SAFETY: the caller's promise.
    let result = unsafe { raw::madvise(address, length, advice) };
    // A failed call may have done a part of its work.
    if entry::is_active() && length > 0 {
        let _keep = KeepErrno::new();
        let (at, whole) = (address as u64, whole_pages(length));
        if discards::drops(advice) {
            areas::leave_zeros(at, whole);
        } else if result == 0 {
            private::note_advice(at, whole, advice);
        }
        discards::after_madvise(at, whole, advice, result == 0);
    }
    result
}

/// `fallocate(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub extern "C" fn fallocate(fd: c_int, mode: c_int, offset: off_t, length: off_t) -> c_int {
    let result = raw::fallocate(fd, mode, offset, length);
    if entry::is_active() && offset >= 0 && length > 0 {
        let _keep = KeepErrno::new();
        discards::after_fallocate(fd, mode, offset, length);
    }
    result
}

/// `fallocate(2)` under its name for large files.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub extern "C" fn fallocate64(fd: c_int, mode: c_int, offset: off_t, length: off_t) -> c_int {
    fallocate(fd, mode, offset, length)
}

/// The smallest page: every page size is a multiple of it.
const SMALLEST_PAGE: u64 = 4096;

/// A length rounded up to whole pages, as the kernel does it.
fn whole_pages(length: usize) -> u64 {
    (length as u64).checked_next_multiple_of(SMALLEST_PAGE).unwrap_or(u64::MAX)
}

/// The block of a mapping that is to be made, without its address, if it is large and writable and its file lies on
/// tmpfs or hugetlbfs.
fn guest_ram(length: u64, protection: c_int, flags: c_int, fd: c_int, offset: u64) -> Option<Block> {
    let of_a_file = fd >= 0 && flags & libc::MAP_ANONYMOUS == 0;
    if !of_a_file || length < MIN_BLOCK_BYTES || protection & libc::PROT_WRITE == 0 {
        return None;
    }
    let _keep = KeepErrno::new();
    // SAFETY: all-zero is valid for both.
    let (mut system, mut status): (libc::statfs, libc::stat) = unsafe { core::mem::zeroed() };
    // SAFETY: writes the two structs only.
    if unsafe { libc::fstatfs(fd, &mut system) != 0 || libc::fstat(fd, &mut status) != 0 } {
        return None;
    }
    if !matches!(system.f_type, libc::TMPFS_MAGIC | libc::HUGETLBFS_MAGIC) {
        return None;
    }
    let (path, path_length) = path_of(fd);
    Some(Block {
        address: 0.into(),
        length: length.into(),
        offset: offset.into(),
        device: status.st_dev.into(),
        inode: status.st_ino.into(),
        page_size: (system.f_bsize as u64).into(),
        flags: flags.unsigned_abs().into(),
        path_length: path_length.into(),
        path,
    })
}

/// The kernel's name of the file: its first bytes, and its whole length up to `PATH_MAX`.
fn path_of(fd: c_int) -> ([u8; PATH_BYTES], u32) {
    const BEFORE: &[u8] = b"/proc/self/fd/";
    let mut link = [0u8; 32];
    let mut end = link.len() - 1;
    let mut rest = fd.unsigned_abs();
    // The number has at most ten digits. The directory is before them, and a zero after them.
    while let Some(digit) = end.checked_sub(1).and_then(|place| link.get_mut(place)) {
        *digit = b'0' + (rest % 10) as u8;
        end -= 1;
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    let start = end.saturating_sub(BEFORE.len());
    if let Some(room) = link.get_mut(start..end) {
        room.iter_mut().zip(BEFORE).for_each(|(to, from)| *to = *from);
    }
    let mut long = [0u8; libc::PATH_MAX as usize];
    let mut path = [0u8; PATH_BYTES];
    let Some(link) = link.get(start..) else { return (path, 0) };
    // SAFETY: `link` ends with a zero; the kernel writes at most the length given.
    let length = unsafe { libc::readlink(link.as_ptr().cast(), long.as_mut_ptr().cast(), long.len()) };
    let long = usize::try_from(length).ok().and_then(|length| long.get(..length)).unwrap_or_default();
    path.iter_mut().zip(long).for_each(|(to, from)| *to = *from);
    (path, long.len() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    #[test]
    fn a_file_is_known_by_its_path() {
        let file = std::fs::File::open("/proc/self/comm").expect("procfs is mounted");
        let (path, length) = path_of(file.as_raw_fd());
        let expected = format!("/proc/{}/comm", std::process::id());
        assert_eq!(&path[..length as usize], expected.as_bytes());
    }

    #[test]
    fn no_descriptor_has_no_path() {
        assert_eq!(path_of(c_int::MAX).1, 0);
    }
}
