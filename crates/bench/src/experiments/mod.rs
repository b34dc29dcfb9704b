//! Experiments: set-ups tried side by side in one lab, their rows, and the targets they are judged by.

/// The cost of repeated migrations to a guest's work.
pub mod back_to_back;

/// The effect of self-ballooning on migrations.
pub mod balloon_migration;

/// A metric over what an experiment varies.
mod curves;

/// Guests that write faster than the link carries.
pub mod converge;

/// The commonest row: one guest, moved once.
mod case;

/// What the experiments after D-Track have in common.
mod dtrack;

/// D-Track's hashes.
pub mod dtrack_hash;

/// D-Track's total migration time, by every technique.
pub mod dtrack_total_time;

/// The throughput that a sort in the guest loses to its migration.
pub mod dtrack_quicksort;

/// The cost of silent stores.
pub mod dtrack_silent;

/// The effect of a migration on a database's client in the guest.
pub mod dtrack_ycsb;

/// The cost of moving idle and busy guests, beside QEMU's own migration.
pub mod first_flight;

/// The error of estimates.
pub mod estimate_error;

/// The cost of giving a guest's free memory back.
pub mod fctrans_reclaim;

/// The floor of a pause.
mod floor;

/// The figures of a gang's move.
mod gang_figures;

/// A running guest that goes on as several.
pub mod gang_fork;

/// Gangs that share nothing, little and much.
pub mod gang_levels;

/// A gang that comes back and moves on.
pub mod gang_return;

/// Speed in huge pages: at rest, watched, after a cancel and where a guest has come.
pub mod huge_pages;

/// The fastest that a program could be whose memory is elsewhere in part.
mod ideal;

/// Figures that are derived from runs to judge them.
mod judge;

/// What the experiments of split guests have in common.
mod lenders;

/// The movers of the guests, and their link.
mod movers;

/// The effect of post-copy on a compile, a web server, a download and a sender.
pub mod postcopy_apps;

/// How long a guest waits for a page in post-copy.
pub mod postcopy_latency;

/// Post-copy of a sequential reader or writer, beside the other modes.
pub mod postcopy_stress;

/// How an experiment tries, judges and draws its rows.
mod plan;

/// The record of what an experiment has found so far.
mod record;

/// The one way in which experiments try their rows.
mod runner;

/// Another QEMU under a running guest.
pub mod replace;

/// How time grows with memory.
pub mod scale;

/// The cost of self-ballooning, by its interval.
pub mod selfballoon_interval;

/// Guests that are split and move in one.
pub mod fctrans_split;

/// Memory that a split guest has never used.
pub mod fctrans_access;

/// A cache in a split guest.
pub mod fctrans_memcached;

/// A host that is emptied.
pub mod split_evict;

/// A memory host that goes.
pub mod split_loss;

/// The speed of a program whose memory is elsewhere in part.
pub mod split_paging;

/// How long the guests of a gang stand still.
pub mod slm_downtime;

/// The memory that gangs take where they go.
pub mod slm_footprint;

/// The throughput of guests at work while their gang moves.
pub mod slm_throughput;

/// The time and the pages that gangs take.
pub mod slm_total_time;

/// How fast pages move where no link limits them.
pub mod throughput;

/// A guest's reports of its own work, before, during and after its migration.
mod timeline;

/// What the experiments after sharing-aware migration have in common.
mod together;

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::error::{Error, Result};
use crate::result::Run;
use crate::tools;
use crate::trial::Qemu;
use crate::{ksm, lab};
use case::{Case, Watch, try_all, try_each};
use plan::Plan;
use record::Record;
pub use record::Round;

/// Options of a run of an experiment.
#[derive(Debug, Clone)]
pub struct Options {
    /// Fewer and smaller set-ups.
    pub quick: bool,
    /// How often each set-up is tried; the experiment's own number where absent.
    pub repeat: Option<usize>,
    /// Words of the rows to try: a row is tried if its mover, QEMU or workload contains one of them. Without words all
    /// rows are tried.
    pub only: Vec<String>,
    /// Where the directory with the results is made.
    pub out: PathBuf,
}

/// An experiment: its name, and the function that makes its plan.
pub struct Experiment {
    /// The experiment's name.
    pub id: &'static str,
    /// What it shows, in a line.
    pub about: &'static str,
    /// Makes its plan.
    plan: fn(&Options) -> Result<Plan>,
}

/// All experiments.
pub const ALL: &[Experiment] = &[
    Experiment {
        id: "first-flight",
        about: "idle and busy 1 GiB guests at 1 Gbit: bytes, downtime, total time, cost to the guest",
        plan: first_flight::plan,
    },
    Experiment {
        id: "throughput",
        about: "incompressible RAM over an unlimited link: GB/s and processor time per GiB",
        plan: throughput::plan,
    },
    Experiment {
        id: "scale",
        about: "guests of 1 to 16 GiB, idle or with RAM used and freed before: time by memory in use, cost of a scan",
        plan: scale::plan,
    },
    Experiment {
        id: "estimate-error",
        about: "idle and busy 1 GiB guests, estimated and moved at once: how far off the estimates are",
        plan: estimate_error::plan,
    },
    Experiment {
        id: "dtrack-total-time",
        about: "a cache in 90 % of RAM, under sets: total time by every technique, alone and combined",
        plan: dtrack_total_time::plan,
    },
    Experiment {
        id: "dtrack-hash",
        about: "silent stores found by each hash, alone and combined: what the hash costs",
        plan: dtrack_hash::plan,
    },
    Experiment {
        id: "converge",
        about: "writers at 0.1 to 8 times the link's rate: who moves them, and how long they are stopped",
        plan: converge::plan,
    },
    Experiment {
        id: "selfballoon-interval",
        about: "a compile with self-ballooning every 10 ms to 10 s: what it costs, and how soon freed memory is taken",
        plan: selfballoon_interval::plan,
    },
    Experiment {
        id: "balloon-migration",
        about: "a guest whose free memory was used, moved before and after its balloon has settled: time, bytes, pages",
        plan: balloon_migration::plan,
    },
    Experiment {
        id: "fctrans-reclaim",
        about: "⅛ to ¾ of a guest's RAM, used and freed beside a memcached, goes back to the host: time, throughput",
        plan: fctrans_reclaim::plan,
    },
    Experiment {
        id: "dtrack-silent",
        about: "a writer with 0 to 95 % of silent stores: pages sent again against pages changed",
        plan: dtrack_silent::plan,
    },
    Experiment {
        id: "dtrack-quicksort",
        about: "a guest that sorts: sorts per second during migration, by every way of tracking",
        plan: dtrack_quicksort::plan,
    },
    Experiment {
        id: "dtrack-ycsb",
        about: "a guest that drives a database elsewhere: requests per second and latency during migration",
        plan: dtrack_ycsb::plan,
    },
    Experiment {
        id: "postcopy-stress",
        about: "a sequential reader or writer of 8 to 512 MiB, in every mode: time, downtime, pages, faults",
        plan: postcopy_stress::plan,
    },
    Experiment {
        id: "postcopy-latency",
        about: "a random reader under post-copy: how long the guest waits for a page, timed by the guest",
        plan: postcopy_latency::plan,
    },
    Experiment {
        id: "postcopy-apps",
        about: "a compile, a web server, a download and a sender under post-copy: faults against the working set",
        plan: postcopy_apps::plan,
    },
    Experiment {
        id: "slm-footprint",
        about: "1 to 8 guests that share pages, moved together: their memory at both ends, and under a limit",
        plan: slm_footprint::plan,
    },
    Experiment {
        id: "slm-total-time",
        about: "1 to 8 guests that share pages, moved together: total time, pages and bytes",
        plan: slm_total_time::plan,
    },
    Experiment {
        id: "slm-downtime",
        about: "8 guests that share pages, moved together, at rest and while one sends: how long each stands still",
        plan: slm_downtime::plan,
    },
    Experiment {
        id: "slm-iperf",
        about: "8 guests that share pages, moved together while one sends: how long its throughput is disturbed",
        plan: slm_throughput::iperf,
    },
    Experiment {
        id: "slm-redis",
        about: "8 guests that share pages, moved together while three serve a Redis cluster: how long it is disturbed",
        plan: slm_throughput::redis,
    },
    Experiment {
        id: "gang-levels",
        about: "8 guests of which 0, 15 and 60 % of the pages are shared, moved together: time and processor time",
        plan: gang_levels::plan,
    },
    Experiment {
        id: "gang-return",
        about: "4 guests that share pages, moved three times: bytes of the way back, what is shared at the end",
        plan: gang_return::plan,
    },
    Experiment {
        id: "gang-fork",
        about: "a running guest of 512 MiB and of 4 GiB goes on as 1 and as 20 more, beside boots and QEMU alone",
        plan: gang_fork::plan,
    },
    Experiment {
        id: "huge-pages",
        about: "a random reader and a sort in huge pages: at rest, watched, after a cancel, after it came, beside QEMU",
        plan: huge_pages::plan,
    },
    Experiment {
        id: "replace",
        about: "another QEMU under a running guest of 1 and of 8 GiB: its pause and the whole, beside QEMU alone",
        plan: replace::plan,
    },
    Experiment {
        id: "fctrans-split-boot",
        about: "an idle guest of 1 to 16 GiB is split over three other hosts: time, pages, its pause",
        plan: fctrans_split::boot,
    },
    Experiment {
        id: "fctrans-split-used",
        about: "a guest of 2 GiB with an eighth to seven eighths in use is split over three other hosts: time by use",
        plan: fctrans_split::used,
    },
    Experiment {
        id: "fctrans-access",
        about: "a split guest uses 128 to 640 MiB that it never used before, and again: speed, pages that come and leave",
        plan: fctrans_access::plan,
    },
    Experiment {
        id: "fctrans-memcached",
        about: "memcached in a split guest, alone and beside a program that takes memory: requests a second",
        plan: fctrans_memcached::plan,
    },
    Experiment {
        id: "split-evict",
        about: "guests leave for a host whose link is six times slower, straight and over two memory hosts: when they are gone",
        plan: split_evict::plan,
    },
    Experiment {
        id: "split-loss",
        about: "a memory host of a split guest is killed, or says nothing: work lost with each page at one and at two",
        plan: split_loss::plan,
    },
    Experiment {
        id: "split-paging",
        about: "a program of whose memory 50, 25 or 10 % is here: words a second, waits, beside a guest that swaps",
        plan: split_paging::plan,
    },
    Experiment {
        id: "back-to-back",
        about: "migrations back and forth with pauses of 5 s, under a compile and a sender: the time that they add",
        plan: back_to_back::plan,
    },
];

/// Runs an experiment and writes its results, after each row and at the end.
///
/// # Errors
/// Where no experiment has that name, or it could not run or go on; the rows until then are kept. Missed targets and
/// failed runs are results, not errors.
pub fn run(id: &str, options: &Options) -> Result<()> {
    let experiment = find(id)?;
    let mut record = experiment.record(options)?;
    record.only(options.only.clone());
    let ended = experiment.carry_out(options, &mut record);
    if ended.is_ok() || !record.runs().is_empty() {
        println!("{}", record.finish()?.markdown());
        println!("results: {}", options.out.join(id).display());
    }
    ended
}

/// Tries each row of an experiment once that was not tried in this round of a campaign, and keeps what it finds after
/// each row; only rows whose words contain one of `only`, where there are some. Returns whether the round is over: it
/// is not where rows are left for the next campaign.
///
/// # Errors
/// As [`run`].
pub fn run_round(id: &str, out: &Path, only: &[String], round: Round) -> Result<bool> {
    let options = Options { quick: false, repeat: Some(1), only: only.to_vec(), out: out.into() };
    let experiment = find(id)?;
    let mut record = experiment.record(&options)?;
    record.only(options.only.clone());
    record.resume(round);
    experiment.carry_out(&options, &mut record)?;
    record.end_round()
}

/// Draws the plots of an experiment's runs into a directory.
///
/// # Errors
/// Where no experiment has that name, its plan cannot be made without a QEMU, or a plot cannot be written.
pub fn draw(id: &str, runs: &[Run], directory: &Path) -> Result<()> {
    let options = Options { quick: false, repeat: None, only: Vec::new(), out: directory.into() };
    (find(id)?.plan)(&options)?.draw(runs, directory)
}

/// The experiment of this name.
///
/// # Errors
/// There is none.
pub fn find(id: &str) -> Result<&'static Experiment> {
    let known = || ALL.iter().map(|experiment| experiment.id).collect::<Vec<_>>().join(", ");
    let experiment = ALL.iter().find(|experiment| experiment.id == id);
    experiment.ok_or_else(|| Error::Usage(format!("there is no experiment {id}; the experiments are {}", known())))
}

impl Experiment {
    /// An empty record of it, with a directory for its results.
    fn record(&self, options: &Options) -> Result<Record> {
        let directory = options.out.join(self.id);
        std::fs::create_dir_all(&directory)
            .map_err(|error| Error::Usage(format!("cannot make {}: {error}", directory.display())))?;
        Ok(Record::new(self.id, directory, options.quick))
    }

    /// Tries its rows where no earlier run has left anything.
    fn carry_out(&self, options: &Options, record: &mut Record) -> Result<()> {
        lab::clear_orphans();
        ksm::clear_orphan();
        (self.plan)(options)?.carry_out(record)
    }
}

/// The QEMUs that are here, the newest last.
fn qemus() -> Result<Vec<Qemu>> {
    let mut found = vec![Qemu { label: "7.2".into(), path: tools::qemu_7_2()? }];
    match tools::qemu_10_0() {
        Ok(path) => found.push(Qemu { label: "10.0".into(), path }),
        Err(error) => eprintln!("rows with QEMU 10.0 are left out: {error}"),
    }
    Ok(found)
}

/// A name for an experiment's lab that no other process uses.
fn lab_name() -> String {
    format!("bench{}", std::process::id())
}

/// Picks runs by words of their set-up.
fn is(run: &Run, values: &[(&str, &str)]) -> bool {
    values.iter().all(|(name, value)| run.config.get(*name).and_then(Value::as_str) == Some(value))
}

/// A first run of a row, for tests of what is derived from runs.
#[cfg(test)]
fn sample(workload: &str, mover: &crate::trial::Mover, qemu: &str, metrics: &[(&str, f64)]) -> Run {
    let config = [("workload", workload), ("mover", &mover.label()), ("qemu", qemu)];
    Run {
        config: config.into_iter().map(|(name, value)| (name.to_owned(), value.into())).collect(),
        baseline: mover.is_baseline(),
        repeat: 0,
        metrics: metrics.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect(),
        details: Value::Null,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_experiment_is_refused_with_the_known_ones() {
        let options = Options { quick: true, repeat: None, only: Vec::new(), out: "/nonexistent".into() };
        let error = run("dtrack", &options).unwrap_err().to_string();
        assert!(ALL.iter().all(|experiment| error.contains(experiment.id)), "{error}");
    }
}
