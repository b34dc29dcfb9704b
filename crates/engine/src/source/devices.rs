//! The devices' state on its way from the VMM to the destination.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::thread::JoinHandle;

use crate::error::MigrateError;
use crate::transport::connection::{Connection, HangUp};

/// The thread that carries the devices' state from the VMM to the destination.
pub struct DevicePump {
    thread: Option<JoinHandle<io::Result<u64>>>,
    from: UnixStream,
    to: HangUp,
}

impl DevicePump {
    /// Starts the thread; the destination sees the end when the VMM closes its side.
    ///
    /// # Errors
    /// No descriptor or thread left.
    pub fn start(from: UnixStream, mut to: Connection) -> Result<Self, MigrateError> {
        let host = || MigrateError::host("setting up the devices' way to the destination");
        let (mut reader, hang_up) = (from.try_clone().map_err(host())?, to.hang_up().map_err(host())?);
        let carry = move || {
            let (mut buffer, mut total) = (vec![0; 256 << 10], 0);
            loop {
                let read = reader.read(&mut buffer)?;
                if read == 0 {
                    to.finish()?;
                    return Ok(total);
                }
                to.write_all(&buffer[..read])?;
                total += read as u64;
            }
        };
        let thread = std::thread::Builder::new().name("devices".into()).spawn(carry).map_err(host())?;
        Ok(Self { thread: Some(thread), from, to: hang_up })
    }

    /// Waits until all of the state is sent, and returns its bytes. Call it when the VMM has written everything.
    ///
    /// # Errors
    /// The link broke.
    pub fn finish(mut self) -> Result<u64, MigrateError> {
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(result)) => result.map_err(MigrateError::link("sending the devices' state")),
            _ => Err(MigrateError::Bug("the thread that carries the devices' state broke off")),
        }
    }
}

impl Drop for DevicePump {
    /// Ends the thread where the migration ended before the VMM closed its side.
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            let _ = self.from.shutdown(Shutdown::Both);
            self.to.now();
            let _ = thread.join();
        }
    }
}
