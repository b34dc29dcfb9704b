//! Showing machines: what the table knows, and what QEMU says when asked.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use sterna_api::{MemoryMode, Phase, Problem, Vm, VmState};

use super::control::{Control, vm_state};
use super::{Daemon, Entry, Hold, arriving, paging};
use crate::metrics::Traffic;
use crate::migration::queue::Counts;
use crate::problems::unknown_vm;
use crate::qemu::binary;

/// How many QEMUs are asked at a time.
const ASKERS: usize = 32;

impl Daemon {
    /// One machine.
    ///
    /// # Errors
    /// A [`Problem`] where there is none of this name.
    pub fn show(&self, name: &str) -> Result<Vm, Problem> {
        let entry = self.table().get(name).cloned().ok_or_else(|| unknown_vm(name))?;
        Ok(self.describe(name, &entry))
    }

    /// The migrations under way now.
    #[must_use]
    pub fn traffic(&self) -> Traffic {
        let Counts { waiting, under_way } = self.jobs.queue.counts();
        Traffic { queued: waiting, outgoing: under_way, incoming: arriving(&self.table()) }
    }

    /// All machines, by name.
    #[must_use]
    pub fn list(&self) -> Vec<Vm> {
        let mut entries: Vec<(String, Entry)> =
            self.table().iter().map(|(name, entry)| (name.clone(), entry.clone())).collect();
        entries.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
        // Side by side: a QEMU that stands still has seconds to answer, and nobody else's list or metrics may wait for each of them in turn.
        let next = AtomicUsize::new(0);
        let describe = || -> Vec<(usize, Vm)> {
            let mine = std::iter::from_fn(|| {
                let index = next.fetch_add(1, Ordering::Relaxed);
                entries.get(index).map(|(name, entry)| (index, self.describe(name, entry)))
            });
            mine.collect()
        };
        let mut described = std::thread::scope(|scope| {
            let others: Vec<_> = (1..ASKERS.min(entries.len()))
                .map_while(|_| std::thread::Builder::new().name("list".into()).spawn_scoped(scope, describe).ok())
                .collect();
            let mut described = describe();
            for other in others {
                described.extend(other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
            }
            described
        });
        described.sort_unstable_by_key(|(index, _)| *index);
        described.into_iter().map(|(_, vm)| vm).collect()
    }

    fn describe(&self, name: &str, entry: &Entry) -> Vm {
        let balloon = entry.record.as_ref().and_then(|record| self.balloons.show(record));
        Vm { balloon, ..describe(name, entry) }
    }
}

fn describe(name: &str, entry: &Entry) -> Vm {
    let Some(record) = &entry.record else { return being_made(name, entry) };
    let mut note = entry.note.clone();
    let mut migration = None;
    let arriving = paging::describe(entry);
    let state = match &entry.hold {
        // Its QEMU may itself wait for a page, and answers nobody then.
        Hold::Free | Hold::Stopping if arriving.as_ref().is_some_and(|(arriving, _)| arriving.waiting_ms.is_some()) => {
            VmState::Running
        }
        Hold::Free | Hold::Stopping | Hold::Starting | Hold::Adjusting | Hold::Estimating(_) => {
            asked(&record.qmp, &mut note)
        }
        // Its QEMU serves one client at a time, and who takes its guest's free memory is one.
        Hold::Reclaiming(_) => {
            note.get_or_insert("the memory that its guest holds free is being taken".into());
            VmState::Running
        }
        Hold::Leaving(monitor) => {
            let progress = monitor.progress();
            if progress.phase == Phase::Postcopy {
                let left = progress.pages_left;
                note.get_or_insert(format!("it runs at its destination, {left} pages of it are still here"));
            }
            migration = Some(progress);
            VmState::MigratingOut
        }
        Hold::Arriving(_) => VmState::MigratingIn,
        Hold::WaitingForPeer { verdict } => {
            let (peer, since) = (verdict.peer(), verdict.elapsed().as_secs());
            note.get_or_insert(format!(
                "handed over to {peer}, which has not said whether it runs there; waiting for {peer} for {since} s"
            ));
            VmState::WaitingForPeer
        }
    };
    Vm {
        name: name.into(),
        state,
        memory_bytes: record.memory_bytes,
        allocated_bytes: record.allocated_bytes(),
        memory_mode: record.memory_mode,
        trust_group: record.trust_group.clone(),
        pid: record.process.pid,
        qemu: binary::show(record.qemu_version),
        qemu_path: record.qemu_path.display().to_string(),
        arguments: record.arguments.clone(),
        migration,
        note: note.or_else(|| arriving.as_ref().map(|(_, text)| text.clone())),
        arriving: arriving.map(|(arriving, _)| arriving),
        balloon: None,
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
    let arriving = matches!(entry.hold, Hold::Arriving(_));
    Vm {
        name: name.into(),
        state: if arriving { VmState::MigratingIn } else { VmState::Paused },
        memory_bytes: 0,
        allocated_bytes: 0,
        memory_mode: MemoryMode::Shared,
        trust_group: None,
        pid: 0,
        qemu: String::new(),
        qemu_path: String::new(),
        arguments: Vec::new(),
        migration: None,
        balloon: None,
        note: Some(if arriving { "it is being moved here" } else { "it is being started" }.into()),
        arriving: None,
    }
}
