//! The baseline: the same unmodified QEMU, moving its guest by itself.

/// A clone through a file.
pub mod file;

/// The ways in which QEMU can do it.
pub mod method;

/// Disks in another host's memory.
pub mod nbd;

/// QEMU processes and their own migration.
pub mod qemu;

/// A small QMP client.
pub mod qmp;

pub use file::Copied;
pub use method::Method;
pub use nbd::MemoryDisk;
pub use qemu::{BaselineReport, BaselineVm, Pause, Ram};
