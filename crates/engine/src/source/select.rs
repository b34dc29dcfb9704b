//! What of a chunk travels: the decision about each page, and nothing else.

use sterna_protocol::layout::{ChunkIndex, PAGE_BYTES};
use sterna_protocol::pages::PageSet;

use super::content::Content;
use super::sent::{Last, SentTable};
use crate::memory::{Ram, is_zero};

/// Where the pages of a round went: each is in exactly one of the counters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Bodies sent whole.
    pub full: u64,
    /// Bodies sent as differences.
    pub delta: u64,
    /// Zeros: a bit each, or nothing where the destination holds zeros already.
    pub zero: u64,
    /// Given back by the guest: zeros at the destination from now on.
    pub unallocated: u64,
    /// Free in the guest: nothing, or a bit where the destination held something else than zeros.
    pub free: u64,
    /// Written with what was there already: nothing.
    pub unchanged: u64,
    /// Written again before their turn: left to the next round.
    pub again: u64,
}

impl Counts {
    /// All pages dealt with.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.bodies() + self.zero + self.unallocated + self.free + self.unchanged + self.again
    }

    /// Bodies sent, whatever their encoding.
    #[must_use]
    pub fn bodies(&self) -> u64 {
        self.full + self.delta
    }
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.full += other.full;
        self.delta += other.delta;
        self.zero += other.zero;
        self.unallocated += other.unallocated;
        self.free += other.free;
        self.unchanged += other.unchanged;
        self.again += other.again;
    }
}

/// What is asked about a chunk.
#[derive(Debug, Clone, Copy)]
pub struct Wanted {
    /// The chunk.
    pub chunk: ChunkIndex,
    /// The pages to decide about.
    pub pages: PageSet,
    /// Those of them that the guest gave back since the last round: they are looked up in the file before they are touched, because
    /// reading a hole through the mapping would fill it.
    pub discarded: PageSet,
    /// Those of them that the guest held free after they were last collected ([`free`](super::free)): zeros at the destination, whatever they
    /// hold here.
    pub free: PageSet,
    /// Those of them that were written again: they are left to the next round.
    pub again: PageSet,
}

/// What of one chunk travels.
#[derive(Debug)]
pub struct Selected {
    /// Pages whose bodies travel.
    pub full: PageSet,
    /// Pages that become zeros at the destination.
    pub zero: PageSet,
    /// A digest for each full page, in order.
    pub digests: Vec<u64>,
    /// What the destination held of each full page before, in order.
    pub held: Vec<Last>,
    /// Where the pages went.
    pub counts: Counts,
}

/// Decides about the wanted pages of a chunk. `content` says how pages whose content is what was last sent are found; they are left out.
/// Where `copies` is given, the body of each full page is appended to it, in order: those are the bytes that were digested.
///
/// Every page is read once, so that all decisions about it are about the same content. Without copies the body is read again by the
/// kernel when it is sent; a write in between makes the page dirty (it is watched), so it goes again.
///
/// # Errors
/// The file's holes cannot be read, or [`RamFault`](crate::memory::RamFault).
pub fn select(
    ram: &Ram,
    sent: &SentTable,
    content: &Content,
    wanted: &Wanted,
    mut copies: Option<&mut Vec<u8>>,
) -> std::io::Result<Selected> {
    let chunk = wanted.chunk;
    let again = wanted.pages.and(&wanted.again);
    let pages = wanted.pages.without(&again);
    let mut counts = Counts { again: again.len() as u64, ..Counts::default() };
    let (mut full, mut zero) = (PageSet::EMPTY, PageSet::EMPTY);
    let (mut digests, mut held) = (Vec::with_capacity(pages.len()), Vec::with_capacity(pages.len()));
    let discarded = pages.and(&wanted.discarded);
    let holes = if discarded.is_empty() { discarded } else { discarded.without(&ram.allocated_in(chunk)?) };
    let (by_digest, mut hashes) = match content {
        Content::Off => (ram.tracked_coarsely(chunk), None),
        Content::Digest => (true, None),
        Content::Hashes(table) => (false, Some(table.chunk(chunk))),
    };
    let mut body = [0; PAGE_BYTES];
    for page in pages.iter() {
        let hole = holes.contains(page);
        let free = !hole && wanted.free.contains(page);
        if !hole && !free {
            ram.read(chunk, page, &mut body)?;
        }
        if hole || free || is_zero(&body) {
            if hole {
                counts.unallocated += 1;
            } else if free {
                counts.free += 1;
            } else {
                counts.zero += 1;
            }
            if !matches!(sent.last(chunk, page), Last::Never | Last::Zero) {
                zero.insert(page);
                sent.zero(chunk, page);
            }
            continue;
        }
        let last = sent.last(chunk, page);
        // The hash says what was sent; only where that has arrived, as far as is known, is it what the destination holds.
        let unchanged = hashes.as_mut().is_some_and(|hashes| hashes.replace(page, &body));
        if unchanged && matches!(last, Last::Content(_)) {
            counts.unchanged += 1;
            continue;
        }
        let digest = sent.digest(&body);
        if by_digest && sent.holds(chunk, page, digest) {
            counts.unchanged += 1;
            continue;
        }
        counts.full += 1;
        held.push(last);
        full.insert(page);
        digests.push(digest);
        sent.content(chunk, page, digest);
        if let Some(copies) = &mut copies {
            copies.extend_from_slice(&body);
        }
    }
    Ok(Selected { full, zero, digests, held, counts })
}

/// Pages of a chunk whose content is not what the destination holds, though nobody reported a write; those in `known` are not looked at. For guests
/// into whose RAM somebody writes past the page tables (a disk by direct I/O, say): such a write can land after its page was armed again, and is seen
/// by nothing else. The guest is stopped and its I/O drained.
///
/// Of a page that was never sent the destination holds zeros, so there zeros are what it is compared with, as where zeros were sent: it may
/// have been outstanding and read while the write was still under way. So no page is left out because of where it has been, and it does not matter
/// when it was pinned, armed, collected, held back or given back. What has no memory is zeros, and is not touched.
///
/// # Errors
/// The file's holes cannot be read.
pub fn changed_untracked(ram: &Ram, sent: &SentTable, chunk: ChunkIndex, known: &PageSet) -> std::io::Result<PageSet> {
    let pages = ram.layout().place(chunk).map_or(0, |place| place.pages);
    let allocated = ram.allocated_in(chunk)?;
    let mut body = [0; PAGE_BYTES];
    let changed = |page: &u8| {
        let last = sent.last(chunk, *page);
        let empty = matches!(last, Last::Never | Last::Zero);
        if !allocated.contains(*page) {
            return !empty;
        }
        if ram.read(chunk, *page, &mut body).is_err() {
            // It is lost: the round that is to send it says so.
            return true;
        }
        if empty { !is_zero(&body) } else { is_zero(&body) || !sent.holds(chunk, *page, sent.digest(&body)) }
    };
    Ok(PageSet::first(pages).without(known).iter().filter(changed).collect())
}
