//! A running guest is forked: others begin as what it is at one moment, and it runs on.
//!
//! ```text
//!   the guest runs
//!   stop the guest, drain its I/O
//!   save the devices                       once, for all clones
//!   its RAM becomes files nobody writes    the guest, too, maps them copy-on-write from now on
//!   the guest runs
//!                                          clones map the same files, load the devices, run
//! ```
//!
//! What a guest's RAM is at that moment is its *image*: which part of which file lies where. RAM that was a shared
//! mapping of one file becomes private over that file, and no page is copied. Private RAM consists of parts of files
//! and of pages of its own; these are copied into a *layer*, a file that then takes their place.
//!
//! Each step leaves the guest's memory as it reads. So whatever fails, and wherever, the guest runs on as it was, and a
//! clone that has not got all of its image never runs.

/// Pages of the guest's own become a file that others can have.
pub mod layer;

/// A guest's RAM at one moment, in files that nobody writes.
mod image;

/// Clones that go to other hosts.
pub mod away;

use std::io::{self, Read};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::Duration;

pub use image::{Image, Piece};

use crate::error::MigrateError;
use crate::vmm::{EventTime, Source, Stopped, VmmError, wait_until_stopped};

/// How long the VMM may take to save its devices, which takes milliseconds. The guest stands still then.
const DEVICE_TIMEOUT: Duration = Duration::from_secs(10);
/// The most that the devices' state may be, bytes: video RAM is in it.
const MAX_DEVICE_BYTES: u64 = 1 << 30;

/// A guest that runs on after it was forked.
#[derive(Debug)]
pub struct Saved {
    /// The state of its devices.
    pub devices: Vec<u8>,
    /// When it stopped.
    pub stopped: Stopped,
    /// When it ran again; `None` where its user had paused it, and where its VMM has not let it run yet.
    pub resumed: Option<EventTime>,
    /// Why its VMM has not let it run again yet.
    pub waits: Option<VmmError>,
}

/// A guest that was not forked, and is as it was.
#[derive(Debug)]
pub struct NotSaved {
    /// Why.
    pub why: Box<MigrateError>,
    /// Why its VMM has not let it run again, where it has not: the guest is stopped then.
    pub waits: Option<VmmError>,
}

/// Stops a guest, saves its devices, has `keep` make its RAM what others can begin as, and lets it run again. When
/// `keep` is called the devices are saved, and nothing in the VMM uses RAM.
///
/// # Errors
/// [`NotSaved`].
pub fn save(source: &mut dyn Source, keep: &mut dyn FnMut() -> Result<(), MigrateError>) -> Result<Saved, NotSaved> {
    let saved = stop_and_save(source, keep);
    let waits = source.rollback().err();
    tracing::debug!("the guest runs on");
    match saved {
        Ok((stopped, devices)) => {
            let resumed = if waits.is_none() { source.resumed() } else { None };
            Ok(Saved { devices, stopped, resumed, waits })
        }
        Err(why) => Err(NotSaved { why: Box::new(why), waits }),
    }
}

fn stop_and_save(
    source: &mut dyn Source,
    keep: &mut dyn FnMut() -> Result<(), MigrateError>,
) -> Result<(Stopped, Vec<u8>), MigrateError> {
    source.prepare()?;
    let stream = source.begin()?;
    std::thread::scope(|scope| {
        let _closed = Closed(&stream);
        let reader = scope.spawn(|| read_all(&stream));
        let stopped = wait_until_stopped(source)?;
        tracing::debug!("the guest has stopped");
        source.save_devices()?;
        source.saved(DEVICE_TIMEOUT)?;
        tracing::debug!("the devices are saved");
        let devices = reader.join().unwrap_or_else(|_| Err(io::Error::other("the thread that reads it panicked")));
        let devices = devices.map_err(MigrateError::host("reading the state of the guest's devices"))?;
        keep()?;
        tracing::debug!("RAM is what others can begin as");
        Ok((stopped, devices))
    })
}

/// Dropped, the way of the devices' state is closed, so that the thread on it ends, whatever the VMM does.
struct Closed<'a>(&'a UnixStream);

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        let _ = self.0.shutdown(Shutdown::Both);
    }
}

/// Reads the state of devices until whoever saves them has written all.
pub(crate) fn read_all(stream: &UnixStream) -> io::Result<Vec<u8>> {
    let mut devices = Vec::new();
    let read = stream.take(MAX_DEVICE_BYTES + 1).read_to_end(&mut devices)?;
    if read as u64 > MAX_DEVICE_BYTES {
        return Err(io::Error::other(format!("it has more than {MAX_DEVICE_BYTES} bytes")));
    }
    Ok(devices)
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
