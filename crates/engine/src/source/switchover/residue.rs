//! The pause of post-copy. No page goes in it, only the residue, the map of the pages that are still to come:
//!
//! ```text
//!   VMM: stop the guest, drain its I/O
//!   Stopped ─────────────────────────────────▶ device state waits from here on
//!   collect; from here on faults are served    ┐ VMM: save the devices
//!   Away …, AwayEnd (of a split guest) ──────▶ │
//!   Residue …, LoadPostcopy ─────────────────▶ │ none of the residue is shown; devices loaded as they come
//!   hand over, on record                       ┘
//!   saved; collect once more: what the VMM wrote while it saved. Those pages must be pending still
//!   Commit ══ the point of no return ════════▶ on record; the guest runs
//! ```
//!
//! Saving and loading are the longest parts of this pause, and so they overlap. The price is a late last look: a VMM
//! that writes RAM while it saves is noticed only after the destination may have loaded from the old page. Where the
//! page is still pending, nobody has seen it, and it goes as it is now; where it is not, the guest stays here.

use std::time::Instant;

use sterna_api::report;
use sterna_api::units::milliseconds as ms;
use sterna_introspect::PageTables;
use sterna_protocol::layout::{ChunkIndex, LayoutError};
use sterna_protocol::message::Request;
use sterna_protocol::pages::PageMap;
use sterna_protocol::residue;

use super::away;
use super::stop::{DEVICE_TIMEOUT, pause_ms, stop};
use crate::error::MigrateError;
use crate::source::departure::Departure;
use crate::source::link::Link;
use crate::source::loaded::{Loaded, Residue};
use crate::source::postcopy::drive::Begun;
use crate::source::rounds::Rounds;
use crate::source::stays::Stays;
use crate::source::track::Tracker;
use crate::split::Split;
use crate::transport::clock::now_us;
use crate::transport::connection::Connection;
use crate::transport::control::REPLY_TIMEOUT;

/// The unanswered request to load the devices, and the residue that went before it.
struct Asked {
    load: Request,
    residue: Residue,
    /// The residue's pages.
    pages: PageMap,
}

/// Stops the guest and brings its devices and the residue to the destination. The residue's pages are `pending` before
/// the destination may request one, that is, before its devices are loaded. While the loading goes on, the source
/// records that the guest may run there.
///
/// # Errors
/// The link's or this host's error, or [`MigrateError::Cancelled`].
pub(super) fn load(
    departure: &mut Departure,
    link: &mut Link,
    (rounds, begun): (&mut Rounds, &Begun),
    devices: Connection,
) -> Result<Loaded, MigrateError> {
    let pump = departure.begin_stop(devices)?;
    let stopped = stop(departure, link, rounds)?;
    departure.haste.stands_still(departure.vmm_threads.as_ref());
    tracing::debug!("the guest has stopped");
    link.control.ask(&Request::Stopped, REPLY_TIMEOUT)?;
    let processors = rounds.processors(departure.vmm);
    let began = Instant::now();
    let Departure { vmm, tracker, throttle, monitor, split, .. } = departure;
    let split = split.as_deref();
    let (saved, asked) = std::thread::scope(|scope| {
        let saving = scope.spawn(|| vmm.save_devices().and_then(|()| vmm.saved(DEVICE_TIMEOUT)));
        throttle.loosen();
        monitor.update(|progress| progress.throttle_percent = 0);
        let asked = leave((rounds, begun), split, &processors, link, *tracker);
        (saving.join(), asked)
    });
    let asked = asked?;
    saved.map_err(|_| MigrateError::Bug("the thread that saves the devices broke off"))??;
    tracing::debug!("its devices are saved, and the residue is on its way");
    rounds.collect_late(*tracker, &asked.pages)?;
    // Those of them that are still pending go as they are now, free or not. The set changes before the look at what is
    // pending: a page that was taken as free by then is not pending, and fails the switchover.
    begun.work.set_free(rounds.free().clone());
    // The others the destination may have seen as they were before, but those that left as they are now.
    let seen = begun.work.leaving.written(rounds.ram, &begun.pending.not_in(&rounds.take_residue()));
    let seen = seen.map_err(MigrateError::host("reading the guest's RAM"))?;
    begun.work.leaving.end();
    if seen > 0 {
        return Err(MigrateError::WrittenWhileSaving(seen));
    }
    if let Some(ended) = vmm.ended() {
        return Err(ended.into());
    }
    departure.record(true)?;
    tracing::debug!("nothing was written meanwhile, and it is on record");
    pump.finish()?;
    link.control.receive(&asked.load, DEVICE_TIMEOUT)?;
    tracing::debug!("its devices are loaded");
    let downtime = report::Downtime {
        pause_ms: pause_ms(&stopped),
        final_pages_ms: ms(asked.residue.took),
        verify_ms: 0.0,
        device_state_ms: ms(began.elapsed() - asked.residue.took),
        start_ms: 0.0,
    };
    let verify = report::Verify::default();
    Ok(Loaded { stop: stopped.stop, downtime, verify, residue: Some(asked.residue), loaded_us: now_us() })
}

/// Tells the destination which pages are still to come, and makes it load the devices.
fn leave(
    (rounds, begun): (&mut Rounds, &Begun),
    split: Option<&Split>,
    processors: &[PageTables],
    link: &mut Link,
    tracker: &mut dyn Tracker,
) -> Result<Asked, MigrateError> {
    // Before the collection: what came until now is in it.
    let mut elsewhere = split.map(Split::stand_still).transpose()?;
    rounds.collect(tracker)?;
    // Where no round was sent, every page goes as it is now, however it was written.
    if !rounds.done.is_empty() {
        rounds.collect_untracked()?;
    }
    if let Some(elsewhere) = &mut elsewhere {
        rounds.leave(elsewhere, false)?;
        away::tell(link, elsewhere, rounds.ram.layout())?;
        rounds.stays.as_ref().and_then(Stays::told).map(|told| begun.work.away.set(told.clone()));
    }
    // The look comes here, not after the guest's start there: pages that are not in the residue are zeros to the guest
    // at once.
    rounds.skip_free_stopped(processors);
    let began = Instant::now();
    let layout = rounds.ram.layout();
    let map = rounds.take_residue();
    let parts = std::iter::successors(residue::part(&map, layout, ChunkIndex(0)), |part| {
        residue::part(&map, layout, ChunkIndex(part.first.0 + part.chunks))
    });
    let mut parts: Vec<_> = parts.collect();
    let (count, bytes) = (map.len(), parts.iter().map(|part| part.bits.len() as u64).sum());
    begun.work.set_free(rounds.free().clone());
    rounds.monitor.begin_round(begun.work.round, count);
    begun.work.leaving.begin();
    begun.pending.fill(map.clone());
    let last = parts.pop().ok_or(LayoutError::Blocks(0))?;
    for part in parts {
        link.control.ask(&Request::Residue(part), REPLY_TIMEOUT)?;
    }
    let load = Request::LoadPostcopy(last);
    link.control.send(&load)?;
    Ok(Asked { load, residue: Residue { pages: count, bytes, took: began.elapsed() }, pages: map })
}
