//! Free pages of a running Linux guest: those that its own kernel holds free, seen from outside.
//!
//! The guest does not notice and runs on. [`Introspection::find`] looks for the kernel in its RAM, once;
//! [`Introspection::look`] then reads the kernel's memory map and yields [`Look`]: the free pages, checked against what
//! the kernel itself counts. `docs/design/introspection.md` says what is read, which races there are and why they do no
//! harm.
//!
//! The guest chooses everything that is read. Nothing here panics, loops without bound or allocates by a number that
//! the guest names. At worst a guest loses pages that it calls free itself.

#![forbid(unsafe_code)]

/// The kernel's description of itself (VMCOREINFO): finding it and looking things up in it.
mod vmcoreinfo;

/// The kernel's image, which points to that description.
mod image;

/// Layouts of the kernel's structures, checked once.
mod layout;

/// Page tables of four and five levels.
mod paging;

/// The memory map: what the kernel notes about each page frame.
mod memory_map;

/// Free blocks in the memory map, also while the guest changes it.
mod free;

/// Clean pages of the guest's page cache.
mod cache;

/// Counters that the kernel keeps itself.
mod counters;

/// The check that the pages found agree with those counters.
mod check;

/// Contents of free pages: whether the guest relies on them.
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
    /// The guest-physical address.
    pub address: u64,
    /// How much was to be read.
    pub bytes: usize,
}
