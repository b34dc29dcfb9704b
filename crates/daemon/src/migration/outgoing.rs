//! One machine's migration, from its claim to its end here.

use std::sync::Arc;
use std::time::Duration;

use sterna_api::problem::Whereabouts;
use sterna_api::{Blame, Code, MigrateOptions, Problem, Report, Status};
use sterna_engine::host::{DaemonId, MigrationId, SourceHost};
use sterna_engine::memory::Memory;
use sterna_engine::monitor::Monitor;
use sterna_engine::source::pauses::Pauses;
use sterna_engine::source::throttle::ProcessThrottle;
use sterna_engine::source::{self, Fate, Outgoing};
use sterna_engine::transport::credentials::Credentials;
use sterna_engine::vmm::qemu::SharedQmp;
use sterna_protocol::spec::{Ticket, VmSpec};
use sterna_sys::host::random_u128;

use super::departures::Departures;
use super::leaving::Leaving;
use super::onward;
use super::queue::{self, Turn};
use super::records::Stage;
use super::returns::Returns;
use super::sharing::Membership;
use super::{resuming, waiting};
use crate::machines::control::{self, end_qemu};
use crate::machines::reach::{Movable, movable};
use crate::machines::record::{Lifecycle, VmRecord};
use crate::problems::host;

/// How long a QEMU whose connection has ended may take to end itself.
const ENDING: Duration = Duration::from_secs(2);

/// A claimed machine on its way.
#[derive(Debug, Clone, Copy)]
pub struct Mover<'a> {
    /// This host as its source.
    pub departures: &'a Arc<Departures>,
    /// The machine, as it was when this was last looked at.
    pub record: &'a VmRecord,
    /// How others see it.
    pub leaving: &'a Leaving,
    /// The destination's address.
    pub peer: &'a str,
    /// The migration's options.
    pub options: &'a MigrateOptions,
    /// The monitor of the migration.
    pub monitor: &'a Monitor,
    /// The gang that it shares pages with.
    pub gang: &'a Membership,
    /// What of it is kept here, and what it can show.
    pub returns: &'a Returns,
    /// How the pauses of those that leave with it lie.
    pub pauses: &'a Arc<Pauses>,
    /// Whether it is brought together where it goes, if it is split.
    pub merge: bool,
}

/// How an attempt ended.
enum Attempt {
    /// The migration has ended.
    Ended(Box<Report>),
    /// The migration did not begin: the destination accepts no more at present, for this reason.
    NotYet(String),
}

impl Mover<'_> {
    /// Moves the machine when its turn has come, and settles where it belongs afterwards. Blocks until then.
    pub fn drive(&self, ticket: &queue::Ticket) -> Report {
        let Self { departures, record, leaving, monitor, .. } = *self;
        let alive = || record.process.open().is_some();
        loop {
            leaving.set_waits(true);
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
            // Where it is just being stopped for want of memory, or let go on, that ends first, and is on record then.
            // What follows begins with the machine as it is now: by an older record a guest that was stopped would be
            // paused by its user, where it goes and, after a migration that failed, here.
            leaving.set_waits(false);
            let Some(turn) = turn else {
                no_longer_waiting(monitor);
                let (problem, status) = if alive() {
                    let message = "the migration was cancelled before its turn came";
                    (Problem::new(Code::Cancelled, Blame::Request, message), Status::Cancelled)
                } else {
                    let problem = Problem::new(Code::QemuGone, Blame::Qemu, "its QEMU ended before its turn came");
                    (problem.guest(Whereabouts::Gone), Status::Failed)
                };
                return self.refused(problem, status);
            };
            let now = departures.machines.now(record);
            match (Mover { record: &now, ..*self }).attempt(&turn) {
                Attempt::Ended(report) => return *report,
                Attempt::NotYet(why) => turn.refused(why),
            }
        }
    }

    /// Gives the machine back, which was not moved. Returns the report.
    pub fn refused(&self, problem: Problem, status: Status) -> Report {
        self.departures.machines.give_back(self.record);
        Report {
            status,
            total_ms: self.monitor.elapsed().as_secs_f64() * 1e3,
            error: Some(problem),
            ..Report::asked(&self.record.name, self.options, self.record.here(), self.peer)
        }
    }

    fn attempt(&self, turn: &Turn) -> Attempt {
        let Self { departures, record, peer, options, monitor, .. } = *self;
        let Departures { machines, records, .. } = &**departures;
        let id = MigrationId(random_u128());
        let number = self.returns.keeping.as_ref().map(|_| random_u128());
        let outgoing = self.prepare(id, number).and_then(|(outgoing, qmp)| {
            let leaving =
                VmRecord { lifecycle: Lifecycle::Outgoing(id), running: outgoing.spec.running, ..record.clone() };
            machines.store(&leaving).map_err(|error| host("cannot write the machine's record", &error))?;
            Ok((outgoing, leaving, qmp))
        });
        let (outgoing, leaving, qmp) = match outgoing {
            Ok(outgoing) => outgoing,
            Err(problem) => {
                let gone = record.process.open().is_none();
                let problem = if gone { problem.guest(Whereabouts::Gone) } else { problem };
                return Attempt::Ended(Box::new(self.refused(problem, Status::Failed)));
            }
        };
        let lent = departures.lending.lend(&record.name, qmp);
        let options = onward::options(record, options);
        let mut outcome = source::migrate(outgoing, peer, &options, &Here { mover: self, id, number, turn }, monitor);
        drop(lent);
        // The connection to QEMU is not needed any more: what follows makes its own.
        drop(outcome.vmm);
        if outcome.fate != Fate::NotYet {
            no_longer_waiting(monitor);
        }
        match outcome.fate {
            Fate::NotYet => {
                // The machine is still claimed: it waits on, as it did before the attempt.
                machines.try_store(record);
                return Attempt::NotYet(outcome.report.error.map(|problem| problem.message).unwrap_or_default());
            }
            Fate::Here => {
                // No guest can run on here: QEMU has died meanwhile.
                if let Some(problem) = &mut outcome.report.error
                    && record.process.open().is_none()
                {
                    problem.guest = Whereabouts::Gone;
                }
                belongs_here(departures, record, id);
            }
            Fate::There => {
                end_qemu(record);
                machines.forget(&record.name, record.process);
                records.remove(id);
            }
            Fate::NotGivenBack => not_given_back(departures, &leaving, id, &mut outcome.report),
            Fate::Unknown => waiting::wait_for_verdict(departures, &leaving, id, peer),
        }
        tracing::info!(vm = %record.name, %id, fate = ?outcome.fate, "migration ended");
        Attempt::Ended(Box::new(outcome.report))
    }

    /// The machine as the engine moves it, and its connection to QEMU. `number`: that of the ticket that it takes along
    /// from here, where one is given.
    fn prepare(&self, id: MigrationId, number: Option<u128>) -> Result<(Outgoing, SharedQmp), Problem> {
        let Self { departures, record, gang, returns, pauses, .. } = *self;
        let split = onward::leaving(&departures.machines, record, self.merge)?;
        let Movable { control, about, blocks, tracker } =
            movable(record, split.as_ref().map(|(split, _)| split.pager()))?;
        let qmp = control.share();
        let own = number.map(|number| Ticket { host: departures.identity.0, number });
        let needed =
            split.as_ref().map(|(split, _)| onward::needed_bytes(record, split, self.merge, self.options.mode));
        let allocated_bytes = needed.unwrap_or_else(|| record.content_bytes());
        let (split, told) = split.unzip();
        let outgoing = Outgoing {
            id,
            spec: VmSpec { split: told, allocated_bytes, ..record.spec(&about) },
            vmm: Box::new(control::source(record, Arc::clone(&qmp))?),
            blocks,
            tracker: Box::new(tracker),
            throttle: Box::new(ProcessThrottle::new(record.process.pid)),
            untracked: about.untracked(),
            trust_first_look: departures.trust_first_look,
            bandwidth: Arc::clone(&departures.bandwidth),
            gang: gang.clone(),
            tickets: returns.tickets(record, own),
            clone: None,
            split,
            pause: pauses.place(),
            here: record.here(),
        };
        Ok((outgoing, qmp))
    }
}

fn no_longer_waiting(monitor: &Monitor) {
    monitor.update(|progress| {
        (progress.waiting_for, progress.queue_place, progress.queue_length) = (None, None, None);
    });
}

/// Handles a guest that stays here and that its QEMU has not let run yet.
fn not_given_back(departures: &Departures, record: &VmRecord, id: MigrationId, report: &mut Report) {
    let Departures { machines, records, .. } = departures;
    let Some(problem) = &mut report.error else { return resuming::give_back(machines, records, record, id, None) };
    let said_to_be_gone = problem.guest == Whereabouts::Gone;
    // A process that is ending takes a moment.
    let gone = record.process.open().is_none_or(|process| said_to_be_gone && process.wait(Some(ENDING)));
    if gone {
        problem.guest = Whereabouts::Gone;
        return belongs_here(departures, record, id);
    }
    problem.guest = Whereabouts::Paused;
    problem.hint = Some(format!(
        "it is stopped here and let run as soon as its QEMU does that; 'sterna show {}' says how far it is",
        record.name
    ));
    let failed = problem.cause.last().cloned().unwrap_or_default();
    resuming::give_back(machines, records, record, id, Some(failed));
}

/// Notes that the guest belongs here again (or still), as before.
fn belongs_here(departures: &Departures, record: &VmRecord, id: MigrationId) {
    let here = VmRecord { lifecycle: Lifecycle::Here, ..record.clone() };
    if let Err(error) = departures.machines.store(&here) {
        tracing::error!(vm = %record.name, %error, "cannot write the machine's record");
    }
    departures.records.remove(id);
    departures.machines.give_back(record);
}

/// This host as the source of one migration.
struct Here<'a> {
    mover: &'a Mover<'a>,
    id: MigrationId,
    /// The number of the ticket that it takes along.
    number: Option<u128>,
    turn: &'a Turn<'a>,
}

impl SourceHost for Here<'_> {
    fn accepted(&self) {
        let Mover { record, peer, monitor, .. } = self.mover;
        tracing::info!(vm = %record.name, id = %self.id, peer, "migration begins");
        self.turn.accepted();
        no_longer_waiting(monitor);
    }

    fn may_haste(&self) -> bool {
        self.mover.departures.may_haste
    }

    fn credentials(&self) -> Option<Arc<Credentials>> {
        self.mover.departures.credentials.clone()
    }

    fn handing_over(
        &self,
        id: MigrationId,
        peer: &str,
        daemon: Option<DaemonId>,
        postcopy: bool,
    ) -> Result<(), Problem> {
        let Mover { departures, record, options, .. } = self.mover;
        let postcopy = postcopy.then(|| Box::new((*options).clone()));
        let stage = Stage::HandingOver { peer: peer.into(), postcopy, daemon };
        departures
            .records
            .write(id, Some(&record.name), stage)
            .map_err(|error| host("cannot write down that the guest is handed over", &error))
    }

    fn peer_now(&self, id: MigrationId) -> Option<String> {
        self.mover.departures.records.peer_now(id)
    }

    fn gone(&self, ram: &dyn Memory) {
        let Mover { record, returns, .. } = self.mover;
        if let Some((keeping, number)) = returns.keeping.as_ref().zip(self.number) {
            // It moves nothing any more: others need not wait.
            self.turn.pauses();
            keeping.keep(&record.name, number, ram);
        }
    }

    fn destination_lost(&self) {
        self.turn.pauses();
    }

    fn destination_back(&self) {
        self.turn.goes_on();
    }
}
