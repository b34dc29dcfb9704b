//! The switchover of real QEMUs, driven through the two traits, in all that can go wrong. Needs QEMU; says what it
//! skips.

#[path = "support/machine.rs"]
mod machine;

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread::JoinHandle;

use machine::{Config, Disk, LONG, Machine, binaries};
use serde_json::json;
use sterna_engine::source::throttle::{ProcessThrottle, Throttle};
use sterna_engine::vmm::qemu::{QemuDestination, QemuSource};
use sterna_engine::vmm::{Destination, Source, VmmError};

/// How far a switchover is taken at the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    Prepared,
    Begun,
    Stopped,
    Saving,
    Saved,
}

const STEPS: [Step; 5] = [Step::Prepared, Step::Begun, Step::Stopped, Step::Saving, Step::Saved];

/// What QEMU writes, read to its end beside everything else.
struct DeviceState(Option<JoinHandle<Vec<u8>>>);

impl DeviceState {
    fn read(mut stream: UnixStream) -> Self {
        Self(Some(std::thread::spawn(move || {
            let mut bytes = Vec::new();
            let _ = stream.read_to_end(&mut bytes);
            bytes
        })))
    }

    fn bytes(mut self) -> Vec<u8> {
        self.0.take().unwrap().join().unwrap()
    }
}

fn take_to(source: &mut QemuSource, step: Step) -> Option<DeviceState> {
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
fn move_devices(from: &Machine, source: &mut QemuSource, to: &Machine) -> Result<(), VmmError> {
    move_devices_into(from, source, to, &mut to.as_destination())
}

fn move_devices_into(
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
fn a_daemon_started_anew_calls_off_what_it_finds() {
    for binary in binaries() {
        let (config, disk) = (Config::new("q35"), Disk::new());
        let mut from = Machine::source(&binary, &config, &disk);
        for step in [Step::Begun, Step::Stopped, Step::Saving, Step::Saved] {
            let mut source = from.as_source();
            let state = take_to(&mut source, step);
            drop((source, state));
            from = from.reconnect();
            QemuSource::recover(from.qmp.clone(), from.process(), true).rollback().unwrap();
            from.assert_counts();
        }
        let to = Machine::destination(&binary, &config, &disk);
        move_devices(&from, &mut from.as_source(), &to).unwrap();
    }
}

#[test]
fn a_migration_that_somebody_else_began_is_left_alone() {
    for binary in binaries() {
        let disk = Disk::new();
        let from = Machine::source(&binary, &Config::new("q35").with(&["-vga", "std"]), &disk);
        let mut other = from.as_source();
        let _stream = other.begin().unwrap();
        let error = from.as_source().begin().unwrap_err();
        assert!(matches!(error, VmmError::Refused { .. }), "{error:?}");
        other.rollback().unwrap();
        from.as_source().begin().expect("its migration is over");
    }
}

#[test]
fn settings_of_somebody_else_neither_disturb_nor_are_lost() {
    for binary in binaries() {
        let (config, disk) = (Config::new("q35"), Disk::new());
        let from = Machine::source(&binary, &config, &disk);
        let theirs = ["multifd", "auto-converge"].map(|name| json!({ "capability": name, "state": true }));
        from.execute("migrate-set-capabilities", json!({ "capabilities": theirs }));
        from.execute("migrate-set-parameters", json!({ "max-bandwidth": 12345678 }));
        let asked = || {
            let capabilities = from.execute("query-migrate-capabilities", json!({}));
            (capabilities, from.execute("query-migrate-parameters", json!({})))
        };
        let before = asked();
        let mut source = from.as_source();
        for step in STEPS {
            let state = take_to(&mut source, step);
            source.rollback().unwrap();
            assert_eq!(asked(), before);
            drop(state);
        }
        let to = Machine::destination(&binary, &config, &disk);
        move_devices(&from, &mut source, &to).unwrap();
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
