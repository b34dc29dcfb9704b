use std::time::Duration;

use serde_json::{Value, json};
use sterna_protocol::balloon::Report;

use super::commands::{list_question, optional, property_question};
use super::inspect::DEVICE_PATHS;
use crate::vmm::VmmError;
use crate::vmm::qmp::Qmp;

/// How often the guest's driver is asked for its statistics, seconds: the least QEMU knows. It stamps them in whole
/// seconds, too.
const POLL_S: u64 = 1;

/// A guest's balloon device (virtio-balloon), over whatever bus.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BalloonDevice {
    path: String,
    /// Whether the guest's driver may take pages out by itself before its kernel ends processes.
    pub deflate_on_oom: bool,
    /// Whether the guest may give back what it holds free without being asked.
    pub free_page_reporting: bool,
}

/// A guest as its balloon device shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BalloonLook {
    /// Whether its processors run.
    pub running: bool,
    /// Its RAM without the balloon, bytes.
    pub guest_bytes: u64,
    /// The driver's last report, stamped with the second of its arrival; `None` where there never was one.
    pub report: Option<Report>,
}

impl BalloonDevice {
    /// The guest's balloon, where it has one; QEMU gives a machine one at most. Every command may take `within`.
    ///
    /// # Errors
    /// [`VmmError`] where QEMU does not answer.
    pub fn find(qmp: &mut Qmp, within: Duration) -> Result<Option<Self>, VmmError> {
        for parent in DEVICE_PATHS {
            let children = optional(qmp, list_question(parent), within)?;
            let is_balloon =
                |child: &&Value| child["type"].as_str().is_some_and(|kind| kind.starts_with("child<virtio-balloon"));
            let found = children.as_array().into_iter().flatten().find(is_balloon);
            let Some(name) = found.and_then(|child| child["name"].as_str()) else { continue };
            let path = format!("{parent}/{name}");
            let mut flag = |property: &str| -> Result<bool, VmmError> {
                let value = optional(qmp, property_question(&path, property), within)?;
                Ok(value.as_bool().unwrap_or(false))
            };
            let (deflate_on_oom, free_page_reporting) = (flag("deflate-on-oom")?, flag("free-page-reporting")?);
            return Ok(Some(Self { path, deflate_on_oom, free_page_reporting }));
        }
        Ok(None)
    }

    /// Has the driver asked for its statistics, now and each second from now on; or no more.
    ///
    /// # Errors
    /// [`VmmError`].
    pub fn ask_for_reports(&self, qmp: &mut Qmp, wanted: bool, within: Duration) -> Result<(), VmmError> {
        // QEMU asks at once only where it did not ask before.
        let intervals: &[u64] = if wanted { &[0, POLL_S] } else { &[0] };
        for seconds in intervals {
            let arguments = json!({ "path": self.path, "property": "guest-stats-polling-interval", "value": seconds });
            qmp.execute("qom-set", arguments, within)?;
        }
        Ok(())
    }

    /// Looks at the guest: its report first, so that the balloon's size is never older than that.
    ///
    /// # Errors
    /// [`VmmError`]; refused where the device is gone.
    pub fn look(&self, qmp: &mut Qmp, within: Duration) -> Result<BalloonLook, VmmError> {
        let stats = qmp.execute("qom-get", json!({ "path": self.path, "property": "guest-stats" }), within)?;
        let balloon = qmp.execute("query-balloon", json!({}), within)?;
        let status = qmp.execute("query-status", json!({}), within)?;
        let guest_bytes = balloon["actual"].as_u64().ok_or_else(|| VmmError::Refused {
            command: "query-balloon".into(),
            reason: "it does not tell the balloon's size".into(),
        })?;
        Ok(BalloonLook { running: status["running"].as_bool().unwrap_or(false), guest_bytes, report: report(&stats) })
    }
}

/// Asks the guest to keep so much of its RAM, bytes. Its driver does so in its own time, and not beyond what it can.
///
/// # Errors
/// [`VmmError`]; refused where there is no balloon.
pub fn resize(qmp: &mut Qmp, guest_bytes: u64, within: Duration) -> Result<(), VmmError> {
    qmp.execute("balloon", json!({ "value": guest_bytes }), within).map(drop)
}

/// The device's `guest-stats`. A statistic that the driver does not know is -1 in 64 bits.
fn report(value: &Value) -> Option<Report> {
    let stamp = value["last-update"].as_u64().filter(|&seconds| seconds > 0)?;
    let stat = |name: &str| value["stats"][name].as_u64().filter(|&value| value != u64::MAX);
    Some(Report {
        stamp,
        free_bytes: stat("stat-free-memory"),
        available_bytes: stat("stat-available-memory"),
        swapped_in_bytes: stat("stat-swap-in"),
        major_faults: stat("stat-major-faults"),
        oom_kills: stat("stat-oom-kills"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_that_never_answered_and_statistics_it_does_not_know_are_told_from_numbers() {
        assert_eq!(report(&json!({ "stats": { "stat-free-memory": u64::MAX }, "last-update": 0 })), None);
        let some = json!({ "stats": { "stat-free-memory": 4096, "stat-available-memory": u64::MAX, "stat-swap-in": -1 }, "last-update": 7 });
        assert_eq!(report(&some), Some(Report { stamp: 7, free_bytes: Some(4096), ..Report::default() }));
        for nonsense in [json!(null), json!([]), json!({ "last-update": -1 }), json!({ "last-update": "x" })] {
            assert_eq!(report(&nonsense), None);
        }
    }
}
