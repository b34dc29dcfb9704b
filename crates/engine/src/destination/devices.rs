//! The devices' state into the VMM, held back until the last pages are in place.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::error::MigrateError;
use crate::haste::Crew;
use crate::transport::connection::{Connection, HangUp};

/// How long the source may take to close its side once the VMM has all of the state: it has nothing left to send.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

/// The thread that carries the devices' state into the VMM. While it is held, it carries nothing.
pub struct HeldDevices {
    gate: Arc<Gate>,
    thread: Mutex<Option<JoinHandle<std::io::Result<()>>>>,
    from: HangUp,
    to: UnixStream,
    crew: Crew,
}

#[derive(Debug, Default)]
struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct GateState {
    held: bool,
    /// The thread has carried all that it will.
    ended: bool,
}

impl Gate {
    fn change(&self, change: impl FnOnce(&mut GateState)) {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_all();
    }

    fn wait_open(&self) {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.changed.wait_while(state, |state| state.held).unwrap_or_else(PoisonError::into_inner));
    }

    /// Waits for the thread's end; false where `timeout` passed first.
    fn wait_ended(&self, timeout: Duration) -> bool {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_timeout_while(state, timeout, |state| !state.ended);
        waited.unwrap_or_else(PoisonError::into_inner).0.ended
    }
}

impl HeldDevices {
    /// Starts the thread.
    ///
    /// # Errors
    /// No descriptor or thread left.
    pub fn start(mut from: Connection, to: UnixStream) -> Result<Self, MigrateError> {
        let host = || MigrateError::host("setting up the devices' way into QEMU");
        let gate = Arc::new(Gate::default());
        let (hang_up, mut writer, waiting) =
            (from.hang_up().map_err(host())?, to.try_clone().map_err(host())?, Arc::clone(&gate));
        // A source may be quiet for as long as the guest runs there.
        from.set_read_timeout(None).map_err(host())?;
        let crew = Crew::default();
        let carry = move || {
            let mut buffer = vec![0; 256 << 10];
            let mut carry = || loop {
                let read = from.read(&mut buffer)?;
                // The wait comes after the read: state that was read after the guest's stop must wait, also where the
                // read began before it.
                waiting.wait_open();
                if read == 0 {
                    return Ok(());
                }
                writer.write_all(&buffer[..read])?;
            };
            let carried = carry();
            // Also where the link broke: the VMM then finds the state cut short, and says so.
            let _ = writer.shutdown(Shutdown::Write);
            waiting.change(|state| state.ended = true);
            carried
        };
        let thread = crew.spawn("devices", carry).map_err(host())?;
        Ok(Self { gate, thread: Mutex::new(Some(thread)), from: hang_up, to, crew })
    }

    /// The thread.
    pub fn crew(&self) -> &Crew {
        &self.crew
    }

    /// Holds back the state that comes from now on.
    pub fn hold(&self) {
        self.gate.change(|state| state.held = true);
    }

    /// Lets the held state go on.
    pub fn release(&self) {
        self.gate.change(|state| state.held = false);
    }

    /// Waits until all of the state is in the VMM, which has loaded it. A VMM that closes its side early says why
    /// itself.
    ///
    /// # Errors
    /// The link broke, or the source does not end its stream: then its connection is ended.
    pub fn finish(&self) -> Result<(), MigrateError> {
        self.finish_within(CLOSE_TIMEOUT)
    }

    fn finish_within(&self, timeout: Duration) -> Result<(), MigrateError> {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        let late = thread.is_some() && !self.gate.wait_ended(timeout);
        if late {
            self.from.now();
            let _ = self.to.shutdown(Shutdown::Both);
        }
        let ended = thread.map(JoinHandle::join);
        if late {
            let source = std::io::ErrorKind::TimedOut.into();
            return Err(MigrateError::Link { doing: "waiting for the end of the devices' state", source });
        }
        match ended {
            Some(Ok(Err(error))) if error.kind() != std::io::ErrorKind::BrokenPipe => {
                Err(MigrateError::Link { doing: "receiving the devices' state", source: error })
            }
            Some(Err(_)) => Err(MigrateError::Bug("the thread that carries the devices' state broke off")),
            _ => Ok(()),
        }
    }
}

impl Drop for HeldDevices {
    /// Ends the thread where the migration ended before the source closed its side.
    fn drop(&mut self) {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            self.from.now();
            let _ = self.to.shutdown(Shutdown::Both);
            self.release();
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    /// Seen to fail: it waited for as long as the source lived, and with it the session, the VMM and a place for
    /// incoming machines.
    #[test]
    fn a_source_that_never_closes_its_side_is_hung_up_on_once_the_state_is_loaded() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut source = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (vmm, ours) = UnixStream::pair().unwrap();
        let held = HeldDevices::start(Connection::plain(listener.accept().unwrap().0), ours).unwrap();
        source.write_all(b"state").unwrap();
        let mut state = [0; 5];
        (&vmm).read_exact(&mut state).unwrap();
        assert_eq!(&state, b"state");
        let error = held.finish_within(Duration::from_millis(50)).unwrap_err();
        assert!(matches!(error, MigrateError::Link { .. }), "{error:?}");
        assert_eq!(source.read(&mut [0]).unwrap(), 0, "hung up");
    }
}
