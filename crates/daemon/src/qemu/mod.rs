//! QEMU's arguments, its binary, and how it is started.

/// The user's arguments: read, checked, and completed.
pub mod arguments;

/// Which files the arguments name.
pub mod files;

/// What a QEMU binary is: version and machine types.
pub mod binary;

/// The host's processor.
pub mod cpu;

/// Starts QEMU so that it outlives the daemon.
pub mod launch;

/// The user QEMU runs as.
pub mod user;
