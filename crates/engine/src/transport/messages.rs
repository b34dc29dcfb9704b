//! Messages on a connection.

use std::io::{Read, Write};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use sterna_protocol::message::{self, PREFIX_BYTES};

use super::connection::Connection;
use crate::error::MigrateError;

/// A connection on which messages go to and fro, in the form that [`message`] says.
#[derive(Debug)]
pub struct Messages {
    connection: Connection,
    key: u64,
}

impl Messages {
    /// On a connection that has exchanged hellos, of the session with this key.
    #[must_use]
    pub fn new(connection: Connection, key: u64) -> Self {
        Self { connection, key }
    }

    /// The connection itself, for what is known of it.
    #[must_use]
    pub fn connection(&self) -> &Connection {
        &self.connection
    }

    /// The connection itself, for what it carries between two messages.
    pub fn connection_mut(&mut self) -> &mut Connection {
        &mut self.connection
    }

    /// Sends a message.
    ///
    /// # Errors
    /// The message is too long, or the link broke.
    pub fn send<M: Serialize>(&mut self, message: &M) -> Result<(), MigrateError> {
        let bytes = message::encode(message, self.key)?;
        self.connection.write_all(&bytes).map_err(MigrateError::link("sending a message"))
    }

    /// Waits for the next message, no longer than `timeout` for any part of it.
    ///
    /// # Errors
    /// The link broke, or the peer sent what is no message of this kind.
    pub fn receive<M: DeserializeOwned>(&mut self, timeout: Option<Duration>) -> Result<M, MigrateError> {
        let link = || MigrateError::link("waiting for a message");
        self.connection.set_read_timeout(timeout).map_err(link())?;
        let mut prefix = [0; PREFIX_BYTES];
        self.connection.read_exact(&mut prefix).map_err(link())?;
        let (length, checksum) = message::decode_prefix(prefix)?;
        let mut body = vec![0; length];
        self.connection.read_exact(&mut body).map_err(link())?;
        Ok(message::decode(&body, checksum, self.key)?)
    }
}
