//! A limit on what all connections of a migration send together.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

/// How far the sending may run ahead of the rate, so that a late wake-up is made good.
const BURST: Duration = Duration::from_millis(5);

/// How long a wait may go on unasked.
const LOOK: Duration = Duration::from_millis(100);

/// Paces senders to a common rate: each takes its turn, at the earliest when the bytes before it are due (GCRA).
#[derive(Debug)]
pub struct Pacer {
    bytes_per_s: Option<u64>,
    due: Mutex<Option<Instant>>,
}

impl Pacer {
    /// For a rate in bytes per second; none where `None`.
    #[must_use]
    pub fn new(bytes_per_s: Option<u64>) -> Self {
        Self { bytes_per_s, due: Mutex::new(None) }
    }

    /// Waits until so many bytes may go, asking `goes_on` every tenth of a second.
    ///
    /// # Errors
    /// What `goes_on` says; the turn is taken all the same.
    pub fn wait<E>(&self, bytes: u64, goes_on: impl Fn() -> Result<(), E>) -> Result<(), E> {
        let until = self.take(bytes, Instant::now()).map(|wait| Instant::now() + wait);
        while let Some(left) = until.and_then(|until| until.checked_duration_since(Instant::now())) {
            goes_on()?;
            std::thread::sleep(left.min(LOOK));
        }
        Ok(())
    }

    /// Takes a turn for so many bytes at `now`: how long to wait before sending them.
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

    #[test]
    fn turns_follow_each_other_at_the_rate() {
        let (pacer, start) = (Pacer::new(Some(1_000_000)), Instant::now());
        let mut now = start;
        for _ in 0..1000 {
            now += pacer.take(10_000, now).unwrap_or_default();
        }
        let took = now - start;
        assert!((Duration::from_secs_f64(9.9)..Duration::from_secs_f64(10.1)).contains(&took), "{took:?}");
    }

    #[test]
    fn an_idle_time_is_not_saved_up() {
        let (pacer, start) = (Pacer::new(Some(1_000_000)), Instant::now());
        let mut now = start + Duration::from_secs(100);
        let began = now;
        for _ in 0..100 {
            now += pacer.take(10_000, now).unwrap_or_default();
        }
        assert!(now - began > Duration::from_millis(950));
    }

    #[test]
    fn without_a_limit_nothing_waits() {
        assert_eq!(Pacer::new(None).take(u64::MAX, Instant::now()), None);
    }
}
