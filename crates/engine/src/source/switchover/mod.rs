//! Phase *switchover*: the guest stops here and is loaded there.
//!
//! ```text
//!   source                                     destination
//!   VMM: stop the guest, drain its I/O
//!   Stopped ─────────────────────────────────▶ device state waits from here on
//!   collect what was written since
//!   VMM: save the devices  ┐ at the same time
//!   the last pages ────────┴─────────────────▶ pages into RAM; when all are in place, device state into the VMM
//!   collect once more: what the VMM wrote while it saved. There must be none
//!   (verify, where the destination cannot do it later)
//!   Load ────────────────────────────────────▶ devices loaded; the guest is stopped
//!   hand over, on record
//!   Commit ══ the point of no return ════════▶ on record; the guest runs
//! ```
//!
//! The devices' loading reads guest RAM (virtio's rings), so device state is held back at the destination until the
//! last pages are in place. Saving the devices does not wait for the pages, which hides the shorter of the two times.
//! The loading does not wait for the last look either. A VMM that writes RAM while it saves (no VMM was seen to do so;
//! its I/O is drained) is noticed only after the destination may have loaded from the old page: then the guest stays
//! here. Holding the state back until `Load` would make every pause longer by the loading.

/// The guest's stop.
mod stop;

/// The pause of post-copy, in which the residue goes.
mod residue;

/// Pages that stay at memory hosts.
mod away;

use std::time::Instant;

use sterna_api::units::milliseconds as ms;
use sterna_api::{Phase, report};
use sterna_protocol::message::Request;
use sterna_protocol::pages::PageMap;

use self::stop::{DEVICE_TIMEOUT, pause_ms, stop};
use super::departure::Departure;
use super::link::Link;
use super::loaded::Loaded;
use super::postcopy::drive::Begun;
use super::precopy::Ending;
use super::prepare::Prepared;
use super::rounds::Rounds;
use super::verify::{self, AtStop, Compared};
use crate::error::MigrateError;
use crate::transport::clock::now_us;
use crate::transport::connection::Connection;
use crate::transport::control::REPLY_TIMEOUT;

/// Stops the guest, and brings its devices and its last pages (or the residue) to the destination.
///
/// # Errors
/// The link's or this host's error, or [`MigrateError::Cancelled`]. The guest is still the source's, stopped or not.
pub fn switchover(
    departure: &mut Departure,
    link: &mut Link,
    prepared: &mut Prepared,
    ending: Ending,
) -> Result<Loaded, MigrateError> {
    departure.monitor.enter(Phase::Switchover);
    if let Some(split) = &departure.split {
        split.stay();
    }
    // While the guest runs: a portion at hand takes its time to be let go.
    departure.tracker.seal();
    let devices = prepared.devices.take().ok_or(MigrateError::Bug("the devices' connection was taken before"))?;
    departure.hurry(prepared.begun.as_ref().map(Begun::crew));
    let loaded = match (ending, &prepared.begun) {
        (Ending::Postcopy(because), Some(begun)) => {
            departure.account.postcopy(because, departure.options);
            residue::load(departure, link, (&mut prepared.rounds, begun), devices)?
        }
        _ => load(departure, link, (&mut prepared.rounds, &prepared.verify_after), devices)?,
    };
    departure.account.loaded(&loaded);
    Ok(loaded)
}

/// Stops the guest and brings the rest of it to the destination.
fn load(
    departure: &mut Departure,
    link: &mut Link,
    (rounds, verify_after): (&mut Rounds, &Result<(), String>),
    devices: Connection,
) -> Result<Loaded, MigrateError> {
    let pump = departure.begin_stop(devices)?;
    let stopped = stop(departure, link, rounds)?;
    departure.haste.stands_still(departure.vmm_threads.as_ref());
    tracing::debug!("the guest has stopped");
    // This does not come before the stop: all that the guest wrote meanwhile at full speed would go in the pause.
    loosen(departure);
    let Departure { vmm, tracker, options, split, .. } = departure;
    let vmm = &mut **vmm;
    link.control.send(&Request::Stopped)?;
    // Before the collection: what came until now is in it.
    let mut elsewhere = split.as_ref().map(|split| split.stand_still()).transpose()?;
    rounds.collect(*tracker)?;
    rounds.collect_untracked()?;
    elsewhere.as_mut().map_or(Ok(()), |elsewhere| rounds.leave(elsewhere, true))?;
    tracing::debug!("what it had written is known");
    let processors = rounds.processors(vmm);
    link.control.receive(&Request::Stopped, REPLY_TIMEOUT)?;
    vmm.save_devices()?;
    let began = Instant::now();
    if let Some(elsewhere) = &elsewhere {
        away::tell(link, elsewhere, rounds.ram.layout())?;
    }
    // The look goes on while the devices are saved: pages that the VMM writes meanwhile are collected below.
    rounds.skip_free_stopped(&processors);
    rounds.send_last(link)?;
    let final_pages = began.elapsed();
    tracing::debug!("its last pages are there");
    let device_began = Instant::now();
    vmm.saved(DEVICE_TIMEOUT)?;
    pump.finish()?;
    tracing::debug!("its devices are saved");
    // Nothing writes RAM any more: the guest is stopped, its I/O drained, its devices saved. A page that was written
    // since the last look comes too late: the destination releases the devices' state once the last pages are in place,
    // and may have loaded from the old page. In the runs seen there was no such page.
    rounds.collect_late(*tracker, &PageMap::empty(rounds.ram.layout()))?;
    if rounds.left() > 0 {
        return Err(MigrateError::WrittenWhileSaving(rounds.left()));
    }
    let saved = device_began.elapsed();
    tracing::debug!("nothing was written meanwhile");
    let verify = match verify_after {
        // The destination would read pages that its devices have brought back meanwhile.
        Err(why) if options.verify && elsewhere.is_some() => verify::not_done(why),
        Err(why) if options.verify => report::Verify { reason: Some(why.clone()), ..same(link, rounds)? },
        _ => report::Verify::default(),
    };
    if let Some(ended) = vmm.ended() {
        return Err(ended.into());
    }
    let load_began = Instant::now();
    link.control.ask(&Request::Load, DEVICE_TIMEOUT)?;
    tracing::debug!("its devices are loaded");
    let downtime = report::Downtime {
        pause_ms: pause_ms(&stopped),
        final_pages_ms: ms(final_pages),
        verify_ms: verify.ms,
        device_state_ms: ms(saved + load_began.elapsed()),
        start_ms: 0.0,
    };
    Ok(Loaded { stop: stopped.stop, downtime, verify, residue: None, loaded_us: now_us() })
}

/// Gives the guest its processor time back.
fn loosen(departure: &mut Departure) {
    departure.throttle.loosen();
    departure.monitor.update(|progress| progress.throttle_percent = 0);
}

/// Compares both sides' pages, one by one.
fn same(link: &mut Link, rounds: &Rounds) -> Result<report::Verify, MigrateError> {
    let ours = AtStop { ram: rounds.ram, free: Some(rounds.free()), away: None };
    let verify = verify::compare(link, ours, Compared::InThePause)?;
    match verify.mismatches {
        0 => Ok(verify),
        mismatches => Err(MigrateError::Mismatch { mismatches, pages: verify.pages }),
    }
}
