use super::*;

/// Bytes of RAM for which this host has memory.
fn here(split: &Split) -> u64 {
    split.pager().ram().allocated_bytes().unwrap()
}

/// All of the guest comes together, and it is split no more.
pub fn comes_together(split: &Arc<Split>) {
    split.keep_to(Room::ALL).unwrap();
    while split.pager().missing() > 0 {
        split.bring_back().unwrap();
    }
    split.end();
}

/// Seen to fail: all of it was here.
#[test]
fn a_guest_that_takes_memory_faster_than_it_leaves_keeps_to_its_room_and_goes_on() {
    if !tracking_works() {
        return;
    }
    let (guest, lending) = (Guest::untouched(), LendingHost::new());
    let split = guest.split(&[&lending]);
    let room = Room::of(2 * CHUNK_BYTES as u64);
    // So that it is faster, whatever this machine is.
    lending.relay.cut();
    split.keep_to(room).unwrap();
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..2u64)
            .map(|own| {
                let guest = &guest;
                scope.spawn(move || (own..PAGES).step_by(2).for_each(|page| guest.writes(page)))
            })
            .collect();
        while !writers.iter().all(|writer| writer.is_finished()) {
            let (here, paced) = (here(&split), split.account().paced);
            if paced.pages > 0 {
                lending.relay.restore();
            }
            // One may be on its way by each thread that lets pages in.
            assert!(here <= room.most() + (paced.forced + 2) * PAGE_BYTES as u64, "{here} bytes are here, {paced:?}");
            std::thread::yield_now();
        }
    });
    let account = split.account();
    println!("{account:?}");
    assert!(account.paced.pages > 0 && account.out_pages > PAGES / 2);
    // What it reads comes back page by page where there is no room for more.
    (0..PAGES).for_each(|page| assert_eq!(guest.word(page), content(page), "page {page}"));
    comes_together(&split);
}

#[test]
fn a_guest_whose_pages_cannot_leave_becomes_slow_and_never_hangs() {
    if !tracking_works() {
        return;
    }
    let (guest, lending) = (Guest::untouched(), LendingHost::new());
    let split = guest.split(&[&lending]);
    lending.relay.cut();
    let room = Room::of(CHUNK_BYTES as u64);
    split.keep_to(room).unwrap();
    let pages = CHUNK_PAGES as u64 + 3;
    (0..pages).for_each(|page| guest.writes(page));
    let paced = split.account().paced;
    assert!(paced.forced == 3 && paced.pages == 3, "{paced:?}");
    assert_eq!(here(&split), pages * PAGE_BYTES as u64);
    while split.stuck().is_none() {
        std::thread::yield_now();
    }
    lending.relay.restore();
    while here(&split) > room.low() || split.stuck().is_some() {
        std::thread::yield_now();
    }
    (0..pages).for_each(|page| assert_eq!(guest.word(page), content(page), "page {page}"));
    split.end();
}

#[test]
fn pages_leave_for_one_memory_host_while_another_is_away() {
    if !tracking_works() {
        return;
    }
    let (guest, lending) = (Guest::new(), [LendingHost::new(), LendingHost::new()]);
    let split = guest.split(&[&lending[0], &lending[1]]);
    split.way_out().unwrap().send(ChunkIndex(0), 0).unwrap();
    let (full, away) = (PAGES / 4 * 3, split.pager().missing());
    // Pages of the chunk that the first one has leave for no other.
    guest.writes(200);
    lending[0].relay.cut();
    split.keep_to(Room::of(0)).unwrap();
    while split.pager().missing() < full || split.stuck().is_none() {
        std::thread::yield_now();
    }
    assert_eq!((split.pager().missing(), lending[1].pages()), (full, full - away + u64::from(CHUNKS) - 1));
    lending[0].relay.restore();
    while split.pager().missing() < full + 1 {
        std::thread::yield_now();
    }
    split.keep_to(Room::ALL).unwrap();
    split.bring_back().unwrap();
    assert_eq!(guest.word(200), content(200));
    guest.ram.mapping.copy_in(200 * 4096, &[0; 16]).unwrap();
    guest.is_as_it_was();
    split.end();
}
