//! Structures and ioctl numbers of the kernel's interface, checked at compile time.
//!
//! The structures come from `linux-raw-sys`, generated from the kernel's own headers. The numbers are computed with the
//! kernel's `_IOWR` formula from group, number and size of the structure, and compared with the numbers that the
//! headers yield: a structure of a wrong size does not compile.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

pub(crate) use linux_raw_sys::general::{
    page_region, pm_scan_arg, uffd_msg, uffdio_api, uffdio_continue, uffdio_copy, uffdio_range, uffdio_register,
    uffdio_writeprotect, uffdio_zeropage,
};
use linux_raw_sys::{general, ioctl as numbers};
use rustix::ioctl::{Opcode, opcode};

const UFFD: u8 = general::UFFDIO as u8;

pub(crate) const UFFDIO_API: Opcode = opcode::read_write::<uffdio_api>(UFFD, general::_UFFDIO_API as u8);
pub(crate) const UFFDIO_REGISTER: Opcode = opcode::read_write::<uffdio_register>(UFFD, general::_UFFDIO_REGISTER as u8);
pub(crate) const UFFDIO_UNREGISTER: Opcode = opcode::read::<uffdio_range>(UFFD, general::_UFFDIO_UNREGISTER as u8);
pub(crate) const UFFDIO_WAKE: Opcode = opcode::read::<uffdio_range>(UFFD, general::_UFFDIO_WAKE as u8);
pub(crate) const UFFDIO_COPY: Opcode = opcode::read_write::<uffdio_copy>(UFFD, general::_UFFDIO_COPY as u8);
pub(crate) const UFFDIO_ZEROPAGE: Opcode = opcode::read_write::<uffdio_zeropage>(UFFD, general::_UFFDIO_ZEROPAGE as u8);
pub(crate) const UFFDIO_WRITEPROTECT: Opcode =
    opcode::read_write::<uffdio_writeprotect>(UFFD, general::_UFFDIO_WRITEPROTECT as u8);
pub(crate) const UFFDIO_CONTINUE: Opcode = opcode::read_write::<uffdio_continue>(UFFD, general::_UFFDIO_CONTINUE as u8);
/// `uffdio_writeprotect.mode`: protect, not lift. (Not among the generated constants.)
pub(crate) const UFFDIO_WRITEPROTECT_MODE_WP: u64 = 1;
pub(crate) const UFFDIO_CONTINUE_MODE_WP: u64 = 1 << 1;
/// An ioctl of `/dev/userfaultfd`: makes a new userfaultfd. Its argument is the open flags, not a pointer.
pub(crate) const USERFAULTFD_IOC_NEW: Opcode = opcode::none(UFFD, 0);
/// An ioctl of `/proc/PID/pagemap`: a scan for pages by category.
pub(crate) const PAGEMAP_SCAN: Opcode = opcode::read_write::<pm_scan_arg>(b'f', 16);

const _: () = {
    assert!(UFFDIO_API == numbers::UFFDIO_API);
    assert!(UFFDIO_REGISTER == numbers::UFFDIO_REGISTER);
    assert!(UFFDIO_UNREGISTER == numbers::UFFDIO_UNREGISTER);
    assert!(UFFDIO_WAKE == numbers::UFFDIO_WAKE);
    assert!(UFFDIO_COPY == numbers::UFFDIO_COPY);
    assert!(UFFDIO_ZEROPAGE == numbers::UFFDIO_ZEROPAGE);
    assert!(UFFDIO_WRITEPROTECT == numbers::UFFDIO_WRITEPROTECT);
    assert!(UFFDIO_CONTINUE == numbers::UFFDIO_CONTINUE);
    // The headers' generator leaves these two out. These are the formula's results on architectures with the common
    // encoding.
    assert!(USERFAULTFD_IOC_NEW == 0xAA00);
    assert!(PAGEMAP_SCAN == 0xC060_6610);
    // Sizes that reach the kernel other than through an ioctl number.
    assert!(size_of::<uffd_msg>() == 32);
    assert!(size_of::<page_region>() == 24);
};

/// Calls `ioctl(2)` with a pointer argument, and returns its result.
///
/// # Safety
/// `request` is an ioctl of `fd` whose argument is a `T`, and what `arg` points to is valid for what the kernel does
/// with it.
pub(crate) unsafe fn ioctl<T>(fd: BorrowedFd<'_>, request: Opcode, arg: &mut T) -> io::Result<u32> {
    // SAFETY: `arg` is a live, exclusive reference to the type that `request` takes; the rest is the caller's promise.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), request as libc::Ioctl, std::ptr::from_mut(arg)) };
    u32::try_from(result).map_err(|_| io::Error::last_os_error())
}
