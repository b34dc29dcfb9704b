//! One machine's way from its claim to its end here.

use std::sync::Arc;
use std::time::Duration;

use sterna_api::problem::Whereabouts;
use sterna_api::report::Host;
use sterna_api::{Blame, Code, MigrateOptions, Problem, Report, Status};
use sterna_engine::host::{DaemonId, MigrationId, SourceHost};
use sterna_engine::inside::InsideQemu;
use sterna_engine::memory::BlockFile;
use sterna_engine::monitor::Monitor;
use sterna_engine::source::throttle::ProcessThrottle;
use sterna_engine::source::track::WriteProtect;
use sterna_engine::source::{self, Fate, Outgoing};
use sterna_engine::transport::credentials::Credentials;
use sterna_engine::vmm::qemu::{Inspection, SharedQmp};

use super::queue::{Ticket, Turn};
use super::records::Stage;
use super::serving::peer_now;
use super::{resuming, waiting};
use crate::problems::host;
use crate::qemu::binary;
use crate::vms::control::{self, Control};
use crate::vms::{Daemon, Lifecycle, VmRecord, random_u128};

/// How long a QEMU whose connection has ended may take to end itself.
const ENDING: Duration = Duration::from_secs(2);

/// Moves a claimed machine to `peer` when its turn has come, and settles where it belongs afterwards. Blocks until then.
pub fn drive(
    daemon: &Arc<Daemon>,
    record: &VmRecord,
    peer: &str,
    options: &MigrateOptions,
    monitor: &Monitor,
    ticket: &Ticket,
) -> Report {
    let alive = || record.process.open().is_some();
    loop {
        let turn = ticket.wait(
            || monitor.check().is_ok() && alive(),
            |wait| {
                monitor.update(|progress| {
                    progress.waiting_for = Some(wait.what);
                    progress.queue_place = Some(wait.place);
                    progress.queue_length = Some(wait.length);
                });
            },
        );
        let Some(turn) = turn else {
            no_longer_waiting(monitor);
            let (problem, status) = if alive() {
                let message = "the migration was cancelled before its turn came";
                (Problem::new(Code::Cancelled, Blame::Request, message), Status::Cancelled)
            } else {
                let problem = Problem::new(Code::QemuGone, Blame::Qemu, "its QEMU ended before its turn came");
                (problem.guest(Whereabouts::Gone), Status::Failed)
            };
            return refused(daemon, record, peer, options, monitor, problem, status);
        };
        match attempt(daemon, record, peer, options, monitor, &turn) {
            Attempt::Ended(report) => return *report,
            Attempt::NotYet(why) => turn.refused(why),
        }
    }
}

fn no_longer_waiting(monitor: &Monitor) {
    monitor.update(|progress| {
        (progress.waiting_for, progress.queue_place, progress.queue_length) = (None, None, None);
    });
}

/// Gives a claimed machine back that was not moved; the report on it.
pub fn refused(
    daemon: &Daemon,
    record: &VmRecord,
    peer: &str,
    options: &MigrateOptions,
    monitor: &Monitor,
    problem: Problem,
    status: Status,
) -> Report {
    daemon.release(&record.name);
    daemon.forget_if_ended(record);
    Report {
        status,
        total_ms: monitor.elapsed().as_secs_f64() * 1e3,
        error: Some(problem),
        ..Report::asked(&record.name, options, here(record), peer)
    }
}

/// How an attempt ended.
enum Attempt {
    /// For good.
    Ended(Box<Report>),
    /// Before it began: the destination takes no more at present, for this reason.
    NotYet(String),
}

fn attempt(
    daemon: &Arc<Daemon>,
    record: &VmRecord,
    peer: &str,
    options: &MigrateOptions,
    monitor: &Monitor,
    turn: &Turn,
) -> Attempt {
    let id = MigrationId(random_u128());
    let outgoing = prepare(daemon, record, id).and_then(|(outgoing, qmp)| {
        let leaving = VmRecord { lifecycle: Lifecycle::Outgoing(id), running: outgoing.spec.running, ..record.clone() };
        daemon.store(&leaving).map_err(|error| host("cannot write the machine's record", &error))?;
        Ok((outgoing, leaving, qmp))
    });
    let (outgoing, leaving, qmp) = match outgoing {
        Ok(outgoing) => outgoing,
        Err(problem) => {
            let gone = record.process.open().is_none();
            let problem = if gone { problem.guest(Whereabouts::Gone) } else { problem };
            let report = refused(daemon, record, peer, options, monitor, problem, Status::Failed);
            return Attempt::Ended(Box::new(report));
        }
    };
    let this = Here { daemon, vm: &record.name, id, peer, options, monitor, turn };
    let lent = daemon.balloons.lend(&record.name, qmp);
    let mut outcome = source::migrate(outgoing, peer, options, &this, monitor);
    drop(lent);
    // Its connection to QEMU is needed no more: what follows makes its own.
    drop(outcome.vmm);
    if outcome.fate != Fate::NotYet {
        no_longer_waiting(monitor);
    }
    match outcome.fate {
        Fate::NotYet => {
            // Still claimed: it waits on, as it did before the attempt.
            if let Err(error) = daemon.store(record) {
                tracing::error!(vm = %record.name, %error, "cannot write the machine's record");
            }
            return Attempt::NotYet(outcome.report.error.map(|problem| problem.message).unwrap_or_default());
        }
        Fate::Here => {
            // Given back to nobody: its QEMU died meanwhile.
            if let Some(problem) = &mut outcome.report.error
                && record.process.open().is_none()
            {
                problem.guest = Whereabouts::Gone;
            }
            belongs_here(daemon, record, id);
        }
        Fate::There => {
            daemon.end_qemu(record);
            daemon.forget(&record.name, record.process);
            daemon.records.remove(id);
        }
        Fate::NotGivenBack => not_given_back(daemon, &leaving, id, &mut outcome.report),
        Fate::Unknown => waiting::wait_for_verdict(daemon, &leaving, id, peer),
    }
    tracing::info!(vm = %record.name, %id, fate = ?outcome.fate, "migration ended");
    Attempt::Ended(Box::new(outcome.report))
}

/// The guest stays here, and its QEMU has not let it run yet.
fn not_given_back(daemon: &Arc<Daemon>, record: &VmRecord, id: MigrationId, report: &mut Report) {
    let Some(problem) = &mut report.error else { return resuming::give_back(daemon, record, id, None) };
    let said_to_be_gone = problem.guest == Whereabouts::Gone;
    // A process that is ending takes a moment.
    let gone = record.process.open().is_none_or(|process| said_to_be_gone && process.wait(Some(ENDING)));
    if gone {
        problem.guest = Whereabouts::Gone;
        return belongs_here(daemon, record, id);
    }
    problem.guest = Whereabouts::Paused;
    problem.hint = Some(format!(
        "it is stopped here and let run as soon as its QEMU does that; 'sterna show {}' says how far it is",
        record.name
    ));
    resuming::give_back(daemon, record, id, Some(problem.cause.last().cloned().unwrap_or_default()));
}

/// The guest belongs here again (or still): as it was before.
fn belongs_here(daemon: &Daemon, record: &VmRecord, id: MigrationId) {
    let here = VmRecord { lifecycle: Lifecycle::Here, ..record.clone() };
    if let Err(error) = daemon.store(&here) {
        tracing::error!(vm = %record.name, %error, "cannot write the machine's record");
    }
    daemon.records.remove(id);
    daemon.release(&record.name);
    daemon.forget_if_ended(record);
}

/// Whether all that writes the guest's RAM does so through QEMU's mapping.
///
/// # Errors
/// A [`Problem`] that names who does not.
pub fn check_writers(name: &str, about: &Inspection) -> Result<(), Problem> {
    if about.foreign_writers.is_empty() {
        return Ok(());
    }
    let who = about.foreign_writers.join(", ");
    let why = format!(
        "'{name}' cannot be moved, nor memory be taken from it: others than QEMU write its RAM, unseen ({who})"
    );
    Err(Problem::new(Code::ForeignWriters, Blame::Request, why)
        .hint("use virtio devices that QEMU or the kernel's vhost serve"))
}

/// What cannot be moved at all, whatever the destination.
fn check_movable(name: &str, about: &Inspection) -> Result<(), Problem> {
    let refuse =
        |code, why: String| Err(Problem::new(code, Blame::Request, format!("'{name}' cannot be moved: {why}")));
    check_writers(name, about)?;
    if !about.blockers.is_empty() {
        return refuse(Code::QemuBlocks, about.blockers.join("; "))
            .map_err(|problem| problem.hint("QEMU itself refuses: take the device away that it names"));
    }
    let immovable = about.immovable_ram();
    if !immovable.is_empty() {
        return refuse(Code::ImmovableRam, format!("RAM that is no shared named file: {}", immovable.join(", ")));
    }
    Ok(())
}

/// A machine that can be moved: its QEMU and its RAM, and what watches its writes.
pub struct Movable {
    /// The connection to its QEMU.
    pub control: Control,
    /// What it is made of.
    pub about: Inspection,
    /// Its RAM.
    pub blocks: Vec<BlockFile>,
    /// What watches its writes.
    pub tracker: WriteProtect<InsideQemu>,
}

/// Reaches a machine's QEMU and agent, and checks that it can be moved at all.
///
/// # Errors
/// A [`Problem`]: what does not answer, or why it cannot be moved.
pub fn movable(record: &VmRecord) -> Result<Movable, Problem> {
    let mut control = Control::connect(&record.qmp)?;
    let about = control.inspect()?;
    check_movable(&record.name, &about)?;
    let (agent, addresses) = control::agent_and_addresses(&record.agent, record.process.pid, &record.blocks)?;
    let blocks = record.block_files(&addresses).map_err(|error| host("cannot open the machine's RAM", &error))?;
    let tracker = WriteProtect::new(record.process.pid, InsideQemu::new(agent)).map_err(|error| error.problem())?;
    Ok(Movable { control, about, blocks, tracker })
}

/// The machine as the engine moves it, and its connection to QEMU.
fn prepare(daemon: &Daemon, record: &VmRecord, id: MigrationId) -> Result<(Outgoing, SharedQmp), Problem> {
    let Movable { control, about, blocks, tracker } = movable(record)?;
    let qmp = control.share();
    let outgoing = Outgoing {
        id,
        spec: record.spec(&about),
        vmm: Box::new(control::source(record, Arc::clone(&qmp))?),
        blocks,
        tracker: Box::new(tracker),
        throttle: Box::new(ProcessThrottle::new(record.process.pid)),
        direct_io: !about.direct_io.is_empty(),
        trust_first_look: daemon.config.test_trust_first_look,
        bandwidth: Arc::clone(&daemon.bandwidth),
        here: here(record),
    };
    Ok((outgoing, qmp))
}

/// This host, for a report.
pub fn here(record: &VmRecord) -> Host {
    Host {
        host: host_name(),
        address: String::new(),
        sterna: env!("CARGO_PKG_VERSION").into(),
        qemu: binary::show(record.qemu_version),
        cpu_s: 0.0,
    }
}

/// This host's name.
#[must_use]
pub fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// This host as the source of one migration.
struct Here<'a> {
    daemon: &'a Daemon,
    vm: &'a str,
    id: MigrationId,
    peer: &'a str,
    options: &'a MigrateOptions,
    monitor: &'a Monitor,
    turn: &'a Turn<'a>,
}

impl SourceHost for Here<'_> {
    fn accepted(&self) {
        tracing::info!(vm = self.vm, id = %self.id, peer = self.peer, "migration begins");
        self.turn.accepted();
        no_longer_waiting(self.monitor);
    }

    fn credentials(&self) -> Option<Arc<Credentials>> {
        self.daemon.credentials.clone()
    }

    fn handing_over(
        &self,
        id: MigrationId,
        peer: &str,
        daemon: Option<DaemonId>,
        postcopy: bool,
    ) -> Result<(), Problem> {
        let postcopy = postcopy.then(|| Box::new(self.options.clone()));
        let stage = Stage::HandingOver { peer: peer.into(), postcopy, daemon };
        self.daemon
            .records
            .write(id, Some(self.vm), stage)
            .map_err(|error| host("cannot write down that the guest is handed over", &error))
    }

    fn peer_now(&self, id: MigrationId) -> Option<String> {
        peer_now(self.daemon, id)
    }

    fn destination_lost(&self) {
        self.turn.pauses();
    }

    fn destination_back(&self) {
        self.turn.goes_on();
    }
}
