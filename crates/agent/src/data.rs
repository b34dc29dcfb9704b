//! Where a file has data.
//!
//! The kernel finds the end of a part with data page by page (`SEEK_HOLE`): 17 ms for a GiB. In the guest's pause that
//! would be too long. So the file is looked at while the guest runs, and in the pause only what were holes then is
//! looked at again: through a hole the kernel goes in large steps.
//!
//! A guest goes on writing after the first look. What it writes into a hole is found by the second one, when it stands
//! still: both looks together cover all of the file, so nothing is missed, however they lie. What it has given back
//! meanwhile counts as data still, and reads as zeros, as the hole that it is. The first write there takes memory
//! twice; that is bounded by what a guest gives back in the moment between.

use core::ffi::c_void;

use libc::{c_int, off_t};

use crate::private::SMALL_PAGE;
use crate::raw::{self, Fd, errno};

/// The most parts that are noted. What lies behind them is looked at in the pause.
const MOST: usize = 8192;

/// So many pages behind the first are looked at one by one, to find where data ends that came into a hole. The kernel
/// would go on through the data behind that hole.
const PAGES_BY_THEMSELVES: u32 = 4096;

/// A part of a file, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
struct Part {
    from: u64,
    to: u64,
}

/// Parts of a file that had data, in order and apart.
pub struct Known {
    /// Device and inode of the file.
    file: (u64, u64),
    /// A mapping of this library's own, with room for [`MOST`].
    parts: *mut Part,
    count: usize,
}

impl Known {
    /// Looks at a file, which may be written meanwhile. Parts that are nearer than `bridged` are one. The error is an
    /// `errno`.
    pub fn look(file: &Fd, bridged: u64) -> Result<Self, c_int> {
        let status = raw::status(file)?;
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let room = unsafe { raw::mmap(core::ptr::null_mut(), MOST * size_of::<Part>(), protection, flags, -1, 0) };
        if room == libc::MAP_FAILED {
            return Err(errno());
        }
        let mut known = Self { file: (status.st_dev, status.st_ino), parts: room.cast(), count: 0 };
        let mut at = 0;
        while let Some(from) = seek(file, at, libc::SEEK_DATA)? {
            // What is given back at this moment still counts with its first page.
            let to = seek(file, from, libc::SEEK_HOLE)?.unwrap_or(from).max(from.saturating_add(SMALL_PAGE));
            at = to;
            if !known.add(Part { from, to }, bridged) {
                break;
            }
        }
        Ok(known)
    }

    /// Adds a part behind the others, if there is room.
    fn add(&mut self, part: Part, bridged: u64) -> bool {
        // SAFETY: the mapping has so many parts, any bytes are one, and nobody else has it.
        let parts = unsafe { core::slice::from_raw_parts_mut(self.parts, MOST) };
        let last = self.count.checked_sub(1).and_then(|last| parts.get_mut(last));
        if let Some(last) = last.filter(|last| part.from <= last.to || part.from - last.to < bridged) {
            last.to = part.to;
            return true;
        }
        let Some(free) = parts.get_mut(self.count) else { return false };
        *free = part;
        self.count += 1;
        true
    }

    /// Whether it is known of this file.
    pub fn is_of(&self, file: &Fd) -> bool {
        raw::status(file).is_ok_and(|status| self.file == (status.st_dev, status.st_ino))
    }

    fn parts(&self) -> &[Part] {
        // SAFETY: so many were written; the mapping lives as long as this.
        unsafe { core::slice::from_raw_parts(self.parts, self.count) }
    }
}

impl Drop for Known {
    fn drop(&mut self) {
        // SAFETY: this library's own mapping, of that length.
        unsafe { raw::munmap(self.parts.cast::<c_void>(), MOST * size_of::<Part>()) };
    }
}

/// The parts of a file with data, of which some may be known.
pub struct Data<'a> {
    file: &'a Fd,
    known: &'a [Part],
}

impl<'a> Data<'a> {
    /// The parts of this file; what is known of another one says nothing.
    pub fn of(file: &'a Fd, known: Option<&'a Known>) -> Self {
        Self { file, known: known.filter(|known| known.is_of(file)).map_or(&[], Known::parts) }
    }

    /// The next part from there on, bytes; `None` where none is left. To be asked in ascending order. The error is an
    /// `errno`.
    pub fn next(&mut self, at: u64) -> Result<Option<(u64, u64)>, c_int> {
        while let [first, rest @ ..] = self.known
            && first.to <= at
        {
            self.known = rest;
        }
        let known = self.known.first().copied();
        if let Some(known) = known.filter(|known| known.from <= at) {
            return Ok(Some((at, known.to)));
        }
        Ok(match (seek(self.file, at, libc::SEEK_DATA)?, known) {
            (Some(from), Some(known)) if from < known.from => Some((from, self.end(from, known.from)?)),
            (_, Some(known)) => Some((known.from, known.to)),
            (Some(from), None) => Some((from, seek(self.file, from, libc::SEEK_HOLE)?.ok_or(libc::EINVAL)?)),
            (None, None) => None,
        })
    }

    /// Where the data that begins there ends, at most there.
    fn end(&self, from: u64, most: u64) -> Result<u64, c_int> {
        let mut to = from;
        for _ in 0..PAGES_BY_THEMSELVES {
            to = to.saturating_add(SMALL_PAGE);
            if to >= most {
                return Ok(most);
            }
            if seek(self.file, to, libc::SEEK_DATA)? != Some(to) {
                return Ok(to);
            }
        }
        Ok(seek(self.file, to, libc::SEEK_HOLE)?.ok_or(libc::EINVAL)?.min(most))
    }
}

/// Where the next data or hole begins; `None` where there is no data any more. The error is an `errno`.
fn seek(file: &Fd, at: u64, whence: c_int) -> Result<Option<u64>, c_int> {
    let at = off_t::try_from(at).map_err(|_| libc::EINVAL)?;
    // SAFETY: moves the offset of a descriptor of this library's.
    let found = unsafe { libc::lseek(file.number(), at, whence) };
    match u64::try_from(found) {
        Ok(found) => Ok(Some(found)),
        Err(_) if errno() == libc::ENXIO => Ok(None),
        Err(_) => Err(errno()),
    }
}
