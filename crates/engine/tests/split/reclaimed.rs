//! What a split guest holds free is taken, wherever it is: the guest is a kernel made for it, with nothing but a memory
//! map, which is away itself in part.

use sterna_api::Reclaimed;
use sterna_engine::memory::elsewhere::PagesElsewhere;
use sterna_engine::monitor::Monitor;
use sterna_engine::reclaim::{Machine, ReclaimError, reclaim};
use sterna_introspect::Unfit;
use sterna_introspect::toy::NOTE;

use super::paced::comes_together;
use super::taking::{Churn, Vmm};
use super::toy::{PAGES as RAM_PAGES, ToyGuest, USED};
use super::*;

const RAM_CHUNKS: u32 = (RAM_PAGES / CHUNK_PAGES as u64) as u32;

fn split(guest: &ToyGuest, hosts: &[&LendingHost]) -> Arc<Split> {
    let inside = InsideSelf::default();
    inside.mappings.lock().unwrap().push(Arc::clone(&guest.ram.mapping));
    let missing = tempfile::tempfile_in("/dev/shm").unwrap();
    let ram = kind::open(&[guest.block()], Access::ReadWrite).unwrap();
    let pager = Pager::open(ram, PagingMeans { inside: Box::new(inside), missing }, None).unwrap();
    let lenders = hosts.iter().map(|host| host.lender()).collect();
    Split::begin(pager, lenders, GUEST, Box::new(Counter::default())).unwrap()
}

fn take(guest: &Arc<ToyGuest>, split: &Arc<Split>, careless: bool) -> (Reclaimed, Result<(), ReclaimError>) {
    let (mut vmm, blocks, mut account) = (Vmm::of(guest), [guest.block()], Reclaimed::default());
    let (faults, elsewhere) =
        (Arc::clone(split.pager().guest_faults()), Arc::<Split>::clone(split) as Arc<dyn PagesElsewhere>);
    let machine = Machine {
        vmm: &mut vmm,
        faults,
        blocks: &blocks,
        away: None,
        elsewhere: Some(elsewhere),
        trust_first_look: careless,
    };
    let done = reclaim(machine, &Monitor::new("guest"), &mut account);
    (account, done)
}

#[test]
fn what_is_free_and_away_is_given_back_and_its_memory_host_has_it_no_more() {
    if !tracking_works() {
        return;
    }
    let guest = ToyGuest::new();
    let lending = LendingHost::to_guests_of(RAM_CHUNKS);
    let split = split(&guest, &[&lending]);
    guest.free(0x2000..0x2c00);
    let mut way = split.way_out().unwrap();
    // All of it, the kernel's account of its memory too.
    for chunk in 0..RAM_CHUNKS {
        way.send(ChunkIndex(chunk), 0).unwrap();
    }
    drop(way);
    let there = lending.pages();
    let (account, done) = take(&guest, &split, false);
    done.unwrap_or_else(|error| panic!("{error:?}: {account:?}"));
    assert_eq!((account.free_pages, account.reclaimed_pages), (3072, 3072), "{account:?}");
    // Some were looked at, and have come for that.
    assert!(account.elsewhere_pages > 2900, "{account:?}");
    split.keep_to(Room::of(2 * guest.ram.bytes)).unwrap();
    while lending.pages() > there - account.elsewhere_pages {
        std::thread::yield_now();
    }
    let came = split.account().in_pages;
    let sees = |page: u64| {
        let mut body = [1; 4096];
        guest.ram.mapping.copy_out(page * 4096..(page + 1) * 4096, &mut body);
        body
    };
    assert!((0x2000..0x2c00).all(|page| sees(page) == [0; 4096]) && split.account().in_pages == came);
    assert!((0x2c00..USED.end).all(|page| sees(page) == [7; 4096]), "what is in use is as it was");
    comes_together(&split);
}

/// Takes memory again and again of a guest that allocates and frees all the time, while its pages come and go. The
/// pages that held something else than was written, and what was taken.
fn churned(careless: bool, times: u32) -> (u64, Vec<Reclaimed>) {
    let guest = ToyGuest::new();
    let lending = [LendingHost::to_guests_of(RAM_CHUNKS), LendingHost::to_guests_of(RAM_CHUNKS)];
    let split = split(&guest, &[&lending[0], &lending[1]]);
    let churn = Churn::start(&guest);
    split.keep_to(Room::of(12 << 20)).unwrap();
    let mut accounts = Vec::new();
    for _ in 0..times {
        let (account, done) = take(&guest, &split, careless);
        match done {
            Ok(()) => accounts.push(account),
            // It frees and allocates more meanwhile than a kernel can; or what tells leaves as fast as it comes.
            Err(ReclaimError::Unfit(Unfit::CountersDisagree { .. }) | ReclaimError::Elsewhere) => {}
            Err(error) => panic!("{error:?}: {account:?}"),
        }
    }
    println!("{:?}", split.account());
    let bad = churn.end();
    comes_together(&split);
    (bad, accounts)
}

#[test]
fn a_split_guest_that_allocates_and_frees_all_the_time_loses_no_page() {
    if !tracking_works() {
        return;
    }
    let (mut bad, mut accounts) = (0, Vec::new());
    let sum = |accounts: &[Reclaimed], of: fn(&Reclaimed) -> u64| accounts.iter().map(of).sum::<u64>();
    for _ in 0..10 {
        let (lost, more) = churned(false, 20);
        bad += lost;
        accounts.extend(more);
        if sum(&accounts, |account| account.elsewhere_pages) > 1000 {
            break;
        }
    }
    println!(
        "{} runs: {} pages taken, {} of them elsewhere, {} put back",
        accounts.len(),
        sum(&accounts, |account| account.reclaimed_pages),
        sum(&accounts, |account| account.elsewhere_pages),
        sum(&accounts, |account| account.put_back_pages),
    );
    assert_eq!(bad, 0);
    assert!(sum(&accounts, |account| account.elsewhere_pages) > 1000, "little of what was away was free");
}

#[test]
fn what_was_free_once_and_is_taken_without_another_look_is_lost_wherever_it_is() {
    // Shows that the test above can fail.
    if tracking_works() {
        assert!((0..10).any(|_| churned(true, 20).0 > 0), "nothing was lost");
    }
}

/// Who is at fault is said: a guest without a kernel that describes itself, or a memory host that does not answer.
#[test]
fn what_is_in_the_way_is_named() {
    if !tracking_works() {
        return;
    }
    let guest = ToyGuest::new();
    let lending = LendingHost::to_guests_of(RAM_CHUNKS);
    let split = split(&guest, &[&lending]);
    guest.free(0x2000..0x2c00);
    let refused = || take(&guest, &split, false).1.unwrap_err();
    guest.change(|toy| toy.ram.write(NOTE, &[0; 64]));
    let found = refused();
    assert!(matches!(found, ReclaimError::Unfit(Unfit::NoKernel)), "{found:?}");
    let mut way = split.way_out().unwrap();
    for chunk in 0..RAM_CHUNKS {
        way.send(ChunkIndex(chunk), 0).unwrap();
    }
    drop(way);
    lending.relay.cut();
    let found = refused();
    assert!(matches!(found, ReclaimError::Elsewhere), "{found:?}");
    assert!(found.problem().hint.is_some_and(|hint| hint.contains("sterna show")));
    lending.relay.restore();
    comes_together(&split);
}
