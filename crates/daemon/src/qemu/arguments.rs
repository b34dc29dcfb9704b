//! The user's QEMU arguments: read, checked, and completed with RAM back end, QMP and what a destination needs.
//!
//! Dropped arguments, when, and why:
//!
//! * **`-daemonize`; always**: Sterna starts QEMU in the background itself and must know its process
//! * **`-incoming`; from the record of a machine that began as a template**: it said where that one start found the
//!   state of its devices
//! * **`-pidfile`; at a destination**: the source's QEMU may still hold the same file
//! * **`-qmp`, `-qmp-pretty`, `-mon`; adopted machine at a destination**: they belong to the user who started it;
//!   Sterna adds its own
//! * **`-incoming`, `-S`; adopted machine at a destination**: they said how it came to the source
//!
//! The machine type is made exact at a destination (`q35` becomes `pc-q35-7.2`): an alias means another machine in
//! another QEMU.

use std::path::{Path, PathBuf};

use sterna_api::{Code, Problem};
use sterna_engine::vmm::qemu::{FOREIGN, is_foreign_driver};

use crate::problems::invalid;

/// The id of the RAM back end that Sterna adds.
pub const RAM_ID: &str = "sterna-ram";

/// The id of the balloon device that Sterna adds where it is asked for one.
pub const BALLOON_ID: &str = "sterna-balloon";

/// What stands for the machine's name in its user's arguments.
pub const NAME: &str = "{name}";

/// Options of QEMU 7.2 to 10.x that take no value.
const FLAGS: &[&str] = &[
    "S",
    "s",
    "alt-grab",
    "ctrl-grab",
    "daemonize",
    "enable-kvm",
    "enable-sync-profile",
    "full-screen",
    "h",
    "help",
    "mem-prealloc",
    "no-acpi",
    "no-fd-bootchk",
    "no-hpet",
    "no-quit",
    "no-reboot",
    "no-shutdown",
    "no-user-config",
    "nodefaults",
    "nographic",
    "old-param",
    "only-migratable",
    "portrait",
    "preconfig",
    "semihosting",
    "show-cursor",
    "singlestep",
    "snapshot",
    "usb",
    "version",
    "win2k-hack",
    "xen-attach",
    "xen-domid-restrict",
];

/// An option with its value, or a bare disk image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Item {
    /// The option without its dashes, `M` as `machine`; empty for a bare disk image.
    pub option: String,
    /// Its value.
    pub value: Option<String>,
}

impl Item {
    fn new(option: &str, value: impl Into<String>) -> Self {
        Self { option: option.into(), value: Some(value.into()) }
    }

    fn flag(option: &str) -> Self {
        Self { option: option.into(), value: None }
    }

    /// The value as `key=value` pairs; a first word without `=` has the key "".
    #[must_use]
    pub fn pairs(&self) -> Vec<(String, String)> {
        self.value.as_deref().map(split_pairs).unwrap_or_default()
    }

    /// The value where it is a JSON object.
    #[must_use]
    pub fn json(&self) -> Option<serde_json::Value> {
        let value = self.value.as_deref().filter(|value| value.trim_start().starts_with('{'))?;
        serde_json::from_str(value).ok()
    }

    /// The value of a key.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<String> {
        self.pairs().into_iter().rev().find(|(name, _)| name == key).map(|(_, value)| value)
    }

    /// The value of a key, in JSON as in words.
    #[must_use]
    pub fn word(&self, key: &str) -> Option<String> {
        self.json().map_or_else(|| self.get(key), |json| json[key].as_str().map(String::from))
    }

    /// Gives a key this value, and no other, in JSON as in words.
    pub fn put(&mut self, key: &str, value: &str) {
        match self.json() {
            Some(mut json) => {
                json[key] = value.into();
                self.value = Some(json.to_string());
            }
            None => self.set(key, value),
        }
    }

    /// Gives a key this value, and no other.
    pub fn set(&mut self, key: &str, value: &str) {
        let mut pairs = self.pairs();
        pairs.retain(|(name, _)| name != key);
        pairs.push((key.into(), value.into()));
        self.value = Some(join_pairs(&pairs));
    }
}

/// Splits QEMU's `a=1,b=2`, where `,,` stands for a comma.
fn split_pairs(value: &str) -> Vec<(String, String)> {
    let mut parts = vec![String::new()];
    let mut chars = value.chars().peekable();
    while let Some(c) = chars.next() {
        if c == ',' && chars.next_if_eq(&',').is_none() {
            parts.push(String::new());
        } else if let Some(part) = parts.last_mut() {
            part.push(c);
        }
    }
    let pair = |part: String| match part.split_once('=') {
        Some((key, value)) => (key.to_string(), value.to_string()),
        None => (String::new(), part),
    };
    parts.into_iter().filter(|part| !part.is_empty()).map(pair).collect()
}

pub(super) fn join_pairs(pairs: &[(String, String)]) -> String {
    let show = |(key, value): &(String, String)| match key.as_str() {
        "" => escape(value),
        _ => format!("{key}={}", escape(value)),
    };
    pairs.iter().map(show).collect::<Vec<_>>().join(",")
}

fn escape(value: &str) -> String {
    value.replace(',', ",,")
}

fn escape_path(path: &Path) -> String {
    escape(&path.display().to_string())
}

/// Reads arguments into options.
#[must_use]
pub fn parse(arguments: &[String]) -> Vec<Item> {
    let mut items = Vec::new();
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        // QEMU knows one dash and two; with three it would be another option when it is written with one less.
        let plain = argument.strip_prefix("--").or_else(|| argument.strip_prefix('-'));
        let Some(option) = plain.filter(|option| !option.is_empty() && !option.starts_with('-')) else {
            items.push(Item::new("", argument.clone()));
            continue;
        };
        let option = if option == "M" { "machine" } else { option };
        let value = if FLAGS.contains(&option) { None } else { rest.next().cloned() };
        items.push(Item { option: option.into(), value });
    }
    items
}

/// Writes options as arguments.
#[must_use]
pub fn unparse(items: &[Item]) -> Vec<String> {
    let mut arguments = Vec::new();
    for item in items {
        if !item.option.is_empty() {
            arguments.push(format!("-{}", item.option));
        }
        arguments.extend(item.value.clone());
    }
    arguments
}

/// The machine type that the arguments name.
#[must_use]
pub fn machine_type(items: &[Item]) -> Option<String> {
    items.iter().filter(|item| item.option == "machine").find_map(|item| item.get("").or_else(|| item.get("type")))
}

/// Checks that `run` can add RAM, agent and QMP to these arguments; `templated`: RAM begins as a template, so that the
/// state of its devices is the user's to give.
///
/// # Errors
/// A [`Problem`] that names the argument in the way and why.
pub fn check_for_run(items: &[Item], templated: bool) -> Result<(), Problem> {
    for item in items {
        let value = item.value.as_deref().unwrap_or_default();
        let reason = match item.option.as_str() {
            "m" if item.pairs().iter().any(|(key, _)| !matches!(key.as_str(), "slots" | "maxmem")) => {
                "the size of RAM is --memory's; only slots= and maxmem= may stand here"
            }
            "mem-path" | "mem-prealloc" => "Sterna makes the RAM back end itself",
            "object" if value.contains("memory-backend-") => "Sterna makes the RAM back end itself",
            "machine" if item.get("memory-backend").is_some() => "Sterna makes the RAM back end itself",
            "incoming" if templated => continue,
            "incoming" => "a machine that waits for another one's state is Sterna's to start",
            "loadvm" => "a snapshot brings its own RAM",
            "h" | "help" | "version" => "it starts no machine",
            "readconfig" => "options in a file cannot be checked or sent to another host",
            _ => continue,
        };
        return Err(conflict(item, reason));
    }
    Ok(())
}

/// Refuses what cannot work on private memory.
///
/// # Errors
/// A [`Problem`] that names the argument in the way and why.
pub fn check_for_private(items: &[Item]) -> Result<(), Problem> {
    match unfit_for_private(items) {
        Some((item, reason)) => Err(conflict(item, reason).hint("without it, or with --memory-mode shared")),
        None => Ok(()),
    }
}

/// What cannot work on private memory, and why.
#[must_use]
pub fn unfit_for_private(items: &[Item]) -> Option<(&Item, &'static str)> {
    items.iter().find_map(|item| {
        let value = item.value.as_deref().unwrap_or_default();
        let asked = |words: [&str; 2]| words.iter().any(|word| value.contains(word));
        let reason = match item.option.as_str() {
            "device" | "netdev" | "nic" | "chardev" if asked(["vhost-user", "ivshmem"]) => {
                "another process reads or writes that memory in a file, and private memory is in QEMU alone"
            }
            "device" | "netdev" if FOREIGN.iter().any(|kind| begins_with(value, kind)) => {
                "it writes guest RAM where that was when the machine started, and private memory does not stay there"
            }
            "drive" | "blockdev"
                if value.contains("nvme://") || driver(item).is_some_and(|driver| is_foreign_driver(&driver)) =>
            {
                "that driver has guest RAM written where it was when the machine started, and private memory does not \
                 stay there"
            }
            "overcommit" if item.get("mem-lock").is_some_and(|word| word != "off") => {
                "locked memory cannot be given back, nor wait for its pages"
            }
            "realtime" => "locked memory cannot be given back, nor wait for its pages",
            _ => return None,
        };
        Some((item, reason))
    })
}

/// The block driver that an argument names.
fn driver(item: &Item) -> Option<String> {
    item.word("driver").or_else(|| item.get("file.driver"))
}

/// Whether a value says that something is of a kind whose name begins so: as its first word, or in JSON.
fn begins_with(value: &str, kind: &str) -> bool {
    value.trim_start().starts_with(kind) || value.contains(&format!("\"{kind}"))
}

/// The device that empties its memory when it is made, whoever else has that memory, if there is one. QEMU makes
/// virtio-mem's so that what is not plugged takes none, also where its state is to come (`virtio_mem_device_realize`).
#[must_use]
pub fn empties_memory(items: &[Item]) -> Option<&Item> {
    items
        .iter()
        .find(|item| item.option == "device" && begins_with(item.value.as_deref().unwrap_or_default(), "virtio-mem"))
}

/// The arguments without those that say where the machine's state comes from: they are of one start, and not of the
/// machine.
#[must_use]
pub fn without_origin(items: &[Item]) -> Vec<String> {
    let lasting: Vec<Item> = items.iter().filter(|item| item.option != "incoming").cloned().collect();
    unparse(&lasting)
}

/// Adds a balloon device to a user's arguments, for the bus that the machine has.
///
/// # Errors
/// A [`Problem`] where they name one already: QEMU takes only one.
pub fn add_balloon(arguments: &mut Vec<String>) -> Result<(), Problem> {
    let items = parse(arguments);
    let is_balloon = |item: &&Item| {
        item.option == "device" && begins_with(item.value.as_deref().unwrap_or_default(), "virtio-balloon")
    };
    if let Some(item) = items.iter().find(is_balloon) {
        return Err(conflict(item, "with --balloon Sterna adds the balloon itself"));
    }
    // A microvm has no PCI unless it is asked for.
    let device =
        if machine_type(&items).as_deref() == Some("microvm") { "virtio-balloon-device" } else { "virtio-balloon-pci" };
    arguments.extend(["-device".into(), format!("{device},id={BALLOON_ID},deflate-on-oom=on,free-page-reporting=on")]);
    Ok(())
}

/// The arguments of the machine of this name, with its name wherever [`NAME`] stands for it.
#[must_use]
pub fn named(items: &[Item], name: &str) -> Vec<Item> {
    let named =
        |item: &Item| Item { value: item.value.as_ref().map(|value| value.replace(NAME, name)), ..item.clone() };
    items.iter().map(named).collect()
}

fn conflict(item: &Item, reason: &str) -> Problem {
    let mut problem = invalid(format!("QEMU's '-{}' cannot be given to 'run': {reason}", item.option));
    problem.code = Code::ArgumentConflict;
    problem
}

/// The additions that a machine needs beside its user's arguments.
#[derive(Debug, Clone)]
pub struct Additions<'a> {
    /// The machine's name.
    pub name: &'a str,
    /// Our QMP socket.
    pub qmp: &'a Path,
    /// RAM that Sterna adds: its size in bytes and its file.
    pub ram: Option<(u64, &'a Path)>,
    /// Whether this RAM is to be in huge pages. QEMU asks for them by itself; without this its mapping does not begin
    /// where one of them does, and has none.
    pub huge: bool,
}

/// The arguments of a machine that is started here.
#[must_use]
pub fn for_run(user: &[Item], additions: &Additions<'_>) -> Vec<String> {
    let mut items = named(user, additions.name);
    items.retain(|item| item.option != "daemonize");
    add(&mut items, additions);
    unparse(&items)
}

/// The arguments of a machine that comes here: it waits for device state and does not run by itself.
///
/// `ram_files` has a path of this host for every RAM back end that the arguments name by its id.
#[must_use]
pub fn for_incoming(
    user: &[Item],
    additions: &Additions<'_>,
    machine: &str,
    ram_files: &[(String, PathBuf)],
) -> Vec<String> {
    let adopted = additions.ram.is_none();
    let dropped = |item: &Item| match item.option.as_str() {
        "daemonize" | "pidfile" | "incoming" | "S" => true,
        "qmp" | "qmp-pretty" | "mon" => adopted,
        _ => false,
    };
    let mut items = named(user, additions.name);
    items.retain(|item| !dropped(item));
    if adopted {
        drop_monitor_chardevs(user, &mut items);
        items.iter_mut().for_each(|item| replace_ram_path(item, ram_files));
    }
    set_machine_type(&mut items, machine);
    add(&mut items, additions);
    items.push(Item::new("incoming", "defer"));
    items.push(Item::flag("S"));
    unparse(&items)
}

fn add(items: &mut Vec<Item>, additions: &Additions<'_>) {
    if let Some((bytes, path)) = additions.ram {
        let path = escape_path(path);
        let align = if additions.huge { ",align=2M" } else { "" };
        let backend = format!("memory-backend-file,id={RAM_ID},size={bytes},mem-path={path},share=on{align}");
        items.push(Item::new("m", format!("size={bytes}B")));
        items.push(Item::new("object", backend));
        items.push(Item::new("machine", format!("memory-backend={RAM_ID}")));
    }
    items.push(Item::new("qmp", format!("unix:{},server=on,wait=off", escape_path(additions.qmp))));
    if !items.iter().any(|item| item.option == "name") {
        items.push(Item::new("name", escape(additions.name)));
    }
}

/// Drops the character device of each dropped `-mon`: its socket would be taken from the source's QEMU.
fn drop_monitor_chardevs(user: &[Item], items: &mut Vec<Item>) {
    let monitors: Vec<String> = user
        .iter()
        .filter(|item| item.option == "mon")
        .filter_map(|item| item.get("chardev").or_else(|| item.get("")))
        .collect();
    items.retain(|item| item.option != "chardev" || item.get("id").is_none_or(|id| !monitors.contains(&id)));
}

fn replace_ram_path(item: &mut Item, ram_files: &[(String, PathBuf)]) {
    let Some(value) = item.value.as_deref().filter(|_| item.option == "object") else { return };
    let path_of = |id: &str| ram_files.iter().find(|(name, _)| name == id).map(|(_, path)| path.display().to_string());
    if value.trim_start().starts_with('{') {
        let Ok(mut json) = serde_json::from_str::<serde_json::Value>(value) else { return };
        if let Some(path) = json["id"].as_str().and_then(path_of)
            && json["mem-path"].is_string()
        {
            json["mem-path"] = path.into();
            item.value = Some(json.to_string());
        }
        return;
    }
    let mut pairs = item.pairs();
    let Some(path) = item.get("id").as_deref().and_then(path_of) else { return };
    for (key, value) in &mut pairs {
        if key == "mem-path" {
            *value = path.clone();
        }
    }
    item.value = Some(join_pairs(&pairs));
}

fn set_machine_type(items: &mut Vec<Item>, machine: &str) {
    let mut exact = false;
    for item in items.iter_mut().filter(|item| item.option == "machine") {
        let mut pairs = item.pairs();
        for (key, value) in &mut pairs {
            if key.is_empty() || key == "type" {
                *key = String::new();
                *value = machine.into();
                exact = true;
            }
        }
        item.value = Some(join_pairs(&pairs));
    }
    if !exact {
        items.push(Item::new("machine", machine));
    }
}

/// Whether the arguments name a RAM back end that is a file, by its id.
#[must_use]
pub fn names_ram_file(items: &[Item], id: &str) -> bool {
    items.iter().filter(|item| item.option == "object").any(|item| {
        let value = item.value.as_deref().unwrap_or_default();
        if let Ok(json) = serde_json::from_str::<serde_json::Value>(value) {
            return json["id"] == id && json["mem-path"].is_string();
        }
        item.get("id").as_deref() == Some(id) && item.get("mem-path").is_some()
    })
}

#[cfg(test)]
#[path = "arguments_tests.rs"]
mod tests;
