//! Who took the guest: what daemons of both minor versions say of themselves, and whom a source believes.

#[path = "support/pair/mod.rs"]
#[allow(dead_code, reason = "each test program uses its own part")]
mod pair;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::Ordering;

use pair::destination::Destination;
use pair::guest::GuestRam;
use pair::inside::InsideSelf;
use pair::source::{Source, SourceVmm};
use pair::{outgoing, tracking_works};
use sterna_api::MigrateOptions;
use sterna_api::report::Status;
use sterna_engine::error::MigrateError;
use sterna_engine::host::{DaemonId, DestinationHost, Verdict};
use sterna_engine::monitor::Monitor;
use sterna_engine::source::{Fate, ask_verdict, migrate};
use sterna_protocol::hello::{Features, HELLO_BYTES};
use sterna_protocol::spec::Kin;

const MIB: u64 = 1 << 20;
/// Where a hello has its minor version, and its features.
const MINOR: std::ops::Range<usize> = 10..12;
const FEATURES: std::ops::Range<usize> = 16..24;

/// Passes connections on to `to`, as two daemons would talk of which one speaks 1.0.
fn as_1_0(to: String) -> String {
    as_older(to, |hello| hello[MINOR].fill(0))
}

/// Passes connections on to `to`, as two daemons would talk of which one is older: it says `older` hellos.
fn as_older(to: String, older: fn(&mut [u8; HELLO_BYTES])) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        for near in listener.incoming().flatten() {
            let far = TcpStream::connect(&to).unwrap();
            for (mut from, mut to) in [(near.try_clone().unwrap(), far.try_clone().unwrap()), (far, near)] {
                std::thread::spawn(move || {
                    let mut hello = [0; HELLO_BYTES];
                    if from.read_exact(&mut hello).is_ok() {
                        older(&mut hello);
                        let _ = to.write_all(&hello).and_then(|()| std::io::copy(&mut from, &mut to).map(drop));
                    }
                    let _ = to.shutdown(std::net::Shutdown::Write);
                });
            }
        }
    });
    address
}

#[test]
fn a_destination_says_who_it_is_and_an_older_one_is_not_asked() {
    if !tracking_works() {
        return;
    }
    let ram = GuestRam::new(4 * MIB);
    (0..100).for_each(|page| ram.write_page(page, 5));
    for old in [false, true] {
        let (host, peer) = Destination::serve();
        host.identity.store(77, Ordering::Release);
        let peer = if old { as_1_0(peer) } else { peer };
        let source = Source::default();
        let going = outgoing(&ram, SourceVmm::new(None), InsideSelf::default());
        let id = going.id;
        let outcome = migrate(going, &peer, &MigrateOptions::default(), &source, &Monitor::new("guest"));
        assert_eq!((outcome.fate, outcome.report.status), (Fate::There, Status::Completed), "{:?}", outcome.report);
        host.assert_same(&ram);
        let known = (!old).then_some(DaemonId(77));
        assert_eq!((outcome.daemon, *source.handed_to.lock().unwrap()), (known, known));
        // Whoever knows nothing of it believes who answers, as ever.
        assert_eq!(ask_verdict(id, &peer, None, None).unwrap(), Verdict::Committed);
        let asked = ask_verdict(id, &peer, Some(DaemonId(77)), None);
        match asked {
            Ok(verdict) => assert_eq!((verdict, old), (Verdict::Committed, false)),
            // One that cannot say who it is may be any other.
            Err(MigrateError::AnotherDaemon { answers: None, .. }) => assert!(old),
            Err(error) => panic!("{error:?}"),
        }
    }
}

#[test]
fn a_daemon_that_is_not_meant_is_not_even_asked() {
    let (host, peer) = Destination::serve();
    host.identity.store(78, Ordering::Release);
    let id = sterna_engine::host::MigrationId(9);
    let error = ask_verdict(id, &peer, Some(DaemonId(77)), None).unwrap_err();
    assert!(matches!(error, MigrateError::AnotherDaemon { answers: Some(DaemonId(78)), .. }), "{error:?}");
    assert_eq!(error.problem().code, "another-daemon");
    host.commit(id, false).expect("nothing was settled there");
}

/// It was `Here` before: nobody looked at the guest again.
#[test]
fn a_guest_whose_rollback_fails_is_not_said_to_be_back() {
    if !tracking_works() {
        return;
    }
    let ram = GuestRam::new(4 * MIB);
    let (host, peer) = Destination::serve();
    host.refuse_state.store(true, Ordering::Release);
    let vmm = SourceVmm::new(None);
    let (refusals, rolled_back) = (vmm.refuse_rollback.clone(), vmm.rolled_back.clone());
    refusals.store(2, Ordering::Release);
    let going = outgoing(&ram, vmm, InsideSelf::default());
    let options = MigrateOptions::default();
    let mut outcome = migrate(going, &peer, &options, &Source::default(), &Monitor::new("guest"));
    assert_eq!((outcome.fate, outcome.report.status), (Fate::NotGivenBack, Status::Failed));
    let problem = outcome.report.error.unwrap();
    assert_eq!(problem.guest, sterna_api::problem::Whereabouts::Paused);
    assert!(problem.cause.last().unwrap().contains("could not be given back"), "{problem:?}");
    outcome.vmm.rollback().expect_err("it refuses twice");
    assert!(!rolled_back.load(Ordering::Acquire));
    outcome.vmm.rollback().expect("what it needs is kept until it works");
    assert!(rolled_back.load(Ordering::Acquire));
}

fn without_families(hello: &mut [u8; HELLO_BYTES]) {
    let own = Features::FAMILIES.and(Features::SMALL_PAGES).0.to_le_bytes();
    hello[FEATURES].iter_mut().zip(own).for_each(|(byte, own)| *byte &= !own);
}

#[test]
fn what_a_machine_is_related_to_and_its_pages_go_along_where_both_daemons_know_of_that() {
    if !tracking_works() {
        return;
    }
    let ram = GuestRam::new(MIB);
    let kin = Kin { family: "origin-1".into(), forked_from: Some("origin".into()) };
    for old in [false, true] {
        let (host, peer) = Destination::serve();
        let peer = if old { as_older(peer, without_families) } else { peer };
        let mut going = outgoing(&ram, SourceVmm::new(None), InsideSelf::default());
        (going.spec.kin, going.spec.small_pages) = (Some(kin.clone()), true);
        let outcome = migrate(going, &peer, &MigrateOptions::default(), &Source::default(), &Monitor::new("guest"));
        assert_eq!((outcome.fate, outcome.report.status), (Fate::There, Status::Completed), "{:?}", outcome.report);
        assert_eq!(*host.kin.lock().unwrap(), (!old).then(|| kin.clone()), "old: {old}");
        assert_eq!(host.small_pages.load(Ordering::Acquire), !old, "old: {old}");
    }
}
