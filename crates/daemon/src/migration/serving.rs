//! Guests that run elsewhere and still need pages of here: served on a job of their own, where the daemon that handed them over has ended,
//! or could not learn at once that they were taken.

use std::sync::Arc;

use sterna_api::problem::Whereabouts;
use sterna_api::{MigrateOptions, Problem, Report};
use sterna_engine::host::{DaemonId, MigrationId, SourceHost};
use sterna_engine::monitor::Monitor;
use sterna_engine::source::{self, Left};
use sterna_engine::transport::credentials::Credentials;

use super::jobs::Job;
use super::outgoing::here;
use super::records::Stage;
use super::waiting::accepted_by;
use crate::problems::host;
use crate::vms::{Daemon, Hold, VmRecord};

/// Sends the pages of a guest that runs at `peer`, until all are there. What is left of the machine here goes then, and not before.
pub fn serve(daemon: &Arc<Daemon>, record: &VmRecord, id: MigrationId, peer: &str, options: MigrateOptions) {
    let job = daemon.jobs.take_up(peer, &record.name);
    if let Some(entry) = daemon.table().get_mut(&record.name) {
        entry.hold = Hold::Leaving(Arc::clone(job.monitor(0)));
    }
    tracing::info!(vm = %record.name, %id, peer, "its guest runs there and needs pages of here");
    let (to_serve, leaving, kept) = (Arc::clone(daemon), record.clone(), Arc::clone(&job));
    let to = peer.to_string();
    let drive = move || {
        let daemon = to_serve;
        let monitor = kept.monitor(0);
        match send(&daemon, &leaving, id, &to, &options, monitor) {
            Ok(report) => {
                daemon.end_qemu(&leaving);
                daemon.forget(&leaving.name, leaving.process);
                daemon.records.remove(id);
                tracing::info!(vm = %leaving.name, %id, status = ?report.status, "migration ended");
                kept.end(0, &daemon, report);
            }
            Err(problem) => failed(&daemon, &leaving, &kept, &options, problem),
        }
    };
    if let Err(error) = std::thread::Builder::new().name(format!("move-{}", record.name)).spawn(drive) {
        tracing::error!(vm = %record.name, %error, "cannot start the thread that sends its pages: the next daemon does");
    }
}

fn send(
    daemon: &Arc<Daemon>,
    record: &VmRecord,
    id: MigrationId,
    peer: &str,
    options: &MigrateOptions,
    monitor: &Monitor,
) -> Result<Report, Problem> {
    let blocks = record.block_files(&[]).map_err(|error| host("cannot open the machine's RAM", &error))?;
    let bandwidth = Arc::clone(&daemon.bandwidth);
    let vm = record.name.clone();
    let left = Left { id, vm, daemon: accepted_by(daemon, id), blocks, bandwidth, here: here(record) };
    source::serve(left, peer, options, &Serving(daemon), monitor).map_err(|error| error.problem())
}

/// The RAM cannot be opened: what is left of the machine stays as it is, and a person has to look.
fn failed(daemon: &Arc<Daemon>, record: &VmRecord, job: &Job, options: &MigrateOptions, problem: Problem) {
    let why = problem.with_causes();
    tracing::error!(vm = %record.name, peer = job.to, "THE GUEST THERE WAITS FOR PAGES THAT CANNOT BE READ HERE: {why}");
    daemon.mark(&record.name, format!("its guest runs at {}, and its pages here cannot be read: {why}", job.to));
    let report = Report::asked(&record.name, options, here(record), &job.to);
    job.end(0, daemon, Report { partial: true, error: Some(problem.guest(Whereabouts::Paused)), ..report });
}

/// This host as the source of a migration that was begun earlier.
struct Serving<'a>(&'a Daemon);

impl SourceHost for Serving<'_> {
    fn credentials(&self) -> Option<Arc<Credentials>> {
        self.0.credentials.clone()
    }

    fn accepted(&self) {}

    /// It is on record already, or this would not be.
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
        peer_now(self.0, id)
    }
}

/// Where the destination of a guest that was handed over is to be found.
pub fn peer_now(daemon: &Daemon, id: MigrationId) -> Option<String> {
    match daemon.records.stage(id) {
        Some(Stage::HandingOver { peer, .. }) => Some(peer),
        _ => None,
    }
}
