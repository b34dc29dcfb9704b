//! The speed of pages, from the rounds so far, and the time that the rest would take.

use std::time::Duration;

/// The least number of bodies in a round that measures the link. In a smaller round the delays of the network and of
/// threads outweigh the sending.
pub const MEASURABLE_PAGES: u64 = 1024;
/// The speed that a link is assumed to have before anything was measured: a tenth of 1 Gbit/s.
const UNKNOWN_BODIES_PER_S: f64 = 3_000.0;
/// The speed that pages without a body are assumed to have before it was measured: reading and digesting one takes
/// about 1 µs.
const UNKNOWN_LIGHT_PER_S: f64 = 1e6;
/// Pages without a body are timed in rounds that have this many times as many of them as bodies.
const MOSTLY_LIGHT: u64 = 16;
/// The time of sending after which a round counts half, because links and guests change.
const HALF_LIFE: Duration = Duration::from_secs(5);

/// The figures of one round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sample {
    /// Pages that went as a body, whatever its encoding.
    pub bodies: u64,
    /// Pages that were read and needed no body: zeros, holes, unchanged.
    pub light: u64,
    /// Whether all these pages were written since tracking was armed. This is false for the first round, which sends
    /// everything.
    pub rewritten: bool,
    /// The time from the round's beginning until all of it had arrived. (The time until the last byte was handed to the
    /// kernel says nothing: the sockets' buffers hold megabytes.)
    pub took: Duration,
}

/// The speed of pages.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Speed {
    /// Pages with a body, per second.
    pub bodies_per_s: f64,
    /// Pages without a body, per second.
    pub light_per_s: f64,
    /// The share of the pages written during a round that needs a body, 0 to 1.
    pub body_share: f64,
}

impl Speed {
    /// The time that this many pages take.
    #[must_use]
    pub fn time_for(&self, pages: u64) -> Duration {
        if pages == 0 {
            return Duration::ZERO;
        }
        let share = self.body_share.clamp(0.0, 1.0);
        let page = share / self.bodies_per_s.max(1.0) + (1.0 - share) / self.light_per_s.max(1.0);
        // NaN, which no caller passes, counts as 0 here.
        Duration::from_secs_f64((pages as f64 * page).clamp(0.0, 1e9))
    }
}

/// The speed over all rounds so far; older rounds count less.
///
/// Rounds below [`MEASURABLE_PAGES`] count only as long as there was none above, so that a guest whose pages are nearly
/// all skipped still has a figure.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Throughput {
    large: Sum,
    small: Sum,
    light: Sum,
    rewritten: Mix,
}

/// Pages and the time they took.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Sum {
    pages: f64,
    seconds: f64,
}

impl Sum {
    fn add(&mut self, pages: f64, seconds: f64) {
        let kept = remembered(seconds);
        self.pages = self.pages * kept + pages;
        self.seconds = self.seconds * kept + seconds;
    }

    fn per_s(&self) -> Option<f64> {
        (self.pages > 0.0 && self.seconds > 0.0).then(|| self.pages / self.seconds)
    }
}

/// Pages with and without a body.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Mix {
    bodies: f64,
    all: f64,
}

/// The weight of earlier rounds after this many seconds of sending.
fn remembered(seconds: f64) -> f64 {
    (-seconds / HALF_LIFE.as_secs_f64()).exp2()
}

impl Throughput {
    /// Takes in a round.
    pub fn add(&mut self, sample: Sample) {
        let (bodies, light, seconds) = (sample.bodies as f64, sample.light as f64, sample.took.as_secs_f64());
        let speed = self.speed();
        if sample.light >= MEASURABLE_PAGES && sample.light >= sample.bodies.saturating_mul(MOSTLY_LIGHT) {
            let sending = bodies / speed.bodies_per_s;
            self.light.add(light, (seconds - sending).max(seconds / 2.0));
        } else if sample.bodies > 0 {
            // Threads read and send at the same time: at most half of a round is taken for the pages without a body.
            let sending = (seconds - light / speed.light_per_s).max(seconds / 2.0);
            let sum = if sample.bodies >= MEASURABLE_PAGES { &mut self.large } else { &mut self.small };
            sum.add(bodies, sending);
        }
        if sample.rewritten {
            let kept = remembered(seconds);
            self.rewritten.bodies = self.rewritten.bodies * kept + bodies;
            self.rewritten.all = self.rewritten.all * kept + bodies + light;
        }
    }

    /// The speed, where rounds have shown that of the link.
    #[must_use]
    pub fn known(&self) -> Option<Speed> {
        self.large.per_s().map(|_| self.speed())
    }

    /// The speed by all rounds so far. Pages written since count as bodies until rounds have shown otherwise.
    #[must_use]
    pub fn speed(&self) -> Speed {
        let Mix { bodies, all } = self.rewritten;
        Speed {
            bodies_per_s: self.large.per_s().or(self.small.per_s()).unwrap_or(UNKNOWN_BODIES_PER_S),
            light_per_s: self.light.per_s().unwrap_or(UNKNOWN_LIGHT_PER_S),
            body_share: if all >= MEASURABLE_PAGES as f64 { bodies / all } else { 1.0 },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(bodies: u64, light: u64, ms: u64) -> Sample {
        Sample { bodies, light, rewritten: true, took: Duration::from_millis(ms) }
    }

    fn assert_about(measured: f64, expected: f64) {
        assert!((measured / expected - 1.0).abs() < 0.05, "{measured} is not about {expected}");
    }

    #[test]
    fn a_small_round_does_not_spoil_what_large_ones_measured() {
        let mut throughput = Throughput::default();
        throughput.add(sample(30_000, 0, 1000));
        throughput.add(sample(3, 0, 50));
        assert_about(throughput.speed().bodies_per_s, 30_000.0);
    }

    #[test]
    fn a_guest_whose_rounds_are_all_small_has_a_figure() {
        let mut throughput = Throughput::default();
        (0..10).for_each(|_| throughput.add(sample(300, 0, 10)));
        assert_about(throughput.speed().bodies_per_s, 30_000.0);
    }

    #[test]
    fn a_link_that_slows_down_is_believed_after_some_seconds() {
        let mut throughput = Throughput::default();
        throughput.add(sample(300_000, 0, 10_000));
        (0..6).for_each(|_| throughput.add(sample(15_000, 0, 5_000)));
        assert_about(throughput.speed().bodies_per_s, 3_000.0 * 1.15);
    }

    #[test]
    fn pages_without_a_body_go_quicker_and_count_in_the_time_predicted() {
        let mut throughput = Throughput::default();
        throughput.add(Sample { rewritten: false, ..sample(30_000, 100, 1000) });
        (0..4).for_each(|_| throughput.add(sample(0, 200_000, 500)));
        assert_about(throughput.speed().light_per_s, 400_000.0);
        assert_about(throughput.speed().time_for(400_000).as_secs_f64(), 1.0);
        // Half of them have a body now, which takes as long as ever.
        (0..60).for_each(|_| throughput.add(sample(15_000, 15_000, 537)));
        assert_about(throughput.speed().bodies_per_s, 30_000.0);
        assert_about(throughput.speed().time_for(60_000).as_secs_f64(), 1.075);
    }

    #[test]
    fn the_first_rounds_mix_says_nothing_of_what_is_written_later() {
        let mut throughput = Throughput::default();
        throughput.add(Sample { rewritten: false, ..sample(2_000, 60_000, 100) });
        assert_eq!(throughput.speed().body_share, 1.0);
    }

    #[test]
    fn nothing_measured_is_no_division_by_zero() {
        let mut throughput = Throughput::default();
        throughput.add(sample(0, 0, 0));
        throughput.add(sample(5, 0, 0));
        assert_eq!(throughput.speed().time_for(0), Duration::ZERO);
        assert_eq!(throughput.speed().time_for(3_000), Duration::from_secs(1));
        assert!(throughput.speed().time_for(u64::MAX) >= Duration::from_secs(1_000_000));
    }
}
