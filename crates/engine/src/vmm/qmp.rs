//! A synchronous QMP client: commands with a time limit, and the events between them in a queue.
//!
//! QEMU may die, hang or be replaced by something else at any moment. So every wait is bounded, and after the first
//! broken line the connection only reports that it is broken. A client whose connection is lost can connect again: QEMU
//! greets it anew.

mod message;

use std::collections::VecDeque;
use std::io;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recv, sendmsg};
use serde_json::{Value, json};

pub use message::{DecodeError, Event, LineBuffer, MAX_LINE_BYTES, Message, Version};

use crate::vmm::VmmError;

/// The most events that wait in the queue; the oldest are dropped first. A guest can cause some kinds as often as it
/// likes.
const MAX_EVENTS: usize = 1024;

/// The most messages that are read once the time is over: enough for what QEMU had said by then, and a limit where it
/// never stops speaking.
const MAX_LATE: usize = 2 * MAX_EVENTS;

/// The size of one read, bytes.
const READ_BYTES: usize = 64 << 10;

/// A connection to one QEMU.
#[derive(Debug)]
pub struct Qmp {
    stream: UnixStream,
    version: Version,
    lines: LineBuffer,
    events: VecDeque<Event>,
    next_id: u64,
    /// Whether the guest switched itself off, by the last event about that.
    guest_off: bool,
    /// What runs the guest's processors, once it was asked: it stays that.
    pub(super) accelerator: Option<String>,
    /// Why the connection has ended, set once: nothing more comes from it.
    ended: Option<Ended>,
}

/// Why a connection is at its end.
#[derive(Debug, Clone, Copy)]
enum Ended {
    /// QEMU closed it.
    Closed,
    /// It carried nonsense, or failed.
    Broken(io::ErrorKind),
}

impl Qmp {
    /// Connects to QEMU's socket, and makes the connection ready for commands. Tries again while nobody listens there
    /// yet.
    ///
    /// # Errors
    /// [`VmmError::Connection`] or [`VmmError::Silent`] where no QEMU answers within `timeout`. QEMU serves one client
    /// at a time, and is silent where another one is connected.
    pub fn connect(path: &Path, timeout: Duration) -> Result<Self, VmmError> {
        let deadline = Instant::now() + timeout;
        let stream = loop {
            match sterna_sys::path::connect(path) {
                Ok(stream) => break stream,
                Err(source) if Instant::now() < deadline && not_there_yet(&source) => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                // A QEMU that hangs accepts nobody.
                Err(source) if source.kind() == io::ErrorKind::WouldBlock => {
                    return Err(silent("QMP connection", timeout));
                }
                Err(source) => {
                    return Err(VmmError::Connection { doing: format!("connecting to {}", path.display()), source });
                }
            }
        };
        Self::new(stream, deadline.saturating_duration_since(Instant::now()))
    }

    /// Makes a connection ready on which nothing was said yet.
    ///
    /// # Errors
    /// As [`Qmp::connect`].
    pub fn new(stream: UnixStream, timeout: Duration) -> Result<Self, VmmError> {
        let doing = "QMP greeting";
        stream.set_nonblocking(true).map_err(|source| VmmError::Connection { doing: doing.into(), source })?;
        let mut qmp = Self {
            stream,
            version: Version(0, 0, 0),
            lines: LineBuffer::default(),
            events: VecDeque::new(),
            next_id: 1,
            guest_off: false,
            accelerator: None,
            ended: None,
        };
        let mut patience = Patience::until(Instant::now() + timeout);
        loop {
            match qmp.receive(patience.deadline, doing)? {
                Some(Message::Greeting(version)) => {
                    qmp.version = version;
                    break;
                }
                Some(_) if !patience.is_over() => {}
                _ => return Err(silent(doing, timeout)),
            }
        }
        qmp.execute("qmp_capabilities", json!({}), timeout)?;
        Ok(qmp)
    }

    /// QEMU's version.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Runs a command and returns its result. Pass `json!({})` where it takes no arguments.
    ///
    /// # Errors
    /// [`VmmError::Refused`] with QEMU's own words; [`VmmError::Silent`] after `timeout`, and the late answer is
    /// dropped when it comes; [`VmmError::Gone`] and [`VmmError::Connection`] for ever once the connection has ended.
    pub fn execute(&mut self, command: &str, arguments: Value, timeout: Duration) -> Result<Value, VmmError> {
        self.command(command, arguments, None, timeout)
    }

    /// Runs a command that carries a descriptor (`getfd`, `add-fd`); QEMU gets a duplicate.
    ///
    /// # Errors
    /// As [`Qmp::execute`].
    pub fn execute_with_fd(
        &mut self,
        command: &str,
        arguments: Value,
        fd: BorrowedFd<'_>,
        timeout: Duration,
    ) -> Result<Value, VmmError> {
        self.command(command, arguments, Some(fd), timeout)
    }

    /// Waits for an event and takes it out of the queue; earlier ones stay. `None` where `timeout` passed first.
    ///
    /// # Errors
    /// [`VmmError::Gone`] or [`VmmError::Connection`], once no such event waits in the queue.
    pub fn wait_event(
        &mut self,
        mut wanted: impl FnMut(&Event) -> bool,
        timeout: Duration,
    ) -> Result<Option<Event>, VmmError> {
        let mut patience = Patience::until(Instant::now() + timeout);
        let mut seen = 0;
        loop {
            if let Some(at) = (seen..self.events.len()).find(|&at| wanted(&self.events[at])) {
                return Ok(self.events.remove(at));
            }
            seen = self.events.len();
            if patience.is_over() || self.receive(patience.deadline, "waiting for an event")?.is_none() {
                return Ok(None);
            }
            // The queue drops its oldest event when it is full.
            if self.events.len() == seen {
                seen = seen.saturating_sub(1);
            }
        }
    }

    /// Reads what QEMU has said, without waiting, and returns the oldest event.
    ///
    /// # Errors
    /// As [`Qmp::wait_event`].
    pub fn poll_event(&mut self) -> Result<Option<Event>, VmmError> {
        if let Err(error) = self.take_in()
            && self.events.is_empty()
        {
            return Err(error);
        }
        Ok(self.events.pop_front())
    }

    /// Drops the events that wait, such as those of an earlier migration.
    ///
    /// # Errors
    /// [`VmmError::Gone`] or [`VmmError::Connection`].
    pub fn drop_events(&mut self) -> Result<(), VmmError> {
        let taken = self.take_in();
        self.events.clear();
        taken
    }

    /// Why nothing more can come from this QEMU, or that its guest has switched itself off. Does not wait.
    pub fn ended(&mut self) -> Option<VmmError> {
        match self.take_in() {
            Err(error) => Some(error),
            Ok(()) if self.guest_off => Some(VmmError::Gone { guest_off: true }),
            Ok(()) => None,
        }
    }

    fn take_in(&mut self) -> Result<(), VmmError> {
        let mut patience = Patience::until(Instant::now());
        while self.receive(patience.deadline, "listening for events")?.is_some() && !patience.is_over() {}
        Ok(())
    }

    /// Runs commands that need not wait for one another, and returns their results in this order. QEMU gets all of them
    /// at once, and is waited for once.
    ///
    /// # Errors
    /// As [`Qmp::execute`]; what QEMU refuses is the result of that command alone.
    pub fn execute_all<const N: usize>(
        &mut self,
        commands: [(&str, Value); N],
        timeout: Duration,
    ) -> Result<[Result<Value, VmmError>; N], VmmError> {
        let mut results = self.execute_each(&commands, timeout)?.into_iter();
        Ok(commands.map(|_| results.next().expect("each command has a result")))
    }

    /// The same of as many as there are.
    ///
    /// # Errors
    /// As [`Qmp::execute_all`].
    pub fn execute_each(
        &mut self,
        commands: &[(&str, Value)],
        timeout: Duration,
    ) -> Result<Vec<Result<Value, VmmError>>, VmmError> {
        let deadline = Instant::now() + timeout;
        let first = self.next_id;
        let lines: String = commands.iter().map(|(command, arguments)| self.line(command, arguments)).collect();
        self.send(lines.as_bytes(), None, deadline, timeout, "several commands")?;
        // It answers in this order.
        let each = (first..).zip(commands);
        each.map(|(id, (command, _))| self.answer(id, command, deadline, timeout)).collect()
    }

    fn command(
        &mut self,
        command: &str,
        arguments: Value,
        fd: Option<BorrowedFd<'_>>,
        timeout: Duration,
    ) -> Result<Value, VmmError> {
        let deadline = Instant::now() + timeout;
        let id = self.next_id;
        let line = self.line(command, &arguments);
        self.send(line.as_bytes(), fd, deadline, timeout, command)?;
        self.answer(id, command, deadline, timeout)?
    }

    /// A command as QEMU takes it, with the next number.
    fn line(&mut self, command: &str, arguments: &Value) -> String {
        let line = json!({ "execute": command, "arguments": arguments, "id": self.next_id }).to_string() + "\n";
        self.next_id += 1;
        line
    }

    /// The result of the command with this number.
    fn answer(
        &mut self,
        id: u64,
        command: &str,
        deadline: Instant,
        timeout: Duration,
    ) -> Result<Result<Value, VmmError>, VmmError> {
        let mut patience = Patience::until(deadline);
        loop {
            match self.receive(deadline, command)? {
                Some(Message::Return { id: answered, value }) if answered == Some(id) => return Ok(Ok(value)),
                Some(Message::Error { id: answered, reason }) if answered == Some(id) => {
                    return Ok(Err(VmmError::Refused { command: command.to_owned(), reason }));
                }
                // An answer that came too late for an earlier command, or an event.
                Some(_) if !patience.is_over() => {}
                _ => return Err(silent(command, timeout)),
            }
        }
    }

    fn send(
        &mut self,
        mut bytes: &[u8],
        fd: Option<BorrowedFd<'_>>,
        deadline: Instant,
        timeout: Duration,
        command: &str,
    ) -> Result<(), VmmError> {
        if self.ended.is_some() {
            return Err(self.end(command, None));
        }
        let fds: Vec<BorrowedFd<'_>> = fd.into_iter().collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(&fds));
        }
        let started = bytes.len();
        while !bytes.is_empty() {
            match sendmsg(&self.stream, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL) {
                Ok(sent) => {
                    bytes = &bytes[sent.min(bytes.len())..];
                    // The descriptor travelled with the first byte.
                    ancillary.clear();
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => {
                    if !wait_until(self.stream.as_fd(), PollFlags::OUT, deadline) {
                        if bytes.len() != started {
                            // Half a command stands in the stream: nothing can follow it.
                            self.ended = Some(Ended::Broken(io::ErrorKind::TimedOut));
                        }
                        return Err(silent(command, timeout));
                    }
                }
                // Messages that QEMU sent before it closed, such as that the guest switched itself off, may still be
                // unread.
                Err(error) => {
                    let _ = self.take_in();
                    return Err(self.end(command, Some(error.into())));
                }
            }
        }
        Ok(())
    }

    /// The next message; events go to the queue as well. `None` at the deadline.
    fn receive(&mut self, deadline: Instant, doing: &str) -> Result<Option<Message>, VmmError> {
        loop {
            if self.ended.is_some() {
                return Err(self.end(doing, None));
            }
            match self.lines.next_line().and_then(|line| line.map(|line| Message::decode(&line)).transpose()) {
                Ok(Some(message)) => {
                    if let Message::Event(event) = &message {
                        self.note(event.clone());
                    }
                    return Ok(Some(message));
                }
                Ok(None) => {}
                Err(error) => return Err(self.end(doing, Some(io::Error::new(io::ErrorKind::InvalidData, error)))),
            }
            let mut bytes = vec![0; READ_BYTES];
            match recv(&self.stream, &mut bytes[..], RecvFlags::DONTWAIT) {
                Ok((0, _)) => self.ended = Some(Ended::Closed),
                Ok((length, _)) => self.lines.push(&bytes[..length]),
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => {
                    if !wait_until(self.stream.as_fd(), PollFlags::IN, deadline) {
                        return Ok(None);
                    }
                }
                Err(rustix::io::Errno::CONNRESET) => self.ended = Some(Ended::Closed),
                Err(error) => return Err(self.end(doing, Some(error.into()))),
            }
        }
    }

    fn note(&mut self, event: Event) {
        match event.name.as_str() {
            "SHUTDOWN" => self.guest_off = event.data["guest"].as_bool().unwrap_or(false),
            // With -no-shutdown a machine that was switched off can be switched on again.
            "RESET" | "RESUME" => self.guest_off = false,
            _ => {}
        }
        if self.events.len() >= MAX_EVENTS {
            self.events.pop_front();
        }
        self.events.push_back(event);
    }

    /// Ends the connection for this reason, unless it has ended before. Returns why it has ended.
    fn end(&mut self, doing: &str, error: Option<io::Error>) -> VmmError {
        use io::ErrorKind::{BrokenPipe, ConnectionReset, Other};
        let kind = error.as_ref().map_or(Other, io::Error::kind);
        let ended = *self.ended.get_or_insert(match kind {
            BrokenPipe | ConnectionReset => Ended::Closed,
            kind => Ended::Broken(kind),
        });
        match ended {
            Ended::Closed => VmmError::Gone { guest_off: self.guest_off },
            Ended::Broken(kind) => {
                VmmError::Connection { doing: doing.to_owned(), source: error.unwrap_or_else(|| kind.into()) }
            }
        }
    }
}

/// How long a caller listens. It still reads what was said in time afterwards, but not without end where QEMU never
/// stops speaking.
struct Patience {
    deadline: Instant,
    late: usize,
}

impl Patience {
    fn until(deadline: Instant) -> Self {
        Self { deadline, late: 0 }
    }

    /// Whether the caller stops listening. Call it once for each message.
    fn is_over(&mut self) -> bool {
        self.late += usize::from(Instant::now() >= self.deadline);
        self.late > MAX_LATE
    }
}

/// Waits until the socket is ready for `flags` (or broken: the next call on it says how); false at the deadline.
fn wait_until(fd: BorrowedFd<'_>, flags: PollFlags, deadline: Instant) -> bool {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return false;
        }
        let limit = rustix::event::Timespec::try_from(left.min(Duration::from_secs(3600))).ok();
        match poll(&mut [PollFd::from_borrowed_fd(fd, flags)], limit.as_ref()) {
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            // An error of poll itself is reported by the call that follows, too.
            Ok(_) | Err(_) => return true,
        }
    }
}

fn not_there_yet(error: &io::Error) -> bool {
    // EAGAIN: the listener's queue is full.
    use io::ErrorKind::{ConnectionRefused, NotFound, WouldBlock};
    matches!(error.kind(), NotFound | ConnectionRefused | WouldBlock)
}

fn silent(waiting_for: &str, timeout: Duration) -> VmmError {
    VmmError::Silent { waiting_for: waiting_for.to_owned(), seconds: timeout.as_secs() }
}
