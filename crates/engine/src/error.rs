//! What can go wrong in a migration, whose fault it is, and the [`Problem`](sterna_api::Problem) that people see.

use std::io;

use sterna_api::problem::Whereabouts;
use sterna_api::{Blame, Code, Problem};
use sterna_protocol::frame::FrameError;
use sterna_protocol::hello::{Features, HelloError};
use sterna_protocol::layout::LayoutError;
use sterna_protocol::message::MessageError;
use sterna_protocol::session::Violation;

use crate::agent::AgentError;
use crate::destination::undecodable::DecodeError;
use crate::id::DaemonId;
use crate::memory::fault::{RamError, RamFault};
use crate::transport::refusal::TlsError;
use crate::vmm::VmmError;

/// Why a migration did not succeed.
#[derive(Debug, thiserror::Error)]
pub enum MigrateError {
    /// Somebody cancelled it.
    #[error("the migration was cancelled")]
    Cancelled,
    /// The options are invalid.
    #[error("{0}")]
    Options(String),
    /// The peer could not be reached.
    #[error("cannot reach the daemon at {peer}")]
    Unreachable {
        /// The peer's address.
        peer: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The link broke, or the peer said nothing for too long.
    #[error("the link to the peer failed while {doing}")]
    Link {
        /// The operation that failed.
        doing: &'static str,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The two daemons do not trust each other.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The peer speaks another protocol, or another version of it.
    #[error(transparent)]
    Hello(#[from] HelloError),
    /// The peer sent a message that makes no sense.
    #[error("the peer sent an invalid message")]
    Message(#[from] MessageError),
    /// The peer sent a frame that makes no sense.
    #[error("the peer sent an invalid frame")]
    Frame(#[from] FrameError),
    /// The peer sent encoded pages that cannot be decoded, or whose digests do not fit: they would not be the guest's
    /// pages.
    #[error("the peer sent invalid pages")]
    Decode(#[from] DecodeError),
    /// The peer spoke out of turn.
    #[error("the peer spoke out of turn")]
    Violation(#[from] Violation),
    /// The peer's reply is not what was asked for.
    #[error("the peer's reply is invalid: {0}")]
    Reply(&'static str),
    /// The peer's request is invalid in this session.
    #[error("the peer's request is invalid: {0}")]
    Request(&'static str),
    /// This daemon did not do its part: a bug.
    #[error("Sterna itself failed: {0}")]
    Bug(&'static str),
    /// The daemon that answers is not the one that has the migration on record: its word does not count.
    #[error(
        "another daemon answers there than the one that accepted the guest ({})",
        .answers.map_or("too old to say who it is".into(), |id| format!("it is {id}, and the guest went to {meant}"))
    )]
    AnotherDaemon {
        /// The daemon that accepted the guest.
        meant: DaemonId,
        /// The daemon that answers; `None` where it is too old to say who it is.
        answers: Option<DaemonId>,
    },
    /// The peer said no, or failed.
    #[error("{}", .0.message)]
    Peer(Problem),
    /// A memory host of the guest did not do its part.
    #[error("{}", .0.message)]
    MemoryHost(Problem),
    /// The peer receives as many machines as it may already: it may accept this one later.
    #[error("{}", .0.message)]
    Busy(Problem),
    /// The guest has RAM that cannot be moved.
    #[error("the guest's RAM cannot be moved")]
    Layout(#[from] LayoutError),
    /// The VMM did not do what it was asked.
    #[error(transparent)]
    Vmm(#[from] VmmError),
    /// The agent inside QEMU did not do what it was asked.
    #[error("the agent inside QEMU failed while {doing}")]
    Agent {
        /// The operation that failed.
        doing: &'static str,
        /// The cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The kernel did not do what it was asked.
    #[error("the host's kernel failed while {doing}")]
    Host {
        /// The operation that failed.
        doing: &'static str,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The guest's RAM, or a part of it, was taken away.
    #[error("the guest's RAM is lost")]
    Ram(#[source] RamFault),
    /// This host has no memory left for the guest's pages.
    #[error("this host has no memory left for the guest ({room_bytes} bytes, kept as a reserve)")]
    OutOfMemory {
        /// The memory that is left, bytes.
        room_bytes: u64,
    },
    /// The migration did not converge in the time it had.
    #[error(
        "the guest writes faster than its pages can be sent: after {elapsed_s:.0} s a pause of {predicted_ms:.0} ms is still to be \
         expected, and {limit_ms:.0} ms are accepted{tried}"
    )]
    NotConverging {
        /// How long it tried, seconds.
        elapsed_s: f64,
        /// The predicted pause, milliseconds.
        predicted_ms: f64,
        /// The longest pause that was accepted in the end, milliseconds.
        limit_ms: f64,
        /// The end of the message, on what was done to the guest; may be empty.
        tried: String,
    },
    /// The time was up before each page of the guest had gone once.
    #[error(
        "the time was up before all of the guest's memory was sent once: after {elapsed_s:.0} s {left_pages} pages were left"
    )]
    OutOfTime {
        /// How long it tried, seconds.
        elapsed_s: f64,
        /// How many pages were left.
        left_pages: u64,
    },
    /// The guest cannot be slowed down on this host.
    #[error("no processor time can be taken from the guest on this host")]
    Throttle(#[source] sterna_sys::Error),
    /// Bodies arrived damaged although the guest was stopped.
    #[error("{0} pages arrived damaged although the guest was stopped")]
    Damaged(usize),
    /// The VMM wrote guest RAM while it saved its devices, after the destination may have read it.
    #[error(
        "QEMU wrote {0} pages of the guest's RAM while it saved its devices, and the destination may have loaded them as they were before"
    )]
    WrittenWhileSaving(u64),
    /// A QEMU that was to take the guest over touched the guest's RAM before it had the guest.
    #[error("the new QEMU touched {0} pages of the guest's RAM before it had the guest")]
    TouchedEarly(u64),
    /// A QEMU wrote guest RAM while the devices went from one QEMU to the other.
    #[error("{changed} of {pages} pages of the guest's RAM changed while its devices went from QEMU to QEMU")]
    ChangedOnTheWay {
        /// Pages that changed.
        changed: u64,
        /// Pages compared.
        pages: u64,
    },
    /// The VMM has something read into guest RAM past the page tables, and does not tell where.
    #[error("devices read into the guest's memory past the page tables, and QEMU does not tell where")]
    UntoldReads,
    /// Others than the VMM can write what clones of a guest would have in common with it.
    #[error("another program can write the memory that the clones would share")]
    WrittenByOthers,
    /// The two sides' pages differ after the migration.
    #[error("{mismatches} of {pages} pages differ between the two hosts")]
    Mismatch {
        /// Pages that differ.
        mismatches: u64,
        /// Pages compared.
        pages: u64,
    },
    /// The daemon could not write a record that must survive its death.
    #[error("{}", .0.message)]
    Record(Problem),
}

impl From<RamError> for MigrateError {
    fn from(error: RamError) -> Self {
        match error {
            RamError::Layout(error) => Self::Layout(error),
            RamError::Fault(fault) => Self::Ram(fault),
            error @ (RamError::Map { .. } | RamError::Process { .. }) => {
                Self::Host { doing: "mapping the guest's RAM", source: io::Error::other(error) }
            }
        }
    }
}

impl MigrateError {
    /// Turns a link's error during an operation into this error.
    pub fn link(doing: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Link { doing, source }
    }

    /// Turns a kernel's error during an operation into this error: [`Self::Ram`] where the guest's RAM is lost.
    pub fn host(doing: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| match RamFault::of(&source) {
            Some(RamFault::ProcessGone) => Self::Vmm(VmmError::Gone { guest_off: false }),
            Some(fault) => Self::Ram(fault.clone()),
            None => Self::Host { doing, source },
        }
    }

    /// Turns a kernel's error that names its own call into this error.
    pub fn kernel(doing: &'static str) -> impl FnOnce(sterna_sys::Error) -> Self {
        move |source| Self::Host { doing, source: source.into() }
    }

    /// Turns a kernel's error about the VMM's process into this error. Where the kernel does not know the process any
    /// more, the VMM has ended. Where it finds no such memory there, or another use of it, the VMM has changed its
    /// mappings.
    pub fn vmm_process(doing: &'static str) -> impl FnOnce(sterna_sys::Error) -> Self {
        move |source| match source.errno() {
            Some(libc::ESRCH) => Self::Vmm(VmmError::Gone { guest_off: false }),
            Some(libc::ENOENT | libc::EINVAL | libc::EBUSY) => {
                Self::Vmm(VmmError::Mappings { doing, source: source.into() })
            }
            _ => Self::Host { doing, source: source.into() },
        }
    }

    /// The problem as the source reports it. What the peer reports happened at the destination and says nothing about
    /// the guest here.
    #[must_use]
    pub fn problem_at_source(&self) -> Problem {
        let problem = self.problem();
        match self {
            Self::Peer(theirs) | Self::Busy(theirs) => {
                Problem { message: format!("at the destination: {}", theirs.message), ..problem }
                    .guest(Whereabouts::Source)
            }
            Self::Vmm(VmmError::Gone { .. }) => problem.guest(Whereabouts::Gone),
            _ => problem,
        }
    }

    /// The problem as people and programs see it.
    #[must_use]
    pub fn problem(&self) -> Problem {
        let (code, blame, hint) = match self {
            Self::Peer(problem) | Self::Busy(problem) | Self::Record(problem) | Self::MemoryHost(problem) => {
                return problem.clone();
            }
            Self::Cancelled => (Code::Cancelled, Blame::Request, None),
            Self::Options(_) => (Code::BadOptions, Blame::Request, None),
            Self::Unreachable { .. } => (
                Code::PeerUnreachable,
                Blame::Peer,
                Some("is sternad running there with --listen, and is the port open?"),
            ),
            Self::Link { .. } => {
                (Code::LinkFailed, Blame::Peer, Some("look at the network between the hosts, then try again"))
            }
            Self::Tls(error) => return error.problem(),
            Self::Hello(HelloError::Features { features, theirs: true }) if features.0 & Features::TLS.0 != 0 => (
                Code::TlsMixed,
                Blame::Peer,
                Some(
                    "give this daemon a [tls] section in its sternad.toml, with a certificate of the peer's authority",
                ),
            ),
            Self::Hello(HelloError::Stranger) => {
                (Code::NotSterna, Blame::Peer, Some("the address must be that of sternad's --listen"))
            }
            Self::AnotherDaemon { .. } => (
                Code::AnotherDaemon,
                Blame::Request,
                Some(
                    "give the address of the daemon that accepted the guest, with its former state directory: 'sterna resume NAME --to HOST:PORT'",
                ),
            ),
            Self::Hello(_) => (Code::PeerVersion, Blame::Peer, Some("bring both hosts to the same version of Sterna")),
            Self::Message(_) | Self::Frame(_) | Self::Violation(_) | Self::Reply(_) | Self::Request(_) => (
                Code::PeerProtocol,
                Blame::Peer,
                Some("the peer or the network between damages what is sent; nothing of it was used"),
            ),
            Self::Bug(_) => (Code::Internal, Blame::Ours, Some("please report this with the daemon's log")),
            Self::Layout(_) => (Code::RamLayout, Blame::Request, None),
            Self::Vmm(VmmError::Gone { guest_off: true }) => (Code::GuestOff, Blame::Guest, None),
            Self::Vmm(VmmError::Gone { guest_off: false }) => (Code::QemuGone, Blame::Qemu, Some("its log says why")),
            Self::Vmm(_) => (Code::QemuFailed, Blame::Qemu, Some("QEMU's log on both hosts may say more")),
            Self::Agent { source, .. } => {
                let (blame, hint) =
                    source.downcast_ref().map_or((Blame::Ours, "the daemon's log may say more"), AgentError::culprit);
                (Code::AgentFailed, blame, Some(hint))
            }
            Self::Host { .. } => (Code::HostFailed, Blame::Host, None),
            Self::Ram(RamFault::CutShort { .. }) => (
                Code::RamCutShort,
                Blame::Qemu,
                Some(
                    "only QEMU can change the size of this file, and no QEMU does so by itself: look who has taken control of it",
                ),
            ),
            Self::Ram(RamFault::ProcessGone) => (Code::QemuGone, Blame::Qemu, Some("its log says why")),
            Self::Ram(RamFault::Unreadable { .. }) => {
                (Code::HostFailed, Blame::Host, Some("the kernel's log names damaged memory"))
            }
            Self::Ram(RamFault::NoMemory { .. }) => (
                Code::RamFull,
                Blame::Host,
                Some("make room in the file system of the guest's RAM files, then try again"),
            ),
            Self::OutOfMemory { .. } => {
                (Code::OutOfMemory, Blame::Host, Some("make room at the destination, or choose another"))
            }
            Self::NotConverging { .. } => (
                Code::NotConverging,
                Blame::Guest,
                Some(
                    "allow a longer pause (--downtime-limit, --downtime-ramp), slow the guest down (--throttle), send less \
                     (--compress zstd, --delta xbzrle), give it more bandwidth, or --on-timeout force",
                ),
            ),
            Self::OutOfTime { .. } => (
                Code::NotConverging,
                Blame::Request,
                Some(
                    "allow more time (--timeout), send less (--compress zstd), give it more bandwidth, or --on-timeout force",
                ),
            ),
            Self::Throttle(_) => (
                Code::CannotThrottle,
                Blame::Host,
                Some(
                    "migrate without --throttle, or let the daemon make control groups with the cpu controller (systemd: Delegate=cpu)",
                ),
            ),
            Self::Damaged(_) | Self::Decode(_) => {
                (Code::Damaged, Blame::Peer, Some("the network or a host damages data: look for the cause first"))
            }
            Self::WrittenWhileSaving(_) => (
                Code::WrittenWhileSaving,
                Blame::Qemu,
                Some("try again; where it happens each time, please report which devices the machine has"),
            ),
            Self::UntoldReads => (
                Code::DirectIo,
                Blame::Request,
                Some("a disk with 'aio=io_uring' is read so: give it 'aio=threads' or 'aio=native'"),
            ),
            Self::WrittenByOthers => (
                Code::ForeignWriters,
                Blame::Host,
                Some("find who has a file of the guest's RAM open for writing; while a gang arrives here, wait for it"),
            ),
            Self::TouchedEarly(_) => (
                Code::TouchedEarly,
                Blame::Qemu,
                Some(
                    "this QEMU cannot replace another with these devices; please report which devices the machine has",
                ),
            ),
            Self::ChangedOnTheWay { .. } => (
                Code::VerifyMismatch,
                Blame::Qemu,
                Some(
                    "the guest may have pages that it did not write: start it anew when you can, and please report which \
                     devices the machine has",
                ),
            ),
            Self::Mismatch { .. } => {
                (Code::VerifyMismatch, Blame::Ours, Some("please report this with the options you used"))
            }
        };
        let mut problem = Problem::from_error(code, blame, self);
        problem.hint = hint.map(String::from);
        problem
    }
}

#[cfg(test)]
mod tests {
    use sterna_agent_protocol::message::Operation;

    use super::*;

    /// Seen to fail: a panic of ours, a machine without RAM and a wrong request of a *source* were "the peer's reply",
    /// and a silent agent was our fault.
    #[test]
    fn each_failure_names_who_is_at_fault() {
        let agent = |source| MigrateError::Agent { doing: "asking", source: Box::new(source) };
        let silent = AgentError::Silent { operation: Operation::Hello, timeout: std::time::Duration::from_secs(5) };
        let refused = |errno| {
            let kernel = sterna_sys::pagemap::Pagemap::open(u32::MAX).expect_err("there is no such process");
            assert_eq!(kernel.errno(), Some(errno));
            MigrateError::vmm_process("looking")(kernel)
        };
        let cut_short = RamFault::CutShort { id: "ram".into(), file_bytes: 1, bytes: 2 };
        let full = RamFault::NoMemory { id: "ram".into() };
        for (error, code, blame) in [
            (MigrateError::Reply("another"), "peer-protocol", Blame::Peer),
            (MigrateError::Request("another"), "peer-protocol", Blame::Peer),
            (MigrateError::Bug("a thread broke off"), "internal", Blame::Ours),
            (LayoutError::Blocks(0).into(), "ram-layout", Blame::Request),
            (agent(silent), "agent-failed", Blame::Qemu),
            (agent(AgentError::Malformed { what: "a reply" }), "agent-failed", Blame::Qemu),
            (agent(AgentError::Version { theirs: 9 }), "agent-failed", Blame::Request),
            (refused(libc::ENOENT), "qemu-failed", Blame::Qemu),
            (MigrateError::host("reading")(io::Error::other(cut_short)), "ram-cut-short", Blame::Qemu),
            (MigrateError::host("reading")(io::Error::other(full)), "ram-full", Blame::Host),
            (MigrateError::host("reading")(io::ErrorKind::UnexpectedEof.into()), "host-failed", Blame::Host),
        ] {
            let problem = error.problem();
            assert_eq!((problem.code.as_str(), problem.blame), (code, blame), "{error:?}");
        }
    }
}
