//! The control connection: one request at a time, one reply to each.

use std::time::{Duration, Instant};

use sterna_protocol::hello::{Features, KNOWS_IDENTITIES};
use sterna_protocol::message::{Reply, Request};
use sterna_protocol::session::{self, Owner, State};
use sterna_protocol::standstill::Standstill;

use super::connection::{Connection, HangUp};
use super::messages::Messages;
use crate::error::MigrateError;
use crate::host::DaemonId;

/// How long a reply may take where the caller sets no other limit.
pub const REPLY_TIMEOUT: Duration = Duration::from_secs(30);

/// How often a wait checks for progress.
const LOOK: Duration = Duration::from_millis(100);
/// The bytes that count as progress: a peer that takes less within the time of a reply stands still.
const PROGRESS_BYTES: u64 = 64 << 10;

/// The source's end: asks, and keeps to the order of [`session`].
#[derive(Debug)]
pub struct Asking {
    messages: Messages,
    state: State,
}

impl Asking {
    /// Begins on a connection that has exchanged hellos.
    #[must_use]
    pub fn new(stream: Connection, key: u64) -> Self {
        Self { messages: Messages::new(stream, key), state: State::Begun }
    }

    /// The features that both ends have.
    #[must_use]
    pub fn features(&self) -> Features {
        self.messages.connection().features()
    }

    /// Asks and waits for the answer.
    ///
    /// # Errors
    /// [`MigrateError::Peer`] where the peer answers [`Reply::Failed`]; else the connection's error.
    pub fn ask(&mut self, request: &Request, timeout: Duration) -> Result<Reply, MigrateError> {
        self.send(request)?;
        self.receive(request, timeout)
    }

    /// The first half of [`ask`](Self::ask), for callers that work while the peer answers.
    ///
    /// # Errors
    /// As [`ask`](Self::ask).
    pub fn send(&mut self, request: &Request) -> Result<(), MigrateError> {
        self.state = session::request(self.state, request)?;
        self.messages.send(request)
    }

    /// The second half of [`ask`](Self::ask).
    ///
    /// # Errors
    /// As [`ask`](Self::ask).
    pub fn receive(&mut self, request: &Request, timeout: Duration) -> Result<Reply, MigrateError> {
        let reply = self.messages.receive(Some(timeout))?;
        self.state = session::reply(self.state, request, &reply)?;
        match reply {
            Reply::Failed(problem) => Err(MigrateError::Peer(problem.from_outside())),
            reply => Ok(reply),
        }
    }

    /// Waits until the answer begins to come, between [`send`](Self::send) and [`receive`](Self::receive). It waits for
    /// as long as the peer takes what was sent on other connections, which `taken_bytes` counts: a slow link needs time
    /// for the bytes in the sockets' buffers.
    ///
    /// # Errors
    /// Neither an answer nor progress for `stall`.
    pub fn wait(&mut self, stall: Duration, taken_bytes: impl Fn() -> u64) -> Result<(), MigrateError> {
        let began = Instant::now();
        let mut standstill = Standstill::new(PROGRESS_BYTES, stall, taken_bytes(), Duration::ZERO);
        while !self.messages.connection_mut().wait_readable(LOOK) {
            if standstill.is_over(taken_bytes(), began.elapsed()) {
                return Err(MigrateError::link("waiting for pages to arrive")(std::io::ErrorKind::TimedOut.into()));
            }
        }
        Ok(())
    }

    /// A handle that ends the connection from another thread: a thread that waits for an answer wakes.
    ///
    /// # Errors
    /// No descriptor left.
    pub fn hang_up(&self) -> std::io::Result<HangUp> {
        self.messages.connection().hang_up()
    }

    /// Asks who the peer is; `None` where it is too old to say. The first question of a connection.
    ///
    /// # Errors
    /// As [`ask`](Self::ask).
    pub fn identify(&mut self) -> Result<Option<DaemonId>, MigrateError> {
        if self.messages.connection().version() < KNOWS_IDENTITIES {
            return Ok(None);
        }
        identity_of(self.ask(&Request::Identify, REPLY_TIMEOUT)?).map(Some)
    }

    /// Makes sure that the peer is this daemon; `None` accepts every daemon.
    ///
    /// # Errors
    /// [`MigrateError::AnotherDaemon`]; else as [`ask`](Self::ask).
    pub fn expect(&mut self, meant: Option<DaemonId>) -> Result<(), MigrateError> {
        let Some(meant) = meant else { return Ok(()) };
        match self.identify()? {
            Some(answers) if answers == meant => Ok(()),
            answers => Err(MigrateError::AnotherDaemon { meant, answers }),
        }
    }

    /// The guest's owner if nothing more can be said.
    #[must_use]
    pub fn owner(&self) -> Owner {
        session::owner_at_source(self.state)
    }

    /// Tells the peer to forget the migration. Returns the problem that the peer had, if any.
    pub fn abort(&mut self) -> Option<sterna_api::Problem> {
        match self.ask(&Request::Abort, Duration::from_secs(5)) {
            Ok(Reply::Aborted { problem }) => problem.map(sterna_api::Problem::from_outside),
            // An earlier request may still be unanswered: its failure is the one to know.
            Err(MigrateError::Peer(problem)) => Some(problem),
            _ => None,
        }
    }
}

/// The destination's end: answers, and keeps to the order of [`session`].
#[derive(Debug)]
pub struct Answering {
    messages: Messages,
    state: State,
}

impl Answering {
    /// Begins on a connection that has exchanged hellos.
    #[must_use]
    pub fn new(stream: Connection, key: u64) -> Self {
        Self { messages: Messages::new(stream, key), state: State::Begun }
    }

    /// The next request. Waits as long as the connection lives: rounds are long, and TCP notices a dead peer.
    ///
    /// # Errors
    /// The connection's error, or a request out of turn.
    pub fn next_request(&mut self) -> Result<Request, MigrateError> {
        let request: Request = self.messages.receive(None)?;
        if !matches!(request, Request::Verdict { .. }) {
            self.state = session::request(self.state, &request)?;
        }
        Ok(request)
    }

    /// Answers a request.
    ///
    /// # Errors
    /// The connection's error, or a reply out of turn (ours: a bug).
    pub fn answer(&mut self, request: &Request, reply: &Reply) -> Result<(), MigrateError> {
        if !matches!(request, Request::Verdict { .. }) {
            self.state = session::reply(self.state, request, reply)?;
        }
        self.messages.send(reply)
    }

    /// The state of the session.
    #[must_use]
    pub fn state(&self) -> State {
        self.state
    }

    /// The peer's identity, by its certificate; `None` on a plain connection.
    #[must_use]
    pub fn peer(&self) -> Option<&str> {
        self.messages.connection().peer()
    }

    /// A handle that ends the connection from another thread.
    ///
    /// # Errors
    /// No descriptor left.
    pub fn hang_up(&self) -> std::io::Result<HangUp> {
        self.messages.connection().hang_up()
    }

    /// Whether the connection still lives. Does not wait.
    #[must_use]
    pub fn alive(&mut self) -> bool {
        self.messages.connection_mut().alive()
    }
}

/// Asks one question that needs no session: what became of a migration. With `of`, only that daemon is asked.
///
/// # Errors
/// [`MigrateError::AnotherDaemon`], [`MigrateError::Peer`] where it knows nothing of it or will not say; else the
/// connection's error.
pub fn ask_verdict(stream: Connection, key: u64, id: u128, of: Option<DaemonId>) -> Result<bool, MigrateError> {
    let mut asking = Asking::new(stream, key);
    asking.expect(of)?;
    // This question follows no session's order: it founds no session.
    let mut messages = asking.messages;
    messages.send(&Request::Verdict { id })?;
    match messages.receive(Some(REPLY_TIMEOUT))? {
        Reply::Verdict { committed } => Ok(committed),
        Reply::Failed(problem) => Err(MigrateError::Peer(problem.from_outside())),
        _ => Err(MigrateError::Reply("another reply than the verdict that was asked for")),
    }
}

fn identity_of(reply: Reply) -> Result<DaemonId, MigrateError> {
    match reply {
        Reply::Identity { identity } => Ok(DaemonId(identity)),
        _ => Err(MigrateError::Reply("another reply than the identity that was asked for")),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    use super::*;

    /// Seen to fail: 30 s were the limit for a round's end, however slow the link was and however much still lay in the
    /// sockets' buffers.
    #[test]
    fn an_answer_is_waited_for_as_long_as_there_is_progress_and_no_longer() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut asking = Asking::new(Connection::plain(TcpStream::connect(listener.local_addr().unwrap()).unwrap()), 1);
        let mut peer = listener.accept().unwrap().0;
        let stall = 3 * LOOK;
        let taken = Cell::new(0);
        let error = asking.wait(stall, || taken.replace(taken.get() + 1)).unwrap_err();
        assert!(matches!(error, MigrateError::Link { .. }), "a byte at a time is no progress: {error:?}");
        let looks = Cell::new(0);
        let slow = || {
            looks.set(looks.get() + 1);
            if looks.get() == 8 {
                peer.write_all(&[0]).unwrap();
            }
            looks.get() * PROGRESS_BYTES
        };
        let slow = std::cell::RefCell::new(slow);
        asking.wait(stall, || slow.borrow_mut()()).unwrap();
        assert!(looks.get() >= 8);
    }
}
