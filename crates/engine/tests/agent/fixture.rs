//! Building the library, and a QEMU or a program with it inside.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use sterna_engine::agent::{Agent, AgentError};
use tempfile::TempDir;

/// How long anything here may take.
pub const PATIENCE: Duration = Duration::from_secs(300);

/// The library: the one that `STERNA_AGENT_SO` names, or built now.
pub fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| match std::env::var_os("STERNA_AGENT_SO") {
        Some(path) => std::fs::canonicalize(path).expect("STERNA_AGENT_SO names a file"),
        None => build(),
    })
}

fn build() -> PathBuf {
    // This program lies in TARGET/PROFILE/deps.
    let program = std::env::current_exe().expect("this program has a path");
    let target = program.ancestors().nth(3).expect("the program lies in a target directory");
    let status = Command::new(env!("CARGO"))
        .args(["build", "--quiet", "--package", "sterna-agent", "--profile", "agent", "--target-dir"])
        .arg(target)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .status()
        .expect("cargo runs");
    assert!(status.success(), "the library does not build");
    target.join("agent/libsterna_agent.so")
}

/// QEMU 7.2.
fn qemu() -> String {
    std::env::var("STERNA_QEMU_7").unwrap_or_else(|_| "qemu-system-x86_64".to_owned())
}

/// Why tests with QEMU cannot run here, said once per test.
pub fn cannot_run() -> bool {
    let root = rustix::process::geteuid().is_root();
    let device = Path::new("/dev/userfaultfd").exists();
    let qemu = Command::new(qemu()).arg("--version").stdout(Stdio::null()).status().is_ok();
    for (there, what) in [(root, "root"), (device, "/dev/userfaultfd"), (qemu, "qemu-system-x86_64")] {
        if !there {
            eprintln!("skipped: needs {what}");
            return true;
        }
    }
    false
}

/// A directory on tmpfs that any user can enter.
pub fn scratch() -> TempDir {
    let dir = tempfile::Builder::new().prefix("sterna-agent-").tempdir_in("/dev/shm").expect("a directory on tmpfs");
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o777)).expect("chmod");
    dir
}

/// Asks again and again until there is an answer.
pub fn eventually<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(start.elapsed() < PATIENCE, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Device and inode.
pub fn identity(path: &Path) -> (u64, u64) {
    let metadata = std::fs::metadata(path).expect("the file is there");
    (metadata.dev(), metadata.ino())
}

/// A QEMU, ended when dropped.
pub struct Qemu {
    pub dir: TempDir,
    pub pid: u32,
    child: Child,
    qmp: Option<BufReader<UnixStream>>,
}

/// Runs a test with every QEMU here: 7.2, and the 10.0 that `STERNA_QEMU_10` names.
pub fn with_each_qemu(test: impl Fn(Start)) {
    if cannot_run() {
        return;
    }
    test(Start::new());
    match std::env::var("STERNA_QEMU_10") {
        Ok(qemu) => test(Start { qemu, ..Start::new() }),
        Err(_) => eprintln!("not run with QEMU 10.0: STERNA_QEMU_10 does not name it"),
    }
}

/// How to start a [`Qemu`].
pub struct Start {
    qemu: String,
    dir: TempDir,
    wrapper: Vec<String>,
    arguments: Vec<String>,
    socket: Option<PathBuf>,
    memory: Option<&'static str>,
    template: Option<OwnedFd>,
}

impl Start {
    /// A q35 machine without RAM, not yet running, with the library inside.
    pub fn new() -> Self {
        let dir = scratch();
        let socket = Some(dir.path().join("agent"));
        let qmp = format!("unix:{}/qmp,server=on,wait=off", dir.path().display());
        let fixed = "-accel tcg -display none -nodefaults -no-user-config -S -qmp";
        let arguments = fixed.split(' ').map(str::to_owned).chain([qmp]).collect();
        Self { qemu: qemu(), dir, wrapper: vec![], arguments, socket, memory: None, template: None }
    }

    /// All of the machine's RAM in one file, "ram".
    pub fn ram(self, mebibytes: u64) -> Self {
        let file = self.file("ram");
        self.with(&format!("-M q35,memory-backend=ram -m {mebibytes}M"))
            .with(&format!("-object memory-backend-file,id=ram,size={mebibytes}M,mem-path={file},share=on"))
    }

    /// More arguments, separated by spaces.
    pub fn with(mut self, arguments: &str) -> Self {
        self.arguments.extend(arguments.split(' ').map(str::to_owned));
        self
    }

    /// Started by another program.
    pub fn under(mut self, wrapper: &[&str]) -> Self {
        self.wrapper = wrapper.iter().map(|word| (*word).to_owned()).collect();
        self
    }

    /// Where the library listens, if it is told.
    pub fn socket(mut self, socket: Option<PathBuf>) -> Self {
        self.socket = socket;
        self
    }

    /// In this memory mode of the library.
    pub fn memory(mut self, mode: &'static str) -> Self {
        self.memory = Some(mode);
        self
    }

    /// With RAM that begins as what this file holds.
    pub fn template(mut self, template: OwnedFd) -> Self {
        self.template = Some(template);
        self
    }

    /// The path of a file in this machine's directory.
    pub fn file(&self, name: &str) -> String {
        self.dir.path().join(name).display().to_string()
    }

    /// Starts it and waits for its QMP.
    pub fn go(self) -> Qemu {
        let words: Vec<_> = self.wrapper.iter().chain([&self.qemu]).collect();
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).args(&self.arguments).env("LD_PRELOAD", library());
        if let Some(socket) = &self.socket {
            command.env("STERNA_AGENT_SOCKET", socket);
        }
        if let Some(memory) = self.memory {
            command.env("STERNA_AGENT_MEMORY", memory);
        }
        if let Some(template) = &self.template {
            pass_template(&mut command, template);
        }
        let log = std::fs::File::create(self.dir.path().join("log")).expect("a log");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let child = command.spawn().expect("QEMU starts");
        let mut qemu = Qemu { pid: child.id(), dir: self.dir, child, qmp: None };
        let socket = qemu.dir.path().join("qmp");
        let stream = eventually("QMP", || {
            let log = qemu.log();
            let ended = qemu.child.try_wait().expect("wait").filter(|status| !status.success());
            assert!(ended.is_none(), "QEMU ended: {log}");
            UnixStream::connect(&socket).ok()
        });
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        qemu.qmp = Some(BufReader::new(stream));
        qemu.qmp("qmp_capabilities", serde_json::json!({}));
        if let Ok(pid) = std::fs::read_to_string(qemu.dir.path().join("pid")) {
            qemu.pid = pid.trim().parse().expect("a pid file holds a number");
        }
        qemu
    }
}

impl Qemu {
    /// Connects to the library.
    pub fn agent(&self) -> Agent {
        connect(&self.dir.path().join("agent"))
    }

    /// What it said on standard error.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    /// One QMP command that must succeed.
    pub fn qmp(&mut self, command: &str, arguments: serde_json::Value) -> serde_json::Value {
        let stream = self.qmp.as_mut().expect("QMP is connected");
        let request = serde_json::json!({"execute": command, "arguments": arguments});
        writeln!(stream.get_mut(), "{request}").expect("QMP takes a command");
        loop {
            let mut line = String::new();
            stream.read_line(&mut line).expect("QMP answers");
            let mut reply: serde_json::Value = serde_json::from_str(&line).expect("QMP speaks JSON");
            assert!(reply.get("error").is_none(), "{command}: {reply}");
            if let Some(answer) = reply.get_mut("return") {
                return answer.take();
            }
        }
    }

    /// Plugs in virtio-mem of so many bytes, which begins by discarding all of its memory. Returns the memory's file.
    pub fn plug_memory(&mut self, bytes: u64) -> PathBuf {
        let file = self.dir.path().join("more");
        let backend = serde_json::json!({
            "qom-type": "memory-backend-file", "id": "more", "size": bytes, "mem-path": file, "share": true
        });
        self.qmp("object-add", backend);
        let device = serde_json::json!({"driver": "virtio-mem-pci", "id": "mem", "memdev": "more", "bus": "pci.0"});
        self.qmp("device_add", device);
        file
    }

    /// The names of its threads.
    pub fn threads(&self) -> Vec<String> {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.pid)).expect("QEMU runs");
        tasks
            .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok())
            .map(|name| name.trim().to_owned())
            .collect()
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        if let Some(pid) = i32::try_from(self.pid).ok().and_then(rustix::process::Pid::from_raw) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Lets a program inherit a descriptor as its template.
pub fn pass_template(command: &mut Command, template: &OwnedFd) {
    let number = template.as_raw_fd();
    command.env("STERNA_AGENT_TEMPLATE", number.to_string());
    // SAFETY: one system call, on a number.
    unsafe {
        command.pre_exec(move || match libc::fcntl(number, libc::F_SETFD, 0) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
}

/// Connects once the library listens.
pub fn connect(socket: &Path) -> Agent {
    connect_within(socket, PATIENCE)
}

/// The same; each answer may take so long.
pub fn connect_within(socket: &Path, answer: Duration) -> Agent {
    eventually("the agent's socket", || match Agent::connect(socket, answer) {
        Ok(agent) => Some(agent),
        Err(AgentError::NotThere { .. }) => None,
        Err(error) => panic!("{error}"),
    })
}

/// Opens `/dev/userfaultfd`.
pub fn device() -> std::fs::File {
    std::fs::OpenOptions::new().read(true).write(true).open("/dev/userfaultfd").expect("/dev/userfaultfd opens")
}
