//! Guests that are given back at the source.

use serde_json::json;
use sterna_engine::vmm::{Destination, Source};

use crate::fixture::{DeviceState, STEPS, Step, move_devices, take_to};
use crate::machine::{Config, Disk, LONG, Machine, binaries};

#[test]
fn a_cancel_at_any_step_gives_the_guest_back_and_a_second_attempt_succeeds() {
    for binary in binaries() {
        for machine in ["pc", "q35", "microvm"] {
            let (config, disk) = (Config::new(machine), Disk::new());
            let from = Machine::source(&binary, &config, &disk);
            let mut source = from.as_source();
            for step in STEPS {
                println!("{} {machine} {step:?}", binary.display());
                let state = take_to(&mut source, step);
                source.rollback().unwrap();
                assert_eq!(from.status(), "running");
                from.assert_counts();
                source.rollback().expect("a second rollback does nothing");
                drop(state.map(DeviceState::bytes));
            }
            let to = Machine::destination(&binary, &config, &disk);
            move_devices(&from, &mut source, &to).unwrap();
            source.quit();
            to.as_destination().start().unwrap();
            to.assert_counts();
        }
    }
}

/// Twenty switchovers called off some time after a step, later each time; the guest is given back each time.
fn assert_given_back_after(step: Step, apart: std::time::Duration) {
    for binary in binaries() {
        for paused in [false, true] {
            let disk = Disk::new();
            let from = Machine::source(&binary, &Config::new("q35"), &disk);
            if paused {
                from.execute("stop", json!({}));
            }
            let mut source = from.as_source();
            for round in 0..20 {
                let state = take_to(&mut source, step);
                std::thread::sleep(apart * round);
                let asked = std::time::Instant::now();
                source.rollback().unwrap();
                // Less than what anything that is waited for in vain takes.
                assert!(asked.elapsed().as_secs() < 8, "round {round}: the guest stood for {:?}", asked.elapsed());
                assert_eq!(from.status(), if paused { "paused" } else { "running" }, "round {round}");
                drop(state);
            }
            if !paused {
                from.assert_counts();
            }
        }
    }
}

#[test]
fn a_cancel_that_races_with_the_guests_stop_gives_it_back() {
    assert_given_back_after(Step::Begun, std::time::Duration::from_micros(300));
}

#[test]
fn a_cancel_that_races_with_the_end_gives_the_guest_back() {
    assert_given_back_after(Step::Saving, std::time::Duration::from_micros(300));
}

#[test]
fn a_guest_whose_stream_nobody_reads_is_given_back() {
    for binary in binaries() {
        let disk = Disk::new();
        let from = Machine::source(&binary, &Config::new("q35").with(&["-vga", "std"]), &disk);
        let mut source = from.as_source();
        for reader_gone in [false, true] {
            let stream = source.begin().unwrap();
            let kept = (!reader_gone).then_some(stream);
            let short = std::time::Duration::from_millis(300);
            assert_eq!(source.stopped(short).unwrap(), None, "video RAM is larger than a socket's buffer");
            source.rollback().unwrap();
            from.assert_counts();
            drop(kept);
        }
    }
}

#[test]
fn a_guest_that_its_user_paused_stays_paused_and_moves() {
    for binary in binaries() {
        let (config, disk) = (Config::new("q35"), Disk::new());
        let from = Machine::source(&binary, &config, &disk);
        from.execute("stop", json!({}));
        let mut source = from.as_source();
        assert!(!source.running().unwrap());
        for step in STEPS {
            let state = take_to(&mut source, step);
            if step >= Step::Stopped {
                let stopped = source.stopped(LONG).unwrap().unwrap();
                assert_eq!(stopped.stop, stopped.ready, "there is no other moment to report");
            }
            source.rollback().unwrap();
            assert_eq!(from.status(), "paused", "{step:?}");
            from.assert_stands();
            drop(state);
        }
        let to = Machine::destination(&binary, &config, &disk);
        move_devices(&from, &mut source, &to).unwrap();
        source.quit();
        to.assert_stands();
        to.as_destination().start().unwrap();
        to.assert_counts();
    }
}

/// With a destination that takes its disks when it has loaded the devices, the first rollback is refused: QEMU gets no
/// lock on the disk. (Seen so.)
#[test]
fn a_destination_that_has_loaded_the_devices_holds_no_disk_and_the_source_may_run_on() {
    for binary in binaries() {
        let (config, disk) = (Config::new("q35"), Disk::new());
        let from = Machine::source(&binary, &config, &disk);
        let to = Machine::destination(&binary, &config, &disk);
        let mut source = from.as_source();
        move_devices(&from, &mut source, &to).unwrap();
        source.rollback().expect("nobody else has the disk");
        from.assert_counts();
        let error = to.as_destination().start().expect_err("the source has the disk again");
        assert!(error.to_string().contains("lock"), "{error}");
        to.as_destination().quit();
        to.wait_ended();

        let to = Machine::destination(&binary, &config, &disk);
        move_devices(&from, &mut source, &to).unwrap();
        to.as_destination().start().expect("it takes the disk when it is let run");
        let error = source.rollback().expect_err("the destination has the disk");
        assert!(error.to_string().contains("lock"), "{error}");
        to.assert_counts();
    }
}
