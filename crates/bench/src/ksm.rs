//! KSM, the kernel's merging of equal pages, for the time of an experiment: it scans as fast as it can until nothing
//! more is merged, and otherwise stands still, above all while guests move. All hosts of a lab are one kernel: KSM at
//! work would merge pages of the source with those of the destination.

use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use nix::fcntl::{Flock, FlockArg};

use crate::command::wait_for;
use crate::error::{Context, Error, Result};

const DIRECTORY: &str = "/sys/kernel/mm/ksm";
/// The settings as they were, for as long as they are others: a process that is killed leaves them to the next one.
const BEFORE: &str = "/run/sterna-bench-ksm.json";
/// What is set, in this order. Pages that were not merged once are looked at again in every scan (`smart_scan`), else
/// nobody knows when merging is over.
const FAST: [(&str, &str); 5] = [
    ("smart_scan", "0"),
    ("advisor_mode", "none"),
    ("pages_to_scan", "100000"),
    ("sleep_millisecs", "1"),
    ("run", "1"),
];
/// Beside guests that move: most of a processor, and not before others.
const BESIDE: [(&str, &str); 2] = [("pages_to_scan", "20000"), ("sleep_millisecs", "10")];
/// A page is merged at the second look at the earliest, and its partner may come later in the same scan.
const SCANS: u64 = 3;
/// Guests at rest write a little: so much of a change between two scans is none, pages and shares of all.
const NOISE_PAGES: u64 = 128;
const NOISE_SHARE: u64 = 1000;

/// KSM, whose settings are put back once this is dropped. One process at a time has it.
pub struct Ksm {
    /// Settings as they were: names and values, in the order of [`FAST`].
    before: Vec<(String, String)>,
    /// Keeps other processes of this crate from changing the settings meanwhile.
    _turn: Flock<File>,
}

impl Ksm {
    /// Takes KSM over and stops it. Waits for other processes that have it.
    ///
    /// # Errors
    /// This kernel has no KSM, or its settings may not be changed: root may.
    pub fn take() -> Result<Self> {
        Self::take_turn(FlockArg::LockExclusive)
    }

    fn take_turn(how: FlockArg) -> Result<Self> {
        let run = Path::new(DIRECTORY).join("run");
        let file = File::open(&run).context(|| format!("opening {}, which kernels with KSM have", run.display()))?;
        let turn = Flock::lock(file, how).map_err(|(_, error)| error).context(|| "waiting for KSM".into())?;
        let before = settings()?;
        let text = serde_json::to_vec(&before).map_err(std::io::Error::other);
        text.and_then(|text| std::fs::write(BEFORE, text)).context(|| format!("writing {BEFORE}"))?;
        let ksm = Self { before, _turn: turn };
        ksm.stop()?;
        Ok(ksm)
    }

    /// Lets KSM scan as fast as it can until scans merge nothing more, then stops it; what is merged stays merged.
    /// `frames` counts the frames of the memory that is to be merged. Returns their last number.
    ///
    /// # Errors
    /// Merging was not over within `limit`, or an error of `frames`.
    pub fn settle(&self, limit: Duration, mut frames: impl FnMut() -> Result<u64>) -> Result<u64> {
        known().try_for_each(|(name, value)| write(name, value))?;
        let _hurried = Hurried::begin();
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
        self.stop()?;
        settled
    }

    /// Lets KSM scan all the time from now on, beside whatever else there is.
    ///
    /// # Errors
    /// Its settings cannot be changed.
    pub fn scan(&self) -> Result<()> {
        known().chain(BESIDE).try_for_each(|(name, value)| write(name, value))
    }

    /// Stops KSM; what is merged stays merged.
    fn stop(&self) -> Result<()> {
        write("run", "0")
    }
}

impl Drop for Ksm {
    fn drop(&mut self) {
        for (name, before) in &self.before {
            if let Err(error) = write(name, before) {
                eprintln!("KSM's {name} was {before} and is not any more: {error}");
            }
        }
        // Where it stays, the next one puts back the same.
        let _ = std::fs::remove_file(BEFORE);
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
    // A process that has its turn is not dead: it puts them back itself.
    if Path::new(BEFORE).exists() && Ksm::take_turn(FlockArg::LockExclusiveNonblock).is_ok() {
        eprintln!("put back KSM's settings, which a killed program had changed");
    }
}

/// The settings as they were before any process of this crate: those that one kept which was killed, or else as they
/// are.
fn settings() -> Result<Vec<(String, String)>> {
    let kept = std::fs::read(BEFORE).ok().and_then(|text| serde_json::from_slice(&text).ok());
    let now = || known().map(|(name, _)| Ok((name.to_owned(), chosen(&read(name)?)))).collect();
    kept.map_or_else(now, Ok)
}

/// What is set of what this kernel has: older ones lack some.
fn known() -> impl Iterator<Item = (&'static str, &'static str)> {
    FAST.into_iter().filter(|(name, _)| Path::new(DIRECTORY).join(name).exists())
}

/// Whether two counts of frames differ by no more than guests at rest write.
fn is_same(before: u64, now: u64) -> bool {
    before.abs_diff(now) <= NOISE_PAGES.max(before / NOISE_SHARE)
}

/// The number of whole scans so far.
fn scans() -> Result<u64> {
    let text = read("full_scans")?;
    let form = |_| Error::Form { what: "KSM's full_scans".into(), reason: format!("'{text}' is no number") };
    text.parse().map_err(form)
}

/// A setting's value; of a list such as `[none] scan-time`, the chosen one.
fn chosen(text: &str) -> String {
    let bracketed = text.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
    bracketed.map_or(text, |(chosen, _)| chosen).to_owned()
}

fn read(name: &str) -> Result<String> {
    let text = std::fs::read_to_string(Path::new(DIRECTORY).join(name)).context(|| format!("reading KSM's {name}"))?;
    Ok(text.trim().to_owned())
}

fn write(name: &str, value: &str) -> Result<()> {
    std::fs::write(Path::new(DIRECTORY).join(name), value).context(|| format!("setting KSM's {name} to {value}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_kept_for_whoever_comes_after_a_killed_process_and_come_back() {
        if !nix::unistd::Uid::effective().is_root() || !Path::new(DIRECTORY).exists() {
            return eprintln!("skipped: KSM's settings are root's, where the kernel has KSM");
        }
        let ksm = Ksm::take().unwrap();
        let before = ksm.before.clone();
        write("sleep_millisecs", "7").unwrap();
        assert_eq!(settings().unwrap(), before, "were this one killed, the next would put back the same");
        drop(ksm);
        assert_eq!(Ksm::take().unwrap().before, before, "the next one finds them as they were");
    }

    #[test]
    fn of_a_list_the_chosen_value_is_kept() {
        assert_eq!(chosen("[none] scan-time"), "none");
        assert_eq!(chosen("none [scan-time]"), "scan-time");
        assert_eq!(chosen("100"), "100");
    }

    #[test]
    fn what_guests_at_rest_write_is_no_change() {
        assert!(is_same(1000, 900) && is_same(1_000_000, 1_000_900));
        assert!(!is_same(1000, 1129) && !is_same(1_000_000, 998_000));
    }
}
