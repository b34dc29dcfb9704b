//! Starting machines: `run`, and the start of one that comes from another host.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_api::problem::Whereabouts;
use sterna_api::units::show_size;
use sterna_api::{BalloonSetting, Blame, Code, MemoryMode, Problem, RunRequest, Vm};
use sterna_engine::vmm::qemu::Inspection;
use sterna_protocol::layout::PAGE_BYTES;

use super::backing::OwnFile;
use super::control::{self, Control};
use super::record::{Block, Lifecycle, VmRecord};
use super::{Daemon, Hold};
use crate::config::{SOCKET_PATH_BYTES, check_socket_path};
use crate::problems::{check_name, host, invalid};
use crate::process::Identity;
use crate::qemu::arguments::{self, Additions, RAM_ID};
use crate::qemu::binary::{Binary, DEFAULT_NAME, Version};
use crate::qemu::files;
use crate::qemu::launch::{self, Launch, agent_socket, log_file, qmp_socket};
use crate::room;
use crate::state::remove_directory;

/// How long the agent of a QEMU that answers already may take to answer, too.
const AGENT_TIMEOUT: Duration = Duration::from_secs(3);
/// The least and the most RAM of a machine, bytes.
const MEMORY_LIMITS: std::ops::RangeInclusive<u64> = 1 << 20..=16 << 40;

impl Daemon {
    /// Starts a machine.
    ///
    /// # Errors
    /// A [`Problem`]; nothing is left behind but a log of what QEMU said.
    pub fn run(self: &Arc<Self>, request: &RunRequest) -> Result<Vm, Problem> {
        check_request(request)?;
        let mut user = request.arguments.clone();
        if request.balloon {
            arguments::add_balloon(&mut user)?;
        }
        let items = arguments::parse(&user);
        arguments::check_for_run(&items)?;
        files::check_absolute(&items)?;
        let default = self.config.qemu.clone().unwrap_or_else(|| DEFAULT_NAME.into());
        let binary = Binary::find(&request.qemu.as_ref().map_or(default, PathBuf::from))?;
        let reservation = self.reserve(&request.name, Hold::Starting)?;
        let dir = self.state.vm(&request.name);
        let ram = self.new_ram_path(&request.name);
        let additions =
            Additions { name: &request.name, qmp: &qmp_socket(&dir), ram: Some((request.memory_bytes, &ram)) };
        let blocks = vec![Block::new(RAM_ID, request.memory_bytes, PAGE_BYTES as u64, &ram)];
        let started = self.start(&binary.path, &arguments::for_run(&items, &additions), &request.name, blocks)?;
        let record = VmRecord {
            name: request.name.clone(),
            memory_bytes: request.memory_bytes,
            memory_mode: request.memory_mode,
            trust_group: request.trust_group.clone(),
            qemu_path: binary.path,
            qemu_version: version(&started.about),
            machine: started.about.machine.clone(),
            arguments: user,
            managed_ram: true,
            process: started.process,
            qmp: qmp_socket(&dir),
            agent: agent_socket(&dir),
            blocks: started.blocks.clone(),
            owns_ram_files: true,
            balloon: BalloonSetting::default(),
            lifecycle: Lifecycle::Here,
            running: true,
            kept_before: None,
            paging: None,
        };
        reservation.keep(&record, Hold::Free)?;
        started.keep();
        self.watch(&record);
        tracing::info!(vm = %record.name, pid = record.process.pid, "started");
        self.show(&record.name)
    }

    /// Starts QEMU with files of its own, these RAM blocks among them, and looks at what came up.
    ///
    /// # Errors
    /// A [`Problem`]; QEMU and its files are gone then.
    pub fn start(
        &self,
        binary: &Path,
        arguments: &[String],
        name: &str,
        mut blocks: Vec<Block>,
    ) -> Result<Started, Problem> {
        let dir = &self.state.vm(name);
        for socket in [qmp_socket(dir), agent_socket(dir)] {
            check_socket_path("the machine's socket", &socket).map_err(|error| {
                let mut problem = invalid(error.to_string())
                    .hint(format!("a shorter name or --state-dir: sockets may have {SOCKET_PATH_BYTES} bytes"));
                problem.code = Code::PathTooLong;
                problem
            })?;
        }
        let agent = self.agent_library()?;
        let ram_files: Vec<(PathBuf, u64)> = blocks.iter().map(|block| (block.path.clone(), block.bytes)).collect();
        let files = ram_files.iter().map(|(path, _)| OwnFile { path: path.clone(), file: None }).collect();
        self.state.make_vm(name).map_err(|error| directory_problem(dir, &error))?;
        let mut cleanup = Cleanup { process: None, files, dir: dir.into(), logs: self.state.logs(), armed: true };
        let launch = Launch { binary, arguments, dir, ram_files: &ram_files, agent: &agent, user: self.user() };
        let process = launch::launch(&launch)?;
        cleanup.process = Some(process);
        // The directory is root's: what has these names now is what was made above.
        for block in &mut blocks {
            block.recall_here().map_err(|error| host("cannot look at the machine's RAM", &error))?;
        }
        let asked = Control::connect(&qmp_socket(dir)).and_then(|mut control| control.inspect());
        let answered = asked.and_then(|about| wait_for_agent(dir, process, &blocks).map(|()| about));
        // Whatever it is that did not answer: where QEMU has ended, its own words say why.
        let about = answered.map_err(|problem| launch::ended(&launch, process).unwrap_or(problem))?;
        Ok(Started { process, about, blocks, cleanup })
    }
}

/// A machine's directory that cannot be made.
pub(super) fn directory_problem(dir: &Path, error: &io::Error) -> Problem {
    if error.kind() != io::ErrorKind::AlreadyExists {
        return host("cannot make the machine's directory", error);
    }
    let message = format!("{} is there already, and nobody knows what became of its machine", dir.display());
    Problem::new(Code::NameTaken, Blame::Request, message)
        .hint("the daemon's log says why its record cannot be used. Choose another name; or end its QEMU, and remove the directory")
}

/// Waits until the agent answers: its thread begins beside QEMU's own, and on a busy host QEMU may be the first to answer.
fn wait_for_agent(dir: &Path, process: Identity, blocks: &[Block]) -> Result<(), Problem> {
    let deadline = Instant::now() + AGENT_TIMEOUT;
    loop {
        match control::agent_and_addresses(&agent_socket(dir), process.pid, blocks) {
            Err(problem)
                if problem.code == Code::AgentMissing && Instant::now() < deadline && process.open().is_some() =>
            {
                std::thread::sleep(Duration::from_millis(5));
            }
            answered => return answered.map(drop),
        }
    }
}

/// The version of a running QEMU.
#[must_use]
pub fn version(about: &Inspection) -> Version {
    (about.version.0, about.version.1, about.version.2)
}

fn check_request(request: &RunRequest) -> Result<(), Problem> {
    check_name(&request.name)?;
    if request.memory_mode == MemoryMode::Private {
        return Err(Problem::new(Code::PrivateMemory, Blame::Request, "memory mode 'private' cannot be moved yet")
            .hint("use --memory-mode shared"));
    }
    if !MEMORY_LIMITS.contains(&request.memory_bytes) || !request.memory_bytes.is_multiple_of(PAGE_BYTES as u64) {
        return Err(invalid(format!("{} bytes of memory are no size of a machine", request.memory_bytes))
            .hint("between 1M and 16T, a multiple of 4096 bytes"));
    }
    let total = room::total_bytes();
    if request.memory_bytes > total {
        let (asked, total) = (show_size(request.memory_bytes), show_size(total));
        return Err(Problem::new(
            Code::TooMuchMemory,
            Blame::Request,
            format!("a machine of {asked} is asked for, and this host has {total} of memory"),
        )
        .guest(Whereabouts::Gone)
        .hint("give it less, or run it on a host that has more"));
    }
    if let Some(text) = request.arguments.iter().find(|argument| argument.contains('\0')) {
        return Err(invalid(format!("the argument {text:?} contains a zero byte")));
    }
    Ok(())
}

/// A QEMU that was just started. Dropped without [`Started::keep`], it and its files are gone.
#[derive(Debug)]
pub struct Started {
    /// Its process.
    pub process: Identity,
    /// What it says of itself.
    pub about: Inspection,
    /// Its RAM, with the files that hold it.
    pub blocks: Vec<Block>,
    cleanup: Cleanup,
}

impl Started {
    /// A file of the machine that is to be gone with it.
    pub fn with_file(&mut self, path: &Path) {
        self.cleanup.files.push(OwnFile { path: path.into(), file: None });
    }

    /// The machine stays: its record is written.
    pub fn keep(mut self) {
        self.cleanup.armed = false;
    }
}

#[derive(Debug)]
struct Cleanup {
    process: Option<Identity>,
    files: Vec<OwnFile>,
    dir: PathBuf,
    logs: PathBuf,
    armed: bool,
}

impl Drop for Cleanup {
    fn drop(&mut self) {
        if !self.armed {
            return;
        }
        if let Some(process) = self.process.and_then(|process| process.open()) {
            process.kill();
        }
        remove_files(&self.dir, &self.files, &self.logs);
    }
}

/// Removes what a machine leaves behind. What its QEMU said last is kept as `STATE/logs/NAME.log`, until the next of that name ends.
pub fn remove_files(dir: &Path, ram_files: &[OwnFile], logs: &Path) {
    for file in ram_files {
        if let Err(error) = file.remove() {
            tracing::warn!(path = %file.path.display(), %error, "cannot remove a RAM file");
        }
    }
    let log = log_file(dir);
    if let Some(name) = dir.file_name()
        && fs::symlink_metadata(&log).is_ok_and(|about| about.is_file() && about.len() > 0)
    {
        let _ = fs::rename(&log, logs.join(format!("{}.log", name.to_string_lossy())));
    }
    if let Err(error) = remove_directory(dir)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(path = %dir.display(), %error, "cannot remove a machine's directory");
    }
}
