//! The mappings of a process (`/proc/PID/maps`).

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::ops::Range;
use std::path::PathBuf;

use crate::error::{Error, Result};
use crate::file::FileId;
use crate::mountinfo::unescape;

/// The permissions of a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Permissions {
    /// The process may read it.
    pub read: bool,
    /// The process may write it.
    pub write: bool,
    /// The process may execute it.
    pub execute: bool,
    /// Others see what it writes (`MAP_SHARED`).
    pub shared: bool,
}

/// A mapping: a range of a process's addresses that is mapped alike.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapping {
    /// The addresses.
    pub range: Range<u64>,
    /// The mapping's permissions.
    pub permissions: Permissions,
    /// The offset in the file at which it starts, bytes.
    pub offset: u64,
    /// The file; `None` for anonymous memory.
    pub file: Option<FileId>,
    /// The file's path as the process's mount namespace has it, or a name in square brackets.
    pub path: Option<PathBuf>,
    /// Whether the file no longer has a name.
    pub deleted: bool,
}

/// The mappings of a process, in the order of their addresses. Empty for a kernel thread and a zombie.
///
/// # Errors
/// No such process, or this one may not trace it.
pub fn maps(pid: u32) -> Result<Vec<Mapping>> {
    Ok(parse_maps(&super::read(pid, "maps")?))
}

/// Shows the mappings of a process one after another, in the order of their addresses. None is kept: a process may have
/// tens of thousands, each with a path of its choice.
///
/// # Errors
/// As [`maps`]; the mappings before have been shown.
pub fn each_mapping(pid: u32, mut show: impl FnMut(Mapping)) -> Result<()> {
    let path = format!("/proc/{pid}/maps");
    let failed = |error| Error::new(format!("read {path}"), error);
    let mut lines = BufReader::new(File::open(&path).map_err(failed)?);
    let mut line = Vec::new();
    // The kernel's lines are no longer than a path and some numbers.
    while lines.read_until(b'\n', &mut line).map_err(failed)? > 0 {
        if let Some(mapping) = parse_line(line.trim_ascii_end()) {
            show(mapping);
        }
        line.clear();
    }
    Ok(())
}

/// Opens the file that a process has mapped at this address for reading and writing, whether it has a name or not.
/// `None` where it has none mapped there.
///
/// # Errors
/// No such process, this one may not trace it, or the file may not be opened. `ENOENT`: the mapping has just changed.
pub fn open_mapped(pid: u32, address: u64) -> Result<Option<File>> {
    let mut found = None;
    each_mapping(pid, |mapping| {
        if mapping.range.contains(&address) && mapping.file.is_some() {
            found = Some(mapping.range);
        }
    })?;
    found.map(|mapping| open_mapping(pid, &mapping)).transpose()
}

/// Opens the file of this mapping of a process, as the kernel lists it, for reading and writing.
///
/// # Errors
/// As [`open_mapped`]. `ENOENT`: the kernel lists no such mapping now.
pub fn open_mapping(pid: u32, Range { start, end }: &Range<u64>) -> Result<File> {
    let path = format!("/proc/{pid}/map_files/{start:x}-{end:x}");
    let file = File::options().read(true).write(true).open(&path);
    file.map_err(|error| Error::new(format!("open {path}"), error))
}

/// The mappings that `text` lists; lines that are not understood are passed over.
pub fn parse_maps(text: &[u8]) -> Vec<Mapping> {
    text.split(|&byte| byte == b'\n').filter_map(parse_line).collect()
}

fn parse_line(line: &[u8]) -> Option<Mapping> {
    let mut rest = line;
    let mut field = || {
        let end = rest.iter().position(|&byte| byte == b' ').unwrap_or(rest.len());
        let field = std::str::from_utf8(&rest[..end]).ok();
        rest = rest.get(end + 1..).unwrap_or_default();
        field
    };
    let (start, end) = field()?.split_once('-')?;
    let permissions = field()?.as_bytes();
    let offset = hexadecimal(field()?)?;
    let (major, minor) = field()?.split_once(':')?;
    let inode: u64 = field()?.parse().ok()?;
    // Blanks align the paths in one column; a path never starts with one.
    let path = rest.trim_ascii_start();
    let without = path.strip_suffix(b" (deleted)");
    let name = without.unwrap_or(path);
    let device = (u32::from_str_radix(major, 16).ok()?, u32::from_str_radix(minor, 16).ok()?);
    Some(Mapping {
        range: hexadecimal(start)?..hexadecimal(end)?,
        permissions: Permissions {
            read: permissions.first() == Some(&b'r'),
            write: permissions.get(1) == Some(&b'w'),
            execute: permissions.get(2) == Some(&b'x'),
            shared: permissions.get(3) == Some(&b's'),
        },
        offset,
        file: (inode != 0).then_some(FileId { device, inode }),
        path: (!name.is_empty()).then(|| PathBuf::from(unescape(name))),
        deleted: without.is_some(),
    })
}

fn hexadecimal(field: &str) -> Option<u64> {
    u64::from_str_radix(field, 16).ok()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn mappings_that_are_shown_one_by_one_are_those_that_are_listed() {
        let child = std::process::Command::new("sleep").arg("60").spawn();
        let mut child = child.expect("sleep runs");
        let pid = child.id();
        while std::fs::read_link(format!("/proc/{pid}/exe")).ok() == std::env::current_exe().ok() {
            std::thread::yield_now();
        }
        // It may still be loading its libraries.
        let same = (0..100).any(|_| {
            let mut shown = Vec::new();
            each_mapping(pid, |mapping| shown.push(mapping)).expect("it runs");
            shown == maps(pid).expect("it runs") && !shown.is_empty()
        });
        child.kill().expect("it runs");
        child.wait().expect("it ends");
        assert!(same);
        assert!(each_mapping(u32::MAX, drop).is_err());
    }

    #[test]
    fn files_anonymous_memory_and_odd_names_are_told_apart() {
        let text = b"55d0c0a00000-55d0c0a21000 r--p 00002000 fe:00 1234                       /usr/bin/qemu\n\
            7f0000000000-7f0040000000 rw-s 00000000 00:1f 77   /dev/shm/my ram\\012file (deleted)\n\
            7f0050000000-7f0050001000 rw-p 00000000 00:00 0 \n\
            7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0                          [stack]\n\
            rubbish\n";
        let maps = parse_maps(text);
        assert_eq!(maps.len(), 4);
        assert_eq!(maps[0].file, Some(FileId { device: (0xfe, 0), inode: 1234 }));
        assert_eq!(maps[0].offset, 0x2000);
        assert!(!maps[0].permissions.write && !maps[0].permissions.shared);
        assert_eq!(maps[1].path.as_deref(), Some(Path::new("/dev/shm/my ram\nfile")));
        assert!(maps[1].deleted && maps[1].permissions.shared && maps[1].permissions.write);
        assert_eq!(maps[1].range, 0x7f00_0000_0000..0x7f00_4000_0000);
        assert_eq!((&maps[2].file, &maps[2].path), (&None, &None));
        assert_eq!(maps[3].path.as_deref(), Some(Path::new("[stack]")));
    }
}
