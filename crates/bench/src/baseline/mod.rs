//! The baseline: the same unmodified QEMU, moving its guest by itself.

/// QEMU processes and their own migration.
pub mod qemu;

/// A small QMP client.
pub mod qmp;

pub use qemu::{BaselineReport, BaselineVm, Method, Ram};
