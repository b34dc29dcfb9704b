//! Agents, and processes around them, that are in their guest's hands: each misdeed costs its own guest at most its
//! migration, in bounded time, and the next guest is moved as if nothing had been.

use std::fs::File;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketType};
use sterna_agent_protocol::message::{Operation, ReplyHeader, RequestHeader};
use sterna_agent_protocol::{MAGIC, MAX_MESSAGE_BYTES, VERSION};
use sterna_api::report::Status;
use sterna_api::{Blame, MigrateOptions, Mode};
use sterna_engine::agent::{Advice, Agent, AgentError};
use sterna_engine::faults::GuestFaults;
use sterna_engine::faults::fence::Fence;
use sterna_engine::inside::InsideQemu;
use sterna_engine::memory::BlockFile;
use sterna_engine::monitor::Monitor;
use sterna_engine::source::track::WriteProtect;
use sterna_engine::source::{Fate, Outcome, migrate};
use zerocopy::{FromBytes, IntoBytes};

use crate::fixture::{cannot_run, scratch};
use crate::pair::destination::Destination;
use crate::pair::guest::GuestRam;
use crate::pair::inside::InsideSelf;
use crate::pair::outgoing;
use crate::pair::source::{Source, SourceVmm};
use crate::program::{Program, RAM_BYTES};

/// What the daemon waits for an answer here.
const TIMEOUT: Duration = Duration::from_millis(500);
/// Longer than anything here takes, on any machine.
const FOR_EVER: Duration = Duration::from_secs(120);

/// What an agent does with a request: the socket, the request's header.
type Misdeed = fn(&OwnedFd, &RequestHeader);

/// An agent that does one thing with whatever it is asked.
struct Double {
    dir: tempfile::TempDir,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Double {
    fn start(misdeed: Misdeed) -> Self {
        let dir = scratch();
        let listener = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        let address = rustix::net::SocketAddrUnix::new(dir.path().join("agent")).unwrap();
        rustix::net::bind(&listener, &address).unwrap();
        rustix::net::listen(&listener, 8).unwrap();
        let stop: Arc<AtomicBool> = Arc::default();
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            while let Ok(socket) = rustix::net::accept(&listener) {
                if stopped.load(Ordering::Acquire) {
                    return;
                }
                let mut request = vec![0; MAX_MESSAGE_BYTES];
                while let Ok((length, _)) = rustix::net::recv(&socket, &mut request[..], RecvFlags::empty()) {
                    let Ok((header, _)) = RequestHeader::read_from_prefix(&request[..length]) else { break };
                    misdeed(&socket, &header);
                }
            }
        });
        Self { dir, stop, thread: Some(thread) }
    }

    fn path(&self) -> std::path::PathBuf {
        self.dir.path().join("agent")
    }
}

impl Drop for Double {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        let _ = Agent::connect(&self.path(), TIMEOUT);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn reply(request: &RequestHeader, length: u32) -> ReplyHeader {
    ReplyHeader {
        magic: MAGIC.into(),
        version: VERSION.into(),
        operation: request.operation,
        sequence: request.sequence,
        length: length.into(),
        status: 0.into(),
        errno: 0.into(),
        item: 0.into(),
        reserved: 0.into(),
    }
}

fn send(socket: &OwnedFd, packet: &[u8]) -> bool {
    rustix::net::send(socket, packet, SendFlags::NOSIGNAL).is_ok()
}

/// Answers as a good agent would, with a descriptor of another kind.
fn with_descriptor(socket: &OwnedFd, request: &RequestHeader, descriptor: impl AsFd) {
    let body = vec![0; if request.operation.get() == Operation::OpenUserfaultfd as u16 { 16 } else { 0 }];
    let packet = [reply(request, body.len() as u32).as_bytes(), &body].concat();
    let descriptors = [descriptor.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
    let _ = rustix::net::sendmsg(socket, &[std::io::IoSlice::new(&packet)], &mut control, SendFlags::NOSIGNAL);
}

/// A pipe that nobody writes, so that reading it would wait for ever; a file that ends; a log that its owner may cut
/// short.
const MISDEEDS: [(&str, Misdeed); 11] = [
    ("stops answering", |_, _| {}),
    ("hangs up", |socket, _| {
        let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
    }),
    ("stops in the middle of a header", |socket, request| {
        send(socket, &reply(request, 0).as_bytes()[..7]);
    }),
    ("promises a body and sends none", |socket, request| {
        send(socket, reply(request, 4096).as_bytes());
    }),
    ("answers something else", |socket, request| {
        send(socket, ReplyHeader { sequence: 999_999.into(), ..reply(request, 0) }.as_bytes());
    }),
    ("speaks of another status", |socket, request| {
        send(socket, ReplyHeader { status: 4711.into(), ..reply(request, 0) }.as_bytes());
    }),
    ("sends more than a message holds", |socket, request| {
        let body = vec![0xff; MAX_MESSAGE_BYTES + 4096];
        send(socket, &[reply(request, body.len() as u32).as_bytes(), &body].concat());
    }),
    ("floods", |socket, request| {
        let packet = ReplyHeader { sequence: 0.into(), ..reply(request, 0) };
        while send(socket, packet.as_bytes()) {}
    }),
    ("sends a pipe", |socket, request| with_descriptor(socket, request, std::io::pipe().unwrap().0)),
    ("sends an endless file", |socket, request| with_descriptor(socket, request, File::open("/dev/zero").unwrap())),
    ("sends a log that it can cut short", |socket, request| {
        let log = rustix::fs::memfd_create("log", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&log, 1 << 20).unwrap();
        with_descriptor(socket, request, log);
    }),
];

#[test]
fn whatever_an_agent_does_each_question_to_it_ends_with_its_fault_and_in_time() {
    type Ask = fn(&mut Agent) -> Result<(), AgentError>;
    let questions: [(&str, Ask); 5] = [
        ("hello", |agent| agent.hello().map(drop)),
        ("blocks", |agent| agent.blocks().map(drop)),
        ("open", |agent| agent.open_userfaultfd(None, 0).map(drop)),
        ("log", |agent| agent.discard_log().map(drop)),
        ("transfers", |agent| agent.transfers().map(drop)),
    ];
    for (misdeed, act) in MISDEEDS {
        for (question, ask) in questions {
            let double = Double::start(act);
            let mut agent = Agent::connect(&double.path(), TIMEOUT).expect("it listens");
            let began = Instant::now();
            match ask(&mut agent) {
                // No list of blocks is a list of none: nothing of the guest's is found in it.
                Ok(()) => assert!(question == "blocks" && misdeed.starts_with("sends a"), "{misdeed}: {question}"),
                Err(AgentError::NotThere { .. } | AgentError::Refused { .. }) => panic!("{misdeed}: {question}"),
                Err(_) => {}
            }
            assert!(began.elapsed() < FOR_EVER, "{misdeed}: {question}");
            drop(agent);
        }
    }
}

/// RAM of the program, as a machine to be moved; `address` is where the agent says that it is.
fn machine(program: &Program, vmm: SourceVmm, address: impl FnOnce(u64) -> u64) -> sterna_engine::source::Outgoing {
    let mut agent = program.agent();
    let at = address(agent.blocks().expect("blocks")[0].address);
    let pid = program.pid().as_raw_nonzero().get().unsigned_abs();
    let ram = GuestRam::new(RAM_BYTES);
    let mut machine = outgoing(&ram, vmm, InsideSelf::default());
    let file = File::options().read(true).write(true).open(&program.ram).expect("its RAM file");
    machine.blocks = vec![BlockFile { spec: machine.blocks[0].spec.clone(), file, address: at, process: None }];
    machine.tracker = Box::new(WriteProtect::new(pid, InsideQemu::new(agent)).expect("its page tables"));
    machine
}

/// Where the agent says that RAM is, which is at this address.
type Lie = fn(u64) -> u64;

/// Moves it, in bounded time.
fn moved(machine: sterna_engine::source::Outgoing, peer: &str, mode: Mode) -> Outcome {
    let (say, outcome) = std::sync::mpsc::channel();
    let peer = peer.to_owned();
    std::thread::spawn(move || {
        let options = MigrateOptions { mode, ..MigrateOptions::default() };
        let _ = say.send(migrate(machine, &peer, &options, &Source::default(), &Monitor::new("guest")));
    });
    outcome.recv_timeout(FOR_EVER).expect("the migration of a hostile guest ends")
}

fn another_guest_is_moved() {
    let (host, peer) = Destination::serve();
    let ram = GuestRam::new(1 << 22);
    (0..1024).for_each(|page| ram.write_page(page, 3));
    let outcome = moved(outgoing(&ram, SourceVmm::new(None), InsideSelf::default()), &peer, Mode::Precopy);
    assert_eq!(outcome.report.status, Status::Completed, "{:?}", outcome.report.error);
    host.assert_same(&ram);
}

fn fill(path: &Path) {
    std::os::unix::fs::FileExt::write_all_at(&File::options().write(true).open(path).unwrap(), &vec![7; 1 << 22], 0)
        .unwrap();
}

#[test]
fn whatever_a_process_does_in_a_migration_costs_its_own_guest_only() {
    if cannot_run() {
        return;
    }
    // What it is told when its guest has stopped; whether that may cost it the migration.
    let misdeeds = [
        ("truncate 1048576", Some("ram-cut-short")),
        ("truncate 0", Some("ram-cut-short")),
        ("block", None),
        ("close", None),
        ("unmap 0 67108864", None),
        ("unmap 4096 8192", None),
        ("map private 0 0", None),
    ];
    for mode in [Mode::Precopy, Mode::Postcopy, Mode::StopAndCopy] {
        for (misdeed, code) in misdeeds {
            let (host, peer) = Destination::serve();
            host.postcopy.store(true, Ordering::Release);
            let program = Program::start();
            fill(&program.ram);
            let mut vmm = SourceVmm::new(None);
            let program = Arc::new(Mutex::new(program));
            let told = Arc::clone(&program);
            vmm.faults.at_stop = Some(Box::new(move || drop(told.lock().unwrap().tell(misdeed))));
            let machine = machine(&program.lock().unwrap(), vmm, |address| address);
            let outcome = moved(machine, &peer, mode);
            let problem = outcome.report.error.as_ref();
            match code {
                Some(code) => {
                    assert_eq!(problem.map(|problem| problem.code.as_str()), Some(code), "{misdeed}, {mode:?}");
                    assert_eq!(
                        (problem.unwrap().blame, outcome.fate),
                        (Blame::Qemu, Fate::Here),
                        "{misdeed}, {mode:?}"
                    );
                }
                None => assert!(
                    problem.is_none_or(|problem| problem.blame == Blame::Qemu),
                    "{misdeed}, {mode:?}: {problem:?}"
                ),
            }
            assert_eq!(host.running.load(Ordering::Acquire), outcome.fate == Fate::There, "{misdeed}, {mode:?}");
        }
    }
    another_guest_is_moved();
}

#[test]
fn a_process_that_stands_still_or_dies_ends_its_own_migration_only() {
    if cannot_run() {
        return;
    }
    for signal in [rustix::process::Signal::STOP, rustix::process::Signal::KILL] {
        let (host, peer) = Destination::serve();
        let program = Program::start();
        fill(&program.ram);
        let mut vmm = SourceVmm::new(None);
        let pid = program.pid();
        vmm.faults.at_stop = Some(Box::new(move || rustix::process::kill_process(pid, signal).unwrap()));
        let outcome = moved(machine(&program, vmm, |address| address), &peer, Mode::Precopy);
        // One that stands still may be moved: nothing more was to be asked of it.
        let problem = outcome.report.error.as_ref();
        assert!(problem.is_none_or(|problem| problem.blame == Blame::Qemu), "{signal:?}: {problem:?}");
        assert_eq!(host.running.load(Ordering::Acquire), outcome.fate == Fate::There, "{signal:?}");
    }
    another_guest_is_moved();
}

#[test]
fn an_agent_that_lies_about_where_its_ram_is_harms_its_own_guest_only() {
    if cannot_run() {
        return;
    }
    // Where half of it is, half of the writes are seen: then that guest alone arrives stale.
    let lies: [(&str, bool, Lie); 4] = [
        ("where nothing is", false, |_| 0x1_0000),
        ("the kernel's", false, |_| 0xffff_8000_0000_0000),
        ("the end of all addresses", false, |_| u64::MAX - RAM_BYTES - 0xfff),
        ("half of it elsewhere", true, |address| address + RAM_BYTES / 2),
    ];
    for (name, may_be_believed, lie) in lies {
        let (host, peer) = Destination::serve();
        let program = Program::start();
        fill(&program.ram);
        let outcome = moved(machine(&program, SourceVmm::new(None), lie), &peer, Mode::Precopy);
        assert_eq!(host.running.load(Ordering::Acquire), outcome.fate == Fate::There, "{name}");
        match &outcome.report.error {
            Some(problem) => {
                assert_eq!((problem.blame, outcome.fate), (Blame::Qemu, Fate::Here), "{name}: {problem:?}")
            }
            None => assert!(may_be_believed, "{name}: believed"),
        }
    }
    another_guest_is_moved();
}

/// Reclaim's fence reads the same descriptor. Seen to fail with a plain `read`: it waited for ever.
#[test]
fn a_fence_whose_userfaultfd_blocks_keeps_nobody_waiting() {
    if cannot_run() {
        return;
    }
    let ram = GuestRam::new(1 << 20);
    let inside = Kept::default();
    let kept = Arc::clone(&inside.kept);
    let fence = Fence::new(GuestFaults::of(inside), vec![ram.mapping.addresses()]).expect("a fence");
    rustix::io::ioctl_fionbio(kept.lock().unwrap().as_ref().unwrap(), false).unwrap();
    let (say, done) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let patience = fence.patience(Duration::from_millis(10));
        let range = ram.mapping.addresses();
        let (fenced_in, rest) = (range.start..range.start + 8192, range.start + 8192..range.end);
        let fenced = fence.close(vec![fenced_in, rest], &patience).unwrap().expect("nobody waits");
        let waits = fence.waits().unwrap();
        fenced.open().unwrap();
        say.send(waits).unwrap();
    });
    assert_eq!(done.recv_timeout(FOR_EVER), Ok(0));
}

/// A foot inside this process which keeps a duplicate that nobody expects.
#[derive(Default)]
struct Kept {
    inside: InsideSelf,
    kept: Arc<Mutex<Option<OwnedFd>>>,
}

impl sterna_engine::inside::Inside for Kept {
    fn open(
        &mut self,
        features: sterna_sys::userfaultfd::Features,
    ) -> Result<sterna_sys::userfaultfd::Userfaultfd, sterna_engine::error::MigrateError> {
        self.inside.open(features)
    }

    fn open_alone(
        &mut self,
        features: sterna_sys::userfaultfd::Features,
    ) -> Result<sterna_sys::userfaultfd::Userfaultfd, sterna_engine::error::MigrateError> {
        let made = self.inside.open_alone(features)?;
        *self.kept.lock().unwrap() = Some(made.as_fd().try_clone_to_owned().expect("a descriptor"));
        Ok(made)
    }

    fn lend(&mut self) -> Result<(), sterna_engine::error::MigrateError> {
        self.inside.lend()
    }

    fn log_discards(&mut self) -> Result<(), sterna_engine::error::MigrateError> {
        self.inside.log_discards()
    }

    fn reopen(&mut self) -> Result<Option<sterna_sys::userfaultfd::Userfaultfd>, sterna_engine::error::MigrateError> {
        self.inside.reopen()
    }

    fn advise(
        &mut self,
        advice: Advice,
        ranges: &[std::ops::Range<u64>],
    ) -> Result<(), sterna_engine::error::MigrateError> {
        self.inside.advise(advice, ranges)
    }

    fn map_own(&mut self, ranges: &[std::ops::Range<u64>]) -> Result<(), sterna_engine::error::MigrateError> {
        self.inside.map_own(ranges)
    }

    fn pid(&self) -> u32 {
        self.inside.pid()
    }

    fn discards(&mut self) -> sterna_engine::agent::Discards {
        self.inside.discards()
    }

    fn close(&mut self) {
        self.inside.close();
    }
}
