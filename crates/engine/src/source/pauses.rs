//! Pauses of machines that leave together: one after the other, or all at the same time. A machine whose turn it is not
//! yet goes on with rounds, or waits where it sends none.
//!
//! Nobody waits for ever: one that hangs in its pause, or waits for its turn in a queue, keeps the others for ten
//! seconds only.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sterna_api::GangPauses;

/// How long a machine that could be stopped waits for others.
const PATIENCE: Duration = Duration::from_secs(10);

/// The pauses of machines that leave together.
#[derive(Debug)]
pub struct Pauses {
    how: GangPauses,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Machines that have not ended.
    left: usize,
    /// Machines that could be stopped, or were.
    ready: usize,
    /// Machines that stand still, or are about to.
    paused: usize,
    /// All were ready at one time: those that are to stop together stop.
    all_ready: bool,
}

impl Pauses {
    /// Of so many machines.
    #[must_use]
    pub fn new(how: GangPauses, machines: usize) -> Arc<Self> {
        Arc::new(Self { how, state: Mutex::new(State { left: machines, ..State::default() }) })
    }

    /// The place of one of them, which has begun to move.
    #[must_use]
    pub fn place(self: &Arc<Self>) -> Place {
        Place { pauses: Arc::clone(self), ready: None, paused: false }
    }

    /// One of them has ended.
    pub fn leave(&self) {
        let mut state = self.lock();
        state.left = state.left.saturating_sub(1);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One machine's place among them. It is given back when the machine's attempt to move ends.
#[derive(Debug)]
pub struct Place {
    pauses: Arc<Pauses>,
    /// Since when it could be stopped.
    ready: Option<Instant>,
    paused: bool,
}

impl Place {
    /// The place of a machine that leaves alone.
    #[must_use]
    pub fn alone() -> Self {
        Pauses::new(GangPauses::Staggered, 1).place()
    }

    /// Whether no other machine leaves with it.
    #[must_use]
    pub fn is_alone(&self) -> bool {
        self.pauses.lock().left <= 1
    }

    /// Says that the machine could be stopped now. Returns whether it may be: then it counts as standing still until
    /// [`over`](Self::over).
    pub fn may_stop(&mut self, now: Instant) -> bool {
        let mut state = self.pauses.lock();
        let since = *self.ready.get_or_insert_with(|| {
            state.ready += 1;
            now
        });
        // Who has ended was ready, or never will be.
        state.all_ready |= state.ready >= state.left;
        let its_turn = match self.pauses.how {
            GangPauses::Staggered => state.paused == 0,
            GangPauses::Together => state.all_ready,
        };
        let stops = self.paused || its_turn || now.saturating_duration_since(since) >= PATIENCE;
        if stops && !self.paused {
            state.paused += 1;
            self.paused = true;
        }
        stops
    }

    /// Its guest runs again, here or there.
    pub fn over(&mut self) {
        let mut state = self.pauses.lock();
        if std::mem::take(&mut self.paused) {
            state.paused -= 1;
        }
        if self.ready.take().is_some() {
            state.ready -= 1;
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.over();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn three(how: GangPauses) -> (Arc<Pauses>, [Place; 3]) {
        let pauses = Pauses::new(how, 3);
        let places = [(); 3].map(|()| pauses.place());
        (pauses, places)
    }

    #[test]
    fn one_stands_still_at_a_time() {
        let (_pauses, [mut a, mut b, mut c]) = three(GangPauses::Staggered);
        let now = Instant::now();
        assert!(a.may_stop(now) && a.may_stop(now), "it is its turn until it runs again");
        assert!(!b.may_stop(now) && !c.may_stop(now));
        a.over();
        assert!(c.may_stop(now) && !b.may_stop(now));
        drop(c);
        assert!(b.may_stop(now), "whoever failed in its pause holds up nobody");
    }

    #[test]
    fn all_stand_still_once_each_can() {
        let (_pauses, [mut a, mut b, mut c]) = three(GangPauses::Together);
        let now = Instant::now();
        assert!(!a.may_stop(now) && !b.may_stop(now) && !a.may_stop(now));
        assert!(c.may_stop(now));
        c.over();
        assert!(a.may_stop(now), "one was so quick that it runs again");
        a.over();
        drop(a);
        assert!(b.may_stop(now));
    }

    #[test]
    fn one_that_has_ended_is_not_waited_for() {
        let (pauses, [mut a, mut b, c]) = three(GangPauses::Together);
        let now = Instant::now();
        assert!(!a.may_stop(now) && !b.may_stop(now));
        drop(c);
        assert!(!a.may_stop(now), "its migration may be tried again");
        pauses.leave();
        assert!(a.may_stop(now) && b.may_stop(now));
    }

    #[test]
    fn nobody_waits_for_ever() {
        for how in [GangPauses::Staggered, GangPauses::Together] {
            let (_pauses, [mut a, mut b, _]) = three(how);
            let now = Instant::now();
            a.may_stop(now);
            assert!(!b.may_stop(now) && !b.may_stop(now + PATIENCE / 2), "{how:?}");
            assert!(b.may_stop(now + PATIENCE), "{how:?}");
        }
    }

    #[test]
    fn one_that_leaves_alone_stops_when_it_can() {
        assert!(Place::alone().may_stop(Instant::now()));
    }
}
