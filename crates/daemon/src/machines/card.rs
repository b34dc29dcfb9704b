//! A network card that is to take another's place, with another hardware address; and what is said of cards.

use serde::{Deserialize, Serialize};
use sterna_api::{Blame, Code, Problem};
use sterna_sys::host::random_u128;

use crate::qemu::arguments::Item;

/// What is being done, for people.
pub const CHANGING: &str = "its network is being changed";

/// The problem of a machine's card with which something cannot be done.
#[must_use]
pub fn unfit(machine: &str, card: &str, why: &str) -> Problem {
    Problem::new(Code::NetworkCard, Blame::Request, format!("the network card '{card}' of '{machine}': {why}"))
}

/// A card that is to take the place of another. It is on record from before that is unplugged until the arguments name
/// it: whoever finds it goes on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewCard {
    /// The network back end of both.
    pub netdev: String,
    /// Its hardware address.
    pub mac: String,
    /// The name of the bus of both.
    pub bus: String,
    /// Their place on the bus.
    pub address: String,
}

impl NewCard {
    /// A card with an address that nobody has. `address`: slot and function.
    #[must_use]
    pub fn new(netdev: String, bus: String, address: (u32, u32)) -> Self {
        let bytes = random_u128().to_le_bytes();
        // As QEMU's own begin, and random: many clones of one guest may be in one network.
        let mac = format!("52:54:{:02x}:{:02x}:{:02x}:{:02x}", bytes[0], bytes[1], bytes[2], bytes[3]);
        Self { netdev, mac, bus, address: format!("{:x}.{:x}", address.0, address.1) }
    }

    /// The argument that makes it, where `former` made the card whose place it takes.
    #[must_use]
    pub fn argument(&self, former: &Item) -> Item {
        let mut item = former.clone();
        let values = [("mac", &self.mac), ("bus", &self.bus), ("addr", &self.address)];
        values.into_iter().for_each(|(key, value)| item.put(key, value));
        item
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::qemu::arguments::{parse, unparse};
    use super::*;

    #[test]
    fn a_new_card_is_in_the_place_of_the_former_and_differs_in_its_address() {
        let card = NewCard::new("n".into(), "rp0".into(), (16, 0));
        assert!(card.mac.len() == 17 && card.mac != NewCard::new("n".into(), "rp0".into(), (16, 0)).mac);
        let argument = |line: &str| unparse(&[card.argument(&parse(&["-device".into(), line.into()])[0])]).remove(1);
        let mac = &card.mac;
        assert_eq!(
            argument("virtio-net-pci,netdev=n,mac=52:54:00:00:00:01,bus=rp0,mq=on"),
            format!("virtio-net-pci,netdev=n,mq=on,mac={mac},bus=rp0,addr=10.0")
        );
        let json = argument("{\"driver\":\"virtio-net-pci\",\"netdev\":\"n\",\"mq\":true}");
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        let expected = serde_json::json!({
            "driver": "virtio-net-pci", "netdev": "n", "mq": true, "mac": mac, "bus": "rp0", "addr": "10.0"
        });
        assert_eq!(json, expected);
    }
}
