//! Machines that were handed over while the peer fell silent: they must not run here until the peer says that they
//! never will there.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sterna_api::{Problem, VmState};
use sterna_engine::host::{MigrationId, Verdict};
use sterna_engine::source::ask_verdict;

use super::departures::Departures;
use super::leaving::{HANDED_OVER, too_late};
use super::pauses::Pauses;
use super::records::Stage;
use super::resuming::give_back;
use super::serving::serve;
use crate::machines::control::end_qemu;
use crate::machines::hold::{Activity, Hold, Shown};
use crate::machines::record::VmRecord;
use crate::machines::table::{Entry, Machines};

/// The question what became of a migration, which is asked until the peer answers.
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

    /// The address that is asked.
    #[must_use]
    pub fn peer(&self) -> String {
        self.lock().peer.clone()
    }

    /// The state of the question, for people: who is waited for, for how long, and the result of the last attempt.
    fn tell(&self) -> String {
        let asked = self.lock();
        let (peer, seconds) = (&asked.peer, self.since.elapsed().as_secs());
        let answer = asked.answer.as_ref().map_or(String::new(), |answer| format!(". When last asked: {answer}"));
        format!(
            "handed over to {peer}, which has not said whether it runs there; waiting for {peer} for {seconds} \
             s{answer}"
        )
    }

    /// Notes why an answer settles nothing. Returns whether it differs from the one before.
    fn answered(&self, answer: String) -> bool {
        let mut asked = self.lock();
        let changed = asked.answer.as_ref() != Some(&answer);
        asked.answer = Some(answer);
        changed
    }

    fn lock(&self) -> MutexGuard<'_, Asked> {
        self.peer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks at once, and from now on at the address `peer`, if given.
    pub fn hurry(&self, peer: Option<&str>) {
        let mut asked = self.lock();
        asked.at_once = true;
        if let Some(peer) = peer {
            asked.peer = peer.into();
        }
        self.hurried.notify_all();
    }

    /// Waits before the next attempt, unless somebody called [`hurry`](Self::hurry).
    fn pause(&self, pause: Duration) -> bool {
        let (mut asked, _) = self
            .hurried
            .wait_timeout_while(self.lock(), pause, |asked| !asked.at_once)
            .unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut asked.at_once)
    }
}

/// The activity of a machine that was handed over without a known verdict: it must not run here.
impl Activity for Question {
    fn describe(&self) -> &'static str {
        "it was handed over to a peer that has not answered yet"
    }

    fn cancel(&self, name: &str) -> Result<(), Problem> {
        Err(too_late(name, HANDED_OVER))
    }

    fn show(&self) -> Shown {
        Shown::As { state: VmState::WaitingForPeer, note: Some(self.tell()), progress: None }
    }
}

/// The activity of a machine whose peer has answered, until what follows from the answer has begun: it is shown as it
/// was, whatever its QEMU says.
#[derive(Debug)]
struct Answered;

impl Activity for Answered {
    fn describe(&self) -> &'static str {
        "the peer that it was handed over to has just answered"
    }

    fn show(&self) -> Shown {
        Shown::state(VmState::WaitingForPeer)
    }
}

/// Asks the peer until it answers, on a thread of its own.
pub fn wait_for_verdict(departures: &Arc<Departures>, record: &VmRecord, id: MigrationId, peer: &str) {
    let question = Arc::new(Question::new(peer));
    departures.machines.hold(&record.name, Hold::shared(&question));
    let (departures, record) = (Arc::clone(departures), record.clone());
    let name = format!("verdict-{}", record.name);
    if let Err(error) = std::thread::Builder::new().name(name).spawn(move || ask(&departures, &record, id, &question)) {
        tracing::error!(%error, "cannot start the thread that asks for a verdict");
    }
}

fn ask(departures: &Arc<Departures>, record: &VmRecord, id: MigrationId, question: &Question) {
    let Departures { machines, records, .. } = &**departures;
    let mut pauses = Pauses::default();
    while still_waiting(machines, record) {
        let peer = question.peer();
        match ask_verdict(id, &peer, records.accepted_by(id), departures.credentials.as_deref()) {
            Ok(verdict) if settle(departures, record, id, verdict, &peer) => return,
            // A person has decided before.
            Ok(_) => {}
            Err(error) => {
                let answer = in_words(&error.problem());
                if question.answered(answer.clone()) {
                    tracing::warn!(vm = %record.name, peer, "no verdict yet: {answer}");
                }
                let hurried = question.pause(pauses.next());
                pauses.over(hurried, question.since.elapsed());
            }
        }
    }
    // The machine was given up by force, or let run here by a person's word: then nobody needs the record.
    records.remove(id);
}

/// A problem and its hint, in one line.
fn in_words(problem: &Problem) -> String {
    let hint = problem.hint.as_ref().map_or(String::new(), |hint| format!(" ({hint})"));
    format!("{}{hint}", problem.with_causes())
}

fn still_waiting(machines: &Machines, record: &VmRecord) -> bool {
    machines.table().get(&record.name).is_some_and(|entry| waits(entry, record))
}

fn waits(entry: &Entry, record: &VmRecord) -> bool {
    entry.hold.is::<Question>() && entry.is(record)
}

/// Ends the waiting for one caller alone: the peer's answer and a person's word may come at the same moment and
/// contradict each other. Returns whether this caller was the first.
pub fn decide(machines: &Machines, record: &VmRecord) -> bool {
    let mut table = machines.table();
    let entry = table.get_mut(&record.name).filter(|entry| waits(entry, record));
    entry.map(|entry| entry.hold = Hold::busy(Answered)).is_some()
}

/// Does what the peer's answer says; `false` where somebody has decided before it came.
fn settle(departures: &Arc<Departures>, record: &VmRecord, id: MigrationId, verdict: Verdict, peer: &str) -> bool {
    let Departures { machines, records, .. } = &**departures;
    if !decide(machines, record) {
        return false;
    }
    tracing::info!(vm = %record.name, %id, ?verdict, "the peer has answered");
    match (verdict, records.stage(id)) {
        // The guest runs there and needs pages from here: nothing of it may be removed.
        (Verdict::Committed, Some(Stage::HandingOver { postcopy: Some(options), .. })) => {
            serve(departures, record, id, peer, *options);
        }
        (Verdict::Committed, _) => {
            end_qemu(record);
            machines.forget(&record.name, record.process);
            records.remove(id);
        }
        (Verdict::Aborted, _) => give_back(machines, records, record, id, None),
    }
    true
}
