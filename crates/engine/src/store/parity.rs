//! A shelf of parity: the bodies of pages at the same place, of several chunks, are one.
//!
//! What a page of parity is follows from what it was before, so a change that is done by half could not be done again.
//! Each is written beside first, then a note that it counts, and then in its place; a daemon that comes back and finds
//! the note writes it in its place once more:
//!
//! ```text
//! the new parity, beside ─▶ the chunk's new slot, beside ─▶ noted ─▶ both in their places ─▶ the note goes
//! ```

use std::io;
use std::os::unix::fs::FileExt;

use sterna_protocol::layout::{CHUNK_BYTES, CHUNK_PAGES, ChunkIndex};
use sterna_protocol::pages::PageSet;
use sterna_protocol::store::{Holdings, Refusal, SLOT_BYTES, Sum};
use sterna_sys::file::{punch, write_at};

use super::shelf::{Files, Shelf, failed};
use super::slot::{Change, NOTE_BYTES, Slot, offset};

/// Where a change is interrupted: for tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// It lies beside; nobody knows.
    Beside,
    /// It is noted.
    Noted,
    /// It is in its place, too.
    Placed,
}

/// The parity of pages of a chunk.
#[derive(Debug)]
pub(super) struct Summed {
    /// Of which pages, and which others there are in it.
    pub sum: Sum,
    /// The digests of the chunk's own pages, in order.
    pub digests: Vec<u64>,
    /// The parity, in order.
    pub bodies: Vec<u8>,
}

impl Shelf {
    /// Folds pages into the parity: `bodies` are those of `full`, in order. Returns their digests. The same once more
    /// changes nothing.
    ///
    /// # Errors
    /// [`Refusal`].
    pub(super) fn fold(
        &self,
        epoch: u64,
        (chunk, version, base): (ChunkIndex, u64, Option<u64>),
        (full, zero): (PageSet, PageSet),
        bodies: &[u8],
        until: Option<Step>,
    ) -> Result<Vec<u64>, Refusal> {
        let digests = self.digests(bodies);
        self.with_parity(epoch, |all| {
            let mut slot = self.files.slot_of(all, chunk).map_err(failed)?;
            let was_done = slot.held.version == version
                && full.without(&slot.held.full).is_empty()
                && zero.without(&slot.held.zero).is_empty()
                && slot.of(&full).eq(digests.iter().copied());
            if was_done {
                return Ok(digests);
            }
            slot.held = all.may_fold(chunk, version, base, full, zero)?;
            full.iter().zip(&digests).for_each(|(page, digest)| slot.digests[usize::from(page)] = *digest);
            self.files.fold_in(all, chunk, &slot, (&full, bodies), until).map_err(failed)?;
            Ok(digests)
        })
    }

    /// Folds pages out of the parity again, as they were folded in: `bodies` are those of `full`, in order.
    ///
    /// # Errors
    /// [`Refusal`]; [`Refusal::Absent`] where they are others.
    pub(super) fn unfold(
        &self,
        epoch: u64,
        (chunk, version): (ChunkIndex, u64),
        (full, zero): (PageSet, PageSet),
        bodies: &[u8],
        until: Option<Step>,
    ) -> Result<(), Refusal> {
        let digests = self.digests(bodies);
        self.with_parity(epoch, |all| {
            let held = all.may_unfold(chunk, version, &full, &zero)?;
            let mut slot = self.files.slot_of(all, chunk).map_err(failed)?;
            if !slot.of(&full).eq(digests.iter().copied()) {
                return Err(Refusal::Absent);
            }
            slot.held = held;
            self.files.fold_in(all, chunk, &slot, (&full, bodies), until).map_err(failed)
        })
    }

    /// The parity of pages of a chunk.
    ///
    /// # Errors
    /// [`Refusal`].
    pub(super) fn sum(&self, epoch: u64, chunk: ChunkIndex, pages: &PageSet) -> Result<Summed, Refusal> {
        self.with_parity(epoch, |all| {
            let sum = all.may_sum(chunk, pages)?;
            let slot = self.files.slot_of(all, chunk).map_err(failed)?;
            let bodies = self.files.read(all.stripe_of(chunk), &sum.full).map_err(failed)?;
            Ok(Summed { digests: slot.of(&sum.full).collect(), bodies, sum })
        })
    }

    /// Forgets a stripe.
    ///
    /// # Errors
    /// [`Refusal`].
    pub(super) fn reset(&self, epoch: u64, chunk: ChunkIndex, until: Option<Step>) -> Result<(), Refusal> {
        self.with_parity(epoch, |all| {
            if chunk.0 >= all.chunks() {
                return Err(Refusal::Request(format!("the guest has no chunk {}", chunk.0)));
            }
            let change = Change { chunk, pages: PageSet::EMPTY, resets: true };
            self.files.note_change(all, &change).map_err(failed)?;
            if until == Some(Step::Noted) {
                return Ok(());
            }
            self.files.reset(all, chunk).map_err(failed)?;
            self.files.forget_change(all).map_err(failed)
        })
    }

    /// Does something for an owner whose epoch is in force, once nothing is half done.
    fn with_parity<T>(&self, epoch: u64, what: impl FnOnce(&mut Holdings) -> Result<T, Refusal>) -> Result<T, Refusal> {
        self.with(epoch, |all| {
            if all.stripe() == 1 {
                return Err(Refusal::Request("parity of pages that are kept".into()));
            }
            self.files.finish(all).map_err(failed)?;
            what(all)
        })
    }
}

impl Files {
    /// Bytes of the files of a guest of so many chunks: a shelf of parity has room for a change at their ends.
    pub(super) fn sizes(chunks: u32, stripe: u32) -> (u64, u64) {
        let (chunks, beside) = (u64::from(chunks), u64::from(stripe > 1));
        ((chunks + beside) * CHUNK_BYTES as u64, SLOT_BYTES * (1 + chunks + 2 * beside))
    }

    /// Ends what a daemon that was killed had noted, and gives back what it had not.
    pub(super) fn go_on(&self, all: &mut Holdings) -> io::Result<()> {
        self.finish(all)?;
        if all.stripe() > 1 {
            // What lies beside and was not noted.
            self.forget_change(all)?;
        }
        for stripe in (0..all.chunks().div_ceil(all.stripe())).map(ChunkIndex) {
            self.punch(stripe, &PageSet::first(CHUNK_PAGES).without(&all.bodies_of(stripe)))?;
        }
        Ok(())
    }

    /// Ends a change that was noted, if there is one: its daemon was killed, or it had no memory for it.
    fn finish(&self, all: &mut Holdings) -> io::Result<()> {
        let noted = if all.stripe() > 1 { self.change(all)? } else { None };
        let Some(change) = noted else { return Ok(()) };
        if change.resets {
            self.reset(all, change.chunk)?;
        } else if let Some(slot) = self.slot_beside(all)? {
            self.place(all, &change, &slot)?;
        }
        self.forget_change(all)
    }

    fn slot_of(&self, all: &Holdings, chunk: ChunkIndex) -> io::Result<Slot> {
        if chunk.0 >= all.chunks() {
            return Ok(Slot::NOTHING);
        }
        Ok(self.slot(chunk, all.claim().key)?.unwrap_or(Slot::NOTHING))
    }

    /// Folds bodies into, or out of, the parity, and notes the chunk's slot.
    fn fold_in(
        &self,
        all: &mut Holdings,
        chunk: ChunkIndex,
        slot: &Slot,
        (full, bodies): (&PageSet, &[u8]),
        until: Option<Step>,
    ) -> io::Result<()> {
        let mut parity = self.read(all.stripe_of(chunk), full)?;
        fold(&mut parity, bodies);
        let beside = ChunkIndex(all.chunks());
        self.write(beside, full, &parity)?;
        write_at(&self.slots, offset(beside), &slot.encode(beside, all.claim().key))?;
        if until == Some(Step::Beside) {
            return Ok(());
        }
        let change = Change { chunk, pages: *full, resets: false };
        self.note_change(all, &change)?;
        if until == Some(Step::Noted) {
            return Ok(());
        }
        self.place(all, &change, slot)?;
        if until == Some(Step::Placed) {
            return Ok(());
        }
        self.forget_change(all)
    }

    /// Writes what lies beside in its place.
    fn place(&self, all: &mut Holdings, change: &Change, slot: &Slot) -> io::Result<()> {
        let Change { chunk, pages, .. } = change;
        let parity = self.read(ChunkIndex(all.chunks()), pages)?;
        self.write(all.stripe_of(*chunk), pages, &parity)?;
        self.note(*chunk, all.claim().key, slot)?;
        all.note(*chunk, slot.held);
        // Parity of nothing.
        self.punch(all.stripe_of(*chunk), &pages.without(&all.bodies_of(all.stripe_of(*chunk))))
    }

    fn reset(&self, all: &mut Holdings, chunk: ChunkIndex) -> io::Result<()> {
        let stripe = all.stripe_of(chunk);
        let chunks: Vec<ChunkIndex> = all.in_stripe(stripe).map(|(chunk, _)| chunk).collect();
        for chunk in chunks {
            self.note(chunk, all.claim().key, &Slot::NOTHING)?;
            all.note(chunk, Slot::NOTHING.held);
        }
        self.punch(stripe, &PageSet::first(CHUNK_PAGES))
    }

    fn note_change(&self, all: &Holdings, change: &Change) -> io::Result<()> {
        Ok(write_at(&self.slots, offset(ChunkIndex(all.chunks() + 1)), &change.encode(all.claim().key))?)
    }

    fn change(&self, all: &Holdings) -> io::Result<Option<Change>> {
        let mut bytes = [0; Change::BYTES];
        self.slots.read_exact_at(&mut bytes, offset(ChunkIndex(all.chunks() + 1)))?;
        Ok(Change::decode(bytes, all.claim().key).filter(|change| change.chunk.0 < all.chunks()))
    }

    fn slot_beside(&self, all: &Holdings) -> io::Result<Option<Slot>> {
        let (mut bytes, beside) = ([0; NOTE_BYTES], ChunkIndex(all.chunks()));
        self.slots.read_exact_at(&mut bytes, offset(beside))?;
        Ok(Slot::decode(bytes, beside, all.claim().key))
    }

    /// Nothing is under way any more. The note goes first.
    fn forget_change(&self, all: &Holdings) -> io::Result<()> {
        let beside = ChunkIndex(all.chunks());
        let (noted, slot) = (offset(ChunkIndex(all.chunks() + 1)), offset(beside));
        punch(&self.slots, noted..noted + SLOT_BYTES)?;
        punch(&self.slots, slot..slot + SLOT_BYTES)?;
        self.punch(beside, &PageSet::first(CHUNK_PAGES))
    }
}

/// Folds one body after the other into another, or out of it.
pub(crate) fn fold(into: &mut [u8], bodies: &[u8]) {
    into.iter_mut().zip(bodies).for_each(|(into, byte)| *into ^= byte);
}

#[cfg(test)]
#[path = "parity_tests.rs"]
mod tests;
