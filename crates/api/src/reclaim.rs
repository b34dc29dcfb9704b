//! Reclaim: a guest's free memory is given back to its host.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::problem::Problem;
use crate::report::Status;

/// The method by which free memory is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ReclaimMethod {
    /// Introspection of the guest's kernel from outside: for any Linux guest, which does not notice it.
    #[default]
    Vmi,
    /// The guest's balloon: it is inflated and deflated again.
    Balloon,
}

/// The request to take a guest's free memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ReclaimRequest {
    /// The method.
    #[serde(default)]
    pub method: ReclaimMethod,
}

/// The report on memory that was taken from a guest, and its cost.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Reclaimed {
    /// The virtual machine.
    pub vm: String,
    /// The method.
    pub method: ReclaimMethod,
    /// How it ended. Memory that was taken until then stays taken, whatever the end.
    pub status: Status,
    /// The time from the request to the end, milliseconds.
    pub ms: f64,
    /// Pages of RAM.
    pub total_pages: u64,
    /// Pages that the guest held free in the first look; with a balloon by its driver's word.
    pub free_pages: u64,
    /// Of them, those for which the host had given memory: these could be taken.
    pub candidate_pages: u64,
    /// Candidates that were left to the guest: they are few in huge pages that it uses otherwise, and each of these
    /// would be split.
    #[serde(default)]
    pub left_huge_pages: u64,
    /// Pages whose memory was given back to the host; with a balloon by what the host then had back.
    pub reclaimed_pages: u64,
    /// These pages in bytes.
    pub reclaimed_bytes: u64,
    /// Those of them that were at memory hosts.
    #[serde(default)]
    pub elsewhere_pages: u64,
    /// Candidates that the guest kept, because they were not free any more or because it wanted to write while they
    /// were checked.
    pub put_back_pages: u64,
    /// Pages that the guest began to use meanwhile, of those that were taken and of others without memory.
    pub touched_pages: u64,
    /// Memory that the host had given the guest before, bytes.
    pub allocated_before_bytes: u64,
    /// Memory that the host had given the guest after, bytes.
    pub allocated_after_bytes: u64,
    /// Portions in which pages were taken.
    pub portions: u64,
    /// Portions that were let go because somebody waited too long.
    pub gave_way: u64,
    /// Writes that waited until a portion was done.
    pub waits: u64,
    /// An upper bound of their waits, milliseconds.
    pub longest_wait_ms: f64,
    /// The guest's kernel, as `uname -r` there has it.
    pub kernel: Option<String>,
    /// Looks into the kernel, of which one was at all RAM.
    pub looks: u64,
    /// Time they took in all, milliseconds.
    pub look_ms: f64,
    /// Time to find the kernel, milliseconds.
    pub find_ms: f64,
    /// Why nothing, or nothing more, was taken, if pages were still free.
    pub error: Option<Problem>,
}
