//! `resume`: a source that has lost its destination is told its present address.

use sterna_api::{Blame, Code, Phase, Problem, ResumeRequest};
use sterna_engine::host::MigrationId;

use super::address::check_address;
use super::departures::Departures;
use super::leaving::Leaving;
use super::onward;
use super::records::Stage;
use super::resuming::{Resuming, give_back};
use super::waiting::{Question, decide};
use crate::caller::Caller;
use crate::machines::record::{Lifecycle, VmRecord};
use crate::problems::{host, invalid};

/// Asks at once for the destination that a machine of here waits for, at another address if `request` names one: the
/// address outlives this daemon. (A source that serves pages asks every two seconds anyway, and at once when the
/// address changes.) Or tries at once to let a machine run that stays here, or lets it run here by the caller's word.
///
/// # Errors
/// A [`Problem`]: the machine is unknown, there is nothing to resume, the request is refused, or the record cannot be
/// written.
pub fn resume(departures: &Departures, name: &str, request: &ResumeRequest, caller: Caller) -> Result<(), Problem> {
    let Departures { machines, records, .. } = departures;
    if let Some(to) = &request.to {
        check_address(to)?;
        if request.fenced.is_some() {
            return Err(invalid("a destination is either somewhere else now or off for good"));
        }
    }
    let entry = machines.entry(name)?;
    if let Some(resuming) = entry.hold.activity::<Resuming>()
        && request.to.is_none()
        && request.fenced.is_none()
    {
        resuming.hurry();
        return Ok(());
    }
    let question: Option<&Question> = entry.hold.activity();
    let leaving: Option<&Leaving> = entry.hold.activity();
    let serves = leaving.is_some_and(|leaving| leaving.monitor.progress().phase == Phase::Postcopy);
    let lifecycle = entry.record.as_ref().map(|record| record.lifecycle);
    let id = match lifecycle {
        Some(Lifecycle::Outgoing(id)) if serves || question.is_some() => id,
        _ if entry.pager.is_some() => {
            return Err(nothing_to_resume(format!("'{name}' runs here, and its source looks for this host"))
                .hint(format!("at its source: 'sterna resume {name} --to HOST:PORT'")));
        }
        _ => return Err(nothing_to_resume(format!("'{name}' has not been handed over to another host"))),
    };
    if let (Some(host), Some(record)) = (&request.fenced, &entry.record) {
        return match question {
            Some(question) => fenced(departures, record, id, host, question, caller),
            None => Err(runs_there(name)),
        };
    }
    if let Some(to) = &request.to {
        let Some(Stage::HandingOver { postcopy, daemon, .. }) = records.stage(id) else {
            return Err(nothing_to_resume(format!("the migration of '{name}' has just ended")));
        };
        records
            .write(id, Some(name), Stage::HandingOver { peer: to.clone(), postcopy, daemon })
            .map_err(|error| host("cannot write down where the destination is", &error))?;
        tracing::info!(vm = name, %id, to, "its destination is said to be there now");
    }
    if let Some(question) = question {
        question.hurry(request.to.as_deref());
    }
    Ok(())
}

/// Lets the guest run on here, as it was when it was handed over, because a person says that the destination is off for
/// good. Its RAM here is complete, also in post-copy: pages are only read from here, and nothing is removed before the
/// last has arrived.
fn fenced(
    departures: &Departures,
    record: &VmRecord,
    id: MigrationId,
    fenced: &str,
    question: &Question,
    caller: Caller,
) -> Result<(), Problem> {
    let Departures { machines, records, .. } = departures;
    let (name, peer) = (&record.name, question.peer());
    // Where the migration's record is unreadable, nobody knows the peer's name.
    let known = matches!(records.stage(id), Some(Stage::HandingOver { .. }));
    if known && fenced != peer && fenced != host_of(&peer) {
        let message = format!("'{name}' was handed over to {peer}, not to {fenced}");
        return Err(Problem::new(Code::NotItsDestination, Blame::Request, message)
            .hint("name the host that is off: the one that this machine went to"));
    }
    if record.process.open().is_none() {
        let message = format!("the QEMU of '{name}' has ended: there is nothing left that could run here");
        return Err(Problem::new(Code::QemuGone, Blame::Qemu, message));
    }
    // The peer's answer may come at this moment: the first of both counts, and the other is refused.
    if !decide(machines, record) {
        return Err(nothing_to_resume(format!("the destination of '{name}' has just answered")));
    }
    tracing::warn!(
        vm = %name, %id, peer, fenced, %caller,
        "IT IS LET RUN HERE BY A PERSON'S WORD that its destination is off for good; if that host still runs, two \
         guests write its disks"
    );
    onward::stays(machines, record, true);
    give_back(machines, records, record, id, None);
    Ok(())
}

/// The host of an address.
fn host_of(address: &str) -> &str {
    address.rsplit_once(':').map_or(address, |(host, _)| host)
}

fn runs_there(name: &str) -> Problem {
    let message = format!("'{name}' is known to run at its destination since it was handed over: it must not run here");
    Problem::new(Code::RunsThere, Blame::Request, message).hint(format!(
        "its disks are ahead of the memory here by all that it did there. Where it is lost with that host, 'sterna \
         stop {name} --force' ends what is left"
    ))
}

fn nothing_to_resume(why: String) -> Problem {
    Problem::new(Code::NotMigrating, Blame::Request, why)
}
