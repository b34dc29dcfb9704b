//! Guests that come back to a host which has kept what their memory was. They keep writing on their way.

use std::fs::File;
use std::io::{Read, Write, copy};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use sterna_api::MigrateOptions;
use sterna_api::problem::Whereabouts;
use sterna_api::report::{Report, Status};
use sterna_engine::memory::kept::Kept;
use sterna_engine::memory::shared::SharedMemory;
use sterna_engine::memory::{BlockFile, Memory};
use sterna_engine::source::tickets::Tickets;
use sterna_engine::source::{Fate, Gang, Outcome};
use sterna_protocol::hello::{Features, HELLO_BYTES};
use sterna_protocol::spec::Ticket;
use sterna_sys::map::Access;

use crate::fixture::{MIB, run, verified};
use crate::pair::destination::Destination;
use crate::pair::guest::{GuestRam, Writers};
use crate::pair::inside::InsideSelf;
use crate::pair::source::SourceVmm;
use crate::pair::{block, outgoing, tracking_works};

const BYTES: u64 = 32 * MIB;
/// Pages that the guest has content in.
const PAGES: u64 = 6000;
/// The number of its ticket.
const NUMBER: u128 = 77;
/// Who the destination is, and another host.
const HOST: u64 = 5;
const OTHER: Ticket = Ticket { host: 6, number: 66 };

/// What is in a page that the guest has not written since it left.
fn content(page: u64) -> [u8; 4096] {
    let mut body = [1; 4096];
    body[..8].copy_from_slice(&page.to_le_bytes());
    body
}

/// A destination that has kept the RAM of the guest as it was.
fn destination() -> (Arc<Destination>, String) {
    let (host, peer) = Destination::serve();
    host.identity.store(HOST, Ordering::Release);
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.set_len(BYTES).unwrap();
    (0..PAGES).for_each(|page| file.write_all_at(&content(page), page * 4096).unwrap());
    let block = BlockFile { spec: block(BYTES), file, address: 0, process: None };
    let ram = SharedMemory::open(&[block], Access::Read).unwrap();
    let kept = Kept::nothing("/dev/shm".into());
    kept.keep(&ram, &|| true).unwrap();
    assert_eq!(ram.allocated_bytes().unwrap(), PAGES * 4096);
    *host.kept.lock().unwrap() = Some((NUMBER, kept));
    (host, peer)
}

/// The guest comes back, and writes all the time: some pages are as they were, some lie elsewhere, some are new, some
/// are zeros now. It shows this number.
fn returns((host, peer): (&Destination, &str), number: u128) -> Report {
    let ram = GuestRam::new(BYTES);
    (0..PAGES).for_each(|page| ram.mapping.copy_in(page * 4096, &content(page)).unwrap());
    (0..500).for_each(|page| ram.mapping.copy_in(page * 4096, &content(PAGES - 1 - page)).unwrap());
    (500..1000).for_each(|page| ram.write_page(page, page as u8 | 2));
    (1000..1500).for_each(|page| ram.write_page(page, 0));
    let writers = Writers::start(&ram, 1400..2400, Duration::from_micros(200));
    let mut guest = outgoing(&ram, SourceVmm::new(Some(writers)), InsideSelf::default());
    let had = vec![OTHER, Ticket { host: HOST.into(), number }];
    let alone = Some(Gang::alone(PAGES * 4096));
    guest.tickets = Tickets { shown: had.clone(), had, own: Some(Ticket { host: 7, number: 99 }), alone };
    let outcome = run(guest, peer, &verified(2));
    assert_eq!(outcome.report.status, Status::Completed, "{:?}", outcome.report.error);
    assert_eq!((outcome.report.verify.checked, outcome.report.verify.mismatches), (true, 0));
    host.assert_same(&ram);
    outcome.report
}

#[test]
fn a_guest_that_returns_refers_to_what_was_kept_and_takes_its_tickets_along() {
    if !tracking_works() {
        return;
    }
    let (host, peer) = destination();
    let report = returns((&host, &peer), NUMBER);
    let (references, full) = (report.pages.shared_reference, report.pages.full);
    assert!(references >= PAGES - 2500, "{references}");
    assert!(full >= 500, "{full}");
    let along = host.tickets.lock().unwrap().clone();
    assert_eq!(along, [OTHER, Ticket { host: 7, number: 99 }], "and not the one that it has used");
}

#[test]
fn whoever_shows_another_number_is_offered_nothing() {
    if !tracking_works() {
        return;
    }
    let (host, peer) = destination();
    let report = returns((&host, &peer), NUMBER + 1);
    assert_eq!(report.pages.shared_reference, 0);
    assert!(report.pages.full >= PAGES - 1500);
}

#[test]
fn what_is_lost_between_offer_and_reference_is_asked_for() {
    if !tracking_works() {
        return;
    }
    let (host, peer) = destination();
    let file = host.kept.lock().unwrap().as_ref().unwrap().1.files().unwrap().remove(0);
    *host.after_offer.lock().unwrap() = Some(Box::new(move || {
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        File::options().write(true).open(path).unwrap().set_len(PAGES * 2048).unwrap();
    }));
    let report = returns((&host, &peer), NUMBER);
    assert!(report.pages.shared_reference > 0 && report.pages.full >= PAGES / 2 - 600, "{:?}", report.pages);
}

/// Moves a guest, which is as it was kept, to a destination where three of the pages that it offers are not what their
/// digests say: to the source it is the same whether the digests were forged or the pages overwritten since.
fn is_offered_what_is_not_there(notes: bool, options: &MigrateOptions) -> (Arc<Destination>, GuestRam, Outcome) {
    let (host, peer) = destination();
    host.postcopy.store(notes, Ordering::Release);
    let file = host.kept.lock().unwrap().as_ref().unwrap().1.files().unwrap().remove(0);
    *host.after_offer.lock().unwrap() = Some(Box::new(move || {
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let file = File::options().write(true).open(path).unwrap();
        (100..103).for_each(|page| file.write_all_at(&content(PAGES + page), page * 4096).unwrap());
    }));
    let ram = GuestRam::new(BYTES);
    (0..PAGES).for_each(|page| ram.mapping.copy_in(page * 4096, &content(page)).unwrap());
    let mut guest = outgoing(&ram, SourceVmm::new(None), InsideSelf::default());
    let had = vec![Ticket { host: HOST.into(), number: NUMBER }];
    let alone = Some(Gang::alone(PAGES * 4096));
    guest.tickets = Tickets { shown: had.clone(), had, own: None, alone };
    let outcome = run(guest, &peer, options);
    (host, ram, outcome)
}

/// A guest goes on at the source where both sides are compared in the pause, and else at the destination, where it is
/// known to have other pages. Without a comparison nobody finds that.
#[test]
fn an_offered_page_that_is_not_what_its_digest_says_is_found_by_the_comparison() {
    if !tracking_works() {
        return;
    }
    for (notes, fate, at) in [(false, Fate::Here, Whereabouts::Source), (true, Fate::There, Whereabouts::Destination)] {
        let (host, _, outcome) = is_offered_what_is_not_there(notes, &verified(2));
        let report = &outcome.report;
        assert_eq!((report.status, outcome.fate, report.verify.mismatches), (Status::Failed, fate, 3), "{notes}");
        let problem = report.error.as_ref().expect("pages differ");
        assert_eq!((problem.code.as_str(), problem.guest), ("verify-mismatch", at));
        assert_eq!((report.pages.shared_reference, host.running.load(Ordering::Acquire)), (PAGES, notes));
    }
    let (host, ram, outcome) = is_offered_what_is_not_there(true, &MigrateOptions { verify: false, ..verified(2) });
    assert_eq!((outcome.report.status, outcome.report.verify.checked), (Status::Completed, false));
    let there = host.ram.lock().unwrap().as_ref().unwrap().try_clone().unwrap();
    let differs = |page: &u64| {
        let [mut here, mut found] = [[0; 4096]; 2];
        ram.mapping.copy_out(page * 4096..(page + 1) * 4096, &mut here);
        there.read_exact_at(&mut found, page * 4096).unwrap();
        here != found
    };
    assert_eq!((0..PAGES).filter(differs).collect::<Vec<_>>(), [100, 101, 102]);
}

/// A way to a daemon that does not know tickets: the bit of its hello says so.
fn older(peer: String) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        for caller in listener.incoming().map_while(Result::ok) {
            let daemon = TcpStream::connect(&peer).unwrap();
            for (mut from, mut to) in [(&caller, &daemon), (&daemon, &caller)] {
                let mut hello = [0; HELLO_BYTES];
                from.read_exact(&mut hello).unwrap();
                let features = u64::from_le_bytes(*hello[16..].first_chunk().unwrap()) & !Features::RETURNS.0;
                hello[16..24].copy_from_slice(&features.to_le_bytes());
                to.write_all(&hello).unwrap();
            }
            for (from, to) in [(&caller, &daemon), (&daemon, &caller)] {
                let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                std::thread::spawn(move || {
                    let _ = copy(&mut from, &mut to);
                    let _ = to.shutdown(Shutdown::Write);
                });
            }
        }
    });
    address
}

#[test]
fn a_daemon_that_does_not_know_tickets_is_shown_none() {
    if !tracking_works() {
        return;
    }
    let (host, peer) = destination();
    let report = returns((&host, &older(peer)), NUMBER);
    assert_eq!(report.pages.shared_reference, 0);
    assert!(host.tickets.lock().unwrap().is_empty());
}
