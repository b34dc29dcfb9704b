//! One trial: a fresh guest is started, put under load, moved once, and measured from every side. Everything is
//! measured in the same way for every mover.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna_api::{MigrateOptions, Report, Status};

use crate::Lab;
use crate::baseline::{BaselineReport, BaselineVm, Method, Ram};
use crate::command::{PATIENCE, wait_for};
use crate::error::{Error, Result};
use crate::guest::{Balloon, Guest, plugged};
use crate::lab::{CLIENT, METER, net};
use crate::load::memcached::{Load, LoadConfig, LoadRecord};
use crate::load::{mean_between, now_us};
use crate::meter::{self, Arrival, Line, Meter};
use crate::ram;
use crate::stats::median;
use crate::sterna::{self, SternaVm};
use crate::warm::{self, Touched};

/// The port where memcached listens in a guest.
pub(crate) const MEMCACHED_PORT: u16 = 11211;
/// How long a guest may take to start, on a machine that has other work too.
const START: Duration = PATIENCE;
/// How often a settling balloon is adjusted, and how long it must not have changed to count as settled.
const ADJUST: Duration = Duration::from_secs(1);
const AT_REST: Duration = Duration::from_secs(4);
/// The default time after which a migration that does not end is given up.
pub const LIMIT: Duration = Duration::from_secs(90);

/// Faults of a guest on pages that had to come from the source: as Sterna's report counts them, or QEMU's
/// `postcopy-requests`.
pub const NETWORK_FAULTS: &str = "network_faults";
/// Pages that the guest touched within the requested time, just before it was moved.
pub const WORKING_SET: &str = "working_set_pages";
/// How long the guest's threads waited for such pages, milliseconds: Sterna adds the threads' waits up, QEMU counts the
/// time in which all processors waited at once. With one processor both are the same.
pub const BLOCKTIME: &str = "blocktime_ms";

/// The mover of the guest.
#[derive(Debug, Clone)]
pub enum Mover {
    /// Sterna.
    Sterna(MigrateOptions),
    /// QEMU by itself.
    Qemu(Method, Ram),
}

impl Mover {
    /// Its name in a table.
    #[must_use]
    pub fn label(&self) -> String {
        match self {
            Self::Sterna(options) => {
                let streams =
                    if options.streams == 1 { "1 stream".into() } else { format!("{} streams", options.streams) };
                let others = sterna::arguments(&MigrateOptions { streams: 1, ..options.clone() }).join(" ");
                format!("sterna, {streams}{}", others.replace(" --", "--").replace("--", ", "))
            }
            Self::Qemu(method, Ram::Plain) => format!("qemu {}", method.label()),
            Self::Qemu(method, Ram::SharedFile) => format!("qemu {}, shared file", method.label()),
            Self::Qemu(method, Ram::Mergeable) => format!("qemu {}, mergeable", method.label()),
        }
    }

    /// Its options, for a row's set-up.
    #[must_use]
    pub fn options(&self) -> Value {
        match self {
            Self::Sterna(options) => json!(options),
            Self::Qemu(method, ram) => json!({ "method": method, "ram": ram, "max_bandwidth": "unlimited" }),
        }
    }

    /// Whether this is the baseline.
    #[must_use]
    pub fn is_baseline(&self) -> bool {
        matches!(self, Self::Qemu(..))
    }
}

/// A QEMU to use.
#[derive(Debug, Clone)]
pub struct Qemu {
    /// Its version in short, such as `7.2`.
    pub label: String,
    /// Its program.
    pub path: PathBuf,
}

/// The set-up of a trial.
pub struct Setup<'a> {
    /// The lab, in which the guest moves from host `a` to host `b`.
    pub lab: &'a Lab,
    /// The guest.
    pub guest: Guest,
    /// The line's beginning by which a program of the guest says that its memory is filled, where one is to be waited
    /// for.
    pub ready: Option<&'static str>,
    /// The mover.
    pub mover: &'a Mover,
    /// The QEMU that runs it.
    pub qemu: &'a Qemu,
    /// Load on its memcached.
    pub load: Option<LoadConfig>,
    /// How long it runs before it is moved, once it is ready.
    pub settle: Duration,
    /// How long its working set is measured after that; zero for not at all.
    pub working_set: Duration,
    /// How long it is watched afterwards.
    pub after: Duration,
    /// When a migration that does not end is given up; Sterna's own timeout, where it has one, comes first.
    pub limit: Duration,
    /// The function that is told what happens next.
    pub say: &'a dyn Fn(&str),
}

/// The result of a trial.
#[derive(Debug, Default)]
pub struct Trial {
    /// Numbers, by name with unit.
    pub metrics: BTreeMap<String, f64>,
    /// The mover's own report.
    pub report: Value,
    /// Sterna's report, where Sterna was the mover.
    pub sterna: Option<Report>,
    /// The end of the time when the guest was left alone, microseconds since 1970: then its RAM was counted and this
    /// machine's touched.
    pub settled_us: i64,
    /// When the request was made, microseconds since 1970.
    pub begin_us: i64,
    /// When the mover said that it was done.
    pub end_us: i64,
    /// Heartbeats.
    pub arrivals: Vec<Arrival>,
    /// What the guest's checker reported.
    pub checker: Vec<Line>,
    /// What all of its programs reported.
    pub lines: Vec<Line>,
    /// What the load saw.
    pub load: Option<LoadRecord>,
}

/// The guest while somebody runs it.
enum Running {
    Sterna(SternaVm),
    Qemu(Box<BaselineVm>),
}

/// The counters before the migration, which are subtracted.
struct Before {
    cpu: Duration,
    link: (u64, u64),
}

impl Before {
    fn read(lab: &Lab) -> Result<Self> {
        let cpu = ["a", "b"]
            .iter()
            .try_fold(Duration::ZERO, |sum, host| Ok::<_, crate::Error>(sum + lab.host(host)?.group.cpu_time()?))?;
        Ok(Self { cpu, link: net::link_bytes(lab.name(), "a")? })
    }
}

/// Runs a trial. Guest, load and meter are gone afterwards; the lab stays.
///
/// # Errors
/// Where the guest does not start or the migration fails.
pub fn run(setup: &Setup) -> Result<Trial> {
    plugged(setup.lab, std::slice::from_ref(&setup.guest), || run_plugged(setup))
}

/// Runs a trial where the guest's network device is in place.
///
/// # Errors
/// As [`run`].
pub fn run_plugged(setup: &Setup) -> Result<Trial> {
    let Setup { lab, guest, qemu, .. } = setup;
    let meter = Meter::start(lab.host(METER)?)?;
    (setup.say)(&format!("starting guest {} on host a: {}", guest.name, guest.jobs));
    // What is touched of a huge page cannot be told.
    let options: &[&str] = if setup.working_set.is_zero() { &[] } else { &["--huge-pages", "off"] };
    let running = match setup.mover {
        Mover::Sterna(_) => Running::Sterna(SternaVm::start_with(lab, "a", guest, &qemu.path, options)?),
        Mover::Qemu(_, ram) => Running::Qemu(Box::new(BaselineVm::start(lab, "a", guest, &qemu.path, *ram)?)),
    };
    guest.wait_until_up(START)?;
    if let Some(ready) = setup.ready {
        guest.wait_until_says(ready, START)?;
    }
    (setup.say)("the guest is up");
    // Before anything is measured: it takes a processor for seconds.
    let warm = Touched::new((guest.memory_bytes + (256 << 20)).min(warm::available_bytes()? / 3))?;
    let server = SocketAddr::from((guest.address(), MEMCACHED_PORT));
    let load = setup.load.as_ref().map(|config| Load::start(lab.host(CLIENT)?, server, config)).transpose()?;
    std::thread::sleep(setup.settle);

    let mut trial = Trial::default();
    if guest.balloon == Balloon::Settled {
        trial.settle_balloon(&running)?;
    }
    trial.settled_us = now_us();
    trial.note_memory(&running, guest, setup.working_set)?;
    drop(warm);
    let before = Before::read(lab)?;
    (setup.say)("moving it to host b");
    trial.begin_us = now_us();
    let running = match running {
        Running::Sterna(vm) => trial.move_by_sterna(vm, setup)?,
        Running::Qemu(vm) => trial.move_by_qemu(vm, setup)?,
    };
    trial.end_us = now_us();
    trial.note_costs(&before, &Before::read(lab)?);
    std::thread::sleep(setup.after);

    trial.load = load.map(Load::finish);
    trial.arrivals = meter.arrivals(guest.address());
    trial.checker = meter.lines(guest.address(), "CHECKER");
    trial.lines = meter.all_lines(guest.address());
    trial.note_outside_view(&meter.lines(guest.address(), "DIRTIER"));
    drop(running);
    Ok(trial)
}

impl Trial {
    fn note(&mut self, name: &str, value: f64) {
        self.metrics.insert(name.into(), value);
    }

    fn note_some(&mut self, name: &str, value: Option<f64>) {
        value.into_iter().for_each(|value| self.note(name, value));
    }

    /// Makes Sterna take the guest's free memory, until its balloon does not grow any more.
    fn settle_balloon(&mut self, running: &Running) -> Result<()> {
        let Running::Sterna(vm) = running else {
            return Err(Error::Usage("a guest that runs without Sterna has no balloon that Sterna adjusts".into()));
        };
        vm.balloon(&["--auto", "--interval", &format!("{}ms", ADJUST.as_millis())])?;
        let mut last = (0, Instant::now());
        let bytes = wait_for("a balloon at rest", START, || {
            std::thread::sleep(ADJUST / 4);
            let bytes = vm.show()?.balloon.map_or(0, |balloon| balloon.size_bytes);
            if bytes != last.0 {
                last = (bytes, Instant::now());
            }
            Ok((bytes > 0 && last.1.elapsed() >= AT_REST).then_some(bytes))
        })?;
        self.note("balloon_mib", (bytes >> 20) as f64);
        Ok(())
    }

    /// Notes the content of the guest's RAM, where it is a file, and its working set where that is asked for.
    fn note_memory(&mut self, running: &Running, guest: &Guest, working_set: Duration) -> Result<()> {
        let pid = match running {
            Running::Sterna(vm) => vm.pid()?,
            Running::Qemu(vm) => vm.pid(),
        };
        if !working_set.is_zero() {
            let pages = ram::working_set(pid, guest.memory_bytes, working_set)?;
            self.note(WORKING_SET, pages as f64);
        }
        if let Some(usage) = ram::file_of(pid, guest.memory_bytes).ok().and_then(|file| ram::usage(&file).ok()) {
            self.note("nonzero_pages", usage.nonzero_pages as f64);
            self.note("allocated_pages", usage.allocated_pages as f64);
        }
        Ok(())
    }

    fn move_by_sterna(&mut self, mut vm: SternaVm, setup: &Setup) -> Result<Running> {
        let Mover::Sterna(options) = setup.mover else { return Ok(Running::Sterna(vm)) };
        let mut options = options.clone();
        // Sterna is given up when QEMU would be.
        options.timeout_ms.get_or_insert(setup.limit.as_secs_f64() * 1e3);
        let report = vm.migrate(setup.lab, "b", &options)?;
        let completed = report.status == Status::Completed;
        self.note_end(report.total_ms, completed, completed.then_some(report.downtime_ms));
        self.note("bytes_on_wire", report.bytes_on_wire as f64);
        self.note("setup_ms", report.setup_ms);
        self.note("scan_ms", report.tracking.scan_ms);
        self.note("scans", report.tracking.scans as f64);
        self.note("write_faults", report.tracking.write_faults as f64);
        self.note("pages_sent", report.pages.sent as f64);
        self.note("rounds", report.rounds.len() as f64);
        self.note("fake_dirty_pages", report.pages.fake_dirty_tracked as f64);
        self.note("silent_pages", report.pages.fake_dirty_content as f64);
        let rates = report.rounds.iter().map(|round| round.dirty_rate_pages_per_s).filter(|rate| *rate > 0.0);
        self.note_some("dirty_pages_per_s", median(&rates.collect::<Vec<_>>()));
        let predicted = report.convergence.predicted_downtime_ms.filter(|ms| *ms > 0.0);
        self.note_some("predicted_downtime_ms", predicted);
        if report.postcopy.residue_pages > 0 {
            self.note_postcopy(&report);
        }
        self.report = json!(report);
        self.sterna = Some(report);
        Ok(Running::Sterna(vm))
    }

    fn move_by_qemu(&mut self, vm: Box<BaselineVm>, setup: &Setup) -> Result<Running> {
        let Mover::Qemu(method, _) = setup.mover else { return Ok(Running::Qemu(vm)) };
        let (vm, report) = vm.migrate(setup.lab, "b", *method, setup.limit)?;
        let BaselineReport { total_ms, with_start_ms, bytes_on_wire, .. } = report;
        // The time counts from the request on, as Sterna's. QEMU's own figure leaves out the start of its destination.
        self.note_end(with_start_ms, !report.given_up, report.pause.as_ref().map(|pause| pause.downtime_ms));
        self.note("setup_ms", with_start_ms - total_ms);
        self.note("bytes_on_wire", bytes_on_wire as f64);
        let ram = &report.query_migrate["ram"];
        self.note("pages_sent", ram["normal"].as_f64().unwrap_or(0.0));
        self.note("rounds", ram["dirty-sync-count"].as_f64().unwrap_or(0.0));
        self.note_some("dirty_pages_per_s", ram["dirty-pages-rate"].as_f64().filter(|rate| *rate > 0.0));
        if method.postcopy_after_pass().is_some() {
            self.note_some(NETWORK_FAULTS, ram["postcopy-requests"].as_f64());
            self.note_some(BLOCKTIME, report.blocktime_ms);
        }
        self.report = json!(report);
        Ok(Running::Qemu(Box::new(vm)))
    }

    /// Notes how long it took and how long the guest stood still, or how long it was tried in vain.
    fn note_end(&mut self, ms: f64, completed: bool, downtime_ms: Option<f64>) {
        self.note("completed", f64::from(u8::from(completed)));
        self.note(if completed { "total_ms" } else { "given_up_ms" }, ms);
        self.note_some("downtime_ms", downtime_ms);
    }

    /// Notes what came after Sterna's switchover.
    fn note_postcopy(&mut self, report: &Report) {
        let (faults, pages, postcopy) = (&report.faults, &report.pages, &report.postcopy);
        for (name, value) in [
            (NETWORK_FAULTS, faults.count as f64),
            (BLOCKTIME, faults.blocktime_ms),
            ("local_faults", faults.local as f64),
            ("fault_p50_us", faults.latency_us.p50),
            ("fault_p99_us", faults.latency_us.p99),
            ("fault_max_us", faults.latency_us.max),
            ("faulted_pages", pages.faulted as f64),
            ("pushed_pages", pages.pushed as f64),
            ("duplicate_pages", pages.duplicate as f64),
            ("residue_pages", postcopy.residue_pages as f64),
            ("residue_ms", postcopy.residue_ms),
            ("postcopy_ms", postcopy.ms),
        ] {
            self.note(name, value);
        }
    }

    /// Notes processor time and link bytes of everything on both hosts, including the guest's own work.
    fn note_costs(&mut self, before: &Before, after: &Before) {
        self.note("wall_ms", (self.end_us - self.begin_us) as f64 / 1e3);
        self.note("cpu_s", after.cpu.saturating_sub(before.cpu).as_secs_f64());
        self.note("link_bytes", after.link.0.saturating_sub(before.link.0) as f64);
    }

    /// Notes what meter and clients saw before and during the migration.
    fn note_outside_view(&mut self, dirtier: &[Line]) {
        const SECOND: i64 = 1_000_000;
        let (begin, end) = (self.begin_us, self.end_us);
        if let Some(gap) = meter::longest_gap(&self.arrivals, begin, end + SECOND) {
            self.note("gap_ms", gap.ms);
            self.note("gap_lost", gap.lost as f64);
        }
        if let Some(gap) = meter::longest_gap(&self.arrivals, begin - 2 * SECOND, begin - SECOND / 10) {
            self.note("gap_before_ms", gap.ms);
        }
        let delivery = meter::delivery(&self.arrivals, begin, end + SECOND);
        self.note("heartbeats_lost", delivery.lost as f64);
        self.note("heartbeats_reordered", delivery.reordered as f64);
        if let Some(load) = &self.load {
            let before = mean_between(&load.samples, begin - 3 * SECOND, begin);
            let during = mean_between(&load.samples, begin, end);
            let longest = load.longest_us as f64 / 1e3;
            self.note_some("requests_per_s_before", before);
            self.note_some("requests_per_s_during", during);
            self.note("longest_request_ms", longest);
        }
        // A line covers the second before it.
        let mean = |from: i64, to: i64| {
            let inside = dirtier.iter().filter(|line| line.at_us - SECOND >= from && line.at_us <= to);
            let values: Vec<f64> = inside.filter_map(|line| line.number("writes_per_s")).collect();
            (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
        };
        let slack = SECOND / 5;
        self.note_some("writes_per_s_before", mean(begin - 4 * SECOND, begin));
        self.note_some("writes_per_s_during", mean(begin - slack, end + slack));
    }
}
