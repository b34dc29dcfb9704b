//! A host that runs short of memory: it warns, and stops guests that write what they shared before the kernel has to
//! end one.
//!
//! Guests that share pages take more memory the more of them they write, and nobody asks before they do. Below twice
//! the floor the daemon says who writes; below the floor it stops those. They go on, one after the other, once there is
//! twice the floor again. A guest that takes memory in another way is not stopped: its host gave it that memory.

use std::collections::HashMap;
use std::sync::Arc;
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
}

impl Rule {
    fn new(floor: u64) -> Self {
        Self { floor, before: HashMap::new(), warned: false }
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
            steps.extend(guests.iter().find(|guest| guest.stopped).map(|guest| Step::LetRun(guest.name.clone())));
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
}

/// Begins to look, on a thread of its own, for as long as this daemon runs. `keeper` says how much memory there is.
/// `floor`: the memory below which guests are stopped, bytes; with 0 none ever is.
pub fn begin(machines: Arc<Machines>, keeper: Arc<Keeper>, floor: u64) {
    let look = move || {
        let mut rule = Rule::new(floor);
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
                    act(&machines, &step, room);
                }
            }));
        }
    };
    if floor == 0 {
        return;
    }
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

fn act(machines: &Machines, step: &Step, room: u64) {
    let room = show_size(room);
    match step {
        Step::Warn(names) => tracing::warn!(
            room,
            writers = names.join(", "),
            "this host has little memory left, and guests write pages that they shared: move one away, or stop one"
        ),
        Step::Stop(name) => match set(machines, name, true) {
            Ok(true) => tracing::error!(vm = %name, room, "STOPPED: this host has no memory left for what it writes"),
            Ok(false) => {}
            // It is being moved or stopped: that takes its turn. People know of it by the warning.
            Err(problem) => tracing::debug!(vm = %name, "cannot be stopped for want of memory: {}", problem.message),
        },
        Step::LetRun(name) => match set(machines, name, false) {
            Ok(_) => tracing::info!(vm = %name, room, "it goes on: there is memory again"),
            Err(problem) => tracing::debug!(vm = %name, "does not go on yet: {}", problem.message),
        },
    }
}

/// Stops a guest, or lets it go on. Returns whether it ran or stood still before because of that.
fn set(machines: &Machines, name: &str, stopped: bool) -> Result<bool, Problem> {
    let mut claimed = Claimed::new(machines, name, Hold::busy(Stopping))?;
    let mut control = Control::connect(&claimed.record.qmp)?;
    let status = control.status()?;
    let expected = if stopped { "running" } else { "paused" };
    if stopped && status != expected {
        return Ok(false);
    }
    let changed = VmRecord { waits_for_room: stopped, ..claimed.record.clone() };
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
    claimed.record = changed;
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
mod tests {
    use super::*;

    const FLOOR: u64 = 100;

    fn guest(name: &str, shared: u64, stopped: bool) -> Guest {
        Guest { name: name.into(), shared, own: None, stopped }
    }

    fn stop(name: &str) -> Step {
        Step::Stop(name.into())
    }

    #[test]
    fn whoever_writes_what_it_shared_is_named_and_then_stopped_and_nobody_else() {
        let mut rule = Rule::new(FLOOR);
        let quiet = guest("quiet", 50, false);
        assert_eq!(rule.step(350, &[guest("w", 90, false), quiet.clone()]), []);
        assert_eq!(rule.step(250, &[guest("w", 80, false), quiet.clone()]), [], "there is enough");
        assert_eq!(rule.step(150, &[guest("w", 70, false), quiet.clone()]), [Step::Warn(vec!["w".into()])]);
        assert_eq!(rule.step(120, &[guest("w", 60, false), quiet.clone()]), [], "once is enough");
        assert_eq!(rule.step(90, &[guest("w", 50, false), quiet.clone()]), [stop("w")]);
        assert_eq!(rule.step(90, &[guest("w", 50, true), quiet]), []);
    }

    #[test]
    fn whoever_gives_back_what_it_shared_is_not_taken_for_one_that_writes_it() {
        let mut rule = Rule::new(FLOOR);
        let guest = |shared, own| Guest { own: Some(own), ..guest("g", shared, false) };
        assert_eq!(rule.step(90, &[guest(50, 10)]), []);
        assert_eq!(rule.step(90, &[guest(40, 10)]), [], "its balloon grows");
        assert_eq!(rule.step(90, &[guest(35, 15)]), [Step::Warn(vec!["g".into()]), stop("g")]);
    }

    #[test]
    fn a_guest_of_which_nothing_is_known_yet_is_not_stopped() {
        let mut rule = Rule::new(FLOOR);
        assert_eq!(rule.step(10, &[guest("new", 50, false)]), []);
        assert_eq!(rule.step(10, &[guest("new", 49, false)]), [Step::Warn(vec!["new".into()]), stop("new")]);
    }

    #[test]
    fn those_that_were_stopped_go_on_one_after_the_other_once_there_is_enough() {
        let mut rule = Rule::new(FLOOR);
        let both = [guest("a", 50, true), guest("b", 50, true)];
        assert_eq!(rule.step(150, &both), [], "more than the floor is not enough");
        assert_eq!(rule.step(200, &both), [Step::LetRun("a".into())]);
        assert_eq!(rule.step(90, &[guest("a", 40, false), guest("b", 50, true)])[1..], [stop("a")]);
    }

    #[test]
    fn guests_are_looked_at_before_there_is_little_left() {
        let rule = Rule::new(FLOOR);
        assert!(rule.looks(399) && !rule.looks(400));
    }
}
