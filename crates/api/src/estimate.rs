//! What a migration would take, by a short look at the guest.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::options::{Compress, Mode};

/// The longest observation, milliseconds.
pub const MAX_DURATION_MS: u64 = 60_000;
/// The shortest: below it a working set has no shape.
pub const MIN_DURATION_MS: u64 = 200;
/// How long a guest is observed where nothing else is asked for.
pub const DEFAULT_DURATION_MS: u64 = 3_000;

/// What a migration of one machine would take now, in each way that there is.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Estimate {
    /// The virtual machine.
    pub vm: String,
    /// The rate the estimate is for, bytes per second: what `--bandwidth` would allow, or the link carry.
    pub bandwidth_bytes_per_s: u64,
    /// The downtime limit it is for.
    pub downtime_limit_ms: f64,
    /// What was seen of the guest.
    pub observed: Observed,
    /// What each way would take.
    pub ways: Vec<Way>,
}

/// What one way of moving it would take.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Way {
    /// The mode.
    pub mode: Mode,
    /// How bodies would be compressed.
    pub compress: Compress,
    /// From the request until the guest runs at the destination and no page is left at the source, as a report's
    /// `total_ms`.
    pub total_ms: f64,
    /// How long the guest would be stopped, as a report's `downtime_ms`. Waits for single pages after it, in hybrid and
    /// post-copy, are not part of it.
    pub downtime_ms: f64,
    /// Bytes of frames, as a report's `bytes_on_wire`.
    pub bytes_on_wire: u64,
    /// Rounds, the one in the pause included where there is one.
    pub rounds: u32,
    /// Whether the pause is within the limit. Where it is not, the other figures are those of a guest that is stopped
    /// as soon as more rounds make the pause no shorter; left to itself the migration would go on until its timeout.
    pub reaches_downtime_limit: bool,
}

/// What was seen of the guest, and what looking cost.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Observed {
    /// How long writes were watched.
    pub duration_ms: f64,
    /// Looks at the page tables.
    pub looks: u64,
    /// Time they took in all, milliseconds.
    pub look_ms: f64,
    /// Write faults the guest took: what the observation cost it.
    pub write_faults: u64,
    /// Pages of RAM.
    pub total_pages: u64,
    /// Pages that the host has given memory for.
    pub allocated_pages: u64,
    /// Of them, those that the guest holds free: they would not travel.
    pub free_pages: u64,
    /// Of the allocated pages, clean ones of the guest's page cache: its kernel could read them again, and they travel
    /// all the same. Experimental; only where it was asked for, and can be told.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub page_cache_pages: Option<u64>,
    /// Of the others, the share that holds zeros only; from samples.
    pub zero_share: f64,
    /// Of the pages written, the share of which no body would travel: written with what was there, or zeros; from
    /// samples.
    pub silent_share: f64,
    /// Different pages written within a time since a look.
    pub written: Vec<Point>,
    /// Pages whose content was read.
    pub sampled_pages: u64,
    /// Bytes that a page takes compressed by LZ4, of its own; absent where there was nothing to compress.
    pub lz4_ratio: Option<f64>,
    /// The same by Zstandard at level 1.
    pub zstd_ratio: Option<f64>,
}

/// A point of the working-set curve.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize, ToSchema)]
pub struct Point {
    /// Time since a look.
    pub ms: f64,
    /// Different pages written since then.
    pub pages: u64,
}
