//! A machine is split and moves to another host: what leaves goes straight to the hosts that it will be at, while the
//! guest runs where it was; then the guest goes, with what is left, and what has left stays where it is.
//!
//! The two are one after the other, each as it is by itself. So nothing travels twice but what the guest writes, and
//! whatever fails leaves a machine that is as it was before. In post-copy the guest goes first, with memory hosts of
//! which it has nothing yet: what is too much where it runs goes past it, as it follows.

use std::sync::Arc;

use sterna_api::units::milliseconds;
use sterna_api::{Blame, Code, MigrateOptions, MigrateRequest, Problem, SplitReport, SplitRequest, Status};
use sterna_engine::monitor::Monitor;

use super::{LOOK, Splits};
use crate::machines::split::SplitRecord;
use crate::migration::address::check_address;
use crate::migration::departures::Departures;
use crate::migration::gang::migrate;
use crate::migration::jobs::Job;
use crate::problems::invalid;

/// Has a part of a machine's memory leave, and its guest move to `request.main`, where one is named. Blocks until that
/// has ended; `monitor` can end it before: then all is as it was.
///
/// # Errors
/// As [`Splits::split`]; the address is none, or a memory host's.
pub fn split(
    splits: &Splits,
    departures: &Arc<Departures>,
    name: &str,
    request: &SplitRequest,
    monitor: &Arc<Monitor>,
) -> Result<SplitReport, Problem> {
    let Some(main) = &request.main else {
        if request.mode.is_some() {
            return Err(invalid("'mode' says how the guest moves to another host, and 'main' names none"));
        }
        return splits.split(name, request, monitor);
    };
    check_address(main)?;
    if splits.listen.as_ref() == Some(main) {
        return Err(invalid(format!("{main} is this host: the guest stays where 'main' is left out")));
    }
    if request.memory.iter().any(|host| host.peer == *main) {
        return Err(invalid(format!("{main} is to run the guest, and cannot lend memory to it, too")));
    }
    let before = departures.machines.entry(name)?.record.and_then(|record| record.split);
    let mut report = splits.split(name, request, monitor)?;
    if report.status != Status::Completed {
        return Ok(report);
    }
    let options = match request.mode {
        Some(mode) => MigrateOptions { mode, ..MigrateOptions::default() },
        None => MigrateOptions { no_postcopy: true, ..MigrateOptions::default() },
    };
    let asked =
        MigrateRequest { vms: vec![name.into()], family: None, to: main.clone(), options, merge: request.merge };
    let failed = match migrate(departures, &asked) {
        Ok(job) => {
            let moved = wait(&job, monitor);
            let stays = moved.as_ref().filter(|moved| moved.status != Status::Completed);
            let failed = stays.map(|moved| (moved.status, moved.error.clone().unwrap_or_else(cancelled)));
            report.migration = moved.map(Box::new);
            failed
        }
        Err(problem) => Some((Status::Failed, problem)),
    };
    if let Some((status, mut problem)) = failed {
        if let Err(why) = put_back(splits, departures, name, before.as_ref()) {
            problem.cause.push(format!("and it is not as it was before: {}", why.with_causes()));
        }
        (report.status, report.error) = (status, Some(problem));
    }
    report.ms = milliseconds(monitor.elapsed());
    Ok(report)
}

fn cancelled() -> Problem {
    Problem::new(Code::Cancelled, Blame::Request, "its migration was cancelled")
}

/// A machine that did not move is as it was before: whole, or split with so much here.
fn put_back(splits: &Splits, departures: &Departures, name: &str, before: Option<&SplitRecord>) -> Result<(), Problem> {
    // It may have ended, or nobody knows where it is.
    if departures.machines.entry(name).is_err() {
        return Ok(());
    }
    let monitor = Arc::new(Monitor::new(name));
    let done = match before {
        None => splits.merge(name, &monitor),
        Some(before) => {
            let (here_bytes, unused) = (before.here_bytes, Some(before.unused));
            splits.split(name, &SplitRequest { here_bytes, unused, ..SplitRequest::default() }, &monitor)
        }
    };
    done?.error.map_or(Ok(()), Err)
}

/// The report of a migration, once it has ended.
fn wait(job: &Job, monitor: &Monitor) -> Option<sterna_api::Report> {
    while !job.ended() {
        if monitor.check().is_err() {
            job.monitor(0).cancel();
        }
        std::thread::sleep(LOOK);
    }
    job.show().migrations.pop()
}
