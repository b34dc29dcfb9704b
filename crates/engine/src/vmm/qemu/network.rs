//! The guest's network cards: their links, and a card that is taken out and put in again with another address.
//!
//! A card's address is part of its state, and its guest keeps it, so that a clone has its source's. It gets another one
//! as a machine does: the card is unplugged, which its guest must agree to, and another one plugged into its place.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::commands::{COMMAND_TIMEOUT, ask_monitor, list_question, optional, property_question};
use super::inspect::{devices, items};
use crate::vmm::VmmError;
use crate::vmm::qmp::Qmp;

/// How often QEMU is asked whether a card is gone.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A network card of the guest.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Card {
    /// Its name in QEMU.
    pub name: String,
    /// Its hardware address.
    pub mac: String,
    /// The name of its back end.
    pub back_end: Option<String>,
    /// The kind of its back end, such as `tap`; none where it is connected to nothing.
    pub kind: Option<String>,
    /// The tap that it is connected to, where QEMU opened that by its name.
    pub tap: Option<String>,
    /// The number of its tap's descriptor in QEMU, where QEMU was given that.
    pub descriptor: Option<u32>,
}

/// The guest's network cards.
///
/// # Errors
/// [`VmmError`] where QEMU does not answer.
pub fn cards(qmp: &mut Qmp) -> Result<Vec<Card>, VmmError> {
    Ok(cards_in(&ask_monitor(qmp, "info network")?))
}

/// Only the monitor for people lists them: `NAME: index=0,type=nic,model=KIND,macaddr=MAC`, and behind each, indented,
/// what it is connected to. A card with several queues is there once for each.
fn cards_in(list: &str) -> Vec<Card> {
    let mut cards: Vec<Card> = Vec::new();
    let mut last = None;
    for line in list.lines() {
        let Some((name, about)) = line.trim().split_once(": index=") else { continue };
        let value = |key: &str| about.split(',').find_map(|part| part.strip_prefix(key)).map(str::to_owned);
        let kind = value("type=").unwrap_or_default();
        // In a hub the name of the port stands in front.
        let name = name.rsplit(": ").next().unwrap_or(name).trim_start_matches("\\ ");
        if kind == "nic" {
            let known = cards.iter().position(|card| card.name == name);
            last = Some(known.unwrap_or(cards.len()));
            if known.is_none() {
                cards.push(Card {
                    name: name.to_owned(),
                    mac: value("macaddr=").unwrap_or_default(),
                    ..Card::default()
                });
            }
        } else if let Some(card) = last.take().and_then(|at| cards.get_mut(at)).filter(|card| card.kind.is_none()) {
            card.tap = value("ifname=").filter(|_| kind == "tap");
            card.descriptor = value("fd=").and_then(|number| number.parse().ok());
            card.back_end = Some(name.to_owned());
            card.kind = Some(kind);
        }
    }
    cards
}

/// Has a card's link be up, or down, for the guest as by a cable.
///
/// # Errors
/// [`VmmError`]: there is no such card.
pub fn set_link(qmp: &mut Qmp, card: &str, up: bool) -> Result<(), VmmError> {
    qmp.execute("set_link", json!({ "name": card, "up": up }), COMMAND_TIMEOUT).map(drop)
}

/// Where a card is plugged in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plug {
    /// Its place among QEMU's objects.
    path: String,
    /// Its hardware address.
    pub mac: String,
    /// The name of its bus.
    pub bus: String,
    /// Its place on the bus: slot and function.
    pub address: (u32, u32),
    /// It can be taken out while the guest runs.
    pub pluggable: bool,
    /// Other functions of its slot are there: they would go with it.
    pub shares_slot: bool,
}

/// Where the card is plugged in that has the network back end of this name; none where QEMU has none in a bus.
///
/// # Errors
/// [`VmmError`] where QEMU does not answer.
pub fn plug_of(qmp: &mut Qmp, netdev: &str) -> Result<Option<Plug>, VmmError> {
    let all: Vec<String> = devices(qmp)?.into_iter().map(|(path, _)| path).collect();
    let mut is_it = |path: &&String| Ok(get(qmp, path, "netdev")?.as_str() == Some(netdev));
    let Some(path) = all.iter().find_map(|path| is_it(&path).map(|is| is.then_some(path)).transpose()).transpose()?
    else {
        return Ok(None);
    };
    let place = |qmp: &mut Qmp, path: &str| -> Result<Option<(String, u32)>, VmmError> {
        let bus = get(qmp, path, "parent_bus")?.as_str().map(str::to_owned);
        let number = get(qmp, path, "addr")?.as_u64().and_then(|number| u32::try_from(number).ok());
        Ok(bus.zip(number))
    };
    let Some((bus, number)) = place(qmp, path)? else { return Ok(None) };
    let mut shares_slot = number % 8 != 0;
    for other in all.iter().filter(|other| *other != path) {
        shares_slot |= place(qmp, other)?.is_some_and(|(its, at)| its == bus && at / 8 == number / 8);
    }
    Ok(Some(Plug {
        mac: get(qmp, path, "mac")?.as_str().unwrap_or_default().to_owned(),
        bus: bus.rsplit('/').next().unwrap_or_default().to_owned(),
        address: (number / 8, number % 8),
        pluggable: get(qmp, path, "hotpluggable")? == true,
        shares_slot,
        path: path.clone(),
    }))
}

/// Its guest has taken the card into use: it has given it addresses, so a region of the card's is part of another's
/// that is not the card's own. What the guest was told about that place before it has done then, in order.
///
/// # Errors
/// [`VmmError`] where QEMU does not answer.
pub fn is_taken(qmp: &mut Qmp, plug: &Plug) -> Result<bool, VmmError> {
    for region in children(qmp, &plug.path, "child<memory-region>")? {
        let container = get(qmp, &region, "container")?;
        if container.as_str().is_some_and(|path| !path.is_empty() && !path.starts_with(&format!("{}/", plug.path))) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The objects of a type that begins so which belong to this one; none where that is gone.
fn children(qmp: &mut Qmp, path: &str, kind: &str) -> Result<Vec<String>, VmmError> {
    let listed = optional(qmp, list_question(path), COMMAND_TIMEOUT)?;
    let all = items(&listed).iter().filter(|item| item["type"].as_str().is_some_and(|is| is.starts_with(kind)));
    Ok(all.filter_map(|item| Some(format!("{path}/{}", item["name"].as_str()?))).collect())
}

/// A property; null where the object has none of that name, or is gone.
fn get(qmp: &mut Qmp, path: &str, property: &str) -> Result<Value, VmmError> {
    optional(qmp, property_question(path, property), COMMAND_TIMEOUT)
}

/// Takes a card out; whether its guest has let go of it within `timeout`. Until it does, it may do so at any time.
/// A guest that was asked more than once lets go as often, of what is in that place then: [`is_taken`] tells when that
/// is over.
///
/// # Errors
/// [`VmmError`]: QEMU does not take it out.
pub fn unplug(qmp: &mut Qmp, plug: &Plug, timeout: Duration) -> Result<bool, VmmError> {
    let deadline = Instant::now() + timeout;
    match qmp.execute("device_del", json!({ "id": plug.path }), COMMAND_TIMEOUT) {
        // Its guest was told before, and has not answered; or has, just now.
        Err(VmmError::Refused { reason, .. }) if reason.contains("process of unplug") => {}
        Err(VmmError::Refused { reason, .. }) if reason.contains("not found") => {}
        told => drop(told?),
    }
    while !get(qmp, &plug.path, "type")?.is_null() {
        if Instant::now() >= deadline {
            return Ok(false);
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    Ok(true)
}

/// Puts a device in that is described as in an argument of QEMU's.
///
/// # Errors
/// [`VmmError`]: QEMU does not put it in.
pub fn plug_in(qmp: &mut Qmp, device: &str) -> Result<(), VmmError> {
    if let Ok(device @ Value::Object(_)) = serde_json::from_str(device) {
        return qmp.execute("device_add", device, COMMAND_TIMEOUT).map(drop);
    }
    // The monitor for people takes words as the command line does; that for programs would want each of its type.
    let said = ask_monitor(qmp, &format!("device_add {device}"))?;
    match said.trim() {
        "" => Ok(()),
        reason => Err(VmmError::Refused { command: "device_add".to_owned(), reason: reason.to_owned() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As QEMU 7.2 and 10.0 answer; the hub and the two queues are put in by hand.
    #[test]
    fn cards_are_told_with_what_they_are_connected_to() {
        let list = "hub 0\r\n \\ hub0port1: h: index=0,type=user,net=10.0.2.0,restrict=off\r\n \
            \\ hub0port0: e1000.0: index=0,type=nic,model=e1000,macaddr=52:54:00:00:00:09\r\n\
            virtio-net-pci.0: index=0,type=nic,model=virtio-net-pci,macaddr=52:54:00:00:00:01\r\n \
            \\ a: index=0,type=tap,ifname=sterna3,script=no,downscript=no\r\n\
            n2: index=0,type=nic,model=virtio-net-pci,macaddr=52:54:00:12:34:56\r\n \\ b: index=0,type=tap,fd=23\r\n\
            n2: index=1,type=nic,model=virtio-net-pci,macaddr=52:54:00:12:34:56\r\n \\ b: index=1,type=tap,fd=24\r\n\
            bare: index=0,type=nic,model=e1000,macaddr=52:54:00:12:34:57\r\n";
        let card = |name: &str, mac: &str| Card { name: name.into(), mac: mac.into(), ..Card::default() };
        let tap = Some("tap".to_owned());
        let expected = [
            card("e1000.0", "52:54:00:00:00:09"),
            Card {
                kind: tap.clone(),
                back_end: Some("a".into()),
                tap: Some("sterna3".into()),
                ..card("virtio-net-pci.0", "52:54:00:00:00:01")
            },
            Card { kind: tap, back_end: Some("b".into()), descriptor: Some(23), ..card("n2", "52:54:00:12:34:56") },
            card("bare", "52:54:00:12:34:57"),
        ];
        assert_eq!(cards_in(list), expected);
        assert!(cards_in("").is_empty());
    }
}
