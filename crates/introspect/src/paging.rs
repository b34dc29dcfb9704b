use crate::{PAGE_BYTES, Physical, Unreadable};

/// The bit of an entry that translates anything at all.
const PRESENT: u64 = 1;

/// The bit of an entry of the second or third level that is a leaf of 2 MiB or 1 GiB.
const HUGE: u64 = 1 << 7;

/// The bits of an entry, and of CR3, that are an address.
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// Where programs have page tables of their own (`CONFIG_PAGE_TABLE_ISOLATION`), a process has two roots beside each
/// other. The addresses of the program's root and the kernel's root differ in this bit.
const USER_TABLES: u64 = 1 << 12;

const TABLE_BYTES: usize = PAGE_BYTES as usize;

/// A processor's page tables: Intel's manual, volume 3, chapter "Paging".
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageTables {
    /// The whole of CR3; bits that are no address are ignored.
    pub root: u64,
    /// Five levels instead of four (`CR4.LA57`).
    pub five_levels: bool,
}

impl PageTables {
    /// The kernel's tables, where these are a program's own.
    pub(crate) fn of_kernel(self) -> Self {
        Self { root: self.root & !USER_TABLES, ..self }
    }
}

/// The translation of a virtual address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Translated {
    /// The guest-physical address.
    pub address: u64,
    /// The bytes from here on for which the same translation holds, at least one.
    pub bytes: u64,
}

/// The reason why virtual memory could not be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The address is not mapped.
    NotMapped,
    /// The tables, or what they map, lie where there is no RAM.
    Unreadable(Unreadable),
}

impl From<Unreadable> for Fault {
    fn from(error: Unreadable) -> Self {
        Self::Unreadable(error)
    }
}

/// The guest's memory as these tables map it, for one look. It keeps the table of each level that was used last, so
/// that addresses in order cost next to nothing. The guest may change its tables meanwhile; a kept table shows what was
/// mapped when it was read.
pub(crate) struct Virtual<'a> {
    ram: &'a dyn Physical,
    tables: PageTables,
    /// By level: the address and the content of the table that was used last.
    kept: [Option<(u64, Box<[u8; TABLE_BYTES]>)>; 5],
}

impl<'a> Virtual<'a> {
    pub fn new(ram: &'a dyn Physical, tables: PageTables) -> Self {
        Self { ram, tables, kept: Default::default() }
    }

    /// Translates a virtual address.
    ///
    /// # Errors
    /// [`Fault`] where nothing is mapped, or a table lies outside of RAM.
    pub fn translate(&mut self, address: u64) -> Result<Translated, Fault> {
        let levels: usize = if self.tables.five_levels { 5 } else { 4 };
        let unused = 64 - (12 + 9 * levels as u32);
        // The unused bits repeat the highest used one, or the processor faults.
        if (address.cast_signed() << unused) >> unused != address.cast_signed() {
            return Err(Fault::NotMapped);
        }
        let mut table = self.tables.root & ADDRESS;
        for level in (0..levels).rev() {
            let shift = 12 + 9 * level as u32;
            let entry = self.entry(level, table, (address >> shift) as usize & 511)?;
            if entry & PRESENT == 0 {
                return Err(Fault::NotMapped);
            }
            if level == 0 || (level <= 2 && entry & HUGE != 0) {
                let within = address & ((1 << shift) - 1);
                let start = entry & ADDRESS & !((1 << shift) - 1);
                return Ok(Translated { address: start | within, bytes: (1 << shift) - within });
            }
            table = entry & ADDRESS;
        }
        Err(Fault::NotMapped)
    }

    /// Copies virtual memory, which may lie in pieces.
    ///
    /// # Errors
    /// [`Fault`]; some of it may have been copied.
    pub fn read(&mut self, address: u64, into: &mut [u8]) -> Result<(), Fault> {
        let mut done = 0;
        while done < into.len() {
            let at = address.checked_add(done as u64).ok_or(Fault::NotMapped)?;
            let found = self.translate(at)?;
            let bytes = usize::try_from(found.bytes).unwrap_or(usize::MAX).min(into.len() - done);
            self.ram.read(found.address, &mut into[done..done + bytes])?;
            done += bytes;
        }
        Ok(())
    }

    /// Reads a little-endian word.
    ///
    /// # Errors
    /// [`Fault`] as for [`Self::read`].
    pub fn word(&mut self, address: u64) -> Result<u64, Fault> {
        let mut bytes = [0; 8];
        self.read(address, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    fn entry(&mut self, level: usize, table: u64, index: usize) -> Result<u64, Unreadable> {
        let kept = &mut self.kept[level];
        let bytes = match kept {
            Some((at, bytes)) if *at == table => bytes,
            _ => {
                let mut bytes = Box::new([0; TABLE_BYTES]);
                self.ram.read(table, bytes.as_mut_slice())?;
                &mut kept.insert((table, bytes)).1
            }
        };
        Ok(bytes.as_chunks::<8>().0.get(index).map_or(0, |entry| u64::from_le_bytes(*entry)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::toy::Ram;

    /// Tables at 0x1000, 0x2000, … one after another, so that `address` is mapped by this entry at `leaf_level`.
    fn mapped(address: u64, levels: usize, leaf_level: usize, leaf: u64) -> Ram {
        let mut ram = Ram::new(1 << 20);
        let mut table = 0x1000;
        for level in (leaf_level..levels).rev() {
            let index = (address >> (12 + 9 * level)) & 511;
            let entry = if level == leaf_level { leaf } else { (table + 0x1000) | 0x8000_0000_0000_0063 };
            ram.write(table + 8 * index, &entry.to_le_bytes());
            table += 0x1000;
        }
        ram
    }

    fn translate(ram: &Ram, five_levels: bool, address: u64) -> Result<Translated, Fault> {
        Virtual::new(ram, PageTables { root: 0x1fff, five_levels }).translate(address)
    }

    #[test]
    fn leaves_of_every_size_are_walked_to_with_four_and_five_levels() {
        for (five_levels, address) in [(false, 0xffff_9234_5678_9abc_u64), (true, 0xff12_3456_789a_bcde)] {
            for (level, bits) in [(0, 12), (1, 21), (2, 30)] {
                let huge = if level == 0 { 0 } else { 1 << 7 };
                // Bit 12 of a huge leaf and the highest bit are no address.
                let leaf = 0x0000_7654_8000_0000 | 0x8000_0000_0000_0063 | huge | if level == 0 { 0 } else { 1 << 12 };
                let ram = mapped(address, if five_levels { 5 } else { 4 }, level, leaf);
                let within = address & ((1 << bits) - 1);
                let expected = Translated { address: 0x0000_7654_8000_0000 | within, bytes: (1 << bits) - within };
                assert_eq!(translate(&ram, five_levels, address), Ok(expected), "level {level}");
                assert_eq!(translate(&ram, five_levels, address ^ 1 << 38), Err(Fault::NotMapped));
            }
        }
    }

    #[test]
    fn an_address_that_no_processor_takes_is_not_mapped() {
        let ram = mapped(0x9234_5678_9abc, 4, 0, 0x63);
        assert_eq!(translate(&ram, false, 0x9234_5678_9abc), Err(Fault::NotMapped));
        assert!(translate(&ram, false, 0xffff_9234_5678_9abc).is_ok());
    }

    #[test]
    fn tables_outside_ram_are_told_from_addresses_that_are_not_mapped() {
        let ram = mapped(0, 4, 3, 0x00ff_0000_0000_0063);
        assert!(
            matches!(translate(&ram, false, 0), Err(Fault::Unreadable(error)) if error.address == 0xf_0000_0000_0000)
        );
        let nowhere = PageTables { root: u64::MAX, five_levels: true };
        assert!(matches!(Virtual::new(&ram, nowhere).translate(0), Err(Fault::Unreadable(_))));
    }

    #[test]
    fn a_table_that_maps_itself_ends_the_walk_like_any_other() {
        // Entry 511 of the root is the root, as some kernels have it.
        let mut ram = Ram::new(1 << 20);
        ram.write(0x1ff8, &0x1063_u64.to_le_bytes());
        assert_eq!(translate(&ram, false, u64::MAX - 4095).map(|found| found.address), Ok(0x1000));
    }

    #[test]
    fn memory_in_pieces_is_read_whole_or_not_at_all() {
        let mut ram = mapped(0x1000, 4, 0, 0xa063);
        ram.write(0x4000 + 8 * 2, &0x8063_u64.to_le_bytes());
        ram.write(0xa000, &[1; 4096]);
        ram.write(0x8000, &[2; 4096]);
        let mut memory = Virtual::new(&ram, PageTables { root: 0x1000, five_levels: false });
        let mut bytes = [0; 8];
        memory.read(0x1ffc, &mut bytes).unwrap();
        assert_eq!(bytes, [1, 1, 1, 1, 2, 2, 2, 2]);
        assert_eq!(memory.word(0x2ffc), Err(Fault::NotMapped));
        assert_eq!(memory.word(u64::MAX - 3), Err(Fault::NotMapped));
    }
}
