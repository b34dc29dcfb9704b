//! The report of a migration: the object that `--json` writes, one per virtual machine.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::options::{MigrateOptions, Mode};
use crate::problem::Problem;

/// How a migration ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Status {
    /// The guest runs at the destination.
    Completed,
    /// It was cancelled; the guest runs on at the source.
    Cancelled,
    /// It failed; `error` says where the guest is.
    #[default]
    Failed,
}

/// The migration report. A page is 4,096 bytes.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Report {
    /// Version of this form.
    pub schema: u32,
    /// The virtual machine's name.
    pub vm: String,
    /// The mode that was used: `precopy`, `hybrid`, `postcopy`, `stop-and-copy`. `auto` is one of the first two.
    pub mode: String,
    /// How it ended.
    pub status: Status,
    /// Whether it covers the end only. Then the source's daemon was restarted while pages followed the guest, or it had
    /// to wait to learn that the guest was taken, and no report has what was done before (rounds, downtime, pages and
    /// bytes sent until then, time). The numbers cover what was done since, except `faults` and `postcopy.ms`, which
    /// the destination counts.
    pub partial: bool,
    /// The time from the accepted request until the guest runs at the destination and no page is left at the source,
    /// milliseconds.
    pub total_ms: f64,
    /// The time from the guest's stop at the source to its start at the destination, by QEMU's own events,
    /// milliseconds.
    pub downtime_ms: f64,
    /// The time from the accepted request to the first page sent, milliseconds.
    pub setup_ms: f64,
    /// The part of it in which the migration waited for its turn, milliseconds.
    pub queued_ms: f64,
    /// The time from the guest's start at the destination to the end of the migration, milliseconds.
    pub resume_ms: f64,
    /// The parts of the downtime.
    pub downtime: Downtime,
    /// The guest's RAM.
    pub ram: RamPages,
    /// Where every page of every round went. Each is in exactly one of the counters other than `sent`, `faulted`,
    /// `pushed`, `straight` and `duplicate`.
    pub pages: Pages,
    /// Bytes of frames, headers included, on all connections.
    pub bytes_on_wire: u64,
    /// The bytes of the page bodies without encoding.
    pub bytes_raw: u64,
    /// One entry per round, the last in the pause.
    pub rounds: Vec<Round>,
    /// Page faults over the network (post-copy).
    pub faults: Faults,
    /// The pages that went after the switchover.
    pub postcopy: Postcopy,
    /// The comparison of both sides' pages.
    pub verify: Verify,
    /// The cost of watching the guest's writes.
    pub tracking: Tracking,
    /// The looks for pages that the guest holds free.
    pub introspection: Introspection,
    /// How pages were encoded.
    pub encoding: Encoding,
    /// What was done where rounds did not converge.
    pub convergence: Convergence,
    /// The options as resolved.
    pub options: MigrateOptions,
    /// The source host.
    pub source: Host,
    /// The destination host.
    pub destination: Host,
    /// The failure, if there was one.
    pub error: Option<Problem>,
}

impl Report {
    /// The version of the report's form.
    pub const SCHEMA: u32 = 1;

    /// The report of a migration of which only the request is known yet.
    #[must_use]
    pub fn asked(vm: &str, options: &MigrateOptions, source: Host, peer: &str) -> Self {
        let options = options.resolved();
        Self {
            schema: Self::SCHEMA,
            vm: vm.into(),
            mode: match options.mode {
                Mode::Auto | Mode::Precopy => "precopy",
                Mode::Postcopy => "postcopy",
                Mode::Hybrid => "hybrid",
                Mode::StopAndCopy => "stop-and-copy",
            }
            .into(),
            options,
            source,
            destination: Host { address: peer.into(), ..Host::default() },
            ..Self::default()
        }
    }
}

/// The parts of the downtime, milliseconds.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Downtime {
    /// From the guest's stop until QEMU stood ready for the switchover.
    pub pause_ms: f64,
    /// The last pages.
    pub final_pages_ms: f64,
    /// Comparing both sides' pages, where that was asked for and had to be done in the pause.
    pub verify_ms: f64,
    /// Saving, moving and loading the devices' state.
    pub device_state_ms: f64,
    /// From the loaded state to the running guest.
    pub start_ms: f64,
}

/// The guest's RAM, in pages.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct RamPages {
    /// All pages.
    pub total_pages: u64,
    /// Pages that the host had given memory for when the migration began.
    pub allocated_pages: u64,
}

/// Where pages went.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Pages {
    /// Page bodies sent, in any encoding (full + delta).
    pub sent: u64,
    /// Bodies sent whole.
    pub full: u64,
    /// Bodies sent as deltas.
    pub delta: u64,
    /// Pages of zeros: a bit each.
    pub zero: u64,
    /// Unallocated pages: nothing is sent.
    pub unallocated: u64,
    /// Pages that the guest holds free: nothing is sent, or a bit where the destination held something else than zeros.
    pub free: u64,
    /// Pages skipped because they were written again before their turn.
    pub fake_dirty_tracked: u64,
    /// Pages skipped because their content is what was last sent.
    pub fake_dirty_content: u64,
    /// Pages sent as a reference to a shared body.
    pub shared_reference: u64,
    /// Pages that a fault at the destination asked for.
    pub faulted: u64,
    /// Pages pushed after the switchover.
    pub pushed: u64,
    /// Pages that went from the source straight to memory hosts after the switchover, of a split machine.
    pub straight: u64,
    /// Pages that arrived twice after the switchover.
    pub duplicate: u64,
}

/// One round.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Round {
    /// Its number, from 0.
    pub round: u32,
    /// Pages the round began with.
    pub dirty_pages: u64,
    /// Bodies it sent.
    pub sent_pages: u64,
    /// Pages that it skipped, for any reason; pages held back as hot are not among them.
    pub skipped_pages: u64,
    /// Pages written in each of the last rounds, which it held back.
    pub hot_pages: u64,
    /// Bytes of its frames.
    pub bytes_on_wire: u64,
    /// How long it took, milliseconds.
    pub ms: f64,
    /// How fast the guest wrote fresh pages meanwhile.
    pub dirty_rate_pages_per_s: f64,
}

/// Page faults over the network.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Faults {
    /// The number of faults.
    pub count: u64,
    /// How long they took.
    pub latency_us: Latency,
    /// The number of faults that took 2^i to 2^(i+1) microseconds.
    pub histogram_log2_us: Vec<u64>,
    /// Faults on pages that were there already, or hold zeros: they were settled at the destination.
    pub local: u64,
    /// How long threads of QEMU waited for pages from the source, all together, milliseconds.
    #[serde(deserialize_with = "finite")]
    pub blocktime_ms: f64,
    /// The same for each thread that waited, longest first.
    pub blocktime_by_thread: Vec<Blocktime>,
}

/// How long one thread waited for pages from the source.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Blocktime {
    /// The thread's number in QEMU's process.
    pub thread: u32,
    /// Its faults.
    pub faults: u64,
    /// How long it waited, milliseconds.
    #[serde(deserialize_with = "finite")]
    pub ms: f64,
}

/// The pages that went after the switchover.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Postcopy {
    /// Why pages went after the switchover although pre-copy was tried first, or why none did although that was
    /// allowed.
    pub reason: Option<String>,
    /// Pages that were not at the destination, or stale there, when the guest started.
    pub residue_pages: u64,
    /// Bytes of the residue's map.
    pub residue_bytes: u64,
    /// Time for making and sending the map in the pause, milliseconds.
    pub residue_ms: f64,
    /// Time until the last of them was there, from the start of the guest, milliseconds.
    pub ms: f64,
    /// How often the two hosts lost each other meanwhile.
    pub interruptions: u32,
    /// How long these interruptions took in all, milliseconds.
    pub interrupted_ms: f64,
}

/// A distribution of latencies, microseconds.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Latency {
    /// The median.
    #[serde(deserialize_with = "finite")]
    pub p50: f64,
    /// The 99th percentile.
    #[serde(deserialize_with = "finite")]
    pub p99: f64,
    /// The longest.
    #[serde(deserialize_with = "finite")]
    pub max: f64,
}

/// Reads a measure from another daemon: one that is not finite counts as 0. JSON would say `null`, and nobody could
/// read the report.
fn finite<'de, D: serde::Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    f64::deserialize(from).map(|measure| if measure.is_finite() { measure } else { 0.0 })
}

/// The comparison of both sides' pages: in the pause, or while the guest runs at the destination, as it first saw each
/// of them.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Verify {
    /// Whether it was done.
    pub checked: bool,
    /// Pages compared.
    pub pages: u64,
    /// Pages that differ and are left out because the guest held them free when it stopped, or discarded them after its
    /// start at the destination and before it had seen them there.
    pub excluded_free_pages: u64,
    /// Pages that stayed at memory hosts, or are there as the source has them, of a machine that is split: neither side
    /// compares them. The memory hosts were asked for them before the guest changed hands.
    pub away_pages: u64,
    /// Pages that differ.
    pub mismatches: u64,
    /// The time that the comparison took, milliseconds.
    pub ms: f64,
    /// Why it was not done although it was asked for, or why the guest had to stand still for it.
    pub reason: Option<String>,
}

/// What watching the guest's writes cost.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Tracking {
    /// Scans of the page tables.
    pub scans: u64,
    /// Time they took in all, milliseconds.
    pub scan_ms: f64,
    /// Write faults the guest took because of tracking: one per page and round.
    pub write_faults: u64,
    /// Pages found changed by content although no tracker saw the write (direct I/O).
    pub untracked_writes: u64,
    /// Pages that the guest discarded while they were watched (balloon, virtio-mem).
    pub discarded_pages: u64,
    /// Looks for pages written again before their turn.
    pub looks: u64,
    /// Time that those looks took in all, milliseconds.
    pub look_ms: f64,
    /// What was mapped by huge pages when watching began, bytes: it is mapped page by page until it ends.
    pub huge_bytes: u64,
    /// Time that this took, milliseconds.
    pub map_small_ms: f64,
}

/// The looks at the guest's kernel for pages that it holds free.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Introspection {
    /// Whether pages were skipped because of the looks.
    pub used: bool,
    /// Why none were skipped, or not to the end, where it was asked for.
    pub reason: Option<String>,
    /// The release of the kernel that was found.
    pub kernel: Option<String>,
    /// Time it took to find it, milliseconds.
    pub find_ms: f64,
    /// Looks, including the one at the stop.
    pub looks: u64,
    /// Time they took in all, milliseconds.
    pub look_ms: f64,
    /// The part of it with the guest stopped.
    pub stop_look_ms: f64,
    /// Pages that the guest held free at the last look at all its RAM.
    pub free_pages: u64,
}

/// How pages were encoded, and what it cost.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Encoding {
    /// Memory of the table of hashes, bytes for each page of RAM.
    pub hash_bytes_per_page: u32,
    /// Threads that encoded beside those that sent.
    pub threads: u32,
    /// Their processor time, seconds; it is part of the source's.
    pub cpu_s: f64,
    /// Deltas.
    pub delta: DeltaUse,
    /// Compression.
    pub compression: Compression,
}

/// The work of the delta cache.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct DeltaUse {
    /// Memory of the cache.
    pub cache_bytes: u64,
    /// Pages sent again whose last content was in the cache.
    pub hits: u64,
    /// Pages sent again whose last content was not.
    pub misses: u64,
    /// Of the hits, those that differed too much to be sent as deltas.
    pub overflows: u64,
    /// Bytes of the deltas.
    pub bytes: u64,
}

/// The work of the compressor.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Compression {
    /// Pages that were compressed.
    pub pages: u64,
    /// Bytes that they became.
    pub bytes: u64,
    /// Pages sent plain because they would not shrink, or the link had room.
    pub plain_pages: u64,
    /// The level at the end.
    pub level: i32,
}

/// What was done where rounds did not converge.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Convergence {
    /// The number of stalls: the rounds made no progress for a while.
    pub stalls: u32,
    /// The pause that was accepted in the end, milliseconds.
    pub downtime_limit_ms: f64,
    /// The pause that was predicted when the guest was stopped, milliseconds; absent where it was not stopped or no
    /// round was sent before.
    pub predicted_downtime_ms: Option<f64>,
    /// The most of the guest's processor time that was taken away, percent.
    pub throttle_percent: u8,
}

/// One host of a migration.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Host {
    /// Its name.
    pub host: String,
    /// The address it was reached at.
    pub address: String,
    /// Version of Sterna.
    pub sterna: String,
    /// Version of QEMU.
    pub qemu: String,
    /// Processor time the migration took there, user and system, seconds.
    pub cpu_s: f64,
}
