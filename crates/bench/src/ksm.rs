//! KSM, the kernel's merging of equal pages, for the time of an experiment: it scans as fast as it can until nothing
//! more is merged, and otherwise stands still, above all while guests move. All hosts of a lab are one kernel: KSM at
//! work would merge pages of the source with those of the destination.

use std::process::{Command, Stdio};
use std::time::Duration;

use crate::command::wait_for;
use crate::error::{Context, Result};

/// Beside guests that move: most of a processor, and not before others.
const BESIDE: [(&str, &str); 2] = [("pages_to_scan", "20000"), ("sleep_millisecs", "10")];
/// A page is merged at the second look at the earliest, and its partner may come later in the same scan.
const SCANS: u64 = 3;
/// Guests at rest write a little: so much of a change between two scans is none, pages and shares of all.
const NOISE_PAGES: u64 = 128;
const NOISE_SHARE: u64 = 1000;

/// KSM, whose settings are put back once this is dropped. One process at a time has it.
pub struct Ksm(sterna_sys::ksm::Ksm);

impl Ksm {
    /// Takes KSM over and stops it. Waits for other processes that have it.
    ///
    /// # Errors
    /// This kernel has no KSM, or its settings may not be changed: root may.
    pub fn take() -> Result<Self> {
        sterna_sys::ksm::Ksm::take().map(Self).context(|| "taking KSM over".into())
    }

    /// Lets KSM scan as fast as it can until scans merge nothing more, then stops it; what is merged stays merged.
    /// `frames` counts the frames of the memory that is to be merged. Returns their last number.
    ///
    /// # Errors
    /// Merging was not over within `limit`, or an error of `frames`.
    pub fn settle(&self, limit: Duration, mut frames: impl FnMut() -> Result<u64>) -> Result<u64> {
        self.scan_but(&[])?;
        let _hurried = Hurried::begin();
        let scans = || self.0.scans().context(|| "waiting for KSM".into());
        let first = scans()?;
        let mut last: Option<(u64, u64)> = None;
        let settled = wait_for("the end of KSM's merging", limit, || {
            std::thread::sleep(Duration::from_millis(50));
            let scan = scans()?;
            // A scan's pages may be merged in the next one: two whole scans lie between two looks.
            if scan < first + SCANS || last.is_some_and(|(seen, _)| scan < seen + 2) {
                return Ok(None);
            }
            let now = frames()?;
            let same = last.is_some_and(|(_, before)| is_same(before, now));
            last = Some((scan, now));
            Ok(same.then_some(now))
        });
        self.0.stop().context(|| "stopping KSM".into())?;
        settled
    }

    /// Lets KSM scan all the time from now on, beside whatever else there is.
    ///
    /// # Errors
    /// Its settings cannot be changed.
    pub fn scan(&self) -> Result<()> {
        self.scan_but(&BESIDE)
    }

    fn scan_but(&self, settings: &[(&str, &str)]) -> Result<()> {
        self.0.scan(settings).context(|| "having KSM scan".into())
    }
}

/// The scanner, before other work for as long as this is there: guests that keep every processor busy would leave it
/// little, and eight of them are merged after a quarter of an hour.
struct Hurried {
    pid: u32,
    /// Its niceness before.
    before: String,
}

impl Hurried {
    fn begin() -> Option<Self> {
        let entries = std::fs::read_dir("/proc").ok()?.flatten();
        let mut pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        let is_scanner = |pid: &u32| {
            let comm = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            // Anybody can have the name; the kernel's own threads have no program.
            comm.trim() == "ksmd" && std::fs::read_link(format!("/proc/{pid}/exe")).is_err()
        };
        let pid = pids.find(is_scanner)?;
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let before = stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(16)?.to_owned();
        set_niceness(pid, "-15").then_some(Self { pid, before })
    }
}

impl Drop for Hurried {
    fn drop(&mut self) {
        set_niceness(self.pid, &self.before);
    }
}

/// Where it fails, merging takes longer.
fn set_niceness(pid: u32, niceness: &str) -> bool {
    let mut renice = Command::new("renice");
    renice.args(["-n", niceness, "-p", &pid.to_string()]).stdout(Stdio::null()).stderr(Stdio::null());
    renice.status().is_ok_and(|status| status.success())
}

/// Puts back the settings that a process which was killed has left changed: for programs that begin to measure.
pub fn clear_orphan() {
    if sterna_sys::ksm::clear_orphan() {
        eprintln!("put back KSM's settings, which a killed program had changed");
    }
}

/// Whether two counts of frames differ by no more than guests at rest write.
fn is_same(before: u64, now: u64) -> bool {
    before.abs_diff(now) <= NOISE_PAGES.max(before / NOISE_SHARE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_guests_at_rest_write_is_no_change() {
        assert!(is_same(1000, 900) && is_same(1_000_000, 1_000_900));
        assert!(!is_same(1000, 1129) && !is_same(1_000_000, 998_000));
    }
}
