//! Frames at a real destination, packed ones above all, from a peer that says what it likes.

#[path = "support/pair/mod.rs"]
#[allow(dead_code, reason = "each test program uses its own part")]
mod pair;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pair::destination::Destination;
use sterna_api::{Blame, Problem};
use sterna_engine::host::{DestinationHost, MigrationId, Verdict};
use sterna_protocol::frame::packed::{Block, Codec, PackedFrame};
use sterna_protocol::frame::{ChunkFrame, Digester, Frame, FrameWriter};
use sterna_protocol::hello::{Features, HELLO_BYTES, Hello, Role, VERSION, Version};
use sterna_protocol::layout::{ChunkIndex, Layout};
use sterna_protocol::message::{MAX_SUSPECTS, PREFIX_BYTES, Reply, Request, decode, decode_prefix, encode};
use sterna_protocol::pages::{PageMap, PageSet};
use sterna_protocol::{residue, xbzrle};

const KEY: u64 = 77;
const CHUNKS: u64 = 3;

type Page = [u8; 4096];

/// A page that compresses well and is like no other.
fn page(seed: u8) -> Page {
    std::array::from_fn(|at| if at % 64 < 8 { seed ^ (at / 64) as u8 } else { b'a' + (at % 3) as u8 })
}

/// A source that has proposed a machine of one block, and says by hand what it sends.
struct Peer {
    control: TcpStream,
    pages: TcpStream,
    _others: Vec<TcpStream>,
    writer: FrameWriter,
    id: MigrationId,
}

impl Peer {
    /// One of a machine of three chunks.
    fn call(address: &str, features: Features) -> Self {
        Self::propose(address, features, CHUNKS, false)
    }

    fn propose(address: &str, features: Features, chunks: u64, postcopy: bool) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let id = u128::from(NEXT.fetch_add(1, Ordering::Relaxed)) << 64 | 0xbad;
        let dial = |role| {
            let mut stream = TcpStream::connect(address).expect("it listens");
            // One of before digests were seeded.
            let version = Version { minor: 0, ..VERSION };
            let hello = Hello { version, role, features, needed: Features::NONE, session: id, key: KEY };
            stream.write_all(&hello.encode()).expect("a hello goes out");
            stream.read_exact(&mut [0; HELLO_BYTES]).expect("and is answered");
            stream
        };
        let mut control = dial(Role::Control);
        let block = pair::block(chunks << 20);
        let layout = Layout::new(std::slice::from_ref(&block)).expect("a layout").digest();
        let spec = pair::spec(block);
        let reply =
            ask(&mut control, &Request::Propose { id, spec: Box::new(spec), streams: 1, postcopy, verify: false });
        assert!(matches!(reply, Reply::Accepted { layout: theirs, .. } if theirs == layout), "{reply:?}");
        let pages = dial(Role::Pages(0));
        let others = if postcopy { &[Role::Devices, Role::Faults, Role::Urgent][..] } else { &[Role::Devices] };
        let others = others.iter().map(|role| dial(*role)).collect();
        Self { control, pages, _others: others, writer: FrameWriter::new(KEY), id: MigrationId(id) }
    }

    fn send(&mut self, frame: &PackedFrame, digests: &[u64], payload: &[u8]) {
        assert_eq!(frame.payload_bytes(), payload.len());
        let mut bytes = self.writer.head(&Frame::Packed(frame.clone()), digests);
        bytes.extend_from_slice(payload);
        // It may have hung up on what came before.
        let _ = self.pages.write_all(&bytes);
    }

    /// Ends the round; what the destination says of it.
    fn end_round(&mut self) -> Reply {
        let _ = self.pages.write_all(&self.writer.head(&Frame::RoundEnd { round: 0 }, &[]));
        ask(&mut self.control, &Request::RoundEnd { round: 0 })
    }

    /// Asserts that the destination gave the migration up at once, that no guest runs there, and that the next one
    /// finds its place; what it said was wrong.
    fn refused(mut self, host: &Arc<Destination>) -> Problem {
        let asked = Instant::now();
        let reply = self.end_round();
        // Half of what a destination waits for what a round still lacks.
        assert!(asked.elapsed() < Duration::from_secs(15), "it waited for what cannot come");
        let Reply::Failed(problem) = reply else { panic!("not refused: {reply:?}") };
        assert!(!host.running.load(Ordering::Acquire));
        assert!(host.aborted.load(Ordering::Acquire));
        assert_eq!(host.verdict(self.id, None), Ok(Verdict::Aborted));
        problem
    }
}

fn ask(control: &mut TcpStream, request: &Request) -> Reply {
    control.write_all(&encode(request, KEY).expect("a message")).expect("the request goes out");
    let mut prefix = [0; PREFIX_BYTES];
    control.read_exact(&mut prefix).expect("a reply comes");
    let (length, checksum) = decode_prefix(prefix).expect("a message");
    let mut body = vec![0; length];
    control.read_exact(&mut body).expect("all of it");
    decode(&body, checksum, KEY).expect("a reply")
}

fn compress(codec: Codec, bytes: &[u8]) -> Vec<u8> {
    match codec {
        Codec::Lz4 => lz4_flex::block::compress(bytes),
        Codec::Zstd => zstd::bulk::compress(bytes, 1).expect("it compresses"),
        Codec::Plain | Codec::Xbzrle => bytes.to_vec(),
    }
}

fn block(codec: Codec, pages: usize, encoded: &[u8]) -> Block {
    Block { codec, pages: pages as u16, bytes: encoded.len() as u32 }
}

/// A frame of chunk 1 with pages 10 and on whole, in one block of these bytes.
fn whole(codec: Codec, pages: &[Page], encoded: &[u8]) -> (PackedFrame, Vec<u64>) {
    let full = (10..10 + pages.len() as u8).collect();
    let (delta, zero) = (PageSet::EMPTY, PageSet::EMPTY);
    let blocks = vec![block(codec, pages.len(), encoded)];
    let frame = PackedFrame { round: 0, chunk: ChunkIndex(1), full, delta, zero, blocks };
    (frame, pages.iter().map(|page| Digester::UNSEEDED.page(&page[..])).collect())
}

/// A frame of chunk 1 with page 10 as a difference.
fn difference(new: &Page, encoded: &[u8]) -> (PackedFrame, Vec<u64>) {
    let (mut frame, digests) = whole(Codec::Xbzrle, &[*new], encoded);
    std::mem::swap(&mut frame.full, &mut frame.delta);
    (frame, digests)
}

fn delta(old: &Page, new: &Page) -> Vec<u8> {
    let mut block = Vec::new();
    assert!(xbzrle::push(old, new, &mut block, usize::MAX));
    block
}

fn arrived(host: &Destination, page: u64) -> Page {
    let mut body = [0; 4096];
    host.ram.lock().unwrap().as_ref().expect("a guest came").read_exact_at(&mut body, page * 4096).expect("RAM");
    body
}

fn allocated(host: &Destination) -> u64 {
    host.ram.lock().unwrap().as_ref().expect("a guest came").metadata().expect("RAM").blocks() * 512
}

#[test]
fn pages_arrive_in_every_encoding() {
    let (host, address) = Destination::serve();
    let mut peer = Peer::call(&address, Features::KNOWN);
    // First plain, LZ4 and Zstandard in one frame, with holes between the pages.
    let pages: Vec<Page> = (0..40).map(page).collect();
    let bytes = |range: std::ops::Range<usize>| pages[range].as_flattened();
    let parts =
        [(Codec::Plain, 0..3), (Codec::Zstd, 3..19), (Codec::Lz4, 19..35), (Codec::Lz4, 35..39), (Codec::Zstd, 39..40)];
    let encoded: Vec<_> =
        parts.iter().map(|(codec, range)| (*codec, range.len(), compress(*codec, bytes(range.clone())))).collect();
    let full: PageSet = (0..40).map(|page| page * 5).collect();
    let first = PackedFrame {
        round: 0,
        chunk: ChunkIndex(2),
        full,
        delta: PageSet::EMPTY,
        zero: PageSet::EMPTY,
        blocks: encoded.iter().map(|(codec, pages, bytes)| block(*codec, *pages, bytes)).collect(),
    };
    let digests: Vec<u64> = pages.iter().map(|page| Digester::UNSEEDED.page(&page[..])).collect();
    peer.send(&first, &digests, &encoded.iter().flat_map(|(_, _, bytes)| bytes.clone()).collect::<Vec<u8>>());
    // Then differences to them and to a hole, between whole pages, and zeros in the place of one.
    let mut changed = pages[0];
    changed[100..108].copy_from_slice(b"changed!");
    let mut filled = [0; 4096];
    filled[4000] = 9;
    let fresh = page(200);
    let differences = [delta(&pages[0], &changed), delta(&[0; 4096], &filled), delta(&pages[2], &pages[2])].concat();
    let second = PackedFrame {
        full: [5].into_iter().collect(),
        delta: [0, 1, 10].into_iter().collect(),
        zero: [15].into_iter().collect(),
        blocks: vec![block(Codec::Plain, 1, &fresh), block(Codec::Xbzrle, 3, &differences)],
        ..first
    };
    let digests: Vec<u64> =
        [&fresh, &changed, &filled, &pages[2]].map(|page| Digester::UNSEEDED.page(&page[..])).to_vec();
    peer.send(&second, &digests, &[&fresh[..], &differences].concat());
    assert_eq!(peer.end_round(), Reply::Arrived { suspects: vec![] });
    for at in 0..256 {
        let expected = match at {
            0 => changed,
            1 => filled,
            5 => fresh,
            15 => [0; 4096],
            at if at % 5 == 0 && at < 200 => pages[at / 5],
            _ => [0; 4096],
        };
        assert!(arrived(&host, 512 + at as u64) == expected, "page {at}");
    }
    assert_eq!(allocated(&host), 40 * 4096, "the pages that hold something, and no others");
}

#[test]
fn pages_that_cannot_be_what_was_sent_end_the_migration_before_one_is_placed() {
    let (host, address) = Destination::serve();
    let pages: Vec<Page> = (0..4).map(page).collect();
    let raw = pages.as_flattened();
    let damaged = |bytes: &[u8], at: usize| {
        let mut bytes = bytes.to_vec();
        bytes[at] ^= 1;
        bytes
    };
    let mut cases: Vec<(String, PackedFrame, Vec<u64>, Vec<u8>)> = Vec::new();
    let mut case = |name: &str, (frame, digests): (PackedFrame, Vec<u64>), payload: Vec<u8>| {
        cases.push((name.into(), frame, digests, payload));
    };
    for codec in [Codec::Plain, Codec::Lz4, Codec::Zstd] {
        let good = compress(codec, raw);
        for at in [0, good.len() / 3, good.len() - 1] {
            case(&format!("{codec:?} with byte {at} changed"), whole(codec, &pages, &good), damaged(&good, at));
        }
        let (frame, mut digests) = whole(codec, &pages, &good);
        digests[3] ^= 1;
        case(&format!("{codec:?} with a wrong digest"), (frame, digests), good.clone());
        if codec != Codec::Plain {
            let bomb = compress(codec, &vec![0; 60 << 20]);
            let bomb = if bomb.len() < raw.len() { bomb } else { compress(codec, &vec![0; 3 << 20]) };
            case(&format!("{codec:?} that becomes much more"), whole(codec, &pages, &bomb), bomb);
            let short = compress(codec, &raw[..3 * 4096]);
            case(&format!("{codec:?} that becomes less"), whole(codec, &pages, &short), short);
            case(&format!("{codec:?} cut short"), whole(codec, &pages, &good[..9]), good[..9].to_vec());
            case(&format!("{codec:?} that is none"), whole(codec, &pages, &[0xa5; 700]), vec![0xa5; 700]);
        }
    }
    let mut new = pages[0];
    new[9] = 1;
    let good = delta(&pages[0], &new);
    case("a difference to what is not there", difference(&new, &good), good.clone());
    let beyond = [4, 0, 0x80, 0x20, 1, 1];
    case("a difference that reaches beyond its page", difference(&new, &beyond), beyond.to_vec());
    let long = [&good[..], &[0, 0]].concat();
    case("differences that are followed by more", difference(&new, &long), long);

    for (name, mut frame, digests, payload) in cases {
        let mut peer = Peer::call(&address, Features::KNOWN);
        // A page in place before, which the frame would make zeros.
        let before = page(250);
        let (mut first, first_digests) = whole(Codec::Plain, &[before], &before);
        first.full = [200].into_iter().collect();
        peer.send(&first, &first_digests, &before);
        frame.zero = first.full;
        peer.send(&frame, &digests, &payload);
        let problem = peer.refused(&host);
        assert_eq!((problem.code.as_str(), problem.blame), ("damaged", Blame::Peer), "{name}: {problem:?}");
        assert!(problem.cause.iter().any(|cause| cause.contains("of chunk 1")), "{name}: {problem:?}");
        assert!(arrived(&host, 256 + 200) == before, "{name}: part of the frame was used");
        assert_eq!(allocated(&host), 4096, "{name}: part of the frame was placed");
    }
}

/// Failed while post-copy began with the pages that the source knew of: the guest would have found zeros in the others.
#[test]
fn a_guest_does_not_run_where_its_source_was_not_told_of_all_that_did_not_arrive() {
    let (host, address) = Destination::serve();
    host.postcopy.store(true, Ordering::Release);
    let chunks = MAX_SUSPECTS as u32 / 256 + 1;
    let mut peer = Peer::propose(&address, Features::KNOWN, chunks.into(), true);
    let bodies = page(3).repeat(256);
    for chunk in 0..chunks {
        let frame = ChunkFrame { round: 0, chunk: ChunkIndex(chunk), full: PageSet::first(256), zero: PageSet::EMPTY };
        let head = peer.writer.head(&Frame::Chunk(frame), &[1; 256]);
        peer.pages.write_all(&[&head[..], &bodies].concat()).expect("it listens");
    }
    let Reply::Arrived { suspects } = peer.end_round() else { panic!("a round ends") };
    assert_eq!(suspects.len(), MAX_SUSPECTS);
    assert_eq!(ask(&mut peer.control, &Request::Stopped), Reply::Holding);
    let layout = Layout::new(&[pair::block(u64::from(chunks) << 20)]).expect("a layout");
    let mut residue = PageMap::empty(&layout);
    suspects.iter().for_each(|page| residue.insert(*page));
    let part = residue::part(&residue, &layout, ChunkIndex(0)).expect("it has chunks");
    assert_eq!(part.chunks, chunks, "it is the last one");
    let reply = ask(&mut peer.control, &Request::LoadPostcopy(part));
    let Reply::Failed(problem) = reply else { panic!("not refused: {reply:?}") };
    assert_eq!(problem.code, "damaged");
    assert!(!host.running.load(Ordering::Acquire) && host.aborted.load(Ordering::Acquire));
}

#[test]
fn frames_that_were_not_agreed_on_are_refused() {
    let (host, address) = Destination::serve();
    let pages = [page(1)];
    for (features, codec) in [
        (Features::NONE, Codec::Plain),
        (Features::PACKED, Codec::Lz4),
        (Features::PACKED.and(Features::LZ4), Codec::Zstd),
    ] {
        let mut peer = Peer::call(&address, features);
        let encoded = compress(codec, pages.as_flattened());
        let (frame, digests) = whole(codec, &pages, &encoded);
        peer.send(&frame, &digests, &encoded);
        assert_eq!(peer.refused(&host).code, "peer-protocol");
    }
    let mut peer = Peer::call(&address, Features::PACKED);
    let encoded = delta(&[0; 4096], &pages[0]);
    let (frame, digests) = difference(&pages[0], &encoded);
    peer.send(&frame, &digests, &encoded);
    assert_eq!(peer.refused(&host).code, "peer-protocol");
}
