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

/// The share of the link that is used while faults come.
pub const SHARE: f64 = 0.9;
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
mod tests {
    use super::*;

    /// A link with a queue, and a sender that keeps a limited number of bytes on their way.
    struct Link {
        bytes_per_s: f64,
        trip: Duration,
        /// Sent and not acknowledged.
        under_way: f64,
        most_under_way: f64,
        noise: u64,
    }

    /// Up to 1 of a sequence that is always the same.
    fn noise(state: &mut u64) -> f64 {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (*state >> 40) as f64 / (1u64 << 24) as f64
    }

    impl Link {
        fn new(bytes_per_s: f64, trip: Duration) -> Self {
            Self { bytes_per_s, trip, under_way: 0.0, most_under_way: 4e6, noise: 1 }
        }

        fn queueing(&self) -> Duration {
            let pipe = self.bytes_per_s * self.trip.as_secs_f64();
            Duration::from_secs_f64((self.under_way - pipe).max(0.0) / self.bytes_per_s)
        }

        /// A window at this pace; what was seen, and the longest that a packet queued.
        fn run(&mut self, pace: &Pace, limit: u64, quiet: bool) -> (Window, Duration) {
            let (step, mut delivered, mut queued) = (1e-4, 0.0, Duration::ZERO);
            let paced = pace.rate(quiet).min(limit) as f64;
            let steps = (pace.window().as_secs_f64() / step).round() as u64;
            for _ in 0..steps {
                // The network's own share of the link varies by a few percent.
                let noise = 1.0 - noise(&mut self.noise) * 0.04;
                self.under_way += (paced * step).min((self.most_under_way - self.under_way).max(0.0));
                let out = (self.bytes_per_s * noise * step).min(self.under_way);
                self.under_way -= out;
                delivered += out;
                queued = queued.max(self.queueing());
            }
            let length = Duration::from_secs_f64(steps as f64 * step);
            let (round_trip, least_trip) = (self.trip + self.queueing(), self.trip);
            let delivered = delivered as u64;
            let deviation = Duration::ZERO;
            let window =
                Window { length, delivered, busy: true, round_trip, deviation, least_trip, lost: false, grain: 0 };
            (window, queued)
        }
    }

    /// Goes on for `seconds`. Returns the used share of the link, and the share of the time with a queue of more than a
    /// millisecond.
    fn run(pace: &mut Pace, link: &mut Link, seconds: f64, quiet: bool) -> (f64, f64) {
        let (mut time, mut delivered, mut queued) = (0.0, 0.0, 0.0);
        while time < seconds {
            let paced = pace.rate(quiet);
            let (window, queue) = link.run(pace, u64::MAX, quiet);
            pace.seen(&window, paced);
            let length = window.length.as_secs_f64();
            time += length;
            delivered += window.delivered as f64;
            queued += if queue > Duration::from_millis(1) { length } else { 0.0 };
        }
        (delivered / time / link.bytes_per_s, queued / time)
    }

    const LINKS: [f64; 5] = [12.5e6, 31e6, 125e6, 312e6, 1.25e9];

    #[test]
    fn any_link_is_known_within_a_second_and_then_used_to_nine_tenths() {
        for bytes_per_s in LINKS {
            for trip_us in [50, 1000, 5000] {
                let (mut pace, mut link) = (Pace::new(None), Link::new(bytes_per_s, Duration::from_micros(trip_us)));
                run(&mut pace, &mut link, 1.0, false);
                let (used, queued) = run(&mut pace, &mut link, 4.0, false);
                assert!((0.84..0.95).contains(&used), "{bytes_per_s} B/s, {trip_us} us: {used:.3} used");
                assert!(queued < 0.12, "{bytes_per_s} B/s, {trip_us} us: a queue {queued:.3} of the time");
            }
        }
    }

    #[test]
    fn where_no_fault_comes_nearly_all_of_the_link_is_used() {
        for bytes_per_s in LINKS {
            let (mut pace, mut link) = (Pace::new(None), Link::new(bytes_per_s, Duration::from_micros(100)));
            run(&mut pace, &mut link, 1.0, true);
            let (used, _) = run(&mut pace, &mut link, 4.0, true);
            assert!(used > 0.94, "{bytes_per_s} B/s: {used:.3}");
        }
    }

    #[test]
    fn a_link_that_becomes_slower_or_faster_is_followed() {
        let (mut pace, mut link) = (Pace::new(None), Link::new(125e6, Duration::from_micros(100)));
        run(&mut pace, &mut link, 1.0, false);
        for bytes_per_s in [12.5e6, 125e6, 60e6, 1.25e9, 100e6] {
            link.bytes_per_s = bytes_per_s;
            run(&mut pace, &mut link, 3.0, false);
            let (used, queued) = run(&mut pace, &mut link, 3.0, false);
            assert!((0.84..0.96).contains(&used) && queued < 0.15, "{bytes_per_s} B/s: {used:.3}, {queued:.3}");
        }
    }

    #[test]
    fn a_wrong_guess_is_corrected() {
        for guess in [1_000, 10_000_000, 10_000_000_000] {
            let (mut pace, mut link) = (Pace::new(Some(guess)), Link::new(125e6, Duration::from_micros(100)));
            run(&mut pace, &mut link, 8.0, false);
            let (used, _) = run(&mut pace, &mut link, 3.0, false);
            assert!((0.84..0.95).contains(&used), "guess {guess}: {used:.3}");
        }
    }

    #[test]
    fn a_push_that_had_nothing_to_send_says_nothing_of_the_link() {
        let (mut pace, mut link) = (Pace::new(None), Link::new(125e6, Duration::from_micros(100)));
        run(&mut pace, &mut link, 1.0, false);
        let before = pace.link();
        for _ in 0..1000 {
            let idle = Window { delivered: 1000, busy: false, ..link.run(&pace, u64::MAX, false).0 };
            let paced = pace.rate(false);
            pace.seen(&idle, paced);
        }
        assert_eq!(pace.link(), before);
    }

    #[test]
    fn a_link_that_carries_nothing_for_a_while_does_not_starve_the_push_for_ever() {
        let (mut pace, mut link) = (Pace::new(None), Link::new(125e6, Duration::from_micros(100)));
        run(&mut pace, &mut link, 1.0, false);
        let trip = Duration::from_micros(100);
        let dead = Window {
            length: SHORTEST_WINDOW,
            delivered: 0,
            busy: true,
            round_trip: trip,
            deviation: Duration::ZERO,
            least_trip: trip,
            lost: true,
            grain: 0,
        };
        for _ in 0..500 {
            let paced = pace.rate(false);
            pace.seen(&dead, paced);
        }
        assert!(pace.rate(false) >= LEAST as u64);
        run(&mut pace, &mut link, 10.0, false);
        let (used, _) = run(&mut pace, &mut link, 3.0, false);
        assert!(used > 0.84, "{used:.3}");
    }

    #[test]
    fn acknowledgements_that_come_in_lumps_do_not_talk_the_link_down() {
        // Four connections over loopback: each segment has 64 KiB, as much as a quarter of a window.
        let lump = 256 << 10;
        let (mut pace, mut link) = (Pace::new(Some(24_000_000)), Link::new(24e6, Duration::from_micros(50)));
        let (mut seconds, mut acknowledged, mut least) = (0.0, 0, u64::MAX);
        while seconds < 10.0 {
            let paced = pace.rate(false);
            let (window, _) = link.run(&pace, u64::MAX, false);
            acknowledged += window.delivered;
            let delivered = acknowledged / lump * lump;
            acknowledged -= delivered;
            pace.seen(&Window { delivered, grain: lump, ..window }, paced);
            seconds += window.length.as_secs_f64();
            least = least.min(pace.link());
        }
        assert!(least > 20_000_000, "{least}");
    }

    #[test]
    fn acknowledgements_held_up_by_a_busy_processor_do_not_make_the_link_look_faster() {
        let (mut pace, mut link) = (Pace::new(Some(119_000_000)), Link::new(119e6, Duration::from_micros(100)));
        let (mut seconds, mut held, mut random, mut queued) = (0.0, 0, 1u64, 0.0);
        while seconds < 20.0 {
            let paced = pace.rate(false);
            let (window, queue) = link.run(&pace, u64::MAX, false);
            // Up to two milliseconds' worth comes with the next window.
            let late = (noise(&mut random) * 238_000.0) as u64;
            let delivered = window.delivered + std::mem::replace(&mut held, late) - late;
            pace.seen(&Window { delivered, ..window }, paced);
            seconds += window.length.as_secs_f64();
            queued += if queue > Duration::from_millis(1) { window.length.as_secs_f64() } else { 0.0 };
        }
        assert!(queued < 3.0, "a queue for {queued:.1} s of {seconds:.1}");
        assert!((110_000_000..124_000_000).contains(&pace.link()), "{}", pace.link());
    }

    #[test]
    fn acknowledgements_that_queue_behind_what_the_guest_sends_do_not_starve_the_push() {
        let (mut pace, mut link) = (Pace::new(Some(119_000_000)), Link::new(119e6, Duration::from_micros(100)));
        let (mut seconds, mut held, mut random, mut sum) = (0.0, 0, 1u64, 0);
        while seconds < 20.0 {
            let paced = pace.rate(false);
            let (window, _) = link.run(&pace, u64::MAX, false);
            sum += window.delivered;
            // Up to ten milliseconds' worth come with the next window.
            let late = (window.delivered as f64 / window.length.as_secs_f64() * 0.01 * noise(&mut random)) as u64;
            let delivered = window.delivered + std::mem::replace(&mut held, late) - late;
            let (round_trip, deviation) = (Duration::from_millis(5), Duration::from_micros(2500));
            pace.seen(&Window { delivered, round_trip, deviation, ..window }, paced);
            seconds += window.length.as_secs_f64();
        }
        let used = sum as f64 / seconds / 119e6;
        assert!(used > 0.8, "{used:.3}");
    }

    #[test]
    fn a_window_that_others_queues_keep_small_is_left_to_tcp() {
        let (mut pace, mut link) = (Pace::new(Some(119_000_000)), Link::new(119e6, Duration::from_micros(100)));
        for _ in 0..200 {
            let paced = pace.rate(false);
            // 270 KB on their way at most, and nine milliseconds for each.
            let (window, _) = link.run(&pace, 30_000_000, false);
            let (round_trip, deviation) = (Duration::from_millis(9), Duration::from_millis(1));
            pace.seen(&Window { round_trip, deviation, ..window }, paced);
        }
        assert!(pace.link() > 60_000_000, "{}", pace.link());
    }

    #[test]
    fn a_sender_that_is_slow_itself_does_not_make_the_link_look_slow() {
        let (mut pace, mut link) = (Pace::new(Some(119_000_000)), Link::new(119e6, Duration::from_micros(100)));
        for _ in 0..200 {
            let paced = pace.rate(false);
            let (window, _) = link.run(&pace, paced * 4 / 5, false);
            pace.seen(&window, paced);
        }
        assert!(pace.link() > 100_000_000, "{}", pace.link());
    }

    #[test]
    fn a_limit_from_elsewhere_is_not_taken_for_the_link_being_slow() {
        let (mut pace, mut link) = (Pace::new(None), Link::new(125e6, Duration::from_micros(100)));
        run(&mut pace, &mut link, 1.0, false);
        for _ in 0..200 {
            let paced = pace.rate(false).min(20_000_000);
            let (window, _) = link.run(&pace, paced, false);
            pace.seen(&window, paced);
        }
        assert!(pace.link() > 15_000_000, "{}", pace.link());
    }
}
