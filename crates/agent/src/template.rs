//! The template: a file that guest RAM begins as, and that every guest that begins as it shares until it writes.
//!
//! Where the template has data it is mapped `MAP_PRIVATE` over the anonymous memory: these parts are *areas*
//! ([`areas`](crate::areas)). Where it has a hole the memory stays anonymous, because the first write into a hole of a
//! privately mapped file takes memory twice, and a read takes memory in the template. The descriptor is inherited,
//! open for reading only, and is closed once RAM is mapped: a QEMU that could write into a template would write into
//! the RAM of every guest that has it.

use core::ffi::c_void;
use core::sync::atomic::{AtomicI32, Ordering};

use libc::{c_int, off_t};

use crate::data::{Data, Known};
use crate::mappings;
use crate::private::SMALL_PAGE;
use crate::raw::{self, Fd, errno};

/// The template's descriptor, or one of these two. Changed before `main`, and by whoever takes it.
static TEMPLATE: AtomicI32 = AtomicI32::new(NONE);
const NONE: c_int = -1;
/// It was asked for one, and there is none: no RAM is mapped.
const INVALID: c_int = -2;

/// How a part of the template is mapped over RAM.
const AREA: c_int = libc::MAP_PRIVATE | libc::MAP_NORESERVE | libc::MAP_FIXED;

/// Sets the template from the variable's value; `None` where it is unset. Before `main` only.
pub fn set(value: Option<&[u8]>) {
    let number = value.map_or(NONE, |value| number(value).unwrap_or(INVALID));
    let number = match number {
        NONE | INVALID => number,
        // SAFETY: a flag of a descriptor that was passed for this library alone; another number fails.
        _ if unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) } != 0 => INVALID,
        _ => number,
    };
    TEMPLATE.store(number, Ordering::Relaxed);
}

/// A descriptor's number, written as decimal digits and in no other way.
fn number(value: &[u8]) -> Option<c_int> {
    let digits = core::str::from_utf8(value).ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()))?;
    digits.parse().ok()
}

/// Whether RAM is to begin as a template, or was to.
pub fn is_asked_for() -> bool {
    TEMPLATE.load(Ordering::Relaxed) != NONE
}

/// Takes the template, if there is one: it is for the first RAM block that is mapped. The error is an `errno`.
pub fn take() -> Result<Option<Fd>, c_int> {
    match TEMPLATE.swap(NONE, Ordering::Relaxed) {
        NONE => Ok(None),
        INVALID => {
            refuse();
            Err(libc::EINVAL)
        }
        number => Fd::from_call(number.into()).map(Some),
    }
}

/// No RAM is mapped from now on: it would lack what the template holds.
pub fn refuse() {
    TEMPLATE.store(INVALID, Ordering::Relaxed);
}

/// Puts the template's data in the place of anonymous memory. The error is an `errno`: `EINVAL` where the template is
/// not a file of exactly this length, open for reading only; `ENOMEM` where its data is in too many pieces. Pieces
/// that are nearer than `bridged` are mapped in one, with the hole between. `known`: what is known of its data.
///
/// # Safety
/// The memory is a mapping of that length that nobody else uses.
pub unsafe fn lay(
    template: &Fd,
    known: Option<&Known>,
    own: *mut c_void,
    length: usize,
    protection: c_int,
    bridged: u64,
) -> Result<(), c_int> {
    check(template, length as u64)?;
    let mut room = mappings::room();
    let mut data = Data::of(template, known);
    let mut next = data.next(0)?;
    while let Some((from, mut to)) = next {
        room = room.checked_sub(1).ok_or(libc::ENOMEM)?;
        next = data.next(to)?;
        while let Some((_, end)) = next.filter(|(begin, _)| *begin == to || begin - to < bridged) {
            to = end;
            next = data.next(to)?;
        }
        // What has grown since the check stays outside.
        let to = to.min(length as u64);
        if !from.is_multiple_of(SMALL_PAGE) || from >= to {
            return Err(libc::EINVAL);
        }
        let (place, bytes) = (own.wrapping_byte_add(from as usize), (to - from) as usize);
        // SAFETY: within the caller's mapping.
        let mapped = unsafe { raw::mmap(place, bytes, protection, AREA, template.number(), from as off_t) };
        if mapped == libc::MAP_FAILED {
            return Err(errno());
        }
    }
    Ok(())
}

/// Checks that a file can be a template of this length, bytes. The error is an `errno`.
pub fn check(template: &Fd, length: u64) -> Result<(), c_int> {
    let status = raw::status(template)?;
    let is_file = status.st_mode & libc::S_IFMT == libc::S_IFREG;
    let right = is_file && status.st_size as u64 == length && is_read_only(template);
    if right { Ok(()) } else { Err(libc::EINVAL) }
}

/// Whether a descriptor is open for reading and not for writing.
pub fn is_read_only(file: &Fd) -> bool {
    // SAFETY: asks only.
    let flags = unsafe { libc::fcntl(file.number(), libc::F_GETFL) };
    flags >= 0 && flags & (libc::O_ACCMODE | libc::O_PATH) == libc::O_RDONLY
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_is_named_by_its_digits_alone() {
        assert_eq!(number(b"7"), Some(7));
        for wrong in [&b""[..], b"-1", b"+7", b" 7", b"7 ", b"0x7", b"99999999999", b"\xff"] {
            assert_eq!(number(wrong), None, "{}", wrong.escape_ascii());
        }
    }

    /// In one test, because the template is this process's.
    #[test]
    fn a_template_is_taken_once_and_one_that_is_invalid_stays_so() {
        set(None);
        assert!(!is_asked_for() && matches!(take(), Ok(None)));
        for wrong in [&b""[..], b"x", b"1000000"] {
            set(Some(wrong));
            assert!(is_asked_for());
            assert!(take().is_err() && take().is_err(), "no later block begins as anything else");
        }
        // SAFETY: a new descriptor.
        let file = unsafe { libc::open(c"/proc/self/comm".as_ptr(), libc::O_RDONLY) };
        set(Some(file.to_string().as_bytes()));
        let template = take().expect("a template").expect("it is there");
        assert!(template.number() == file && is_read_only(&template) && !is_asked_for());
        set(None);
    }
}
