//! How many more mappings a process may have (`vm.max_map_count`), and what is copied where they do not suffice.

use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use sterna_protocol::layout::PAGE_BYTES;
use sterna_protocol::spec::SharedPages;

/// Mappings that are left to the VMM for everything else.
const KEPT_FOR_VMM: u64 = 4096;
/// Mappings that a VMM has by itself, about: 300 to 500.
const OF_VMM: u64 = 1024;
/// How many mappings are taken between two counts: to count 30,000 takes 10 ms.
const BETWEEN_COUNTS: u64 = 2048;

/// How many more mappings a process may have.
///
/// Whoever takes some takes the most that he may need. Neighbours become one mapping, so it is counted again where they
/// seem to be used up.
#[derive(Debug, Default)]
pub struct Room(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// How many are left, by what was counted and taken.
    left: u64,
    /// How many were taken since they were counted.
    taken: u64,
    /// How many were taken and may not be there yet.
    on_their_way: u64,
    counted: bool,
}

/// Mappings that were taken and are being made; dropped once they are there.
#[derive(Debug)]
pub struct Taken<'a> {
    room: &'a Room,
    mappings: u64,
}

impl Taken<'_> {
    /// How many they are.
    #[must_use]
    pub fn mappings(&self) -> u64 {
        self.mappings
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        self.room.lock().on_their_way -= self.mappings;
    }
}

impl Room {
    /// Takes room for mappings of this process; `None` where there is not enough.
    ///
    /// # Errors
    /// The kernel does not say how many there are, or may be.
    pub fn take(&self, pid: u32, mappings: u64) -> io::Result<Option<Taken<'_>>> {
        let state = self.for_these(pid, mappings)?;
        Ok((state.left >= mappings).then(|| self.taken(state, mappings)))
    }

    /// As [`take`](Self::take), but no more than there is room for.
    ///
    /// # Errors
    /// As [`take`](Self::take).
    pub fn take_at_most(&self, pid: u32, mappings: u64) -> io::Result<Taken<'_>> {
        let state = self.for_these(pid, mappings)?;
        let mappings = mappings.min(state.left);
        Ok(self.taken(state, mappings))
    }

    /// The state, counted again where this is more than is left.
    fn for_these(&self, pid: u32, mappings: u64) -> io::Result<MutexGuard<'_, State>> {
        let mut state = self.lock();
        if !state.counted || state.left < mappings && state.taken >= BETWEEN_COUNTS {
            let used = count(pid)? + KEPT_FOR_VMM + state.on_their_way;
            *state = State { left: most()?.saturating_sub(used), taken: 0, counted: true, ..*state };
        }
        Ok(state)
    }

    /// Takes mappings, of which so many are left.
    fn taken(&self, mut state: MutexGuard<'_, State>, mappings: u64) -> Taken<'_> {
        state.left -= mappings;
        state.taken += mappings;
        state.on_their_way += mappings;
        Taken { room: self, mappings }
    }

    /// Only so many are left.
    #[cfg(test)]
    pub(super) fn set(&self, left: u64) {
        *self.lock() = State { left, counted: true, ..State::default() };
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How many mappings for shared pages a machine may have that comes to this host.
///
/// # Errors
/// The kernel does not say.
pub fn for_newcomer() -> io::Result<u64> {
    Ok(most()?.saturating_sub(KEPT_FOR_VMM + OF_VMM))
}

/// How much of what a gang shares is copied where each process may have so many mappings for it, bytes. Which runs find
/// no room is a matter of their order: they are taken for runs of average length.
#[must_use]
pub fn copied_bytes(shared: &[SharedPages], mappings: u64) -> u64 {
    let copied = |one: &SharedPages| {
        let without = one.mappings.saturating_sub(mappings);
        let pages = u128::from(one.pages) * u128::from(without) / u128::from(one.mappings.max(1));
        u64::try_from(pages * PAGE_BYTES as u128).unwrap_or(u64::MAX)
    };
    shared.iter().map(copied).fold(0, u64::saturating_add)
}

fn most() -> io::Result<u64> {
    std::fs::read_to_string("/proc/sys/vm/max_map_count")?.trim().parse().map_err(io::Error::other)
}

fn count(pid: u32) -> io::Result<u64> {
    Ok(std::fs::read(format!("/proc/{pid}/maps"))?.iter().filter(|byte| **byte == b'\n').count() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_copied_and_what_fits_is_not() {
        let member = |pages, mappings| SharedPages { pages, mappings };
        assert_eq!(copied_bytes(&[member(1 << 20, 60_000)], 60_000), 0);
        assert_eq!(copied_bytes(&[member(1000, 100), member(1000, 10)], 75), 250 * 4096);
        assert_eq!(copied_bytes(&[member(7, 0)], 0), 0);
        // A peer may say anything.
        assert_eq!(copied_bytes(&[member(u64::MAX, u64::MAX), member(u64::MAX, 1)], 0), u64::MAX);
    }

    #[test]
    fn mappings_that_became_fewer_are_counted_again_and_those_on_their_way_are_not_given_twice() {
        let (room, pid) = (Room::default(), std::process::id());
        let all = room.take(pid, 1).expect("counted").map(|_| room.lock().left).expect("room");
        let first = room.take(pid, all - 100).expect("counted").expect("room");
        assert!(room.take(pid, 5000).expect("counted").is_none(), "the first are on their way");
        drop(first);
        // They became none: this process has as many as before.
        assert!(room.take(pid, 5000).expect("counted").is_none(), "it was counted a moment ago");
        room.lock().taken = BETWEEN_COUNTS;
        assert!(room.take(pid, 5000).expect("counted").is_some());
    }

    #[test]
    fn whoever_takes_what_there_is_gets_no_more_and_may_get_nothing() {
        let (room, pid) = (Room::default(), std::process::id());
        room.set(10);
        let most = |mappings| room.take_at_most(pid, mappings).expect("counted").mappings();
        assert_eq!([most(4), most(7), most(1)], [4, 6, 0]);
    }
}
