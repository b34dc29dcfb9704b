//! A running guest goes on as several: `fork`.
//!
//! The clones' QEMUs are started first, while the guest runs. In its pause its devices are saved and its RAM becomes
//! files that nobody writes (`sterna_engine::fork`); then it runs on, and each clone maps the same files, loads the
//! devices and runs.
//!
//! What is on record: the source's record says *forking* from before the pause until its guest runs again, with its RAM
//! as it is once it is private. A daemon that finds this asks QEMU which of both it is, and lets the guest run
//! (`ending::recover`). A clone gets its record when it is whole, before it runs; one without is a start that was never
//! finished, and a daemon that finds it ends it.

use std::collections::HashSet;
use std::fs::File;
use std::sync::Arc;
use std::time::Instant;

use sterna_api::problem::Whereabouts;
use sterna_api::units::milliseconds;
use sterna_api::{Cloned, Code, ForkRequest, Forked, NotCloned, Problem};
use sterna_engine::error::MigrateError;
use sterna_engine::fork::{NotSaved, Saved};
use sterna_engine::memory::unneeded::mark_as_pool;
use sterna_sys::host::random_u128;

use crate::care::Care;
use crate::link::new_mac;
use crate::machines::control;
use crate::machines::hold::{Hold, InPlace};
use crate::machines::images::Images;
use crate::machines::overlay::Overlay;
use crate::machines::record::VmRecord;
use crate::machines::start::Launcher;
use crate::machines::table::Machines;
use crate::migration::address::check_address;
use crate::migration::departures::Departures;
use crate::migration::incoming::Destination;
use crate::migration::resuming;
use crate::problems::{check_name, host, invalid};
use crate::several;

/// What is done while the guest runs.
mod prepare;

/// The machine that is forked.
pub mod source;

/// The end of it: what the machine's RAM has become.
pub mod ending;

/// A clone.
mod clone;

/// Clones that go to other hosts.
mod away;

/// The overlays of its disks and its clones'.
pub mod overlays;

/// What it was, on record.
pub mod templates;

/// Clones that are held ready.
pub mod warm;

use clone::Begun;
use prepare::{Clones, Preparation};
use source::{Frozen, Source};
use templates::template_name;
use warm::{MOST_CLONES, WarmPools, check_hold};

/// What it takes to fork a machine.
#[derive(Debug)]
pub struct Fork<'a> {
    /// The machines, and their care.
    pub care: &'a Care,
    /// What starts QEMUs.
    pub launcher: &'a Launcher,
    /// This host as one that machines come to: its memory, and what gangs share.
    pub here: &'a Destination,
    /// The files that RAM consists of once it was forked.
    pub images: &'a Arc<Images>,
    /// What clones can be made of later.
    pub warm: &'a WarmPools,
    /// This host as one that machines leave.
    pub departures: &'a Arc<Departures>,
}

impl Fork<'_> {
    /// Has a machine's guest go on as several. Blocks until the clones run.
    ///
    /// # Errors
    /// A [`Problem`]: the machine is unknown or busy, cannot be forked and why, or no clone could be made. The machine
    /// goes on as it was, unless the problem says otherwise.
    pub fn fork(&self, name: &str, request: &ForkRequest) -> Result<Forked, Problem> {
        let began = Instant::now();
        check_request(request)?;
        let doing = InPlace::new("it is being forked");
        let found = self.care.machines.claim(name, Hold::shared(&doing))?;
        let record = with_family(found.clone());
        tracing::debug!(vm = name, "it is to be forked");
        let prepared = self.preparation().prepare(&record, request, &doing);
        let (source, clones) = prepared.map_err(|problem| self.stays(&found, problem))?;
        let overlays = source.overlays().to_vec();
        let (prepare_ms, running) = (milliseconds(began.elapsed()), source.running);
        // Pages that only the clones will need stay.
        let _held = self.here.pools.hold();
        let Paused { frozen, saved, clones, now } = self.pause(&record, source, clones)?;
        let mut forked = Forked {
            vm: name.into(),
            prepare_ms,
            pause_ms: saved
                .resumed
                .filter(|_| running)
                .map_or(0.0, |at| at.0.saturating_sub(saved.stopped.stop.0) as f64 / 1e3),
            memory_bytes: record.memory_bytes,
            copied_bytes: frozen.copied_bytes,
            copied_in_pause_bytes: frozen.late_bytes,
            pieces: frozen.image.mappings() as u64,
            device_bytes: saved.devices.len() as u64,
            ..Forked::default()
        };
        let Clones { here, away, of_the_template, room: _until_they_are_there } = clones;
        let gone = away.map(|away| away.go(&saved, &frozen.image, began)).unwrap_or_default();
        let loaded = several::map(here, |begun: Begun| {
            (begun.name().to_owned(), begun.load(self.care, &frozen.image, &saved.devices, began))
        });
        for (vm, clone) in loaded.into_iter().chain(gone) {
            match clone {
                Ok(clone) => forked.clones.push(clone),
                Err(problem) => {
                    tracing::warn!(vm, "not forked from '{name}': {}", problem.with_causes());
                    forked.failed.push(NotCloned { vm, problem });
                }
            }
        }
        // By its name it can be had for a template.
        if let Err(error) = self.images.name(&frozen.latest) {
            tracing::warn!(%error, "no template can be made of what a fork has made common");
        }
        let made = request.hold.map(|_| {
            // It begins with the disks as they were.
            let source = VmRecord { overlays: Vec::new(), ..now.clone() };
            let source = VmRecord { arguments: record.arguments.clone(), bases: record.bases.clone(), ..source };
            let ram = (Arc::clone(&frozen.image), &saved.devices[..]);
            let made = self.warm.make(request, source, &overlays, &record.machine, ram);
            made.inspect(|_| of_the_template.keep())
        });
        if !now.overlays.is_empty() {
            self.settle(&VmRecord { overlays: Vec::new(), ..now.clone() });
        }
        if request.new_mac {
            self.renew_cards(&mut forked.clones);
        }
        // Until now a page of it that only a clone needed could have been given back. Where one needs it on another
        // host, the clone's record keeps it.
        mark(&frozen.latest);
        match made {
            Some(Ok(template)) => forked.template = Some(self.warm.fill_first(&template)),
            Some(Err(problem)) => {
                forked.failed.push(NotCloned { vm: template_name(request, name).into(), problem });
            }
            None => {}
        }
        forked.ms = milliseconds(began.elapsed());
        let Forked { pause_ms, ms, pieces, copied_bytes, .. } = &forked;
        tracing::info!(vm = name, clones = forked.clones.len(), pause_ms, ms, pieces, copied_bytes, "forked");
        match (forked.clones.is_empty() && forked.template.is_none(), forked.failed.pop()) {
            (true, Some(failed)) => Err(failed.problem),
            (_, failed) => {
                forked.failed.extend(failed);
                Ok(forked)
            }
        }
    }

    fn preparation(&self) -> Preparation<'_> {
        let Self { launcher, here, departures, .. } = *self;
        Preparation { machines: &self.care.machines, launcher, here, departures, templates: &self.warm.templates }
    }

    /// The pause. Whatever becomes of it, the machine is given back, and what is on record of it is so.
    fn pause(&self, record: &VmRecord, mut source: Source, clones: Clones) -> Result<Paused, Problem> {
        let forking = source.on_record();
        // Which overlays are no more this host's to remove a restarted host must know, too.
        let outlives = forking.overlays.iter().any(|overlay| overlay.elsewhere);
        let store = if outlives { Machines::store } else { Machines::store_for_daemon };
        if let Err(error) = store(&self.care.machines, &forking) {
            source.called_off();
            drop((source, clones));
            let problem = host("cannot write the machine's record", &error);
            return Err(self.stays(record, problem));
        }
        let mut frozen = None;
        let saved = source.save(|freezing| {
            frozen = Some(freezing.freeze()?);
            Ok(())
        });
        // Nothing watches the guest any more when the machine is given back, and nobody has the layer for writing.
        source.runs_on();
        let (waits, why) = match &saved {
            Ok(saved) => (saved.waits.as_ref(), None),
            Err(NotSaved { why, waits }) => (waits.as_ref(), Some(why.problem())),
        };
        // Whether its RAM is private by now is asked, and not concluded.
        let now = ending::as_it_is(&forking).unwrap_or_else(|problem| {
            tracing::error!(vm = %record.name, "{}", problem.with_causes());
            forking.clone()
        });
        // And which images its disks are on. Who does not know that must not give it another QEMU.
        let now = match source.with_its_disks(&now) {
            Ok(now) => now,
            Err(problem) => {
                // QEMU is asked again over another connection.
                let waits = waits.is_some();
                drop(source);
                return Err(self.is_in_doubt(&forking, problem, waits));
            }
        };
        if now.forking.is_none() {
            ending::forget_others(self.images, &forking, &now);
        }
        // What is on record stays until it runs: a restarted daemon lets it.
        if let Some(error) = waits {
            let failed = control::refused("let the guest run on", error);
            if has_ended(&now, &failed) {
                return Err(self.is_gone(&now, why.unwrap_or(failed)));
            }
            resuming::go_on_here(&self.care.machines, &now, false, failed.with_causes());
            return Err(why.unwrap_or(failed).guest(Whereabouts::Paused).hint(format!(
                "the guest is whole, and QEMU is asked again until it lets it run: 'sterna show {}'",
                record.name
            )));
        }
        if let (Ok(saved), Some(frozen)) = (saved, frozen) {
            // With its clones' overlays on record it is nobody else's.
            if now.overlays.is_empty() {
                self.settle(&now);
            } else {
                self.write_down(&now);
            }
            return Ok(Paused { frozen, saved, clones, now });
        }
        drop(clones);
        let why = why.unwrap_or_else(|| MigrateError::Bug("nothing was saved").problem());
        if has_ended(&now, &why) {
            return Err(self.is_gone(&now, why));
        }
        self.settle(&VmRecord { overlays: Vec::new(), ..now });
        Err(why.guest(Whereabouts::Source))
    }

    /// Gives running clones network cards with addresses of their own.
    fn renew_cards(&self, clones: &mut [Cloned]) {
        several::map(clones.iter_mut().collect(), |clone: &mut Cloned| {
            clone.lacks = new_mac::go_on(&self.care.machines, &clone.vm).err();
        });
    }

    /// The machine is as any other again, and its record says so.
    fn settle(&self, now: &VmRecord) {
        self.write_down(now);
        self.care.machines.give_back(now);
        self.care.balloons.keep(now);
    }

    /// Of interest to a restarted daemon, and to no restarted host: the disk's time is not waited for.
    fn write_down(&self, now: &VmRecord) {
        if self.care.machines.store_for_daemon(now).is_err() {
            self.care.machines.try_store(now);
        }
    }

    /// The guest runs, or stands still (`waits`), on disks of which nobody knows whether they are overlays.
    fn is_in_doubt(&self, forking: &VmRecord, problem: Problem, waits: bool) -> Problem {
        if has_ended(forking, &problem) {
            return self.is_gone(forking, problem);
        }
        tracing::error!(vm = %forking.name, "{}", problem.with_causes());
        go_on_once_known(&self.care.machines, self.images, forking, problem.with_causes());
        problem.guest(if waits { Whereabouts::Paused } else { Whereabouts::Source }).hint(format!(
            "the guest is whole, and QEMU is asked again until it says which images its disks are on: 'sterna show {}'",
            forking.name
        ))
    }

    /// The machine's QEMU has ended, and its guest with it.
    fn is_gone(&self, record: &VmRecord, problem: Problem) -> Problem {
        self.care.machines.give_back(record);
        record.overlays.iter().filter(|overlay| overlay.of == record.name).for_each(Overlay::remove);
        problem.guest(Whereabouts::Gone)
    }

    /// The machine is as it was, unless its QEMU has ended.
    fn stays(&self, record: &VmRecord, problem: Problem) -> Problem {
        let recorded = self.care.machines.entry(&record.name).ok().and_then(|entry| entry.record);
        if recorded.is_some_and(|recorded| !recorded.overlays.is_empty()) {
            self.care.machines.try_store(record);
        }
        self.care.machines.give_back(record);
        self.care.balloons.keep(record);
        let gone = has_ended(record, &problem);
        problem.guest(if gone { Whereabouts::Gone } else { Whereabouts::Source })
    }
}

/// Brings a machine whose RAM and disks nobody knows to the end of its fork, as soon as its QEMU says what they are,
/// and lets its guest run on. `failed` is why that has not worked yet.
pub fn go_on_once_known(machines: &Arc<Machines>, images: &Arc<Images>, forking: &VmRecord, failed: String) {
    let images = Arc::clone(images);
    let known = move |machines: &Machines, forking: &VmRecord| end_of_fork(machines, &images, forking);
    resuming::go_on_once_known(machines, forking, known, failed);
}

/// A machine that was being forked, as its RAM and its disks are now. That is on record when this returns.
///
/// # Errors
/// As [`ending::recover`] and [`overlays::recover`].
pub fn end_of_fork(machines: &Machines, images: &Images, forking: &VmRecord) -> Result<VmRecord, Problem> {
    let now = ending::recover(forking).and_then(|record| overlays::recover(&record))?;
    if let Err(error) = machines.store_for_daemon(&now) {
        tracing::error!(vm = %now.name, %error, "cannot write the machine's record");
    }
    ending::forget_others(images, forking, &now);
    Ok(now)
}

/// Whether a machine's QEMU has ended, with which something did not work.
fn has_ended(record: &VmRecord, problem: &Problem) -> bool {
    record.process.has_ended(matches!(problem.code, Code::QemuGone | Code::GuestOff))
}

/// A machine that has been forked, and its clones before they run.
struct Paused {
    frozen: Frozen,
    saved: Saved,
    clones: Clones,
    /// The machine as it is now.
    now: VmRecord,
}

/// Has pages of what guests' own pages have become given back when nobody needs them any more.
pub fn mark(latest: &File) {
    if let Err(error) = mark_as_pool(latest) {
        tracing::warn!(%error, "what a fork has made common stays when nobody needs it any more");
    }
}

/// A machine that is forked has a family, and it and its clones may go on sharing what they share: one that is in no
/// trust group founds one with its family, of the same name.
fn with_family(record: VmRecord) -> VmRecord {
    if record.family.is_some() {
        return record;
    }
    let family = format!("{}-{:08x}", record.name, random_u128() as u32);
    let trust_group = record.trust_group.or_else(|| Some(family.clone()));
    VmRecord { family: Some(family), trust_group, ..record }
}

fn check_request(request: &ForkRequest) -> Result<(), Problem> {
    check_hold(request.hold.unwrap_or(0))?;
    match (&request.template, request.hold) {
        (Some(name), Some(_)) => check_name(name)?,
        (Some(_), None) => return Err(invalid("a template's name, and no clones are to be held ready: with hold")),
        _ => {}
    }
    if request.names.is_empty() && request.hold.is_none() || request.names.len() > MOST_CLONES {
        return Err(invalid(format!("{} clones: at least one, and at most {MOST_CLONES}", request.names.len())));
    }
    request.names.iter().try_for_each(|name| check_name(name))?;
    let mut seen = HashSet::new();
    request.to.iter().try_for_each(|to| check_address(to))?;
    if let Some(twice) = request.to.iter().enumerate().find(|(index, to)| request.to[..*index].contains(to)) {
        return Err(invalid(format!("'{}' is named twice as the clones' host", twice.1)));
    }
    if request.hold.is_some() && !request.to.is_empty() {
        return Err(invalid("a template and its clones are on the machine's own host").hint("fork it there by itself"));
    }
    if request.new_mac && !request.to.is_empty() {
        let hint = "'sterna link NAME up --new-mac' does so where the clone is";
        return Err(invalid("clones on other hosts cannot get other hardware addresses yet").hint(hint));
    }
    if request.overlay_directory.is_some() && !request.overlay_disks {
        return Err(invalid("a directory for overlays, and no overlays are asked for"));
    }
    if request.new_mac && request.hold.is_some() {
        let hint = "once one is taken and runs: 'sterna link NAME up --new-mac'";
        return Err(invalid("clones that are held ready keep the hardware addresses of their source").hint(hint));
    }
    if request.new_mac && request.paused {
        return Err(invalid("a guest that is held lets go of no network card, so it gets no other address"));
    }
    match request.names.iter().find(|name| !seen.insert(*name)) {
        Some(twice) => Err(invalid(format!("two clones cannot be '{twice}'"))),
        None => Ok(()),
    }
}
