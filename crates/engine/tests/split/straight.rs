//! Pages that go past the guest's next host, straight to memory hosts: what its source says, and what it does.

use sterna_engine::destination::arrival::Arrival;
use sterna_engine::paging::supplier::{Straight, Supplier, Whose};
use sterna_engine::split::onward::{Elsewhere, Handed};
use sterna_engine::store::client::StoreError;
use sterna_protocol::errand::{Errand, Put};
use sterna_protocol::pages::{PageMap, PageSet};
use sterna_protocol::store::Refusal;
use sterna_sys::iovec::Outgoing;

use super::*;

/// The pages of a chunk that have content: [`Guest::new`] has the same.
fn full() -> PageSet {
    PageSet::first(192)
}

/// A guest that runs here, and all of whose pages are at its source still. Of two chunks there is room.
fn coming(guest: &Guest, lenders: Vec<Lender>) -> Arc<Split> {
    let epoch = guest.epochs.raise().unwrap();
    let claim = Claim { guest: GUEST.0, key: GUEST.1, epoch };
    lenders.iter().flat_map(Lender::members).for_each(|lender| borrow(&lender, claim, CHUNKS).unwrap());
    let pager = Pager::open(guest.ram(), guest.means(), None).unwrap();
    let mut follow = PageMap::empty(pager.ram().layout());
    (0..CHUNKS).for_each(|chunk| follow.insert_all(ChunkIndex(chunk), &full()));
    let handed = Handed { lenders, guest: GUEST, epochs: guest.epochs() };
    let arriving = Split::arriving(pager, handed, &Elsewhere { away: Vec::new(), epoch }, follow).unwrap();
    let (split, raised) = arriving.take_over();
    raised.unwrap();
    split.keep_to(Room::of(2 * CHUNK_BYTES as u64)).unwrap();
    split
}

/// The source puts pages of an errand's chunk at its memory host, in this version.
fn puts(split: &Split, (errand, epoch): (Errand, u64), version: u64, pages: &PageSet) -> Result<(), StoreError> {
    let mut host = split.reach_in_the_name_of_its_owner(usize::from(errand.host), epoch)?;
    let bodies = bodies(errand.chunk, pages, 0);
    let parts: Vec<_> = bodies.chunks(PAGE_BYTES).map(Outgoing::from).collect();
    host.put(errand.chunk, (version, None), (*pages, PageSet::EMPTY), &parts).map(drop)
}

/// The source sends pages of a chunk after the guest; with `wrong` they are others than it wrote.
fn sends(split: &Split, chunk: ChunkIndex, pages: &PageSet, wrong: u64) {
    let bodies = bodies(chunk, pages, wrong);
    let (bodies, none) = ([(*pages, bodies.as_slice())], PageSet::EMPTY);
    let arrival = Arrival { chunk, bodies: &bodies, zero: none, pooled: None, suspect: none };
    split.pager().place(Whose::Source, &arrival).unwrap();
}

fn bodies(chunk: ChunkIndex, pages: &PageSet, wrong: u64) -> Vec<u8> {
    let word = |page: u8| content(u64::from(chunk.0) * 256 + u64::from(page)) + wrong;
    pages.iter().flat_map(|page| word(page).to_le_bytes().repeat(512)).collect()
}

/// It says that it has put these there, and asks what is next.
fn says(split: &Split, put: &[(ChunkIndex, PageSet)]) -> Straight {
    let put: Vec<_> =
        put.iter().map(|(chunk, pages)| Put { chunk: *chunk, pages: pages.to_bytes(), failed: false }).collect();
    split.straight(&put, true).unwrap()
}

/// The rest follows, and the guest finds what it wrote.
fn all_comes(guest: &Guest, split: &Arc<Split>) {
    (0..CHUNKS).for_each(|chunk| sends(split, ChunkIndex(chunk), &split.pager().to_come_in(ChunkIndex(chunk)), 0));
    assert_eq!(split.pager().to_come(), 0);
    split.keep_to(Room::ALL).unwrap();
    split.bring_back().unwrap();
    guest.is_as_it_was();
}

#[test]
fn what_the_source_has_put_at_a_memory_host_is_there_but_for_what_somebody_waits_for() {
    if !tracking_works() {
        return;
    }
    let (guest, hosts) = (Guest::untouched(), [LendingHost::new(), LendingHost::new()]);
    let split = coming(&guest, hosts.iter().map(LendingHost::lender).collect());
    assert!(split.straight(&[], false).unwrap().errands.is_empty(), "both sides are compared");
    let Straight { epoch, errands, .. } = says(&split, &[]);
    let chunks: Vec<_> = errands.iter().map(|errand| errand.chunk.0).collect();
    assert_eq!(chunks, [7, 6, 5, 4, 3, 2], "there is room for the others");
    assert!(errands.iter().any(|errand| errand.host == 0) && errands.iter().any(|errand| errand.host == 1));
    assert_eq!(says(&split, &[]).errands, errands, "once");

    let (last, to_come) = (errands[0].chunk, split.pager().to_come());
    let waits = guest.reads(7 * 256 + 5);
    until("it waits", || split.pager().waited_for_in(last).contains(5));
    puts(&split, (errands[0], epoch), errands[0].version, &full()).unwrap();
    let taken = says(&split, &[(last, full())]).taken;
    let but_for_5: PageSet = full().iter().filter(|page| *page != 5).collect();
    assert_eq!(taken, [but_for_5]);
    assert_eq!((split.pager().to_come(), split.pager().away_in(last)), (to_come - 191, but_for_5));
    until("the host forgets what was not taken", || hosts.iter().map(LendingHost::pages).sum::<u64>() == 191 + 1);
    // What comes from the source after that is no answer to what is at the memory host.
    sends(&split, last, &full(), 1 << 40);
    assert_eq!(split.pager().away_in(last), but_for_5);
    assert_eq!(waits.join().unwrap(), content(7 * 256 + 5) + (1 << 40), "that was the source's to send");
    guest.ram.mapping.copy_in((7 * 256 + 5) * 4096, &content(7 * 256 + 5).to_le_bytes().repeat(512)).unwrap();
    assert_eq!(guest.word(7 * 256 + 6), content(7 * 256 + 6));

    // Another daemon finds what was noted, and gives up what was not.
    puts(&split, (errands[1], epoch), errands[1].version, &full()).unwrap();
    dies(split);
    let split = guest.recover(&[&hosts[0], &hosts[1]]).unwrap();
    assert_eq!(split.pager().to_come(), 7 * 192);
    assert!(split.pager().away_in(errands[1].chunk).is_empty());
    all_comes(&guest, &split);
    split.end();
}

#[test]
fn what_a_memory_host_does_not_have_is_not_taken_whatever_the_source_says() {
    if !tracking_works() {
        return;
    }
    let (guest, hosts) = (Guest::untouched(), [LendingHost::new(), LendingHost::new()]);
    let split = coming(&guest, hosts.iter().map(LendingHost::lender).collect());
    let Straight { epoch, errands, .. } = says(&split, &[]);
    let of = |host: u8| errands.iter().copied().filter(move |errand| errand.host == host);
    // It has a part, in another version.
    let [some, other] = [of(0).next().unwrap(), of(0).nth(1).unwrap()];
    puts(&split, (some, epoch), some.version, &PageSet::first(100)).unwrap();
    puts(&split, (other, epoch), other.version + 1, &full()).unwrap();
    let said = says(&split, &[(some.chunk, full()), (other.chunk, full())]);
    assert_eq!(said.taken, [PageSet::EMPTY; 2]);
    assert_eq!(split.pager().away(), 0);
    // One that is away.
    let third = of(1).next().unwrap();
    hosts[1].relay.cut();
    let said = says(&split, &[(third.chunk, full())]);
    assert_eq!(said.taken, [PageSet::EMPTY]);
    hosts[1].relay.restore();
    // Those that are under way stay so; nothing more is left to one that had not what it was to have.
    let gone_on = says(&split, &[]).errands;
    assert_eq!(gone_on, said.errands);
    assert!(gone_on.iter().all(|errand| errand.host == 1 || errands.contains(errand)), "{gone_on:?}");
    let stranger = Put { chunk: some.chunk, pages: full().to_bytes(), failed: false };
    assert!(split.straight(&[stranger], true).is_err(), "nobody has sent it there");
    split.nothing_goes_straight();
    until("they forget what counts no more", || hosts.iter().all(|host| host.pages() == 0));
    all_comes(&guest, &split);
    split.end();
}

#[test]
fn nothing_of_a_chunk_leaves_that_the_source_is_to_put_there_and_a_late_put_counts_for_nothing() {
    if !tracking_works() {
        return;
    }
    let (guest, lending) = (Guest::untouched(), LendingHost::new());
    let split = coming(&guest, vec![lending.lender()]);
    let Straight { epoch, errands, .. } = says(&split, &[]);
    let errand = errands[0];
    let one: PageSet = [9].into_iter().collect();
    sends(&split, errand.chunk, &one, 0);
    let send = || split.way_out().unwrap().send(errand.chunk, 0).unwrap().away;
    assert!(send().is_empty());
    // It is there, and the link to the source breaks before it has said so.
    puts(&split, (errand, epoch), errand.version, &full()).unwrap();
    split.nothing_goes_straight();
    guest.writes(u64::from(errand.chunk.0) * 256 + 9);
    assert_eq!(send(), one);
    let late = puts(&split, (errand, epoch), errand.version + 7, &full());
    assert!(matches!(late, Err(StoreError::Refused(Refusal::Fenced { .. }))), "{late:?}");
    assert_eq!((lending.pages(), split.pager().away_in(errand.chunk)), (1 + 1, one));
    all_comes(&guest, &split);
    split.end();
}

#[test]
fn nothing_goes_past_a_host_where_pages_are_at_two_memory_hosts() {
    if !tracking_works() {
        return;
    }
    let (guest, hosts) = (Guest::untouched(), [LendingHost::new(), LendingHost::new()]);
    let split = coming(&guest, vec![Lender { mirror: Some(hosts[1].lender().peer), ..hosts[0].lender() }]);
    assert!(says(&split, &[]).errands.is_empty());
    all_comes(&guest, &split);
    split.end();
}
