//! Machines that were handed over while the peer fell silent: they must not run here until it says that they never will there.

use std::sync::Arc;
use std::time::Duration;

use sterna_engine::host::{MigrationId, Verdict};
use sterna_engine::source::ask_verdict;

use super::outgoing::belongs_here;
use crate::vms::{Daemon, Hold, VmRecord, control};

/// The pauses between two questions grow up to this.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// Asks the peer until it answers, on a thread of its own.
pub fn wait_for_verdict(daemon: &Arc<Daemon>, record: &VmRecord, id: MigrationId, peer: &str) {
    if let Some(entry) = daemon.table().get_mut(&record.name) {
        entry.hold = Hold::WaitingForPeer { peer: peer.into() };
    }
    let (daemon, record, peer) = (Arc::clone(daemon), record.clone(), peer.to_string());
    let name = format!("verdict-{}", record.name);
    if let Err(error) = std::thread::Builder::new().name(name).spawn(move || ask(&daemon, &record, id, &peer)) {
        tracing::error!(%error, "cannot start the thread that asks for a verdict");
    }
}

fn ask(daemon: &Daemon, record: &VmRecord, id: MigrationId, peer: &str) {
    let mut pause = Duration::from_millis(250);
    while still_waiting(daemon, record) {
        match ask_verdict(id, peer, daemon.credentials.as_deref()) {
            Ok(verdict) => return settle(daemon, record, id, verdict),
            Err(error) => {
                tracing::debug!(vm = %record.name, peer, %error, "no verdict yet");
                std::thread::sleep(pause);
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        }
    }
    // Given up by force: then nobody needs the record.
    daemon.records.remove(id);
}

fn still_waiting(daemon: &Daemon, record: &VmRecord) -> bool {
    daemon.table().get(&record.name).is_some_and(|entry| {
        matches!(entry.hold, Hold::WaitingForPeer { .. })
            && entry.record.as_ref().is_some_and(|known| known.process == record.process)
    })
}

fn settle(daemon: &Daemon, record: &VmRecord, id: MigrationId, verdict: Verdict) {
    tracing::info!(vm = %record.name, %id, ?verdict, "the peer has answered");
    match verdict {
        Verdict::Committed => {
            daemon.end_qemu(record);
            daemon.forget(&record.name, record.process);
            daemon.records.remove(id);
        }
        Verdict::Aborted => {
            if let Err(problem) = control::give_back(record) {
                tracing::error!(vm = %record.name, "the guest could not be given back: {}", problem.message);
                daemon.mark(&record.name, format!("it could not be given back after a migration: {}", problem.message));
            }
            belongs_here(daemon, record, id);
        }
    }
}
