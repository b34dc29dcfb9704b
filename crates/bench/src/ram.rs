//! A guest's RAM as a file, and how much of it is not zeros.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::Duration;

use nix::errno::Errno;
use nix::unistd::{Whence, lseek};
use serde::Serialize;

use crate::error::{Context, Error, Result};

const PAGE_BYTES: usize = 4096;

/// The usage of a guest's RAM.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// Pages the host has given memory for.
    pub allocated_pages: u64,
    /// Of these, pages that are not all zero.
    pub nonzero_pages: u64,
}

/// The file that a QEMU process maps as RAM: its largest file of at least `memory_bytes`.
///
/// # Errors
/// Where there is none, because the RAM is not a file.
pub fn file_of(pid: u32, memory_bytes: u64) -> Result<PathBuf> {
    let maps =
        std::fs::read_to_string(format!("/proc/{pid}/maps")).context(|| format!("reading the mappings of {pid}"))?;
    let mapping = |line: &str| {
        let (range, rest) = line.split_once(' ')?;
        let (start, end) = range.split_once('-')?;
        let size = u64::from_str_radix(end, 16).ok()?.checked_sub(u64::from_str_radix(start, 16).ok()?)?;
        let path = rest.get(rest.find('/')?..)?;
        (size >= memory_bytes).then(|| (size, PathBuf::from(path)))
    };
    let largest = maps.lines().filter_map(mapping).max_by_key(|(size, _)| *size);
    largest
        .map(|(_, path)| path)
        .ok_or_else(|| Error::Usage(format!("process {pid} maps no file of {memory_bytes} bytes")))
}

/// The working set: pages of a guest's RAM that are touched within `time`. QEMU's page tables show what was touched;
/// where they map huge pages, each counts whole.
///
/// # Errors
/// Where the kernel does not say.
pub fn working_set(pid: u32, memory_bytes: u64, time: Duration) -> Result<u64> {
    let file = format!("/proc/{pid}/clear_refs");
    std::fs::write(&file, "1").context(|| format!("writing to {file}"))?;
    std::thread::sleep(time);
    let file = format!("/proc/{pid}/smaps");
    let text = std::fs::read_to_string(&file).context(|| format!("reading {file}"))?;
    referenced_pages(&text, memory_bytes)
        .ok_or_else(|| Error::Usage(format!("process {pid} maps no {memory_bytes} bytes in one piece")))
}

/// The pages referenced in the largest mapping of at least the given size without code, from `/proc/PID/smaps`: what
/// QEMU has translated may be larger than the RAM.
fn referenced_pages(smaps: &str, memory_bytes: u64) -> Option<u64> {
    let kib = |line: &str, key: &str| line.strip_prefix(key)?.split_ascii_whitespace().next()?.parse::<u64>().ok();
    let (mut is_code, mut size, mut largest) = (false, 0, None);
    for line in smaps.lines() {
        is_code = is_code_of(line).unwrap_or(is_code);
        size = kib(line, "Size:").unwrap_or(size);
        if let Some(referenced) = kib(line, "Referenced:")
            && !is_code
            && size >= (memory_bytes >> 10).max(largest.map_or(0, |(size, _)| size))
        {
            largest = Some((size, referenced / 4));
        }
    }
    largest.map(|(_, pages)| pages)
}

/// The memory of the guest's code that QEMU has translated, bytes; none where the host's processor runs the guest.
///
/// # Errors
/// Where the kernel does not say.
pub fn translated_bytes(pid: u32) -> Result<u64> {
    let file = format!("/proc/{pid}/smaps");
    let text = std::fs::read_to_string(&file).context(|| format!("reading {file}"))?;
    Ok(writable_code_kib(&text) << 10)
}

/// The memory of mappings that are both writable and executable, KiB, from `/proc/PID/smaps`.
fn writable_code_kib(smaps: &str) -> u64 {
    let (mut is_code, mut sum) = (false, 0);
    for line in smaps.lines() {
        is_code = is_code_of(line).unwrap_or(is_code);
        let mut words = line.split_ascii_whitespace();
        if let (Some("Rss:"), Some(kib), true) = (words.next(), words.next(), is_code) {
            sum += kib.parse::<u64>().unwrap_or(0);
        }
    }
    sum
}

/// Whether the mapping that begins with this line of `smaps` is writable code; `None` where none begins.
fn is_code_of(line: &str) -> Option<bool> {
    let mut words = line.split_ascii_whitespace();
    let (range, access) = (words.next()?, words.next()?);
    range.contains('-').then(|| access.starts_with("rwx"))
}

/// Counts the pages of a RAM file; holes are skipped and stay holes.
///
/// # Errors
/// Where the file cannot be read.
pub fn usage(path: &std::path::Path) -> Result<Usage> {
    let file = File::open(path).context(|| format!("opening {}", path.display()))?;
    let seek = |from: i64, whence| match lseek(&file, from, whence) {
        Ok(at) => Ok(Some(at)),
        Err(Errno::ENXIO) => Ok(None),
        Err(error) => Err(error).context(|| format!("looking for data in {}", path.display())),
    };
    let mut usage = Usage::default();
    let mut block = vec![0; 256 * PAGE_BYTES];
    let mut at = 0;
    while let Some(start) = seek(at, Whence::SeekData)? {
        let end = seek(start, Whence::SeekHole)?.unwrap_or(start);
        at = start;
        while at < end {
            let wanted = usize::try_from(end - at).unwrap_or(usize::MAX).min(block.len());
            let read = file.read_at(&mut block[..wanted], at.unsigned_abs()).context(|| "reading RAM".into())?;
            if read == 0 {
                return Ok(usage);
            }
            for page in block[..read].chunks(PAGE_BYTES) {
                usage.allocated_pages += 1;
                usage.nonzero_pages += u64::from(!is_zero(page));
            }
            at += i64::try_from(read).unwrap_or(i64::MAX - at);
        }
    }
    Ok(usage)
}

/// Whether a page holds zeros alone.
pub(crate) fn is_zero(page: &[u8]) -> bool {
    page.chunks(64).all(|line| line.iter().fold(0, |all, byte| all | byte) == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_working_set_is_that_of_the_largest_mapping() {
        let smaps = "7e00-7f00 rwxp\nSize: 2097152 kB\nReferenced: 9 kB\n7f00-7f10 rw-p\nSize:   2048 kB\nReferenced:  2048 kB\n7f10-7f20 rw-s\nSize:  1048576 kB\nRss: 9 kB\nReferenced:    400 kB\n";
        assert_eq!(referenced_pages(smaps, 1 << 30), Some(100));
        assert_eq!(referenced_pages(smaps, 1 << 31), None);
        assert!(working_set(std::process::id(), u64::MAX, Duration::ZERO).is_err());
    }

    #[test]
    fn translated_code_is_what_is_both_writable_and_executable() {
        let smaps = "7f00-7f10 rwxp 0 00:00 0\nSize: 2048 kB\nRss: 12 kB\n7f10-7f20 rw-p 0 00:00 0\nSize: 8 kB\nRss: 9 kB\n7f20-7f30 rwxp 0 00:00 0\nRss: 4 kB\nVmFlags: rd-wr ex\n";
        assert_eq!(writable_code_kib(smaps), 16);
        assert_eq!(translated_bytes(std::process::id()).unwrap(), 0);
    }

    #[test]
    fn holes_zero_pages_and_pages_with_content_are_told_apart() {
        let mut temporary = tempfile::Builder::new().tempfile_in("/dev/shm").unwrap();
        let file = temporary.as_file_mut();
        file.set_len(64 << 20).unwrap();
        file.write_all_at(&[0; 3 * PAGE_BYTES], 5 << 20).unwrap();
        file.write_all_at(&[1], (5 << 20) + 4096).unwrap();
        file.write_all_at(&[1], (64 << 20) - 1).unwrap();
        assert_eq!(usage(temporary.path()).unwrap(), Usage { allocated_pages: 4, nonzero_pages: 2 });
    }

    #[test]
    fn a_process_without_such_a_mapping_is_told() {
        assert!(file_of(std::process::id(), 1 << 50).unwrap_err().to_string().contains("maps no file"));
    }
}
