//! A QEMU that somebody else used, or uses.

use serde_json::json;
use sterna_engine::vmm::qemu::QemuSource;
use sterna_engine::vmm::{Source, VmmError};

use crate::fixture::{STEPS, Step, move_devices, take_to};
use crate::machine::{Config, Disk, Machine, binaries};

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
