//! A handle on a process, which never refers to another.

use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, Signal};

use crate::error::{Error, Result};

/// A process. Once it has ended, signals fail instead of reaching a process that got its number.
#[derive(Debug)]
pub struct Pidfd {
    fd: OwnedFd,
    pid: u32,
}

impl AsFd for Pidfd {
    /// The descriptor, which is readable once the process has ended.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Pidfd {
    /// The process that has this number now. To be sure which one that is, compare its [`super::Identity`] afterwards.
    ///
    /// # Errors
    /// No such process.
    pub fn open(pid: u32) -> Result<Self> {
        let doing = || format!("open process {pid}");
        let raw = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let raw = raw.ok_or_else(|| Error::new(doing(), rustix::io::Errno::SRCH))?;
        let fd = rustix::process::pidfd_open(raw, PidfdFlags::empty()).map_err(|error| Error::new(doing(), error))?;
        Ok(Self { fd, pid })
    }

    /// The process's number.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Waits until the process has ended, `timeout` at most, and says whether it has. A child stays a zombie until its
    /// parent collects it.
    ///
    /// # Errors
    /// Waiting is not possible.
    pub fn wait(&self, timeout: Duration) -> Result<bool> {
        let deadline = Instant::now().checked_add(timeout);
        loop {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            match rustix::event::poll(&mut [PollFd::new(&self.fd, PollFlags::IN)], left.as_ref()) {
                Ok(ready) => return Ok(ready > 0),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(Error::new(format!("wait for process {}", self.pid), error)),
            }
        }
    }

    /// Whether the process has ended.
    ///
    /// # Errors
    /// As [`Self::wait`].
    pub fn ended(&self) -> Result<bool> {
        self.wait(Duration::ZERO)
    }

    /// Asks the process to end (`SIGTERM`). If it has ended already, this is no error.
    ///
    /// # Errors
    /// This process may not send it signals.
    pub fn terminate(&self) -> Result<()> {
        self.signal(Signal::TERM)
    }

    /// Ends the process (`SIGKILL`). If it has ended already, this is no error.
    ///
    /// # Errors
    /// This process may not send it signals.
    pub fn kill(&self) -> Result<()> {
        self.signal(Signal::KILL)
    }

    /// A duplicate of the process's descriptor number `number`.
    ///
    /// # Errors
    /// It has no such descriptor, or this process may not trace it.
    pub fn duplicate(&self, number: i32) -> Result<OwnedFd> {
        rustix::process::pidfd_getfd(&self.fd, number, PidfdGetfdFlags::empty())
            .map_err(|error| Error::new(format!("duplicate descriptor {number} of process {}", self.pid), error))
    }

    /// Makes a huge page of this memory of the process, which is shared and has no page that others hold
    /// (`MADV_COLLAPSE`): a mapping of the huge page that a file has there, or a copy of its small pages, holes
    /// included. Content stays; who writes there meanwhile waits.
    ///
    /// # Errors
    /// `EINVAL`: nothing is there, or its owner or whoever watches its writes wants small pages. `EAGAIN`, `EBUSY`: a
    /// page is held. `ENOMEM`: no huge page is left. `ESRCH`: the process has ended.
    pub fn collapse(&self, range: Range<u64>) -> Result<()> {
        let part = libc::iovec { iov_base: range.start as *mut _, iov_len: (range.end - range.start) as usize };
        // SAFETY: the kernel reads one `iovec`, which lives until it returns. The advice changes no content.
        let done = unsafe {
            let (number, of) = (libc::SYS_process_madvise, self.fd.as_raw_fd());
            libc::syscall(number, of, &raw const part, 1usize, libc::MADV_COLLAPSE, 0u32)
        };
        if done < 0 {
            let error = std::io::Error::last_os_error();
            return Err(Error::new(format!("make a huge page of memory of process {}", self.pid), error));
        }
        Ok(())
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        match rustix::process::pidfd_send_signal(&self.fd, signal) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(error) => Err(Error::new(format!("end process {}", self.pid), error)),
        }
    }
}
