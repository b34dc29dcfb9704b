//! Guests that run on at the destination.

use std::path::Path;

use serde_json::json;
use sterna_engine::source::throttle::{ProcessThrottle, Throttle};
use sterna_engine::vmm::{Destination, Source};

use crate::fixture::{move_devices, move_devices_into};
use crate::machine::{Config, Disk, LONG, Machine, binaries};

fn assert_moves(from_binary: &Path, to_binary: &Path, config: &Config) {
    let disk = Disk::new();
    let from = Machine::source(from_binary, config, &disk);
    let to = Machine::destination(to_binary, config, &disk);
    let mut source = from.as_source();
    assert!(source.running().unwrap());
    move_devices(&from, &mut source, &to).unwrap();
    to.assert_stands();
    let counted = from.counter();
    source.quit();
    from.wait_ended();
    to.as_destination().start().unwrap();
    to.assert_counts();
    assert!(to.counter() > counted, "the guest counts on from where it was");
}

#[test]
fn a_guest_runs_on_at_the_destination() {
    for binary in binaries() {
        for machine in ["pc", "q35", "microvm"] {
            println!("{} {machine}", binary.display());
            assert_moves(&binary, &binary, &Config::new(machine));
        }
    }
}

#[test]
fn the_threads_of_processors_are_found_and_can_be_slowed_down_and_let_go() {
    for binary in binaries() {
        // Counting instructions, TCG runs all processors in turn on one thread.
        let cases = [(&["-smp", "2"][..], 2), (&["-smp", "3", "-icount", "shift=1"][..], 1)];
        for (arguments, expected) in cases {
            let disk = Disk::new();
            let machine = Machine::source(&binary, &Config::new("q35").with(arguments), &disk);
            let threads = machine.as_source().processor_threads().unwrap();
            assert_eq!(threads.len(), expected, "{arguments:?}");
            assert!(!threads.contains(&machine.pid()), "the first thread runs QEMU's devices");
            let mut throttle = ProcessThrottle::new(machine.pid());
            if let Err(error) = throttle.try_out(&threads) {
                return println!("skipped: {error}: {:?}", std::error::Error::source(&error).map(ToString::to_string));
            }
            throttle.set(60, &threads).unwrap();
            // It answers, and its guest runs, if slowly.
            assert!(machine.as_source().running().unwrap());
            machine.assert_counts();
            throttle.release();
            machine.assert_counts();
            machine.as_source().quit();
        }
    }
}

#[test]
fn a_guest_with_video_ram_runs_on_at_the_destination() {
    for binary in binaries() {
        assert_moves(&binary, &binary, &Config::new("q35").with(&["-vga", "std"]));
    }
}

#[test]
fn a_versioned_machine_moves_between_versions_of_qemu_both_ways() {
    let [old, new] = &binaries()[..] else { return println!("skipped: needs two versions of QEMU") };
    for machine in ["pc-q35-7.2", "pc-i440fx-7.2"] {
        assert_moves(old, new, &Config::new(machine));
        assert_moves(new, old, &Config::new(machine));
    }
}

#[test]
fn the_pause_is_reported_by_the_events_of_both_ends() {
    for binary in binaries() {
        let (config, disk) = (Config::new("q35"), Disk::new());
        let (from, to) = (Machine::source(&binary, &config, &disk), Machine::destination(&binary, &config, &disk));
        let mut source = from.as_source();
        let before = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_micros() as u64;
        move_devices(&from, &mut source, &to).unwrap();
        let stopped = source.stopped(LONG).unwrap().unwrap();
        let started = to.as_destination().start().unwrap();
        let after = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_micros() as u64;
        assert!(before <= stopped.stop.0 && stopped.stop <= stopped.ready);
        assert!(stopped.ready < started && started.0 <= after);
    }
}

/// A guest that nobody lets run keeps its disks as they came. QEMU 7.2 aborts when such a one is moved on, so those of
/// a paused guest are taken at once. (Without that: "Assertion `!(bs->open_flags & BDRV_O_INACTIVE)' failed".)
#[test]
fn a_guest_that_stays_paused_can_be_moved_on_and_on() {
    for binary in binaries() {
        let (config, disk) = (Config::new("q35"), Disk::new());
        let mut at = Machine::source(&binary, &config, &disk);
        at.execute("stop", json!({}));
        for _ in 0..3 {
            let to = Machine::destination(&binary, &config, &disk);
            let mut source = at.as_source();
            let mut destination = to.as_destination().staying_paused();
            move_devices_into(&at, &mut source, &to, &mut destination).unwrap();
            source.quit();
            to.assert_stands();
            at = to;
        }
        at.as_destination().start().unwrap();
        at.assert_counts();
    }
}
