use super::*;

const FULL: u64 = PAGES / 4 * 3;

#[test]
fn pages_that_are_as_they_came_leave_again_without_being_sent() {
    if !tracking_works() {
        return;
    }
    let (guest, lending) = (Guest::new(), LendingHost::new());
    let split = guest.split(&[&lending]);
    send_all(&split, 0);
    split.bring_back().unwrap();
    // Written, written and written back, given the memory of another, and not touched at all.
    let changed = [3, 300, 301];
    changed.iter().for_each(|page| guest.ram.mapping.copy_in(page * 4096, &[7; 16]).unwrap());
    guest.ram.mapping.copy_in(5 * 4096, &[7; 16]).unwrap();
    guest.writes(5);
    let carried = lending.relay.carried();
    send_all(&split, 0);
    let account = split.account();
    assert_eq!((account.out_pages, account.unsent_pages), (FULL + 3, FULL - 3));
    assert!(lending.relay.carried() - carried < 64 << 10, "little was said");
    assert_eq!((guest.pages_here(&split), split.pager().missing()), (0, FULL));
    assert!(changed.iter().all(|page| guest.word(*page) == 0x0707_0707_0707_0707));
    changed.iter().for_each(|page| guest.writes(*page));
    split.bring_back().unwrap();
    guest.is_as_it_was();
    leaves_nothing(&guest, split, &[&lending]);
}

/// Fails where a memory host is taken to have still what it had: the pages are lost.
#[test]
fn copies_that_a_memory_host_has_lost_are_not_relied_on() {
    if !tracking_works() {
        return;
    }
    let (guest, lending) = (Guest::new(), LendingHost::new());
    let split = guest.split(&[&lending]);
    send_all(&split, 0);
    split.bring_back().unwrap();
    lending.store.close(lending.lender().number(GUEST.0), None).unwrap();
    // The connection finds out with the first request, and another one is opened.
    while split.pager().missing() < FULL {
        let mut way = split.way_out().unwrap();
        (0..CHUNKS).for_each(|chunk| drop(way.send(ChunkIndex(chunk), 0)));
    }
    assert_eq!((split.account().out_pages, split.account().unsent_pages), (2 * FULL, 0));
    guest.is_as_it_was();
    split.bring_back().unwrap();
    split.end();
}

#[test]
fn a_full_memory_host_gives_up_copies_for_pages_that_leave() {
    if !tracking_works() {
        return;
    }
    let (guest, lending) = (Guest::new(), LendingHost::to_guests_of(CHUNKS / 2));
    let split = guest.split(&[&lending]);
    for half in [0..CHUNKS / 2, CHUNKS / 2..CHUNKS, 0..CHUNKS / 2] {
        let mut way = split.way_out().unwrap();
        for chunk in half {
            way.send(ChunkIndex(chunk), 0).unwrap();
        }
        assert_eq!(split.pager().missing(), FULL / 2);
        split.bring_back().unwrap();
    }
    guest.is_as_it_was();
    split.end();
}

#[test]
fn pages_whose_copies_are_out_of_reach_leave_for_others_and_what_is_left_of_them_is_given_up_later() {
    if !tracking_works() {
        return;
    }
    let (guest, lending) = (Guest::new(), [LendingHost::new(), LendingHost::new()]);
    let split = guest.split(&[&lending[0], &lending[1]]);
    send_all(&split, 0);
    split.bring_back().unwrap();
    lending[0].relay.cut();
    split.keep_to(Room::of(0)).unwrap();
    while split.pager().missing() < FULL {
        std::thread::yield_now();
    }
    let notes = u64::from(CHUNKS);
    assert_eq!(lending.each_ref().map(LendingHost::pages), [FULL + notes, FULL + notes]);
    lending[0].relay.restore();
    while lending[0].pages() > 0 {
        std::thread::yield_now();
    }
    split.keep_to(Room::ALL).unwrap();
    split.bring_back().unwrap();
    guest.is_as_it_was();
    split.end();
}
