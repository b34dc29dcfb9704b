//! Peers that misbehave, and links that break or damage what they carry.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use sterna_api::report::Status;
use sterna_api::{MigrateOptions, Mode};
use sterna_engine::monitor::Monitor;
use sterna_engine::source::{Fate, migrate};
use sterna_protocol::hello::HELLO_BYTES;

use crate::fixture::{MIB, code, run, verified};
use crate::pair::destination::Destination;
use crate::pair::guest::GuestRam;
use crate::pair::inside::InsideSelf;
use crate::pair::source::{DEVICE_BYTES, Source, SourceVmm};
use crate::pair::{outgoing, tracking_works};

/// A peer that misbehaves: what it does with each connection is up to `act`.
fn misbehaving(act: impl Fn(TcpStream) + Send + Sync + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let act = Arc::new(act);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let act = Arc::clone(&act);
            std::thread::spawn(move || act(stream));
        }
    });
    address
}

#[test]
fn peers_that_are_absent_silent_strange_or_of_another_version_are_named() {
    if !tracking_works() {
        return;
    }
    let ram = GuestRam::new(MIB);
    let attempt = |peer: &str| {
        let vmm = SourceVmm::new(None);
        let rolled_back = Arc::clone(&vmm.rolled_back);
        let outcome = run(outgoing(&ram, vmm, InsideSelf::default()), peer, &MigrateOptions::default());
        assert_eq!((outcome.fate, rolled_back.load(Ordering::Acquire)), (Fate::Here, true));
        code(&outcome).to_string()
    };
    assert_eq!(attempt("127.0.0.1:1"), "peer-unreachable");
    assert_eq!(attempt("no.such.host.invalid:1"), "peer-unreachable");
    let silent = misbehaving(|stream| {
        let _ = (&stream).read_to_end(&mut Vec::new());
    });
    assert_eq!(attempt(&silent), "link-failed");
    let web_server = misbehaving(|mut stream| {
        let mut request = [0; 64];
        let _ = stream.read(&mut request);
        let _ = stream.write_all(&b"HTTP/1.1 400 Bad Request\r\n".repeat(4));
    });
    assert_eq!(attempt(&web_server), "not-sterna");
    let newer = misbehaving(|mut stream| {
        let mut hello = [0; 64];
        let _ = stream.read_exact(&mut hello);
        hello[8] = 99;
        let _ = stream.write_all(&hello);
    });
    assert_eq!(attempt(&newer), "peer-version");
    let babbling = misbehaving(|mut stream| {
        let mut hello = [0; 64];
        let _ = stream.read_exact(&mut hello);
        let _ = stream.write_all(&hello);
        let _ = stream.write_all(&[0x5a; 4096]);
        // Until it is hung up on: an end with something unread would take back what was said.
        let _ = stream.read_to_end(&mut Vec::new());
    });
    assert_eq!(attempt(&babbling), "peer-protocol");
}

/// Passes bytes on to `to` until `limit` bytes have gone from the source, over all connections; then cuts them all.
fn cutting_proxy(to: String, limit: u64) -> String {
    let left = Arc::new(AtomicU64::new(limit));
    let cut = Arc::new(AtomicBool::new(false));
    misbehaving(move |mut source| {
        if cut.load(Ordering::Acquire) {
            return;
        }
        let mut destination = TcpStream::connect(&to).unwrap();
        let (mut back_from, mut back_to) = (destination.try_clone().unwrap(), source.try_clone().unwrap());
        std::thread::spawn(move || {
            let _ = std::io::copy(&mut back_from, &mut back_to);
            let _ = back_to.shutdown(std::net::Shutdown::Both);
        });
        let mut buffer = [0; 65_536];
        source.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        loop {
            let read = match source.read(&mut buffer) {
                Ok(0) => break,
                Ok(read) => read,
                Err(_) if cut.load(Ordering::Acquire) => break,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => continue,
                Err(_) => break,
            };
            let before = left
                .fetch_update(Ordering::AcqRel, Ordering::Acquire, |left| Some(left.saturating_sub(read as u64)))
                .unwrap();
            let pass = read.min(before as usize);
            if destination.write_all(&buffer[..pass]).is_err() || pass < read || cut.load(Ordering::Acquire) {
                cut.store(true, Ordering::Release);
                break;
            }
        }
        let _ = source.shutdown(std::net::Shutdown::Both);
        let _ = destination.shutdown(std::net::Shutdown::Both);
    })
}

#[test]
fn a_link_cut_at_any_byte_leaves_the_guest_on_exactly_one_host() {
    if !tracking_works() {
        return;
    }
    let ram = GuestRam::new(4 * MIB);
    (0..600).for_each(|page| ram.write_page(page, 5));
    let whole = 64 * 4 + 600 * 4096 + DEVICE_BYTES as u64;
    for limit in
        [0, 63, 64, 100, 400, 5_000, 300_000, whole / 2, whole - 50_000, whole - 100, whole + 4_000, whole + 20_000]
    {
        let (host, peer) = Destination::serve();
        let vmm = SourceVmm::new(None);
        let (rolled_back, quit) = (Arc::clone(&vmm.rolled_back), Arc::clone(&vmm.quit));
        let proxy = cutting_proxy(peer.clone(), limit);
        let source = Source::default();
        let outcome = migrate(
            outgoing(&ram, vmm, InsideSelf::default()),
            &proxy,
            &MigrateOptions::default(),
            &source,
            &Monitor::new("guest"),
        );
        let runs_there = host.running.load(Ordering::Acquire);
        match outcome.fate {
            Fate::Here => assert!(rolled_back.load(Ordering::Acquire) && !runs_there, "cut at {limit}"),
            Fate::There => assert!(quit.load(Ordering::Acquire) && runs_there, "cut at {limit}"),
            Fate::NotYet => panic!("cut at {limit}: nobody was full"),
            Fate::NotGivenBack => panic!("cut at {limit}: its VMM never refuses"),
            // Stopped here until the destination is asked on a link that works.
            Fate::Unknown => {
                assert!(
                    source.handed_over.load(Ordering::Acquire) && !rolled_back.load(Ordering::Acquire),
                    "cut at {limit}"
                );
            }
        }
        if !runs_there {
            let again = run(outgoing(&ram, SourceVmm::new(None), InsideSelf::default()), &peer, &verified(1));
            assert_eq!(again.report.status, Status::Completed, "after a cut at {limit}: {:?}", again.report.error);
            host.assert_same(&ram);
        }
    }
}

/// Passes bytes on to `to`, and flips one bit of the byte at `at`, counted over all that comes from the source in
/// order; `pages_only` counts the connections that carry pages alone.
fn damaging_proxy(to: String, at: u64, pages_only: bool) -> String {
    const ROLE_AT: usize = 12;
    const PAGES: u8 = 2;
    let passed = Arc::new(AtomicU64::new(0));
    misbehaving(move |mut source| {
        let mut hello = [0; HELLO_BYTES];
        let counts = source.peek(&mut hello).is_ok_and(|read| read > ROLE_AT && hello[ROLE_AT] == PAGES) || !pages_only;
        let mut destination = TcpStream::connect(&to).unwrap();
        let (mut back_from, mut back_to) = (destination.try_clone().unwrap(), source.try_clone().unwrap());
        std::thread::spawn(move || {
            let _ = std::io::copy(&mut back_from, &mut back_to);
            let _ = back_to.shutdown(std::net::Shutdown::Both);
        });
        let mut buffer = [0; 65_536];
        while let Ok(read @ 1..) = source.read(&mut buffer) {
            let before = passed.fetch_add(if counts { read as u64 } else { 0 }, Ordering::AcqRel);
            if counts && (before..before + read as u64).contains(&at) {
                buffer[(at - before) as usize] ^= 4;
            }
            if destination.write_all(&buffer[..read]).is_err() {
                break;
            }
        }
        let _ = destination.shutdown(std::net::Shutdown::Write);
    })
}

#[test]
fn a_body_damaged_on_its_way_comes_again() {
    if !tracking_works() {
        return;
    }
    let ram = GuestRam::new(4 * MIB);
    (0..600).for_each(|page| ram.write_page(page, 5));
    for mode in [Mode::Precopy, Mode::StopAndCopy] {
        let (host, peer) = Destination::serve();
        // Headers and digests are some kilobytes in all: far behind them lie bodies.
        let proxy = damaging_proxy(peer, 600 * 4096 / 2, true);
        let outcome = run(
            outgoing(&ram, SourceVmm::new(None), InsideSelf::default()),
            &proxy,
            &MigrateOptions { mode, ..verified(1) },
        );
        assert_eq!(outcome.report.status, Status::Completed, "{:?}", outcome.report.error);
        assert_eq!(outcome.report.pages.full, 601);
        host.assert_same(&ram);
    }
}

#[test]
fn a_damaged_header_fails_the_migration_at_once() {
    if !tracking_works() {
        return;
    }
    let (host, peer) = Destination::serve();
    let ram = GuestRam::new(4 * MIB);
    (0..600).for_each(|page| ram.write_page(page, 5));
    // Find the first frame's header: it follows the control connection's messages and the other connections' hellos.
    let codes: Vec<String> = (1..14)
        .map(|step| {
            let proxy = damaging_proxy(peer.clone(), step * 97, false);
            let outcome = run(outgoing(&ram, SourceVmm::new(None), InsideSelf::default()), &proxy, &verified(1));
            if outcome.report.status != Status::Completed {
                assert_eq!(outcome.fate, Fate::Here);
                assert!(!host.running.load(Ordering::Acquire));
            }
            host.running.store(false, Ordering::Release);
            code(&outcome).to_string()
        })
        .collect();
    assert!(codes.iter().any(|code| code == "peer-protocol"), "{codes:?}");
    assert!(codes.iter().all(|code| code != "verify-mismatch" && code != "out-of-memory"), "{codes:?}");
}

#[test]
fn callers_that_babble_do_not_hurt_the_destination() {
    if !tracking_works() {
        return;
    }
    let (host, peer) = Destination::serve();
    let mut state = 1u64;
    for length in [0, 1, 63, 64, 65, 300, 5000] {
        let garbage: Vec<u8> = (0..length)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 56) as u8
            })
            .collect();
        let mut stream = TcpStream::connect(&peer).unwrap();
        let _ = stream.write_all(&garbage);
        // A good hello, then garbage.
        let mut stream = TcpStream::connect(&peer).unwrap();
        let hello = sterna_protocol::hello::Hello {
            version: sterna_protocol::hello::VERSION,
            role: sterna_protocol::hello::Role::Control,
            features: sterna_protocol::hello::Features(0),
            needed: sterna_protocol::hello::Features(0),
            session: length as u128,
            key: 3,
        };
        let _ = stream.write_all(&hello.encode());
        let _ = stream.write_all(&garbage);
    }
    let ram = GuestRam::new(MIB);
    ram.write_page(3, 3);
    let outcome = run(outgoing(&ram, SourceVmm::new(None), InsideSelf::default()), &peer, &verified(1));
    assert_eq!(outcome.report.status, Status::Completed, "{:?}", outcome.report.error);
    host.assert_same(&ram);
}
