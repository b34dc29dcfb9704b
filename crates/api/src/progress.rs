//! The progress of a running migration: one line of `sterna watch --json`.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The phases of a migration, the same names at the source and at the destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Waiting for its turn.
    #[default]
    Queued,
    /// Reaching the peer and agreeing on version and features.
    Connect,
    /// The destination checks and starts its QEMU.
    Prepare,
    /// Rounds of pages while the guest runs.
    Precopy,
    /// The guest is stopped: last pages and devices.
    Switchover,
    /// The guest runs at the destination; the rest of its pages follow.
    Postcopy,
    /// The guest runs at the destination: cleaning up.
    Finish,
    /// Undoing what was begun.
    Rollback,
    /// The migration has ended.
    Done,
}

/// The progress of a migration now.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Progress {
    /// The virtual machine.
    pub vm: String,
    /// The phase.
    pub phase: Phase,
    /// The round, from 0.
    pub round: u32,
    /// Pages left to send in this round.
    pub pages_left: u64,
    /// Pages that this round began with.
    pub round_pages: u64,
    /// Bytes sent so far.
    pub bytes_on_wire: u64,
    /// The rate of sending, measured over about the last second.
    pub throughput_bytes_per_s: u64,
    /// How fast the guest writes fresh pages.
    pub dirty_rate_pages_per_s: f64,
    /// Time since the request was accepted, milliseconds.
    pub elapsed_ms: f64,
    /// The time until it should end, milliseconds; absent while it is unknown.
    pub remaining_ms: Option<f64>,
    /// The pause if it came now, milliseconds; absent before the first round.
    pub predicted_downtime_ms: Option<f64>,
    /// How much of the guest's processor time is taken away, percent.
    pub throttle_percent: u8,
    /// What it waits for, if it waits.
    pub waiting_for: Option<String>,
    /// How long it has waited for that, milliseconds; absent where that is unknown.
    pub waiting_ms: Option<f64>,
    /// Pages that faults at the destination have asked for; absent before the switchover.
    pub faults: Option<u64>,
    /// Its place among the migrations that wait for their turn on this host, from 1; absent where it does not wait for
    /// one.
    pub queue_place: Option<u32>,
    /// The number of migrations that wait, including this one; absent likewise.
    pub queue_length: Option<u32>,
}
