//! Clones that go to other hosts.
//!
//! Each is moved as a machine is in post-copy, and what is on record of it here is what would be of such a machine
//! whose QEMU has ended: a machine of its name, *being moved away*, whose RAM is the fork's image. The image's file
//! gets a name for each clone, so that it is kept for as long as one needs it, over this daemon's end; nothing of a
//! file that such a record has is given back (`migration::sweep`). What is done after a lost link, and by a daemon
//! that finds such a record, is therefore what is done for any guest in post-copy (`migration::{waiting, serving}`),
//! but that nobody is let run here again: where the destination says that the clone never ran, its record goes.
//!
//! Its overlays are on that record, too. They lie where its host finds them by the same names, and go with a clone that
//! never ran.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use sterna_api::options::{FakeDirty, SkipFree};
use sterna_api::report::Host;
use sterna_api::units::milliseconds;
use sterna_api::{Cloned, MemoryMode, MigrateOptions, Mode, Phase, Problem, Report, Status};
use sterna_engine::error::MigrateError;
use sterna_engine::fork::away::{Pause, Still, Unthrottled, Writes};
use sterna_engine::fork::{Image, Saved};
use sterna_engine::host::{self, DaemonId, MigrationId, SourceHost};
use sterna_engine::memory::BlockFile;
use sterna_engine::memory::common::Together;
use sterna_engine::source::pauses::Place;
use sterna_engine::source::tickets::Tickets;
use sterna_engine::source::{self, Fate, Gang, Outgoing};
use sterna_engine::transport::credentials::Credentials;
use sterna_engine::vmm::Untracked;
use sterna_protocol::layout::PAGE_BYTES;
use sterna_protocol::spec::{SharedPages, VmSpec};
use sterna_sys::file::{give_name, reader};
use sterna_sys::host::random_u128;

use super::clone::{Plan, QEMU_BYTES};
use super::overlays::{Made, Overlays};
use super::source::MOST_MAPPINGS;
use crate::machines::backing::Block;
use crate::machines::claim::Reservation;
use crate::machines::hold::Hold;
use crate::machines::record::{Lifecycle, VmRecord};
use crate::machines::start::Launcher;
use crate::migration::departures::Departures;
use crate::migration::jobs::Job;
use crate::migration::leaving::Leaving;
use crate::migration::records::Stage;
use crate::migration::sharing::Membership;
use crate::migration::waiting::wait_for_verdict;
use crate::problems;
use crate::process::Identity;
use crate::qemu::arguments::unparse;
use crate::several;

/// How often it is looked whether a clone runs, where nothing is told of it.
const LOOK: Duration = Duration::from_millis(100);

/// What clones on other hosts begin as, and where they go.
pub struct Way<'a> {
    /// This host as a source.
    pub departures: &'a Arc<Departures>,
    /// What makes paths and directories here.
    pub launcher: &'a Launcher,
    /// The machine that is forked, as it is on record.
    pub source: &'a VmRecord,
    /// The same, as a destination must know it.
    pub spec: VmSpec,
    /// What its clones are to be.
    pub plan: &'a Plan<'a>,
    /// And their disks.
    pub overlays: &'a Overlays,
    /// What is kept back of what they may write, percent.
    pub unshare_reserve: u8,
}

/// The clones of one fork, each on its way. Dropped before they have gone on, nothing of them is left.
pub struct Away {
    pause: Arc<Pause>,
    clones: Vec<Leaver>,
}

/// The name of a clone, and what is its own before it has set out.
type Clone = (String, Reservation, Made);

/// A clone on its way.
struct Leaver {
    name: String,
    job: Arc<Job>,
    /// Which of the job's machines it is.
    index: usize,
    ready: Receiver<()>,
    thread: Option<JoinHandle<()>>,
}

/// What the thread of a clone has.
struct Journey {
    departures: Arc<Departures>,
    record: VmRecord,
    id: MigrationId,
    spec: VmSpec,
    /// The image, open for reading only.
    image: File,
    gang: Membership,
    connected: bool,
    pause: Arc<Pause>,
    job: Arc<Job>,
    index: usize,
}

impl Away {
    /// Sets clones of these names on their way, to these hosts in turn: each is proposed there, and waits for the
    /// pause. `image` is the file that has all of their memory once the pause is over.
    ///
    /// # Errors
    /// A [`Problem`]: the image cannot be given a name, or a record not be written. Nothing of them is left.
    pub fn begin(way: &Way<'_>, image: &File, clones: Vec<Clone>, to: &[String]) -> Result<Self, Problem> {
        let pause = Arc::default();
        let mut by_host: BTreeMap<usize, Vec<Clone>> = BTreeMap::new();
        for (number, clone) in clones.into_iter().enumerate() {
            by_host.entry(number % to.len()).or_default().push(clone);
        }
        let mut leaving = Vec::new();
        for (number, clones) in by_host {
            let names: Vec<String> = clones.iter().map(|(name, ..)| name.clone()).collect();
            let job = way.departures.jobs.add(&to[number], &names);
            let gang = (clones.len() > 1).then(|| way.gang(clones.len()));
            leaving.extend(clones.into_iter().enumerate().map(|(index, clone)| {
                let member = gang.clone().map(|gang| (gang, index as u16));
                (clone, member, Arc::clone(&job), index)
            }));
        }
        // Records are written to disk.
        let set_out = several::map(leaving, |(clone, member, job, index)| {
            let name = clone.0.clone();
            way.set_out(clone, member, image, (&pause, &job, index)).inspect_err(|problem| {
                let report = Report { error: Some(problem.clone()), ..failed(&name, &job.to) };
                job.end(index, &way.departures.metrics, report);
            })
        });
        let mut away = Self { pause, clones: Vec::with_capacity(set_out.len()) };
        let mut problem = None;
        for clone in set_out {
            match clone {
                Ok(clone) => away.clones.push(clone),
                Err(why) => problem = Some(why),
            }
        }
        problem.map_or(Ok(away), Err)
    }

    /// Waits until each waits for nothing but the pause.
    ///
    /// # Errors
    /// A [`Problem`]: one was refused, or did not get so far.
    pub fn wait_until_ready(&mut self) -> Result<(), Problem> {
        self.clones.iter_mut().try_for_each(|clone| match clone.ready.recv() {
            Ok(()) => Ok(()),
            Err(_) => Err(clone.problem()),
        })
    }

    /// Lets them go on as this, and waits until each runs where it is, or has come to nothing. Their pages follow them
    /// afterwards. `began`: when they were asked for.
    pub fn go(mut self, saved: &Saved, image: &Arc<Image>, began: Instant) -> Vec<(String, Result<Cloned, Problem>)> {
        self.pause.over(saved, image);
        let clones = std::mem::take(&mut self.clones);
        several::map(clones, |mut clone| (clone.name.clone(), clone.arrives(began)))
    }
}

impl Drop for Away {
    fn drop(&mut self) {
        self.pause.came_to_nothing();
        self.clones.drain(..).for_each(|mut clone| clone.end());
    }
}

impl Leaver {
    /// Waits until it runs.
    fn arrives(&mut self, began: Instant) -> Result<Cloned, Problem> {
        let monitor = self.job.monitor(self.index);
        let mut seen = 0;
        loop {
            seen = monitor.wait(seen, LOOK);
            let runs = match monitor.progress().phase {
                Phase::Postcopy | Phase::Finish => true,
                // The report comes before the thread's end.
                _ if self.thread.as_ref().is_none_or(JoinHandle::is_finished) => match self.report() {
                    Some(report) if report.status == Status::Completed => true,
                    _ => return Err(self.problem()),
                },
                _ => false,
            };
            if runs {
                let (vm, host) = (self.name.clone(), Some(self.job.to.clone()));
                return Ok(Cloned { vm, pid: 0, ms: milliseconds(began.elapsed()), host, lacks: None });
            }
        }
    }

    /// Why it came to nothing.
    fn problem(&mut self) -> Problem {
        self.end();
        let why = self.report().and_then(|report| report.error);
        why.unwrap_or_else(|| MigrateError::Bug("a clone's thread broke off").problem())
    }

    /// Waits for its thread's end. What it reports is there by then.
    fn end(&mut self) {
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }

    fn report(&self) -> Option<Report> {
        self.job.show().migrations.into_iter().find(|report| report.vm == self.name)
    }
}

impl Way<'_> {
    /// Clones that go to one host: what they have in common goes there once.
    fn gang(&self, clones: usize) -> Arc<Gang> {
        let (record, content) = (self.source, self.spec.allocated_bytes);
        let each = (u128::from(content) * u128::from(self.unshare_reserve) / 100) as u64 + QEMU_BYTES;
        let pages = content / PAGE_BYTES as u64;
        let together = Together {
            bytes: content.saturating_add(each.saturating_mul(clones as u64)),
            // The bodies lie there as they lie in the image.
            shared: vec![SharedPages { pages, mappings: pages.min(MOST_MAPPINGS) }; clones],
        };
        Gang::alike(record.trust_group.as_deref().unwrap_or_default(), clones as u16, together)
    }

    /// Sets a clone on its way.
    fn set_out(
        &self,
        (name, reservation, disks): Clone,
        gang: Membership,
        image: &File,
        (pause, job, index): (&Arc<Pause>, &Arc<Job>, usize),
    ) -> Result<Leaver, Problem> {
        let (departures, name) = (self.departures, name.as_str());
        let record = self.record(name, image)?;
        let (id, path) = (MigrationId(random_u128()), record.blocks[0].path.clone());
        let record = VmRecord { lifecycle: Lifecycle::Outgoing(id), ..record };
        let spec = VmSpec {
            name: name.into(),
            private: true,
            arguments: record.arguments.clone(),
            running: record.running,
            kin: record.kin(),
            split: None,
            ..self.spec.clone()
        };
        let made = self.launcher.state.make_vm(name);
        made.map_err(|error| problems::host("cannot make the clone's directory", &error))?;
        let leaving = Leaving::new(Arc::clone(job.monitor(index)), &job.to);
        // On record first: a name that is on no record keeps its file for nobody.
        let kept = reservation.keep(&record, Hold::busy(leaving));
        kept.inspect_err(|_| {
            let _ = std::fs::remove_dir_all(self.launcher.state.vm(name));
        })?;
        // From here on they are the record's.
        disks.keep();
        let forget = || departures.machines.forget_clone(&record);
        let named = give_name(image, &path).and_then(|()| reader(image));
        let image = named
            .inspect_err(|_| forget())
            .map_err(|error| problems::host("cannot keep the image for the clone", &std::io::Error::from(error)))?;
        let (told, ready) = mpsc::channel();
        let journey = Journey {
            departures: Arc::clone(departures),
            record: record.clone(),
            id,
            spec,
            image,
            gang,
            connected: self.plan.is_connected(),
            pause: Arc::clone(pause),
            job: Arc::clone(job),
            index,
        };
        let thread = std::thread::Builder::new().name(format!("move-{name}")).spawn(move || journey.go(told));
        let thread = thread.inspect_err(|_| forget());
        let thread = thread.map_err(|error| problems::host("cannot start a clone's thread", &error))?;
        Ok(Leaver { name: name.into(), job: Arc::clone(job), index, ready, thread: Some(thread) })
    }

    /// What is on record here of a clone while its pages are here.
    fn record(&self, name: &str, image: &File) -> Result<VmRecord, Problem> {
        let source = self.source;
        let mut blocks = Vec::with_capacity(source.blocks.len());
        for block in &source.blocks {
            let path = self.launcher.new_ram_path(name);
            let mut block = Block::new(&block.id, block.bytes, block.page_bytes, &path);
            block.is_to_be(image).map_err(|error| problems::host("cannot look at the image", &error))?;
            blocks.push(block);
        }
        Ok(VmRecord {
            name: name.into(),
            memory_mode: MemoryMode::Shared,
            arguments: unparse(&self.plan.items(self.overlays, name)?),
            process: Identity::nobody(),
            qmp: PathBuf::new(),
            agent: PathBuf::new(),
            blocks,
            owns_ram_files: true,
            kept_before: None,
            running: self.plan.runs(),
            waits_for_room: false,
            image: true,
            overlays: self.overlays.of(name),
            bases: Vec::new(),
            forked_from: Some(source.name.clone()),
            ..source.clone()
        })
    }
}

impl Journey {
    /// Moves the clone, and settles what is on record of it. `ready` is told once it waits for nothing but the pause.
    fn go(self, ready: mpsc::Sender<()>) {
        let Self { departures, record, id, .. } = &self;
        let (monitor, to, options) = (self.job.monitor(self.index), self.job.to.as_str(), options());
        let outgoing = match self.outgoing(ready) {
            Ok(outgoing) => outgoing,
            Err(error) => {
                departures.machines.forget_clone(record);
                let problem = problems::host("cannot open the image", &error);
                let report = Report { error: Some(problem), ..failed(&record.name, to) };
                return self.job.end(self.index, &departures.metrics, report);
            }
        };
        let outcome = source::migrate(outgoing, to, &options, &Here(&self), monitor);
        tracing::info!(vm = %record.name, id = %id, to, fate = ?outcome.fate, "a clone's migration ended");
        match outcome.fate {
            Fate::Unknown => wait_for_verdict(departures, record, *id, to),
            Fate::There => {
                departures.machines.forget(&record.name, record.process);
                departures.records.remove(*id);
            }
            Fate::Here | Fate::NotYet | Fate::NotGivenBack => {
                departures.records.remove(*id);
                departures.machines.forget_clone(record);
            }
        }
        let mut report = outcome.report;
        if let Some(problem) = report.error.as_mut().filter(|_| outcome.fate == Fate::Unknown) {
            problem.hint = Some(format!("whether it runs at {to} is asked until {to} answers"));
        }
        self.job.end(self.index, &departures.metrics, report);
    }

    fn outgoing(&self, ready: mpsc::Sender<()>) -> std::io::Result<Outgoing> {
        let blocks =
            self.spec.blocks.iter().map(|spec| {
                Ok(BlockFile { spec: spec.clone(), file: self.image.try_clone()?, address: 0, process: None })
            });
        Ok(Outgoing {
            id: self.id,
            spec: self.spec.clone(),
            vmm: Box::new(Still::of(&self.pause, ready)),
            blocks: blocks.collect::<std::io::Result<_>>()?,
            tracker: Box::new(Writes::default()),
            throttle: Box::new(Unthrottled),
            untracked: Untracked::Nobody,
            trust_first_look: false,
            bandwidth: Arc::clone(&self.departures.bandwidth),
            gang: self.gang.clone(),
            tickets: Tickets::default(),
            clone: Some(host::Clone { connected: self.connected }),
            split: None,
            pause: Place::alone(),
            here: self.record.here(),
        })
    }
}

/// How a clone is moved.
fn options() -> MigrateOptions {
    let (fake_dirty, skip_free) = (FakeDirty::Off, SkipFree::Off);
    MigrateOptions { mode: Mode::Postcopy, fake_dirty, skip_free, ..MigrateOptions::default() }
}

/// The report on a clone that was not begun with.
fn failed(name: &str, to: &str) -> Report {
    Report { status: Status::Failed, ..Report::asked(name, &options(), Host::default(), to) }
}

/// This host as the source of one clone.
struct Here<'a>(&'a Journey);

impl SourceHost for Here<'_> {
    fn credentials(&self) -> Option<Arc<Credentials>> {
        self.0.departures.credentials.clone()
    }

    fn accepted(&self) {}

    fn handing_over(
        &self,
        id: MigrationId,
        peer: &str,
        daemon: Option<DaemonId>,
        _postcopy: bool,
    ) -> Result<(), Problem> {
        let Journey { departures, record, pause, .. } = self.0;
        pause.nobody_writes().map_err(|error| error.problem())?;
        let stage = Stage::HandingOver { peer: peer.into(), postcopy: Some(Box::new(options())), daemon };
        departures
            .records
            .write(id, Some(&record.name), stage)
            .map_err(|error| problems::host("cannot write down that the clone is handed over", &error))
    }

    fn peer_now(&self, id: MigrationId) -> Option<String> {
        self.0.departures.records.peer_now(id)
    }
}
