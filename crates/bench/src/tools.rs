//! The paths of the programs and files that the lab uses: named by the environment (`./x env` prints it), or beside
//! this program.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// The daemon.
///
/// # Errors
/// [`Error::Missing`] where it is not built.
pub fn sternad() -> Result<PathBuf> {
    program("the daemon", "sternad")
}

/// The command line.
///
/// # Errors
/// [`Error::Missing`] where it is not built.
pub fn sterna() -> Result<PathBuf> {
    program("the command line", "sterna")
}

/// The library that is loaded into QEMU.
///
/// # Errors
/// [`Error::Missing`] where it is not built.
pub fn agent() -> Result<PathBuf> {
    find("the agent", "STERNA_AGENT_SO", &[beside("libsterna_agent.so"), repository("target/agent/libsterna_agent.so")])
}

/// The guest's kernel.
///
/// # Errors
/// [`Error::Missing`] where the image has not been made.
pub fn kernel() -> Result<PathBuf> {
    find("the guest's kernel", "STERNA_KERNEL", &[repository("build/guest/vmlinuz")])
}

/// A newer kernel, which boots with the same image without its modules.
///
/// # Errors
/// [`Error::Missing`] where the archive does not offer it.
pub fn new_kernel() -> Result<PathBuf> {
    find("a newer kernel", "STERNA_NEW_KERNEL", &[repository("build/new-kernel/vmlinuz")])
}

/// The guest's initial RAM file system.
///
/// # Errors
/// [`Error::Missing`] where the image has not been made.
pub fn initrd() -> Result<PathBuf> {
    find("the guest's image", "STERNA_INITRD", &[repository("build/guest/initrd.gz")])
}

/// QEMU 7.2, as the distribution ships it.
///
/// # Errors
/// [`Error::Missing`] where it is not installed.
pub fn qemu_7_2() -> Result<PathBuf> {
    find("QEMU 7.2", "STERNA_QEMU_7", &[PathBuf::from("/usr/bin/qemu-system-x86_64")])
}

/// QEMU 10.0, from the distribution's backports.
///
/// # Errors
/// [`Error::Missing`] where the archive does not offer it.
pub fn qemu_10_0() -> Result<PathBuf> {
    find("QEMU 10.0", "STERNA_QEMU_10", &[repository("build/qemu-10.0/qemu-system-x86_64")])
}

/// QEMU's storage daemon, as the distribution ships it.
///
/// # Errors
/// [`Error::Missing`] where it is not installed.
pub fn storage_daemon() -> Result<PathBuf> {
    find("QEMU's storage daemon", "STERNA_STORAGE_DAEMON", &[PathBuf::from("/usr/bin/qemu-storage-daemon")])
}

/// iperf3, as the distribution ships it.
///
/// # Errors
/// [`Error::Missing`] where it is not installed.
pub fn iperf3() -> Result<PathBuf> {
    find("iperf3", "STERNA_IPERF3", &[PathBuf::from("/usr/bin/iperf3")])
}

/// redis-benchmark, as the distribution ships it.
///
/// # Errors
/// [`Error::Missing`] where it is not installed.
pub fn redis_benchmark() -> Result<PathBuf> {
    find("redis-benchmark", "STERNA_REDIS_BENCHMARK", &[PathBuf::from("/usr/bin/redis-benchmark")])
}

/// wrk, as the distribution ships it.
///
/// # Errors
/// [`Error::Missing`] where it is not installed.
pub fn wrk() -> Result<PathBuf> {
    find("wrk", "STERNA_WRK", &[PathBuf::from("/usr/bin/wrk")])
}

/// The directory of PostgreSQL's programs: the newest version that is installed.
///
/// # Errors
/// [`Error::Missing`] where there is none.
pub fn postgres() -> Result<PathBuf> {
    const VERSIONS: &str = "/usr/lib/postgresql";
    let version = |entry: std::fs::DirEntry| entry.file_name().to_str()?.parse::<u32>().ok();
    let installed = std::fs::read_dir(VERSIONS).into_iter().flatten().filter_map(|entry| version(entry.ok()?));
    let newest = installed.max().unwrap_or(15);
    find("PostgreSQL", "STERNA_POSTGRES", &[Path::new(VERSIONS).join(newest.to_string()).join("bin")])
}

/// One of our own programs: in the directory that the environment names, or beside this one.
fn program(what: &'static str, name: &str) -> Result<PathBuf> {
    const VARIABLE: &str = "STERNA_BIN_DIR";
    let path = std::env::var_os(VARIABLE).map_or_else(|| beside(name), |directory| Path::new(&directory).join(name));
    if path.exists() { Ok(path) } else { Err(Error::Missing { what, path, variable: VARIABLE }) }
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

/// A path in the repository that this program was built from.
#[must_use]
pub fn repository(path: &str) -> PathBuf {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    own.ancestors().nth(2).unwrap_or(own).join(path)
}
