//! QEMU's own migration, which moves the devices: the sockets that it gets, what has become of it, and why it failed.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use serde_json::json;

use super::commands::{COMMAND_TIMEOUT, ask};
use crate::vmm::VmmError;
use crate::vmm::qmp::{Event, Qmp};

/// Gives QEMU one end of a new socket pair under the name given; the other is ours.
pub(super) fn pass_socket(qmp: &mut Qmp, name: &str) -> Result<UnixStream, VmmError> {
    let (ours, theirs) = UnixStream::pair()
        .map_err(|source| VmmError::Connection { doing: "making the device state's sockets".to_owned(), source })?;
    qmp.execute_with_fd("getfd", json!({ "fdname": name }), theirs.as_fd(), COMMAND_TIMEOUT)?;
    Ok(ours)
}

/// Takes back a descriptor that QEMU has not used, best effort: QEMU has closed it where it did use it.
pub(super) fn withdraw_socket(qmp: &mut Qmp, name: &str) {
    let _ = qmp.execute("closefd", json!({ "fdname": name }), COMMAND_TIMEOUT);
}

/// The state of the migration, by QEMU's name; `none` where there never was one.
pub(super) fn migration_status(qmp: &mut Qmp) -> Result<String, VmmError> {
    Ok(ask(qmp, "query-migrate")?["status"].as_str().unwrap_or("none").to_owned())
}

/// Whether QEMU's migration has come to an end, whichever.
pub(super) fn has_ended(status: &str) -> bool {
    matches!(status, "none" | "completed" | "failed" | "cancelled")
}

/// Waits until the migration's status is one of `wanted` or a final one, by event. `None` where `timeout` passed first.
pub(super) fn wait_migration(qmp: &mut Qmp, wanted: &str, timeout: Duration) -> Result<Option<Event>, VmmError> {
    let matches = |event: &Event| event.migration_status().is_some_and(|status| status == wanted || has_ended(status));
    qmp.wait_event(matches, timeout)
}

/// Why a migration failed, in QEMU's words where it has some.
pub(super) fn failure(qmp: &mut Qmp, status: &str) -> VmmError {
    let description = ask(qmp, "query-migrate").ok().and_then(|reply| reply["error-desc"].as_str().map(str::to_owned));
    let reason = description.unwrap_or_else(|| format!("its migration is '{status}', without a reason given"));
    VmmError::Migration { reason }
}
