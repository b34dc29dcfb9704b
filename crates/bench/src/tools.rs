//! Where the programs and files are that the lab uses: named by the environment (`./x env` prints it), or beside this program.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// The root of the repository this program was built from.
const REPOSITORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// The daemon.
///
/// # Errors
/// [`Error::Missing`] where it is not built.
pub fn sternad() -> Result<PathBuf> {
    find("the daemon", "STERNA_STERNAD", &[beside("sternad")])
}

/// The command line.
///
/// # Errors
/// [`Error::Missing`] where it is not built.
pub fn sterna() -> Result<PathBuf> {
    find("the command line", "STERNA_CLI", &[beside("sterna")])
}

/// The library that is loaded into QEMU.
///
/// # Errors
/// [`Error::Missing`] where it is not built.
pub fn agent() -> Result<PathBuf> {
    find("the agent", "STERNA_AGENT", &[beside("libsterna_agent.so"), repository("target/agent/libsterna_agent.so")])
}

/// The guest's kernel.
///
/// # Errors
/// [`Error::Missing`] where the image has not been made.
pub fn kernel() -> Result<PathBuf> {
    find("the guest's kernel", "STERNA_GUEST_KERNEL", &[repository("build/guest/vmlinuz")])
}

/// The guest's initial RAM file system.
///
/// # Errors
/// [`Error::Missing`] where the image has not been made.
pub fn initrd() -> Result<PathBuf> {
    find("the guest's image", "STERNA_GUEST_INITRD", &[repository("build/guest/initrd.gz")])
}

/// QEMU 7.2, as the distribution ships it.
///
/// # Errors
/// [`Error::Missing`] where it is not installed.
pub fn qemu_7_2() -> Result<PathBuf> {
    find("QEMU 7.2", "STERNA_QEMU_7_2", &[PathBuf::from("/usr/bin/qemu-system-x86_64")])
}

/// QEMU 10.0, from the distribution's backports.
///
/// # Errors
/// [`Error::Missing`] where the archive does not offer it.
pub fn qemu_10_0() -> Result<PathBuf> {
    find("QEMU 10.0", "STERNA_QEMU_10_0", &[repository("build/qemu-10.0/qemu-system-x86_64")])
}

fn find(what: &'static str, variable: &'static str, places: &[PathBuf]) -> Result<PathBuf> {
    if let Some(named) = std::env::var_os(variable) {
        let path = PathBuf::from(named);
        return if path.exists() { Ok(path) } else { Err(Error::Missing { what, path, variable }) };
    }
    let found = places.iter().find(|path| path.exists());
    found.cloned().ok_or_else(|| Error::Missing { what, path: places[0].clone(), variable })
}

/// A program in the directory of this one; tests run from a directory below it.
fn beside(name: &str) -> PathBuf {
    let own = std::env::current_exe().unwrap_or_default();
    let directory = own.parent().unwrap_or(Path::new("."));
    let above = if directory.ends_with("deps") { directory.parent().unwrap_or(directory) } else { directory };
    above.join(name)
}

fn repository(path: &str) -> PathBuf {
    Path::new(REPOSITORY).join(path)
}
