//! QEMU's jobs: work that goes on for a while beside the guest, each under a name.

use serde_json::json;

use super::commands::{COMMAND_TIMEOUT, SLOW_COMMAND_TIMEOUT, ask};
use super::inspect::items;
use crate::vmm::VmmError;
use crate::vmm::qmp::Qmp;

/// How far a job is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JobState {
    /// It is at work.
    Running,
    /// A commit has written all that there was, and goes on with what the guest writes, until it is told to end.
    Ready,
    /// It has ended; why it failed, where it has.
    Ended(Option<String>),
}

/// How far a job is; none where there is no job of this name.
///
/// # Errors
/// [`VmmError`] where QEMU does not answer.
pub fn job_state(qmp: &mut Qmp, job: &str) -> Result<Option<JobState>, VmmError> {
    let jobs = ask(qmp, "query-jobs")?;
    let Some(found) = items(&jobs).iter().find(|found| found["id"] == job) else { return Ok(None) };
    Ok(Some(match found["status"].as_str() {
        Some("concluded") => JobState::Ended(found["error"].as_str().map(str::to_owned)),
        Some("ready") => JobState::Ready,
        _ => JobState::Running,
    }))
}

/// Has a commit that is ready end: from then on the disk is the image that was under it.
///
/// # Errors
/// [`VmmError`]: it goes on as it was.
pub fn complete(qmp: &mut Qmp, job: &str) -> Result<(), VmmError> {
    qmp.execute("job-complete", json!({ "id": job }), SLOW_COMMAND_TIMEOUT).map(drop)
}

/// Has a job end, and leave the disk as it is.
///
/// # Errors
/// [`VmmError`]: it has ended by itself, or QEMU does not answer.
pub fn cancel(qmp: &mut Qmp, job: &str) -> Result<(), VmmError> {
    qmp.execute("block-job-cancel", json!({ "device": job, "force": true }), SLOW_COMMAND_TIMEOUT).map(drop)
}

/// Forgets a job that has ended.
///
/// # Errors
/// [`VmmError`]: it has not.
pub fn dismiss(qmp: &mut Qmp, job: &str) -> Result<(), VmmError> {
    qmp.execute("job-dismiss", json!({ "id": job }), COMMAND_TIMEOUT).map(drop)
}
