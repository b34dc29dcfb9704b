//! Requests to a memory host and its replies, and what a store has after any requests.
#![no_main]

use libfuzzer_sys::fuzz_target;
use serde::Serialize;
use serde::de::DeserializeOwned;
use sterna_protocol::message::{PREFIX_BYTES, decode, decode_prefix, encode};
use sterna_protocol::pages::PageSet;
use sterna_protocol::store::{Claim, Holdings, MAX_STRIPE, StoreReply, StoreRequest};

const KEY: u64 = 7;
const CLAIM: Claim = Claim { guest: 1, key: 2, epoch: 3 };

fuzz_target!(|bytes: &[u8]| {
    whole::<StoreReply>(bytes);
    whole::<StoreRequest>(bytes);
    let mut holdings = Holdings::new(CLAIM, 3 << 20, 8);
    let mut parity = Holdings::of_parity(CLAIM, 3 << 20, 8, 2);
    for request in bytes.chunks_exact(128) {
        let (sets, body) = request.split_at(2 * PageSet::BYTES);
        let sets: Vec<PageSet> = sets.as_chunks().0.iter().map(PageSet::from_bytes).collect();
        // What follows the message in its part is padding.
        let Ok((request, _)) = postcard::take_from_bytes::<StoreRequest>(body) else { continue };
        match request {
            StoreRequest::Put { chunk, version, base } => {
                if let Ok(put) = holdings.may_put(chunk, version, base, sets[0], sets[1]) {
                    assert_eq!(put.after.pages().and(&sets[0].or(&sets[1])), sets[0].or(&sets[1]));
                    assert!(put.before.is_none_or(|before| before.pages().and(&sets[0]).is_empty()));
                    holdings.note(chunk, put.before.unwrap_or_default());
                    holdings.note(chunk, put.after);
                }
            }
            StoreRequest::Get { chunk, version, pages } => {
                if let Ok((full, zero)) = holdings.may_get(chunk, version, &PageSet::from_bytes(&pages)) {
                    assert_eq!(full.or(&zero), PageSet::from_bytes(&pages));
                }
            }
            StoreRequest::Release { chunk, version, pages } => {
                if let Some(left) = holdings.after_release(chunk, version, &PageSet::from_bytes(&pages)) {
                    holdings.note(chunk, left);
                }
            }
            StoreRequest::Open { claim, bytes, chunks } => {
                if holdings.may_open(&claim, bytes, chunks).is_ok() {
                    holdings.open(claim, bytes);
                }
            }
            StoreRequest::Inventory { first, most } => {
                let entries = holdings.inventory(first, most);
                assert!(entries.len() <= most as usize && entries.is_sorted_by_key(|entry| entry.chunk));
            }
            StoreRequest::OpenParity { stripe, .. } => {
                parity = Holdings::of_parity(CLAIM, 3 << 20, 8, stripe % (MAX_STRIPE + 1));
            }
            StoreRequest::Unfold { chunk, version } => {
                // What is not in it is put there; what is, is taken out.
                if let Ok(left) = parity.may_unfold(chunk, version, &sets[0], &sets[1]) {
                    parity.note(chunk, left);
                } else if let Ok(after) =
                    parity.may_fold(chunk, version, parity.held(chunk).map(|held| held.version), sets[0], sets[1])
                {
                    parity.note(chunk, after);
                }
            }
            StoreRequest::Sum { chunk, pages } => {
                if let Ok(sum) = parity.may_sum(chunk, &PageSet::from_bytes(&pages)) {
                    assert_eq!(sum.full.or(&sum.zero), PageSet::from_bytes(&pages));
                    let fits = |other, pages: &PageSet| other != chunk && pages.without(&sum.full).is_empty();
                    assert!(sum.others.iter().all(|(other, pages)| fits(*other, pages)));
                }
            }
            StoreRequest::Reset { .. } | StoreRequest::Reopen { .. } | StoreRequest::Prepare | StoreRequest::Close => {}
        }
        assert!(parity.used_bytes() <= parity.granted_bytes());
        assert!(holdings.used_bytes() <= holdings.granted_bytes());
        assert_eq!(holdings.used_bytes(), holdings.iter().map(|(_, held)| held.bytes()).sum::<u64>());
        assert!(holdings.iter().all(|(chunk, held)| chunk.0 < 8 && held.full.and(&held.zero).is_empty()));
    }
});

/// The message in `body`, with the checksum that fits it: the fuzzer is not to guess that.
fn whole<M: DeserializeOwned + Serialize + PartialEq + std::fmt::Debug>(body: &[u8]) {
    let Ok(message) = decode::<M>(body, twox_hash::XxHash3_64::oneshot_with_seed(KEY, body), KEY) else { return };
    let again = encode(&message, KEY).expect("what was understood can be said");
    let (prefix, again) = again.split_first_chunk::<PREFIX_BYTES>().expect("a message has a prefix");
    let (_, checksum) = decode_prefix(*prefix).expect("our own prefix");
    assert_eq!(decode::<M>(again, checksum, KEY).expect("our own message"), message);
}
