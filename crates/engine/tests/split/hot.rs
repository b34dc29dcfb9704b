//! Which chunks leave of a guest that uses a part of its memory all the time.

use sterna_engine::paging::supplier::Supplier;
use sterna_protocol::layout::PageIndex;

use super::*;

/// What the guest uses all the time stays, although it has never left before; and nothing of what it writes meanwhile
/// is lost.
#[test]
fn what_a_guest_uses_stays_where_other_pages_can_leave() {
    if !tracking_works() {
        return;
    }
    let (guest, lending) = (Guest::new(), LendingHost::new());
    let split = guest.split(&[&lending]);
    // A quarter of its chunks, which the hand comes to first.
    let hot = PAGES / 4;
    let (mapping, ended) = (Arc::clone(&guest.ram.mapping), Arc::new(AtomicBool::new(false)));
    let (rounds, over) = (Arc::new(AtomicU64::new(0)), Arc::clone(&ended));
    let counted = Arc::clone(&rounds);
    let uses = std::thread::spawn(move || {
        while !over.load(Ordering::Acquire) {
            for page in (0..hot).step_by(16) {
                assert_eq!(word(&mapping, page), expected(page));
            }
            counted.fetch_add(1, Ordering::AcqRel);
        }
    });
    while rounds.load(Ordering::Acquire) < 3 {
        std::thread::yield_now();
    }
    // Half of it may be here.
    split.keep_to(Room::of(u64::from(CHUNKS / 2) * CHUNK_BYTES as u64)).unwrap();
    until("half of it has left", || split.pager().missing() >= PAGES / 4);
    let gone = (0..CHUNKS / 4).filter(|chunk| !split.pager().away_in(ChunkIndex(*chunk)).is_empty()).count();
    println!("{gone} of {} chunks in use have left, {:?}", CHUNKS / 4, split.account());
    ended.store(true, Ordering::Release);
    uses.join().unwrap();
    split.bring_back().unwrap();
    guest.is_as_it_was();
    split.end();
}

/// While the VMM's main thread waits for a page nobody can talk to the VMM.
#[test]
fn what_the_main_thread_uses_stays_while_all_else_leaves() {
    if !tracking_works() {
        return;
    }
    let (guest, lending) = (Guest::new(), LendingHost::new());
    let split = guest.split(&[&lending]);
    let page = PageIndex { chunk: ChunkIndex(2), page: 9 };
    split.touched(page, std::process::id());
    split.touched(PageIndex { chunk: ChunkIndex(3), ..page }, std::process::id() + 1);
    split.keep_to(Room::of(CHUNK_BYTES as u64 * 5 / 4)).unwrap();
    let is_away = |chunk: u32| !split.pager().away_in(ChunkIndex(chunk)).is_empty();
    until("all else has left", || (0..CHUNKS).all(|chunk| is_away(chunk) || chunk == 2));
    assert!(!is_away(2));
    // It waits for another one, which stays in the place of that.
    split.ask(PageIndex { chunk: ChunkIndex(5), ..page }, std::process::id());
    until("it has come", || split.pager().away_in(ChunkIndex(5)).len() < 192);
    split.keep_to(Room::of(CHUNK_BYTES as u64 / 2)).unwrap();
    until("the other one has left", || is_away(2));
    split.keep_to(Room::ALL).unwrap();
    split.bring_back().unwrap();
    guest.is_as_it_was();
    split.end();
}

#[test]
fn a_chunk_that_is_watched_is_known_to_be_used_for_one_fault() {
    if !tracking_works() {
        return;
    }
    let (guest, lending) = (Guest::new(), LendingHost::new());
    let split = guest.split(&[&lending]);
    let used = |chunk: u32| split.was_used(ChunkIndex(chunk)).unwrap();
    let reads = |chunk: u32| {
        (0..192).for_each(|page| {
            assert_eq!(guest.word(u64::from(chunk) * 256 + page), content(u64::from(chunk) * 256 + page))
        })
    };
    assert!(!used(2) && !used(3));
    let before = split.pager().faults().local;
    reads(2);
    assert_eq!(split.pager().faults().local - before, 1, "the rest of it came with the first page");
    assert!(used(2) && !used(3), "and is watched again");
    assert!(!used(2));
    // What is away comes from where it is, and was used.
    split.way_out().unwrap().send(ChunkIndex(3), 0).unwrap();
    assert!(!used(3));
    reads(3);
    split.bring_back().unwrap();
    guest.is_as_it_was();
    split.end();
}
