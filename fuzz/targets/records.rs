//! What a daemon finds in its state directory when it starts: the records of machines, of migrations and of templates,
//! with fields replaced, left out, or added.
#![no_main]

use libfuzzer_sys::fuzz_target;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;
use sterna_daemon::fork::templates::TemplateRecord;
use sterna_daemon::machines::record::VmRecord;
use sterna_daemon::migration::records::MigrationRecord;

/// Which field, and what stands there instead; nothing where that is no JSON.
type Changes = Vec<(u8, String)>;

/// A record as a daemon writes it, one field after another: as text, because numbers may be wider than a reader's.
type Fields = &'static [(&'static str, &'static str)];

const MACHINE: Fields = &[
    ("name", r#""vm""#),
    ("memory_bytes", "67108864"),
    ("memory_mode", r#""shared""#),
    ("trust_group", "null"),
    ("qemu_path", r#""/usr/bin/qemu-system-x86_64""#),
    ("qemu_version", "[7,2,22]"),
    ("machine", r#""pc-q35-7.2""#),
    ("arguments", r#"["-machine","q35"]"#),
    ("managed_ram", "true"),
    ("process", r#"{"pid":4711,"start_ticks":12,"boot":340282366920938463463374607431768211455}"#),
    ("qmp", r#""/var/lib/sterna/vms/vm/qmp.sock""#),
    ("agent", r#""/var/lib/sterna/vms/vm/agent.sock""#),
    ("blocks", r#"[{"id":"ram","path":"/var/lib/sterna/ram/vm-1","bytes":67108864,"page_bytes":4096}]"#),
    ("owns_ram_files", "true"),
    ("balloon", r#"{"mode":"auto","interval_ms":1000,"memory_bytes":null}"#),
    ("lifecycle", r#"{"incoming":7}"#),
    ("running", "true"),
    ("kept_before", "null"),
    ("paging", r#"{"id":7,"from":"a","map":"/var/lib/sterna/ram/vm-1.missing","held_back":true}"#),
    ("huge_pages", "true"),
    ("waits_for_room", "true"),
    ("succession", r#"{"done":{"tag":"0badcafe","former":{"pid":4711,"start_ticks":12,"boot":7},"files":["/run/a"]}}"#),
    ("forking", r#"[{"id":"ram","path":"/r","bytes":4096,"page_bytes":4096,"private":140000000000000}]"#),
    ("image", "true"),
    ("overlays", r#"[{"of":"clone","path":"/d/clone.qcow2","base":"/d/vm.qcow2","node":"sterna-1"}]"#),
    ("bases", r#"[{"image":"/d/vm.qcow2","overlay":"/d/over.qcow2","others":["/d/clone.qcow2"],"kept":true}]"#),
    ("new_cards", r#"[{"netdev":"n","mac":"52:54:00:00:00:01","bus":"pcie.0","address":"2.0"}]"#),
    ("tickets", r#"[{"host":1,"number":340282366920938463463374607431768211455}]"#),
    ("held", r#"{"template":"t","taking":{"from":"t.1","to":"clone"}}"#),
    ("forked_from", r#""origin""#),
    ("family", r#""origin-0badcafe""#),
];

const MIGRATION: Fields = &[
    ("id", "340282366920938463463374607431768211455"),
    ("vm", r#""vm""#),
    ("stage", r#"{"handing-over":{"peer":"10.0.0.2:7700","postcopy":{"mode":"postcopy","streams":4}}}"#),
    ("at_s", "1700000000"),
    ("boot", "340282366920938463463374607431768211455"),
    ("from", "null"),
    ("pages", r#""coming""#),
];

/// All but the machine that it was made of.
const TEMPLATE: Fields = &[
    ("name", r#""t""#),
    ("machine", r#""pc-q35-7.2""#),
    ("arguments", r#"["-machine","q35"]"#),
    ("content_bytes", "1048576"),
    (
        "image",
        r#"{"files":[{"file":{"path":"/ram/t","device":[0,42],"inode":7},
        "pieces":[{"block":0,"within":{"start":0,"end":4096},"offset":8192}]}],
        "devices":{"path":"/ram/t.devices","device":[0,42],"inode":8}}"#,
    ),
    ("hold", "3"),
];

fuzz_target!(|given: (Changes, Changes, Changes, Vec<u8>)| {
    let (machine, migration, template, bytes) = given;
    let source = changed(MACHINE, &machine);
    let mut whole = changed(TEMPLATE, &template);
    whole.pop();
    whole.extend([br#","source":"#.as_slice(), &source, b"}"].concat());
    if machine.is_empty() && migration.is_empty() && template.is_empty() {
        assert!(read::<VmRecord>(&source).is_some() && read::<TemplateRecord>(&whole).is_some(), "ours are none");
        assert!(read::<MigrationRecord>(&changed(MIGRATION, &migration)).is_some(), "ours is none");
    }
    for text in [&bytes, &source] {
        if let Some((record, again)) = read::<VmRecord>(text) {
            assert_eq!(record, again);
            let _ = (record.layout(), record.own_files());
        }
    }
    if let Some((record, again)) = read::<MigrationRecord>(&changed(MIGRATION, &migration)) {
        // Options have fractions, of which the last digit may change on the way through text.
        assert_eq!((record.id, record.vm, record.at_s, record.boot), (again.id, again.vm, again.at_s, again.boot));
        assert_eq!((record.from, record.pages), (again.from, again.pages));
        assert_eq!(std::mem::discriminant(&record.stage), std::mem::discriminant(&again.stage));
    }
    if let Some((record, again)) = read::<TemplateRecord>(&whole) {
        assert_eq!((record.name, record.machine, record.arguments), (again.name, again.machine, again.arguments));
        assert_eq!((record.content_bytes, record.hold), (again.content_bytes, again.hold));
        assert_eq!((record.image, record.source), (again.image, again.source));
    }
});

fn changed(fields: Fields, changes: &Changes) -> Vec<u8> {
    let mut fields: Vec<(&str, &str)> = fields.to_vec();
    for (which, value) in changes {
        // One in two is left out where the value is no JSON, so that defaults have their turn, too.
        let at = usize::from(*which) % fields.len();
        match serde_json::from_str::<&RawValue>(value) {
            Ok(value) => fields[at].1 = value.get(),
            Err(_) if which % 2 == 0 && fields.len() > 1 => drop(fields.remove(at)),
            Err(_) => {}
        }
    }
    let fields: Vec<String> = fields.iter().map(|(name, value)| format!("\"{name}\":{value}")).collect();
    format!("{{{}}}", fields.join(",")).into_bytes()
}

/// A record, and what is understood where it is written again: or a restart would make something else of it.
fn read<T: DeserializeOwned + Serialize>(text: &[u8]) -> Option<(T, T)> {
    let record: T = serde_json::from_slice(text).ok()?;
    let again = serde_json::to_vec_pretty(&record).expect("what was understood can be said");
    Some((record, serde_json::from_slice::<T>(&again).expect("our own record")))
}
