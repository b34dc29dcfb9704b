use sterna_protocol::spec::BlockSpec;

use super::*;

/// A machine that can come here.
pub(in crate::migration) fn spec() -> Option<VmSpec> {
    let Ok(binary) = Binary::find(Path::new(DEFAULT_NAME)) else {
        eprintln!("skipped: no QEMU here");
        return None;
    };
    Some(VmSpec {
        name: "db1".into(),
        memory_bytes: 1 << 26,
        private: false,
        trust_group: None,
        qemu_version: binary.version,
        qemu_path: binary.path.display().to_string(),
        machine: "pc-q35-7.2".into(),
        arguments: vec!["-machine".into(), "q35".into()],
        managed_ram: true,
        blocks: vec![BlockSpec { id: RAM_ID.into(), bytes: 1 << 26, page_bytes: 4096, path: "/r".into() }],
        cpu: None,
        allocated_bytes: 1 << 25,
        balloon: sterna_api::BalloonSetting::default(),
        running: true,
        from: "a".into(),
        kin: None,
        split: None,
        small_pages: false,
    })
}

fn code(change: impl FnOnce(&mut VmSpec)) -> Option<String> {
    let mut spec = spec()?;
    change(&mut spec);
    let items = arguments::parse(&spec.arguments);
    Some(check(&spec, &items, None).map_or_else(|problem| problem.code.to_string(), |_| "fine".into()))
}

#[test]
fn every_reason_to_refuse_has_its_code() {
    type Change = fn(&mut VmSpec);
    let cases: [(&str, Change); 12] = [
        ("fine", |_| {}),
        ("fine", |spec| spec.private = true),
        ("balloon", |spec| spec.balloon.interval_ms = 0),
        ("invalid-name", |spec| spec.name = "../x".into()),
        ("private-memory", |spec| (spec.private, spec.managed_ram) = (true, false)),
        ("huge-pages", |spec| spec.blocks[0].page_bytes = 2 << 20),
        ("hotplugged-memory", |spec| spec.blocks[0].id = "dimm1".into()),
        ("ram-layout", |spec| spec.blocks[0].bytes *= 2),
        ("machine-type", |spec| spec.machine = "pc-q35-99.0".into()),
        ("cpu-model", |spec| spec.cpu = Some("Nobody/1/1/fpu".into())),
        ("file-missing", |spec| spec.arguments = vec!["-kernel".into(), "/nowhere/vmlinuz".into()]),
        ("argument-conflict", |spec| spec.arguments = vec!["-incoming".into(), "exec:id".into()]),
    ];
    for (expected, change) in cases {
        let Some(code) = code(change) else { return };
        assert_eq!(code, expected);
    }
}

#[test]
fn a_host_without_room_says_so() {
    assert_eq!(check_room("'db1'", 1 << 25, 1 << 20).unwrap_err().code, Code::OutOfMemory);
    assert!(check_room("'db1'", 1 << 25, (1 << 25) + MARGIN_BYTES).is_ok());
}

#[test]
fn an_unversioned_machine_type_does_not_go_to_an_older_qemu() {
    let newer: fn(&mut VmSpec) = |spec| {
        spec.machine = "microvm".into();
        spec.qemu_version = (99, 0, 0);
    };
    let Some(found) = code(newer) else { return };
    assert_eq!(found, "qemu-version");
    let versioned = code(|spec| spec.qemu_version = (99, 0, 0));
    assert_eq!(versioned.as_deref(), Some("fine"));
}

#[test]
fn a_program_that_others_could_have_put_there_is_not_started() {
    use std::os::unix::fs::PermissionsExt;
    assert!(roots_alone(Path::new("/bin/sh")));
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: only root's files can be root's alone");
    }
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("qemu");
    std::fs::write(&program, "").unwrap();
    assert!(roots_alone(&program));
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o775)).unwrap();
    assert!(!roots_alone(&program), "its group may change it");
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    assert!(!roots_alone(&program), "anybody may replace it");
}
