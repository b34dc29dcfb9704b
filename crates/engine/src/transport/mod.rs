//! Connections between two daemons: one for control, one for the devices, several for pages.

/// One connection.
pub mod connection;

/// A socket's timeouts.
mod socket;

/// TLS 1.3 over a socket.
mod tls;

/// Who this daemon is to others, and whom it believes.
pub mod credentials;

/// Why two daemons do not trust each other.
pub mod refusal;

/// Messages on a connection.
pub mod messages;

/// Frames on a connection.
pub mod frames;

/// Requests and replies.
pub mod control;

/// A limit on what all connections of a migration send together.
pub mod pacer;

/// A host's bandwidth, shared by all its migrations.
pub mod share;

/// Whose turn it is, and when.
mod fair;

/// When others wait for a guest that stands still.
mod quiet;

/// What has been sent and has not arrived.
mod backlog;

/// The pace of all pushes to one host.
pub mod pushes;

/// The clock that both sides compare.
pub mod clock;

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Instant;

use sterna_protocol::hello::{Features, HELLO_BYTES, Hello, HelloError, Role, VERSION};

use self::connection::Connection;
use self::credentials::Credentials;
use self::refusal::TlsError;
use self::socket::{HELLO_TIMEOUT, STALL_TIMEOUT, prepare};
use self::tls::{HANDSHAKE_RECORD, Session};
use crate::error::MigrateError;

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

/// Calls the peer, encrypts the connection where there are credentials, and exchanges hellos.
///
/// # Errors
/// [`MigrateError::Unreachable`], [`MigrateError::Tls`], [`MigrateError::Link`], [`MigrateError::Hello`].
pub fn call(
    peer: &str,
    session: SessionKey,
    role: Role,
    credentials: Option<&Credentials>,
) -> Result<Connection, MigrateError> {
    let unreachable = |source| MigrateError::Unreachable { peer: peer.into(), source };
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in peer.to_socket_addrs().map_err(unreachable)? {
        match TcpStream::connect_timeout(&address, HELLO_TIMEOUT) {
            Ok(socket) => {
                prepare(&socket, HELLO_TIMEOUT).map_err(MigrateError::link("setting up a connection"))?;
                let connection = match credentials {
                    None => Connection::plain(socket),
                    Some(credentials) => {
                        let tls = Session::call(&socket, credentials, host_of(peer))?;
                        Connection::encrypted(socket, tls)
                    }
                };
                return greet(connection, session, role);
            }
            Err(error) => last = error,
        }
    }
    Err(unreachable(last))
}

/// The host of an address as `HOST:PORT`, `[::1]:PORT`: whom the certificate must be for.
fn host_of(peer: &str) -> &str {
    let host = peer.rsplit_once(':').map_or(peer, |(host, _)| host);
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

fn greet(mut stream: Connection, session: SessionKey, role: Role) -> Result<Connection, MigrateError> {
    let ours = hello(session, role);
    let exchange = || -> io::Result<[u8; HELLO_BYTES]> {
        prepare(stream.socket(), HELLO_TIMEOUT)?;
        stream.write_all(&ours.encode())?;
        read_hello(&mut stream)
    };
    let theirs = { exchange }().map_err(refused_or("agreeing on a version with the peer"))?;
    stream.agree_on(ours.agree(&Hello::decode(&theirs)?)?);
    prepare(stream.socket(), STALL_TIMEOUT).map_err(MigrateError::link("setting up a connection"))?;
    Ok(stream)
}

/// A listener refuses a caller's certificate when the caller believes the handshake done: it says so instead of its
/// hello.
fn refused_or(doing: &'static str) -> impl FnOnce(io::Error) -> MigrateError {
    move |error| match error.downcast::<rustls::Error>() {
        Ok(rustls::Error::AlertReceived(alert)) => TlsError::Refused(alert).into(),
        Ok(error) => TlsError::Other(error).into(),
        Err(error) => MigrateError::link(doing)(error),
    }
}

/// Takes a call: encrypts it where there are credentials, takes the caller's hello and answers it. The connection, and
/// what the caller wants.
///
/// # Errors
/// As [`call`].
pub fn answer(socket: TcpStream, credentials: Option<&Credentials>) -> Result<(Connection, Hello), MigrateError> {
    prepare(&socket, HELLO_TIMEOUT).map_err(MigrateError::link("setting up a connection"))?;
    let Some(credentials) = credentials else {
        return answer_hello(Connection::plain(socket), Features::NONE);
    };
    let waiting = MigrateError::link("waiting for the caller's first byte");
    let mut first = [0];
    socket.peek(&mut first).map_err(waiting)?;
    if first == [HANDSHAKE_RECORD] {
        let tls = Session::answer(&socket, credentials)?;
        let connection = Connection::encrypted(socket, tls);
        prepare(connection.socket(), HELLO_TIMEOUT).map_err(MigrateError::link("setting up a connection"))?;
        return answer_hello(connection, Features::NONE);
    }
    // It gets an answer that it understands, and no further.
    answer_hello(Connection::plain(socket), Features::TLS)
}

fn answer_hello(mut stream: Connection, needed: Features) -> Result<(Connection, Hello), MigrateError> {
    let bytes = read_hello(&mut stream).map_err(MigrateError::link("waiting for the caller's hello"))?;
    let theirs = Hello::decode(&bytes);
    // A caller of another version gets our hello all the same: it tells its user why.
    let (session, key) = theirs.as_ref().map_or((0, 0), |h| (h.session, h.key));
    let key = SessionKey { session, key, needed };
    let ours = hello(key, theirs.as_ref().map_or(Role::Control, |h| h.role));
    stream.write_all(&ours.encode()).map_err(MigrateError::link("answering the caller's hello"))?;
    if needed == Features::TLS {
        return Err(TlsError::CallerPlain.into());
    }
    if theirs == Err(HelloError::Stranger) && bytes[0] == HANDSHAKE_RECORD {
        return Err(TlsError::CallerEncrypted.into());
    }
    let theirs = theirs?;
    stream.agree_on(ours.agree(&theirs)?);
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
