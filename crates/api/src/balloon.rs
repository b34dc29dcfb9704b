//! Balloons: how much of its memory a guest keeps, and what it does with the rest.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// How often the balloon is adjusted by default, milliseconds: the best interval in the post-copy paper (its figure
/// 11).
pub const DEFAULT_INTERVAL_MS: u64 = 5_000;
/// The shortest interval, milliseconds.
pub const MIN_INTERVAL_MS: u64 = 10;
/// The longest interval, milliseconds.
pub const MAX_INTERVAL_MS: u64 = 3_600_000;

/// Who decides how large a guest's balloon is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum BalloonMode {
    /// Not Sterna, which leaves the balloon alone.
    #[default]
    Off,
    /// The guest's free memory: the balloon follows it.
    Auto,
    /// The user: the guest keeps `memory_bytes`.
    Target,
}

/// How a guest's balloon is handled. It outlives the daemon, and travels with the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BalloonSetting {
    /// Who decides.
    pub mode: BalloonMode,
    /// How often the balloon is adjusted, milliseconds; used with `auto` only.
    #[serde(default = "default_interval")]
    pub interval_ms: u64,
    /// The memory that the guest keeps, bytes; with `target` only.
    #[serde(default)]
    pub memory_bytes: Option<u64>,
}

fn default_interval() -> u64 {
    DEFAULT_INTERVAL_MS
}

impl Default for BalloonSetting {
    fn default() -> Self {
        Self { mode: BalloonMode::Off, interval_ms: DEFAULT_INTERVAL_MS, memory_bytes: None }
    }
}

impl BalloonSetting {
    /// Checks that the setting contradicts neither itself nor the machine, whose RAM is `ram_bytes`.
    ///
    /// # Errors
    /// What is wrong, for people.
    pub fn check(&self, ram_bytes: u64) -> Result<(), String> {
        if !(MIN_INTERVAL_MS..=MAX_INTERVAL_MS).contains(&self.interval_ms) {
            let asked = self.interval_ms;
            return Err(format!("the interval is {asked} ms: it must be between {MIN_INTERVAL_MS} ms and one hour"));
        }
        match (self.mode, self.memory_bytes) {
            (BalloonMode::Target, None) => Err("a balloon's target needs a size".into()),
            (BalloonMode::Target, Some(bytes)) if bytes < 1 << 20 || bytes > ram_bytes => Err(format!(
                "a guest of {ram_bytes} bytes cannot keep {bytes} bytes: at least 1 MiB, at most all of it"
            )),
            (BalloonMode::Off | BalloonMode::Auto, Some(_)) => Err("a size goes with a balloon's target alone".into()),
            _ => Ok(()),
        }
    }
}

/// Why a guest needs memory back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Pressure {
    /// Little memory is left that could be allocated easily.
    LowMemory,
    /// It reads pages back from its swap.
    SwapIn,
    /// It waits for pages of files more often than before: it gave them up because memory was short.
    MajorFaults,
    /// It ran out: its driver took pages out of the balloon by itself, or its kernel ended a process.
    OutOfMemory,
    /// It restarted.
    Restart,
    /// Its driver has reported nothing for a while, although the guest runs: the guest may be too busy with the search
    /// for memory.
    Silent,
}

/// A moment of pressure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PressureSeen {
    /// The sign of pressure.
    pub what: Pressure,
    /// The time, milliseconds since 1970 by the host's clock.
    pub at_ms: u64,
}

/// A guest's balloon as its daemon sees it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
pub struct Balloon {
    /// How it is handled.
    pub setting: BalloonSetting,
    /// What the guest has put into it, bytes.
    pub size_bytes: u64,
    /// What the guest was last asked to put into it, bytes; absent where it was not asked since the daemon's start.
    pub target_bytes: Option<u64>,
    /// The guest's memory that it uses for nothing, bytes.
    pub guest_free_bytes: Option<u64>,
    /// The memory that it could allocate easily, caches included, bytes.
    pub guest_available_bytes: Option<u64>,
    /// The last time when the guest got memory back because it was short.
    pub last_pressure: Option<PressureSeen>,
    /// How often that has happened since the daemon's start or the machine's arrival.
    pub pressures: u64,
    /// Whether the balloon does not grow for a while, because of pressure.
    pub backing_off: bool,
    /// Whether the guest's driver may take pages out by itself before its kernel ends processes (`deflate-on-oom`).
    pub deflate_on_oom: bool,
    /// Whether the guest may discard large free pieces of memory without being asked (`free-page-reporting`).
    pub free_page_reporting: bool,
    /// Why nothing is done, or what should be better, for people.
    pub note: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_contradict_themselves_or_the_machine_are_refused() {
        let auto = BalloonSetting { mode: BalloonMode::Auto, ..BalloonSetting::default() };
        assert_eq!(auto.check(1 << 30), Ok(()));
        assert!(BalloonSetting { interval_ms: 9, ..auto }.check(1 << 30).is_err());
        assert!(BalloonSetting { interval_ms: u64::MAX, ..auto }.check(1 << 30).is_err());
        assert!(BalloonSetting { memory_bytes: Some(1 << 20), ..auto }.check(1 << 30).is_err());
        let target = |memory_bytes| BalloonSetting { mode: BalloonMode::Target, memory_bytes, ..auto }.check(1 << 30);
        assert_eq!(target(Some(1 << 30)), Ok(()));
        for wrong in [None, Some(0), Some((1 << 30) + 1)] {
            assert!(target(wrong).is_err(), "{wrong:?}");
        }
    }
}
