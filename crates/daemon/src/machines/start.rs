//! Starting a machine's QEMU: of one that is run here, and of one that comes from another host.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_api::{Blame, Code, MemoryMode, Problem};
use sterna_engine::agent::Agent;
use sterna_engine::vmm::qemu::Inspection;
use sterna_sys::host;

use super::agent::{self, Unreached};
use super::backing::{Block, OwnFile};
use super::control::{self, Control};
use super::files::{directory_problem, remove_each, remove_files};
use super::record::Running;
use super::succession::Succession;
use crate::config::{SOCKET_PATH_BYTES, check_socket_path};
use crate::problems::{self, invalid};
use crate::process::Identity;
use crate::qemu::launch::{self, Launch, Place, RamKind};
use crate::qemu::own_tap;
use crate::qemu::user::User;
use crate::state::StateDir;

/// How long the agent of a QEMU that answers already may take to answer, too.
const AGENT_TIMEOUT: Duration = Duration::from_secs(10);

/// What starts the machines' QEMUs.
#[derive(Debug)]
pub struct Launcher {
    /// Where the machines' files go.
    pub state: Arc<StateDir>,
    /// The library inside QEMU, where the configuration names it.
    pub agent: Option<PathBuf>,
    /// Whom QEMU runs as, where it is not root.
    pub user: Option<User>,
    /// The trust group whose machines' memory KSM may merge.
    pub ksm_group: Option<String>,
    /// Whether shared memory is in huge pages where nothing else is said of a machine.
    pub huge_pages: bool,
}

impl Launcher {
    /// What a machine of this mode and trust group has for RAM. Nobody's pages are merged but those of the one group
    /// that the configuration names: KSM merges whatever is equal, and a write to a merged page takes longer, which
    /// tells the writer that another machine has the same page.
    #[must_use]
    pub fn ram_kind(&self, mode: MemoryMode, trust_group: Option<&str>) -> RamKind {
        match mode {
            MemoryMode::Shared => RamKind::Files,
            MemoryMode::Private => {
                RamKind::Private { mergeable: trust_group.is_some() && trust_group == self.ksm_group.as_deref() }
            }
        }
    }

    /// Starts QEMU with files of its own, these RAM blocks among them, and looks at what came up. `template`: the file
    /// that the first block's private memory begins as, open for reading only.
    ///
    /// # Errors
    /// A [`Problem`]; QEMU and its files are gone then.
    pub fn start(
        &self,
        binary: &Path,
        arguments: &[String],
        name: &str,
        (kind, mut blocks): (RamKind, Vec<Block>),
        template: Option<&File>,
    ) -> Result<(Started, Reached), Problem> {
        let dir = &self.state.vm(name);
        let place = Place::first(dir);
        let agent = self.library_for(&place)?;
        let ram_files: Vec<(PathBuf, u64)> = blocks.iter().map(|block| (block.path.clone(), block.bytes)).collect();
        let files = files_of(&blocks);
        self.state.make_vm(name).map_err(|error| directory_problem(dir, &error))?;
        let cleanup = Cleanup::new(Leftovers::Machine(files), dir, self.state.logs());
        let user = self.user.as_ref();
        launch::make_files(dir, &ram_files, user)
            .map_err(|error| problems::host("cannot make the machine's files", &error))?;
        // The directory is root's: what has these names now is what was made above.
        for block in &mut blocks {
            block.recall_here().map_err(|error| problems::host("cannot look at the machine's RAM", &error))?;
        }
        let (ram, mut arguments) = (kind, arguments.to_vec());
        let inherited = &own_tap::make(&mut arguments)?;
        let arguments = &arguments;
        let launch = Launch { binary, arguments, place: &place, inherited, agent: &agent, ram, template, user };
        bring_up(&launch, blocks, cleanup)
    }

    /// Starts another QEMU on the RAM of a machine that has one, with these descriptors of ours; private memory it gets
    /// of its own, and the files of its blocks are made. What one says that comes to nothing is kept.
    ///
    /// # Errors
    /// As [`start`](Self::start); the machine is as it was.
    pub fn start_beside(
        &self,
        binary: &Path,
        arguments: &[String],
        name: &str,
        (succession, ram, mut blocks): (&Succession, RamKind, Vec<Block>),
        inherited: &[OwnedFd],
    ) -> Result<(Started, Reached), Problem> {
        let dir = &self.state.vm(name);
        let place = succession.place(dir);
        let agent = self.library_for(&place)?;
        let own = if ram == RamKind::Files { Vec::new() } else { files_of(&blocks) };
        let leftovers = Leftovers::Beside(name.into(), succession.clone(), own.clone());
        let cleanup = Cleanup::new(leftovers, dir, self.state.logs());
        let user = self.user.as_ref();
        if !own.is_empty() {
            let made = blocks.iter_mut().try_for_each(|block| {
                launch::make_ram_file(&block.path, block.bytes, user)?;
                block.recall_here()
            });
            made.map_err(|error| problems::host("cannot make the machine's files", &error))?;
        }
        let launch = Launch { binary, arguments, place: &place, inherited, agent: &agent, ram, template: None, user };
        bring_up(&launch, blocks, cleanup)
    }

    /// The library inside QEMU, for one whose sockets have paths that a socket may have.
    fn library_for(&self, place: &Place) -> Result<PathBuf, Problem> {
        check_sockets(place)?;
        self.agent_library()
    }

    /// RAM blocks as these are, which hold nothing yet, with files of their own that are to be made.
    #[must_use]
    pub fn blocks_like(&self, name: &str, blocks: &[Block]) -> Vec<Block> {
        let like = |block: &Block| {
            let path = self.new_ram_path(name);
            Block { template: block.template.clone(), ..Block::new(&block.id, block.bytes, block.page_bytes, &path) }
        };
        blocks.iter().map(like).collect()
    }

    /// A new RAM file's path.
    #[must_use]
    pub fn new_ram_path(&self, name: &str) -> PathBuf {
        self.state.ram().join(format!("{name}-{:08x}", host::random_u128() as u32))
    }

    /// The library inside QEMU: where the configuration says, else beside the daemon, else where packages put it.
    ///
    /// # Errors
    /// A [`Problem`] where it is nowhere.
    fn agent_library(&self) -> Result<PathBuf, Problem> {
        const NAME: &str = "libsterna_agent.so";
        let beside = std::env::current_exe().ok().and_then(|exe| Some(exe.parent()?.join(NAME)));
        let places = match &self.agent {
            Some(path) => vec![path.clone()],
            None => beside.into_iter().chain([Path::new("/usr/lib/sterna").join(NAME)]).collect(),
        };
        places.iter().find(|path| path.is_file()).cloned().ok_or_else(|| {
            let list: Vec<String> = places.iter().map(|path| path.display().to_string()).collect();
            Problem::new(Code::AgentNotFound, Blame::Host, "the agent library for QEMU is not on this host")
                .hint(format!("it is looked for at {}; name another with 'agent' in sternad.toml", list.join(" and ")))
        })
    }
}

/// The files of RAM blocks, wherever their names lead.
fn files_of(blocks: &[Block]) -> Vec<OwnFile> {
    blocks.iter().map(|block| OwnFile { path: block.path.clone(), file: None }).collect()
}

/// Checks that a QEMU's sockets have paths that a socket may have.
///
/// # Errors
/// A [`Problem`] where one is too long.
pub fn check_sockets(place: &Place) -> Result<(), Problem> {
    [&place.qmp, &place.agent].into_iter().try_for_each(|socket| {
        check_socket_path("the machine's socket", socket).map_err(|error| {
            let mut problem = invalid(error.to_string())
                .hint(format!("a shorter name or --state-dir: sockets may have {SOCKET_PATH_BYTES} bytes"));
            problem.code = Code::PathTooLong;
            problem
        })
    })
}

/// Starts QEMU, and looks at what came up.
fn bring_up(launch: &Launch<'_>, mut blocks: Vec<Block>, mut cleanup: Cleanup) -> Result<(Started, Reached), Problem> {
    let (place, kind) = (launch.place, launch.ram);
    let process = launch::launch(launch)?;
    cleanup.process = Some(process);
    tracing::debug!(qmp = %place.qmp.display(), "QEMU listens");
    let mut reach = || {
        let mut control = Control::connect_started(&place.qmp)?;
        tracing::debug!("QEMU answers");
        let about = control.inspect()?;
        let (agent, addresses) = wait_for_agent(&place.agent, process, kind, &mut blocks)?;
        tracing::debug!("QEMU is up");
        Ok((about, Reached { control, agent, addresses }))
    };
    // Whatever it is that did not answer: where QEMU has ended, its own words say why.
    let (about, reached) = reach().map_err(|problem| launch::ended(launch, process).unwrap_or(problem))?;
    Ok((Started { process, about, blocks, place: place.clone(), cleanup }, reached))
}

/// Waits until the agent answers: its thread begins beside QEMU's own, and on a busy host QEMU may be the first to
/// answer. Then it must see all of the RAM: the address of each block.
fn wait_for_agent(
    socket: &Path,
    process: Identity,
    kind: RamKind,
    blocks: &mut [Block],
) -> Result<(Agent, Vec<u64>), Problem> {
    let deadline = Instant::now() + AGENT_TIMEOUT;
    let mut agent = loop {
        match agent::connect(socket, process.pid) {
            Err(Unreached::NoAnswer(_)) if Instant::now() < deadline && process.open().is_some() => {
                std::thread::sleep(Duration::from_millis(5));
            }
            reached => break reached.map_err(|error| error.problem())?,
        }
    };
    if let RamKind::Private { .. } = kind {
        control::find_private(&mut agent, blocks)?;
    }
    let addresses = control::addresses(&mut agent, process.pid, blocks)?;
    Ok((agent, addresses))
}

/// What reached a QEMU that was just started. As long as this is kept nobody else reaches it: it serves one QMP client.
#[derive(Debug)]
pub struct Reached {
    /// The connection to QEMU itself.
    pub control: Control,
    /// The agent in it.
    pub agent: Agent,
    /// Where the agent sees each block of RAM.
    pub addresses: Vec<u64>,
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
    place: Place,
    cleanup: Cleanup,
}

impl Started {
    /// The running QEMU, with its binary's path, as the machine's record begins with it.
    #[must_use]
    pub fn qemu(&self, path: PathBuf) -> Running<'_> {
        let Place { qmp, agent, .. } = self.place.clone();
        Running { process: self.process, path, about: &self.about, qmp, agent }
    }

    /// A file of the machine that is to be gone with it.
    pub fn with_file(&mut self, path: &Path) {
        if let Leftovers::Machine(files) = &mut self.cleanup.leftovers {
            files.push(OwnFile { path: path.into(), file: None });
        }
    }

    /// The machine stays: its record is written.
    pub fn keep(mut self) {
        self.cleanup.armed = false;
    }
}

/// What is left of a QEMU that was started in vain.
#[derive(Debug)]
enum Leftovers {
    /// A machine, with these files.
    Machine(Vec<OwnFile>),
    /// A QEMU beside that of the machine of this name, with these files of RAM of its own.
    Beside(String, Succession, Vec<OwnFile>),
}

#[derive(Debug)]
struct Cleanup {
    process: Option<Identity>,
    leftovers: Leftovers,
    /// The machine's directory.
    dir: PathBuf,
    logs: PathBuf,
    armed: bool,
}

impl Cleanup {
    fn new(leftovers: Leftovers, dir: &Path, logs: PathBuf) -> Self {
        Self { process: None, leftovers, dir: dir.into(), logs, armed: true }
    }
}

impl Drop for Cleanup {
    fn drop(&mut self) {
        if !self.armed {
            return;
        }
        if let Some(process) = self.process.and_then(|process| process.open()) {
            process.kill();
        }
        match &self.leftovers {
            Leftovers::Machine(files) => remove_files(&self.dir, files, &self.logs),
            Leftovers::Beside(name, succession, files) => {
                succession.tidy(name, &self.dir, &self.logs);
                remove_each(files);
            }
        }
    }
}
