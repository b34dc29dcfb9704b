//! Processes by identity: a process number is reused, the pair of number and start time is not.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{
    Pid, PidfdFlags, Resource, Rlimit, Signal, WaitId, WaitIdOptions, getrlimit, pidfd_open, pidfd_send_signal,
    setrlimit, waitid,
};
use serde::{Deserialize, Serialize};

/// How long to wait before the next look where the host cannot tell whether a process runs.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// How long a process that closes its connections may take to end.
const END_TIMEOUT: Duration = Duration::from_secs(2);

/// The identity of a process that runs or ran.
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
    /// No process: one that has ended, another at each call.
    #[must_use]
    pub fn nobody() -> Self {
        Self { pid: 0, start_ticks: sterna_sys::host::random_u128() as u64, boot: 0 }
    }

    /// The process that has this number now.
    ///
    /// # Errors
    /// There is no such process.
    pub fn of(pid: u32) -> io::Result<Self> {
        Ok(Self { pid, start_ticks: start_ticks(pid)?, boot: boot_id()? })
    }

    /// A handle on the process, where it still runs (a zombie does not). `None` is certain, because callers then remove
    /// the machine's RAM. Where the host cannot tell now, because no descriptor or memory is left, this waits until it
    /// can.
    #[must_use]
    pub fn open(&self) -> Option<Handle> {
        let mut told = false;
        loop {
            match self.look() {
                Ok(handle) => return handle,
                Err(error) => {
                    if !std::mem::replace(&mut told, true) {
                        tracing::error!(pid = self.pid, %error, "cannot tell whether a process runs: waiting until it can be told");
                    }
                    std::thread::sleep(LOOK_AGAIN);
                }
            }
        }
    }

    /// Whether it has ended, or does so within moments: a QEMU that ends closes its connections first.
    #[must_use]
    pub fn is_ending(&self) -> bool {
        self.open().is_none_or(|handle| handle.wait(Some(END_TIMEOUT)))
    }

    /// Whether it has ended. One that has closed its connections may take a moment longer, for which is waited.
    #[must_use]
    pub fn has_ended(&self, is_closed: bool) -> bool {
        if is_closed { self.is_ending() } else { self.open().is_none() }
    }

    /// As [`open`](Self::open), with an error where the host cannot tell.
    fn look(&self) -> io::Result<Option<Handle>> {
        let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) else { return Ok(None) };
        // No process of this boot is one of another boot.
        if boot_id()? != self.boot {
            return Ok(None);
        }
        let gone = |error: &io::Error| {
            let errno = error.raw_os_error().map(rustix::io::Errno::from_raw_os_error);
            // EINVAL: the number is that of a thread of another process by now.
            matches!(errno, Some(rustix::io::Errno::SRCH | rustix::io::Errno::NOENT | rustix::io::Errno::INVAL))
        };
        let fd = match pidfd_open(pid, PidfdFlags::empty()).map_err(io::Error::from) {
            Err(error) if gone(&error) => return Ok(None),
            other => other?,
        };
        // The start time is read after opening: it shows whether the number was reused in between.
        let handle = Handle { fd, pid: self.pid };
        match start_ticks(self.pid) {
            Err(error) if gone(&error) => Ok(None),
            other => Ok((other? == self.start_ticks && !handle.has_ended()).then_some(handle)),
        }
    }
}

/// A handle on a process, which stays on it even if its number is reused.
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

    /// Kills it and waits until it is gone, 10 s at most.
    pub fn kill(&self) {
        if pidfd_send_signal(&self.fd, Signal::KILL).is_ok() && !self.wait(Some(Duration::from_secs(10))) {
            tracing::warn!(pid = self.pid, "the process does not end: the kernel keeps it");
        }
    }
}

/// The limit of open files that this process was started with.
static FILE_LIMIT: OnceLock<Rlimit> = OnceLock::new();

/// Lets this process open as many files as it may, because each machine takes some. Its children get the former limit
/// back with [`restore_file_limit`].
pub fn raise_file_limit() {
    let before = *FILE_LIMIT.get_or_init(|| getrlimit(Resource::Nofile));
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: before.maximum, ..before }) {
        tracing::warn!(%error, "the limit of open files stays as it was");
    }
}

/// Gives the calling process the limit of open files with which this daemon was started: programs that use `select`
/// rely on a low one. It is for a child between fork and exec: it makes only a system call.
///
/// # Errors
/// The kernel refuses.
pub fn restore_file_limit() -> io::Result<()> {
    match FILE_LIMIT.get() {
        Some(before) => Ok(setrlimit(Resource::Nofile, *before)?),
        None => Ok(()),
    }
}

/// The arguments it was started with.
///
/// # Errors
/// There is no such process, or this user may not look at it.
pub fn command_line(pid: u32) -> io::Result<Vec<String>> {
    let bytes = std::fs::read(format!("/proc/{pid}/cmdline"))?;
    let text = String::from_utf8(bytes).map_err(|_| io::Error::other("its arguments are not UTF-8"))?;
    Ok(text.strip_suffix('\0').unwrap_or(&text).split('\0').map(String::from).collect())
}

/// The environment it was started with; entries that are not UTF-8 are left out.
///
/// # Errors
/// There is no such process, or this user may not look at it.
pub fn environment(pid: u32) -> io::Result<HashMap<String, String>> {
    let bytes = std::fs::read(format!("/proc/{pid}/environ"))?;
    let pairs = bytes.split(|byte| *byte == 0).filter_map(|entry| std::str::from_utf8(entry).ok()?.split_once('='));
    Ok(pairs.map(|(name, value)| (name.into(), value.into())).collect())
}

/// The program it runs.
///
/// # Errors
/// There is no such process, or this user may not look at it.
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

/// The kernel's number of this boot of the host.
///
/// # Errors
/// The kernel does not tell.
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

    /// Failed while every error counted as the process's end: its machine's RAM was then removed.
    #[test]
    fn a_process_that_cannot_be_looked_at_now_is_waited_for_and_not_taken_for_one_that_ended() {
        let identity = Identity::of(std::process::id()).unwrap();
        // A process of its own: the limit is the whole process's.
        let own = "a_process_that_cannot_be_looked_at_now_is_waited_for_and_not_taken_for_one_that_ended";
        if std::env::var_os("STERNA_TEST_FEW_FILES").is_none() {
            let test = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", &format!("process::tests::{own}")])
                .env("STERNA_TEST_FEW_FILES", "1")
                .status();
            return assert!(test.unwrap().success());
        }
        let before = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current: Some(0), maximum: before.maximum }).unwrap();
        assert!(identity.look().is_err());
        std::thread::scope(|scope| {
            let looks = scope.spawn(|| identity.open().is_some());
            std::thread::sleep(LOOK_AGAIN * 2);
            assert!(!looks.is_finished());
            setrlimit(Resource::Nofile, before).unwrap();
            assert!(looks.join().unwrap(), "it runs");
        });
    }

    #[test]
    fn another_process_of_the_same_number_is_not_taken_for_it() {
        let mut identity = Identity::of(std::process::id()).unwrap();
        assert!(identity.open().is_some());
        identity.start_ticks -= 1;
        assert!(identity.open().is_none());
    }
}
