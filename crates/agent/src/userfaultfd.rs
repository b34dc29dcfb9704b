//! Making a userfaultfd.

use libc::{c_int, c_ulong};

use crate::raw::{Fd, errno};

/// `_IO(0xAA, 0x00)`, on `/dev/userfaultfd`.
const USERFAULTFD_IOC_NEW: c_ulong = 0xaa00;

/// `_IOWR(0xAA, 0x3f, struct uffdio_api)`.
const UFFDIO_API: c_ulong = 0xc000_aa3f | (size_of::<ApiArguments>() as c_ulong) << 16;

const UFFD_API: u64 = 0xaa;

/// The kernel's `struct uffdio_api`.
#[repr(C)]
struct ApiArguments {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// A userfaultfd of this process.
pub struct Opened {
    /// The userfaultfd's descriptor.
    pub descriptor: Fd,
    /// The features that the kernel has.
    pub features: u64,
    /// The `ioctl`s that the kernel offers.
    pub ioctls: u64,
}

/// Makes a userfaultfd with these features. `device` is `/dev/userfaultfd`, opened by a process that may do so. Without
/// it the system call is tried, which needs privilege. The error is an `errno`.
pub fn open(device: Option<&Fd>, features: u64) -> Result<Opened, c_int> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    let result = match device {
        // SAFETY: takes flags by value; another file answers ENOTTY.
        Some(device) => unsafe { libc::ioctl(device.number(), USERFAULTFD_IOC_NEW as _, flags) }.into(),
        // SAFETY: takes flags by value.
        None => unsafe { libc::syscall(libc::SYS_userfaultfd, flags) },
    };
    let descriptor = Fd::from_call(result)?;
    let mut arguments = ApiArguments { api: UFFD_API, features, ioctls: 0 };
    // SAFETY: UFFDIO_API reads and writes one ApiArguments.
    if unsafe { libc::ioctl(descriptor.number(), UFFDIO_API as _, &mut arguments) } != 0 {
        return Err(errno());
    }
    Ok(Opened { descriptor, features: arguments.features, ioctls: arguments.ioctls })
}

const _: () = assert!(UFFDIO_API == 0xc018_aa3f);
