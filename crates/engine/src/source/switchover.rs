//! The guest stops here and starts there.
//!
//! ```text
//!   source                                     destination
//!   VMM: stop the guest, drain its I/O
//!   Stopped ─────────────────────────────────▶ device state waits from here on
//!   collect what was written since
//!   VMM: save the devices  ┐ at the same time
//!   the last pages ────────┴─────────────────▶ pages into RAM; when all are in place, device state into the VMM
//!   collect once more: what the VMM wrote while it saved
//!   (verify)
//!   Load ────────────────────────────────────▶ devices loaded; the guest is stopped
//!   hand over, on record
//!   Commit ══ the point of no return ════════▶ on record; the guest runs
//! ```
//!
//! The devices' loading reads guest RAM (virtio's rings), so device state is held back at the destination until the last pages are
//! in place; saving them does not wait for the pages, which hides the shorter of the two times.

use std::time::{Duration, Instant};

use sterna_api::report;
use sterna_protocol::message::{Reply, Request};

use super::devices::DevicePump;
use super::link::{Link, now_us};
use super::rounds::Rounds;
use super::throttle::Throttle;
use super::track::Tracker;
use super::verify;
use crate::error::MigrateError;
use crate::host::{MigrationId, SourceHost};
use crate::monitor::Monitor;
use crate::transport::connection::Connection;
use crate::transport::control::REPLY_TIMEOUT;
use crate::vmm::{self, EventTime, VmmError};

/// How long the VMM may take to stop the guest: a disk may take its time to drain.
const STOP_TIMEOUT: Duration = Duration::from_secs(30);
/// How long the VMM may take to save or to load its devices.
const DEVICE_TIMEOUT: Duration = Duration::from_secs(30);
/// How long one look for the stop takes; where it takes longer, another round goes meanwhile.
const STOP_LOOK: Duration = Duration::from_millis(20);

/// A guest that is stopped, with its RAM and devices at the destination: one word lets it run there.
pub struct Loaded {
    /// When it stopped, by the VMM's event.
    pub stop: EventTime,
    /// The parts of the downtime so far.
    pub downtime: report::Downtime,
    /// The comparison of both sides.
    pub verify: report::Verify,
    loaded_at: Instant,
}

/// What the hand-over needs to know of the migration.
pub struct Switchover<'a> {
    /// Whether to compare both sides.
    pub verify: bool,
    /// Whether the guest's disks write into RAM past the page tables.
    pub direct_io: bool,
    /// Progress and cancelling.
    pub monitor: &'a Monitor,
}

impl Switchover<'_> {
    /// Stops the guest and brings the rest of it to the destination. Whatever goes wrong, `vmm.rollback()` gives it back.
    ///
    /// # Errors
    /// What went wrong on the way, or [`MigrateError::Cancelled`].
    pub fn load(
        &self,
        rounds: &mut Rounds,
        link: &mut Link,
        tracker: &mut dyn Tracker,
        vmm: &mut dyn vmm::Source,
        throttle: &mut dyn Throttle,
        devices: Connection,
    ) -> Result<Loaded, MigrateError> {
        let pump = DevicePump::start(vmm.begin()?, devices)?;
        let stopped = self.stop(rounds, link, tracker, vmm)?;
        // Not before the stop: what the guest wrote meanwhile at its full speed would all be in the pause.
        throttle.loosen();
        self.monitor.update(|progress| progress.throttle_percent = 0);
        link.control.send(&Request::Stopped)?;
        rounds.collect(tracker)?;
        if self.direct_io {
            rounds.collect_untracked();
        }
        link.control.receive(&Request::Stopped, REPLY_TIMEOUT)?;
        vmm.save_devices()?;
        let began = Instant::now();
        rounds.send_last(link)?;
        let final_pages = began.elapsed();
        let device_began = Instant::now();
        vmm.saved(DEVICE_TIMEOUT)?;
        pump.finish()?;
        // Nothing writes RAM any more: the guest is stopped, its I/O drained, its devices saved. What was written since the last look
        // is sent; in the runs seen there was none.
        rounds.collect(tracker)?;
        if rounds.left() > 0 {
            tracing::info!(pages = rounds.left(), "pages written while the devices were saved");
            rounds.send_last(link)?;
        }
        let saved = device_began.elapsed();
        let verify_began = Instant::now();
        let verify = if self.verify { verify::compare(link, rounds.ram)? } else { report::Verify::default() };
        let verify_time = verify_began.elapsed();
        if let Some(ended) = vmm.ended() {
            return Err(ended.into());
        }
        let load_began = Instant::now();
        link.control.ask(&Request::Load, DEVICE_TIMEOUT)?;
        let downtime = report::Downtime {
            pause_ms: ms(stopped.ready.0.saturating_sub(stopped.stop.0)),
            final_pages_ms: final_pages.as_secs_f64() * 1e3,
            verify_ms: verify_time.as_secs_f64() * 1e3,
            device_state_ms: (saved + load_began.elapsed()).as_secs_f64() * 1e3,
            start_ms: 0.0,
        };
        Ok(Loaded { stop: stopped.stop, downtime, verify, loaded_at: Instant::now() })
    }

    /// Waits until the guest has stopped. A VMM with memory of its own to move first (a display's) takes a while, in which the guest
    /// runs on: then its pages go meanwhile.
    fn stop(
        &self,
        rounds: &mut Rounds,
        link: &mut Link,
        tracker: &mut dyn Tracker,
        vmm: &mut dyn vmm::Source,
    ) -> Result<vmm::Stopped, MigrateError> {
        let deadline = Instant::now() + STOP_TIMEOUT;
        loop {
            self.monitor.check()?;
            if let Some(stopped) = vmm.stopped(STOP_LOOK)? {
                return Ok(stopped);
            }
            if Instant::now() > deadline {
                return Err(VmmError::Silent { waiting_for: "stop".into(), seconds: STOP_TIMEOUT.as_secs() }.into());
            }
            if !rounds.done.is_empty() {
                rounds.collect(tracker)?;
                rounds.send(link, None)?;
            }
        }
    }
}

/// How the hand-over ended.
pub enum HandOver {
    /// The guest runs at the destination.
    Done {
        /// The parts of the downtime.
        downtime: report::Downtime,
        /// From the stop to the start, by both VMMs' events, milliseconds.
        downtime_ms: f64,
        /// Processor time at the destination, seconds.
        destination_cpu_s: f64,
    },
    /// It was given away, and whether it was taken is not known.
    Unknown(MigrateError),
}

/// Gives the guest away: the point of no return at the source.
///
/// Before the message goes it is on record that it may have gone, and it can no longer be cancelled. After that the guest may run
/// here again only when the destination says that it never ran there.
///
/// # Errors
/// Nothing was sent: the guest is still the source's.
pub fn hand_over(
    loaded: Loaded,
    link: &mut Link,
    clock_offset_us: i64,
    id: MigrationId,
    peer: &str,
    host: &dyn SourceHost,
    monitor: &Monitor,
) -> Result<HandOver, MigrateError> {
    monitor.commit()?;
    host.handing_over(id, peer, false).map_err(MigrateError::Record)?;
    let mut downtime = loaded.downtime;
    match link.control.ask(&Request::Commit, REPLY_TIMEOUT) {
        Ok(Reply::Running { start_us, cpu_us }) => {
            downtime.start_ms = loaded.loaded_at.elapsed().as_secs_f64() * 1e3;
            let started = start_us.saturating_add_signed(-clock_offset_us).min(now_us());
            let downtime_ms = ms(started.saturating_sub(loaded.stop.0));
            Ok(HandOver::Done { downtime, downtime_ms, destination_cpu_s: cpu_us as f64 / 1e6 })
        }
        Ok(_) => Ok(HandOver::Unknown(MigrateError::Reply("another reply than that the guest runs"))),
        Err(error) => Ok(HandOver::Unknown(error)),
    }
}

fn ms(us: u64) -> f64 {
    us as f64 / 1e3
}
