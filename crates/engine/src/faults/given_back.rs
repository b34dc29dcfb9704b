//! What is given back of a guest's RAM: what the VMM discards, by the agent's log, and what this daemon takes. The log
//! can be read once, and more than one user may want to know: each is told of all that came since it asked last.

use std::ops::Range;
use std::sync::PoisonError;

use super::{User, Userfault};
use crate::agent::{Discard, Discards};
use crate::inside::Inside;

/// The most that is kept for a user that does not ask: for more any page may have been given back.
const MOST: usize = 1 << 20;

/// What a user has not been told of yet.
#[derive(Debug)]
pub(super) struct Backlog {
    user: User,
    discards: Vec<Discard>,
    everything: bool,
    /// By addresses.
    holes: Vec<Range<u64>>,
}

impl Backlog {
    /// Of a user that begins.
    pub(super) fn of(user: User) -> Self {
        Self { user, discards: Vec::new(), everything: false, holes: Vec::new() }
    }

    fn add(&mut self, discards: &Discards, holes: &[Range<u64>]) {
        match discards {
            Discards::Ranges(ranges) if self.discards.len() + ranges.len() <= MOST => {
                self.discards.extend_from_slice(ranges);
            }
            Discards::Ranges(_) | Discards::Everything => self.everything = true,
        }
        if self.holes.len() + holes.len() <= MOST {
            self.holes.extend_from_slice(holes);
        } else {
            self.everything = true;
        }
    }

    fn take(&mut self) -> (Discards, Vec<Range<u64>>) {
        let (discards, holes) = (std::mem::take(&mut self.discards), std::mem::take(&mut self.holes));
        let all = std::mem::take(&mut self.everything);
        (if all { Discards::Everything } else { Discards::Ranges(discards) }, holes)
    }
}

impl Userfault {
    /// A user has gone, and need not be told of anything.
    pub(super) fn tells_no_more(&self, user: User) {
        self.backlogs.lock().unwrap_or_else(PoisonError::into_inner).retain(|backlog| backlog.user != user);
    }

    /// From now on this user is told, too.
    pub(super) fn tells(&self, user: User) {
        self.backlogs.lock().unwrap_or_else(PoisonError::into_inner).push(Backlog::of(user));
    }

    /// What was given back since this user asked last: what the VMM has discarded, and what
    /// [`Fence::taking`](super::fence::Fence::taking) made holes, each the number of a span and bytes from its
    /// beginning.
    pub(crate) fn given_back(&self, user: User, inside: &mut dyn Inside) -> (Discards, Vec<(usize, Range<u64>)>) {
        let mut backlogs = self.backlogs.lock().unwrap_or_else(PoisonError::into_inner);
        // The log is read under this lock, so that each user is told in the order in which it happened.
        let discards = inside.discards();
        let taken = std::mem::take(&mut *self.holes.lock().unwrap_or_else(PoisonError::into_inner));
        backlogs.iter_mut().for_each(|backlog| backlog.add(&discards, &taken));
        let own = backlogs.iter_mut().find(|backlog| backlog.user == user).map(Backlog::take);
        let (discards, holes) = own.unwrap_or((Discards::Ranges(Vec::new()), Vec::new()));
        (discards, holes.into_iter().filter_map(|hole| self.place(hole)).collect())
    }

    fn place(&self, hole: Range<u64>) -> Option<(usize, Range<u64>)> {
        let (at, span) = self.spans.iter().enumerate().find(|(_, span)| span.contains(&hole.start))?;
        Some((at, hole.start - span.start..hole.end - span.start))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_that_does_not_ask_is_told_that_anything_may_have_been_given_back() {
        let discard = |offset| Discard { device: 1, inode: 2, offset, length: 4096 };
        let mut backlog = Backlog::of(User::Tracking);
        backlog.add(&Discards::Ranges(vec![discard(0)]), std::slice::from_ref(&(0..4096)));
        let (told, holes) = backlog.take();
        assert!(matches!(told, Discards::Ranges(ranges) if ranges == [discard(0)]) && holes == [0..4096]);
        let many: Vec<_> = (0..MOST as u64).map(discard).collect();
        backlog.add(&Discards::Ranges(many), &[]);
        backlog.add(&Discards::Ranges(vec![discard(1)]), &[]);
        assert!(matches!(backlog.take().0, Discards::Everything));
        assert!(matches!(backlog.take().0, Discards::Ranges(ranges) if ranges.is_empty()));
    }
}
