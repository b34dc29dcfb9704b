//! # Reading while the guest writes
//!
//! A free block is known by its first page: `_mapcount` holds a value that no other page has, and `private` the block's
//! order. The kernel changes both under the zone's lock, which we do not take. It writes the order before it marks the
//! page, and removes the mark before it takes the order away, so while a page is marked its order is right; and a page
//! stays marked until the block is allocated, or becomes part of a bigger one, which is free as well.
//!
//! We cannot read both words at one instant. If they are read one after the other, the mark may belong to one time that
//! the page was free, and the order to another time, or to an owner in between, who keeps numbers of its own in
//! `private`: a single page would count as a block of a thousand. So every stretch of the memory map is copied twice,
//! and a block counts only where both copies show the mark, no user, and the same order. Let m1, o1 be mark and order
//! in the first copy, and m2, o2 those in the second. All are read after the look began, and both of the first before
//! both of the second.
//!
//! - The page was marked at m1 and at m2. If it was marked without a break in between, the order that was read in
//!   between, o1 or o2, is the block's, and the block was free at that instant.
//! - If it was allocated in between, and freed again: where o1 or o2 was read while the page was marked, or just before
//!   it was marked the second time, it is the order of one of the two blocks, and that block was free at m1 or m2.
//! - There remains a page whose owner before m1 and whose owner between m1 and m2 both kept the same small number in
//!   `private`, and that was free for a moment twice within one stretch (some 10 µs). Such a number must also be an
//!   order that fits the page's place. This case was never seen. Also, whoever skips pages by a look must look again
//!   with the guest stopped before the guest runs elsewhere: then nothing changes, and the look is exact.
//!
//! So each page that a look names was free at an instant after the look began. It may be in use by the time the look
//! ends: whoever relies on the look must have armed write tracking before, and sends what is written afterwards.

use std::ops::Range;

use crate::layout::{Layout, MAX_ORDERS, PageLayout};
use crate::linux::Unfit;
use crate::memory_map::walk_sections;
use crate::paging::{Fault, Virtual};
use crate::runs::{Runs, sorted};
use crate::{PAGE_BYTES, Physical};

/// Frames whose structures are copied at once: 64 KiB of 64 bytes each.
const STRETCH: u64 = 1024;

/// Frames that are copied where a block ends just before: what follows is likely to be free, too, and only its first
/// page matters.
const PROBE: u64 = 64;

/// Free blocks by their order.
pub(crate) type Blocks = [u64; MAX_ORDERS];

/// The result of a walk over the memory map.
#[derive(Debug)]
pub(crate) struct Found {
    pub runs: Runs,
    pub blocks: Blocks,
}

/// Pages in blocks by their order.
pub(crate) fn pages(blocks: &[u64]) -> u64 {
    let pages = blocks.iter().enumerate().map(|(order, blocks)| blocks.checked_shl(order as u32).unwrap_or(u64::MAX));
    pages.fold(0, u64::saturating_add)
}

/// Walks the memory map of all RAM.
///
/// # Errors
/// [`Unfit`] where the memory map cannot be read. Parts that are not mapped, as for memory that was removed, hold no
/// free pages.
pub(crate) fn walk(ram: &dyn Physical, memory: &mut Virtual<'_>, layout: &Layout) -> Result<Found, Unfit> {
    let all = frames(ram);
    walk_frames(memory, layout, &all, limit(&all))
}

/// Walks those parts of the memory map whose blocks hold any of these frames, and yields all free blocks there. A block
/// is aligned to its size, and none is bigger than the highest order's, so each lies in one such part.
///
/// # Errors
/// As [`walk`].
pub(crate) fn walk_around(
    ram: &dyn Physical,
    memory: &mut Virtual<'_>,
    layout: &Layout,
    wanted: &[Range<u64>],
) -> Result<Found, Unfit> {
    let all = frames(ram);
    let biggest = 1_u64 << layout.page.orders.saturating_sub(1);
    let widened = wanted.iter().filter(|run| !run.is_empty()).map(|run| {
        let end = run.end.checked_next_multiple_of(biggest).unwrap_or(u64::MAX);
        run.start / biggest * biggest..end
    });
    let mut parts = Vec::with_capacity(wanted.len());
    for part in widened {
        let first = all.partition_point(|range| range.end <= part.start);
        let inside = all[first..].iter().take_while(|range| range.start < part.end);
        parts.extend(inside.map(|range| range.start.max(part.start)..range.end.min(part.end)));
    }
    walk_frames(memory, layout, &sorted(parts), limit(&all))
}

/// The most runs of a look: a sixteenth of the number of frames, so that runs take at most a byte for each frame.
fn limit(all: &[Range<u64>]) -> usize {
    usize::try_from(crate::runs::count(all) / 16).unwrap_or(usize::MAX)
}

/// Walks the memory map of these frames, which are RAM, in order and disjoint. No block lies in part outside of them.
fn walk_frames(memory: &mut Virtual<'_>, layout: &Layout, frames: &[Range<u64>], limit: usize) -> Result<Found, Unfit> {
    let mut walk = Walk {
        page: &layout.page,
        found: Found { runs: Runs::new(limit), blocks: [0; MAX_ORDERS] },
        first: vec![0; STRETCH as usize * layout.page.bytes],
        second: vec![0; STRETCH as usize * layout.page.bytes],
        heads: Vec::with_capacity(STRETCH as usize),
    };
    // A block may go on into the next section, never beyond RAM.
    walk_sections(memory, &layout.sections, frames, |memory, map, frames, limit| {
        walk.section(memory, map, frames, limit)
    })?;
    Ok(walk.found)
}

/// RAM as page frames. Ranges that touch are joined, because a block may lie across them.
pub(crate) fn frames(ram: &dyn Physical) -> Vec<Range<u64>> {
    let mut runs = Runs::new(ram.ranges().len());
    for range in ram.ranges() {
        runs.push(range.start.div_ceil(PAGE_BYTES)..range.end / PAGE_BYTES);
    }
    runs.into_inner()
}

struct Walk<'a> {
    page: &'a PageLayout,
    found: Found,
    first: Vec<u8>,
    second: Vec<u8>,
    /// The blocks that the first copy of a stretch shows: index in the stretch, order.
    heads: Vec<(usize, u8)>,
}

impl Walk<'_> {
    /// Walks the frames of one section, whose blocks all end before `limit`. Returns where it stopped, at the section's
    /// end or behind it.
    fn section(&mut self, memory: &mut Virtual<'_>, map: u64, frames: Range<u64>, limit: u64) -> Result<u64, Unfit> {
        let mut at = frames.start;
        let mut small = false;
        while at < frames.end {
            let end = frames.end.min(at + if small { PROBE } else { STRETCH });
            match self.stretch(memory, map, at..end, limit) {
                Ok(behind) => {
                    small = behind >= end && self.heads.last().is_some_and(|&(_, order)| 1 << order >= PROBE);
                    at = behind.max(end);
                }
                Err(Fault::NotMapped) if small => at = end,
                // A part of the stretch may be mapped.
                Err(Fault::NotMapped) => small = true,
                Err(Fault::Unreadable(error)) => return Err(Unfit::Unreadable(error)),
            }
        }
        Ok(at)
    }

    /// Finds the free blocks that begin among these frames, at most a stretch. Returns the end of the last.
    fn stretch(&mut self, memory: &mut Virtual<'_>, map: u64, frames: Range<u64>, limit: u64) -> Result<u64, Fault> {
        self.heads.clear();
        let bytes = self.page.bytes;
        let count = (frames.end - frames.start) as usize;
        let address = |index: usize| {
            let offset = (frames.start + index as u64).checked_mul(bytes as u64);
            // The entry of a section is the map's beginning less the offset of its first frame, so the sum may wrap.
            offset.map(|offset| map.wrapping_add(offset)).ok_or(Fault::NotMapped)
        };
        memory.read(address(0)?, &mut self.first[..count * bytes])?;
        let mut index = 0;
        while index < count {
            let order = self.page.head(&self.first, index).filter(|&order| fits(frames.start, index, order, limit));
            if let Some(order) = order {
                self.heads.push((index, order));
            }
            index += order.map_or(1, |order| 1 << order);
        }
        let (Some(&(from, _)), Some(&(last, order))) = (self.heads.first(), self.heads.last()) else {
            return Ok(frames.end);
        };
        memory.read(address(from)?, &mut self.second[from * bytes..(last + 1) * bytes])?;
        for &(index, order) in &self.heads {
            if self.page.head(&self.second, index) == Some(order) {
                let start = frames.start + index as u64;
                self.found.runs.push(start..start + (1 << order));
                self.found.blocks[usize::from(order)] += 1;
            }
        }
        Ok(frames.start + last as u64 + (1 << order))
    }
}

/// Whether a block of this order may begin there: it is aligned to its size, and inside RAM.
fn fits(start: u64, index: usize, order: u8, limit: u64) -> bool {
    let frame = start + index as u64;
    let size = 1_u64 << order;
    frame.is_multiple_of(size) && frame.checked_add(size).is_some_and(|end| end <= limit)
}

impl PageLayout {
    /// The order of the free block that begins with this page of a copy, less than [`MAX_ORDERS`]; `None` where none
    /// begins here.
    fn head(&self, copy: &[u8], index: usize) -> Option<u8> {
        let page = copy.get(index * self.bytes..)?;
        let word = |offset: usize| Some(u32::from_le_bytes(*page.get(offset..)?.first_chunk()?));
        // Most pages are ruled out here.
        if word(self.mapcount)? != self.buddy || word(self.refcount)? != 0 {
            return None;
        }
        let order = u64::from_le_bytes(*page.get(self.private..)?.first_chunk()?);
        u8::try_from(order).ok().filter(|&order| order < self.orders)
    }
}
