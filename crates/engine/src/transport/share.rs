//! A host's bandwidth, shared by all its migrations: threads wait here for their turns, which `fair.rs` orders.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::backlog::Backlog;
use super::connection::Connection;
use super::fair::{Flow, Turn, Turns};
use super::pushes::Pushes;

/// How often a wait asks whether it should go on.
const LOOK: Duration = Duration::from_millis(100);
/// How often who hurries looks whether the others' backlog has arrived.
const BACKLOG_LOOK: Duration = Duration::from_millis(1);

/// The limit on what all migrations away from a host send together.
#[derive(Debug, Default)]
pub struct Share {
    turns: Mutex<Turns>,
    changed: Condvar,
    pushes: Pushes,
    backlog: Backlog,
}

impl Share {
    /// A limit of this rate in bytes per second; no limit where `None`.
    #[must_use]
    pub fn new(bytes_per_s: Option<u64>) -> Self {
        Self { turns: Mutex::new(Turns::new(bytes_per_s)), ..Self::default() }
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

    /// Waits for a change, at most until this moment and for [`LOOK`].
    fn wait<'a>(&self, turns: MutexGuard<'a, Turns>, until: Instant) -> MutexGuard<'a, Turns> {
        let wait = until.saturating_duration_since(Instant::now()).min(LOOK);
        self.changed.wait_timeout(turns, wait).unwrap_or_else(PoisonError::into_inner).0
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
    /// Notes that a guest stands still from now on, or soon, and waits for what is sent: it goes before the others'
    /// bulk, and these begin to send nothing ([`quiet`](super::quiet)) until it is [`calm`](Self::calm). Waits until
    /// what they had begun has arrived, at most so long. Returns whether there was anything.
    pub fn hurry(&self, patience: Duration) -> bool {
        let mut turns = self.share.lock();
        turns.hurry(self.flow, Instant::now());
        self.share.changed.notify_all();
        let others_sent = turns.others_send();
        let until = Instant::now() + patience;
        while turns.others_send()
            && let Some(left) = until.checked_duration_since(Instant::now())
        {
            turns = self.share.changed.wait_timeout(turns, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        let hurried = turns.hurried();
        drop(turns);
        let backlog = || self.share.backlog.bytes(|flow| !hurried.contains(&flow));
        let had = backlog();
        while backlog() > 0 && Instant::now() < until {
            std::thread::sleep(BACKLOG_LOOK);
        }
        self.share.lock().quiet_counts(Instant::now());
        others_sent || had > 0
    }

    /// The migration sends over these connections.
    pub fn sends_over<'a>(&self, connections: impl Iterator<Item = &'a Connection>) {
        self.share.backlog.add(self.flow, connections);
    }

    /// Notes that no guest waits any more.
    pub fn calm(&self) {
        self.share.lock().calm(self.flow, Instant::now());
        self.share.changed.notify_all();
    }

    /// The pushes away from this host.
    pub fn pushes(&self) -> &Pushes {
        &self.share.pushes
    }

    /// Waits until there is no quiet for another's guest. Calls `goes_on` at least every tenth of a second.
    ///
    /// # Errors
    /// The error of `goes_on`.
    pub fn wait_quiet<E>(&self, goes_on: impl Fn() -> Result<(), E>) -> Result<(), E> {
        let mut turns = self.share.lock();
        while let Some(until) = turns.quiet_for(self.flow, Instant::now()) {
            drop(self.share.wait(turns, until));
            goes_on()?;
            turns = self.share.lock();
        }
        Ok(())
    }

    /// Waits for the turn to send this many bytes. The turn lasts until what is returned is dropped, which is when they
    /// have been sent. Calls `goes_on` at least every tenth of a second.
    ///
    /// # Errors
    /// The error of `goes_on`; the turn then goes to another.
    pub fn wait<E>(&self, bytes: u64, goes_on: impl Fn() -> Result<(), E>) -> Result<Sending<'_>, E> {
        let mut turns = self.share.lock();
        let ticket = turns.ask(self.flow, bytes);
        loop {
            let now = Instant::now();
            let until = match turns.turn(self.flow, ticket, now) {
                // The member that is next now learns it.
                Turn::Now => {
                    self.share.changed.notify_all();
                    return Ok(Sending(self));
                }
                Turn::At(at) => at,
                Turn::Later => now + LOOK,
            };
            drop(self.share.wait(turns, until));
            let goes_on = goes_on();
            turns = self.share.lock();
            if let Err(error) = goes_on {
                turns.withdraw(self.flow, ticket);
                self.share.changed.notify_all();
                return Err(error);
            }
        }
    }
}

/// A turn that was given. It ends when this is dropped.
#[derive(Debug)]
pub struct Sending<'a>(&'a Member);

impl Drop for Sending<'_> {
    fn drop(&mut self) {
        let mut turns = self.0.share.lock();
        turns.sent(self.0.flow);
        // Whoever hurries waits for the last of the others, and nobody else for the end of a turn.
        if !turns.others_send() {
            self.0.share.changed.notify_all();
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.share.backlog.remove(self.flow);
        self.share.lock().part(self.flow, Instant::now());
        self.share.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn a_cancelled_wait_ends_and_leaves_its_turn_to_others() {
        let share = Arc::new(Share::new(Some(1)));
        let (first, second) = (share.join(), share.join());
        let on = || Ok::<(), ()>(());
        drop(first.wait(1000, on).unwrap());
        // At that rate the turn comes in a thousand seconds.
        let cancelled = AtomicBool::new(false);
        let goes_on = || if cancelled.load(Ordering::Acquire) { Err("cancelled") } else { Ok(()) };
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| first.wait(1000, goes_on));
            let waits_too = scope.spawn(|| second.wait(1000, on));
            cancelled.store(true, Ordering::Release);
            assert_eq!(waits.join().unwrap().map(drop), Err("cancelled"));
            share.set_rate(None);
            assert_eq!(waits_too.join().unwrap().map(drop), Ok(()));
        });
    }

    #[test]
    fn without_a_limit_nobody_waits() {
        let share = Arc::new(Share::new(None));
        let member = share.join();
        assert_eq!(member.wait(u64::MAX, || Err("never asked")).map(drop), Ok(()));
    }

    #[test]
    fn a_guest_that_is_about_to_stop_waits_for_what_others_have_in_the_kernel() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (mut ours, mut theirs) =
            (TcpStream::connect(listener.local_addr().unwrap()).unwrap(), listener.accept().unwrap().0);
        let share = Arc::new(Share::new(None));
        let (paused, other) = (share.join(), share.join());
        // More than both sides hold: the rest waits here.
        ours.set_nonblocking(true).unwrap();
        while ours.write(&[0; 64 << 10]).is_ok() {}
        let connection = Connection::plain(ours);
        other.sends_over([&connection].into_iter());
        std::thread::scope(|scope| {
            let hurries = scope.spawn(|| paused.hurry(Duration::from_secs(100)));
            while share.lock().quiet_for(other.flow, Instant::now()).is_none() {
                std::thread::yield_now();
            }
            assert!(!hurries.is_finished(), "nobody reads");
            assert!(share.backlog.bytes(|flow| flow == other.flow) > 0);
            assert_eq!(share.backlog.bytes(|flow| flow == paused.flow), 0);
            let reads = scope.spawn(move || theirs.read_to_end(&mut Vec::new()));
            assert!(hurries.join().unwrap());
            assert_eq!(share.backlog.bytes(|flow| flow == other.flow), 0);
            drop(connection);
            reads.join().unwrap().unwrap();
        });
        paused.calm();
        assert!(!paused.hurry(Duration::from_secs(100)), "a connection that is gone holds nothing");
    }

    #[test]
    fn a_guest_that_is_about_to_stop_waits_for_what_others_have_begun_and_they_wait_for_it() {
        let share = Arc::new(Share::new(None));
        let (paused, other) = (share.join(), share.join());
        let on = || Ok::<(), ()>(());
        assert!(!paused.hurry(Duration::from_secs(100)), "nobody sends");
        paused.calm();
        let sending = other.wait(1, on).unwrap();
        std::thread::scope(|scope| {
            let hurries = scope.spawn(|| paused.hurry(Duration::from_secs(100)));
            while share.lock().quiet_for(other.flow, Instant::now()).is_none() {
                std::thread::yield_now();
            }
            drop(sending);
            assert!(hurries.join().unwrap());
            let cancelled = other.wait(1, || Err("cancelled"));
            assert_eq!(cancelled.map(drop), Err("cancelled"), "it is quiet");
            let waits = scope.spawn(|| other.wait_quiet(on));
            paused.calm();
            assert_eq!(waits.join().unwrap(), Ok(()));
            drop(other.wait(1, on).unwrap());
        });
    }
}
