//! A guest's RAM by the addresses that the guest uses, for reading it from outside.

use std::ops::Range;
use std::sync::Arc;

use sterna_introspect::{Physical, Unreadable};
use sterna_protocol::pages::PageMap;

use super::elsewhere::{Fetching, PagesElsewhere};
use super::{Memory, pages_of};
use crate::vmm::MappedRam;

/// A machine's RAM by guest-physical address. Reading touches nothing ([`Memory::load`]): a page without content reads
/// as zeros and stays without memory.
#[derive(Debug)]
pub struct GuestPhysical {
    ram: Arc<dyn Memory>,
    ranges: Vec<Range<u64>>,
    /// For each range, the number of its block and the range's offset in the block, bytes.
    places: Vec<(usize, u64)>,
    away: Option<PageMap>,
    elsewhere: Option<Fetching>,
}

/// A memory map that is invalid.
#[derive(Debug, thiserror::Error)]
pub enum GuestPhysicalError {
    /// It maps more of a block than there is, or some of it twice.
    #[error("the VMM maps block '{block}' in an invalid way: {what}")]
    Absurd {
        /// The block.
        block: String,
        /// What is wrong.
        what: &'static str,
    },
    /// None of the machine's blocks is in it.
    #[error("the VMM maps none of the machine's RAM")]
    Nothing,
}

impl GuestPhysical {
    /// This RAM as the VMM's map has it. Other RAM in the map is left out: it does not move.
    ///
    /// # Errors
    /// [`GuestPhysicalError`].
    pub fn new(map: &[MappedRam], ram: Arc<dyn Memory>) -> Result<Self, GuestPhysicalError> {
        let mut memory =
            Self { ram: Arc::clone(&ram), ranges: Vec::new(), places: Vec::new(), away: None, elsewhere: None };
        for mapped in map {
            let mut blocks = ram.layout().blocks().enumerate();
            let Some((index, block)) = blocks.find(|(_, block)| block.id == mapped.block) else { continue };
            let absurd = |what| GuestPhysicalError::Absurd { block: mapped.block.clone(), what };
            let Range { start, end } = mapped.guest_physical;
            let bytes = end.checked_sub(start).ok_or_else(|| absurd("a range ends before it begins"))?;
            let behind = mapped.offset.checked_add(bytes).filter(|&behind| behind <= block.bytes);
            let behind = behind.ok_or_else(|| absurd("a range ends behind it"))?;
            if memory.ranges.last().is_some_and(|last| start < last.end) {
                return Err(absurd("ranges overlap"));
            }
            // A frame that is free under one address may be in use under the other.
            let twice = |(place, range): (&(usize, u64), &Range<u64>)| {
                place.0 == index && place.1 < behind && mapped.offset < place.1 + (range.end - range.start)
            };
            if memory.places.iter().zip(&memory.ranges).any(twice) {
                return Err(absurd("some of it has two addresses"));
            }
            memory.ranges.push(start..end);
            memory.places.push((index, mapped.offset));
        }
        if memory.ranges.is_empty() { Err(GuestPhysicalError::Nothing) } else { Ok(memory) }
    }

    /// The same, of a guest of which these pages are not here: the RAM has something else in their place, which nobody
    /// may take for theirs. They stay unreadable when they have come.
    #[must_use]
    pub fn without(self, away: PageMap) -> Self {
        Self { away: Some(away), ..self }
    }

    /// The same, of a guest whose pages come and go: those that are read and elsewhere come here, so many at most.
    #[must_use]
    pub fn beside(self, elsewhere: Arc<dyn PagesElsewhere>, most_pages: u64) -> Self {
        Self { elsewhere: Some(Fetching::new(elsewhere, most_pages)), ..self }
    }

    /// Whether pages come and go.
    #[must_use]
    pub fn comes_and_goes(&self) -> bool {
        self.elsewhere.is_some()
    }

    /// Whether something was not read, as it is elsewhere and did not come.
    #[must_use]
    pub fn fell_short(&self) -> bool {
        self.elsewhere.as_ref().is_some_and(Fetching::fell_short)
    }

    /// Says whether pages that are elsewhere are unreadable from now on, or come.
    pub fn only_here(&self, only: bool) {
        self.elsewhere.iter().for_each(|elsewhere| elsewhere.only_here(only));
    }

    /// Reads bytes of a block; whether that is what the guest has there.
    fn load(&self, block: usize, range: &Range<u64>, piece: &mut [u8]) -> bool {
        let mut load = || self.ram.load_bytes(block, range.start, piece).is_ok();
        match &self.elsewhere {
            None => load(),
            Some(elsewhere) => {
                let pages: Vec<_> = pages_of(self.ram.layout(), block, range.clone()).collect();
                elsewhere.read(&pages, load)
            }
        }
    }

    /// Whether one of these bytes of a block is of a page that is not here.
    fn is_away(&self, block: usize, bytes: Range<u64>) -> bool {
        let Some(away) = &self.away else { return false };
        pages_of(self.ram.layout(), block, bytes).any(|(chunk, pages)| !pages.and(away.chunk(chunk)).is_empty())
    }

    /// Where guest-physical addresses lie: the blocks' numbers, in the layout's order, and ranges of bytes in them.
    /// Addresses that are no RAM are left out.
    pub fn locate(&self, addresses: Range<u64>) -> impl Iterator<Item = (usize, Range<u64>)> {
        let first = self.ranges.partition_point(|range| range.end <= addresses.start);
        self.ranges[first..].iter().zip(&self.places[first..]).map_while(move |(range, &(block, offset))| {
            let (start, end) = (range.start.max(addresses.start), range.end.min(addresses.end));
            (start < end).then(|| (block, offset + (start - range.start)..offset + (end - range.start)))
        })
    }

    /// The inverse: the addresses where the guest sees these bytes of a block. Bytes that it does not see are left out.
    pub fn addresses(&self, block: usize, bytes: Range<u64>) -> impl Iterator<Item = Range<u64>> {
        self.ranges.iter().zip(&self.places).filter_map(move |(range, &(place, offset))| {
            let (start, end) = (bytes.start.max(offset), bytes.end.min(offset + (range.end - range.start)));
            (place == block && start < end).then(|| range.start + (start - offset)..range.start + (end - offset))
        })
    }
}

impl Physical for GuestPhysical {
    fn ranges(&self) -> &[Range<u64>] {
        &self.ranges
    }

    fn read(&self, address: u64, into: &mut [u8]) -> Result<(), Unreadable> {
        let unreadable = Unreadable { address, bytes: into.len() };
        let end = address.checked_add(into.len() as u64).ok_or(unreadable)?;
        let mut rest = into;
        for (block, range) in self.locate(address..end) {
            let (piece, after) = rest.split_at_mut((range.end - range.start) as usize);
            if self.is_away(block, range.clone()) || !self.load(block, &range, piece) {
                return Err(unreadable);
            }
            rest = after;
        }
        // Some addresses in between are no RAM.
        if rest.is_empty() { Ok(()) } else { Err(unreadable) }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use sterna_protocol::spec::BlockSpec;
    use sterna_sys::map::Access;

    use super::*;
    use crate::memory::BlockFile;
    use crate::memory::shared::SharedMemory;

    fn ram(blocks: &[BlockFile]) -> Arc<dyn Memory> {
        Arc::new(SharedMemory::open(blocks, Access::Read).expect("a mapping"))
    }

    fn block(id: &str, pages: u8) -> BlockFile {
        let file = tempfile::tempfile().expect("a file");
        for page in 0..pages {
            file.write_all_at(&[page; 4096], u64::from(page) * 4096).expect("room");
        }
        let spec = BlockSpec { id: id.into(), bytes: u64::from(pages) * 4096, page_bytes: 4096, path: String::new() };
        BlockFile { spec, file, address: 0, process: None }
    }

    fn mapped(guest_physical: Range<u64>, block: &str, offset: u64) -> MappedRam {
        MappedRam { guest_physical, block: block.into(), offset }
    }

    #[test]
    fn ram_is_read_by_the_guests_addresses_across_blocks_and_not_across_holes() {
        let ram = ram(&[block("low", 4), block("high", 4)]);
        let map = [
            mapped(0..0x2000, "low", 0),
            mapped(0x2000..0x3000, "high", 0x3000),
            mapped(0x8000..0x9000, "vga.vram", 0),
            mapped(0x1_0000..0x1_2000, "low", 0x2000),
        ];
        let memory = GuestPhysical::new(&map, ram).unwrap();
        assert_eq!(memory.ranges(), [0..0x2000, 0x2000..0x3000, 0x1_0000..0x1_2000]);
        let mut bytes = [9; 0x1002];
        memory.read(0x1fff, &mut bytes[..2]).unwrap();
        assert_eq!(bytes[..2], [1, 3]);
        memory.read(0x1_0fff, &mut bytes).unwrap_err();
        memory.read(0x1_0fff, &mut bytes[..0x1001]).unwrap();
        assert_eq!((bytes[0], bytes[1], bytes[0x1000]), (2, 3, 3));
        for (address, length) in
            [(0x2fff, 2), (0x3000, 1), (0x8000, 1), (0x1_2000, 1), (u64::MAX, 1), (u64::MAX - 4, 8)]
        {
            assert!(memory.read(address, &mut bytes[..length]).is_err(), "{address:#x}");
        }
        let places: Vec<_> = memory.locate(0x1000..0x1_1000).collect();
        assert_eq!(places, [(0, 0x1000..0x2000), (1, 0x3000..0x4000), (0, 0x2000..0x3000)]);
        let addresses = |block, bytes| memory.addresses(block, bytes).collect::<Vec<_>>();
        assert_eq!(addresses(0, 0x1000..0x3000), [0x1000..0x2000, 0x1_0000..0x1_1000]);
        assert_eq!(addresses(1, 0..0x4000).first(), Some(&(0x2000..0x3000)));
        assert_eq!(addresses(1, 0..0x3000), []);
    }

    #[test]
    fn maps_that_cannot_be_are_refused() {
        let ram = ram(&[block("ram", 4)]);
        for map in [
            vec![],
            vec![mapped(0..0x1000, "other", 0)],
            vec![mapped(0..0x5000, "ram", 0)],
            vec![mapped(0..0x1000, "ram", u64::MAX - 4095)],
            vec![mapped(0..0x2000, "ram", 0), mapped(0x1000..0x2000, "ram", 0x3000)],
            vec![mapped(0..0x2000, "ram", 0), mapped(0x8000..0x9000, "ram", 0x1000)],
        ] {
            assert!(GuestPhysical::new(&map, Arc::clone(&ram)).is_err(), "{map:?}");
        }
    }
}
