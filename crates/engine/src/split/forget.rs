//! Pages that the guest gives back while they are at memory hosts: they are nowhere from then on, and take no memory
//! there.
//!
//! What it gives back is known a moment later, from the agent's log or from whoever took what it holds free. Then the
//! page is away still, or has come as a page of zeros. Nothing comes or leaves while the chunk is looked at, so what is
//! away and known to be given back was given back after it left, and not written since.

use sterna_protocol::layout::ChunkIndex;
use sterna_protocol::pages::PageSet;

use super::lender::Member;
use super::lines::Lines;
use super::{Split, SplitError};

impl Split {
    /// Has memory hosts forget what was given back of what they have. Those that do not answer are told another time.
    ///
    /// # Errors
    /// The map cannot be written, or the VMM has ended.
    pub(super) fn tell_what_was_given_back(&self, lines: &mut Lines<'_>) -> Result<(), SplitError> {
        self.pager.given_back_elsewhere().into_iter().try_for_each(|chunk| self.forget_in(lines, chunk))
    }

    fn forget_in(&self, lines: &mut Lines<'_>, chunk: ChunkIndex) -> Result<(), SplitError> {
        let _coming = self.still.coming();
        if self.still.is_on() {
            return Ok(());
        }
        // One that is busy has its turn the next time.
        let Some(mut state) = self.free_chunk(chunk.index()) else { return Ok(()) };
        let Some(number) = self.host_of(chunk) else { return Ok(()) };
        let members = self.members(chunk, number);
        let knows = |member: &Member| {
            !state.members[member.which].unsure && !self.is_behind(chunk, *member) && !self.lenders.is_silent(*member)
        };
        if !members.iter().all(knows) {
            return Ok(());
        }
        let gone = self.pager.forget(chunk)?;
        if self.lenders.parity_at(number).is_some() {
            members.iter().for_each(|member| state.members[member.which].at.comes(&gone));
            if self.lenders.is_leaving(number) {
                // The parity of other chunks stands on them, until all of it is given back.
                self.has_come(lines, number, chunk, &mut state);
                return Ok(());
            }
            return match self.retire(lines, (chunk, &gone), &mut state) {
                Err(SplitError::Here(error)) => Err(error.into()),
                // They are copies until then.
                Err(_) | Ok(()) => Ok(()),
            };
        }
        state.came((number, members.len()), (&PageSet::EMPTY, &gone), &[]);
        members.into_iter().for_each(|member| self.release(lines, member, (chunk, &gone), &mut state));
        self.has_come(lines, number, chunk, &mut state);
        Ok(())
    }
}
