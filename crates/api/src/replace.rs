//! Replacement: another QEMU takes a guest over on the same host.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::report::Verify;

/// The request to have another QEMU take a guest over. Absent fields mean that nothing changes.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ReplaceRequest {
    /// The new QEMU's binary: a path, or a name on the daemon's PATH. Without it the machine's own, as it is now.
    pub qemu: Option<String>,
    /// The new QEMU's arguments, without RAM. Without them the machine's own.
    pub arguments: Option<Vec<String>>,
    /// Compare the guest's RAM before and after the devices' way, in the pause.
    pub verify: bool,
}

/// The report on a guest that is in another QEMU.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Replaced {
    /// The virtual machine.
    pub vm: String,
    /// The former QEMU's version.
    pub from_qemu: String,
    /// Its binary.
    pub from_path: String,
    /// The new QEMU's version.
    pub to_qemu: String,
    /// Its binary.
    pub to_path: String,
    /// Its process.
    pub pid: u32,
    /// Arguments that differ: what the former QEMU alone had, with "-" before it, what the new one alone has, with "+".
    pub changed_arguments: Vec<String>,
    /// The time from the request until the guest ran again, milliseconds.
    pub ms: f64,
    /// Of it, the time until the new QEMU waited for the guest, which ran meanwhile, milliseconds.
    pub prepare_ms: f64,
    /// The guest's pause, from its last instruction to its next, by both QEMUs' events, milliseconds. 0 where its user
    /// had paused it.
    pub pause_ms: f64,
    /// The time that the former QEMU then took to end, milliseconds.
    pub end_ms: f64,
    /// RAM, bytes. Both QEMUs have mapped the same files.
    pub memory_bytes: u64,
    /// What of it was copied into a file first, bytes: pages of the guest's own, where its memory is private.
    pub copied_bytes: u64,
    /// What of that was copied in the pause, bytes.
    pub copied_in_pause_bytes: u64,
    /// Memory that the host had given for it before, bytes.
    pub allocated_before_bytes: u64,
    /// Memory that the host has given for it after, bytes.
    pub allocated_after_bytes: u64,
    /// The comparison of RAM before and after the devices' way.
    pub verify: Verify,
}
