//! The images that a disk is made of, made fewer while the guest runs.
//!
//! Two ways, both QEMU's own jobs: what an overlay has is written into the image under it (*commit*), which the disk is
//! then; or an overlay takes in what lies under it (*pull*), and nobody's image is written but the overlay's.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::commands::{COMMAND_TIMEOUT, SLOW_COMMAND_TIMEOUT, ask, tell_monitor};
use super::disks::close_node;
use super::inspect::items;
use crate::vmm::VmmError;
use crate::vmm::qmp::Qmp;

/// A disk that the guest can write, with the images that it is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chain {
    /// The name of the block node that the device has.
    pub node: String,
    /// The images, the one that is written first: each with its format.
    pub images: Vec<(PathBuf, String)>,
}

/// The disks that the guest can write, with their images.
///
/// # Errors
/// [`VmmError`] where QEMU does not answer.
pub fn chains(qmp: &mut Qmp) -> Result<Vec<Chain>, VmmError> {
    Ok(chains_in(&ask(qmp, "query-block")?))
}

fn chains_in(list: &Value) -> Vec<Chain> {
    let chain = |device: &Value| {
        let inserted = &device["inserted"];
        let mut images = Vec::new();
        let mut image = &inserted["image"];
        while let (Some(file), Some(format)) = (image["filename"].as_str(), image["format"].as_str()) {
            images.push((PathBuf::from(file), format.to_owned()));
            image = &image["backing-image"];
        }
        Chain { node: inserted["node-name"].as_str().unwrap_or_default().to_owned(), images }
    };
    items(list).iter().filter(|device| device["inserted"]["ro"].as_bool() == Some(false)).map(chain).collect()
}

/// The block nodes.
fn nodes(qmp: &mut Qmp) -> Result<Value, VmmError> {
    qmp.execute("query-named-block-nodes", json!({ "flat": true }), COMMAND_TIMEOUT)
}

fn reads(node: &Value, (file, format): &(PathBuf, String)) -> bool {
    node["file"].as_str().map(Path::new) == Some(file) && node["drv"].as_str() == Some(format)
}

/// The name of the block node that reads this image.
fn node_of(qmp: &mut Qmp, image: &(PathBuf, String)) -> Result<String, VmmError> {
    let nodes = nodes(qmp)?;
    let name = items(&nodes).iter().find(|node| reads(node, image)).and_then(|node| node["node-name"].as_str());
    name.map(str::to_owned).ok_or_else(|| VmmError::Refused {
        command: "query-named-block-nodes".to_owned(),
        reason: format!("no block node reads {}", image.0.display()),
    })
}

/// Closes the block nodes that read this image and that no device has.
///
/// # Errors
/// [`VmmError`] where QEMU does not answer.
pub fn close(qmp: &mut Qmp, file: &Path) -> Result<(), VmmError> {
    let nodes = nodes(qmp)?;
    let its = items(&nodes).iter().filter(|node| node["file"].as_str().map(Path::new) == Some(file));
    for name in its.filter_map(|node| node["node-name"].as_str()) {
        // One that another is made of goes with that.
        let _ = close_node(qmp, name);
    }
    Ok(())
}

/// Has QEMU write no image under a disk's first. A commit that is given up leaves the image open for writing that it
/// wrote: QEMU 7.2 does, 10.0 no longer. A qcow2 image is then locked for as long, and no other QEMU can have it under
/// a disk of its own.
///
/// # Errors
/// [`VmmError`]: one is open for writing still.
pub fn write_none_below(qmp: &mut Qmp) -> Result<(), VmmError> {
    let written = written_below(qmp)?;
    if written.is_empty() {
        return Ok(());
    }
    let mut said = String::new();
    for (node, _) in &written {
        // `blockdev-reopen` refuses nodes to which QEMU itself gave their names.
        said += &tell_monitor(qmp, &format!("qemu-io {node} \"reopen -r\""), SLOW_COMMAND_TIMEOUT)?;
    }
    match written_below(qmp)?.first() {
        None => Ok(()),
        Some((_, file)) => Err(VmmError::Refused {
            command: "reopen".to_owned(),
            reason: format!("'{file}' stays open for writing. {}", said.trim()),
        }),
    }
}

/// The block nodes under disks' first images that are open for writing, each with its image.
fn written_below(qmp: &mut Qmp) -> Result<Vec<(String, String)>, VmmError> {
    let below: Vec<_> = chains(qmp)?.into_iter().flat_map(|chain| chain.images.into_iter().skip(1)).collect();
    let nodes = nodes(qmp)?;
    let is_written =
        |node: &&Value| node["ro"].as_bool() == Some(false) && below.iter().any(|image| reads(node, image));
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let written = items(&nodes).iter().filter(is_written);
    Ok(written.map(|node| (text(&node["node-name"]), text(&node["file"]))).collect())
}

/// Begins to write what a disk's first image has into the one under it. `job` is a name that no job has.
///
/// # Errors
/// [`VmmError`]: QEMU cannot write the image, or somebody else has it open.
pub fn begin_commit(qmp: &mut Qmp, job: &str, chain: &Chain) -> Result<(), VmmError> {
    let under = chain.images.get(1).ok_or_else(|| nothing_under(chain))?;
    let base = node_of(qmp, under)?;
    let arguments = json!({ "job-id": job, "device": chain.node, "base-node": base, "auto-dismiss": false });
    qmp.execute("block-commit", arguments, SLOW_COMMAND_TIMEOUT).map(drop)
}

/// Begins to take what lies between a disk's first image and its last into the first.
///
/// # Errors
/// [`VmmError`]: QEMU does not begin it.
pub fn begin_pull(qmp: &mut Qmp, job: &str, chain: &Chain) -> Result<(), VmmError> {
    let last = chain.images.get(1..).and_then(<[_]>::last).ok_or_else(|| nothing_under(chain))?;
    let base = node_of(qmp, last)?;
    let arguments = json!({ "job-id": job, "device": chain.node, "base-node": base, "auto-dismiss": false });
    qmp.execute("block-stream", arguments, SLOW_COMMAND_TIMEOUT).map(drop)
}

fn nothing_under(chain: &Chain) -> VmmError {
    VmmError::Refused { command: "block-commit".to_owned(), reason: format!("'{}' has no image under it", chain.node) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As QEMU 7.2 and 10.0 answer, of which only these fields matter.
    #[test]
    fn a_chain_is_told_from_the_image_that_is_written_down() {
        let image = |file: &str, format: &str, under: Value| json!({ "filename": file, "format": format, "backing-image": under });
        let list = json!([
            { "inserted": { "ro": false, "node-name": "o", "image":
                image("/o", "qcow2", image("/m", "qcow2", image("/base", "raw", Value::Null))) } },
            { "inserted": { "ro": true, "node-name": "c", "image": image("/c", "raw", Value::Null) } },
            { "device": "floppy0" },
        ]);
        let images = [("/o", "qcow2"), ("/m", "qcow2"), ("/base", "raw")];
        let images = images.map(|(file, format)| (PathBuf::from(file), format.to_owned())).to_vec();
        assert_eq!(chains_in(&list), [Chain { node: "o".into(), images }]);
    }
}
