//! The names of bodies: digests of their content under a key that no guest knows.

use sterna_protocol::layout::PAGE_BYTES;
use sterna_sys::host::random_u128;

/// A body's name. Nobody without the key can look for two bodies with one name, and by accident it takes 2^64 bodies.
pub type Name = [u8; 16];

/// The key of a gang's names.
pub type Key = [u8; 32];

/// A key drawn at random.
#[must_use]
pub fn random_key() -> Key {
    let mut key = [0; 32];
    for half in key.as_chunks_mut::<16>().0 {
        *half = random_u128().to_ne_bytes();
    }
    key
}

/// The name of a body under this key.
#[must_use]
pub fn name(key: &Key, body: &[u8; PAGE_BYTES]) -> Name {
    *blake3::keyed_hash(key, body).as_bytes().first_chunk().expect("it has 32 bytes")
}
