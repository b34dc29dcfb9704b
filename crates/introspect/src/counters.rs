use crate::layout::{Layout, Nodes, ZoneLayout};
use crate::linux::Unfit;
use crate::paging::{Fault, Virtual};

/// More zones than a node can have (`MAX_NR_ZONES`).
const MAX_ZONES: u32 = 8;

/// The counters of one of the guest's zones.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ZoneCounters {
    /// The node's number.
    pub node: u32,
    /// The zone's number in the node.
    pub zone: u32,
    /// Page frames from its first to its last, holes included.
    pub spanned_pages: u64,
    /// Free blocks, by their order.
    pub free_blocks: Vec<u64>,
    /// The zone's counter `NR_FREE_PAGES`. Each processor holds back up to 125 pages of changes to it, and pages that
    /// are isolated, to be taken out, do not count in it.
    pub nr_free_pages: i64,
}

impl ZoneCounters {
    /// Pages in the zone's free lists.
    #[must_use]
    pub fn free_pages(&self) -> u64 {
        crate::free::pages(&self.free_blocks)
    }
}

/// Reads the counters of all zones that have any page.
///
/// # Errors
/// [`Unfit`] where the counters cannot be read, or there are none.
pub(crate) fn read(memory: &mut Virtual<'_>, layout: &Layout) -> Result<Vec<ZoneCounters>, Unfit> {
    let mut counters = Vec::new();
    let unreadable = |fault| Unfit::from_fault(fault, "the kernel's zones");
    for (node, address) in nodes(memory, layout.zones.nodes).map_err(unreadable)? {
        read_node(memory, layout, node, address, &mut counters).map_err(unreadable)?;
    }
    if counters.is_empty() {
        return Err(Unfit::Malformed { what: "the kernel's zones: none has a page".to_owned() });
    }
    Ok(counters)
}

fn nodes(memory: &mut Virtual<'_>, nodes: Nodes) -> Result<Vec<(u32, u64)>, Fault> {
    let (array, count) = match nodes {
        Nodes::One(address) => return Ok(vec![(0, address)]),
        Nodes::Array(array, count) => (array, count),
    };
    // Bounded by the layout.
    let mut bytes = vec![0; count as usize * 8];
    memory.read(array, &mut bytes)?;
    let pointers = bytes.as_chunks::<8>().0.iter().map(|pointer| u64::from_le_bytes(*pointer));
    Ok((0..).zip(pointers).filter(|&(_, pointer)| pointer != 0).collect())
}

fn read_node(
    memory: &mut Virtual<'_>,
    layout: &Layout,
    node: u32,
    address: u64,
    counters: &mut Vec<ZoneCounters>,
) -> Result<(), Fault> {
    let zones = &layout.zones;
    let mut count = [0; 4];
    memory.read(address.checked_add(zones.zone_count).ok_or(Fault::NotMapped)?, &mut count)?;
    let mut bytes = vec![0; zones.bytes];
    for zone in 0..u32::from_le_bytes(count).min(MAX_ZONES) {
        let at = address.checked_add(zones.zones).and_then(|at| at.checked_add(u64::from(zone) * zones.bytes as u64));
        memory.read(at.ok_or(Fault::NotMapped)?, &mut bytes)?;
        let read = zones.decode(&bytes, layout.page.orders, node, zone);
        if read.spanned_pages > 0 {
            counters.push(read);
        }
    }
    Ok(())
}

impl ZoneLayout {
    /// `bytes` is as long as the layout says, which has checked that every field lies in it.
    fn decode(&self, bytes: &[u8], orders: u8, node: u32, zone: u32) -> ZoneCounters {
        let word = |offset: usize| {
            let bytes = bytes.get(offset..).and_then(|rest| rest.first_chunk());
            bytes.map_or(0, |bytes| u64::from_le_bytes(*bytes))
        };
        let blocks = |order: u8| word(self.areas + usize::from(order) * self.area_bytes + self.blocks);
        ZoneCounters {
            node,
            zone,
            spanned_pages: word(self.spanned),
            free_blocks: (0..orders).map(blocks).collect(),
            nr_free_pages: word(self.free_pages).cast_signed(),
        }
    }
}
