//! Stream: one connection that carries pages.

use std::time::Duration;

use sterna_protocol::frame::{Digester, Frame, FrameWriter};
use sterna_sys::iovec::Outgoing;
use sterna_sys::socket::{SendError, TcpInfo};

use super::outbound::Outbound;
use crate::error::MigrateError;
use crate::transport::connection::Connection;

/// One connection that carries pages.
#[derive(Debug)]
pub struct Stream {
    connection: Connection,
    writer: FrameWriter,
    digester: Digester,
    bytes: u64,
    cpu: Duration,
}

impl Stream {
    /// A stream on a connection that has exchanged hellos.
    #[must_use]
    pub fn new(connection: Connection, key: u64, digester: Digester) -> Self {
        Self { connection, writer: FrameWriter::new(key), digester, bytes: 0, cpu: Duration::ZERO }
    }

    /// The digester of its pages.
    #[must_use]
    pub fn digester(&self) -> Digester {
        self.digester
    }

    /// The bytes sent so far, and the processor time of the sending threads (without the caller's own).
    #[must_use]
    pub fn cost(&self) -> (u64, Duration) {
        (self.bytes, self.cpu)
    }

    /// Sends what goes of a chunk. Returns all bytes, the frame's included.
    ///
    /// # Errors
    /// The link broke; [`SendError::Memory`]: memory that is sent in place could not be read.
    pub fn send(&mut self, outbound: &Outbound) -> Result<u64, SendError> {
        let shared = outbound.shared.as_ref().map(|frame| self.writer.head(frame, &[]));
        let frame = outbound.frame.as_ref().map(|frame| self.writer.head(frame, &outbound.digests));
        let mut vectors: Vec<_> = shared.iter().chain(&frame).map(|head| Outgoing::from(head.as_slice())).collect();
        outbound.payload.add_to(&mut vectors);
        self.write(&mut vectors)
    }

    /// Says that this connection's share of a round has been sent.
    ///
    /// # Errors
    /// The link broke.
    pub fn end_round(&mut self, round: u32) -> Result<(), MigrateError> {
        let head = self.writer.head(&Frame::RoundEnd { round }, &[]);
        self.write(&mut [Outgoing::from(head.as_slice())]).map(drop).map_err(link_broke)
    }

    /// The bytes that the destination's kernel has taken.
    #[must_use]
    pub fn taken_bytes(&self) -> u64 {
        TcpInfo::of(self.connection.socket()).map_or(0, |info| info.acknowledged_bytes)
    }

    /// Its connection, for its settings and to wait for it.
    #[must_use]
    pub fn connection(&self) -> &Connection {
        &self.connection
    }

    /// Notes the processor time of this stream's own thread, which ends now.
    pub(super) fn thread_ends(&mut self) {
        self.cpu += sterna_sys::process::thread_cpu_time();
    }

    /// Writes frames: their headers and digests from here, payloads straight from their place. Returns all bytes.
    fn write(&mut self, vectors: &mut [Outgoing<'_>]) -> Result<u64, SendError> {
        let bytes: usize = vectors.iter().map(Outgoing::bytes).sum();
        self.connection.send(vectors)?;
        self.bytes += bytes as u64;
        Ok(bytes as u64)
    }
}

/// The error of a failed send of this process's own memory: the link is at fault.
pub fn link_broke(error: SendError) -> MigrateError {
    MigrateError::Link { doing: "sending pages", source: std::io::Error::other(error) }
}
