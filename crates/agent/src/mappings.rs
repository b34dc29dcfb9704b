//! How many more mappings guest RAM may be cut into.
//!
//! The kernel allows a process only so many (`vm.max_map_count`), and QEMU ends where it gets no more. Each part of an
//! area that is replaced may cut one mapping into three. Half of what the kernel allows is left to QEMU.

use core::ffi::CStr;
use core::sync::atomic::{AtomicU64, Ordering};

use crate::raw::{self, Fd};

/// How many replacements are made before the mappings are counted again: counting 30,000 takes 10 ms.
const AT_ONCE: u64 = 1024;

/// What the kernel allows unless it is told otherwise.
const USUAL_LIMIT: u64 = 65_530;

/// Replacements that are left before the next count.
static LEFT: AtomicU64 = AtomicU64::new(0);

/// Refusals that are left before the next count.
static REFUSED: AtomicU64 = AtomicU64::new(0);

/// Whether one more part of guest RAM may become a mapping of its own. With the lock of
/// [`watched`](crate::watched::lock) only.
pub fn take() -> bool {
    if REFUSED.load(Ordering::Relaxed) > 0 {
        REFUSED.fetch_sub(1, Ordering::Relaxed);
        return false;
    }
    if LEFT.load(Ordering::Relaxed) == 0 {
        let room = room();
        LEFT.store(room.min(AT_ONCE), Ordering::Relaxed);
        if room == 0 {
            REFUSED.store(AT_ONCE, Ordering::Relaxed);
            return false;
        }
    }
    LEFT.fetch_sub(1, Ordering::Relaxed);
    true
}

/// How many parts of guest RAM may become mappings of their own.
pub fn room() -> u64 {
    (limit() / 2).saturating_sub(count()) / 2
}

/// How many mappings the kernel allows.
fn limit() -> u64 {
    let mut text = [0u8; 24];
    let Some(length) = open(c"/proc/sys/vm/max_map_count").and_then(|file| read(&file, &mut text)) else {
        return USUAL_LIMIT;
    };
    number(text.get(..length).unwrap_or_default()).unwrap_or(USUAL_LIMIT)
}

/// The decimal number that a text begins with.
fn number(text: &[u8]) -> Option<u64> {
    let digits = text.iter().take_while(|byte| byte.is_ascii_digit());
    let mut number = None;
    for digit in digits {
        number = Some(number.unwrap_or(0_u64).checked_mul(10)?.checked_add(u64::from(digit - b'0'))?);
    }
    number
}

/// How many mappings there are; all that there may be where the kernel does not say.
fn count() -> u64 {
    let Some(file) = open(c"/proc/self/maps") else { return u64::MAX };
    let mut lines = 0;
    let mut text = [0u8; 4096];
    loop {
        match read(&file, &mut text) {
            Some(0) => return lines,
            Some(length) => {
                let ends = text.get(..length).unwrap_or_default().iter().filter(|byte| **byte == b'\n');
                lines += ends.count() as u64;
            }
            None => return u64::MAX,
        }
    }
}

fn open(path: &CStr) -> Option<Fd> {
    // SAFETY: the path ends with a zero.
    Fd::from_call(unsafe { libc::open(path.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC) }.into()).ok()
}

/// Reads what comes next; 0 at the end.
fn read(file: &Fd, room: &mut [u8]) -> Option<usize> {
    loop {
        // SAFETY: the kernel writes at most the length given.
        let length = unsafe { libc::read(file.number(), room.as_mut_ptr().cast(), room.len()) };
        if length >= 0 || raw::errno() != libc::EINTR {
            return usize::try_from(length).ok();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_are_counted_and_the_kernels_limit_is_known() {
        let maps = std::fs::read_to_string("/proc/self/maps").expect("procfs is mounted");
        // Other tests' threads map and unmap meanwhile.
        assert!(count().abs_diff(maps.lines().count() as u64) < 50);
        let limit_text = std::fs::read_to_string("/proc/sys/vm/max_map_count").expect("the kernel says");
        assert_eq!(limit().to_string(), limit_text.trim());
        assert!(room() > 0 && room() < limit() / 4);
    }

    #[test]
    fn a_number_ends_where_its_digits_end() {
        assert_eq!(number(b"65530\n"), Some(65530));
        assert_eq!(number(b""), None);
        assert_eq!(number(b"x1"), None);
        assert_eq!(number(b"99999999999999999999999"), None);
    }
}
