//! Migrations over mutual TLS in one process, and every way in which two daemons do not trust each other.

#[path = "support/authority.rs"]
mod authority;
#[path = "support/pair/mod.rs"]
#[allow(dead_code, reason = "each test program uses its own part")]
mod pair;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use authority::Authority;
use pair::destination::Destination;
use pair::guest::{GuestRam, Writers};
use pair::inside::InsideSelf;
use pair::source::{Source, SourceVmm};
use pair::{outgoing, tracking_works};
use sterna_api::report::Status;
use sterna_api::{MigrateOptions, Mode, Problem};
use sterna_engine::monitor::Monitor;
use sterna_engine::source::{Fate, Outcome, migrate};
use sterna_engine::transport::credentials::{Credentials, Files};
use sterna_engine::transport::{SessionKey, call};
use sterna_protocol::hello::{Features, Role};

const MIB: u64 = 1 << 20;
/// The destination in these tests: the address it is called by, and its identity.
const B: [&str; 2] = ["b.example", "127.0.0.1"];
/// A refusal that takes longer, and does so each time, has waited for something.
const SECONDS: Duration = Duration::from_secs(4);

/// What `tried` comes to, where it takes no longer in one of a few tries: machines have other work, too.
fn at_once<T>(mut tried: impl FnMut() -> T) -> T {
    let (mut last, mut took) = (None, Duration::MAX);
    for _ in 0..5 {
        let began = Instant::now();
        last = Some(tried());
        took = began.elapsed();
        if took < SECONDS {
            break;
        }
    }
    assert!(took < SECONDS, "it took {took:?}");
    last.expect("it was tried")
}

fn run(outgoing: sterna_engine::source::Outgoing, peer: &str, ours: Option<Arc<Credentials>>, streams: u32) -> Outcome {
    let options = MigrateOptions { streams, verify: true, ..MigrateOptions::default() };
    let source = Source { credentials: ours, ..Source::default() };
    migrate(outgoing, peer, &options, &source, &Monitor::new("guest"))
}

/// Tries to move a small guest that stays; why.
fn refused(peer: &str, ours: Option<Arc<Credentials>>) -> Problem {
    let ram = GuestRam::new(MIB);
    let outcome = at_once(|| run(outgoing(&ram, SourceVmm::new(None), InsideSelf::default()), peer, ours.clone(), 1));
    assert_eq!(outcome.fate, Fate::Here);
    let problem = outcome.report.error.expect("it was refused");
    println!("{}: {} {:?} ({:?})", problem.code, problem.message, problem.cause, problem.hint);
    assert!(problem.hint.is_some(), "it is not said what to do");
    problem
}

/// A small guest arrives.
fn arrives(host: &Destination, peer: &str, ours: Option<Arc<Credentials>>) {
    let ram = GuestRam::new(MIB);
    (0..100).for_each(|page| ram.write_page(page, 3));
    let outcome = run(outgoing(&ram, SourceVmm::new(None), InsideSelf::default()), peer, ours, 2);
    assert_eq!(outcome.report.status, Status::Completed, "{:?}", outcome.report.error);
    host.assert_same(&ram);
}

#[test]
fn pages_follow_a_guest_over_tls() {
    if !tracking_works() {
        return;
    }
    let authority = Authority::new();
    for streams in [1, 3] {
        let (host, peer) = Destination::serve_with(Some(authority.host(&B)));
        host.postcopy.store(true, Ordering::Release);
        *host.touched.lock().unwrap() = vec![5, 1000, 3999];
        let ram = GuestRam::new(16 * MIB);
        (0..4000).for_each(|page| ram.write_page(page, page as u8 | 1));
        let options = MigrateOptions { mode: Mode::Postcopy, streams, verify: true, ..MigrateOptions::default() };
        let source = Source { credentials: Some(authority.host(&["a.example"])), ..Source::default() };
        let going = outgoing(&ram, SourceVmm::new(None), InsideSelf::default());
        let outcome = migrate(going, &peer, &options, &source, &Monitor::new("guest"));
        let report = &outcome.report;
        assert_eq!(report.status, Status::Completed, "{:?}", report.error);
        assert_eq!((report.pages.faulted >= 3, report.pages.duplicate), (true, 0), "{:?}", report.pages);
        assert_eq!((report.verify.checked, report.verify.mismatches), (true, 0));
        host.assert_same(&ram);
    }
}

#[test]
fn a_guest_that_keeps_writing_arrives_whole_over_tls() {
    if !tracking_works() {
        return;
    }
    let authority = Authority::new();
    for streams in [1, 4] {
        let (host, peer) = Destination::serve_with(Some(authority.host(&B)));
        let ram = GuestRam::new(64 * MIB + 4096);
        (0..9000).for_each(|page| ram.write_page(page, page as u8));
        let writers = Writers::start(&ram, 0..12_000, Duration::ZERO);
        let vmm = SourceVmm::new(Some(writers));
        let outcome =
            run(outgoing(&ram, vmm, InsideSelf::default()), &peer, Some(authority.host(&["a.example"])), streams);
        assert_eq!(outcome.report.status, Status::Completed, "{:?}", outcome.report.error);
        assert!(outcome.report.rounds.len() > 1, "the writers left nothing to do");
        assert_eq!((outcome.report.verify.checked, outcome.report.verify.mismatches), (true, 0));
        assert!(host.running.load(Ordering::Acquire));
        host.assert_same(&ram);
    }
}

#[test]
fn a_certificate_of_another_authority_is_refused_on_either_side() {
    if !tracking_works() {
        return;
    }
    let (ours, theirs) = (Authority::new(), Authority::new());
    // The caller notices first.
    let (_host, peer) = Destination::serve_with(Some(theirs.host(&B)));
    let problem = refused(&peer, Some(ours.host(&["a.example"])));
    assert_eq!(problem.code, "tls-untrusted");
    assert!(problem.message.contains("is not signed by"), "{problem:?}");
    // A caller that believes both authorities is refused by a listener that does not.
    let mut files = ours.files(&["a.example"], (2020, 2120));
    let both = [ours.path("authority.pem"), theirs.path("authority.pem")].map(|path| std::fs::read(path).unwrap());
    files.authority = ours.path("both.pem");
    std::fs::write(&files.authority, both.concat()).unwrap();
    let problem = refused(&peer, Some(Arc::new(Credentials::load(files).unwrap())));
    assert_eq!(problem.code, "tls-refused");
    assert!(problem.message.contains("not signed by the authority there"), "{problem:?}");
}

#[test]
fn an_expired_certificate_is_refused_on_either_side() {
    if !tracking_works() {
        return;
    }
    let authority = Authority::new();
    let old = |names: &[&str]| Arc::new(Credentials::load(authority.files(names, (2019, 2020))).unwrap());
    let (_host, peer) = Destination::serve_with(Some(old(&B)));
    let problem = refused(&peer, Some(authority.host(&["a.example"])));
    assert_eq!((problem.code.as_str(), problem.message.as_str()), ("tls-date", "the peer's certificate has expired"));
    let (_host, peer) = Destination::serve_with(Some(authority.host(&B)));
    let problem = refused(&peer, Some(old(&["a.example"])));
    assert_eq!(problem.code, "tls-refused");
    assert!(problem.message.contains("expired"), "{problem:?}");
}

#[test]
fn a_caller_without_a_certificate_is_refused() {
    let authority = Authority::new();
    let (_host, peer) = Destination::serve_with(Some(authority.host(&B)));
    let mut roots = rustls::RootCertStore::empty();
    let pem = std::fs::read(authority.path("authority.pem")).unwrap();
    for certificate in
        <rustls::pki_types::CertificateDer as rustls::pki_types::pem::PemObject>::pem_slice_iter(&pem).flatten()
    {
        roots.add(certificate).unwrap();
    }
    let config = rustls::ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let tls = rustls::ClientConnection::new(Arc::new(config), "127.0.0.1".try_into().unwrap()).unwrap();
    let mut stream = rustls::StreamOwned::new(tls, TcpStream::connect(&peer).unwrap());
    let error = stream.write_all(&[0; 64]).and_then(|()| stream.read_exact(&mut [0; 64])).unwrap_err();
    assert!(error.to_string().contains("CertificateRequired"), "{error}");
}

#[test]
fn a_destination_whose_certificate_is_for_another_host_is_refused() {
    if !tracking_works() {
        return;
    }
    let authority = Authority::new();
    let (_host, peer) = Destination::serve_with(Some(authority.host(&["c.example", "127.0.0.2"])));
    let problem = refused(&peer, Some(authority.host(&["a.example"])));
    assert_eq!(problem.code, "tls-name");
    assert!(problem.message.contains("not for '127.0.0.1' but for"), "{problem:?}");
    assert!(problem.message.contains("c.example"), "{problem:?}");
}

#[test]
fn only_those_on_the_list_may_call() {
    if !tracking_works() {
        return;
    }
    let authority = Authority::new();
    let files = Files { peers: vec!["A.example".into()], ..authority.files(&B, (2020, 2120)) };
    let (host, peer) = Destination::serve_with(Some(Arc::new(Credentials::load(files).unwrap())));
    arrives(&host, &peer, Some(authority.host(&["a.example"])));
    let problem = refused(&peer, Some(authority.host(&["c.example", "a.example"])));
    assert_eq!(problem.code, "tls-refused");
    assert!(problem.message.contains("not among the peers"), "{problem:?}");
}

#[test]
fn plain_and_encrypted_daemons_tell_each_other_what_is_wrong() {
    if !tracking_works() {
        return;
    }
    let authority = Authority::new();
    let (encrypted, peer) = Destination::serve_with(Some(authority.host(&B)));
    let problem = refused(&peer, None);
    assert_eq!(problem.code, "tls-mixed");
    assert!(problem.message.contains("the peer needs what this daemon lacks: TLS"), "{problem:?}");
    arrives(&encrypted, &peer, Some(authority.host(&["a.example"])));

    let (plain, peer) = Destination::serve();
    let problem = refused(&peer, Some(authority.host(&["a.example"])));
    assert_eq!(
        (problem.code.as_str(), problem.message.as_str()),
        ("tls-mixed", "this daemon has [tls], the peer speaks plain")
    );
    arrives(&plain, &peer, None);
}

#[test]
fn callers_that_babble_or_stall_before_the_handshake_hold_nobody_up() {
    if !tracking_works() {
        return;
    }
    let authority = Authority::new();
    let (host, peer) = Destination::serve_with(Some(authority.host(&B)));
    let mut held = Vec::new();
    // Nothing; the beginning of a handshake, and no more; a handshake that cannot be; a record that cannot be; no
    // handshake.
    for bytes in
        [&b""[..], &[22, 3, 1, 2, 0, 1], &[22; 4000], &[22, 3, 1, 255, 255, 1], &b"GET / HTTP/1.1\r\n\r\n".repeat(9)]
    {
        let mut stream = TcpStream::connect(&peer).unwrap();
        let _ = stream.write_all(bytes);
        held.push(stream);
    }
    // It waits for none of the others.
    at_once(|| arrives(&host, &peer, Some(authority.host(&["a.example"]))));
    for mut stream in held {
        // Hung up on once the time for a handshake, and that for its answer, are over.
        stream.set_read_timeout(Some(Duration::from_secs(300))).unwrap();
        let mut buffer = [0; 1000];
        let ended = loop {
            match stream.read(&mut buffer) {
                Ok(1..) => {}
                Ok(0) => break true,
                Err(error) => break error.kind() != std::io::ErrorKind::WouldBlock,
            }
        };
        assert!(ended, "it is kept for ever");
    }
}

#[test]
fn a_session_is_its_founders_alone() {
    let authority = Authority::new();
    let (_host, peer) = Destination::serve_with(Some(authority.host(&B)));
    let (a, c) = (authority.host(&["a.example"]), authority.host(&["c.example"]));
    let session = SessionKey { session: 77, key: 78, needed: Features::NONE };
    let mut control = call(&peer, session, Role::Control, Some(&a)).unwrap();
    let mut intruder = call(&peer, session, Role::Pages(0), Some(&c)).unwrap();
    assert_eq!(intruder.read(&mut [0]).ok(), Some(0), "it is hung up on");
    let mut own = call(&peer, session, Role::Pages(0), Some(&a)).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    assert!(own.alive() && control.alive() && !intruder.alive());
}

#[test]
fn a_renewed_certificate_is_used_from_the_next_call_on() {
    if !tracking_works() {
        return;
    }
    let authority = Authority::new();
    let files = authority.files(&B, (2019, 2020));
    let (host, peer) = Destination::serve_with(Some(Arc::new(Credentials::load(files.clone()).unwrap())));
    let a = authority.host(&["a.example"]);
    assert_eq!(refused(&peer, Some(Arc::clone(&a))).code, "tls-date");
    authority.files(&B, (2020, 2120));
    arrives(&host, &peer, Some(Arc::clone(&a)));
    // Half a renewal: the key is not there yet. What was read before still does.
    let key = std::fs::read_to_string(&files.key).unwrap();
    std::fs::remove_file(&files.key).unwrap();
    arrives(&host, &peer, Some(Arc::clone(&a)));
    authority::write_key(&files.key, &key);
    arrives(&host, &peer, Some(a));
}

/// Half-written, of two pairs, empty, gone, and good again, while guests are moved: each call finds a pair that works.
/// (Guards what was found right.)
#[test]
fn certificates_that_change_under_way_fail_no_migration() {
    if !tracking_works() {
        return;
    }
    let authority = Authority::new();
    let files = authority.files(&B, (2020, 2120));
    let (host, peer) = Destination::serve_with(Some(Arc::new(Credentials::load(files.clone()).unwrap())));
    let a = authority.host(&["a.example"]);
    let read = |files: &Files| {
        (std::fs::read_to_string(&files.certificate).unwrap(), std::fs::read_to_string(&files.key).unwrap())
    };
    let pairs = [read(&files), read(&authority.files(&B, (2020, 2120)))];
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let changing = scope.spawn(|| {
            let (mut changes, mut at) = (0u64, 0);
            while !stop.load(Ordering::Acquire) {
                at = 1 - at;
                let (certificate, key) = &pairs[at];
                for text in [&certificate[..certificate.len() / 2], "", &pairs[1 - at].0, certificate] {
                    std::fs::write(&files.certificate, text).unwrap();
                    std::thread::yield_now();
                }
                for text in [&key[..key.len() / 2], key] {
                    authority::write_key(&files.key, text);
                    std::thread::yield_now();
                }
                let _ = std::fs::remove_file(&files.certificate);
                std::fs::write(&files.certificate, certificate).unwrap();
                changes += 1;
            }
            changes
        });
        for _ in 0..10 {
            arrives(&host, &peer, Some(Arc::clone(&a)));
        }
        stop.store(true, Ordering::Release);
        assert!(changing.join().unwrap() > 0);
    });
    arrives(&host, &peer, Some(a));
}

#[test]
fn credentials_that_cannot_work_are_refused_at_the_start_with_the_file_at_fault() {
    let authority = Authority::new();
    let good = authority.files(&B, (2020, 2120));
    let code = |files: Files| {
        let error = Credentials::load(files).unwrap_err();
        let problem = error.problem();
        println!("{} {:?}", problem.message, problem.hint);
        (problem.code, problem.message, problem.hint.unwrap())
    };
    let open = authority.path("open.key");
    std::fs::copy(&good.key, &open).unwrap();
    std::fs::set_permissions(&open, std::fs::Permissions::from_mode(0o640)).unwrap();
    let (name, message, hint) = code(Files { key: open.clone(), ..good.clone() });
    assert_eq!((name.as_str(), hint), ("tls-key-exposed", format!("chmod 600 {}", open.display())));
    assert!(message.contains("mode 640"), "{message}");
    assert!(code(Files { key: authority.path("none"), ..good.clone() }).1.contains("none"));
    assert!(code(Files { certificate: good.key.clone(), ..good.clone() }).1.contains("holds no certificate"));
    let other_key = authority.files(&["c.example"], (2020, 2120)).key;
    assert_eq!(code(Files { key: other_key, ..good.clone() }).0, "tls-files");
    let other = Authority::new();
    assert!(code(Files { authority: other.path("authority.pem"), ..good }).1.contains("is not signed by"));
    assert!(code(authority.files(&["127.0.0.1"], (2020, 2120))).1.contains("no DNS name"));
}

/// Passes bytes on to `to`, and flips one bit of the byte at `at`, counted over all that comes from the source in
/// order.
fn damaging_proxy(to: String, at: u64) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let passed = Arc::new(AtomicU64::new(0));
    std::thread::spawn(move || {
        for mut source in listener.incoming().flatten() {
            let mut destination = TcpStream::connect(&to).unwrap();
            let (mut back_from, mut back_to) = (destination.try_clone().unwrap(), source.try_clone().unwrap());
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut back_from, &mut back_to);
                let _ = back_to.shutdown(std::net::Shutdown::Both);
            });
            let passed = Arc::clone(&passed);
            std::thread::spawn(move || {
                let mut buffer = [0; 65_536];
                while let Ok(read @ 1..) = source.read(&mut buffer) {
                    let before = passed.fetch_add(read as u64, Ordering::AcqRel);
                    if (before..before + read as u64).contains(&at) {
                        buffer[(at - before) as usize] ^= 4;
                    }
                    if destination.write_all(&buffer[..read]).is_err() {
                        break;
                    }
                }
                let _ = destination.shutdown(std::net::Shutdown::Write);
            });
        }
    });
    address
}

#[test]
fn what_somebody_changes_on_the_way_is_never_used() {
    if !tracking_works() {
        return;
    }
    let authority = Authority::new();
    let (host, peer) = Destination::serve_with(Some(authority.host(&B)));
    let ram = GuestRam::new(4 * MIB);
    (0..600).for_each(|page| ram.write_page(page, 5));
    // In the handshake, in the messages, in the pages.
    for at in [40, 1500, 3500, 600 * 4096 / 2] {
        let proxy = damaging_proxy(peer.clone(), at);
        let vmm = SourceVmm::new(None);
        let outcome = run(outgoing(&ram, vmm, InsideSelf::default()), &proxy, Some(authority.host(&["a.example"])), 1);
        assert_eq!((outcome.report.status, outcome.fate), (Status::Failed, Fate::Here), "changed at {at}");
        assert!(!host.running.load(Ordering::Acquire));
        println!("{at}: {:?}", outcome.report.error);
    }
    arrives(&host, &peer, Some(authority.host(&["a.example"])));
}
