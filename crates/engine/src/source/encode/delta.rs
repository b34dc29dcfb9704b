//! Deltas: pages as differences to what was last sent of them, which a bounded cache keeps.
//!
//! **What is kept.** A page enters the cache when it is sent for the second time. Its first sending does not show that
//! it will be written again: the first round sends all of the guest's memory, which would push everything else out.
//! Where the cache is full, a page takes the place of one that was not sent in this round or the last; where there is
//! no such page, it stays out. So a working set larger than the cache is hit in part. A cache that replaced the oldest
//! page would replace each page just before its turn comes, and hit nothing.
//!
//! **Why the destination can apply it.** A delta is made against exactly what the destination holds, because
//! - an entry is replaced whenever its page is sent, whatever way, and holds the very copy that was encoded;
//! - what was sent of a page in one round has arrived and is in place before the next round begins, and a chunk keeps
//!   its connection; a page goes once in a round;
//! - an entry is used only where [`SentTable`](crate::source::sent::SentTable) says that the destination holds content
//!   of the entry's digest. So a page is sent whole, and nobody has to tell the cache, where it was zeros or discarded
//!   in between, where it arrived *suspect*, or where it was sent past the cache;
//! - a frame that fails makes the migration fail, and the next one begins with nothing sent.
//!
//! If all that were wrong, the destination would find it: it checks every page's digest after decoding and before
//! placing.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use sterna_api::report::DeltaUse;
use sterna_protocol::layout::{CHUNK_PAGES, ChunkIndex, PAGE_BYTES};
use sterna_protocol::xbzrle::{self, Page};

/// The longest delta. A longer one is hardly shorter than the page, and costs the destination more: the page goes
/// whole.
const MOST_DELTA_BYTES: usize = PAGE_BYTES * 3 / 4;
/// How many neighbouring pages share a shard. A chunk's pages are spread over many shards: hot pages often lie
/// together, and threads that encode neighbouring chunks should not wait for each other.
const NEIGHBOURS: u64 = 16;
/// The most shards: many more than threads, so that two threads rarely want the same one.
const MAX_SHARDS: u64 = 64;
/// The fewest pages of a shard, where there is more than one.
const MIN_SHARD_PAGES: u64 = 64;
/// How many entries a search for one to replace looks at.
const LOOKED_AT: usize = 8;
/// The memory of an entry beside its page, for itself and its place in the index, bytes.
const ENTRY_BYTES: u64 = 64;

/// A page that is about to be sent.
#[derive(Debug, Clone, Copy)]
pub struct Sending<'a> {
    /// The round.
    pub round: u32,
    /// The page's chunk.
    pub chunk: ChunkIndex,
    /// The page within it.
    pub page: u8,
    /// The digest of the destination's content of it, where that is known.
    pub held: Option<u64>,
    /// The body that is sent.
    pub body: &'a Page,
    /// Its digest.
    pub digest: u64,
}

/// The cache of what was last sent of pages that are sent again and again.
#[derive(Debug)]
pub struct DeltaCache {
    shards: Vec<Mutex<Shard>>,
}

#[derive(Debug)]
struct Shard {
    capacity: usize,
    index: HashMap<u64, usize>,
    entries: Vec<Entry>,
    /// The place where the search for an entry to replace goes on.
    hand: usize,
    used: DeltaUse,
}

#[derive(Debug)]
struct Entry {
    page: u64,
    /// The round in which the page was last sent.
    round: u32,
    digest: u64,
    body: Box<Page>,
}

impl DeltaCache {
    /// An empty cache that will take at most this many bytes.
    #[must_use]
    pub fn new(bytes: u64) -> Self {
        let pages = bytes / (PAGE_BYTES as u64 + ENTRY_BYTES);
        let shards = (pages / MIN_SHARD_PAGES).clamp(1, MAX_SHARDS);
        let capacity = (pages / shards) as usize;
        Self { shards: (0..shards).map(|_| Mutex::new(Shard::new(capacity))).collect() }
    }

    /// Appends the page to a block of deltas, and keeps what is sent. Returns `false` and appends nothing where the
    /// page must go whole: the destination's content is not in the cache, or differs too much.
    pub fn encode(&self, sending: &Sending, block: &mut Vec<u8>) -> bool {
        let page = sending.chunk.index() as u64 * CHUNK_PAGES as u64 + u64::from(sending.page);
        let shard = &self.shards[(page / NEIGHBOURS % self.shards.len() as u64) as usize];
        shard.lock().unwrap_or_else(PoisonError::into_inner).encode(page, sending, block)
    }

    /// What the cache has done, and the memory it takes.
    #[must_use]
    pub fn used(&self) -> DeltaUse {
        let mut total = DeltaUse::default();
        for shard in &self.shards {
            let shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            total.cache_bytes += shard.entries.len() as u64 * (PAGE_BYTES as u64 + ENTRY_BYTES);
            total.hits += shard.used.hits;
            total.misses += shard.used.misses;
            total.overflows += shard.used.overflows;
            total.bytes += shard.used.bytes;
        }
        total
    }
}

impl Shard {
    fn new(capacity: usize) -> Self {
        let (index, entries) = (HashMap::new(), Vec::new());
        Self { capacity, index, entries, hand: 0, used: DeltaUse::default() }
    }

    fn encode(&mut self, page: u64, sending: &Sending, block: &mut Vec<u8>) -> bool {
        let Some(&at) = self.index.get(&page) else {
            // `held` is absent for a page that is sent for the first time: that is no miss, because no delta is
            // possible.
            if sending.held.is_some() {
                self.used.misses += 1;
                self.insert(page, sending);
            }
            return false;
        };
        let entry = &mut self.entries[at];
        let hit = sending.held == Some(entry.digest);
        let before = block.len();
        let encoded = hit && xbzrle::push(&entry.body, sending.body, block, MOST_DELTA_BYTES);
        *entry.body = *sending.body;
        (entry.digest, entry.round) = (sending.digest, sending.round);
        self.used.hits += u64::from(hit);
        self.used.misses += u64::from(!hit && sending.held.is_some());
        self.used.overflows += u64::from(hit && !encoded);
        self.used.bytes += (block.len() - before) as u64;
        encoded
    }

    fn insert(&mut self, page: u64, sending: &Sending) {
        let Sending { round, digest, body, .. } = *sending;
        if self.entries.len() < self.capacity {
            self.index.insert(page, self.entries.len());
            self.entries.push(Entry { page, round, digest, body: Box::new(*body) });
            return;
        }
        let Some(at) = self.replaceable(round) else { return };
        let entry = &mut self.entries[at];
        self.index.remove(&entry.page);
        self.index.insert(page, at);
        (entry.page, entry.round, entry.digest) = (page, round, digest);
        *entry.body = *body;
    }

    /// The least recently sent of the next few entries, unless it was sent in this round or the last.
    fn replaceable(&mut self, round: u32) -> Option<usize> {
        let entries = self.entries.len();
        let hand = self.hand;
        self.hand = (hand + LOOKED_AT) % entries.max(1);
        (0..LOOKED_AT.min(entries))
            .map(|step| (hand + step) % entries)
            .min_by_key(|at| self.entries[*at].round)
            .filter(|at| self.entries[*at].round.saturating_add(1) < round)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use sterna_protocol::frame::Digester;

    use super::*;

    const MIB: u64 = 1 << 20;

    /// Both ends of a page's way, without the link: what the source knows of the destination, and what the destination
    /// holds.
    struct Ends {
        cache: DeltaCache,
        round: u32,
        held: HashMap<u64, Option<u64>>,
        there: HashMap<u64, Page>,
        deltas: u64,
    }

    impl Ends {
        fn new(bytes: u64) -> Self {
            let cache = DeltaCache::new(bytes);
            Self { cache, round: 0, held: HashMap::new(), there: HashMap::new(), deltas: 0 }
        }

        fn send(&mut self, page: u64, body: &Page) {
            let (chunk, page_in_chunk) = (ChunkIndex((page / 256) as u32), (page % 256) as u8);
            let held = self.held.get(&page).copied().flatten();
            let digest = Digester::UNSEEDED.page(body);
            let sending = Sending { round: self.round, chunk, page: page_in_chunk, held, body, digest };
            let mut block = Vec::new();
            let there = self.there.entry(page).or_insert([0; PAGE_BYTES]);
            if self.cache.encode(&sending, &mut block) {
                self.deltas += 1;
                let mut rest = block.as_slice();
                assert!(block.len() <= MOST_DELTA_BYTES + 2);
                xbzrle::decode(there, xbzrle::take(&mut rest).unwrap()).unwrap();
                assert!(rest.is_empty());
            } else {
                assert!(block.is_empty());
                *there = *body;
            }
            self.held.insert(page, Some(digest));
        }

        /// Sends a page past the cache: zeros, or a discarded page.
        fn zero(&mut self, page: u64) {
            self.there.insert(page, [0; PAGE_BYTES]);
            self.held.insert(page, None);
        }

        /// Sends a body that arrives as unknown content.
        fn suspect(&mut self, page: u64, body: &Page) {
            self.there.insert(page, *body);
            self.held.insert(page, None);
        }
    }

    #[derive(Debug, Clone)]
    enum Step {
        Write { page: u64, at: usize, byte: u8, length: usize },
        Send { page: u64 },
        SendEverything,
        Zero { page: u64 },
        Suspect { page: u64 },
        Round,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let page = 0u64..700;
        let step = prop_oneof![
            4 => (page.clone(), 0..PAGE_BYTES, any::<u8>(), 1usize..3500)
                .prop_map(|(page, at, byte, length)| Step::Write { page, at, byte, length }),
            4 => page.clone().prop_map(|page| Step::Send { page }),
            2 => Just(Step::SendEverything),
            1 => page.clone().prop_map(|page| Step::Zero { page }),
            1 => page.prop_map(|page| Step::Suspect { page }),
            2 => Just(Step::Round),
        ];
        prop::collection::vec(step, 0..120)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn whatever_happens_in_between_the_destination_has_what_was_sent(steps in steps()) {
            let mut ends = Ends::new(MIB);
            let mut guest: HashMap<u64, Page> = HashMap::new();
            for step in steps {
                match step {
                    Step::Write { page, at, byte, length } => {
                        let body = guest.entry(page).or_insert([1; PAGE_BYTES]);
                        body[at..(at + length).min(PAGE_BYTES)].fill(byte);
                    }
                    Step::Send { page } => {
                        let body = *guest.entry(page).or_insert([1; PAGE_BYTES]);
                        ends.send(page, &body);
                        prop_assert!(ends.there[&page] == body);
                    }
                    Step::SendEverything => {
                        ends.round += 1;
                        for (page, body) in &guest {
                            ends.send(*page, body);
                            prop_assert!(ends.there[page] == *body);
                        }
                    }
                    Step::Zero { page } => {
                        guest.insert(page, [0; PAGE_BYTES]);
                        ends.zero(page);
                    }
                    Step::Suspect { page } => {
                        let body = guest.entry(page).or_insert([1; PAGE_BYTES]);
                        ends.suspect(page, body);
                        body[17] ^= 0x55;
                    }
                    Step::Round => ends.round += 1,
                }
            }
            prop_assert!(ends.cache.used().cache_bytes <= MIB);
        }
    }

    fn page(byte: u8) -> Page {
        let mut page = [byte; PAGE_BYTES];
        page[0] = 1;
        page
    }

    #[test]
    fn a_page_goes_as_a_difference_from_its_third_sending_on() {
        let mut ends = Ends::new(MIB);
        let mut body = page(7);
        let mut deltas = Vec::new();
        for round in 0..5 {
            ends.round = round;
            body[100] = round as u8;
            ends.send(3, &body);
            deltas.push(ends.deltas);
        }
        assert_eq!(deltas, [0, 0, 1, 2, 3]);
        let used = ends.cache.used();
        assert_eq!((used.hits, used.misses, used.overflows), (3, 1, 0));
        assert_eq!(used.bytes, 3 * (2 + 1 + 1 + 1));
    }

    #[test]
    fn a_page_that_differs_too_much_goes_whole_and_is_kept_all_the_same() {
        let mut ends = Ends::new(MIB);
        for (round, byte) in [(0, 1), (1, 2), (2, 3), (3, 3)] {
            ends.round = round;
            ends.send(3, &page(byte));
        }
        let used = ends.cache.used();
        assert_eq!((used.hits, used.misses, used.overflows, ends.deltas), (2, 1, 1, 1));
    }

    #[test]
    fn a_working_set_of_twice_the_cache_is_hit_in_part() {
        let mut ends = Ends::new(4 * MIB);
        for round in 0..10 {
            ends.round = round;
            (0..2048).for_each(|at| ends.send(at, &page(round as u8 % 2)));
        }
        let used = ends.cache.used();
        assert!(used.cache_bytes <= 4 * MIB && used.cache_bytes > 3 * MIB);
        let rate = used.hits as f64 / (used.hits + used.misses) as f64;
        assert!((0.35..0.5).contains(&rate), "the cache holds half of it: {rate}");
    }

    #[test]
    fn pages_that_cooled_down_make_room() {
        let mut ends = Ends::new(MIB);
        let mut rounds = |pages: std::ops::Range<u64>| {
            let before = ends.cache.used().hits;
            for _ in 0..6 {
                ends.round += 1;
                pages.clone().for_each(|at| ends.send(at, &page(ends.round as u8)));
            }
            ends.cache.used().hits - before
        };
        let (first, second) = (rounds(0..200), rounds(1000..1200));
        assert!(first >= 200 * 4 && second >= 200 * 2, "{first} and {second} hits");
    }
}
