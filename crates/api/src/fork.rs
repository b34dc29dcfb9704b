//! Forks: a running guest goes on as several.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::problem::Problem;

/// The request to fork a guest. Absent fields have their type's zero.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ForkRequest {
    /// The clones' names: one clone for each.
    pub names: Vec<String>,
    /// The hosts that the clones go to, `HOST:PORT` of their daemons: one after the other gets a clone, in the order of
    /// the names, and again from the first on. Without any, the clones are on the source's host.
    pub to: Vec<String>,
    /// Hold the clones: their guests do not run until they are let (`continue`).
    pub paused: bool,
    /// Give each clone's network cards new hardware addresses, and links, once it runs.
    pub new_mac: bool,
    /// Give the guest and each clone an overlay (qcow2) of each disk that can be written. Nobody writes the disk's
    /// image afterwards. Without it a machine with such a disk is refused.
    pub overlay_disks: bool,
    /// The directory of the host that overlays are made in. Without it, each is beside the image that it is over. Hosts
    /// that clones go to must have it, and the image, at the same path.
    pub overlay_directory: Option<String>,
    /// The clones' QEMU arguments, without RAM. Without them the source's own, with network cards that are connected to
    /// nothing and have no link.
    pub arguments: Option<Vec<String>>,
    /// Make a template of the guest as it is at this moment, and hold so many clones of it ready.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hold: Option<u32>,
    /// The template's name. Without it, the machine's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub template: Option<String>,
}

/// The report on a guest that was forked.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Forked {
    /// The virtual machine that was forked, the source.
    pub vm: String,
    /// The time from the request until all clones ran, milliseconds.
    pub ms: f64,
    /// Of it, the time until the clones' QEMUs waited for their guest, milliseconds. The source ran meanwhile.
    pub prepare_ms: f64,
    /// The source's pause, by QEMU's events, milliseconds. 0 where its user had paused it.
    pub pause_ms: f64,
    /// RAM of the source, and of each clone, bytes.
    pub memory_bytes: u64,
    /// What of the source's RAM was copied, bytes: its own pages since it was last forked. Nothing where it was in
    /// shared memory until now.
    pub copied_bytes: u64,
    /// What was copied in the pause, bytes: pages that the guest wrote while the others were copied.
    pub copied_in_pause_bytes: u64,
    /// How many pieces the RAM of each is in.
    pub pieces: u64,
    /// The state of the guest's devices, bytes.
    pub device_bytes: u64,
    /// The clones that are there.
    pub clones: Vec<Cloned>,
    /// The clones that did not come to run, and why.
    pub failed: Vec<NotCloned>,
    /// The template, where one was made.
    pub template: Option<TemplateState>,
}

/// A clone.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Cloned {
    /// Its name.
    pub vm: String,
    /// Its QEMU's process; 0 where it is on another host.
    pub pid: u32,
    /// The daemon that it is at, where that is another than its source's. Pages of it may still be on their way there.
    pub host: Option<String>,
    /// The time from the request until it ran, or was held, milliseconds.
    pub ms: f64,
    /// What it has not got yet of what was asked for, and why; it runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lacks: Option<Problem>,
}

/// A clone that came to nothing, of which nothing is left; or one on another host that has not said whether it runs
/// there, which is asked until it does: then the problem says so.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct NotCloned {
    /// The name that it was to have.
    pub vm: String,
    /// Why.
    pub problem: Problem,
}

/// A template: what a guest was at the moment of a fork. Clones are made of it later.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct TemplateState {
    /// Its name.
    pub name: String,
    /// The machine that it was made of, by the name that it had.
    pub source: String,
    /// The family of that machine and of all clones.
    pub family: Option<String>,
    /// The trust group of the clones.
    pub trust_group: Option<String>,
    /// RAM of each clone, bytes.
    pub memory_bytes: u64,
    /// The memory of its files, bytes, whoever else has them.
    pub image_bytes: u64,
    /// How many clones are to be held ready.
    pub hold: u32,
    /// How many are ready.
    pub ready: u32,
    /// RAM that these have for themselves, bytes.
    pub allocated_bytes: u64,
    /// RAM that these have in common with others, bytes, each counted: what they take in addition where they write all
    /// of it.
    pub shared_bytes: u64,
    /// Why fewer are ready than should be.
    pub note: Option<String>,
}

/// Changes a template.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TemplateChange {
    /// How many clones are to be held ready.
    pub hold: u32,
}

/// Takes a clone of a template.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TakeRequest {
    /// The name that it gets.
    pub name: String,
}

/// A clone that was taken, and runs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Taken {
    /// Its name.
    pub vm: String,
    /// Its QEMU's process.
    pub pid: u32,
    /// The time from the request until it ran, milliseconds.
    pub ms: f64,
    /// It was held ready; else it was made for the request.
    pub was_held: bool,
}
