//! A switchover, step by step.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::thread::JoinHandle;

use sterna_engine::vmm::qemu::{QemuDestination, QemuSource};
use sterna_engine::vmm::{Destination, Source, VmmError};

use crate::machine::{LONG, Machine};

/// How far a switchover is taken at the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Step {
    Prepared,
    Begun,
    Stopped,
    Saving,
    Saved,
}

pub const STEPS: [Step; 5] = [Step::Prepared, Step::Begun, Step::Stopped, Step::Saving, Step::Saved];

/// What QEMU writes, read to its end beside everything else.
pub struct DeviceState(Option<JoinHandle<Vec<u8>>>);

impl DeviceState {
    pub fn read(mut stream: UnixStream) -> Self {
        Self(Some(std::thread::spawn(move || {
            let mut bytes = Vec::new();
            let _ = stream.read_to_end(&mut bytes);
            bytes
        })))
    }

    pub fn bytes(mut self) -> Vec<u8> {
        self.0.take().unwrap().join().unwrap()
    }
}

pub fn take_to(source: &mut QemuSource, step: Step) -> Option<DeviceState> {
    source.prepare().unwrap();
    if step < Step::Begun {
        return None;
    }
    let state = DeviceState::read(source.begin().unwrap());
    if step >= Step::Stopped {
        let stopped = source.stopped(LONG).unwrap().expect("the guest stops");
        assert!(stopped.stop <= stopped.ready);
    }
    if step >= Step::Saving {
        source.save_devices().unwrap();
    }
    if step >= Step::Saved {
        source.saved(LONG).unwrap();
    }
    Some(state)
}

/// A whole switchover, after which the guest stands at the source and its devices are loaded at the destination.
pub fn move_devices(from: &Machine, source: &mut QemuSource, to: &Machine) -> Result<(), VmmError> {
    move_devices_into(from, source, to, &mut to.as_destination())
}

pub fn move_devices_into(
    from: &Machine,
    source: &mut QemuSource,
    to: &Machine,
    destination: &mut QemuDestination,
) -> Result<(), VmmError> {
    let mut stream = destination.prepare().unwrap();
    let state = take_to(source, Step::Stopped).unwrap();
    to.copy_ram_from(from);
    source.save_devices().unwrap();
    source.saved(LONG).unwrap();
    let bytes = state.bytes();
    assert!(!bytes.is_empty());
    // A QEMU that refuses the state may close its end before all is written.
    let _ = stream.write_all(&bytes).and_then(|()| stream.shutdown(Shutdown::Write));
    destination.loaded(LONG)
}
