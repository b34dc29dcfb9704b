//! How large a guest's balloon should be: dynamic self-ballooning (post-copy paper, sections 3.3 and 4.2), decided from
//! outside.
//!
//! The policy is a pure function of what the guest's driver reports: each look at the guest is a `Sample` and yields a
//! `Decision`.
//!
//! - **Pressure** (little memory available, reading from swap, waiting for files more often, out of memory, a restart,
//!   silence): the balloon shrinks at once, by half and at least by four reserves, or to nothing where memory has run
//!   out. It does not grow for `BACK_OFF_INTERVALS` intervals.
//! - **An interval has passed, and more is free than 5 % of what would be free without the balloon**: the balloon grows
//!   until that share is left (95 % of the free memory are in it).
//! - **An interval has passed, and less is available than that share**: the balloon shrinks by the difference.
//!
//! The balloon never leaves the guest less free than a reserve (a thirty-second of its RAM, 16 to 256 MiB), nor less
//! RAM than `floor_bytes`.
//!
//! What a guest reports is older than the balloon's size, which is read beside it. If free memory were added to a size
//! from after the report, the pages that have just gone into the balloon would be counted twice, and the guest would
//! run out of memory. So the size must have stood still while two reports arrived: the second was asked for after the
//! first had come, so it describes the guest with this balloon.

use std::time::Duration;

use sterna_api::balloon::Pressure;

/// The number of intervals in which the balloon does not grow after pressure.
pub const BACK_OFF_INTERVALS: u32 = 10;
/// The share of the free memory that is left to the guest, as a divisor: 5 %.
const KEPT_DIVISOR: u64 = 20;
/// A guest's driver that sends no report for this time counts as stuck.
const SILENCE: Duration = Duration::from_secs(10);
/// Swap-in rate that counts as pressure, bytes per second.
const SWAP_IN_PER_S: f64 = 64.0 * 1024.0;
/// Waits for pages of files per second that can be pressure.
const MAJOR_FAULTS_PER_S: f64 = 50.0;
/// They are pressure where they exceed the usual rate by this factor.
const RISING: f64 = 2.0;
/// The weight of the newest rate in the usual rate.
const NEWEST: f64 = 0.2;
/// Reports that must have come since the balloon's size changed.
const SETTLED_REPORTS: u32 = 2;

const MIB: u64 = 1 << 20;

/// A report of the guest's driver. Values that the driver does not know are absent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Report {
    /// The time of its arrival, in any unit that grows from one report to the next.
    pub stamp: u64,
    /// Memory that is used for nothing, bytes.
    pub free_bytes: Option<u64>,
    /// Memory that could be allocated without swapping, bytes.
    pub available_bytes: Option<u64>,
    /// Read back from swap since the guest's start, bytes.
    pub swapped_in_bytes: Option<u64>,
    /// Waits for pages of files since the guest's start.
    pub major_faults: Option<u64>,
    /// Processes ended for want of memory since the guest's start.
    pub oom_kills: Option<u64>,
}

/// One look at a guest that runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sample {
    /// The time since the look before, as far as the guest ran.
    pub elapsed: Duration,
    /// Its RAM without the balloon, bytes; read after the report.
    pub guest_bytes: u64,
    /// Its driver's last report, where there ever was one.
    pub report: Option<Report>,
}

/// What to do with the balloon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// Leave the balloon as it is.
    Leave,
    /// Ask the guest to keep this many bytes.
    Resize(u64),
    /// The same, at once, because it needs memory.
    Relieve(u64, Pressure),
}

/// The policy's state: the last decision, and what was seen before.
#[derive(Debug, Clone)]
pub struct Policy {
    ram_bytes: u64,
    interval: Duration,
    /// The time since the balloon was last adjusted or left as it is.
    waited: Duration,
    /// The time for which it does not grow.
    back_off: Duration,
    /// What the guest was last asked to keep, bytes.
    asked: Option<u64>,
    before: Option<Sample>,
    /// The time since the last report arrived.
    quiet: Duration,
    /// Reports since the size changed.
    settled: u32,
    /// Reports since memory was last given back because the guest needed it.
    relieved: u32,
    /// Waits for files in a second, as a sliding mean.
    usual_faults: f64,
}

/// The least RAM that a guest keeps, bytes: an eighth of its RAM, and 64 MiB.
#[must_use]
pub fn floor_bytes(ram_bytes: u64) -> u64 {
    (ram_bytes / 8).max(64 * MIB).min(ram_bytes)
}

/// The memory that a guest always has free, bytes.
fn reserve_bytes(ram_bytes: u64) -> u64 {
    (ram_bytes / 32).clamp(16 * MIB, 256 * MIB)
}

impl Policy {
    /// A policy for a guest with `ram_bytes` of RAM, whose balloon is adjusted every `interval`.
    #[must_use]
    pub fn new(ram_bytes: u64, interval: Duration) -> Self {
        Self {
            ram_bytes,
            interval,
            // Memory that is free now need not wait for an interval.
            waited: interval,
            back_off: Duration::ZERO,
            asked: None,
            before: None,
            quiet: Duration::ZERO,
            settled: 0,
            relieved: SETTLED_REPORTS,
            usual_faults: 0.0,
        }
    }

    /// Whether the balloon does not grow at present, because of pressure.
    #[must_use]
    pub fn backs_off(&self) -> bool {
        !self.back_off.is_zero()
    }

    /// What to do after this look.
    pub fn step(&mut self, now: &Sample) -> Decision {
        let before = self.before.replace(*now);
        self.waited = self.waited.saturating_add(now.elapsed);
        self.back_off = self.back_off.saturating_sub(now.elapsed);
        self.quiet = self.quiet.saturating_add(now.elapsed);
        let stamp = |sample: &Sample| sample.report.map(|report| report.stamp);
        let reported = before.is_some_and(|before| stamp(&before) != stamp(now));
        let since_report = self.quiet;
        if reported {
            (self.quiet, self.relieved) = (Duration::ZERO, self.relieved.saturating_add(1));
        }
        self.settled = match before {
            Some(before) if before.guest_bytes == now.guest_bytes => self.settled + u32::from(reported),
            _ => 0,
        };
        if let Some(pressure) = self.pressure(before.as_ref(), now, reported.then_some(since_report)) {
            return self.relieve(now, pressure);
        }
        if self.waited < self.interval || self.settled < SETTLED_REPORTS {
            return Decision::Leave;
        }
        self.waited = Duration::ZERO;
        self.adjust(now)
    }

    /// The guest's pressure. `since_report` is the time between the last report and the one before, where the last has
    /// just come.
    fn pressure(&mut self, before: Option<&Sample>, now: &Sample, since_report: Option<Duration>) -> Option<Pressure> {
        let report = now.report?;
        let earlier = before.and_then(|before| before.report).unwrap_or(report);
        let fell = |then: Option<u64>, now: Option<u64>| now.zip(then).is_some_and(|(now, then)| now < then);
        if fell(earlier.major_faults, report.major_faults) || fell(earlier.swapped_in_bytes, report.swapped_in_bytes) {
            self.usual_faults = 0.0;
            return Some(Pressure::Restart);
        }
        let rose = |then: Option<u64>, now: Option<u64>| now.unwrap_or(0).saturating_sub(then.or(now).unwrap_or(0));
        // Nobody asked the balloon to shrink: the driver gave pages back because its kernel needed them.
        let by_itself = before
            .zip(self.asked)
            .is_some_and(|(before, asked)| asked <= before.guest_bytes && now.guest_bytes > before.guest_bytes);
        if by_itself || rose(earlier.oom_kills, report.oom_kills) > 0 {
            return Some(Pressure::OutOfMemory);
        }
        if self.quiet >= SILENCE && self.is_inflated(now) {
            // Once for each silence of this length.
            self.quiet = Duration::ZERO;
            return Some(Pressure::Silent);
        }
        if let Some(elapsed) = since_report.filter(|elapsed| !elapsed.is_zero()) {
            let swapped = rose(earlier.swapped_in_bytes, report.swapped_in_bytes) as f64 / elapsed.as_secs_f64();
            let faults = rose(earlier.major_faults, report.major_faults) as f64 / elapsed.as_secs_f64();
            let usual = self.usual_faults;
            self.usual_faults += (faults - usual) * NEWEST;
            if swapped >= SWAP_IN_PER_S {
                return Some(Pressure::SwapIn);
            }
            if faults >= MAJOR_FAULTS_PER_S && faults >= usual * RISING {
                return Some(Pressure::MajorFaults);
            }
        }
        let low = report.available_bytes.or(report.free_bytes)? < reserve_bytes(self.ram_bytes) / 2;
        // The reports say nothing new before they show the memory that was given back last.
        (low && self.relieved >= SETTLED_REPORTS && self.is_inflated(now)).then_some(Pressure::LowMemory)
    }

    /// Whether there is a balloon, or will be one once the guest has done what it was asked.
    fn is_inflated(&self, now: &Sample) -> bool {
        now.guest_bytes.min(self.asked.unwrap_or(u64::MAX)) < self.ram_bytes
    }

    fn relieve(&mut self, now: &Sample, pressure: Pressure) -> Decision {
        self.back_off = self.interval.saturating_mul(BACK_OFF_INTERVALS);
        (self.waited, self.relieved) = (Duration::ZERO, 0);
        if !self.is_inflated(now) {
            return Decision::Leave;
        }
        let balloon = self.ram_bytes.saturating_sub(now.guest_bytes);
        let left = match pressure {
            Pressure::OutOfMemory | Pressure::Restart | Pressure::Silent => 0,
            Pressure::LowMemory | Pressure::SwapIn | Pressure::MajorFaults => {
                (balloon / 2).min(balloon.saturating_sub(4 * reserve_bytes(self.ram_bytes)))
            }
        };
        let guest_bytes = self.ram_bytes - left;
        self.asked = Some(guest_bytes);
        Decision::Relieve(guest_bytes, pressure)
    }

    fn adjust(&mut self, now: &Sample) -> Decision {
        let Some(report) = now.report else { return Decision::Leave };
        let Some(free) = report.free_bytes else { return Decision::Leave };
        let available = report.available_bytes.unwrap_or(free);
        let balloon = self.ram_bytes.saturating_sub(now.guest_bytes);
        // Caches are not taken: the guest would have to read again what they hold.
        let spare = free.min(available).min(now.guest_bytes);
        let kept = (balloon.saturating_add(spare) / KEPT_DIVISOR).max(reserve_bytes(self.ram_bytes));
        // The balloon does not follow every page.
        let band = (self.ram_bytes / 256).max(MIB);
        let wanted = if spare > kept {
            let least = floor_bytes(self.ram_bytes).min(now.guest_bytes);
            (now.guest_bytes - (spare - kept)).max(least)
        } else {
            now.guest_bytes.saturating_add(kept.saturating_sub(available)).min(self.ram_bytes)
        };
        let grows = wanted < now.guest_bytes;
        if wanted.abs_diff(now.guest_bytes) < band || (grows && self.backs_off()) {
            return Decision::Leave;
        }
        self.asked = Some(wanted);
        Decision::Resize(wanted)
    }
}

#[cfg(test)]
#[path = "balloon_tests.rs"]
mod tests;
