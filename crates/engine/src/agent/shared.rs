//! Memory that the library shares.

use std::fs::File;
use std::os::fd::OwnedFd;

use rustix::fs::SealFlags;

/// The memory, to be read; `None` where it could make reading wait or shrink under it.
pub(super) fn of_fixed_size(memory: OwnedFd) -> Option<File> {
    let seals = rustix::fs::fcntl_get_seals(&memory).ok()?;
    seals.contains(SealFlags::SHRINK | SealFlags::GROW).then(|| memory.into())
}
