//! How large a guest's balloon should be: dynamic self-ballooning (post-copy paper, sections 3.3 and 4.2), decided from outside.
//!
//! A pure function of what the guest's driver reports: each look at the guest is a `Sample`, each yields a `Decision`.
//!
//! | criterion | then |
//! | --- | --- |
//! | pressure: little memory available, reading from swap, waiting for files more often, out of memory, a restart, silence | the balloon shrinks at once: by half and at least by four reserves, or to nothing where memory has run out; it does not grow for `BACK_OFF_INTERVALS` intervals |
//! | an interval has passed and more is free than 5 % of what would be free without the balloon | it grows until that is left (95 % of the free memory are in it) |
//! | an interval has passed and less is available than that | it shrinks by the difference |
//!
//! It never leaves the guest less free than a reserve (a thirty-second of its RAM, 16 to 256 MiB), nor less RAM than `floor_bytes`.
//!
//! What a guest reports is older than the balloon's size, which is read beside it. Were free memory added up with a size from after it, what
//! has just gone into the balloon would be counted twice and the guest squeezed dry. So the size must have stood still while two reports
//! arrived: the second was asked for after the first had come, and so tells of the guest as it is with this balloon.

use std::time::Duration;

use sterna_api::balloon::Pressure;

/// For how many intervals the balloon does not grow after pressure.
pub const BACK_OFF_INTERVALS: u32 = 10;
/// What is left of the free memory, as a divisor: 5 %.
const KEPT_DIVISOR: u64 = 20;
/// After so long without a report the guest's driver is taken for stuck.
const SILENCE: Duration = Duration::from_secs(10);
/// Reading back so much from swap in a second is pressure, bytes.
const SWAP_IN_PER_S: f64 = 64.0 * 1024.0;
/// So many waits for pages of files in a second can be pressure.
const MAJOR_FAULTS_PER_S: f64 = 50.0;
/// Where they are that much more than usual.
const RISING: f64 = 2.0;
/// How much the newest rate weighs in what is usual.
const NEWEST: f64 = 0.2;
/// Reports that must have come since the balloon's size changed.
const SETTLED_REPORTS: u32 = 2;

const MIB: u64 = 1 << 20;

/// What the guest's driver reports. What it does not know is absent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Report {
    /// When it arrived, in any unit that grows from one report to the next.
    pub stamp: u64,
    /// Used for nothing, bytes.
    pub free_bytes: Option<u64>,
    /// What could be allocated without pain, bytes.
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
    /// Since the look before, as far as the guest ran.
    pub elapsed: Duration,
    /// Its RAM without the balloon, bytes; read after the report.
    pub guest_bytes: u64,
    /// Its driver's last report, where there ever was one.
    pub report: Option<Report>,
}

/// What to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// Nothing.
    Leave,
    /// Ask the guest to keep so much, bytes.
    Resize(u64),
    /// The same, at once, because it needs memory.
    Relieve(u64, Pressure),
}

/// What is decided, and what was seen before.
#[derive(Debug, Clone)]
pub struct Policy {
    ram_bytes: u64,
    interval: Duration,
    /// Since the balloon was last looked over.
    waited: Duration,
    /// For how long it does not grow.
    back_off: Duration,
    /// What the guest was last asked to keep, bytes.
    asked: Option<u64>,
    before: Option<Sample>,
    /// Since the last report arrived.
    quiet: Duration,
    /// Reports since the size changed.
    settled: u32,
    /// Reports since memory was last given back for want of it.
    relieved: u32,
    /// Waits for files in a second, as a sliding mean.
    usual_faults: f64,
}

/// The least a guest is left with, bytes: an eighth of its RAM and 64 MiB.
#[must_use]
pub fn floor_bytes(ram_bytes: u64) -> u64 {
    (ram_bytes / 8).max(64 * MIB).min(ram_bytes)
}

/// What a guest always has free, bytes.
fn reserve_bytes(ram_bytes: u64) -> u64 {
    (ram_bytes / 32).clamp(16 * MIB, 256 * MIB)
}

impl Policy {
    /// For a guest with so much RAM, looked over so often.
    #[must_use]
    pub fn new(ram_bytes: u64, interval: Duration) -> Self {
        Self {
            ram_bytes,
            interval,
            // What is free now need not wait.
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

    /// `since_report`: between the last report and the one before, where it has just come.
    fn pressure(&mut self, before: Option<&Sample>, now: &Sample, since_report: Option<Duration>) -> Option<Pressure> {
        let report = now.report?;
        let earlier = before.and_then(|before| before.report).unwrap_or(report);
        let fell = |then: Option<u64>, now: Option<u64>| now.zip(then).is_some_and(|(now, then)| now < then);
        if fell(earlier.major_faults, report.major_faults) || fell(earlier.swapped_in_bytes, report.swapped_in_bytes) {
            self.usual_faults = 0.0;
            return Some(Pressure::Restart);
        }
        let rose = |then: Option<u64>, now: Option<u64>| now.unwrap_or(0).saturating_sub(then.or(now).unwrap_or(0));
        // Nobody asked it to shrink: the driver gave pages back in its kernel's need.
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
        // Before what was given back last shows in the reports, they say nothing new.
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
        // So that the balloon does not tremble with every page.
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
