//! QEMU 7.2 and later as a VMM: its own migration moves the devices, and Sterna everything in files of RAM.
//!
//! Device state passes through a socket pair: one end goes to QEMU over its QMP connection (`getfd`), so that no path,
//! no permission and no right to open sockets is needed, and a QEMU confined to its own user and `-sandbox` works like
//! any other.

/// The VMM at the source.
mod source;

/// The VMM at the destination.
mod destination;

/// What a running QEMU is made of.
mod inspect;

/// Who writes guest RAM past the page tables.
mod past;

/// Where the guest sees RAM.
mod memory_map;

/// What the processors' registers say.
mod registers;

/// The guest's balloon.
mod balloon;

/// What a QEMU binary can do.
mod binary;

/// The migration capabilities and parameters the switchover needs.
mod settings;

/// QEMU's process.
mod process;

/// What QEMU wrote to its standard error.
mod log;

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};

pub use balloon::{BalloonDevice, BalloonLook, resize};
pub use binary::{BinaryError, binary_version, machine_types};
pub use destination::QemuDestination;
pub use inspect::{Inspection, MemoryDevice, inspect};
pub use log::ErrorLog;
pub use process::QemuProcess;
pub use source::QemuSource;

use super::VmmError;
use super::qmp::{Event, Qmp};

/// A QMP connection that the daemon and a migration take turns on: QEMU serves only one client.
pub type SharedQmp = Arc<Mutex<Qmp>>;

/// How long QEMU may take for a command that only asks or sets something. Its main loop can stand still behind disk
/// I/O.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(10);

/// How long QEMU may take to resume a guest or to give it back: it opens and flushes its disks on the way.
const SLOW_COMMAND_TIMEOUT: Duration = Duration::from_secs(60);

/// How long QEMU has to end by itself once asked to.
const QUIT_TIMEOUT: Duration = Duration::from_secs(5);

/// A broken-off command leaves the connection as it was, so one whose holder panicked is still of use.
fn lock(qmp: &SharedQmp) -> MutexGuard<'_, Qmp> {
    qmp.lock().unwrap_or_else(PoisonError::into_inner)
}

fn ask(qmp: &mut Qmp, command: &str) -> Result<Value, VmmError> {
    qmp.execute(command, json!({}), COMMAND_TIMEOUT)
}

/// What the monitor for people says, where no command for programs tells it.
fn ask_monitor(qmp: &mut Qmp, command: &str) -> Result<String, VmmError> {
    let reply = qmp.execute("human-monitor-command", json!({ "command-line": command }), COMMAND_TIMEOUT)?;
    let no_text = || VmmError::Refused { command: command.to_owned(), reason: "its answer is no text".to_owned() };
    reply.as_str().map(str::to_owned).ok_or_else(no_text)
}

/// Gives QEMU one end of a new socket pair under the name given; the other is ours.
fn pass_socket(qmp: &mut Qmp, name: &str) -> Result<UnixStream, VmmError> {
    let (ours, theirs) = UnixStream::pair()
        .map_err(|source| VmmError::Connection { doing: "making the device state's sockets".to_owned(), source })?;
    qmp.execute_with_fd("getfd", json!({ "fdname": name }), theirs.as_fd(), COMMAND_TIMEOUT)?;
    Ok(ours)
}

/// Takes back a descriptor that QEMU has not used, best effort: QEMU has closed it where it did use it.
fn withdraw_socket(qmp: &mut Qmp, name: &str) {
    let _ = qmp.execute("closefd", json!({ "fdname": name }), COMMAND_TIMEOUT);
}

/// QEMU's state of the guest, by its own name, and whether virtual processors run.
fn guest_status(qmp: &mut Qmp) -> Result<(String, bool), VmmError> {
    let reply = ask(qmp, "query-status")?;
    let status = reply["status"].as_str().unwrap_or("unknown").to_owned();
    Ok((status, reply["running"].as_bool().unwrap_or(false)))
}

/// The state of the migration, by QEMU's name; `none` where there never was one.
fn migration_status(qmp: &mut Qmp) -> Result<String, VmmError> {
    Ok(ask(qmp, "query-migrate")?["status"].as_str().unwrap_or("none").to_owned())
}

/// Whether QEMU's migration has come to an end, whichever.
fn has_ended(status: &str) -> bool {
    matches!(status, "none" | "completed" | "failed" | "cancelled")
}

/// Waits until the migration's status is one of `wanted` or a final one, by event. `None` where `timeout` passed first.
fn wait_migration(qmp: &mut Qmp, wanted: &str, timeout: Duration) -> Result<Option<Event>, VmmError> {
    let matches = |event: &Event| event.migration_status().is_some_and(|status| status == wanted || has_ended(status));
    qmp.wait_event(matches, timeout)
}

/// Why a migration failed, in QEMU's words where it has some.
fn failure(qmp: &mut Qmp, status: &str) -> VmmError {
    let description = ask(qmp, "query-migrate").ok().and_then(|reply| reply["error-desc"].as_str().map(str::to_owned));
    let reason = description.unwrap_or_else(|| format!("its migration is '{status}', without a reason given"));
    VmmError::Migration { reason }
}

/// Ends QEMU: asks it first, then kills it; returns when the process is gone.
fn end(qmp: &SharedQmp, process: &QemuProcess) {
    let _ = lock(qmp).execute("quit", json!({}), QUIT_TIMEOUT);
    if !process.wait(QUIT_TIMEOUT) {
        tracing::warn!("QEMU did not end when asked: killing it");
        process.kill();
        if !process.wait(SLOW_COMMAND_TIMEOUT) {
            tracing::error!("QEMU was killed and is still there: it hangs in the kernel");
        }
    }
}
