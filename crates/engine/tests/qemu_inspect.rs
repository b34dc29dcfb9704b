//! What a real QEMU says of itself.

#[path = "support/machine.rs"]
mod machine;

use machine::{Config, Disk, LONG, Machine, RAM_BYTES, binaries};
use serde_json::json;
use sterna_engine::vmm::qemu::{BalloonDevice, binary_version, inspect, machine_types, resize};
use sterna_engine::vmm::{Source, Untracked, VmmError};

#[test]
fn a_running_machine_is_described() {
    for binary in binaries() {
        let version = binary_version(&binary).unwrap();
        for (machine, prefix) in [("q35", "pc-q35-"), ("pc", "pc-i440fx-"), ("microvm", "microvm")] {
            let disk = Disk::new();
            let from = Machine::source(&binary, &Config::new(machine).with(&["-cpu", "max"]), &disk);
            let found = inspect(&mut from.qmp.lock().unwrap()).unwrap();
            assert_eq!(found.version, version);
            assert_eq!((found.status.as_str(), found.running), ("running", true));
            assert!(found.machine.starts_with(prefix), "{}", found.machine);
            assert!(machine_types(&binary).unwrap().contains(&found.machine));
            assert_eq!((found.accelerator.as_str(), found.cpu.as_deref()), ("tcg", Some("max")));
            assert_eq!(found.ram_bytes, RAM_BYTES);
            assert_eq!(found.memory_devices.len(), 1);
            assert!(found.memory_devices[0].is_movable(), "{found:?}");
            assert!(found.memory_devices[0].path.as_ref().unwrap().ends_with("/ram"));
            assert!(found.immovable_ram().is_empty(), "{found:?}");
            assert!(found.direct_io.is_empty() && found.foreign_writers.is_empty() && found.blockers.is_empty());
        }
    }
}

#[test]
fn what_cannot_be_moved_is_found() {
    for binary in binaries() {
        let config = Config::new("q35").with(&["-m", "64,slots=2,maxmem=256M"]).with(&[
            "-object",
            "memory-backend-memfd,id=plugged,size=16M",
            "-device",
            "pc-dimm,memdev=plugged",
            "-blockdev",
            "driver=null-co,node-name=direct,size=1048576,cache.direct=on",
            "-object",
            "memory-backend-ram,id=common,size=1M,share=on",
            "-device",
            "ivshmem-plain,memdev=common,master=off",
        ]);
        let disk = Disk::new();
        let from = Machine::source(&binary, &config, &disk);
        let found = inspect(&mut from.qmp.lock().unwrap()).unwrap();
        assert_eq!(found.ram_bytes, RAM_BYTES + (16 << 20));
        let immovable = found.immovable_ram().join(" ");
        assert!(immovable.contains("'plugged' (memory-backend-memfd"), "{immovable}");
        assert!(!immovable.contains("'ram'"), "{immovable}");
        assert_eq!(found.direct_io, ["direct"]);
        assert_eq!(found.foreign_writers, ["ivshmem-plain"]);
        assert!(found.blockers.iter().any(|blocker| blocker.contains("ivshmem")), "{:?}", found.blockers);
        // QEMU says so itself when it is tried, and the guest is none the worse for it.
        let error = from.as_source().begin().unwrap_err();
        assert!(matches!(&error, VmmError::Refused { reason, .. } if reason.contains("ivshmem")), "{error:?}");
        from.assert_counts();
    }
}

/// Whether a disk of QEMU's writes past the page tables is told by the file that it has open, and by whose that is. The
/// flag of its nodes, which was all that was looked at, and once, says nothing of a file on FUSE.
#[test]
fn disks_that_write_past_the_page_tables_are_found_whenever_they_come() {
    for binary in binaries() {
        let (disk, directory) = (Disk::new(), tempfile::tempdir_in("/var/tmp").unwrap());
        std::fs::set_permissions(directory.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let file = directory.path().join("medium");
        std::fs::write(&file, [1; 65536]).unwrap();
        let config = Config::new("q35");
        let from = Machine::source(&binary, &config, &disk);
        let mut source = from.as_source();
        assert_eq!(source.writes_untracked().unwrap(), Untracked::Nobody, "a raw disk of its page cache");
        assert!(!inspect(&mut from.qmp.lock().unwrap()).unwrap().may_nest, "TCG writes through QEMU's page tables");
        let add = |name: &str, path: &std::path::Path, direct: bool| {
            let cache = json!({ "direct": direct });
            let node =
                json!({ "driver": "file", "node-name": name, "filename": path, "read-only": true, "cache": cache });
            from.execute("blockdev-add", node);
        };
        let began = std::time::Instant::now();
        (0..100).for_each(|_| assert_eq!(source.writes_untracked().unwrap(), Untracked::Nobody));
        println!("{:?} a look", began.elapsed() / 100);
        add("copied", &file, false);
        assert_eq!(source.writes_untracked().unwrap(), Untracked::Nobody);
        add("direct", &file, true);
        assert_eq!(source.writes_untracked().unwrap(), Untracked::Reads, "a medium that came later");
        from.execute("blockdev-del", json!({ "node-name": "direct" }));
        assert_eq!(source.writes_untracked().unwrap(), Untracked::Nobody);
        // QEMU has nothing but a file on FUSE, and its node says nothing of it.
        let Some(fuse) = Fuse::mount(&file, directory.path()) else { continue };
        add("fuse", &fuse.point, false);
        assert_eq!(inspect(&mut from.qmp.lock().unwrap()).unwrap().direct_io, Vec::<String>::new());
        assert_eq!(source.writes_untracked().unwrap(), Untracked::Reads, "a file on FUSE");
        from.execute("blockdev-del", json!({ "node-name": "fuse" }));
    }
}

/// A file served by FUSE.
struct Fuse {
    server: std::process::Child,
    point: std::path::PathBuf,
}

impl Fuse {
    /// Serves what `file` holds; `None`, and says so, where that cannot be.
    fn mount(file: &std::path::Path, directory: &std::path::Path) -> Option<Self> {
        let point = directory.join("served");
        std::fs::write(&point, "").unwrap();
        let kind = || {
            let mounts = sterna_sys::mountinfo::mounts().unwrap();
            mounts.into_iter().rev().find(|mount| mount.point == point).map(|mount| mount.kind)
        };
        let server = std::process::Command::new("qemu-storage-daemon")
            .args(["--blockdev", &format!("driver=file,node-name=f,read-only=on,filename={}", file.display())])
            .args(["--export", &format!("type=fuse,id=e,node-name=f,mountpoint={},allow-other=on", point.display())])
            .stderr(std::process::Stdio::null())
            .spawn();
        let Ok(mut server) = server else {
            println!("skipped: no qemu-storage-daemon to serve a file with");
            return None;
        };
        let deadline = std::time::Instant::now() + LONG;
        while kind().is_none() {
            if server.try_wait().unwrap().is_some() || std::time::Instant::now() > deadline {
                println!("skipped: nothing serves a file by FUSE here");
                let _ = server.kill();
                let _ = server.wait();
                return None;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        assert!(kind().is_some_and(|kind| kind.starts_with("fuse")), "{:?}", kind());
        std::fs::set_permissions(&point, std::os::unix::fs::PermissionsExt::from_mode(0o444)).unwrap();
        Some(Self { server, point })
    }
}

impl Drop for Fuse {
    fn drop(&mut self) {
        let _ = sterna_sys::mount::unmount(&self.point);
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

#[test]
fn replies_of_any_length_arrive_whole() {
    for binary in binaries() {
        let disk = Disk::new();
        let from = Machine::start(&binary, &Config::new("q35"), &disk, &["-S"]);
        let schema = from.qmp.lock().unwrap().execute("query-qmp-schema", json!({}), LONG).unwrap();
        assert!(schema.to_string().len() > 120_000);
    }
}

#[test]
fn a_balloon_is_found_whatever_its_bus_and_name_and_a_machine_without_one_has_none() {
    for binary in binaries() {
        let cases = [
            ("q35", "virtio-balloon-pci,id=mine,deflate-on-oom=on", (true, false)),
            ("pc", "virtio-balloon-pci,free-page-reporting=on", (false, true)),
            ("microvm", "virtio-balloon-device", (false, false)),
        ];
        for (machine, device, flags) in cases {
            let disk = Disk::new();
            let from = Machine::source(&binary, &Config::new(machine).with(&["-device", device]), &disk);
            let mut qmp = from.qmp.lock().unwrap();
            let found = BalloonDevice::find(&mut qmp, LONG).unwrap().expect("a balloon");
            assert_eq!((found.deflate_on_oom, found.free_page_reporting), flags, "{device}");
            found.ask_for_reports(&mut qmp, true, LONG).unwrap();
            let look = found.look(&mut qmp, LONG).unwrap();
            // A boot sector has no driver.
            assert_eq!((look.running, look.guest_bytes, look.report), (true, RAM_BYTES, None));
            resize(&mut qmp, RAM_BYTES / 2, LONG).unwrap();
            found.ask_for_reports(&mut qmp, false, LONG).unwrap();
        }
        let disk = Disk::new();
        let from = Machine::source(&binary, &Config::new("q35"), &disk);
        let mut qmp = from.qmp.lock().unwrap();
        assert_eq!(BalloonDevice::find(&mut qmp, LONG).unwrap(), None);
        assert!(matches!(resize(&mut qmp, RAM_BYTES, LONG), Err(VmmError::Refused { .. })));
    }
}
