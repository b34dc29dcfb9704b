//! Bare requests: pages of 4 KiB asked of memory hosts as a pager asks for them, with the same protocol and the same
//! digests, on connections of their own, for no guest.
//!
//! This is the one module that uses the engine: what it measures is the protocol's other end and the way there, and
//! what is compared with it is measured from outside.

use std::time::{Duration, Instant};

use sterna_engine::store::client::{MemoryHost, StoreError};
use sterna_guest_programs::histogram::Histogram;
use sterna_guest_programs::random::Random;
use sterna_protocol::layout::{CHUNK_BYTES, CHUNK_PAGES, ChunkIndex};
use sterna_protocol::pages::PageSet;
use sterna_protocol::store::{Claim, most_bytes};
use sterna_sys::host::random_u128;
use sterna_sys::iovec::Outgoing;

use crate::error::{Error, Result};
use crate::lab::{Host, net};

/// What a memory host lends for the requests: a chunk, from which single pages are asked.
const CHUNKS: u32 = 1;
const CHUNK: ChunkIndex = ChunkIndex(0);
/// The version of the chunk.
const VERSION: u64 = 1;
/// The time between two requests: few enough to take nothing from the guest that is measured meanwhile.
const PERIOD: Duration = Duration::from_millis(5);

/// What a memory host must lend beside all else, bytes.
#[must_use]
pub fn lent_bytes() -> u64 {
    most_bytes(CHUNKS)
}

/// Memory hosts that have pages for bare requests. Dropped, it gives back what they lent.
pub struct Bare {
    /// The network namespace of the host that asks.
    namespace: String,
    claim: Claim,
    lenders: Vec<Lender>,
}

struct Lender {
    peer: String,
    host: MemoryHost,
}

impl Bare {
    /// Has each of these memory hosts keep pages, which are asked for from a host of the lab.
    ///
    /// # Errors
    /// [`Error::MemoryHost`].
    pub fn open(from: &Host, peers: &[String]) -> Result<Self> {
        let claim = Claim { guest: random_u128(), key: random_u128(), epoch: 1 };
        let mut bare = Self { namespace: from.namespace.clone(), claim, lenders: Vec::new() };
        let bodies = noise();
        for peer in peers {
            let mut host = bare.call(peer)?;
            let pages = (PageSet::first(CHUNK_PAGES), PageSet::EMPTY);
            let put = host.put(CHUNK, (VERSION, None), pages, &[Outgoing::from(bodies.as_slice())]);
            // Whatever became of it, what is lent is given back.
            bare.lenders.push(Lender { peer: peer.clone(), host });
            failed(peer, put)?;
        }
        Ok(bare)
    }

    /// Calls a memory host from where the pages are asked for.
    fn call(&self, peer: &str) -> Result<MemoryHost> {
        let session = (random_u128(), random_u128() as u64);
        net::inside(&self.namespace, || {
            failed(peer, MemoryHost::open(peer, None, session, self.claim, lent_bytes(), CHUNKS))
        })
    }

    /// Asks them in turn for single pages, for so long, one request at a time. Returns how long each took from the
    /// request until the page was there and was what its digest says, nanoseconds.
    ///
    /// # Errors
    /// [`Error::MemoryHost`].
    pub fn ask(&mut self, length: Duration) -> Result<Histogram> {
        let (mut random, mut took) = (Random::new(4), Histogram::default());
        let (begin, mut due) = (Instant::now(), Duration::ZERO);
        let mut turn = 0;
        while due < length && !self.lenders.is_empty() {
            std::thread::sleep(due.saturating_sub(begin.elapsed()));
            turn = (turn + 1) % self.lenders.len();
            let Lender { peer, host } = &mut self.lenders[turn];
            let page: PageSet = [random.below(CHUNK_PAGES) as u8].into_iter().collect();
            let asked = Instant::now();
            failed(peer, host.get(CHUNK, VERSION, &page))?;
            took.note(asked.elapsed().as_nanos() as u64);
            // After an answer that took long none is asked for at once.
            due = (due + PERIOD).max(begin.elapsed());
        }
        std::thread::sleep(length.saturating_sub(begin.elapsed()));
        Ok(took)
    }
}

impl Drop for Bare {
    fn drop(&mut self) {
        for Lender { peer, host } in std::mem::take(&mut self.lenders) {
            if host.close().is_err() {
                // Its connection may be of no use any more. What is not given back goes with the lab.
                let _ = self.call(&peer).map(MemoryHost::close);
            }
        }
    }
}

fn failed<T>(peer: &str, result: Result<T, StoreError>) -> Result<T> {
    result.map_err(|error| Error::MemoryHost { peer: peer.into(), reason: error.to_string() })
}

/// A chunk of what does not compress.
fn noise() -> Vec<u8> {
    let mut random = Random::new(5);
    (0..CHUNK_BYTES / 8).flat_map(|_| random.next_u64().to_le_bytes()).collect()
}
