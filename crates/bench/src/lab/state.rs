//! The record of a lab, by which another process, or one after a crash, can use it or take it down.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::{Context, Error, Result};
use crate::process::ProcessId;

/// The directory below which all labs keep their files.
const ROOT: &str = "/run/sterna-lab";

/// The configuration of a lab, and its owner.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct State {
    /// Its name.
    pub name: String,
    /// The process it ends with; none for a lab that stays until it is taken down.
    pub owner: Option<ProcessId>,
    /// Its hosts with a daemon, in the order of their addresses.
    pub hosts: Vec<String>,
    /// Rate of each host's link, bytes per second; unlimited where absent.
    pub rate_bytes_per_s: Option<u64>,
    /// Memory limit of each host, bytes.
    pub memory_limit_bytes: Option<u64>,
    /// The QEMU of hosts whose daemon does not take the one on its PATH.
    #[serde(default)]
    pub qemu: BTreeMap<String, PathBuf>,
    /// Daemons, with the host each runs on.
    pub daemons: Vec<(String, ProcessId)>,
}

impl State {
    /// Whether the process that brought this lab up is gone.
    #[must_use]
    pub fn is_orphan(&self) -> bool {
        self.owner.is_some_and(|owner| !owner.is_alive())
    }

    /// Writes the record, whole or not at all.
    ///
    /// # Errors
    /// Where the file cannot be written.
    pub fn save(&self) -> Result<()> {
        let (file, draft) = (directory(&self.name).join("lab.json"), directory(&self.name).join("lab.json.new"));
        let text = serde_json::to_vec_pretty(self)
            .map_err(std::io::Error::other)
            .context(|| "writing a lab's state".into())?;
        std::fs::write(&draft, text).context(|| format!("writing {}", draft.display()))?;
        std::fs::rename(&draft, &file).context(|| format!("writing {}", file.display()))
    }

    /// Reads it back; `None` where there is no such lab, or it was never completed.
    ///
    /// # Errors
    /// Where the file is there and cannot be read.
    pub fn load(name: &str) -> Result<Option<Self>> {
        let file = directory(name).join("lab.json");
        match std::fs::read(&file) {
            Ok(text) => serde_json::from_slice(&text)
                .map(Some)
                .map_err(|error| Error::Form { what: file.display().to_string(), reason: error.to_string() }),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).context(|| format!("reading {}", file.display())),
        }
    }
}

/// The directory of a lab's files.
#[must_use]
pub fn directory(name: &str) -> PathBuf {
    Path::new(ROOT).join(name)
}

/// Takes the name: of two processes that ask for the same, one gets it.
///
/// # Errors
/// Where the lab exists already, or the directory cannot be made.
pub fn claim(name: &str) -> Result<PathBuf> {
    if name.is_empty()
        || name.len() > 24
        || !name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit())
    {
        return Err(Error::Usage(format!("'{name}' is no valid name of a lab: use 1 to 24 small letters and digits")));
    }
    let directory = directory(name);
    make_all(Path::new(ROOT))?;
    match std::fs::create_dir(&directory) {
        Ok(()) => Ok(directory),
        // The last other lab went down at this moment and removed the directory of all labs.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => claim(name),
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Err(Error::Usage(format!(
            "lab {name} is up already: take it down (`sterna-bench lab down --name {name}`) or use another --name"
        ))),
        Err(error) => Err(error).context(|| format!("making {}", directory.display())),
    }
}

/// Makes a directory with those above it, also while another lab that goes down removes the empty ones of them.
///
/// # Errors
/// Where it cannot be made.
pub fn make_all(directory: &Path) -> Result<()> {
    let made = (0..10)
        .map(|_| std::fs::create_dir_all(directory))
        .find(|made| !made.as_ref().is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound));
    made.unwrap_or_else(|| std::fs::create_dir_all(directory)).context(|| format!("making {}", directory.display()))
}

/// How long ago a lab's directory was last changed.
#[must_use]
pub fn age(name: &str) -> Duration {
    let changed = std::fs::metadata(directory(name)).and_then(|metadata| metadata.modified());
    changed.ok().and_then(|at| at.elapsed().ok()).unwrap_or_default()
}

/// The names of all labs.
#[must_use]
pub fn names() -> Vec<String> {
    let entries = std::fs::read_dir(ROOT).into_iter().flatten();
    let mut names: Vec<String> = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
    names.sort();
    names
}

/// Removes a lab's files and what is mounted below them. A lab without files is no error.
///
/// # Errors
/// Where something cannot be unmounted or removed.
pub fn erase(name: &str) -> Result<()> {
    let directory = directory(name);
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").context(|| "reading the mounts".into())?;
    // The latest mount goes first: one may lie on another.
    for mount in mounts.lines().rev().filter_map(|line| line.split(' ').nth(4)).map(Path::new) {
        if mount.starts_with(&directory) {
            nix::mount::umount2(mount, nix::mount::MntFlags::MNT_DETACH)
                .context(|| format!("unmounting {}", mount.display()))?;
        }
    }
    match std::fs::remove_dir_all(&directory) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).context(|| format!("removing {}", directory.display()))
        }
        _ => {
            // The directory of all labs goes with the last of them.
            let _ = std::fs::remove_dir(ROOT);
            Ok(())
        }
    }
}
