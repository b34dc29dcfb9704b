//! The functions of libc, libaio and liburing by which QEMU reads into guest RAM.
//!
//! They do what they always do; meanwhile the [table of transfers](crate::transfers) says that they do. `read(2)` and
//! `readv(2)` are not here: QEMU uses them for its own memory and for sockets, from which the kernel copies. Nor is
//! `ioctl(2)`: devices that pass SCSI commands through are known by their type. What goes through io_uring ends without
//! a call, and in a ring that QEMU reads by inlined code: one such read, and nothing is known any more.

use core::ffi::CStr;
use core::ptr;
use core::sync::atomic::{AtomicPtr, Ordering};

use libc::{c_int, c_long, c_uint, c_void, iovec, off_t, ssize_t};

use crate::transfers::{self, Read, Request};
use crate::{entry, raw};

/// `pread(2)`.
///
/// # Safety
/// As `pread(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn pread(fd: c_int, buffer: *mut c_void, length: usize, offset: off_t) -> ssize_t {
    let _read = noted(&[iovec { iov_base: buffer, iov_len: length }]);
    // SAFETY: the caller's promise.
    unsafe { libc::syscall(libc::SYS_pread64, fd, buffer, length, offset) as ssize_t }
}

/// `pread(2)` under its name for large files.
///
/// # Safety
/// As `pread(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn pread64(fd: c_int, buffer: *mut c_void, length: usize, offset: off_t) -> ssize_t {
    // SAFETY: the caller's promise.
    unsafe { pread(fd, buffer, length, offset) }
}

/// `preadv(2)`.
///
/// # Safety
/// As `preadv(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn preadv(fd: c_int, buffers: *const iovec, count: c_int, offset: off_t) -> ssize_t {
    // SAFETY: the caller's promise.
    let _read = noted(unsafe { slice(buffers, count) });
    // SAFETY: the caller's promise. The upper half of an offset means nothing where a half has 64 bits.
    unsafe { libc::syscall(libc::SYS_preadv, fd, buffers, count, offset, 0usize) as ssize_t }
}

/// `preadv(2)` under its name for large files.
///
/// # Safety
/// As `preadv(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn preadv64(fd: c_int, buffers: *const iovec, count: c_int, offset: off_t) -> ssize_t {
    // SAFETY: the caller's promise.
    unsafe { preadv(fd, buffers, count, offset) }
}

/// `preadv2(2)`.
///
/// # Safety
/// As `preadv2(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn preadv2(
    fd: c_int,
    buffers: *const iovec,
    count: c_int,
    offset: off_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: the caller's promise.
    let _read = noted(unsafe { slice(buffers, count) });
    // SAFETY: as in `preadv`.
    unsafe { libc::syscall(libc::SYS_preadv2, fd, buffers, count, offset, 0usize, flags) as ssize_t }
}

/// `preadv2(2)` under its name for large files.
///
/// # Safety
/// As `preadv2(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn preadv64v2(
    fd: c_int,
    buffers: *const iovec,
    count: c_int,
    offset: off_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: the caller's promise.
    unsafe { preadv2(fd, buffers, count, offset, flags) }
}

/// libaio's `io_submit(3)`: as the system call, but the error comes back as a negative number.
///
/// # Safety
/// As `io_submit(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn io_submit(context: *mut c_void, count: c_long, requests: *mut *mut c_void) -> c_int {
    let submit = || {
        let _keep = raw::KeepErrno::new();
        // SAFETY: the caller's promise.
        let taken = unsafe { libc::syscall(libc::SYS_io_submit, context, count, requests) };
        if taken < 0 { -raw::errno() } else { taken as c_int }
    };
    let all = usize::try_from(count).unwrap_or(0);
    if !entry::is_active() || requests.is_null() || all == 0 {
        return submit();
    }
    // SAFETY: the caller's promise.
    let requests = unsafe { core::slice::from_raw_parts(requests.cast::<*const Request>(), all) };
    // SAFETY: the caller's promise.
    unsafe { transfers::queue(context as u64, requests, submit) }
}

/// libaio's `io_destroy(3)`: as the system call, but the error comes back as a negative number.
///
/// # Safety
/// As `io_destroy(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn io_destroy(context: *mut c_void) -> c_int {
    if entry::is_active() {
        // Its ring goes with it.
        transfers::forget(context as u64);
    }
    let _keep = raw::KeepErrno::new();
    // SAFETY: the caller's promise.
    let done = unsafe { libc::syscall(libc::SYS_io_destroy, context) };
    if done < 0 { -raw::errno() } else { 0 }
}

/// liburing's `io_uring_submit(3)`.
///
/// # Safety
/// As `io_uring_submit(3)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn io_uring_submit(ring: *mut Uring) -> c_int {
    static REAL: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
    // SAFETY: the caller's promise.
    unsafe { look_at(ring) };
    let Some(real) = real(&REAL, c"io_uring_submit") else { return -libc::ENOSYS };
    // SAFETY: the function of this name has this type; the caller's promise.
    unsafe { core::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut Uring) -> c_int>(real)(ring) }
}

/// liburing's `io_uring_submit_and_wait(3)`.
///
/// # Safety
/// As `io_uring_submit_and_wait(3)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn io_uring_submit_and_wait(ring: *mut Uring, wait: c_uint) -> c_int {
    static REAL: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
    // SAFETY: the caller's promise.
    unsafe { look_at(ring) };
    let Some(real) = real(&REAL, c"io_uring_submit_and_wait") else { return -libc::ENOSYS };
    // SAFETY: as above.
    unsafe { core::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut Uring, c_uint) -> c_int>(real)(ring, wait) }
}

/// The beginning of liburing's `struct io_uring`, which its versions 2 have in common.
#[repr(C)]
pub struct Uring {
    others: [*const c_uint; 2],
    mask: *const c_uint,
    more: [*const c_uint; 4],
    entries: *const UringEntry,
    head: c_uint,
    tail: c_uint,
}

/// What is asked of io_uring (`struct io_uring_sqe`).
#[repr(C)]
struct UringEntry {
    opcode: u8,
    rest: [u8; 63],
}

/// What reads into memory past the page tables, or may: `READV`, `READ_FIXED`, `READ`, `URING_CMD`, `READV_FIXED`.
const READS: [u8; 5] = [1, 4, 22, 46, 60];

/// Looks at what is about to be submitted.
///
/// # Safety
/// As `io_uring_submit(3)`.
unsafe fn look_at(ring: *const Uring) {
    if !entry::is_active() {
        return;
    }
    // SAFETY: the caller's promise.
    let Some((ring, mask)) = (unsafe { ring.as_ref().and_then(|ring| Some((ring, *ring.mask.as_ref()?))) }) else {
        return transfers::lose_track();
    };
    let (mut at, mut looked) = (ring.head, 0);
    while at != ring.tail && looked <= mask {
        // SAFETY: entries have `mask` + 1 places.
        if READS.contains(unsafe { &(*ring.entries.add((at & mask) as usize)).opcode }) {
            return transfers::lose_track();
        }
        (at, looked) = (at.wrapping_add(1), looked + 1);
    }
}

/// The function of this name that this library stands before.
fn real(known: &AtomicPtr<c_void>, name: &CStr) -> Option<*mut c_void> {
    let mut real = known.load(Ordering::Relaxed);
    if real.is_null() {
        // SAFETY: the name is a string.
        real = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
        known.store(real, Ordering::Relaxed);
    }
    (!real.is_null()).then_some(real)
}

/// Notes a read into these buffers, where the library is meant for this process.
fn noted(buffers: &[iovec]) -> Option<Read> {
    entry::is_active().then(|| Read::begin(buffers))
}

/// The descriptions of buffers; none where the kernel will refuse them.
///
/// # Safety
/// As `preadv(2)`.
unsafe fn slice<'a>(buffers: *const iovec, count: c_int) -> &'a [iovec] {
    match usize::try_from(count) {
        // SAFETY: the caller's promise.
        Ok(count @ 1..=1024) if !buffers.is_null() => unsafe { core::slice::from_raw_parts(buffers, count) },
        _ => &[],
    }
}
