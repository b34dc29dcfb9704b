//! Machines that were handed over while the peer fell silent: they must not run here until it says that they never will there.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use sterna_engine::host::{MigrationId, Verdict};
use sterna_engine::source::ask_verdict;

use super::outgoing::belongs_here;
use super::records::Stage;
use super::serving::serve;
use crate::vms::{Daemon, Hold, VmRecord, control};

/// The first pause between two questions; each is twice as long as the one before.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
/// The longest in the first minute: where the guest was taken it runs there, and waits for pages of here until the answer is known.
const LONGEST_AT_FIRST: Duration = Duration::from_millis(500);
/// How long that is so.
const AT_FIRST: Duration = Duration::from_secs(60);
/// The longest after it.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// What became of a migration: asked for until the peer answers.
#[derive(Debug)]
pub struct Question {
    since: Instant,
    peer: Mutex<Asked>,
    hurried: Condvar,
}

#[derive(Debug)]
struct Asked {
    peer: String,
    at_once: bool,
}

impl Question {
    fn new(peer: &str) -> Self {
        let asked = Asked { peer: peer.into(), at_once: false };
        Self { since: Instant::now(), peer: Mutex::new(asked), hurried: Condvar::new() }
    }

    /// Whom it is asked.
    #[must_use]
    pub fn peer(&self) -> String {
        self.peer.lock().unwrap_or_else(PoisonError::into_inner).peer.clone()
    }

    /// For how long it has been asked.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.since.elapsed()
    }

    /// Asks at once, and somebody else from now on where `peer` says so.
    pub fn hurry(&self, peer: Option<&str>) {
        let mut asked = self.peer.lock().unwrap_or_else(PoisonError::into_inner);
        asked.at_once = true;
        if let Some(peer) = peer {
            asked.peer = peer.into();
        }
        self.hurried.notify_all();
    }

    /// Waits before the next attempt, unless somebody is in a hurry.
    fn pause(&self, pause: Duration) -> bool {
        let asked = self.peer.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut asked, _) = self
            .hurried
            .wait_timeout_while(asked, pause, |asked| !asked.at_once)
            .unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut asked.at_once)
    }
}

/// Asks the peer until it answers, on a thread of its own.
pub fn wait_for_verdict(daemon: &Arc<Daemon>, record: &VmRecord, id: MigrationId, peer: &str) {
    let question = Arc::new(Question::new(peer));
    if let Some(entry) = daemon.table().get_mut(&record.name) {
        entry.hold = Hold::WaitingForPeer { verdict: Arc::clone(&question) };
    }
    let (daemon, record) = (Arc::clone(daemon), record.clone());
    let name = format!("verdict-{}", record.name);
    if let Err(error) = std::thread::Builder::new().name(name).spawn(move || ask(&daemon, &record, id, &question)) {
        tracing::error!(%error, "cannot start the thread that asks for a verdict");
    }
}

fn ask(daemon: &Arc<Daemon>, record: &VmRecord, id: MigrationId, question: &Question) {
    let mut pause = FIRST_PAUSE;
    while still_waiting(daemon, record) {
        let peer = question.peer();
        match ask_verdict(id, &peer, daemon.credentials.as_deref()) {
            Ok(verdict) => return settle(daemon, record, id, verdict, &peer),
            Err(error) => {
                tracing::debug!(vm = %record.name, peer, %error, "no verdict yet");
                let hurried = question.pause(pause);
                pause = if hurried { FIRST_PAUSE } else { longer(pause, question.elapsed()) };
            }
        }
    }
    // Given up by force: then nobody needs the record.
    daemon.records.remove(id);
}

/// The pause after one of that length, where it has been asked for so long.
fn longer(pause: Duration, asked_for: Duration) -> Duration {
    (pause * 2).min(if asked_for < AT_FIRST { LONGEST_AT_FIRST } else { LONGEST_PAUSE })
}

fn still_waiting(daemon: &Daemon, record: &VmRecord) -> bool {
    daemon.table().get(&record.name).is_some_and(|entry| {
        matches!(entry.hold, Hold::WaitingForPeer { .. })
            && entry.record.as_ref().is_some_and(|known| known.process == record.process)
    })
}

fn settle(daemon: &Arc<Daemon>, record: &VmRecord, id: MigrationId, verdict: Verdict, peer: &str) {
    tracing::info!(vm = %record.name, %id, ?verdict, "the peer has answered");
    match (verdict, daemon.records.stage(id)) {
        // The guest runs there and needs pages of here: nothing of it may go.
        (Verdict::Committed, Some(Stage::HandingOver { postcopy: Some(options), .. })) => {
            serve(daemon, record, id, peer, *options);
        }
        (Verdict::Committed, _) => {
            daemon.end_qemu(record);
            daemon.forget(&record.name, record.process);
            daemon.records.remove(id);
        }
        (Verdict::Aborted, _) => {
            if record.process.open().is_some()
                && let Err(problem) = control::give_back(record)
            {
                tracing::error!(vm = %record.name, "the guest could not be given back: {}", problem.message);
                daemon.mark(&record.name, format!("it could not be given back after a migration: {}", problem.message));
            }
            belongs_here(daemon, record, id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_that_is_back_within_a_minute_is_asked_within_half_a_second() {
        let (mut asked_for, mut pause) = (Duration::ZERO, FIRST_PAUSE);
        while asked_for < AT_FIRST {
            assert!(pause <= Duration::from_millis(500), "{pause:?} after {asked_for:?}");
            asked_for += pause;
            pause = longer(pause, asked_for);
        }
        for _ in 0..6 {
            pause = longer(pause, asked_for);
        }
        assert_eq!(pause, LONGEST_PAUSE, "nobody is asked twice a second for days");
    }
}
