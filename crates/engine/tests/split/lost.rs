//! A memory host that has not what it was given.

use super::*;

#[test]
fn a_memory_host_that_has_lost_pages_is_named_and_nobody_gets_others_in_their_place() {
    if !tracking_works() {
        return;
    }
    let (guest, lending) = (Guest::new(), LendingHost::new());
    let split = guest.split(&[&lending]);
    send_all(&split, 0);
    dies(split);
    // A memory host that begins anew at the same place.
    let empty = LendingHost::new();
    let error = guest.recover(&[&empty]).unwrap_err();
    assert!(matches!(error, SplitError::Lost { pages: 192, .. }), "{error}");
    assert!(matches!(guest.recover(&[]), Err(SplitError::Here(_))), "nobody is named who has them");
    // The first one is found again, and all is well.
    let split = guest.recover(&[&lending]).unwrap();
    guest.is_as_it_was();
    split.bring_back().unwrap();
    split.end();
}

#[test]
fn pages_whose_loan_is_taken_back_are_lost_and_the_guest_waits_for_them_while_it_uses_the_others() {
    if !tracking_works() {
        return;
    }
    let (guest, lending) = (Guest::new(), LendingHost::new());
    let split = guest.split(&[&lending]);
    split.way_out().unwrap().send(ChunkIndex(1), 0).unwrap();
    lending.store.close(lending.lender().number(GUEST.0), None).unwrap();
    let waits = guest.reads(300);
    while split.pager().fault_count() == 0 {
        std::thread::yield_now();
    }
    let lost = std::iter::from_fn(|| split.bring_back().err()).find(|error| matches!(error, SplitError::Lost { .. }));
    assert!(lost.is_some_and(|error| error.to_string().contains("192 pages")));
    // What is here can be used, and leave.
    assert_eq!(guest.word(10), content(10));
    split.way_out().unwrap().send(ChunkIndex(0), 0).unwrap();
    assert_eq!(guest.word(10), content(10));
    assert!(!waits.is_finished());
    // Its guest has ended: whoever waits is let go, with whatever is there.
    split.end();
    assert_eq!(waits.join().unwrap(), 0);
}
