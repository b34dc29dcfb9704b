//! What a machine leaves behind: its RAM files, its directory, and what its QEMU said last.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use sterna_api::{Blame, Code, Problem};

use super::backing::OwnFile;
use crate::problems::host;
use crate::qemu::launch::log_file;
use crate::state::remove_directory;

/// A machine's directory that cannot be made.
pub fn directory_problem(dir: &Path, error: &io::Error) -> Problem {
    if error.kind() != io::ErrorKind::AlreadyExists {
        return host("cannot make the machine's directory", error);
    }
    let message = format!("{} is there already, and nobody knows what became of its machine", dir.display());
    Problem::new(Code::NameTaken, Blame::Request, message).hint(
        "the daemon's log says why its record cannot be used. Choose another name; or end its QEMU, and remove the \
         directory",
    )
}

/// Removes what a machine leaves behind. What its QEMU said last is kept as `STATE/logs/NAME.log`, until the next of
/// that name ends.
pub fn remove_files(dir: &Path, ram_files: &[OwnFile], logs: &Path) {
    remove_each(ram_files);
    let log = log_file(dir);
    if let Some(name) = dir.file_name()
        && fs::symlink_metadata(&log).is_ok_and(|about| about.is_file() && about.len() > 0)
    {
        let _ = fs::rename(&log, kept_log(logs, &name.to_string_lossy()));
    }
    if let Err(error) = remove_directory(dir)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(path = %dir.display(), %error, "cannot remove a machine's directory");
    }
}

/// Where what the QEMU of the machine of this name said last is kept.
#[must_use]
pub fn kept_log(logs: &Path, name: &str) -> PathBuf {
    logs.join(format!("{name}.log"))
}

/// Removes these files.
pub fn remove_each(files: &[OwnFile]) {
    for file in files {
        if let Err(error) = file.remove() {
            tracing::warn!(path = %file.path.display(), %error, "cannot remove a machine's file");
        }
    }
}
