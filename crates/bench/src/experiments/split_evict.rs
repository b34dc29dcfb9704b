//! A host is emptied of its guests, whose new home has a link six times slower: straight there, and over two memory
//! hosts, from which they come together at their new home by themselves.

use std::time::{Duration, Instant};

use serde_json::json;
use sterna_api::{MigrateOptions, Mode, Report};

use super::gang_figures::{Measured, measure};
use super::judge::{metric, ratio};
use super::lenders::{self, MIB, PROGRAM};
use super::movers::LINK_BYTES_PER_S;
use super::runner::{Attempt, Row, Site, figure, try_all};
use super::together::{self, REST};
use super::{Options, Plan, is};
use crate::command::{PATIENCE, wait_for};
use crate::error::Result;
use crate::guest::Guest;
use crate::lab::{Lab, net};
use crate::result::{Run, Target, series};
use crate::stats::median;
use crate::sterna::SternaVm;
use crate::trial::Qemu;

/// The guests, their memory, and what each uses of it, MiB.
const GUESTS: usize = 3;
const MEMORY_MIB: u64 = 512;
const USED_MIB: u64 = 256;
/// What each of the two memory hosts lends to all of them, MiB.
const LENT_MIB: u64 = 700;
/// How much slower the new home's link is.
const SLOWER: u64 = 6;

/// From the request until the host has none of them, seconds; and what its link would take for their memory.
const FREE: &str = "free_s";
const LINK: &str = "link_s";
const QUOTIENT: &str = "free_per_link";
/// From the request until all of them are whole at their new home, seconds.
const WHOLE: &str = "whole_s";
/// The longest pause, milliseconds.
const LONGEST: &str = "longest_pause_ms";

/// How they leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Straight,
    OverMemoryHosts,
}

impl Way {
    fn label(self) -> &'static str {
        match self {
            Self::Straight => "sterna migrate",
            Self::OverMemoryHosts => "sterna evacuate",
        }
    }
}

pub(super) fn plan(options: &Options) -> Result<Plan> {
    let repeats = options.repeat.unwrap_or(if options.quick { 1 } else { 5 });
    let qemu = together::newest()?;
    let attempts = [Way::OverMemoryHosts, Way::Straight].map(|way| Evict { way, qemu: qemu.clone() });
    let plan = Plan::new(move |record| {
        let lab = lenders::lab_to_move_in(GUESTS, LENT_MIB)?;
        net::reshape(lab.name(), "d", LINK_BYTES_PER_S / SLOWER)?;
        try_all(&lab, &attempts, repeats, record);
        Ok(())
    });
    Ok(plan.judged(|runs| Ok(targets(runs))))
}

/// A host that is emptied.
#[derive(Debug, Clone)]
struct Evict {
    way: Way,
    qemu: Qemu,
}

fn jobs() -> String {
    format!("checker:--mib,16,--rate,4;toucher:--mib,{USED_MIB},--access,read,--rate,1")
}

impl Attempt for Evict {
    fn rows(&self) -> Vec<Row> {
        let workload = format!("{GUESTS} guests of {MEMORY_MIB} MiB, {USED_MIB} of each in use");
        let values = [
            ("mover", json!(self.way.label())),
            ("qemu", json!(self.qemu.label)),
            ("workload", json!(workload)),
            ("jobs", json!(jobs())),
            ("slower", json!(SLOWER)),
        ];
        let config = values.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        let words = format!("{} on QEMU {}, {workload}", self.way.label(), self.qemu.label);
        vec![Row { words, config, baseline: false }]
    }

    fn guests(&self, lab: &Lab, name: &str) -> Vec<Guest> {
        let guest = |number: usize| {
            let name = format!("{name}-{number}");
            Guest { memory_bytes: MEMORY_MIB * MIB, ..Guest::new(lab, &name, 10 + number as u8, &jobs()) }
        };
        (0..GUESTS).map(guest).collect()
    }

    fn run(&self, site: &Site, runs: &mut [Run]) -> Result<()> {
        measure(runs, |measured| self.empty(site.lab, site.guests, measured))
    }

    fn tell(&self, run: &Run) -> String {
        let [free, link, whole, longest] = [FREE, LINK, WHOLE, LONGEST].map(|name| figure(run, name));
        format!("free after {free} s (its link: {link}), all whole after {whole} s, paused {longest} ms at most")
    }
}

impl Evict {
    fn empty(&self, lab: &Lab, guests: &[Guest], measured: &mut Measured) -> Result<()> {
        let start = |guest: &Guest| SternaVm::start(lab, "a", guest, &self.qemu.path);
        let mut vms: Vec<SternaVm> = guests.iter().map(start).collect::<Result<_>>()?;
        for guest in guests {
            guest.wait_until_up(PATIENCE)?;
            guest.wait_until_says(&format!("{PROGRAM} ready"), PATIENCE)?;
        }
        std::thread::sleep(REST);
        let in_use: u64 = vms.iter().map(|vm| Ok(vm.show()?.allocated_bytes)).sum::<Result<u64>>()?;
        let began = Instant::now();
        let reports: Vec<Report> = match self.way {
            Way::OverMemoryHosts => SternaVm::evacuate(&mut vms, lab, "d", &lenders::lending(lab, LENT_MIB)?)?,
            Way::Straight => {
                let options = MigrateOptions { mode: Mode::Precopy, ..MigrateOptions::default() };
                vms.iter_mut().map(|vm| vm.migrate(lab, "d", &options)).collect::<Result<_>>()?
            }
        };
        let free = began.elapsed();
        wait_for("all of them together", 4 * PATIENCE, || {
            let whole = vms.iter().map(|vm| Ok(vm.show()?.split.is_none())).collect::<Result<Vec<_>>>()?;
            Ok(whole.iter().all(|whole| *whole).then_some(()))
        })?;
        let whole = began.elapsed();
        guests.iter().try_for_each(|guest| guest.wait_until_well(PATIENCE))?;
        let link = Duration::from_secs_f64(in_use as f64 / LINK_BYTES_PER_S as f64);
        measured.details = json!({ "moved": reports });
        measured.note(FREE, free.as_secs_f64());
        measured.note(LINK, link.as_secs_f64());
        measured.note(QUOTIENT, free.as_secs_f64() / link.as_secs_f64());
        measured.note(WHOLE, whole.as_secs_f64());
        if let Some(longest) = reports.iter().map(|report| report.downtime_ms).reduce(f64::max) {
            measured.note(LONGEST, longest);
        }
        Ok(())
    }
}

fn targets(runs: &[Run]) -> Vec<Target> {
    let over = |run: &Run| is(run, &[("mover", Way::OverMemoryHosts.label())]);
    let straight = |run: &Run| is(run, &[("mover", Way::Straight.label())]);
    let quotient = median(&series(runs, QUOTIENT, over));
    vec![
        Target::at_most("time until the host is free ÷ its link's", 1.15, quotient),
        Target::at_least(
            "straight ÷ over memory hosts, time until the host is free",
            3.0,
            ratio(runs, metric(FREE), straight, over),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_measured_is_not_met() {
        assert!(targets(&[]).iter().all(|target| target.measured.is_none() && !target.met));
    }
}
