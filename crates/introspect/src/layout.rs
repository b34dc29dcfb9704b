use crate::PAGE_BYTES;
use crate::linux::Unfit;
use crate::paging::PageTables;
use crate::vmcoreinfo::Vmcoreinfo;

/// The address at which the kernel maps itself: `__START_KERNEL_map`, the same in every x86-64 kernel.
const KERNEL_IMAGE: u64 = 0xffff_ffff_8000_0000;

/// The size of a section of the memory map where the kernel does not say it, as up to 5.10: 128 MiB, on every x86-64 so
/// far.
const SECTION_BITS: u64 = 27;

/// More orders than any configuration has (`ARCH_FORCE_MAX_ORDER`).
pub(crate) const MAX_ORDERS: usize = 20;

/// More nodes than a kernel can be configured for (`NODES_SHIFT` is 10 at most).
const MAX_NODES: u64 = 1024;

/// The layout of a kernel: where it keeps what is read of it. Every field lies inside its structure, and every size is
/// bounded: the rest of the crate relies on that.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Layout {
    /// The kernel's own page tables.
    pub tables: PageTables,
    /// The beginning of its text, and `init_uts_ns` with its name: virtual addresses inside its image.
    pub text: u64,
    pub uts: u64,
    /// The offsets in `init_uts_ns` at which the name may begin.
    pub name: [u64; 2],
    phys_base: u64,
    pub sections: SectionLayout,
    pub page: PageLayout,
    pub zones: ZoneLayout,
}

/// `struct mem_section`: roots of one page each, whose entries say where a section's part of the memory map lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SectionLayout {
    /// The array of roots, and their number.
    pub roots: u64,
    pub root_count: u64,
    /// Bytes of an entry, the offset of the map in it, entries in a root.
    pub bytes: u64,
    pub map: u64,
    pub per_root: u64,
    /// Page frames of a section.
    pub frames: u64,
}

/// `struct page`: the fields that tell a free block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PageLayout {
    pub bytes: usize,
    pub mapcount: usize,
    pub refcount: usize,
    pub private: usize,
    /// What `_mapcount` holds in the first page of a free block.
    pub buddy: u32,
    /// The number of orders: a block's order is less.
    pub orders: u8,
}

/// The fields of `struct page` that describe a page of the page cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CacheLayout {
    pub bytes: usize,
    pub flags: usize,
    pub mapping: usize,
    pub compound: usize,
    /// The flags that are looked at, and those of them that a clean page has.
    pub all: u64,
    pub set: u64,
}

/// `struct pglist_data`, its zones, and their free lists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ZoneLayout {
    /// The place of the nodes.
    pub nodes: Nodes,
    /// In a node: the offsets of its zones, and of their number.
    pub zones: u64,
    pub zone_count: u64,
    /// In a zone: its size, the offset of its free areas, the size of one area, the offset of the number of blocks in
    /// an area, the offsets of the counter of free pages and of the number of frames that the zone spans.
    pub bytes: usize,
    pub areas: usize,
    pub area_bytes: usize,
    pub blocks: usize,
    pub free_pages: usize,
    pub spanned: usize,
}

/// The places of `struct pglist_data`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Nodes {
    /// An array at this address with this number of pointers, null where there is no node.
    Array(u64, u64),
    /// The address of the only node, in a kernel that knows no others.
    One(u64),
}

impl Layout {
    /// Reads and checks what a kernel says of itself.
    ///
    /// # Errors
    /// [`Unfit`] where something is missing or invalid.
    pub fn of(note: &Vmcoreinfo) -> Result<Self, Unfit> {
        if note.value("PAGESIZE").is_none_or(|bytes| bytes.parse() != Ok(PAGE_BYTES)) {
            return Err(malformed("PAGESIZE"));
        }
        if note.number("sme_mask").is_ok_and(|mask| mask != 0) {
            return Err(Unfit::Encrypted);
        }
        // Only x86-64 has this line.
        let phys_base = note.number("phys_base")?.cast_unsigned();
        let root = image(note.symbol("swapper_pg_dir")?, phys_base);
        // Kernels up to 5.10 do not tell it, and have a count of 4 bytes first. Kernels without that count may not tell
        // it either.
        let name = match note.measure("OFFSET", "uts_namespace.name") {
            Err(Unfit::Missing { .. }) => [4, 0],
            offset => [offset?; 2],
        };
        Ok(Self {
            tables: PageTables { root, five_levels: note.number("pgtable_l5_enabled")? != 0 },
            text: note.symbol("_stext")?,
            uts: note.symbol("init_uts_ns")?,
            name,
            phys_base,
            sections: SectionLayout::of(note)?,
            page: PageLayout::of(note)?,
            zones: ZoneLayout::of(note)?,
        })
    }

    /// The guest-physical address of an address in the kernel's image. For other addresses the result is meaningless,
    /// but does not panic.
    pub fn in_image(&self, address: u64) -> u64 {
        image(address, self.phys_base)
    }
}

/// `__pa_symbol`. It wraps on purpose: a kernel that was loaded below the address for which it was linked has a
/// negative base.
fn image(address: u64, phys_base: u64) -> u64 {
    address.wrapping_sub(KERNEL_IMAGE).wrapping_add(phys_base)
}

impl SectionLayout {
    fn of(note: &Vmcoreinfo) -> Result<Self, Unfit> {
        let bits = match note.number("SECTION_SIZE_BITS") {
            Err(Unfit::Missing { .. }) => SECTION_BITS,
            bits => bits?.cast_unsigned(),
        };
        let bytes = note.measure("SIZE", "mem_section")?;
        let map = note.measure("OFFSET", "mem_section.section_mem_map")?;
        if !(24..=40).contains(&bits) || !(8..=512).contains(&bytes) || map > bytes - 8 {
            return Err(malformed("struct mem_section"));
        }
        Ok(Self {
            roots: note.symbol("mem_section")?,
            root_count: note.measure("LENGTH", "mem_section")?,
            bytes,
            map,
            per_root: PAGE_BYTES / bytes,
            frames: 1 << (bits - 12),
        })
    }
}

impl PageLayout {
    fn of(note: &Vmcoreinfo) -> Result<Self, Unfit> {
        let bytes = bounded(note, "SIZE", "page", 32..=512)?;
        let field = |name: &str, width: usize| bounded(note, "OFFSET", name, 0..=bytes - width);
        let (mapcount, refcount) = (field("page._mapcount", 4)?, field("page._refcount", 4)?);
        let private = field("page.private", 8)?;
        let buddy = note.number("PAGE_BUDDY_MAPCOUNT_VALUE")?;
        // 32 bits, signed or not.
        let buddy = i32::try_from(buddy).map(i32::cast_unsigned).or_else(|_| u32::try_from(buddy));
        // A page in no special state holds -1.
        let buddy = buddy.ok().filter(|&value| value != u32::MAX && value != 0);
        Ok(Self {
            bytes,
            mapcount,
            refcount,
            private,
            buddy: buddy.ok_or_else(|| malformed("PAGE_BUDDY_MAPCOUNT_VALUE"))?,
            orders: bounded(note, "LENGTH", "zone.free_area", 1..=MAX_ORDERS)? as u8,
        })
    }
}

impl CacheLayout {
    /// # Errors
    /// [`Unfit`]; the other layouts may be known all the same.
    pub fn of(note: &Vmcoreinfo) -> Result<Self, Unfit> {
        let bytes = bounded(note, "SIZE", "page", 32..=512)?;
        let field = |name: &str| bounded(note, "OFFSET", name, 0..=bytes - 8);
        let bit = |name: &str, least: usize| bounded(note, "NUMBER", name, least..=63).map(|bit| 1_u64 << bit);
        // `PG_uptodate`, `PG_dirty` and `PG_lru` follow each other in every kernel so far
        // (`include/linux/page-flags.h`); the kernel tells only the last.
        let (lru, in_memory) = (bit("PG_lru", 2)?, bit("PG_swapbacked", 0)?);
        let (up_to_date, dirty) = (lru >> 2, lru >> 1);
        Ok(Self {
            bytes,
            flags: field("page.flags")?,
            mapping: field("page.mapping")?,
            compound: field("page.compound_head")?,
            all: lru | up_to_date | dirty | in_memory,
            set: lru | up_to_date,
        })
    }
}

impl ZoneLayout {
    fn of(note: &Vmcoreinfo) -> Result<Self, Unfit> {
        let nodes = match note.symbol("node_data") {
            Err(Unfit::Missing { .. }) => Nodes::One(note.symbol("contig_page_data")?),
            array => Nodes::Array(array?, note.measure("LENGTH", "node_data")?.min(MAX_NODES)),
        };
        let bytes = bounded(note, "SIZE", "zone", 64..=64 << 10)?;
        let inside = |name: &str, width: usize| {
            let last = bytes.checked_sub(width).ok_or_else(|| malformed("struct zone"))?;
            bounded(note, "OFFSET", name, 0..=last)
        };
        let orders = bounded(note, "LENGTH", "zone.free_area", 1..=MAX_ORDERS)?;
        let area_bytes = bounded(note, "SIZE", "free_area", 8..=4096)?;
        // The number of blocks follows the lists, one for each type of page, and nothing else does.
        let types = bounded(note, "LENGTH", "free_area.free_list", 1..=64)?;
        let list = bounded(note, "SIZE", "list_head", 16..=16)?;
        let blocks = bounded(note, "OFFSET", "free_area.free_list", 0..=64)? + types * list;
        if blocks + 8 != area_bytes {
            return Err(malformed("struct free_area"));
        }
        let counter = bounded(note, "NUMBER", "NR_FREE_PAGES", 0..=64)?;
        let free_pages = inside("zone.vm_stat", 8 * (counter + 1))? + 8 * counter;
        Ok(Self {
            nodes,
            zones: note.measure("OFFSET", "pglist_data.node_zones")?,
            zone_count: note.measure("OFFSET", "pglist_data.nr_zones")?,
            bytes,
            areas: inside("zone.free_area", orders * area_bytes)?,
            area_bytes,
            blocks,
            free_pages,
            spanned: inside("zone.spanned_pages", 8)?,
        })
    }
}

/// Reads a measure that has to lie in these bounds.
fn bounded(note: &Vmcoreinfo, kind: &str, name: &str, bounds: std::ops::RangeInclusive<usize>) -> Result<usize, Unfit> {
    let value = note.measure(kind, name)? as usize;
    if bounds.contains(&value) { Ok(value) } else { Err(malformed(&format!("{kind}({name})"))) }
}

fn malformed(what: &str) -> Unfit {
    Unfit::Malformed { what: format!("{what} in VMCOREINFO") }
}
