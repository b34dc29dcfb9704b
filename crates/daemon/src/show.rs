//! Showing machines: what the table knows, and what QEMU says when asked.

use std::path::Path;

use sterna_api::{MemoryMode, Problem, Vm, VmState};

use crate::balloon::Balloons;
use crate::machines::control::{Control, vm_state};
use crate::machines::hold::{Hold, Shown};
use crate::machines::split;
use crate::machines::table::{Entry, Machines};
use crate::metrics::Traffic;
use crate::migration::arriving::{Arriving, arriving};
use crate::migration::line::Counts;
use crate::migration::paging;
use crate::migration::queue::Queue;
use crate::qemu::binary;
use crate::several;

/// The machine of this name, as the API shows it.
///
/// # Errors
/// A [`Problem`] where no machine has this name.
pub fn show(machines: &Machines, balloons: &Balloons, name: &str) -> Result<Vm, Problem> {
    Ok(look(machines, balloons, name, &machines.entry(name)?))
}

/// All machines, ordered by name.
#[must_use]
pub fn list(machines: &Machines, balloons: &Balloons) -> Vec<Vm> {
    let mut entries: Vec<(String, Entry)> =
        machines.table().iter().map(|(name, entry)| (name.clone(), entry.clone())).collect();
    entries.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
    several::map(entries, |(name, entry)| look(machines, balloons, &name, &entry))
}

/// The migrations under way now.
#[must_use]
pub fn traffic(machines: &Machines, queue: &Queue) -> Traffic {
    let Counts { waiting, under_way } = queue.counts();
    Traffic { queued: waiting, outgoing: under_way, incoming: arriving(&machines.table()) }
}

fn look(machines: &Machines, balloons: &Balloons, name: &str, entry: &Entry) -> Vm {
    let vm = describe(balloons, name, entry);
    if vm.state != VmState::Lost {
        return vm;
    }
    // QEMU talks to one at a time: it may not have answered because somebody has come to work with it meanwhile.
    match machines.entry(name) {
        Ok(entry) if matches!(entry.hold, Hold::Busy(_)) => describe(balloons, name, &entry),
        _ => vm,
    }
}

fn describe(balloons: &Balloons, name: &str, entry: &Entry) -> Vm {
    let Some(record) = &entry.record else { return being_made(name, entry) };
    let stopped =
        "stopped: this host has no memory left for pages that it shares and writes. It goes on when there is some";
    let mut note = entry.note.clone().or_else(|| record.waits_for_room.then(|| stopped.into()));
    let mut migration = None;
    let arriving = paging::describe(entry);
    // Its QEMU may itself wait for a page, and then answers nobody.
    let split = record.split.as_ref().zip(entry.remote.as_ref()).map(|(record, remote)| remote.show(record));
    let waits = arriving.as_ref().is_some_and(|(arriving, _)| arriving.waiting_ms.is_some())
        || split.as_ref().is_some_and(|split| !split.waiting.is_empty());
    let shown = match &entry.hold {
        Hold::Free | Hold::Stopping if waits => Shown::state(VmState::Running),
        Hold::Free | Hold::Stopping | Hold::Starting => Shown::Asked,
        Hold::Busy(activity) => match activity.show() {
            Shown::Asked if waits => Shown::state(VmState::Running),
            shown => shown,
        },
    };
    let state = match shown {
        Shown::Asked => match asked(&record.qmp, &mut note) {
            // It waits for one of the pages that are elsewhere, most likely: it has not ended.
            VmState::Lost if (arriving.is_some() || split.is_some()) && record.process.open().is_some() => {
                VmState::Running
            }
            state => state,
        },
        Shown::As { state, note: more, progress } => {
            note = note.or(more);
            migration = progress.map(|progress| *progress);
            state
        }
    };
    Vm {
        name: name.into(),
        state,
        memory_bytes: record.memory_bytes,
        allocated_bytes: record.allocated_bytes(),
        huge_bytes: record.huge_bytes(),
        shared_bytes: record.shared_bytes(),
        memory_mode: record.memory_mode,
        memory_template: record.template().map(|template| template.path.display().to_string()),
        trust_group: record.trust_group.clone(),
        pid: record.process.pid,
        qemu: binary::show(record.qemu_version),
        qemu_path: record.qemu_path.display().to_string(),
        arguments: record.arguments.clone(),
        forked_from: record.forked_from.clone(),
        family: record.family.clone(),
        held_for: record.held.as_ref().map(|held| held.template.clone()),
        migration,
        note: note
            .or_else(|| arriving.as_ref().map(|(_, text)| text.clone()))
            .or_else(|| split.as_ref().map(split::describe)),
        arriving: arriving.map(|(arriving, _)| arriving),
        split,
        balloon: balloons.show(record),
    }
}

fn asked(qmp: &Path, note: &mut Option<String>) -> VmState {
    match Control::connect(qmp).and_then(|mut control| control.status()) {
        Ok(status) => {
            let state = vm_state(&status);
            if state == VmState::Paused && status != "paused" {
                note.get_or_insert(format!("QEMU says '{status}'"));
            }
            state
        }
        Err(problem) => {
            let cause = problem.cause.first().map_or(String::new(), |cause| format!(": {cause}"));
            note.get_or_insert(format!("{}{cause}", problem.message));
            VmState::Lost
        }
    }
}

fn being_made(name: &str, entry: &Entry) -> Vm {
    let arriving = entry.hold.is::<Arriving>();
    Vm {
        name: name.into(),
        state: if arriving { VmState::MigratingIn } else { VmState::Paused },
        memory_bytes: 0,
        allocated_bytes: 0,
        huge_bytes: 0,
        shared_bytes: 0,
        memory_mode: MemoryMode::Shared,
        memory_template: None,
        trust_group: None,
        pid: 0,
        qemu: String::new(),
        qemu_path: String::new(),
        arguments: Vec::new(),
        forked_from: None,
        family: None,
        held_for: None,
        migration: None,
        balloon: None,
        split: None,
        note: Some(if arriving { "it is being moved here" } else { "it is being started" }.into()),
        arriving: None,
    }
}
