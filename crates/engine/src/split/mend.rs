//! Pages that one of two memory hosts alone has are copied to the other one: it has lost them, or did not answer when
//! they left. Then each page is at both again.
//!
//! They go through this host, and not through the guest's memory: they are away before and after. Nothing else is done
//! with the chunk meanwhile. The map of missing pages says that both have them once the other one has acknowledged all;
//! killed before that, the next daemon does it again.

use sterna_protocol::layout::{ChunkIndex, PAGE_BYTES};
use sterna_protocol::pages::PageSet;
use sterna_sys::iovec::Outgoing;

use super::fetch::{TOGETHER, some_of};
use super::lender::Member;
use super::lines::Lines;
use super::{Chunk, Split, SplitError};
use crate::error::MigrateError;
use crate::store::client::ANSWER_TIMEOUT;

impl Split {
    /// Finds out for each chunk of which pages are away whether a memory host has them still, that has not answered for
    /// a while.
    ///
    /// # Errors
    /// [`SplitError`]; it is to be gone through once more.
    pub(super) fn look_through(&self, lines: &mut Lines<'_>, member: Member) -> Result<(), SplitError> {
        for chunk in self.pager.ram().layout().iter() {
            if self.has_ended() {
                break;
            }
            let mut state = self.chunk(chunk);
            if self.lenders.parity_at(member.number).is_some() {
                self.look_by_parity(lines, member, chunk, &mut state)?;
            } else if self.concerns(chunk, member) {
                state.members[member.which].unasked = true;
                match self.make_sure(lines, member, chunk, &mut state) {
                    // Whoever touches those pages finds out.
                    Ok(()) | Err(SplitError::Lost { .. }) => {}
                    Err(other) => return Err(other),
                }
            }
        }
        Ok(())
    }

    /// Copies what is away to a memory host that has not all of it. Returns whether it has all then: not where somebody
    /// waits for a page of the chunk, or its mirror does not answer.
    ///
    /// # Errors
    /// [`SplitError`]; what was copied until then is there.
    pub(super) fn mend(
        &self,
        lines: &mut Lines<'_>,
        member: Member,
        chunk: ChunkIndex,
        state: &mut Chunk,
    ) -> Result<bool, SplitError> {
        if !self.is_behind(chunk, member) {
            return Ok(true);
        }
        // Parity that is made anew is nobody's meanwhile, and its next host counts on it.
        if self.still.is_on() {
            return Ok(false);
        }
        let other = self.having(chunk).into_iter().find(|other| *other != member);
        let Some(from) = other.filter(|from| !self.lenders.is_silent(*from)) else { return Ok(false) };
        if self.is_parity(member) && !self.parity_begins_anew(lines, member, chunk, state)? {
            return Ok(false);
        }
        for asked in [from, member] {
            self.make_sure(lines, asked, chunk, state)?;
        }
        let away = self.pager.away_in(chunk);
        loop {
            let lacks = away.without(&state.members[member.which].at.away());
            if lacks.is_empty() {
                break;
            }
            if !self.pager.waited_for_in(chunk).is_empty() {
                return Ok(false);
            }
            self.copy_between(lines, (from, member), (chunk, &some_of(&lacks, TOGETHER)), state)?;
        }
        self.pager.mended(chunk)?;
        Ok(true)
    }

    fn copy_between(
        &self,
        lines: &mut Lines<'_>,
        (from, to): (Member, Member),
        (chunk, pages): (ChunkIndex, &PageSet),
        state: &mut Chunk,
    ) -> Result<(), SplitError> {
        let got = self.get(lines, from, (chunk, pages), state, ANSWER_TIMEOUT)?;
        let bodies: Vec<_> = got.bodies.chunks_exact(PAGE_BYTES).map(Outgoing::from).collect();
        let kept = self.give(lines, to, (chunk, state), (got.full, got.zero), &bodies)?;
        let known = &mut state.members[to.which];
        if kept != got.digests {
            known.unsure = true;
            let other = MigrateError::Reply("other pages than it was given");
            return Err(self.failed(to, other.into()));
        }
        known.at.goes(pages);
        Ok(())
    }

    /// Mends the next chunk that can be, from this one on. Returns where to go on; `None` where there is none.
    ///
    /// # Errors
    /// As [`mend`](Self::mend).
    pub(super) fn mend_next(&self, lines: &mut Lines<'_>, from: usize) -> Result<Option<usize>, SplitError> {
        for index in from..self.chunks.len() {
            let chunk = ChunkIndex(index as u32);
            let members = self.having(chunk);
            let Some(behind) = members.iter().find(|member| self.is_behind(chunk, **member)) else { continue };
            if members.iter().any(|member| self.lenders.is_silent(*member)) {
                continue;
            }
            let Some(mut state) = self.free_chunk(index) else { continue };
            match self.mend(lines, *behind, chunk, &mut state) {
                // Whoever touches those pages finds out.
                Ok(_) | Err(SplitError::Lost { .. }) => return Ok(Some(index + 1)),
                Err(other) => return Err(other),
            }
        }
        Ok(None)
    }
}
