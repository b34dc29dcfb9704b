use std::time::{Duration, Instant};

/// The most that a program makes up for after it stood still: a guest that was paused goes on, it does not burst.
const MOST_TO_MAKE_UP: Duration = Duration::from_millis(100);

/// Says how many units are due, so that over time they come at a given rate.
#[derive(Debug)]
pub struct Pace {
    per_second: f64,
    credited: Instant,
    credit: f64,
}

impl Pace {
    /// `per_second` units from `now` on; 0 means without limit.
    #[must_use]
    pub fn new(per_second: f64, now: Instant) -> Self {
        Self { per_second, credited: now, credit: 0.0 }
    }

    /// How many of at most `most` units are due at `now`.
    pub fn due(&mut self, now: Instant, most: usize) -> usize {
        if self.per_second <= 0.0 {
            return most;
        }
        let since = now.saturating_duration_since(self.credited).min(MOST_TO_MAKE_UP);
        self.credited = now;
        self.credit = (self.credit + since.as_secs_f64() * self.per_second)
            .min(self.per_second * MOST_TO_MAKE_UP.as_secs_f64() + 1.0);
        let due = (self.credit as usize).min(most);
        self.credit -= due as f64;
        due
    }
}

/// Comes round at an interval.
#[derive(Debug)]
pub struct Every {
    interval: Duration,
    last: Instant,
}

impl Every {
    /// The first interval starts `now`.
    #[must_use]
    pub fn new(interval: Duration, now: Instant) -> Self {
        Self { interval, last: now }
    }

    /// The time since the last round, once that is an interval or more.
    pub fn elapsed(&mut self, now: Instant) -> Option<Duration> {
        let since = now.saturating_duration_since(self.last);
        (since >= self.interval).then(|| {
            self.last = now;
            since
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_come_at_the_rate_asked_for() {
        let start = Instant::now();
        let mut pace = Pace::new(1000.0, start);
        let given: usize = (1..=500).map(|ms| pace.due(start + Duration::from_millis(ms), 64)).sum();
        assert!((499..=500).contains(&given), "{given} in half a second at 1000 a second");
    }

    #[test]
    fn a_long_stop_is_not_made_up_for() {
        let start = Instant::now();
        let mut pace = Pace::new(1000.0, start);
        assert_eq!(pace.due(start + Duration::from_secs(60), 10_000), 100);
    }

    #[test]
    fn no_rate_means_no_limit() {
        let start = Instant::now();
        assert_eq!(Pace::new(0.0, start).due(start, 32), 32);
    }

    #[test]
    fn an_interval_is_told_once_and_with_what_it_really_took() {
        let start = Instant::now();
        let mut every = Every::new(Duration::from_millis(100), start);
        let at = |ms| start + Duration::from_millis(ms);
        assert_eq!(every.elapsed(at(99)), None);
        assert_eq!(every.elapsed(at(130)), Some(Duration::from_millis(130)));
        assert_eq!(every.elapsed(at(131)), None);
    }
}
