//! Parity: pages that can be had without the memory host that has them.
//!
//! Of so many chunks in a row, a *stripe*, each is at another memory host, and the XOR of them at one more:
//!
//! ```text
//!   stripe 0   chunk 0 at b   chunk 1 at c   parity at a        who has what follows from the chunk's number:
//!   stripe 1   chunk 2 at c   chunk 3 at a   parity at b        nothing of it is on record
//!   stripe 2   chunk 4 at a   chunk 5 at b   parity at c
//! ```
//!
//! The record knows a chunk's memory host, and the parity as its mirror: a page is had from either. What a mirror does
//! with a page of its own, parity does by folding it into those that are there (`sterna_protocol::store`).
//!
//! **What is in the parity is at its memory host, too, as it was folded in.** All else follows from this, whatever is
//! cut or killed:
//!
//! ```text
//! out       put at the memory host ─▶ fold into the parity          a copy, not in the parity: nobody misses it
//! no more   fold out of the parity ─▶ release, or put another       the same
//! ```
//!
//! So a page whose content has changed since it came back is folded out before it leaves again; its former body comes
//! from the memory host for that. It is the price of parity that never stands for what nobody has.
//!
//! **While the parity's host is away** nothing can be folded out there. What leaves then replaces what the parity
//! stands for, also for the stripe's other chunks: the record says first that they are at their memory hosts alone.
//! Once it is back the stripe's parity begins anew ([`Split::parity_begins_anew`]), and each chunk is folded in again.
//! **While a memory host is away** its chunks come by parity, and leave again where they are as they were.

use std::time::Duration;

use sterna_protocol::layout::{ChunkIndex, PAGE_BYTES};
use sterna_protocol::pages::PageSet;
use sterna_protocol::split::Whereabouts;
use sterna_protocol::store::Refusal;

use super::lender::{Member, Parity};
use super::lines::Lines;
use super::out::Copied;
use super::{Chunk, Split, SplitError};
use crate::error::MigrateError;
use crate::paging::whereabouts::Holder;
use crate::store::client::{ANSWER_TIMEOUT, Pages, StoreError};
use crate::store::parity::fold;

/// Whether a memory host answers, and has others than it should.
fn says_otherwise(error: &StoreError) -> bool {
    matches!(error, StoreError::Refused(_) | StoreError::Connection(MigrateError::Reply(_)))
}

/// How often pages are asked for anew whose stripe changed meanwhile.
const TRIES: usize = 8;

/// Pages that a memory host was asked for, and has not sent yet.
struct Asked {
    member: Member,
    chunk: ChunkIndex,
    pages: PageSet,
}

impl Asked {
    fn answer(self, lines: &mut Lines<'_>, patience: Duration) -> Option<(ChunkIndex, Pages)> {
        let Self { member, chunk, pages } = self;
        lines.answer(member, |host| host.got(patience, chunk, &pages)).map(|got| (chunk, got))
    }
}

/// Folds those of `pages` that are in `got` out of what was `found`.
fn fold_out_of(found: &mut Pages, pages: &PageSet, got: &Pages) {
    let bodies = got.full.iter().zip(got.bodies.as_chunks::<PAGE_BYTES>().0);
    let mut bodies = bodies.filter(|(page, _)| pages.contains(*page)).peekable();
    for (page, into) in found.full.iter().zip(found.bodies.as_chunks_mut::<PAGE_BYTES>().0) {
        if let Some((_, body)) = bodies.next_if(|(of, _)| *of == page) {
            fold(into, body);
        }
    }
}

impl Split {
    /// Whether a memory host has parity, and no pages.
    pub(super) fn is_parity(&self, member: Member) -> bool {
        member.which == 1 && self.lenders.parity_at(member.number).is_some()
    }

    /// Whether the memory hosts that pages leave for have parity.
    #[must_use]
    pub fn has_parity(&self) -> bool {
        self.lenders.parity().is_some()
    }

    /// How the parity of a chunk lies, where there is some: that of its pages that are away, or of those that leave.
    /// What is known of the chunk is of these memory hosts.
    pub(super) fn parity_for(&self, chunk: ChunkIndex) -> Option<Parity> {
        match self.host_of(chunk) {
            Some(number) => self.lenders.parity_at(number),
            None => self.lenders.parity(),
        }
    }

    /// Whether what is known of a chunk is of the memory hosts to which this one belongs, where some have parity.
    pub(super) fn is_of(&self, chunk: ChunkIndex, member: Member) -> bool {
        match (self.parity_for(chunk), self.lenders.parity_at(member.number)) {
            (Some(one), Some(other)) => one.is(&other),
            (one, other) => one.is_none() && other.is_none(),
        }
    }

    /// The memory host that a chunk leaves for, where there is parity.
    pub(super) fn host_by_parity(&self, chunk: ChunkIndex) -> Option<usize> {
        Some(self.parity_for(chunk)?.host_of(chunk))
    }

    /// What is known of a chunk at a member that has been asked: these pages of it are away, and all else that it has
    /// are copies.
    pub(super) fn found(&self, there: PageSet, has: Option<(u64, PageSet)>) -> Whereabouts {
        let (version, pages) = has.unwrap_or((0, PageSet::EMPTY));
        let mut now = Whereabouts::recorded(there);
        now.seen(version);
        now.comes(&pages.without(&there));
        now
    }

    /// Gets pages of a chunk without the memory host that has them: what the parity has of them, and of that all that
    /// others have. All are asked at once, as far as this host knows what the parity has.
    ///
    /// # Errors
    /// [`SplitError`]; also where the others do not have what the parity was told.
    pub(super) fn get_by_parity(
        &self,
        lines: &mut Lines<'_>,
        parity: Member,
        (chunk, pages): (ChunkIndex, &PageSet),
        patience: Duration,
    ) -> Result<Pages, SplitError> {
        let mut asked = self.ask_the_others(lines, parity, (chunk, pages));
        for turn in 1.. {
            let summed = lines.ask(parity, |host| host.sum(patience, chunk, pages));
            // Whatever became of that: nothing else is asked of them before.
            let mut ahead: Vec<_> = asked.drain(..).filter_map(|asked| asked.answer(lines, patience)).collect();
            let summed = summed.map_err(|error| self.failed(parity, error))?;
            let mut found = summed.parity;
            let folded = summed.others.into_iter().try_for_each(|(other, pages)| {
                let known = ahead.iter().position(|(of, got)| *of == other && got.has(&pages));
                let got = known
                    .map_or_else(|| self.get_other(lines, parity, (other, &pages)), |at| Ok(ahead.swap_remove(at).1));
                fold_out_of(&mut found, &pages, &got?);
                Ok(())
            });
            let is_it = || {
                let each = found.bodies.as_chunks::<PAGE_BYTES>().0.iter().map(|body| self.digester.page(body));
                each.eq(summed.digests.iter().copied())
            };
            match folded {
                Ok(()) if is_it() => return Ok(Pages { digests: summed.digests, ..found }),
                // Another chunk of the stripe came, or left, between the two.
                Ok(()) if turn < TRIES => {}
                Err(SplitError::Host { source, .. })
                    if turn < TRIES
                        && matches!(*source, StoreError::Refused(Refusal::Absent | Refusal::Version { .. })) => {}
                Ok(()) => {
                    let other = MigrateError::Reply("parity of other pages than the other memory hosts have");
                    return Err(self.failed(parity, other.into()));
                }
                Err(error) => return Err(error),
            }
        }
        unreachable!("it returns at the last turn")
    }

    /// Asks for what the parity has of a stripe's other chunks at these pages, as far as it is known here.
    fn ask_the_others(
        &self,
        lines: &mut Lines<'_>,
        parity: Member,
        (chunk, pages): (ChunkIndex, &PageSet),
    ) -> Vec<Asked> {
        let stripe = self.lenders.parity_at(parity.number);
        let others = stripe.into_iter().flat_map(|stripe| stripe.beside(chunk, self.chunks.len()));
        let asked = others.filter_map(|other| {
            let number = stripe?.host_of(other);
            // With a busy one something is done that changes what it has.
            let state = self.free_chunk(other.index()).filter(|_| self.is_of(other, parity))?;
            let at = [&state.members[0], &state.members[parity.which]];
            let is_known = at.iter().all(|known| !known.unsure && !known.unasked);
            let [at_host, in_parity] = at.map(|known| known.at.away().or(&known.at.copied()));
            let (version, pages) = (at[0].at.held(), at_host.and(&in_parity).and(pages));
            (is_known && !pages.is_empty()).then_some((Member { number, which: 0 }, other, version, pages))
        });
        let asked = asked.filter(|(member, other, version, pages)| {
            lines.ask_ahead(*member, |host| host.ask_for(*other, *version, pages))
        });
        asked.map(|(member, chunk, _, pages)| Asked { member, chunk, pages }).collect()
    }

    /// Gets pages of another chunk of a stripe, in whatever version they are.
    fn get_other(
        &self,
        lines: &mut Lines<'_>,
        parity: Member,
        (other, pages): (ChunkIndex, &PageSet),
    ) -> Result<Pages, SplitError> {
        let stripe = self.lenders.parity_at(parity.number).filter(|_| other.index() < self.chunks.len());
        let number = stripe.map(|stripe| stripe.host_of(other));
        let number = number.ok_or(MigrateError::Reply("parity of a chunk that the guest has not"))?;
        let member = Member { number, which: 0 };
        let got = lines.ask(member, |host| match host.held(other)? {
            Some((version, _)) => host.get(other, version, pages),
            None => Err(Refusal::Absent.into()),
        });
        got.map_err(|error| self.failed(member, error))
    }

    /// Has the parity, and then the memory host, forget pages of a chunk that are here. Both have what is not away as
    /// copies.
    ///
    /// # Errors
    /// [`SplitError`]; both have them still, or it is not known.
    pub(super) fn retire(
        &self,
        lines: &mut Lines<'_>,
        of: (ChunkIndex, &PageSet),
        state: &mut Chunk,
    ) -> Result<(), SplitError> {
        self.retire_known(lines, of, state, &Copied::NOTHING)
    }

    /// The same, where some are known as they were folded in.
    pub(super) fn retire_known(
        &self,
        lines: &mut Lines<'_>,
        (chunk, pages): (ChunkIndex, &PageSet),
        state: &mut Chunk,
        known: &Copied,
    ) -> Result<(), SplitError> {
        let Some(stripe) = self.parity_for(chunk) else { return Ok(()) };
        // Its next host may have been told that they are there.
        if self.still.is_on() {
            return Ok(());
        }
        let (host, parity) = (Member { number: stripe.host_of(chunk), which: 0 }, stripe.parity_of(chunk));
        match self.fold_out(lines, (host, parity), (chunk, pages), state, known) {
            Err(SplitError::Host { source, .. }) if says_otherwise(&source) => {
                self.stripe_begins_anew(lines, parity, chunk, state)?;
            }
            done => done?,
        }
        let [at_host, in_parity] = [0, 1].map(|which| state.members[which].at.copied().and(pages));
        // What the parity may stand for stays.
        if !at_host.is_empty() && in_parity.is_empty() {
            self.release(lines, host, (chunk, &at_host), state);
        }
        if state.copies_at().is_none() {
            state.copies = None;
        }
        Ok(())
    }

    /// Has the parity forget pages of a chunk, whose bodies come from the memory host, unless it has lost them.
    pub(super) fn fold_out(
        &self,
        lines: &mut Lines<'_>,
        (host, parity): (Member, Member),
        (chunk, pages): (ChunkIndex, &PageSet),
        state: &mut Chunk,
        known: &Copied,
    ) -> Result<(), SplitError> {
        let [at_host, in_parity] = [0, 1].map(|which| state.members[which].at.copied().and(pages));
        let known = known.only(in_parity);
        self.unfold(lines, parity, (chunk, known.full, PageSet::EMPTY), state, &known.bodies)?;
        let others = in_parity.without(&known.full);
        for (member, part) in [(host, others.and(&at_host)), (parity, others.without(&at_host))] {
            if part.is_empty() {
                continue;
            }
            let got = match self.get(lines, member, (chunk, &part), state, ANSWER_TIMEOUT) {
                Err(SplitError::Host { source, .. }) if member == host && says_otherwise(&source) => {
                    self.get_by_parity(lines, parity, (chunk, &part), ANSWER_TIMEOUT)?
                }
                got => got?,
            };
            self.unfold(lines, parity, (chunk, got.full, got.zero), state, &got.bodies)?;
        }
        Ok(())
    }

    fn unfold(
        &self,
        lines: &mut Lines<'_>,
        parity: Member,
        (chunk, full, zero): (ChunkIndex, PageSet, PageSet),
        state: &mut Chunk,
        bodies: &[u8],
    ) -> Result<(), SplitError> {
        let (known, pages) = (&mut state.members[parity.which], full.or(&zero));
        if pages.is_empty() {
            return Ok(());
        }
        let version = known.at.held();
        let unfolded = lines.ask(parity, |host| host.unfold((chunk, version), (full, zero), bodies));
        known.unsure |= unfolded.is_err();
        unfolded.map_err(|error| self.failed(parity, error))?;
        known.at.released(&pages);
        Ok(())
    }

    /// Finds out what a member has still of a chunk, of what it may have. Copies go: the memory host may have lost some
    /// that the parity stands for, or others may have replaced them while the parity's host was away, and nobody could
    /// do without another chunk of the stripe then.
    ///
    /// # Errors
    /// [`SplitError`]; it is to be looked at once more.
    pub(super) fn look_by_parity(
        &self,
        lines: &mut Lines<'_>,
        member: Member,
        chunk: ChunkIndex,
        state: &mut Chunk,
    ) -> Result<(), SplitError> {
        let Some(stripe) = self.parity_for(chunk).filter(|_| self.is_of(chunk, member)) else { return Ok(()) };
        let (host, parity) = (Member { number: stripe.host_of(chunk), which: 0 }, stripe.parity_of(chunk));
        if ![host, parity].contains(&member) {
            return Ok(());
        }
        state.members[member.which].unasked = true;
        for asked in [host, parity] {
            match self.make_sure(lines, asked, chunk, state) {
                Ok(()) => {}
                // Whoever touches those pages finds out.
                Err(SplitError::Lost { .. }) => return Ok(()),
                Err(other) => return Err(other),
            }
        }
        let copies = state.members[parity.which].at.copied();
        self.retire(lines, (chunk, &copies), state)
    }

    /// Copies that the parity stands for, and that the memory host has not: they came by parity while it was behind.
    pub(super) fn orphans_of(&self, chunk: ChunkIndex, state: &Chunk) -> PageSet {
        let [at_host, in_parity] = [0, 1].map(|which| state.members[which].at);
        match self.parity_for(chunk) {
            Some(_) => in_parity.copied().without(&at_host.copied().or(&at_host.away())),
            None => PageSet::EMPTY,
        }
    }

    /// How many there are of them, where a chunk with which something is done counts as `busy` of them. As long as
    /// there are some, other chunks of their stripes cannot be done without.
    pub(super) fn orphans(&self, busy: u64) -> u64 {
        let chunks = if self.lenders.has_parity() { self.chunks.len() as u32 } else { 0 };
        // Whoever asks is not to wait for a memory host.
        let of = |chunk: ChunkIndex| {
            self.free_chunk(chunk.index()).map_or(busy, |state| self.orphans_of(chunk, &state).len() as u64)
        };
        (0..chunks).map(ChunkIndex).map(of).sum()
    }

    /// Has the parity forget them.
    ///
    /// # Errors
    /// [`SplitError`]; it is to be done once more.
    pub(super) fn retire_orphans(&self, lines: &mut Lines<'_>) -> Result<(), SplitError> {
        let chunks = if self.lenders.has_parity() { self.chunks.len() as u32 } else { 0 };
        for chunk in (0..chunks).map(ChunkIndex) {
            let Some(mut state) = self.free_chunk(chunk.index()) else { continue };
            let orphans = self.orphans_of(chunk, &state);
            if !orphans.is_empty() {
                self.retire(lines, (chunk, &orphans), &mut state)?;
            }
        }
        Ok(())
    }

    /// All of a stripe is at its memory hosts alone from now on, where it is there, and its parity has nothing.
    fn stripe_begins_anew(
        &self,
        lines: &mut Lines<'_>,
        parity: Member,
        chunk: ChunkIndex,
        state: &mut Chunk,
    ) -> Result<(), SplitError> {
        if let Some(number) = self.host_of(chunk).filter(|_| !self.is_behind(chunk, parity)) {
            let alone = Holder::one_of(number, 0).ok_or(MigrateError::Bug("a memory host that is not known"))?;
            if self.is_behind(chunk, Member { number, which: 0 }) {
                let pages = self.pager.away_in(chunk).len() as u64;
                return Err(SplitError::Lost { peer: self.lenders.peer(parity), pages });
            }
            self.pager.left_alone(chunk, alone)?;
        }
        state.members[parity.which].unasked = true;
        if !self.parity_begins_anew(lines, parity, chunk, state)? {
            self.lenders.note_return(parity);
        }
        Ok(())
    }

    /// Pages of a chunk are about to leave for its memory host alone, because the parity's does not answer: what the
    /// parity stands for is no longer so, of the stripe's other chunks neither. Returns whether that is on record: not
    /// where one of them is busy, or can be had by parity alone.
    ///
    /// # Errors
    /// The map of missing pages cannot be written.
    pub(super) fn leave_parity_behind(&self, parity: Member, chunk: ChunkIndex) -> Result<bool, SplitError> {
        let Some(stripe) = self.lenders.parity_at(parity.number) else { return Ok(true) };
        for other in stripe.beside(chunk, self.chunks.len()) {
            let Some(mut state) = self.free_chunk(other.index()) else { return Ok(false) };
            if !self.is_of(other, parity) {
                // It has left for others, and nobody needs it of this parity.
                continue;
            }
            if let Some(holder) = self.pager.holder(other) {
                match holder.alone() {
                    Some(0) => {}
                    Some(_) => return Ok(false),
                    None => {
                        let Some(number) = holder.host_number() else { return Ok(false) };
                        if self.lenders.is_silent(Member { number, which: 0 }) {
                            return Ok(false);
                        }
                        let alone =
                            Holder::one_of(number, 0).ok_or(MigrateError::Bug("a memory host that is not known"))?;
                        self.pager.left_alone(other, alone)?;
                    }
                }
            }
            state.members[parity.which].left_behind();
        }
        Ok(true)
    }

    /// Before a chunk is folded into a parity that it left behind, all of the stripe leaves that. Returns whether it is
    /// so: not where another chunk of the stripe is busy, or can be had by parity alone.
    ///
    /// # Errors
    /// [`SplitError`].
    pub(super) fn parity_begins_anew(
        &self,
        lines: &mut Lines<'_>,
        parity: Member,
        chunk: ChunkIndex,
        state: &mut Chunk,
    ) -> Result<bool, SplitError> {
        self.make_sure(lines, parity, chunk, state)?;
        if state.members[parity.which].at.copied().is_empty() {
            return Ok(true);
        }
        if !self.leave_parity_behind(parity, chunk)? {
            return Ok(false);
        }
        lines.ask(parity, |host| host.reset(chunk)).map_err(|error| self.failed(parity, error))?;
        state.members[parity.which].at = Whereabouts::default();
        Ok(true)
    }
}
