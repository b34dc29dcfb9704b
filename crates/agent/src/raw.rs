//! System calls past libc's wrappers, `errno`, descriptors.
//!
//! The hooks replace libc's functions, so they cannot call these. Also, a direct call works before any other library is
//! ready.

use core::ffi::CStr;
use core::ptr;

use libc::{c_int, c_long, c_void, off_t};

/// `mmap`, called directly. Sets `errno`.
///
/// # Safety
/// As `mmap(2)`.
pub unsafe fn mmap(
    address: *mut c_void,
    length: usize,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> *mut c_void {
    // SAFETY: the caller's promise; -1 is MAP_FAILED.
    unsafe { libc::syscall(libc::SYS_mmap, address, length, protection, flags, fd, offset) as *mut c_void }
}

/// `munmap`, called directly. Sets `errno`.
///
/// # Safety
/// As `munmap(2)`.
pub unsafe fn munmap(address: *mut c_void, length: usize) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { libc::syscall(libc::SYS_munmap, address, length) as c_int }
}

/// `mremap` to another place, whatever was mapped there. The error is an `errno`; then nothing was moved.
///
/// # Safety
/// As `mremap(2)`.
pub unsafe fn move_mapping(from: u64, length: usize, to: u64) -> Result<(), c_int> {
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: the caller's promise.
    let moved = unsafe { libc::syscall(libc::SYS_mremap, from, length, length, flags, to) };
    if moved < 0 { Err(errno()) } else { Ok(()) }
}

/// `madvise`, called directly. Sets `errno`.
///
/// # Safety
/// As `madvise(2)`.
pub unsafe fn madvise(address: *mut c_void, length: usize, advice: c_int) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { libc::syscall(libc::SYS_madvise, address, length, advice) as c_int }
}

/// `fallocate`, called directly. Sets `errno`.
pub fn fallocate(fd: c_int, mode: c_int, offset: off_t, length: off_t) -> c_int {
    // SAFETY: touches no memory of ours.
    unsafe { libc::syscall(libc::SYS_fallocate, fd, mode, offset, length) as c_int }
}

/// The calling thread's `errno`.
pub fn errno() -> c_int {
    // SAFETY: the location is the calling thread's own and always valid.
    unsafe { *libc::__errno_location() }
}

/// Sets the calling thread's `errno`.
pub fn set_errno(errno: c_int) {
    // SAFETY: as in `errno`.
    unsafe { *libc::__errno_location() = errno }
}

/// Restores `errno` when dropped: the caller must not notice what a hook does after the real call.
pub struct KeepErrno(c_int);

impl KeepErrno {
    /// Keeps the present `errno`.
    pub fn new() -> Self {
        Self(errno())
    }
}

impl Drop for KeepErrno {
    fn drop(&mut self) {
        set_errno(self.0);
    }
}

/// A descriptor, closed when dropped.
pub struct Fd(c_int);

impl Fd {
    /// Takes over the descriptor that a system call returned. A negative result is an error, whose `errno` is returned.
    pub fn from_call(result: c_long) -> Result<Self, c_int> {
        if result < 0 { Err(errno()) } else { Ok(Self(result as c_int)) }
    }

    /// The descriptor's number.
    pub fn number(&self) -> c_int {
        self.0
    }
}

impl Drop for Fd {
    fn drop(&mut self) {
        // SAFETY: owned, so nobody else closes it.
        unsafe { libc::close(self.0) };
    }
}

/// Zeroed memory for a `T` that the daemon reads: mapped for ever, and the number of its memfd, which stays open. The
/// error is an `errno`.
///
/// # Safety
/// All-zero is a valid `T`, which is changed only as a `T` that is shared.
pub unsafe fn shared_memory<T>(name: &CStr) -> Result<(&'static T, c_int), c_int> {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: the name is a string. (Not memfd_create: older libcs lack it.)
    let memory = Fd::from_call(unsafe { libc::syscall(libc::SYS_memfd_create, name.as_ptr(), flags) })?;
    // SAFETY: touches no memory of ours.
    if unsafe { libc::ftruncate(memory.number(), size_of::<T>() as off_t) } != 0 {
        return Err(errno());
    }
    // The daemon accepts no memory whose size can still change.
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    // SAFETY: touches no memory of ours.
    if unsafe { libc::fcntl(memory.number(), libc::F_ADD_SEALS, seals) } != 0 {
        return Err(errno());
    }
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let mapped = unsafe { mmap(ptr::null_mut(), size_of::<T>(), protection, libc::MAP_SHARED, memory.number(), 0) };
    if mapped == libc::MAP_FAILED {
        return Err(errno());
    }
    let number = memory.number();
    core::mem::forget(memory);
    // SAFETY: zeroed memory of a T's size, page-aligned, never unmapped; the caller's promise for the rest.
    Ok((unsafe { &*mapped.cast::<T>() }, number))
}

/// What the kernel says of a file.
pub fn status(file: &Fd) -> Result<libc::stat, c_int> {
    // SAFETY: all-zero is a valid stat.
    let mut status: libc::stat = unsafe { core::mem::zeroed() };
    // SAFETY: writes `status` only.
    if unsafe { libc::fstat(file.number(), &mut status) } == 0 { Ok(status) } else { Err(errno()) }
}

/// Makes the number of another open descriptor stand for this file. It is closed in programs that are started.
pub fn replace(file: &Fd, number: c_int) -> Result<(), c_int> {
    // SAFETY: touches no memory of ours. A number that is not open is refused, so that none is made here.
    let result = unsafe {
        match libc::fcntl(number, libc::F_GETFD) {
            -1 => -1,
            _ => libc::dup3(file.number(), number, libc::O_CLOEXEC),
        }
    };
    if result < 0 { Err(errno()) } else { Ok(()) }
}

/// The process's number.
pub fn process_id() -> c_int {
    // SAFETY: always succeeds.
    unsafe { libc::getpid() }
}

/// The kernel's number of the calling thread.
pub fn thread_id() -> c_int {
    // SAFETY: always succeeds.
    unsafe { libc::syscall(libc::SYS_gettid) as c_int }
}

/// Lets other threads run.
pub fn yield_now() {
    // SAFETY: always succeeds.
    unsafe { libc::sched_yield() };
}

/// Sleeps for this time.
pub fn sleep_ms(milliseconds: u32) {
    let time = libc::timespec {
        tv_sec: libc::time_t::from(milliseconds / 1000),
        tv_nsec: c_long::from(milliseconds % 1000) * 1_000_000,
    };
    // SAFETY: reads `time` only; no remainder wanted.
    unsafe { libc::nanosleep(&time, core::ptr::null_mut()) };
}

/// Ends only the calling thread.
#[cfg(not(test))]
pub fn end_thread() -> ! {
    loop {
        // SAFETY: SYS_exit ends one thread; it holds no lock of libc's.
        unsafe { libc::syscall(libc::SYS_exit, 0) };
    }
}

/// Writes one line to standard error: what failed, and the `errno`.
pub fn complain(what: &str, errno: c_int) {
    let mut digits = [b'0'; 10];
    let mut rest = errno.unsigned_abs();
    let mut used = 0;
    for digit in digits.iter_mut().rev() {
        *digit = b'0' + (rest % 10) as u8;
        rest /= 10;
        used += 1;
        if rest == 0 {
            break;
        }
    }
    let number = digits.get(digits.len() - used..).unwrap_or_default();
    let parts = ["sterna-agent: ".as_bytes(), what.as_bytes(), b": errno ", number, b"; QEMU goes on without it\n"]
        .map(|part| libc::iovec { iov_base: part.as_ptr() as *mut c_void, iov_len: part.len() });
    // SAFETY: the parts outlive the call, which only reads them.
    unsafe { libc::writev(libc::STDERR_FILENO, parts.as_ptr(), parts.len() as c_int) };
}
