//! What of a chunk travels: the decision about each page, and nothing else.

use sterna_protocol::frame::{ChunkFrame, page_digest};
use sterna_protocol::layout::{ChunkIndex, PAGE_BYTES};
use sterna_protocol::pages::PageSet;

use super::sent::{Last, SentTable};
use crate::ram::{Ram, is_zero};

/// Where the pages of a round went: each is in exactly one of the counters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Bodies sent.
    pub full: u64,
    /// Zeros: a bit each, or nothing where the destination holds zeros already.
    pub zero: u64,
    /// Given back by the guest: zeros at the destination from now on.
    pub unallocated: u64,
    /// Written again with what was there.
    pub unchanged: u64,
}

impl Counts {
    /// All pages dealt with.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.full + self.zero + self.unallocated + self.unchanged
    }
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.full += other.full;
        self.zero += other.zero;
        self.unallocated += other.unallocated;
        self.unchanged += other.unchanged;
    }
}

/// What of one chunk travels.
#[derive(Debug)]
pub struct Selected {
    /// The frame; absent where nothing travels.
    pub frame: Option<ChunkFrame>,
    /// A digest for each full page of it, in order.
    pub digests: Vec<u64>,
    /// Where the pages went.
    pub counts: Counts,
}

/// Decides about `wanted` pages of a chunk.
///
/// `discarded` are those of them that the guest gave back since: they are looked up in the file before they are touched, because
/// reading a hole through the mapping would fill it. `skip_unchanged` is for blocks whose tracking is coarser than a page.
///
/// Every page is read once into a buffer, so that all decisions about it are about the same content; the body is read again by
/// the kernel when it is sent. A write in between makes the page dirty (it is watched), so it goes again.
///
/// # Errors
/// The file's holes cannot be read.
pub fn select(
    ram: &Ram,
    sent: &SentTable,
    round: u32,
    chunk: ChunkIndex,
    wanted: &PageSet,
    discarded: &PageSet,
) -> std::io::Result<Selected> {
    let mut counts = Counts::default();
    let (mut full, mut zero, mut digests) = (PageSet::EMPTY, PageSet::EMPTY, Vec::with_capacity(wanted.len()));
    let holes = if discarded.is_empty() { PageSet::EMPTY } else { discarded.without(&ram.allocated_in(chunk)?) };
    let skip_unchanged = ram.tracked_coarsely(chunk);
    let mut body = [0; PAGE_BYTES];
    for page in wanted.iter() {
        let hole = holes.contains(page);
        if !hole {
            ram.read(chunk, page, &mut body);
        }
        if hole || is_zero(&body) {
            if hole {
                counts.unallocated += 1;
            } else {
                counts.zero += 1;
            }
            if !matches!(sent.last(chunk, page), Last::Never | Last::Zero) {
                zero.insert(page);
                sent.zero(chunk, page);
            }
            continue;
        }
        let digest = page_digest(&body);
        if skip_unchanged && sent.holds(chunk, page, digest) {
            counts.unchanged += 1;
            continue;
        }
        counts.full += 1;
        full.insert(page);
        digests.push(digest);
        sent.content(chunk, page, digest);
    }
    let frame = (!full.is_empty() || !zero.is_empty()).then_some(ChunkFrame { round, chunk, full, zero });
    Ok(Selected { frame, digests, counts })
}

/// Pages of a chunk whose content is not what was last sent, though nobody reported a write. For guests whose disks write into
/// RAM past the page tables (direct I/O): such a write can land after its page was armed again, and is seen by nothing else.
pub fn changed_untracked(ram: &Ram, sent: &SentTable, chunk: ChunkIndex, pages: usize) -> PageSet {
    let mut body = [0; PAGE_BYTES];
    (0..pages)
        .map(|page| page as u8)
        .filter(|&page| {
            let last = sent.last(chunk, page);
            if last == Last::Never {
                // Neither allocated when the migration began nor written since: a page that was pinned would be allocated.
                return false;
            }
            ram.read(chunk, page, &mut body);
            match last {
                Last::Zero => !is_zero(&body),
                _ => is_zero(&body) || !sent.holds(chunk, page, page_digest(&body)),
            }
        })
        .collect()
}
