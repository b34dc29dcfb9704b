//! Estimates: what a migration would cost, by a short look at the guest.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::options::{Compress, Mode};

/// The longest observation, milliseconds.
pub const MAX_DURATION_MS: u64 = 60_000;
/// The shortest observation, milliseconds: a shorter one does not show a working set.
pub const MIN_DURATION_MS: u64 = 200;
/// How long a guest is observed by default, milliseconds.
pub const DEFAULT_DURATION_MS: u64 = 3_000;

/// The estimate of one machine's migration now, in each way that there is.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Estimate {
    /// The virtual machine.
    pub vm: String,
    /// The rate that the estimate is for, bytes per second: the limit of `--bandwidth`, or the link's speed.
    pub bandwidth_bytes_per_s: u64,
    /// The downtime limit that it is for, milliseconds.
    pub downtime_limit_ms: f64,
    /// The observation of the guest.
    pub observed: Observed,
    /// The estimate of each way.
    pub ways: Vec<Way>,
}

/// The estimate of one way of moving the machine.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Way {
    /// The mode.
    pub mode: Mode,
    /// How bodies would be compressed.
    pub compress: Compress,
    /// The time from the request until the guest runs at the destination and no page is left at the source, as a
    /// report's `total_ms`.
    pub total_ms: f64,
    /// How long the guest would be stopped, as a report's `downtime_ms`. Waits for single pages after it, in hybrid and
    /// post-copy, are not part of it.
    pub downtime_ms: f64,
    /// Bytes of frames, as a report's `bytes_on_wire`.
    pub bytes_on_wire: u64,
    /// Rounds, including the one in the pause, if any.
    pub rounds: u32,
    /// Whether the pause is within the limit. Where it is not, the other figures are for a guest that is stopped as
    /// soon as more rounds do not make the pause shorter; a real migration would go on until its timeout.
    pub reaches_downtime_limit: bool,
}

/// The observation of the guest, and its cost.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Observed {
    /// How long writes were watched, milliseconds.
    pub duration_ms: f64,
    /// Looks at the page tables.
    pub looks: u64,
    /// Time they took in all, milliseconds.
    pub look_ms: f64,
    /// Write faults that the guest took: the cost of the observation to it.
    pub write_faults: u64,
    /// Pages of RAM.
    pub total_pages: u64,
    /// Pages that the host has given memory for.
    pub allocated_pages: u64,
    /// Of them, those that the guest holds free: they would not travel.
    pub free_pages: u64,
    /// Of the allocated pages, the clean ones of the guest's page cache: its kernel could read them again, and they
    /// travel all the same. Experimental; only where the request asked for it and the kernel could be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub page_cache_pages: Option<u64>,
    /// Of the others, the share that holds zeros only; from samples.
    pub zero_share: f64,
    /// Of the pages written, the share of which no body would travel, because they are content fake dirty or zeros;
    /// from samples.
    pub silent_share: f64,
    /// Different pages written within a time since a look.
    pub written: Vec<Point>,
    /// Pages whose content was read.
    pub sampled_pages: u64,
    /// The share of its bytes that a page takes when LZ4 has compressed it; absent where there was nothing to compress.
    pub lz4_ratio: Option<f64>,
    /// The same share for Zstandard at level 1.
    pub zstd_ratio: Option<f64>,
}

/// A point of the working-set curve.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize, ToSchema)]
pub struct Point {
    /// Time since a look, milliseconds.
    pub ms: f64,
    /// Different pages written since then.
    pub pages: u64,
}
