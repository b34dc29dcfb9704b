//! The guest's disks, and their overlays: what QEMU makes of an image when others are to begin as it.
//!
//! QEMU itself formats an overlay, so that no other program is needed, and the one that reads it has written it.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::commands::{COMMAND_TIMEOUT, ask};
use super::inspect::items;
use super::jobs::{JobState, dismiss, job_state};
use crate::vmm::VmmError;
use crate::vmm::qmp::Qmp;

/// How long QEMU may take to write the few blocks that an overlay begins with.
const FORMAT_TIMEOUT: Duration = Duration::from_secs(30);

/// How often it is asked whether it has.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// A disk that the guest can write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disk {
    /// Its device's name, as people should see it.
    pub name: String,
    /// The name of the block node that the device has.
    pub node: String,
    /// Its image.
    pub file: String,
    /// The image's format.
    pub format: String,
    /// What the guest sees of it, bytes.
    pub bytes: u64,
    /// How many images lie under it.
    pub depth: u64,
    /// What is written to it stays in this host's memory until the kernel likes (`cache=unsafe`).
    pub no_flush: bool,
    /// It is read and written past the page cache (`cache=none`).
    pub direct: bool,
}

/// The disks that the guest can write.
///
/// # Errors
/// [`VmmError`] where QEMU does not answer.
pub fn writable_disks(qmp: &mut Qmp) -> Result<Vec<Disk>, VmmError> {
    Ok(disks(&ask(qmp, "query-block")?))
}

fn disks(list: &Value) -> Vec<Disk> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let disk = |device: &Value| {
        let inserted = &device["inserted"];
        let names = [&device["device"], &device["qdev"], &inserted["file"]];
        let name = names.iter().filter_map(|name| name.as_str()).find(|name| !name.is_empty());
        Disk {
            name: name.unwrap_or("a disk").to_owned(),
            node: text(&inserted["node-name"]),
            file: text(&inserted["file"]),
            format: text(&inserted["drv"]),
            bytes: inserted["image"]["virtual-size"].as_u64().unwrap_or_default(),
            depth: inserted["backing_file_depth"].as_u64().unwrap_or_default(),
            no_flush: inserted["cache"]["no-flush"].as_bool().unwrap_or_default(),
            direct: inserted["cache"]["direct"].as_bool().unwrap_or_default(),
        }
    };
    items(list).iter().filter(|device| device["inserted"]["ro"].as_bool() == Some(false)).map(disk).collect()
}

/// Makes an empty file at `path` an overlay of a disk, in which all of it reads as in the disk's image. `name` is a
/// name that no block node and no job has: of one that a daemon began and did not end, both may be left.
///
/// # Errors
/// [`VmmError`]: QEMU cannot write the file, or there is no room.
pub fn format_overlay(qmp: &mut Qmp, name: &str, path: &Path, disk: &Disk) -> Result<(), VmmError> {
    let file = json!({ "driver": "file", "node-name": name, "filename": path });
    qmp.execute("blockdev-add", file, COMMAND_TIMEOUT)?;
    let made = format(qmp, name, disk);
    let closed = close_node(qmp, name);
    made.and(closed)
}

fn format(qmp: &mut Qmp, name: &str, disk: &Disk) -> Result<(), VmmError> {
    let options = json!({
        "driver": "qcow2", "file": name, "size": disk.bytes, "backing-file": disk.file, "backing-fmt": disk.format,
    });
    qmp.execute("blockdev-create", json!({ "job-id": name, "options": options }), COMMAND_TIMEOUT)?;
    let deadline = Instant::now() + FORMAT_TIMEOUT;
    loop {
        match job_state(qmp, name)? {
            Some(JobState::Ended(error)) => {
                dismiss(qmp, name)?;
                return error
                    .map_or(Ok(()), |reason| Err(VmmError::Refused { command: "blockdev-create".to_owned(), reason }));
            }
            _ if Instant::now() >= deadline => {
                let seconds = FORMAT_TIMEOUT.as_secs();
                return Err(VmmError::Silent { waiting_for: "blockdev-create".to_owned(), seconds });
            }
            _ => std::thread::sleep(POLL_INTERVAL),
        }
    }
}

/// Opens an overlay of a disk under this name of a block node, over nothing yet, as the disk is open.
///
/// # Errors
/// [`VmmError`].
pub fn open_overlay(qmp: &mut Qmp, node: &str, path: &Path, disk: &Disk) -> Result<(), VmmError> {
    let cache = json!({ "direct": disk.direct, "no-flush": disk.no_flush });
    let overlay = json!({
        "driver": "qcow2", "node-name": node, "backing": null, "cache": cache,
        "file": { "driver": "file", "filename": path, "cache": cache },
    });
    qmp.execute("blockdev-add", overlay, COMMAND_TIMEOUT).map(drop)
}

/// Closes a block node that no device has.
///
/// # Errors
/// [`VmmError`]; it is open still.
pub fn close_node(qmp: &mut Qmp, node: &str) -> Result<(), VmmError> {
    qmp.execute("blockdev-del", json!({ "node-name": node }), COMMAND_TIMEOUT).map(drop)
}

/// Moves disks onto overlays, all or none: each a block node and that of its overlay. The guest is stopped, and QEMU
/// has its disks still.
pub(super) fn onto_overlays(qmp: &mut Qmp, disks: &[(String, String)]) -> Result<(), VmmError> {
    let action =
        |(node, overlay): &(_, _)| json!({ "type": "blockdev-snapshot", "data": { "node": node, "overlay": overlay } });
    let actions: Vec<Value> = disks.iter().map(action).collect();
    if actions.is_empty() {
        return Ok(());
    }
    qmp.execute("transaction", json!({ "actions": actions }), COMMAND_TIMEOUT).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As QEMU 7.2 and 10.0 answer, of which only these fields matter.
    #[test]
    fn a_disk_that_can_be_written_is_told_with_its_image_and_what_is_under_it() {
        let list = json!([
            { "device": "virtio0", "qdev": "/machine/peripheral-anon/device[0]/virtio-backend", "inserted":
                { "ro": false, "node-name": "#block162", "drv": "raw", "file": "/base", "backing_file_depth": 0,
                  "cache": { "no-flush": false, "direct": true, "writeback": true }, "image": { "virtual-size": 8388608 } } },
            { "device": "", "qdev": "d", "inserted":
                { "ro": false, "node-name": "o", "drv": "qcow2", "file": "/o", "backing_file_depth": 2,
                  "cache": { "no-flush": true, "direct": false, "writeback": true }, "image": { "virtual-size": 512 } } },
            { "device": "cd", "inserted": { "ro": true, "node-name": "c", "drv": "raw", "file": "/c" } },
            { "device": "floppy0" },
        ]);
        let disk = |name: &str, node: &str, file: &str, format: &str, bytes, depth| {
            let [name, node, file, format] = [name, node, file, format].map(str::to_owned);
            Disk { name, node, file, format, bytes, depth, no_flush: depth > 0, direct: depth == 0 }
        };
        let expected =
            [disk("virtio0", "#block162", "/base", "raw", 8 << 20, 0), disk("d", "o", "/o", "qcow2", 512, 2)];
        assert_eq!(disks(&list), expected);
        assert!(disks(&Value::Null).is_empty());
    }
}
