//! Page requests, off the connection on which the destination sends them.

use std::io::{self, Read};

use sterna_protocol::message::{self, PREFIX_BYTES, PageRequest};

use crate::error::MigrateError;
use crate::transport::connection::{Connection, HangUp};

/// The most bytes of a request; a longer one is invalid.
const MAX_REQUEST_BYTES: usize = 32;
/// The bytes of one read: enough for the requests of some hundred threads.
const READ_BYTES: usize = 4096;

/// The requests, in their order.
#[derive(Debug)]
pub struct Requests {
    connection: Connection,
    key: u64,
    buffer: Vec<u8>,
    read: usize,
}

impl Requests {
    /// Begins on a connection that has exchanged hellos.
    ///
    /// # Errors
    /// The connection is gone.
    pub fn new(connection: Connection, key: u64) -> Result<Self, MigrateError> {
        // A guest may touch no missing page for any time; the control connection tells whether its host lives.
        connection.set_read_timeout(None).map_err(MigrateError::link("waiting for requests for pages"))?;
        Ok(Self { connection, key, buffer: Vec::with_capacity(READ_BYTES), read: 0 })
    }

    /// A handle that ends the connection from another thread.
    ///
    /// # Errors
    /// No descriptor left.
    pub fn hang_up(&self) -> io::Result<HangUp> {
        self.connection.hang_up()
    }

    /// Waits for the next request; `None` where the destination has said that it asks no more.
    ///
    /// # Errors
    /// The connection broke, or carries something else.
    pub fn receive(&mut self) -> Result<Option<PageRequest>, MigrateError> {
        loop {
            if let Some(request) = self.take()? {
                return Ok(Some(request));
            }
            self.buffer.drain(..self.read);
            self.read = 0;
            let filled = self.buffer.len();
            self.buffer.resize(READ_BYTES, 0);
            let read = self.connection.read(&mut self.buffer[filled..]);
            self.buffer.truncate(filled + *read.as_ref().unwrap_or(&0));
            match read.map_err(MigrateError::link("waiting for requests for pages"))? {
                0 if filled == 0 => return Ok(None),
                0 => {
                    let cut = io::ErrorKind::UnexpectedEof.into();
                    return Err(MigrateError::link("waiting for requests for pages")(cut));
                }
                _ => {}
            }
        }
    }

    /// Whether [`receive`](Self::receive) would not have to wait.
    #[must_use]
    pub fn waiting(&mut self) -> bool {
        self.buffer.len() >= self.read + PREFIX_BYTES || self.connection.readable()
    }

    /// Takes a request out of what was read, if a whole one is there.
    fn take(&mut self) -> Result<Option<PageRequest>, MigrateError> {
        let Some((prefix, rest)) = self.buffer[self.read..].split_first_chunk::<PREFIX_BYTES>() else {
            return Ok(None);
        };
        let (length, checksum) = message::decode_prefix(*prefix)?;
        if length > MAX_REQUEST_BYTES {
            return Err(MigrateError::Request("a request for a page that is too long to be one"));
        }
        let Some(body) = rest.get(..length) else { return Ok(None) };
        let request = message::decode(body, checksum, self.key)?;
        self.read += PREFIX_BYTES + length;
        Ok(Some(request))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    use sterna_protocol::layout::{ChunkIndex, PageIndex};

    use super::*;

    fn pair() -> (TcpStream, Requests) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let theirs = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let ours = listener.accept().unwrap().0;
        (theirs, Requests::new(Connection::plain(ours), 5).unwrap())
    }

    fn request(chunk: u32) -> PageRequest {
        PageRequest { page: PageIndex { chunk: ChunkIndex(chunk), page: 9 }, thread: u32::MAX }
    }

    #[test]
    fn requests_come_out_as_they_were_sent_whole_or_in_pieces() {
        let (mut theirs, mut requests) = pair();
        assert!(!requests.waiting());
        let bytes: Vec<u8> = (0..1000).flat_map(|n| message::encode(&request(n << 16), 5).unwrap()).collect();
        let writer = std::thread::spawn(move || {
            for piece in bytes.chunks(37) {
                theirs.write_all(piece).unwrap();
            }
        });
        for n in 0..1000 {
            assert_eq!(requests.receive().unwrap(), Some(request(n << 16)));
        }
        writer.join().unwrap();
        assert_eq!(requests.receive().unwrap(), None);
    }

    #[test]
    fn what_is_no_request_ends_the_connection_before_anything_is_allocated() {
        for bytes in [[0xff; 40].to_vec(), message::encode(&request(1), 6).unwrap(), {
            let mut long = 33u32.to_le_bytes().to_vec();
            long.extend([0; 60]);
            long
        }] {
            let (mut theirs, mut requests) = pair();
            theirs.write_all(&bytes).unwrap();
            assert!(requests.receive().is_err());
        }
        let (mut theirs, mut requests) = pair();
        theirs.write_all(&message::encode(&request(1), 5).unwrap()[..15]).unwrap();
        drop(theirs);
        assert!(requests.receive().is_err(), "a request that was cut");
    }
}
