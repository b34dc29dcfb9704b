//! Differences between two states of a page: runs of bytes that stayed, and the bytes that did not.
//!
//! ```text
//!   delta := ( stayed: LEB128 · changed: LEB128 · `changed` bytes )*   from the page's first byte on; the rest stayed
//! ```
//!
//! The idea is XBZRLE's (Svärd et al., VEE 2011; QEMU's `docs/devel/migration/`), the code is our own. There is one way
//! to write a run: lengths take as few bytes as possible; `changed` is at least 1, and so is `stayed`, except in the
//! first run. So no run is empty, nothing follows the last change, and the empty delta is a page that did not change.

use crate::layout::PAGE_BYTES;

/// The most bytes of a delta: a longer one is worth less than the page.
pub const MAX_DELTA_BYTES: usize = PAGE_BYTES;
/// The least number of bytes between two changes that are written as stayed. Fewer are sent as changed, because the two
/// lengths would take as many bytes.
const MIN_STAYED: usize = 3;

/// The bytes of a page.
pub type Page = [u8; PAGE_BYTES];

/// A delta that is invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DeltaError {
    /// It ends in the middle of a run.
    #[error("a difference is cut short")]
    Short,
    /// A length is not written in the one valid way.
    #[error("a difference has an invalid length")]
    Length,
    /// It changes bytes beyond the page.
    #[error("a difference reaches beyond its page")]
    Beyond,
}

/// Appends to `delta` what turns `old` into `new`. `false`, and nothing is appended, where that takes more than `limit`
/// bytes.
pub fn encode(old: &Page, new: &Page, delta: &mut Vec<u8>, limit: usize) -> bool {
    let before = delta.len();
    let (mut at, mut changed) = (0, next_change(old, new, 0));
    while changed < PAGE_BYTES {
        let end = end_of_change(old, new, changed);
        push_length(delta, changed - at);
        push_length(delta, end - changed);
        delta.extend_from_slice(&new[changed..end]);
        if delta.len() - before > limit {
            delta.truncate(before);
            return false;
        }
        (at, changed) = (end, next_change(old, new, end));
    }
    true
}

/// Changes `page` as `delta` says.
///
/// # Errors
/// [`DeltaError`]; the page may be changed in part.
pub fn decode(page: &mut Page, mut delta: &[u8]) -> Result<(), DeltaError> {
    let mut rest = page.as_mut_slice();
    let mut first = true;
    while !delta.is_empty() {
        let stayed = take_length(&mut delta)?;
        let changed = take_length(&mut delta)?;
        if changed == 0 || (stayed == 0 && !first) {
            return Err(DeltaError::Length);
        }
        let (bytes, after) = delta.split_at_checked(changed).ok_or(DeltaError::Short)?;
        let (_, from) = rest.split_at_mut_checked(stayed).ok_or(DeltaError::Beyond)?;
        let (to, onward) = from.split_at_mut_checked(changed).ok_or(DeltaError::Beyond)?;
        to.copy_from_slice(bytes);
        (rest, delta, first) = (onward, after, false);
    }
    Ok(())
}

/// Appends a page's delta to a block of them: its length in two bytes, and itself. `false`, and nothing is appended,
/// where the delta takes more than `limit` bytes or more than [`MAX_DELTA_BYTES`].
pub fn push(old: &Page, new: &Page, block: &mut Vec<u8>, limit: usize) -> bool {
    let before = block.len();
    block.extend_from_slice(&[0; 2]);
    if !encode(old, new, block, limit.min(MAX_DELTA_BYTES)) {
        block.truncate(before);
        return false;
    }
    let length = (block.len() - before - 2) as u16;
    block[before..before + 2].copy_from_slice(&length.to_le_bytes());
    true
}

/// Takes the next page's delta off a block of them.
///
/// # Errors
/// [`DeltaError::Short`], [`DeltaError::Length`].
pub fn take<'b>(block: &mut &'b [u8]) -> Result<&'b [u8], DeltaError> {
    let (length, rest) = block.split_first_chunk().ok_or(DeltaError::Short)?;
    let length = usize::from(u16::from_le_bytes(*length));
    if length > MAX_DELTA_BYTES {
        return Err(DeltaError::Length);
    }
    let (delta, rest) = rest.split_at_checked(length).ok_or(DeltaError::Short)?;
    *block = rest;
    Ok(delta)
}

/// The first byte from `at` on that differs; the page's length where none does.
fn next_change(old: &Page, new: &Page, mut at: usize) -> usize {
    // Most of the page stayed: a cache line at a time, which the compiler turns into vector instructions.
    while let (Some(a), Some(b)) = (old[at..].first_chunk::<64>(), new[at..].first_chunk::<64>())
        && a == b
    {
        at += 64;
    }
    while at < PAGE_BYTES {
        match difference(old, new, at) {
            Some(0) => at += 8,
            Some(bits) => return at + bits.trailing_zeros() as usize / 8,
            None if old[at] == new[at] => at += 1,
            None => return at,
        }
    }
    PAGE_BYTES
}

/// The end of the change that begins at `at`: at least [`MIN_STAYED`] bytes behind it stayed, or all of them.
fn end_of_change(old: &Page, new: &Page, mut at: usize) -> usize {
    loop {
        at = next_same(old, new, at + 1);
        let change = if at < PAGE_BYTES { next_change(old, new, at) } else { PAGE_BYTES };
        if change == PAGE_BYTES || change - at >= MIN_STAYED {
            return at;
        }
        at = change;
    }
}

/// The first byte from `at` on that does not differ; the page's length where all do.
fn next_same(old: &Page, new: &Page, mut at: usize) -> usize {
    const LOW: u64 = u64::from_ne_bytes([0x01; 8]);
    const HIGH: u64 = u64::from_ne_bytes([0x80; 8]);
    while at < PAGE_BYTES {
        match difference(old, new, at) {
            // The lowest byte that is 0 has the lowest bit that is left; bits above it may be wrong, and do not matter.
            Some(bits) => match bits.wrapping_sub(LOW) & !bits & HIGH {
                0 => at += 8,
                zeros => return at + zeros.trailing_zeros() as usize / 8,
            },
            None if old[at] == new[at] => return at,
            None => at += 1,
        }
    }
    PAGE_BYTES
}

/// The bits in which the 8 bytes from `at` on differ, the first byte lowest; `None` where the page ends before.
fn difference(old: &Page, new: &Page, at: usize) -> Option<u64> {
    let (old, new) = (old[at..].first_chunk()?, new[at..].first_chunk()?);
    Some(u64::from_le_bytes(*old) ^ u64::from_le_bytes(*new))
}

fn push_length(delta: &mut Vec<u8>, length: usize) {
    if length >= 0x80 {
        delta.push(length as u8 | 0x80);
        delta.push((length >> 7) as u8);
    } else {
        delta.push(length as u8);
    }
}

/// Takes a length of one or two bytes, which is enough for any page.
fn take_length(delta: &mut &[u8]) -> Result<usize, DeltaError> {
    let (&low, rest) = delta.split_first().ok_or(DeltaError::Short)?;
    *delta = rest;
    if low < 0x80 {
        return Ok(usize::from(low));
    }
    let (&high, rest) = delta.split_first().ok_or(DeltaError::Short)?;
    *delta = rest;
    if !(1..0x80).contains(&high) {
        return Err(DeltaError::Length);
    }
    Ok(usize::from(low & 0x7f) | usize::from(high) << 7)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn delta(old: &Page, new: &Page) -> Vec<u8> {
        let mut delta = Vec::new();
        assert!(encode(old, new, &mut delta, usize::MAX));
        delta
    }

    fn page(bytes: &[u8]) -> Page {
        std::array::from_fn(|at| bytes[at % bytes.len()])
    }

    proptest! {
        #[test]
        fn what_changed_arrives(
            base in prop::collection::vec(any::<u8>(), 1..600),
            writes in prop::collection::vec((0..PAGE_BYTES, prop::collection::vec(any::<u8>(), 1..90)), 0..40),
        ) {
            let old = page(&base);
            let mut new = old;
            for (at, bytes) in writes {
                let end = (at + bytes.len()).min(PAGE_BYTES);
                new[at..end].copy_from_slice(&bytes[..end - at]);
            }
            let delta = delta(&old, &new);
            let mut page = old;
            prop_assert_eq!(decode(&mut page, &delta), Ok(()));
            prop_assert!(page == new);
            // Within its limit, and not one byte below it; a refusal leaves nothing behind.
            let mut out = vec![7];
            prop_assert!(encode(&old, &new, &mut out, delta.len()));
            prop_assert_eq!(&out[1..], &delta[..]);
            if !delta.is_empty() {
                let mut out = vec![7];
                prop_assert!(!encode(&old, &new, &mut out, delta.len() - 1));
                prop_assert_eq!(out, vec![7]);
            }
        }

        #[test]
        fn pages_that_have_nothing_in_common_arrive(
            old in prop::collection::vec(any::<u8>(), PAGE_BYTES),
            new in prop::collection::vec(any::<u8>(), PAGE_BYTES),
        ) {
            let (old, new) = (page(&old), page(&new));
            let delta = delta(&old, &new);
            let length = delta.len();
            prop_assert!(length <= PAGE_BYTES + 3, "no page grows by more than its first lengths: {length}");
            let mut page = old;
            prop_assert_eq!(decode(&mut page, &delta), Ok(()));
            prop_assert!(page == new);
        }

        #[test]
        fn garbage_never_panics_and_changes_only_what_it_says(garbage in prop::collection::vec(any::<u8>(), 0..6000)) {
            let mut page = [0; PAGE_BYTES];
            let _ = decode(&mut page, &garbage);
            prop_assert!(page.iter().filter(|byte| **byte != 0).count() <= garbage.len());
        }

        #[test]
        fn what_is_cut_short_is_refused_or_says_less(cut in 0usize..100) {
            let old = [0; PAGE_BYTES];
            let mut new = old;
            (0..20).for_each(|i| new[i * 200..i * 200 + 3].fill(9));
            let delta = delta(&old, &new);
            prop_assert_eq!(delta.len(), 20 * (2 + 3) + 19);
            let mut page = old;
            let result = decode(&mut page, &delta[..cut]);
            prop_assert!(result.is_err() || page != new);
        }

        #[test]
        fn a_block_gives_back_its_deltas(marks in prop::collection::vec((0..PAGE_BYTES, any::<u8>()), 0..20)) {
            let old = [3; PAGE_BYTES];
            let mut block = Vec::new();
            for (at, mark) in &marks {
                let mut new = old;
                new[*at] = *mark;
                prop_assert!(push(&old, &new, &mut block, 64));
            }
            let mut rest = block.as_slice();
            for (at, mark) in &marks {
                let mut page = old;
                prop_assert_eq!(decode(&mut page, take(&mut rest).unwrap()), Ok(()));
                prop_assert_eq!(page[*at], *mark);
            }
            prop_assert_eq!(rest, &[] as &[u8]);
            prop_assert_eq!(take(&mut rest), Err(DeltaError::Short));
        }
    }

    #[test]
    fn a_few_bytes_that_changed_are_a_few_bytes() {
        let old = page(b"what was there");
        assert!(delta(&old, &old).is_empty());
        let mut new = old;
        new[0] = b'W';
        new[4095] = b'!';
        new[1000..1004].copy_from_slice(b"WERE");
        assert_eq!(
            delta(&old, &new),
            [&[0, 1, b'W', 0x80 | 0x67, 7, 4], &b"WERE"[..], &[0x80 | 0x13, 24, 1, b'!']].concat()
        );
    }

    #[test]
    fn a_short_stretch_that_stayed_does_not_part_two_changes() {
        let old = [0; PAGE_BYTES];
        let mut new = old;
        (new[10], new[13], new[17]) = (1, 2, 3);
        assert_eq!(delta(&old, &new), [10, 4, 1, 0, 0, 2, 3, 1, 3]);
    }

    #[test]
    fn there_is_one_way_to_write_a_run() {
        let refused = |delta: &[u8], error| assert_eq!(decode(&mut [0; PAGE_BYTES], delta), Err(error), "{delta:?}");
        refused(&[0x80, 0x00, 1, 9], DeltaError::Length); // 0 in two bytes.
        refused(&[0x80, 0x80, 1, 1, 9], DeltaError::Length); // Three bytes.
        refused(&[5, 0], DeltaError::Length); // Nothing changed.
        refused(&[0, 1, 9, 0, 1, 9], DeltaError::Length); // Two runs that are one.
        refused(&[5], DeltaError::Short);
        refused(&[5, 2, 1], DeltaError::Short);
        refused(&[0x80 | 0x7f, 31, 2, 1, 1], DeltaError::Beyond); // From byte 4,095 on.
        refused(&[0x80, 32, 1, 1], DeltaError::Beyond);
        refused(&[0xff, 0x7f, 1, 1], DeltaError::Beyond);
        assert_eq!(decode(&mut [0; PAGE_BYTES], &[0x80 | 0x7f, 31, 1, 1]), Ok(()));
    }

    #[test]
    fn a_block_that_cannot_be_is_refused() {
        assert_eq!(take(&mut [5].as_slice()), Err(DeltaError::Short));
        assert_eq!(take(&mut [5, 0, 1, 2, 3, 4].as_slice()), Err(DeltaError::Short));
        assert_eq!(take(&mut [1, 16].as_slice()), Err(DeltaError::Length));
        let mut block = Vec::new();
        assert!(
            !push(&[0; PAGE_BYTES], &[1; PAGE_BYTES], &mut block, usize::MAX),
            "a delta longer than the page is none"
        );
        assert!(block.is_empty());
    }
}
