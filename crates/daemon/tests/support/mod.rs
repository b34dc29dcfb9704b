//! A host for tests: a daemon of its own in a directory of its own, machines without a guest system, nothing left
//! behind.
#![allow(dead_code, missing_docs, reason = "each test program uses a part of it")]

pub mod pools;

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};

/// Ends a wait that is hopeless, and nothing else: no result depends on it, however slow the machine.
pub const PATIENCE: Duration = Duration::from_secs(300);

/// A machine with firmware and nothing else: it runs for ever.
pub const BARE: [&str; 8] = ["-machine", "q35", "-accel", "tcg", "-display", "none", "-vga", "none"];

/// Which part of a machine's RAM [`Host::fill`] fills, bytes.
pub const FULL: std::ops::Range<u64> = 32 << 20..48 << 20;

/// Why tests with QEMU cannot run here, said once per test.
pub fn cannot_run() -> bool {
    let needs = [
        (rustix::process::geteuid().is_root(), "root"),
        (Path::new("/dev/userfaultfd").exists(), "/dev/userfaultfd"),
        (Command::new(qemu()).arg("--version").stdout(Stdio::null()).status().is_ok(), "qemu-system-x86_64"),
    ];
    let missing = needs.iter().find(|(there, _)| !there);
    if let Some((_, what)) = missing {
        eprintln!("skipped: needs {what}");
    }
    missing.is_some()
}

pub fn qemu() -> String {
    std::env::var("STERNA_QEMU_7").unwrap_or_else(|_| "qemu-system-x86_64".into())
}

/// Where this build's programs lie: TARGET/PROFILE.
fn profile_dir() -> PathBuf {
    let program = std::env::current_exe().expect("this program has a path");
    program.ancestors().nth(2).expect("it lies in TARGET/PROFILE/deps").to_path_buf()
}

fn cargo(arguments: &[&str], target: &Path) {
    let status = Command::new(env!("CARGO"))
        .args(arguments)
        .arg("--quiet")
        .arg("--target-dir")
        .arg(target)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .status()
        .expect("cargo runs");
    assert!(status.success(), "cargo {arguments:?} fails");
}

/// The library inside QEMU: the one `STERNA_AGENT_SO` names, or built now.
pub fn agent() -> &'static Path {
    static PLACE: OnceLock<PathBuf> = OnceLock::new();
    PLACE.get_or_init(|| {
        if let Some(path) = std::env::var_os("STERNA_AGENT_SO") {
            return std::fs::canonicalize(path).expect("STERNA_AGENT_SO names a file");
        }
        let profile = profile_dir();
        let target = profile.parent().expect("a profile's directory lies in the target directory");
        cargo(&["build", "--package", "sterna-agent", "--profile", "agent"], target);
        target.join("agent/libsterna_agent.so")
    })
}

/// The daemon: this package's own, the one in the directory that `STERNA_BIN_DIR` names, or built now. (What a package
/// builds alone has other features of its dependencies than what the workspace builds, so that is nearly everything
/// anew.)
fn sternad() -> &'static Path {
    static PLACE: OnceLock<PathBuf> = OnceLock::new();
    PLACE.get_or_init(|| match (option_env!("CARGO_BIN_EXE_sternad"), std::env::var_os("STERNA_BIN_DIR")) {
        (Some(path), _) => path.into(),
        (None, Some(directory)) => Path::new(&directory).join("sternad"),
        (None, None) => {
            let profile = profile_dir();
            let target = profile.parent().expect("a profile's directory lies in the target directory");
            let release: &[&str] = if profile.ends_with("release") { &["--release"] } else { &[] };
            cargo(&[&["build", "--package", "sterna-daemon"], release].concat(), target);
            profile.join("sternad")
        }
    })
}

/// Waits until something holds.
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A host.
pub struct Host {
    dir: tempfile::TempDir,
    daemon: Option<Child>,
    /// Where other daemons reach it.
    listen: SocketAddr,
    config: String,
}

/// An address that nobody else takes, also while no daemon listens there: of this process's own part of 127.0.0.0/8,
/// with a port from below those that the kernel gives out.
fn own_address() -> SocketAddr {
    static NEXT: AtomicU16 = AtomicU16::new(7300);
    let [high, a, b, c] = std::process::id().to_be_bytes();
    assert_eq!(high, 0, "a process number has 22 bits");
    SocketAddr::from((Ipv4Addr::new(127, 64 + a, b, c), NEXT.fetch_add(1, Ordering::Relaxed)))
}

impl Host {
    /// With its daemon running.
    pub fn start() -> Self {
        Self::configured("")
    }

    /// With more lines in its configuration file.
    pub fn configured(config: &str) -> Self {
        Self::with(agent(), config)
    }

    /// With another agent.
    pub fn with_agent(agent: &Path) -> Self {
        Self::with(agent, "")
    }

    /// With a state directory that was made before the daemon starts.
    pub fn on(config: &str, make: impl FnOnce(&Path)) -> Self {
        Self::made(agent(), config, make)
    }

    fn with(agent: &Path, config: &str) -> Self {
        Self::made(agent, config, |_| ())
    }

    fn made(agent: &Path, config: &str, make: impl FnOnce(&Path)) -> Self {
        let dir = tempfile::Builder::new().prefix("sterna-host-").tempdir().expect("a directory");
        let mut host =
            Self { dir, daemon: None, listen: own_address(), config: format!("agent = {agent:?}\n{config}\n") };
        make(&host.state());
        host.start_daemon();
        host
    }

    /// The daemon's command, with its log.
    fn command(&self, state: &Path, api: &str) -> Command {
        let config = self.path("sternad.toml");
        std::fs::write(&config, &self.config).expect("a configuration");
        let mut command = Command::new(sternad());
        command.arg("--config").arg(config).arg("--state-dir").arg(state);
        command.args(["--api", api, "--listen", &self.address(), "--log", "debug"]);
        command
    }

    /// With more lines in its configuration file, from its daemon's next start on.
    pub fn configure(&mut self, config: &str) {
        self.config += &format!("{config}\n");
    }

    fn log_file(&self) -> std::fs::File {
        std::fs::File::options().create(true).append(true).open(self.path("sternad.log")).expect("a log")
    }

    /// What a second daemon on this state directory says before it ends.
    pub fn second_daemon(&self, state: &Path) -> std::process::Output {
        let api = format!("unix:{}", self.path("second.sock").display());
        self.command(state, &api).output().expect("it starts and ends")
    }

    /// Starts a daemon that may open so many files, and does not wait for it.
    pub fn start_daemon_with_few_files(&mut self, files: u64) {
        let command = self.command(&self.state(), &self.api());
        let child = Command::new("prlimit")
            .arg(format!("--nofile={files}:{files}"))
            .arg(command.get_program())
            .args(command.get_args())
            .stderr(self.log_file())
            .spawn();
        self.daemon = Some(child.expect("prlimit starts the daemon"));
    }

    pub fn start_daemon(&mut self) {
        assert!(self.daemon.is_none(), "it runs already");
        let child = self.command(&self.state(), &self.api()).stderr(self.log_file()).spawn();
        self.daemon = Some(child.expect("the daemon starts"));
        let socket = self.socket();
        eventually("the daemon answers", || UnixStream::connect(&socket).is_ok());
    }

    /// As a crash would.
    pub fn kill_daemon(&mut self) {
        let mut daemon = self.daemon.take().expect("it runs");
        daemon.kill().expect("it can be killed");
        daemon.wait().expect("it ends");
    }

    /// As a service manager would.
    pub fn stop_daemon(&mut self) -> std::process::ExitStatus {
        let mut daemon = self.daemon.take().expect("it runs");
        signal(daemon.id(), Signal::TERM);
        daemon.wait().expect("it ends")
    }

    pub fn daemon_pid(&self) -> u32 {
        self.daemon.as_ref().expect("it runs").id()
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn state(&self) -> PathBuf {
        self.path("state")
    }

    pub fn socket(&self) -> PathBuf {
        self.path("api.sock")
    }

    pub fn api(&self) -> String {
        format!("unix:{}", self.socket().display())
    }

    pub fn address(&self) -> String {
        self.listen.to_string()
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.path("sternad.log")).unwrap_or_default()
    }

    /// A request; the status and the answer's JSON (text where it is none).
    pub fn ask(&self, method: &str, path: &str, body: Option<&Value>) -> (u16, Value) {
        let text = body.map(Value::to_string).unwrap_or_default();
        self.ask_raw(method, path, &text)
    }

    pub fn ask_raw(&self, method: &str, path: &str, body: &str) -> (u16, Value) {
        let mut stream = UnixStream::connect(self.socket()).expect("the daemon listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        let head =
            format!("{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n");
        // In one piece: an answer may come, and the connection end, before all of a body was read.
        let request = format!("{head}content-length: {}\r\n\r\n{body}", body.len());
        stream.write_all(request.as_bytes()).expect("a request");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
        let status = head.split(' ').nth(1).and_then(|word| word.parse().ok()).expect("a status");
        (status, serde_json::from_str(body).unwrap_or_else(|_| body.into()))
    }

    pub fn get(&self, path: &str) -> Value {
        let (status, body) = self.ask("GET", path, None);
        assert_eq!(status, 200, "{path}: {body}");
        body
    }

    /// A request that must be refused; its problem's code.
    pub fn refused(&self, method: &str, path: &str, body: &Value) -> String {
        let (status, problem) = self.ask(method, path, Some(body));
        assert!(status >= 400, "{path} was not refused: {problem}");
        for field in ["blame", "message"] {
            assert!(problem[field].as_str().is_some_and(|text| !text.is_empty()), "{field} is missing: {problem}");
        }
        problem["code"].as_str().expect("a code").into()
    }

    /// Starts a bare machine.
    pub fn run(&self, name: &str) -> Value {
        let (status, vm) = self.ask("POST", "/v1/vms", Some(&run_request(name, &BARE)));
        assert_eq!(status, 201, "{vm}\n{}", self.log());
        vm
    }

    /// Starts a bare machine whose RAM is so full that at a low rate it is under way for as long as a test takes on any
    /// machine: 16 MiB, of which no page compresses. (What firmware writes is little, and takes the time it takes.)
    pub fn run_full(&self, name: &str) {
        self.run(name);
        self.fill(name);
    }

    /// Fills a machine's RAM so.
    pub fn fill(&self, name: &str) {
        let mut state = 1_u64;
        let noise = |_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        };
        let bytes: Vec<u8> = (0..FULL.end - FULL.start).map(noise).collect();
        let ram = std::fs::File::options().write(true).open(self.ram_of(name)).expect("its RAM");
        std::os::unix::fs::FileExt::write_all_at(&ram, &bytes, FULL.start).expect("room");
    }

    /// The RAM file of a machine in shared memory.
    pub fn ram_of(&self, name: &str) -> PathBuf {
        let files = std::fs::read_dir(self.state().join("ram")).expect("RAM files").flatten();
        let of_it = |file: &std::fs::DirEntry| file.file_name().to_string_lossy().starts_with(&format!("{name}-"));
        files.filter(of_it).map(|file| file.path()).next().expect("its RAM")
    }

    /// From now on, until its daemon is started anew, migrations away from this host go as fast as they can.
    pub fn hurry(&self) {
        let (status, answer) =
            self.ask("PUT", "/v1/host/bandwidth", Some(&json!({ "bandwidth_bytes_per_s": Value::Null })));
        assert_eq!(status, 200, "{answer}");
    }

    /// Asks until the answer is another than such a one, which says to ask again.
    pub fn ask_while(&self, method: &str, path: &str, request: &Value, again: impl Fn(&Value) -> bool) -> (u16, Value) {
        let mut answer = self.ask(method, path, Some(request));
        eventually("it need not be asked again", || {
            let again = again(&answer.1);
            if again {
                answer = self.ask(method, path, Some(request));
            }
            !again
        });
        answer
    }

    pub fn names(&self) -> Vec<String> {
        let list = self.get("/v1/vms");
        list.as_array().expect("a list").iter().filter_map(|vm| vm["name"].as_str()).map(String::from).collect()
    }

    pub fn state_of(&self, name: &str) -> String {
        let (_, vm) = self.ask("GET", &format!("/v1/vms/{name}"), None);
        vm["state"].as_str().unwrap_or("none").into()
    }

    pub fn pid_of(&self, name: &str) -> u32 {
        self.get(&format!("/v1/vms/{name}"))["pid"].as_u64().expect("a pid") as u32
    }

    /// Begins a migration; its number.
    pub fn migrate(&self, names: &[&str], to: &str, options: Value) -> u64 {
        let request = json!({ "vms": names, "to": to, "options": options });
        let (status, migration) = self.ask("POST", "/v1/migrations", Some(&request));
        assert_eq!(status, 202, "{migration}");
        migration["id"].as_u64().expect("a number")
    }

    /// Waits for a migration's end; its reports.
    pub fn ended(&self, id: u64) -> Vec<Value> {
        let path = format!("/v1/migrations/{id}");
        eventually("the migration ends", || self.get(&path)["ended"] == true);
        self.get(&path)["migrations"].as_array().expect("reports").clone()
    }

    /// The same, of the migration that began last: one that the daemon itself went on with has a number that nobody was
    /// told. Its machine is forgotten before it ends.
    pub fn latest_ended(&self) -> Vec<Value> {
        let all = self.get("/v1/migrations");
        let latest = all.as_array().and_then(|all| all.last()).expect("a migration");
        self.ended(latest["id"].as_u64().expect("a number"))
    }

    /// RAM files on this host.
    pub fn ram_files(&self) -> usize {
        std::fs::read_dir(self.state().join("ram")).map_or(0, Iterator::count)
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- the daemon's log:\n{}", self.log());
        }
        if let Some(mut daemon) = self.daemon.take() {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
        for entry in std::fs::read_dir(self.state().join("vms")).into_iter().flatten().flatten() {
            let record = std::fs::read(entry.path().join("vm.json")).unwrap_or_default();
            let record: Value = serde_json::from_slice(&record).unwrap_or_default();
            if let Some(pid) = record["process"]["pid"].as_u64() {
                end_process(pid as u32, &self.dir.path().display().to_string());
            }
        }
        // The directory itself where a test mounted one.
        for mounted in [self.state().join("ram"), self.state()] {
            let _ = rustix::mount::unmount(mounted, rustix::mount::UnmountFlags::DETACH);
        }
    }
}

/// A host whose state directory is a file system of one MiB.
pub fn small_host() -> Host {
    Host::on("", |state| {
        std::fs::create_dir(state).expect("a directory");
        let mount =
            Command::new("mount").args(["-t", "tmpfs", "-o", "size=1m,mode=755", "sterna-test"]).arg(state).status();
        assert!(mount.expect("mount runs").success(), "a file system");
    })
}

/// Fills a file system to the last byte.
pub fn fill(path: &Path) {
    let mut file = std::fs::File::create(path).expect("a file");
    let error = std::io::copy(&mut std::io::repeat(1), &mut file).expect_err("it has an end");
    assert_eq!(error.kind(), std::io::ErrorKind::StorageFull);
}

/// Ends a machine's QEMU, as the kernel does when memory runs out.
pub fn end_machine(pid: u32) {
    end_process(pid, "sterna-host-");
}

/// Sends a signal to a process of this test's.
pub fn signal(pid: u32, signal: Signal) {
    let pid = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw).expect("a process");
    rustix::process::kill_process(pid, signal).expect("it runs");
}

/// Ends a process, where its arguments name this test's directory: numbers are used again.
fn end_process(pid: u32, mark: &str) {
    let arguments = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    if arguments.contains(mark)
        && let Some(pid) = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw)
    {
        let _ = rustix::process::kill_process(pid, Signal::KILL);
    }
}

/// Whether a process runs. A zombie does not, unless threads of it are on their way out still: its files are open then.
pub fn runs(pid: u32) -> bool {
    let runs = |task: std::fs::DirEntry| {
        let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
    };
    std::fs::read_dir(format!("/proc/{pid}/task")).is_ok_and(|tasks| tasks.flatten().any(runs))
}

/// A request for a machine of 64 MiB.
pub fn run_request(name: &str, arguments: &[&str]) -> Value {
    json!({ "name": name, "memory_bytes": 64 << 20, "qemu": qemu(), "arguments": arguments })
}

/// A QEMU that somebody else started.
pub struct Stranger {
    pub child: Child,
    pub qmp: PathBuf,
}

impl Stranger {
    /// Starts QEMU in `dir` with these arguments, with or without the agent.
    pub fn start(dir: &Path, arguments: &[&str], with_agent: bool) -> Self {
        let qmp = dir.join("stranger-qmp.sock");
        let mut command = Command::new(qemu());
        command.args(arguments).arg("-qmp").arg(format!("unix:{},server=on,wait=off", qmp.display()));
        if with_agent {
            command.env("LD_PRELOAD", agent()).env("STERNA_AGENT_SOCKET", dir.join("stranger-agent.sock"));
        }
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().expect("QEMU starts");
        eventually("QEMU answers", || UnixStream::connect(&qmp).is_ok());
        Self { child, qmp }
    }

    pub fn request(&self, name: &str) -> Value {
        json!({ "name": name, "pid": self.child.id(), "qmp": self.qmp })
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
