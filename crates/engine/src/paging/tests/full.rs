//! Pages that follow their guest to a host that has no memory left for them.

use sterna_api::Blame;
use sterna_protocol::frame::{ChunkFrame, Digester};
use sterna_sys::file::HugePolicy;
use sterna_sys::mount::Tmpfs;

use super::*;
use crate::destination::place::Placer;
use crate::destination::room_alone::Room;

/// Lets page 3 come to a guest that runs without it.
fn page_comes(pager: &Pager, host: &Room) -> Result<(), MigrateError> {
    let placer = Placer::new(pager.ram().as_ref(), host, Some(pager), Digester::UNSEEDED, None);
    let only: PageSet = [3].into_iter().collect();
    let frame = ChunkFrame { round: 0, chunk: ChunkIndex(0), full: only, zero: PageSet::EMPTY };
    let digests = [Digester::UNSEEDED.page(&[8; 4096])];
    placer.place(&Arrival::plain(&frame, &digests, Digester::UNSEEDED, &[(only, &[8; 4096])]))
}

/// Seen to fail: the page was placed, and the reserve used up.
#[test]
fn the_reserve_is_kept_while_pages_follow_too_and_what_was_refused_may_come_again() {
    if !works() {
        return;
    }
    let guest = Guest::new();
    let pager = guest.pager(false);
    pager.begin(residue(&pager, [3])).unwrap();
    let looks = guest.looks(3);
    waits_for(&pager, 3);
    let refused = page_comes(&pager, &Room(1 << 20)).unwrap_err();
    assert!(matches!(refused, MigrateError::OutOfMemory { room_bytes: 0x10_0000 }), "{refused:?}");
    assert_eq!(pager.missing(), 1);
    page_comes(&pager, &Room(u64::MAX)).unwrap();
    assert_eq!(looks.join().unwrap(), [8; 16]);
    pager.end();
}

/// A mount that is undone when this is dropped.
struct Mount(std::path::PathBuf);

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
    }
}

/// Seen to fail: "host-failed", without a word of memory.
#[test]
fn a_full_ram_file_system_is_said_to_be_full_while_pages_follow_too() {
    if !works() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    Tmpfs { size_bytes: Some(4096), mode: 0o700, huge: HugePolicy::Never }.mount(directory.path()).unwrap();
    let _mount = Mount(directory.path().to_owned());
    let mut guest = Guest::new();
    let mut options = File::options();
    guest.file = options.read(true).write(true).create_new(true).open(directory.path().join("ram")).unwrap();
    guest.file.set_len(PAGES * 4096).unwrap();
    guest.here.mapping = Arc::new(SharedMapping::new(&guest.file, PAGES * 4096, Access::ReadWrite).unwrap());
    std::fs::write(directory.path().join("ballast"), [1]).unwrap();
    let pager = guest.pager(false);
    pager.begin(residue(&pager, [3])).unwrap();
    let problem = page_comes(&pager, &Room(u64::MAX)).unwrap_err().problem();
    assert_eq!((problem.code.as_str(), problem.blame), ("out-of-memory", Blame::Host), "{problem:?}");
    assert_eq!(pager.missing(), 1);
    std::fs::remove_file(directory.path().join("ballast")).unwrap();
    page_comes(&pager, &Room(u64::MAX)).unwrap();
    assert_eq!(guest.looks(3).join().unwrap(), [8; 16]);
    pager.end();
}
