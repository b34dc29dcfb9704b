//! Processor time and faults.

use std::time::Duration;

use rustix::time::{ClockId, Timespec, clock_gettime};

/// Processor time of all threads of this process, also of those that have ended.
pub fn process_cpu_time() -> Duration {
    duration(clock_gettime(ClockId::ProcessCPUTime))
}

/// Processor time of the calling thread.
pub fn thread_cpu_time() -> Duration {
    duration(clock_gettime(ClockId::ThreadCPUTime))
}

fn duration(time: Timespec) -> Duration {
    Duration::try_from(time).unwrap_or_default()
}

/// The resources that this process has used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// Processor time in its own code.
    pub user: Duration,
    /// Processor time in the kernel.
    pub system: Duration,
    /// Faults settled without reading a disk.
    pub minor_faults: u64,
    /// Faults that read a disk.
    pub major_faults: u64,
    /// The most memory it ever had mapped at once, bytes.
    pub resident_most_bytes: u64,
}

/// The resources that this process has used (`getrusage`).
pub fn usage() -> Usage {
    // SAFETY: all zero is a valid `struct rusage`.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel fills the structure, and this call fails for invalid arguments only.
    unsafe { libc::getrusage(libc::RUSAGE_SELF, &raw mut usage) };
    let time =
        |time: libc::timeval| Duration::from_secs(time.tv_sec as u64) + Duration::from_micros(time.tv_usec as u64);
    Usage {
        user: time(usage.ru_utime),
        system: time(usage.ru_stime),
        minor_faults: usage.ru_minflt as u64,
        major_faults: usage.ru_majflt as u64,
        resident_most_bytes: (usage.ru_maxrss as u64).saturating_mul(1024),
    }
}
