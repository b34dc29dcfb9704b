//! A host that runs short of memory: it warns, and stops guests that write what they shared before the kernel has to
//! end one.
//!
//! Guests that share pages take more memory the more of them they write, and nobody asks before they do. Below twice
//! the floor the daemon says who writes; below the floor it stops those. They go on, one after the other, once there is
//! twice the floor again. A guest that takes memory in another way is not stopped: its host gave it that memory.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sterna_api::units::show_size;
use sterna_api::{MemoryMode, Problem, VmState};
use sterna_engine::memory::common::common_now;

use crate::guest_agent;
use crate::kept::Keeper;
use crate::machines::claim::Claimed;
use crate::machines::control::Control;
use crate::machines::hold::{Activity, Hold, Shown};
use crate::machines::record::VmRecord;
use crate::machines::table::Machines;
use crate::migration::leaving::Leaving;
use crate::pace::pause_after;

/// How often the host's memory is looked at, while there is enough of it and else.
const CALM: Duration = Duration::from_secs(1);
const SHORT: Duration = Duration::from_millis(200);
/// A look's processor time is less than this part of the pause after it: all page tables of all guests are gone
/// through, which takes long where they have much memory, and the guests have as few processors as before.
const PART: u32 = 4;
/// Guests are looked at while there is less than so many times the floor: what one has written since the look before
/// is then known when it counts.
const LOOK_BELOW: u64 = 4;
/// There is room again at so many times the floor.
const ENOUGH: u64 = 2;

/// A guest that may share pages.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Guest {
    name: String,
    /// What it has in common with others, bytes.
    shared: u64,
    /// What its QEMU has for itself, bytes, where the kernel says.
    own: Option<u64>,
    /// It was stopped because the host is short of memory.
    stopped: bool,
}

/// What is done because of one look.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Step {
    /// People are told that there is little left, and whose writes take it.
    Warn(Vec<String>),
    /// This guest is stopped.
    Stop(String),
    /// This guest goes on.
    LetRun(String),
}

/// When guests are stopped and go on.
#[derive(Debug)]
struct Rule {
    /// The memory below which they are stopped, bytes.
    floor: u64,
    /// What each shared, and had for itself, at the look before.
    before: HashMap<String, (u64, Option<u64>)>,
    warned: bool,
    /// Those that had their turn to go on. One that cannot now, because it is being moved or its QEMU does not answer,
    /// has its next turn after all others.
    had_turn: HashSet<String>,
}

impl Rule {
    fn new(floor: u64) -> Self {
        Self { floor, before: HashMap::new(), warned: false, had_turn: HashSet::new() }
    }

    /// Whether guests have to be looked at, where this much is left.
    fn looks(&self, room: u64) -> bool {
        room < self.floor.saturating_mul(LOOK_BELOW)
    }

    /// What to do, where this much is left.
    fn step(&mut self, room: u64, guests: &[Guest]) -> Vec<Step> {
        // What it has given back it does not have for itself.
        let took = |guest: &Guest, before: Option<u64>| guest.own.zip(before).is_none_or(|(own, before)| own > before);
        let wrote = |guest: &&Guest| {
            let before = self.before.get(&guest.name);
            before.is_some_and(|(shared, own)| *shared > guest.shared && took(guest, *own))
        };
        let writers: Vec<&Guest> = guests.iter().filter(|guest| !guest.stopped).filter(wrote).collect();
        let mut steps = Vec::new();
        if room >= self.floor.saturating_mul(ENOUGH) {
            self.warned = false;
            steps.extend(self.turn(guests).map(Step::LetRun));
        } else if !self.warned && !writers.is_empty() {
            self.warned = true;
            steps.push(Step::Warn(writers.iter().map(|guest| guest.name.clone()).collect()));
        }
        if room < self.floor {
            steps.extend(writers.iter().map(|guest| Step::Stop(guest.name.clone())));
        }
        self.before = guests.iter().map(|guest| (guest.name.clone(), (guest.shared, guest.own))).collect();
        steps
    }

    /// The guest whose turn it is to go on.
    fn turn(&mut self, guests: &[Guest]) -> Option<String> {
        let stopped = || guests.iter().filter(|guest| guest.stopped).map(|guest| &guest.name);
        if stopped().all(|name| self.had_turn.contains(name)) {
            self.had_turn.clear();
        }
        let next = stopped().find(|name| !self.had_turn.contains(*name))?;
        self.had_turn.insert(next.clone());
        Some(next.clone())
    }
}

/// Begins to look, on a thread of its own, for as long as this daemon runs. `keeper` says how much memory there is.
/// `floor`: the memory below which guests are stopped, bytes. With 0 none ever is; those that were before go on.
pub fn begin(machines: Arc<Machines>, keeper: Arc<Keeper>, floor: u64) {
    let look = move || {
        let (mut rule, acts) = (Rule::new(floor), Acts::new(Arc::clone(&machines)));
        loop {
            let any = machines
                .table()
                .values()
                .filter_map(|entry| entry.record.as_ref())
                .any(|record| record.memory_mode == MemoryMode::Private || record.waits_for_room);
            let room = if any { keeper.room_bytes() } else { u64::MAX };
            let least = if rule.looks(room) { SHORT } else { CALM };
            std::thread::sleep(pause_after(least, PART, || {
                let guests = guests(&machines, rule.looks(room));
                for step in rule.step(room, &guests) {
                    acts.begin(step, room);
                }
            }));
        }
    };
    if let Err(error) = std::thread::Builder::new().name("room".into()).spawn(look) {
        tracing::error!(%error, "cannot start the thread that watches this host's memory");
    }
}

/// The guests that were stopped, and with `all` all that may share pages.
fn guests(machines: &Machines, all: bool) -> Vec<Guest> {
    let records: Vec<_> = machines.table().values().filter_map(|entry| entry.record.clone()).collect();
    let wanted =
        records.into_iter().filter(|record| record.waits_for_room || all && record.memory_mode == MemoryMode::Private);
    wanted
        .map(|record| {
            let now = common_now(&record.private_memory());
            let (shared, own) = now.unwrap_or((0, None));
            Guest { shared, own, stopped: record.waits_for_room, name: record.name }
        })
        .collect()
}

/// What is being done with guests. Each is stopped, and goes on, on a thread of its own: one whose QEMU does not answer
/// holds up neither the looks nor another guest.
struct Acts {
    machines: Arc<Machines>,
    /// Those with which a thread is busy: nothing else is begun with them.
    under_way: Mutex<HashSet<String>>,
    /// Those of which it was told that they cannot be stopped.
    told: Mutex<HashSet<String>>,
}

impl Acts {
    fn new(machines: Arc<Machines>) -> Arc<Self> {
        Arc::new(Self { machines, under_way: Mutex::default(), told: Mutex::default() })
    }

    /// Begins what is to be done, where `room` is left, bytes.
    fn begin(self: &Arc<Self>, step: Step, room: u64) {
        let (name, stopped) = match step {
            Step::Warn(names) => {
                lock(&self.told).clear();
                return tracing::warn!(
                    room = show_size(room),
                    writers = names.join(", "),
                    "this host has little memory left, and guests write pages that they shared: move one away, or stop \
                     one"
                );
            }
            Step::Stop(name) => (name, true),
            Step::LetRun(name) => (name, false),
        };
        if !lock(&self.under_way).insert(name.clone()) {
            return;
        }
        let (acts, whose) = (Arc::clone(self), name.clone());
        let act = move || acts.act(&whose, stopped, room);
        if std::thread::Builder::new().name("room-vm".into()).spawn(act).is_err() {
            // A host that is short has no thread to spare: then this one does it.
            self.act(&name, stopped, room);
        }
    }

    fn act(&self, name: &str, stopped: bool, room: u64) {
        let (done, room) = (set(&self.machines, name, stopped), show_size(room));
        match (stopped, done) {
            (true, Ok(true)) => {
                tracing::error!(vm = %name, room, "STOPPED: this host has no memory left for what it writes");
            }
            (true, Ok(false)) => {}
            // It is tried again at every look: once is enough.
            (true, Err(problem)) if lock(&self.told).insert(name.into()) => tracing::warn!(
                vm = %name,
                room,
                "memory is short, it writes what it shared, and it cannot be stopped: {}. Stop another machine, or move \
                 one away",
                problem.message
            ),
            (true, Err(_)) => {}
            (false, Ok(_)) => tracing::info!(vm = %name, room, "it goes on: there is memory again"),
            (false, Err(problem)) => tracing::debug!(vm = %name, "does not go on yet: {}", problem.message),
        }
        lock(&self.under_way).remove(name);
    }
}

fn lock(names: &Mutex<HashSet<String>>) -> MutexGuard<'_, HashSet<String>> {
    names.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Stops a guest, or lets it go on. Returns whether it ran or stood still before because of that.
fn set(machines: &Machines, name: &str, stopped: bool) -> Result<bool, Problem> {
    let entry = machines.entry(name)?;
    let leaving: Option<&Leaving> = entry.hold.activity();
    // One that waits for its turn to leave is claimed, perhaps for hours, and nothing is done with it. Its turn does
    // not come before this has ended, and begins with what this has written.
    if let (Some(_rests), Some(record)) = (leaving.and_then(Leaving::at_rest), &entry.record) {
        return change(machines, &machines.now(record), stopped);
    }
    let claimed = Claimed::new(machines, name, Hold::busy(Stopping))?;
    change(machines, &claimed.record, stopped)
}

/// The same of a machine with which nobody else does anything.
fn change(machines: &Machines, record: &VmRecord, stopped: bool) -> Result<bool, Problem> {
    let mut control = Control::connect(&record.qmp)?;
    let status = control.status()?;
    let expected = if stopped { "running" } else { "paused" };
    if stopped && status != expected {
        return Ok(false);
    }
    let changed = VmRecord { waits_for_room: stopped, ..record.clone() };
    // Written first where it stops, and last where it goes on: a daemon started anew lets it go on in any case.
    if stopped {
        machines.try_store(&changed);
    }
    if status == expected {
        control.send(if stopped { "stop" } else { "cont" })?;
    }
    if !stopped {
        machines.try_store(&changed);
        guest_agent::set_clock_later(&changed);
    }
    Ok(status == expected)
}

/// The activity of being stopped, or let go on, because of the host's memory.
#[derive(Debug)]
struct Stopping;

impl Activity for Stopping {
    fn describe(&self) -> &'static str {
        "this host's memory is short: it is being stopped, or let go on"
    }

    fn show(&self) -> Shown {
        Shown::state(VmState::Paused)
    }
}

#[cfg(test)]
#[path = "shortage_tests.rs"]
mod tests;
