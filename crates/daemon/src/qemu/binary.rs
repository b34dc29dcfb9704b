//! A QEMU binary: its path, its version, and the machine types that it offers.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use sterna_api::{Blame, Code, Problem};
use sterna_engine::vmm::qemu::{BinaryError, binary_version, has_device, machine_types};
use sterna_engine::vmm::qmp::Version as Version3;

use super::vmgenid;
use crate::problems::host;

/// Major, minor, micro.
pub type Version = (u32, u32, u32);

/// The oldest QEMU that can do what Sterna needs.
pub const OLDEST: Version = (7, 2, 0);

/// The binary of a machine that names none.
pub const DEFAULT_NAME: &str = "qemu-system-x86_64";

/// A QEMU binary.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Binary {
    /// Its path.
    pub path: PathBuf,
    /// Its version.
    pub version: Version,
    /// Whether it can give a guest a generation ID.
    pub has_vmgenid: bool,
    machines: Vec<String>,
}

impl Binary {
    /// Looks at the binary of this path or name.
    ///
    /// # Errors
    /// A [`Problem`]: the binary was not found, is not QEMU, or is too old.
    pub fn find(name: &Path) -> Result<Self, Problem> {
        let Some(path) = locate(name) else {
            return Err(Problem::new(
                Code::QemuNotFound,
                Blame::Host,
                format!("there is no QEMU '{}' on this host", name.display()),
            )
            .hint("install it, or name another with --qemu or 'qemu' in sternad.toml"));
        };
        let binary = Self::ask(&path)?;
        let version = binary.version;
        if version < OLDEST {
            return Err(Problem::new(
                Code::QemuTooOld,
                Blame::Host,
                format!("{} is QEMU {}", path.display(), show(version)),
            )
            .hint(format!("Sterna needs QEMU {} or later", show(OLDEST))));
        }
        Ok(binary)
    }

    /// Whether this QEMU offers the machine type.
    #[must_use]
    pub fn offers(&self, machine: &str) -> bool {
        self.machines.iter().any(|name| name == machine)
    }

    /// Asks the program itself, or uses its former answer: asking takes tens of milliseconds, and a guest waits to be
    /// moved. Where a gang comes, one asks and the others wait for that answer: on a busy host as many programs as
    /// guests at once did not answer in time.
    fn ask(path: &Path) -> Result<Self, Problem> {
        static ASKED: Mutex<BTreeMap<Identity, Arc<Mutex<Option<Binary>>>>> = Mutex::new(BTreeMap::new());
        let identity = fs::metadata(path)
            .map(|file| (path.to_path_buf(), file.dev(), file.ino(), file.mtime_nsec(), file.mtime()));
        let identity = identity.map_err(|error| host(format!("cannot look at {}", path.display()), &error))?;
        let answer = Arc::clone(ASKED.lock().unwrap_or_else(PoisonError::into_inner).entry(identity).or_default());
        let mut answer = answer.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = &*answer {
            return Ok(known.clone());
        }
        let Version3(major, minor, micro) = binary_version(path).map_err(|error| not_qemu(&error))?;
        let machines = machine_types(path).map_err(|error| not_qemu(&error))?;
        let has_vmgenid = has_device(path, vmgenid::DEVICE).map_err(|error| not_qemu(&error))?;
        let binary = Self { path: path.into(), version: (major, minor, micro), has_vmgenid, machines };
        Ok(answer.insert(binary).clone())
    }
}

/// The identity of a file, which changes when the file is replaced: its path, device, inode and time of change. (A
/// wrapper script around a replaced QEMU goes unnoticed; then QEMU itself refuses what it does not offer.)
type Identity = (PathBuf, u64, u64, i64, i64);

/// A version as people write it.
#[must_use]
pub fn show((major, minor, micro): Version) -> String {
    format!("{major}.{minor}.{micro}")
}

/// Finds the program of this path, or of this name on PATH.
fn locate(name: &Path) -> Option<PathBuf> {
    if name.components().count() > 1 {
        return name.is_file().then(|| name.to_path_buf());
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join(name)).find(|path| path.is_file())
}

fn not_qemu(error: &BinaryError) -> Problem {
    Problem::from_error(Code::NotQemu, Blame::Host, error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_qemu_is_refused() {
        assert_eq!(Binary::find(Path::new("/nowhere/qemu")).unwrap_err().code, "qemu-not-found");
        assert_eq!(Binary::find(Path::new("true")).unwrap_err().code, "not-qemu");
    }

    #[test]
    fn a_program_is_asked_once_however_many_want_to_know_at_once() {
        let directory = tempfile::tempdir().unwrap();
        let [text, program, asked] = ["text", "qemu", "asked"].map(|name| directory.path().join(name));
        let script = format!(
            "#!/bin/sh\necho \"$1\" >> {}\nsleep 0.1\ncase $1 in\n--version) echo 'QEMU emulator version 10.0.2';;\n\
             -machine) printf 'Supported machines are:\\nq35 a\\n';;\nesac\n",
            asked.display()
        );
        fs::write(&text, script).unwrap();
        // By another process: a file that this one had open for writing may be so in a child of another test.
        let install = std::process::Command::new("install").args(["-m", "755"]).arg(&text).arg(&program).status();
        assert!(install.unwrap().success());
        std::thread::scope(|scope| {
            let found: Vec<_> = (0..8).map(|_| scope.spawn(|| Binary::find(&program))).collect();
            assert!(found.into_iter().all(|found| found.join().unwrap().unwrap().version == (10, 0, 2)));
        });
        assert_eq!(fs::read_to_string(asked).unwrap(), "--version\n-machine\n-device\n");
    }

    #[test]
    fn the_installed_qemu_offers_the_usual_machines() {
        let Ok(binary) = Binary::find(Path::new(DEFAULT_NAME)) else { return eprintln!("skipped: no QEMU here") };
        assert!(binary.offers("microvm") && binary.offers("q35"));
        assert!(!binary.offers("pc-q35-99.0"));
        assert!(binary.has_vmgenid);
    }
}
