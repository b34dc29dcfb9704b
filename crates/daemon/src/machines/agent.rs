//! The agent inside a machine's QEMU.

use std::path::{Path, PathBuf};
use std::time::Duration;

use sterna_api::{Blame, Code, Problem};
use sterna_engine::agent::{Agent, AgentError};

use crate::problems;

/// How long it has for an answer.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Why the agent inside a QEMU was not reached.
#[derive(Debug, thiserror::Error)]
pub enum Unreached {
    /// It does not answer.
    #[error(transparent)]
    NoAnswer(#[from] AgentError),
    /// Something else answers in its place.
    #[error("what listens at {} is process {peer}, and QEMU is {pid}", .socket.display())]
    Foreign {
        /// Its socket.
        socket: PathBuf,
        /// The process that answers.
        peer: i32,
        /// QEMU's.
        pid: u32,
    },
}

impl Unreached {
    /// The problem that this is for a request.
    #[must_use]
    pub fn problem(&self) -> Problem {
        match self {
            Self::NoAnswer(error) => failed(Code::AgentMissing, "the agent inside QEMU does not answer", error),
            Self::Foreign { .. } => Problem::new(Code::AgentForeign, Blame::Qemu, self.to_string())
                .hint("each QEMU needs a STERNA_AGENT_SOCKET of its own; is it the right process number?"),
        }
    }
}

/// Connects to the agent inside this QEMU.
///
/// # Errors
/// [`Unreached`].
pub fn connect(socket: &Path, pid: u32) -> Result<Agent, Unreached> {
    let agent = Agent::connect(socket, TIMEOUT)?;
    // The path comes from QEMU's environment, or from its directory: what listens there may be another's.
    let peer = agent.peer().pid;
    if u32::try_from(peer) != Ok(pid) {
        return Err(Unreached::Foreign { socket: socket.to_owned(), peer, pid });
    }
    Ok(agent)
}

/// Whether the agent tells of all that QEMU reads into guest RAM. One of an earlier version tells of nothing.
///
/// # Errors
/// A [`Problem`]: it does not answer.
pub fn tells_of_reads(socket: &Path, pid: u32) -> Result<bool, Problem> {
    let mut agent = connect(socket, pid).map_err(|error| error.problem())?;
    match agent.transfers() {
        Ok(table) => Ok(table.is_complete().unwrap_or(false)),
        Err(AgentError::Refused { .. }) => Ok(false),
        Err(error) => Err(failed(Code::AgentFailed, "the agent does not tell what is read into RAM", &error)),
    }
}

/// What the agent did not do.
pub fn failed(code: Code, what: &str, error: &AgentError) -> Problem {
    let (blame, hint) = error.culprit();
    let mut problem = problems::host(what, error).hint(hint);
    (problem.code, problem.blame) = (code, blame);
    problem
}
