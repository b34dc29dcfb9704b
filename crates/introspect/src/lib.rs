//! Which pages of a running Linux guest its own kernel holds free, seen from outside.
//!
//! The guest knows nothing of it and runs on. [`Introspection::find`] looks for the kernel in its RAM, once;
//! [`Introspection::look`] then reads the kernel's memory map and yields [`Look`]: the free pages, checked against what the
//! kernel itself counts. `docs/design/introspection.md` says what is read, which races there are and why they do no harm.
//!
//! Everything that is read is the guest's to choose. Nothing here panics, loops without bound or allocates by a number that the
//! guest names; at worst a guest loses pages that it calls free itself.

#![forbid(unsafe_code)]

/// The kernel's description of itself (VMCOREINFO): finding it and looking things up in it.
mod vmcoreinfo;

/// Finding it where the kernel's image points to it.
mod image;

/// Where the kernel's structures have their fields, checked once.
mod layout;

/// Page tables of four and five levels.
mod paging;

/// From a page frame to what the kernel notes about it.
mod memory_map;

/// Free blocks among what is noted, also while the guest changes it.
mod free;

/// Clean pages of its page cache.
mod cache;

/// What the kernel counts itself.
mod counters;

/// Whether what was found agrees with that.
mod check;

/// What free pages hold: whether the guest relies on it.
mod contents;

/// Page frames as runs.
pub mod runs;

/// The whole look at a Linux guest.
mod linux;

/// A guest made of nothing but what is read here: for tests and fuzzing.
#[doc(hidden)]
pub mod toy;

#[cfg(test)]
mod tests;

use std::ops::Range;

pub use check::Agreement;
pub use counters::ZoneCounters;
pub use linux::{Introspection, Look, PageCache, Unfit};
pub use paging::PageTables;

/// Bytes of a page and of a page frame.
pub const PAGE_BYTES: u64 = 4096;

/// A guest's RAM by guest-physical addresses. The guest may write it at any time.
pub trait Physical {
    /// Guest-physical addresses that are the guest's RAM: sorted, disjoint, of whole pages.
    fn ranges(&self) -> &[Range<u64>];

    /// Copies RAM from this address on. What the guest writes meanwhile may be seen in part.
    ///
    /// # Errors
    /// [`Unreadable`] where that is not all RAM, or cannot be read.
    fn read(&self, address: u64, into: &mut [u8]) -> Result<(), Unreadable>;
}

/// Addresses that are no RAM of the guest, or RAM that cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{bytes} bytes at guest-physical address {address:#x} cannot be read as RAM")]
pub struct Unreadable {
    /// Guest-physical.
    pub address: u64,
    /// How much was to be read.
    pub bytes: usize,
}
