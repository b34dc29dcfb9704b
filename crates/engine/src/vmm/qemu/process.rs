use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde_json::json;

use super::commands::{SLOW_COMMAND_TIMEOUT, SharedQmp, lock};

/// How long QEMU has to end by itself once asked to.
const QUIT_TIMEOUT: Duration = Duration::from_secs(5);

/// A QEMU process, held by descriptor: another process that gets the same number later is never taken for it.
#[derive(Debug)]
pub struct QemuProcess(OwnedFd);

impl QemuProcess {
    /// Takes hold of a process by its number. Whoever calls this knows that the number still means that process.
    ///
    /// # Errors
    /// The kernel's, `ESRCH` where there is no such process.
    pub fn open(pid: u32) -> io::Result<Self> {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Self(pidfd_open(pid, PidfdFlags::empty())?))
    }

    /// Its number; `None` where it has ended.
    pub fn pid(&self) -> Option<u32> {
        let about = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", self.0.as_raw_fd())).ok()?;
        about.lines().find_map(|line| line.strip_prefix("Pid:"))?.trim().parse().ok()
    }

    /// Waits until the process has ended; false where `timeout` passed first.
    pub fn wait(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let limit = Timespec::try_from(left).ok();
            match poll(&mut [PollFd::from_borrowed_fd(self.0.as_fd(), PollFlags::IN)], limit.as_ref()) {
                Ok(0) | Err(rustix::io::Errno::INTR) if left.is_zero() => return false,
                Ok(0) | Err(rustix::io::Errno::INTR) => {}
                Ok(_) => return true,
                Err(_) => return false,
            }
        }
    }

    /// Whether the process has ended.
    pub fn has_ended(&self) -> bool {
        self.wait(Duration::ZERO)
    }

    /// Ends QEMU: asks it first, then kills it; returns when the process is gone.
    pub(super) fn end(&self, qmp: &SharedQmp) {
        let _ = lock(qmp).execute("quit", json!({}), QUIT_TIMEOUT);
        if !self.wait(QUIT_TIMEOUT) {
            tracing::warn!("QEMU did not end when asked: killing it");
            self.kill();
            if !self.wait(SLOW_COMMAND_TIMEOUT) {
                tracing::error!("QEMU was killed and is still there: it hangs in the kernel");
            }
        }
    }

    /// Ends the process at once. Does nothing where it has ended already.
    pub fn kill(&self) {
        let _ = pidfd_send_signal(&self.0, Signal::KILL);
    }
}

impl From<OwnedFd> for QemuProcess {
    fn from(pidfd: OwnedFd) -> Self {
        Self(pidfd)
    }
}
