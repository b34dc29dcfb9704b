//! KSM, the kernel's merging of equal pages, taken over for the time of a test or an experiment
//! (`Documentation/admin-guide/mm/ksm.rst`).

use std::fs::File;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

use crate::error::{Error, Result};

/// The settings as they were, for as long as they are others: a process that is killed leaves them to the next one.
const BEFORE: &str = "/run/sterna-ksm";
/// What is set, in this order. Pages that were not merged once are looked at again in every scan (`smart_scan`), else
/// nobody knows when merging is over.
const FAST: [(&str, &str); 5] = [
    ("smart_scan", "0"),
    ("advisor_mode", "none"),
    ("pages_to_scan", "100000"),
    ("sleep_millisecs", "1"),
    ("run", "1"),
];

/// KSM, whose settings are put back once this is dropped. One process at a time has it.
#[derive(Debug)]
pub struct Ksm {
    /// Settings as they were: names and values, in the order of [`FAST`].
    before: Vec<(&'static str, String)>,
    /// Keeps others from changing the settings meanwhile.
    _turn: File,
}

impl Ksm {
    /// Takes KSM over and stops it. Waits for others that have it.
    ///
    /// # Errors
    /// This kernel has no KSM, or its settings may not be changed: root may.
    pub fn take() -> Result<Self> {
        Self::take_turn(FlockOperation::LockExclusive)
    }

    /// As [`take`](Self::take), without waiting: where others have it, that is an error.
    ///
    /// # Errors
    /// As [`take`](Self::take); or others have it.
    pub fn try_take() -> Result<Self> {
        Self::take_turn(FlockOperation::NonBlockingLockExclusive)
    }

    fn take_turn(how: FlockOperation) -> Result<Self> {
        let turn = File::open(path("run")).map_err(|error| Error::new("find KSM's settings", error))?;
        flock(&turn, how).map_err(|error| Error::new("have KSM to itself", error))?;
        let before = settings()?;
        let text: String = before.iter().map(|(name, value)| format!("{name} {value}\n")).collect();
        std::fs::write(BEFORE, text).map_err(|error| Error::new(format!("write {BEFORE}"), error))?;
        let ksm = Self { before, _turn: turn };
        ksm.stop()?;
        Ok(ksm)
    }

    /// Lets it scan as fast as it can from now on, but for these settings.
    ///
    /// # Errors
    /// Its settings cannot be changed.
    pub fn scan(&self, but: &[(&str, &str)]) -> Result<()> {
        known().try_for_each(|(name, value)| write(name, value))?;
        but.iter().try_for_each(|(name, value)| write(name, value))
    }

    /// Stops it; what is merged stays merged.
    ///
    /// # Errors
    /// As [`scan`](Self::scan).
    pub fn stop(&self) -> Result<()> {
        write("run", "0")
    }

    /// The number of whole scans so far.
    ///
    /// # Errors
    /// The kernel does not tell.
    pub fn scans(&self) -> Result<u64> {
        let text = read("full_scans")?;
        text.parse().map_err(|_| Error::malformed("read KSM's full_scans", format!("'{text}' is no number")))
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

/// Puts back the settings that a process which was killed has left changed, if there are such. Returns whether it did.
#[must_use]
pub fn clear_orphan() -> bool {
    // A process that has its turn is not dead: it puts them back itself.
    Path::new(BEFORE).exists() && Ksm::try_take().is_ok()
}

/// The settings as they were before anybody changed them by this: those that a process kept which was killed, or else
/// as they are.
fn settings() -> Result<Vec<(&'static str, String)>> {
    let kept = std::fs::read_to_string(BEFORE).unwrap_or_default();
    let kept = |name: &str| kept.lines().find_map(|line| Some(line.strip_prefix(name)?.strip_prefix(' ')?.to_owned()));
    let before = |(name, _): (&'static str, _)| Ok((name, kept(name).map_or_else(|| read(name), Ok)?));
    known().map(before).collect()
}

/// What is set of what this kernel has: older ones lack some.
fn known() -> impl Iterator<Item = (&'static str, &'static str)> {
    FAST.into_iter().filter(|(name, _)| path(name).exists())
}

fn path(name: &str) -> PathBuf {
    Path::new("/sys/kernel/mm/ksm").join(name)
}

/// A setting's value; of a list such as `[none] scan-time`, the chosen one.
fn read(name: &str) -> Result<String> {
    let text = std::fs::read_to_string(path(name)).map_err(|error| Error::new(format!("read KSM's {name}"), error))?;
    Ok(chosen(text.trim()))
}

fn chosen(text: &str) -> String {
    let bracketed = text.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
    bracketed.map_or(text, |(chosen, _)| chosen).to_owned()
}

fn write(name: &str, value: &str) -> Result<()> {
    std::fs::write(path(name), value).map_err(|error| Error::new(format!("set KSM's {name} to {value}"), error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_kept_for_whoever_comes_after_a_killed_process_and_come_back() {
        if !rustix::process::geteuid().is_root() || !path("run").exists() {
            return println!("skipped: KSM's settings are root's, where the kernel has KSM");
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
}
