use std::ops::Range;

use crate::PAGE_BYTES;
use crate::layout::SectionLayout;
use crate::linux::Unfit;
use crate::paging::{Fault, Virtual};

/// The lowest bits of a section's entry (`include/linux/mmzone.h`): the section has a memory map, and the kernel uses
/// its pages. The map of a section that is not online was never written.
const HAS_MAP: u64 = 1 << 1;
const IS_ONLINE: u64 = 1 << 2;

/// Bits of the entry that are no address. Six are flags today. A map begins at the border of a page at least, whatever
/// the size of a page's structure, because a section has many thousands of them.
const FLAGS: u64 = 0xfff;

/// The sections of physical memory (`CONFIG_SPARSEMEM_EXTREME`, which x86-64 always has).
struct Sections<'a> {
    layout: &'a SectionLayout,
    /// The root that was read last, by number; sections come in order.
    root: Option<(u64, Option<Box<[u8]>>)>,
}

impl<'a> Sections<'a> {
    fn new(layout: &'a SectionLayout) -> Self {
        Self { layout, root: None }
    }

    /// The virtual address that frame 0's structure would have, for the frames of this section; `None` where it has no
    /// map.
    ///
    /// # Errors
    /// [`Unfit`] where the section's entry cannot be read.
    fn map_of(&mut self, memory: &mut Virtual<'_>, section: u64) -> Result<Option<u64>, Unfit> {
        let number = section / self.layout.per_root;
        if number >= self.layout.root_count {
            return Ok(None);
        }
        let root = match &mut self.root {
            Some((kept, root)) if *kept == number => root,
            kept => &mut kept.insert((number, read_root(self.layout, memory, number)?)).1,
        };
        let Some(root) = root else { return Ok(None) };
        let at = ((section % self.layout.per_root) * self.layout.bytes + self.layout.map) as usize;
        let entry = root.get(at..at + 8).and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_le_bytes);
        let usable = entry & HAS_MAP != 0 && entry & IS_ONLINE != 0;
        Ok(usable.then_some(entry & !FLAGS))
    }
}

/// Calls `each` with the memory map of these frames, which are RAM, in order and disjoint: the virtual address that
/// frame 0's structure would have, frames of one section, and the end of the RAM they lie in. `each` returns the frame
/// up to which it looked, at the end of those frames or behind it. Parts that have no map, as for memory that was
/// removed, are left out.
///
/// # Errors
/// [`Unfit`] where a section's entry cannot be read, and what `each` fails with.
pub(crate) fn walk_sections(
    memory: &mut Virtual<'_>,
    layout: &SectionLayout,
    frames: &[Range<u64>],
    mut each: impl FnMut(&mut Virtual<'_>, u64, Range<u64>, u64) -> Result<u64, Unfit>,
) -> Result<(), Unfit> {
    let mut sections = Sections::new(layout);
    for range in frames {
        let mut at = range.start;
        while at < range.end {
            let section = at / layout.frames;
            let end = range.end.min((section + 1) * layout.frames);
            at = match sections.map_of(memory, section)? {
                Some(map) => each(memory, map, at..end, range.end)?,
                None => end,
            };
        }
    }
    Ok(())
}

fn read_root(layout: &SectionLayout, memory: &mut Virtual<'_>, number: u64) -> Result<Option<Box<[u8]>>, Unfit> {
    let unreadable = |fault| Unfit::from_fault(fault, "the list of memory sections");
    let slot = layout.roots.checked_add(8 * number).ok_or(Fault::NotMapped).map_err(unreadable)?;
    let root = memory.word(slot).map_err(unreadable)?;
    if root == 0 {
        return Ok(None);
    }
    let mut bytes = vec![0; PAGE_BYTES as usize].into_boxed_slice();
    memory.read(root, &mut bytes).map_err(unreadable)?;
    Ok(Some(bytes))
}
