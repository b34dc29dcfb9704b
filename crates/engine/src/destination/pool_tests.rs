//! What a pool does for machines whose pages refer to one another's. Nobody maps anything here.

use std::sync::mpsc::{Receiver, Sender, channel};

use sterna_protocol::spec::BlockSpec;

use super::*;

const CHUNK: ChunkIndex = ChunkIndex(1);

/// What a machine is given at a time.
type Given = (ChunkIndex, Vec<PoolRun>);

/// A machine that notes what it is given.
#[derive(Debug)]
struct Machine {
    expected: Mutex<PageSet>,
    given: Sender<Given>,
}

impl Waits for Machine {
    fn expect(&self, _: ChunkIndex, pages: &PageSet) -> Option<u64> {
        let mut expected = self.expected.lock().unwrap();
        *expected = expected.or(pages);
        Some(3)
    }

    fn came(&self, turn: u64, chunk: ChunkIndex, runs: Vec<PoolRun>) {
        assert_eq!(turn, 3);
        self.given.send((chunk, runs)).unwrap();
    }
}

fn machine() -> (Arc<dyn Waits>, Receiver<Given>) {
    let (given, came) = channel();
    (Arc::new(Machine { expected: Mutex::new(PageSet::EMPTY), given }), came)
}

fn pool(members: u16, here: &[u16]) -> Arc<Pool> {
    let pool = Pool::new(tempfile::tempfile_in("/dev/shm").expect("a file"), members).expect("a pool");
    let spec = BlockSpec { id: "ram".into(), bytes: 4 << 20, page_bytes: 4096, path: String::new() };
    let layout = Layout::new(&[spec]).expect("a layout");
    here.iter().for_each(|member| pool.enter(*member, &layout).expect("a member"));
    pool
}

fn refer(pages: &[(u8, u16, u8)]) -> Vec<References> {
    let each = pages.iter().map(|(page, member, origin)| {
        (*page, Origin { member: *member, page: PageIndex { chunk: CHUNK, page: *origin } })
    });
    References::runs(each)
}

fn body(byte: u8) -> [u8; PAGE_BYTES] {
    [byte; PAGE_BYTES]
}

fn put(pool: &Arc<Pool>, member: u16, pages: &[u8]) -> Result<Vec<PoolRun>, PoolError> {
    let bodies: Vec<_> = pages.iter().map(|page| body(*page)).collect();
    let bodies: Vec<&[u8]> = bodies.iter().map(<[u8; PAGE_BYTES]>::as_slice).collect();
    pool.put(member, CHUNK, &pages.iter().copied().collect(), &bodies)
}

fn first_bytes(pool: &Pool, runs: &[PoolRun]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for run in runs {
        let mut bodies = vec![0; run.pages * PAGE_BYTES];
        pool.reader().read_exact_at(&mut bodies, run.offset).unwrap();
        bytes.extend(bodies.iter().step_by(PAGE_BYTES));
    }
    bytes
}

/// Where the bodies that these pages refer to lie in the gang's own pool.
fn own(pool: &Pool, machine: &Arc<dyn Waits>, pages: &[(u8, u16, u8)]) -> Vec<PoolRun> {
    let mut found = pool.find(machine, CHUNK, &refer(pages)).expect("the gang has them");
    let Some(found) = found.pop() else { return Vec::new() };
    assert!(std::ptr::eq(found.pool, pool.reader()));
    found.runs
}

#[test]
fn an_offered_page_is_found_in_its_file_and_one_that_nobody_offered_is_waited_for() {
    let (pool, before) = (pool(1, &[0]), pool(1, &[0]));
    put(&before, 0, &[7, 8]).unwrap();
    put(&pool, 0, &[1]).unwrap();
    pool.offer(Offers::new(&[before.file.try_clone().unwrap()]).unwrap());
    pool.offer(Offers::default());
    let own = Origin { member: 0, page: PageIndex { chunk: CHUNK, page: 1 } };
    let pages = [(3, Origin::offered(0)), (4, Origin::offered(1)), (5, own), (6, Origin::offered(2))];
    let (reader, _came) = machine();
    let found = pool.find(&reader, CHUNK, &References::runs(pages)).unwrap();
    let [offered, sent] = found.as_slice() else { panic!("two files: {found:?}") };
    assert_eq!(offered.runs, [PoolRun { first: 3, pages: 2, offset: (1 << 20) + 7 * 4096 }]);
    assert_eq!(sent.runs, [PoolRun { first: 5, pages: 1, offset: (1 << 20) + 4096 }]);
    let mut body = [0; 1];
    offered.pool.read_exact_at(&mut body, offered.runs[0].offset).unwrap();
    assert_eq!((body[0], sent.pool.metadata().is_ok()), (7, true));
    assert_eq!(pool.lock().waiting.len(), 1, "the offer of a daemon that has ended");
}

#[test]
fn bodies_lie_where_their_origins_lie_in_their_machines_ram() {
    let pool = pool(2, &[1, 0]);
    let runs = put(&pool, 0, &[3, 4, 9]).unwrap();
    // The member that came first has the first part.
    let at = |page: u64| (4 << 20) + (1 << 20) + page * 4096;
    assert_eq!(runs, [PoolRun { first: 3, pages: 2, offset: at(3) }, PoolRun { first: 9, pages: 1, offset: at(9) }]);
    let (reader, _) = machine();
    let found = own(&pool, &reader, &[(10, 0, 3), (11, 0, 4), (12, 0, 9)]);
    assert_eq!(found, [PoolRun { first: 10, pages: 2, offset: at(3) }, PoolRun { first: 12, pages: 1, offset: at(9) }]);
    assert_eq!(first_bytes(&pool, &found), [3, 4, 9]);
    assert!(pool.reader().write_at(&[1], at(3)).is_err(), "a VMM cannot write what others have in common");
}

#[test]
fn a_page_whose_body_is_still_to_come_gets_it_when_it_comes_and_what_is_here_at_once() {
    let pool = pool(3, &[0]);
    put(&pool, 0, &[1]).unwrap();
    let ((reader, came), (other, other_came)) = (machine(), machine());
    let found = own(&pool, &reader, &[(1, 0, 1), (2, 0, 2), (3, 0, 3), (5, 2, 5)]);
    assert_eq!(first_bytes(&pool, &found), [1]);
    pool.find(&other, CHUNK, &refer(&[(7, 0, 3)])).unwrap();
    assert!(came.try_recv().is_err());
    put(&pool, 0, &[2, 3, 4]).unwrap();
    let (chunk, runs) = came.try_recv().unwrap();
    assert_eq!((chunk, runs.len(), runs[0].first, runs[0].pages), (CHUNK, 1, 2, 2), "neighbours come together");
    assert_eq!(first_bytes(&pool, &runs), [2, 3]);
    assert_eq!(first_bytes(&pool, &other_came.try_recv().unwrap().1), [3]);
    assert!(came.try_recv().is_err(), "the member of its last body has not come");
    pool.forget(other.as_ref());
    let _ = (reader, other);
}

#[test]
fn who_has_gone_gets_nothing() {
    let pool = pool(1, &[0]);
    let ((reader, came), (gone, gone_came)) = (machine(), machine());
    for waits in [&reader, &gone] {
        pool.find(waits, CHUNK, &refer(&[(1, 0, 1)])).unwrap();
    }
    pool.forget(gone.as_ref());
    put(&pool, 0, &[1]).unwrap();
    assert!(came.try_recv().is_ok() && gone_came.try_recv().is_err());
    assert!(pool.lock().waiting.is_empty());
}

#[test]
fn what_a_peer_cannot_mean_is_refused_and_changes_nothing() {
    let pool = pool(2, &[0]);
    put(&pool, 0, &[1]).unwrap();
    let (reader, _came) = machine();
    let refused = |result: Result<_, PoolError>| matches!(result, Err(PoolError::Peer(_)));
    let refer_to = |references: &[References]| pool.find(&reader, CHUNK, references).map(drop);
    assert!(refused(put(&pool, 0, &[0, 1]).map(drop)), "a body that guests may have mapped comes again");
    assert!(refused(put(&pool, 1, &[1]).map(drop)) && refused(put(&pool, 2, &[1]).map(drop)));
    let outside = Origin { member: 0, page: PageIndex { chunk: ChunkIndex(4), page: 0 } };
    assert!(refused(refer_to(&References::runs([(2, outside)]))));
    assert!(refused(refer_to(&refer(&[(1, 0, 9), (2, 2, 1)]))));
    assert!(pool.lock().waiting.is_empty(), "it waits for nothing");
    let (reader, _came) = machine();
    assert_eq!(first_bytes(&pool, &own(&pool, &reader, &[(1, 0, 1)])), [1]);
    let layout = Layout::new(&[BlockSpec { id: "r".into(), bytes: 4096, page_bytes: 4096, path: String::new() }]);
    let layout = layout.unwrap();
    assert!(matches!(pool.enter(0, &layout), Err(PoolError::Peer(_))), "a member comes twice");
    assert!(matches!(pool.enter(2, &layout), Err(PoolError::Peer(_))));
    assert!(!pool.is_complete());
    pool.enter(1, &layout).unwrap();
    assert!(pool.is_complete());
}
