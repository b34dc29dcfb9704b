//! Foresight: whether rounds can bring the pause down to its limit at all, judged within the first moments.
//!
//! Let *W(t)* be the number of different pages that the guest writes within a time *t*, *v* the pages that go in a
//! second, and *L* the limit for the pages' part of the pause. Each round sends what was written during the one before,
//! so rounds get shorter until one takes a time with *W(t) = v·t*, and no shorter. A page that is written twice counts
//! once, so *W* grows ever more slowly: where *W(L) > v·L*, that time is longer than *L*, and rounds never reach the
//! limit; where *W(L) < v·L*, they do. For the same reason a window of any length tells something of *L*: in it the
//! guest wrote no more than *W(L)* where it was shorter, and no more than *W(L)·t/L* where it was longer. So the guest
//! is too fast where it wrote more than *v·max(t, L)* in *any* window.
//!
//! A burst looks the same while it lasts. So what one window shows, further windows must confirm, for as long as it is
//! worth: a few percent of the time that all pages take.

use std::time::Duration;

use crate::throughput::Speed;

/// How many times as much as the link carries the guest must write to count as too fast. In between rounds may end
/// after all, because pages that are written again before their turn are skipped; or they stall.
pub const MARGIN: f64 = 1.3;
/// The least time of the first window: a shorter one shows how threads were scheduled.
pub const SHORTEST: Duration = Duration::from_millis(100);
/// The longest first window: with a limit of seconds it need not be as long as the limit.
pub const LONGEST: Duration = Duration::from_millis(500);
/// The share of the time for all pages that a guest is watched before it is given up. What was sent meanwhile is in
/// vain only where the guest has written it again.
pub const PATIENCE: f64 = 0.03;
/// Longer than this is no burst.
pub const LONGEST_BURST: Duration = Duration::from_secs(5);

/// What was seen from one collection to the next.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Window {
    /// The time between them.
    pub took: Duration,
    /// Different pages written in that time.
    pub written: u64,
    /// The speed at which pages go; `None` where too few went to tell.
    pub speed: Option<Speed>,
    /// Pages that are still to go.
    pub left: u64,
}

/// The judgement, over all windows so far. It has no clock, and knows only what it is told.
#[derive(Debug, Clone, PartialEq)]
pub struct Foresight {
    limit: Duration,
    view: View,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum View {
    /// Nothing is known yet. The window is to take no longer than this.
    Fresh(Duration),
    /// The guest was too fast in the last windows.
    Doubtful {
        /// How long it has been since the first of them ended.
        confirmed: Duration,
        /// How long the next one is to take at most.
        next: Duration,
    },
    /// Rounds may reach the limit.
    Open,
}

impl Foresight {
    /// A judgement on pauses of at most `limit`, of which the devices take `device_time`.
    #[must_use]
    pub fn new(limit: Duration, device_time: Duration) -> Self {
        let limit = limit.saturating_sub(device_time).max(Duration::from_millis(1));
        Self { limit, view: View::Fresh(limit.clamp(SHORTEST, LONGEST)) }
    }

    /// How long the next window may take; `None` where it may take as long as its round.
    #[must_use]
    pub fn window(&self) -> Option<Duration> {
        match self.view {
            View::Fresh(next) | View::Doubtful { next, .. } => Some(next),
            View::Open => None,
        }
    }

    /// Whether the guest was too fast in the last window: only further windows show whether it stays so.
    #[must_use]
    pub fn doubts(&self) -> bool {
        matches!(self.view, View::Doubtful { .. })
    }

    /// Judges a window that has ended. Returns whether the guest is too fast for good: rounds are in vain.
    pub fn step(&mut self, window: &Window) -> bool {
        let Some(speed) = window.speed else {
            // A round may be short because all its pages are skipped.
            if let View::Fresh(next) = &mut self.view
                && window.took >= *next
            {
                *next = next.saturating_mul(2);
            }
            return false;
        };
        let doubtful = match self.view {
            View::Doubtful { .. } => is_too_fast(window, &speed, window.took),
            View::Fresh(_) | View::Open => is_too_fast(window, &speed, window.took.max(self.limit)),
        };
        if !doubtful {
            self.view = View::Open;
            return false;
        }
        let confirmed = match self.view {
            View::Doubtful { confirmed, .. } => confirmed + window.took,
            View::Fresh(_) | View::Open => Duration::ZERO,
        };
        // No window is longer than the limit: the same pages would be written again in it, and count once.
        self.view = View::Doubtful { confirmed, next: confirmed.min(self.limit).max(SHORTEST) };
        // A window ends at the end of a chunk, and so a little early or late.
        let least = SHORTEST / 2;
        confirmed >= speed.time_for(window.left).mul_f64(PATIENCE).clamp(least, LONGEST_BURST)
    }
}

/// Whether the pages written in a window take longer than `time`, by the margin.
fn is_too_fast(window: &Window, speed: &Speed, time: Duration) -> bool {
    speed.time_for(window.written).as_secs_f64() > MARGIN * time.as_secs_f64()
}

#[cfg(test)]
#[path = "foresight_tests.rs"]
mod tests;
