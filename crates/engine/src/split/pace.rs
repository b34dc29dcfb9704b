//! How much of a split guest may be here at present, what waits for room, and the account of what did (`admit.rs`).

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use sterna_protocol::layout::{PAGE_BYTES, PageIndex};

use super::room::Room;

/// The longest that a page waits for room.
pub(super) const LONGEST: Duration = Duration::from_millis(100);
/// How often it is looked whether there is room.
pub(super) const STEP: Duration = Duration::from_millis(1);

/// Pages that wait for room, and those that did.
#[derive(Debug)]
pub(super) struct Pace {
    /// More is not here, but for pages that have waited too long. Bytes.
    ceiling: AtomicU64,
    /// Pages that wait, in the order in which they came.
    pub waiting: Mutex<VecDeque<Touch>>,
    /// One has come.
    pub called: Condvar,
    paced: AtomicU64,
    forced: AtomicU64,
    longest_us: AtomicU64,
}

/// The first access to a page.
#[derive(Debug, Clone, Copy)]
pub(super) struct Touch {
    /// The page.
    pub page: PageIndex,
    /// When it was.
    pub since: Instant,
}

/// Pages that waited for room.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Paced {
    /// How many.
    pub pages: u64,
    /// Those of them that were let in although there was none.
    pub forced: u64,
    /// The longest wait.
    pub longest: Duration,
}

impl Pace {
    /// Nothing waits.
    pub fn new() -> Self {
        let count = || AtomicU64::new(0);
        let (waiting, called) = (Mutex::default(), Condvar::new());
        Self {
            ceiling: AtomicU64::new(u64::MAX),
            waiting,
            called,
            paced: count(),
            forced: count(),
            longest_us: count(),
        }
    }

    /// So much may be here from now on, where so much is.
    pub fn bound(&self, room: Room, here: u64) {
        self.ceiling.store(room.most().max(here), Ordering::Relaxed);
    }

    /// So much has left: the ceiling comes down with what is here, until it is the room's.
    pub fn left(&self, room: Room, bytes: u64) {
        let lower = |ceiling: u64| Some(ceiling.saturating_sub(bytes / 2).max(room.most()));
        let _ = self.ceiling.fetch_update(Ordering::Relaxed, Ordering::Relaxed, lower);
    }

    /// Whether there is room for so many pages where so much is here.
    pub fn has_room(&self, pages: usize, here: impl FnOnce() -> u64) -> bool {
        let ceiling = self.ceiling.load(Ordering::Relaxed);
        ceiling == u64::MAX || here().saturating_add((pages * PAGE_BYTES) as u64) <= ceiling
    }

    /// A page has waited so long; where it was `forced`, there was no room for it.
    pub fn passed(&self, waited: Duration, forced: bool) {
        self.paced.fetch_add(1, Ordering::Relaxed);
        self.forced.fetch_add(u64::from(forced), Ordering::Relaxed);
        self.longest_us.fetch_max(waited.as_micros() as u64, Ordering::Relaxed);
    }

    /// What waited so far.
    pub fn paced(&self) -> Paced {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let longest = Duration::from_micros(load(&self.longest_us));
        Paced { pages: load(&self.paced), forced: load(&self.forced), longest }
    }

    /// Wakes who lets pages in, for it to look whether this is the end.
    pub fn end(&self) {
        let _waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        self.called.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ceiling_comes_down_by_half_of_what_leaves_until_it_is_the_rooms() {
        let (pace, page) = (Pace::new(), PAGE_BYTES as u64);
        assert!(pace.has_room(1, || u64::MAX), "no bound");
        let room = Room::of(4 * page);
        pace.bound(room, 12 * page);
        let fits = |pages: u64| pace.has_room(1, || pages * page);
        assert!(fits(11) && !fits(12));
        pace.left(room, 4 * page);
        // 8 are here, and 2 more may be.
        assert!(fits(9) && !fits(10));
        pace.left(room, 100 * page);
        assert!(fits(3) && !fits(4));
        pace.bound(room, page);
        assert!(fits(3) && !fits(4));
        pace.bound(Room::ALL, page);
        assert!(fits(1 << 40));
    }

    #[test]
    fn what_waited_is_counted() {
        let pace = Pace::new();
        assert_eq!(pace.paced(), Paced::default());
        pace.passed(Duration::from_millis(7), false);
        pace.passed(Duration::from_millis(3), true);
        assert_eq!(pace.paced(), Paced { pages: 2, forced: 1, longest: Duration::from_millis(7) });
    }
}
