//! The daemon's interface to the kernel: each `unsafe`, each ioctl number, each file of `/proc` and `/sys`.
//!
//! Addresses are `u64`. Ranges of addresses or of a file are `Range<u64>` in bytes; both ends are multiples of
//! [`PAGE_BYTES`], unless documented otherwise. Nothing here decides anything about a migration.

// Structures and ioctl numbers of the kernel's interface, checked at compile time.
mod abi;
// One error type: what was being done, and what the kernel said.
mod error;
// Files that back guest RAM: their holes, punching, their file systems.
pub mod file;
// This host's name, and random numbers.
pub mod host;
// Pools of huge pages on this host.
pub mod huge;
// Memory for the kernel to read from or write to, without a Rust reference to it.
pub mod iovec;
// The kernel's merging of equal pages, taken over for a while.
pub mod ksm;
// A RAM file mapped into this process while a guest writes to it.
pub mod map;
// How much memory this process can still get.
pub mod memory;
// Mounting a tmpfs for RAM files.
pub mod mount;
// The mounts of this host.
pub mod mountinfo;
// The page map of a process: which pages were written, and arming them again.
pub mod pagemap;
// Paths that others can change.
pub mod path;
// Threads that go before all others for a moment.
pub mod precedence;
// Features of this kernel, found out once.
pub mod probe;
// Other processes: their identity, mappings and end.
pub mod process;
// Less processor time for some threads of a process, by a cgroup.
pub mod quota;
// Bodies between guest RAM and a socket, descriptors over a socket, and TCP's settings.
pub mod socket;
// Tap devices: those of a process, and new ones.
pub mod tap;
// userfaultfd: write tracking now, faults on missing and stale pages for post-copy.
pub mod userfaultfd;

pub use error::{Error, Result};

/// Bytes of a page. [`probe::missing`] reports a kernel with another page size.
pub const PAGE_BYTES: u64 = 4096;
