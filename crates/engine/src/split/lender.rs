//! Hosts that lend memory to a guest, and how it names them.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use sterna_protocol::store::Claim;
use sterna_sys::host::random_u128;
use xxhash_rust::xxh3::xxh3_128;

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

/// What a host lends for the parity of pages that others have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parity {
    /// Of how many chunks, one after the other, a stripe is made.
    pub stripe: u32,
    /// Over how many memory hosts the stripes lie: those with the first numbers, more of them than a stripe has chunks.
    pub hosts: usize,
    /// How much it is asked for, bytes.
    pub bytes: u64,
    /// This is the parity's part of the host by itself.
    pub alone: bool,
}

impl Parity {
    /// Of stripes of so many chunks over so many memory hosts, in so many bytes of each.
    #[must_use]
    pub fn new((stripe, hosts): (u32, usize), bytes: u64) -> Self {
        Self { stripe, hosts, bytes, alone: false }
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
        if self.is_for_parity() {
            return guest ^ xxh3_128(format!("{}, parity", self.peer).as_bytes());
        }
        let name = match self.once[0].as_ref().or(self.mirror.as_ref()) {
            Some(mirror) => xxh3_128(format!("{} {mirror}", self.peer).as_bytes()),
            None => xxh3_128(self.peer.as_bytes()),
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
        1 + usize::from(self.mirror.is_some() || self.parity.is_some_and(|parity| !parity.alone))
    }

    fn is_for_parity(&self) -> bool {
        self.parity.is_some_and(|parity| parity.alone)
    }

    /// The one of this place among them.
    pub(super) fn member(&self, which: usize) -> Self {
        match (&self.mirror, self.parity) {
            (None, Some(parity)) if which > 0 => {
                Self { parity: Some(Parity { alone: true, ..parity }), bytes: parity.bytes, ..self.clone() }
            }
            (None, Some(parity)) if !parity.alone => Self { parity: None, ..self.clone() },
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
        match self.parity.filter(|parity| parity.alone) {
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
