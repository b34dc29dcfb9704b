//! Content fake dirty pages: the guest wrote what was there already (silent stores). They are found by a hash of what
//! was last sent.
//!
//! D-Track's HBFDP keeps a SHA-1 of each page, which its sending thread computes. Here the threads that encode compute
//! the slow hashes. XXH3 costs nothing more: it is the digest that travels with every body anyway, and
//! [`SentTable`](crate::source::sent::SentTable) has it. This is the table for the other hashes.
//!
//! **Collisions.** A page left out wrongly is lost to the destination. By accident that takes 2^128 tries with the
//! hashes of this table (2^64 with XXH3: with 10^9 pages compared, one chance in 10^10). Somebody who *makes*
//! collisions, which is easy for MD5 and XXH3, can harm only his own guest: every guest has a table of its own. But he
//! may be one user of the guest who harms the others. So XXH3, the default, has a seed that no guest knows
//! ([`Digester`](sterna_protocol::frame::Digester)). The other hashes are unseeded, for comparison with D-Track.
//! `--verify` compares by seeded XXH3, too, and so finds their collisions.

use std::sync::{Mutex, MutexGuard, PoisonError};

use sha1::Digest;
use sterna_api::options::ContentHash;
use sterna_protocol::layout::{CHUNK_PAGES, ChunkIndex, Layout, PAGE_BYTES};

/// The bytes of a hash that are kept: all of MD5's and MurmurHash3's, the first of SHA-1's 20 and BLAKE3's 32. A
/// collision of 128 bits on purpose harms the guest that makes it, and against accidents 128 bits are as good as 256.
/// So the table takes 4 KiB per chunk.
pub const HASH_BYTES: usize = 16;

/// The bytes of a hash that are kept.
type Hash = [u8; HASH_BYTES];

/// Hashes of the pages of a chunk, as they were last sent.
type Hashes = Box<[Hash; CHUNK_PAGES]>;

/// The way to find pages whose content is what was last sent.
#[derive(Debug)]
pub enum Content {
    /// No search, except where tracking is coarser than a page: there by the digest.
    Off,
    /// By the digest that travels with each body.
    Digest,
    /// By hashes of the table's own.
    Hashes(ContentTable),
}

impl Content {
    /// The search that the options ask for.
    #[must_use]
    pub fn new(hash: ContentHash, layout: &Layout) -> Self {
        match (hash, ContentTable::new(hash, layout)) {
            (ContentHash::Off, _) => Self::Off,
            (_, None) => Self::Digest,
            (_, Some(table)) => Self::Hashes(table),
        }
    }

    /// The size of what is kept of each page, bytes. The digest is always kept, because it says whether a page was sent
    /// at all.
    #[must_use]
    pub fn bytes_per_page(&self) -> u32 {
        let hash = if matches!(self, Self::Hashes(_)) { HASH_BYTES } else { 0 };
        (size_of::<u64>() + hash) as u32
    }
}

/// Hashes of what was last sent of every page: 16 bytes per page, for every chunk of which a body was ever sent (4 MiB
/// per GiB).
///
/// The table says what the content was, not whether it arrived: [`SentTable`](super::sent::SentTable), which is asked
/// first, says whether the destination holds it.
#[derive(Debug)]
pub struct ContentTable {
    hash: fn(&[u8; PAGE_BYTES]) -> Hash,
    /// One thread alone encodes a chunk, so nobody ever waits for its lock.
    chunks: Vec<Mutex<Option<Hashes>>>,
}

impl ContentTable {
    /// A table for this hash; `None` where none is needed: for XXH3, and without a search for silent stores.
    #[must_use]
    pub fn new(hash: ContentHash, layout: &Layout) -> Option<Self> {
        let hash = function(hash)?;
        Some(Self { hash, chunks: (0..layout.chunks()).map(|_| Mutex::new(None)).collect() })
    }

    /// The hashes of a chunk, with which its pages are compared.
    ///
    /// # Panics
    /// Where the chunk is not in the layout the table was made for.
    #[must_use]
    pub fn chunk(&self, chunk: ChunkIndex) -> ChunkHashes<'_> {
        let hashes = self.chunks[chunk.index()].lock().unwrap_or_else(PoisonError::into_inner);
        ChunkHashes { hash: self.hash, hashes }
    }
}

/// The hashes of one chunk's pages.
pub struct ChunkHashes<'a> {
    hash: fn(&[u8; PAGE_BYTES]) -> Hash,
    hashes: MutexGuard<'a, Option<Hashes>>,
}

impl ChunkHashes<'_> {
    /// Notes this content. Returns whether the page had it before.
    pub fn replace(&mut self, page: u8, body: &[u8; PAGE_BYTES]) -> bool {
        let hash = (self.hash)(body);
        let hashes = self.hashes.get_or_insert_with(|| Box::new([[0; HASH_BYTES]; CHUNK_PAGES]));
        std::mem::replace(&mut hashes[usize::from(page)], hash) == hash
    }
}

/// The function for a hash; `None` where no table is needed.
fn function(hash: ContentHash) -> Option<fn(&[u8; PAGE_BYTES]) -> Hash> {
    match hash {
        ContentHash::Off | ContentHash::Xxh3 => None,
        ContentHash::Sha1 => Some(|body| first(&sha1::Sha1::digest(body))),
        ContentHash::Md5 => Some(|body| md5::Md5::digest(body).into()),
        ContentHash::Murmur3 => Some(|body| {
            let [low, high] = murmurs::murmur3_x64_128(body, 0);
            (u128::from(high) << 64 | u128::from(low)).to_le_bytes()
        }),
        ContentHash::Blake3 => Some(|body| first(blake3::hash(body).as_bytes())),
    }
}

/// The bytes of a longer hash that are kept.
fn first(hash: &[u8]) -> Hash {
    std::array::from_fn(|at| hash[at])
}

#[cfg(test)]
mod tests {
    use sterna_protocol::spec::BlockSpec;

    use super::*;

    const SLOW: [ContentHash; 4] = [ContentHash::Sha1, ContentHash::Md5, ContentHash::Murmur3, ContentHash::Blake3];

    fn layout() -> Layout {
        Layout::new(&[BlockSpec { id: "ram".into(), bytes: 2 << 20, page_bytes: 4096, path: String::new() }]).unwrap()
    }

    #[test]
    fn each_hash_is_the_one_it_is_called() {
        let hex = |hash| {
            let hash: Hash = function(hash).unwrap()(&std::array::from_fn(|at| (at % 251) as u8));
            hash.iter().map(|byte| format!("{byte:02x}")).collect::<String>()
        };
        // The input is that of BLAKE3's own test vectors; the other hashes were computed by other programs.
        assert_eq!(hex(ContentHash::Sha1), "92ca8f2b4163e64a1b53e0fde263ad56");
        assert_eq!(hex(ContentHash::Md5), "a0c16616c91907bd14e999986cf822d5");
        assert_eq!(hex(ContentHash::Blake3), "015094013f57a5277b59d8475c050104");
        assert_eq!(hex(ContentHash::Murmur3), "bf418a7d7fa327f75fe46a0a61c18de6");
    }

    #[test]
    fn a_page_is_unchanged_exactly_where_its_content_is_what_it_was() {
        for hash in SLOW {
            let table = ContentTable::new(hash, &layout()).unwrap();
            let mut body = [3; PAGE_BYTES];
            let mut hashes = table.chunk(ChunkIndex(1));
            assert!(!hashes.replace(7, &body), "{hash:?}: nothing is known at first");
            assert!(hashes.replace(7, &body));
            assert!(!hashes.replace(8, &body), "{hash:?}: another page");
            body[PAGE_BYTES - 1] ^= 1;
            assert!(!hashes.replace(7, &body));
            assert!(hashes.replace(7, &body));
            drop(hashes);
            assert!(table.chunk(ChunkIndex(1)).replace(7, &body));
            assert!(!table.chunk(ChunkIndex(0)).replace(7, &body), "{hash:?}: another chunk");
        }
    }

    #[test]
    fn what_is_never_sent_has_no_hashes_and_the_quick_hash_no_table() {
        let table = ContentTable::new(ContentHash::Sha1, &layout()).unwrap();
        table.chunk(ChunkIndex(0)).replace(0, &[1; PAGE_BYTES]);
        let kept: Vec<bool> = table.chunks.iter().map(|chunk| chunk.lock().unwrap().is_some()).collect();
        assert_eq!(kept, [true, false]);
        assert!(ContentTable::new(ContentHash::Xxh3, &layout()).is_none());
        assert!(ContentTable::new(ContentHash::Off, &layout()).is_none());
    }
}
