//! How fast the push goes: `Push` decides, the kernel's `SO_MAX_PACING_RATE` holds it, and `TCP_INFO` says what came
//! through (tcp(7), socket(7)).
//!
//! Few bytes wait unsent in the sockets (`TCP_NOTSENT_LOWAT`), because they were chosen before the latest fault.

use std::net::TcpStream;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use sterna_protocol::pace::push::{Counted, Ended, Push, Setting};
use sterna_sys::socket::{TcpInfo, set_notsent_lowat, set_pacing_rate};

use super::work::Work;
use crate::error::MigrateError;
use crate::source::stream::Stream;

/// The pace of one session's push.
pub struct Pacing<'a> {
    work: &'a Work,
    sockets: Vec<TcpStream>,
    push: Push,
    /// From here the push's time is counted.
    began: Instant,
}

impl<'a> Pacing<'a> {
    /// The pace over these connections, within the limit of `work`. It begins at their known speed, where there is one.
    ///
    /// # Errors
    /// No descriptor left, or the kernel does not pace.
    pub fn new(streams: &[Stream], known: Option<u64>, work: &'a Work) -> Result<Self, MigrateError> {
        let sockets = streams.iter().map(|stream| stream.connection().socket().try_clone());
        let sockets: Vec<_> =
            sockets.collect::<Result<_, _>>().map_err(MigrateError::host("setting the pace of the push"))?;
        let (began, counted) = (Instant::now(), look(&sockets, work)?);
        let push = Push::new(known, work.limit, sockets.len() as u32, Duration::ZERO, &counted);
        let mut pacing = Self { work, sockets, push, began };
        pacing.set(false)?;
        Ok(pacing)
    }

    /// How long until the next [`step`](Self::step).
    #[must_use]
    pub fn window(&self) -> Duration {
        self.push.left(self.began.elapsed())
    }

    /// Counts what came through, and sets the pace of the next window where this one is over.
    ///
    /// # Errors
    /// The kernel gives no figures, or does not pace.
    pub fn step(&mut self, quiet: bool) -> Result<(), MigrateError> {
        if !self.window().is_zero() {
            return Ok(());
        }
        let (counted, link) = (look(&self.sockets, self.work)?, self.push.link());
        let Ended { window, paced, asked_rate } = self.push.ends(self.began.elapsed(), &counted);
        tracing::debug!(?window, paced, asked_rate, link, "a window of the push");
        self.set(quiet)
    }

    fn set(&mut self, quiet: bool) -> Result<(), MigrateError> {
        self.work.spare.store(self.push.spare(), Ordering::Relaxed);
        let Some(Setting { bytes_per_s, unsent }) = self.push.set(quiet) else { return Ok(()) };
        for socket in &self.sockets {
            set_pacing_rate(socket, Some(bytes_per_s)).map_err(MigrateError::kernel("setting the pace of the push"))?;
            set_notsent_lowat(socket, unsent).map_err(MigrateError::kernel("setting the pace of the push"))?;
        }
        Ok(())
    }
}

/// What the kernel has counted of all connections, and what faults have asked for.
fn look(sockets: &[TcpStream], work: &Work) -> Result<Counted, MigrateError> {
    let mut counted = Counted { least_trip: Duration::MAX, ..Counted::default() };
    for socket in sockets {
        let info = TcpInfo::of(socket).map_err(MigrateError::kernel("looking at the pace of the push"))?;
        counted.acknowledged += info.acknowledged_bytes;
        counted.busy += info.busy;
        counted.round_trip = counted.round_trip.max(info.round_trip);
        counted.deviation = counted.deviation.max(info.round_trip_deviation);
        counted.least_trip = counted.least_trip.min(info.least_round_trip);
        counted.retransmitted += u64::from(info.retransmitted);
        counted.grain += u64::from(info.segment_bytes);
    }
    counted.asked = work.tally.asked();
    Ok(counted)
}
