//! How a guest is measured at its work, and what its hosts do for it meanwhile.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use sterna_guest_programs::histogram::Histogram;

use super::super::gang_figures::{Measured, daemons_cpu_time};
use super::super::judge::derive_quotient;
use super::super::lenders::{PROGRAM, paged};
use super::super::timeline::{rate, totals};
use super::super::together::REST;
use super::work::{INTERVAL_MS, Work};
use super::{
    BARE_P50, BARE_P99, IN, LONGEST, OUT, REQUESTS, SORTS, WAIT_P50, WAIT_P50_TO_BARE, WAIT_P99, WAIT_P99_TO_BARE,
    WORDS,
};
use crate::bare::Bare;
use crate::command::wait_for;
use crate::error::Result;
use crate::guest::Guest;
use crate::lab::{CLIENT, Lab};
use crate::load::memcached::{Load, LoadConfig};
use crate::load::now_us;
use crate::meter::{Line, Meter};
use crate::sterna::SternaVm;
use crate::trial::MEMCACHED_PORT;

/// How long a guest is measured.
const MEASURED: Duration = Duration::from_secs(8);
/// How long a cache is at work before: until the pages that it asks for often are here.
const WARM: Duration = Duration::from_secs(40);
/// How long it may take to sort once.
const LONGEST_SORT: Duration = Duration::from_secs(400);
/// An access that takes so long has waited for a page; others take a few microseconds at most.
const WAIT_NS: u64 = 50_000;

/// A guest at work.
pub(super) struct Scene<'a> {
    pub(super) lab: &'a Lab,
    pub(super) guest: &'a Guest,
    pub(super) meter: &'a Meter,
    pub(super) work: Work,
}

impl Scene<'_> {
    /// Waits until the guest is at work, and fills its cache where it has one.
    pub(super) fn begin(&self) -> Result<()> {
        self.work.is_begun(self.guest)?;
        if let Work::Cache(_) = self.work {
            drop(self.load(&self.work.load())?);
        }
        Ok(())
    }

    fn load(&self, config: &LoadConfig) -> Result<Load> {
        Load::start(self.lab.host(CLIENT)?, SocketAddr::from((self.guest.address(), MEMCACHED_PORT)), config)
    }

    /// Lets the guest settle, and notes what it does then; of a split guest what its hosts do for it, too, and beside
    /// it bare requests.
    pub(super) fn look(&self, split: Option<(&SternaVm, &mut Bare)>, measured: &mut Measured) -> Result<()> {
        let Some((vm, bare)) = split else { return self.measure(None, None, measured) };
        self.measure(Some(vm), Some(bare), measured)
    }

    fn measure(&self, vm: Option<&SternaVm>, bare: Option<&mut Bare>, measured: &mut Measured) -> Result<()> {
        match self.work {
            Work::Reads(..) => {
                std::thread::sleep(REST);
                let effort = Effort::begin(self.lab, vm)?;
                let from_us = now_us();
                // The last line of the time tells of what came before it.
                let length = MEASURED + Duration::from_millis(3 * INTERVAL_MS.unsigned_abs());
                match bare {
                    Some(bare) => note_quantiles(&bare.ask(length)?, [(BARE_P50, 0.5), (BARE_P99, 0.99)], measured),
                    None => std::thread::sleep(length),
                }
                effort.note(self.lab, vm, measured)?;
                let to_us = from_us + MEASURED.as_micros() as i64;
                note(&self.meter.lines(self.guest.address(), PROGRAM), (from_us, to_us), measured);
                for (name, wait) in [(WAIT_P50_TO_BARE, WAIT_P50), (WAIT_P99_TO_BARE, WAIT_P99)] {
                    derive_quotient(&mut measured.metrics, name, wait, BARE_P50);
                }
            }
            Work::Cache(_) => {
                let load = self.load(&LoadConfig { fill: false, ..self.work.load() })?;
                std::thread::sleep(WARM);
                let (effort, begin, before) = (Effort::begin(self.lab, vm)?, Instant::now(), load.requests());
                std::thread::sleep(MEASURED);
                let answered = load.requests() - before;
                measured.note(REQUESTS, answered as f64 / begin.elapsed().as_secs_f64());
                effort.note(self.lab, vm, measured)?;
                measured.note(LONGEST, load.finish().longest_us as f64 / 1e3);
            }
            Work::Sort => {
                let begin_us = self.sorted()?;
                let effort = Effort::begin(self.lab, vm)?;
                let end_us = self.sorted()?;
                effort.note(self.lab, vm, measured)?;
                measured.note(SORTS, 60e6 / (end_us - begin_us) as f64);
            }
        }
        Ok(())
    }

    /// Waits until the guest has ended one more sort; returns when it said so.
    fn sorted(&self) -> Result<i64> {
        let lines = || self.meter.lines(self.guest.address(), "QUICKSORT");
        let so_far = |lines: &[Line]| lines.iter().filter_map(|line| line.number("sorts")).fold(0.0, f64::max);
        let before = so_far(&lines());
        wait_for("the end of a sort", LONGEST_SORT, || {
            let done = |line: &Line| line.number("sorts").is_some_and(|sorts| sorts > before);
            Ok(lines().into_iter().find(done).map(|line| line.at_us))
        })
    }
}

/// What the hosts have done for a split guest until a moment.
struct Effort {
    at: Instant,
    /// Processor time of the daemon at the guest's host, and of all that its memory hosts run.
    borrower: Duration,
    lenders: Duration,
    paged: [f64; 2],
}

impl Effort {
    fn begin(lab: &Lab, vm: Option<&SternaVm>) -> Result<Self> {
        let borrower = daemons_cpu_time(&lab.host("a")?.group);
        let lenders = lab.host("b")?.group.cpu_time()? + lab.host("c")?.group.cpu_time()?;
        Ok(Self { at: Instant::now(), borrower, lenders, paged: vm.map(paged).transpose()?.unwrap_or_default() })
    }

    /// Notes what they have done since then: of memory hosts and disks how busy their processors were, and of a split
    /// guest's host what its daemon took, too.
    fn note(self, lab: &Lab, vm: Option<&SternaVm>, measured: &mut Measured) -> Result<()> {
        let now = Self::begin(lab, vm)?;
        let seconds = (now.at - self.at).as_secs_f64();
        let [lenders, borrower] =
            [now.lenders - self.lenders, now.borrower - self.borrower].map(|cpu| cpu.as_secs_f64());
        measured.note("lenders_cpu_percent", lenders / seconds * 100.0);
        if vm.is_none() {
            return Ok(());
        }
        measured.note("borrower_cpu_percent", borrower / seconds * 100.0);
        let [came, left] = [0, 1].map(|way| now.paged[way] - self.paged[way]);
        measured.note(IN, came / seconds);
        measured.note(OUT, left / seconds);
        if came + left > 0.0 {
            measured.note("borrower_cpu_us_per_page", borrower * 1e6 / (came + left));
            measured.note("lenders_cpu_us_per_page", lenders * 1e6 / (came + left));
        }
        Ok(())
    }
}

fn note(lines: &[Line], (from_us, to_us): (i64, i64), measured: &mut Measured) {
    let Some(words) = rate(&totals(lines), from_us, to_us) else { return };
    measured.note(WORDS, words);
    let mut all = Histogram::default();
    let inside = lines.iter().filter(|line| (from_us..=to_us).contains(&line.at_us));
    inside.filter_map(|line| line.word("latency_ns")?.parse::<Histogram>().ok()).for_each(|latency| all.add(&latency));
    let waits = all.from(WAIT_NS);
    measured.note("waits_per_s", waits.count() as f64 / ((to_us - from_us) as f64 / 1e6));
    note_quantiles(&waits, [(WAIT_P50, 0.5), (WAIT_P99, 0.99)], measured);
}

/// Notes quantiles of nanoseconds, in microseconds.
fn note_quantiles(of: &Histogram, wanted: [(&str, f64); 2], measured: &mut Measured) {
    for (name, quantile) in wanted {
        if let Some(ns) = of.quantile(quantile) {
            measured.note(name, ns / 1e3);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn what_a_guest_waits_is_told_apart_from_its_other_accesses() {
        let latency: Histogram = [1_000; 90].into_iter().chain([200_000; 10]).collect();
        let line = |tenth: i64| {
            let text = format!("TOUCHER ok touches=100 total={} latency_ns={latency}", tenth * 100);
            Line { from: Ipv4Addr::LOCALHOST, at_us: tenth * 100_000, text }
        };
        let lines: Vec<Line> = (0..100).map(line).collect();
        let mut measured = Measured::default();
        note(&lines, (1_000_000, 9_000_000), &mut measured);
        let of = |name: &str| measured.metrics[name];
        assert_eq!(of(WORDS), 1000.0);
        assert!((of("waits_per_s") - 100.0).abs() < 2.0, "{}", of("waits_per_s"));
        assert!((of(WAIT_P50) / 200.0 - 1.0).abs() < 1.0 / 16.0, "{}", of(WAIT_P50));
        let mut measured = Measured::default();
        note(&[], (0, 1), &mut measured);
        assert!(measured.metrics.is_empty());
    }
}
