//! Machines that were handed over while the peer fell silent: they must not run here until it says that they never will there.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sterna_api::Problem;
use sterna_engine::host::{DaemonId, MigrationId, Verdict};
use sterna_engine::source::ask_verdict;

use super::records::Stage;
use super::resuming::give_back;
use super::serving::serve;
use crate::vms::{Daemon, Entry, Hold, VmRecord};

/// The first pause between two questions; each is twice as long as the one before.
pub(super) const FIRST_PAUSE: Duration = Duration::from_millis(250);
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
    /// Why the last answer settled nothing.
    answer: Option<String>,
    at_once: bool,
}

impl Question {
    fn new(peer: &str) -> Self {
        let asked = Asked { peer: peer.into(), answer: None, at_once: false };
        Self { since: Instant::now(), peer: Mutex::new(asked), hurried: Condvar::new() }
    }

    /// Whom it is asked.
    #[must_use]
    pub fn peer(&self) -> String {
        self.lock().peer.clone()
    }

    /// What is waited for, for how long, and what came of the last question, for people.
    #[must_use]
    pub fn show(&self) -> String {
        let asked = self.lock();
        let (peer, seconds) = (&asked.peer, self.since.elapsed().as_secs());
        let answer = asked.answer.as_ref().map_or(String::new(), |answer| format!(". When last asked: {answer}"));
        format!(
            "handed over to {peer}, which has not said whether it runs there; waiting for {peer} for {seconds} s{answer}"
        )
    }

    /// Notes why an answer settles nothing; whether it is another one than before.
    fn answered(&self, answer: String) -> bool {
        let mut asked = self.lock();
        let changed = asked.answer.as_ref() != Some(&answer);
        asked.answer = Some(answer);
        changed
    }

    fn lock(&self) -> MutexGuard<'_, Asked> {
        self.peer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks at once, and somebody else from now on where `peer` says so.
    pub fn hurry(&self, peer: Option<&str>) {
        let mut asked = self.lock();
        asked.at_once = true;
        if let Some(peer) = peer {
            asked.peer = peer.into();
        }
        self.hurried.notify_all();
    }

    /// Waits before the next attempt, unless somebody is in a hurry.
    fn pause(&self, pause: Duration) -> bool {
        let (mut asked, _) = self
            .hurried
            .wait_timeout_while(self.lock(), pause, |asked| !asked.at_once)
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
        match ask_verdict(id, &peer, accepted_by(daemon, id), daemon.credentials.as_deref()) {
            Ok(verdict) if settle(daemon, record, id, verdict, &peer) => return,
            // A person was quicker.
            Ok(_) => {}
            Err(error) => {
                let answer = in_words(&error.problem());
                if question.answered(answer.clone()) {
                    tracing::warn!(vm = %record.name, peer, "no verdict yet: {answer}");
                }
                let hurried = question.pause(pause);
                pause = if hurried { FIRST_PAUSE } else { longer(pause, question.since.elapsed()) };
            }
        }
    }
    // Given up by force, or let run here by a person's word: then nobody needs the record.
    daemon.records.remove(id);
}

/// Which daemon took the guest, where that is known.
pub fn accepted_by(daemon: &Daemon, id: MigrationId) -> Option<DaemonId> {
    match daemon.records.stage(id) {
        Some(Stage::HandingOver { daemon, .. }) => daemon,
        _ => None,
    }
}

/// A problem and what to do about it, in a line.
fn in_words(problem: &Problem) -> String {
    let hint = problem.hint.as_ref().map_or(String::new(), |hint| format!(" ({hint})"));
    format!("{}{hint}", problem.with_causes())
}

/// The pause after one of that length, where it has been tried for so long.
pub(super) fn longer(pause: Duration, asked_for: Duration) -> Duration {
    (pause * 2).min(if asked_for < AT_FIRST { LONGEST_AT_FIRST } else { LONGEST_PAUSE })
}

fn still_waiting(daemon: &Daemon, record: &VmRecord) -> bool {
    daemon.table().get(&record.name).is_some_and(|entry| waits(entry, record))
}

fn waits(entry: &Entry, record: &VmRecord) -> bool {
    matches!(entry.hold, Hold::WaitingForPeer { .. })
        && entry.record.as_ref().is_some_and(|known| known.process == record.process)
}

/// Ends the waiting, for one alone: the peer's answer and a person's word may come at the same moment, and say different things. Whether it was
/// this one.
pub fn decide(daemon: &Daemon, record: &VmRecord) -> bool {
    let mut table = daemon.table();
    let entry = table.get_mut(&record.name).filter(|entry| waits(entry, record));
    entry.map(|entry| entry.hold = Hold::Stopping).is_some()
}

/// Does what the peer's answer says; `false` where somebody has decided otherwise before it came.
fn settle(daemon: &Arc<Daemon>, record: &VmRecord, id: MigrationId, verdict: Verdict, peer: &str) -> bool {
    if !decide(daemon, record) {
        return false;
    }
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
        (Verdict::Aborted, _) => give_back(daemon, record, id, None),
    }
    true
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
