use sterna_protocol::store::most_bytes;

use super::*;

const CLAIM: Claim = Claim { guest: 7, key: 8, epoch: 1 };
const CHUNKS: u32 = 4;
const CHUNK: ChunkIndex = ChunkIndex(2);

fn dir() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap()
}

fn shelf(dir: &Path) -> Shelf {
    Shelf::make(dir, &CLAIM, most_bytes(CHUNKS), (CHUNKS, 1)).unwrap()
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

fn bodies(pages: &[u8], content: u8) -> Vec<u8> {
    pages.iter().flat_map(|page| [content ^ *page; PAGE_BYTES]).collect()
}

fn put(shelf: &Shelf, version: u64, base: Option<u64>, pages: &[u8], until: Option<Step>) -> Result<(), Refusal> {
    let bodies = bodies(pages, version as u8);
    let pages = (set(pages), PageSet::EMPTY);
    shelf.put_until(CLAIM.epoch, (CHUNK, version, base), pages, &bodies, until).map(drop)
}

fn allocated(shelf: &Shelf) -> u64 {
    let of = |file: &File| sterna_sys::file::allocated_bytes(file).unwrap();
    of(&shelf.files.pages) + of(&shelf.files.slots)
}

#[test]
fn what_is_kept_comes_back_as_it_was_also_after_a_restart() {
    let dir = dir();
    let first = shelf(dir.path());
    put(&first, 1, None, &[0, 1, 2, 9], None).unwrap();
    let zeros = first.put(1, (ChunkIndex(3), 5, None), (PageSet::EMPTY, set(&[4])), &[]).unwrap();
    assert!(zeros.is_empty());
    let summary = first.prepare(1).unwrap();
    for shelf in [first, restarted(dir.path())] {
        let got = shelf.get(1, CHUNK, 1, &set(&[1, 9])).unwrap();
        assert_eq!((got.full, got.zero, got.bodies), (set(&[1, 9]), PageSet::EMPTY, bodies(&[1, 9], 1)));
        let got = shelf.get(1, ChunkIndex(3), 5, &set(&[4])).unwrap();
        assert_eq!((got.zero, got.bodies.len()), (set(&[4]), 0));
        assert_eq!((shelf.prepare(1).unwrap(), summary.pages), (summary, 5));
        let loan = shelf.loan();
        assert_eq!((loan.guest, loan.epoch, loan.granted_bytes), (7, 1, most_bytes(CHUNKS)));
        assert_eq!(allocated(&shelf), loan.used_bytes + SLOT_BYTES, "the header's page comes to it");
    }
}

/// Killed at each step of a put: what the next daemon has is what was sent, no memory is lost to what nobody knows of,
/// and the same put then succeeds.
#[test]
fn a_store_that_is_killed_in_a_put_has_less_and_nothing_wrong() {
    for until in [Step::Forgotten, Step::Written] {
        for base in [None, Some(1)] {
            let dir = dir();
            let first = shelf(dir.path());
            put(&first, 1, None, &[0, 1, 2], None).unwrap();
            put(&first, 2, base, &[2, 3], Some(until)).unwrap();
            drop(first);
            let shelf = restarted(dir.path());
            let left: &[u8] = if base.is_some() { &[0, 1] } else { &[] };
            let held = shelf.inventory(1, ChunkIndex(0), 9).unwrap();
            let pages: Vec<_> = held.iter().map(|entry| (entry.version, PageSet::from_bytes(&entry.pages))).collect();
            assert_eq!(pages, if left.is_empty() { vec![] } else { vec![(1, set(left))] }, "{until:?} {base:?}");
            if !left.is_empty() {
                assert_eq!(shelf.get(1, CHUNK, 1, &set(left)).unwrap().bodies, bodies(left, 1));
            }
            assert_eq!(allocated(&shelf), shelf.loan().used_bytes + SLOT_BYTES, "{until:?} {base:?}");
            put(&shelf, 2, base, &[2, 3], None).unwrap();
            assert_eq!(shelf.get(1, CHUNK, 2, &set(&[2, 3])).unwrap().bodies, bodies(&[2, 3], 2));
        }
    }
}

#[test]
fn what_is_replaced_or_released_takes_no_memory() {
    let dir = dir();
    let shelf = shelf(dir.path());
    let empty = allocated(&shelf);
    put(&shelf, 1, None, &[0, 1, 2, 3], None).unwrap();
    put(&shelf, 2, None, &[3, 4], None).unwrap();
    assert_eq!(allocated(&shelf) - empty, SLOT_BYTES + 2 * PAGE_BYTES as u64);
    shelf.release(1, CHUNK, 1, &set(&[3, 4])).unwrap();
    assert_eq!(allocated(&shelf) - empty, SLOT_BYTES + 2 * PAGE_BYTES as u64, "that was an older version");
    shelf.release(1, CHUNK, 2, &set(&[3])).unwrap();
    assert_eq!(shelf.get(1, CHUNK, 2, &set(&[4])).unwrap().bodies, bodies(&[4], 2));
    shelf.release(1, CHUNK, 2, &set(&[4])).unwrap();
    assert_eq!((allocated(&shelf), shelf.loan().used_bytes), (empty, 0));
}

#[test]
fn an_earlier_owner_is_refused_also_after_a_restart() {
    let dir = dir();
    let first = shelf(dir.path());
    put(&first, 1, None, &[0], None).unwrap();
    let next = Claim { epoch: 2, ..CLAIM };
    first.open(&next, most_bytes(CHUNKS), CHUNKS).unwrap();
    for shelf in [first, restarted(dir.path())] {
        let fenced = Refusal::Fenced { current: 2 };
        assert_eq!(put(&shelf, 9, None, &[0], None), Err(fenced.clone()));
        assert_eq!(shelf.get(1, CHUNK, 1, &set(&[0])).unwrap_err(), fenced);
        assert_eq!(shelf.release(1, CHUNK, 9, &set(&[0])), Err(fenced.clone()));
        assert_eq!(shelf.prepare(1).unwrap_err(), fenced);
        assert_eq!(shelf.open(&CLAIM, most_bytes(CHUNKS), CHUNKS), Err(fenced));
        assert_eq!(shelf.get(2, CHUNK, 1, &set(&[0])).unwrap().bodies, bodies(&[0], 1));
    }
}

#[test]
fn damaged_memory_is_noticed_before_a_guest_relies_on_it() {
    let dir = dir();
    let first = shelf(dir.path());
    put(&first, 1, None, &[0, 1], None).unwrap();
    let at = u64::from(CHUNK.0) * CHUNK_BYTES as u64 + 77;
    first.files.pages.write_all_at(&[0xee], at).unwrap();
    assert!(matches!(first.prepare(1), Err(Refusal::Memory(_))));
    // A damaged note is no note: what it spoke of is not there.
    first.files.slots.write_all_at(&[0xee], offset(CHUNK) + 5).unwrap();
    assert!(matches!(first.get(1, CHUNK, 1, &set(&[1])), Err(Refusal::Memory(_))));
    assert_eq!(restarted(dir.path()).inventory(1, ChunkIndex(0), 9), Ok(vec![]));
}

#[test]
fn files_that_are_not_understood_are_left_alone() {
    let dir = dir();
    drop(shelf(dir.path()));
    let slots = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path());
    let slots: PathBuf = slots.filter(|path| path.extension().is_some_and(|end| end == SLOTS)).collect();
    File::options().write(true).open(&slots).unwrap().write_all_at(b"?", 3).unwrap();
    assert_eq!(Shelf::find(dir.path()).unwrap().count(), 0);
    assert!(matches!(Shelf::make(dir.path(), &CLAIM, 1 << 20, (CHUNKS, 1)), Err(Refusal::Memory(_))));
    assert!(slots.exists() && slots.with_extension(PAGES).exists());
}

/// A daemon that is killed when it makes the files, or when it removes them, before anybody or after everybody relied
/// on them.
#[test]
fn files_that_are_half_made_or_half_removed_go_with_the_next_start() {
    for half in ["no slots", "an empty file of slots", "no header", "no pages"] {
        let dir = dir();
        let made = shelf(dir.path()).files.paths;
        let slots = || File::options().write(true).open(&made[1]).unwrap();
        match half {
            "no slots" => std::fs::remove_file(&made[1]).unwrap(),
            "an empty file of slots" => slots().set_len(0).unwrap(),
            "no header" => punch(slots(), 0..SLOT_BYTES).unwrap(),
            _ => std::fs::remove_file(&made[0]).unwrap(),
        }
        assert_eq!(Shelf::find(dir.path()).unwrap().count(), 0, "{half}");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "{half}");
        drop(shelf(dir.path()));
    }
}

#[test]
fn what_was_given_back_serves_nobody() {
    let dir = dir();
    let shelf = shelf(dir.path());
    put(&shelf, 1, None, &[0], None).unwrap();
    shelf.close();
    assert_eq!(put(&shelf, 2, None, &[0], None), Err(Refusal::Closed));
    assert_eq!(shelf.get(1, CHUNK, 1, &set(&[0])).unwrap_err(), Refusal::Closed);
    assert_eq!((allocated(&shelf), std::fs::read_dir(dir.path()).unwrap().count()), (0, 0));
}
