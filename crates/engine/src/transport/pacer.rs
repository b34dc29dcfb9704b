//! A limit on what all connections of a migration send together, within its share of what its host may send.

use std::net::TcpStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::connection::Connection;
use super::fair::BURST;
use super::pushes::Place;
use super::share::{Member, Sending, Share};

/// How often a wait asks whether it should go on.
const LOOK: Duration = Duration::from_millis(100);

/// Paces senders to a common rate: each takes its turn, at the earliest when the bytes before it are due (GCRA).
#[derive(Debug)]
pub struct Pacer {
    bytes_per_s: Option<u64>,
    due: Mutex<Option<Instant>>,
    host: Member,
}

impl Pacer {
    /// A pacer for a rate in bytes per second (`None`: no limit), on a host whose bandwidth is shared.
    #[must_use]
    pub fn new(bytes_per_s: Option<u64>, host: &Arc<Share>) -> Self {
        Self { bytes_per_s, due: Mutex::new(None), host: host.join() }
    }

    /// The migration sends over these connections.
    pub fn sends_over<'a>(&self, connections: impl Iterator<Item = &'a Connection>) {
        self.host.sends_over(connections);
    }

    /// Notes that the guest stands still, or is about to: its pages go before other migrations' bulk, which waits for
    /// it at first. Waits, at most so long, until what the others had begun to send is on its way. Returns whether
    /// there was anything.
    pub fn hurry(&self, patience: Duration) -> bool {
        self.host.hurry(patience)
    }

    /// Notes that the guest runs again, here or there.
    pub fn calm(&self) {
        self.host.calm();
    }

    /// Waits until this many bytes may go: they are being sent until what is returned is dropped. Calls `goes_on` every
    /// tenth of a second.
    ///
    /// # Errors
    /// The error of `goes_on`; a turn under the migration's own limit is used up all the same.
    pub fn wait<E>(&self, bytes: u64, goes_on: impl Fn() -> Result<(), E>) -> Result<Sending<'_>, E> {
        self.wait_own(bytes, &goes_on)?;
        // The host is asked only now, so that a migration that its own limit holds back holds up no other.
        self.host.wait(bytes, goes_on)
    }

    /// Waits until bytes may go under the migration's own limit and nobody needs quiet, for callers that decide
    /// afterwards which. [`pass`](Self::pass) is the other half.
    ///
    /// # Errors
    /// The error of `goes_on`.
    pub fn ready<E>(&self, goes_on: impl Fn() -> Result<(), E>) -> Result<(), E> {
        self.wait_own(0, &goes_on)?;
        self.host.wait_quiet(goes_on)
    }

    /// Lets this many bytes go once the host allows it.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub fn pass<E>(&self, bytes: u64, goes_on: impl Fn() -> Result<(), E>) -> Result<Sending<'_>, E> {
        self.charge(bytes);
        self.host.wait(bytes, goes_on)
    }

    /// Begins to push over these connections to another host, at most at the migration's own limit, beside the pushes
    /// that go there already.
    ///
    /// # Errors
    /// The kernel gives no figures, or does not pace.
    pub fn push(&self, to: &str, sockets: Vec<TcpStream>, known: Option<u64>) -> sterna_sys::Result<Place> {
        self.host.pushes().join(to, sockets, known, self.bytes_per_s)
    }

    fn wait_own<E>(&self, bytes: u64, goes_on: &impl Fn() -> Result<(), E>) -> Result<(), E> {
        let until = self.take(bytes, Instant::now()).map(|wait| Instant::now() + wait);
        while let Some(left) = until.and_then(|until| until.checked_duration_since(Instant::now())) {
            goes_on()?;
            std::thread::sleep(left.min(LOOK));
        }
        Ok(())
    }

    /// Counts bytes that went without a turn: the bytes after them wait longer for it.
    pub fn charge(&self, bytes: u64) {
        let _ = self.take(bytes, Instant::now());
    }

    /// Takes a turn for this many bytes at `now`. Returns how long to wait before they are sent.
    fn take(&self, bytes: u64, now: Instant) -> Option<Duration> {
        let rate = self.bytes_per_s?;
        let mut due = self.due.lock().unwrap_or_else(PoisonError::into_inner);
        let mine = due.map_or(now, |due| due.max(now - BURST));
        *due = Some(mine + Duration::from_secs_f64(bytes as f64 / rate as f64));
        mine.checked_duration_since(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn alone(bytes_per_s: Option<u64>) -> Pacer {
        Pacer::new(bytes_per_s, &Arc::default())
    }

    #[test]
    fn turns_follow_each_other_at_the_rate() {
        let (pacer, start) = (alone(Some(1_000_000)), Instant::now());
        let mut now = start;
        for _ in 0..1000 {
            now += pacer.take(10_000, now).unwrap_or_default();
        }
        let took = now - start;
        assert!((Duration::from_secs_f64(9.9)..Duration::from_secs_f64(10.1)).contains(&took), "{took:?}");
    }

    #[test]
    fn an_idle_time_is_not_saved_up() {
        let (pacer, start) = (alone(Some(1_000_000)), Instant::now());
        let mut now = start + Duration::from_secs(100);
        let began = now;
        for _ in 0..100 {
            now += pacer.take(10_000, now).unwrap_or_default();
        }
        assert!(now - began > Duration::from_millis(950));
    }

    #[test]
    fn without_a_limit_nothing_waits() {
        assert_eq!(alone(None).take(u64::MAX, Instant::now()), None);
    }
}
