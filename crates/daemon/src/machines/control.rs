//! What is asked of a machine's QEMU outside of migrations, each time over a connection of its own: QEMU serves one
//! client at a time, and the socket must be free for a migration, or for the user of an adopted machine.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::json;
use sterna_api::{Blame, Code, Problem, VmState};
use sterna_engine::agent::{Agent, AgentBlock, Sharing};
use sterna_engine::vmm::qemu::{ErrorLog, Inspection, QemuDestination, QemuProcess, QemuSource, SharedQmp, inspect};
use sterna_engine::vmm::qmp::Qmp;
use sterna_engine::vmm::{Destination, Source, Untracked, VmmError};
use sterna_sys::file::FileId;
use sterna_sys::process::{Mapping, maps};

use super::agent;
use super::backing::{Block, is_private, stretches};
use super::record::VmRecord;
use super::succession::Succession;
use super::template::Template;
use crate::problems;
use crate::process::{Handle, Identity};
use crate::qemu::launch::log_file;

/// How long a QEMU has to answer that was just started, each time that somebody connects: it makes its memory at first,
/// which may be much, or locked, and its host may have much to do.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// How long QEMU has for an answer.
pub const TIMEOUT: Duration = Duration::from_secs(5);
/// How long a QEMU whose process is not known has to end when it is told to.
const END_TIMEOUT: Duration = Duration::from_millis(500);
/// How long QEMU has to end when it is told to.
const QUIT_TIMEOUT: Duration = Duration::from_secs(5);

/// A connection to a QEMU.
#[derive(Debug)]
pub struct Control(Qmp);

impl Control {
    /// Connects.
    ///
    /// # Errors
    /// A [`Problem`] where nobody answers.
    pub fn connect(path: &Path) -> Result<Self, Problem> {
        Self::connect_within(path, TIMEOUT)
    }

    /// Connects to a QEMU that was just started.
    ///
    /// # Errors
    /// As [`Control::connect`].
    pub fn connect_started(path: &Path) -> Result<Self, Problem> {
        Self::connect_within(path, START_TIMEOUT)
    }

    /// Connects, where QEMU answers within so long.
    ///
    /// # Errors
    /// As [`Control::connect`].
    pub fn connect_within(path: &Path, timeout: Duration) -> Result<Self, Problem> {
        Qmp::connect(path, timeout).map(Self).map_err(|error| {
            let hint = match &error {
                // It takes connections, and greets nobody.
                VmmError::Silent { .. } => {
                    "another QMP client may hold the socket, as QEMU serves one at a time; or QEMU stands still"
                }
                VmmError::Gone { .. } => "it closed the connection: it has ended, or is about to; its log says why",
                _ => "does a QEMU listen there? Its log may say more",
            };
            let mut problem = problems::qemu(format!("QEMU does not answer at {}", path.display()), &error).hint(hint);
            problem.code = Code::QmpUnreachable;
            problem
        })
    }

    /// What it is made of.
    ///
    /// # Errors
    /// A [`Problem`] where it does not say.
    pub fn inspect(&mut self) -> Result<Inspection, Problem> {
        inspect(&mut self.0).map_err(|error| refused("tell what it is made of", &error))
    }

    /// The guest's state as QEMU names it: `running`, `paused`, `prelaunch`, `inmigrate`, `shutdown`, …
    ///
    /// # Errors
    /// A [`Problem`] where it does not say.
    pub fn status(&mut self) -> Result<String, Problem> {
        let status =
            self.0.execute("query-status", json!({}), TIMEOUT).map_err(|error| refused("tell its state", &error))?;
        Ok(status["status"].as_str().unwrap_or_default().into())
    }

    /// Sends a command without arguments.
    ///
    /// # Errors
    /// A [`Problem`] where QEMU refuses.
    pub fn send(&mut self, command: &str) -> Result<(), Problem> {
        self.0.execute(command, json!({}), TIMEOUT).map(drop).map_err(|error| refused(command, &error))
    }

    /// The connection itself.
    pub fn qmp(&mut self) -> &mut Qmp {
        &mut self.0
    }

    /// The connection, for several to take turns on.
    #[must_use]
    pub fn share(self) -> SharedQmp {
        Arc::new(Mutex::new(self.0))
    }
}

/// Whether a machine's disks read into its memory past the page tables, which its agent tells of then. `refusal` says
/// what cannot be done where somebody writes there who is not told of.
///
/// # Errors
/// A [`Problem`]: there is somebody, or QEMU does not answer.
pub fn reads_past(record: &VmRecord, vmm: &mut QemuSource, refusal: &str) -> Result<bool, Problem> {
    let told = match vmm.writes_untracked().map_err(|error| refused("tell its devices", &error))? {
        Untracked::Nobody => return Ok(false),
        Untracked::Reads => agent::tells_of_reads(&record.agent, record.process.pid)?,
        Untracked::Others => false,
    };
    if told {
        return Ok(true);
    }
    let why = "a disk with direct I/O, or a processor that runs guests of its own, may write its memory, and nobody tells where";
    Err(Problem::new(Code::DirectIo, Blame::Request, format!("{refusal}: {why}")).hint(
        "give such disks 'aio=threads' or 'aio=native', and let the guest run no guests; a QEMU that an earlier version of Sterna has started must be started anew",
    ))
}

/// What to say where QEMU did not do `what`.
pub fn refused(what: &str, error: &VmmError) -> Problem {
    match error {
        VmmError::Gone { guest_off: true } => Problem::new(Code::GuestOff, Blame::Guest, error.to_string()),
        VmmError::Gone { guest_off: false } => Problem::new(Code::QemuGone, Blame::Qemu, error.to_string()),
        _ => problems::qemu(format!("QEMU did not do what it was asked ({what})"), error),
    }
}

fn open(process: Identity) -> Result<QemuProcess, Problem> {
    let handle = process.open().ok_or_else(|| Problem::new(Code::QemuGone, Blame::Qemu, "QEMU has ended"))?;
    Ok(QemuProcess::from(handle.into_fd()))
}

/// The driver that moves a machine's devices away, over a connection that was made for it.
///
/// # Errors
/// A [`Problem`] where its QEMU has ended.
pub fn source(record: &VmRecord, qmp: SharedQmp) -> Result<QemuSource, Problem> {
    Ok(QemuSource::new(qmp, open(record.process)?))
}

/// The driver that takes a machine's devices in, over this connection; its QEMU writes to `log`.
///
/// # Errors
/// A [`Problem`] where its QEMU has ended.
pub fn destination(control: Control, record: &VmRecord, log: PathBuf) -> Result<QemuDestination, Problem> {
    let driver = QemuDestination::new(control.share(), open(record.process)?, Some(ErrorLog::new(log)));
    Ok(if record.running { driver } else { driver.staying_paused() })
}

/// Gives a guest back whose migration ended without its driver: calls off what QEMU has under way, stops the tracking,
/// and lets the guest run if it ran before. Only for a guest that is certain not to run elsewhere.
///
/// # Errors
/// A [`Problem`]; the guest is stopped then.
pub fn give_back(record: &VmRecord) -> Result<(), Problem> {
    let control = Control::connect(&record.qmp)?;
    let mut driver = QemuSource::recover(control.share(), open(record.process)?, record.running);
    driver.rollback().map_err(|error| refused("give the guest back", &error))?;
    if record.split.is_none() {
        stop_tracking(record);
    }
    Ok(())
}

/// Closes the userfaultfd that the agent keeps: of pages that are all here by now, or of write tracking that a daemon
/// of an earlier version left on. Not of a machine that is split: what is away would read as zeros.
pub fn stop_tracking(record: &VmRecord) {
    let closed = agent::connect(&record.agent, record.process.pid).and_then(|mut agent| Ok(agent.close_userfaultfd()?));
    if let Err(error) = closed {
        // The next migration closes what it finds; until then written pages cost a fault each.
        tracing::warn!(vm = %record.name, %error, "the agent may still hold a userfaultfd");
    }
}

/// Lets a guest run that was moved here by a daemon that died before it could.
///
/// # Errors
/// A [`Problem`]; the guest is stopped then.
pub fn let_run(record: &VmRecord, dir: &Path) -> Result<(), Problem> {
    let mut control = Control::connect(&record.qmp)?;
    if !record.running || control.status()? == "running" {
        return Ok(());
    }
    let mut driver = QemuDestination::new(control.share(), open(record.process)?, Some(ErrorLog::new(log_file(dir))));
    driver.start().map(drop).map_err(|error| refused("let the guest run", &error))
}

/// Ends a machine's QEMU: told to, then killed.
pub fn end_qemu(record: &VmRecord) {
    let Some(process) = record.process.open() else { return };
    let told = Control::connect(&record.qmp).and_then(|mut control| control.send("quit"));
    if told.is_err() || !process.wait(Some(QUIT_TIMEOUT)) {
        process.kill();
    }
}

/// Ends the QEMU of a machine that has not got its guest; it is gone when this returns.
pub fn end_other(succession: &Succession, dir: &Path) {
    if let Some(process) = succession.other() {
        return process.open().iter().for_each(Handle::kill);
    }
    // It was started, and the daemon ended before it was noted. It has no disk, and never runs.
    quit_unknown(&succession.place(dir).qmp);
}

/// Tells a QEMU to end of which nothing is known but where its QMP socket would be.
pub fn quit_unknown(qmp: &Path) {
    if Control::connect(qmp).is_ok_and(|mut control| control.send("quit").is_ok()) {
        std::thread::sleep(END_TIMEOUT);
    }
}

/// The API's state for QEMU's.
#[must_use]
pub fn vm_state(status: &str) -> VmState {
    if status == "running" { VmState::Running } else { VmState::Paused }
}

/// The agent inside QEMU, with the address of every RAM block: where the kernel says that QEMU has mapped the file on
/// record.
///
/// # Errors
/// A [`Problem`] where it does not answer, or does not know the RAM.
pub fn agent_and_addresses(socket: &Path, pid: u32, blocks: &[Block]) -> Result<(Agent, Vec<u64>), Problem> {
    let mut agent = agent::connect(socket, pid).map_err(|error| error.problem())?;
    let addresses = addresses(&mut agent, pid, blocks)?;
    Ok((agent, addresses))
}

/// The same addresses, of an agent that was reached.
///
/// # Errors
/// A [`Problem`] where it does not answer, or does not know the RAM.
pub fn addresses(agent: &mut Agent, pid: u32, blocks: &[Block]) -> Result<Vec<u64>, Problem> {
    let known = known_blocks(agent)?;
    let failed = |error| agent::failed(Code::AgentFailed, "the agent does not introduce itself", &error);
    let lost = agent.hello().map_err(failed)?.blocks_lost;
    if lost > 0 {
        return Err(Problem::new(
            Code::AgentRam,
            Blame::Ours,
            format!("the agent lost sight of {lost} RAM blocks: QEMU has too many"),
        ));
    }
    let maps = maps(pid).map_err(|error| problems::host("cannot look at QEMU's memory", &error))?;
    blocks.iter().map(|block| address_of(block, &maps, &known)).collect()
}

/// The RAM blocks that the agent sees.
fn known_blocks(agent: &mut Agent) -> Result<Vec<AgentBlock>, Problem> {
    let failed = |error| agent::failed(Code::AgentFailed, "the agent does not tell the RAM blocks", &error);
    agent.blocks().map_err(failed)
}

/// Where a RAM block is. Where the file on record is mapped is the kernel's word; the agent's is that it sees what
/// QEMU discards there.
fn address_of(block: &Block, maps: &[Mapping], known: &[AgentBlock]) -> Result<u64, Problem> {
    let file = block.file().map_err(|error| problems::host("cannot tell the machine's RAM", &error))?;
    if let Some(address) = block.private {
        return private_address(block, address, maps, known);
    }
    let mut mapped = stretches(maps, file).into_iter().filter(|stretch| stretch.length >= block.bytes).peekable();
    let named = format!("RAM block '{}' ({})", block.id, block.path.display());
    if mapped.peek().is_none() {
        return Err(Problem::new(Code::AgentRam, Blame::Qemu, format!("QEMU has not mapped {named}")));
    }
    let seen = |address: u64| {
        known.iter().any(|seen| seen.address == address && seen.offset == 0 && seen.length >= block.bytes)
    };
    let address = mapped.map(|stretch| stretch.address).find(|address| seen(*address));
    address.ok_or_else(|| Problem::new(Code::AgentRam, Blame::Ours, format!("the agent does not see {named}")))
}

/// The same of a block in QEMU's private memory, which may be at this address: there the agent sees the block, and by
/// the kernel's word the memory is QEMU's own.
fn private_address(block: &Block, address: u64, maps: &[Mapping], known: &[AgentBlock]) -> Result<u64, Problem> {
    let named = format!("RAM block '{}' ({})", block.id, block.path.display());
    let seen = known.iter().any(|seen| seen.address == address && is_block(seen, block));
    if !seen {
        return Err(Problem::new(Code::AgentRam, Blame::Ours, format!("the agent does not see {named}")));
    }
    let (template, own) = (block.template.as_ref().map(Template::file), block.file().ok());
    // What RAM consists of since it was forked lies where its own file does: only machines' RAM and such files do.
    let may_be = |file: FileId| Some(file) == template || own.is_some_and(|own| file.device == own.device);
    if !is_private(maps, &(address..address.saturating_add(block.bytes)), may_be) {
        let why = format!("QEMU has no private memory where the agent sees {named}");
        return Err(Problem::new(Code::AgentRam, Blame::Qemu, why));
    }
    Ok(address)
}

/// Whether what the agent sees is this block, in private memory. The file that QEMU was given is its mark: it has an
/// inode of its own. (The agent's device numbers are encoded otherwise than the kernel's in `maps`.)
fn is_block(seen: &AgentBlock, block: &Block) -> bool {
    let inode = block.file().map(|file| file.inode).ok();
    let whole = seen.offset == 0 && seen.length >= block.bytes && seen.sharing == Sharing::Private;
    whole && Some(seen.inode) == inode
}

/// Notes where a QEMU that was just started has its RAM in private memory.
///
/// # Errors
/// A [`Problem`] where the agent does not answer, or does not see it.
pub fn find_private(agent: &mut Agent, blocks: &mut [Block]) -> Result<(), Problem> {
    let known = known_blocks(agent)?;
    for block in blocks {
        let found = known.iter().find(|seen| is_block(seen, block)).map(|seen| seen.address);
        block.private = Some(found.ok_or_else(|| {
            let why = format!("the agent does not see RAM block '{}' in private memory", block.id);
            Problem::new(Code::AgentRam, Blame::Ours, why)
        })?);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixListener;

    use sterna_sys::process::parse_maps;

    use super::super::backing::Backing;
    use super::*;

    fn said(address: u64, inode: u64) -> AgentBlock {
        AgentBlock {
            address,
            length: 0x4000,
            offset: 0,
            device: 0x1f,
            inode,
            page_size: 4096,
            sharing: Sharing::Shared,
            backing: sterna_engine::agent::Backing::Unknown,
        }
    }

    /// Failed while only the first connection to a QEMU that was just started had more than the usual time: the next
    /// one, by which the devices come, was given up after that, and a migration to a busy host was refused.
    #[test]
    fn a_qemu_that_was_just_started_may_take_longer_to_answer_than_others() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qmp.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let slow = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            std::thread::sleep(TIMEOUT + Duration::from_millis(500));
            let greeting = json!({ "QMP": { "version": { "qemu": { "major": 7, "minor": 2, "micro": 0 } } } });
            writeln!(stream, "{greeting}").unwrap();
            let mut asked = String::new();
            BufReader::new(&stream).read_line(&mut asked).unwrap();
            let asked: serde_json::Value = serde_json::from_str(&asked).unwrap();
            writeln!(stream, "{}", json!({ "return": {}, "id": asked["id"] })).unwrap();
        });
        Control::connect_started(&path).unwrap();
        slow.join().unwrap();
    }

    /// Failed while a block was where the agent said that its inode is: an agent that names another guest's file, or
    /// any address, was believed.
    #[test]
    fn an_agent_that_lies_about_ram_is_not_believed() {
        let maps = parse_maps(
            b"7f0000000000-7f0000004000 rw-s 00000000 00:1f 77 /ram\n\
            7f0000010000-7f0000014000 rw-s 00000000 00:1f 78 /other\n\
            7f0000020000-7f0000024000 rw-s 00000000 00:1f 77 /ram\n",
        );
        let mut block = Block::new("ram", 0x4000, 4096, Path::new("/ram"));
        let code = |result: Result<u64, Problem>| result.unwrap_err().code;
        assert_eq!(
            code(address_of(&block, &maps, &[said(0x7f00_0000_0000, 77)])),
            "host-error",
            "nothing is on record"
        );
        let on_record = |inode| Backing { path: "/ram".into(), device: (0, 0x1f), inode, owned: true };
        block.backings = vec![on_record(77)];
        for lie in [0x7f00_0001_0000, 0x7f00_0003_0000, 0] {
            assert_eq!(code(address_of(&block, &maps, &[said(lie, 77)])), "agent-ram", "{lie:x}");
        }
        assert_eq!(address_of(&block, &maps, &[said(0x7f00_0002_0000, 77)]).unwrap(), 0x7f00_0002_0000);
        block.backings = vec![on_record(79)];
        assert_eq!(
            code(address_of(&block, &maps, &[said(0x7f00_0003_0000, 79)])),
            "agent-ram",
            "it is not mapped at all"
        );
    }

    #[test]
    fn private_memory_is_where_the_agent_sees_the_block_and_the_kernel_private_memory() {
        let maps = parse_maps(
            b"7f0000000000-7f0000004000 rw-p 00000000 00:00 0\n\
            7f0000010000-7f0000014000 rw-s 00000000 00:1f 77 /ram\n",
        );
        let mut block = Block::new("ram", 0x4000, 4096, Path::new("/ram"));
        block.backings = vec![Backing { path: "/ram".into(), device: (0, 0x1f), inode: 77, owned: true }];
        block.private = Some(0x7f00_0000_0000);
        let private = |address, inode| AgentBlock { sharing: Sharing::Private, ..said(address, inode) };
        assert_eq!(address_of(&block, &maps, &[private(0x7f00_0000_0000, 77)]).unwrap(), 0x7f00_0000_0000);
        for lie in [said(0x7f00_0000_0000, 77), private(0x7f00_0000_0000, 78), private(0x7f00_0001_0000, 77)] {
            assert_eq!(address_of(&block, &maps, &[lie]).unwrap_err().code, "agent-ram");
        }
        block.private = Some(0x7f00_0001_0000);
        let elsewhere = address_of(&block, &maps, &[private(0x7f00_0001_0000, 77)]);
        assert_eq!(elsewhere.unwrap_err().blame, Blame::Qemu, "that is no private memory");
    }
}
