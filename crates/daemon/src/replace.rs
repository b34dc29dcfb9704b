//! Another QEMU takes a guest over on this host: `replace`.
//!
//! Who has the guest is on record at every moment ([`Succession`](crate::machines::succession::Succession)). *Begun*:
//! the machine's own QEMU; another one waits beside it, and ends with whoever began this. *Done*: the record is the new
//! QEMU's, and the former one ends. The one write of the record between the two is the point of no return: a daemon
//! that finds *begun* ends the new QEMU before it lets the guest run on in its own; one that finds *done* ends the
//! former one before it lets it run in the new.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use sterna_api::problem::Whereabouts;
use sterna_api::units::milliseconds;
use sterna_api::{Blame, Code, MemoryMode, Problem, ReplaceRequest, Replaced};
use sterna_engine::agent::Agent;
use sterna_engine::error::MigrateError;
use sterna_engine::memory::{Memory, kind};
use sterna_engine::replace::{HandedOver, Keeper, Stayed, Untouched, hand_over};
use sterna_engine::vmm::Source;
use sterna_engine::vmm::qemu::{QemuDestination, QemuSource};
use sterna_sys::map::Access;

use crate::care::Care;
use crate::machines::control::{self, Control};
use crate::machines::files::kept_log;
use crate::machines::hold::{Hold, InPlace};
use crate::machines::reach::check_movable;
use crate::machines::record::{VmRecord, version};
use crate::machines::start::{Launcher, Started};
use crate::machines::succession::Succession;
use crate::machines::table::Machines;
use crate::migration::{prechecks, resuming};
use crate::problems::host;
use crate::process::{Handle, Identity};
use crate::qemu::arguments::{self, Additions, Item};
use crate::qemu::binary::{self, Binary};
use crate::qemu::{files, successor, vmgenid};

/// Taps that change hands.
mod taps;

use taps::Taps;

/// What it takes to replace a machine's QEMU.
#[derive(Debug)]
pub struct Replace<'a> {
    /// The machines, and their care.
    pub care: &'a Care,
    /// What starts QEMUs.
    pub launcher: &'a Launcher,
}

/// A QEMU that waits for the guest, and the one that has it.
struct Waiting {
    former: QemuSource,
    /// Whether the guest is to run.
    running: bool,
    successor: QemuDestination,
    started: Started,
    /// The machine as it will be.
    next: VmRecord,
    agent: Agent,
    untouched: Untouched,
    taps: Taps,
    /// What stands in for the taps. The last who closes one waits for the kernel to take a network device apart: that
    /// must not be the new QEMU in the pause.
    stand_ins: Vec<OwnedFd>,
}

impl Replace<'_> {
    /// Has another QEMU take a machine's guest over. Blocks until the former one has ended.
    ///
    /// # Errors
    /// A [`Problem`]: the machine is unknown or busy, cannot be replaced and why, or the guest could not be handed
    /// over. The guest is where it was then, unless the problem says otherwise.
    pub fn replace(&self, name: &str, request: &ReplaceRequest) -> Result<Replaced, Problem> {
        let began = Instant::now();
        let doing = InPlace::new("another QEMU takes it over");
        let record = self.care.machines.claim(name, Hold::shared(&doing))?;
        let waiting = self.prepare(&record, request, &doing).map_err(|problem| self.stays(&record, problem))?;
        let next = waiting.next.clone();
        let (own, new) = (arguments::parse(&record.arguments), arguments::parse(&next.arguments));
        let mut replaced = Replaced {
            vm: name.into(),
            from_qemu: binary::show(record.qemu_version),
            from_path: record.qemu_path.display().to_string(),
            to_qemu: binary::show(next.qemu_version),
            to_path: next.qemu_path.display().to_string(),
            pid: next.process.pid,
            changed_arguments: successor::differences(&own, &new),
            prepare_ms: milliseconds(began.elapsed()),
            memory_bytes: record.memory_bytes,
            allocated_before_bytes: record.allocated_bytes(),
            ..Replaced::default()
        };
        let handed = match self.hand_over(&record, waiting, request.verify) {
            Ok(handed) => handed,
            Err(Stayed { why, stopped: None }) => return Err(self.stays(&record, why.problem())),
            Err(Stayed { why, stopped: Some(error) }) => {
                let own = VmRecord { running: next.running, ..record };
                let failed = control::refused("give the guest back", &error).with_causes();
                return Err(self.stands_still(&own, false, failed, why.problem()));
            }
        };
        replaced.ms = milliseconds(began.elapsed());
        replaced.verify = handed.verify;
        if let Some(start) = handed.start {
            replaced.pause_ms = start.0.saturating_sub(handed.stopped.stop.0) as f64 / 1e3;
        }
        replaced.end_ms = self.end_former(&record, &next);
        replaced.allocated_after_bytes = next.allocated_bytes();
        if let Some(waits) = handed.waits {
            let problem = control::refused("let the guest run", &waits);
            return Err(self.stands_still(&next, true, problem.with_causes(), problem));
        }
        self.care.settle(&next);
        let Replaced { from_qemu, to_qemu, pid, pause_ms, ms, .. } = &replaced;
        tracing::info!(vm = name, from_qemu, to_qemu, pid, pause_ms, ms, "its QEMU is replaced");
        Ok(replaced)
    }

    /// All that can be done while the guest runs.
    fn prepare(&self, record: &VmRecord, request: &ReplaceRequest, doing: &InPlace) -> Result<Waiting, Problem> {
        let name = &record.name;
        if record.memory_mode == MemoryMode::Private {
            return Err(Problem::new(
                Code::PrivateMemory,
                Blame::Request,
                format!("the QEMU of '{name}' cannot be replaced: its guest's memory is that QEMU's own"),
            )
            .hint("move it to another host and back, or run it with --memory-mode shared"));
        }
        record.check_settled()?;
        let mut control = Control::connect(&record.qmp)?;
        let about = control.inspect()?;
        check_movable(name, &about)?;
        let user = request.arguments.clone().unwrap_or_else(|| record.arguments.clone());
        let user = vmgenid::kept(user, &arguments::parse(&record.arguments));
        let items = arguments::parse(&user);
        files::check_absolute(&items)?;
        let path = request.qemu.as_ref().map_or(record.qemu_path.clone(), PathBuf::from);
        // There is room: it is the same memory.
        let binary = prechecks::check(&record.spec(&about), &items, Some(&path), u64::MAX)?;
        let mut former = control::source(record, control.share())?;
        let running = former.running().map_err(|error| control::refused("tell its state", &error))?;
        doing.found(running);
        let succession = Succession::begin();
        let begun = VmRecord { succession: Some(succession.clone()), running, ..record.clone() };
        self.store(&begun)?;
        self.start((former, running), &begun, &succession, binary, (user, items))
    }

    /// Starts a QEMU that waits for the guest.
    fn start(
        &self,
        (former, running): (QemuSource, bool),
        record: &VmRecord,
        succession: &Succession,
        binary: Binary,
        (user, mut items): (Vec<String>, Vec<Item>),
    ) -> Result<Waiting, Problem> {
        let dir = self.care.machines.dir(&record.name);
        let place = succession.place(&dir);
        let (taps, stand_ins) = Taps::of(record.process, &mut items)?;
        let managed = record.managed_ram.then(|| (record.memory_bytes, record.blocks[0].path.as_path()));
        let additions = Additions { name: &record.name, qmp: &place.qmp, ram: managed };
        let files: Vec<(String, PathBuf)> =
            record.blocks.iter().map(|block| (block.id.clone(), block.path.clone())).collect();
        let all = arguments::for_incoming(&successor::beside(&items), &additions, &record.machine, &files);
        let ram = (succession, record.blocks.clone());
        let started = self.launcher.start_beside(&binary.path, &all, &record.name, ram, &stand_ins)?;
        self.store(&VmRecord { succession: Some(succession.with(started.process)), ..record.clone() })?;
        let next = VmRecord {
            process: started.process,
            qemu_path: binary.path,
            qemu_version: version(&started.about),
            arguments: user,
            qmp: place.qmp,
            agent: place.agent,
            succession: Some(succession.done(record.process, own_files(record, &dir))),
            ..record.clone()
        };
        let (agent, addresses) = control::agent_and_addresses(&next.agent, next.process.pid, &next.blocks)?;
        let ram = next.blocks.iter().zip(addresses).map(|(block, address)| address..address + block.bytes).collect();
        let untouched = Untouched::of(next.process.pid, ram).map_err(|error| error.problem())?;
        let successor = control::destination(&next, place.log)?;
        Ok(Waiting { former, running, successor, started, next, agent, untouched, taps, stand_ins })
    }

    /// The pause.
    fn hand_over(&self, record: &VmRecord, waiting: Waiting, verify: bool) -> Result<HandedOver, Stayed> {
        let Waiting { mut former, running, mut successor, started, next, agent, untouched, taps, stand_ins } = waiting;
        let ram = verify.then(|| ram_of(record)).transpose();
        let ram = ram.map_err(|why| Stayed { why: Box::new(why), stopped: None })?;
        let machines = &self.care.machines;
        let mut keeper = Changeover { machines, former: record.process, next: &next, agent, taps };
        let handed = hand_over((&mut former, &mut successor), &untouched, &mut keeper, running, ram.as_deref());
        drop(stand_ins);
        let handed = handed?;
        started.keep();
        Ok(handed)
    }

    /// Ends the QEMU that has the guest no more. The time that it took, milliseconds.
    ///
    /// It is killed: told to quit, it would remove the paths of sockets that are the new QEMU's by now, and with
    /// `discard-data` its guest's RAM.
    fn end_former(&self, former: &VmRecord, next: &VmRecord) -> f64 {
        let began = Instant::now();
        former.process.open().iter().for_each(Handle::kill);
        if let Some(succession) = &next.succession {
            succession.tidy(&next.name, &self.care.machines.dir(&next.name), &self.launcher.state.logs());
        }
        milliseconds(began.elapsed())
    }

    /// The machine is as it was, unless its own QEMU has ended.
    fn stays(&self, record: &VmRecord, mut problem: Problem) -> Problem {
        self.care.machines.try_store(record);
        // It may have closed its connections, and take a moment longer to end.
        let gone = problem.code == Code::QemuGone;
        let ended = if gone { record.process.is_ending() } else { record.process.open().is_none() };
        self.care.machines.give_back(record);
        self.care.balloons.keep(record);
        if ended {
            return problem.guest(Whereabouts::Gone);
        }
        if gone {
            problem.message = "the new QEMU has ended before it had the guest".into();
        }
        if gone || problem.code == Code::QemuFailed && problem.cause.is_empty() {
            let log = kept_log(&self.launcher.state.logs(), &record.name);
            problem.hint = Some(format!("what the new QEMU said is in {}", log.display()));
        }
        problem.guest(Whereabouts::Source)
    }

    /// The machine stands still, in its new QEMU where it is `replaced`, else in its own, which is asked until it lets
    /// it run. `failed` is why that has not worked yet. The record says so until then, and a daemon started anew goes
    /// on.
    fn stands_still(&self, record: &VmRecord, replaced: bool, failed: String, problem: Problem) -> Problem {
        resuming::go_on_here(&self.care.machines, record, replaced, failed);
        if replaced {
            self.care.watch(record);
        }
        if record.process.open().is_none() {
            return problem.guest(Whereabouts::Gone);
        }
        problem.guest(Whereabouts::Paused).hint(format!(
            "the guest is in its {} QEMU, which is asked again until it lets the guest run: 'sterna show {}'",
            if replaced { "new" } else { "own" },
            record.name
        ))
    }

    /// Writes the record of a machine whose guest is in its own QEMU still.
    fn store(&self, record: &VmRecord) -> Result<(), Problem> {
        let stored = self.care.machines.store_succession(record.process, record);
        stored.map_err(|error| host("cannot write the machine's record", &error))
    }
}

/// The files in a machine's directory that end with the QEMU it has now.
fn own_files(record: &VmRecord, dir: &Path) -> Vec<PathBuf> {
    [&record.qmp, &record.agent].into_iter().filter(|path| path.starts_with(dir)).cloned().collect()
}

/// The guest's RAM, to be read.
fn ram_of(record: &VmRecord) -> Result<Arc<dyn Memory>, MigrateError> {
    let blocks = record.block_files(&[]).map_err(MigrateError::host("opening the guest's RAM"))?;
    Ok(kind::open(&blocks, Access::Read)?)
}

/// What changes hands in the pause.
struct Changeover<'a> {
    machines: &'a Machines,
    former: Identity,
    next: &'a VmRecord,
    agent: Agent,
    taps: Taps,
}

impl Keeper for Changeover<'_> {
    fn stopped(&mut self) -> Result<(), MigrateError> {
        let doing = "giving the new QEMU its tap devices";
        let handed = self.taps.hand_over(&mut self.agent);
        handed.map_err(|error| MigrateError::Agent { doing, source: Box::new(error) })
    }

    fn commit(&mut self) -> Result<(), MigrateError> {
        let stored = self.machines.store_succession(self.former, self.next);
        stored
            .map_err(|error| MigrateError::Record(host("cannot write down that the guest is in its new QEMU", &error)))
    }

    fn end_successor(&mut self) {
        self.next.process.open().iter().for_each(Handle::kill);
    }
}
