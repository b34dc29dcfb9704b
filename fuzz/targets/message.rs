//! Requests and replies on the control connection, and the RAM layout that a proposal describes.
#![no_main]

use libfuzzer_sys::fuzz_target;
use serde::Serialize;
use serde::de::DeserializeOwned;
use sterna_protocol::layout::{ChunkIndex, Layout};
use sterna_protocol::message::{PREFIX_BYTES, Reply, Request, decode, decode_prefix, encode};

const KEY: u64 = 7;

fuzz_target!(|bytes: &[u8]| {
    if let Some((prefix, _)) = bytes.split_first_chunk::<PREFIX_BYTES>() {
        let _ = decode_prefix(*prefix);
    }
    if let Some(Request::Propose { spec, .. }) = whole::<Request>(bytes)
        && let Ok(layout) = Layout::new(&spec.blocks)
    {
        for chunk in [0, layout.chunks() - 1, layout.chunks(), u32::MAX] {
            let place = layout.place(ChunkIndex(chunk));
            assert_eq!(place.is_some(), chunk < layout.chunks());
        }
    }
    whole::<Reply>(bytes);
});

/// The message in `body`, with the checksum that fits it: the fuzzer is not to guess that.
fn whole<M: DeserializeOwned + Serialize + PartialEq + std::fmt::Debug>(body: &[u8]) -> Option<M> {
    let message: M = decode(body, checksum(body), KEY).ok()?;
    let again = encode(&message, KEY).expect("what was understood can be said");
    let (prefix, again) = again.split_first_chunk::<PREFIX_BYTES>().expect("a message has a prefix");
    let (length, checksum) = decode_prefix(*prefix).expect("our own prefix");
    assert_eq!(length, again.len());
    assert_eq!(decode::<M>(again, checksum, KEY).expect("our own message"), message);
    Some(message)
}

fn checksum(body: &[u8]) -> u64 {
    twox_hash::XxHash3_64::oneshot_with_seed(KEY, body)
}
