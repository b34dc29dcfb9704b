//! A host's bandwidth, shared by all its migrations: threads wait here for their turns, which `fair.rs` orders.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::fair::{Flow, Turn, Turns};

/// How often a wait asks whether it should go on.
const LOOK: Duration = Duration::from_millis(100);

/// The limit on what all migrations away from a host send together.
#[derive(Debug, Default)]
pub struct Share {
    turns: Mutex<Turns>,
    changed: Condvar,
}

impl Share {
    /// A limit of this rate in bytes per second; no limit where `None`.
    #[must_use]
    pub fn new(bytes_per_s: Option<u64>) -> Self {
        Self { turns: Mutex::new(Turns::new(bytes_per_s)), changed: Condvar::new() }
    }

    /// The rate, bytes per second.
    #[must_use]
    pub fn rate(&self) -> Option<u64> {
        self.lock().rate()
    }

    /// Sets another rate, also for migrations under way.
    pub fn set_rate(&self, bytes_per_s: Option<u64>) {
        self.lock().set_rate(bytes_per_s);
        self.changed.notify_all();
    }

    /// Adds a migration, until its member is dropped.
    #[must_use]
    pub(super) fn join(self: &Arc<Self>) -> Member {
        let flow = self.lock().join();
        Member { share: Arc::clone(self), flow }
    }

    fn lock(&self) -> MutexGuard<'_, Turns> {
        self.turns.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A migration that shares the bandwidth.
#[derive(Debug)]
pub(super) struct Member {
    share: Arc<Share>,
    flow: Flow,
}

impl Member {
    /// Notes that a guest waits for what is sent from now on: it goes before the others' bulk.
    pub fn hurry(&self) {
        self.share.lock().hurry(self.flow);
        self.share.changed.notify_all();
    }

    /// Waits for the turn to send this many bytes. Calls `goes_on` at least every tenth of a second.
    ///
    /// # Errors
    /// The error of `goes_on`; the turn then goes to another.
    pub fn wait<E>(&self, bytes: u64, goes_on: impl Fn() -> Result<(), E>) -> Result<(), E> {
        let mut turns = self.share.lock();
        if turns.rate().is_none() {
            return Ok(());
        }
        let ticket = turns.ask(self.flow, bytes);
        loop {
            let now = Instant::now();
            let wait = match turns.turn(self.flow, ticket, now) {
                // The member that is next now learns it.
                Turn::Now => {
                    self.share.changed.notify_all();
                    return Ok(());
                }
                Turn::At(at) => at.saturating_duration_since(now).min(LOOK),
                Turn::Later => LOOK,
            };
            let (guard, _) = self.share.changed.wait_timeout(turns, wait).unwrap_or_else(PoisonError::into_inner);
            drop(guard);
            let goes_on = goes_on();
            turns = self.share.lock();
            if goes_on.is_err() {
                turns.withdraw(self.flow, ticket);
                self.share.changed.notify_all();
                return goes_on;
            }
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.share.lock().part(self.flow);
        self.share.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn a_cancelled_wait_ends_and_leaves_its_turn_to_others() {
        let share = Arc::new(Share::new(Some(1)));
        let (first, second) = (share.join(), share.join());
        let on = || Ok::<(), ()>(());
        first.wait(1000, on).unwrap();
        // At that rate the turn comes in a thousand seconds.
        let cancelled = AtomicBool::new(false);
        let goes_on = || if cancelled.load(Ordering::Acquire) { Err("cancelled") } else { Ok(()) };
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| first.wait(1000, goes_on));
            let waits_too = scope.spawn(|| second.wait(1000, on));
            cancelled.store(true, Ordering::Release);
            assert_eq!(waits.join().unwrap(), Err("cancelled"));
            share.set_rate(None);
            assert_eq!(waits_too.join().unwrap(), Ok(()));
        });
    }

    #[test]
    fn without_a_limit_nobody_waits() {
        let share = Arc::new(Share::new(None));
        let member = share.join();
        assert_eq!(member.wait(u64::MAX, || Err("never asked")), Ok(()));
    }
}
