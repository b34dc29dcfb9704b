//! The state directory: what must outlive the daemon.
//!
//! ```text
//! STATE/lock                one daemon per directory
//! STATE/ram/                a tmpfs of our own: RAM files, NAME-RANDOM
//! STATE/vms/NAME/vm.json    the machine's record; beside it qmp.sock, agent.sock, qemu.log
//! STATE/logs/NAME.log       what the last QEMU of that name said before it ended
//! STATE/migrations/ID.json  what became of a migration, as far as the other end may ask
//! ```

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use serde::Serialize;
use serde::de::DeserializeOwned;
use sterna_sys::mount::{Tmpfs, mounted_at, unmount};

use crate::room;

/// The state directory, locked for as long as this lives.
#[derive(Debug)]
pub struct StateDir {
    root: PathBuf,
    _lock: File,
}

/// A state directory that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// A file or directory could not be made or read.
    #[error("cannot use {path}", path = .path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Another daemon has it.
    #[error("another daemon uses the state directory {path}: give this one another --state-dir", path = .0.display())]
    Locked(PathBuf),
    /// The RAM file system cannot be mounted.
    #[error("cannot mount a tmpfs on {path}: the daemon needs CAP_SYS_ADMIN, or a tmpfs with huge=never mounted there", path = .path.display())]
    Mount {
        /// Where.
        path: PathBuf,
        /// Why.
        #[source]
        source: sterna_sys::Error,
    },
}

impl StateDir {
    /// Makes what is missing, takes the lock, mounts the RAM file system.
    ///
    /// # Errors
    /// [`StateError`].
    pub fn open(root: &Path) -> Result<Self, StateError> {
        let io_error = |path: &Path| {
            let path = path.to_path_buf();
            move |source| StateError::Io { path, source }
        };
        make_dir(root, 0o755).map_err(io_error(root))?;
        let lock_path = root.join("lock");
        let lock =
            File::options().create(true).truncate(false).write(true).open(&lock_path).map_err(io_error(&lock_path))?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(StateError::Locked(root.into())),
            other => other.map_err(|error| io_error(&lock_path)(error.into()))?,
        }
        let state = Self { root: root.into(), _lock: lock };
        for (dir, mode) in
            [(state.ram(), 0o755), (state.vms(), 0o755), (state.logs(), 0o750), (state.migrations(), 0o700)]
        {
            make_dir(&dir, mode).map_err(io_error(&dir))?;
        }
        state.mount_ram()?;
        Ok(state)
    }

    /// Where RAM files lie.
    #[must_use]
    pub fn ram(&self) -> PathBuf {
        self.root.join("ram")
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

    /// Where the logs of machines that ended lie.
    #[must_use]
    pub fn logs(&self) -> PathBuf {
        self.root.join("logs")
    }

    /// Where migrations are remembered.
    #[must_use]
    pub fn migrations(&self) -> PathBuf {
        self.root.join("migrations")
    }

    /// Gives the RAM file system back where it is empty and ours.
    pub fn unmount_if_empty(&self) {
        let ram = self.ram();
        let empty = fs::read_dir(&ram).is_ok_and(|mut entries| entries.next().is_none());
        if empty
            && mounted_at(&ram).is_ok_and(|mount| mount.is_some())
            && let Err(error) = unmount(&ram)
        {
            tracing::debug!(%error, path = %ram.display(), "the RAM file system stays mounted");
        }
    }

    /// RAM lies on a file system of our own, never in huge pages: with them one write would mark 512 pages as written.
    fn mount_ram(&self) -> Result<(), StateError> {
        let path = self.ram();
        let mounted = || -> sterna_sys::Result<()> {
            if mounted_at(&path)?.is_none() {
                Tmpfs { size_bytes: Some(room::total_bytes()), mode: 0o755 }.mount(&path)?;
            }
            Ok(())
        };
        mounted().map_err(|source| StateError::Mount { path: path.clone(), source })
    }
}

fn make_dir(path: &Path, mode: u32) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(mode).create(path)
}

/// What a record must outlive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outlives {
    /// The daemon alone: where the host goes down, what the record is about ends too.
    Daemon,
    /// The host.
    Host,
}

/// Writes `value` as JSON so that after a crash at any moment the file holds either the old or the new value, and outlives the
/// host.
///
/// # Errors
/// As [`replace_record`].
pub fn write_record<T: Serialize>(path: &Path, value: &T) -> io::Result<()> {
    replace_record(path, value, Outlives::Host)
}

/// Writes `value` as JSON so that after a crash of what it outlives the file holds either the old or the new value.
///
/// # Errors
/// What the file system says; the old value then stands.
pub fn replace_record<T: Serialize>(path: &Path, value: &T, outlives: Outlives) -> io::Result<()> {
    let dir = path.parent().ok_or_else(|| io::Error::other("a record needs a directory"))?;
    let new = path.with_extension("json.new");
    let mut file = File::create(&new)?;
    file.write_all(&serde_json::to_vec_pretty(value)?)?;
    if outlives == Outlives::Daemon {
        return fs::rename(&new, path);
    }
    file.sync_all()?;
    fs::rename(&new, path)?;
    File::open(dir)?.sync_all()
}

/// Reads a record; `None` where there is no such file.
///
/// # Errors
/// What the file system says, or what is wrong with its JSON.
pub fn read_record<T: DeserializeOwned>(path: &Path) -> io::Result<Option<T>> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(serde_json::from_slice(&bytes)?)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_daemon_is_told_that_the_directory_is_taken() {
        let dir = tempfile::tempdir().unwrap();
        let first = match StateDir::open(dir.path()) {
            Err(StateError::Mount { source, .. }) => return eprintln!("skipped: no mounts here: {source}"),
            other => other.unwrap(),
        };
        assert!(matches!(StateDir::open(dir.path()), Err(StateError::Locked(_))));
        first.unmount_if_empty();
        drop(first);
        let again = StateDir::open(dir.path()).unwrap();
        fs::write(again.ram().join("x"), "1").unwrap();
        again.unmount_if_empty();
        assert!(mounted_at(&again.ram()).unwrap().is_some(), "a RAM file must not lose its file system");
        fs::remove_file(again.ram().join("x")).unwrap();
        again.unmount_if_empty();
        assert!(mounted_at(&again.ram()).unwrap().is_none());
    }

    #[test]
    fn a_record_is_replaced_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vm.json");
        assert_eq!(read_record::<u32>(&path).unwrap(), None);
        write_record(&path, &7u32).unwrap();
        write_record(&path, &8u32).unwrap();
        assert_eq!(read_record::<u32>(&path).unwrap(), Some(8));
        fs::write(&path, "{").unwrap();
        assert!(read_record::<u32>(&path).is_err());
    }
}
