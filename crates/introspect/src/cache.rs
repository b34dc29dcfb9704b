//! Clean pages of the guest's page cache: copies of what is on its disks, which its kernel could read again.
//!
//! Experimental: they are named, and nothing leaves them out. A page counts where its flags say that it is up to date,
//! not dirty, in the lists of pages that can be given up, and backed by a file that is not memory itself; `mapping`
//! points to what it is a copy of. Everything is read once, in any order: changes that a running guest makes meanwhile
//! may be seen in part. Pages that are just being written back count as clean.

use std::ops::Range;

use crate::layout::{CacheLayout, SectionLayout};
use crate::linux::Unfit;
use crate::memory_map::walk_sections;
use crate::paging::{Fault, Virtual};
use crate::runs::Runs;

/// Frames whose structures are copied at once, and where not all of them are mapped.
const STRETCH: u64 = 1024;
const PROBE: u64 = 64;

/// The lowest bits of `mapping`, which are set for pages that no file backs (`PAGE_MAPPING_FLAGS`).
const NO_FILE: u64 = 3;

/// Walks the memory map of these frames, which are RAM, in order and disjoint.
///
/// # Errors
/// [`Unfit`] where the memory map cannot be read.
pub(crate) fn walk(
    memory: &mut Virtual<'_>,
    sections: &SectionLayout,
    layout: &CacheLayout,
    frames: &[Range<u64>],
) -> Result<Runs, Unfit> {
    let limit = usize::try_from(crate::runs::count(frames) / 16).unwrap_or(usize::MAX);
    let mut runs = Runs::new(limit);
    let mut copy = vec![0; STRETCH as usize * layout.bytes];
    let mut clean_head = None;
    walk_sections(memory, sections, frames, |memory, map, frames, _| {
        let mut at = frames.start;
        let mut step = STRETCH;
        while at < frames.end {
            let end = frames.end.min(at + step);
            let copy = &mut copy[..(end - at) as usize * layout.bytes];
            // The entry of a section is the map's beginning less the offset of its first frame, so the sum may wrap.
            let address = |frame: u64| map.wrapping_add(frame.wrapping_mul(layout.bytes as u64));
            match memory.read(address(at), copy) {
                Ok(()) => {
                    for (frame, page) in (at..end).zip(copy.chunks_exact(layout.bytes)) {
                        // A folio is described by its first page; the others say which that is.
                        let goes_on = clean_head.is_some_and(|head| layout.head_of(page) == Some(head));
                        if layout.is_clean(page) {
                            clean_head = Some(address(frame));
                        } else if !goes_on {
                            clean_head = None;
                            continue;
                        }
                        runs.push(frame..frame + 1);
                    }
                    (at, step) = (end, STRETCH);
                }
                Err(Fault::NotMapped) if step == PROBE => at = end,
                // A part of the stretch may be mapped.
                Err(Fault::NotMapped) => step = PROBE,
                Err(Fault::Unreadable(error)) => return Err(Unfit::Unreadable(error)),
            }
        }
        Ok(at)
    })?;
    Ok(runs)
}

impl CacheLayout {
    fn word(page: &[u8], offset: usize) -> Option<u64> {
        Some(u64::from_le_bytes(*page.get(offset..)?.first_chunk()?))
    }

    /// The address of the first page's structure, where this is another page of a folio.
    fn head_of(&self, page: &[u8]) -> Option<u64> {
        Self::word(page, self.compound).filter(|word| word & 1 != 0).map(|word| word - 1)
    }

    fn is_clean(&self, page: &[u8]) -> bool {
        let (Some(flags), Some(mapping)) = (Self::word(page, self.flags), Self::word(page, self.mapping)) else {
            return false;
        };
        flags & self.all == self.set && mapping != 0 && mapping & NO_FILE == 0 && self.head_of(page).is_none()
    }
}
