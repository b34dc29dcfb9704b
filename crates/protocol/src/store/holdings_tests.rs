use std::collections::BTreeMap;

use proptest::prelude::*;

use super::super::most_bytes;
use super::*;
use crate::layout::CHUNK_PAGES;

const CHUNK: ChunkIndex = ChunkIndex(0);
const CLAIM: Claim = Claim { guest: 1, key: 2, epoch: 3 };

fn set(pages: &[u8]) -> PageSet {
    let mut set = PageSet::EMPTY;
    pages.iter().for_each(|page| set.insert(*page));
    set
}

fn holdings() -> Holdings {
    Holdings::new(CLAIM, most_bytes(4), 4)
}

fn put(holdings: &mut Holdings, version: u64, base: Option<u64>, full: &[u8]) -> Result<(), Refusal> {
    let put = holdings.may_put(CHUNK, version, base, set(full), PageSet::EMPTY)?;
    holdings.note(CHUNK, put.after);
    Ok(())
}

#[test]
fn an_older_version_is_refused_and_the_same_one_is_taken_again() {
    let mut holdings = holdings();
    put(&mut holdings, 5, None, &[1, 2]).unwrap();
    assert_eq!(put(&mut holdings, 4, None, &[1]), Err(Refusal::Version { has: Some(5) }));
    put(&mut holdings, 5, None, &[1, 2]).unwrap();
    put(&mut holdings, 6, Some(5), &[2, 3]).unwrap();
    put(&mut holdings, 6, Some(5), &[2, 3]).unwrap();
    assert_eq!(holdings.held(CHUNK).unwrap().pages(), set(&[1, 2, 3]));
    assert_eq!(put(&mut holdings, 9, Some(5), &[4]), Err(Refusal::Version { has: Some(6) }));
    put(&mut holdings, 9, None, &[4]).unwrap();
    assert_eq!(holdings.held(CHUNK).unwrap().pages(), set(&[4]));
}

#[test]
fn an_earlier_owner_and_a_stranger_are_refused() {
    let mut holdings = holdings();
    let next = Claim { epoch: 4, ..CLAIM };
    assert_eq!(holdings.may_open(&next, most_bytes(4), 4), Ok(true));
    holdings.open(next, most_bytes(4));
    assert_eq!(holdings.in_force(3), Err(Refusal::Fenced { current: 4 }));
    assert_eq!(holdings.may_open(&CLAIM, most_bytes(4), 4), Err(Refusal::Fenced { current: 4 }));
    let stranger = Claim { key: 9, epoch: 100, ..CLAIM };
    assert_eq!(holdings.may_open(&stranger, most_bytes(4), 4), Err(Refusal::Stranger));
    assert_eq!(holdings.may_open(&next, most_bytes(4), 4), Ok(false), "the same again");
    assert!(matches!(holdings.may_open(&next, most_bytes(4), 5), Err(Refusal::Request(_))));
}

#[test]
fn no_more_is_kept_than_was_granted() {
    let mut holdings = Holdings::new(CLAIM, SLOT_BYTES + 2 * PAGE_BYTES as u64, 4);
    let granted_bytes = holdings.granted_bytes();
    assert_eq!(put(&mut holdings, 1, None, &[1, 2, 3]), Err(Refusal::Full { granted_bytes }));
    put(&mut holdings, 1, None, &[1, 2]).unwrap();
    assert_eq!(put(&mut holdings, 2, Some(1), &[3]), Err(Refusal::Full { granted_bytes }));
    put(&mut holdings, 2, Some(1), &[2]).unwrap();
    put(&mut holdings, 3, None, &[3, 4]).unwrap();
    assert_eq!(holdings.used_bytes(), granted_bytes);
    assert_eq!(
        holdings.may_open(&CLAIM, granted_bytes - 1, 4),
        Err(Refusal::Full { granted_bytes: granted_bytes - 1 })
    );
    let zeros = holdings.may_put(CHUNK, 4, None, PageSet::EMPTY, PageSet::first(CHUNK_PAGES)).unwrap();
    assert_eq!(zeros.after.bytes(), SLOT_BYTES, "zeros take no room");
}

#[test]
fn a_release_of_an_older_version_takes_nothing_away() {
    let mut holdings = holdings();
    put(&mut holdings, 5, None, &[1, 2]).unwrap();
    assert_eq!(holdings.after_release(CHUNK, 4, &set(&[1])), None);
    assert_eq!(holdings.after_release(CHUNK, 5, &set(&[7])), None);
    let left = holdings.after_release(CHUNK, 6, &set(&[1])).unwrap();
    holdings.note(CHUNK, left);
    assert_eq!(holdings.may_get(CHUNK, 5, &set(&[1])), Err(Refusal::Absent));
    assert_eq!(holdings.may_get(CHUNK, 5, &set(&[2])), Ok((set(&[2]), PageSet::EMPTY)));
    assert_eq!(holdings.may_get(CHUNK, 4, &set(&[2])), Err(Refusal::Version { has: Some(5) }));
    let left = holdings.after_release(CHUNK, 5, &set(&[2])).unwrap();
    holdings.note(CHUNK, left);
    assert_eq!((holdings.held(CHUNK), holdings.used_bytes()), (None, 0));
}

#[derive(Debug, Clone)]
enum Step {
    Put { add: bool, full: PageSet, zero: PageSet, killed_after: Option<usize> },
    Release { pages: PageSet, late: bool },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let pages = || proptest::collection::vec(0u8..12, 0..8).prop_map(|pages| set(&pages));
    let put = (any::<bool>(), pages(), pages(), proptest::option::of(0usize..8))
        .prop_map(|(add, full, zero, killed_after)| Step::Put { add, full, zero: zero.without(&full), killed_after });
    let release = (pages(), any::<bool>()).prop_map(|(pages, late)| Step::Release { pages, late });
    proptest::collection::vec(prop_oneof![3 => put, 1 => release], 1..40)
}

proptest! {
    /// A store that is killed after any byte of a put, and an owner that then does what it can: whatever the store says
    /// that it has is what the owner sent last.
    #[test]
    fn a_store_that_is_killed_in_a_put_never_has_what_its_owner_did_not_send(steps in steps()) {
        let mut holdings = holdings();
        let mut file: BTreeMap<u8, u64> = BTreeMap::new();
        // What the owner sent last of each page; 0 for zeros.
        let mut sent: BTreeMap<u8, u64> = BTreeMap::new();
        for (version, step) in (1u64..).zip(steps) {
            match step {
                Step::Put { add, full, zero, killed_after } => {
                    let base = holdings.held(CHUNK).map(|held| held.version).filter(|_| add);
                    let Ok(put) = holdings.may_put(CHUNK, version, base, full, zero) else { continue };
                    holdings.note(CHUNK, put.before.unwrap_or_default());
                    full.iter().for_each(|page| { sent.insert(page, version); });
                    zero.iter().for_each(|page| { sent.insert(page, 0); });
                    let written = killed_after.unwrap_or(usize::MAX);
                    full.iter().take(written).for_each(|page| { file.insert(page, version); });
                    if killed_after.is_none() {
                        holdings.note(CHUNK, put.after);
                    }
                }
                Step::Release { pages, late } => {
                    let of = if late { version.saturating_sub(3) } else { version };
                    if let Some(left) = holdings.after_release(CHUNK, of, &pages) {
                        holdings.note(CHUNK, left);
                    }
                }
            }
            if let Some(held) = holdings.held(CHUNK) {
                prop_assert!(held.full.iter().all(|page| file.get(&page) == sent.get(&page)));
                prop_assert!(held.zero.iter().all(|page| sent.get(&page) == Some(&0)));
            }
            let bytes: u64 = holdings.iter().map(|(_, held)| held.bytes()).sum();
            prop_assert_eq!(holdings.used_bytes(), bytes);
        }
    }
}
