//! Commands that several parts of the driver give QEMU, and the connection that they go over.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};

use crate::vmm::VmmError;
use crate::vmm::qmp::Qmp;

/// A QMP connection that the daemon and a migration take turns on: QEMU serves only one client.
pub type SharedQmp = Arc<Mutex<Qmp>>;

/// How long QEMU may take for a command that only asks or sets something. Its main loop can stand still behind disk
/// I/O.
pub(super) const COMMAND_TIMEOUT: Duration = Duration::from_secs(10);

/// How long QEMU may take to resume a guest or to give it back: it opens and flushes its disks on the way.
pub(super) const SLOW_COMMAND_TIMEOUT: Duration = Duration::from_secs(60);

/// Waits for the turn on a connection. A broken-off command leaves the connection as it was, so one whose holder
/// panicked is still of use.
pub fn lock(qmp: &SharedQmp) -> MutexGuard<'_, Qmp> {
    qmp.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs a command that has no arguments.
pub(super) fn ask(qmp: &mut Qmp, command: &str) -> Result<Value, VmmError> {
    qmp.execute(command, json!({}), COMMAND_TIMEOUT)
}

/// Runs a command that this QEMU may not know or not serve: null where it refuses.
pub(super) fn optional(
    qmp: &mut Qmp,
    (command, arguments): (&str, Value),
    within: Duration,
) -> Result<Value, VmmError> {
    match qmp.execute(command, arguments, within) {
        Err(VmmError::Refused { .. }) => Ok(Value::Null),
        other => other,
    }
}

/// The question for an object's property.
pub(super) fn property_question(path: &str, name: &str) -> (&'static str, Value) {
    ("qom-get", json!({ "path": path, "property": name }))
}

/// The question for what an object has.
pub(super) fn list_question(path: &str) -> (&'static str, Value) {
    ("qom-list", json!({ "path": path }))
}

/// What the monitor for people says, where no command for programs tells it.
pub(super) fn ask_monitor(qmp: &mut Qmp, command: &str) -> Result<String, VmmError> {
    tell_monitor(qmp, command, COMMAND_TIMEOUT)
}

/// Has the monitor for people do what no command for programs does; what it says, which is how it tells of failures.
pub(super) fn tell_monitor(qmp: &mut Qmp, command: &str, within: Duration) -> Result<String, VmmError> {
    let reply = qmp.execute("human-monitor-command", json!({ "command-line": command }), within)?;
    let no_text = || VmmError::Refused { command: command.to_owned(), reason: "its answer is no text".to_owned() };
    reply.as_str().map(str::to_owned).ok_or_else(no_text)
}

/// QEMU's state of the guest, by its own name, and whether virtual processors run.
pub(super) fn guest_status(qmp: &mut Qmp) -> Result<(String, bool), VmmError> {
    ask(qmp, "query-status").map(|reply| status_in(&reply))
}

/// The same in the answer to `query-status`.
pub(super) fn status_in(reply: &Value) -> (String, bool) {
    (reply["status"].as_str().unwrap_or("unknown").to_owned(), reply["running"].as_bool().unwrap_or(false))
}

/// The numbers of the threads that run the guest's processors.
pub(super) fn processor_threads(qmp: &mut Qmp) -> Result<Vec<u32>, VmmError> {
    let cpus = ask(qmp, "query-cpus-fast")?;
    let ids = cpus.as_array().into_iter().flatten().filter_map(|cpu| u32::try_from(cpu["thread-id"].as_u64()?).ok());
    let mut threads: Vec<u32> = ids.collect();
    // TCG without threads of its own for each processor names the same one for all.
    threads.sort_unstable();
    threads.dedup();
    Ok(threads)
}
