use crate::PAGE_BYTES;
use crate::layout::SectionLayout;
use crate::linux::Unfit;
use crate::paging::{Fault, Virtual};

/// What a section's entry says in its lowest bits (`include/linux/mmzone.h`): it has a memory map, and its pages are in use by
/// the kernel. The map of a section that is not online was never written.
const HAS_MAP: u64 = 1 << 1;
const IS_ONLINE: u64 = 1 << 2;

/// Bits of the entry that are no address. Six are flags today; a map begins on a page at least, whatever a page's structure is
/// big, because a section has many thousands of them.
const FLAGS: u64 = 0xfff;

/// The sections of physical memory (`CONFIG_SPARSEMEM_EXTREME`, which x86-64 always has).
pub(crate) struct Sections<'a> {
    layout: &'a SectionLayout,
    /// The root that was read last, by number; sections come in order.
    root: Option<(u64, Option<Box<[u8]>>)>,
}

impl<'a> Sections<'a> {
    pub fn new(layout: &'a SectionLayout) -> Self {
        Self { layout, root: None }
    }

    /// The virtual address that frame 0's structure would have, for the frames of this section; `None` where it has no map.
    ///
    /// # Errors
    /// [`Unfit`] where the section's entry cannot be read.
    pub fn map_of(&mut self, memory: &mut Virtual<'_>, section: u64) -> Result<Option<u64>, Unfit> {
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
