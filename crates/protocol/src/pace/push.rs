//! The pace of a push beside faults: when a window ends, what it says, and how fast the next one goes.
//!
//! The pages that faults ask for share the link with the push. They have the part that the push leaves, and what they
//! take beyond it, the push gives up. They are counted as delivered, so that they never make the link look slow.
//!
//! There is no clock here: the caller says what time it is, counted from any moment that stays the same.

use std::time::Duration;

use super::{Pace, SHARE, Window};

/// What may wait unsent is what goes in this time.
const UNSENT: Duration = Duration::from_millis(1);
/// At least two frames' headers and half their bodies, so that the connection does not run dry.
const LEAST_UNSENT: u32 = 32 << 10;
/// At most what was measured to keep an urgent page waiting little.
const MOST_UNSENT: u32 = 128 << 10;

/// The share of a window for which there must have been something to send, for it to say what the link carries. The
/// kernel counts in ticks.
const BUSY: f64 = 0.75;
/// How much the latest window counts for what faults take of the link.
const LATEST: f64 = 0.3;
/// The push goes on at that share of the link at least, whatever faults take.
const LEAST_SHARE: f64 = 0.25;

/// What was counted so far, of all connections of a push together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counted {
    /// Bytes that the peer acknowledged.
    pub acknowledged: u64,
    /// For how long there was something to send, summed over the connections.
    pub busy: Duration,
    /// The longest smoothed round trip of any connection.
    pub round_trip: Duration,
    /// The largest mean deviation of any.
    pub deviation: Duration,
    /// The shortest round trip that any had.
    pub least_trip: Duration,
    /// Segments sent again.
    pub retransmitted: u64,
    /// A segment of each connection, bytes.
    pub grain: u64,
    /// Bytes that went because faults asked for them, on another connection.
    pub asked: u64,
}

/// What every connection of a push is set to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setting {
    /// Its pace, bytes per second.
    pub bytes_per_s: u64,
    /// The most bytes that wait in it unsent.
    pub unsent: u32,
}

/// A window that has ended, and at what it went.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ended {
    /// What was seen in it.
    pub window: Window,
    /// The pace of all that went, bytes per second, what faults asked for included.
    pub paced: u64,
    /// What faults asked for, bytes per second.
    pub asked_rate: f64,
}

/// The pace of one session's push.
#[derive(Debug, Clone)]
pub struct Push {
    pace: Pace,
    connections: u32,
    limit: Option<u64>,
    /// What all connections are set to together, bytes per second, and whether they must be set anew.
    paced: u64,
    to_set: bool,
    /// What faults took of late, bytes per second.
    asked_rate: f64,
    /// When the window began, and what had been counted then.
    since: Duration,
    before: Counted,
}

impl Push {
    /// Over so many connections, at what the link is `known` to carry, where that is known, and never at more than the
    /// `limit`; both in bytes per second. The first window begins now.
    #[must_use]
    pub fn new(known: Option<u64>, limit: Option<u64>, connections: u32, now: Duration, counted: &Counted) -> Self {
        let pace = Pace::new(known);
        Self { pace, connections, limit, paced: 0, to_set: true, asked_rate: 0.0, since: now, before: *counted }
    }

    /// Goes on over so many connections, those that have something to send, within this limit, and is set anew.
    pub fn share_among(&mut self, connections: u32, limit: Option<u64>) {
        if (self.connections, self.limit) != (connections.max(1), limit) {
            (self.connections, self.limit) = (connections.max(1), limit);
            self.to_set = true;
        }
    }

    /// How long the window has been going on.
    #[must_use]
    pub fn length(&self, now: Duration) -> Duration {
        now.saturating_sub(self.since)
    }

    /// How long the window goes on; nothing where it is over.
    #[must_use]
    pub fn left(&self, now: Duration) -> Duration {
        self.pace.window().saturating_sub(self.length(now))
    }

    /// Takes in what was counted in the window that ends now, and begins the next.
    pub fn ends(&mut self, now: Duration, counted: &Counted) -> Ended {
        let before = std::mem::replace(&mut self.before, *counted);
        let length = now.saturating_sub(std::mem::replace(&mut self.since, now));
        let asked = counted.asked.saturating_sub(before.asked);
        let asked_rate = if length.is_zero() { 0.0 } else { asked as f64 / length.as_secs_f64() };
        self.asked_rate += (asked_rate - self.asked_rate) * LATEST;
        let window = Window {
            length,
            delivered: counted.acknowledged.saturating_sub(before.acknowledged) + asked,
            // A host whose processors are busy elsewhere lets its connections run dry: then the window says nothing of
            // the link.
            busy: counted.busy.saturating_sub(before.busy) >= length.mul_f64(BUSY) * self.connections,
            round_trip: counted.round_trip,
            deviation: counted.deviation,
            least_trip: counted.least_trip,
            lost: counted.retransmitted > before.retransmitted,
            grain: counted.grain,
        };
        let paced = self.paced + asked_rate as u64;
        self.pace.seen(&window, paced);
        Ended { window, paced, asked_rate }
    }

    /// What faults may take of the link before the push gives something up, bytes per second: the tenth that the push
    /// leaves.
    #[must_use]
    pub fn spare(&self) -> u64 {
        spare_of(self.pace.link() as f64) as u64
    }

    /// What each connection is to be set to from now on; `None` where that is what it was set to before. `quiet` as in
    /// [`Pace::rate`].
    pub fn set(&mut self, quiet: bool) -> Option<Setting> {
        let link = self.pace.link() as f64;
        let beyond = (self.asked_rate - spare_of(link)).max(0.0);
        let rate = (self.pace.rate(quiet) as f64 - beyond).max(link * LEAST_SHARE) as u64;
        let rate = rate.min(self.limit.unwrap_or(u64::MAX));
        if rate == self.paced && !self.to_set {
            return None;
        }
        (self.paced, self.to_set) = (rate, false);
        let each = self.each();
        let unsent = (each as f64 * UNSENT.as_secs_f64()) as u32;
        Some(Setting { bytes_per_s: each, unsent: unsent.clamp(LEAST_UNSENT, MOST_UNSENT) })
    }

    /// What each connection is set to, bytes per second.
    #[must_use]
    pub fn each(&self) -> u64 {
        self.paced / u64::from(self.connections.max(1))
    }

    /// What the link carries as far as is known, bytes per second.
    #[must_use]
    pub fn link(&self) -> u64 {
        self.pace.link()
    }
}

/// The part of a link that the push leaves to faults.
fn spare_of(link: f64) -> f64 {
    link * (1.0 - SHARE)
}

#[cfg(test)]
#[path = "push_tests.rs"]
mod tests;
