//! QEMU 7.2 and later as a VMM: its own migration moves the devices, and Sterna everything in files of RAM.
//!
//! Device state passes through a socket pair: one end goes to QEMU over its QMP connection (`getfd`), so that no path,
//! no permission and no right to open sockets is needed, and a QEMU confined to its own user and `-sandbox` works like
//! any other.

/// The VMM at the source.
mod source;

/// The VMM at the destination.
mod destination;

/// What a running QEMU is made of.
mod inspect;

/// The images that its disks are on.
mod images;

/// The guest's disks, and their overlays.
mod disks;

/// Jobs: work that goes on beside the guest.
pub mod jobs;

/// The images that a disk is made of, made fewer.
pub mod chains;

/// The guest's network cards.
pub mod network;

/// Who writes guest RAM past the page tables.
mod past;

/// Where the guest sees RAM.
mod memory_map;

/// What the processors' registers say.
mod registers;

/// The guest's balloon.
mod balloon;

/// What a QEMU binary can do.
mod binary;

/// The migration capabilities and parameters the switchover needs.
mod settings;

/// Commands that several of these give, and the connection that they go over.
mod commands;

/// QEMU's own migration, which moves the devices.
mod migration;

/// QEMU's process.
mod process;

/// What QEMU wrote to its standard error.
mod log;

pub use balloon::{BalloonDevice, BalloonLook, resize};
pub use binary::{BinaryError, binary_version, has_device, machine_types};
pub use commands::{SharedQmp, lock};
pub use destination::QemuDestination;
pub use disks::{Disk, close_node, format_overlay, open_overlay, writable_disks};
pub use inspect::{Inspection, MemoryDevice, inspect};
pub use log::ErrorLog;
pub use past::{FOREIGN, is_foreign_driver};
pub use process::QemuProcess;
pub use source::QemuSource;
