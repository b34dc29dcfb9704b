//! The virtual machine as the source daemon describes it to the destination daemon.

use serde::{Deserialize, Serialize};
use sterna_api::BalloonSetting;

/// One RAM block: a file that QEMU maps.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct BlockSpec {
    /// The memory back end's id in QEMU (`-object memory-backend-file,id=…`).
    pub id: String,
    /// Size; a multiple of `page_bytes`.
    pub bytes: u64,
    /// Page size of the file's backing: 4,096, or a huge page's size.
    pub page_bytes: u64,
    /// The file's path at the source, which the arguments may name.
    pub path: String,
}

/// What the destination needs to start the same machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmSpec {
    /// The name, unique on each host.
    pub name: String,
    /// RAM, bytes: the sum of the blocks present at start.
    pub memory_bytes: u64,
    /// `true` where RAM is mapped privately.
    pub private: bool,
    /// Which machines it may share pages with.
    pub trust_group: Option<String>,
    /// QEMU's version at the source: major, minor, micro.
    pub qemu_version: (u32, u32, u32),
    /// QEMU's binary at the source.
    pub qemu_path: String,
    /// The machine type in full, as QEMU resolves it: `pc-q35-7.2`.
    pub machine: String,
    /// The arguments as the user gave them, without what Sterna adds.
    pub arguments: Vec<String>,
    /// Sterna added the RAM back end itself (`run`), so the destination adds it again; else (`adopt`) the arguments
    /// name the back ends, and the destination puts its own paths in place of each block's `path`.
    pub managed_ram: bool,
    /// The RAM blocks, in the order of their ids.
    pub blocks: Vec<BlockSpec>,
    /// The source host's processor flags matter to this guest (`-cpu host` or `max`): vendor, family, model and flags.
    pub cpu: Option<String>,
    /// RAM the host has given memory for, bytes: what the destination must have room for.
    pub allocated_bytes: u64,
    /// How its balloon is handled: the destination goes on with it.
    pub balloon: BalloonSetting,
    /// Whether the guest runs (else it was paused by its user, and stays so).
    pub running: bool,
    /// The source host's name, for people.
    pub from: String,
}

/// Machines that come together and share pages.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GangSpec {
    /// Its number, drawn at random by the source's daemon.
    pub id: u128,
    /// The trust group of all its members.
    pub group: String,
    /// The number of members.
    pub members: u16,
    /// RAM the host has given memory for, for all of them together, bytes: what they share counts once. It is what the
    /// destination must have room for.
    pub bytes: u64,
    /// What each member shares, in the members' order; none where that is not known.
    pub shared: Vec<SharedPages>,
}

/// How the pages lie that a machine shares with its gang.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedPages {
    /// How many there are.
    pub pages: u64,
    /// How many mappings of a process they take where they go: one for each run of pages whose bodies are neighbours as
    /// well, and one for what lies between two runs.
    pub mappings: u64,
}
