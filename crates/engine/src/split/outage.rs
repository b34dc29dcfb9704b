//! Memory hosts that do not answer, and when they are asked again.
//!
//! Whoever asks a host that is away in vain takes time from pages that could go to others, and each attempt after a
//! lost answer costs an epoch, which is written to disk. So the pauses between attempts grow with the outage: one of a
//! second is noticed within 125 ms, one of a night within seconds.

use std::time::{Duration, Instant};

/// The shortest pause between two attempts.
const SHORT: Duration = Duration::from_millis(100);
/// The longest.
const LONG: Duration = Duration::from_secs(5);
/// The part of an outage that may pass unnoticed after its end.
const PART: u32 = 8;

/// An outage of one memory host, as one thread finds it; or none.
#[derive(Debug, Default)]
pub struct Outage {
    began: Option<Instant>,
    until: Option<Instant>,
}

impl Outage {
    /// An attempt failed that began at `began` and ended `now`. Returns for how long the host is left alone; one in
    /// whose place `others` can be asked, for longer: attempts take no more than a part of the time.
    pub fn failed(&mut self, began: Instant, now: Instant, others: bool) -> Duration {
        let since = *self.began.get_or_insert(began);
        let mut pause = (now.saturating_duration_since(since) / PART).clamp(SHORT, LONG);
        if others {
            pause = pause.max(now.saturating_duration_since(began) * PART);
        }
        self.until = Some(now + pause);
        pause
    }

    /// It has answered. Returns whether there was an outage.
    pub fn over(&mut self) -> bool {
        self.until = None;
        self.began.take().is_some()
    }

    /// Whether it fails at present.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.began.is_some()
    }

    /// Whether it is left alone now.
    #[must_use]
    pub fn rests(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| now < until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_with_the_outage_and_begin_anew_after_it() {
        let (began, ms) = (Instant::now(), Duration::from_millis);
        let mut outage = Outage::default();
        assert!(!outage.is_on() && !outage.rests(began) && !outage.over());
        assert_eq!(outage.failed(began, began, false), SHORT);
        assert!(outage.is_on() && outage.rests(began + ms(99)) && !outage.rests(began + ms(100)));
        let second = began + ms(1600);
        assert_eq!(outage.failed(second, second, false), ms(200));
        let late = began + Duration::from_secs(3600);
        assert_eq!(outage.failed(late, late, false), LONG);
        assert!(outage.over() && !outage.is_on() && !outage.rests(late));
        assert_eq!(outage.failed(late, late, false), SHORT);
    }

    #[test]
    fn a_silent_host_takes_a_part_of_the_time_of_who_can_ask_others() {
        let (began, silent) = (Instant::now(), Duration::from_secs(10));
        let mut outage = Outage::default();
        assert_eq!(outage.failed(began, began + silent, true), 8 * silent);
        assert!(outage.rests(began + 8 * silent));
        // With nobody else to ask there is nothing to lose.
        assert!(Outage::default().failed(began, began + silent, false) < silent);
    }
}
