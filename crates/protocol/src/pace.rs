//! How fast to push after the switchover: about nine tenths of what the link carries, so that a page that a fault waits
//! for finds the wire free.
//!
//! Beside a push that fills the link, an urgent page waits behind everything in the network's queues: 1 to 14 ms on 1
//! Gbit/s, against 0.04 ms beside one at nine tenths. Nobody says what the link carries, so it is measured, much as BBR
//! does (Cardwell et al., 2016): while there was more to send, the bytes that the peer acknowledged in a window of time
//! are what the link carried. At nine tenths of the link that shows nothing new, so now and then a short window tries
//! more.
//!
//! ```text
//!   Searching ──no more came through──▶ Draining ──▶ Cruising ──now and then──▶ Probing ─┐
//!       ▲                                   ▲            │ fewer came through than went  │
//!       └───────────── more came through ───┼────────────┼──────────────────────────────┤
//!                                           └────────────┴── nothing more came through ──┘
//! ```
//!
//! Fewer bytes than were paced may also come through where processors are busy with other things than sending. Then the
//! link is free, and a slower push helps nobody. Bytes that exceed the link show in the round trip, because they queue.
//! A round trip that stays long while queues drain is not caused by the push: acknowledgements wait, for example behind
//! what the guest sends from its new host. Then TCP shares the link as it always does, and a slower push would only
//! keep its window small.
//!
//! There is no clock here: the caller reports windows.

use std::time::Duration;

/// When windows end, and what faults take of the pace.
pub mod push;

/// The share of the link that is used while faults come.
const SHARE: f64 = 0.9;
/// The share that is used where hardly any faults come. It is less than 1, because the estimate of the link may be a
/// few percent too high: queues that were empty take more than the link for a while, and a full queue loses packets.
const QUIET_SHARE: f64 = 0.97;
/// The shortest window. The delays of a processor that is busy elsewhere are smaller, and so are the ticks (4 ms) in
/// which the kernel counts how long a connection was busy.
const SHORTEST_WINDOW: Duration = Duration::from_millis(20);
/// The longest window.
const LONGEST_WINDOW: Duration = Duration::from_millis(400);
/// Bytes that make a window: some hundred acknowledgements.
const WINDOW_BYTES: f64 = 256.0 * 1024.0;
/// The least number of round trips in a window. Bytes that are sent in a window are then acknowledged in it, even where
/// acknowledgements queue behind what the peer's host sends.
const WINDOW_TRIPS: u32 = 4;
/// The least length of a window in mean deviations of the round trip. An acknowledgement that comes some milliseconds
/// earlier or later falls into another window, and such errors must stay small beside the window.
const WINDOW_DEVIATIONS: u32 = 32;
/// The rate that a link is assumed to carry where nothing is known: 256 Mbit/s.
const FIRST_GUESS: f64 = 32e6;
/// The least pace, bytes per second: below it a push would never end.
const LEAST: f64 = 64.0 * 1024.0;
/// The factor by which each window of a search is faster than the last.
const SEARCH: f64 = 2.0;
/// Windows without more coming through that end a search.
const SEARCH_FAILS: u32 = 2;
/// The factor that counts as more in a search.
const MORE: f64 = 1.25;
/// The factor by which a probe is faster than the link.
const PROBE: f64 = 1.25;
/// The factor that counts as more in a probe.
const PROBE_MORE: f64 = 1.1;
/// The least time and the least number of windows between two probes.
const CRUISE: (Duration, u32) = (Duration::from_millis(500), 6);
/// The largest multiple of both. Each probe that shows nothing new doubles the multiple.
const MOST_PATIENCE: u32 = 4;
/// The pace while queues drain, as a share of the link.
const DRAIN: f64 = 0.5;
/// The factor that counts as more coming out of the queues than goes in: something is in them still.
const FULL: f64 = 1.1;
/// The most windows of draining.
const MOST_DRAIN: u32 = 64;
/// Windows in a row that come short of the pace, with a queue, until the link counts as slower.
const SHORT_WINDOWS: u32 = 3;
/// The share of the pace below which a window is short.
const SHORT: f64 = 0.93;
/// A round trip shows a queue where it exceeds the shortest by this time, and by this share of it.
const QUEUE: (Duration, f64) = (Duration::from_millis(1), 0.25);
/// The largest share by which the link counts as slower at one time.
const MOST_DROP: f64 = 0.5;
/// The weight of a single probe that shows no faster link.
const DOUBT: f64 = 0.25;

/// A window: what was seen in a time of pushing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Window {
    /// The window's length.
    pub length: Duration,
    /// Bytes that the peer acknowledged in it, of all that goes over the link.
    pub delivered: u64,
    /// Whether there was more to send all the time. If not, the window says nothing about the link.
    pub busy: bool,
    /// The round trip, smoothed.
    pub round_trip: Duration,
    /// Its mean deviation.
    pub deviation: Duration,
    /// The shortest round trip: one without queues.
    pub least_trip: Duration,
    /// Whether segments were lost.
    pub lost: bool,
    /// Bytes by which `delivered` can be wrong: an acknowledgement stands for a segment or more, and falls into this
    /// window or the next.
    pub grain: u64,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum State {
    /// Searches upwards for what the link carries.
    Searching { fails: u32 },
    /// Drains the queues for `windows` windows at most. Where the link seemed slower, `before` is the rate that it was
    /// assumed to carry before.
    Draining { windows: u32, before: Option<f64> },
    /// Goes at the share.
    Cruising(Cruise),
    /// Tries whether the link carries more.
    Probing,
}

/// What was seen since the last probe.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Cruise {
    time: Duration,
    windows: u32,
    /// Windows in a row that came short of the pace, and what came through in them, bytes per second.
    short: u32,
    sum: f64,
}

const CRUISING: State = State::Cruising(Cruise { time: Duration::ZERO, windows: 0, short: 0, sum: 0.0 });

/// The pace. The caller reports each window by `seen`.
#[derive(Debug, Clone)]
pub struct Pace {
    state: State,
    /// What the link carries as far as is known, bytes per second.
    link: f64,
    /// The multiple of the least time between probes.
    patience: u32,
    /// The least window that round trips and their deviation allow.
    steady: Duration,
    /// The round trip without a queue of our own.
    calm: Duration,
}

/// A window in bytes per second.
struct Rates<'a> {
    window: &'a Window,
    delivered: f64,
    paced: f64,
    grain: f64,
}

impl Rates<'_> {
    /// Whether less came through than went.
    fn are_short(&self) -> bool {
        self.delivered + self.grain < self.paced * SHORT
    }
}

impl Pace {
    /// A pace that begins with what the link carried before, bytes per second, where that is known.
    #[must_use]
    pub fn new(known: Option<u64>) -> Self {
        let link = known.map_or(FIRST_GUESS / SEARCH, |rate| (rate as f64).max(LEAST));
        let state = if known.is_some() { CRUISING } else { State::Searching { fails: 0 } };
        Self { state, link, patience: 1, steady: Duration::ZERO, calm: Duration::ZERO }
    }

    /// The pace of the next window, bytes per second. Where hardly any fault has come for a while (`quiet`), it is
    /// nearly all that the link is known to carry: the next fault may then wait for one frame, but for no queue.
    #[must_use]
    pub fn rate(&self, quiet: bool) -> u64 {
        let gain = match self.state {
            State::Searching { .. } => SEARCH,
            State::Draining { .. } => DRAIN,
            State::Cruising(_) if quiet => QUIET_SHARE,
            State::Cruising(_) => SHARE,
            State::Probing => PROBE,
        };
        (self.link * gain).max(LEAST) as u64
    }

    /// The length of the next window.
    #[must_use]
    pub fn window(&self) -> Duration {
        // A probe fills queues: it is short.
        let bytes = if self.state == State::Probing { WINDOW_BYTES / 4.0 } else { WINDOW_BYTES };
        let enough = Duration::from_secs_f64(bytes / self.rate(false) as f64);
        enough.max(self.steady).clamp(SHORTEST_WINDOW, LONGEST_WINDOW)
    }

    /// What the link carries as far as is known, bytes per second.
    #[must_use]
    pub fn link(&self) -> u64 {
        self.link as u64
    }

    /// Takes in a window, all of which went at `paced` bytes per second, what faults asked for included (another's
    /// limit may be below [`rate`](Self::rate)).
    pub fn seen(&mut self, window: &Window, paced: u64) {
        let seconds = window.length.as_secs_f64();
        if seconds <= 0.0 {
            return;
        }
        self.steady = (window.round_trip * WINDOW_TRIPS).max(window.deviation * WINDOW_DEVIATIONS);
        self.calm = self.calm.min(window.round_trip).max(window.least_trip);
        let delivered = window.delivered as f64 / seconds;
        if !window.busy {
            // There was too little to send to learn more than this. A probe is tried again when there is more to send.
            self.link = self.link.max(delivered);
            if matches!(self.state, State::Draining { .. }) {
                self.state = CRUISING;
            }
            return;
        }
        let rates = Rates { window, delivered, paced: paced as f64, grain: window.grain as f64 / seconds };
        self.state = match self.state {
            State::Searching { fails } => self.searched(fails, delivered),
            State::Draining { windows, before } => self.drained(windows, before, &rates),
            State::Cruising(cruise) => self.cruised(cruise, &rates),
            State::Probing => self.probed(&rates),
        };
        self.link = self.link.max(LEAST);
    }

    fn searched(&mut self, fails: u32, delivered: f64) -> State {
        let more = delivered >= self.link * MORE;
        // The rate may also fall here: the guess may have been too high.
        self.link = if more || fails + 1 >= SEARCH_FAILS { delivered } else { self.link };
        match (more, fails + 1 >= SEARCH_FAILS) {
            (true, _) => State::Searching { fails: 0 },
            (false, true) => State::Draining { windows: MOST_DRAIN, before: None },
            (false, false) => State::Searching { fails: fails + 1 },
        }
    }

    /// Whether what was sent waits in the network.
    fn queued(&self, window: &Window) -> bool {
        window.round_trip.saturating_sub(self.calm) >= QUEUE.0.max(self.calm.mul_f64(QUEUE.1))
    }

    fn drained(&mut self, windows: u32, before: Option<f64>, rates: &Rates<'_>) -> State {
        let more = State::Draining { windows: windows.saturating_sub(1), before };
        if rates.delivered - rates.grain > rates.paced * FULL && windows > 1 {
            return more;
        }
        match before {
            // Even this pace is more than goes through.
            Some(_) if rates.are_short() && windows > 1 => {
                self.link = rates.delivered.max(self.link * (1.0 - MOST_DROP));
                return more;
            }
            // None of our bytes are in the queues, and the queues are as long as before.
            Some(before) if self.queued(rates.window) => (self.link, self.calm) = (before, rates.window.round_trip),
            _ => {}
        }
        CRUISING
    }

    fn cruised(&mut self, mut cruise: Cruise, rates: &Rates<'_>) -> State {
        let window = rates.window;
        (cruise.time, cruise.windows) = (cruise.time + window.length, cruise.windows + 1);
        // No more can come through than was sent: a surplus belongs to the window before. So only a probe finds a
        // faster link.
        if rates.are_short() && (window.lost || self.queued(window)) {
            (cruise.short, cruise.sum) = (cruise.short + 1, cruise.sum + rates.delivered);
            if cruise.short >= SHORT_WINDOWS {
                let before = Some(self.link);
                // The queues are full by now, so this rate is what comes out of them.
                self.link = (cruise.sum / f64::from(SHORT_WINDOWS)).max(self.link * (1.0 - MOST_DROP));
                // Or only the acknowledgements came late: the next probe shows that at once.
                self.patience = 0;
                return State::Draining { windows: MOST_DRAIN, before };
            }
            return State::Cruising(cruise);
        }
        (cruise.short, cruise.sum) = (0, 0.0);
        let long_enough = cruise.time >= CRUISE.0 * self.patience && cruise.windows >= CRUISE.1 * self.patience;
        if long_enough { State::Probing } else { State::Cruising(cruise) }
    }

    fn probed(&mut self, rates: &Rates<'_>) -> State {
        let Rates { window, delivered, grain, .. } = *rates;
        if delivered - grain >= self.link * PROBE_MORE {
            (self.link, self.patience) = (delivered - grain, 1);
            return State::Searching { fails: 0 };
        }
        // One window may be short because a processor was busy elsewhere, or long because one before it was short.
        let seen = self.link.clamp(delivered - grain, delivered + grain);
        if seen > self.link || self.queued(window) {
            self.link += (seen - self.link) * DOUBT;
        }
        self.patience = (self.patience * 2).clamp(1, MOST_PATIENCE);
        State::Draining { windows: 1, before: None }
    }
}

#[cfg(test)]
mod simulated;
#[cfg(test)]
mod tests;
