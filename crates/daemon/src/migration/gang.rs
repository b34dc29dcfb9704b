//! Gangs: machines that are moved together. All or none are claimed, and they are driven to their ends side by side.
//!
//! A migration of one machine is a gang of one. Each member waits for its turn and is moved on a thread of its own, and
//! may end in another way than the others. `Gang` has what the members share.

use std::sync::Arc;

use sterna_api::options::PreserveSharing;
use sterna_api::{Blame, Code, GangPauses, MigrateOptions, MigrateRequest, Problem, Status};
use sterna_engine::source::pauses::Pauses;

use super::address::check_address;
use super::departures::Departures;
use super::jobs::Job;
use super::leaving::Leaving;
use super::onward;
use super::outgoing::Mover;
use super::queue::Ticket;
use super::returns::{self, Returns};
use super::sharing::{self, Membership};
use crate::machines::hold::Hold;
use crate::machines::reach;
use crate::machines::record::VmRecord;
use crate::machines::table::Machines;
use crate::problems::{host, invalid};
use crate::several;

/// The most machines of one gang.
const MAX_GANG: usize = 256;

/// Claimed machines on their way to one destination.
#[derive(Debug)]
pub struct Gang {
    departures: Arc<Departures>,
    /// The job that shows their migration, member by member in the same order.
    job: Arc<Job>,
    /// The options of each member.
    options: Vec<MigrateOptions>,
    members: Vec<VmRecord>,
    /// How others see each.
    leaving: Vec<Arc<Leaving>>,
    /// Whom each member shares pages with.
    sharing: Vec<Membership>,
    /// What of each is kept here, and what it can show where it goes.
    returns: Vec<Returns>,
    /// How their pauses lie.
    pauses: Arc<Pauses>,
    /// Whether those that are split are brought together where they go.
    merge: bool,
}

/// Begins a migration. Every machine is claimed, or none is.
///
/// # Errors
/// A [`Problem`]: a machine is unknown or busy, or the options or the address are invalid; or machines that are to
/// share cannot, or one of several cannot be moved. What is wrong with each of them is named.
pub fn migrate(departures: &Arc<Departures>, request: &MigrateRequest) -> Result<Arc<Job>, Problem> {
    let named =
        request.family.as_deref().map(|family| with_members(&departures.machines, request, family)).transpose()?;
    let request = named.as_ref().unwrap_or(request);
    check_request(request)?;
    check_pauses(request, departures.jobs.queue.places())?;
    let gang = Arc::new(Gang::claim(departures, request)?);
    gang.depart();
    Ok(Arc::clone(&gang.job))
}

impl Gang {
    fn claim(departures: &Arc<Departures>, request: &MigrateRequest) -> Result<Self, Problem> {
        let machines = &departures.machines;
        let job = departures.jobs.add(&request.to, &request.vms);
        let (mut members, mut leaving): (Vec<VmRecord>, _) = (Vec::new(), Vec::new());
        let give_back = |members: &[VmRecord]| {
            for record in members {
                // While the machine was claimed, nobody took note of its end.
                machines.give_back(record);
            }
            departures.jobs.drop_job(job.id);
        };
        let mut refused = Vec::new();
        for (index, name) in request.vms.iter().enumerate() {
            let activity = Arc::new(Leaving::new(Arc::clone(job.monitor(index)), &request.to));
            match machines.claim(name, Hold::shared(&activity)) {
                Ok(record) => {
                    refused.extend(onward::check(&record, &request.to).err());
                    members.push(record);
                    leaving.push(activity);
                }
                Err(problem) => refused.push(problem),
            }
        }
        let asked = request.options.preserve_sharing;
        // Also where one of them is busy or unknown: whoever asks hears at once of all that is in the way.
        let sharing = sharing::gangs(&members, asked).unwrap_or_else(|problem| {
            refused.push(problem);
            Vec::new()
        });
        // One that cannot be moved is known before others have left. (One alone says so in its report.)
        if request.vms.len() > 1 || asked == Some(PreserveSharing::On) {
            let checked = several::map(members.iter().collect(), reach::check);
            refused.extend(checked.into_iter().filter_map(Result::err));
        }
        if let Some(problem) = all_of(refused) {
            give_back(&members);
            return Err(problem);
        }
        let returns = returns::returns(&departures.keeper, &members, &sharing, asked);
        let options = sharing.iter().map(|membership| sharing::resolved(&request.options, membership)).collect();
        let pauses = Pauses::new(request.options.gang_pauses, members.len());
        let (departures, merge) = (Arc::clone(departures), request.merge);
        Ok(Self { departures, job, options, members, leaving, sharing, returns, pauses, merge })
    }

    /// Starts a thread for each member, which drives it.
    fn depart(self: &Arc<Self>) {
        for (index, record) in self.members.iter().enumerate() {
            let gang = Arc::clone(self);
            // Members join the queue in the order of the request, whichever thread is the first.
            let ticket = self.departures.jobs.queue.join(&self.job.to);
            let drive = move || gang.drive(index, ticket);
            let spawned = std::thread::Builder::new().name(format!("move-{}", record.name)).spawn(drive);
            if let Err(error) = spawned {
                let problem = host("cannot start a migration's thread", &error);
                let report = self.mover(index).refused(problem, Status::Failed);
                self.pauses.leave();
                self.job.end(index, &self.departures.metrics, report);
            }
        }
    }

    /// Drives one member to its end.
    fn drive(&self, index: usize, ticket: Ticket) {
        let report = self.mover(index).drive(&ticket);
        drop(ticket);
        self.pauses.leave();
        self.job.end(index, &self.departures.metrics, report);
    }

    fn mover(&self, index: usize) -> Mover<'_> {
        Mover {
            departures: &self.departures,
            record: &self.members[index],
            leaving: &self.leaving[index],
            peer: &self.job.to,
            options: &self.options[index],
            monitor: self.job.monitor(index),
            gang: &self.sharing[index],
            returns: &self.returns[index],
            pauses: &self.pauses,
            merge: self.merge,
        }
    }
}

/// Refuses pauses at the same time of more machines than leave at the same time.
fn check_pauses(request: &MigrateRequest, places: usize) -> Result<(), Problem> {
    let count = request.vms.len();
    if request.options.gang_pauses != GangPauses::Together || count <= places {
        return Ok(());
    }
    let message = format!("{count} machines cannot stand still together: {places} at most leave this host at one time");
    Err(invalid(message).hint("raise 'max_outgoing' in sternad.toml, or move fewer"))
}

/// Problems of several machines as one: that of the first, and what is wrong with the others.
fn all_of(problems: Vec<Problem>) -> Option<Problem> {
    let mut problems = problems.into_iter();
    let first = problems.next()?;
    let message = problems.fold(first.message.clone(), |all, problem| format!("{all}; {}", problem.message));
    Some(Problem { message, ..first })
}

/// The request to move a family, with the names of its machines.
fn with_members(machines: &Machines, request: &MigrateRequest, family: &str) -> Result<MigrateRequest, Problem> {
    if !request.vms.is_empty() {
        return Err(invalid("names of machines, and a family: one or the other"));
    }
    let mut records: Vec<VmRecord> = {
        let table = machines.table();
        let of_machine = table.get(family).and_then(|entry| entry.record.as_ref()).and_then(|it| it.family.clone());
        let family = of_machine.unwrap_or_else(|| family.into());
        let records = table.values().filter_map(|entry| entry.record.as_ref()).filter(|record| record.held.is_none());
        records.filter(|record| record.family.as_deref() == Some(&family)).cloned().collect()
    };
    records.sort_unstable_by(|one, other| one.name.cmp(&other.name));
    let Some(first) = records.first() else {
        let message = format!("there is no family '{family}' on this host, nor a machine of this name that has one");
        return Err(Problem::new(Code::UnknownVm, Blame::Request, message)
            .hint("a machine has a family once it was forked: 'sterna ps' shows it"));
    };
    // A clone is in its source's group, whatever came to either since.
    if let Some(other) = records.iter().find(|record| record.trust_group != first.trust_group) {
        let message = format!("'{}' and '{}' are of one family, and not in one trust group", first.name, other.name);
        return Err(Problem::new(Code::NoSharing, Blame::Request, message).hint("move them by their names"));
    }
    let vms = records.into_iter().map(|record| record.name).collect();
    Ok(MigrateRequest { vms, family: None, ..request.clone() })
}

fn check_request(request: &MigrateRequest) -> Result<(), Problem> {
    request.options.check().map_err(invalid)?;
    if request.vms.is_empty() || request.vms.len() > MAX_GANG {
        return Err(invalid(format!(
            "{} machines cannot be moved together: between 1 and {MAX_GANG}",
            request.vms.len()
        )));
    }
    if let Some(twice) = request.vms.iter().enumerate().find(|(index, name)| request.vms[..*index].contains(name)) {
        return Err(invalid(format!("'{}' is named twice", twice.1)));
    }
    check_address(&request.to)
}
