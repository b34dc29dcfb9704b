//! The virtual machine as the source daemon describes it to the destination daemon.

use serde::{Deserialize, Serialize};
use sterna_api::BalloonSetting;

/// One RAM block: a file that QEMU maps.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct BlockSpec {
    /// The memory back end's id in QEMU (`-object memory-backend-file,id=…`).
    pub id: String,
    /// Size; a multiple of `page_bytes`.
    pub bytes: u64,
    /// Page size of the file's backing: 4,096, or a huge page's size.
    pub page_bytes: u64,
    /// The file's path at the source, which the arguments may name.
    pub path: String,
}

/// What the destination needs to start the same machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmSpec {
    /// The name, unique on each host.
    pub name: String,
    /// RAM, bytes: the sum of the blocks present at start.
    pub memory_bytes: u64,
    /// `true` where RAM is mapped privately.
    pub private: bool,
    /// Which machines it may share pages with.
    pub trust_group: Option<String>,
    /// QEMU's version at the source: major, minor, micro.
    pub qemu_version: (u32, u32, u32),
    /// QEMU's binary at the source.
    pub qemu_path: String,
    /// The machine type in full, as QEMU resolves it: `pc-q35-7.2`.
    pub machine: String,
    /// The arguments as the user gave them, without what Sterna adds.
    pub arguments: Vec<String>,
    /// Sterna added the RAM back end itself (`run`), so the destination adds it again; else (`adopt`) the arguments
    /// name the back ends, and the destination puts its own paths in place of each block's `path`.
    pub managed_ram: bool,
    /// The RAM blocks, in the order of their ids.
    pub blocks: Vec<BlockSpec>,
    /// The source host's processor flags matter to this guest (`-cpu host` or `max`): vendor, family, model and flags.
    pub cpu: Option<String>,
    /// RAM the host has given memory for, bytes: what the destination must have room for.
    pub allocated_bytes: u64,
    /// How its balloon is handled: the destination goes on with it.
    pub balloon: BalloonSetting,
    /// Whether the guest runs (else it was paused by its user, and stays so).
    pub running: bool,
    /// The source host's name, for people.
    pub from: String,
    /// What it is related to by forks. It travels by itself ([`Request::Kin`](crate::message::Request::Kin)): a daemon
    /// that does not know it reads a machine as before.
    #[serde(skip)]
    pub kin: Option<Kin>,
    /// Where those of its pages are that are at memory hosts. It travels by itself, too
    /// ([`Request::Split`](crate::message::Request::Split)).
    #[serde(skip)]
    pub split: Option<SplitSpec>,
    /// Its user wants it in small pages, on whatever host it is. It travels by itself, too
    /// ([`Request::SmallPages`](crate::message::Request::SmallPages)).
    #[serde(skip)]
    pub small_pages: bool,
}

/// The memory hosts of a machine, and who its owner is to them: with this its next owner goes on.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SplitSpec {
    /// The guest's number there.
    pub guest: u128,
    /// What its owners alone know.
    pub key: u128,
    /// How many chunks its memory has.
    pub chunks: u32,
    /// The memory hosts, by the numbers that the map of missing pages has for them.
    pub hosts: Vec<SplitHost>,
    /// The most of its memory that may be on the host that runs it, bytes.
    pub here_bytes: u64,
    /// Pages that the guest does not use count, and are at memory hosts as others are.
    pub unused_counts: bool,
    /// The epoch of the source, at present.
    pub epoch: u64,
    /// The last that the source will ever use; those of the destination come after it.
    pub own_epoch: u64,
    /// All of it is to be brought together at the destination.
    pub merge: bool,
    /// How the parity of its pages lies, where there is some. It travels by itself, too
    /// ([`Request::SplitParity`](crate::message::Request::SplitParity)).
    #[serde(skip)]
    pub parity: Option<SplitParity>,
}

impl std::fmt::Debug for SplitSpec {
    /// Without the key.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SplitSpec").field("hosts", &self.hosts).field("epoch", &self.epoch).finish_non_exhaustive()
    }
}

/// A memory host of a machine, or two that have the same pages.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SplitHost {
    /// Where it listens.
    pub peer: String,
    /// What it lends, bytes; its mirror lends the same.
    pub bytes: u64,
    /// Where its mirror listens.
    pub mirror: Option<String>,
    /// Of it and of its mirror: who was the mirror of each when it was first asked, where that one has been replaced.
    pub once: [Option<String>; 2],
    /// It has nothing of the guest any more: its number is free.
    pub gone: bool,
}

/// How the parity of a machine's pages lies over its memory hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SplitParity {
    /// Of how many chunks, one after the other, a stripe is made.
    pub stripe: u32,
    /// Over how many memory hosts the stripes lie.
    pub hosts: u32,
    /// Their numbers: a bit for each. None is set where they are the first ones.
    pub over: u16,
    /// Which of the guest's it is, one after the other: the guest has other numbers at the memory hosts of each.
    pub turn: u32,
    /// What each of these lends for parity, bytes; it comes on top of what it lends for pages.
    pub bytes: u64,
}

/// What a machine is related to by forks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kin {
    /// Its family.
    pub family: String,
    /// The name of the machine that it was forked from.
    pub forked_from: Option<String>,
}

/// The most tickets that a machine takes along.
pub const MAX_TICKETS: usize = 16;

/// A machine's word that it was on a host, which may keep what its memory was then. The host draws the number at random
/// and gives it to the host that the machine goes to, which gets all of the machine's memory anyway: so nobody can show
/// it who has never had that memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ticket {
    /// The host's daemon, by its identity.
    pub host: u128,
    /// The number.
    pub number: u128,
}

impl Ticket {
    /// The tickets that a machine takes along when it leaves a host that may keep its memory (`own`) for another
    /// (`to`): each host's latest, and none of where it goes.
    #[must_use]
    pub fn along(given: &[Self], own: Option<Self>, to: u128) -> Vec<Self> {
        let stays = |ticket: &&Self| ticket.host != to && own.is_none_or(|own| ticket.host != own.host);
        let all: Vec<Self> = given.iter().filter(stays).copied().chain(own).collect();
        all[all.len().saturating_sub(MAX_TICKETS)..].to_vec()
    }
}

/// Machines that come together and share pages.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GangSpec {
    /// Its number, drawn at random by the source's daemon.
    pub id: u128,
    /// The trust group of all its members.
    pub group: String,
    /// The number of members.
    pub members: u16,
    /// RAM the host has given memory for, for all of them together, bytes: what they share counts once. It is what the
    /// destination must have room for.
    pub bytes: u64,
    /// What each member shares, in the members' order; none where that is not known.
    pub shared: Vec<SharedPages>,
}

/// How the pages lie that a machine shares with its gang.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedPages {
    /// How many there are.
    pub pages: u64,
    /// How many mappings of a process they take where they go: one for each run of pages whose bodies are neighbours as
    /// well, and one for what lies between two runs.
    pub mappings: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_takes_each_hosts_latest_ticket_along_and_none_of_where_it_goes() {
        let ticket = |host, number| Ticket { host, number };
        let given = [ticket(1, 10), ticket(2, 20), ticket(3, 30)];
        assert_eq!(Ticket::along(&given, Some(ticket(2, 21)), 3), [ticket(1, 10), ticket(2, 21)]);
        assert_eq!(Ticket::along(&given, None, 4), given);
        let many: Vec<_> = (0..100).map(|host| ticket(host, 0)).collect();
        let along = Ticket::along(&many, Some(ticket(200, 1)), 300);
        assert_eq!((along.len(), along[0], along[MAX_TICKETS - 1]), (MAX_TICKETS, ticket(85, 0), ticket(200, 1)));
    }
}
