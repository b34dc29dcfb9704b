use std::collections::BTreeMap;
use std::path::Path;

use proptest::prelude::*;
use sterna_protocol::layout::PAGE_BYTES;
use sterna_protocol::store::{Claim, Held, most_bytes};

use super::*;

const CLAIM: Claim = Claim { guest: 7, key: 8, epoch: 1 };
const CHUNKS: u32 = 5;
const STRIPE: u32 = 2;

fn shelf(dir: &Path) -> Shelf {
    Shelf::make(dir, &CLAIM, most_bytes(CHUNKS), (CHUNKS, STRIPE)).unwrap()
}

/// What the next daemon finds.
fn restarted(dir: &Path) -> Shelf {
    let mut found: Vec<_> = Shelf::find(dir).unwrap().collect();
    assert_eq!(found.len(), 1);
    found.remove(0)
}

fn set(pages: &[u8]) -> PageSet {
    pages.iter().copied().collect()
}

/// A page's body, which is another one for each of its versions.
fn body(chunk: u32, page: u8, version: u64) -> [u8; PAGE_BYTES] {
    let mut body = [chunk as u8 + 1; PAGE_BYTES];
    body[usize::from(page)] = version as u8;
    body[PAGE_BYTES - 1] = !page;
    body
}

fn bodies(chunk: u32, pages: &PageSet, version: u64) -> Vec<u8> {
    pages.iter().flat_map(|page| body(chunk, page, version)).collect()
}

fn put(shelf: &Shelf, chunk: u32, version: u64, base: Option<u64>, pages: &[u8]) -> Result<Vec<u64>, Refusal> {
    let bodies = bodies(chunk, &set(pages), version);
    shelf.fold(1, (ChunkIndex(chunk), version, base), (set(pages), PageSet::EMPTY), &bodies, None)
}

fn allocated(shelf: &Shelf) -> u64 {
    let of = |file: &std::fs::File| sterna_sys::file::allocated_bytes(file).unwrap();
    of(&shelf.files.pages) + of(&shelf.files.slots)
}

#[test]
fn whoever_has_lost_a_chunk_finds_it_in_the_parity_and_the_others() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let first = shelf(dir.path());
    let kept = put(&first, 2, 1, None, &[0, 1, 9]).unwrap();
    put(&first, 3, 1, None, &[1, 2]).unwrap();
    put(&first, 4, 1, None, &[1]).unwrap();
    for shelf in [first, restarted(dir.path())] {
        let summed = shelf.sum(1, ChunkIndex(2), &set(&[0, 1])).unwrap();
        assert_eq!(summed.sum.others, [(ChunkIndex(3), set(&[1]))], "the other stripe's is not in it");
        assert_eq!(summed.digests, kept[..2]);
        let mut found = summed.bodies;
        fold(&mut found[PAGE_BYTES..], &body(3, 1, 1));
        assert_eq!(found, bodies(2, &set(&[0, 1]), 1));
        assert_eq!(shelf.sum(1, ChunkIndex(2), &set(&[2])).unwrap_err(), Refusal::Absent);
        // Two stripes: three slots of two pages, pages 0, 1, 2, 9 of one and 1 of the other.
        let (slots, pages) = (3, 5);
        assert_eq!(shelf.loan().used_bytes, slots * SLOT_BYTES + pages * PAGE_BYTES as u64);
        assert_eq!(allocated(&shelf), shelf.loan().used_bytes + SLOT_BYTES, "the header's page comes to it");
    }
}

#[test]
fn the_same_twice_is_done_once_and_nothing_is_folded_out_that_was_not_folded_in() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let shelf = shelf(dir.path());
    let kept = put(&shelf, 0, 1, None, &[0, 1]).unwrap();
    assert_eq!(put(&shelf, 0, 1, None, &[0, 1]).unwrap(), kept);
    assert!(matches!(put(&shelf, 0, 2, Some(1), &[1]), Err(Refusal::Request(_))), "it must be folded out before");
    assert_eq!(put(&shelf, 0, 2, None, &[2]), Err(Refusal::Version { has: Some(1) }));
    let out = |version, pages: &[u8], of| {
        let bodies = bodies(0, &set(pages), of);
        shelf.unfold(1, (ChunkIndex(0), version), (set(pages), PageSet::EMPTY), &bodies, None)
    };
    assert_eq!(out(1, &[0], 9), Err(Refusal::Absent), "another body");
    assert_eq!(out(1, &[5], 1), Err(Refusal::Absent));
    assert_eq!(out(2, &[0], 1), Err(Refusal::Version { has: Some(1) }));
    out(1, &[0], 1).unwrap();
    assert_eq!(out(1, &[0], 1), Err(Refusal::Absent), "once more it would be in it again");
    out(1, &[1], 1).unwrap();
    assert_eq!((shelf.loan().used_bytes, allocated(&shelf)), (0, SLOT_BYTES));
    // Nothing of it may come as of a shelf that keeps pages, nor the other way round.
    put(&shelf, 0, 3, None, &[0]).unwrap();
    assert!(matches!(shelf.get(1, ChunkIndex(0), 3, &set(&[0])), Err(Refusal::Request(_))));
    assert!(matches!(shelf.release(1, ChunkIndex(0), 3, &set(&[0])), Err(Refusal::Request(_))));
    let of_pages = tempfile::tempdir_in("/dev/shm").unwrap();
    let of_pages = Shelf::make(of_pages.path(), &CLAIM, most_bytes(CHUNKS), (CHUNKS, 1)).unwrap();
    assert!(matches!(of_pages.sum(1, ChunkIndex(0), &set(&[0])), Err(Refusal::Request(_))));
    assert!(matches!(of_pages.reset(1, ChunkIndex(0), None), Err(Refusal::Request(_))));
}

#[test]
fn no_more_is_kept_than_was_granted_and_two_chunks_of_a_stripe_need_little_more_than_one() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let granted_bytes = 2 * SLOT_BYTES + 3 * PAGE_BYTES as u64;
    let shelf = Shelf::make(dir.path(), &CLAIM, granted_bytes, (CHUNKS, STRIPE)).unwrap();
    put(&shelf, 0, 1, None, &[0, 1, 2]).unwrap();
    put(&shelf, 1, 1, None, &[0, 1, 2]).unwrap();
    assert_eq!(put(&shelf, 1, 2, Some(1), &[3]), Err(Refusal::Full { granted_bytes }));
    assert_eq!(put(&shelf, 2, 1, None, &[0]), Err(Refusal::Full { granted_bytes }));
}

#[derive(Debug, Clone)]
enum Act {
    Fold { chunk: u32, full: PageSet, zero: PageSet, until: Option<Step> },
    Unfold { chunk: u32, pages: PageSet, until: Option<Step> },
    Reset { chunk: u32, until: Option<Step> },
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let pages = || proptest::collection::vec(0u8..10, 0..6).prop_map(|pages| set(&pages));
    let until = || proptest::option::of(prop_oneof![Just(Step::Beside), Just(Step::Noted), Just(Step::Placed)]);
    let chunk = 0..CHUNKS;
    let fold = (chunk.clone(), pages(), pages(), until()).prop_map(|(chunk, full, zero, until)| Act::Fold {
        chunk,
        full,
        zero: zero.without(&full),
        until,
    });
    let unfold =
        (chunk.clone(), pages(), until()).prop_map(|(chunk, pages, until)| Act::Unfold { chunk, pages, until });
    let reset = (chunk, until()).prop_map(|(chunk, until)| Act::Reset { chunk, until });
    proptest::collection::vec(prop_oneof![4 => fold, 3 => unfold, 1 => reset], 1..30)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Killed at any step of any change: the parity is that of what is noted, no memory is lost to what nobody knows
    /// of, and the next change does not mind.
    #[test]
    fn parity_is_that_of_what_is_noted_whenever_the_store_is_killed(acts in acts()) {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let mut shelf = shelf(dir.path());
        // The version in which each page was folded in last.
        let mut folded: BTreeMap<(u32, u8), u64> = BTreeMap::new();
        for (version, act) in (1u64..).zip(acts) {
            let of = |shelf: &Shelf, chunk: u32| {
                shelf.with(1, |all| Ok(all.held(ChunkIndex(chunk)).copied())).unwrap()
            };
            let killed = match act {
                Act::Fold { chunk, full, zero, until } => {
                    let held = of(&shelf, chunk);
                    let (base, there) = (held.map(|held| held.version), held.unwrap_or_default().pages());
                    let (full, zero) = (full.without(&there), zero.without(&there));
                    full.iter().for_each(|page| { folded.insert((chunk, page), version); });
                    let bodies = bodies(chunk, &full, version);
                    let done = shelf.fold(1, (ChunkIndex(chunk), version, base), (full, zero), &bodies, until);
                    prop_assert_eq!(done.is_ok(), !full.or(&zero).is_empty());
                    until
                }
                Act::Unfold { chunk, pages, until } => {
                    let Some(held) = of(&shelf, chunk) else { continue };
                    let (full, zero) = (held.full.and(&pages), held.zero.and(&pages));
                    let each = full.iter().flat_map(|page| body(chunk, page, folded[&(chunk, page)]));
                    let bodies: Vec<u8> = each.collect();
                    shelf.unfold(1, (ChunkIndex(chunk), held.version), (full, zero), &bodies, until).unwrap();
                    until
                }
                Act::Reset { chunk, until } => {
                    shelf.reset(1, ChunkIndex(chunk), until).unwrap();
                    until
                }
            };
            if killed.is_some() {
                drop(shelf);
                shelf = restarted(dir.path());
            }
            for stripe in (0..CHUNKS.div_ceil(STRIPE)).map(ChunkIndex) {
                let each = |(chunk, held): (ChunkIndex, &Held)| (chunk, *held);
                let held = shelf.with(1, |all| Ok(all.in_stripe(stripe).map(each).collect::<Vec<_>>())).unwrap();
                let mut wanted = vec![0; 10 * PAGE_BYTES];
                for (chunk, held) in &held {
                    for page in held.full.iter() {
                        let at = usize::from(page) * PAGE_BYTES;
                        fold(&mut wanted[at..at + PAGE_BYTES], &body(chunk.0, page, folded[&(chunk.0, page)]));
                    }
                }
                prop_assert_eq!(shelf.files.read(stripe, &PageSet::first(10)).unwrap(), wanted);
            }
            prop_assert_eq!(allocated(&shelf), shelf.loan().used_bytes + SLOT_BYTES);
        }
    }
}
