//! Virtual machines as the daemon shows them, and the requests that make, move and end them.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::balloon::Balloon;
use crate::gang::Totals;
use crate::options::MigrateOptions;
use crate::progress::Progress;
use crate::report::Report;
use crate::split::Split;

/// How guest RAM is mapped into QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum MemoryMode {
    /// The daemon maps the same file.
    #[default]
    Shared,
    /// The guest's pages are anonymous, so that equal pages can be merged.
    Private,
}

/// What a virtual machine is doing on this host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum VmState {
    /// It runs here.
    Running,
    /// It is stopped, by its user.
    Paused,
    /// It runs here and is being moved away.
    MigratingOut,
    /// It is being moved here and does not run here yet.
    MigratingIn,
    /// It was handed over, and the peer has not said yet that it runs there: it must not run here.
    WaitingForPeer,
    /// It belongs to this host after a migration and is stopped, because its QEMU has not let it run yet: this is tried
    /// until it works.
    Resuming,
    /// Its QEMU ended or cannot be reached.
    Lost,
}

/// One virtual machine of this host.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Vm {
    /// Its name, unique on the host.
    pub name: String,
    /// What it is doing.
    pub state: VmState,
    /// RAM, bytes.
    pub memory_bytes: u64,
    /// RAM the host has given memory for, bytes: for this machine alone, and not what it shares with others.
    pub allocated_bytes: u64,
    /// RAM that is mapped by huge pages at this moment, bytes; while the guest's writes are watched, none is.
    #[serde(default)]
    pub huge_bytes: u64,
    /// RAM that other machines may have in common with it, bytes: what it takes in addition where it writes all of
    /// that. Pages that the kernel has merged (KSM) are allocated as well.
    #[serde(default)]
    pub shared_bytes: u64,
    /// How RAM is mapped.
    pub memory_mode: MemoryMode,
    /// The file that its memory began as, and that it shares with other machines until it writes.
    #[serde(default)]
    pub memory_template: Option<String>,
    /// Which machines it may share pages with.
    pub trust_group: Option<String>,
    /// QEMU's process.
    pub pid: u32,
    /// QEMU's version.
    pub qemu: String,
    /// The path of the QEMU binary.
    pub qemu_path: String,
    /// QEMU's arguments as the user gave them.
    pub arguments: Vec<String>,
    /// The machine that it was forked from, by the name that it had.
    #[serde(default)]
    pub forked_from: Option<String>,
    /// Its family: the same word for all machines that are related to it by forks.
    #[serde(default)]
    pub family: Option<String>,
    /// The template that it is held ready for: its guest runs once it is taken, and has another name then.
    #[serde(default)]
    pub held_for: Option<String>,
    /// The migration under way, where there is one.
    pub migration: Option<Progress>,
    /// Its balloon, where Sterna looks after it.
    pub balloon: Option<Balloon>,
    /// More on the state, for people.
    pub note: Option<String>,
    /// The progress of its missing pages, where its guest runs here already.
    #[serde(default)]
    pub arriving: Option<Arriving>,
    /// What is elsewhere of it, where a part of its memory is at memory hosts.
    #[serde(default)]
    pub split: Option<Split>,
}

/// Pages of a guest that runs on this host and are still at the one it came from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Arriving {
    /// The number of missing pages.
    pub missing_pages: u64,
    /// The host where they are, as it calls itself.
    pub from: String,
    /// How long that host has been away, milliseconds; absent where it is there.
    pub waiting_ms: Option<f64>,
}

/// Starts a virtual machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RunRequest {
    /// Its name: letters, digits, `.`, `_`, `-`, at most 64.
    pub name: String,
    /// RAM, bytes; a multiple of 4,096.
    pub memory_bytes: u64,
    /// How RAM is mapped.
    #[serde(default)]
    pub memory_mode: MemoryMode,
    /// A file on tmpfs that its private memory begins as, by its absolute path: the RAM of a stopped guest. It is
    /// exactly as long as the memory, belongs to root, and nobody may change it while a machine uses it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_template: Option<String>,
    /// Which machines it may share pages with.
    #[serde(default)]
    pub trust_group: Option<String>,
    /// The QEMU binary; `qemu-system-x86_64` on the daemon's PATH where absent.
    #[serde(default)]
    pub qemu: Option<String>,
    /// Add a balloon device to the arguments.
    #[serde(default)]
    pub balloon: bool,
    /// Whether its shared memory is in huge pages, as far as the host has them; as the host's configuration says where
    /// absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub huge_pages: Option<bool>,
    /// QEMU's arguments, without RAM.
    pub arguments: Vec<String>,
}

/// Takes over a running QEMU that has the agent loaded.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AdoptRequest {
    /// The name it gets.
    pub name: String,
    /// QEMU's process.
    pub pid: u32,
    /// Its QMP socket.
    pub qmp: String,
}

/// Moves virtual machines to another host.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MigrateRequest {
    /// The names of the machines; several are a gang, moved together.
    #[serde(default)]
    pub vms: Vec<String>,
    /// In the place of names: a family, or a machine of it. All machines of the family on this host are moved, but
    /// those that are held ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub family: Option<String>,
    /// The destination daemon, `HOST:PORT`.
    pub to: String,
    /// The options.
    #[serde(default)]
    pub options: MigrateOptions,
    /// Machines that are split are brought together at the destination, once they run there. Without it, what is at
    /// their memory hosts stays there.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub merge: bool,
}

/// Looks for the destination of a machine that was handed over, at once.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ResumeRequest {
    /// Its present address, `HOST:PORT`; where absent, the address as before.
    #[serde(default)]
    pub to: Option<String>,
    /// A person's word that this host, the destination, is off and stays off: the guest is let run here, from its
    /// memory as it was when it was handed over. `HOST` or `HOST:PORT`, as `show` names it. Where that host still runs,
    /// two guests write one disk; where the guest ran there, its disk is ahead of its memory.
    #[serde(default)]
    pub fenced: Option<String>,
}

/// A migration, running or ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Migration {
    /// Its number on this host.
    pub id: u64,
    /// The destination.
    pub to: String,
    /// The progress of each machine.
    pub progress: Vec<Progress>,
    /// A report per machine that has ended.
    pub migrations: Vec<Report>,
    /// What these add up to.
    #[serde(default)]
    pub totals: Totals,
    /// Whether all have ended.
    pub ended: bool,
}

/// What all migrations away from a host may send together; they share it evenly.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct HostBandwidth {
    /// Bytes per second; `null` for no limit.
    #[serde(deserialize_with = "Option::deserialize")]
    #[schema(required = true)]
    pub bandwidth_bytes_per_s: Option<u64>,
}

/// What a host keeps of machines that have left, so that less travels when they come back.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
pub struct HostKept {
    /// The memory that it takes, bytes. It counts as free: it goes when memory is needed.
    pub bytes: u64,
    /// The machines.
    pub machines: Vec<String>,
}

/// What a host lends to guests that run on other hosts.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
pub struct HostLent {
    /// What it lends at most (`lend_memory`), bytes.
    pub budget_bytes: u64,
    /// What it has granted, bytes. Nobody else is given it.
    pub granted_bytes: u64,
    /// What is used of that, bytes.
    pub used_bytes: u64,
    /// The guests.
    pub guests: Vec<Loan>,
}

/// Memory that is lent to a guest of another host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Loan {
    /// The guest's number, in hexadecimal digits.
    pub guest: String,
    /// How often the guest has changed hands.
    pub epoch: u64,
    /// What was granted to it, bytes.
    pub granted_bytes: u64,
    /// What it uses of that, bytes.
    pub used_bytes: u64,
}

/// The daemon that answers at an API's socket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Version {
    /// Version of Sterna.
    pub sterna: String,
    /// The host's name.
    pub host: String,
    /// Where other daemons reach it, if they can.
    pub listen: Option<String>,
}
