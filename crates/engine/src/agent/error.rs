//! Why a request failed.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use sterna_agent_protocol::VERSION;
use sterna_agent_protocol::message::{Operation, Status};
use sterna_api::Blame;

/// A request to the library inside QEMU that failed.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// Nobody listens there.
    #[error(
        "no agent listens on {}: QEMU must be started with libsterna_agent.so in LD_PRELOAD and this path in STERNA_AGENT_SOCKET, \
         and its RAM must lie in a file", .path.display()
    )]
    NotThere {
        /// The socket.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// No answer in time.
    #[error("the agent in QEMU did not answer '{operation:?}' within {} ms", .timeout.as_millis())]
    Silent {
        /// What was asked.
        operation: Operation,
        /// How long it had.
        timeout: Duration,
    },
    /// The connection broke.
    #[error("the connection to the agent in QEMU failed during '{operation:?}'")]
    Connection {
        /// What was asked.
        operation: Operation,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// It speaks another version.
    #[error(
        "the agent in QEMU speaks version {theirs}, this daemon version {VERSION}: restart QEMU with this daemon's agent"
    )]
    Version {
        /// Its version.
        theirs: u16,
    },
    /// It said something that makes no sense.
    #[error("the agent in QEMU sent nonsense instead of {what}")]
    Malformed {
        /// What was expected.
        what: &'static str,
    },
    /// It did not do what it was asked. The connection stays good.
    #[error("the agent in QEMU refused '{operation:?}': {}", reason(*.status, *.errno, *.item))]
    Refused {
        /// What was asked.
        operation: Operation,
        /// Why.
        status: Status,
        /// What QEMU's kernel said, with [`Status::System`].
        errno: u32,
        /// Which item of a batch, counted from 0.
        item: usize,
    },
}

impl AgentError {
    /// Who is to blame, and what to do.
    #[must_use]
    pub fn culprit(&self) -> (Blame, &'static str) {
        match self {
            Self::NotThere { .. } => (
                Blame::Request,
                "QEMU must be started with LD_PRELOAD=…/libsterna_agent.so and STERNA_AGENT_SOCKET=PATH",
            ),
            Self::Silent { .. } | Self::Connection { .. } => {
                (Blame::Qemu, "does this QEMU still run? One that stands still, or is being debugged, does not answer")
            }
            Self::Malformed { .. } => {
                (Blame::Qemu, "what answers inside this QEMU is not Sterna's agent: look who has taken it over")
            }
            Self::Version { .. } => (Blame::Request, "restart QEMU with this daemon's agent"),
            // What its kernel said is part of the message.
            Self::Refused { .. } => (Blame::Qemu, "QEMU's log may say more"),
        }
    }

    /// Counts the failed item from the beginning of all batches.
    pub(super) fn counted_from(self, start: usize) -> Self {
        match self {
            Self::Refused { operation, status, errno, item } => {
                Self::Refused { operation, status, errno, item: start.saturating_add(item) }
            }
            other => other,
        }
    }
}

fn reason(status: Status, errno: u32, item: usize) -> String {
    match status {
        Status::System => {
            let error = io::Error::from_raw_os_error(i32::try_from(errno).unwrap_or(0));
            format!("{error} (item {item})")
        }
        Status::OutsideRam => format!("item {item} does not lie on whole pages inside one RAM block"),
        Status::AlreadyOpen => "it keeps a userfaultfd already".to_owned(),
        Status::NotOpen => "it keeps no userfaultfd".to_owned(),
        Status::Malformed | Status::Unknown | Status::Version | Status::Done => {
            format!("it does not understand the request ({status:?})")
        }
    }
}
