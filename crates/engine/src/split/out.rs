//! Pages that leave for a memory host while their guest runs.

use std::sync::atomic::Ordering;
use std::time::Duration;

use sterna_api::Unused;
use sterna_protocol::layout::{ChunkIndex, Layout, PAGE_BYTES};
use sterna_protocol::pages::PageSet;
use sterna_protocol::store::{InventoryEntry, Refusal};
use sterna_sys::iovec::Outgoing;

use super::lender::{Member, Parity};
use super::lines::Lines;
use super::{Chunk, Split, SplitError};
use crate::error::MigrateError;
use crate::faults::fence::Fence;
use crate::memory::is_zero;
use crate::paging::depart::{Copy, Departed};
use crate::paging::whereabouts::Holder;
use crate::store::client::{MemoryHost, StoreError};

/// How long pages may be fenced in once somebody waits for one of them.
const GRACE: Duration = Duration::from_millis(2);

/// One thread's way out for pages: a fence, and connections.
pub struct WayOut<'a> {
    split: &'a Split,
    pub(super) lines: Lines<'a>,
    fence: Fence,
}

impl Split {
    /// A way out. One at a time: two fences exclude each other.
    ///
    /// # Errors
    /// The VMM does not answer.
    pub fn way_out(&self) -> Result<WayOut<'_>, SplitError> {
        Ok(WayOut { split: self, lines: Lines::new(&self.lenders), fence: self.pager.fence()? })
    }

    /// Asks every memory host what it has, and does what follows from that. Before pages are brought.
    pub(super) fn take_stock(&self) -> Result<(), SplitError> {
        let mut lines = Lines::new(&self.lenders);
        let layout: &Layout = self.pager.ram().layout();
        if layout.iter().any(|chunk| self.pager.holder(chunk).is_some() && self.host_of(chunk).is_none()) {
            return Err(MigrateError::Bug("pages are at a memory host that is not named").into());
        }
        // One that is leaving and has nothing any more may be gone for good.
        let asked =
            (0..self.lenders.count()).filter(|number| !self.lenders.is_leaving(*number) || self.has_part(*number));
        // By parity one of all that it lies over may be away.
        let mut away: Vec<Parity> = Vec::new();
        for number in asked {
            let parity = self.lenders.parity_at(number);
            let (mut answered, mut why) = (false, None);
            for member in self.lenders.members(number) {
                match self.take_stock_of(&mut lines, member) {
                    Ok(()) => {
                        answered = true;
                        if parity.is_some() {
                            self.note_rests(member);
                            // What the parity stands for may be lost where it came from.
                            self.lenders.note_return(member);
                        }
                    }
                    Err(error @ SplitError::Host { .. }) => {
                        // Its mirror may do meanwhile.
                        layout.iter().for_each(|chunk| self.chunk(chunk).members[member.which].unsure = true);
                        self.note_rests(member);
                        why = Some(error);
                    }
                    Err(other) => return Err(other),
                }
            }
            if let Some(error) = why.filter(|_| !answered) {
                let first = parity.filter(|parity| !away.iter().any(|other| other.is(parity)));
                away.push(first.ok_or(error)?);
            }
        }
        Ok(())
    }

    /// Those of the pages of which each of these memory hosts had copies when it was last asked. One that is silent has
    /// them still, or has lost them: so nothing that is on record as away is another page there. What it was never
    /// given, or is another page by now, is not among them; nothing is where pages have left without it.
    fn had_by_each(
        &self,
        (chunk, state): (ChunkIndex, &Chunk),
        members: &[Member],
        silent: &[Member],
        copied: &Copied,
    ) -> PageSet {
        let is_known = |member: &Member| !state.members[member.which].unsure && !self.is_behind(chunk, *member);
        if !silent.iter().all(is_known) {
            return PageSet::EMPTY;
        }
        members.iter().fold(copied.full, |pages, member| {
            pages.and(&state.unchanged(member.which, &copied.full, &copied.bodies, self.digester))
        })
    }

    fn take_stock_of(&self, lines: &mut Lines<'_>, member: Member) -> Result<(), SplitError> {
        let inventory = lines.ask(member, |host| host.inventory()).map_err(|error| self.failed(member, error))?;
        let mut entries = inventory.iter().peekable();
        for chunk in self.pager.ram().layout().iter() {
            let entry = entries.next_if(|entry| entry.chunk == chunk);
            let has = entry.map(|InventoryEntry { version, pages, .. }| (*version, PageSet::from_bytes(pages)));
            if has.is_some() || self.concerns(chunk, member) {
                self.settle(lines, member, chunk, &mut self.chunk(chunk), has)?;
            }
        }
        Ok(())
    }
}

impl WayOut<'_> {
    /// Sends the pages of a chunk that have content to a memory host, where none of them is at another one already: to
    /// that one then. Returns what has left; nothing where the chunk is busy.
    ///
    /// # Errors
    /// [`SplitError`]; each page is here or away, and valid there.
    pub fn send(&mut self, chunk: ChunkIndex, number: usize) -> Result<Departed, SplitError> {
        let split = self.split;
        let number = split.host_by_parity(chunk).unwrap_or(number);
        // Whoever needs the chunk meanwhile is not to wait for one that does not answer. Of two the other may do.
        let members = split.members(chunk, split.host_of(chunk).unwrap_or(number));
        if members.iter().all(|member| split.lenders.is_silent(*member)) {
            for member in members {
                self.lines.ask(member, |host| host.held(chunk)).map_err(|error| split.failed(member, error))?;
            }
        }
        // Where it is busy, its pages are coming back.
        let Some(mut state) = split.free_chunk(chunk.index()) else { return Ok(Departed::NOTHING) };
        let nothing = Departed { freed: split.pager.take_out_again(chunk)?, ..Departed::NOTHING };
        let number = split.host_of(chunk).unwrap_or(number);
        if split.lenders.is_leaving(number) {
            return Ok(nothing);
        }
        if let Some(other) = state.copies_at().filter(|other| *other != number) {
            // That one is left alone, or it would be asked.
            split.leave_copies(other, &mut state);
        }
        let members = split.members(chunk, number);
        let (silent, answering): (Vec<Member>, Vec<Member>) =
            members.iter().partition(|member| split.lenders.is_silent(**member));
        if answering.is_empty() {
            return Ok(nothing);
        }
        for member in &answering {
            split.make_sure(&mut self.lines, *member, chunk, &mut state)?;
        }
        for member in &answering {
            // Before more of the chunk leaves.
            if !split.mend(&mut self.lines, *member, chunk, &mut state)? {
                return Ok(nothing);
            }
        }
        for member in &answering {
            split.check_copies(&mut self.lines, *member, chunk, &mut state)?;
        }
        let mut copied = self.copy(chunk)?;
        let (mut to, mut holder) = (&members, Holder::host(number));
        if !silent.is_empty() {
            let had = split.had_by_each((chunk, &state), &members, &silent, &copied);
            if had.is_empty() && !self.may_leave_for_one(chunk, answering[0])? {
                return Ok(nothing);
            }
            if had.is_empty() {
                // The rest of the chunk leaves for the one that answers, which alone is believed from then on.
                (to, holder) = (&answering, Holder::one_of(number, answering[0].which));
            } else {
                copied = copied.only(had);
            }
        }
        let holder = holder.ok_or(MigrateError::Bug("a memory host that is not known"))?;
        let (mut departed, mut sent) = (Ok(nothing), PageSet::EMPTY);
        if !copied.full.is_empty() || !copied.zero.is_empty() {
            let digests;
            (digests, sent) = self.put_at_each(chunk, &answering, &mut state, &copied)?;
            let (pages, digester) = (copied.full, split.digester);
            let copy = Copy { chunk, pages, digests: &digests, digester, holder, zero: copied.zero };
            departed = split.pager.depart(&self.fence, &copy, &self.fence.patience(GRACE));
        }
        // Whatever came of it: the record says what is away.
        let away = split.pager.away_in(chunk).and(&copied.full);
        let stayed = copied.full.without(&away);
        let unsent = away.without(&sent);
        for member in to {
            state.members[member.which].at.goes(&away);
            state.members[member.which].unasked |= silent.contains(member) && !away.is_empty();
        }
        for member in silent.iter().filter(|member| split.is_behind(chunk, **member)) {
            state.members[member.which].left_behind();
        }
        // A copy of what has stayed, or is nothing any more, would be of no use the next time. But while one of two
        // does not answer, what both have copies of is what leaves for both.
        if silent.is_empty() && split.lenders.parity_at(number).is_some() {
            let stale = (0..answering.len()).fold(stayed, |all, which| all.or(&state.members[which].at.copied()));
            if let Err(error) = split.retire_known(&mut self.lines, (chunk, &stale), &mut state, &copied) {
                tracing::debug!(%error, "the parity stands for pages that stayed");
            }
        } else {
            for member in answering.iter().filter(|_| silent.is_empty()) {
                let stale = stayed.or(&state.members[member.which].at.copied());
                split.release(&mut self.lines, *member, (chunk, &stale), &mut state);
            }
        }
        let mut departed = departed?;
        departed.freed = departed.freed.or(&nothing.freed);
        let count = |pages: &PageSet| pages.len() as u64;
        split.out.fetch_add(count(&away) - count(&unsent), Ordering::Relaxed);
        split.unsent.fetch_add(count(&unsent), Ordering::Relaxed);
        split.zero.fetch_add(count(&departed.zero), Ordering::Relaxed);
        split.kept.fetch_add(count(&stayed), Ordering::Relaxed);
        Ok(departed)
    }

    /// Whether a chunk may leave for one of two alone, while the other one does not answer. For the parity alone
    /// nothing does: it would stand for what no memory host has.
    fn may_leave_for_one(&self, chunk: ChunkIndex, member: Member) -> Result<bool, SplitError> {
        match self.split.lenders.parity_at(member.number) {
            _ if self.split.is_parity(member) => Ok(false),
            Some(stripe) => self.split.leave_parity_behind(stripe.parity_of(chunk), chunk),
            None => Ok(true),
        }
    }

    /// The pages of a chunk that are somewhere, and here, as the guest has them at some moment each.
    fn copy(&self, chunk: ChunkIndex) -> Result<Copied, SplitError> {
        let ram = self.split.pager.ram();
        let failed = MigrateError::host("reading pages that are about to leave");
        let unused = self.split.room().unused();
        let there = match unused {
            Unused::Track => ram.allocated_in(chunk),
            Unused::Ignore => Ok(PageSet::of_chunk(ram.layout(), chunk)),
        };
        let there = there.map_err(MigrateError::host("looking for holes in the guest's RAM"))?;
        // What is to come from the source may be here as a round brought it.
        let there = there.without(&self.split.pager.presence(chunk).0);
        let mut bodies = vec![0; there.len() * PAGE_BYTES];
        ram.load(chunk, &there, &mut bodies).map_err(failed)?;
        let each = || there.iter().zip(bodies.as_chunks::<PAGE_BYTES>().0);
        let is_nothing = |body: &[u8; PAGE_BYTES]| unused == Unused::Track && is_zero(body);
        let zero: PageSet = each().filter(|(_, body)| is_nothing(body)).map(|(page, _)| page).collect();
        let bodies = match zero.is_empty() {
            true => bodies,
            false => each().filter(|(page, _)| !zero.contains(*page)).flat_map(|(_, body)| *body).collect(),
        };
        Ok(Copied { full: there.without(&zero), zero, bodies })
    }

    /// Has the memory host and its mirror keep what each does not have yet; the digests of what they have, and which
    /// pages were sent. The parity comes after the memory host.
    fn put_at_each(
        &mut self,
        chunk: ChunkIndex,
        members: &[Member],
        state: &mut Chunk,
        copied: &Copied,
    ) -> Result<(Vec<u64>, PageSet), SplitError> {
        let has_parity = self.split.lenders.parity_at(members[0].number).is_some();
        if has_parity && members.len() > 1 {
            let stale = (0..members.len()).fold(PageSet::EMPTY, |stale, which| {
                let unchanged = state.unchanged(which, &copied.full, &copied.bodies, self.split.digester);
                stale.or(&state.members[which].at.copied().and(&copied.full).without(&unchanged))
            });
            self.split.retire(&mut self.lines, (chunk, &stale), state)?;
            if members.iter().any(|member| self.split.is_behind(chunk, *member)) {
                let anew = MigrateError::Reply("parity of other pages than it was given: it is made anew");
                return Err(self.split.failed(members[1], anew.into()));
            }
        }
        let (mut digests, mut all_sent) = (Vec::new(), PageSet::EMPTY);
        for (done, member) in members.iter().enumerate() {
            let kept = self.put(chunk, *member, state, copied);
            let kept = kept.inspect(|(_, sent)| all_sent = all_sent.or(sent)).map(|(kept, _)| kept);
            let kept = kept.and_then(|kept| match done > 0 && kept != digests {
                true => {
                    state.members[member.which].unsure = true;
                    let other = MigrateError::Reply("other pages than its mirror has");
                    Err(self.split.failed(*member, other.into()))
                }
                false => Ok(kept),
            });
            digests = match kept {
                Ok(kept) => kept,
                Err(error) => {
                    // With parity they are copies.
                    for member in members[..done].iter().filter(|_| !has_parity) {
                        self.split.release(&mut self.lines, *member, (chunk, &copied.full), state);
                    }
                    return Err(error);
                }
            };
        }
        Ok((digests, all_sent))
    }

    /// Has one of them keep what it does not have yet; the digests of what it has, and which pages were sent.
    fn put(
        &mut self,
        chunk: ChunkIndex,
        member: Member,
        state: &mut Chunk,
        copied: &Copied,
    ) -> Result<(Vec<u64>, PageSet), SplitError> {
        let which = member.which;
        let unchanged = state.unchanged(which, &copied.full, &copied.bodies, self.split.digester);
        let known: Vec<_> = unchanged.iter().map(|page| state.digest(which, page).unwrap_or_default()).collect();
        let sent = copied.full.without(&unchanged);
        let each = copied.full.iter().zip(copied.bodies.as_chunks::<PAGE_BYTES>().0);
        let these = each.filter(|(page, _)| sent.contains(*page));
        let bodies: Vec<_> = these.map(|(_, body)| Outgoing::from(body.as_slice())).collect();
        let kept = if sent.is_empty() {
            Vec::new()
        } else {
            self.split.give(&mut self.lines, member, (chunk, state), (sent, PageSet::EMPTY), &bodies)?
        };
        if let Some(parity) = self.split.lenders.parity_at(member.number) {
            state.given((parity.host_of(chunk), which), &sent, &kept);
        }
        let (mut known, mut kept) = (known.into_iter(), kept.into_iter());
        let of = |page| if unchanged.contains(page) { known.next() } else { kept.next() };
        Ok((copied.full.iter().filter_map(of).collect(), sent))
    }
}

impl Split {
    /// Gives pages of a chunk to a memory host: those of `full` with these bodies, in order, and `zero`. One that is
    /// full gives up copies for them. Returns the digests of what it keeps.
    ///
    /// # Errors
    /// [`SplitError::Host`].
    pub(super) fn give(
        &self,
        lines: &mut Lines<'_>,
        member: Member,
        (chunk, state): (ChunkIndex, &mut Chunk),
        (full, zero): (PageSet, PageSet),
        bodies: &[Outgoing<'_>],
    ) -> Result<Vec<u64>, SplitError> {
        let known = &mut state.members[member.which];
        let next = known.at.number();
        let is_full = |error: &StoreError| matches!(error, StoreError::Refused(Refusal::Full { .. }));
        let number = (next.version, next.base);
        let mut put = |host: &mut MemoryHost| host.put(chunk, number, (full, zero), bodies);
        let mut answer = lines.ask(member, &mut put);
        if answer.as_ref().is_err_and(is_full) && self.give_up_copies(lines, member, chunk) {
            answer = lines.ask(member, &mut put);
        }
        match answer {
            Ok(digests) => {
                known.at.kept(next, &full.or(&zero));
                Ok(digests)
            }
            Err(error) => {
                // A refusal says that nothing was done; but then both sides may not agree on what is there.
                known.unsure = !is_full(&error);
                if known.unsure {
                    self.note_rests(member);
                }
                Err(self.failed(member, error))
            }
        }
    }
}

/// A chunk's pages, copied.
#[derive(Clone)]
pub(super) struct Copied {
    pub full: PageSet,
    zero: PageSet,
    /// The bodies of the full ones, in order.
    pub bodies: Vec<u8>,
}

impl Copied {
    /// None.
    pub const NOTHING: Self = Self { full: PageSet::EMPTY, zero: PageSet::EMPTY, bodies: Vec::new() };

    /// Those of the full pages, and the zeros.
    pub fn only(&self, pages: PageSet) -> Self {
        let each = self.full.iter().zip(self.bodies.as_chunks::<PAGE_BYTES>().0);
        let bodies = each.filter(|(page, _)| pages.contains(*page)).flat_map(|(_, body)| *body).collect();
        Self { full: self.full.and(&pages), zero: self.zero, bodies }
    }
}
