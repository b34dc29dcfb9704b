//! How many more mappings a process may have (`vm.max_map_count`).

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

/// Mappings that are left to the VMM for everything else.
const KEPT_FOR_VMM: u64 = 4096;

/// How many more mappings a process may have.
#[derive(Debug)]
pub struct Room(pub(super) AtomicU64);

/// They were not counted yet.
const UNCOUNTED: u64 = u64::MAX;

impl Default for Room {
    fn default() -> Self {
        Self(AtomicU64::new(UNCOUNTED))
    }
}

impl Room {
    /// Takes room for mappings; returns whether there was enough.
    pub fn take(&self, pid: u32, mappings: u64) -> io::Result<bool> {
        if self.0.load(Ordering::Relaxed) == UNCOUNTED {
            let most = std::fs::read_to_string("/proc/sys/vm/max_map_count")?;
            let most: u64 = most.trim().parse().map_err(io::Error::other)?;
            let now = std::fs::read(format!("/proc/{pid}/maps"))?.iter().filter(|byte| **byte == b'\n').count() as u64;
            let room = most.saturating_sub(now + KEPT_FOR_VMM);
            // Somebody else may have counted meanwhile, and taken some.
            let _ = self.0.compare_exchange(UNCOUNTED, room, Ordering::Relaxed, Ordering::Relaxed);
        }
        let taken = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |room| room.checked_sub(mappings));
        Ok(taken.is_ok())
    }
}
