//! Files that back guest RAM: their holes, punching, their file systems.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, FallocateFlags, Mode, OFlags, SeekFrom, StatxFlags};

use crate::PAGE_BYTES;
use crate::error::{Error, Result};
use crate::mountinfo;

/// The magic number of tmpfs (`TMPFS_MAGIC`).
const TMPFS: u64 = linux_raw_sys::general::TMPFS_MAGIC as u64;
/// The magic number of hugetlbfs (`HUGETLBFS_MAGIC`).
const HUGETLBFS: u64 = linux_raw_sys::general::HUGETLBFS_MAGIC as u64;

/// The stretches of `range` for which the file holds content, ascending. Reading any other part yields zeros.
///
/// On tmpfs they are exact to the page, and a page that was allocated and never touched is not among them. On hugetlbfs
/// the kernel knows no holes: the whole file is one stretch. The file may change meanwhile: a page that is written
/// after the iterator has passed it is missed.
pub fn allocated_runs<F: AsFd>(file: &F, range: Range<u64>) -> AllocatedRuns<'_> {
    AllocatedRuns { file: file.as_fd(), at: range.start, end: range.end }
}

/// See [`allocated_runs`]. Ends after the first error.
#[derive(Debug)]
pub struct AllocatedRuns<'a> {
    file: BorrowedFd<'a>,
    at: u64,
    end: u64,
}

impl AllocatedRuns<'_> {
    fn seek(&self, to: SeekFrom) -> Result<Option<u64>> {
        match rustix::fs::seek(self.file, to) {
            Ok(at) => Ok(Some(at)),
            // No data up to the file's end.
            Err(rustix::io::Errno::NXIO) => Ok(None),
            Err(error) => Err(Error::new("find the allocated parts of a RAM file", error)),
        }
    }

    fn step(&mut self) -> Result<Option<Range<u64>>> {
        if self.at >= self.end {
            return Ok(None);
        }
        let Some(start) = self.seek(SeekFrom::Data(self.at))?.filter(|&start| start < self.end) else {
            return Ok(None);
        };
        // A run that is punched or cut off at this moment still counts with its first page: the reader finds zeros
        // there.
        let end = self.seek(SeekFrom::Hole(start))?.unwrap_or(start).max(start + 1).min(self.end);
        self.at = end;
        Ok(Some(start..end))
    }
}

impl Iterator for AllocatedRuns<'_> {
    type Item = Result<Range<u64>>;

    fn next(&mut self) -> Option<Self::Item> {
        let step = self.step().transpose();
        if !matches!(step, Some(Ok(_))) {
            self.at = self.end;
        }
        step
    }
}

/// Discards the memory of `range`, which reads as zeros from now on. The file's length stays.
///
/// # Errors
/// The file system does not support it, or the file is not open for writing.
pub fn punch(file: impl AsFd, range: Range<u64>) -> Result<()> {
    fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, range, "give back memory of a RAM file")
}

/// Allocates the memory of `range`, with zeros where there was none. The file's length stays.
///
/// # Errors
/// `ENOSPC`, `ENOMEM`: there is not enough; what was allocated before the error may stay.
pub fn allocate(file: impl AsFd, range: Range<u64>) -> Result<()> {
    fallocate(file, FallocateFlags::KEEP_SIZE, range, "allocate memory of a RAM file")
}

fn fallocate(file: impl AsFd, flags: FallocateFlags, range: Range<u64>, doing: &'static str) -> Result<()> {
    if range.is_empty() {
        return Ok(());
    }
    loop {
        match rustix::fs::fallocate(&file, flags, range.start, range.end - range.start) {
            Err(rustix::io::Errno::INTR) => {}
            result => return result.map_err(|error| Error::new(doing, error)),
        }
    }
}

/// Memory or blocks that the file takes, bytes.
///
/// # Errors
/// `fstat` failed.
pub fn allocated_bytes(file: impl AsFd) -> Result<u64> {
    let stat = rustix::fs::fstat(file).map_err(|error| Error::new("look at a RAM file", error))?;
    // The unit is 512 bytes on every file system.
    Ok((stat.st_blocks as u64).saturating_mul(512))
}

/// A file's identity while it exists, as `/proc/PID/maps` shows it too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FileId {
    /// Major and minor number of the device.
    pub device: (u32, u32),
    /// The inode's number.
    pub inode: u64,
}

/// The file's identity.
///
/// # Errors
/// `fstat` failed.
pub fn id(file: impl AsFd) -> Result<FileId> {
    let stat = rustix::fs::fstat(file).map_err(|error| Error::new("look at a file", error))?;
    let device = (rustix::fs::major(stat.st_dev), rustix::fs::minor(stat.st_dev));
    Ok(FileId { device, inode: stat.st_ino })
}

/// The device of the file system that a directory is on.
///
/// # Errors
/// There is no such directory.
pub fn device_of(directory: &Path) -> Result<(u32, u32)> {
    let open = File::open(directory).map_err(|error| Error::new(format!("open {}", directory.display()), error))?;
    Ok(id(open)?.device)
}

/// A file without a name, open for reading and writing, on the file system of this directory.
///
/// # Errors
/// The file system makes none.
pub fn unnamed(dir: &Path) -> Result<File> {
    let unnamed = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = rustix::fs::open(dir, unnamed, Mode::RUSR | Mode::WUSR);
    file.map(File::from).map_err(|error| Error::new(format!("make a file without a name in {}", dir.display()), error))
}

/// Gives a file one more name, in its file system. One that never had a name, or has one still, can be given one.
///
/// # Errors
/// The name is taken, the directory is of another file system, or the file's last name was taken from it.
pub fn give_name(file: impl AsFd, path: &Path) -> Result<()> {
    let open = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
    rustix::fs::linkat(CWD, open, CWD, path, AtFlags::SYMLINK_FOLLOW)
        .map_err(|error| Error::new(format!("give a file the name {}", path.display()), error))
}

/// The same file once more, open for reading only.
///
/// # Errors
/// No descriptor left.
pub fn reader(file: impl AsFd) -> Result<File> {
    let path = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
    File::open(&path).map_err(|error| Error::new(format!("open {path}"), error))
}

/// Whether nobody has the file open for writing, nor mapped so that a write goes to it. `file` is open for reading
/// only.
///
/// The kernel grants a lease for reading (`fcntl(2)`, `F_SETLEASE`) only where that is so; it is given back at once.
///
/// # Errors
/// The file is not this user's, or of a file system without leases.
pub fn nobody_writes(file: impl AsFd) -> Result<bool> {
    let lease = |kind: libc::c_int| {
        // SAFETY: changes nothing but this open file's lease.
        let result = unsafe { libc::fcntl(file.as_fd().as_raw_fd(), libc::F_SETLEASE, kind) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    };
    let failed = |error| Error::new("ask who writes a file", error);
    match lease(libc::F_RDLCK) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
        Err(error) => Err(failed(error)),
        Ok(()) => lease(libc::F_UNLCK).map(|()| true).map_err(failed),
    }
}

/// A tmpfs's policy on huge pages (`huge=`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HugePolicy {
    /// Small pages only.
    Never,
    /// Huge pages wherever possible.
    Always,
    /// Huge pages within the file's size.
    WithinSize,
    /// Huge pages where the process asked for them.
    Advise,
    /// The policy is unknown: the mount is not of this mount namespace, or it is the kernel's own (a memfd).
    Unknown,
}

impl HugePolicy {
    /// The policy of a mount.
    #[must_use]
    pub fn of(mount: &mountinfo::Mount) -> Self {
        match mount.option("huge").map(|value| value.to_string_lossy()).as_deref() {
            // The kernel leaves the option out where it is the default.
            None | Some("never") => Self::Never,
            Some("always") => Self::Always,
            Some("within_size") => Self::WithinSize,
            Some("advise") => Self::Advise,
            Some(_) => Self::Unknown,
        }
    }

    /// The mount option's value; `None` where it is unknown.
    #[must_use]
    pub fn word(self) -> Option<&'static str> {
        Some(match self {
            Self::Never => "never",
            Self::Always => "always",
            Self::WithinSize => "within_size",
            Self::Advise => "advise",
            Self::Unknown => return None,
        })
    }
}

/// The kind of file that backs the memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// A file on a tmpfs.
    Tmpfs(HugePolicy),
    /// A file on a hugetlbfs.
    Hugetlbfs,
    /// An anonymous memory file, of either: it has no name that a second process could open.
    Memfd,
    /// Any other file system, by its magic number (`statfs(2)`).
    Other(u64),
}

/// The backing of a RAM file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Backing {
    /// The kind of file.
    pub kind: Kind,
    /// The size of a page of it, bytes.
    pub page_bytes: u64,
}

/// Says where a RAM file lies.
///
/// # Errors
/// `fstatfs` failed, or `/proc` is not mounted.
pub fn backing(file: impl AsFd) -> Result<Backing> {
    let file = file.as_fd();
    let statfs = rustix::fs::fstatfs(file).map_err(|error| Error::new("look at a RAM file's file system", error))?;
    let magic = statfs.f_type as u64 & u64::from(u32::MAX);
    let kind = match magic {
        TMPFS | HUGETLBFS if is_memfd(file)? => Kind::Memfd,
        TMPFS => Kind::Tmpfs(huge_policy(file)?),
        HUGETLBFS => Kind::Hugetlbfs,
        other => Kind::Other(other),
    };
    // hugetlbfs shows the size of its pages as its block size; elsewhere the block size says nothing of memory.
    Ok(Backing { kind, page_bytes: page_bytes_of(&statfs) })
}

/// The size of the pages in which a mapping of the file is made.
pub(crate) fn page_bytes(file: impl AsFd) -> Result<u64> {
    let statfs = rustix::fs::fstatfs(file).map_err(|error| Error::new("look at a RAM file's file system", error))?;
    Ok(page_bytes_of(&statfs))
}

fn page_bytes_of(statfs: &rustix::fs::StatFs) -> u64 {
    if statfs.f_type as u64 == HUGETLBFS { statfs.f_bsize as u64 } else { PAGE_BYTES }
}

fn is_memfd(file: BorrowedFd<'_>) -> Result<bool> {
    let link = format!("/proc/self/fd/{}", file.as_raw_fd());
    let path = std::fs::read_link(&link).map_err(|error| Error::new(format!("read {link}"), error))?;
    Ok(path.as_os_str().as_encoded_bytes().starts_with(b"/memfd:"))
}

fn huge_policy(file: BorrowedFd<'_>) -> Result<HugePolicy> {
    let statx = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID)
        .map_err(|error| Error::new("look at a RAM file", error))?;
    let mounts = mountinfo::mounts()?;
    let Some(mount) = mounts.iter().find(|mount| mount.id == statx.stx_mnt_id) else { return Ok(HugePolicy::Unknown) };
    Ok(HugePolicy::of(mount))
}

/// The bytes that the file's file system can still hold; `None` for a tmpfs without a limit.
///
/// # Errors
/// `fstatvfs` failed.
pub fn free_bytes(file: impl AsFd) -> Result<Option<u64>> {
    let statvfs = rustix::fs::fstatvfs(file).map_err(|error| Error::new("look at a RAM file's file system", error))?;
    Ok((statvfs.f_blocks != 0).then(|| statvfs.f_bavail.saturating_mul(statvfs.f_frsize)))
}

/// Writes `bytes` at `offset`, which may be a hole. Where memory runs out, this is an error and not a signal. It does
/// not work on hugetlbfs.
///
/// # Errors
/// `ENOSPC`, `ENOMEM`: there is no memory left.
pub fn write_at(file: impl AsFd, offset: u64, mut bytes: &[u8]) -> Result<()> {
    let mut at = offset;
    while !bytes.is_empty() {
        match rustix::io::pwrite(&file, bytes, at) {
            Ok(0) => return Err(Error::new("write to a RAM file", io::Error::from(io::ErrorKind::WriteZero))),
            Ok(written) => {
                bytes = &bytes[written..];
                at += written as u64;
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(Error::new("write to a RAM file", error)),
        }
    }
    Ok(())
}
