//! Selection: the decision which pages of a chunk travel, and nothing else.

use sterna_protocol::layout::{ChunkIndex, PAGE_BYTES};
use sterna_protocol::pages::PageSet;

use super::content::{ChunkHashes, Content};
use super::copies::Copies;
use super::sent::{Last, SentTable};
use crate::memory::{BATCH_PAGES, Memory, batches, for_each_body, is_zero};

/// Where the pages of a round went: each is in exactly one of the counters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Bodies sent whole.
    pub full: u64,
    /// Bodies sent as deltas.
    pub delta: u64,
    /// Sent as references to bodies that the gang shares.
    pub reference: u64,
    /// Zeros: a bit each, or nothing where the destination holds zeros already.
    pub zero: u64,
    /// Discarded by the guest: zeros at the destination from now on.
    pub unallocated: u64,
    /// Free in the guest: nothing is sent, or a bit where the destination held something else than zeros.
    pub free: u64,
    /// Content fake dirty: nothing is sent.
    pub unchanged: u64,
    /// Written again before their turn: left to the next round.
    pub again: u64,
}

impl Counts {
    /// All pages counted.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.bodies() + self.reference + self.zero + self.unallocated + self.free + self.unchanged + self.again
    }

    /// The bodies sent, in any encoding.
    #[must_use]
    pub fn bodies(&self) -> u64 {
        self.full + self.delta
    }
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.full += other.full;
        self.delta += other.delta;
        self.reference += other.reference;
        self.zero += other.zero;
        self.unallocated += other.unallocated;
        self.free += other.free;
        self.unchanged += other.unchanged;
        self.again += other.again;
    }
}

/// The wanted pages of a chunk, and what is known of them.
#[derive(Debug, Clone, Copy)]
pub struct Wanted {
    /// The chunk.
    pub chunk: ChunkIndex,
    /// The pages to decide about.
    pub pages: PageSet,
    /// Those of them that the guest discarded since the last round: they are looked up in the file before they are
    /// touched, because reading a hole through the mapping would fill it.
    pub discarded: PageSet,
    /// Those of them that the guest held free after they were last collected ([`free`](super::free)): zeros at the
    /// destination, whatever they hold here.
    pub free: PageSet,
    /// Those of them that were written again: they are left to the next round.
    pub again: PageSet,
}

/// The pages of one chunk that travel.
#[derive(Debug, Default)]
pub struct Selected {
    /// Pages whose bodies travel.
    pub full: PageSet,
    /// Pages that become zeros at the destination.
    pub zero: PageSet,
    /// A digest for each full page, in order.
    pub digests: Vec<u64>,
    /// What the destination held of each full page before, in order.
    pub held: Vec<Last>,
    /// The counts of the pages.
    pub counts: Counts,
}

/// What becomes of the bodies after the decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    /// No body is kept: the kernel reads them again when they are sent.
    Nothing,
    /// The full pages' bodies are kept, in order.
    Full,
}

/// Decides about the wanted pages of a chunk. `content` says how to find pages whose content is what was last sent;
/// they are left out. The kept bodies, the very bytes that were digested, are behind what `copies` held.
///
/// Every page is read once, so that all decisions about it are about the same content. Where no body is kept, the
/// kernel reads it again when it is sent; a write in between makes the page dirty (it is watched), so it goes again.
///
/// # Errors
/// The file's holes cannot be read, or [`RamFault`](crate::memory::fault::RamFault).
pub fn select(
    ram: &dyn Memory,
    sent: &SentTable,
    content: &Content,
    wanted: &Wanted,
    copies: &mut Copies,
    keep: Keep,
) -> std::io::Result<Selected> {
    let chunk = wanted.chunk;
    let again = wanted.pages.and(&wanted.again);
    let pages = wanted.pages.without(&again);
    let discarded = pages.and(&wanted.discarded);
    let holes = if discarded.is_empty() { discarded } else { discarded.without(&ram.allocated_in(chunk)?) };
    let free = pages.and(&wanted.free).without(&holes);
    let by_digest = match content {
        Content::Off => ram.tracked_coarsely(chunk),
        Content::Digest => true,
        Content::Hashes(_) => false,
    };
    let hashes = if let Content::Hashes(table) = content { Some(table.chunk(chunk)) } else { None };
    let left = pages.without(&holes).without(&free);
    let (digests, held) = (Vec::with_capacity(left.len()), Vec::with_capacity(left.len()));
    let selected = Selected { digests, held, ..Selected::default() };
    let mut deciding = Deciding { sent, chunk, by_digest, hashes, selected };
    for page in holes.or(&free).iter() {
        deciding.zero(page);
    }
    for batch in batches(&left) {
        ram.read(chunk, &batch, copies.room(batch.len()))?;
        let (mut full, mut count) = ([0; BATCH_PAGES], 0);
        for (place, page) in batch.iter().enumerate() {
            if deciding.body(page, copies.beyond(place)) {
                full[count] = place;
                count += 1;
            }
        }
        if keep == Keep::Full {
            copies.keep(full[..count].iter().copied());
        }
    }
    let mut selected = deciding.selected;
    selected.counts.again = again.len() as u64;
    selected.counts.unallocated = holes.len() as u64;
    selected.counts.free = free.len() as u64;
    Ok(selected)
}

/// The decisions about the pages of a chunk, one after another.
struct Deciding<'a> {
    sent: &'a SentTable,
    chunk: ChunkIndex,
    by_digest: bool,
    hashes: Option<ChunkHashes<'a>>,
    selected: Selected,
}

impl Deciding<'_> {
    /// Decides that a page becomes zeros at the destination: a bit, or nothing where it holds zeros already.
    fn zero(&mut self, page: u8) {
        if !matches!(self.sent.last(self.chunk, page), Last::Never | Last::Zero) {
            self.selected.zero.insert(page);
            self.sent.zero(self.chunk, page);
        }
    }

    /// Decides about a page with this body. Returns whether it travels whole.
    fn body(&mut self, page: u8, body: &[u8; PAGE_BYTES]) -> bool {
        let (sent, chunk, selected) = (self.sent, self.chunk, &mut self.selected);
        if is_zero(body) {
            selected.counts.zero += 1;
            self.zero(page);
            return false;
        }
        let last = sent.last(chunk, page);
        // The hash says what was sent; the destination holds it only where it is known to have arrived.
        let unchanged = self.hashes.as_mut().is_some_and(|hashes| hashes.replace(page, body));
        if unchanged && matches!(last, Last::Content(_)) {
            selected.counts.unchanged += 1;
            return false;
        }
        let digest = sent.digest(body);
        if self.by_digest && sent.holds(chunk, page, digest) {
            selected.counts.unchanged += 1;
            return false;
        }
        selected.counts.full += 1;
        selected.held.push(last);
        selected.full.insert(page);
        selected.digests.push(digest);
        sent.content(chunk, page, digest);
        true
    }
}

/// The pages of a chunk whose content differs from the destination's although no tracker reported a write; pages in
/// `known` are not looked at. It is for guests whose RAM somebody writes past the page tables (for example a disk by
/// direct I/O): such a write can land after its page was armed again, and nothing else sees it. The guest is stopped
/// and its I/O drained.
///
/// The destination holds zeros of a page that was never sent, so such a page is compared with zeros, as where zeros
/// were sent: it may have been outstanding and read while the write was still under way. So no page is left out because
/// of its past, and it does not matter when it was pinned, armed, collected, held back or discarded. A page without
/// memory is zeros, and is not touched.
///
/// # Errors
/// The file's holes cannot be read.
pub fn changed_untracked(
    ram: &dyn Memory,
    sent: &SentTable,
    chunk: ChunkIndex,
    known: &PageSet,
) -> std::io::Result<PageSet> {
    let pages = PageSet::of_chunk(ram.layout(), chunk).without(known);
    let there = pages.and(&ram.allocated_in(chunk)?);
    let empty = |page: u8| matches!(sent.last(chunk, page), Last::Never | Last::Zero);
    let mut changed: PageSet = pages.without(&there).iter().filter(|page| !empty(*page)).collect();
    let mut left = there;
    let read = for_each_body(
        &there,
        |batch, bodies| ram.read(chunk, batch, bodies),
        |page, body| {
            left.remove(page);
            let zero = is_zero(body);
            if if empty(page) { !zero } else { zero || !sent.holds(chunk, page, sent.digest(body)) } {
                changed.insert(page);
            }
        },
    );
    // A lost page counts as changed: the round that must send it reports the loss.
    Ok(if read.is_ok() { changed } else { changed.or(&left) })
}
