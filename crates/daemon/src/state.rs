//! The state directory: what must outlive the daemon.
//!
//! ```text
//! STATE/lock                one daemon per directory
//! STATE/ram/                a tmpfs of our own: RAM files, NAME-RANDOM
//! STATE/ram/lent/           pages of guests that run on other hosts
//! STATE/vms/NAME/vm.json    the machine's record; beside it qemu.log
//! STATE/vms/NAME/epoch.json how often its guest, a part of whose memory is elsewhere, has changed hands
//! STATE/vms/NAME/run/       of QEMU's user: qmp.sock, agent.sock
//! STATE/logs/NAME.log       what the last QEMU of that name said before it ended
//! STATE/owed/GUEST-….json   what memory hosts have lent, and is to be given back
//! STATE/templates/NAME.json what clones can be made of
//! STATE/migrations/ID.json  what became of a migration, as far as the other end may ask
//! ```
//!
//! All of it is root's, and only root can write there, except in `run/`. A QEMU that a hostile guest controls can
//! change `run/`, so the daemon neither believes nor writes what is there.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use sterna_sys::file::HugePolicy;
use sterna_sys::huge::transparent_bytes;
use sterna_sys::mount::{Tmpfs, mounted_at, set_huge_policy, unmount};

use crate::room;

// Records, and whom they may come from.
mod record_file;
// Removing what others had a part in.
mod remove;

pub use record_file::{Outlives, read_record, remove_half_written, replace_record, take_directory, write_record};
pub use remove::remove_directory;

/// The state directory, locked for as long as this lives.
#[derive(Debug)]
pub struct StateDir {
    root: PathBuf,
    _locks: [File; 2],
}

/// A state directory that is unusable.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// A file or directory could not be made or read.
    #[error("cannot use {path}", path = .path.display())]
    Io {
        /// The path.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// Another daemon uses the state directory.
    #[error("another daemon uses the state directory {path}: give this one another --state-dir", path = .0.display())]
    Locked(PathBuf),
    /// The RAM file system cannot be mounted.
    #[error("cannot mount a tmpfs on {path}: the daemon needs CAP_SYS_ADMIN, or a tmpfs mounted there", path = .path.display())]
    Mount {
        /// The path.
        path: PathBuf,
        /// The cause.
        #[source]
        source: sterna_sys::Error,
    },
}

impl StateDir {
    /// Makes what is missing, takes the lock, mounts the RAM file system; `huge_pages`: RAM may be in huge pages.
    ///
    /// # Errors
    /// [`StateError`].
    pub fn open(root: &Path, huge_pages: bool) -> Result<Self, StateError> {
        let io_error = |path: &Path| {
            let path = path.to_path_buf();
            move |source| StateError::Io { path, source }
        };
        make_dir(root, 0o755).map_err(io_error(root))?;
        // The root itself may be a link: the user who starts the daemon chooses it.
        fs::canonicalize(root).and_then(|root| take_directory(&root)).map_err(io_error(root))?;
        let locks = lock(root)?;
        let state = Self { root: root.into(), _locks: locks };
        let private = [state.migrations(), state.templates(), state.owed()];
        let own = private.into_iter().map(|dir| (dir, 0o700)).chain([(state.logs(), 0o750)]);
        for (dir, mode) in [(state.ram(), 0o755), (state.vms(), 0o755)].into_iter().chain(own) {
            make_dir(&dir, mode).map_err(io_error(&dir))?;
            take_directory(&dir).map_err(io_error(&dir))?;
        }
        remove_half_written(&state.migrations());
        state.mount_ram(huge_pages)?;
        // This is about the mounted file system's own directory: somebody else may have mounted it.
        take_directory(&state.ram()).map_err(io_error(&state.ram()))?;
        Ok(state)
    }

    /// Where RAM files lie.
    #[must_use]
    pub fn ram(&self) -> PathBuf {
        self.root.join("ram")
    }

    /// Where pages of guests that run on other hosts lie.
    #[must_use]
    pub fn lent(&self) -> PathBuf {
        self.ram().join("lent")
    }

    /// Where machines have their directories.
    #[must_use]
    pub fn vms(&self) -> PathBuf {
        self.root.join("vms")
    }

    /// One machine's directory.
    #[must_use]
    pub fn vm(&self, name: &str) -> PathBuf {
        self.vms().join(name)
    }

    /// Makes a new machine's directory: root's, and others may pass through it to what is theirs.
    ///
    /// # Errors
    /// The directory is there already, or the file system's error.
    pub fn make_vm(&self, name: &str) -> io::Result<PathBuf> {
        let dir = self.vm(name);
        fs::DirBuilder::new().mode(0o755).create(&dir)?;
        // The daemon's umask may have removed bits.
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o755))?;
        Ok(dir)
    }

    /// Where the logs of machines that ended lie.
    #[must_use]
    pub fn logs(&self) -> PathBuf {
        self.root.join("logs")
    }

    /// Where templates are remembered.
    #[must_use]
    pub fn templates(&self) -> PathBuf {
        self.root.join("templates")
    }

    /// Where it is remembered what memory hosts have lent and is to be given back.
    #[must_use]
    pub fn owed(&self) -> PathBuf {
        self.root.join("owed")
    }

    /// Where migrations are remembered.
    #[must_use]
    pub fn migrations(&self) -> PathBuf {
        self.root.join("migrations")
    }

    /// Gives the RAM file system back where it is empty and ours.
    pub fn unmount_if_empty(&self) {
        let ram = self.ram();
        // It stays where anything is lent.
        let _ = fs::remove_dir(self.lent());
        let empty = fs::read_dir(&ram).is_ok_and(|mut entries| entries.next().is_none());
        if empty
            && mounted_at(&ram).is_ok_and(|mount| mount.is_some())
            && let Err(error) = unmount(&ram)
        {
            tracing::debug!(%error, path = %ram.display(), "the RAM file system stays mounted");
        }
    }

    /// Mounts a file system of our own for RAM. Whoever maps it decides by its advice what is in huge pages: QEMU,
    /// which asks for them, gets them, and pages that this daemon writes are small. One that is mounted already by a
    /// daemon before this one is changed; where that is not possible it stays as it is.
    fn mount_ram(&self, huge_pages: bool) -> Result<(), StateError> {
        let path = self.ram();
        let huge = if huge_pages && transparent_bytes().is_some() { HugePolicy::Advise } else { HugePolicy::Never };
        let mounted = || -> sterna_sys::Result<()> {
            match mounted_at(&path)? {
                None => Tmpfs { size_bytes: Some(room::total_bytes()), mode: 0o755, huge }.mount(&path)?,
                // Others' mounts with another policy are theirs.
                Some(mount)
                    if matches!(
                        (HugePolicy::of(&mount), huge),
                        (HugePolicy::Never, HugePolicy::Advise) | (HugePolicy::Advise, HugePolicy::Never)
                    ) && mount.kind == "tmpfs" =>
                {
                    if let Err(error) = set_huge_policy(&path, huge) {
                        tracing::warn!(%error, "the RAM file system stays as it is");
                    }
                }
                Some(_) => {}
            }
            Ok(())
        };
        mounted().map_err(|source| StateError::Mount { path: path.clone(), source })
    }
}

/// Takes the locks of a state directory. One is the directory's own, which holds under any path and even if somebody
/// removes the directory's content; the other is of a file in it, which earlier daemons know.
fn lock(root: &Path) -> Result<[File; 2], StateError> {
    let path = root.join("lock");
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32)
        .open(&path);
    let lock = |path: &Path, opened: io::Result<File>| {
        let io_error = |source| StateError::Io { path: path.into(), source };
        let opened = opened.map_err(io_error)?;
        match flock(&opened, FlockOperation::NonBlockingLockExclusive) {
            Err(rustix::io::Errno::WOULDBLOCK) => Err(StateError::Locked(root.into())),
            other => other.map(|()| opened).map_err(|error| io_error(error.into())),
        }
    };
    Ok([lock(root, File::open(root))?, lock(&path, file)?])
}

fn make_dir(path: &Path, mode: u32) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(mode).create(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_daemon_is_told_that_the_directory_is_taken() {
        let dir = tempfile::tempdir().unwrap();
        let first = match StateDir::open(dir.path(), true) {
            Err(StateError::Mount { source, .. }) => return eprintln!("skipped: no mounts here: {source}"),
            other => other.unwrap(),
        };
        assert!(matches!(StateDir::open(dir.path(), true), Err(StateError::Locked(_))));
        first.unmount_if_empty();
        drop(first);
        let again = StateDir::open(dir.path(), true).unwrap();
        fs::write(again.ram().join("x"), "1").unwrap();
        again.unmount_if_empty();
        assert!(mounted_at(&again.ram()).unwrap().is_some(), "a RAM file must not lose its file system");
        fs::remove_file(again.ram().join("x")).unwrap();
        again.unmount_if_empty();
        assert!(mounted_at(&again.ram()).unwrap().is_none());
    }

    #[test]
    fn a_ram_file_system_of_an_earlier_daemon_gets_huge_pages_and_keeps_what_it_holds() {
        let dir = tempfile::tempdir().unwrap();
        let policy = |state: &StateDir| HugePolicy::of(&mounted_at(&state.ram()).unwrap().expect("mounted"));
        let before = match StateDir::open(dir.path(), false) {
            Err(StateError::Mount { source, .. }) => return eprintln!("skipped: no mounts here: {source}"),
            other => other.unwrap(),
        };
        assert_eq!(policy(&before), HugePolicy::Never);
        fs::write(before.ram().join("x"), "1").unwrap();
        drop(before);
        let state = StateDir::open(dir.path(), true).unwrap();
        let has_huge_pages = transparent_bytes().is_some();
        assert_eq!(policy(&state), if has_huge_pages { HugePolicy::Advise } else { HugePolicy::Never });
        assert_eq!(fs::read(state.ram().join("x")).unwrap(), b"1");
        fs::remove_file(state.ram().join("x")).unwrap();
        state.unmount_if_empty();
    }

    /// Failed while the lock was that of the file alone: the second daemon removed what the first had just made.
    #[test]
    fn neither_a_link_nor_another_lock_file_lets_a_second_daemon_in() {
        let dir = tempfile::tempdir().unwrap();
        let (root, link) = (dir.path().join("state"), dir.path().join("link"));
        fs::create_dir(&root).unwrap();
        let first = lock(&root).unwrap();
        std::os::unix::fs::symlink(&root, &link).unwrap();
        assert!(matches!(lock(&link), Err(StateError::Locked(_))));
        fs::remove_file(root.join("lock")).unwrap();
        assert!(matches!(lock(&root), Err(StateError::Locked(_))));
        drop(first);
        // An earlier daemon knows of the file alone.
        let old = File::create(root.join("lock")).unwrap();
        flock(&old, FlockOperation::NonBlockingLockExclusive).unwrap();
        assert!(matches!(lock(&root), Err(StateError::Locked(_))));
    }
}
