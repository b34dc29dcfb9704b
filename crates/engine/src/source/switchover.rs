//! The guest stops here and starts there.
//!
//! ```text
//!   source                                     destination
//!   VMM: stop the guest, drain its I/O
//!   Stopped ─────────────────────────────────▶ device state waits from here on
//!   collect what was written since
//!   VMM: save the devices  ┐ at the same time
//!   the last pages ────────┴─────────────────▶ pages into RAM; when all are in place, device state into the VMM
//!   collect once more: what the VMM wrote while it saved. There must be none
//!   (verify)
//!   Load ────────────────────────────────────▶ devices loaded; the guest is stopped
//!   hand over, on record
//!   Commit ══ the point of no return ════════▶ on record; the guest runs
//! ```
//!
//! The devices' loading reads guest RAM (virtio's rings), so device state is held back at the destination until the last pages are
//! in place; saving them does not wait for the pages, which hides the shorter of the two times. Nor does the loading wait for the last look: a VMM
//! that writes RAM while it saves (none was seen to; its I/O is drained) is found out after the destination may have loaded from the page as it was
//! before, and the guest stays here. To hold the state back until `Load` would make every pause longer by the loading.
//!
//! In post-copy no page goes in the pause, only the map of those that are still to come:
//!
//! ```text
//!   VMM: stop the guest, drain its I/O
//!   Stopped ─────────────────────────────────▶ device state waits from here on
//!   collect; from here on faults are served    ┐ VMM: save the devices
//!   Residue …, LoadPostcopy ─────────────────▶ │ pages of the residue are shown to nobody; devices loaded as they come, with faults
//!   hand over, on record                       ┘
//!   saved; collect once more: what the VMM wrote while it saved. Those pages must be pending still
//!   Commit ══ the point of no return ════════▶ on record; the guest runs
//! ```
//!
//! Saving and loading are the longest parts of this pause, and so they overlap. What that costs is the last look: a VMM that writes RAM while it
//! saves is found out after the destination may have loaded from the page as it was before. Where the page is
//! still pending, nobody has seen it, and it goes as it is now; where it is not, the guest stays here.

use std::time::{Duration, Instant};

use sterna_api::report;
use sterna_introspect::PageTables;
use sterna_protocol::layout::{ChunkIndex, LayoutError};
use sterna_protocol::message::{Reply, Request};
use sterna_protocol::residue;

use super::devices::DevicePump;
use super::link::Link;
use super::postcopy::drive::Begun;
use super::rounds::Rounds;
use super::throttle::Throttle;
use super::track::Tracker;
use super::verify::{self, Compared};
use crate::error::MigrateError;
use crate::monitor::Monitor;
use crate::transport::clock::now_us;
use crate::transport::connection::Connection;
use crate::transport::control::REPLY_TIMEOUT;
use crate::vmm::{self, EventTime, VmmError};

/// How long the VMM may take to stop the guest: a disk may take its time to drain.
const STOP_TIMEOUT: Duration = Duration::from_secs(30);
/// How long the VMM may take to save or to load its devices.
const DEVICE_TIMEOUT: Duration = Duration::from_secs(30);
/// How long one look for the stop takes; where it takes longer, another round goes meanwhile.
const STOP_LOOK: Duration = Duration::from_millis(20);

/// A guest that is stopped, with its devices at the destination, and its RAM or the map of what is to come of it: one word lets it run there.
pub struct Loaded {
    /// When it stopped, by the VMM's event.
    pub stop: EventTime,
    /// The parts of the downtime so far.
    pub downtime: report::Downtime,
    /// The comparison of both sides.
    pub verify: report::Verify,
    /// Pages that are still to come, their map's bytes and what it took.
    pub residue: Option<Residue>,
    loaded_us: u64,
}

/// The map of what is still to come, for the report.
#[derive(Debug, Clone, Copy)]
pub struct Residue {
    /// Its pages.
    pub pages: u64,
    /// Its bytes.
    pub bytes: u64,
    /// Making and sending it.
    pub took: Duration,
}

/// The request that had the devices loaded, unanswered, and the map that went with it.
struct Left {
    load: Request,
    account: Residue,
}

/// What the hand-over needs to know of the migration.
pub struct Switchover<'a> {
    /// Whether to compare both sides.
    pub verify: bool,
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
        rounds.collect_untracked()?;
        let processors = rounds.processors(vmm);
        link.control.receive(&Request::Stopped, REPLY_TIMEOUT)?;
        vmm.save_devices()?;
        let began = Instant::now();
        // While the devices are saved: what the VMM writes meanwhile is collected below.
        rounds.skip_free_stopped(&processors);
        rounds.send_last(link)?;
        let final_pages = began.elapsed();
        let device_began = Instant::now();
        vmm.saved(DEVICE_TIMEOUT)?;
        pump.finish()?;
        // Nothing writes RAM any more: the guest is stopped, its I/O drained, its devices saved. What was written since the last look comes too
        // late: the destination lets go of the devices' state once the last pages are in place, and may have loaded it from these as they were. In
        // the runs seen there was none.
        rounds.collect(tracker)?;
        if rounds.left() > 0 {
            return Err(MigrateError::WrittenWhileSaving(rounds.left()));
        }
        let saved = device_began.elapsed();
        let verify_began = Instant::now();
        let verify = if self.verify { Self::same(link, rounds)? } else { report::Verify::default() };
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
        Ok(Loaded { stop: stopped.stop, downtime, verify, residue: None, loaded_us: now_us() })
    }

    /// Stops the guest and brings its devices to the destination, and the map of the pages that are still to come. Those are `pending` from
    /// the moment on when the destination may ask for one: before its devices are loaded. `record` is called when all that is left to do is
    /// to wait for that: it puts down that the guest may run there. Whatever goes wrong, `vmm.rollback()` gives it back.
    ///
    /// # Errors
    /// What went wrong on the way, or [`MigrateError::Cancelled`].
    #[allow(clippy::too_many_arguments, reason = "as `load`, with what follows")]
    pub fn load_postcopy(
        &self,
        (rounds, begun): (&mut Rounds, &Begun),
        link: &mut Link,
        tracker: &mut dyn Tracker,
        vmm: &mut dyn vmm::Source,
        throttle: &mut dyn Throttle,
        devices: Connection,
        record: impl FnOnce() -> Result<(), MigrateError>,
    ) -> Result<Loaded, MigrateError> {
        let pump = DevicePump::start(vmm.begin()?, devices)?;
        let stopped = self.stop(rounds, link, tracker, vmm)?;
        link.control.ask(&Request::Stopped, REPLY_TIMEOUT)?;
        let processors = rounds.processors(vmm);
        let began = Instant::now();
        let (saved, left) = std::thread::scope(|scope| {
            let saving = scope.spawn(|| vmm.save_devices().and_then(|()| vmm.saved(DEVICE_TIMEOUT)));
            throttle.loosen();
            self.monitor.update(|progress| progress.throttle_percent = 0);
            let left = self.leave(rounds, begun, &processors, link, tracker);
            (saving.join(), left)
        });
        let left = left?;
        saved.map_err(|_| MigrateError::Bug("the thread that saves the devices broke off"))??;
        rounds.collect(tracker)?;
        // What is still pending of them goes as it is now, free or not. Said before it is looked which are pending: what was taken as free by then is
        // not pending, and fails the switchover.
        begun.work.set_free(rounds.free().clone());
        let seen = begun.pending.not_in(&rounds.take_residue());
        if seen > 0 {
            return Err(MigrateError::WrittenWhileSaving(seen));
        }
        if let Some(ended) = vmm.ended() {
            return Err(ended.into());
        }
        record()?;
        pump.finish()?;
        link.control.receive(&left.load, DEVICE_TIMEOUT)?;
        let downtime = report::Downtime {
            pause_ms: ms(stopped.ready.0.saturating_sub(stopped.stop.0)),
            final_pages_ms: left.account.took.as_secs_f64() * 1e3,
            verify_ms: 0.0,
            device_state_ms: (began.elapsed() - left.account.took).as_secs_f64() * 1e3,
            start_ms: 0.0,
        };
        let verify = report::Verify::default();
        Ok(Loaded { stop: stopped.stop, downtime, verify, residue: Some(left.account), loaded_us: now_us() })
    }

    /// Tells the destination which pages are still to come, and has it load the devices.
    fn leave(
        &self,
        rounds: &mut Rounds,
        begun: &Begun,
        processors: &[PageTables],
        link: &mut Link,
        tracker: &mut dyn Tracker,
    ) -> Result<Left, MigrateError> {
        rounds.collect(tracker)?;
        // Where no round was sent every page goes as it is now, however it was written.
        if !rounds.done.is_empty() {
            rounds.collect_untracked()?;
        }
        // Here and not once the guest runs there: what is not in the residue is zeros to it at once.
        rounds.skip_free_stopped(processors);
        let began = Instant::now();
        let layout = rounds.ram.layout();
        let map = rounds.take_residue();
        let parts = std::iter::successors(residue::part(&map, layout, ChunkIndex(0)), |part| {
            residue::part(&map, layout, ChunkIndex(part.first.0 + part.chunks))
        });
        let mut parts: Vec<_> = parts.collect();
        let (pages, bytes) = (map.len(), parts.iter().map(|part| part.bits.len() as u64).sum());
        begun.work.set_free(rounds.free().clone());
        begun.pending.fill(map);
        let last = parts.pop().ok_or(LayoutError::Blocks(0))?;
        for part in parts {
            link.control.ask(&Request::Residue(part), REPLY_TIMEOUT)?;
        }
        let load = Request::LoadPostcopy(last);
        link.control.send(&load)?;
        Ok(Left { load, account: Residue { pages, bytes, took: began.elapsed() } })
    }

    /// Both sides are the same, page by page.
    fn same(link: &mut Link, rounds: &Rounds) -> Result<report::Verify, MigrateError> {
        let verify = verify::compare(link, rounds.ram, Some(rounds.free()), Compared::InThePause)?;
        match verify.mismatches {
            0 => Ok(verify),
            mismatches => Err(MigrateError::Mismatch { mismatches, pages: verify.pages }),
        }
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
                rounds.look_for_untracked(vmm)?;
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
/// Before the message goes it is on record that it may have gone (`record`, or [`Switchover::load_postcopy`] did it), and it can no longer be
/// cancelled. After that the guest may run here again only when the destination says that it never ran there.
///
/// # Errors
/// Nothing was sent: the guest is still the source's.
pub fn hand_over(
    loaded: Loaded,
    link: &mut Link,
    clock_offset_us: i64,
    monitor: &Monitor,
    record: impl FnOnce() -> Result<(), MigrateError>,
) -> Result<HandOver, MigrateError> {
    monitor.commit()?;
    if loaded.residue.is_none() {
        record()?;
    }
    let mut downtime = loaded.downtime;
    match link.control.ask(&Request::Commit, REPLY_TIMEOUT) {
        Ok(Reply::Running { start_us, cpu_us }) => {
            let started = start_us.saturating_add_signed(-clock_offset_us).min(now_us());
            downtime.start_ms = ms(started.saturating_sub(loaded.loaded_us));
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
