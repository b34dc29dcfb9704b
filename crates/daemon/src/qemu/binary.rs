//! What a QEMU binary is: where it lies, its version, and the machine types it offers.

use std::path::{Path, PathBuf};

use sterna_api::{Blame, Problem};
use sterna_engine::vmm::qemu::{BinaryError, binary_version, machine_types};
use sterna_engine::vmm::qmp::Version as Version3;

/// Major, minor, micro.
pub type Version = (u32, u32, u32);

/// The oldest QEMU that can do what Sterna needs.
pub const OLDEST: Version = (7, 2, 0);

/// The binary of a machine that names none.
pub const DEFAULT_NAME: &str = "qemu-system-x86_64";

/// A QEMU binary.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Binary {
    /// Where it lies.
    pub path: PathBuf,
    /// Its version.
    pub version: Version,
}

impl Binary {
    /// Looks at the binary of this path or name.
    ///
    /// # Errors
    /// A [`Problem`]: not found, not QEMU, too old.
    pub fn find(name: &Path) -> Result<Self, Problem> {
        let Some(path) = locate(name) else {
            return Err(Problem::new(
                "qemu-not-found",
                Blame::Host,
                format!("there is no QEMU '{}' on this host", name.display()),
            )
            .hint("install it, or name another with --qemu or 'qemu' in sternad.toml"));
        };
        let Version3(major, minor, micro) = binary_version(&path).map_err(|error| not_qemu(&error))?;
        let version = (major, minor, micro);
        if version < OLDEST {
            return Err(Problem::new(
                "qemu-too-old",
                Blame::Host,
                format!("{} is QEMU {}", path.display(), show(version)),
            )
            .hint(format!("Sterna needs QEMU {} or later", show(OLDEST))));
        }
        Ok(Self { path, version })
    }

    /// Whether this QEMU offers the machine type.
    ///
    /// # Errors
    /// A [`Problem`] where it cannot be asked.
    pub fn offers(&self, machine: &str) -> Result<bool, Problem> {
        let types = machine_types(&self.path).map_err(|error| not_qemu(&error))?;
        Ok(types.iter().any(|name| name == machine))
    }
}

/// Writes a version as people do.
#[must_use]
pub fn show((major, minor, micro): Version) -> String {
    format!("{major}.{minor}.{micro}")
}

/// The program of this path, or of this name on PATH.
fn locate(name: &Path) -> Option<PathBuf> {
    if name.components().count() > 1 {
        return name.is_file().then(|| name.to_path_buf());
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join(name)).find(|path| path.is_file())
}

fn not_qemu(error: &BinaryError) -> Problem {
    Problem::from_error("not-qemu", Blame::Host, error)
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
    fn the_installed_qemu_offers_the_usual_machines() {
        let Ok(binary) = Binary::find(Path::new(DEFAULT_NAME)) else { return eprintln!("skipped: no QEMU here") };
        assert!(binary.offers("microvm").unwrap() && binary.offers("q35").unwrap());
        assert!(!binary.offers("pc-q35-99.0").unwrap());
    }
}
