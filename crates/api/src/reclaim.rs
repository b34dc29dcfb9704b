//! What a guest holds free, given back to its host.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::problem::Problem;
use crate::report::Status;

/// How free memory is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ReclaimMethod {
    /// By looking into the guest's kernel from outside: any Linux guest, which knows nothing of it.
    #[default]
    Vmi,
    /// By the guest's balloon: it is inflated and deflated again.
    Balloon,
}

/// How a guest's free memory is to be taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ReclaimRequest {
    /// How.
    #[serde(default)]
    pub method: ReclaimMethod,
}

/// What was taken of a guest's free memory, and what it cost.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Reclaimed {
    /// The virtual machine.
    pub vm: String,
    /// How.
    pub method: ReclaimMethod,
    /// How it ended. What was taken until then stays taken, whatever the end.
    pub status: Status,
    /// From the request to the end.
    pub ms: f64,
    /// Pages of RAM.
    pub total_pages: u64,
    /// Pages that the guest held free in the first look; with a balloon by its driver's word.
    pub free_pages: u64,
    /// Of them, those for which the host had given memory: what there was to take.
    pub candidate_pages: u64,
    /// Pages whose memory was given back to the host; with a balloon by what the host then had back.
    pub reclaimed_pages: u64,
    /// The same in bytes.
    pub reclaimed_bytes: u64,
    /// Candidates that were left with the guest because they were not free any more, or because it wanted to write
    /// while they were looked at.
    pub put_back_pages: u64,
    /// Pages that the guest began to use meanwhile, of those taken and of others that had no memory.
    pub touched_pages: u64,
    /// Memory that the host had given the guest before, bytes.
    pub allocated_before_bytes: u64,
    /// The same after.
    pub allocated_after_bytes: u64,
    /// Portions in which pages were taken.
    pub portions: u64,
    /// Portions that were let go because somebody waited too long.
    pub gave_way: u64,
    /// Writes that waited for a portion to be done with.
    pub waits: u64,
    /// None of them waited longer than this.
    pub longest_wait_ms: f64,
    /// The guest's kernel, as `uname -r` there has it.
    pub kernel: Option<String>,
    /// Looks into the kernel, of which one was at all RAM.
    pub looks: u64,
    /// Time they took in all, milliseconds.
    pub look_ms: f64,
    /// Time to find the kernel, milliseconds.
    pub find_ms: f64,
    /// Why nothing, or nothing more, was taken, where that was not for want of free pages.
    pub error: Option<Problem>,
}
