//! What is kept of machines that have left, and when it goes.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};

use sterna_engine::memory::{BlockFile, kind};
use sterna_protocol::spec::BlockSpec;
use sterna_sys::map::Access;

use super::*;

const MIB: u64 = 1 << 20;
const HOUR: Duration = Duration::from_secs(3600);

/// The memory that the host has left, bytes: tests that set it take turns.
static ROOM: AtomicU64 = AtomicU64::new(0);
static TURN: Mutex<()> = Mutex::new(());

/// A host that has so much memory left.
struct Host {
    keeper: Arc<Keeper>,
    _dir: tempfile::TempDir,
    _turn: MutexGuard<'static, ()>,
}

fn host(limit: Duration, floor: u64, room: u64) -> Host {
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    ROOM.store(room, Ordering::SeqCst);
    let dir = tempfile::tempdir_in("/dev/shm").expect("a directory");
    let limit = (!limit.is_zero()).then_some(limit);
    let room = |_: &Path| ROOM.load(Ordering::SeqCst);
    let lent = Arc::new(Store::open(&dir.path().join("lent"), "here".into(), 0).expect("nothing is there"));
    let keeper = Keeper { ram: dir.path().into(), limit, floor, room, lent, entries: Mutex::default() };
    Host { keeper: Arc::new(keeper), _dir: dir, _turn: turn }
}

/// A machine of so much memory leaves, and its number is that of its ticket.
fn leaves(host: &Host, name: &str, number: u128, bytes: u64) {
    let file = tempfile::tempfile_in("/dev/shm").expect("a file");
    file.set_len(bytes).expect("room");
    for page in 0..bytes / 4096 {
        file.write_all_at(&[7; 4096], page * 4096).expect("room");
    }
    let spec = BlockSpec { id: "ram".into(), bytes, page_bytes: 4096, path: String::new() };
    let ram = kind::open(&[BlockFile { spec, file, address: 0, process: None }], Access::Read).expect("its RAM");
    host.keeper.keeping("").expect("it is on").keep(name, number, ram.as_ref());
}

fn pool() -> Arc<Pool> {
    Pool::new(tempfile::tempfile_in("/dev/shm").expect("a file"), 1).expect("a pool")
}

fn machines(host: &Host) -> Vec<String> {
    host.keeper.show().machines
}

#[test]
fn nothing_is_kept_unless_it_is_asked_for() {
    assert!(host(Duration::ZERO, 0, u64::MAX).keeper.keeping("").is_none());
}

#[test]
fn what_is_kept_counts_as_free_and_goes_oldest_first_before_memory_gets_short() {
    let host = host(HOUR, MIB, 100 * MIB);
    leaves(&host, "old", 1, 2 * MIB);
    leaves(&host, "new", 2, 3 * MIB);
    assert_eq!((machines(&host), host.keeper.show().bytes), (vec!["new".into(), "old".into()], 5 * MIB));
    assert_eq!(host.keeper.room_bytes(), 105 * MIB);
    assert_eq!(host.keeper.room_beside_bytes(), 100 * MIB);
    // Less is left than is kept: one goes, and that is enough.
    ROOM.store(4 * MIB, Ordering::SeqCst);
    assert_eq!(host.keeper.room_bytes(), 7 * MIB);
    assert_eq!(machines(&host), ["new"]);
    // Little is left at all.
    ROOM.store(4 * MIB - 1, Ordering::SeqCst);
    assert_eq!(host.keeper.room_bytes(), 4 * MIB - 1);
    assert!(machines(&host).is_empty() && !host.keeper.keeps(&[1, 2]));
}

#[test]
fn what_is_kept_ends_with_its_time_with_the_machines_return_and_on_demand() {
    let host = host(Duration::from_millis(1), 0, u64::MAX);
    leaves(&host, "a", 1, MIB);
    std::thread::sleep(Duration::from_millis(2));
    assert!(machines(&host).is_empty());
    drop(host);
    let host = self::host(HOUR, 0, u64::MAX);
    leaves(&host, "a", 1, MIB);
    leaves(&host, "b", 2, MIB);
    leaves(&host, "a", 3, MIB);
    assert_eq!(machines(&host), ["a", "b"], "what was kept of it before is old");
    assert!(!host.keeper.keeps(&[1]) && host.keeper.keeps(&[3]));
    host.keeper.came("a");
    assert_eq!(machines(&host), ["b"]);
    host.keeper.drop_all();
    assert!(machines(&host).is_empty());
}

#[test]
fn only_who_shows_a_ticket_is_offered_what_was_kept_and_only_within_the_trust_group() {
    let host = host(HOUR, 0, u64::MAX);
    leaves(&host, "a", 1, MIB);
    let pool = pool();
    assert!(host.keeper.keeps(&[1]) && !host.keeper.keeps(&[]) && !host.keeper.keeps(&[2]));
    for (group, shown, all) in [("", &[2][..], false), ("", &[], true), ("g", &[1], true)] {
        assert!(host.keeper.offer(group, shown, all, &pool).is_empty(), "{group} {shown:?}");
    }
    assert_eq!(host.keeper.offer("", &[2, 1], false, &pool).len(), 1);
}

#[test]
fn what_is_offered_stays_until_the_gang_has_come_and_is_nobodys_room_meanwhile() {
    let host = host(HOUR, 0, 100 * MIB);
    leaves(&host, "a", 1, MIB);
    let pool = pool();
    let offered = host.keeper.offer("", &[1], false, &pool);
    ROOM.store(0, Ordering::SeqCst);
    assert_eq!(host.keeper.room_bytes(), 0);
    assert_eq!(machines(&host), ["a"]);
    drop((pool, offered));
    assert!(machines(&host).is_empty());
}

#[test]
fn files_that_are_kept_are_those_of_the_machine_that_left() {
    let host = host(HOUR, 0, u64::MAX);
    leaves(&host, "a", 1, MIB);
    let kept = host.keeper.offer("", &[1], false, &pool());
    let files: Vec<File> = kept.iter().flat_map(|kept| kept.files().expect("the kernel tells")).collect();
    let mut byte = [0];
    files[0].read_exact_at(&mut byte, MIB - 1).expect("it is there");
    assert_eq!((files.len(), byte), (1, [7]));
}

/// Failed while a machine could be started on a host that had begun to stop others.
#[test]
fn no_machine_is_started_where_less_than_the_floor_is_left() {
    let host = host(Duration::ZERO, 64 * MIB, 64 * MIB);
    assert_eq!(host.keeper.check_not_short(), Ok(()));
    ROOM.store(64 * MIB - 1, Ordering::SeqCst);
    let problem = host.keeper.check_not_short().expect_err("it is short");
    assert_eq!((problem.code, problem.blame), (Code::OutOfMemory, Blame::Host));
}
