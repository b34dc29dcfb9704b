//! A stand-in for the library inside QEMU: a thread that answers the daemon's client with what a fuzzer gives it.

use std::io::IoSlice;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags,
    SocketType,
};
use sterna_agent_protocol::message::{ReplyHeader, RequestHeader};
use sterna_agent_protocol::{MAGIC, MAX_MESSAGE_BYTES, VERSION};
use sterna_engine::agent::Agent;
use zerocopy::{FromBytes, IntoBytes};

/// A reply as a fuzzer wants it.
#[derive(Debug, Default)]
pub struct Answer {
    /// No header: the body is the whole packet.
    pub bare: bool,
    /// The header's status; 0 is "done".
    pub status: u32,
    /// The header's `errno`.
    pub errno: u32,
    /// What follows the header.
    pub body: Vec<u8>,
    /// A descriptor beside it.
    pub descriptor: Option<OwnedFd>,
}

/// The stand-in, for as long as the process lives.
#[derive(Debug)]
pub struct Library {
    path: PathBuf,
    answers: Sender<Vec<Answer>>,
}

impl Library {
    /// Begins to listen.
    #[must_use]
    pub fn start() -> Self {
        let path = std::env::temp_dir().join(format!("sterna-fuzz-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let listener = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .expect("a socket");
        rustix::net::bind(&listener, &SocketAddrUnix::new(&path).expect("a short path")).expect("an address");
        rustix::net::listen(&listener, 4).expect("a listener");
        let (answers, given) = channel();
        std::thread::spawn(move || answer_all(&listener, &given));
        Self { path, answers }
    }

    /// A client whose requests get these answers in turn, and empty ones when they are used up.
    #[must_use]
    pub fn client(&self, answers: Vec<Answer>) -> Agent {
        self.answers.send(answers).expect("the thread lives");
        Agent::connect(&self.path, Duration::from_secs(5)).expect("it listens")
    }
}

fn answer_all(listener: &OwnedFd, given: &Receiver<Vec<Answer>>) {
    for answers in given {
        let connection = rustix::net::accept(listener).expect("a call");
        let mut answers = answers.into_iter();
        let mut request = vec![0; MAX_MESSAGE_BYTES];
        while let Ok((1.., _)) = rustix::net::recv(&connection, &mut request[..], RecvFlags::empty()) {
            let Ok((asked, _)) = RequestHeader::read_from_prefix(&request) else { break };
            if answer(&connection, &asked, &answers.next().unwrap_or_default()).is_err() {
                break;
            }
        }
    }
}

fn answer(connection: &OwnedFd, asked: &RequestHeader, answer: &Answer) -> rustix::io::Result<()> {
    let header = ReplyHeader {
        magic: MAGIC.into(),
        version: VERSION.into(),
        operation: asked.operation,
        sequence: asked.sequence,
        length: (answer.body.len() as u32).into(),
        status: answer.status.into(),
        errno: answer.errno.into(),
        item: u32::MAX.into(),
        reserved: 0.into(),
    };
    let header = if answer.bare { &[] } else { header.as_bytes() };
    let body = &answer.body[..answer.body.len().min(MAX_MESSAGE_BYTES - header.len())];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = answer.descriptor.as_ref().map(|descriptor| [descriptor.as_fd()]);
    if let Some(descriptors) = &descriptors {
        control.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    let slices = [IoSlice::new(header), IoSlice::new(body)];
    rustix::net::sendmsg(connection, &slices, &mut control, SendFlags::NOSIGNAL).map(drop)
}

/// A sealed memory file that begins with `bytes` and is `length` bytes long.
#[must_use]
pub fn sealed_memory(bytes: &[u8], length: u64) -> OwnedFd {
    let memory =
        rustix::fs::memfd_create("log", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).expect("a memory file");
    rustix::io::write(&memory, bytes).expect("room");
    rustix::fs::ftruncate(&memory, length.max(bytes.len() as u64)).expect("room");
    rustix::fs::fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW).expect("seals");
    memory
}
