//! A tmpfs of a test's own.

use std::path::{Path, PathBuf};

use sterna_sys::file::HugePolicy;
use sterna_sys::mount::Tmpfs;

/// A tmpfs, unmounted when dropped, whatever still lies on it.
pub struct Mount(PathBuf);

impl Mount {
    /// Mounts it; `None`, saying why, where nobody may mount here or the kernel has no huge pages.
    pub fn new(directory: &Path, size_bytes: Option<u64>, huge: HugePolicy) -> Option<Self> {
        match (Tmpfs { size_bytes, mode: 0o700, huge }).mount(directory) {
            Ok(()) => Some(Self(directory.to_owned())),
            Err(error) => {
                println!("skipped: {error}");
                None
            }
        }
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let detached = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
        assert!(detached.is_ok() || std::thread::panicking(), "{} stays mounted", self.0.display());
    }
}
