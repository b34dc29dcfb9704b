//! Guests that run elsewhere and still need pages from here. Each is served by a job of its own, where the daemon that
//! handed it over has ended, or did not learn at once that it was taken.

use std::sync::Arc;

use sterna_api::problem::Whereabouts;
use sterna_api::{MigrateOptions, Problem, Report};
use sterna_engine::host::{DaemonId, MigrationId, SourceHost};
use sterna_engine::monitor::Monitor;
use sterna_engine::source::{self, Left};
use sterna_engine::transport::credentials::Credentials;

use super::departures::Departures;
use super::jobs::Job;
use super::leaving::Leaving;
use crate::machines::control::end_qemu;
use crate::machines::hold::Hold;
use crate::machines::record::VmRecord;
use crate::problems::host;

/// Sends the pages of a guest that runs at `peer`, until all are there. Only then the remains of the machine here are
/// removed.
pub fn serve(departures: &Arc<Departures>, record: &VmRecord, id: MigrationId, peer: &str, options: MigrateOptions) {
    let job = departures.jobs.add(peer, std::slice::from_ref(&record.name));
    let leaving = Leaving::new(Arc::clone(job.monitor(0)), peer);
    departures.machines.hold(&record.name, Hold::busy(leaving));
    tracing::info!(vm = %record.name, %id, peer, "its guest runs there and needs pages of here");
    let (to_serve, leaving, kept) = (Arc::clone(departures), record.clone(), Arc::clone(&job));
    let to = peer.to_string();
    let drive = move || {
        let departures = to_serve;
        match send(&departures, &leaving, id, &to, &options, kept.monitor(0)) {
            Ok(report) => {
                end_qemu(&leaving);
                departures.machines.forget(&leaving.name, leaving.process);
                departures.records.remove(id);
                tracing::info!(vm = %leaving.name, %id, status = ?report.status, "migration ended");
                kept.end(0, &departures.metrics, report);
            }
            Err(problem) => failed(&departures, &leaving, &kept, &options, problem),
        }
    };
    if let Err(error) = std::thread::Builder::new().name(format!("move-{}", record.name)).spawn(drive) {
        tracing::error!(
            vm = %record.name, %error,
            "cannot start the thread that sends its pages: the next daemon does"
        );
    }
}

fn send(
    departures: &Departures,
    record: &VmRecord,
    id: MigrationId,
    peer: &str,
    options: &MigrateOptions,
    monitor: &Monitor,
) -> Result<Report, Problem> {
    let blocks = record.block_files(&[]).map_err(|error| host("cannot open the machine's RAM", &error))?;
    let bandwidth = Arc::clone(&departures.bandwidth);
    let (vm, daemon) = (record.name.clone(), departures.records.accepted_by(id));
    let left = Left { id, vm, daemon, blocks, bandwidth, here: record.here() };
    source::serve(left, peer, options, &Serving(departures), monitor).map_err(|error| error.problem())
}

/// Handles RAM that cannot be opened: the remains of the machine stay as they are, and a person has to look.
fn failed(departures: &Departures, record: &VmRecord, job: &Job, options: &MigrateOptions, problem: Problem) {
    let why = problem.with_causes();
    tracing::error!(
        vm = %record.name, peer = job.to,
        "THE GUEST THERE WAITS FOR PAGES THAT CANNOT BE READ HERE: {why}"
    );
    let note = format!("its guest runs at {}, and its pages here cannot be read: {why}", job.to);
    departures.machines.mark(&record.name, note);
    let report = Report::asked(&record.name, options, record.here(), &job.to);
    let report = Report { partial: true, error: Some(problem.guest(Whereabouts::Paused)), ..report };
    job.end(0, &departures.metrics, report);
}

/// This host as the source of a migration that was begun earlier.
struct Serving<'a>(&'a Departures);

impl SourceHost for Serving<'_> {
    fn credentials(&self) -> Option<Arc<Credentials>> {
        self.0.credentials.clone()
    }

    fn accepted(&self) {}

    /// The handing over is on record already: this job comes from that record.
    fn handing_over(
        &self,
        _id: MigrationId,
        _peer: &str,
        _daemon: Option<DaemonId>,
        _postcopy: bool,
    ) -> Result<(), Problem> {
        Ok(())
    }

    fn peer_now(&self, id: MigrationId) -> Option<String> {
        self.0.records.peer_now(id)
    }
}
