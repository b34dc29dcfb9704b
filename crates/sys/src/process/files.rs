//! The open files of a process (`/proc/PID/fd` and `fdinfo`).

use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use rustix::fs::{Mode, OFlags};

use crate::error::{Error, Result};
use crate::file::{self, FileId};
use crate::mountinfo;

/// A file that a process has open by a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenFile {
    /// Its path as the process's mount namespace has it; of a file of the kernel's own making, a name behind a slash.
    pub path: PathBuf,
    /// Whether it is open for reading.
    pub readable: bool,
    /// Whether it is read and written past the page cache (`O_DIRECT`).
    pub direct: bool,
    /// The type of its file system, such as `ext4`; `None` where its mount is none of the process's own.
    pub file_system: Option<String>,
}

/// The files that a process has open by a name; sockets, pipes and their like are not among them. No file is touched,
/// so this works even if the server of its file system does not answer.
///
/// # Errors
/// No such process, or this one may not look into it.
pub fn open_files(pid: u32) -> Result<Vec<OpenFile>> {
    let mounts = mountinfo::parse(&super::read(pid, "mountinfo")?);
    let directory = format!("/proc/{pid}/fd");
    let failed = |error| Error::new(format!("list {directory}"), error);
    let mut files = Vec::new();
    for entry in std::fs::read_dir(&directory).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        // It was closed since it was listed. If the file is open under another number, it is listed there, or was
        // opened since.
        let Ok(path) = std::fs::read_link(entry.path()) else { continue };
        if !path.as_os_str().as_bytes().starts_with(b"/") {
            continue;
        }
        let Ok(about) = super::read(pid, &format!("fdinfo/{}", entry.file_name().to_string_lossy())) else { continue };
        let Some((flags, mount)) = parse(&about) else { continue };
        let file_system = mounts.iter().find(|candidate| candidate.id == mount).map(|mount| mount.kind.clone());
        let readable = flags & libc::O_ACCMODE as u32 != libc::O_WRONLY as u32;
        files.push(OpenFile { path, readable, direct: flags & libc::O_DIRECT as u32 != 0, file_system });
    }
    Ok(files)
}

/// The numbers under which a process has a file open.
///
/// # Errors
/// As [`open_files`].
pub fn descriptors_of(pid: u32, file: FileId) -> Result<Vec<u32>> {
    let directory = format!("/proc/{pid}/fd");
    let failed = |error| Error::new(format!("list {directory}"), error);
    let mut numbers = Vec::new();
    for entry in std::fs::read_dir(&directory).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        // A socket or a pipe cannot be opened this way, and is none of RAM's files.
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let Ok(open) = rustix::fs::open(entry.path(), flags, Mode::empty()) else { continue };
        if file::id(&open)? == file {
            numbers.extend(entry.file_name().to_str().and_then(|number| number.parse::<u32>().ok()));
        }
    }
    Ok(numbers)
}

/// An open file's flags and its mount's number.
fn parse(text: &[u8]) -> Option<(u32, u64)> {
    let text = std::str::from_utf8(text).ok()?;
    let value = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    Some((u32::from_str_radix(value("flags:")?, 8).ok()?, value("mnt_id:")?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::OpenOptionsExt;

    use super::*;

    #[test]
    fn what_the_kernel_says_of_an_open_file_is_read() {
        assert_eq!(parse(b"pos:\t0\nflags:\t02140002\nmnt_id:\t29\nino:\t7\n"), Some((0o2_140_002, 29)));
        for text in
            [&b""[..], b"flags:\t08\nmnt_id:\t1\n", b"flags:\t0\n", b"mnt_id:\t1\n", b"flags:\t0\nmnt_id:\t-1\n"]
        {
            assert_eq!(parse(text), None);
        }
    }

    #[test]
    fn a_files_mode_and_file_system_are_told() {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = directory.path().join("file");
        let direct =
            std::fs::File::options().write(true).create(true).truncate(true).custom_flags(libc::O_DIRECT).open(&path);
        let files = || -> Vec<OpenFile> {
            let mut files = open_files(std::process::id()).unwrap();
            files.retain(|file| file.path == path);
            files
        };
        // tmpfs takes the flag since Linux 6.6.
        if let Ok(direct) = direct {
            let expected =
                OpenFile { path: path.clone(), readable: false, direct: true, file_system: Some("tmpfs".into()) };
            assert_eq!(files(), [expected]);
            drop(direct);
        }
        std::fs::write(&path, "").unwrap();
        assert_eq!(files(), []);
        let plain = std::fs::File::open(&path).unwrap();
        let expected =
            OpenFile { path: path.clone(), readable: true, direct: false, file_system: Some("tmpfs".into()) };
        assert_eq!(files(), [expected]);
        drop(plain);
    }

    #[test]
    fn a_process_that_does_not_exist_has_none() {
        assert!(open_files(u32::MAX >> 2).is_err());
    }
}
