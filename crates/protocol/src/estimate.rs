//! Estimates of a migration: its rounds are played through on what was seen of a guest, without moving a page.
//!
//! The guest is its working-set curve: how many different pages it writes within a time. The time of a round
//! gives the number of pages for the next one, and pre-copy's rounds depend on nothing else. Counts of one look at a
//! guest hold as long as the guest goes on as it did; a guest that changes what it does makes every estimate wrong.

use std::time::Duration;

use sterna_api::options::OnTimeout;

use crate::convergence::{Convergence, Decision, Goal, Measured};
use crate::foresight::{Foresight, Window};
use crate::throughput::Speed;

/// A round's announcement and the answer that it has arrived, seconds: no round is shorter.
const ROUND_TRIP: f64 = 0.001;
/// The most rounds that an estimate plays.
const MAX_ROUNDS: u32 = 10_000;
/// A page is held back as hot when each of this many collections yielded it: the round after them is the first to hold
/// any.
const HOT_AFTER_ROUNDS: usize = 3;

/// A curve: a value that grows with time, in straight lines between the points that were seen.
///
/// Beyond the last point it goes on as a geometric series of the growth in the last two quarters. That is exact for
/// pages written at random over a working set, whose curve is an exponential. For pages written one after another it is
/// a straight line.
#[derive(Debug, Clone, PartialEq)]
pub struct Curve {
    /// Seconds and value, both ascending, from (0, 0) on.
    points: Vec<(f64, f64)>,
    ceiling: f64,
    step: f64,
    growth: f64,
    ratio: f64,
}

impl Curve {
    /// A curve through these points (seconds since the start, and the value) that never exceeds `ceiling`. Points that
    /// are no numbers, lie before 0 or fall are corrected: a value holds until a larger one is seen.
    #[must_use]
    pub fn new(points: impl IntoIterator<Item = (f64, f64)>, ceiling: f64) -> Self {
        let ceiling = if ceiling.is_nan() { 0.0 } else { ceiling.max(0.0) };
        let mut seen: Vec<_> =
            points.into_iter().filter(|(time, value)| time.is_finite() && *time > 0.0 && value.is_finite()).collect();
        seen.sort_by(|one, other| one.0.total_cmp(&other.0));
        let mut points = vec![(0.0, 0.0)];
        for (time, value) in seen {
            let (before, least) = points[points.len() - 1];
            if time > before {
                points.push((time, value.clamp(least, ceiling.max(least))));
            }
        }
        let mut curve = Self { points, ceiling, step: 0.0, growth: 0.0, ratio: 0.0 };
        let (end, last) = curve.points[curve.points.len() - 1];
        if end > 0.0 {
            curve.step = end / 4.0;
            let (half, later) = (curve.within(end / 2.0), curve.within(end - curve.step));
            curve.growth = last - later;
            curve.ratio = if later > half { (curve.growth / (later - half)).min(1.0) } else { 1.0 };
        }
        curve
    }

    /// The value at this many seconds after the start.
    #[must_use]
    pub fn at(&self, seconds: f64) -> f64 {
        let (end, last) = self.points[self.points.len() - 1];
        if seconds <= end {
            return self.within(seconds.max(0.0));
        }
        if self.step == 0.0 {
            return last;
        }
        let steps = (seconds - end) / self.step;
        // Below this distance from a straight line the closed form would divide by almost nothing.
        let straight = 1.0 - self.ratio < 1e-9;
        let sum = if straight { steps } else { self.ratio * (1.0 - self.ratio.powf(steps)) / (1.0 - self.ratio) };
        (last + self.growth * sum).min(self.ceiling).max(last)
    }

    /// The mean value over this many seconds from the start.
    fn mean(&self, seconds: f64) -> f64 {
        const PARTS: u32 = 32;
        (0..PARTS).map(|part| self.at(seconds * (f64::from(part) + 0.5) / f64::from(PARTS))).sum::<f64>()
            / f64::from(PARTS)
    }

    fn within(&self, seconds: f64) -> f64 {
        let next = self.points.partition_point(|(time, _)| *time < seconds);
        match (next.checked_sub(1).map(|before| self.points[before]), self.points.get(next)) {
            (Some((t0, v0)), Some((t1, v1))) => v0 + (v1 - v0) * (seconds - t0) / (t1 - t0),
            (Some((_, last)), None) => last,
            (None, _) => 0.0,
        }
    }
}

/// What was seen of a guest.
#[derive(Debug, Clone, PartialEq)]
pub struct Guest {
    /// Pages that the host has given memory for, without those that the guest holds free.
    pub used_pages: u64,
    /// Share of them that hold zeros only, 0 to 1.
    pub zero_share: f64,
    /// Different pages written within a time.
    pub written: Curve,
    /// The share of the pages written in a while that is written again within a time after it, 0 to 1.
    pub again: Curve,
    /// The share of the pages written that need no body, because they hold what they held before, or zeros. 0 to 1.
    pub silent_share: f64,
}

/// When pages travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// All in the pause.
    Paused,
    /// In rounds while the guest runs at the source, the rest in the pause.
    Before,
    /// The same as far as rounds make the pause shorter. Pages for which the guest would notice it follow then, and all
    /// that is left where rounds cannot reach the limit, which is seen early in the first one.
    Auto,
    /// In `rounds` rounds while the guest runs at the source, none in the pause, the rest while it runs at the
    /// destination.
    After {
        /// The number of rounds; 0 where no page goes before.
        rounds: u32,
    },
}

/// A way to move the guest.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Way {
    /// When pages travel.
    pub order: Order,
    /// Bytes on the wire for each body, everything that travels with it included.
    pub bytes_per_body: f64,
    /// The host's time for a page, without the link, seconds: reading, digesting, encoding.
    pub seconds_per_page: f64,
    /// Whether pages written again before their turn are left out of a round, and pages written in each of the last
    /// rounds are held back.
    pub skips_rewritten: bool,
}

/// The conditions of a migration.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Terms {
    /// What the link carries, bytes per second.
    pub bytes_per_s: f64,
    /// The longest pause.
    pub downtime_limit: Duration,
    /// The time that the devices take in the pause.
    pub device_time: Duration,
    /// The time before the first page: reaching the destination and starting its VMM.
    pub setup_time: Duration,
}

/// The estimate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Prediction {
    /// From the request until the guest runs at the destination and no page is left at the source.
    pub total: Duration,
    /// From the guest's stop to its start there.
    pub downtime: Duration,
    /// Bytes of frames on the wire.
    pub bytes_on_wire: u64,
    /// Rounds, the one in the pause included where there is one.
    pub rounds: u32,
    /// Whether the pause is within the limit. If not, the other figures are those of a guest that is stopped as soon as
    /// further rounds make the pause no shorter.
    pub reaches_limit: bool,
}

/// Plays a migration through.
///
/// It is stopped when [`Convergence`] and [`Foresight`] stop it, which decide about real rounds too; or, where the
/// pause does not come within the limit, at the first stall.
#[must_use]
pub fn predict(guest: &Guest, way: &Way, terms: &Terms) -> Prediction {
    let mut played = Played { guest, way, terms, elapsed: terms.setup_time.as_secs_f64(), bytes: 0.0, rounds: 0 };
    let used = guest.used_pages as f64;
    let nonzero = 1.0 - share(guest.zero_share);
    let mut foresight = None;
    match way.order {
        Order::Paused => return played.stop(used, nonzero),
        Order::After { rounds } => return played.follow(used, nonzero, rounds),
        Order::Before => {}
        Order::Auto => {
            let rules = foresight.insert(Foresight::new(terms.downtime_limit, terms.device_time));
            if let Some(watched) = played.too_fast_after(used, nonzero, rules) {
                return played.turn_early(used, nonzero, watched);
            }
        }
    }
    let mut policy = Convergence::new(Goal {
        downtime_limit: terms.downtime_limit,
        downtime_ramp: None,
        throttle_percent: None,
        timeout: None,
        on_timeout: OnTimeout::Cancel,
        postcopy: way.order == Order::Auto,
        rounds: None,
    });
    let sent = played.sent();
    let mut took = vec![played.first(used, nonzero)];
    let mut left = guest.written.at(took[0]);
    loop {
        let written = played.window(took[took.len() - 1], left, left);
        let decision = policy.step(&Measured {
            rounds: played.rounds,
            elapsed: duration(played.elapsed),
            pages_left: left.round() as u64,
            speed: played.speed(sent),
            device_time: terms.device_time,
            speed_is_known: true,
            too_fast: foresight.as_mut().is_some_and(|rules| rules.step(&written)),
        });
        let at_least = match decision {
            Decision::Round { at_least } => at_least,
            Decision::Postcopy(_) => return played.rest_follows(used, &[(left, sent)]),
            _ => return played.stop(left, sent),
        };
        if policy.stalls() > 0 || played.rounds >= MAX_ROUNDS {
            return played.stop(left, sent);
        }
        let hot = if way.skips_rewritten { left * hot_share(&guest.again, &took) } else { 0.0 };
        let round = played.next(left - hot, at_least.as_secs_f64());
        left = guest.written.at(round) + hot * (1.0 - guest.again.at(round));
        took.push(round);
    }
}

/// The share of the last collection's pages that the collections before it yielded too.
fn hot_share(again: &Curve, took: &[f64]) -> f64 {
    if took.len() < HOT_AFTER_ROUNDS {
        0.0
    } else {
        took.iter().rev().take(HOT_AFTER_ROUNDS - 1).map(|t| again.at(*t)).product()
    }
}

fn share(value: f64) -> f64 {
    if value.is_nan() { 0.0 } else { value.clamp(0.0, 1.0) }
}

/// A migration as far as it is played.
struct Played<'a> {
    guest: &'a Guest,
    way: &'a Way,
    terms: &'a Terms,
    elapsed: f64,
    bytes: f64,
    rounds: u32,
}

impl Played<'_> {
    /// The seconds that `pages` pages take, of which the share `sent` travels as bodies.
    fn time(&self, pages: f64, sent: f64) -> f64 {
        (pages * sent * self.way.bytes_per_body / self.terms.bytes_per_s.max(1.0))
            .max(pages * self.way.seconds_per_page)
    }

    /// The share of written pages that travels as bodies.
    fn sent(&self) -> f64 {
        1.0 - share(self.guest.silent_share)
    }

    /// The speed of written pages, of which the share `sent` travels as bodies.
    fn speed(&self, sent: f64) -> Speed {
        let light = self.way.seconds_per_page.max(1e-9);
        let body = (self.way.bytes_per_body / self.terms.bytes_per_s.max(1.0)).max(light);
        Speed { bodies_per_s: 1.0 / body, light_per_s: 1.0 / light, body_share: sent }
    }

    /// The first round, over all that is in use; its time. A page the guest writes before its turn is left out.
    fn first(&mut self, used: f64, sent: f64) -> f64 {
        let written = |seconds: f64| self.guest.written.mean(seconds) / used.max(1.0);
        let left_out = self.left_out(used, sent, written);
        self.round(used * (1.0 - left_out), sent, 0.0)
    }

    /// A later round, over pages that were written; its time.
    fn next(&mut self, pages: f64, least: f64) -> f64 {
        let sent = self.sent();
        let left_out = self.left_out(pages, sent, |seconds| self.guest.again.mean(seconds));
        self.round(pages * (1.0 - left_out), sent, least)
    }

    /// The share of a round's pages that is written again before its turn, where `again` gives that share for a round
    /// of some seconds. The more pages are left out, the shorter the round; and the shorter the round, the fewer are
    /// left out. So exactly one length fits.
    fn left_out(&self, pages: f64, sent: f64, again: impl Fn(f64) -> f64) -> f64 {
        if !self.way.skips_rewritten {
            return 0.0;
        }
        let (mut short, mut long) = (0.0, self.time(pages, sent));
        for _ in 0..40 {
            let middle = (short + long) / 2.0;
            let fits = self.time(pages * (1.0 - share(again(middle))), sent);
            if fits > middle { short = middle } else { long = middle }
        }
        share(again(long))
    }

    fn round(&mut self, pages: f64, sent: f64, least: f64) -> f64 {
        let took = (self.time(pages, sent) + ROUND_TRIP).max(least);
        self.bytes += pages * sent * self.way.bytes_per_body;
        self.elapsed += took;
        self.rounds += 1;
        took
    }

    /// What is seen in this many seconds in which so many pages were written, and at whose end so many are left.
    fn window(&self, took: f64, written: f64, left: f64) -> Window {
        let speed = Some(self.speed(self.sent()));
        Window { took: duration(took), written: written.round() as u64, speed, left: left.round() as u64 }
    }

    /// After how many seconds of the first round the guest is known to be too fast, if it is: the round is cut where
    /// these rules want to see what it has written, and goes on.
    fn too_fast_after(&self, used: f64, nonzero: f64, rules: &mut Foresight) -> Option<f64> {
        let (whole, mut watched) = (self.time(used, nonzero), 0.0);
        while let Some(took) = rules.window().map(|window| window.as_secs_f64())
            && watched + took < whole
        {
            watched += took;
            let left = used * (1.0 - watched / whole);
            if rules.step(&self.window(took, self.guest.written.at(took), left)) {
                return Some(watched);
            }
        }
        None
    }

    /// Plays so many seconds of the first round; then all that is left follows the guest.
    fn turn_early(mut self, used: f64, nonzero: f64, watched: f64) -> Prediction {
        let gone = watched / self.time(used, nonzero);
        let took = self.round(used * gone, nonzero, 0.0);
        let (written_again, sent) = (self.guest.written.at(took) * gone, self.sent());
        self.rest_follows(used, &[(used * (1.0 - gone), nonzero), (written_again, sent)])
    }

    /// Plays `rounds` rounds; then the other pages follow the guest.
    fn follow(mut self, used: f64, nonzero: f64, rounds: u32) -> Prediction {
        let (mut left, mut sent) = (used, nonzero);
        for round in 0..rounds.min(MAX_ROUNDS) {
            let took = if round == 0 { self.first(left, sent) } else { self.next(left, 0.0) };
            // Pages that a round left out as written again are among the written pages.
            (left, sent) = (self.guest.written.at(took), self.sent());
        }
        self.rest_follows(used, &[(left, sent)])
    }

    /// The guest starts at the destination, and these pages follow it, each part with the share of it that travels as
    /// bodies. The devices go in the pause, and the map of missing pages, which has at most a bit for each page. How
    /// long the guest then waits for single pages is not part of the pause, and depends on what it touches.
    fn rest_follows(mut self, used: f64, parts: &[(f64, f64)]) -> Prediction {
        let after: f64 = parts.iter().map(|(pages, sent)| self.time(*pages, *sent)).sum();
        let bodies: f64 = parts.iter().map(|(pages, sent)| pages * sent).sum();
        let map_bytes = used / 8.0;
        let map = map_bytes / self.terms.bytes_per_s.max(1.0) + ROUND_TRIP;
        let pause = map + self.terms.device_time.as_secs_f64();
        self.bytes += map_bytes + bodies * self.way.bytes_per_body;
        Prediction {
            total: duration(self.elapsed + pause + after),
            downtime: duration(pause),
            bytes_on_wire: self.bytes as u64,
            rounds: self.rounds,
            reaches_limit: pause <= self.terms.downtime_limit.as_secs_f64(),
        }
    }

    /// The last round, with the guest stopped.
    fn stop(mut self, pages: f64, sent: f64) -> Prediction {
        let pause = self.time(pages, sent) + self.terms.device_time.as_secs_f64();
        self.bytes += pages * sent * self.way.bytes_per_body;
        Prediction {
            total: duration(self.elapsed + pause),
            downtime: duration(pause),
            bytes_on_wire: self.bytes as u64,
            rounds: self.rounds + 1,
            reaches_limit: pause <= self.terms.downtime_limit.as_secs_f64(),
        }
    }
}

/// A duration of this many seconds, at most a billion, which is more than thirty years.
fn duration(seconds: f64) -> Duration {
    Duration::from_secs_f64(if seconds.is_nan() { 1e9 } else { seconds.clamp(0.0, 1e9) })
}

#[cfg(test)]
#[path = "estimate_tests.rs"]
mod tests;
