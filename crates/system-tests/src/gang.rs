//! Two hosts and guests under watch that share pages and move together.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use sterna_bench::command::{PATIENCE, wait_for};
use sterna_bench::footprint::{self, Footprint, Watch};
use sterna_bench::gang::{self, Gang, Moved, Mover};
use sterna_bench::lab::{Host, METER};
use sterna_bench::load::now_us;
use sterna_bench::meter::{Line, Meter, delivery};
use sterna_bench::{Guest, Lab, LabConfig, sterna};

use crate::census::ram_bytes;
use crate::cli::{self, Answer, Attempt};
use crate::plan::Plan;
use crate::site::{files, print_logs};

/// How long a move of a gang may take.
const MOVE: Duration = Duration::from_secs(600);

/// Two hosts `a` and `b`, and guests of one trust group in private memory that began on `a`.
pub struct GangSite {
    /// The hosts.
    pub lab: Lab,
    /// The guests.
    pub guests: Vec<Guest>,
    meter: Meter,
    /// `None` while they move.
    gang: Option<Gang>,
    there: &'static str,
}

impl Drop for GangSite {
    fn drop(&mut self) {
        if std::thread::panicking() {
            print_logs(&self.lab);
        }
    }
}

impl GangSite {
    /// Brings the lab up and starts so many guests with these jobs; all are up and their checkers at work. Where the
    /// jobs say `{number}`, each guest has its own: a checker with a seed knows another guest's page from its own.
    ///
    /// # Panics
    /// Where that fails.
    #[must_use]
    pub fn start(guests: u8, jobs: &str) -> Self {
        Self::with(gang::lab, guests, jobs)
    }

    /// The same on hosts that keep what leaves them.
    ///
    /// # Panics
    /// Where that fails.
    #[must_use]
    pub fn that_keeps(guests: u8, jobs: &str) -> Self {
        Self::with(gang::lab_that_keeps, guests, jobs)
    }

    fn with(lab: impl FnOnce(LabConfig, usize) -> sterna_bench::error::Result<Lab>, guests: u8, jobs: &str) -> Self {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let name = format!("sg{}x{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let plan = Plan::private();
        let [a, b] = plan.qemu.clone();
        let config = LabConfig {
            rate_bytes_per_s: None,
            qemu: [("a".to_owned(), a), ("b".to_owned(), b)].into(),
            ..LabConfig::pair(&name)
        };
        let lab = lab(config, guests.into()).expect("a lab");
        let guests: Vec<_> = (0..guests)
            .map(|number| {
                let mut guest = Guest::new(
                    &lab,
                    &format!("g{number}"),
                    10 + number,
                    &jobs.replace("{number}", &number.to_string()),
                );
                guest.memory_bytes = plan.memory_bytes;
                lab.create_tap(&guest.tap()).expect("a tap");
                guest
            })
            .collect();
        let meter = Meter::start(lab.host(METER).expect("a meter")).expect("a meter");
        let mover = mover("--mode precopy", true);
        let gang = Gang::start(&lab, &guests, &plan.qemu[0], &mover).expect("the guests");
        let site = Self { lab, guests, meter, gang: Some(gang), there: "b" };
        site.guests.iter().for_each(|guest| guest.wait_until_up(PATIENCE).expect("the guest comes up"));
        site.checkers_are_well();
        site
    }

    fn gang(&self) -> &Gang {
        self.gang.as_ref().expect("the guests run")
    }

    /// The memory that the guests' RAM takes.
    ///
    /// # Panics
    /// Where one has ended.
    #[must_use]
    pub fn footprint(&self) -> Footprint {
        let rams = self.gang().rams(self.guests[0].memory_bytes).expect("their RAM");
        footprint::of(&rams).expect("their frames")
    }

    /// The most mappings that a guest's process has.
    ///
    /// # Panics
    /// Where one has ended.
    #[must_use]
    pub fn most_mappings(&self) -> usize {
        let pids = self.gang().pids().expect("they run").into_iter();
        let maps = pids.map(|pid| std::fs::read(format!("/proc/{pid}/maps")).expect("its mappings"));
        maps.map(|maps| maps.iter().filter(|byte| **byte == b'\n').count()).max().unwrap_or(0)
    }

    /// Watches the frames that guests take at the host that they are moved to next.
    ///
    /// # Panics
    /// There is no such host.
    #[must_use]
    pub fn watch_there(&self) -> Watch {
        let group = self.lab.host(self.there).expect("a host").group.clone();
        Watch::start(group, self.guests[0].memory_bytes)
    }

    /// Moves all guests to the other host with these options, and compares both sides.
    ///
    /// # Panics
    /// Where one does not move, or a page differs.
    pub fn migrate(&mut self, options: &str, sharing: bool) -> Vec<Moved> {
        let mover = mover(&format!("{options} --verify"), sharing);
        let gang = self.gang.take().expect("the guests run");
        let (gang, moved) = gang.migrate(&self.lab, self.there, &mover, MOVE).expect("they move");
        self.gang = Some(gang);
        self.there = if self.there == "b" { "a" } else { "b" };
        for one in &moved {
            assert_eq!(one.report["verify"]["mismatches"], 0, "{:#}", one.report);
            assert!(one.report["verify"]["pages"].as_u64() > Some(0), "{:#}", one.report);
        }
        moved
    }

    /// Every guest's checker reports, after this moment, that every page it ever wrote is as it wrote it.
    ///
    /// # Panics
    /// Where one complains, or is not heard of.
    pub fn checkers_are_well(&self) {
        self.are_well(&self.guests.iter().map(|guest| guest.name.as_str()).collect::<Vec<_>>());
    }

    /// The same of these guests.
    ///
    /// # Panics
    /// As [`checkers_are_well`](Self::checkers_are_well).
    pub fn are_well(&self, names: &[&str]) {
        let from = now_us();
        for guest in self.guests.iter().filter(|guest| names.contains(&guest.name.as_str())) {
            let lines = || self.meter.lines(guest.address(), "CHECKER");
            let fresh = |line: &Line| line.text.starts_with("CHECKER ok") && line.at_us > from + 1_500_000;
            let heard = wait_for("the checker's word", PATIENCE, || {
                let lines = lines();
                let complaints: Vec<&Line> = lines.iter().filter(|line| line.text.starts_with("CHECKER BAD")).collect();
                assert!(complaints.is_empty(), "{}: {complaints:#?}", guest.name);
                Ok(lines.into_iter().find(fresh))
            });
            let line = heard.unwrap_or_else(|error| panic!("{} has come to harm: {error}", guest.name));
            assert_eq!(line.number("bad"), Some(0.0), "{}: {line:?}", guest.name);
            let twice = delivery(&self.meter.arrivals(guest.address()), i64::MIN, i64::MAX).duplicate;
            assert_eq!(twice, 0, "{} ran on two hosts", guest.name);
        }
    }

    /// Moves these guests from one host to the other in pre-copy, and does something while all of them are under way.
    /// Returns how each ended.
    ///
    /// # Panics
    /// Where they do not get under way, or do not end.
    pub fn disturbed(&self, names: &[&str], [from, to]: [&str; 2], disturb: impl FnOnce(&Host)) -> Vec<String> {
        let source = self.lab.host(from).expect("a host");
        cli::limit_bandwidth(source, Some(3_000_000));
        let attempt = self.begin(names, from, &self.lab.host(to).expect("a host").listen(), &["--mode", "precopy"]);
        self.all_are_in("precopy", names, from);
        disturb(source);
        cli::limit_bandwidth(source, None);
        statuses(&attempt.end())
    }

    /// Begins to move these guests from a host to the daemon at an address.
    #[must_use]
    pub fn begin(&self, names: &[&str], from: &str, address: &str, options: &[&str]) -> Attempt {
        let from = self.lab.host(from).expect("a host");
        let head: Vec<&str> = ["migrate"].into_iter().chain(names.iter().copied()).collect();
        Attempt::run(from, &[&head[..], &["--to", address, "--json", "-"], options].concat())
    }

    /// Waits until the migrations of all these guests from a host are in this phase.
    ///
    /// # Panics
    /// Where they never are.
    pub fn all_are_in(&self, phase: &str, names: &[&str], from: &str) {
        let of = |name: &str| self.shown(name, from)["migration"]["phase"].as_str().map(str::to_owned);
        let all = || Ok(names.iter().all(|name| of(name).as_deref() == Some(phase)).then_some(()));
        wait_for(&format!("all of them in {phase}"), PATIENCE, all).unwrap_or_else(|error| panic!("{error}"));
    }

    /// Waits until each of these guests runs on one of two hosts and the other knows nothing of it, and moves those
    /// that are on the first to the second, comparing both sides. All are well then, and the first host has nothing
    /// left.
    ///
    /// # Panics
    /// Where it is not so.
    pub fn gather(&self, names: &[&str], [from, to]: [&str; 2]) {
        let state = |name: &str, host| self.shown(name, host)["state"].as_str().unwrap_or("none").to_owned();
        let mut seen = Vec::new();
        let settled = wait_for("each guest to run on one host", PATIENCE, || {
            seen = names.iter().map(|name| [state(name, from), state(name, to)]).collect();
            let one = |states: &[String; 2]| *states == ["running", "none"] || *states == ["none", "running"];
            Ok(seen.iter().all(one).then_some(()))
        });
        settled.unwrap_or_else(|error| panic!("{error}: {names:?} are {seen:?}"));
        self.are_well(names);
        let stayed = names.iter().zip(&seen).filter(|(_, states)| states[0] == "running");
        let stayed: Vec<&str> = stayed.map(|(name, _)| *name).collect();
        println!("{stayed:?} stayed at {from}");
        if !stayed.is_empty() {
            let address = self.lab.host(to).expect("a host").listen();
            let answer = self.begin(&stayed, from, &address, &["--verify"]).end();
            answer.expect(0, &[]);
            for report in reports(&answer) {
                assert_eq!(report["verify"]["mismatches"], 0, "{report:#}");
            }
            self.are_well(names);
        }
        let from = self.lab.host(from).expect("a host");
        let left = || (files(from).len(), ram_bytes(from));
        let nothing = || Ok((left() == (0, 0)).then_some(()));
        wait_for("an empty host", PATIENCE, nothing).unwrap_or_else(|error| panic!("{error}: {:?}", left()));
    }

    /// Sends a signal to the QEMU of a guest on a host.
    ///
    /// # Panics
    /// There is none.
    pub fn signal_qemu(&self, name: &str, host: &str, signal: Signal) {
        let pid = self.shown(name, host)["pid"].as_u64().and_then(|pid| i32::try_from(pid).ok()).expect("its process");
        kill(Pid::from_raw(pid), signal).expect("it runs");
    }

    /// Waits until neither host knows anything of a guest.
    ///
    /// # Panics
    /// Where one goes on to.
    pub fn is_gone(&self, name: &str) {
        let shown = || ["a", "b"].map(|host| self.shown(name, host)["state"].clone());
        let gone = || Ok(shown().iter().all(Value::is_null).then_some(()));
        wait_for("the end of a guest", PATIENCE, gone)
            .unwrap_or_else(|error| panic!("{error}: {name} is {:?}", shown()));
    }

    /// What the daemon of a host says of a guest; null where it knows none.
    #[must_use]
    pub fn shown(&self, name: &str, host: &str) -> Value {
        let host = self.lab.host(host).expect("a host");
        serde_json::from_str(&cli::ask(host, &["show", name, "--json"]).stdout).unwrap_or_default()
    }
}

/// How each of a gang's migrations ended.
///
/// # Panics
/// The answer has no report.
#[must_use]
pub fn statuses(answer: &Answer) -> Vec<String> {
    reports(answer).iter().map(|report| report["status"].as_str().unwrap_or_default().to_owned()).collect()
}

/// The report of each migration, of one as of several.
fn reports(answer: &Answer) -> Vec<Value> {
    let report: Value = serde_json::from_str(&answer.stdout).unwrap_or_else(|error| panic!("{error}: {answer:#?}"));
    report["migrations"].as_array().cloned().unwrap_or_else(|| vec![report])
}

fn mover(options: &str, sharing: bool) -> Mover {
    Mover::Sterna { options: sterna::options(options).expect("options"), sharing }
}
