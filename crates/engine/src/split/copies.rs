//! Copies: pages that are here, and at their memory host as they came back. Unchanged they leave again without being
//! sent.
//!
//! Whether a page is unchanged is told by its digest behind the fence, as for any page that leaves. That the memory
//! host still has it is asked each time before: it may have been restarted since.
//!
//! Copies take nothing from pages that leave: a memory host that is full gives up copies first. One that did not answer
//! may have pages that count no more; it is gone through when it answers again.

use std::sync::{MutexGuard, TryLockError};

use sterna_protocol::layout::{CHUNK_PAGES, ChunkIndex};
use sterna_protocol::pages::PageSet;
use sterna_protocol::store::InventoryEntry;

use super::chunk::Chunk;
use super::lender::Member;
use super::lines::Lines;
use super::rests::Rests;
use super::{Split, SplitError, lock};

impl Split {
    /// Asks a memory host whether it still has the copies of a chunk, before they are relied on.
    ///
    /// # Errors
    /// [`SplitError::Host`]. The chunk may leave for another one then, where nothing of it is away.
    pub(super) fn check_copies(
        &self,
        lines: &mut Lines<'_>,
        member: Member,
        chunk: ChunkIndex,
        state: &mut Chunk,
    ) -> Result<(), SplitError> {
        let at = &mut state.members[member.which].at;
        if at.copied().is_empty() {
            return Ok(());
        }
        match lines.ask(member, |host| host.held(chunk)) {
            Ok(has) => {
                let there = has.filter(|(version, _)| *version == at.held()).map(|(_, pages)| pages);
                let gone = at.copied().without(&there.unwrap_or(PageSet::EMPTY));
                at.released(&gone);
                Ok(())
            }
            Err(error) => {
                if self.lenders.parity_at(member.number).is_some() {
                    // They are in the parity, or what is in the parity is there.
                    state.members[member.which].unsure = true;
                } else if !self.is_silent_of_two(member) {
                    // Of two the other one has them still, and they are what lets pages leave meanwhile.
                    self.leave_copies(member.number, state);
                }
                Err(self.failed(member, error))
            }
        }
    }

    /// No copy of a chunk counts any more at a memory host, nor at its mirror: each is gone through later.
    pub(super) fn leave_copies(&self, number: usize, state: &mut Chunk) {
        self.lenders.members(number).into_iter().for_each(|member| self.note_rests(member));
        state.forget_copies();
    }

    /// No copy counts any more, anywhere. For tests.
    #[doc(hidden)]
    pub fn give_up_all_copies(&self) {
        for index in 0..self.chunks.len() {
            let mut state = self.chunk(ChunkIndex(index as u32));
            if let Some(number) = state.copies_at() {
                self.leave_copies(number, &mut state);
            }
        }
    }

    /// Has a memory host forget pages of a chunk that count no more there.
    pub(super) fn release(
        &self,
        lines: &mut Lines<'_>,
        member: Member,
        (chunk, pages): (ChunkIndex, &PageSet),
        state: &mut Chunk,
    ) {
        if pages.is_empty() {
            return;
        }
        let known = &mut state.members[member.which];
        known.at.released(pages);
        let version = known.at.held();
        if let Err(error) = lines.ask(member, |host| host.release(chunk, version, pages)) {
            known.unsure = true;
            self.note_rests(member);
            tracing::debug!(%error, "a memory host was not told which pages count no more");
        }
        if state.copies_at().is_none() {
            state.copies = None;
        }
    }

    /// Has a full memory host give up copies, of other chunks than this, for the pages of one. Returns whether it has.
    pub(super) fn give_up_copies(&self, lines: &mut Lines<'_>, member: Member, but: ChunkIndex) -> bool {
        let (count, mut given_up) = (self.chunks.len(), 0);
        for index in (1..count).map(|more| (but.index() + more) % count) {
            let Some(mut state) = self.free_chunk(index) else { continue };
            let (chunk, known) = (ChunkIndex(index as u32), &state.members[member.which]);
            let copied = known.at.copied();
            if let Some(parity) = self.lenders.parity_at(member.number) {
                let is_there =
                    self.is_of(chunk, member) && self.members(chunk, parity.host_of(chunk)).contains(&member);
                if is_there && !copied.is_empty() && self.retire(lines, (chunk, &copied), &mut state).is_ok() {
                    given_up += copied.len();
                }
            } else if state.copies_at() == Some(member.number) && !known.unsure {
                self.release(lines, member, (chunk, &copied), &mut state);
                if state.members[member.which].unsure {
                    break;
                }
                given_up += copied.len();
            }
            // With one page more, for the note of a chunk.
            if given_up > CHUNK_PAGES {
                break;
            }
        }
        given_up > 0
    }

    /// A memory host may have pages that count no more.
    pub(super) fn note_rests(&self, member: Member) {
        lock(&self.rests[member.index()]).join(Rests::Anywhere);
    }

    /// Whether a memory host may have pages that count no more.
    pub(super) fn has_rests(&self, member: Member) -> bool {
        *lock(&self.rests[member.index()]) != Rests::Nowhere
    }

    /// Has it forget them, as far as it can be done now.
    ///
    /// # Errors
    /// [`SplitError`]; it is to be gone through once more.
    pub(super) fn go_through(&self, lines: &mut Lines<'_>, member: Member) -> Result<(), SplitError> {
        let noted = std::mem::take(&mut *lock(&self.rests[member.index()]));
        let gone = match &noted {
            Rests::Nowhere => return Ok(()),
            Rests::In(chunks) => self.forget_rests(lines, member, chunks),
            Rests::Anywhere => self.forget_all_rests(lines, member),
        };
        let (left, gone) = match gone {
            Ok(later) if later.is_empty() => (Rests::Nowhere, Ok(())),
            Ok(later) => (Rests::In(later), Ok(())),
            Err(error) => (noted, Err(error)),
        };
        lock(&self.rests[member.index()]).join(left);
        gone
    }

    fn forget_all_rests(&self, lines: &mut Lines<'_>, member: Member) -> Result<Vec<ChunkIndex>, SplitError> {
        let inventory = lines.ask(member, |host| host.inventory()).map_err(|error| self.failed(member, error))?;
        let chunks: Vec<_> = inventory.into_iter().map(|InventoryEntry { chunk, .. }| chunk).collect();
        self.forget_rests(lines, member, &chunks)
    }

    /// Returns the chunks that have their turn another time: they are busy, or there is parity and one of the two hosts
    /// does not answer, or knows otherwise.
    fn forget_rests(
        &self,
        lines: &mut Lines<'_>,
        member: Member,
        chunks: &[ChunkIndex],
    ) -> Result<Vec<ChunkIndex>, SplitError> {
        let mut later = Vec::new();
        for chunk in chunks.iter().copied() {
            let Some(mut state) = self.free_chunk(chunk.index()) else {
                later.push(chunk);
                continue;
            };
            if !self.is_of(chunk, member) {
                // It is at others still, which are leaving.
                later.push(chunk);
                continue;
            }
            if self.lenders.parity_at(member.number).is_some() {
                match self.retire_rests(lines, chunk, &mut state) {
                    Err(SplitError::Here(error)) => return Err(error.into()),
                    // Whoever touches those pages finds out.
                    Ok(true) | Err(SplitError::Lost { .. }) => {}
                    Ok(false) | Err(_) => later.push(chunk),
                }
                continue;
            }
            // Those are asked about in a new epoch.
            if state.members[member.which].unsure && self.concerns(chunk, member) {
                continue;
            }
            // As it is now: it may have come or left since.
            let has = lines.ask(member, |host| host.held(chunk)).map_err(|error| self.failed(member, error))?;
            match self.settle(lines, member, chunk, &mut state, has) {
                // Whoever touches those pages finds out.
                Ok(()) | Err(SplitError::Lost { .. }) => {}
                Err(other) => return Err(other),
            }
        }
        Ok(later)
    }

    /// Has the memory host and the parity of a chunk forget what is not away of it. Returns whether they have.
    fn retire_rests(&self, lines: &mut Lines<'_>, chunk: ChunkIndex, state: &mut Chunk) -> Result<bool, SplitError> {
        let members = self.members(chunk, self.host_by_parity(chunk).unwrap_or_default());
        // Pages would wait to leave behind whoever asks.
        if members.iter().any(|member| self.lenders.is_silent(*member)) {
            return Ok(false);
        }
        for member in members {
            self.make_sure(lines, member, chunk, state)?;
        }
        let copied = |state: &Chunk| state.members[0].at.copied().or(&state.members[1].at.copied());
        self.retire(lines, (chunk, &copied(state)), state)?;
        Ok(copied(state).is_empty())
    }

    /// The memory host that has copies of a chunk, where nothing else is done with the chunk.
    pub(super) fn copies_of(&self, chunk: ChunkIndex) -> Option<usize> {
        self.free_chunk(chunk.index())?.copies_at()
    }

    /// A chunk, unless something is done with it.
    pub(super) fn free_chunk(&self, index: usize) -> Option<MutexGuard<'_, Chunk>> {
        let state = match self.chunks[index].try_lock() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(state)) => Some(state.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        };
        state.filter(|state| !state.entrusted)
    }
}
