//! Two hosts and a guest under watch.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::Value;
use sterna_api::{Phase, Progress, Report, Status};
use sterna_bench::command::{PATIENCE, wait_for};
use sterna_bench::lab::{Host, METER};
use sterna_bench::load::now_us;
use sterna_bench::meter::{Line, Meter, delivery};
use sterna_bench::sterna::sterna;
use sterna_bench::{Guest, Lab, LabConfig};

use crate::cli::{self, Answer, Attempt};
use crate::plan::Plan;

/// A guest of whose memory a test takes pages on purpose, and that is not heard of for so long, has come to harm.
const SILENCE: Duration = Duration::from_secs(30);
/// How much of a daemon's log is printed where a test fails, lines.
const LOG_LINES: usize = 40;

/// Two hosts `a` and `b` without a limit on their link, or more of them, and a guest that began on `a`.
pub struct Site {
    /// The hosts.
    pub lab: Lab,
    /// What listens to the guest.
    pub meter: Meter,
    /// The guest.
    pub guest: Guest,
    /// The host it is on.
    here: &'static str,
    watcher: Option<Child>,
}

impl Site {
    /// Brings the lab up and starts the guest; it is up and its checker at work.
    ///
    /// # Panics
    /// Where that fails.
    #[must_use]
    pub fn start(plan: &Plan) -> Self {
        let site = Self::without_guest(plan);
        site.run(plan);
        site
    }

    /// Starts the guest where it was last; it is up and its checker at work.
    ///
    /// # Panics
    /// Where that fails.
    pub fn run(&self, plan: &Plan) {
        let words = self.run_words(plan);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        cli::ask(self.here(), &words).expect(0, &[]);
        self.wait_until_up();
    }

    /// Brings the lab up with a tap for the guest, which is not started.
    ///
    /// # Panics
    /// Where that fails.
    #[must_use]
    pub fn without_guest(plan: &Plan) -> Self {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let name = format!("st{}x{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let [a, b] = plan.qemu.clone();
        let lab = Lab::up(LabConfig {
            hosts: plan.hosts.clone(),
            rate_bytes_per_s: None,
            memory_limit_bytes: plan.memory_limit_bytes,
            qemu: [("a".to_owned(), a), ("b".to_owned(), b)].into(),
            ..LabConfig::pair(&name)
        })
        .expect("a lab");
        let mut guest = Guest::new(&lab, "g", 7, &plan.jobs);
        guest.memory_bytes = plan.memory_bytes;
        guest.cpus = plan.cpus;
        guest.machine.clone_from(&plan.machine);
        if let Some(cpu) = &plan.cpu {
            guest.cpu.clone_from(cpu);
        }
        lab.create_tap(&guest.tap()).expect("a tap");
        let meter = Meter::start(lab.host(METER).expect("a meter")).expect("a meter");
        Self { lab, meter, guest, here: "a", watcher: None }
    }

    /// QEMU's arguments for the guest, without RAM.
    ///
    /// # Panics
    /// Where the guest's image is absent.
    #[must_use]
    pub fn qemu_words(&self, plan: &Plan) -> Vec<String> {
        let micro = plan.machine.starts_with("microvm");
        // A microvm has no PCI.
        let word = |word: String| if micro { word.replace("virtio-net-pci", "virtio-net-device") } else { word };
        let words = self.guest.arguments(&self.lab).expect("the guest's image");
        words.into_iter().map(word).chain(plan.more.clone()).collect()
    }

    fn run_words(&self, plan: &Plan) -> Vec<String> {
        let memory = format!("{}K", plan.memory_bytes / 1024);
        let words = ["run", &self.guest.name, "--memory", &memory, "--detach"].map(str::to_owned);
        words.into_iter().chain(plan.run.clone()).chain(["--".into()]).chain(self.qemu_words(plan)).collect()
    }

    /// Waits until the guest and its checker are at work.
    ///
    /// # Panics
    /// Where they never are.
    pub fn wait_until_up(&self) {
        self.guest.wait_until_up(PATIENCE).expect("the guest comes up");
        self.checker_is_well();
    }

    /// A host by its name.
    ///
    /// # Panics
    /// Where there is none.
    #[must_use]
    pub fn host(&self, name: &str) -> &Host {
        self.lab.host(name).expect("a host")
    }

    /// The host the guest is on.
    #[must_use]
    pub fn here(&self) -> &Host {
        self.host(self.here)
    }

    /// The other one.
    #[must_use]
    pub fn there(&self) -> &Host {
        self.host(self.other())
    }

    fn other(&self) -> &'static str {
        if self.here == "a" { "b" } else { "a" }
    }

    /// Names of the host the guest is on, and of the other.
    #[must_use]
    pub fn names(&self) -> (&'static str, &'static str) {
        (self.here, self.other())
    }

    /// The guest is now known to be on the other host.
    pub fn moved(&mut self) {
        self.here = self.other();
    }

    /// Begins to move the guest to the other host, straight or by a detour.
    #[must_use]
    pub fn begin(&self, detour: Option<&str>, options: &[&str]) -> Attempt {
        let straight = self.there().listen();
        Attempt::begin(self.here(), &self.guest.name, detour.unwrap_or(&straight), options)
    }

    /// Tries to move the guest, and waits for the end.
    #[must_use]
    pub fn attempt(&self, detour: Option<&str>, options: &[&str]) -> Answer {
        self.begin(detour, options).end()
    }

    /// Moves the guest, both sides compared; it arrives whole and leaves nothing behind.
    ///
    /// # Panics
    /// Where anything is not as it should be.
    pub fn migrate(&mut self, options: &[&str]) -> Report {
        let answer = self.attempt(None, &[&["--verify"], options].concat());
        answer.expect(0, &[]);
        let report = answer.report().unwrap_or_else(|| panic!("no report: {answer:#?}"));
        assert_eq!(report.status, Status::Completed, "{report:#?}");
        assert!(report.verify.checked && report.verify.mismatches == 0, "{report:#?}");
        self.moved();
        self.nothing_is_left_there();
        report
    }

    /// After a fault: the guest runs on where it was, the other host has nothing of it, the next attempt succeeds, and
    /// it was never harmed.
    ///
    /// # Panics
    /// Where it is not so.
    pub fn a_second_attempt_succeeds(&mut self) {
        // The checker's last word is on all that ever happened; waiting for it twice would take a second more for each
        // fault.
        self.is_heard_of();
        self.belongs_here();
        self.migrate(&[]);
        self.checker_is_well();
    }

    /// The guest runs where it was, unharmed, and the other host has nothing of it.
    ///
    /// # Panics
    /// Where it is not so.
    pub fn runs_on_here(&self) {
        self.checker_is_well();
        self.belongs_here();
    }

    fn belongs_here(&self) {
        self.eventually("the daemon says that it runs", || self.state_at(self.here) == "running");
        self.nothing_is_left_there();
    }

    /// What the daemon of a host says of the guest; `none` where it knows none.
    #[must_use]
    pub fn state_at(&self, host: &str) -> String {
        let answer = cli::ask(self.host(host), &["show", &self.guest.name, "--json"]);
        let vm: Value = serde_json::from_str(&answer.stdout).unwrap_or_default();
        vm["state"].as_str().unwrap_or("none").into()
    }

    /// The daemon's process on a host.
    ///
    /// # Panics
    /// Where it has none.
    #[must_use]
    pub fn daemon_at(&self, host: &str) -> u32 {
        let daemons = &self.lab.state().daemons;
        daemons.iter().find(|(name, _)| name == host).map(|(_, id)| id.pid).expect("a daemon")
    }

    /// QEMU's process on a host, where it has one.
    #[must_use]
    pub fn qemu_at(&self, host: &str) -> Option<u32> {
        let program = |pid: u32| std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        let processes = self.host(host).group.processes();
        processes.into_iter().map(|process| process.pid).find(|pid| program(*pid).starts_with("qemu"))
    }

    /// What `show` says of the guest on a host, word for word.
    #[must_use]
    pub fn told_at(&self, host: &str) -> String {
        cli::ask(self.host(host), &["show", &self.guest.name]).stdout
    }

    /// The guest's QEMU on a host, which must be there, does not run the guest: it takes no processor time.
    ///
    /// # Panics
    /// Where it does, or is not there.
    pub fn stands_still_at(&self, host: &str) {
        let pid = self.qemu_at(host).expect("its QEMU is kept");
        let ticks = || -> u64 {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("its QEMU is kept");
            let fields = stat.rsplit_once(')').expect("its name").1.split_ascii_whitespace();
            // Time in user and in kernel mode, hundredths of a second (proc_pid_stat(5)).
            fields.skip(11).take(2).map(|field| field.parse::<u64>().expect("a number")).sum()
        };
        let before = ticks();
        std::thread::sleep(Duration::from_millis(300));
        let taken = ticks() - before;
        // A guest that runs writes all the time; a daemon that asks QEMU something takes next to nothing.
        assert!(taken <= 5, "the guest runs on host {host}: its QEMU took {taken} hundredths of a second in 0.3 s");
    }

    /// The host the guest is not on has no QEMU, no record and no RAM of it, soon.
    ///
    /// # Panics
    /// Where something stays.
    pub fn nothing_is_left_there(&self) {
        let (_, there) = self.names();
        self.eventually("nothing of it is left on the other host", || {
            self.qemu_at(there).is_none() && files(self.host(there)).is_empty() && self.state_at(there) == "none"
        });
    }

    /// The guest's heart beats, after this moment.
    ///
    /// # Panics
    /// Where it does not.
    pub fn is_heard_of(&self) {
        let from = now_us();
        let beats = || self.meter.arrivals(self.guest.address()).last().is_some_and(|arrival| arrival.at_us > from);
        wait_for("a heartbeat", PATIENCE, || Ok(beats().then_some(()))).unwrap_or_else(|error| panic!("{error}"));
    }

    /// The guest has never run on two hosts: no heartbeat has come twice.
    ///
    /// # Panics
    /// Where one has.
    pub fn ran_on_one_host_at_a_time(&self) {
        let twice = delivery(&self.meter.arrivals(self.guest.address()), i64::MIN, i64::MAX).duplicate;
        assert_eq!(twice, 0, "heartbeats came twice: the guest ran on two hosts");
    }

    /// The checker reports, after this moment, that every page it ever wrote is as it wrote it.
    ///
    /// # Panics
    /// Where it complains, or is not heard of.
    pub fn checker_is_well(&self) {
        let (from, lines) = (now_us(), || self.meter.lines(self.guest.address(), "CHECKER"));
        // It looks at every page twice a second, or as often as it can: a report that is older than that says nothing
        // of this moment.
        let sweep_us = |line: &Line| (line.number("sweep_ms").unwrap_or(0.0) * 1e3) as i64;
        let fresh = |line: &Line| {
            line.text.starts_with("CHECKER ok") && line.at_us > from + 100_000 + sweep_us(line).max(500_000)
        };
        let heard = wait_for("the checker's word", PATIENCE, || {
            let lines = lines();
            let complaints: Vec<&Line> = lines.iter().filter(|line| line.text.starts_with("CHECKER BAD")).collect();
            assert!(complaints.is_empty(), "{complaints:#?}");
            Ok(lines.into_iter().find(fresh))
        });
        let line = heard.unwrap_or_else(|error| panic!("the guest has come to harm: {error}; {:?}", lines().last()));
        assert_eq!(line.number("bad"), Some(0.0), "{line:?}");
        assert!(line.number("writes_per_s") > Some(0.0), "it no longer writes: {line:?}");
    }

    /// The guest's `churn` goes on, after this moment, and has found nothing wrong since it began.
    ///
    /// # Panics
    /// Where it complains, or is not heard of.
    pub fn churn_is_well(&self) {
        let (from, lines) = (now_us(), || self.meter.lines(self.guest.address(), "CHURN"));
        // What was in use at a migration has been checked by then: a file or a process does not live longer.
        let fresh = |line: &Line| line.at_us > from + 1_500_000 && line.text.starts_with("CHURN ok");
        let heard = wait_for("the churn's word", PATIENCE, || Ok(lines().into_iter().find(fresh)));
        let complaints = self.churn_complaints();
        assert!(complaints.is_empty(), "{complaints:#?}");
        let line = heard.unwrap_or_else(|error| panic!("the guest has come to harm: {error}; {:?}", lines().last()));
        assert_eq!(line.number("bad"), Some(0.0), "{line:?}");
    }

    /// What the guest's `churn` found wrong so far.
    #[must_use]
    pub fn churn_complaints(&self) -> Vec<Line> {
        let lines = self.meter.lines(self.guest.address(), "CHURN");
        lines.into_iter().filter(|line| line.text.starts_with("CHURN BAD")).collect()
    }

    /// What the guest says of pages that it lost: its programs, or its kernel, which is as likely to have owned one; or
    /// that it says nothing any more.
    #[must_use]
    pub fn harm(&self) -> Option<String> {
        const WORDS: [&str; 6] = ["CHURN BAD", "CHECKER BAD", "BUG:", "Oops:", "Kernel panic", "segfault"];
        let complaint = self.churn_complaints().first().map(|line| line.text.clone());
        let console = self.guest.console_text();
        let told = || console.lines().find(|line| WORDS.iter().any(|word| line.contains(word)));
        let silent = || {
            let last = self.meter.lines(self.guest.address(), "CHURN").last().map(|line| line.at_us);
            let long = SILENCE.as_micros() as i64;
            last.filter(|at_us| now_us() - at_us > long).map(|_| "its churn fell silent".to_owned())
        };
        complaint.or_else(|| told().map(str::to_owned)).or_else(silent)
    }

    /// Waits until something holds.
    ///
    /// # Panics
    /// Where it never does.
    pub fn eventually(&self, what: &str, mut holds: impl FnMut() -> bool) {
        let waited = wait_for(what, PATIENCE, || {
            let holds = holds();
            if !holds {
                std::thread::sleep(Duration::from_millis(30));
            }
            Ok(holds.then_some(()))
        });
        waited.unwrap_or_else(|error| panic!("{error}"));
    }

    /// Waits until the guest's `dirtier` writes so many MiB a second, as fast as it should.
    ///
    /// # Panics
    /// Where it never does.
    pub fn dirtier_writes(&self, mib_per_s: u32) {
        let pages_per_s = f64::from(mib_per_s) * 256.0;
        self.eventually("it writes as fast as it should", || {
            let lines = self.meter.lines(self.guest.address(), "DIRTIER");
            lines.last().and_then(|line| line.number("writes_per_s")).is_some_and(|rate| rate > pages_per_s)
        });
    }

    /// Follows `sterna watch --json` until a migration is in this phase; `what` may ask for more.
    ///
    /// # Panics
    /// Where it never is.
    pub fn wait_for_phase(&mut self, phase: Phase, what: impl Fn(&Progress) -> bool) {
        self.end_watcher();
        let mut command = sterna(self.here()).expect("sterna is built");
        let mut child = command
            .args(["watch", &self.guest.name, "--json"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("sterna starts");
        let stdout = child.stdout.take().expect("piped");
        self.watcher = Some(child);
        let mut seen = Vec::new();
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            let progress: Progress = serde_json::from_str(&line).expect("a line of progress");
            if progress.phase == phase && what(&progress) {
                return self.end_watcher();
            }
            assert_ne!(progress.phase, Phase::Done, "it ended before {phase:?}: {seen:?}");
            seen.push((progress.phase, progress.round));
        }
        panic!("watching ended before {phase:?}: {seen:?}");
    }

    fn end_watcher(&mut self) {
        if let Some(mut child) = self.watcher.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Starts the daemon of a host anew, with more lines in its configuration.
    ///
    /// # Panics
    /// Where they cannot be written, or it does not come up.
    pub fn configure(&mut self, host: &str, lines: &str) {
        std::fs::write(self.host(host).directory.join("more.toml"), format!("{lines}\n")).expect("a configuration");
        self.kill_daemon(host);
        self.start_daemon(host);
    }

    /// Kills the daemon of a host with -9.
    pub fn kill_daemon(&mut self, host: &str) {
        self.lab.kill_daemon(host);
    }

    /// Starts it again.
    ///
    /// # Panics
    /// Where it does not come up.
    pub fn start_daemon(&mut self, host: &str) {
        self.lab.start_daemon(host).expect("the daemon comes back");
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        self.end_watcher();
        if std::thread::panicking() {
            print_logs(&self.lab);
            let console = self.guest.console_text();
            let lines: Vec<&str> = console.lines().collect();
            println!("--- console of the guest:\n{}", lines[lines.len().saturating_sub(10)..].join("\n"));
        }
    }
}

/// Prints the ends of the daemons' logs.
pub fn print_logs(lab: &Lab) {
    for name in &lab.state().hosts {
        let log = lab.host(name).map(|host| std::fs::read_to_string(host.directory.join("sternad.log")));
        let log = log.ok().and_then(Result::ok).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        println!("--- daemon of host {name}:\n{}", lines[lines.len().saturating_sub(LOG_LINES)..].join("\n"));
    }
}

/// RAM files and machines' directories of a host.
#[must_use]
pub fn files(host: &Host) -> Vec<PathBuf> {
    let state = host.directory.join("state");
    let list =
        |name: &str| std::fs::read_dir(state.join(name)).into_iter().flatten().flatten().map(|entry| entry.path());
    list("ram").chain(list("vms")).collect()
}
