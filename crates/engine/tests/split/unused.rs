//! Pages that the guest does not use: nowhere, or where any other page would be.

use sterna_api::Unused;

use super::*;

/// Room for so many chunks, where pages that nobody uses count.
fn room(chunks: u32) -> Room {
    Room::of(u64::from(chunks) * CHUNK_BYTES as u64).with(Unused::Ignore)
}

fn comes_down(split: &Split, room: Room, checking: Option<&Checking>) {
    while split.here_bytes().unwrap() > room.high() {
        assert!(checking.is_none_or(Checking::is_well), "it found something else than it had written");
        std::thread::yield_now();
    }
}

#[test]
fn where_they_count_pages_that_were_never_used_leave_and_come_back_as_others_do() {
    if !tracking_works() {
        return;
    }
    let (guest, lending) = (Guest::untouched(), LendingHost::new());
    let split = guest.split(&[&lending]);
    split.keep_to(Room::of(CHUNK_BYTES as u64)).unwrap();
    assert_eq!((split.here_bytes().unwrap(), split.pager().missing()), (0, 0), "they are nowhere");
    split.keep_to(room(4)).unwrap();
    comes_down(&split, room(4), None);
    assert!(split.pager().missing() >= PAGES / 2 && split.account().zero_pages == 0, "{:?}", split.account());
    assert_eq!(split.pager().ram().allocated_bytes().unwrap(), 0, "nobody has touched one yet");
    let before = split.account().in_pages;
    (0..PAGES).step_by(CHUNK_PAGES).for_each(|page| assert_eq!(guest.word(page), 0));
    assert!(split.account().in_pages > before, "those that are away have come over the network");
    split.merge(&|| Ok(())).unwrap();
    assert_eq!(split.pager().missing(), 0);
    (0..PAGES).for_each(|page| assert_eq!(guest.word(page), 0, "page {page}"));
    split.end();
}

/// A page is used for the first time while it leaves, and again and again.
#[test]
fn a_guest_that_goes_on_writing_finds_what_it_wrote_where_unused_pages_leave_too() {
    if !tracking_works() {
        return;
    }
    let (guest, lending) = (Guest::new(), [LendingHost::new(), LendingHost::new()]);
    let split = guest.split(&[&lending[0], &lending[1]]);
    let checking = Checking::start(&guest, 3);
    for chunks in [5, 2, 6, 1, 3] {
        split.keep_to(room(chunks)).unwrap();
        comes_down(&split, room(chunks), Some(&checking));
        checking.goes_on(300);
    }
    println!("{:?}", split.account());
    split.keep_to(Room::ALL).unwrap();
    while split.pager().missing() > 0 {
        split.bring_back().unwrap();
    }
    checking.end();
    split.end();
}

/// What the guest gives back while it is away (balloon, free-page reporting) takes no memory anywhere.
#[test]
fn a_memory_host_forgets_what_the_guest_gives_back_of_what_it_has() {
    if !tracking_works() {
        return;
    }
    let (guest, lending) = (Guest::new(), [LendingHost::new(), LendingHost::new()]);
    let split = guest.split_over(vec![Lender { mirror: Some(lending[1].lender().peer), ..lending[0].lender() }]);
    send_all(&split, 0);
    let (there, away) = (lending[0].pages(), split.pager().missing());
    let (device, inode) = split.pager().ram().files().unwrap()[0];
    let (first, count) = (CHUNK_PAGES as u64 + 10, 100);
    guest.discards.lock().unwrap().push(Discard { device, inode, offset: first * 4096, length: count * 4096 });
    // With room for all nothing leaves by itself.
    split.keep_to(Room::of(2 * PAGES * 4096)).unwrap();
    while lending.iter().any(|host| host.pages() > there - count) {
        std::thread::yield_now();
    }
    assert_eq!(
        (lending[0].pages(), lending[1].pages(), split.pager().missing()),
        (there - count, there - count, away - count)
    );
    let came = split.account().in_pages;
    (first..first + count).for_each(|page| assert_eq!(guest.word(page), 0, "page {page}"));
    assert_eq!(split.account().in_pages, came, "nobody is asked for them");
    // What it writes there from now on leaves and comes back as any other page.
    guest.writes(first);
    send_all(&split, 0);
    split.bring_back().unwrap();
    for page in 0..PAGES {
        let gone = (first + 1..first + count).contains(&page);
        assert_eq!(guest.word(page), if gone { 0 } else { expected(page) }, "page {page}");
    }
    split.end();
}

/// A guest that goes through memory that it has never used waits for few of its pages.
#[test]
fn what_is_used_for_the_first_time_in_order_has_memory_before_it_is_touched() {
    if !tracking_works() {
        return;
    }
    let (guest, lending) = (Guest::untouched(), LendingHost::new());
    let split = guest.split(&[&lending]);
    split.keep_to(Room::of(2 * PAGES * 4096)).unwrap();
    (0..PAGES).for_each(|page| guest.writes(page));
    let touches = split.pager().faults().local;
    assert!(touches < PAGES / 8, "{touches} of {PAGES} waited");
    (0..PAGES).for_each(|page| assert_eq!(guest.word(page), content(page), "page {page}"));
    split.end();
    // Here and there: each by itself.
    let (guest, lending) = (Guest::untouched(), LendingHost::new());
    let split = guest.split(&[&lending]);
    split.keep_to(Room::of(2 * PAGES * 4096)).unwrap();
    for chunk in 0..u64::from(CHUNKS) {
        guest.writes(chunk * CHUNK_PAGES as u64 + 17);
    }
    assert_eq!(guest.pages_here(&split), u64::from(CHUNKS));
    split.end();
}
