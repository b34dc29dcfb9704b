//! Another QEMU takes a guest over on this host: `replace`.
//!
//! Who has the guest is on record at every moment ([`Succession`](crate::machines::succession::Succession)). *Begun*:
//! the machine's own QEMU; another one waits beside it, and ends with whoever began this. *Done*: the record is the new
//! QEMU's, and the former one ends. The one write of the record between the two is the point of no return: a daemon
//! that finds *begun* ends the new QEMU before it lets the guest run on in its own; one that finds *done* ends the
//! former one before it lets it run in the new.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_api::problem::Whereabouts;
use sterna_api::units::milliseconds;
use sterna_api::{Blame, Code, MemoryMode, Problem, ReplaceRequest, Replaced, VmState};
use sterna_engine::agent::Agent;
use sterna_engine::error::MigrateError;
use sterna_engine::memory::{Memory, kind};
use sterna_engine::replace::{HandedOver, Keeper, Stayed, Untouched, hand_over};
use sterna_engine::vmm::qemu::Inspection;
use sterna_engine::vmm::{Destination, Source};
use sterna_sys::map::Access;
use sterna_sys::process::Pidfd;
use sterna_sys::tap;

use crate::care::Care;
use crate::machines::control::{self, Control};
use crate::machines::hold::{Activity, Hold, Shown};
use crate::machines::reach::check_movable;
use crate::machines::record::{VmRecord, version};
use crate::machines::start::{Launcher, Started};
use crate::machines::succession::Succession;
use crate::machines::table::Machines;
use crate::migration::{prechecks, resuming};
use crate::problems::{self, host};
use crate::process::{Handle, Identity};
use crate::qemu::arguments::{self, Additions, Item};
use crate::qemu::binary::{self, Binary};
use crate::qemu::launch::Place;
use crate::qemu::successor::{self, NamedTap};

/// How long a QEMU that closes its connections may take to end.
const END_TIMEOUT: Duration = Duration::from_secs(2);

/// Another QEMU takes the guest over.
#[derive(Debug)]
struct Replacing;

impl Activity for Replacing {
    fn describe(&self) -> &'static str {
        "another QEMU takes it over"
    }

    fn show(&self) -> Shown {
        Shown::As { state: VmState::Running, note: Some(self.describe().into()), progress: None }
    }
}

/// What it takes to replace a machine's QEMU.
#[derive(Debug)]
pub struct Replace<'a> {
    /// The machines, and their care.
    pub care: &'a Care,
    /// What starts QEMUs.
    pub launcher: &'a Launcher,
}

/// A QEMU that waits for the guest.
struct Waiting {
    started: Started,
    /// The machine as it will be.
    next: VmRecord,
    agent: Agent,
    untouched: Untouched,
    taps: Vec<Tap>,
    place: Place,
    changed: Vec<String>,
}

/// A queue of a tap, and the number under which the new QEMU is to have it.
struct Tap {
    number: i32,
    queue: OwnedFd,
}

impl Replace<'_> {
    /// Has another QEMU take a machine's guest over. Blocks until the former one has ended.
    ///
    /// # Errors
    /// A [`Problem`]: the machine is unknown or busy, cannot be replaced and why, or the guest could not be handed
    /// over. The guest is where it was then, unless the problem says otherwise.
    pub fn replace(&self, name: &str, request: &ReplaceRequest) -> Result<Replaced, Problem> {
        let began = Instant::now();
        let machines = &self.care.machines;
        let record = machines.claim(name, Hold::busy(Replacing))?;
        let prepared = self.prepare(&record, request);
        let (about, control, waiting) = prepared.map_err(|problem| self.stays(&record, problem))?;
        let mut replaced = Replaced {
            vm: name.into(),
            from_qemu: binary::show(record.qemu_version),
            from_path: record.qemu_path.display().to_string(),
            to_qemu: binary::show(waiting.next.qemu_version),
            to_path: waiting.next.qemu_path.display().to_string(),
            pid: waiting.next.process.pid,
            changed_arguments: waiting.changed.clone(),
            prepare_ms: milliseconds(began.elapsed()),
            memory_bytes: record.memory_bytes,
            allocated_before_bytes: record.allocated_bytes(),
            ..Replaced::default()
        };
        let handed = self.hand_over(&record, control, waiting, about.running, request.verify);
        let (handed, next) = match handed {
            Ok(handed) => handed,
            Err((problem, None)) => return Err(self.stays(&record, *problem)),
            Err((problem, Some(why))) => {
                // The record says *begun* until the guest runs: so does a restarted daemon's.
                resuming::give_back_here(machines, &record, why);
                return Err(problem.guest(Whereabouts::Paused));
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
            resuming::let_run(machines, &next, problem.with_causes());
            self.care.watch(&next);
            return Err(problem.guest(Whereabouts::Paused).hint(format!(
                "the guest is in its new QEMU, which is asked again until it lets the guest run: 'sterna show {name}'"
            )));
        }
        self.care.settle(&next);
        tracing::info!(
            vm = name,
            from = replaced.from_qemu,
            to = replaced.to_qemu,
            pid = replaced.pid,
            pause_ms = replaced.pause_ms,
            ms = replaced.ms,
            "its QEMU is replaced"
        );
        Ok(replaced)
    }

    /// All that can be done while the guest runs.
    fn prepare(&self, record: &VmRecord, request: &ReplaceRequest) -> Result<(Inspection, Control, Waiting), Problem> {
        let name = &record.name;
        if record.memory_mode == MemoryMode::Private {
            return Err(Problem::new(
                Code::PrivateMemory,
                Blame::Request,
                format!("the QEMU of '{name}' cannot be replaced: its guest's memory is that QEMU's own"),
            )
            .hint("move it to another host and back, or run it with --memory-mode shared"));
        }
        let mut control = Control::connect(&record.qmp)?;
        let about = control.inspect()?;
        check_movable(name, &about)?;
        let own = arguments::parse(&record.arguments);
        let user = request.arguments.clone().unwrap_or_else(|| record.arguments.clone());
        let items = arguments::parse(&user);
        let path = request.qemu.as_ref().map_or(record.qemu_path.clone(), PathBuf::from);
        // There is room: it is the same memory.
        let binary = prechecks::check(&record.spec(&about), &items, Some(&path), u64::MAX)?;
        let succession = Succession::begin();
        let begun = VmRecord { succession: Some(succession.clone()), running: about.running, ..record.clone() };
        self.store(&begun)?;
        let waiting = self.start(&begun, &succession, binary, &items)?;
        let next = VmRecord { arguments: user, ..waiting.next };
        let changed = successor::differences(&own, &items);
        Ok((about, control, Waiting { next, changed, ..waiting }))
    }

    /// Starts a QEMU that waits for the guest.
    fn start(
        &self,
        record: &VmRecord,
        succession: &Succession,
        binary: Binary,
        items: &[Item],
    ) -> Result<Waiting, Problem> {
        let dir = self.care.machines.dir(&record.name);
        let place = succession.place(&dir);
        let mut items = items.to_vec();
        let (taps, stand_ins) = taps(record.process, &mut items)?;
        let managed = record.managed_ram.then(|| (record.memory_bytes, record.blocks[0].path.as_path()));
        let additions = Additions { name: &record.name, qmp: &place.qmp, ram: managed };
        let files: Vec<(String, PathBuf)> =
            record.blocks.iter().map(|block| (block.id.clone(), block.path.clone())).collect();
        let items = successor::beside(&items);
        let all = arguments::for_incoming(&items, &additions, &record.machine, &files);
        let started = self.launcher.start_beside(&binary.path, &all, &place, record.blocks.clone(), &stand_ins)?;
        let noted = succession.with(started.process);
        self.store(&VmRecord { succession: Some(noted), ..record.clone() })?;
        let next = VmRecord {
            process: started.process,
            qemu_path: binary.path.clone(),
            qemu_version: version(&started.about),
            qmp: place.qmp.clone(),
            agent: place.agent.clone(),
            blocks: started.blocks.clone(),
            succession: Some(succession.done(record.process, own_files(record, &dir))),
            ..record.clone()
        };
        let (agent, addresses) = control::agent_and_addresses(&next.agent, next.process.pid, &next.blocks)?;
        let ram = next.blocks.iter().zip(addresses).map(|(block, address)| address..address + block.bytes).collect();
        let untouched = Untouched::of(next.process.pid, ram).map_err(|error| error.problem())?;
        Ok(Waiting { started, next, agent, untouched, taps, place, changed: Vec::new() })
    }

    /// The pause. Where the guest has stayed: why; and why it does not run again, where it does not.
    fn hand_over(
        &self,
        record: &VmRecord,
        control: Control,
        waiting: Waiting,
        running: bool,
        verify: bool,
    ) -> Result<(HandedOver, VmRecord), (Box<Problem>, Option<String>)> {
        let stayed = |problem| (Box::new(problem), None);
        let Waiting { started, next, agent, untouched, taps, place, .. } = waiting;
        let mut former = control::source(record, control.share()).map_err(stayed)?;
        let mut successor = control::destination(&next, place.log).map_err(stayed)?;
        let ram = verify.then(|| ram_of(record)).transpose().map_err(stayed)?;
        let machines = &self.care.machines;
        let mut keeper = Changeover { machines, former: record.process, next: &next, agent, taps };
        let ends = (&mut former as &mut dyn Source, &mut successor as &mut dyn Destination);
        match hand_over(ends, &untouched, &mut keeper, running, ram.as_deref()) {
            Ok(handed) => {
                started.keep();
                Ok((handed, next))
            }
            Err(Stayed { why, stopped }) => {
                let why_stopped = stopped.map(|error| control::refused("give the guest back", &error).with_causes());
                Err((Box::new(why.problem_at_source()), why_stopped))
            }
        }
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
    fn stays(&self, record: &VmRecord, problem: Problem) -> Problem {
        self.care.machines.try_store(record);
        // It may have closed its connections, and take a moment longer to end.
        let patience = if problem.code == Code::QemuGone { END_TIMEOUT } else { Duration::ZERO };
        let ended = record.process.open().is_none_or(|own| own.wait(Some(patience)));
        self.care.machines.give_back(record);
        self.care.balloons.keep(record);
        problem.guest(if ended { Whereabouts::Gone } else { Whereabouts::Source })
    }

    fn store(&self, record: &VmRecord) -> Result<(), Problem> {
        self.care.machines.store(record).map_err(|error| host("cannot write the machine's record", &error))
    }
}

/// The files in a machine's directory that end with the QEMU it has now.
fn own_files(record: &VmRecord, dir: &Path) -> Vec<PathBuf> {
    [&record.qmp, &record.agent].into_iter().filter(|path| path.starts_with(dir)).cloned().collect()
}

/// The guest's RAM, to be read.
fn ram_of(record: &VmRecord) -> Result<Arc<dyn Memory>, Problem> {
    let blocks = record.block_files(&[]).map_err(|error| host("cannot open the machine's RAM", &error))?;
    kind::open(&blocks, Access::Read).map_err(|error| MigrateError::from(error).problem())
}

/// The taps of a machine's QEMU, and others like them, which the arguments name then.
fn taps(process: Identity, items: &mut [Item]) -> Result<(Vec<Tap>, Vec<OwnedFd>), Problem> {
    let named = successor::taps(items);
    if named.is_empty() {
        return Ok(Default::default());
    }
    let failed = |error: sterna_sys::Error| host("cannot hand the machine's tap devices over", &error);
    let pidfd = Pidfd::open(process.pid).map_err(failed)?;
    let mut open = tap::open_taps(&pidfd, process.pid).map_err(failed)?;
    let (mut real, mut stand_ins, mut given) = (Vec::new(), Vec::new(), Vec::<(NamedTap, Vec<i32>)>::new());
    // Those that are named first: what is left is in the order in which QEMU opened it, that of its arguments.
    let claimed: Vec<String> = named.iter().filter_map(|tap| tap.device.clone()).collect();
    for tap in named {
        let wanted = |other: &tap::OpenTap| match &tap.device {
            Some(device) => other.name == *device,
            None => !claimed.contains(&other.name),
        };
        let found = open.iter().position(wanted).map(|index| open.remove(index));
        let found = found.ok_or_else(|| {
            let which = tap.device.as_deref().unwrap_or("one of its tap devices");
            problems::invalid(format!("its QEMU has not opened {which}, which its arguments name"))
                .guest(Whereabouts::Source)
                .hint("network cards that were plugged in or out while it ran: name them in the arguments after '--'")
        })?;
        let like = tap::like(&found).map_err(failed)?;
        let numbers: Vec<i32> = like.iter().map(AsRawFd::as_raw_fd).collect();
        real.extend(numbers.iter().zip(found.queues).map(|(number, queue)| Tap { number: *number, queue }));
        given.push((tap, numbers));
        stand_ins.extend(like);
    }
    successor::give_taps(items, &given);
    Ok((real, stand_ins))
}

/// What changes hands in the pause.
struct Changeover<'a> {
    machines: &'a Machines,
    former: Identity,
    next: &'a VmRecord,
    agent: Agent,
    taps: Vec<Tap>,
}

impl Keeper for Changeover<'_> {
    fn stopped(&mut self) -> Result<(), MigrateError> {
        for tap in &self.taps {
            let doing = "giving the new QEMU its tap devices";
            let put = self.agent.put_descriptor(tap.number.unsigned_abs(), tap.queue.as_fd());
            put.map_err(|error| MigrateError::Agent { doing, source: Box::new(error) })?;
        }
        Ok(())
    }

    fn commit(&mut self) -> Result<(), MigrateError> {
        self.machines
            .succeed(self.former, self.next)
            .map_err(|error| MigrateError::Record(host("cannot write down that the guest is in its new QEMU", &error)))
    }

    fn end_successor(&mut self) {
        self.next.process.open().iter().for_each(Handle::kill);
    }
}
