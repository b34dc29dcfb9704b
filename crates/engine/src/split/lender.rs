//! Hosts that lend memory to a guest, and how it names them.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use sterna_protocol::layout::ChunkIndex;
use sterna_protocol::store::Claim;
use sterna_sys::host::random_u128;
use twox_hash::XxHash3_128;

use crate::paging::whereabouts::Holder;
use crate::store::client::{MemoryHost, StoreError};
use crate::transport::credentials::Credentials;

/// The most memory hosts that have the same pages.
pub(super) const MEMBERS: usize = 2;

/// One of the memory hosts that have the pages of a number in the map of missing pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Member {
    /// The number.
    pub number: usize,
    /// 0, or 1 for the mirror, or for parity.
    pub which: usize,
}

impl Member {
    /// The most of a guest.
    pub const MOST: usize = Holder::MAX_HOSTS * MEMBERS;

    /// Its place among all.
    pub fn index(self) -> usize {
        self.number * MEMBERS + self.which
    }
}

/// What a host lends for the parity of pages that others have, and how that lies over them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parity {
    /// Of how many chunks, one after the other, a stripe is made.
    pub stripe: u32,
    /// Over how many memory hosts the stripes lie, more of them than a stripe has chunks.
    pub hosts: usize,
    /// Their numbers: a bit for each. None is set where they are the first ones.
    #[serde(default)]
    pub over: u16,
    /// Which of a guest's it is, one after the other: the guest has other numbers at the memory hosts of each.
    #[serde(default)]
    pub turn: u32,
    /// How much it is asked for, bytes.
    pub bytes: u64,
    /// What of the host this is.
    #[serde(default)]
    pub part: Part,
}

/// What of a host with parity: to a guest it is two.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Part {
    /// Both.
    #[default]
    Both,
    /// What it lends for pages, by itself.
    Pages,
    /// What it lends for parity, by itself.
    Parity,
}

impl Parity {
    /// Of stripes of so many chunks over the first so many memory hosts, in so many bytes of each.
    #[must_use]
    pub fn new((stripe, hosts): (u32, usize), bytes: u64) -> Self {
        Self { stripe, hosts, over: 0, turn: 0, bytes, part: Part::Both }
    }

    /// Whether it can lie so over memory hosts with numbers below this.
    #[must_use]
    pub fn fits(&self, count: usize) -> bool {
        let most = self.over.checked_ilog2().map_or(self.hosts, |last| last as usize + 1);
        let named = self.over == 0 || self.over.count_ones() as usize == self.hosts;
        named && (1..self.hosts).contains(&(self.stripe as usize)) && most <= count && most <= Holder::MAX_HOSTS
    }

    /// Whether this is the parity of the same pages, whatever is lent for it.
    #[must_use]
    pub fn is(&self, other: &Self) -> bool {
        let of = |one: &Self| (one.stripe, one.hosts, one.over, one.turn);
        of(self) == of(other)
    }

    /// The numbers of the memory hosts that it lies over.
    pub fn numbers(&self) -> impl Iterator<Item = usize> + use<> {
        let (over, hosts) = (self.over, self.hosts);
        (0..Holder::MAX_HOSTS).filter(move |number| if over == 0 { *number < hosts } else { over >> number & 1 == 1 })
    }

    /// What the guest's number at a part of a host follows from.
    fn name_at(&self, peer: &str) -> String {
        match (self.part, self.turn) {
            (Part::Parity, 0) => format!("{peer}, parity"),
            (_, 0) => peer.to_owned(),
            (Part::Parity, turn) => format!("{peer}, parity {turn}"),
            (_, turn) => format!("{peer}, pages {turn}"),
        }
    }

    fn number_at(&self, place: usize) -> usize {
        self.numbers().nth(place % self.hosts.max(1)).unwrap_or_default()
    }

    /// The number of the memory host that a chunk is at.
    pub(super) fn host_of(&self, chunk: ChunkIndex) -> usize {
        let (stripe, place) = (chunk.index() / self.stripe as usize, chunk.index() % self.stripe as usize);
        self.number_at(stripe + 1 + place)
    }

    /// The memory host that has the parity of a chunk.
    pub(super) fn parity_of(&self, chunk: ChunkIndex) -> Member {
        Member { number: self.number_at(chunk.index() / self.stripe as usize), which: 1 }
    }

    /// The other chunks of a chunk's stripe, where the guest has so many.
    pub(super) fn beside(&self, chunk: ChunkIndex, chunks: usize) -> impl Iterator<Item = ChunkIndex> + use<> {
        let stripe = self.stripe as usize;
        let first = chunk.index() / stripe * stripe;
        let last = (first + stripe).min(chunks);
        (first..last).map(|index| ChunkIndex(index as u32)).filter(move |other| *other != chunk)
    }
}

/// A host that lends memory to a guest, or two that lend the same and have the same pages.
#[derive(Debug, Clone)]
pub struct Lender {
    /// Where it listens.
    pub peer: String,
    /// Where its mirror listens, which has each page as well.
    pub mirror: Option<String>,
    /// What it has of the parity of other hosts' pages. All of a guest have some, or none has.
    pub parity: Option<Parity>,
    /// Of it and of its mirror: who was the mirror of each when it was first asked, where that one has been replaced
    /// since. The guest has the same number there still.
    pub once: [Option<String>; MEMBERS],
    /// Who this host is to it.
    pub credentials: Option<Arc<Credentials>>,
    /// How much each is asked for, bytes.
    pub bytes: u64,
    /// It is given nothing more, and what it has is to leave it; one that has nothing is not asked anything.
    pub leaving: bool,
}

impl Lender {
    /// The number of a guest at it: another one for each memory host, and for each that it was first the mirror of. A
    /// person may name one host twice, in different ways; then it keeps two guests, and what it has under one name is
    /// not taken for a rest of what it was given under the other.
    #[must_use]
    pub fn number(&self, guest: u128) -> u128 {
        if let Some(parity) = self.parity {
            return guest ^ XxHash3_128::oneshot(parity.name_at(&self.peer).as_bytes());
        }
        let name = match self.once[0].as_ref().or(self.mirror.as_ref()) {
            Some(mirror) => XxHash3_128::oneshot(format!("{} {mirror}", self.peer).as_bytes()),
            None => XxHash3_128::oneshot(self.peer.as_bytes()),
        };
        guest ^ name
    }

    /// The hosts that this is, one by one: of each its mirror is the other. One with parity is two to a guest, one for
    /// pages and one for parity.
    #[must_use]
    pub fn members(&self) -> Vec<Self> {
        (0..self.count()).map(|which| self.member(which)).collect()
    }

    /// How many hosts it is.
    pub(super) fn count(&self) -> usize {
        1 + usize::from(self.mirror.is_some() || self.parity.is_some_and(|parity| parity.part == Part::Both))
    }

    /// The one of this place among them.
    pub(super) fn member(&self, which: usize) -> Self {
        match (&self.mirror, self.parity) {
            (None, Some(parity)) if parity.part == Part::Both => {
                let (part, bytes) = if which > 0 { (Part::Parity, parity.bytes) } else { (Part::Pages, self.bytes) };
                Self { parity: Some(Parity { part, ..parity }), bytes, ..self.clone() }
            }
            (Some(mirror), _) if which > 0 => {
                let [first, second] = self.once.clone();
                Self { peer: mirror.clone(), mirror: Some(self.peer.clone()), once: [second, first], ..self.clone() }
            }
            _ => self.clone(),
        }
    }

    /// Calls it, not its mirror, for a guest of so many chunks, and asks for what it is to lend.
    pub(super) fn borrow(&self, claim: Claim, chunks: u32) -> Result<MemoryHost, StoreError> {
        let (claim, credentials) = (self.claim(claim), self.credentials.as_deref());
        match self.parity.filter(|parity| parity.part == Part::Parity) {
            Some(Parity { stripe, .. }) => {
                MemoryHost::open_parity(&self.peer, credentials, session(), claim, self.bytes, (chunks, stripe))
            }
            None => MemoryHost::open(&self.peer, credentials, session(), claim, self.bytes, chunks),
        }
    }

    /// Calls it, not its mirror, where it lends already.
    pub(super) fn reach(&self, claim: Claim, chunks: u32) -> Result<MemoryHost, StoreError> {
        let claim = self.claim(claim);
        MemoryHost::reopen(&self.peer, self.credentials.as_deref(), session(), claim, self.bytes, chunks)
    }

    fn claim(&self, claim: Claim) -> Claim {
        Claim { guest: self.number(claim.guest), ..claim }
    }
}

/// A connection's own number, and the seed of its checksums. Who asks is told by the claim.
fn session() -> (u128, u64) {
    (random_u128(), random_u128() as u64)
}
