//! Mounting a tmpfs for RAM files.

use std::ffi::CString;
use std::path::Path;

use rustix::mount::{MountFlags, UnmountFlags};

use crate::error::{Error, Result};
use crate::file::HugePolicy;
use crate::mountinfo::{self, Mount};

/// A tmpfs to mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tmpfs {
    /// Its limit, bytes; `None` means the kernel's default, half of the host's memory.
    pub size_bytes: Option<u64>,
    /// Permissions of its root directory.
    pub mode: u32,
    /// Which of its memory is in huge pages: not [`Unknown`](HugePolicy::Unknown), and
    /// [`Never`](HugePolicy::Never) where the kernel has none.
    pub huge: HugePolicy,
}

impl Tmpfs {
    fn options(&self) -> String {
        let size = self.size_bytes.map(|bytes| format!(",size={bytes}")).unwrap_or_default();
        format!("{},mode={:o}{size}", huge_option(self.huge), self.mode & 0o7777)
    }

    /// Mounts it at `directory`, over whatever is there.
    ///
    /// # Errors
    /// `directory` does not exist, or this process may not mount.
    pub fn mount(&self, directory: &Path) -> Result<()> {
        let options = CString::new(self.options()).expect("digits and letters hold no zero byte");
        let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        rustix::mount::mount("tmpfs", directory, "tmpfs", flags, options.as_c_str())
            .map_err(|error| Error::new(format!("mount a tmpfs at {}", directory.display()), error))
    }
}

/// Has a mounted tmpfs use huge pages so from now on. What it holds already stays as it is.
///
/// # Errors
/// Nothing is mounted there, this process may not mount, or the kernel has no huge pages.
pub fn set_huge_policy(directory: &Path, policy: HugePolicy) -> Result<()> {
    let option = CString::new(huge_option(policy)).expect("letters hold no zero byte");
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    rustix::mount::mount_remount(directory, flags, option.as_c_str())
        .map_err(|error| Error::new(format!("change the huge pages of {}", directory.display()), error))
}

fn huge_option(policy: HugePolicy) -> String {
    format!("huge={}", policy.word().unwrap_or("never"))
}

/// Removes the uppermost mount at `directory`.
///
/// # Errors
/// `EBUSY`: a file there is open or mapped; `EINVAL`: nothing is mounted there.
pub fn unmount(directory: &Path) -> Result<()> {
    rustix::mount::unmount(directory, UnmountFlags::NOFOLLOW)
        .map_err(|error| Error::new(format!("unmount {}", directory.display()), error))
}

/// The mount at `directory` itself (not above it), if there is one.
///
/// # Errors
/// `directory` does not exist, or `/proc` is not mounted.
pub fn mounted_at(directory: &Path) -> Result<Option<Mount>> {
    let real = directory
        .canonicalize()
        .map_err(|error| Error::new(format!("find the directory {}", directory.display()), error))?;
    Ok(mountinfo::mounts()?.into_iter().rfind(|mount| mount.point == real))
}
