//! Processes by identity: a process number is reused, the pair of number and start time is not.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, pidfd_open, pidfd_send_signal, waitid};
use serde::{Deserialize, Serialize};

/// A process that is or was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Its number.
    pub pid: u32,
    /// When it started, clock ticks since boot (`/proc/PID/stat`, field 22).
    pub start_ticks: u64,
    /// The boot it belongs to: after a reboot numbers and ticks begin anew.
    pub boot: u128,
}

impl Identity {
    /// The process that has this number now.
    ///
    /// # Errors
    /// Where there is none.
    pub fn of(pid: u32) -> io::Result<Self> {
        Ok(Self { pid, start_ticks: start_ticks(pid)?, boot: boot_id()? })
    }

    /// A handle on the process, where it still runs (a zombie does not).
    #[must_use]
    pub fn open(&self) -> Option<Handle> {
        let pid = Pid::from_raw(i32::try_from(self.pid).ok()?)?;
        let fd = pidfd_open(pid, PidfdFlags::empty()).ok()?;
        // Looked at after opening: should the number have been reused in between, the start time tells.
        let handle = Handle { fd, pid: self.pid };
        (Self::of(self.pid).ok().as_ref() == Some(self) && !handle.has_ended()).then_some(handle)
    }
}

/// A running process: stays on it whatever becomes of its number.
#[derive(Debug)]
pub struct Handle {
    fd: OwnedFd,
    pid: u32,
}

impl Handle {
    /// Waits until the process has ended; `false` where `timeout` (`None`: for ever) passed first. Reaps a child.
    #[must_use]
    pub fn wait(&self, timeout: Option<Duration>) -> bool {
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        loop {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let spec = left.map(|left| Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() });
            match poll(&mut [PollFd::new(&self.fd, PollFlags::IN)], spec.as_ref()) {
                Ok(0) => return false,
                Ok(_) => break,
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => return false,
            }
        }
        // Not our child after a restart of the daemon: then somebody else reaps it.
        let _ = waitid(WaitId::PidFd(self.fd.as_fd()), WaitIdOptions::EXITED | WaitIdOptions::NOHANG);
        true
    }

    /// The descriptor (`pidfd_open(2)`).
    #[must_use]
    pub fn into_fd(self) -> OwnedFd {
        self.fd
    }

    /// Whether it has ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.wait(Some(Duration::ZERO))
    }

    /// Ends it without asking and waits until it is gone, 10 s at most.
    pub fn kill(&self) {
        if pidfd_send_signal(&self.fd, Signal::KILL).is_ok() && !self.wait(Some(Duration::from_secs(10))) {
            tracing::warn!(pid = self.pid, "the process does not end: the kernel keeps it");
        }
    }
}

/// The arguments it was started with.
///
/// # Errors
/// Where there is no such process or it may not be looked at.
pub fn command_line(pid: u32) -> io::Result<Vec<String>> {
    let bytes = std::fs::read(format!("/proc/{pid}/cmdline"))?;
    let text = String::from_utf8(bytes).map_err(|_| io::Error::other("its arguments are not UTF-8"))?;
    Ok(text.strip_suffix('\0').unwrap_or(&text).split('\0').map(String::from).collect())
}

/// The environment it was started with; what is not UTF-8 is left out.
///
/// # Errors
/// Where there is no such process or it may not be looked at.
pub fn environment(pid: u32) -> io::Result<HashMap<String, String>> {
    let bytes = std::fs::read(format!("/proc/{pid}/environ"))?;
    let pairs = bytes.split(|byte| *byte == 0).filter_map(|entry| std::str::from_utf8(entry).ok()?.split_once('='));
    Ok(pairs.map(|(name, value)| (name.into(), value.into())).collect())
}

/// The program it runs.
///
/// # Errors
/// Where there is no such process or it may not be looked at.
pub fn executable(pid: u32) -> io::Result<PathBuf> {
    let path = std::fs::read_link(format!("/proc/{pid}/exe"))?;
    // The binary of a QEMU that was upgraded while it runs.
    let bytes = path.as_os_str().as_bytes();
    Ok(bytes
        .strip_suffix(b" (deleted)")
        .map_or(path.clone(), |bytes| Path::new(std::ffi::OsStr::from_bytes(bytes)).into()))
}

fn start_ticks(pid: u32) -> io::Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The second field is the program's name in brackets and may itself hold brackets and spaces: count after the last.
    let after_name = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    after_name
        .split_whitespace()
        .nth(19)
        .and_then(|field| field.parse().ok())
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("/proc/{pid}/stat has no start time")))
}

/// This boot of the host, as the kernel names it.
///
/// # Errors
/// The kernel does not say.
pub fn boot_id() -> io::Result<u128> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    u128::from_str_radix(&text.trim().replace('-', ""), 16)
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "the boot id is not a number"))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_process_is_recognised_until_it_ends() {
        let mut child = Command::new("sleep").arg("30").spawn().unwrap();
        let identity = Identity::of(child.id()).unwrap();
        let handle = identity.open().expect("it runs");
        assert!(!handle.wait(Some(Duration::from_millis(20))));
        handle.kill();
        assert!(handle.has_ended());
        assert!(identity.open().is_none());
        assert!(child.wait().is_err(), "it was reaped");
    }

    #[test]
    fn another_process_of_the_same_number_is_not_taken_for_it() {
        let mut identity = Identity::of(std::process::id()).unwrap();
        assert!(identity.open().is_some());
        identity.start_ticks -= 1;
        assert!(identity.open().is_none());
    }
}
