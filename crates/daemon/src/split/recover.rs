//! Machines that an earlier daemon has left split.
//!
//! * *Nothing may have left yet* (there is no map of missing pages): the machine is as any other, and what its memory
//!   hosts have granted is given back.
//! * *Pages may be away*: the agent's userfaultfd and the map are taken over at once, so that the guest runs on with
//!   what is here. Its memory hosts are asked until all of them answer; then it is split as before, or merged where
//!   that had begun.
//! * *They cannot be taken over*: what is away would read as zeros where the agent does not hold it back any more, so
//!   the guest is stopped.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_api::{Problem, SplitReport, SplitRequest};
use sterna_engine::monitor::Monitor;
use sterna_engine::paging::Pager;
use sterna_engine::split::Split;
use sterna_engine::split::outage::Outage;

use super::Splits;
use super::hosts::{RETRY, alive};
use crate::machines::control::Control;
use crate::machines::record::VmRecord;
use crate::machines::split::{EpochFile, Remote, SplitRecord};
use crate::migration::arriving::Arriving;
use crate::migration::paging::{pager, read_map};
use crate::problems::{host, passes};

/// How long a machine that is to come together waits for others that are on their way here.
const OTHERS: Duration = Duration::from_secs(60);

/// Takes over a machine that an earlier daemon has left split; its record as it is now. Where it is not split any
/// more, all of its memory is here. Where its guest may be another host's (`held`), its memory hosts are asked once it
/// is known that it is not.
pub fn recover(splits: &Arc<Splits>, record: &VmRecord, held: bool) -> VmRecord {
    let Some(split) = &record.split else { return record.clone() };
    match read_map(record, &split.map) {
        Ok(None) => {
            tracing::info!(vm = %record.name, "it was to be split, and nothing of it has left");
            splits.forget(record);
            return VmRecord { split: None, ..record.clone() };
        }
        Ok(Some(_)) => match take_over(record, split) {
            Ok(remote) => {
                tracing::info!(vm = %record.name, away = remote.pager.away(), "a part of it is at memory hosts");
                if held {
                    remote.hold();
                }
                splits.keep_remote(&record.name, Some(&remote));
                go_on_later(splits, record, remote);
            }
            Err(problem) => hold_back(splits, record, &problem),
        },
        Err(error) => hold_back(splits, record, &host("cannot read which of its pages are away", &error)),
    }
    record.clone()
}

/// Asks a machine's memory hosts until all of them answer, and goes on then.
fn go_on_later(splits: &Arc<Splits>, record: &VmRecord, remote: Arc<Remote>) {
    let (splits, record) = (Arc::clone(splits), record.clone());
    let name = format!("split-{}", record.name);
    let ask = move || {
        let mut outage = Outage::default();
        while alive(&record).is_ok() {
            if remote.is_held() {
                std::thread::sleep(RETRY);
                continue;
            }
            let began = Instant::now();
            match go_on(&splits, &record, &remote) {
                Ok(()) => return,
                Err(problem) => {
                    tracing::debug!(vm = %record.name, "{}", problem.with_causes());
                    remote.not_answered(problem);
                }
            }
            std::thread::sleep(outage.failed(began, Instant::now(), false));
        }
    };
    if let Err(error) = std::thread::Builder::new().name(name).spawn(ask) {
        tracing::error!(%error, "cannot start the thread that asks a machine's memory hosts");
    }
}

fn go_on(splits: &Splits, record: &VmRecord, remote: &Arc<Remote>) -> Result<(), Problem> {
    let Some(known) = &record.split else { return Ok(()) };
    let (SplitRecord { borrowed, here_bytes, merging, .. }, room) = (known, known.room());
    let epochs = EpochFile::of(&splits.care.machines.dir(&record.name));
    let (lenders, guest) = (borrowed.lenders(splits.credentials.as_ref()), (borrowed.guest, borrowed.key));
    let split = Split::recover(Arc::clone(&remote.pager), lenders, guest, Box::new(epochs));
    let split = split.map_err(|error| error.problem())?;
    tracing::info!(vm = %record.name, "its memory hosts have answered");
    // Also where it is being merged: that may come to nothing, for want of room.
    if let Err(error) = split.keep_to(room) {
        split.stop();
        return Err(error.problem());
    }
    remote.answered(split);
    // Whoever cancels that leaves the machine split, over all of them.
    if *merging {
        end_of(record, "merge", |monitor| splits.merge(&record.name, monitor));
    } else if !borrowed.leaving.is_empty() {
        let request = SplitRequest {
            here_bytes: *here_bytes,
            memory: borrowed.lending(),
            redundancy: Some(borrowed.redundancy()),
            ..SplitRequest::default()
        };
        end_of(record, "exchange of memory hosts", |monitor| splits.split(&record.name, &request, monitor));
    }
    Ok(())
}

/// Brings a machine together that has just come here and was split where it comes from, in the background: once no
/// other machine is on its way here, whose last pages would stand behind those of this one.
pub fn come_together(splits: &Arc<Splits>, record: &VmRecord) {
    let (splits, record) = (Arc::clone(splits), record.clone());
    let merge = move || {
        let (began, table) = (Instant::now(), || splits.care.machines.table());
        while table().values().any(|entry| entry.hold.is::<Arriving>()) && began.elapsed() < OTHERS {
            std::thread::sleep(RETRY);
        }
        end_of(&record, "merge", |monitor| splits.merge(&record.name, monitor));
    };
    if let Err(error) = std::thread::Builder::new().name("merge".into()).spawn(merge) {
        tracing::error!(%error, "cannot start the thread that brings a machine together");
    }
}

/// Ends what an earlier daemon had begun.
fn end_of(record: &VmRecord, what: &str, work: impl Fn(&Arc<Monitor>) -> Result<SplitReport, Problem>) {
    let name = &record.name;
    while alive(record).is_ok() {
        match work(&Arc::new(Monitor::new(name))) {
            // Somebody does something else with it, it is still being taken over, or pages follow it.
            Err(problem) if passes(&problem) => std::thread::sleep(RETRY),
            Err(problem) => {
                return tracing::warn!(vm = %name, "its {what} is not gone on with: {}", problem.with_causes());
            }
            Ok(SplitReport { error: Some(problem), .. }) => {
                return tracing::warn!(vm = %name, "its {what} came to nothing: {}", problem.with_causes());
            }
            Ok(_) => return,
        }
    }
}

/// Stops a guest whose pages nothing can bring. Threads that wait for a page go on waiting. If the agent does not
/// hold the pages back any more, the guest must not see the zeros in their place.
fn hold_back(splits: &Splits, record: &VmRecord, problem: &Problem) {
    let why = problem.with_causes();
    tracing::error!(
        vm = %record.name,
        "ITS PAGES AT MEMORY HOSTS CANNOT BE BROUGHT, it is stopped and must not be let run: {why}"
    );
    if let Err(problem) = Control::connect(&record.qmp).and_then(|mut control| control.send("stop")) {
        tracing::error!(vm = %record.name, "nor can it be stopped: {}", problem.message);
    }
    let note = format!("stopped, its pages at memory hosts cannot be brought: {why}");
    splits.care.machines.mark(&record.name, note);
}

fn take_over(record: &VmRecord, split: &SplitRecord) -> Result<Arc<Remote>, Problem> {
    pager(record, &split.map, Pager::recover).map(Remote::found)
}
