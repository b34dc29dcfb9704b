//! A gang whose source lies or breaks, or whose pool fails: frames as they come off the wire, and the guests that they
//! are for. Whoever lies harms itself alone, and is named. This process is the VMM.

use std::fs::File;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sterna_api::{Blame, Code, Problem};
use sterna_protocol::frame::shared::{Origin, References, SharedFrame};
use sterna_protocol::frame::{ChunkFrame, Digester, Frame, FrameReader, FrameWriter};
use sterna_protocol::hello::Features;
use sterna_protocol::layout::{ChunkIndex, PAGE_BYTES, PageIndex};
use sterna_protocol::pages::PageSet;
use sterna_protocol::spec::BlockSpec;
use sterna_sys::file::HugePolicy;
use sterna_sys::map::{Access, PrivateMapping};
use sterna_sys::mount::Tmpfs;

use super::awaited::Membership;
use super::place::Placer;
use super::pool::{Pool, Waits};
use super::receive::{Arrivals, receive};
use super::room_alone::Room;
use crate::agent::MapRun;
use crate::inside::Inside;
use crate::memory::inside_here::{InsideHere, MapsItsWay};
use crate::memory::{BlockFile, Holder, Memory, PoolRun, kind};
use crate::transport::connection::Connection;

const PAGES: u64 = 512;
const CHUNK: ChunkIndex = ChunkIndex(0);
const KEY: u64 = 77;

/// A guest that comes with a gang, and does not run yet.
struct Guest {
    mapping: Arc<Vec<PrivateMapping>>,
    ram: Arc<dyn Memory>,
    member: u16,
    pool: Arc<Pool>,
}

impl Guest {
    fn new(pool: &Arc<Pool>, member: u16) -> Self {
        Self::of(pool, member, |mapping| Arc::new(Mutex::new(InsideHere(mapping))))
    }

    fn of(
        pool: &Arc<Pool>,
        member: u16,
        inside: impl FnOnce(Arc<Vec<PrivateMapping>>) -> Arc<Mutex<dyn Inside>>,
    ) -> Self {
        let bytes = PAGES * PAGE_BYTES as u64;
        let mapping = Arc::new(vec![PrivateMapping::new(bytes).unwrap()]);
        let spec = BlockSpec { id: "ram".into(), bytes, page_bytes: 4096, path: String::new() };
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        let process = Some(Holder { pid: std::process::id(), inside: inside(Arc::clone(&mapping)) });
        let block = BlockFile { spec, file, address: mapping[0].addresses().start, process };
        let ram = kind::open(&[block], Access::ReadWrite).unwrap();
        pool.enter(member, ram.layout()).unwrap();
        Self { mapping, ram, member, pool: Arc::clone(pool) }
    }

    fn joins(&self) -> Membership {
        Membership::new(Arc::clone(&self.pool), self.member, Arc::clone(&self.ram), None).unwrap()
    }

    /// These frames arrive for the guest, and a round is over: the failure, or the pages to send again.
    fn gets(&self, frames: &[Sent]) -> Result<Vec<u8>, Problem> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut source = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut here = Connection::plain(listener.accept().unwrap().0);
        let host = Room(u64::MAX);
        let placer = Placer::new(self.ram.as_ref(), &host, None, Digester::UNSEEDED, Some(self.joins()));
        let arrivals = Arrivals::new(1);
        std::thread::scope(|scope| {
            scope.spawn(|| receive(0, &mut here, FrameReader::new(KEY, Features(u64::MAX)), &placer, &arrivals));
            let mut writer = FrameWriter::new(KEY);
            for Sent(frame, digests, bodies) in frames {
                // A destination that has found the lie listens no more.
                let _ = source.write_all(&writer.head(frame, digests)).and_then(|()| source.write_all(bodies));
            }
            let _ = source.write_all(&writer.head(&Frame::Close, &[]));
        });
        arrivals.failure().map_or(Ok(()), Err)?;
        placer.settle();
        Ok(placer.suspects(100).0.iter().map(|page| page.page).collect())
    }

    /// What the guest reads in a page, all of it one byte.
    fn page(&self, page: u8) -> u8 {
        let mut body = [0; PAGE_BYTES];
        self.mapping[0].read(u64::from(page) * PAGE_BYTES as u64, &mut body);
        assert!(body.iter().all(|byte| *byte == body[0]), "half a page");
        body[0]
    }
}

/// A frame, the digests in it, and what follows it.
struct Sent(Frame, Vec<u64>, Vec<u8>);

fn shared(pooled: &[u8], references: &[(u8, Origin)]) -> Sent {
    let (pooled, references) = (pooled.iter().copied().collect(), References::runs(references.iter().copied()));
    Sent(Frame::Shared(SharedFrame { round: 0, chunk: CHUNK, pooled, references }), vec![], vec![])
}

/// These pages, each full of a byte.
fn bodies(pages: &[(u8, u8)]) -> Sent {
    let full: PageSet = pages.iter().map(|(page, _)| *page).collect();
    let each: Vec<_> = pages.iter().map(|(_, byte)| [*byte; PAGE_BYTES]).collect();
    let digests = each.iter().map(|body| Digester::UNSEEDED.page(body)).collect();
    Sent(Frame::Chunk(ChunkFrame { round: 0, chunk: CHUNK, full, zero: PageSet::EMPTY }), digests, each.concat())
}

fn origin(member: u16, page: u8) -> Origin {
    Origin { member, page: PageIndex { chunk: CHUNK, page } }
}

fn pool(members: u16) -> Arc<Pool> {
    Pool::new(tempfile::tempfile_in("/dev/shm").unwrap(), members).unwrap()
}

fn blames(problem: &Problem) -> (&str, Blame) {
    (problem.code.as_str(), problem.blame)
}

/// Two of a gang, the first of which has brought the body of page 1, which is all ones.
fn two() -> [Guest; 2] {
    let pool = pool(3);
    let guests = [0, 1].map(|member| Guest::new(&pool, member));
    assert_eq!(guests[0].gets(&[shared(&[1], &[]), bodies(&[(1, 1)])]), Ok(vec![]));
    guests
}

/// The other guest can still refer to what is there, and finds it as it was.
fn the_other_is_right(guests: &[Guest; 2]) {
    assert_eq!(guests[1].gets(&[shared(&[], &[(9, origin(0, 1))])]), Ok(vec![]));
    assert_eq!((guests[1].page(9), guests[0].page(1)), (1, 1));
}

#[test]
fn a_body_that_never_comes_is_asked_for_and_holds_nobody_else_up() {
    let guests = two();
    let missing = [(5, origin(0, 7)), (6, origin(0, 1)), (7, origin(2, 1))];
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| guests[1].gets(&[shared(&[], &missing)]));
        assert_eq!(guests[0].gets(&[shared(&[2], &[]), bodies(&[(2, 2), (3, 3)])]), Ok(vec![]));
        assert!(!waits.is_finished(), "whoever waits for bodies is not who brings others");
        assert_eq!(waits.join().unwrap(), Ok(vec![5, 7]));
    });
    assert_eq!([5, 6, 7].map(|page| guests[1].page(page)), [0, 1, 0]);
    // It comes after all, when the page has come with its body: nobody waits for it any more.
    assert_eq!(guests[1].gets(&[bodies(&[(5, 50), (7, 70)])]), Ok(vec![]));
    assert_eq!(guests[0].gets(&[shared(&[7], &[]), bodies(&[(7, 7)])]), Ok(vec![]));
    assert_eq!([5, 7].map(|page| guests[1].page(page)), [50, 70]);
}

/// A VMM that answers a request to map only once it is let, or after a long time.
struct Silent {
    asked: Arc<AtomicBool>,
    answered: Arc<AtomicBool>,
}

impl Silent {
    /// Such a guest, and what lets its VMM answer.
    fn guest(pool: &Arc<Pool>, member: u16) -> (Guest, Self, impl FnOnce()) {
        let (answer, may_answer) = channel::<()>();
        let [asked, answered] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
        let says = Self { asked: Arc::clone(&asked), answered: Arc::clone(&answered) };
        let map = move |here: &mut InsideHere<_>, file: BorrowedFd<'_>, runs: &[MapRun]| {
            asked.store(true, Ordering::Release);
            let _ = may_answer.recv_timeout(Duration::from_secs(60));
            answered.store(true, Ordering::Release);
            here.map(file, runs)
        };
        let guest =
            Guest::of(pool, member, |mapping| Arc::new(Mutex::new(MapsItsWay(InsideHere(mapping), Box::new(map)))));
        (guest, says, move || drop(answer))
    }

    /// It was asked, and has not answered.
    fn is_silent(&self) -> bool {
        while !self.asked.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        !self.answered.load(Ordering::Acquire)
    }
}

/// Fails where whoever brings a body maps it into all that have waited for it: a VMM that does not answer holds up the
/// others for as long as it is given to answer, and, with its machine's list of pages locked, whoever finds bodies.
#[test]
fn a_vmm_that_does_not_answer_holds_up_its_own_machine_alone() {
    let pool = pool(3);
    let guests = [0, 1].map(|member| Guest::new(&pool, member));
    let (slow, vmm, answers) = Silent::guest(&pool, 2);
    let [joined, other] = [&slow, &guests[1]].map(Guest::joins);
    let refer = |membership: &Membership, page, origin| {
        membership.find(CHUNK, &References::runs([(page, origin)])).expect("the gang has it").len()
    };
    assert_eq!([refer(&joined, 9, origin(0, 1)), refer(&other, 4, origin(0, 1))], [0, 0], "they wait");
    assert_eq!(guests[0].gets(&[shared(&[1], &[]), bodies(&[(1, 1)])]), Ok(vec![]));
    assert!(vmm.is_silent(), "who brought the body has waited");
    // Whatever the pool does for that machine, nobody waits for it.
    assert_eq!(refer(&joined, 10, origin(0, 2)), 0);
    assert_eq!(guests[0].gets(&[shared(&[2], &[]), bodies(&[(2, 2)])]), Ok(vec![]));
    assert!(other.settle().is_empty());
    assert_eq!(guests[1].page(4), 1);
    assert!(vmm.is_silent(), "others have waited");
    answers();
    assert!(joined.settle().is_empty());
    assert_eq!([slow.page(9), slow.page(10)], [1, 2]);
}

/// Whoever brings a body may come to say so after its page has come in another way, and waits for another body.
#[test]
fn a_body_is_for_those_alone_that_wait_for_it_still() {
    let guests = two();
    let awaited = super::awaited::Awaited::nothing(Arc::clone(&guests[1].ram), None);
    let wait_for = |page: u8| awaited.expect(CHUNK, &[page].into_iter().collect()).expect("it may wait");
    let at = |page: usize| Vec::from([PoolRun { first: 9, pages: 1, offset: (page * PAGE_BYTES) as u64 }]);
    let before = wait_for(9);
    assert_eq!(awaited.wait(&guests[1].pool).iter().count(), 1, "it does not come");
    let now = wait_for(9);
    std::thread::scope(|scope| {
        scope.spawn(|| awaited.put_what_comes(&guests[1].pool));
        awaited.came(before, CHUNK, at(0));
        awaited.came(now, CHUNK, at(1));
        assert!(awaited.wait(&guests[1].pool).is_empty());
        awaited.end();
    });
    assert_eq!(guests[1].page(9), 1, "and not what page 0 of the pool holds");
}

#[test]
fn a_reference_to_what_cannot_be_ends_the_liars_migration_alone() {
    let beyond = Origin { member: 0, page: PageIndex { chunk: ChunkIndex(2), page: 0 } };
    for wrong in [origin(3, 0), origin(0x3ffe, 0), beyond] {
        let guests = two();
        let problem = guests[0].gets(&[shared(&[], &[(4, wrong)])]).unwrap_err();
        assert_eq!(blames(&problem), ("peer-protocol", Blame::Peer), "{wrong:?}: {problem:?}");
        the_other_is_right(&guests);
    }
    // A number that nobody has offered may be one of another daemon's process.
    let guests = two();
    assert_eq!(
        guests[0].gets(&[shared(&[], &[(4, Origin::offered(0)), (8, Origin::offered(u32::MAX))])]),
        Ok(vec![4, 8])
    );
    the_other_is_right(&guests);
}

/// Without a bound this host would remember every such reference, as many as a peer cares to send.
#[test]
fn a_peer_cannot_make_this_host_remember_more_and_more_references() {
    let guests = two();
    let all: Vec<_> = (0..=255).map(|page| (page, origin(2, page))).collect();
    let again: Vec<_> = (0..100).map(|_| shared(&[], &all)).collect();
    let problem = guests[0].gets(&again).unwrap_err();
    assert_eq!(blames(&problem), ("peer-protocol", Blame::Peer), "{problem:?}");
    the_other_is_right(&guests);
}

#[test]
fn a_body_that_comes_twice_changes_nothing_that_others_have() {
    let guests = two();
    assert_eq!(guests[1].gets(&[shared(&[], &[(9, origin(0, 1))])]), Ok(vec![]));
    let problem = guests[0].gets(&[shared(&[1], &[]), bodies(&[(1, 66)])]).unwrap_err();
    assert_eq!(blames(&problem), ("peer-protocol", Blame::Peer), "{problem:?}");
    the_other_is_right(&guests);
}

#[test]
fn a_member_brings_bodies_under_its_own_pages_alone() {
    let guests = two();
    // The same page number as the body that the first has brought: it is another body.
    assert_eq!(guests[1].gets(&[shared(&[1], &[]), bodies(&[(1, 66)])]), Ok(vec![]));
    let references = [(10, origin(0, 1)), (11, origin(1, 1))];
    assert_eq!(guests[0].gets(&[shared(&[], &references)]), Ok(vec![]));
    assert_eq!([1, 10, 11].map(|page| guests[0].page(page)), [1, 1, 66]);
}

#[test]
fn a_damaged_shared_body_gets_into_no_guest() {
    let guests = two();
    let Sent(frame, digests, mut bytes) = bodies(&[(2, 2), (3, 3)]);
    bytes[100] ^= 1;
    let problem = guests[0].gets(&[shared(&[2], &[]), Sent(frame, digests, bytes)]).unwrap_err();
    assert_eq!(problem.blame, Blame::Peer, "{problem:?}");
    assert_eq!(guests[1].gets(&[shared(&[], &[(4, origin(0, 2))])]), Ok(vec![4]));
    assert_eq!((guests[0].page(2), guests[1].page(4)), (0, 0));
    the_other_is_right(&guests);
}

#[test]
fn shared_pages_without_their_bodies_are_refused() {
    for follows in [bodies(&[(3, 3)]), shared(&[3], &[]), Sent(Frame::RoundEnd { round: 0 }, vec![], vec![])] {
        let guests = two();
        let problem = guests[0].gets(&[shared(&[2], &[]), follows]).unwrap_err();
        assert_eq!(blames(&problem), ("peer-protocol", Blame::Peer), "{problem:?}");
        assert_eq!(guests[1].gets(&[shared(&[], &[(4, origin(0, 2))])]), Ok(vec![4]));
        the_other_is_right(&guests);
    }
}

/// A mount that is undone when this is dropped.
struct Mount(PathBuf);

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
    }
}

#[test]
fn a_pool_that_can_take_no_more_costs_whoever_brings_a_body_and_others_refer_to_what_is_there() {
    let directory = tempfile::tempdir().unwrap();
    Tmpfs { size_bytes: Some(4 * PAGE_BYTES as u64), mode: 0o700, huge: HugePolicy::Never }
        .mount(directory.path())
        .unwrap();
    let _mount = Mount(directory.path().to_owned());
    let file = File::options().read(true).write(true).create_new(true).open(directory.path().join("pool")).unwrap();
    let pool = Pool::new(file, 2).unwrap();
    let guests = [0, 1].map(|member| Guest::new(&pool, member));
    assert_eq!(guests[0].gets(&[shared(&[1], &[]), bodies(&[(1, 1)])]), Ok(vec![]));
    let many: Vec<_> = (20..40).collect();
    let each: Vec<_> = many.iter().map(|page| (*page, 2)).collect();
    let problem = guests[0].gets(&[shared(&many, &[]), bodies(&each)]).unwrap_err();
    assert_eq!((&problem.code, problem.blame), (&Code::OutOfMemory, Blame::Host), "{problem:?}");
    // Half of them may lie there: nobody gets any.
    assert_eq!(guests[1].gets(&[shared(&[], &[(4, origin(0, 20))])]), Ok(vec![4]));
    assert_eq!(guests[1].page(4), 0);
    the_other_is_right(&guests);
}

/// The next body behind the cut would make the file as long as before, with zeros in the place of what was cut off.
#[test]
fn of_a_pool_that_somebody_cut_short_nobody_gets_anything() {
    let file = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
    let pool = Pool::new(file.reopen().unwrap(), 2).unwrap();
    let guests = [0, 1].map(|member| Guest::new(&pool, member));
    assert_eq!(guests[0].gets(&[shared(&[1], &[]), bodies(&[(1, 1)])]), Ok(vec![]));
    file.as_file().set_len(0).unwrap();
    for frames in [vec![shared(&[1], &[]), bodies(&[(1, 2)])], vec![shared(&[], &[(9, origin(0, 1))])]] {
        let problem = guests[1].gets(&frames).unwrap_err();
        assert_eq!(blames(&problem), ("host-failed", Blame::Host), "{problem:?}");
    }
    assert_eq!(file.as_file().metadata().unwrap().len(), 0, "zeros in the place of what guests have in common");
    assert_eq!(guests[1].page(9), 0);
    // Who shares nothing goes on.
    assert_eq!(guests[1].gets(&[bodies(&[(9, 9)])]), Ok(vec![]));
    assert_eq!(guests[1].page(9), 9);
}

/// A body is looked at when it comes. Whoever overwrites it afterwards changes what each guest has that maps it, and
/// the digests that both sides compare.
#[test]
fn what_somebody_wrote_into_the_pool_is_in_what_is_compared_of_each_guest_that_maps_it() {
    let file = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
    let pool = Pool::new(file.reopen().unwrap(), 3).unwrap();
    let guests = [0, 1, 2].map(|member| Guest::new(&pool, member));
    assert_eq!(guests[0].gets(&[shared(&[1, 2], &[]), bodies(&[(1, 1), (2, 2)])]), Ok(vec![]));
    assert_eq!(guests[2].gets(&[shared(&[], &[(1, origin(0, 1))])]), Ok(vec![]));
    // The guest has written the page before: it is its own.
    assert_eq!(guests[2].gets(&[bodies(&[(1, 1)])]), Ok(vec![]));
    file.as_file().write_all_at(&[9], PAGE_BYTES as u64 + 5).unwrap();
    assert_eq!(guests[1].gets(&[shared(&[], &[(8, origin(0, 1)), (9, origin(0, 2))])]), Ok(vec![]));
    let digest = |guest: usize, page: usize| guests[guest].ram.page_digests(CHUNK, Digester::UNSEEDED).unwrap()[page];
    let [sent, other] = [1, 2].map(|byte| Digester::UNSEEDED.page(&[byte; PAGE_BYTES]));
    assert!(digest(0, 1) != sent && digest(1, 8) != sent, "nobody would find it");
    assert_eq!((digest(2, 1), digest(0, 2), digest(1, 9)), (sent, other, other));
}
