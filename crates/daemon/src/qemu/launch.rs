//! Starting of QEMU so that it outlives the daemon: it has its own session, writes its output to a file, and inherits
//! nothing of the daemon's.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, chown, fchown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::{Gid, Uid, setsid};
use rustix::thread::{set_thread_gid, set_thread_groups, set_thread_uid};
use sterna_api::problem::Whereabouts;
use sterna_api::{Blame, Code, Problem};
use sterna_sys::path::{connect, open_regular};

use super::user::User;
use crate::problems::host;
use crate::process::{Identity, restore_file_limit};

/// How often it is looked whether QEMU listens. Clones wait for that, twenty of them at once.
const LOOK: Duration = Duration::from_millis(2);
/// How long QEMU may take until its QMP socket answers.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// How much of the end of QEMU's log is read, bytes.
const LAST_BYTES: u64 = 4096;

/// The environment variable that tells the agent its socket.
pub const AGENT_SOCKET_VARIABLE: &str = "STERNA_AGENT_SOCKET";

/// The environment variable that tells the agent what to make of guest RAM.
const AGENT_MEMORY_VARIABLE: &str = "STERNA_AGENT_MEMORY";

/// The environment variable that tells the agent the descriptor of the file that private memory begins as.
const AGENT_TEMPLATE_VARIABLE: &str = "STERNA_AGENT_TEMPLATE";

/// What the agent makes of guest RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RamKind {
    /// The files that QEMU was given.
    Files,
    /// Private memory of QEMU's process; `mergeable`: KSM may merge its pages, where QEMU asks for that.
    Private {
        /// Equal pages of other machines may be merged with these.
        mergeable: bool,
    },
}

impl RamKind {
    fn word(self) -> &'static str {
        match self {
            Self::Files => "shared",
            Self::Private { mergeable: false } => "private",
            Self::Private { mergeable: true } => "private,mergeable",
        }
    }
}

/// What QEMU needs at its start.
#[derive(Debug)]
pub struct Launch<'a> {
    /// The binary.
    pub binary: &'a Path,
    /// All its arguments.
    pub arguments: &'a [String],
    /// Where it makes its sockets, and where its output goes.
    pub place: &'a Place,
    /// Descriptors that it inherits, under the numbers that they have here.
    pub inherited: &'a [OwnedFd],
    /// The library inside QEMU.
    pub agent: &'a Path,
    /// What it makes of guest RAM.
    pub ram: RamKind,
    /// The file that private memory begins as, open for reading only.
    pub template: Option<&'a File>,
    /// The user QEMU runs as.
    pub user: Option<&'a User>,
}

/// The directory where QEMU makes its sockets: the only part of a machine's directory that belongs to QEMU's user.
#[must_use]
pub fn run_dir(dir: &Path) -> PathBuf {
    dir.join("run")
}

/// QMP's socket of a machine with this directory.
#[must_use]
pub fn qmp_socket(dir: &Path) -> PathBuf {
    run_dir(dir).join("qmp.sock")
}

/// The agent's socket of a machine with this directory.
#[must_use]
pub fn agent_socket(dir: &Path) -> PathBuf {
    run_dir(dir).join("agent.sock")
}

/// The file of QEMU's output in a machine's directory. It is root's, and QEMU has only its descriptor.
#[must_use]
pub fn log_file(dir: &Path) -> PathBuf {
    dir.join("qemu.log")
}

/// The files of one QEMU in its machine's directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// QMP's socket.
    pub qmp: PathBuf,
    /// The agent's socket.
    pub agent: PathBuf,
    /// Its output.
    pub log: PathBuf,
}

impl Place {
    /// The place of the QEMU that a machine with this directory begins with.
    #[must_use]
    pub fn first(dir: &Path) -> Self {
        Self { qmp: qmp_socket(dir), agent: agent_socket(dir), log: log_file(dir) }
    }

    /// The place of another one beside it, which `tag` tells apart.
    #[must_use]
    pub fn beside(dir: &Path, tag: &str) -> Self {
        let run = run_dir(dir);
        Self {
            qmp: run.join(format!("qmp-{tag}.sock")),
            agent: run.join(format!("agent-{tag}.sock")),
            log: dir.join(format!("qemu-{tag}.log")),
        }
    }
}

/// Starts QEMU and waits until its QMP socket takes connections.
///
/// # Errors
/// A [`Problem`], with QEMU's last words if it has ended. The caller must then remove what it has made.
pub fn launch(launch: &Launch<'_>) -> Result<Identity, Problem> {
    let log = File::options()
        .create_new(true)
        .append(true)
        .mode(0o640)
        .open(&launch.place.log)
        .and_then(|log| Ok((log.try_clone()?, log)));
    let (stdout, stderr) = log.map_err(|error| host("cannot make QEMU's log", &error))?;
    let mut command = Command::new(launch.binary);
    command
        .args(launch.arguments)
        .current_dir("/")
        .env("LD_PRELOAD", launch.agent)
        .env(AGENT_SOCKET_VARIABLE, &launch.place.agent)
        .env(AGENT_MEMORY_VARIABLE, launch.ram.word())
        .stdin(Stdio::null())
        .stdout(stdout)
        .stderr(stderr);
    // A descriptor of this start alone, which only its child lets the program inherit: others are started meanwhile.
    let template = launch.template.map(File::try_clone).transpose();
    let template = template.map_err(|error| host("cannot pass the memory template on", &error))?;
    if let Some(template) = &template {
        command.env(AGENT_TEMPLATE_VARIABLE, template.as_raw_fd().to_string());
    }
    let inherited: Vec<_> = launch.inherited.iter().map(AsRawFd::as_raw_fd).collect();
    let user = launch.user.cloned();
    // SAFETY: between fork and exec only system calls that touch no memory but the child's own stack and what was
    // allocated before; none of them takes a lock or allocates. The inherited descriptors are borrowed until
    // this function returns, and the child has begun by then.
    unsafe {
        command.pre_exec(move || {
            setsid()?;
            restore_file_limit()?;
            if let Some(template) = &template {
                fcntl_setfd(template, FdFlags::empty())?;
            }
            for number in &inherited {
                fcntl_setfd(BorrowedFd::borrow_raw(*number), FdFlags::empty())?;
            }
            let Some(user) = &user else { return Ok(()) };
            become_user(user)
        });
    }
    let child = command.spawn().map_err(|error| host(format!("cannot start {}", launch.binary.display()), &error))?;
    wait_for_qmp(launch, child)
}

/// Gives up all privileges. The groups come first: afterwards changing them would not be allowed any more.
fn become_user(user: &User) -> io::Result<()> {
    // The groups have the type that the system call takes, so that nothing is allocated after the fork.
    let mut groups = [Gid::ROOT; 64];
    let count = user.groups.len().min(groups.len());
    for (slot, gid) in groups.iter_mut().zip(&user.groups) {
        *slot = Gid::from_raw(*gid);
    }
    set_thread_groups(&groups[..count])?;
    set_thread_gid(Gid::from_raw(user.gid))?;
    set_thread_uid(Uid::from_raw(user.uid))?;
    Ok(())
}

/// Makes the directory for a machine's sockets in `dir`, root's, and its RAM files of these sizes, all of them
/// `user`'s.
///
/// # Errors
/// They are there already, or the file system refuses.
pub fn make_files(dir: &Path, ram_files: &[(PathBuf, u64)], user: Option<&User>) -> io::Result<()> {
    let owner = user.map(|user| (user.uid, user.gid));
    let run = run_dir(dir);
    fs::DirBuilder::new().mode(0o750).create(&run)?;
    if let Some((uid, gid)) = owner {
        chown(&run, Some(uid), Some(gid))?;
    }
    ram_files.iter().try_for_each(|(path, bytes)| make_ram_file(path, *bytes, user).map(drop))
}

/// Makes a RAM file of this size, `user`'s.
///
/// # Errors
/// As [`make_files`].
pub fn make_ram_file(path: &Path, bytes: u64, user: Option<&User>) -> io::Result<File> {
    let file = File::options().create_new(true).read(true).write(true).mode(0o600).open(path)?;
    file.set_len(bytes)?;
    if let Some(user) = user {
        fchown(&file, Some(user.uid), Some(user.gid))?;
    }
    Ok(file)
}

fn wait_for_qmp(launch: &Launch<'_>, mut child: Child) -> Result<Identity, Problem> {
    let deadline = Instant::now() + START_TIMEOUT;
    let identity = Identity::of(child.id());
    loop {
        if let Some(status) = child.try_wait().map_err(|error| host("cannot wait for QEMU", &error))? {
            return Err(failed(format!("QEMU ended at once ({status})"), launch));
        }
        // Connecting is the only proof that somebody listens: the file can be there before.
        if let Ok(stream) = connect(&launch.place.qmp) {
            drop(stream);
            return identity.map_err(|error| host("cannot look at QEMU's process", &error));
        }
        if Instant::now() > deadline {
            let _ = child.kill();
            let _ = child.wait();
            return Err(failed(
                format!("QEMU did not open its QMP socket within {} s", START_TIMEOUT.as_secs()),
                launch,
            ));
        }
        std::thread::sleep(LOOK);
    }
}

/// The problem of a QEMU that ended just after its start, with its last words; `None` where it has not ended. QEMU
/// opens its QMP socket before it has made its memory and its display.
#[must_use]
pub fn ended(launch: &Launch<'_>, process: Identity) -> Option<Problem> {
    process.is_ending().then(|| failed("QEMU ended while it started".into(), launch))
}

fn failed(message: String, launch: &Launch<'_>) -> Problem {
    let mut problem = Problem::new(Code::QemuFailed, Blame::Qemu, message).guest(Whereabouts::Gone);
    problem.cause = last_lines(&launch.place.log, 5);
    problem.hint("QEMU's own words are above; the arguments are passed on as they were given")
}

/// The last lines of a log; empty where it is no regular file.
#[must_use]
pub fn last_lines(path: &Path, count: usize) -> Vec<String> {
    let read = || -> io::Result<String> {
        let mut file = open_regular(path)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(LAST_BYTES)))?;
        let mut bytes = Vec::new();
        file.take(LAST_BYTES).read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    let text = read().unwrap_or_default();
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    lines[lines.len().saturating_sub(count)..].iter().map(|line| (*line).to_string()).collect()
}
