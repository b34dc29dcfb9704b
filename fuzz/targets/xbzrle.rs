//! Differences between two states of a page, alone and in a block.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sterna_protocol::layout::PAGE_BYTES;
use sterna_protocol::xbzrle::{decode, encode, push, take};

fuzz_target!(|bytes: &[u8]| {
    let old = [0x5a; PAGE_BYTES];
    let mut new = old;
    if decode(&mut new, bytes).is_ok() {
        // Whatever is understood can be said, and means the same.
        let (mut delta, mut again) = (Vec::new(), old);
        assert!(encode(&old, &new, &mut delta, usize::MAX));
        assert_eq!(decode(&mut again, &delta), Ok(()));
        assert!(again == new);
    }
    // The input as a page: what travels is that page, or nothing where it would be longer than one.
    let mut new = old;
    let length = bytes.len().min(PAGE_BYTES);
    new[..length].copy_from_slice(&bytes[..length]);
    let mut block = Vec::new();
    if push(&old, &new, &mut block, PAGE_BYTES) {
        let (mut rest, mut again) = (block.as_slice(), old);
        decode(&mut again, take(&mut rest).expect("our own block")).expect("our own difference");
        assert!(again == new && rest.is_empty());
    }
    let mut rest = bytes;
    while let Ok(delta) = take(&mut rest) {
        assert!(delta.len() <= PAGE_BYTES);
        let _ = decode(&mut new, delta);
    }
});
