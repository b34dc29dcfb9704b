//! A simulated link, on which time passes in steps.

use std::time::Duration;

use super::{Pace, Window};

/// A link with a queue, and a sender that keeps a limited number of bytes on their way.
pub(super) struct Link {
    pub bytes_per_s: f64,
    pub trip: Duration,
    /// Sent and not acknowledged.
    under_way: f64,
    most_under_way: f64,
    noise: u64,
}

/// Up to 1 of a sequence that is always the same.
pub(super) fn noise(state: &mut u64) -> f64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
    (*state >> 40) as f64 / (1u64 << 24) as f64
}

impl Link {
    pub fn new(bytes_per_s: f64, trip: Duration) -> Self {
        Self { bytes_per_s, trip, under_way: 0.0, most_under_way: 4e6, noise: 1 }
    }

    /// How long what is sent now queues.
    pub fn queueing(&self) -> Duration {
        let pipe = self.bytes_per_s * self.trip.as_secs_f64();
        Duration::from_secs_f64((self.under_way - pipe).max(0.0) / self.bytes_per_s)
    }

    /// Sends at this pace, bytes per second, for a step of so many seconds; how many bytes came through.
    pub fn step(&mut self, paced: f64, step: f64) -> f64 {
        // The network's own share of the link varies by a few percent.
        let noise = 1.0 - noise(&mut self.noise) * 0.04;
        self.under_way += (paced * step).min((self.most_under_way - self.under_way).max(0.0));
        let out = (self.bytes_per_s * noise * step).min(self.under_way);
        self.under_way -= out;
        out
    }

    /// A window at this pace; what was seen, and the longest that a packet queued.
    pub fn run(&mut self, pace: &Pace, limit: u64, quiet: bool) -> (Window, Duration) {
        let (step, mut delivered, mut queued) = (1e-4, 0.0, Duration::ZERO);
        let paced = pace.rate(quiet).min(limit) as f64;
        let steps = (pace.window().as_secs_f64() / step).round() as u64;
        for _ in 0..steps {
            delivered += self.step(paced, step);
            queued = queued.max(self.queueing());
        }
        let length = Duration::from_secs_f64(steps as f64 * step);
        let (round_trip, least_trip) = (self.trip + self.queueing(), self.trip);
        let delivered = delivered as u64;
        let deviation = Duration::ZERO;
        let window = Window { length, delivered, busy: true, round_trip, deviation, least_trip, lost: false, grain: 0 };
        (window, queued)
    }
}
