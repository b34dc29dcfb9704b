//! Areas: parts of private RAM that a file stands behind, so that several guests have what it holds in common until one
//! of them writes.
//!
//! `MADV_DONTNEED`, by which QEMU discards, brings the file's content back in an area, and a discarded page must read
//! as zeros: a guest that zeroes its free pages (`init_on_free`), a balloon and virtio-mem rely on it. So where areas
//! may be, zeros are put in the place of whatever QEMU has discarded.
//!
//! * While nobody watches RAM ([`watched`]), the range becomes anonymous memory: that gives the memory back, and is one
//!   step for whoever reads there.
//! * While a userfaultfd is kept, no mapping is replaced. The kernel's page of zeros is put in place of what is missing
//!   (`UFFDIO_ZEROPAGE`). Where that fails, because a page or a mark of write protection is there, zeros are written
//!   over what is not zero. The same is done while one is lent, or while RAM is in as many mappings as it may be.
//!
//! No table says where areas are: there may be 30,000, and `/proc/self/maps` takes 10 ms to read then. All that QEMU
//! discards of private RAM is treated alike once there are areas at all. Of anonymous memory these are the zeros that
//! it holds anyway: a mapping of the same kind, or nothing that would have to be written.

use core::ffi::c_void;
use core::sync::atomic::{AtomicBool, Ordering};

use libc::{c_int, c_ulong};

use crate::blocks::BLOCKS;
use crate::private::{self, SMALL_PAGE};
use crate::raw::{self, errno};
use crate::watched::{self, Watch};
use crate::{mappings, remap};

/// Whether RAM may have areas. It is set before the first one is mapped, and stays.
static EXPECTED: AtomicBool = AtomicBool::new(false);

/// The most that is done with the lock held, or without asking again who watches, bytes.
const STEP: u64 = 512 * SMALL_PAGE;

/// How often a call is tried again that the kernel refuses because mappings change.
const TRIES: u32 = 100;

/// Says that RAM may have areas from now on.
pub fn expect() {
    EXPECTED.store(true, Ordering::SeqCst);
}

/// Makes zeros of what QEMU has just discarded of private RAM.
///
/// The look for areas comes after the discard. An area that was mapped before it is seen. One that is mapped after it
/// shows its file's content, as whoever maps it wants.
pub fn leave_zeros(address: u64, length: u64) {
    if !EXPECTED.load(Ordering::SeqCst) {
        return;
    }
    let end = address.saturating_add(length);
    for block in BLOCKS.touching(address, length).filter(private::is_anonymous) {
        let mut at = address.max(block.address.get());
        let end = end.min(block.address.get().saturating_add(block.length.get()));
        while at < end {
            at = at.saturating_add(leave_some(at, end));
        }
    }
}

/// Makes zeros of the first part of a range, and returns its length, bytes.
fn leave_some(at: u64, end: u64) -> u64 {
    let length = end - at;
    let written = {
        let watched = watched::lock();
        // QEMU has unmapped it meanwhile, and what is there now is something else.
        if BLOCKS.holding(at, length).is_none() {
            return length;
        }
        match watched.state() {
            Watch::Nobody if mappings::take() && map_own(at, length) => return length,
            Watch::Nobody | Watch::Lent => length.min(STEP),
            Watch::Kept(userfaultfd) => match put_zeros(userfaultfd, at, length.min(STEP)) {
                0 => SMALL_PAGE,
                put => return put,
            },
        }
    };
    // Without the lock: a write may wait for a daemon that has the page fenced in.
    for page in (at..at + written).step_by(SMALL_PAGE as usize) {
        write_zeros(page);
    }
    written
}

/// Puts anonymous memory in the place of RAM, on the daemon's request, and only `also_watched` where somebody watches.
/// `None` where it is no RAM; the error is an `errno`, `EBUSY` where somebody watches. The daemon counts the mappings
/// that its requests make, and may use more than this library takes for itself ([`mappings`]).
pub fn make_own(address: u64, length: u64, also_watched: bool) -> Option<Result<(), c_int>> {
    remap::within_block(address, length, |block| {
        if !private::is_anonymous(block) {
            return Err(libc::EINVAL);
        }
        let watched = watched::lock();
        match watched.state() {
            Watch::Kept(_) | Watch::Lent if !also_watched => Err(libc::EBUSY),
            _ if map_own(address, length) => Ok(()),
            _ => Err(errno()),
        }
    })
}

/// Maps anonymous memory there, and says whether that succeeded. Where it fails nothing has changed.
fn map_own(address: u64, length: u64) -> bool {
    let (place, length) = (address as *mut c_void, length as usize);
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the addresses are guest RAM while the lock is held, and what is lost there is to be zeros.
    let mapped = unsafe { raw::mmap(place, length, protection, private::OWN | libc::MAP_FIXED, -1, 0) };
    if mapped == libc::MAP_FAILED {
        return false;
    }
    // SAFETY: as above.
    unsafe { private::advise_again(place, length) };
    true
}

/// The kernel's `struct uffdio_zeropage`.
#[repr(C)]
struct ZeroPageArguments {
    start: u64,
    length: u64,
    mode: u64,
    put: i64,
}

/// `_IOWR(0xAA, 0x04, struct uffdio_zeropage)`.
const UFFDIO_ZEROPAGE: c_ulong = 0xc000_aa04 | (size_of::<ZeroPageArguments>() as c_ulong) << 16;
const _: () = assert!(UFFDIO_ZEROPAGE == 0xc020_aa04);

/// Puts the page of zeros where no page is, and returns how far it got, bytes.
fn put_zeros(userfaultfd: c_int, start: u64, length: u64) -> u64 {
    let mut length = length;
    for _ in 0..TRIES {
        let mut arguments = ZeroPageArguments { start, length, mode: 0, put: 0 };
        // SAFETY: reads and writes the arguments only; the kernel fills missing pages of registered memory.
        if unsafe { libc::ioctl(userfaultfd, UFFDIO_ZEROPAGE as _, &mut arguments) } == 0 {
            return length;
        }
        match (u64::try_from(arguments.put), errno()) {
            (Ok(put), _) if put > 0 => return put,
            (_, libc::EAGAIN) => raw::yield_now(),
            // It does not lie in one mapping.
            (_, libc::ENOENT) if length > SMALL_PAGE => length = SMALL_PAGE,
            _ => break,
        }
    }
    0
}

/// Writes zeros to a page that does not hold zeros: to read one that does takes no memory.
fn write_zeros(page: u64) {
    let words = page as *mut u64;
    let index = 0..(SMALL_PAGE / 8) as usize;
    // SAFETY: aligned, and within RAM that QEMU is discarding: it does not unmap it meanwhile. The guest may write
    // there at any moment, so the accesses are volatile; it has given up what it had there.
    unsafe {
        if index.clone().any(|index| words.add(index).read_volatile() != 0) {
            index.for_each(|index| words.add(index).write_volatile(0));
        }
    }
}
