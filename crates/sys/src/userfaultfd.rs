//! userfaultfd: write tracking, and faults on missing and stale pages for post-copy.
//!
//! Kernel's documentation: `Documentation/admin-guide/mm/userfaultfd.rst`. The descriptor belongs to the process that
//! made it (the agent inside the VMM): every range here is of that process's addresses, whoever calls.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use linux_raw_sys::general as raw;
use rustix::ioctl::Opcode;

use crate::abi::{self, uffdio_range};
use crate::error::{Error, Result};

// The events that [`Userfaultfd::read_events`] reads.
mod event;
pub use event::{Event, Fault};

bitflags::bitflags! {
    /// Features of a userfaultfd (`UFFD_FEATURE_*`).
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub struct Features: u64 {
        /// Faults on write-protected pages are told apart.
        const PAGEFAULT_FLAG_WP = raw::UFFD_FEATURE_PAGEFAULT_FLAG_WP as u64;
        /// An event when the process forks.
        const EVENT_FORK = raw::UFFD_FEATURE_EVENT_FORK as u64;
        /// An event when a mapping moves.
        const EVENT_REMAP = raw::UFFD_FEATURE_EVENT_REMAP as u64;
        /// An event when pages are discarded; the process waits until it is read.
        const EVENT_REMOVE = raw::UFFD_FEATURE_EVENT_REMOVE as u64;
        /// Missing pages of hugetlbfs.
        const MISSING_HUGETLBFS = raw::UFFD_FEATURE_MISSING_HUGETLBFS as u64;
        /// Missing pages of tmpfs.
        const MISSING_SHMEM = raw::UFFD_FEATURE_MISSING_SHMEM as u64;
        /// An event when a mapping goes away.
        const EVENT_UNMAP = raw::UFFD_FEATURE_EVENT_UNMAP as u64;
        /// A signal in place of an event.
        const SIGBUS = raw::UFFD_FEATURE_SIGBUS as u64;
        /// Faults name the thread.
        const THREAD_ID = raw::UFFD_FEATURE_THREAD_ID as u64;
        /// Minor faults on hugetlbfs.
        const MINOR_HUGETLBFS = raw::UFFD_FEATURE_MINOR_HUGETLBFS as u64;
        /// Minor faults on tmpfs.
        const MINOR_SHMEM = raw::UFFD_FEATURE_MINOR_SHMEM as u64;
        /// Faults carry the address as it was, not the page's.
        const EXACT_ADDRESS = raw::UFFD_FEATURE_EXACT_ADDRESS as u64;
        /// Write protection on hugetlbfs and tmpfs.
        const WP_HUGETLBFS_SHMEM = raw::UFFD_FEATURE_WP_HUGETLBFS_SHMEM as u64;
        /// Write protection of pages that are not there yet.
        const WP_UNPOPULATED = raw::UFFD_FEATURE_WP_UNPOPULATED as u64;
        /// Pages that raise a machine check when touched.
        const POISON = raw::UFFD_FEATURE_POISON as u64;
        /// A write to a protected page lifts the protection by itself and sends no event: write tracking.
        const WP_ASYNC = raw::UFFD_FEATURE_WP_ASYNC as u64;
        /// Pages moved within the process.
        const MOVE = raw::UFFD_FEATURE_MOVE as u64;
        /// The features that write tracking of guest RAM needs.
        const TRACKING = Self::WP_ASYNC.bits() | Self::WP_UNPOPULATED.bits() | Self::WP_HUGETLBFS_SHMEM.bits();
        /// The features that a guest needs to run before all its pages are there.
        const PAGING = Self::MISSING_SHMEM.bits() | Self::MINOR_SHMEM.bits() | Self::THREAD_ID.bits();
        // A newer kernel offers features that are not in this list.
        const _ = !0;
    }

    /// Which faults a range raises (`UFFDIO_REGISTER_MODE_*`).
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub struct Modes: u64 {
        /// Accesses to pages that the file (shared) or the mapping (private) does not hold.
        const MISSING = raw::UFFDIO_REGISTER_MODE_MISSING as u64;
        /// Writes to write-protected pages.
        const WP = raw::UFFDIO_REGISTER_MODE_WP as u64;
        /// Accesses to pages that the file holds and the mapping does not.
        const MINOR = raw::UFFDIO_REGISTER_MODE_MINOR as u64;
    }

    /// The calls that a registered range allows.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub struct Ioctls: u64 {
        /// [`Userfaultfd::wake`].
        const WAKE = 1 << raw::_UFFDIO_WAKE;
        /// [`Userfaultfd::copy`].
        const COPY = 1 << raw::_UFFDIO_COPY;
        /// [`Userfaultfd::zeropage`].
        const ZEROPAGE = 1 << raw::_UFFDIO_ZEROPAGE;
        /// [`Userfaultfd::write_protect`].
        const WRITE_PROTECT = 1 << raw::_UFFDIO_WRITEPROTECT;
        /// [`Userfaultfd::continue_`].
        const CONTINUE = 1 << raw::_UFFDIO_CONTINUE;
        // A newer kernel offers calls that are not in this list.
        const _ = !0;
    }
}

/// The result of a call that fills a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Filled {
    /// Bytes filled, from the start of the range on.
    pub bytes: u64,
    /// The reason why it ended before the end of the range.
    pub stopped: Option<Stopped>,
}

/// The reason why a call that fills a range ended early.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stopped {
    /// The next page is there already.
    AlreadyThere,
    /// The process is changing its mappings. Read the events, where `EVENT_*` features are enabled, then go on.
    MappingsChange,
}

/// A userfaultfd of this or of another process.
#[derive(Debug)]
pub struct Userfaultfd {
    fd: OwnedFd,
}

impl From<OwnedFd> for Userfaultfd {
    /// Takes `fd`, which must be a userfaultfd; on anything else every call fails.
    fn from(fd: OwnedFd) -> Self {
        Self { fd }
    }
}

impl AsFd for Userfaultfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl From<Userfaultfd> for OwnedFd {
    fn from(uffd: Userfaultfd) -> Self {
        uffd.fd
    }
}

/// Opens `/dev/userfaultfd`. A process that is handed the descriptor can make userfaultfds for itself without
/// privilege.
///
/// # Errors
/// The kernel has no such device (before 6.1) or this process may not open it.
pub fn open_device() -> Result<File> {
    File::options()
        .read(true)
        .write(true)
        .open("/dev/userfaultfd")
        .map_err(|error| Error::new("open /dev/userfaultfd", error))
}

impl Userfaultfd {
    /// A new userfaultfd of this process from [`open_device`]'s descriptor. [`Self::enable`] must come next. Reading
    /// events does not block.
    ///
    /// # Errors
    /// `device` is not `/dev/userfaultfd`, or no descriptor is left.
    pub fn create(device: impl AsFd) -> Result<Self> {
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
        // SAFETY: this ioctl takes plain flags and returns a new descriptor; another kind of file refuses its number.
        let fd = unsafe { libc::ioctl(device.as_fd().as_raw_fd(), abi::USERFAULTFD_IOC_NEW as libc::Ioctl, flags) };
        if fd < 0 {
            return Err(Error::new("create a userfaultfd", io::Error::last_os_error()));
        }
        // SAFETY: the kernel has just made it for this call alone.
        Ok(Self { fd: unsafe { OwnedFd::from_raw_fd(fd) } })
    }

    /// A duplicate of the descriptor.
    ///
    /// # Errors
    /// No descriptor left.
    pub fn duplicate(&self) -> Result<Self> {
        let fd = self.fd.try_clone().map_err(|error| Error::new("duplicate a userfaultfd", error))?;
        Ok(Self { fd })
    }

    /// Does the handshake, once for each userfaultfd and before anything else; returns all features that the kernel
    /// offers.
    ///
    /// # Errors
    /// `EINVAL`: the kernel lacks one of `features`, or the handshake was done before.
    pub fn enable(&self, features: Features) -> Result<Features> {
        let mut api = abi::uffdio_api { api: u64::from(raw::UFFD_API), features: features.bits(), ioctls: 0 };
        self.ioctl(abi::UFFDIO_API, &mut api, "enable the features of a userfaultfd")?;
        Ok(Features::from_bits_retain(api.features))
    }

    /// Registers `range`: from now on its faults of these modes come to this userfaultfd.
    ///
    /// # Errors
    /// `EINVAL`: the range has mappings that do not support this; `EPERM`: a shared mapping of a file opened read-only;
    /// `EBUSY`: another userfaultfd has it; `ENOMEM`: too many mappings (`vm.max_map_count`).
    pub fn register(&self, range: Range<u64>, modes: Modes) -> Result<Ioctls> {
        let mut register = abi::uffdio_register { range: kernel_range(&range), mode: modes.bits(), ioctls: 0 };
        self.ioctl(abi::UFFDIO_REGISTER, &mut register, "register memory with a userfaultfd")?;
        Ok(Ioctls::from_bits_retain(register.ioctls))
    }

    /// Gives `range` up: wakes the threads that wait there, and clears every write protection and marker.
    ///
    /// # Errors
    /// The range holds mappings that cannot be registered.
    pub fn unregister(&self, range: Range<u64>) -> Result<()> {
        self.ioctl(abi::UFFDIO_UNREGISTER, &mut kernel_range(&range), "unregister memory from a userfaultfd")
    }

    /// Fills missing pages from `destination` on with `pages`, whole pages, and wakes the threads that wait for them.
    /// With `protect` they are write-protected (tracked) from the start.
    ///
    /// # Errors
    /// `ENOENT`: nothing is mapped or registered there; `ENOSPC`, `ENOMEM`: no memory; `ESRCH`: the process has ended.
    pub fn copy(&self, destination: u64, pages: &[u8], protect: bool) -> Result<Filled> {
        let end = destination.saturating_add(pages.len() as u64);
        fill(destination..end, "fill missing memory through a userfaultfd", |rest| {
            let from = &pages[(rest.start - destination) as usize..];
            let mut copy = abi::uffdio_copy {
                dst: rest.start,
                src: from.as_ptr() as u64,
                len: from.len() as u64,
                mode: if protect { u64::from(raw::UFFDIO_COPY_MODE_WP) } else { 0 },
                copy: 0,
            };
            // SAFETY: the kernel reads `from`, which outlives the call; it writes to memory registered with this
            // userfaultfd only.
            let result = unsafe { abi::ioctl(self.as_fd(), abi::UFFDIO_COPY, &mut copy) };
            (copy.copy, result)
        })
    }

    /// Fills missing pages with zeros. On a shared mapping this takes memory as any page does. On a private one it
    /// takes none, and a page that carries a write-protection marker counts as there already: [`Self::copy`] zeros
    /// then.
    ///
    /// # Errors
    /// As [`Self::copy`].
    pub fn zeropage(&self, range: Range<u64>) -> Result<Filled> {
        fill(range, "fill missing memory with zeros through a userfaultfd", |rest| {
            let mut zero = abi::uffdio_zeropage { range: kernel_range(&rest), mode: 0, zeropage: 0 };
            // SAFETY: no pointer of ours; the kernel writes to memory registered with this userfaultfd only.
            let result = unsafe { abi::ioctl(self.as_fd(), abi::UFFDIO_ZEROPAGE, &mut zero) };
            (zero.zeropage, result)
        })
    }

    /// Maps pages that the file holds already (registered [`Modes::MINOR`]) and wakes the threads that wait for them.
    ///
    /// # Errors
    /// As [`Self::copy`]; `EFAULT`: the file has a hole there.
    pub fn continue_(&self, range: Range<u64>) -> Result<Filled> {
        self.continue_in(range, 0)
    }

    /// As [`continue_`](Self::continue_), and the pages are write-protected from the moment they are mapped (registered
    /// [`Modes::WP`], too; since Linux 6.4).
    ///
    /// # Errors
    /// As [`continue_`](Self::continue_).
    pub fn continue_protected(&self, range: Range<u64>) -> Result<Filled> {
        self.continue_in(range, abi::UFFDIO_CONTINUE_MODE_WP)
    }

    fn continue_in(&self, range: Range<u64>, mode: u64) -> Result<Filled> {
        fill(range, "map present memory through a userfaultfd", |rest| {
            let mut map = abi::uffdio_continue { range: kernel_range(&rest), mode, mapped: 0 };
            // SAFETY: no pointer of ours; the kernel maps pages into memory registered with this userfaultfd only.
            let result = unsafe { abi::ioctl(self.as_fd(), abi::UFFDIO_CONTINUE, &mut map) };
            (map.mapped, result)
        })
    }

    /// Write-protects `range`, or lifts the protection and wakes the threads that wait to write.
    ///
    /// # Errors
    /// `ENOENT`: the range is not wholly registered [`Modes::WP`]; `EAGAIN`: the process is changing its mappings,
    /// nothing was done; `ESRCH`: the process has ended.
    pub fn write_protect(&self, range: Range<u64>, protect: bool) -> Result<()> {
        let mode = if protect { abi::UFFDIO_WRITEPROTECT_MODE_WP } else { 0 };
        let mut call = abi::uffdio_writeprotect { range: kernel_range(&range), mode };
        self.ioctl(abi::UFFDIO_WRITEPROTECT, &mut call, "write-protect memory through a userfaultfd")
    }

    /// Wakes the threads that wait for a fault in `range`; a fault that is not resolved is raised again.
    ///
    /// # Errors
    /// `EINVAL`: not a range of addresses.
    pub fn wake(&self, range: Range<u64>) -> Result<()> {
        self.ioctl(abi::UFFDIO_WAKE, &mut kernel_range(&range), "wake threads that wait for a userfaultfd")
    }

    /// Reads the events that are there, as many as `events` has room for, and returns their number. It does not wait,
    /// whatever flags another process gave the descriptor; but with a kernel older than 6.10 such a process may make it
    /// wait.
    ///
    /// # Errors
    /// The read failed; `EINVAL`: [`Self::enable`] was never called.
    pub fn read_events(&self, events: &mut [Event]) -> Result<usize> {
        event::read(self.as_fd(), events)
    }

    /// Makes the descriptor non-blocking again, whatever another process did to it: on a blocking one, `poll(2)`
    /// reports an error at once and for ever.
    ///
    /// # Errors
    /// None is known.
    pub fn unblock(&self) -> Result<()> {
        let set = rustix::io::ioctl_fionbio(&self.fd, true);
        set.map_err(|error| Error::new("make a userfaultfd non-blocking", error))
    }

    fn ioctl<T>(&self, request: Opcode, arg: &mut T, doing: &'static str) -> Result<()> {
        // SAFETY: called with plain structures of addresses in the userfaultfd's process that the kernel checks against
        // what is registered; of our memory it reads and writes only `arg`.
        unsafe { abi::ioctl(self.as_fd(), request, arg) }.map(drop).map_err(|error| Error::new(doing, error))
    }
}

/// Repeats `call` with the rest of `range` until the kernel says why it stops. `call` returns the structure's field for
/// the bytes done (or a negated error number) and the ioctl's result.
fn fill(
    range: Range<u64>,
    doing: &'static str,
    mut call: impl FnMut(Range<u64>) -> (i64, io::Result<u32>),
) -> Result<Filled> {
    let mut at = range.start;
    let mut stopped = None;
    while at < range.end && stopped.is_none() {
        let (done, result) = call(at..range.end);
        match result.map_err(|error| (error.raw_os_error(), error)) {
            Ok(_) => at = range.end,
            // After a partial success the ioctl says EAGAIN; the next call shows why it stopped there.
            Err((Some(libc::EAGAIN), _)) if done > 0 => at += done.unsigned_abs(),
            Err((Some(libc::EAGAIN), _)) => stopped = Some(Stopped::MappingsChange),
            Err((Some(libc::EEXIST), _)) => stopped = Some(Stopped::AlreadyThere),
            Err((_, error)) => return Err(Error::new(doing, error)),
        }
    }
    Ok(Filled { bytes: at - range.start, stopped })
}

fn kernel_range(range: &Range<u64>) -> uffdio_range {
    uffdio_range { start: range.start, len: range.end.saturating_sub(range.start) }
}
