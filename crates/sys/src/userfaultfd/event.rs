//! The events of a userfaultfd, read as bytes and decoded.

use std::io::IoSliceMut;
use std::ops::Range;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd};

use linux_raw_sys::general as raw;
use rustix::io::{Errno, ReadWriteFlags};

use crate::error::{Error, Result};

/// `struct uffd_msg`: one byte of kind at 0, three words of argument from 8 on.
const MESSAGE_BYTES: usize = size_of::<crate::abi::uffd_msg>();
/// Messages read by one call.
const BATCH: usize = 64;

/// A fault: an access that waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// The address in the faulting process; the page's first byte, unless `EXACT_ADDRESS` was enabled.
    pub address: u64,
    /// The thread that waits; 0 unless `THREAD_ID` was enabled, or where the thread is not of this PID namespace.
    pub thread: u32,
    /// Whether the access is a write.
    pub write: bool,
    /// Whether it is a write to a write-protected page.
    pub protected: bool,
    /// Whether the page is in the file and only not mapped.
    pub minor: bool,
}

/// An event of a userfaultfd.
#[derive(Debug, Default)]
pub enum Event {
    /// A thread waits for a page.
    Fault(Fault),
    /// The process has forked; the child's userfaultfd.
    Fork(OwnedFd),
    /// A mapping has moved.
    Remap {
        /// The old address.
        from: u64,
        /// The new address.
        to: u64,
        /// Its length, bytes.
        bytes: u64,
    },
    /// Pages are being discarded.
    Remove(Range<u64>),
    /// A mapping is going away.
    Unmap(Range<u64>),
    /// A kind that this version does not know.
    #[default]
    Unknown,
}

/// Reads into `events` until it is full or nothing more is there.
pub(super) fn read(fd: BorrowedFd<'_>, events: &mut [Event]) -> Result<usize> {
    let mut buffer = [0u8; MESSAGE_BYTES * BATCH];
    let room = &mut buffer[..MESSAGE_BYTES * events.len().min(BATCH)];
    if room.is_empty() {
        return Ok(0);
    }
    let read = match read_now(fd, room) {
        Ok(read) => read,
        // Interrupted: whoever interrupts the thread wants it to look at something else.
        Err(Errno::AGAIN | Errno::INTR) => return Ok(0),
        Err(error) => return Err(Error::new("read the events of a userfaultfd", error)),
    };
    let messages = room[..read].chunks_exact(MESSAGE_BYTES);
    let count = messages.len();
    for (message, event) in messages.zip(events) {
        *event = decode(message);
    }
    Ok(count)
}

/// Reads without waiting. The descriptor's flags are unreliable: every process that shares it may change them, and one
/// in its guest's hands may clear `O_NONBLOCK` at any moment. Since 6.10 a single read can ask not to wait. With an
/// older kernel the flag is set first, and the caller must be prepared to wait all the same.
fn read_now(fd: BorrowedFd<'_>, room: &mut [u8]) -> rustix::io::Result<usize> {
    // The position -1 is the file's own: it has none.
    match rustix::io::preadv2(fd, &mut [IoSliceMut::new(room)], u64::MAX, ReadWriteFlags::NOWAIT) {
        Err(Errno::OPNOTSUPP) => {
            rustix::io::ioctl_fionbio(fd, true)?;
            rustix::io::read(fd, room)
        }
        read => read,
    }
}

fn decode(message: &[u8]) -> Event {
    let word = |index: usize| {
        let at = 8 + 8 * index;
        u64::from_ne_bytes(message[at..at + 8].try_into().expect("eight bytes"))
    };
    match u32::from(message[0]) {
        raw::UFFD_EVENT_PAGEFAULT => {
            let flag = |bit: u32| word(0) & u64::from(bit) != 0;
            Event::Fault(Fault {
                address: word(1),
                thread: word(2) as u32,
                write: flag(raw::UFFD_PAGEFAULT_FLAG_WRITE),
                protected: flag(raw::UFFD_PAGEFAULT_FLAG_WP),
                minor: flag(raw::UFFD_PAGEFAULT_FLAG_MINOR),
            })
        }
        // SAFETY: the kernel has put a new descriptor into this process for this very message, which is decoded once.
        raw::UFFD_EVENT_FORK => Event::Fork(unsafe { OwnedFd::from_raw_fd(word(0) as u32 as i32) }),
        raw::UFFD_EVENT_REMAP => Event::Remap { from: word(0), to: word(1), bytes: word(2) },
        raw::UFFD_EVENT_REMOVE => Event::Remove(word(0)..word(1)),
        raw::UFFD_EVENT_UNMAP => Event::Unmap(word(0)..word(1)),
        _ => Event::Unknown,
    }
}
