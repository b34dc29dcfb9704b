//! What is asked of a machine's QEMU outside of migrations, each time over a connection of its own: QEMU serves one client at a
//! time, and the socket must be free for a migration, or for the user of an adopted machine.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::json;
use sterna_api::{Blame, Problem, VmState};
use sterna_engine::agent::{Agent, AgentError};
use sterna_engine::vmm::qemu::{ErrorLog, Inspection, QemuDestination, QemuProcess, QemuSource, SharedQmp, inspect};
use sterna_engine::vmm::qmp::Qmp;
use sterna_engine::vmm::{Destination, Source, VmmError};

use super::record::{Block, VmRecord, seen_from};
use crate::problems;
use crate::process::Identity;
use crate::qemu::launch::log_file;

/// How long QEMU, or the agent inside it, has for an answer.
pub(super) const TIMEOUT: Duration = Duration::from_secs(5);

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
            problem.code = "qmp-unreachable".into();
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

/// What to say where QEMU did not do `what`.
pub(super) fn refused(what: &str, error: &VmmError) -> Problem {
    match error {
        VmmError::Gone { guest_off: true } => Problem::new("guest-off", Blame::Guest, error.to_string()),
        VmmError::Gone { guest_off: false } => Problem::new("qemu-gone", Blame::Qemu, error.to_string()),
        _ => problems::qemu(format!("QEMU did not do what it was asked ({what})"), error),
    }
}

fn open(process: Identity) -> Result<QemuProcess, Problem> {
    let handle = process.open().ok_or_else(|| Problem::new("qemu-gone", Blame::Qemu, "QEMU has ended"))?;
    Ok(QemuProcess::from(handle.into_fd()))
}

/// The driver that moves a machine's devices away, over a connection that was made for it.
///
/// # Errors
/// A [`Problem`] where its QEMU has ended.
pub fn source(record: &VmRecord, qmp: SharedQmp) -> Result<QemuSource, Problem> {
    Ok(QemuSource::new(qmp, open(record.process)?))
}

/// The driver that takes a machine's devices in.
///
/// # Errors
/// A [`Problem`] where its QEMU does not answer.
pub fn destination(record: &VmRecord, dir: &Path) -> Result<QemuDestination, Problem> {
    let control = Control::connect(&record.qmp)?;
    Ok(QemuDestination::new(control.share(), open(record.process)?, Some(ErrorLog::new(log_file(dir)))))
}

/// Gives a guest back whose migration ended without its driver: calls off what QEMU has under way, stops the tracking, and lets
/// the guest run if it ran before. Only for a guest that is certain not to run elsewhere.
///
/// # Errors
/// A [`Problem`]; the guest is stopped then.
pub fn give_back(record: &VmRecord) -> Result<(), Problem> {
    let control = Control::connect(&record.qmp)?;
    let mut driver = QemuSource::recover(control.share(), open(record.process)?, record.running);
    driver.rollback().map_err(|error| refused("give the guest back", &error))?;
    stop_tracking(record);
    Ok(())
}

/// Ends write tracking that a dead daemon left on: the agent keeps the descriptor.
pub fn stop_tracking(record: &VmRecord) {
    let closed = Agent::connect(&record.agent, TIMEOUT).and_then(|mut agent| agent.close_userfaultfd());
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

/// The API's state for QEMU's.
#[must_use]
pub fn vm_state(status: &str) -> VmState {
    if status == "running" { VmState::Running } else { VmState::Paused }
}

/// What the agent did not do.
fn agent_failed(code: &str, what: &str, error: &AgentError) -> Problem {
    let (blame, hint) = error.culprit();
    let mut problem = problems::host(what, error).hint(hint);
    (problem.code, problem.blame) = (code.into(), blame);
    problem
}

/// The agent inside QEMU, with the address of every RAM block.
///
/// # Errors
/// A [`Problem`] where it does not answer, or does not know the RAM.
pub fn agent_and_addresses(socket: &Path, pid: u32, blocks: &[Block]) -> Result<(Agent, Vec<u64>), Problem> {
    let mut agent = Agent::connect(socket, TIMEOUT)
        .map_err(|error| agent_failed("agent-missing", "the agent inside QEMU does not answer", &error))?;
    // The path comes from QEMU's environment, or from its directory: what listens there may be another's.
    let peer = agent.peer().pid;
    if u32::try_from(peer) != Ok(pid) {
        let why = format!("what listens at {} is process {peer}, and QEMU is {pid}", socket.display());
        return Err(Problem::new("agent-foreign", Blame::Qemu, why)
            .hint("each QEMU needs a STERNA_AGENT_SOCKET of its own; is it the right process number?"));
    }
    let failed = |what| move |error| agent_failed("agent-failed", what, &error);
    let known = agent.blocks().map_err(failed("the agent does not tell the RAM blocks"))?;
    let lost = agent.hello().map_err(failed("the agent does not introduce itself"))?.blocks_lost;
    if lost > 0 {
        return Err(Problem::new(
            "agent-ram",
            Blame::Ours,
            format!("the agent lost sight of {lost} RAM blocks: QEMU has too many"),
        ));
    }
    let address = |block: &Block| {
        let file = std::fs::metadata(seen_from(pid, &block.path))
            .map_err(|error| problems::host(format!("cannot look at {}", block.path.display()), &error))?;
        let mapping = known.iter().find(|mapping| {
            mapping.inode == file.ino()
                && mapping.device == file.dev()
                && mapping.offset == 0
                && mapping.length >= block.bytes
        });
        mapping.map(|mapping| mapping.address).ok_or_else(|| {
            let why = format!("the agent does not see RAM block '{}' ({})", block.id, block.path.display());
            Problem::new("agent-ram", Blame::Ours, why)
        })
    };
    let addresses = blocks.iter().map(address).collect::<Result<_, _>>()?;
    Ok((agent, addresses))
}
