//! Another QEMU takes a guest over on this host: `replace`.
//!
//! Who has the guest is on record at every moment ([`Succession`](crate::machines::succession::Succession)). *Begun*:
//! the machine's own QEMU; another one waits beside it, and ends with whoever began this. *Done*: the record is the new
//! QEMU's, and the former one ends. The one write of the record between the two is the point of no return: a daemon
//! that finds *begun* ends the new QEMU before it lets the guest run on in its own; one that finds *done* ends the
//! former one before it lets it run in the new.
//!
//! Private memory is its QEMU's own. The new one maps the files that the guest's memory consists of, and a file with
//! the guest's own pages, which are copied while it runs, as for a fork (`Draft`), and touches none of it until the
//! last ones are there. The former one's memory stays as it was.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use sterna_api::problem::Whereabouts;
use sterna_api::units::milliseconds;
use sterna_api::{Blame, Code, MemoryMode, Problem, ReplaceRequest, Replaced};
use sterna_engine::agent::Agent;
use sterna_engine::error::MigrateError;
use sterna_engine::fork::layer::{Draft, Layer};
use sterna_engine::memory::{Memory, kind};
use sterna_engine::replace::{HandedOver, Keeper, Stayed, Untouched, hand_over};
use sterna_engine::vmm::qemu::{QemuDestination, QemuSource};
use sterna_engine::vmm::{self, Source};
use sterna_sys::map::Access;

use crate::care::Care;
use crate::fork;
use crate::machines::control::{self, Control};
use crate::machines::files::kept_log;
use crate::machines::hold::{Hold, InPlace};
use crate::machines::reach::{check_images, check_movable};
use crate::machines::record::{VmRecord, version};
use crate::machines::start::{Launcher, Reached, Started};
use crate::machines::succession::Succession;
use crate::machines::table::Machines;
use crate::migration::incoming::Destination;
use crate::migration::promises::Promise;
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
    /// This host as one whose memory is promised.
    pub here: &'a Destination,
    /// Whether the threads of a pause may go before all others.
    pub may_haste: bool,
}

/// The QEMU that has the guest.
struct Former {
    vmm: QemuSource,
    /// Whether the guest is to run.
    running: bool,
    /// The memory that its pages may take once more while it is there.
    _room: Option<Promise>,
}

/// A QEMU that waits for the guest.
struct Waiting {
    successor: QemuDestination,
    started: Started,
    /// The machine as it will be.
    next: VmRecord,
    agent: Agent,
    /// Where it has RAM.
    ram: Vec<Range<u64>>,
    /// Of private memory, the file that the guest's own pages become.
    draft: Option<Draft>,
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
        let prepared = self.prepare(&record, request, &doing);
        let (mut former, waiting) = prepared.map_err(|problem| self.stays(&record, problem))?;
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
        let (handed, layer) = match self.hand_over(&record, &mut former, waiting, request.verify) {
            Ok(handed) => handed,
            Err(Stayed { why, stopped: None }) => {
                // Where nothing had begun, its migration settings are to be put back still.
                let _ = former.vmm.rollback();
                return Err(self.stays(&record, why.problem()));
            }
            Err(Stayed { why, stopped: Some(error) }) => {
                let own = VmRecord { running: next.running, ..record };
                let failed = control::refused("give the guest back", &error).with_causes();
                return Err(self.stands_still(&own, false, failed, why.problem()));
            }
        };
        replaced.ms = milliseconds(began.elapsed());
        replaced.verify = handed.verify;
        if let Some(layer) = layer {
            (replaced.copied_bytes, replaced.copied_in_pause_bytes) = (layer.bytes, layer.late_bytes);
            fork::mark(&layer.file);
        }
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
    fn prepare(
        &self,
        record: &VmRecord,
        request: &ReplaceRequest,
        doing: &InPlace,
    ) -> Result<(Former, Waiting), Problem> {
        let name = &record.name;
        record.check_settled()?;
        let mut control = Control::connect(&record.qmp)?;
        let about = control.inspect()?;
        check_movable(name, "have its QEMU replaced", &about)?;
        let user = request.arguments.clone().unwrap_or_else(|| record.arguments.clone());
        let user = vmgenid::kept(user, &arguments::parse(&record.arguments));
        let items = arguments::parse(&user);
        files::check_absolute(&items)?;
        check_keeps_memory(name, &items)?;
        check_images(name, &items, &about)?;
        let path = request.qemu.as_ref().map_or(record.qemu_path.clone(), PathBuf::from);
        // For shared memory there is room: it is the same. A guest's own pages in private memory are copied, and are
        // there twice until its former QEMU has ended.
        let copy = || self.here.promise(&format!("a copy of what '{name}' has for its own"), record.allocated_bytes());
        let room = (record.memory_mode == MemoryMode::Private).then(copy).transpose()?;
        let binary = prechecks::check(&record.spec(&about), &items, Some(&path))?;
        let mut vmm = control::source(record, control.share())?;
        let running = vmm.running().map_err(|error| control::refused("tell its state", &error))?;
        let past = match record.memory_mode {
            MemoryMode::Shared => false,
            MemoryMode::Private => {
                check_private(record, &items)?;
                control::reads_past(record, &mut vmm, &format!("the QEMU of '{}' cannot be replaced", record.name))?
            }
        };
        doing.found(running);
        let succession = Succession::begin();
        let begun = VmRecord { succession: Some(succession.clone()), running, ..record.clone() };
        self.store(&begun)?;
        let started = self.start((&mut vmm, past), &begun, &succession, binary, (user, items));
        match started {
            Ok(waiting) => Ok((Former { vmm, running, _room: room }, waiting)),
            Err(problem) => {
                // Its migration settings are what they were.
                let _ = vmm.rollback();
                Err(problem)
            }
        }
    }

    /// Starts a QEMU that waits for the guest, and has the former one ready to let it go.
    fn start(
        &self,
        (former, past): (&mut QemuSource, bool),
        record: &VmRecord,
        succession: &Succession,
        binary: Binary,
        (user, mut items): (Vec<String>, Vec<Item>),
    ) -> Result<Waiting, Problem> {
        let dir = self.care.machines.dir(&record.name);
        let place = succession.place(&dir);
        let (taps, stand_ins) = Taps::of(record.process, &mut items)?;
        let kind = self.launcher.ram_kind(record.memory_mode, record.trust_group.as_deref());
        let blocks = match record.memory_mode {
            MemoryMode::Shared => record.blocks.clone(),
            MemoryMode::Private => self.launcher.blocks_like(&record.name, &record.blocks),
        };
        let managed = record.managed_ram.then(|| (record.memory_bytes, blocks[0].path.as_path()));
        let additions =
            Additions { name: &record.name, qmp: &place.qmp, ram: managed, huge: record.wants_huge_pages() };
        let files: Vec<(String, PathBuf)> = blocks.iter().map(|block| (block.id.clone(), block.path.clone())).collect();
        let all = arguments::for_incoming(&successor::beside(&items), &additions, &record.machine, &files);
        let (draft, started, prepared) = std::thread::scope(|scope| {
            let draft = scope.spawn(|| self.copy_ahead(record, past));
            let prepared = scope.spawn(|| former.prepare());
            let ram = (succession, kind, blocks.clone());
            let started = self.launcher.start_beside(&binary.path, &all, &record.name, ram, &stand_ins);
            let draft = draft.join().unwrap_or_else(|panic| resume_unwind(panic));
            (draft, started, prepared.join().unwrap_or_else(|panic| resume_unwind(panic)))
        });
        let (draft, (started, Reached { control, agent, addresses })) = (draft?, started?);
        prepared.map_err(|error| control::refused("prepare to let its guest go", &error))?;
        self.store(&VmRecord { succession: Some(succession.with(started.process)), ..record.clone() })?;
        let next = VmRecord {
            process: started.process,
            qemu_path: binary.path,
            qemu_version: version(&started.about),
            arguments: user,
            qmp: place.qmp,
            agent: place.agent,
            blocks: started.blocks.clone(),
            succession: Some(succession.done(record.process, own_files(record, &dir))),
            ..record.clone()
        };
        let ram: Vec<_> =
            next.blocks.iter().zip(addresses).map(|(block, address)| address..address + block.bytes).collect();
        let untouched = Untouched::of(next.process.pid, ram.clone()).map_err(|error| error.problem())?;
        let successor = control::destination(control, &next, place.log)?;
        Ok(Waiting { successor, started, next, agent, ram, draft, untouched, taps, stand_ins })
    }

    /// Of private memory: copies the guest's own pages, and watches what it writes from then on. `past`: its disks
    /// read past the page tables.
    fn copy_ahead(&self, record: &VmRecord, past: bool) -> Result<Option<Draft>, Problem> {
        if record.memory_mode == MemoryMode::Shared {
            return Ok(None);
        }
        let (_, addresses) = control::agent_and_addresses(&record.agent, record.process.pid, &record.blocks)?;
        let mut draft = fork::source::draft(record, &addresses, &self.launcher.state.ram(), past)?;
        draft.copy_ahead().map_err(|error| error.problem())?;
        Ok(Some(draft))
    }

    /// The pause.
    fn hand_over(
        &self,
        record: &VmRecord,
        former: &mut Former,
        waiting: Waiting,
        verify: bool,
    ) -> Result<(HandedOver, Option<Layer>), Stayed> {
        let Waiting { mut successor, started, next, agent, ram, draft, .. } = waiting;
        let Waiting { untouched, taps, stand_ins, .. } = waiting;
        let stays = |why: MigrateError| Stayed { why: Box::new(why), stopped: None };
        let compared = verify.then(|| Ok((ram_of(record)?, ram_of(&next)?))).transpose().map_err(stays)?;
        let compared = compared.as_ref().map(|(former, next)| (former.as_ref(), next.as_ref()));
        let (mut agent, mut draft) = (agent, draft);
        if let Some(draft) = &mut draft {
            // What the guest has written since.
            draft.copy_ahead().and_then(|()| draft.ahead()?.lay(&mut agent, &ram)).map_err(stays)?;
        }
        let machines = &self.care.machines;
        let moved = draft.map(|draft| Moved { draft, ram, layer: None });
        let may_haste = self.may_haste;
        let mut keeper = Changeover { machines, former: record.process, next: &next, agent, taps, moved, may_haste };
        let vmms: (&mut dyn Source, &mut dyn vmm::Destination) = (&mut former.vmm, &mut successor);
        let handed = hand_over(vmms, &untouched, &mut keeper, former.running, compared);
        drop(stand_ins);
        let handed = handed?;
        started.keep();
        Ok((handed, keeper.moved.and_then(|moved| moved.layer)))
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
        let gone = problem.code == Code::QemuGone;
        let ended = record.process.has_ended(gone);
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

/// Refuses a device that would empty the guest's memory, which both QEMUs have, before the guest is the new one's.
fn check_keeps_memory(name: &str, items: &[Item]) -> Result<(), Problem> {
    let Some(item) = arguments::empties_memory(items) else { return Ok(()) };
    let device = item.value.as_deref().unwrap_or_default();
    let message = format!(
        "the QEMU of '{name}' cannot be replaced: a new one empties the memory of '-device {device}' when it starts"
    );
    Err(Problem::new(Code::ArgumentConflict, Blame::Request, message).hint("move it to another host and back"))
}

/// Checks that the guest's private memory can become another QEMU's.
fn check_private(record: &VmRecord, items: &[Item]) -> Result<(), Problem> {
    let refuse = |why: &str, hint: &str| {
        let message = format!("the QEMU of '{}' cannot be replaced: {why}", record.name);
        Err(Problem::new(Code::PrivateMemory, Blame::Request, message).hint(hint))
    };
    if !record.managed_ram {
        return refuse("its private memory was not made by Sterna", "move it to another host and back");
    }
    if let Some((item, reason)) = arguments::unfit_for_private(items) {
        return refuse(&format!("'-{}': {reason}", item.option), "give its arguments without");
    }
    record.check_template()
}

/// The files that end with the QEMU that a machine has now: those in its directory, and those of private memory.
fn own_files(record: &VmRecord, dir: &Path) -> Vec<PathBuf> {
    let sockets = [&record.qmp, &record.agent].into_iter().filter(|path| path.starts_with(dir)).cloned();
    let private = record.blocks.iter().filter(|block| block.private.is_some()).map(|block| block.path.clone());
    sockets.chain(private).collect()
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
    moved: Option<Moved>,
    may_haste: bool,
}

/// Private memory that becomes the new QEMU's.
struct Moved {
    draft: Draft,
    /// Where the new QEMU has its own.
    ram: Vec<Range<u64>>,
    /// What the guest's own pages have become.
    layer: Option<Layer>,
}

impl Keeper for Changeover<'_> {
    fn may_haste(&self) -> bool {
        self.may_haste
    }

    fn moves_ram(&self) -> bool {
        self.moved.is_some()
    }

    fn move_ram(&mut self) -> Result<(), MigrateError> {
        let Some(Moved { draft, ram, layer }) = &mut self.moved else { return Ok(()) };
        let (rest, made) = draft.rest()?;
        rest.lay_rest(&mut self.agent, ram)?;
        // The guest alone writes its memory, from its first instruction there.
        rest.wait_until_nobody_writes()?;
        *layer = Some(made);
        Ok(())
    }

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
