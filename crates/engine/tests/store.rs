//! A memory host and the owners of guests, over real sockets: what comes back is what was sent last, whoever is cut
//! off, comes late, lies or asks for too much.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use sterna_engine::store::Store;
use sterna_engine::store::client::{MemoryHost, StoreError};
use sterna_engine::store::serve::serve;
use sterna_engine::transport::answer;
use sterna_protocol::frame::{ChunkFrame, Frame, FrameWriter};
use sterna_protocol::layout::{CHUNK_BYTES, ChunkIndex, PAGE_BYTES};
use sterna_protocol::message;
use sterna_protocol::pages::PageSet;
use sterna_protocol::store::{Claim, Held, Refusal, StoreReply, StoreRequest, Summing, most_bytes};
use sterna_sys::iovec::Outgoing;
use sterna_sys::map::{Access, SharedMapping};

const CHUNKS: u32 = 8;

fn claim(guest: u128) -> Claim {
    Claim { guest, key: guest << 64 | 0x5eed, epoch: 1 }
}

/// A host that lends, until the test ends.
struct Lender {
    store: Arc<Store>,
    peer: String,
}

impl Lender {
    fn new(dir: &Path, budget_bytes: u64) -> Self {
        let store = Arc::new(Store::open(dir, "lender".into(), budget_bytes).unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let peer = listener.local_addr().unwrap().to_string();
        let shared = Arc::clone(&store);
        std::thread::spawn(move || {
            for call in listener.incoming() {
                let (call, store) = (call.unwrap(), Arc::clone(&shared));
                std::thread::spawn(move || {
                    let (connection, hello) = answer(call, None).unwrap();
                    let _ = serve(connection, hello.key, &store, || u64::MAX);
                });
            }
        });
        Self { store, peer }
    }

    fn open(&self, claim: Claim) -> Result<MemoryHost, StoreError> {
        self.ask(claim, most_bytes(CHUNKS))
    }

    fn reopen(&self, claim: Claim) -> Result<MemoryHost, StoreError> {
        MemoryHost::reopen(&self.peer, None, (1, 2), claim, most_bytes(CHUNKS), CHUNKS)
    }

    fn ask(&self, claim: Claim, bytes: u64) -> Result<MemoryHost, StoreError> {
        MemoryHost::open(&self.peer, None, (1, 2), claim, bytes, CHUNKS)
    }
}

fn dir() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap()
}

fn set(pages: &[u8]) -> PageSet {
    pages.iter().copied().collect()
}

fn body(content: u64) -> Vec<u8> {
    content.to_le_bytes().repeat(PAGE_BYTES / 8)
}

/// Puts pages of one content each.
fn put(host: &mut MemoryHost, chunk: u32, version: (u64, Option<u64>), pages: &[(u8, u64)]) -> Result<(), StoreError> {
    let full: PageSet = pages.iter().filter(|(_, content)| *content != 0).map(|(page, _)| *page).collect();
    let zero: PageSet = pages.iter().filter(|(_, content)| *content == 0).map(|(page, _)| *page).collect();
    let mut pages: Vec<_> = pages.iter().filter(|(_, content)| *content != 0).collect();
    pages.sort_unstable();
    let bodies: Vec<u8> = pages.iter().flat_map(|(_, content)| body(*content)).collect();
    let kept = host.put(ChunkIndex(chunk), version, (full, zero), &[Outgoing::from(bodies.as_slice())])?;
    let digester = host.digester();
    assert_eq!(kept, pages.iter().map(|(_, content)| digester.page(&body(*content))).collect::<Vec<_>>());
    Ok(())
}

fn refused<T>(result: Result<T, StoreError>) -> Refusal {
    match result {
        Err(StoreError::Refused(refusal)) => refusal,
        Err(other) => panic!("another error: {other}"),
        Ok(_) => panic!("it was not refused"),
    }
}

/// Four owners beside each other, each with two connections, who put, replace, add, release and look at random.
#[test]
fn whatever_its_owners_do_each_gets_back_what_it_sent_last() {
    let dir = dir();
    let lender = Lender::new(dir.path(), 4 * most_bytes(CHUNKS));
    std::thread::scope(|scope| {
        for guest in 1..=4u64 {
            let lender = &lender;
            scope.spawn(move || {
                let claim = claim(guest.into());
                let mut hosts = [lender.open(claim).unwrap(), lender.open(claim).unwrap()];
                let mut model: BTreeMap<u32, (u64, BTreeMap<u8, u64>)> = BTreeMap::new();
                let mut random = guest * 0x9e37_79b9_7f4a_7c15;
                let mut draw = |below: u64| {
                    random ^= random << 13;
                    random ^= random >> 7;
                    random ^= random << 17;
                    random % below
                };
                for version in 1..400u64 {
                    let host = &mut hosts[draw(2) as usize];
                    let chunk = draw(CHUNKS.into()) as u32;
                    let pages: BTreeMap<u8, u64> = (0..1 + draw(20))
                        .map(|_| (draw(256) as u8, if draw(5) == 0 { 0 } else { version << 8 | guest }))
                        .collect();
                    let known = model.get(&chunk).cloned();
                    match (draw(4), known) {
                        (0, Some((base, mut has))) => {
                            put(
                                host,
                                chunk,
                                (version, Some(base)),
                                &pages.iter().map(|(p, c)| (*p, *c)).collect::<Vec<_>>(),
                            )
                            .unwrap();
                            has.extend(pages);
                            model.insert(chunk, (version, has));
                        }
                        (1, Some((of, mut has))) => {
                            let gone: PageSet = pages.keys().copied().collect();
                            host.release(ChunkIndex(chunk), of, &gone).unwrap();
                            has.retain(|page, _| !gone.contains(*page));
                            if has.is_empty() {
                                model.remove(&chunk)
                            } else {
                                model.insert(chunk, (of, has))
                            };
                        }
                        (2, Some((of, has))) => {
                            let all: PageSet = has.keys().copied().collect();
                            let got = host.get(ChunkIndex(chunk), of, &all).unwrap();
                            let zero: PageSet = has.iter().filter(|(_, c)| **c == 0).map(|(p, _)| *p).collect();
                            let bodies: Vec<u8> = has.values().filter(|c| **c != 0).flat_map(|c| body(*c)).collect();
                            assert_eq!((got.zero, got.full), (zero, all.without(&zero)));
                            assert!(got.bodies == bodies, "chunk {chunk} of guest {guest}");
                        }
                        _ => {
                            put(host, chunk, (version, None), &pages.iter().map(|(p, c)| (*p, *c)).collect::<Vec<_>>())
                                .unwrap();
                            model.insert(chunk, (version, pages));
                        }
                    }
                }
                let held: Vec<_> = hosts[0].inventory().unwrap();
                let held: BTreeMap<_, _> = held
                    .iter()
                    .map(|entry| (entry.chunk.0, (entry.version, PageSet::from_bytes(&entry.pages))))
                    .collect();
                let meant: BTreeMap<_, _> = model
                    .iter()
                    .map(|(chunk, (version, has))| (*chunk, (*version, has.keys().copied().collect::<PageSet>())))
                    .collect();
                assert_eq!(held, meant);
                let (digester, mut sum) = (hosts[0].digester(), Summing::new(claim.key));
                for (chunk, (version, has)) in &model {
                    let zero: PageSet = has.iter().filter(|(_, c)| **c == 0).map(|(p, _)| *p).collect();
                    let full = meant[chunk].1.without(&zero);
                    let digests = has.values().filter(|c| **c != 0).map(|c| digester.page(&body(*c)));
                    sum.add(ChunkIndex(*chunk), &Held { version: *version, full, zero }, digests);
                }
                assert_eq!(hosts[1].prepare().unwrap(), sum.end(1));
            });
        }
    });
    assert_eq!(lender.store.loans().len(), 4);
}

/// The guest goes on writing while its pages are on their way: what is acknowledged is what is kept, whichever state of
/// a page that is.
#[test]
fn what_a_guest_writes_on_the_way_is_acknowledged_as_it_is_kept() {
    let dir = dir();
    let lender = Lender::new(dir.path(), most_bytes(CHUNKS));
    let mut host = lender.open(claim(1)).unwrap();
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.set_len(CHUNK_BYTES as u64).unwrap();
    let ram = SharedMapping::new(&file, CHUNK_BYTES as u64, Access::ReadWrite).unwrap();
    let (stop, changed) = (AtomicBool::new(false), Cell::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for count in 0u64.. {
                if stop.load(Ordering::Acquire) {
                    return;
                }
                ram.copy_in(count * 16 % CHUNK_BYTES as u64, &u128::from(count).to_le_bytes()).unwrap();
            }
        });
        // Until it is seen that the guest wrote meanwhile.
        for version in (1..).take_while(|version| *version < 50 || changed.get() == 0) {
            let all = PageSet::first(256);
            let mut before = vec![0; CHUNK_BYTES];
            ram.copy_out(0..CHUNK_BYTES as u64, &mut before);
            let kept =
                host.put(ChunkIndex(0), (version, None), (all, PageSet::EMPTY), &[ram.outgoing(0..CHUNK_BYTES as u64)]);
            let kept = kept.unwrap();
            let got = host.get(ChunkIndex(0), version, &all).unwrap();
            let digester = host.digester();
            let digests = |bytes: &[u8]| bytes.chunks_exact(PAGE_BYTES).map(|b| digester.page(b)).collect::<Vec<_>>();
            assert_eq!(kept, digests(&got.bodies));
            changed.set(changed.get() + usize::from(kept != digests(&before)));
        }
        stop.store(true, Ordering::Release);
    });
}

/// The next owner takes over while the earlier one still puts as fast as it can. After the first answer to the next
/// owner nothing of the earlier one is let in, on any of its connections, and it learns why.
#[test]
fn an_earlier_owner_writes_nothing_once_the_next_one_was_let_in() {
    let dir = dir();
    let lender = Lender::new(dir.path(), most_bytes(CHUNKS));
    let first = claim(1);
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..3u32)
            .map(|chunk| {
                let mut host = lender.open(first).unwrap();
                scope.spawn(move || {
                    for version in 1.. {
                        if let Err(error) = put(&mut host, chunk, (version, None), &[(0, version), (9, version)]) {
                            return error;
                        }
                    }
                    unreachable!("it is fenced off")
                })
            })
            .collect();
        while lender.store.loans()[0].used_bytes == 0 {
            std::thread::yield_now();
        }
        let mut next = lender.open(Claim { epoch: 2, ..first }).unwrap();
        let held = next.inventory().unwrap();
        let content = |host: &mut MemoryHost| -> Vec<_> {
            held.iter()
                .map(|entry| host.get(entry.chunk, entry.version, &PageSet::from_bytes(&entry.pages)).unwrap())
                .collect()
        };
        let taken_over = content(&mut next);
        for writer in writers {
            assert_eq!(refused(Err::<(), _>(writer.join().unwrap())), Refusal::Fenced { current: 2 });
        }
        assert_eq!((next.inventory().unwrap(), content(&mut next)), (held.clone(), taken_over));
        assert_eq!(refused(lender.open(first)), Refusal::Fenced { current: 2 });
        assert_eq!(refused(lender.open(Claim { key: 1, epoch: 3, ..first })), Refusal::Stranger);
    });
}

#[test]
fn no_more_is_lent_than_the_budget_and_what_is_given_back_can_be_lent_again() {
    let dir = dir();
    let lender = Lender::new(dir.path(), 3 << 20);
    let mut first = lender.ask(claim(1), 2 << 20).unwrap();
    assert_eq!(refused(lender.ask(claim(2), 2 << 20)), Refusal::Budget { left_bytes: 1 << 20 });
    let pages: Vec<_> = (0..=255).map(|page| (page, 1)).collect();
    put(&mut first, 0, (1, None), &pages).unwrap();
    let full = Refusal::Full { granted_bytes: 2 << 20 };
    assert_eq!(refused(put(&mut first, 1, (1, None), &pages)), full, "the notes' memory counts, too");
    put(&mut first, 1, (1, None), &pages[..200]).unwrap();
    assert_eq!(refused(lender.ask(claim(1), 1 << 20)), Refusal::Full { granted_bytes: 1 << 20 });
    let mut first = lender.ask(claim(1), 3 << 20).unwrap();
    assert_eq!(first.opened(), ("lender", 2));
    put(&mut first, 1, (2, None), &pages).unwrap();
    assert_eq!(refused(lender.ask(claim(1), 4 << 20)), Refusal::Budget { left_bytes: 3 << 20 });
    assert_eq!(lender.store.promised_bytes(), (3 << 20) - 2 * ((1 << 20) + 4096));
    first.close().unwrap();
    lender.ask(claim(2), 3 << 20).unwrap().close().unwrap();
    assert_eq!((lender.store.loans(), std::fs::read_dir(dir.path()).unwrap().count()), (vec![], 0));
    let none = Lender::new(&dir.path().join("none"), 0);
    assert_eq!(refused(none.open(claim(1))), Refusal::LendsNothing);
}

/// What was lent is there after a restart, with its epoch, also where the budget is less by then.
#[test]
fn a_restarted_memory_host_has_what_it_had() {
    let dir = dir();
    let second = Claim { epoch: 2, ..claim(1) };
    {
        let lender = Lender::new(dir.path(), most_bytes(CHUNKS));
        put(&mut lender.open(second).unwrap(), 5, (7, None), &[(3, 33), (4, 0)]).unwrap();
    }
    let lender = Lender::new(dir.path(), 0);
    let mut host = lender.open(second).unwrap();
    assert_eq!(host.opened().1, 1);
    let got = host.get(ChunkIndex(5), 7, &set(&[3, 4])).unwrap();
    assert_eq!((got.full, got.zero, got.bodies), (set(&[3]), set(&[4]), body(33)));
    assert_eq!(refused(lender.open(claim(1))), Refusal::Fenced { current: 2 });
    assert!(matches!(refused(lender.open(claim(9))), Refusal::LendsNothing));
}

/// A plain connection to the lender, for what no owner sends.
struct Raw(TcpStream);

impl Raw {
    fn new(lender: &Lender) -> Self {
        use sterna_protocol::hello::{Features, HELLO_BYTES, Hello, Role, VERSION};
        let mut stream = TcpStream::connect(&lender.peer).unwrap();
        let hello = Hello {
            version: VERSION,
            role: Role::Store,
            features: Features::KNOWN,
            needed: Features::NONE,
            session: 1,
            key: 2,
        };
        stream.write_all(&hello.encode()).unwrap();
        std::io::Read::read_exact(&mut stream, &mut [0; HELLO_BYTES]).unwrap();
        Self(stream)
    }

    fn say(&mut self, request: &StoreRequest) {
        self.0.write_all(&message::encode(request, 2).unwrap()).unwrap();
    }

    fn hear(&mut self) -> Option<StoreReply> {
        let mut prefix = [0; message::PREFIX_BYTES];
        std::io::Read::read_exact(&mut self.0, &mut prefix).ok()?;
        let (length, checksum) = message::decode_prefix(prefix).unwrap();
        let mut body = vec![0; length];
        std::io::Read::read_exact(&mut self.0, &mut body).unwrap();
        Some(message::decode(&body, checksum, 2).unwrap())
    }
}

/// Who comes back to what was granted is granted nothing, and has it as whoever asks for it: by the guest's key, the
/// owner's epoch, and its size.
#[test]
fn who_comes_back_to_what_was_granted_is_granted_nothing_anew() {
    let dir = dir();
    let lender = Lender::new(dir.path(), most_bytes(CHUNKS));
    assert_eq!(refused(lender.reopen(claim(1))), Refusal::Closed);
    assert!(lender.store.loans().is_empty());
    let mut owner = lender.ask(claim(1), most_bytes(CHUNKS) / 2).unwrap();
    put(&mut owner, 0, (1, None), &[(1, 11)]).unwrap();

    let next = Claim { epoch: 2, ..claim(1) };
    assert_eq!(refused(lender.reopen(Claim { key: 0, ..next })), Refusal::Stranger);
    let mut back = lender.reopen(next).unwrap();
    assert_eq!(back.get(ChunkIndex(0), 1, &set(&[1])).unwrap().bodies, body(11));
    assert_eq!(lender.store.loans()[0].granted_bytes, most_bytes(CHUNKS) / 2);
    assert_eq!(refused(lender.reopen(claim(1))), Refusal::Fenced { current: 2 });
    assert_eq!(refused(owner.held(ChunkIndex(0))), Refusal::Fenced { current: 2 });

    back.close().unwrap();
    assert_eq!(refused(lender.reopen(next)), Refusal::Closed);
    assert!(lender.store.loans().is_empty());
}

/// Requests out of turn are refused, and what is no request ends its own connection only.
#[test]
fn what_no_owner_sends_costs_its_own_connection() {
    let dir = dir();
    let lender = Lender::new(dir.path(), most_bytes(CHUNKS));
    let mut owner = lender.open(claim(1)).unwrap();
    put(&mut owner, 0, (1, None), &[(1, 11)]).unwrap();
    let open = StoreRequest::Open { claim: claim(1), bytes: most_bytes(CHUNKS), chunks: CHUNKS };
    let put_zero = StoreRequest::Put { chunk: ChunkIndex(0), version: 2, base: None };

    let mut early = Raw::new(&lender);
    early.say(&StoreRequest::Prepare);
    assert!(matches!(early.hear(), Some(StoreReply::Refused(Refusal::Request(_)))));
    assert_eq!(early.hear(), None);

    for (chunks, refused) in [(0, true), (u32::MAX, true), (CHUNKS + 1, true)] {
        let mut wrong = Raw::new(&lender);
        wrong.say(&StoreRequest::Open { claim: claim(1), bytes: most_bytes(CHUNKS), chunks });
        assert_eq!(matches!(wrong.hear(), Some(StoreReply::Refused(_))), refused);
    }

    let mut garbage = Raw::new(&lender);
    garbage.say(&open);
    garbage.hear().unwrap();
    garbage.0.write_all(&[0xff; 64]).unwrap();
    assert_eq!(garbage.hear(), None);

    // A frame of another chunk, one that is cut in its middle, and one of a chunk that the guest does not have.
    for (chunk, bytes) in [(1, PAGE_BYTES), (0, 100), (CHUNKS, PAGE_BYTES)] {
        let mut cut = Raw::new(&lender);
        cut.say(&open);
        cut.hear().unwrap();
        cut.say(&put_zero);
        let frame = ChunkFrame { round: 0, chunk: ChunkIndex(chunk), full: set(&[1]), zero: PageSet::EMPTY };
        let head = FrameWriter::new(2).head(&Frame::Chunk(frame), &[0]);
        cut.0.write_all(&head).unwrap();
        let _ = cut.0.write_all(&vec![7; bytes]);
        cut.0.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(cut.hear(), None);
    }
    assert_eq!(owner.get(ChunkIndex(0), 1, &set(&[1])).unwrap().bodies, body(11));
}

/// A memory host that gives what it was not given, or other pages than it was asked for, is not believed.
#[test]
fn a_memory_host_that_lies_is_not_believed() {
    let frames: [(&[u8], u64, u8); 3] = [(&[1], 0, 7), (&[2], 1, 7), (&[1], 1, 8)];
    for (pages, right_digest, content) in frames {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let peer = listener.local_addr().unwrap().to_string();
        let liar = std::thread::spawn(move || {
            let (mut connection, hello) = answer(listener.accept().unwrap().0, None).unwrap();
            let skip = |connection: &mut sterna_engine::transport::connection::Connection| {
                let mut prefix = [0; message::PREFIX_BYTES];
                std::io::Read::read_exact(connection, &mut prefix).unwrap();
                let mut body = vec![0; message::decode_prefix(prefix).unwrap().0];
                std::io::Read::read_exact(connection, &mut body).unwrap();
            };
            skip(&mut connection);
            let opened = StoreReply::Opened { host: "liar".into(), held: 0 };
            connection.write_all(&message::encode(&opened, hello.key).unwrap()).unwrap();
            skip(&mut connection);
            connection.write_all(&message::encode(&StoreReply::Pages, hello.key).unwrap()).unwrap();
            let digester = sterna_protocol::frame::Digester::of(sterna_protocol::hello::VERSION, claim(1).key);
            let digest = right_digest * digester.page(&[7; PAGE_BYTES]);
            let frame = ChunkFrame { round: 0, chunk: ChunkIndex(0), full: set(pages), zero: PageSet::EMPTY };
            connection.write_all(&FrameWriter::new(hello.key).head(&Frame::Chunk(frame), &[digest])).unwrap();
            connection.write_all(&[content; PAGE_BYTES]).unwrap();
        });
        let mut host = MemoryHost::open(&peer, None, (1, 2), claim(1), 1 << 20, CHUNKS).unwrap();
        let got = host.get(ChunkIndex(0), 1, &set(&[1]));
        assert!(matches!(got, Err(StoreError::Connection(_))), "{got:?}");
        liar.join().unwrap();
    }
}
