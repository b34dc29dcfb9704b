//! Connections between two daemons: one for control, one for the devices, several for pages.

/// One connection.
pub mod connection;

/// Requests and replies.
pub mod control;

/// A limit on what all connections of a migration send together.
pub mod pacer;

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use sterna_protocol::hello::{Features, HELLO_BYTES, Hello, Role, VERSION};

use self::connection::Connection;
use crate::error::MigrateError;

/// How long the peer may take to answer a hello, and to be reached at all.
pub const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a connection may make no progress before it is given up: a peer that is alive reads and answers.
pub const STALL_TIMEOUT: Duration = Duration::from_secs(15);

/// What both sides agreed on, and what names their session.
#[derive(Debug, Clone, Copy)]
pub struct SessionKey {
    /// Names the session.
    pub session: u128,
    /// Seeds its checksums.
    pub key: u64,
    /// What the caller's options need the peer to know.
    pub needed: Features,
}

/// Our hello for a connection.
fn hello(session: SessionKey, role: Role) -> Hello {
    Hello {
        version: VERSION,
        role,
        features: Features::KNOWN,
        needed: session.needed,
        session: session.session,
        key: session.key,
    }
}

/// Calls the peer and exchanges hellos.
///
/// # Errors
/// [`MigrateError::Unreachable`], [`MigrateError::Link`], [`MigrateError::Hello`].
pub fn call(peer: &str, session: SessionKey, role: Role) -> Result<Connection, MigrateError> {
    let unreachable = |source| MigrateError::Unreachable { peer: peer.into(), source };
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in peer.to_socket_addrs().map_err(unreachable)? {
        match TcpStream::connect_timeout(&address, HELLO_TIMEOUT) {
            Ok(stream) => return greet(Connection::plain(stream), session, role),
            Err(error) => last = error,
        }
    }
    Err(unreachable(last))
}

fn greet(mut stream: Connection, session: SessionKey, role: Role) -> Result<Connection, MigrateError> {
    let link = MigrateError::link("agreeing on a version with the peer");
    let ours = hello(session, role);
    let exchange = || -> io::Result<[u8; HELLO_BYTES]> {
        prepare(stream.socket(), HELLO_TIMEOUT)?;
        stream.write_all(&ours.encode())?;
        read_hello(&mut stream)
    };
    let theirs = { exchange }().map_err(link)?;
    ours.agree(&Hello::decode(&theirs)?)?;
    prepare(stream.socket(), STALL_TIMEOUT).map_err(MigrateError::link("setting up a connection"))?;
    Ok(stream)
}

/// Takes a caller's hello and answers it; the stream, and what the caller wants.
///
/// # Errors
/// As [`call`].
pub fn answer(stream: TcpStream) -> Result<(Connection, Hello), MigrateError> {
    let mut stream = Connection::plain(stream);
    let setup = MigrateError::link("setting up a connection");
    prepare(stream.socket(), HELLO_TIMEOUT).map_err(setup)?;
    let bytes = read_hello(&mut stream).map_err(MigrateError::link("waiting for the caller's hello"))?;
    let theirs = Hello::decode(&bytes);
    // A caller of another version gets our hello all the same: it tells its user why.
    let (session, key) = theirs.as_ref().map_or((0, 0), |h| (h.session, h.key));
    let key = SessionKey { session, key, needed: Features::NONE };
    let ours = hello(key, theirs.as_ref().map_or(Role::Control, |h| h.role));
    stream.write_all(&ours.encode()).map_err(MigrateError::link("answering the caller's hello"))?;
    let theirs = theirs?;
    ours.agree(&theirs)?;
    prepare(stream.socket(), STALL_TIMEOUT).map_err(MigrateError::link("setting up a connection"))?;
    Ok((stream, theirs))
}

/// Reads a hello within [`HELLO_TIMEOUT`] in all: a caller that trickles bytes does not hold us.
fn read_hello(stream: &mut Connection) -> io::Result<[u8; HELLO_BYTES]> {
    let deadline = Instant::now() + HELLO_TIMEOUT;
    let mut bytes = [0; HELLO_BYTES];
    let mut filled = 0;
    while filled < HELLO_BYTES {
        if Instant::now() >= deadline {
            return Err(io::ErrorKind::TimedOut.into());
        }
        match stream.read(&mut bytes[filled..])? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => filled += read,
        }
    }
    Ok(bytes)
}

/// Sets the timeouts of a connection: no read or write may stall for longer, and a dead host is noticed.
fn prepare(stream: &TcpStream, timeout: Duration) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(timeout))?;
    stream.set_write_timeout(Some(timeout))?;
    let socket = socket2::SockRef::from(stream);
    socket.set_tcp_user_timeout(Some(STALL_TIMEOUT))?;
    let keepalive = socket2::TcpKeepalive::new()
        .with_time(Duration::from_secs(5))
        .with_interval(Duration::from_secs(2))
        .with_retries(4);
    socket.set_tcp_keepalive(&keepalive)
}
