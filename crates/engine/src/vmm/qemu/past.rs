//! Who writes guest RAM past the page tables of QEMU's process, told by what it is.
//!
//! Most of what a device reads for its guest the kernel, or QEMU itself, copies into RAM through QEMU's page tables,
//! where write tracking sees it. Two kinds do not:
//!
//! - **Foreign writers** have all of RAM mapped or pinned for as long as they live (VFIO, vhost-user, vDPA, drivers
//!   with registered memory). Nothing that Sterna does to pages of the file reaches them, at either end: such guests
//!   are refused.
//! - **Direct I/O** pins a page for one request. To pin it is a write fault, which is seen; what lands later is not.
//!   QEMU drains its requests when it stops the guest, and then content tells
//!   ([`changed_untracked`](crate::source::select::changed_untracked)).
//!
//! A name that is on no list here counts as direct I/O: it costs time in the pause, and no page.

use std::os::unix::fs::FileTypeExt;

use serde_json::Value;
use sterna_sys::process::OpenFile;

/// Devices and network back ends that have RAM mapped or pinned for themselves: their types begin so. Of vhost in the
/// kernel these alone; `vhost-net` and `vhost-vsock` copy, by the addresses of QEMU's process.
pub const FOREIGN: [&str; 7] =
    ["vfio-", "vhost-user", "vhost-vdpa", "vhost-scsi", "ivshmem", "x-vfio-user", "x-pci-proxy"];

/// Block drivers that map guest RAM for a device or register it with the kernel: QEMU's own for NVMe, and libblkio's.
const FOREIGN_DRIVERS: [&str; 5] =
    ["nvme", "io_uring", "nvme-io_uring", "virtio-blk-vfio-pci", "virtio-blk-vhost-user"];
/// The one left of them that its name alone does not name.
const FOREIGN_DRIVER_PREFIX: &str = "virtio-blk-";

/// Devices that pass SCSI commands through to the host's: the kernel pins what they read into (`SG_IO`), whatever the
/// cache mode.
const PASSING_THROUGH: [&str; 2] = ["scsi-block", "scsi-generic"];

/// Block drivers that do no I/O of their own, or whose I/O is copied: formats and filters; those that have an open
/// file, which is looked at itself; those that receive from a socket. Which are not here may be anything.
const COPYING_DRIVERS: [&str; 42] = [
    "backup-top",
    "blkdebug",
    "blklogwrites",
    "blkreplay",
    "blkverify",
    "bochs",
    "cloop",
    "commit_top",
    "compress",
    "copy-before-write",
    "copy-on-read",
    "dmg",
    "file",
    "ftp",
    "ftps",
    "host_cdrom",
    "host_device",
    "http",
    "https",
    "iscsi",
    "luks",
    "mirror_top",
    "nbd",
    "nfs",
    "null-aio",
    "null-co",
    "parallels",
    "preallocate",
    "qcow",
    "qcow2",
    "qed",
    "quorum",
    "raw",
    "replication",
    "snapshot-access",
    "ssh",
    "throttle",
    "vdi",
    "vhdx",
    "vmdk",
    "vpc",
    "vvfat",
];

/// File systems that copy what is read through the page cache unless a file is opened for direct I/O. Not here, because
/// they may do direct I/O by themselves: FUSE (as a server or the mount asks), ZFS (`direct=always`), CIFS
/// (`cache=none`), NFS, Ceph, 9p; and overlays of whatever.
const COPYING_FILE_SYSTEMS: [&str; 16] = [
    "bfs",
    "btrfs",
    "devpts",
    "erofs",
    "ext2",
    "ext3",
    "ext4",
    "f2fs",
    "hugetlbfs",
    "iso9660",
    "proc",
    "ramfs",
    "squashfs",
    "sysfs",
    "tmpfs",
    "xfs",
];

/// Files of the kernel's own making, as the name of their link begins: memory without a name on a disk.
const MEMORY_FILES: [&str; 3] = ["/memfd:", "/dev/zero", "/SYSV"];

/// Devices of the host through which nothing is read into guest RAM, or what is, by copying.
const COPYING_DEVICES: [&str; 10] = [
    "/dev/kvm",
    "/dev/net/tun",
    "/dev/null",
    "/dev/ptmx",
    "/dev/random",
    "/dev/urandom",
    "/dev/userfaultfd",
    "/dev/vhost-net",
    "/dev/vhost-vsock",
    "/dev/hwrng",
];

/// Whether a device or network back end of this type is a foreign writer.
pub(super) fn is_foreign(kind: &str) -> bool {
    FOREIGN.iter().any(|prefix| kind.starts_with(prefix))
}

/// Whether a block driver maps guest RAM for a device, or registers it with the kernel.
#[must_use]
pub fn is_foreign_driver(driver: &str) -> bool {
    FOREIGN_DRIVERS.contains(&driver) || driver.starts_with(FOREIGN_DRIVER_PREFIX)
}

/// Block nodes that read past the page tables, or may.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Nodes {
    /// Foreign writers, with their driver.
    pub foreign: Vec<String>,
    /// Those that do direct I/O or whose driver nobody knows.
    pub direct: Vec<String>,
    /// Of these, those whose driver nobody knows: what it calls to read is not known either.
    pub unknown: Vec<String>,
}

/// Block nodes by what they are, as `query-named-block-nodes` lists them.
pub(super) fn nodes(nodes: &Value) -> Nodes {
    let mut found = Nodes::default();
    for node in nodes.as_array().into_iter().flatten() {
        let (name, driver) = (node["node-name"].as_str().unwrap_or("?"), node["drv"].as_str().unwrap_or("?"));
        if is_foreign_driver(driver) {
            found.foreign.push(format!("{name} ({driver})"));
        } else if !COPYING_DRIVERS.contains(&driver) {
            found.direct.push(format!("{name} ({driver})"));
            found.unknown.push(format!("{name} ({driver})"));
        } else if node["cache"]["direct"].as_bool() == Some(true) {
            found.direct.push(name.to_owned());
        }
    }
    found
}

/// Whether a device of this type pins what it reads into.
pub(super) fn passes_through(kind: &str) -> bool {
    PASSING_THROUGH.contains(&kind)
}

/// Whether a device of this type does so where it was asked to (`scsi=on`, QEMU before 9.1).
pub(super) fn may_pass_through(kind: &str) -> bool {
    kind.starts_with("virtio-blk")
}

/// Whether a file of these is only ever read by calls that are noted for as long as they are under way: regular files
/// and block devices. What is asked of another device nobody knows. Where commands are passed through to a block device
/// the device says so, not the file.
pub(super) fn are_read_by_calls(files: &[&OpenFile]) -> bool {
    files.iter().all(|file| {
        let path = &file.path;
        !path.starts_with("/dev")
            || path.starts_with("/dev/shm")
            || std::fs::metadata(path).is_ok_and(|about| about.file_type().is_block_device())
    })
}

/// Of the files that QEMU has open: those through which something is, or may be, read into guest RAM by direct I/O. It
/// is the kernel's word, so it holds for what QEMU does not tell, too: a medium just changed, a descriptor that was
/// passed.
pub(super) fn files(files: &[OpenFile]) -> Vec<&OpenFile> {
    let suspect = |file: &&OpenFile| {
        let is = |prefixes: &[&str]| {
            file.path.to_str().is_some_and(|path| prefixes.iter().any(|prefix| path.starts_with(prefix)))
        };
        let copies = if is(&MEMORY_FILES) {
            true
        } else if file.path.starts_with("/dev") && !file.path.starts_with("/dev/shm") {
            // Block devices among them: whether commands are passed through to one cannot be told by its descriptor.
            is(&COPYING_DEVICES) || file.path.starts_with("/dev/pts")
        } else {
            file.file_system.as_deref().is_some_and(|kind| COPYING_FILE_SYSTEMS.contains(&kind))
        };
        file.readable && (file.direct || !copies)
    };
    files.iter().filter(suspect).collect()
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use serde_json::json;

    use super::*;

    /// As QEMU 7.2 and 10.0 answer, of which only these fields matter; `nvme`, libblkio's drivers and the last are put
    /// in by hand.
    fn node(name: &str, driver: &str, direct: bool) -> Value {
        let cache = json!({ "no-flush": false, "direct": direct, "writeback": true });
        json!({ "node-name": name, "drv": driver, "cache": cache, "file": "/var/disk", "ro": false })
    }

    /// By `cache.direct` alone, which was all that was looked at before, two of them were told, and one of those as
    /// what it is not.
    #[test]
    fn block_nodes_are_told_by_what_they_are() {
        let list = json!([
            node("#block141", "raw", true),
            node("copied", "qcow2", false),
            node("a", "nvme", false),
            node("b", "io_uring", false),
            node("c", "virtio-blk-vhost-vdpa", true),
            node("d", "what-comes-next", false),
            node("e", "rbd", false),
        ]);
        let Nodes { foreign, direct, unknown } = nodes(&list);
        assert_eq!(foreign, ["a (nvme)", "b (io_uring)", "c (virtio-blk-vhost-vdpa)"]);
        assert_eq!(direct, ["#block141", "d (what-comes-next)", "e (rbd)"]);
        assert_eq!(unknown, direct[1..]);
        assert_eq!(nodes(&Value::Null), Nodes::default());
    }

    #[test]
    fn devices_are_told_by_their_type() {
        for kind in
            ["vhost-scsi-pci", "vhost-scsi-ccw", "vfio-pci", "vhost-user-blk-pci", "vhost-vdpa", "ivshmem-plain"]
        {
            assert!(is_foreign(kind) && !passes_through(kind), "{kind}");
        }
        for kind in ["scsi-block", "scsi-generic"] {
            assert!(passes_through(kind) && !is_foreign(kind), "{kind}");
        }
        for kind in ["virtio-net-pci", "vhost-vsock-pci", "scsi-hd", "virtio-scsi-pci", "tap"] {
            assert!(!is_foreign(kind) && !passes_through(kind), "{kind}");
        }
    }

    #[test]
    fn open_files_are_told_by_their_file_system_and_flags() {
        let file = |path: &str, kind: Option<&str>, readable, direct| OpenFile {
            path: PathBuf::from(path),
            readable,
            direct,
            file_system: kind.map(str::to_owned),
        };
        let copied = [
            file("/var/disk", Some("ext4"), true, false),
            file("/run/ram", Some("tmpfs"), true, false),
            file("/dev/shm/ram", Some("tmpfs"), true, false),
            file("/memfd:x (deleted)", None, true, false),
            file("/dev/kvm", Some("devtmpfs"), true, false),
            file("/dev/pts/3", Some("devpts"), true, false),
            file("/srv/log", Some("fuse.sshfs"), false, false),
        ];
        assert!(files(&copied).is_empty(), "{:?}", files(&copied));
        let past = [
            file("/var/disk", Some("ext4"), true, true),
            file("/srv/a", Some("fuse.sshfs"), true, false),
            file("/srv/b", Some("zfs"), true, false),
            file("/srv/c", Some("cifs"), true, false),
            file("/srv/d", Some("nfs4"), true, false),
            file("/srv/e", None, true, false),
            file("/dev/sg0", Some("devtmpfs"), true, false),
            file("/dev/sda", Some("devtmpfs"), true, false),
        ];
        assert_eq!(files(&past).len(), past.len());
    }
}
