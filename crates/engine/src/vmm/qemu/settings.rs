use serde_json::{Value, json};

use super::commands::{COMMAND_TIMEOUT, ask};
use crate::vmm::VmmError;
use crate::vmm::qmp::Qmp;

/// What both ends need: QEMU leaves RAM in shared files alone, and says by events how far it is.
const BOTH: &[&str] = &["x-ignore-shared", "events"];

/// What the destination needs besides: it takes its disks, and their locks, when its guest is let run and not when its
/// devices are loaded. Until then the source may let its own guest run on.
const AT_DESTINATION: &[&str] = &["x-ignore-shared", "events", "late-block-activate"];

/// What the source needs besides: it stops the guest and waits there for Sterna.
const AT_SOURCE: &[&str] = &["x-ignore-shared", "events", "pause-before-switchover"];

/// Bytes a second for what QEMU still sends itself: no limit in practice, Sterna's own limit comes after it.
const MAX_BANDWIDTH: u64 = 1 << 40;

/// QEMU's own downtime limit at first, ms: what is left of its small blocks (ROMs, video RAM) when it stops the guest.
const DOWNTIME_LIMIT_MS: u64 = 300;

/// The largest that QEMU accepts, ms: whatever is left, stop now.
const MAX_DOWNTIME_LIMIT_MS: u64 = 2_000_000;

/// Where the machine says whether its device state ends in a description of itself: for tools that take a stream apart,
/// several times the state's own bytes, written and read with the guest stopped. QEMU's own post-copy leaves it out,
/// too.
const DESCRIPTION: (&str, &str) = ("/machine", "suppress-vmdesc");

/// QEMU's migration settings as they were, to be put back when a switchover is called off.
#[derive(Debug)]
pub(super) struct Settings {
    capabilities: Vec<Value>,
    parameters: serde_json::Map<String, Value>,
    /// Whether the description was left out.
    suppressed: Option<bool>,
}

impl Settings {
    /// Sets what the source needs.
    pub(super) fn for_source(qmp: &mut Qmp) -> Result<Self, VmmError> {
        let capabilities = set_capabilities(qmp, AT_SOURCE)?;
        let mut former = Self { capabilities, parameters: Default::default(), suppressed: suppress_description(qmp) };
        match set_parameters(qmp) {
            Ok(parameters) => former.parameters = parameters,
            Err(error) => {
                former.put_back(qmp);
                return Err(error);
            }
        }
        Ok(former)
    }

    /// Sets what the destination needs, which nobody puts back: there is no migration before this one. A guest that
    /// `stays_paused` is not let run, and its disks would stay as they came: a QEMU before 10.0 aborts when such a
    /// guest is moved on. So it takes them when the devices are loaded.
    pub(super) fn for_destination(qmp: &mut Qmp, stays_paused: bool) -> Result<(), VmmError> {
        set_capabilities(qmp, if stays_paused { BOTH } else { AT_DESTINATION })?;
        // Here, too: a destination reads a description, and waits for it, unless it is told that there is none.
        suppress_description(qmp);
        Ok(())
    }

    /// Has a guest that comes announce itself once instead of five times: its network addresses are another's, who is
    /// still there, and where it has no link that once goes nowhere. With no round at all QEMU (7.2 to 10.0 at least)
    /// frees a timer of each virtio network card, and crashes as soon as the guest resets one: when it reboots, or lets
    /// go of it.
    pub(super) fn announce_once(qmp: &mut Qmp) -> Result<(), VmmError> {
        let arguments = json!({ "announce-rounds": 1 });
        qmp.execute("migrate-set-parameters", arguments, COMMAND_TIMEOUT).map(drop)
    }

    /// Puts back what was changed, best effort: the next migration sets all of it again.
    pub(super) fn put_back(self, qmp: &mut Qmp) {
        if let Some(suppressed) = self.suppressed {
            let _ = set_description(qmp, suppressed);
        }
        if !self.capabilities.is_empty() {
            let arguments = json!({ "capabilities": self.capabilities });
            let _ = qmp.execute("migrate-set-capabilities", arguments, COMMAND_TIMEOUT);
        }
        if !self.parameters.is_empty() {
            let _ = qmp.execute("migrate-set-parameters", Value::Object(self.parameters), COMMAND_TIMEOUT);
        }
    }
}

/// Leaves the description out. How it had been; `None` where the machine cannot do without, which costs some of the
/// pause and no more.
fn suppress_description(qmp: &mut Qmp) -> Option<bool> {
    let (path, property) = DESCRIPTION;
    let former =
        qmp.execute("qom-get", json!({ "path": path, "property": property }), COMMAND_TIMEOUT).ok()?.as_bool()?;
    set_description(qmp, true).ok().map(|_| former)
}

fn set_description(qmp: &mut Qmp, suppressed: bool) -> Result<Value, VmmError> {
    let (path, property) = DESCRIPTION;
    qmp.execute("qom-set", json!({ "path": path, "property": property, "value": suppressed }), COMMAND_TIMEOUT)
}

/// Has QEMU stop the guest now, whatever is left of its small blocks. For a guest that writes its video RAM without
/// pause.
pub(super) fn stop_at_any_cost(qmp: &mut Qmp) -> Result<(), VmmError> {
    let arguments = json!({ "downtime-limit": MAX_DOWNTIME_LIMIT_MS });
    qmp.execute("migrate-set-parameters", arguments, COMMAND_TIMEOUT).map(drop)
}

/// Switches on the capabilities wanted and every other off: one left on by somebody (multifd, a return path, …) changes
/// the stream. Returns how those that were changed had been.
fn set_capabilities(qmp: &mut Qmp, wanted: &[&str]) -> Result<Vec<Value>, VmmError> {
    let reply = ask(qmp, "query-migrate-capabilities")?;
    let known: Vec<(&str, bool)> = reply
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|entry| Some((entry["capability"].as_str()?, entry["state"].as_bool()?)))
        .collect();
    if let Some(missing) = wanted.iter().find(|&&name| known.iter().all(|&(other, _)| other != name)) {
        return Err(VmmError::Refused {
            command: "migrate-set-capabilities".to_owned(),
            reason: format!("this QEMU has no capability '{missing}'; Sterna needs QEMU 7.2 or later"),
        });
    }
    let entry = |name: &str, state: bool| json!({ "capability": name, "state": state });
    let changed = known.iter().filter(|&&(name, state)| state != wanted.contains(&name));
    let (new, former): (Vec<Value>, Vec<Value>) =
        changed.map(|&(name, state)| (entry(name, !state), entry(name, state))).unzip();
    if !new.is_empty() {
        qmp.execute("migrate-set-capabilities", json!({ "capabilities": new }), COMMAND_TIMEOUT)?;
    }
    Ok(former)
}

fn set_parameters(qmp: &mut Qmp) -> Result<serde_json::Map<String, Value>, VmmError> {
    let now = ask(qmp, "query-migrate-parameters")?;
    let mut wanted = json!({ "max-bandwidth": MAX_BANDWIDTH, "downtime-limit": DOWNTIME_LIMIT_MS });
    // The stream ends in this daemon, which encrypts it with everything else.
    if now["tls-creds"].as_str().is_some_and(|credentials| !credentials.is_empty()) {
        wanted["tls-creds"] = json!("");
    }
    let names = wanted.as_object().into_iter().flatten().map(|(name, _)| name);
    let former = names.filter_map(|name| Some((name.clone(), now.get(name)?.clone()))).collect();
    qmp.execute("migrate-set-parameters", wanted, COMMAND_TIMEOUT)?;
    Ok(former)
}
