use std::path::PathBuf;

use serde_json::{Value, json};

use super::commands::{COMMAND_TIMEOUT, list_question, optional, property_question, status_in};
use super::{images, past};
use crate::vmm::qmp::{Qmp, Version};
use crate::vmm::{Untracked, VmmError};

/// Where QEMU's object tree holds the devices that were asked for, with and without a name of their own.
pub(super) const DEVICE_PATHS: [&str; 2] = ["/machine/peripheral", "/machine/peripheral-anon"];

/// What a running QEMU is made of, as far as a migration has to know it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inspection {
    /// QEMU's version.
    pub version: Version,
    /// The guest's state by QEMU's name, such as `running` or `paused`.
    pub status: String,
    /// Whether virtual processors run.
    pub running: bool,
    /// The machine type with its version, such as `pc-q35-7.2` where `q35` was asked for.
    pub machine: String,
    /// `kvm`, `tcg`, or `unknown`.
    pub accelerator: String,
    /// The model of the first processor, such as `qemu64`.
    pub cpu: Option<String>,
    /// Guest RAM, bytes, with what was plugged in.
    pub ram_bytes: u64,
    /// Every memory back end, those that QEMU made itself for a plain `-m` among them.
    pub memory_devices: Vec<MemoryDevice>,
    /// Block nodes and devices that write guest RAM by direct I/O, or may.
    pub direct_io: Vec<String>,
    /// Of these, those that the agent's account of reads does not tell of: they read by other calls than those that it
    /// notes, or may.
    pub untold_io: Vec<String>,
    /// Whether the guest may run guests of its own, whose processors KVM lets write into pages that it keeps mapped.
    pub may_nest: bool,
    /// Devices, network back ends and block nodes through which others than QEMU write guest RAM (vfio, vhost-user,
    /// vDPA, ivshmem, `nvme://`), by type.
    pub foreign_writers: Vec<String>,
    /// Why QEMU itself refuses to migrate this guest.
    pub blockers: Vec<String>,
    /// The image that each of its disks and drives is on: of several that lie over one another the uppermost.
    pub images: Vec<PathBuf>,
}

/// A memory back end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryDevice {
    /// Its id.
    pub id: String,
    /// Its type: `memory-backend-file`, `memory-backend-memfd`, `memory-backend-ram`, ….
    pub kind: String,
    /// The file it maps, where it maps a named one.
    pub path: Option<String>,
    /// Bytes.
    pub size_bytes: u64,
    /// Whether the file is mapped shared.
    pub share: bool,
}

impl MemoryDevice {
    /// Whether QEMU leaves its contents to Sterna: a named file, mapped shared.
    pub fn is_movable(&self) -> bool {
        self.kind == "memory-backend-file" && self.share && self.path.is_some()
    }
}

impl Inspection {
    /// Who writes its RAM past the page tables, by what it is made of.
    #[must_use]
    pub fn untracked(&self) -> Untracked {
        match (self.direct_io.is_empty(), self.untold_io.is_empty()) {
            (true, _) => Untracked::Nobody,
            (false, true) => Untracked::Reads,
            (false, false) => Untracked::Others,
        }
    }

    /// Guest RAM that Sterna cannot move, as names for people: back ends that are no shared named files, and RAM that
    /// has no back end at all.
    pub fn immovable_ram(&self) -> Vec<String> {
        let backed: u64 = self.memory_devices.iter().map(|device| device.size_bytes).fold(0, u64::saturating_add);
        let others = self.memory_devices.iter().filter(|device| !device.is_movable());
        let mut names: Vec<String> = others
            .map(|device| {
                let sharing = if device.share { "" } else { ", not shared" };
                format!("'{}' ({}{sharing})", device.id, device.kind)
            })
            .collect();
        if backed < self.ram_bytes {
            names.push(format!("{} bytes without a back end", self.ram_bytes - backed));
        }
        names
    }
}

/// Asks a running QEMU what it is made of. Changes nothing.
///
/// # Errors
/// [`VmmError`] where QEMU does not answer. What a version does not know to say is left empty.
pub fn inspect(qmp: &mut Qmp) -> Result<Inspection, VmmError> {
    let [peripheral, anonymous] = DEVICE_PATHS.map(list_question);
    let none = || json!({});
    let [status, machine, size, memory, migration, blocks, nodes, networks, peripheral, anonymous] = qmp.execute_all(
        [
            ("query-status", none()),
            property_question("/machine", "type"),
            ("query-memory-size-summary", none()),
            ("query-memdev", none()),
            ("query-migrate", none()),
            ("query-block", none()),
            nodes_question(),
            ("human-monitor-command", json!({ "command-line": "info network" })),
            peripheral,
            anonymous,
        ],
        COMMAND_TIMEOUT,
    )?;
    let (status, running) = status_in(&status?);
    let machine = text(machine).unwrap_or_default();
    let size = size.unwrap_or_default();
    let bytes = |name: &str| size[name].as_u64().unwrap_or(0);
    let devices = devices_in(&[peripheral, anonymous].map(Result::unwrap_or_default));
    let past::Nodes { foreign, direct: mut direct_io, unknown: mut untold_io } =
        past::nodes(&nodes.unwrap_or_default());
    let passing = passing(qmp, &devices)?;
    direct_io.extend(passing.iter().cloned());
    untold_io.extend(passing);
    let kinds = devices.into_iter().map(|(_, kind)| kind);
    let mut foreign_writers: Vec<String> = kinds.filter(|kind| past::is_foreign(kind)).collect();
    foreign_writers.extend(foreign_networks(&text(networks).unwrap_or_default()));
    foreign_writers.extend(foreign);
    Ok(Inspection {
        version: qmp.version(),
        status,
        running,
        machine: machine.strip_suffix("-machine").unwrap_or(&machine).to_owned(),
        accelerator: accelerator(qmp)?,
        cpu: cpu(qmp)?,
        ram_bytes: bytes("base-memory").saturating_add(bytes("plugged-memory")),
        memory_devices: memory_devices(qmp, &memory?)?,
        direct_io,
        untold_io,
        may_nest: may_nest(qmp)?,
        foreign_writers,
        blockers: strings(&migration?["blocked-reasons"]),
        images: images::files(&blocks?),
    })
}

fn accelerator(qmp: &mut Qmp) -> Result<String, VmmError> {
    if let Some(known) = &qmp.accelerator {
        return Ok(known.clone());
    }
    let kvm = optional(qmp, ("query-kvm", json!({})), COMMAND_TIMEOUT)?["enabled"].as_bool() == Some(true);
    // Only TCG answers the second one, which takes it 10 ms.
    let accelerator = match kvm {
        true => "kvm",
        false if optional(qmp, ("x-query-jit", json!({})), COMMAND_TIMEOUT)?.is_null() => "unknown",
        false => "tcg",
    };
    Ok(qmp.accelerator.insert(accelerator.to_owned()).clone())
}

fn cpu(qmp: &mut Qmp) -> Result<Option<String>, VmmError> {
    let cpus = optional(qmp, ("query-cpus-fast", json!({})), COMMAND_TIMEOUT)?;
    let Some(path) = cpus[0]["qom-path"].as_str() else { return Ok(None) };
    let kind = property(qmp, path, "type")?;
    // Such as `qemu64-x86_64-cpu`.
    let suffix = format!("-{}-cpu", cpus[0]["target"].as_str().unwrap_or_default());
    Ok(kind.map(|kind| kind.strip_suffix(&suffix).unwrap_or(&kind).to_owned()))
}

/// What there is to know of the memory back ends that the answer to `query-memdev` names.
fn memory_devices(qmp: &mut Qmp, list: &Value) -> Result<Vec<MemoryDevice>, VmmError> {
    let id = |entry: &Value| entry["id"].as_str().unwrap_or_default().to_owned();
    let of = |entry: &Value| {
        let object = format!("/objects/{}", id(entry));
        ["type", "mem-path"].map(|name| property_question(&object, name))
    };
    let questions: Vec<_> = items(list).iter().flat_map(of).collect();
    let mut answers = qmp.execute_each(&questions, COMMAND_TIMEOUT)?.into_iter().map(text);
    let mut devices = Vec::new();
    for entry in items(list) {
        let kind = answers.next().flatten().unwrap_or_else(|| "unknown".to_owned());
        // Refused for kinds that have no path.
        let path = answers.next().flatten().filter(|path| !path.is_empty());
        let share = entry["share"].as_bool().unwrap_or(false);
        devices.push(MemoryDevice {
            id: id(entry),
            kind,
            path,
            size_bytes: entry["size"].as_u64().unwrap_or(0),
            share,
        });
    }
    Ok(devices)
}

/// Whether the guest has virtualization that KVM serves: while a guest of it runs, KVM keeps some of its pages mapped,
/// which the processor then writes by physical address (Intel's virtual APIC page and posted interrupts, AMD's backing
/// page). TCG writes all through QEMU's page tables.
pub(super) fn may_nest(qmp: &mut Qmp) -> Result<bool, VmmError> {
    if accelerator(qmp)? == "tcg" {
        return Ok(false);
    }
    let cpus = optional(qmp, ("query-cpus-fast", json!({})), COMMAND_TIMEOUT)?;
    let Some(path) = cpus[0]["qom-path"].as_str() else { return Ok(false) };
    let features = ["vmx", "svm"].map(|feature| property_question(path, feature));
    let has = qmp.execute_all(features, COMMAND_TIMEOUT)?;
    Ok(has.into_iter().any(|feature| feature.unwrap_or_default().as_bool() == Some(true)))
}

/// Block nodes that read past the page tables, or may.
pub(super) fn block_nodes(qmp: &mut Qmp) -> Result<past::Nodes, VmmError> {
    Ok(past::nodes(&optional(qmp, nodes_question(), COMMAND_TIMEOUT)?))
}

/// The devices that were asked for: where each is, and its type.
pub(super) fn devices(qmp: &mut Qmp) -> Result<Vec<(String, String)>, VmmError> {
    let lists = qmp.execute_all(DEVICE_PATHS.map(list_question), COMMAND_TIMEOUT)?;
    Ok(devices_in(&lists.map(Result::unwrap_or_default)))
}

/// The same in the lists of [`DEVICE_PATHS`].
fn devices_in(lists: &[Value; 2]) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for (path, children) in DEVICE_PATHS.iter().zip(lists) {
        for child in items(children) {
            let kind = child["type"].as_str().and_then(|kind| kind.strip_prefix("child<")?.strip_suffix('>'));
            if let Some((name, kind)) = child["name"].as_str().zip(kind) {
                found.push((format!("{path}/{name}"), kind.to_owned()));
            }
        }
    }
    found
}

/// The types of those devices that pass their guest's SCSI commands through to the host's.
fn passing(qmp: &mut Qmp, devices: &[(String, String)]) -> Result<Vec<String>, VmmError> {
    let mut found = Vec::new();
    for (path, kind) in devices {
        let passes = past::passes_through(kind)
            || past::may_pass_through(kind)
                && optional(qmp, property_question(path, "scsi"), COMMAND_TIMEOUT)?.as_bool() == Some(true);
        if passes {
            found.push(kind.clone());
        }
    }
    Ok(found)
}

/// Whether a device passes its guest's SCSI commands through to the host's.
pub(super) fn passes_commands(qmp: &mut Qmp) -> Result<bool, VmmError> {
    let devices = devices(qmp)?;
    Ok(!passing(qmp, &devices)?.is_empty())
}

/// Network back ends are in no object tree; only the monitor for people lists them, `NAME: index=0,type=KIND,…`.
fn foreign_networks(list: &str) -> impl Iterator<Item = String> {
    let kinds = list.split(',').filter_map(|part| part.trim().strip_prefix("type="));
    let kinds = kinds.filter_map(|kind| kind.split_whitespace().next());
    kinds.filter(|kind| past::is_foreign(kind)).map(str::to_owned)
}

/// The question for all block nodes.
fn nodes_question() -> (&'static str, Value) {
    ("query-named-block-nodes", json!({ "flat": true }))
}

/// An answer that is a text; `None` where it is none, or QEMU refused it.
fn text(answer: Result<Value, VmmError>) -> Option<String> {
    answer.ok()?.as_str().map(str::to_owned)
}

/// An object's property that is a text; `None` where it has none of that name.
fn property(qmp: &mut Qmp, path: &str, name: &str) -> Result<Option<String>, VmmError> {
    Ok(optional(qmp, property_question(path, name), COMMAND_TIMEOUT)?.as_str().map(str::to_owned))
}

pub(super) fn items(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn strings(value: &Value) -> Vec<String> {
    items(value).iter().filter_map(|item| item.as_str().map(str::to_owned)).collect()
}
