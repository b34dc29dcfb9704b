//! QEMUs that are killed or hang, and guests that switch themselves off or panic.

use sterna_engine::vmm::{Destination, Source, VmmError};

use crate::fixture::{STEPS, Step, take_to};
use crate::machine::{Config, Disk, LONG, Machine, binaries};

#[test]
fn a_qemu_killed_at_any_step_is_reported_gone() {
    for binary in binaries() {
        let disk = Disk::new();
        for step in STEPS {
            let from = Machine::source(&binary, &Config::new("q35"), &disk);
            let mut source = from.as_source();
            let state = take_to(&mut source, step);
            assert!(source.ended().is_none());
            from.kill();
            from.wait_ended();
            let error = match step {
                Step::Prepared => source.begin().map(drop),
                Step::Begun => source.stopped(LONG).map(drop),
                Step::Stopped => source.save_devices(),
                Step::Saving => source.saved(LONG).and_then(|()| source.running().map(drop)),
                Step::Saved => source.running().map(drop),
            }
            .unwrap_err();
            assert!(matches!(error, VmmError::Gone { guest_off: false }), "{step:?}: {error:?}");
            assert!(matches!(source.ended(), Some(VmmError::Gone { guest_off: false })));
            if step >= Step::Begun {
                assert!(matches!(source.rollback(), Err(VmmError::Gone { .. })));
            }
            source.quit();
            drop(state);
        }
    }
}

#[test]
fn a_destination_killed_at_any_step_is_reported() {
    for binary in binaries() {
        let (config, disk) = (Config::new("q35"), Disk::new());
        let to = Machine::destination(&binary, &config, &disk);
        to.kill();
        to.wait_ended();
        assert!(matches!(to.as_destination().prepare(), Err(VmmError::Gone { .. })));

        let to = Machine::destination(&binary, &config, &disk);
        let mut destination = to.as_destination();
        let _stream = destination.prepare().unwrap();
        to.kill();
        assert!(matches!(destination.loaded(LONG), Err(VmmError::Gone { guest_off: false })));
        assert!(matches!(destination.start(), Err(VmmError::Gone { guest_off: false })));
        destination.quit();
    }
}

#[test]
fn a_guest_that_switches_itself_off_is_reported_as_off() {
    for binary in binaries() {
        for step in [Step::Prepared, Step::Begun] {
            let disk = Disk::new();
            let from = Machine::source(&binary, &Config::new("q35").with(&["-vga", "std"]), &disk);
            let mut source = from.as_source();
            source.prepare().unwrap();
            // Not read, so that the guest is still running when it switches itself off.
            let stream = (step == Step::Begun).then(|| source.begin().unwrap());
            from.switch_off();
            from.wait_ended();
            if stream.is_some() {
                let error = source.stopped(LONG).unwrap_err();
                assert!(matches!(error, VmmError::Gone { guest_off: true }), "{error:?}");
                assert!(matches!(source.rollback(), Err(VmmError::Gone { guest_off: true })));
            }
            assert!(matches!(source.ended(), Some(VmmError::Gone { guest_off: true })));
        }
    }
}

#[test]
fn a_guest_that_is_off_in_a_living_qemu_is_not_moved() {
    for binary in binaries() {
        let disk = Disk::new();
        let from = Machine::source(&binary, &Config::new("q35").with(&["-no-shutdown", "-vga", "std"]), &disk);
        let mut source = from.as_source();
        let _stream = source.begin().unwrap();
        from.switch_off();
        let error = source.stopped(LONG).unwrap_err();
        assert!(matches!(error, VmmError::Gone { guest_off: true }), "{error:?}");
        source.rollback().unwrap();
        assert_eq!(from.status(), "shutdown", "it is not switched on by the rollback");
        assert!(matches!(source.begin(), Err(VmmError::Gone { guest_off: true })));
    }
}

#[test]
fn a_guest_that_panics_meanwhile_is_left_as_it_is() {
    for binary in binaries() {
        let config = Config::new("q35").with(&["-device", "pvpanic", "-action", "panic=pause", "-vga", "std"]);
        let disk = Disk::new();
        let from = Machine::source(&binary, &config, &disk);
        let mut source = from.as_source();
        let stream = source.begin().unwrap();
        from.write_port(0x505, 1);
        while from.status() != "guest-panicked" {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        source.rollback().unwrap();
        assert_eq!(from.status(), "guest-panicked");
        drop(stream);
    }
}

#[test]
fn a_qemu_that_hangs_is_killed_on_quit() {
    for binary in binaries() {
        let disk = Disk::new();
        let from = Machine::source(&binary, &Config::new("q35"), &disk);
        let pid = rustix::process::Pid::from_raw(i32::try_from(from.pid()).unwrap()).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
        from.as_source().quit();
        assert!(from.process().has_ended());
    }
}
