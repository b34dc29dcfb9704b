//! Memory hosts in the place of those that are gone for good. Of two that have the same pages one may not answer for so
//! long that nobody waits for it any more: a spare takes its place, and is given what the other one has. So, too, where
//! there is parity; without a spare the others go on without it (`fewer.rs`).

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_api::Problem;
use sterna_engine::monitor::Monitor;

use super::{Parting, Splits, fewer};
use crate::machines::claim::Claimed;
use crate::machines::hold::Hold;
use crate::problems::passes;

/// How often it is looked who does not answer.
const LOOK: Duration = Duration::from_secs(1);
/// How long until spares are asked again, none of which has lent anything.
const AGAIN: Duration = Duration::from_secs(60);

/// The spares of a host's guests.
#[derive(Debug, Clone, Default)]
pub struct Spares {
    /// Where they listen, the first to be asked first.
    pub peers: Vec<String>,
    /// How long a memory host may be silent that another one has the same pages as.
    pub after: Duration,
}

/// A memory host that does not answer: the machine, and where it listened.
type Silent = (String, String);

/// Begins to have spares take the places of memory hosts that do not answer, on a thread of its own, for as long as
/// this daemon runs.
pub fn begin(splits: &Arc<Splits>, spares: Spares) {
    let splits = Arc::clone(splits);
    let look = move || {
        let mut due = HashMap::new();
        loop {
            replace_silent(&splits, &spares, &mut due);
            std::thread::sleep(LOOK);
        }
    };
    if let Err(error) = std::thread::Builder::new().name("spares".into()).spawn(look) {
        tracing::error!(%error, "cannot start the thread that replaces memory hosts");
    }
}

/// Looks who does not answer, and replaces those whose time is over; `due` is when that is.
fn replace_silent(splits: &Arc<Splits>, spares: &Spares, due: &mut HashMap<Silent, Instant>) {
    let now = Instant::now();
    let silent = silent(splits);
    due.retain(|known, _| silent.contains(known));
    for (name, peer) in silent {
        let when = due.entry((name.clone(), peer.clone())).or_insert(now + spares.after);
        if *when > now {
            continue;
        }
        *when = now + AGAIN;
        match replace_by_spare(splits, &name, &peer, &spares.peers) {
            Ok(Some(spare)) => {
                tracing::warn!(vm = name, gone = peer, by = spare, "a memory host that did not answer was replaced");
            }
            Ok(None) => begin_without(splits, name, peer),
            // Somebody else is busy with it, or it is not split any more.
            Err(problem) => tracing::debug!(vm = name, silent = peer, "{}", problem.with_causes()),
        }
    }
}

/// Has a machine go on without a memory host, in the background: this takes as long as all that it has away.
fn begin_without(splits: &Arc<Splits>, name: String, peer: String) {
    let splits = Arc::clone(splits);
    let go_on = move || {
        let record = splits.care.machines.table().get(&name).and_then(|entry| entry.record.clone());
        let Some(split) = record.and_then(|record| record.split) else { return };
        let silent: Vec<_> = silent(&splits).into_iter().filter(|(of, _)| *of == name).map(|(_, peer)| peer).collect();
        match fewer::go_on_without(&splits, &name, &split, &silent) {
            Ok(Some(redundancy)) => {
                tracing::warn!(vm = name, gone = peer, ?redundancy, "its other memory hosts go on without one");
            }
            Ok(None) => tracing::warn!(
                vm = name,
                silent = peer,
                "nobody takes the place of a memory host that does not answer: another one that goes would cost pages"
            ),
            // Somebody else does something with it, or pages follow it. It is tried again.
            Err(problem) if passes(&problem) => {
                tracing::debug!(vm = name, silent = peer, "{}", problem.with_causes());
            }
            Err(problem) => tracing::warn!(
                vm = name,
                silent = peer,
                "its other memory hosts do not go on without one: {}",
                problem.with_causes()
            ),
        }
    };
    if let Err(error) = std::thread::Builder::new().name("fewer".into()).spawn(go_on) {
        tracing::error!(%error, "cannot start the thread that has a machine go on without a memory host");
    }
}

/// The memory hosts that do not answer, while another one that does has the same pages.
fn silent(splits: &Splits) -> Vec<Silent> {
    let table = splits.care.machines.table();
    let split = |name: &String| Some((name.clone(), table.get(name)?.remote.as_ref()?.split().ok()?.silent()));
    table.keys().filter_map(split).flat_map(|(name, all)| all.into_iter().map(move |one| (name.clone(), one))).collect()
}

/// The spare that has taken the place of a machine's memory host; `None` where none lends what is needed.
fn replace_by_spare(splits: &Splits, name: &str, peer: &str, spares: &[String]) -> Result<Option<String>, Problem> {
    if spares.is_empty() {
        return Ok(None);
    }
    let what = "another memory host takes the place of one that does not answer";
    let hold = Hold::busy(Parting { what, monitor: Arc::new(Monitor::new(name)) });
    let claimed = Claimed::new(&splits.care.machines, name, hold)?;
    let Some(split) = &claimed.record.split else { return Ok(None) };
    let Some((number, which)) = split.borrowed.one_of_two(peer) else { return Ok(None) };
    let lend: Vec<String> = split.borrowed.lending().into_iter().map(|host| host.peer).collect();
    let remote = splits.care.machines.reach(name)?;
    for spare in spares.iter().filter(|spare| !lend.contains(spare) && splits.listen.as_ref() != Some(*spare)) {
        // Each attempt leaves the record as it was, or is the last.
        let record = splits.care.machines.table().get(name).and_then(|entry| entry.record.clone());
        let Some(record) = record else { break };
        match splits.exchange(&record, remote.split()?).take_place((number, which), spare) {
            Ok(()) => return Ok(Some(spare.clone())),
            Err(problem) => {
                tracing::info!(
                    vm = name,
                    spare,
                    "it does not take the place of a memory host: {}",
                    problem.with_causes()
                )
            }
        }
    }
    Ok(None)
}
