//! How a migration is to be done. Absent fields mean the default that the contract names.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The migration mode asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// What serves best: today pre-copy.
    #[default]
    Auto,
    /// Rounds over dirty pages while the guest runs, the rest in the pause.
    Precopy,
    /// Everything in the pause.
    StopAndCopy,
}

/// What happens when `timeout_ms` has passed and the rounds have not converged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum OnTimeout {
    /// Give up; the guest runs on at the source.
    #[default]
    Cancel,
    /// Switch over whatever the pause will be.
    Force,
}

/// Options of one migration, in the units of their names.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct MigrateOptions {
    /// The migration mode.
    pub mode: Mode,
    /// Limit on everything sent, bytes per second; none where absent.
    pub bandwidth_bytes_per_s: Option<u64>,
    /// TCP connections that carry pages, 1 to 16.
    pub streams: u32,
    /// The longest pause the guest's users accept, milliseconds.
    pub downtime_limit_ms: f64,
    /// When to give up converging, milliseconds from the start; never where absent.
    pub timeout_ms: Option<f64>,
    /// What to do then.
    pub on_timeout: OnTimeout,
    /// Compare every page of both sides in the pause.
    pub verify: bool,
}

/// The most connections one migration may use.
pub const MAX_STREAMS: u32 = 16;

impl Default for MigrateOptions {
    fn default() -> Self {
        Self {
            mode: Mode::Auto,
            bandwidth_bytes_per_s: None,
            streams: 1,
            downtime_limit_ms: 300.0,
            timeout_ms: None,
            on_timeout: OnTimeout::Cancel,
            verify: false,
        }
    }
}

impl MigrateOptions {
    /// Says what is wrong with these options, or nothing.
    ///
    /// # Errors
    /// A sentence that names the option and what it may be.
    pub fn check(&self) -> Result<(), String> {
        if !(1..=MAX_STREAMS).contains(&self.streams) {
            return Err(format!("streams is {}: it must be between 1 and {MAX_STREAMS}", self.streams));
        }
        if !self.downtime_limit_ms.is_finite() || self.downtime_limit_ms <= 0.0 {
            return Err(format!("downtime limit is {} ms: it must be above 0", self.downtime_limit_ms));
        }
        if let Some(rate) = self.bandwidth_bytes_per_s
            && rate < 64 * 1024
        {
            return Err(format!("bandwidth is {rate} bytes/s: below 64 KiB/s no migration ends"));
        }
        if let Some(timeout) = self.timeout_ms
            && (!timeout.is_finite() || timeout <= 0.0)
        {
            return Err(format!("timeout is {timeout} ms: it must be above 0"));
        }
        if self.timeout_ms.is_none() && self.on_timeout == OnTimeout::Force {
            return Err("on-timeout force needs a timeout".into());
        }
        Ok(())
    }
}
