//! Memory hosts that are exchanged under a running guest.

use sterna_engine::error::MigrateError;

use super::*;

fn always() -> Result<(), MigrateError> {
    Ok(())
}

fn leaving(host: &LendingHost) -> Lender {
    Lender { leaving: true, ..host.lender() }
}

/// What has left the guest's owner for this memory host, if only for a moment.
fn has_given(host: &LendingHost) -> bool {
    host.pages() > 0
}

#[test]
fn memory_hosts_are_exchanged_one_after_the_other_under_a_guest_that_goes_on_writing() {
    if !tracking_works() {
        return;
    }
    let (guest, first) = (Guest::new(), LendingHost::new());
    let split = guest.split(&[&first]);
    split.keep_to(Room::of(2 * CHUNK_BYTES as u64)).unwrap();
    let checking = Checking::start(&guest, 3);
    while !has_given(&first) {
        checking.goes_on(20);
    }
    let (mut known, mut hosts) = (vec![first], vec![0]);
    // The number of the one before last is free each time, and is used again.
    for turn in 1..6 {
        let (next, old) = (LendingHost::new(), hosts[turn - 1]);
        let number = if turn % 2 == 1 { 1 } else { 0 };
        split.add(number, next.lender()).unwrap();
        hosts.push(number);
        known.push(next);
        split.leave_out(old, true);
        split.empty(old, &always).unwrap();
        assert!(!split.has_pages(old));
        // It is given nothing more, and whoever was served by it is served by the others.
        known[turn - 1].relay.cut();
        while !split.has_pages(number) {
            checking.goes_on(20);
        }
        checking.goes_on(100);
        assert!(split.stuck().is_none(), "{:?}", split.stuck());
    }
    println!("{:?}", split.account());
    split.merge(&always).unwrap();
    checking.end();
    assert_eq!(split.pager().missing(), 0);
    split.end();
}

#[test]
fn a_memory_host_that_is_emptied_leaves_no_more_here_than_there_is_room_for() {
    if !tracking_works() {
        return;
    }
    let (guest, lending) = (Guest::new(), [LendingHost::new(), LendingHost::new()]);
    let split = guest.split(&[&lending[0]]);
    send_all(&split, 0);
    let room = Room::of(3 * CHUNK_BYTES as u64);
    split.keep_to(room).unwrap();
    split.add(1, lending[1].lender()).unwrap();
    split.leave_out(0, true);
    let most = std::sync::atomic::AtomicU64::new(0);
    let here = || {
        most.fetch_max(split.pager().ram().allocated_bytes().unwrap(), Ordering::Relaxed);
        Ok(())
    };
    split.empty(0, &here).unwrap();
    here().unwrap();
    assert!(most.load(Ordering::Relaxed) <= room.high() + CHUNK_BYTES as u64, "{most:?} of {}", room.most());
    assert!(!split.has_pages(0) && split.has_pages(1));
    split.merge(&always).unwrap();
    guest.is_as_it_was();
    split.end();
}

/// Where the others take nothing, what comes would be too much here.
#[test]
fn a_memory_host_is_not_emptied_into_a_host_that_has_no_room() {
    if !tracking_works() {
        return;
    }
    let (guest, lending) = (Guest::new(), [LendingHost::new(), LendingHost::to_guests_of(1)]);
    let split = guest.split(&[&lending[0]]);
    send_all(&split, 0);
    let room = Room::of(3 * CHUNK_BYTES as u64);
    split.keep_to(room).unwrap();
    split.add(1, lending[1].lender()).unwrap();
    split.leave_out(0, true);
    let full = || match split.stuck() {
        Some(_) => Err(MigrateError::Cancelled),
        None => Ok(()),
    };
    let ended = split.empty(0, &full).unwrap_err();
    assert!(matches!(ended, SplitError::Here(MigrateError::Cancelled)), "{ended}");
    assert!(split.has_pages(0) && split.pager().ram().allocated_bytes().unwrap() <= room.high() + CHUNK_BYTES as u64);
    // It stays, and is given pages again.
    split.leave_out(0, false);
    while split.stuck().is_some() {
        std::thread::yield_now();
    }
    split.merge(&always).unwrap();
    guest.is_as_it_was();
    split.end();
}

#[test]
fn a_memory_host_that_is_away_is_emptied_once_it_is_back() {
    if !tracking_works() {
        return;
    }
    let (guest, lending) = (Guest::new(), [LendingHost::new(), LendingHost::new()]);
    let split = guest.split(&[&lending[0], &lending[1]]);
    send_in_turn(&split);
    split.leave_out(0, true);
    lending[0].relay.cut();
    let away = split.empty(0, &always).unwrap_err();
    assert!(matches!(&away, SplitError::Host { peer, .. } if *peer == lending[0].relay.address), "{away}");
    assert!(split.has_pages(0));
    lending[0].relay.restore();
    split.empty(0, &always).unwrap();
    assert!(!split.has_pages(0) && split.has_pages(1));
    split.merge(&always).unwrap();
    guest.is_as_it_was();
    split.end();
}

/// One that has nothing may be gone for good; one that has pages must answer.
#[test]
fn another_daemon_asks_a_memory_host_that_is_leaving_only_where_it_has_pages() {
    if !tracking_works() {
        return;
    }
    let (guest, lending) = (Guest::new(), [LendingHost::new(), LendingHost::new()]);
    let split = guest.split(&[&lending[0], &lending[1]]);
    send_in_turn(&split);
    split.leave_out(0, true);
    dies(split);
    let both = || vec![leaving(&lending[0]), lending[1].lender()];
    let split = guest.recover_over(both()).unwrap();
    split.empty(0, &always).unwrap();
    dies(split);
    lending[0].relay.cut();
    let split = guest.recover_over(both()).unwrap();
    split.merge(&always).unwrap();
    guest.is_as_it_was();
    split.end();
}

#[test]
fn a_number_that_is_in_use_is_given_to_nobody_else() {
    if !tracking_works() {
        return;
    }
    let (guest, lending) = (Guest::new(), [LendingHost::new(), LendingHost::new()]);
    let split = guest.split(&[&lending[0]]);
    send_all(&split, 0);
    for number in [0, 2, 16] {
        let refused = split.add(number, lending[1].lender());
        assert!(matches!(refused, Err(SplitError::Here(MigrateError::Bug(_)))), "{number}: {refused:?}");
    }
    split.add(1, lending[1].lender()).unwrap();
    split.merge(&always).unwrap();
    guest.is_as_it_was();
    split.end();
}
