//! QEMU's arguments, its binary, and how it is started.

/// The user's arguments: read, checked, and completed.
pub mod arguments;

/// The arguments of a QEMU that takes a guest over beside the one that has it.
pub mod successor;

/// The arguments of a clone.
pub mod clone;

/// Where QEMU listens, by its arguments.
mod endpoints;

/// Taps of a machine's own.
pub mod own_tap;

/// The disks in the arguments, and the same on overlays.
pub mod disks;

/// The generation ID of a guest, by which it knows that it was cloned.
pub mod vmgenid;

/// The files that the arguments name.
pub mod files;

/// A QEMU binary: its version and machine types.
pub mod binary;

/// The host's processor.
pub mod cpu;

/// Starting of QEMU so that it outlives the daemon.
pub mod launch;

/// The user QEMU runs as.
pub mod user;
