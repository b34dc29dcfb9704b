//! FCtrans' figures 16 and 17: right after its boot a guest is split; its memcached takes memory that it never used,
//! alone and beside a program that takes more, again and again.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::json;

use super::gang_figures::{Measured, measure};
use super::judge::ratio;
use super::lenders::{self, MEMORY_MIB, MIB, Way, paged};
use super::runner::{Attempt, Row, Site, figure, try_all};
use super::together::{self, REST};
use super::{Options, Plan, is};
use crate::command::PATIENCE;
use crate::console::Console;
use crate::error::Result;
use crate::guest::Guest;
use crate::lab::{CLIENT, Lab};
use crate::load::memcached::{Load, LoadConfig};
use crate::result::{Run, Target};
use crate::sterna::SternaVm;
use crate::trial::{MEMCACHED_PORT, Qemu};

/// What memcached may take, and what the program beside it goes through, MiB.
const CACHE_MIB: u32 = 256;
const WALKED_MIB: u64 = 384;
/// How long clients are at work before they are watched, and how long they are.
const WARM: Duration = Duration::from_secs(3);
const WATCHED: Duration = Duration::from_secs(20);
const SEED: u64 = 7;

const REQUESTS: &str = "requests_per_s";
const LONGEST: &str = "longest_request_ms";
const IN: &str = "in_pages";
const OUT: &str = "out_pages";

pub(super) fn plan(options: &Options) -> Result<Plan> {
    let repeats = options.repeat.unwrap_or(if options.quick { 1 } else { 5 });
    let attempts = attempts(&together::newest()?);
    let plan = Plan::new(move |record| {
        try_all(&lenders::lab()?, &attempts, repeats, record);
        Ok(())
    });
    Ok(plan.judged(|runs| Ok(targets(runs))))
}

/// A cache at work.
#[derive(Debug, Clone)]
struct Cache {
    way: Way,
    /// Whether another program takes memory.
    beside: bool,
    qemu: Qemu,
}

fn attempts(qemu: &Qemu) -> Vec<Cache> {
    let each = [false, true].into_iter().flat_map(|beside| Way::ALL.map(|way| (way, beside)));
    each.map(|(way, beside)| Cache { way, beside, qemu: qemu.clone() }).collect()
}

fn workload(beside: bool) -> String {
    let takes = if beside { format!(", {WALKED_MIB} MiB gone through beside it") } else { ", alone".into() };
    format!("memcached{takes}")
}

impl Attempt for Cache {
    fn rows(&self) -> Vec<Row> {
        vec![self.way.row(&self.qemu, &workload(self.beside), &[("seed", json!(SEED))])]
    }

    fn guests(&self, lab: &Lab, name: &str) -> Vec<Guest> {
        let guest = Guest::new(lab, name, 10, &format!("memcached:-m,{CACHE_MIB},-t,2;checker:--mib,16,--rate,4"));
        vec![Guest { memory_bytes: MEMORY_MIB * MIB, cpus: 2, typed_at: true, ..guest }]
    }

    fn run(&self, site: &Site, runs: &mut [Run]) -> Result<()> {
        let guest = site.guest()?;
        measure(runs, |measured| self.serve(site.lab, guest, measured))
    }

    fn tell(&self, run: &Run) -> String {
        let [requests, longest, came, left] = [REQUESTS, LONGEST, IN, OUT].map(|name| figure(run, name));
        format!("{requests} requests a second, the longest {longest} ms; {came} pages came and {left} left")
    }
}

impl Cache {
    fn serve(&self, lab: &Lab, guest: &Guest, measured: &mut Measured) -> Result<()> {
        let vm = SternaVm::start(lab, "a", guest, &self.qemu.path)?;
        guest.wait_until_up(PATIENCE)?;
        std::thread::sleep(REST);
        let report = self.way.split(lab, &vm)?;
        if self.beside {
            let mut console = Console::open(guest)?;
            console.type_line(&format!("walker --mib {WALKED_MIB} --passes 0"))?;
            console.wait_for("WALKER ready", PATIENCE)?;
        }
        // Half of the requests take memory, until the cache is full.
        let config = LoadConfig { keys: CACHE_MIB * 512, set_share: 0.5, ..LoadConfig::mixed(SEED) };
        let load = Load::start(lab.host(CLIENT)?, SocketAddr::from((guest.address(), MEMCACHED_PORT)), &config)?;
        std::thread::sleep(WARM);
        let (before, requests) = (paged(&vm)?, load.requests());
        std::thread::sleep(WATCHED);
        let (after, answered) = (paged(&vm)?, load.requests() - requests);
        let seen = load.finish();
        guest.wait_until_well(PATIENCE)?;
        measured.details = json!({ "split": report });
        for (name, value) in [
            (REQUESTS, answered as f64 / WATCHED.as_secs_f64()),
            (LONGEST, seen.longest_us as f64 / 1e3),
            (IN, after[0] - before[0]),
            (OUT, after[1] - before[1]),
            ("load_errors", seen.errors as f64),
        ] {
            measured.note(name, value);
        }
        Ok(())
    }
}

fn targets(runs: &[Run]) -> Vec<Target> {
    let requests = |run: &Run| run.metrics.get(REQUESTS).copied();
    let row = |way: Way, beside| move |run: &Run| is(run, &[("mover", way.label()), ("workload", &workload(beside))]);
    let kept = |beside, other| ratio(runs, requests, row(Way::Tracked, beside), row(other, beside));
    vec![
        Target::at_least("alone: requests a second ÷ those of a whole guest", 0.98, kept(false, Way::Whole)),
        Target::at_least("alone: the same ÷ where unused memory is ignored", 1.075, kept(false, Way::Ignored)),
        Target::at_least("beside a program: ÷ where unused memory is ignored", 1.19, kept(true, Way::Ignored)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_three_ways_are_compared_and_a_way_that_is_missing_is_missed() {
        let qemu = Qemu { label: "10.0".into(), path: "/nonexistent".into() };
        let runs: Vec<Run> = attempts(&qemu)
            .iter()
            .map(|cache| {
                let mut run = cache.rows()[0].run(0);
                let requests = match (cache.way, cache.beside) {
                    (Way::Whole, _) => 1000.0,
                    (Way::Tracked, false) => 990.0,
                    (Way::Tracked, true) => 900.0,
                    (Way::Ignored, false) => 900.0,
                    (Way::Ignored, true) => 600.0,
                };
                run.metrics.insert(REQUESTS.into(), requests);
                run
            })
            .collect();
        let judged = |runs: &[Run]| -> Vec<_> { targets(runs).iter().map(|target| target.measured).collect() };
        assert_eq!(judged(&runs), [Some(0.99), Some(1.1), Some(1.5)]);
        assert_eq!(judged(&runs[1..]), [None, Some(1.1), Some(1.5)]);
        assert_eq!(judged(&[]), [None; 3]);
    }
}
