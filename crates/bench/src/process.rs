//! Processes by id and start time, so that a reused id is never mistaken for the process it once named.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

/// A process that cannot be confused with a later one of the same id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessId {
    /// Its id.
    pub pid: u32,
    /// When it started, in clock ticks since boot (field 22 of `/proc/PID/stat`).
    pub start: u64,
}

impl ProcessId {
    /// The process that has the id `pid` now; `None` where there is none.
    #[must_use]
    pub fn of(pid: u32) -> Option<Self> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name in brackets may hold blanks and brackets itself: fields are counted from its last one.
        let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_ascii_whitespace().collect();
        if fields.first() == Some(&"Z") {
            return None;
        }
        Some(Self { pid, start: fields.get(19)?.parse().ok()? })
    }

    /// This process.
    #[must_use]
    pub fn own() -> Option<Self> {
        Self::of(std::process::id())
    }

    /// Whether it still runs.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        Self::of(self.pid) == Some(*self)
    }

    /// Ends it for certain. A process that is gone already is no error.
    pub fn kill(&self) {
        if self.is_alive()
            && let Ok(pid) = i32::try_from(self.pid)
        {
            // It may end between the look and the signal, which is as good.
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_alive_until_it_is_killed_and_a_reused_id_is_another() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let id = ProcessId::of(child.id()).unwrap();
        assert!(id.is_alive());
        assert!(!ProcessId { start: id.start + 1, ..id }.is_alive());
        id.kill();
        child.wait().unwrap();
        assert!(!id.is_alive());
    }
}
