use super::super::simulated::Link;
use super::*;

const MS: Duration = Duration::from_millis(1);
/// A link of 1 Gbit/s, bytes per second.
const GIGABIT: f64 = 125e6;

/// A push over a simulated link, beside faults that ask for pages at a rate.
struct Session {
    push: Push,
    link: Link,
    now: Duration,
    setting: Setting,
    connections: u32,
    /// Bytes per second that faults ask for. They go before the push.
    faults: f64,
    /// The share of the time for which there is something to push.
    busy: f64,
    /// Bytes that came through: of the push, and of what faults asked for.
    came: (f64, f64),
    busy_for: Duration,
    /// Windows so far.
    windows: u32,
}

impl Session {
    fn new(known: Option<u64>, limit: Option<u64>, connections: u32) -> Self {
        let mut push = Push::new(known, limit, connections, Duration::ZERO, &Counted::default());
        let setting = push.set(false).expect("it has no pace yet");
        let link = Link::new(GIGABIT, Duration::from_micros(100));
        let (now, busy_for) = (Duration::ZERO, Duration::ZERO);
        Self { push, link, now, setting, connections, faults: 0.0, busy: 1.0, came: (0.0, 0.0), busy_for, windows: 0 }
    }

    fn counted(&self) -> Counted {
        Counted {
            acknowledged: self.came.0 as u64,
            busy: self.busy_for,
            round_trip: self.link.trip + self.link.queueing(),
            least_trip: self.link.trip,
            asked: self.came.1 as u64,
            ..Counted::default()
        }
    }

    fn paced(&self) -> f64 {
        self.setting.bytes_per_s as f64 * f64::from(self.connections)
    }

    /// Time passes on the link, and nobody looks.
    fn unseen(&mut self, time: Duration) {
        let step = Duration::from_micros(100);
        let end = self.now + time;
        while self.now < end {
            let came = self.link.step(self.paced() * self.busy + self.faults, step.as_secs_f64());
            let asked = (self.faults * step.as_secs_f64()).min(came);
            self.came = (self.came.0 + came - asked, self.came.1 + asked);
            self.busy_for += step.mul_f64(self.busy) * self.connections;
            self.now += step;
        }
    }

    fn look(&mut self) {
        if self.push.left(self.now).is_zero() {
            self.push.ends(self.now, &self.counted());
            self.windows += 1;
            self.setting = self.push.set(false).unwrap_or(self.setting);
        }
    }

    /// Time passes; the shares of the link that the push had meanwhile, and that faults had.
    fn run(&mut self, time: Duration) -> (f64, f64) {
        let (before, end) = (self.came, self.now + time);
        while self.now < end {
            self.unseen(self.push.left(self.now).max(MS / 10));
            self.look();
        }
        let of_link = |bytes: f64| bytes / GIGABIT / time.as_secs_f64();
        (of_link(self.came.0 - before.0), of_link(self.came.1 - before.1))
    }
}

#[test]
fn faults_that_take_no_more_than_the_push_leaves_take_nothing_from_it() {
    let mut session = Session::new(None, None, 4);
    session.run(2000 * MS);
    session.faults = GIGABIT * 0.06;
    session.run(1000 * MS);
    let (push, faults) = session.run(5000 * MS);
    assert!((0.82..0.95).contains(&push) && (0.055..0.065).contains(&faults), "{push:.3} and {faults:.3}");
}

#[test]
fn what_faults_take_beyond_it_the_push_gives_up_and_takes_back_when_they_end() {
    let mut session = Session::new(None, None, 4);
    session.run(2000 * MS);
    session.faults = GIGABIT * 0.4;
    session.run(2000 * MS);
    let (push, faults) = session.run(5000 * MS);
    assert!((0.45..0.62).contains(&push) && faults > 0.38, "{push:.3} and {faults:.3}");
    session.faults = 0.0;
    session.run(2000 * MS);
    let (push, _) = session.run(5000 * MS);
    assert!((0.84..0.95).contains(&push), "{push:.3}");
}

#[test]
fn however_much_faults_take_the_push_goes_on_at_a_quarter() {
    let mut session = Session::new(Some(GIGABIT as u64), None, 2);
    session.faults = GIGABIT * 0.95;
    for _ in 0..200 {
        session.unseen(session.push.left(session.now));
        session.look();
        let least = session.push.link() as f64 * LEAST_SHARE;
        assert!(session.paced() >= least - 2.0, "{} of {}", session.paced(), session.push.link());
    }
}

#[test]
fn a_limit_holds_for_all_connections_together() {
    let mut session = Session::new(None, Some(20_000_000), 4);
    for _ in 0..50 {
        assert!(session.setting.bytes_per_s <= 5_000_000, "{:?}", session.setting);
        session.run(20 * MS);
    }
    let (push, _) = session.run(1000 * MS);
    assert!((0.8..1.01).contains(&(push * GIGABIT / 20e6)), "{push:.3}: the link carries more");
    assert!(session.push.link() > 15_000_000, "the limit is not the link's");
}

#[test]
fn what_is_set_already_is_not_set_again() {
    let mut push = Push::new(Some(100_000_000), None, 2, Duration::ZERO, &Counted::default());
    let setting = push.set(false).unwrap();
    assert_eq!(setting, Setting { bytes_per_s: 45_000_000, unsent: 45_000 });
    assert_eq!(push.set(false), None);
    assert_eq!(push.set(true).unwrap().bytes_per_s, 48_500_000, "hardly any fault comes");
}

#[test]
fn what_waits_unsent_is_a_millisecond_of_each_connection_within_bounds() {
    for (rate, connections, unsent) in [(1_000_000, 1, LEAST_UNSENT), (1_000_000_000, 1, MOST_UNSENT)] {
        let mut push = Push::new(Some(rate), None, connections, Duration::ZERO, &Counted::default());
        assert_eq!(push.set(false).unwrap().unsent, unsent);
    }
}

#[test]
fn a_window_is_over_after_its_time_and_not_before() {
    let mut push = Push::new(Some(GIGABIT as u64), None, 1, MS, &Counted::default());
    let window = push.left(MS);
    assert!(window >= 20 * MS, "{window:?}");
    assert_eq!(push.left(MS), window, "the clock stands still");
    assert_eq!(push.left(Duration::ZERO), window, "the clock is behind");
    assert_eq!(push.left(MS + window - Duration::from_nanos(1)), Duration::from_nanos(1));
    assert_eq!(push.left(MS + window), Duration::ZERO, "the end in the same instant");
    assert_eq!(push.left(Duration::from_secs(3600)), Duration::ZERO);
    push.ends(Duration::from_secs(3600), &Counted::default());
    assert!(!push.left(Duration::from_secs(3600)).is_zero(), "time that was missed is not made up for");
}

#[test]
fn a_clock_that_stands_still_teaches_nothing() {
    let mut session = Session::new(None, None, 1);
    session.run(1000 * MS);
    let (link, set) = (session.push.link(), session.setting);
    for _ in 0..100 {
        session.came.0 += 1e6;
        session.came.1 += 1e6;
        let ended = session.push.ends(session.now, &session.counted());
        assert_eq!((ended.window.length, ended.asked_rate), (Duration::ZERO, 0.0));
    }
    assert_eq!(session.push.link(), link);
    assert!(session.push.set(false).is_none_or(|setting| setting == set));
}

#[test]
fn a_look_that_comes_seconds_late_takes_the_link_for_neither_faster_nor_slower() {
    let mut session = Session::new(None, None, 2);
    session.run(3000 * MS);
    for _ in 0..20 {
        session.unseen(3000 * MS);
        session.look();
        assert!((0.9..1.05).contains(&(session.push.link() as f64 / GIGABIT)), "{}", session.push.link());
    }
}

#[test]
fn connections_that_ran_dry_say_nothing_of_the_link() {
    let mut session = Session::new(None, None, 3);
    session.run(3000 * MS);
    let (link, windows) = (session.push.link(), session.windows);
    session.busy = 0.5;
    session.run(5000 * MS);
    assert!(session.windows > windows + 50);
    assert_eq!(session.push.link(), link, "half of the time there was nothing to send");
}

#[test]
fn only_what_is_new_counts_and_what_is_counted_backwards_is_nothing() {
    let before = Counted { acknowledged: 5_000_000, asked: 1_000_000, retransmitted: 7, ..Counted::default() };
    let mut push = Push::new(Some(GIGABIT as u64), None, 1, Duration::ZERO, &before);
    let rate = push.set(false).unwrap().bytes_per_s;
    let ended = push.ends(100 * MS, &Counted { acknowledged: 5_300_000, asked: 1_200_000, ..before });
    assert_eq!((ended.window.delivered, ended.window.lost), (500_000, false));
    assert_eq!((ended.paced, ended.asked_rate), (rate + 2_000_000, 2e6), "what faults asked for went, too");
    let ended = push.ends(200 * MS, &Counted { retransmitted: 8, ..Counted::default() });
    assert_eq!((ended.window.delivered, ended.window.lost), (0, true));
}
