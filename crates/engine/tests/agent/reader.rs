//! Reads into RAM by each of the ways in which QEMU reads, for the program that stands in its place.

use std::fs::File;
use std::os::fd::AsRawFd;

/// Reads so many bytes of a file to an address that is mapped, in one of these ways: `pread`, `preadv`, `preadv2`, or
/// `aio` and `aio-vector` (native AIO). `aio-refused` is a request that the kernel does not take. Returns what the call
/// returned, or what came of the request.
///
/// # Safety
/// Nobody refers to the memory there.
pub unsafe fn read(way: &str, file: &File, address: u64, length: u64) -> i64 {
    let (fd, buffer, bytes) = (file.as_raw_fd(), address as *mut libc::c_void, length as usize);
    // In two parts, of which the second comes first.
    let half = bytes / 2;
    let parts = [
        libc::iovec { iov_base: buffer.wrapping_byte_add(half), iov_len: bytes - half },
        libc::iovec { iov_base: buffer, iov_len: half },
    ];
    // SAFETY: the caller's promise; the descriptions outlive the calls.
    unsafe {
        match way {
            "pread" => libc::pread64(fd, buffer, bytes, 0) as i64,
            "preadv" => libc::preadv64(fd, parts.as_ptr(), 2, 0) as i64,
            "preadv2" => libc::preadv64v2(fd, parts.as_ptr(), 2, 0, 0) as i64,
            "aio" => queued(Request::new(0, fd, buffer as u64, length)),
            "aio-vector" => queued(Request::new(7, fd, parts.as_ptr() as u64, 2)),
            "aio-refused" => queued(Request::new(0, -1, buffer as u64, length)),
            other => panic!("'{other}' is no way to read"),
        }
    }
}

/// `struct iocb`.
#[repr(C)]
struct Request {
    data: u64,
    key: u32,
    flags: u32,
    opcode: u16,
    priority: i16,
    file: i32,
    buffer: u64,
    length: u64,
    offset: i64,
    reserved: u64,
    more_flags: u32,
    event: u32,
}

impl Request {
    fn new(opcode: u16, file: i32, buffer: u64, length: u64) -> Self {
        let (data, key, flags, priority, offset, reserved, more_flags, event) = (0, 0, 0, 0, 0, 0, 0, 0);
        Self { data, key, flags, opcode, priority, file, buffer, length, offset, reserved, more_flags, event }
    }
}

/// A function that the library stands before, as the dynamic linker finds it: this program has no libaio and no
/// liburing.
fn function(name: &std::ffi::CStr) -> *mut libc::c_void {
    // SAFETY: the name is a string.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    assert!(!found.is_null(), "the library has {name:?}");
    found
}

/// Queues a request, and waits for its end: what came of it, or why it was not taken.
///
/// # Safety
/// As `io_submit(2)`.
unsafe fn queued(mut request: Request) -> i64 {
    type Submit = unsafe extern "C" fn(u64, libc::c_long, *mut *mut Request) -> libc::c_int;
    type Destroy = unsafe extern "C" fn(u64) -> libc::c_int;
    let mut context = 0_u64;
    let mut requests = [&raw mut request];
    let mut event = [0_i64; 4];
    // SAFETY: the functions have these types; all that the calls refer to outlives them.
    unsafe {
        let submit: Submit = std::mem::transmute(function(c"io_submit"));
        let destroy: Destroy = std::mem::transmute(function(c"io_destroy"));
        assert_eq!(libc::syscall(libc::SYS_io_setup, 8, &raw mut context), 0);
        let taken = submit(context, 1, requests.as_mut_ptr());
        let came = if taken == 1 {
            let none = std::ptr::null_mut::<libc::timespec>();
            assert_eq!(libc::syscall(libc::SYS_io_getevents, context, 1, 1, event.as_mut_ptr(), none), 1);
            event[2]
        } else {
            i64::from(taken)
        };
        assert_eq!(destroy(context), 0);
        came
    }
}

/// Submits an io_uring in which this operation stands, to a library that stands before no liburing: what it returned.
pub fn uring(operation: u8) -> i32 {
    type Submit = unsafe extern "C" fn(*mut Ring) -> libc::c_int;
    #[repr(C)]
    struct Ring {
        others: [*const u32; 2],
        mask: *const u32,
        more: [*const u32; 4],
        entries: *const [u8; 64],
        head: u32,
        tail: u32,
        room: [u64; 20],
    }
    let mask = 3;
    let mut entries = [[0_u8; 64]; 4];
    entries[1][0] = operation;
    let none = std::ptr::null();
    let (others, more) = ([none; 2], [none; 4]);
    // Entry 5 of a ring of four is its second.
    let mut ring = Ring { others, mask: &mask, more, entries: entries.as_ptr(), head: 5, tail: 6, room: [0; 20] };
    // SAFETY: the function has this type, and looks only at what is here.
    unsafe {
        let submit: Submit = std::mem::transmute(function(c"io_uring_submit"));
        submit(&raw mut ring)
    }
}
