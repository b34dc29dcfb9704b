//! What the experiments after sharing-aware migration have in common: a gang of equal guests whose pages KSM has merged
//! at the source moves, and its memory, time, bytes and pauses are measured.

use std::time::{Duration, Instant};

use serde_json::json;

use super::gang_figures::{Before, COMPLETED, Measured, SETTLED, Source, measure, mib};
use super::runner::{Attempt, Row, Site, figure};
use super::{Record, is, lab_name, movers, qemus};
use crate::baseline::{Method, qemu};
use crate::command::PATIENCE;
use crate::error::{Error, Result};
use crate::footprint::{self, Watch};
use crate::gang::{self, Gang, Mover};
use crate::guest::Guest;
use crate::ksm::Ksm;
use crate::lab::{
    CLIENT, Lab, LabConfig, METER,
    cgroup::{Group, Limit},
};
use crate::load::iperf::IperfServer;
use crate::load::redis::{self, RedisLoad};
use crate::load::{Sample, now_us};
use crate::meter::{Meter, longest_gap};
use crate::ram;
use crate::result::{Config, Run};
use crate::stats::median;
use crate::trial::Qemu;
use crate::warm;

/// The experiments whose rows are such gangs.
const EXPERIMENTS: &[&str] =
    &["slm-footprint", "slm-total-time", "slm-downtime", "slm-iperf", "slm-redis", "gang-levels"];
/// The number of guests at which a level's share is reached.
pub(super) const MOST_GUESTS: usize = 8;
/// What every guest of this image holds, whatever it runs, MiB; and how much of it is equal in all of them.
const IMAGE_MIB: u64 = 143;
const IMAGE_ALIKE_MIB: u64 = 96;
/// How long KSM may merge, on a machine that has other work too.
pub(super) const MERGING: Duration = Duration::from_secs(600);
/// How long the guests are left alone: before KSM merges, while their own processor time is measured, and once moved.
pub(super) const REST: Duration = Duration::from_secs(3);
/// When a migration that does not end is given up.
pub(super) const LIMIT: Duration = Duration::from_secs(300);
/// The same where a destination's memory is limited, beside the time that the link needs.
const PATIENCE_IF_LIMITED: Duration = Duration::from_secs(15);
/// The limit of a destination's memory ÷ the guests' at the source.
const ROOM: f64 = 1.05;
/// The network of a guest that sends is full: it is watched for a while before.
const SENDING: Duration = Duration::from_secs(5);

/// A gang that moves once.
#[derive(Clone)]
pub(super) struct Together {
    pub(super) guests: usize,
    pub(super) memory_mib: u64,
    /// The share of the pages of eight such guests that merging saves, percent; 0: nothing is merged.
    pub(super) shared_percent: u64,
    /// Whether the destination's memory is limited to little more than the guests take at the source.
    pub(super) limited: bool,
    /// What the first guests do all the time.
    pub(super) work: Work,
    /// Whether the destination's frames are counted while the guests move, which takes processor time.
    pub(super) watched: bool,
    pub(super) mover: Mover,
    pub(super) qemu: Qemu,
}

/// What the first guests of a gang do all the time; the others rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    /// They rest, too.
    Rest,
    /// The first sends to `client`.
    Sends,
    /// Three are the nodes of a Redis cluster, whose clients are on `client`.
    Serves,
}

impl Work {
    /// The guests that work.
    fn guests(self) -> usize {
        match self {
            Self::Rest => 0,
            Self::Sends => 1,
            Self::Serves => 3,
        }
    }
}

/// The other end of what guests do.
enum Load {
    Iperf(IperfServer),
    Redis(RedisLoad),
}

impl Load {
    fn samples(&self) -> Vec<Sample> {
        match self {
            Self::Iperf(server) => server.samples(),
            Self::Redis(clients) => clients.samples(),
        }
    }
}

impl Together {
    /// What the guests do and where they go, in words.
    pub(super) fn workload(&self) -> String {
        let Self { guests, memory_mib, shared_percent, .. } = self;
        let limited = if self.limited { ", limited memory" } else { "" };
        let work = match self.work {
            Work::Rest => "",
            Work::Sends => ", one sends",
            Work::Serves => ", three serve Redis",
        };
        format!("{guests} guests of {memory_mib} MiB, {shared_percent} % shared{limited}{work}")
    }

    /// The jobs of the guest with this number.
    fn jobs(&self, number: u8, client: &str) -> String {
        let (alike, own) = fill_mib(self.memory_mib, self.shared_percent);
        let idle = format!("idle:--mib,{alike},--own-mib,{own},--seed,{number}");
        match self.work {
            Work::Sends if number == FIRST => format!("{idle};iperf3:-c,{client},-t,86400"),
            Work::Serves if usize::from(number - FIRST) < self.work.guests() => format!("{idle};{}", redis::NODE),
            _ => idle,
        }
    }
}

/// The time between two heartbeats of a guest: guests at rest take little of the processors.
const BEAT: Duration = Duration::from_millis(10);

/// The number of a gang's first guest.
const FIRST: u8 = 10;

/// What a program fills in a guest of that size, MiB: with what is equal in all guests, and with what is not.
///
/// Of N equal guests merging saves the equal part N − 1 times: the equal part is larger than the share that it saves.
fn fill_mib(memory_mib: u64, shared_percent: u64) -> (u64, u64) {
    let fill = if memory_mib >= 512 { memory_mib - 256 } else { memory_mib * 3 / 16 };
    let alike = (fill + IMAGE_MIB) * shared_percent * MOST_GUESTS as u64 / (MOST_GUESTS as u64 - 1) / 100;
    let alike = alike.saturating_sub(IMAGE_ALIKE_MIB).min(fill);
    (alike, fill - alike)
}

/// The lab of gangs of up to so many guests.
pub(super) fn lab(guests: usize) -> Result<Lab> {
    gang::lab(lab_config(), guests)
}

/// The same, whose hosts also keep what the memory of guests was that have left.
pub(super) fn lab_that_keeps(guests: usize) -> Result<Lab> {
    gang::lab_that_keeps(lab_config(), guests)
}

fn lab_config() -> LabConfig {
    LabConfig { rate_bytes_per_s: Some(movers::LINK_BYTES_PER_S), ..LabConfig::pair(&lab_name()) }
}

/// The newest QEMU.
pub(super) fn newest() -> Result<Qemu> {
    qemus()?.pop().ok_or_else(|| Error::Usage("no QEMU".into()))
}

/// QEMU's post-copy, with a connection of its own for pages that a guest waits for.
pub(super) const QEMU_POSTCOPY: Mover = Mover::Qemu(Method::PurePostcopyPreempt);
/// QEMU's pre-copy.
pub(super) const QEMU_PRECOPY: Mover = Mover::Qemu(Method::Vanilla);
/// The modes of Sterna that are judged.
pub(super) const MODES: [&str; 2] = ["--mode precopy", "--mode postcopy"];

/// Sterna with these options.
pub(super) fn sterna(options: &str, sharing: bool) -> Result<Mover> {
    Ok(Mover::Sterna { options: crate::sterna::options(options)?, sharing })
}

/// QEMU's own migrations that this QEMU has, then Sterna's without and with sharing.
pub(super) fn all_movers(qemu: &Qemu) -> Result<Vec<Mover>> {
    let known = qemu::capabilities(&qemu.path)?;
    let has = |mover: &Mover| {
        let Mover::Qemu(method) = mover else { return true };
        method.capabilities().iter().all(|name| known.iter().any(|known| known == name))
    };
    let mut movers = vec![QEMU_PRECOPY, QEMU_POSTCOPY];
    movers.retain(has);
    for sharing in [false, true] {
        for mode in MODES {
            movers.push(sterna(mode, sharing)?);
        }
    }
    Ok(movers)
}

/// Tries gangs.
pub(super) fn try_gangs(lab: &Lab, gangs: &[Together], repeats: usize, record: &mut Record) {
    super::runner::try_all(lab, gangs, repeats, record);
}

impl Attempt for Together {
    fn rows(&self) -> Vec<Row> {
        let Self { mover, qemu, .. } = self;
        let workload = self.workload();
        let values = [
            ("mover", json!(mover.label())),
            ("qemu", json!(qemu.label)),
            ("workload", json!(workload)),
            ("guests", json!(self.guests)),
            ("memory_mib", json!(self.memory_mib)),
            ("shared_percent", json!(self.shared_percent)),
            ("watched", json!(self.watched)),
            ("jobs", json!(self.jobs(FIRST, "CLIENT"))),
            ("options", mover.options()),
            ("seed", json!("the guest's number")),
        ];
        let config: Config = values.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        let words = format!("{} on QEMU {}, {workload}", mover.label(), qemu.label);
        vec![Row { words, config, baseline: mover.is_baseline() }]
    }

    fn guests(&self, lab: &Lab, name: &str) -> Vec<Guest> {
        let client = lab.host(CLIENT).map(|host| host.address.to_string()).unwrap_or_default();
        let numbers = (FIRST..).take(self.guests);
        let guest = |number: u8| {
            let mut guest = Guest::new(lab, &format!("{name}n{number}"), number, &self.jobs(number, &client));
            guest.memory_bytes = self.memory_mib << 20;
            guest.beat = BEAT;
            guest
        };
        numbers.map(guest).collect()
    }

    fn run(&self, site: &Site, runs: &mut [Run]) -> Result<()> {
        measure(runs, |measured| self.migrate(site.lab, site.guests, measured))
    }

    fn experiments(&self) -> &'static [&'static str] {
        EXPERIMENTS
    }

    fn tell(&self, run: &Run) -> String {
        let is = |name: &str| run.metrics.get(name).is_some_and(|value| *value > 0.0);
        let word = [("killed", "killed, "), ("refused", "refused, ")].into_iter().find(|(name, _)| is(name));
        let word = word.map_or("", |(_, word)| word);
        let [ms, pages, settled, downtime] =
            ["total_ms", "pages_sent", SETTLED, "downtime_ms"].map(|name| figure(run, name));
        format!("{word}total {ms} ms, {pages} pages, settled {settled}, downtime {downtime} ms")
    }
}

impl Together {
    /// Starts the guests, lets KSM merge their pages, and moves them. Figures that were measured until an error are
    /// kept. A destination that needs more than its limit, and so is killed or refuses pages, is no error.
    fn migrate(&self, lab: &Lab, guests: &[Guest], measured: &mut Measured) -> Result<()> {
        let memory_bytes = self.memory_mib << 20;
        // KSM's settings come back once the guests are gone.
        let ksm = Ksm::take()?;
        let meter = Meter::start(lab.host(METER)?)?;
        let server =
            if self.work == Work::Sends { Some(Load::Iperf(IperfServer::start(lab.host(CLIENT)?)?)) } else { None };
        let (gang, source, _warm) = self.start(lab, guests, &ksm, measured)?;
        let load = match self.work {
            Work::Serves => Some(Load::Redis(self.redis(lab, guests)?)),
            _ => server,
        };
        let settled_us = now_us();
        if load.is_some() {
            std::thread::sleep(SENDING);
        }
        let idle = own_cpu_share(lab)?;
        let _limit = self.limited.then(|| limit(lab, &source, measured)).transpose()?;

        let before = Before::read(lab)?;
        let watch = self.watched.then(|| lab.host("b").map(|host| Watch::start(host.group.clone(), memory_bytes)));
        let watch = watch.transpose()?;
        let (begin_us, begin) = (now_us(), Instant::now());
        let moved = gang.migrate(lab, "b", &self.mover, self.patience(&source));
        let (wall, end_us) = (begin.elapsed(), now_us());
        let after = Before::read(lab)?;
        measured.note_peak(watch.map(Watch::finish), &source);
        measured.note_costs(&before, &after, wall, idle);
        let killed = after.killed.saturating_sub(before.killed);
        measured.note("killed", killed as f64);
        measured.note(COMPLETED, f64::from(u8::from(moved.is_ok())));
        let refused = moved.as_ref().is_err_and(|error| self.limited && is_refusal(error));
        measured.note("refused", f64::from(u8::from(refused)));
        let (gang, moved) = match moved {
            Err(error) if killed > 0 || refused => {
                measured.details = json!({ "no_room": error.to_string() });
                lab.end_machines();
                return Ok(());
            }
            moved => moved?,
        };
        measured.note_moved(&moved, &source);
        std::thread::sleep(REST);
        measured.note_settled(footprint::of(&gang.rams(memory_bytes)?)?, &source);
        let gaps = guests.iter().map(|guest| longest_gap(&meter.arrivals(guest.address()), begin_us, end_us));
        measured.note_gaps(&gaps.filter_map(|gap| Some(gap?.ms)).collect::<Vec<_>>());
        if let Some(load) = load {
            std::thread::sleep(SENDING);
            measured.note_throughput(&load.samples(), settled_us, begin_us, now_us());
        }
        Ok(())
    }

    /// The clients of the guests' cluster.
    fn redis(&self, lab: &Lab, guests: &[Guest]) -> Result<RedisLoad> {
        let nodes: Vec<_> = guests.iter().take(self.work.guests()).map(Guest::address).collect();
        RedisLoad::start(lab.host(CLIENT)?, &nodes)
    }

    /// When a migration that does not end is given up. Where memory is limited, a post-copy may wait for ever.
    fn patience(&self, source: &Source) -> Duration {
        let link = Duration::from_secs_f64((source.footprint.pages * 4096) as f64 / movers::LINK_BYTES_PER_S as f64);
        if self.limited { PATIENCE_IF_LIMITED + 3 * link } else { LIMIT }
    }

    /// Starts the guests and lets KSM merge what it can. The memory that their destination takes is warm.
    pub(super) fn start(
        &self,
        lab: &Lab,
        guests: &[Guest],
        ksm: &Ksm,
        measured: &mut Measured,
    ) -> Result<(Gang, Source, warm::Kept)> {
        let gang = Gang::start(lab, guests, &self.qemu.path, &self.mover)?;
        guests.iter().try_for_each(is_filled)?;
        let source = self.settle(lab, ksm, &gang, measured)?;
        Ok((gang, source, warm::Kept::start()?))
    }

    /// Lets KSM merge what it can, and counts the guests' memory.
    fn settle(&self, lab: &Lab, ksm: &Ksm, gang: &Gang, measured: &mut Measured) -> Result<Source> {
        std::thread::sleep(REST);
        let rams = gang.rams(self.memory_mib << 20)?;
        if self.shared_percent > 0 {
            let begin = Instant::now();
            ksm.settle(MERGING, || Ok(footprint::of(&rams)?.frames))?;
            measured.note("merging_ms", begin.elapsed().as_secs_f64() * 1e3);
        }
        let footprint = footprint::of(&rams)?;
        let nonzero_frames = footprint::nonzero_frames(&rams)?;
        let group = &lab.host("a")?.group;
        let guests_bytes = footprint.frames * 4096;
        let others_bytes = others_bytes(group, gang, guests_bytes)?;
        let room_bytes = (guests_bytes as f64 * ROOM) as u64 + others_bytes;
        measured.note("source_mib", mib(guests_bytes));
        measured.note("source_frames", footprint.frames as f64);
        measured.note("source_nonzero_frames", nonzero_frames as f64);
        measured.note("source_pages", footprint.pages as f64);
        measured.note("source_others_mib", mib(others_bytes));
        measured.note("saved_percent", 100.0 * (1.0 - footprint.frames as f64 / footprint.pages.max(1) as f64));
        Ok(Source { footprint, nonzero_frames, room_bytes })
    }
}

/// Waits until a guest runs and has filled its memory.
pub(super) fn is_filled(guest: &Guest) -> Result<()> {
    guest.wait_until_up(PATIENCE)?;
    guest.wait_until_says("IDLE ready", PATIENCE)
}

/// What the guests' processes and their host's daemon take beside the guests' RAM. Code that QEMU has translated since
/// the guests booted does not move: the destination translates what still runs there.
fn others_bytes(group: &Group, gang: &Gang, guests_bytes: u64) -> Result<u64> {
    let translated = gang.pids()?.into_iter().map(ram::translated_bytes).sum::<Result<u64>>()?;
    Ok(group.anonymous_bytes()?.saturating_sub(guests_bytes + translated) + group.kernel_bytes()?)
}

/// Whether a destination of Sterna's has refused the guests' pages because it has no memory for them. In post-copy the
/// guests then wait there, and the migration does not end.
fn is_refusal(error: &Error) -> bool {
    match error {
        Error::Migration { reason, .. } => reason.contains("no memory left for the guest"),
        error => matches!(error, Error::Timeout { .. }),
    }
}

/// The processor time that both hosts take while nothing moves, as a share of one processor.
fn own_cpu_share(lab: &Lab) -> Result<f64> {
    let (before, begin) = (Before::read(lab)?, Instant::now());
    std::thread::sleep(REST);
    Ok((Before::read(lab)?.cpu - before.cpu).as_secs_f64() / begin.elapsed().as_secs_f64())
}

/// Limits the destination's memory.
fn limit(lab: &Lab, source: &Source, measured: &mut Measured) -> Result<Limit> {
    measured.note("limit_mib", mib(source.room_bytes));
    lab.host("b")?.group.limit(source.room_bytes)
}

/// Whether this is a run of that workload by that mover.
pub(super) fn is_row(run: &Run, workload: &str, mover: &Mover) -> bool {
    is(run, &[("workload", workload), ("mover", &mover.label())])
}

/// The median of a metric over the runs of that workload by that mover.
pub(super) fn middle(runs: &[Run], workload: &str, mover: &Mover, metric: &str) -> Option<f64> {
    let chosen = runs.iter().filter(|run| is_row(run, workload, mover));
    median(&chosen.filter_map(|run| run.metrics.get(metric).copied()).collect::<Vec<_>>())
}

/// The number of guests of a workload without a limit in which nobody sends, as [`Together::workload`] names it: the
/// place of its rows in a plot.
pub(super) fn guests_of(workload: &str) -> Option<f64> {
    let (guests, rest) = workload.split_once(" guests of ")?;
    guests.parse().ok().filter(|_| rest.ends_with("shared"))
}

/// A run with these metrics, for tests of what is derived from runs.
#[cfg(test)]
pub(super) fn sample(gang: &Together, repeat: usize, metrics: &[(&str, f64)]) -> Run {
    let mut run = gang.rows().remove(0).run(repeat);
    run.metrics = metrics.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
    run
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gang(shared_percent: u64, limited: bool, work: Work) -> Together {
        let qemu = Qemu { label: "10.0".into(), path: "/nonexistent".into() };
        let mover = QEMU_PRECOPY;
        Together { guests: 8, memory_mib: 1024, shared_percent, limited, work, watched: false, mover, qemu }
    }

    #[test]
    fn what_is_equal_is_as_much_as_eight_guests_need_to_save_the_share() {
        let (alike, own) = fill_mib(1024, 60);
        assert_eq!(alike + own, 768);
        let saved = (alike + IMAGE_ALIKE_MIB) as f64 * 7.0 / 8.0 / (768 + IMAGE_MIB) as f64;
        assert!((0.595..0.605).contains(&saved), "{saved}");
        assert_eq!(fill_mib(1024, 0).0, 0);
        assert!(fill_mib(256, 60).1 < 256);
    }

    #[test]
    fn guests_differ_in_their_own_pages_and_only_the_first_one_sends() {
        let gang = gang(60, false, Work::Sends);
        assert!(gang.jobs(10, "10.77.0.100").ends_with(";iperf3:-c,10.77.0.100,-t,86400"));
        assert!(gang.jobs(11, "10.77.0.100").ends_with("--seed,11"));
        let gang = self::gang(60, false, Work::Serves);
        assert!(gang.jobs(12, "10.77.0.100").contains("redis-server"));
        assert!(gang.jobs(13, "10.77.0.100").ends_with("--seed,13"));
    }

    #[test]
    fn a_destination_without_memory_is_told_from_other_failures() {
        let failed = |reason: &str| Error::Migration { vm: "g".into(), status: "failed".into(), reason: reason.into() };
        assert!(is_refusal(&failed("at the destination: this host has no memory left for the guest (5 bytes, kept)")));
        assert!(!is_refusal(&failed("the connection was lost")));
    }

    #[test]
    fn a_workload_is_at_its_number_of_guests_and_special_ones_are_in_no_plot() {
        assert_eq!(guests_of(&gang(60, false, Work::Rest).workload()), Some(8.0));
        assert_eq!(guests_of(&gang(60, true, Work::Rest).workload()), None);
        assert_eq!(guests_of(&gang(60, false, Work::Sends).workload()), None);
    }
}
