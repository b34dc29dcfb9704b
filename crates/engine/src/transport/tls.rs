//! TLS 1.3 over a socket, both ends with certificates.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use rustls::pki_types::ServerName;
use rustls::{ClientConnection, ServerConnection};
use sterna_sys::iovec::{Outgoing, copy_out};
use sterna_sys::socket::SendError;

use super::credentials::{Credentials, identity};
use super::refusal::TlsError;
use super::socket::HELLO_TIMEOUT;
use crate::error::MigrateError;

/// Bytes encrypted at one time: they fit the processor's cache.
const WRITE_BYTES: usize = 256 << 10;
/// Bytes taken off the socket at one time: four records at the least.
const READ_BYTES: usize = 128 << 10;
/// What TLS may keep of what is to be sent; more than is ever given to it at one time.
const BUFFER_LIMIT: usize = 1 << 20;
/// What a caller that was refused may still send before it reads why.
const LAST_WORDS: u64 = 64 << 10;
/// The first byte of everything a TLS caller begins with: a handshake's record (RFC 8446, section 5.1).
pub(super) const HANDSHAKE_RECORD: u8 = 22;

/// One end of an encrypted connection, beside its socket.
#[derive(Debug)]
pub(super) struct Session {
    tls: rustls::Connection,
    /// Off the socket, not yet looked at; empty until the first read.
    received: Vec<u8>,
    unread: Range<usize>,
    /// Copies of guest RAM on their way; empty until the first.
    copy: Vec<u8>,
    peer: String,
}

impl Session {
    /// As the caller of `host`, whose certificate must be for it.
    ///
    /// # Errors
    /// [`MigrateError::Tls`] where one does not trust the other as far as the caller can tell (a listener that refuses
    /// the caller says so by the first read), [`MigrateError::Link`].
    pub fn call(socket: &TcpStream, credentials: &Credentials, host: &str) -> Result<Self, MigrateError> {
        let configs = credentials.current();
        let name = ServerName::try_from(host.to_owned()).map_err(|_| TlsError::Host(host.into()))?;
        let tls = ClientConnection::new(Arc::clone(&configs.client), name).map_err(TlsError::Other)?;
        Self::shake_hands(socket, tls.into(), host.into())
            .map_err(|failed| failed.explain(|error| TlsError::of(error, &configs.authority, Some(host))))
    }

    /// As the listener, on a caller that speaks TLS.
    ///
    /// # Errors
    /// As [`call`](Self::call).
    pub fn answer(socket: &TcpStream, credentials: &Credentials) -> Result<Self, MigrateError> {
        let configs = credentials.current();
        let tls = ServerConnection::new(Arc::clone(&configs.server)).map_err(TlsError::Other)?;
        let mut session = Self::shake_hands(socket, tls.into(), String::new()).map_err(|failed| {
            if matches!(failed, Failed::Tls(_)) {
                let_read(socket);
            }
            failed.explain(|error| TlsError::of(error, &configs.authority, None))
        })?;
        let certificate = session.tls.peer_certificates().and_then(<[_]>::first);
        session.peer = certificate.and_then(identity).ok_or(TlsError::Nameless)?;
        Ok(session)
    }

    /// Within [`HELLO_TIMEOUT`] in all, however slowly the peer sends. TLS bounds what it keeps of a handshake (64 KiB
    /// a message), and nothing else is allocated before the peer is known.
    fn shake_hands(mut socket: &TcpStream, mut tls: rustls::Connection, peer: String) -> Result<Self, Failed> {
        tls.set_buffer_limit(Some(BUFFER_LIMIT));
        let deadline = Instant::now() + HELLO_TIMEOUT;
        while tls.is_handshaking() || tls.wants_write() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::Error::from(io::ErrorKind::TimedOut).into());
            }
            if tls.wants_write() {
                socket.set_write_timeout(Some(left))?;
                tls.write_tls(&mut socket)?;
                continue;
            }
            socket.set_read_timeout(Some(left))?;
            match tls.read_tls(&mut socket) {
                Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
                Ok(_) => {}
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                    continue;
                }
                Err(error) => return Err(error.into()),
            }
            if let Err(error) = tls.process_new_packets() {
                // The alert that says why.
                let _ = tls.write_tls(&mut socket);
                return Err(Failed::Tls(error));
            }
        }
        Ok(Self { tls, received: Vec::new(), unread: 0..0, copy: Vec::new(), peer })
    }

    /// Who the peer is: its identity at the listener, whom we called at the caller.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// As [`Read::read`]; 0 only where the peer said that it is done: a connection that somebody cut is an error.
    pub fn read(&mut self, socket: &TcpStream, out: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.tls.reader().read(out) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.take_in(socket)?,
                read => return read,
            }
        }
    }

    /// Whether the peer has not ended the connection; `socket` does not block now.
    pub fn alive(&mut self, socket: &TcpStream) -> bool {
        match self.take_in(socket) {
            Ok(()) => self.tls.process_new_packets().is_ok_and(|state| !state.peer_has_closed()),
            Err(error) => error.kind() == io::ErrorKind::WouldBlock,
        }
    }

    /// Whether something was received that nobody has read.
    pub fn has_read(&mut self) -> bool {
        // Where it cannot be decrypted the next read says so, and does not wait.
        let decrypted = self.tls.process_new_packets().map_or(1, |state| state.plaintext_bytes_to_read());
        decrypted > 0 || !self.unread.is_empty()
    }

    /// Decrypts what has come, waiting for it where nothing has.
    fn take_in(&mut self, mut socket: &TcpStream) -> io::Result<()> {
        if self.unread.is_empty() {
            self.received.resize(READ_BYTES, 0);
            self.unread = 0..socket.read(&mut self.received)?;
        }
        let mut bytes = &self.received[self.unread.clone()];
        self.unread.start += self.tls.read_tls(&mut bytes)?;
        let processed = self.tls.process_new_packets();
        // An answer to a change of keys, or the alert that says what was wrong.
        self.flush(socket)?;
        processed.map(drop).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
    }

    /// Sends all of `bytes`.
    pub fn write_all(&mut self, socket: &TcpStream, bytes: &[u8]) -> io::Result<()> {
        for mut part in bytes.chunks(WRITE_BYTES) {
            while !part.is_empty() {
                let taken = self.tls.writer().write(part)?;
                part = &part[taken..];
                self.flush(socket)?;
            }
        }
        Ok(())
    }

    /// Sends all of `vectors`. Guest RAM is copied first: encrypting reads its input more than once, and the guest may
    /// write meanwhile.
    pub fn send(&mut self, socket: &TcpStream, mut vectors: &mut [Outgoing<'_>]) -> Result<(), SendError> {
        let mut copy = std::mem::take(&mut self.copy);
        copy.resize(WRITE_BYTES, 0);
        let sent = loop {
            let (left, copied) = copy_out(vectors, &mut copy);
            if copied == 0 {
                break Ok(());
            }
            if let Err(error) = self.write_all(socket, &copy[..copied]) {
                break Err(match error.kind() {
                    io::ErrorKind::WouldBlock => SendError::TimedOut,
                    _ => SendError::Connection(error),
                });
            }
            vectors = left;
        };
        self.copy = copy;
        sent
    }

    /// Says that nothing more will be sent.
    pub fn finish(&mut self, socket: &TcpStream) -> io::Result<()> {
        self.tls.send_close_notify();
        self.flush(socket)
    }

    fn flush(&mut self, mut socket: &TcpStream) -> io::Result<()> {
        while self.tls.wants_write() {
            match self.tls.write_tls(&mut socket) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }
}

/// Lets a refused caller read why: where a socket is closed with bytes unread, the kernel throws away what was to be
/// said.
fn let_read(socket: &TcpStream) {
    let second = std::time::Duration::from_secs(1);
    if socket.shutdown(std::net::Shutdown::Write).is_ok() && socket.set_read_timeout(Some(second)).is_ok() {
        let _ = io::copy(&mut socket.take(LAST_WORDS), &mut io::sink());
    }
}

/// A handshake that failed.
enum Failed {
    Socket(io::Error),
    Tls(rustls::Error),
}

impl From<io::Error> for Failed {
    fn from(error: io::Error) -> Self {
        Self::Socket(error)
    }
}

impl Failed {
    fn explain(self, why: impl FnOnce(rustls::Error) -> TlsError) -> MigrateError {
        match self {
            Self::Socket(error) => MigrateError::link("agreeing on encryption with the peer")(error),
            Self::Tls(error) => why(error).into(),
        }
    }
}
