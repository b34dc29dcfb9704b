use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::ops::Range;

use crate::{PAGE_BYTES, PageTables, Physical, Unreadable};

/// RAM of a guest that does not exist; pages nobody wrote are zeros.
#[derive(Debug, Clone)]
pub struct Ram {
    ranges: Vec<Range<u64>>,
    pages: BTreeMap<u64, Box<[u8; PAGE_BYTES as usize]>>,
}

impl Ram {
    /// RAM of `bytes` bytes from address 0 on, less a part that is no whole page.
    #[must_use]
    pub fn new(bytes: u64) -> Self {
        Self::with_ranges(std::iter::once(0..bytes / PAGE_BYTES * PAGE_BYTES).collect())
    }

    /// RAM at these addresses: sorted, disjoint, of whole pages.
    #[must_use]
    pub fn with_ranges(ranges: Vec<Range<u64>>) -> Self {
        Self { ranges, pages: BTreeMap::new() }
    }

    /// Writes; what would lie outside RAM is lost.
    pub fn write(&mut self, address: u64, bytes: &[u8]) {
        for (at, &byte) in (address..u64::MAX).zip(bytes) {
            if self.ranges.iter().any(|range| range.contains(&at)) {
                let page = self.pages.entry(at / PAGE_BYTES).or_insert_with(|| Box::new([0; PAGE_BYTES as usize]));
                page[(at % PAGE_BYTES) as usize] = byte;
            }
        }
    }

    /// The pages that were written, by their frames.
    pub fn written(&self) -> impl Iterator<Item = (u64, &[u8; PAGE_BYTES as usize])> {
        self.pages.iter().map(|(&frame, page)| (frame, &**page))
    }

    /// Writes a little-endian word.
    pub fn write_word(&mut self, address: u64, word: u64) {
        self.write(address, &word.to_le_bytes());
    }
}

impl Physical for Ram {
    fn ranges(&self) -> &[Range<u64>] {
        &self.ranges
    }

    fn read(&self, address: u64, into: &mut [u8]) -> Result<(), Unreadable> {
        let unreadable = Unreadable { address, bytes: into.len() };
        let end = address.checked_add(into.len() as u64).ok_or(unreadable)?;
        if !self.ranges.iter().any(|range| range.start <= address && end <= range.end) {
            return Err(unreadable);
        }
        let mut at = address;
        let mut rest = into;
        while !rest.is_empty() {
            let offset = (at % PAGE_BYTES) as usize;
            let (piece, after) = rest.split_at_mut(rest.len().min(PAGE_BYTES as usize - offset));
            match self.pages.get(&(at / PAGE_BYTES)) {
                Some(page) => piece.copy_from_slice(&page[offset..offset + piece.len()]),
                None => piece.fill(0),
            }
            at += piece.len() as u64;
            rest = after;
        }
        Ok(())
    }
}

const IMAGE: u64 = 0xffff_ffff_8000_0000;
const DIRECT: u64 = 0xffff_8880_0000_0000;
const VMEMMAP: u64 = 0xffff_ea00_0000_0000;

/// The kernel's image: 2 MiB.
const KERNEL: u64 = 16 << 20;
/// In it: the name, the array of nodes, the only node.
const NAME: u64 = KERNEL + 0x8000;
const NODES: u64 = KERNEL + 0x9000;
const NODE: u64 = KERNEL + 0xa000;
const ROOT: u64 = KERNEL + 0x1000;
/// The array of roots, the only root.
const SECTION_ROOTS: u64 = KERNEL + 0xb000;
const SECTION_ROOT: u64 = KERNEL + 0xc000;
/// The memory map: 2 MiB, of a section.
const MAP: u64 = 18 << 20;

const BUDDY: u32 = 0xf000_0000;
const ZONE_BYTES: u64 = 512;
const ORDERS: u64 = 11;

/// Where the toy's description lies.
pub const NOTE: u64 = 20 << 20;

/// A kernel in 72 MiB of RAM, part of one section, with nothing but what is read of it: no page of it is free at first.
#[derive(Debug, Clone)]
pub struct Toy {
    /// Its RAM.
    pub ram: Ram,
    /// Lines of its description, by what stands before `=`.
    pub lines: BTreeMap<String, String>,
    blocks: [u64; ORDERS as usize],
}

impl Default for Toy {
    fn default() -> Self {
        let mut toy = Self { ram: Ram::new(72 << 20), lines: lines(), blocks: [0; ORDERS as usize] };
        toy.map_memory();
        let mut name = [0; 195];
        for (field, text) in [(0, &b"Linux"[..]), (65, b"toy"), (130, b"6.18.0-toy")] {
            name[field..field + text.len()].copy_from_slice(text);
        }
        toy.ram.write(NAME, &name);
        toy.ram.write_word(NODES, DIRECT + NODE);
        // One zone.
        toy.ram.write(NODE + 0x800, &1_u32.to_le_bytes());
        toy.ram.write_word(NODE + 16, 72 << 8);
        toy.ram.write_word(SECTION_ROOTS, DIRECT + SECTION_ROOT);
        toy.ram.write_word(SECTION_ROOT, VMEMMAP | 0xf);
        for frame in 0..72 << 8 {
            toy.set_page(frame, u32::MAX, 1, 0);
        }
        toy.write_note();
        toy
    }
}

impl Toy {
    /// Its processors.
    #[must_use]
    pub fn processors(&self) -> [PageTables; 1] {
        [PageTables { root: ROOT, five_levels: false }]
    }

    /// Writes the description as `lines` have it.
    pub fn write_note(&mut self) {
        let mut text = format!("OSRELEASE={}\n", self.lines.get("OSRELEASE").map_or("", String::as_str));
        for (key, value) in self.lines.iter().filter(|(key, _)| *key != "OSRELEASE") {
            let _ = writeln!(text, "{key}={value}");
        }
        self.ram.write(NOTE, &[0; 8192]);
        self.ram.write(NOTE, text.as_bytes());
    }

    /// Has the kernel's image point to something, from this offset in it.
    pub fn point_to(&mut self, offset: u64, address: u64) {
        self.ram.write_word(KERNEL + offset % (2 << 20), DIRECT.wrapping_add(address));
    }

    /// Frees a block, and counts it.
    pub fn free(&mut self, frame: u64, order: u64) {
        self.set_page(frame, BUDDY, 0, order);
        self.count(order, 1);
    }

    /// Takes a block that was freed, and counts it no more.
    pub fn allocate(&mut self, frame: u64, order: u64) {
        self.set_page(frame, u32::MAX, 1, 0);
        self.count(order, -1);
    }

    fn count(&mut self, order: u64, more: i64) {
        if let Some(blocks) = self.blocks.get_mut(order as usize) {
            *blocks = blocks.saturating_add_signed(more);
            self.ram.write_word(NODE + 64 + order * 24 + 16, *blocks);
        }
        let pages = crate::free::pages(&self.blocks);
        self.ram.write_word(NODE + 400, pages);
    }

    /// The counters of a kernel that is starting; the memory map stays.
    pub fn forget_counts(&mut self) {
        for (order, blocks) in (0..).zip(std::mem::take(&mut self.blocks)) {
            if blocks > 0 {
                self.ram.write_word(NODE + 64 + order * 24 + 16, 0);
            }
        }
        self.ram.write_word(NODE + 400, 0);
    }

    /// What the memory map says of a page.
    pub fn set_page(&mut self, frame: u64, mapcount: u32, refcount: u32, private: u64) {
        let page = MAP + frame * 64;
        self.ram.write_word(page + 40, private);
        self.ram.write(page + 48, &mapcount.to_le_bytes());
        self.ram.write(page + 52, &refcount.to_le_bytes());
    }

    /// What the memory map says of a page's use: flags, what it is a copy of, and of which folio it is.
    pub fn set_use(&mut self, frame: u64, flags: u64, mapping: u64, compound: u64) {
        for (word, value) in [(0, flags), (8, compound), (24, mapping)] {
            self.ram.write_word(MAP + frame * 64 + word, value);
        }
    }

    /// Where the kernel sees what it notes about a page.
    #[must_use]
    pub fn structure_of(frame: u64) -> u64 {
        VMEMMAP + frame * 64
    }

    /// The entry of the only section.
    pub fn set_section(&mut self, flags: u64) {
        self.ram.write_word(SECTION_ROOT, VMEMMAP | flags);
    }

    /// Takes a frame out of the direct map, which has pages of 4 KiB from then on.
    pub fn hide(&mut self, frames: &[u64]) {
        let directory = KERNEL + 0x10_0000;
        self.ram.write_word(KERNEL + 0x3000, directory | 0x63);
        for index in 0..64 {
            let table = directory + 0x1000 * (index + 1);
            self.ram.write_word(directory + 8 * index, table | 0x63);
            for entry in 0..512 {
                let frame = index * 512 + entry;
                let mapped = if frames.contains(&frame) { 0 } else { (frame * PAGE_BYTES) | 0x63 };
                self.ram.write_word(table + 8 * entry, mapped);
            }
        }
    }

    fn map_memory(&mut self) {
        let tables = [(IMAGE, 0x2000, 0x4000), (DIRECT, 0x3000, 0), (VMEMMAP, 0x5000, 0x6000)];
        for (address, second, third) in tables {
            let index = |shift: u32| (address >> shift & 511) * 8;
            self.ram.write_word(ROOT + index(39), (KERNEL + second) | 0x63);
            if third == 0 {
                // 1 GiB of physical memory.
                self.ram.write_word(KERNEL + second + index(30), 0xe3);
            } else {
                self.ram.write_word(KERNEL + second + index(30), (KERNEL + third) | 0x63);
            }
        }
        self.ram.write_word(KERNEL + 0x4000 + 8 * 8, KERNEL | 0xe3);
        self.ram.write_word(KERNEL + 0x6000, MAP | 0xe3);
    }
}

fn lines() -> BTreeMap<String, String> {
    let hex = |physical: u64| format!("{:x}", IMAGE + physical);
    let pairs = [
        ("OSRELEASE", "6.18.0-toy".to_owned()),
        ("PAGESIZE", "4096".to_owned()),
        ("NUMBER(phys_base)", "0".to_owned()),
        ("NUMBER(pgtable_l5_enabled)", "0".to_owned()),
        ("SYMBOL(swapper_pg_dir)", hex(ROOT)),
        ("SYMBOL(_stext)", hex(KERNEL)),
        ("SYMBOL(init_uts_ns)", hex(NAME)),
        ("OFFSET(uts_namespace.name)", "0".to_owned()),
        ("SYMBOL(mem_section)", format!("{:x}", DIRECT + SECTION_ROOTS)),
        ("LENGTH(mem_section)", "2048".to_owned()),
        ("SIZE(mem_section)", "16".to_owned()),
        ("OFFSET(mem_section.section_mem_map)", "0".to_owned()),
        ("NUMBER(SECTION_SIZE_BITS)", "27".to_owned()),
        ("SIZE(page)", "64".to_owned()),
        ("OFFSET(page.flags)", "0".to_owned()),
        ("OFFSET(page.compound_head)", "8".to_owned()),
        ("OFFSET(page.mapping)", "24".to_owned()),
        ("NUMBER(PG_lru)", "5".to_owned()),
        ("NUMBER(PG_swapbacked)", "19".to_owned()),
        ("OFFSET(page._mapcount)", "48".to_owned()),
        ("OFFSET(page._refcount)", "52".to_owned()),
        ("OFFSET(page.private)", "40".to_owned()),
        ("NUMBER(PAGE_BUDDY_MAPCOUNT_VALUE)", BUDDY.cast_signed().to_string()),
        ("LENGTH(zone.free_area)", ORDERS.to_string()),
        ("SYMBOL(node_data)", hex(NODES)),
        ("LENGTH(node_data)", "1".to_owned()),
        ("OFFSET(pglist_data.node_zones)", "0".to_owned()),
        ("OFFSET(pglist_data.nr_zones)", "2048".to_owned()),
        ("SIZE(zone)", ZONE_BYTES.to_string()),
        ("OFFSET(zone.free_area)", "64".to_owned()),
        ("SIZE(free_area)", "24".to_owned()),
        ("LENGTH(free_area.free_list)", "1".to_owned()),
        ("OFFSET(free_area.free_list)", "0".to_owned()),
        ("SIZE(list_head)", "16".to_owned()),
        ("OFFSET(zone.vm_stat)", "400".to_owned()),
        ("NUMBER(NR_FREE_PAGES)", "0".to_owned()),
        ("OFFSET(zone.spanned_pages)", "16".to_owned()),
    ];
    pairs.map(|(key, value)| (key.to_owned(), value)).into()
}
