//! The links of machines' network cards: up, down, and what they are connected to.
//!
//! A clone's cards have no link, in taps of their own that are in no bridge: two guests with one hardware address in
//! one network take each other's packets. Its user says when that ends, and may give it other addresses first.

use sterna_api::{Blame, Code, LinkRequest, NetworkCard, Problem};
use sterna_engine::vmm::qemu::network::{self, Card};
use sterna_sys::process::Pidfd;
use sterna_sys::tap;

use crate::machines::card::{CHANGING, unfit};
use crate::machines::claim::Claimed;
use crate::machines::control::{self, Control};
use crate::machines::hold::{Hold, InPlace};
use crate::machines::record::VmRecord;
use crate::machines::table::Machines;
use crate::problems::host;

/// Cards that take others' places, with other addresses.
pub mod new_mac;

/// A machine's network cards.
///
/// # Errors
/// A [`Problem`]: the machine is unknown or busy, or does not answer.
pub fn show(machines: &Machines, name: &str) -> Result<Vec<NetworkCard>, Problem> {
    let claimed = Claimed::new(machines, name, Hold::shared(&InPlace::new(CHANGING)))?;
    let mut control = Control::connect(&claimed.record.qmp)?;
    shown(&claimed.record, &cards(&mut control)?)
}

/// Changes the links of a machine's network cards. Those that it was asked about, as they are then.
///
/// # Errors
/// A [`Problem`]: the machine is unknown or busy, has no such card, or what cannot be done with it.
pub fn set(machines: &Machines, name: &str, request: &LinkRequest) -> Result<Vec<NetworkCard>, Problem> {
    let doing = InPlace::new(CHANGING);
    let claimed = Claimed::new(machines, name, Hold::shared(&doing))?;
    let record = &claimed.record;
    let mut control = Control::connect(&record.qmp)?;
    doing.found(control.status()? == "running");
    let wanted = chosen(record, request, cards(&mut control)?)?;
    if request.new_mac {
        new_mac::give(machines, record, &mut control, &wanted)?;
    }
    let now = chosen(record, request, cards(&mut control)?)?;
    let now_shown = shown(record, &now)?;
    if let Some(bridge) = &request.bridge {
        for card in &now_shown {
            let why = "it is connected to no tap, which a bridge could have";
            let device = card.tap.as_deref().ok_or_else(|| unfit(&record.name, &card.name, why))?;
            tap::connect(device, bridge).map_err(|error| host("cannot connect the machine to the bridge", &error))?;
        }
    }
    for card in &now {
        let set = network::set_link(control.qmp(), &card.name, request.up);
        set.map_err(|error| control::refused("change the link", &error))?;
    }
    tracing::info!(vm = name, up = request.up, cards = now.len(), bridge = request.bridge, "its links are changed");
    Ok(now_shown)
}

/// The network cards of the machine behind this connection.
///
/// # Errors
/// A [`Problem`] where QEMU does not tell them.
pub fn cards(control: &mut Control) -> Result<Vec<Card>, Problem> {
    network::cards(control.qmp()).map_err(|error| control::refused("tell its network cards", &error))
}

/// The cards that the request is about.
fn chosen(record: &VmRecord, request: &LinkRequest, mut all: Vec<Card>) -> Result<Vec<Card>, Problem> {
    let names: Vec<String> = all.iter().map(|card| card.name.clone()).collect();
    all.retain(|card| request.card.as_ref().is_none_or(|name| *name == card.name));
    // Between two attempts at a new address there may be none.
    if !all.is_empty() || request.new_mac && !record.new_cards.is_empty() {
        return Ok(all);
    }
    let why = match (&request.card, names.is_empty()) {
        (Some(name), false) => format!("no network card '{name}': there are {}", names.join(", ")),
        _ => "no network card".into(),
    };
    Err(Problem::new(Code::NetworkCard, Blame::Request, format!("'{}' has {why}", record.name)))
}

/// The cards as the API shows them.
fn shown(record: &VmRecord, cards: &[Card]) -> Result<Vec<NetworkCard>, Problem> {
    let failed = |error: sterna_sys::Error| host("cannot look at the machine's taps", &error);
    let pid = record.process.pid;
    let taps = match cards.iter().any(|card| card.descriptor.is_some()) {
        true => tap::open_taps(&Pidfd::open(pid).map_err(failed)?, pid).map_err(failed)?,
        false => Vec::new(),
    };
    let by_number = |number: u32| taps.iter().find(|tap| tap.numbers.contains(&number)).map(|tap| tap.name.clone());
    let show = |card: &Card| NetworkCard {
        name: card.name.clone(),
        mac: card.mac.clone(),
        back_end: card.kind.clone(),
        tap: card.tap.clone().or_else(|| card.descriptor.and_then(by_number)),
    };
    Ok(cards.iter().map(show).collect())
}
