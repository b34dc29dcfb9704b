//! What the experiments of split guests have in common: a guest's host, and two memory hosts.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna_api::{SplitReport, Unused};

use super::movers;
use super::runner::Row;
use crate::command::PATIENCE;
use crate::error::{Error, Result};
use crate::gang::lab_with;
use crate::guest::Guest;
use crate::lab::{Lab, LabConfig};
use crate::sterna::SternaVm;
use crate::trial::Qemu;

pub(super) const MIB: u64 = 1 << 20;
/// What each memory host lends, MiB.
const LENT_MIB: u64 = 400;
/// What it has beside, for [bare requests](crate::bare), MiB.
const BESIDE_MIB: u64 = 2;
/// How often it is looked how many pages have come and left.
const WATCH: Duration = Duration::from_millis(500);
/// The program whose work is measured.
pub(super) const PROGRAM: &str = "TOUCHER";

/// The lab: guests run on `a`; `b` and `c` lend memory.
pub(super) fn lab() -> Result<Lab> {
    lab_of(&["a", "b", "c"], 1, LENT_MIB + BESIDE_MIB)
}

/// The same with `d`, where guests go; each memory host lends so many MiB.
pub(super) fn lab_to_move_in(guests: usize, lent_mib: u64) -> Result<Lab> {
    lab_of(&["a", "b", "c", "d"], guests, lent_mib)
}

fn lab_of(hosts: &[&str], guests: usize, lent_mib: u64) -> Result<Lab> {
    let hosts = hosts.iter().map(|host| (*host).to_owned()).collect();
    let lend = format!("lend_memory = \"{lent_mib}M\"\n");
    lab_with(LabConfig { hosts, ..movers::lab_config() }, guests, &lend)
}

/// The memory hosts, and what each lends to a guest, bytes.
pub(super) fn lenders(lab: &Lab) -> Result<[(String, u64); 2]> {
    lending(lab, LENT_MIB)
}

/// The memory hosts where each lends so many MiB to a guest.
pub(super) fn lending(lab: &Lab, mib: u64) -> Result<[(String, u64); 2]> {
    let lent = |name| Ok((lab.host(name)?.listen(), mib * MIB));
    Ok([lent("b")?, lent("c")?])
}

/// Where a guest's memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// All of it is here.
    Whole,
    /// A part is at memory hosts, and what the guest does not use is nowhere.
    Tracked,
    /// What it does not use is at memory hosts, too.
    Ignored,
}

/// The words of `sterna split` for pages that a guest does not use.
pub(super) fn unused_words(unused: Unused) -> &'static [&'static str] {
    match unused {
        Unused::Track => &[],
        Unused::Ignore => &["--unused", "ignore"],
    }
}

/// The memory of guests that use what they never used before, and what of it may be here, MiB. Right after their boot
/// they use some 150.
pub(super) const MEMORY_MIB: u64 = 1024;
pub(super) const HERE_MIB: u64 = 512;

impl Way {
    pub(super) const ALL: [Self; 3] = [Self::Whole, Self::Tracked, Self::Ignored];

    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Whole => "all of it here",
            Self::Tracked => "sterna split",
            Self::Ignored => "sterna split --unused ignore",
        }
    }

    /// The row of a workload in a guest whose memory is so, with `more` in its set-up.
    pub(super) fn row(self, qemu: &Qemu, workload: &str, more: &[(&str, Value)]) -> Row {
        let values = [
            ("mover", json!(self.label())),
            ("qemu", json!(qemu.label)),
            ("workload", json!(workload)),
            ("memory_mib", json!(MEMORY_MIB)),
            ("here_mib", json!(HERE_MIB)),
        ];
        let values = values.into_iter().chain(more.iter().cloned());
        let config = values.map(|(name, value)| (name.to_owned(), value)).collect();
        Row { words: format!("{}, {workload}", self.label()), config, baseline: self != Self::Tracked }
    }

    /// Splits a guest so.
    pub(super) fn split(self, lab: &Lab, vm: &SternaVm) -> Result<Option<SplitReport>> {
        let unused = match self {
            Self::Whole => return Ok(None),
            Self::Tracked => Unused::Track,
            Self::Ignored => Unused::Ignore,
        };
        vm.split(HERE_MIB * MIB, &lenders(lab)?, unused_words(unused)).map(Some)
    }
}

/// Pages of a guest that have come from memory hosts so far, and that have left for them.
pub(super) fn paged(vm: &SternaVm) -> Result<[f64; 2]> {
    let split = vm.show()?.split.unwrap_or_default();
    Ok([split.in_pages as f64, split.out_pages as f64])
}

/// Seconds since a beginning, and pages that had come from memory hosts and that had left for them until then.
pub(super) type Moment = [f64; 3];

/// Does something with a guest, which is told when it begins, and notes meanwhile how many of its pages come and leave.
///
/// # Errors
/// What `during` fails for, or where the guest's daemon does not answer.
pub(super) fn watched<T>(vm: &SternaVm, during: impl FnOnce(Instant) -> Result<T>) -> Result<(T, Vec<Moment>)> {
    let (begin, over) = (Instant::now(), AtomicBool::new(false));
    let watch = || -> Result<Vec<Moment>> {
        let mut moments = Vec::new();
        while !over.load(Ordering::Relaxed) {
            let [came, left] = paged(vm)?;
            moments.push([begin.elapsed().as_secs_f64(), came, left]);
            std::thread::sleep(WATCH);
        }
        Ok(moments)
    };
    std::thread::scope(|scope| {
        let watcher = scope.spawn(watch);
        let done = during(begin);
        over.store(true, Ordering::Relaxed);
        let moments =
            watcher.join().unwrap_or_else(|_| Err(Error::Usage("the thread that watches has panicked".into())));
        Ok((done?, moments?))
    })
}

/// Pages a second between each two moments, for `way` 0 those that came and for 1 those that left.
pub(super) fn rates(moments: &[Moment], way: usize) -> Vec<(f64, f64)> {
    let between = |pair: &[Moment]| {
        let seconds = pair[1][0] - pair[0][0];
        (pair[1][0], (pair[1][1 + way] - pair[0][1 + way]) / seconds.max(1e-6))
    };
    moments.windows(2).map(between).collect()
}

/// Waits until a guest's program is at its work.
pub(super) fn is_at_work(guest: &Guest) -> Result<()> {
    guest.wait_until_up(PATIENCE)?;
    guest.wait_until_says("TOUCHER ready", PATIENCE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_a_second_are_told_between_two_looks() {
        let moments = [[0.0, 10.0, 0.0], [0.5, 20.0, 0.0], [1.0, 20.0, 100.0]];
        assert_eq!(rates(&moments, 0), [(0.5, 20.0), (1.0, 0.0)]);
        assert_eq!(rates(&moments, 1), [(0.5, 0.0), (1.0, 200.0)]);
        assert!(rates(&moments[..1], 0).is_empty());
    }
}
