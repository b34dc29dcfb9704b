//! Removal of a directory in which another user could make anything.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Dir, Gid, Mode, OFlags, Uid, fchmod, fchown, openat, renameat, unlinkat};
use rustix::io::Errno;

use sterna_sys::host::random_u128;

/// Removes a directory of root's with all its content. No link is followed. Nested directories are moved up before they
/// are emptied, so that any depth takes no deep stack and only a few descriptors.
///
/// # Errors
/// The file system's error, also where the directory does not exist.
pub fn remove_directory(path: &Path) -> io::Result<()> {
    let top = open(CWD, path)?;
    loop {
        let mut empty = true;
        for entry in Dir::read_from(&top)? {
            let entry = entry?;
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            empty = false;
            if !unlink(&top, name)? {
                let nested = open(&top, name)?;
                take(&nested)?;
                flatten(&nested, &top)?;
                unlinkat(&top, name, AtFlags::REMOVEDIR)?;
            }
        }
        if empty {
            return fs::remove_dir(path);
        }
    }
}

fn open(at: impl AsFd, name: impl rustix::path::Arg) -> rustix::io::Result<OwnedFd> {
    openat(at, name, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
}

/// Makes the directory root's own: from then on nobody else changes its content, so it can be emptied.
fn take(dir: &OwnedFd) -> rustix::io::Result<()> {
    let (user, group) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    fchown(dir, Some(Uid::from_raw(user)), Some(Gid::from_raw(group)))?;
    fchmod(dir, Mode::RWXU)
}

/// Empties a directory: directories in it lie in `top` afterwards, under new names.
fn flatten(dir: &OwnedFd, top: &OwnedFd) -> rustix::io::Result<()> {
    loop {
        let mut empty = true;
        for entry in Dir::read_from(dir)? {
            let entry = entry?;
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            empty = false;
            if !unlink(dir, name)? {
                renameat(dir, name, top, format!("removed-{:032x}", random_u128()))?;
            }
        }
        if empty {
            return Ok(());
        }
    }
}

/// Removes an entry that is no directory. Returns whether it was none.
fn unlink(dir: &OwnedFd, name: &std::ffi::CStr) -> rustix::io::Result<bool> {
    match unlinkat(dir, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(true),
        // EPERM is what POSIX says for a directory, on systems that follow it.
        Err(Errno::ISDIR | Errno::PERM) => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::mkdirat;

    use super::*;

    /// Failed with `remove_dir_all`: it overflowed the stack, and the daemon ended, and again at each next start.
    #[test]
    fn directories_nested_without_end_are_removed() {
        let base = tempfile::tempdir_in("/dev/shm").unwrap();
        let (dir, outside) = (base.path().join("m"), base.path().join("outside"));
        fs::create_dir_all(dir.join("run/other/deep")).unwrap();
        fs::write(&outside, "stays").unwrap();
        std::os::unix::fs::symlink(base.path(), dir.join("run/other/link")).unwrap();
        for path in ["vm.json", "run/x", "run/other/x", "run/other/deep/x"] {
            fs::write(dir.join(path), "x").unwrap();
        }
        let mut at = open(CWD, dir.join("run")).unwrap();
        for _ in 0..3_000 {
            mkdirat(&at, "d", Mode::RWXU).unwrap();
            at = open(&at, "d").unwrap();
        }
        // The stack is small, so that the directories need not be nested very deep, which takes long.
        let remove = |dir: std::path::PathBuf| {
            std::thread::Builder::new()
                .stack_size(128 << 10)
                .spawn(move || remove_directory(&dir))
                .unwrap()
                .join()
                .unwrap()
        };
        remove(dir.clone()).unwrap();
        assert!(!dir.exists() && outside.exists());
        assert_eq!(remove_directory(&dir).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
