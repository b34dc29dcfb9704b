//! Paths that others can change: no link of another user is followed on the way, and a file is opened only when its
//! kind is known.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::net::UnixStream;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::error::{Error, Result};
use crate::file::{self, FileId};

/// The most links that are followed in one path, as in the kernel.
const MAX_LINKS: usize = 40;

/// The directory that a path begins at.
#[derive(Debug)]
pub struct Root(OwnedFd);

impl Root {
    /// This process's own root.
    ///
    /// # Errors
    /// This process may not look at it.
    pub fn own() -> Result<Self> {
        Self::at("/".into())
    }

    /// A process's root: its mounts may differ from this one's.
    ///
    /// # Errors
    /// No such process, or this one may not trace it.
    pub fn of(pid: u32) -> Result<Self> {
        Self::at(format!("/proc/{pid}/root"))
    }

    fn at(path: String) -> Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = rustix::fs::open(&path, flags, Mode::empty());
        opened.map(Self).map_err(|error| Error::new(format!("look at {path}"), error))
    }

    /// Finds what `path` names below this root. A symbolic link is followed where root or this process's user made it,
    /// in a directory of theirs. An absolute link and `..` do not lead out of the root.
    ///
    /// # Errors
    /// `ENOENT`, `ENOTDIR`; `ELOOP` for a link that another user made.
    pub fn find(&self, path: &Path) -> Result<Place> {
        self.walk(path).map_err(|error| Error::new(format!("look at {}", path.display()), error))
    }

    fn walk(&self, path: &Path) -> rustix::io::Result<Place> {
        // The directories on the way: `..` goes back to the one from which this one was reached, even if that has been
        // moved since.
        let mut trail = vec![rustix::io::fcntl_dupfd_cloexec(&self.0, 0)?];
        let mut pending = reversed(path);
        let mut links = 0;
        while let Some(name) = pending.pop() {
            if name == ".." {
                trail.truncate((trail.len() - 1).max(1));
                continue;
            }
            let directory = &trail[trail.len() - 1];
            let next = open_itself(directory, &name)?;
            let stat = rustix::fs::fstat(&next)?;
            match FileType::from_raw_mode(stat.st_mode) {
                FileType::Symlink => {
                    links += 1;
                    if links > MAX_LINKS || !ours(&stat) || !ours(&rustix::fs::fstat(directory)?) {
                        return Err(Errno::LOOP);
                    }
                    let target = rustix::fs::readlinkat(&next, c"", Vec::new())?;
                    let target = PathBuf::from(OsString::from_vec(target.into_bytes()));
                    if target.is_absolute() {
                        trail.truncate(1);
                    }
                    pending.extend(reversed(&target));
                }
                FileType::Directory => trail.push(next),
                _ if pending.is_empty() => return Ok(Place(next)),
                _ => return Err(Errno::NOTDIR),
            }
        }
        trail.pop().map(Place).ok_or(Errno::NOENT)
    }
}

/// The names in a path, the last one first.
fn reversed(path: &Path) -> Vec<OsString> {
    let names = path.components().filter_map(|component| match component {
        Component::Normal(name) => Some(name),
        Component::ParentDir => Some(OsStr::new("..")),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    });
    names.rev().map(OsStr::to_os_string).collect()
}

/// Whether root or this process's user owns the file.
fn ours(stat: &Stat) -> bool {
    stat.st_uid == 0 || stat.st_uid == rustix::process::geteuid().as_raw()
}

/// Opens a name itself, even if it is a link. The file behind it is not opened, so no device, pipe or server notices.
fn open_itself(directory: impl AsFd, name: impl rustix::path::Arg) -> rustix::io::Result<OwnedFd> {
    rustix::fs::openat(directory, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
}

/// A place in a file system, which stays the same whatever happens to its name.
#[derive(Debug)]
pub struct Place(OwnedFd);

impl AsFd for Place {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Place {
    /// The place that `path` itself names: a link there is not followed.
    ///
    /// # Errors
    /// `ENOENT` and the like.
    pub fn at(path: &Path) -> Result<Self> {
        let found = open_itself(rustix::fs::CWD, path);
        found.map(Self).map_err(|error| Error::new(format!("look at {}", path.display()), error))
    }

    /// The result of `fstat`.
    ///
    /// # Errors
    /// `fstat` failed.
    pub fn stat(&self) -> Result<Stat> {
        rustix::fs::fstat(&self.0).map_err(|error| Error::new("look at a file", error))
    }

    /// The file's identity.
    ///
    /// # Errors
    /// `fstat` failed.
    pub fn id(&self) -> Result<FileId> {
        file::id(&self.0)
    }

    /// Opens the regular file that this is, for reading, and for writing where `write` is set.
    ///
    /// # Errors
    /// It is no regular file, or may not be opened.
    pub fn open(&self, write: bool) -> Result<File> {
        if FileType::from_raw_mode(self.stat()?.st_mode) != FileType::RegularFile {
            return Err(Error::malformed("open a file", "it is no regular file"));
        }
        let access = if write { OFlags::RDWR } else { OFlags::RDONLY };
        let opened = rustix::fs::open(self.itself(), access | OFlags::CLOEXEC | OFlags::NOCTTY, Mode::empty());
        opened.map(File::from).map_err(|error| Error::new("open a file", error))
    }

    /// A path that leads here in this process as long as this lives, for calls that take only paths.
    #[must_use]
    pub fn itself(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.0.as_raw_fd()))
    }
}

/// Opens a regular file for reading, and no other kind of file: a link is not followed, and a pipe is not waited for.
///
/// # Errors
/// There is no file, or it is no regular one.
pub fn open_regular(path: &Path) -> Result<File> {
    Place::at(path)?.open(false)
}

/// Connects to the stream socket that `path` names, without waiting: the connection is non-blocking. No link of
/// another user is followed: the path may lead through directories of the listener's user.
///
/// # Errors
/// As [`Root::find`]; nobody listens there; `EAGAIN` where the listener's queue is full.
pub fn connect(path: &Path) -> std::io::Result<UnixStream> {
    let place = Root::own()?.find(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(place.itself())?)?;
    Ok(socket.into())
}
