//! The thread that waits for a machine's end.
//!
//! When a guest switches itself off or its QEMU dies, the machine leaves the list: its RAM file and directory go, what
//! QEMU said last stays as `STATE/logs/NAME.log`.

use std::sync::Arc;

use super::record::VmRecord;
use super::table::Machines;

/// Waits for the end of a machine's process, on a thread of its own, and then takes the machine off the list.
pub fn watch(machines: &Arc<Machines>, record: &VmRecord) {
    let (machines, name, process) = (Arc::clone(machines), record.name.clone(), record.process);
    let watch = move || {
        if let Some(handle) = process.open() {
            let _ = handle.wait(None);
        }
        machines.ended(&name, process);
    };
    let spawned = std::thread::Builder::new().name(format!("watch-{}", record.name)).spawn(watch);
    if let Err(error) = spawned {
        tracing::error!(vm = %record.name, %error, "cannot watch the machine's process");
    }
}
