//! Warm pools: clones of a template that are held ready, so that one is had in the time of a `cont`.
//!
//! A pool is filled by a thread of its own, again and again: whatever ended in the middle, it comes back to its number.

use std::fs;
use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use sterna_api::units::milliseconds;
use sterna_api::{ForkRequest, Problem, Taken, TemplateState};
use sterna_engine::fork::Image;
use sterna_engine::vmm::Destination as _;

use super::clone::Plan;
use super::overlays::Overlays;
use super::templates::{Template, TemplateRecord, Templates, template_name, unknown};
use crate::care::Care;
use crate::guest_agent;
use crate::machines::claim::Reservation;
use crate::machines::control::{self, Control, end_qemu};
use crate::machines::files::directory_problem;
use crate::machines::held::{Held, Ready, Taking, new_name, rename_files};
use crate::machines::hold::Hold;
use crate::machines::overlay::Overlay;
use crate::machines::record::VmRecord;
use crate::machines::start::{Launcher, check_sockets};
use crate::machines::table::Machines;
use crate::migration::incoming::Destination;
use crate::migration::promises::Promise;
use crate::migration::resuming;
use crate::problems::{check_name, host, invalid};
use crate::qemu::launch::{Place, log_file};
use crate::several;

/// The most clones of one request, and of one pool.
pub const MOST_CLONES: usize = 256;
/// The memory that a QEMU needs beside its guest's RAM, bytes.
const QEMU_BYTES: u64 = 64 << 20;
/// How often pools are looked at, where nobody asks for it.
const LOOK: Duration = Duration::from_secs(1);
/// How long a pool that could not be filled is left alone.
const PATIENCE: Duration = Duration::from_secs(10);

/// The warm pools of this host.
#[derive(Debug)]
pub struct WarmPools {
    /// The machines, and their care.
    pub care: Care,
    /// What starts QEMUs.
    pub launcher: Arc<Launcher>,
    /// This host as one that machines come to: its memory, and what gangs share.
    pub here: Destination,
    /// What clones are made of.
    pub templates: Templates,
    /// Somebody wants the pools looked at.
    wanted: Mutex<bool>,
    asked: Condvar,
}

impl WarmPools {
    /// The pools of these templates.
    #[must_use]
    pub fn new(care: Care, launcher: Arc<Launcher>, here: Destination, templates: Templates) -> Self {
        Self { care, launcher, here, templates, wanted: Mutex::default(), asked: Condvar::new() }
    }

    /// Begins to keep them filled, on a thread of its own, for as long as this daemon runs.
    pub fn begin(self: &Arc<Self>) {
        let pools = Arc::clone(self);
        let look = move || {
            loop {
                for template in pools.templates.list() {
                    pools.look_after(&template);
                }
                let wanted = pools.wanted.lock().unwrap_or_else(PoisonError::into_inner);
                let (mut wanted, _) = pools
                    .asked
                    .wait_timeout_while(wanted, LOOK, |wanted| !*wanted)
                    .unwrap_or_else(PoisonError::into_inner);
                *wanted = false;
            }
        };
        if let Err(error) = std::thread::Builder::new().name("warm".into()).spawn(look) {
            tracing::error!(%error, "cannot start the thread that keeps clones ready");
        }
    }

    /// Has the pools looked at soon.
    fn ask(&self) {
        *self.wanted.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.asked.notify_all();
    }

    fn machines(&self) -> &Arc<Machines> {
        &self.care.machines
    }

    /// Makes a template of a machine that has just been forked: `source` before that, as far as disks are concerned,
    /// and these overlays were made of it. No clone of it is there yet.
    ///
    /// # Errors
    /// A [`Problem`]: no template can be made.
    pub fn make(
        &self,
        request: &ForkRequest,
        source: VmRecord,
        overlays: &[Overlay],
        machine: &str,
        ram: (Arc<Image>, &[u8]),
    ) -> Result<Arc<Template>, Problem> {
        let name = template_name(request, &source.name).to_owned();
        tracing::info!(template = name, of = %source.name, hold = request.hold, "made");
        let describe = |image| TemplateRecord {
            name: name.clone(),
            machine: machine.into(),
            arguments: request.arguments.clone(),
            content_bytes: content_bytes(&source),
            image,
            hold: request.hold.unwrap_or(0),
            overlays: overlays.to_vec(),
            making: Vec::new(),
            removed: false,
            source,
        };
        self.templates.add(&name, ram.0, ram.1, describe)
    }

    /// Fills the pool of a template that was just made, whose clones room is promised for. Returns it as the API shows
    /// it; one with fewer clones ready says why.
    #[must_use]
    pub fn fill_first(&self, template: &Arc<Template>) -> TemplateState {
        self.fill(template, template.record().hold);
        self.describe(template)
    }

    /// The template of this name, as the API shows it.
    ///
    /// # Errors
    /// A [`Problem`] where there is none.
    pub fn show(&self, name: &str) -> Result<TemplateState, Problem> {
        Ok(self.describe(&*self.templates.get(name)?))
    }

    /// All templates, by name.
    #[must_use]
    pub fn list(&self) -> Vec<TemplateState> {
        self.templates.list().iter().map(|template| self.describe(template)).collect()
    }

    fn describe(&self, template: &Template) -> TemplateState {
        let (record, trouble) = (template.record(), template.trouble());
        let ready = self.ready(&record.name);
        TemplateState {
            source: record.source.name,
            family: record.source.family,
            trust_group: record.source.trust_group,
            memory_bytes: record.source.memory_bytes,
            image_bytes: record.image.bytes(),
            hold: record.hold,
            ready: ready.len() as u32,
            allocated_bytes: ready.iter().map(VmRecord::allocated_bytes).sum(),
            shared_bytes: ready.iter().map(VmRecord::shared_bytes).sum(),
            note: trouble.map(|(why, since)| format!("{why} ({} s ago)", since.elapsed().as_secs())),
            name: record.name,
        }
    }

    /// Changes how many clones of a template are held ready; returns when it is so, or cannot be.
    ///
    /// # Errors
    /// A [`Problem`]: there is no such template, or what is in the way of so many.
    pub fn resize(&self, name: &str, hold: u32) -> Result<TemplateState, Problem> {
        check_hold(hold)?;
        let template = self.templates.get(name)?;
        let more = hold.saturating_sub(self.ready(name).len() as u32);
        let _room = self.promise_room(&template.record(), more)?;
        self.templates.set_hold(&template, hold)?;
        self.fill(&template, more);
        self.show(name)
    }

    /// Removes a template and the clones that are held of it. Those that were taken stay.
    ///
    /// # Errors
    /// A [`Problem`]: there is no such template, or its record stays.
    pub fn remove(&self, name: &str) -> Result<(), Problem> {
        // From here on a daemon started anew ends what is held of it.
        let template = self.templates.remove(name)?;
        self.fill(&template, 0);
        self.templates.release(&template);
        tracing::info!(template = name, "removed");
        Ok(())
    }

    /// Lets a clone of a template run under this name: one that is held ready, or one that is made now.
    ///
    /// # Errors
    /// A [`Problem`]: there is no such template, the name is taken, or no clone can be made.
    pub fn take(&self, template: &str, name: &str) -> Result<Taken, Problem> {
        let began = Instant::now();
        check_name(name)?;
        let template = self.templates.get(template)?;
        let taken = self.take_or_make(&template, name, began);
        self.ask();
        taken
    }

    fn take_or_make(&self, template: &Arc<Template>, name: &str, began: Instant) -> Result<Taken, Problem> {
        loop {
            let reservation = Reservation::starting(self.machines(), name)?;
            let dir = self.machines().dir(name);
            check_sockets(&Place::first(&dir))?;
            if dir.symlink_metadata().is_ok() {
                return Err(directory_problem(&dir, &io::ErrorKind::AlreadyExists.into()));
            }
            let Some(held) = self.claim(&template.record().name) else {
                let record = template.record();
                let _room = self.promise_room(&record, 1)?;
                let cloned = self.clone_of(template, name, reservation, None, began)?;
                self.set_clock(name);
                return Ok(Taken { vm: name.into(), pid: cloned.pid, ms: cloned.ms, was_held: false });
            };
            let taken = match self.rename(&held, name) {
                Ok(taken) => taken,
                Err(error) => {
                    // It is whole, and has its former name.
                    self.hold_on(&held);
                    return Err(host("cannot give a clone that is held ready its name", &error));
                }
            };
            reservation.becomes(&held.name, &taken);
            match self.let_run(&taken, &held.name) {
                Ok(record) => {
                    let ms = milliseconds(began.elapsed());
                    tracing::info!(vm = name, from = %held.name, ms, "taken");
                    self.care.watch(&record);
                    self.machines().give_back(&record);
                    return Ok(Taken { vm: name.into(), pid: record.process.pid, ms, was_held: true });
                }
                // The next one may do better.
                Err(problem) => {
                    tracing::warn!(vm = %held.name, as_ = name, "it could not be taken: {}", problem.with_causes());
                    self.end(&held, name);
                }
            }
        }
    }

    /// Claims a clone that is held ready of this template.
    fn claim(&self, template: &str) -> Option<VmRecord> {
        let mut table = self.machines().table();
        let is_ready = |hold: &Hold| hold.activity::<Ready>().is_some_and(|ready| ready.template == template);
        let entry = table.values_mut().find(|entry| is_ready(&entry.hold))?;
        let record = entry.record.clone()?;
        entry.hold = Hold::Starting;
        Some(record)
    }

    /// Gives a held clone its name: what a daemon finds on either side of this, it goes on with.
    fn rename(&self, held: &VmRecord, name: &str) -> io::Result<VmRecord> {
        let machines = self.machines();
        let taking = Some(Taking { from: held.name.clone(), to: name.into() });
        let waits = held.held.as_ref().map(|waits| Held { taking, ..waits.clone() });
        let taking = VmRecord { held: waits, ..held.clone() };
        machines.store_for_daemon(&taking)?;
        let to = machines.dir(name);
        fs::rename(machines.dir(&held.name), &to)?;
        Ok(taking.renamed(name, &to))
    }

    /// Lets a clone run that has just got its name. Returns it as any other machine.
    fn let_run(&self, taken: &VmRecord, former: &str) -> Result<VmRecord, Problem> {
        let failed = |error| host("cannot write the machine's record", &error);
        self.machines().store_for_daemon(taken).map_err(failed)?;
        let running = self.run_taken(taken, former)?;
        self.machines().store_for_daemon(&running).map_err(failed)?;
        Ok(running)
    }

    /// A clone waits for whoever takes it next.
    fn hold_on(&self, held: &VmRecord) {
        if let Some(Held { template, .. }) = &held.held {
            self.machines().hold(&held.name, Hold::busy(Ready { template: template.clone() }));
        }
    }

    /// Lets a clone run that has got its name. Returns it as any other machine.
    fn run_taken(&self, taken: &VmRecord, former: &str) -> Result<VmRecord, Problem> {
        rename_files(&taken.arguments, former, &taken.name);
        let control = Control::connect_started(&taken.qmp)?;
        let mut driver = control::destination(control, taken, log_file(&self.machines().dir(&taken.name)))?;
        driver.start().map_err(|error| control::refused("let the clone run", &error))?;
        guest_agent::set_clock_later(taken);
        Ok(VmRecord { held: None, overlays: Vec::new(), ..taken.clone() })
    }

    /// Has the clock of a clone set that was made when it was asked for: it goes on at the moment of the fork.
    fn set_clock(&self, name: &str) {
        let record = self.machines().table().get(name).and_then(|entry| entry.record.clone());
        record.inspect(guest_agent::set_clock_later);
    }

    /// Ends a clone that could not be taken, whichever name it has by now.
    fn end(&self, held: &VmRecord, name: &str) {
        if let Some(process) = held.process.open() {
            process.kill();
        }
        held.overlays.iter().for_each(Overlay::remove);
        [&held.name, name].iter().for_each(|name| self.machines().forget(name, held.process));
    }

    /// The clones that are held ready of a template.
    fn ready(&self, template: &str) -> Vec<VmRecord> {
        let table = self.machines().table();
        let of_it = table
            .values()
            .filter(|entry| entry.hold.activity::<Ready>().is_some_and(|ready| ready.template == template));
        of_it.filter_map(|entry| entry.record.clone()).collect()
    }

    /// Looks whether its clones are still there, and makes up for those that are not.
    fn look_after(&self, template: &Arc<Template>) {
        let record = template.record();
        let gone = |ready: &VmRecord| ready.process.open().is_none();
        for lost in self.ready(&record.name).into_iter().filter(gone) {
            tracing::warn!(vm = %lost.name, template = %record.name, "a clone that was held ready has ended");
            self.machines().forget_clone(&lost);
        }
        let waits = template.trouble().is_some_and(|(_, since)| since.elapsed() < PATIENCE);
        if !waits && self.ready(&record.name).len() != record.hold as usize {
            self.fill(template, 0);
        }
    }

    /// Brings the pool to its number. What is in the way is noted with the template. For so many clones room is
    /// `promised` already.
    fn fill(&self, template: &Arc<Template>, promised: u32) {
        let _alone = template.filling.lock().unwrap_or_else(PoisonError::into_inner);
        let record = template.record();
        let wanted = if template.is_gone() { 0 } else { record.hold as usize };
        let ready = self.ready(&record.name);
        if wanted < ready.len() {
            let claimed = (wanted..ready.len()).filter_map(|_| self.claim(&record.name)).collect();
            several::map(claimed, |surplus: VmRecord| {
                end_qemu(&surplus);
                self.machines().forget_clone(&surplus);
            });
        }
        let missing = wanted.saturating_sub(ready.len());
        let made = self.promise_room(&record, (missing as u32).saturating_sub(promised)).map(|_room| {
            let made = several::map((0..missing).collect(), |_| self.hold_another(template, &record.name));
            made.into_iter().collect::<Result<Vec<()>, Problem>>()
        });
        let problem = made.and_then(|made| made.map(drop)).err();
        if let Some(problem) = &problem {
            tracing::warn!(template = %record.name, "no clone can be made ready: {}", problem.with_causes());
        }
        template.set_trouble(problem.map(|problem| problem.with_causes()));
    }

    fn hold_another(&self, template: &Arc<Template>, of: &str) -> Result<(), Problem> {
        let name = new_name();
        let reservation = Reservation::starting(self.machines(), &name)?;
        let held = Held { template: of.into(), taking: None };
        self.clone_of(template, &name, reservation, Some(held), Instant::now()).map(drop)
    }

    /// Makes a clone of a template: one that runs, or one that is held.
    fn clone_of(
        &self,
        template: &Arc<Template>,
        name: &str,
        reservation: Reservation,
        held: Option<Held>,
        began: Instant,
    ) -> Result<sterna_api::Cloned, Problem> {
        // Pages that only it will need stay; asked after that, the template is there for as long as this takes.
        let _held = self.here.pools.hold();
        let record = template.record();
        if template.is_gone() {
            return Err(unknown(&record.name));
        }
        let request = ForkRequest { arguments: record.arguments.clone(), ..ForkRequest::default() };
        let devices = record.image.devices().map_err(|error| host("cannot read the template's devices", &error))?;
        let plan = Plan::new(&record.source, &record.machine, &request)?.holding(held);
        let overlays = Overlays::like(&record.overlays, name);
        self.templates.begin_overlays(template, &overlays.all)?;
        let cloned = overlays.make_like_templates().and_then(|disks| {
            let begun = plan.begin(&self.launcher, &overlays, (name.into(), reservation, disks))?;
            begun.load(&self.care, &template.image, &devices, began)
        });
        self.templates.end_overlays(template, &overlays.all);
        cloned
    }

    /// Has room promised for so many more clones, and for what is kept back of what they may write.
    fn promise_room(&self, record: &TemplateRecord, more: u32) -> Result<Option<Promise>, Problem> {
        let needed = needed_bytes(record.content_bytes, self.here.unshare_reserve, u64::from(more));
        let what = format!("what may become of {more} clones of the template '{}'", record.name);
        (more > 0).then(|| self.here.promise(&what, needed)).transpose()
    }

    /// Takes up a clone that an earlier daemon held, or was giving away; its QEMU runs.
    pub fn recover(&self, record: &VmRecord, held: &Held) {
        if let Some(taking) = held.taking.as_ref().filter(|_| record.is_taken_as(&record.name)) {
            return self.recover_taken(record, &taking.from);
        }
        let still = VmRecord { held: Some(Held { taking: None, ..held.clone() }), ..record.clone() };
        if self.templates.get(&held.template).is_err() {
            tracing::info!(vm = %record.name, template = held.template, "its template is gone: it is ended");
            end_qemu(record);
            return self.machines().forget_clone(record);
        }
        self.machines().try_store(&still);
        self.hold_on(&still);
    }

    fn recover_taken(&self, taken: &VmRecord, former: &str) {
        match self.run_taken(taken, former) {
            Ok(running) => self.care.settle(&running),
            Err(problem) => {
                let running = VmRecord { held: None, overlays: Vec::new(), ..taken.clone() };
                self.care.watch(&running);
                resuming::let_run(self.machines(), &running, problem.with_causes());
            }
        }
    }
}

/// What in a machine's RAM has content, bytes.
#[must_use]
pub fn content_bytes(record: &VmRecord) -> u64 {
    record.blocks.iter().map(|block| block.content_bytes(record.process.pid)).sum()
}

/// The memory, bytes, that so many clones need: for their QEMUs, and what is kept back of what they may write.
#[must_use]
pub fn needed_bytes(content: u64, unshare_reserve: u8, clones: u64) -> u64 {
    let may_write = (u128::from(content) * u128::from(unshare_reserve) / 100) as u64;
    clones.saturating_mul(may_write.saturating_add(QEMU_BYTES))
}

/// Checks the number of clones of a pool.
///
/// # Errors
/// A [`Problem`] where there are too many.
pub fn check_hold(hold: u32) -> Result<(), Problem> {
    if hold as usize > MOST_CLONES {
        return Err(invalid(format!("{hold} clones cannot be held ready: at most {MOST_CLONES}")));
    }
    Ok(())
}
