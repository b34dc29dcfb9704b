//! A clone as QEMU makes one by itself: the whole guest goes into a file, and another QEMU loads it.

use std::path::{Path, PathBuf};
use std::time::Instant;

use serde::Serialize;
use serde_json::{Value, json};

use super::method::Method;
use super::qemu::{BaselineVm, is_end, ram_directory};
use super::qmp::{Qmp, event_us};
use crate::Lab;
use crate::command::{PATIENCE, wait_for};
use crate::error::{Context, Error, Result};
use crate::guest::Guest;

/// The first version of QEMU that writes to a file without a program between.
const WRITES_FILES: u64 = 9;

/// What a clone through a file cost.
#[derive(Debug, Clone, Serialize)]
pub struct Copied {
    /// How long the source stood still, by QEMU's events, milliseconds.
    pub pause_ms: f64,
    /// From the request until the clone ran, its QEMU's start included, milliseconds.
    pub clone_ms: f64,
    /// The file's size, bytes.
    pub file_bytes: u64,
}

impl BaselineVm {
    /// Has its guest go on as this one, too, which is equal but for its name. Neither has a tap, which only one QEMU
    /// can have. The file lies on tmpfs and is removed again.
    ///
    /// # Errors
    /// Where QEMU refuses; the guest may then stand still.
    pub fn copy_through_file(&mut self, lab: &Lab, guest: &Guest) -> Result<(Self, Copied)> {
        let file = Removed(ram_directory(&self.host)?.join(format!("{}.state", guest.name)));
        let begin = Instant::now();
        let mut clone = Self::launch(lab, &self.host, guest, &self.binary, self.ram, (self.generation + 1, None))?;
        for qmp in [&mut self.qmp, &mut clone.qmp] {
            Method::Vanilla.prepare(qmp)?;
        }
        self.qmp.forget_events();
        self.qmp.execute("migrate", json!({ "uri": self.uri(&file.0, "cat >") }))?;
        let end = self.qmp.wait_for_event("the end of writing the guest to a file", PATIENCE, is_end)?;
        if end["data"]["status"] != "completed" {
            let reason = "QEMU did not write it to a file".into();
            return Err(Error::Migration { vm: guest.name.clone(), status: "failed".into(), reason });
        }
        // QEMU says that it has ended a moment before the guest may run again.
        wait_for("the end of QEMU's migration", PATIENCE, || {
            Ok((self.qmp.execute("query-status", json!({}))?["status"] == "postmigrate").then_some(()))
        })?;
        self.qmp.execute("cont", json!({}))?;
        clone.qmp.execute("migrate-incoming", json!({ "uri": self.uri(&file.0, "cat ") }))?;
        runs(&mut clone.qmp)?;
        let clone_ms = begin.elapsed().as_secs_f64() * 1e3;
        let resume = runs(&mut self.qmp)?;
        let file_bytes = std::fs::metadata(&file.0).context(|| format!("looking at {}", file.0.display()))?.len();
        Ok((clone, Copied { pause_ms: self.pause(&resume, &Value::Null)?.downtime_ms, clone_ms, file_bytes }))
    }

    /// The file as QEMU is told of it: by name, or as the end of a program's pipe.
    fn uri(&self, file: &Path, program: &str) -> String {
        let major = self.version().split('.').next().and_then(|text| text.parse::<u64>().ok());
        if major.is_some_and(|major| major >= WRITES_FILES) {
            format!("file:{}", file.display())
        } else {
            format!("exec:{program}{}", file.display())
        }
    }
}

/// Waits until the guest of this QEMU runs.
fn runs(qmp: &mut Qmp) -> Result<Value> {
    qmp.wait_for_event("the guest's start", PATIENCE, |event| event["event"] == "RESUME" && event_us(event).is_some())
}

/// A file that is removed in the end.
struct Removed(PathBuf);

impl Drop for Removed {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}
