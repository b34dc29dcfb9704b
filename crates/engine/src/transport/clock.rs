//! The clock that both sides of a migration compare.

use std::time::{SystemTime, UNIX_EPOCH};

/// Microseconds since the epoch, by this host's clock.
#[must_use]
pub fn now_us() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros() as u64)
}
