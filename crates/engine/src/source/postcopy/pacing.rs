//! How fast the push goes: it has a place among the pushes to the same host ([`pushes`](crate::transport::pushes)). The
//! kernel's `SO_MAX_PACING_RATE` holds the pace, and `TCP_INFO` says what came through (tcp(7), socket(7)).
//!
//! Few bytes wait unsent in the sockets (`TCP_NOTSENT_LOWAT`), because they were chosen before the latest fault.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::work::Work;
use crate::error::MigrateError;
use crate::source::stream::Stream;
use crate::transport::pushes::Place;

/// The pace of one session's push.
pub struct Pacing<'a> {
    work: &'a Work,
    place: Place,
}

impl<'a> Pacing<'a> {
    /// The pace over these connections to that host, within the limit of `work`. It begins at their known speed, where
    /// there is one and nobody else pushes there.
    ///
    /// # Errors
    /// No descriptor left, or the kernel does not pace.
    pub fn new(streams: &[Stream], to: &str, known: Option<u64>, work: &'a Work) -> Result<Self, MigrateError> {
        let sockets = streams.iter().map(|stream| stream.connection().socket().try_clone());
        let sockets = sockets.collect::<Result<_, _>>().map_err(MigrateError::host("setting the pace of the push"))?;
        work.pacer.sends_over(streams.iter().map(Stream::connection));
        let place = work.pacer.push(to, sockets, known);
        let place = place.map_err(MigrateError::kernel("setting the pace of the push"))?;
        let mut pacing = Self { work, place };
        pacing.step(false)?;
        Ok(pacing)
    }

    /// How long until the next [`step`](Self::step).
    #[must_use]
    pub fn window(&self) -> Duration {
        self.place.window()
    }

    /// Counts what came through, and sets the pace of the next window where this one is over.
    ///
    /// # Errors
    /// The kernel gives no figures, or does not pace.
    pub fn step(&mut self, quiet: bool) -> Result<(), MigrateError> {
        let spare = self.place.step(self.work.tally.asked(), quiet);
        let spare = spare.map_err(MigrateError::kernel("setting the pace of the push"))?;
        self.work.spare.store(spare, Ordering::Relaxed);
        Ok(())
    }
}
