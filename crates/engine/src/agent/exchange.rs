//! One request, one reply.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rustix::net::sockopt::{self, Timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use sterna_agent_protocol::message::{Operation, ReplyHeader, RequestHeader, Status};
use sterna_agent_protocol::{MAGIC, MAX_MESSAGE_BYTES, VERSION};
use sterna_sys::path::Root;
use zerocopy::{FromBytes, IntoBytes};

use super::error::AgentError;

/// The process behind a socket, when it began to listen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// Its number in this process's pid namespace.
    pub pid: i32,
    /// Its user.
    pub uid: u32,
}

/// A connection on which every request gets one reply.
#[derive(Debug)]
pub(super) struct Exchange {
    socket: OwnedFd,
    timeout: Duration,
    sequence: u32,
    peer: Peer,
}

/// A reply that says done.
pub(super) struct Reply {
    pub body: Vec<u8>,
    pub descriptor: Option<OwnedFd>,
}

impl Exchange {
    pub fn connect(path: &Path, timeout: Duration) -> Result<Self, AgentError> {
        let place = Root::own().and_then(|root| root.find(path));
        let place = place.map_err(|error| AgentError::NotThere { path: path.to_owned(), source: error.into() })?;
        let connected = || -> rustix::io::Result<(OwnedFd, Peer)> {
            let socket =
                rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
            sockopt::set_socket_timeout(&socket, Timeout::Send, Some(timeout))?;
            sockopt::set_socket_timeout(&socket, Timeout::Recv, Some(timeout))?;
            rustix::net::connect(&socket, &SocketAddrUnix::new(place.itself())?)?;
            let credentials = sockopt::socket_peercred(&socket)?;
            let peer = Peer { pid: credentials.pid.as_raw_nonzero().get(), uid: credentials.uid.as_raw() };
            Ok((socket, peer))
        };
        match connected() {
            Ok((socket, peer)) => Ok(Self { socket, timeout, sequence: 0, peer }),
            Err(rustix::io::Errno::AGAIN) => Err(AgentError::Silent { operation: Operation::Hello, timeout }),
            Err(errno) => Err(AgentError::NotThere { path: path.to_owned(), source: errno.into() }),
        }
    }

    pub fn peer(&self) -> Peer {
        self.peer
    }

    /// Sends a request, whose body are the parts together, and waits for its reply.
    pub fn call(
        &mut self,
        operation: Operation,
        parts: &[&[u8]],
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<Reply, AgentError> {
        self.sequence = self.sequence.wrapping_add(1);
        self.send(operation, parts, descriptor).map_err(|errno| self.broken(operation, errno))?;
        let (mut packet, descriptor) = self.receive().map_err(|errno| self.broken(operation, errno))?;
        if packet.is_empty() {
            return Err(AgentError::Connection { operation, source: io::ErrorKind::UnexpectedEof.into() });
        }
        let header = self.check(operation, &packet)?;
        match Status::from_wire(header.status.get()) {
            Some(Status::Done) => {
                packet.drain(..size_of::<ReplyHeader>());
                Ok(Reply { body: packet, descriptor })
            }
            Some(Status::Version) | None => Err(AgentError::Malformed { what: "a status" }),
            Some(status) => {
                let (errno, item) = (header.errno.get(), header.item.get() as usize);
                Err(AgentError::Refused { operation, status, errno, item })
            }
        }
    }

    /// The header of a reply to what was asked last.
    fn check(&self, operation: Operation, packet: &[u8]) -> Result<ReplyHeader, AgentError> {
        const WHAT: AgentError = AgentError::Malformed { what: "a reply" };
        let (header, body) = ReplyHeader::read_from_prefix(packet).map_err(|_| WHAT)?;
        if header.magic.get() != MAGIC {
            return Err(WHAT);
        }
        if header.version.get() != VERSION {
            return Err(AgentError::Version { theirs: header.version.get() });
        }
        let answers = header.operation.get() == operation as u16 && header.sequence.get() == self.sequence;
        if answers && header.length.get() as usize == body.len() { Ok(header) } else { Err(WHAT) }
    }

    fn send(
        &self,
        operation: Operation,
        parts: &[&[u8]],
        descriptor: Option<BorrowedFd<'_>>,
    ) -> rustix::io::Result<()> {
        let length: usize = parts.iter().map(|part| part.len()).sum();
        let header = RequestHeader {
            magic: MAGIC.into(),
            version: VERSION.into(),
            operation: (operation as u16).into(),
            sequence: self.sequence.into(),
            length: u32::try_from(length).map_err(|_| rustix::io::Errno::MSGSIZE)?.into(),
        };
        let slices: Vec<_> = [header.as_bytes()].iter().chain(parts).map(|part| IoSlice::new(part)).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let descriptors = descriptor.map(|descriptor| [descriptor]);
        if let Some(descriptors) = &descriptors {
            control.push(SendAncillaryMessage::ScmRights(descriptors));
        }
        rustix::net::sendmsg(&self.socket, &slices, &mut control, SendFlags::NOSIGNAL).map(drop)
    }

    /// One packet, empty at the end of the connection. Descriptors beyond the first are closed.
    fn receive(&self) -> rustix::io::Result<(Vec<u8>, Option<OwnedFd>)> {
        let mut packet = vec![0; MAX_MESSAGE_BYTES];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut slices = [IoSliceMut::new(&mut packet)];
        let received = rustix::io::retry_on_intr(|| {
            rustix::net::recvmsg(&self.socket, &mut slices, &mut control, RecvFlags::CMSG_CLOEXEC)
        })?;
        let mut descriptor = None;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                descriptors.for_each(|received| descriptor = descriptor.take().or(Some(received)));
            }
        }
        if received.flags.contains(ReturnFlags::TRUNC) {
            return Err(rustix::io::Errno::MSGSIZE);
        }
        packet.truncate(received.bytes);
        Ok((packet, descriptor))
    }

    fn broken(&self, operation: Operation, errno: rustix::io::Errno) -> AgentError {
        match errno {
            rustix::io::Errno::AGAIN => AgentError::Silent { operation, timeout: self.timeout },
            errno => AgentError::Connection { operation, source: errno.into() },
        }
    }
}

/// Whether a descriptor that somebody sent is a userfaultfd.
pub(super) fn is_userfaultfd(descriptor: &OwnedFd) -> bool {
    std::fs::read_link(format!("/proc/self/fd/{}", descriptor.as_raw_fd()))
        .is_ok_and(|name| name.as_os_str() == "anon_inode:[userfaultfd]")
}
