//! The network cards of a virtual machine, and their links.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The request to change the links of a machine's network cards. Absent fields have their type's zero.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct LinkRequest {
    /// Whether there is a link.
    pub up: bool,
    /// Only the card of this name in QEMU. Without it, all of them.
    pub card: Option<String>,
    /// Put the taps of these cards into this bridge of the host.
    pub bridge: Option<String>,
    /// Give the cards new hardware addresses first: each is unplugged, and another one plugged into its place. The
    /// guest has to run, and to let go of them.
    pub new_mac: bool,
}

/// A network card of a machine.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct NetworkCard {
    /// Its name in QEMU.
    pub name: String,
    /// Its hardware address.
    pub mac: String,
    /// What it is connected to, such as `tap` or `user`; none where that is nothing.
    pub back_end: Option<String>,
    /// The network device of the host that it is connected to.
    pub tap: Option<String>,
}
