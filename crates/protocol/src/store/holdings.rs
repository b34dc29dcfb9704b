use std::collections::BTreeMap;
use std::ops::Bound;

use super::{Claim, InventoryEntry, MAX_INVENTORY, Refusal};
use crate::layout::{ChunkIndex, PAGE_BYTES};
use crate::pages::PageSet;

/// What the note of a chunk takes beside its pages, bytes.
pub const SLOT_BYTES: u64 = PAGE_BYTES as u64;

/// What a store has of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Held {
    /// The owner's number of it.
    pub version: u64,
    /// Pages with a body.
    pub full: PageSet,
    /// Pages of zeros.
    pub zero: PageSet,
}

impl Held {
    /// All its pages.
    #[must_use]
    pub fn pages(&self) -> PageSet {
        self.full.or(&self.zero)
    }

    /// The memory it takes, bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        if self.pages().is_empty() { 0 } else { SLOT_BYTES + self.full.len() as u64 * PAGE_BYTES as u64 }
    }

    /// The same without some pages.
    #[must_use]
    pub fn without(&self, pages: &PageSet) -> Self {
        Self { version: self.version, full: self.full.without(pages), zero: self.zero.without(pages) }
    }
}

/// A put, in the two steps that keep a store right whenever it is killed: what the put replaces is forgotten before a
/// byte of it is overwritten, and the new is noted when all of it is there. The owner has every page of a put until it
/// is answered, so it loses nothing in between.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Put {
    /// What holds while bodies are written; `None`: nothing of the chunk.
    pub before: Option<Held>,
    /// What holds afterwards.
    pub after: Held,
}

/// What is asked of a stripe's parity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sum {
    /// The pages of the chunk that have a body.
    pub full: PageSet,
    /// Those of zeros.
    pub zero: PageSet,
    /// Other chunks of the stripe, and which of `full` there are of them in the parity.
    pub others: Vec<(ChunkIndex, PageSet)>,
}

/// What a store has of one guest. Changes are checked here, made by whoever keeps the pages, and then noted here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holdings {
    claim: Claim,
    granted_bytes: u64,
    chunks: u32,
    /// Of how many chunks the bodies of pages at the same place are one: 1 where each is kept, more for parity.
    stripe: u32,
    held: BTreeMap<ChunkIndex, Held>,
    used_bytes: u64,
}

impl Holdings {
    /// Nothing yet, of a guest with so many chunks.
    #[must_use]
    pub fn new(claim: Claim, granted_bytes: u64, chunks: u32) -> Self {
        Self::of_parity(claim, granted_bytes, chunks, 1)
    }

    /// Nothing yet, of the parity of a guest's chunks, `stripe` of them together.
    #[must_use]
    pub fn of_parity(claim: Claim, granted_bytes: u64, chunks: u32, stripe: u32) -> Self {
        Self { claim, granted_bytes, chunks, stripe: stripe.max(1), held: BTreeMap::new(), used_bytes: 0 }
    }

    /// How many chunks have a stripe together; 1 where pages are kept, and no parity of them.
    #[must_use]
    pub fn stripe(&self) -> u32 {
        self.stripe
    }

    /// The stripe that a chunk is in: its number. Parity lies at the place of the chunk with this number.
    #[must_use]
    pub fn stripe_of(&self, chunk: ChunkIndex) -> ChunkIndex {
        ChunkIndex(chunk.0 / self.stripe)
    }

    /// What there is of each chunk of a stripe.
    pub fn in_stripe(&self, stripe: ChunkIndex) -> impl Iterator<Item = (ChunkIndex, &Held)> {
        let first = stripe.0.saturating_mul(self.stripe);
        let chunks = ChunkIndex(first)..ChunkIndex(first.saturating_add(self.stripe));
        self.held.range(chunks).map(|(chunk, held)| (*chunk, held))
    }

    /// The pages of a stripe of which there is a body.
    #[must_use]
    pub fn bodies_of(&self, stripe: ChunkIndex) -> PageSet {
        self.in_stripe(stripe).fold(PageSet::EMPTY, |all, (_, held)| all.or(&held.full))
    }

    /// The memory that a stripe takes, bytes.
    fn stripe_bytes(&self, stripe: ChunkIndex) -> u64 {
        let slots = self.in_stripe(stripe).filter(|(_, held)| !held.pages().is_empty()).count() as u64;
        slots * SLOT_BYTES + self.bodies_of(stripe).len() as u64 * PAGE_BYTES as u64
    }

    /// The present owner.
    #[must_use]
    pub fn claim(&self) -> Claim {
        self.claim
    }

    /// What was granted, bytes.
    #[must_use]
    pub fn granted_bytes(&self) -> u64 {
        self.granted_bytes
    }

    /// What is used of it, bytes.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    /// The guest's chunks: their number.
    #[must_use]
    pub fn chunks(&self) -> u32 {
        self.chunks
    }

    /// What there is of a chunk.
    #[must_use]
    pub fn held(&self, chunk: ChunkIndex) -> Option<&Held> {
        self.held.get(&chunk)
    }

    /// All that there is, in order.
    pub fn iter(&self) -> impl Iterator<Item = (ChunkIndex, &Held)> {
        self.held.iter().map(|(chunk, held)| (*chunk, held))
    }

    /// Whether who opens may: the same owner again, or the next one. Returns whether that is a change.
    ///
    /// # Errors
    /// [`Refusal::Stranger`], [`Refusal::Fenced`]; [`Refusal::Request`] where the guest has another size;
    /// [`Refusal::Full`] where more is kept than is asked for.
    pub fn may_open(&self, claim: &Claim, bytes: u64, chunks: u32) -> Result<bool, Refusal> {
        if (claim.guest, claim.key) != (self.claim.guest, self.claim.key) {
            return Err(Refusal::Stranger);
        }
        self.in_force(claim.epoch)?;
        if chunks != self.chunks {
            return Err(Refusal::Request(format!("the guest has {} chunks, not {chunks}", self.chunks)));
        }
        if bytes < self.used_bytes {
            return Err(Refusal::Full { granted_bytes: bytes });
        }
        Ok(claim.epoch > self.claim.epoch || bytes != self.granted_bytes)
    }

    /// Notes what was opened: older epochs are refused from now on.
    pub fn open(&mut self, claim: Claim, bytes: u64) {
        (self.claim, self.granted_bytes) = (claim, bytes);
    }

    /// Whether an owner's epoch is in force.
    ///
    /// # Errors
    /// [`Refusal::Fenced`].
    pub fn in_force(&self, epoch: u64) -> Result<(), Refusal> {
        let current = self.claim.epoch;
        if epoch < current { Err(Refusal::Fenced { current }) } else { Ok(()) }
    }

    /// Checks a put.
    ///
    /// # Errors
    /// [`Refusal::Version`], [`Refusal::Full`]; [`Refusal::Request`]: no such chunk, no pages, or a page that is both.
    pub fn may_put(
        &self,
        chunk: ChunkIndex,
        version: u64,
        base: Option<u64>,
        full: PageSet,
        zero: PageSet,
    ) -> Result<Put, Refusal> {
        let pages = self.check(chunk, full, zero)?;
        let now = self.held(chunk);
        let has = now.map(|held| held.version);
        // The same put again, whose answer was lost, is done again.
        let stale = has.is_some_and(|has| version < has);
        let wrong = base.is_some_and(|base| has != Some(base) && has != Some(version));
        if stale || wrong {
            return Err(Refusal::Version { has });
        }
        let stays = now.filter(|_| base.is_some()).map(|held| held.without(&pages));
        let kept = stays.unwrap_or_default();
        let after = Held { version, full: kept.full.or(&full), zero: kept.zero.or(&zero) };
        let used = self.used_bytes - now.map_or(0, Held::bytes) + after.bytes();
        if used > self.granted_bytes {
            return Err(Refusal::Full { granted_bytes: self.granted_bytes });
        }
        Ok(Put { before: stays.filter(|held| !held.pages().is_empty()), after })
    }

    /// Checks that the guest can have such pages. Returns all of them.
    fn check(&self, chunk: ChunkIndex, full: PageSet, zero: PageSet) -> Result<PageSet, Refusal> {
        if chunk.0 >= self.chunks {
            return Err(Refusal::Request(format!("the guest has no chunk {}", chunk.0)));
        }
        let pages = full.or(&zero);
        if pages.is_empty() || !full.and(&zero).is_empty() {
            return Err(Refusal::Request("a chunk that contradicts itself".into()));
        }
        Ok(pages)
    }

    /// Checks pages of a chunk that are to be folded into the parity. Returns what there is of the chunk afterwards.
    ///
    /// # Errors
    /// [`Refusal::Version`], also where there is something of the chunk and no `base`; [`Refusal::Full`];
    /// [`Refusal::Request`]: no such chunk, no pages, a page that is both, or one that is in the parity already.
    pub fn may_fold(
        &self,
        chunk: ChunkIndex,
        version: u64,
        base: Option<u64>,
        full: PageSet,
        zero: PageSet,
    ) -> Result<Held, Refusal> {
        let pages = self.check(chunk, full, zero)?;
        let now = self.held.get(&chunk).copied().unwrap_or_default();
        let has = self.held.get(&chunk).map(|held| held.version);
        if has != base || version <= now.version {
            return Err(Refusal::Version { has });
        }
        if !now.pages().and(&pages).is_empty() {
            return Err(Refusal::Request("pages that are in the parity already".into()));
        }
        let after = Held { version, full: now.full.or(&full), zero: now.zero.or(&zero) };
        let more = full.without(&self.bodies_of(self.stripe_of(chunk))).len() as u64 * PAGE_BYTES as u64;
        let slot = if now.pages().is_empty() { SLOT_BYTES } else { 0 };
        if self.used_bytes + more + slot > self.granted_bytes {
            return Err(Refusal::Full { granted_bytes: self.granted_bytes });
        }
        Ok(after)
    }

    /// Checks pages of a chunk that are to be folded out of the parity. Returns what there is of the chunk afterwards.
    ///
    /// # Errors
    /// [`Refusal::Version`]; [`Refusal::Absent`] where they are not in it, as these.
    pub fn may_unfold(&self, chunk: ChunkIndex, version: u64, full: &PageSet, zero: &PageSet) -> Result<Held, Refusal> {
        let held = self.held(chunk);
        let Some(held) = held.filter(|held| held.version == version) else {
            return Err(Refusal::Version { has: held.map(|held| held.version) });
        };
        if !full.without(&held.full).is_empty() || !zero.without(&held.zero).is_empty() {
            return Err(Refusal::Absent);
        }
        Ok(held.without(&full.or(zero)))
    }

    /// Checks what is asked of a stripe's parity. Returns the pages with a body and those of zeros, and which of these
    /// pages there are in it of other chunks.
    ///
    /// # Errors
    /// [`Refusal::Absent`].
    pub fn may_sum(&self, chunk: ChunkIndex, pages: &PageSet) -> Result<Sum, Refusal> {
        let held = self.held(chunk).filter(|held| pages.without(&held.pages()).is_empty() && !pages.is_empty());
        let held = held.ok_or(Refusal::Absent)?;
        let full = held.full.and(pages);
        let others = self.in_stripe(self.stripe_of(chunk)).filter(|(other, _)| *other != chunk);
        let others = others.map(|(other, held)| (other, held.full.and(&full)));
        Ok(Sum { full, zero: held.zero.and(pages), others: others.filter(|(_, pages)| !pages.is_empty()).collect() })
    }

    /// Checks a get. Returns the pages with a body, and those of zeros.
    ///
    /// # Errors
    /// [`Refusal::Version`], [`Refusal::Absent`].
    pub fn may_get(&self, chunk: ChunkIndex, version: u64, pages: &PageSet) -> Result<(PageSet, PageSet), Refusal> {
        let held = self.held(chunk);
        let Some(held) = held.filter(|held| held.version == version) else {
            return Err(Refusal::Version { has: held.map(|held| held.version) });
        };
        if pages.is_empty() || !pages.without(&held.pages()).is_empty() {
            return Err(Refusal::Absent);
        }
        Ok((held.full.and(pages), held.zero.and(pages)))
    }

    /// What a release leaves of a chunk; `None` where it changes nothing: there is a newer version, or none of the
    /// pages.
    #[must_use]
    pub fn after_release(&self, chunk: ChunkIndex, version: u64, pages: &PageSet) -> Option<Held> {
        let held = self.held(chunk).filter(|held| held.version <= version)?;
        let left = held.without(pages);
        (left != *held).then_some(left)
    }

    /// Notes what there is of a chunk now; without pages it is forgotten.
    pub fn note(&mut self, chunk: ChunkIndex, held: Held) {
        let stripe = self.stripe_of(chunk);
        let before = self.stripe_bytes(stripe);
        if held.pages().is_empty() {
            self.held.remove(&chunk)
        } else {
            self.held.insert(chunk, held)
        };
        self.used_bytes = self.used_bytes - before + self.stripe_bytes(stripe);
    }

    /// What there is from a chunk on, of so many chunks and at most [`MAX_INVENTORY`].
    #[must_use]
    pub fn inventory(&self, first: ChunkIndex, most: u32) -> Vec<InventoryEntry> {
        let from = self.held.range((Bound::Included(first), Bound::Unbounded)).take(MAX_INVENTORY.min(most as usize));
        let entry = |(chunk, held): (&ChunkIndex, &Held)| InventoryEntry {
            chunk: *chunk,
            version: held.version,
            pages: held.pages().to_bytes(),
        };
        from.map(entry).collect()
    }
}

#[cfg(test)]
#[path = "holdings_tests.rs"]
mod tests;
