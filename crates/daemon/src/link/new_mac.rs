//! Network cards that take the places of others, with other hardware addresses.
//!
//! The new ones are on record before the former are unplugged. A daemon that finds them there goes on: what is gone is
//! plugged in, what is not is unplugged first. Until the arguments name the new ones the machine is not moved and not
//! forked: elsewhere its QEMU would have other cards than its guest.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_api::{Blame, Code, Problem};
use sterna_engine::vmm::qemu::network::{self, Card};

use crate::machines::card::{CHANGING, NewCard, unfit};
use crate::machines::claim::Claimed;
use crate::machines::control::{self, Control};
use crate::machines::hold::{Hold, InPlace};
use crate::machines::record::VmRecord;
use crate::machines::table::Machines;
use crate::problems::host;
use crate::qemu::arguments::{Item, named, parse, unparse};

/// How long a guest may take to let go of a card: its kernel does so within a second, and one that is busy later. The
/// same for taking another one into use.
const UNPLUG_TIMEOUT: Duration = Duration::from_secs(30);

/// How often QEMU is asked whether its guest uses a card.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Cards with new addresses for these of a machine, whose QEMU is asked whether it can replace them.
///
/// # Errors
/// A [`Problem`]: a card that cannot be replaced, and why.
pub fn plan(record: &VmRecord, control: &mut Control, cards: &[Card]) -> Result<Vec<NewCard>, Problem> {
    let items = parse(&record.arguments);
    let mut planned = Vec::with_capacity(cards.len());
    for card in cards {
        let refuse = |why: &str, hint: &str| Err(unfit(&record.name, &card.name, &format!("it {why}")).hint(hint));
        let no_device = "is not made by -device in the machine's arguments, so another cannot be made like it";
        let Some(netdev) = card.back_end.clone().filter(|netdev| device_of(&items, netdev).is_some()) else {
            return refuse(no_device, "give the machine -netdev and -device in the place of -nic or -net");
        };
        let plug = network::plug_of(control.qmp(), &netdev);
        let plug = plug.map_err(|error| control::refused("tell where a network card is plugged in", &error))?;
        match plug {
            Some(plug) if plug.shares_slot => {
                return refuse("is one of several functions of a slot, which can only be unplugged together", SLOT);
            }
            Some(plug) if plug.pluggable => planned.push(NewCard::new(netdev, plug.bus, plug.address)),
            _ => return refuse("cannot be unplugged while its guest runs", SLOT),
        }
    }
    Ok(planned)
}

/// What to do about a card that cannot be unplugged.
const SLOT: &str = "a card can be unplugged on 'pc', and on 'q35' behind a slot of its own: \
                    -device pcie-root-port,id=SLOT and bus=SLOT; on a microvm none can";

/// Gives cards of a machine, which is claimed, new addresses; or goes on with what was begun. Blocks until its guest
/// has let go of the former ones, for a while.
///
/// # Errors
/// A [`Problem`]: what cannot be replaced, or that the guest does not let go.
pub(super) fn give(
    machines: &Machines,
    record: &VmRecord,
    control: &mut Control,
    cards: &[Card],
) -> Result<(), Problem> {
    if control.status()? != "running" {
        let message = format!("the guest of '{}' does not run, so it cannot let go of a network card", record.name);
        return Err(Problem::new(Code::NotRunning, Blame::Request, message));
    }
    let new_cards = match record.new_cards.is_empty() {
        true => plan(record, control, cards)?,
        false => record.new_cards.clone(),
    };
    let begun = VmRecord { new_cards, ..record.clone() };
    machines.store(&begun).map_err(|error| host("cannot write the machine's record", &error))?;
    finish(machines, &begun, control)
}

/// Replaces the cards that are on record. The record names the new ones then.
///
/// # Errors
/// As `give`; they stay on record.
fn finish(machines: &Machines, record: &VmRecord, control: &mut Control) -> Result<(), Problem> {
    let mut items = parse(&record.arguments);
    for card in &record.new_cards {
        let index = device_of(&items, &card.netdev);
        let index = index.ok_or_else(|| unfit(&record.name, &card.netdev, "the arguments do not name it any more"))?;
        let device = card.argument(&items[index]);
        replace(record, control, card, &device)?;
        items[index] = device;
    }
    let now = VmRecord { arguments: unparse(&items), new_cards: Vec::new(), ..record.clone() };
    machines.store(&now).map_err(|error| host("cannot write the machine's record", &error))
}

/// Has the card be in its place, and its guest use it. A guest that was asked for the former one more than once, by a
/// daemon that died or a user, may let go of this one too: it is put in again then.
fn replace(record: &VmRecord, control: &mut Control, card: &NewCard, device: &Item) -> Result<(), Problem> {
    let failed = |error| control::refused("replace a network card", &error);
    let named = named(std::slice::from_ref(device), &record.name);
    let words = named.first().and_then(|item| item.value.clone()).unwrap_or_default();
    let mut deadline = Instant::now() + UNPLUG_TIMEOUT;
    loop {
        let is_over = Instant::now() >= deadline;
        match network::plug_of(control.qmp(), &card.netdev).map_err(failed)? {
            Some(plug) if plug.mac == card.mac => {
                if network::is_taken(control.qmp(), &plug).map_err(failed)? {
                    return Ok(());
                }
                if is_over {
                    tracing::warn!(vm = record.name, mac = card.mac, "its guest does not use its new network card");
                    return Ok(());
                }
                std::thread::sleep(POLL_INTERVAL);
            }
            Some(plug) => {
                if !network::unplug(control.qmp(), &plug, UNPLUG_TIMEOUT).map_err(failed)? {
                    let what = format!("has not let go of a network card within {} s", UNPLUG_TIMEOUT.as_secs());
                    return Err(ask_again(record, &what));
                }
                deadline = Instant::now() + UNPLUG_TIMEOUT;
            }
            None if is_over => return Err(ask_again(record, "lets go of its new network card again and again")),
            None => network::plug_in(control.qmp(), &words).map_err(failed)?,
        }
    }
}

fn ask_again(record: &VmRecord, what: &str) -> Problem {
    Problem::new(Code::GuestKeepsCard, Blame::Guest, format!("the guest of '{}' {what}", record.name))
        .hint(format!("'sterna link {} up --new-mac' asks it again", record.name))
}

/// Goes on with what an earlier daemon has begun, or a fork; the machine is not claimed.
///
/// # Errors
/// As `give`.
pub fn go_on(machines: &Machines, name: &str) -> Result<(), Problem> {
    let claimed = Claimed::new(machines, name, Hold::shared(&InPlace::new(CHANGING)))?;
    finish(machines, &claimed.record, &mut Control::connect(&claimed.record.qmp)?)
}

/// The same beside everything else. Where it fails, people see it.
pub fn go_on_later(machines: &Arc<Machines>, name: &str) {
    let (machines, vm) = (Arc::clone(machines), name.to_owned());
    let work = move || {
        if let Err(problem) = go_on(&machines, &vm) {
            tracing::warn!(vm, "{}", problem.with_causes());
            machines.mark(&vm, problem.message);
        }
    };
    if let Err(error) = std::thread::Builder::new().name("new-mac".into()).spawn(work) {
        tracing::error!(vm = name, %error, "cannot go on with replacing its network cards");
    }
}

/// Which option makes the device that has this network back end.
fn device_of(items: &[Item], netdev: &str) -> Option<usize> {
    items.iter().position(|item| item.option == "device" && item.word("netdev").as_deref() == Some(netdev))
}
