//! What users have not been told of yet that was given back of a guest's RAM.

use std::ops::Range;

use crate::agent::{Discard, Discards};

/// The most that is kept for a user that does not ask: for more any page may have been given back.
const MOST: usize = 1 << 20;

/// The users, and what each has not been told of.
#[derive(Debug)]
pub(super) struct Backlogs<U>(Vec<(U, Backlog)>);

#[derive(Debug, Default)]
struct Backlog {
    discards: Vec<Discard>,
    everything: bool,
    /// By addresses.
    holes: Vec<Range<u64>>,
}

impl<U: PartialEq> Backlogs<U> {
    /// Of this user alone.
    pub fn of(user: U) -> Self {
        Self(vec![(user, Backlog::default())])
    }

    /// From now on this user is told, too.
    pub fn add_user(&mut self, user: U) {
        self.0.push((user, Backlog::default()));
    }

    /// This user has gone, and need not be told of anything.
    pub fn remove_user(&mut self, user: &U) {
        self.0.retain(|(known, _)| known != user);
    }

    /// This has been given back.
    pub fn add(&mut self, discards: &Discards, holes: &[Range<u64>]) {
        self.0.iter_mut().for_each(|(_, backlog)| backlog.add(discards, holes));
    }

    /// What this user has not been told of yet.
    pub fn take(&mut self, user: &U) -> (Discards, Vec<Range<u64>>) {
        let own = self.0.iter_mut().find(|(known, _)| known == user);
        own.map_or((Discards::Ranges(Vec::new()), Vec::new()), |(_, backlog)| backlog.take())
    }
}

impl Backlog {
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
        let Self { discards, everything, holes } = std::mem::take(self);
        (if everything { Discards::Everything } else { Discards::Ranges(discards) }, holes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_user_is_told_of_everything_once_and_of_too_much_that_it_may_be_anything() {
        let discard = |offset| Discard { device: 1, inode: 2, offset, length: 4096 };
        let mut backlogs = Backlogs::of(1);
        backlogs.add_user(2);
        backlogs.add(&Discards::Ranges(vec![discard(0)]), std::slice::from_ref(&(0..4096)));
        for user in [1, 2] {
            let (told, holes) = backlogs.take(&user);
            assert!(told == Discards::Ranges(vec![discard(0)]) && holes.len() == 1, "{told:?}");
            assert_eq!(backlogs.take(&user).0, Discards::Ranges(vec![]));
        }
        backlogs.remove_user(&1);
        let many: Vec<_> = (0..MOST as u64).map(discard).collect();
        backlogs.add(&Discards::Ranges(many), &[]);
        backlogs.add(&Discards::Ranges(vec![discard(1)]), &[]);
        assert_eq!((backlogs.take(&2).0, backlogs.take(&1).0), (Discards::Everything, Discards::Ranges(vec![])));
        assert_eq!(backlogs.take(&2).0, Discards::Ranges(vec![]));
    }
}
