//! One connection to another daemon, plain or encrypted.
//!
//! A connection belongs to one thread at a time: control connections ask and answer in turn, the others have one
//! direction. A thread that must end it from elsewhere holds its [`HangUp`](crate::transport::connection::HangUp).

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Weak};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sterna_protocol::hello::{Features, VERSION, Version};
use sterna_sys::iovec::Outgoing;
use sterna_sys::socket::{SendError, send_all};

use super::tls::Session;

/// The version that is spoken until both ends have agreed on one.
const OLDEST: Version = Version { major: VERSION.major, minor: 0 };

/// A wait that begins again and again.
const LONG: Duration = Duration::from_secs(60);

/// A connection that has exchanged hellos, or is about to.
#[derive(Debug)]
pub struct Connection {
    socket: Arc<TcpStream>,
    tls: Option<Box<Session>>,
    version: Version,
    features: Features,
}

/// Ends a connection from another thread.
#[derive(Debug)]
pub struct HangUp(TcpStream);

impl Connection {
    /// A plain connection on a socket.
    #[must_use]
    pub fn plain(socket: TcpStream) -> Self {
        Self { socket: Arc::new(socket), tls: None, version: OLDEST, features: Features::NONE }
    }

    /// A connection on a socket whose encryption is set up.
    pub(super) fn encrypted(socket: TcpStream, tls: Session) -> Self {
        Self { socket: Arc::new(socket), tls: Some(Box::new(tls)), version: OLDEST, features: Features::NONE }
    }

    /// The version that both ends speak.
    #[must_use]
    pub fn version(&self) -> Version {
        self.version
    }

    /// The features that both ends have.
    #[must_use]
    pub fn features(&self) -> Features {
        self.features
    }

    /// Sets the version and the features that both have agreed on.
    pub(super) fn agree_on(&mut self, (version, features): (Version, Features)) {
        (self.version, self.features) = (version, features);
    }

    /// Who the peer is, by its certificate; `None` on a plain connection.
    #[must_use]
    pub fn peer(&self) -> Option<&str> {
        self.tls.as_deref().map(Session::peer)
    }

    /// The socket, for its settings alone: nobody may read or write it here.
    #[must_use]
    pub fn socket(&self) -> &TcpStream {
        &self.socket
    }

    /// The socket, for the kernel's figures of it for as long as the connection is there.
    pub(super) fn observed(&self) -> Weak<TcpStream> {
        Arc::downgrade(&self.socket)
    }

    /// Sends all of `vectors`, in order, and uses them up. On a plain connection the kernel sends guest RAM straight
    /// from its place; on an encrypted one it is copied once.
    ///
    /// # Errors
    /// As [`send_all`]; part may have been sent.
    pub fn send(&mut self, vectors: &mut [Outgoing<'_>]) -> Result<(), SendError> {
        match &mut self.tls {
            None => send_all(&self.socket, vectors),
            Some(tls) => tls.send(&self.socket, vectors),
        }
    }

    /// Sets how long a read may wait; for ever where `None`.
    ///
    /// # Errors
    /// The timeout is zero, or the kernel refuses.
    pub fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.socket.set_read_timeout(timeout)
    }

    /// Sets how long a write may wait for room; `None`: without end.
    ///
    /// # Errors
    /// As [`set_read_timeout`](Self::set_read_timeout).
    pub fn set_write_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.socket.set_write_timeout(timeout)
    }

    /// Says that nothing more will be sent: the peer reads everything that was sent, and then the end.
    ///
    /// # Errors
    /// The connection is gone.
    pub fn finish(&mut self) -> io::Result<()> {
        if let Some(tls) = &mut self.tls {
            tls.finish(&self.socket)?;
        }
        self.socket.shutdown(Shutdown::Write)
    }

    /// Whether the connection still lives. Does not wait.
    #[must_use]
    pub fn alive(&mut self) -> bool {
        if self.socket.set_nonblocking(true).is_err() {
            return false;
        }
        let alive = match &mut self.tls {
            Some(tls) => tls.alive(&self.socket),
            None => match self.socket.peek(&mut [0]) {
                Ok(read) => read > 0,
                Err(error) => error.kind() == io::ErrorKind::WouldBlock,
            },
        };
        self.socket.set_nonblocking(false).is_ok() && alive
    }

    /// Whether a read would not have to wait: bytes are here, or the end is.
    #[must_use]
    pub fn readable(&mut self) -> bool {
        self.tls.as_deref_mut().is_some_and(Session::has_read) || ready(&self.socket, PollFlags::IN, Duration::ZERO)
    }

    /// Waits until a read would not have to wait; `false` after `timeout`.
    #[must_use]
    pub fn wait_readable(&mut self, timeout: Duration) -> bool {
        self.tls.as_deref_mut().is_some_and(Session::has_read) || ready(&self.socket, PollFlags::IN, timeout)
    }

    /// Waits for as long as it takes until the peer sends something. Returns whether it did: if not, the connection is
    /// at its end, as it may be between two messages.
    #[must_use]
    pub fn sends_more(&mut self) -> bool {
        while !self.wait_readable(LONG) {}
        // The end may have come with the last that was sent.
        self.alive() || self.tls.as_deref_mut().is_some_and(Session::has_read)
    }

    /// Waits until there is room to send; `false` after `timeout`. How much room that is, is a setting of the socket.
    #[must_use]
    pub fn wait_writable(&self, timeout: Duration) -> bool {
        ready(&self.socket, PollFlags::OUT, timeout)
    }

    /// Ends the connection: the peer sees its end, whatever either side was doing.
    pub fn end(&self) {
        // An error means that it has ended already, which is what is wanted.
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    /// A handle that ends the connection from another thread.
    ///
    /// # Errors
    /// No descriptor left.
    pub fn hang_up(&self) -> io::Result<HangUp> {
        self.socket.try_clone().map(HangUp)
    }
}

/// Whether the socket is ready within `timeout`. A failed socket counts as ready: the next call on it says why it
/// failed.
fn ready(socket: &TcpStream, what: PollFlags, timeout: Duration) -> bool {
    let timeout = Timespec { tv_sec: timeout.as_secs() as _, tv_nsec: timeout.subsec_nanos().into() };
    let mut polled = [PollFd::new(socket, what)];
    poll(&mut polled, Some(&timeout)).is_ok_and(|ready| ready > 0)
}

impl HangUp {
    /// Ends the connection, as [`Connection::end`] does: its reader and its writer wake.
    pub fn now(&self) {
        let _ = self.0.shutdown(Shutdown::Both);
    }
}

impl Drop for Connection {
    /// Tells the peer that this end is no accident, where that needs no waiting. Where [`Connection::end`] was called
    /// before, the peer is not told: to it the end is an accident.
    fn drop(&mut self) {
        if let Some(tls) = &mut self.tls
            && self.socket.set_nonblocking(true).is_ok()
        {
            let _ = tls.finish(&self.socket);
        }
    }
}

impl Read for Connection {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        match &mut self.tls {
            None => (&*self.socket).read(out),
            Some(tls) => tls.read(&self.socket, out),
        }
    }
}

impl Write for Connection {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.tls {
            None => (&*self.socket).write(bytes),
            Some(tls) => tls.write_all(&self.socket, bytes).map(|()| bytes.len()),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
