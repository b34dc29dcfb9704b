//! What is given back of a guest's RAM: what the VMM discards, by the agent's log, and what this daemon takes. The log
//! can be read once, and more than one user may want to know: each is told of all that came since it asked last.

use std::ops::Range;
use std::sync::PoisonError;

use super::{User, Userfault};
use crate::agent::Discards;
use crate::inside::Inside;

impl Userfault {
    /// What was given back since this user asked last: what the VMM has discarded, and what
    /// [`Fence::taking`](super::fence::Fence::taking) made holes, each the number of a span and bytes from its
    /// beginning.
    pub(crate) fn given_back(&self, user: User, inside: &mut dyn Inside) -> (Discards, Vec<(usize, Range<u64>)>) {
        let mut backlogs = self.backlogs.lock().unwrap_or_else(PoisonError::into_inner);
        // The log is read under this lock, so that each user is told in the order in which it happened.
        let discards = inside.discards();
        let taken = std::mem::take(&mut *self.holes.lock().unwrap_or_else(PoisonError::into_inner));
        backlogs.add(&discards, &taken);
        let (discards, holes) = backlogs.take(&user);
        (discards, holes.into_iter().filter_map(|hole| self.place(hole)).collect())
    }

    fn place(&self, hole: Range<u64>) -> Option<(usize, Range<u64>)> {
        let (at, span) = self.spans.iter().enumerate().find(|(_, span)| span.contains(&hole.start))?;
        Some((at, hole.start - span.start..hole.end - span.start))
    }
}
