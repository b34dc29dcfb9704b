//! Device state that the destination refuses.

use std::io::Write;
use std::net::Shutdown;

use sterna_engine::vmm::{Destination, Source, VmmError};

use crate::fixture::move_devices;
use crate::machine::{Config, Disk, LONG, Machine, binaries};

#[test]
fn a_destination_with_other_devices_refuses_and_the_source_gets_its_guest_back() {
    for binary in binaries() {
        let (config, disk) = (Config::new("q35"), Disk::new());
        let from = Machine::source(&binary, &config.clone().with(&["-device", "virtio-rng-pci"]), &disk);
        let to = Machine::destination(&binary, &config, &disk);
        let mut source = from.as_source();
        let error = move_devices(&from, &mut source, &to).unwrap_err();
        let VmmError::Migration { reason } = &error else { panic!("{error:?}") };
        println!("{} says: {reason}", binary.display());
        assert!(reason.contains("virtio-rng"), "{reason}");
        to.as_destination().quit();
        to.wait_ended();
        source.rollback().unwrap();
        from.assert_counts();

        let to = Machine::destination(&binary, &config.with(&["-device", "virtio-rng-pci"]), &disk);
        move_devices(&from, &mut source, &to).unwrap();
    }
}

#[test]
fn a_destination_refuses_a_stream_that_is_cut_or_garbage() {
    for binary in binaries() {
        let (config, disk) = (Config::new("q35"), Disk::new());
        for bytes in [&b""[..], b"QEVM", b"\0\0\0\0no state at all"] {
            let to = Machine::destination(&binary, &config, &disk);
            let mut destination = to.as_destination();
            let mut stream = destination.prepare().unwrap();
            let _ = stream.write_all(bytes).and_then(|()| stream.shutdown(Shutdown::Write));
            let error = destination.loaded(LONG).unwrap_err();
            assert!(matches!(error, VmmError::Migration { .. }), "{error:?}");
            destination.quit();
            to.wait_ended();
        }
    }
}
