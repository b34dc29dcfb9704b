//! The pace of the push: `Pace` decides, the kernel's `SO_MAX_PACING_RATE` enforces it, and `TCP_INFO` says how much
//! came through (tcp(7), socket(7)).
//!
//! Few bytes wait unsent in the sockets (`TCP_NOTSENT_LOWAT`), because they were chosen before the latest fault.

use std::net::TcpStream;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use sterna_protocol::pace::{Pace, SHARE, Window};
use sterna_sys::socket::{TcpInfo, set_notsent_lowat, set_pacing_rate};

use super::work::Work;
use crate::error::MigrateError;
use crate::source::stream::Stream;

/// The bytes that may wait unsent are those that go in this time.
const UNSENT: Duration = Duration::from_millis(1);
/// The fewest bytes that may wait unsent: two frames' headers and half their bodies, so that the connection does not
/// run dry.
const LEAST_UNSENT: u32 = 32 << 10;
/// The most bytes that may wait unsent: by measurement, an urgent page waits little behind them.
const MOST_UNSENT: u32 = 128 << 10;

/// The share of a window during which a connection must have had bytes to send, so that the window tells the link's
/// speed. The kernel counts in ticks.
const BUSY: f64 = 0.75;
/// The weight of the latest window in the link's share that faults take.
const LATEST: f64 = 0.3;
/// The least share of the link that the push keeps, whatever faults take.
const LEAST_SHARE: f64 = 0.25;

/// The pace of one session's push.
pub struct Pacing<'a> {
    work: &'a Work,
    sockets: Vec<TcpStream>,
    pace: Pace,
    paced: u64,
    acknowledged: u64,
    busy: Duration,
    retransmitted: u64,
    /// The bytes of requested pages: in all, and per second of late.
    asked: (u64, f64),
    since: Instant,
}

/// The kernel's figures for all connections together.
#[derive(Default)]
struct Seen {
    /// Bytes acknowledged so far.
    acknowledged: u64,
    /// How long there were bytes to send.
    busy_time: Duration,
    /// The longest round trip, the largest variation of one, and the shortest round trip of any.
    round_trip: Duration,
    deviation: Duration,
    least_trip: Duration,
    /// Segments sent again so far.
    retransmitted: u64,
    /// The sum of one segment of each connection.
    grain: u64,
}

impl<'a> Pacing<'a> {
    /// The pace over these connections, within the limit of `work`. It begins at their known speed, where there is one.
    ///
    /// # Errors
    /// No descriptor left, or the kernel does not pace.
    pub fn new(streams: &[Stream], known: Option<u64>, work: &'a Work) -> Result<Self, MigrateError> {
        let sockets = streams.iter().map(|stream| stream.connection().socket().try_clone());
        let sockets = sockets.collect::<Result<_, _>>().map_err(MigrateError::host("setting the pace of the push"))?;
        let pace = Pace::new(known);
        let since = Instant::now();
        let (busy, asked) = (Duration::ZERO, (work.tally.asked(), 0.0));
        let mut pacing = Self { work, sockets, pace, paced: 0, acknowledged: 0, busy, retransmitted: 0, asked, since };
        let Seen { acknowledged, busy_time, retransmitted, .. } = pacing.look()?;
        (pacing.acknowledged, pacing.busy, pacing.retransmitted) = (acknowledged, busy_time, retransmitted);
        pacing.set(false)?;
        Ok(pacing)
    }

    /// How long until the next [`step`](Self::step).
    #[must_use]
    pub fn window(&self) -> Duration {
        self.pace.window().saturating_sub(self.since.elapsed())
    }

    /// Counts what came through, and sets the pace of the next window where this one is over.
    ///
    /// # Errors
    /// The kernel gives no figures, or does not pace.
    pub fn step(&mut self, quiet: bool) -> Result<(), MigrateError> {
        if !self.window().is_zero() {
            return Ok(());
        }
        let Seen { acknowledged, busy_time, round_trip, deviation, least_trip, retransmitted, grain } = self.look()?;
        let length = self.since.elapsed();
        let asked = self.work.tally.asked();
        let new_asked = asked.saturating_sub(self.asked.0);
        let asked_rate = new_asked as f64 / length.as_secs_f64();
        self.asked = (asked, self.asked.1 + (asked_rate - self.asked.1) * LATEST);
        let delivered = acknowledged.saturating_sub(self.acknowledged) + new_asked;
        // A host whose processors are busy elsewhere lets its connections run dry: then the window says nothing about
        // the link.
        let busy = busy_time.saturating_sub(self.busy) >= length.mul_f64(BUSY) * self.sockets.len() as u32;
        let lost = retransmitted > self.retransmitted;
        (self.since, self.acknowledged, self.busy, self.retransmitted) =
            (Instant::now(), acknowledged, busy_time, retransmitted);
        let paced = self.paced + asked_rate as u64;
        let window = Window { length, delivered, busy, round_trip, deviation, least_trip, lost, grain };
        tracing::debug!(?window, paced, asked_rate, link = self.pace.link(), "a window of the push");
        self.pace.seen(&window, paced);
        self.set(quiet)
    }

    fn look(&self) -> Result<Seen, MigrateError> {
        let mut seen = Seen { least_trip: Duration::MAX, ..Seen::default() };
        for socket in &self.sockets {
            let info = TcpInfo::of(socket).map_err(MigrateError::kernel("looking at the pace of the push"))?;
            seen.acknowledged += info.acknowledged_bytes;
            seen.busy_time += info.busy;
            seen.round_trip = seen.round_trip.max(info.round_trip);
            seen.deviation = seen.deviation.max(info.round_trip_deviation);
            seen.least_trip = seen.least_trip.min(info.least_round_trip);
            seen.retransmitted += u64::from(info.retransmitted);
            seen.grain += u64::from(info.segment_bytes);
        }
        Ok(seen)
    }

    fn set(&mut self, quiet: bool) -> Result<(), MigrateError> {
        // Faults have the tenth that the push leaves; the push gives up what they take beyond it.
        let link = self.pace.link() as f64;
        let spare = link * (1.0 - SHARE);
        self.work.spare.store(spare as u64, Ordering::Relaxed);
        let beyond = (self.asked.1 - spare).max(0.0);
        let rate = (self.pace.rate(quiet) as f64 - beyond).max(link * LEAST_SHARE) as u64;
        let rate = rate.min(self.work.limit.unwrap_or(u64::MAX));
        if rate == self.paced {
            return Ok(());
        }
        self.paced = rate;
        let each = rate / self.sockets.len().max(1) as u64;
        let unsent = (each as f64 * UNSENT.as_secs_f64()) as u32;
        for socket in &self.sockets {
            set_pacing_rate(socket, Some(each)).map_err(MigrateError::kernel("setting the pace of the push"))?;
            set_notsent_lowat(socket, unsent.clamp(LEAST_UNSENT, MOST_UNSENT))
                .map_err(MigrateError::kernel("setting the pace of the push"))?;
        }
        Ok(())
    }
}
