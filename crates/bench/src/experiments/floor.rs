//! The floor of a pause: QEMU alone hands guests' devices to other QEMUs on the same host and the same RAM files, all
//! at the same time, and does nothing else.

use std::path::Path;
use std::sync::Barrier;
use std::time::Duration;

use super::gang_figures::measure;
use super::runner::{Attempt, Row, Site, figure};
use crate::baseline::{BaselineVm, Pause, Ram};
use crate::error::{Error, Result};
use crate::guest::Guest;
use crate::lab::Lab;
use crate::result::Run;
use crate::stats::median;
use crate::trial::Qemu;

/// How many times the guests are handed over, and how long they run before each.
pub(super) const TIMES: usize = 3;
const REST: Duration = Duration::from_secs(2);

/// Guests whose QEMUs hand their devices over at the same time.
pub(super) struct Floor<'a> {
    /// Its row.
    pub(super) row: Row,
    /// Makes the guests of this name.
    pub(super) guests: &'a dyn Fn(&Lab, &str) -> Vec<Guest>,
    /// The QEMU of both sides.
    pub(super) qemu: &'a Qemu,
    /// Waits until a guest is at its work.
    pub(super) ready: &'a dyn Fn(&Guest) -> Result<()>,
}

impl Attempt for Floor<'_> {
    fn rows(&self) -> Vec<Row> {
        let Row { words, config, baseline } = &self.row;
        vec![Row { words: words.clone(), config: config.clone(), baseline: *baseline }]
    }

    fn guests(&self, lab: &Lab, name: &str) -> Vec<Guest> {
        let guests = (self.guests)(lab, name).into_iter();
        // Two QEMUs cannot have one tap.
        guests.map(|guest| Guest { wired: false, ..guest }).collect()
    }

    fn run(&self, site: &Site, runs: &mut [Run]) -> Result<()> {
        measure(runs, |measured| {
            let binary = &self.qemu.path;
            let start = |guest| BaselineVm::start(site.lab, "a", guest, binary, Ram::SharedFile);
            let mut vms = site.guests.iter().map(start).collect::<Result<Vec<_>>>()?;
            site.guests.iter().try_for_each(self.ready)?;
            let (mut longest, mut middle) = (Vec::new(), Vec::new());
            for _ in 0..TIMES {
                std::thread::sleep(REST);
                let pauses = hand_all_over(site.lab, &mut vms, binary)?;
                let downtimes: Vec<f64> = pauses.iter().map(|pause| pause.downtime_ms).collect();
                longest.push(downtimes.iter().copied().fold(0.0, f64::max));
                middle.extend(median(&downtimes));
            }
            for (name, values) in [("downtime_ms", longest), ("downtime_median_ms", middle)] {
                median(&values).into_iter().for_each(|ms| measured.note(name, ms));
            }
            Ok(())
        })
    }

    fn tell(&self, run: &Run) -> String {
        let [longest, middle] = ["downtime_ms", "downtime_median_ms"].map(|name| figure(run, name));
        format!("stopped for {longest} ms (median {middle})")
    }
}

/// Hands all guests to other QEMUs, which wait for them before the first one stops.
fn hand_all_over(lab: &Lab, vms: &mut [BaselineVm], binary: &Path) -> Result<Vec<Pause>> {
    let next = vms.iter().map(|vm| vm.successor(lab, binary)).collect::<Result<Vec<_>>>()?;
    let all = Barrier::new(vms.len());
    std::thread::scope(|scope| {
        let hand_over = |(vm, next): (&'_ mut BaselineVm, BaselineVm), all: &Barrier| {
            all.wait();
            vm.hand_over(next)
        };
        let all = &all;
        let threads: Vec<_> = vms.iter_mut().zip(next).map(|pair| scope.spawn(move || hand_over(pair, all))).collect();
        let lost = |_| Err(Error::Usage("a thread that handed a guest over has panicked".into()));
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(lost)).collect()
    })
}
