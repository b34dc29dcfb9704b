//! RAM files, their mappings, and what happens when memory runs out.

use std::fs::File;
use std::io::{Read, Write};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::fs::MemfdFlags;
use sterna_sys::PAGE_BYTES;
use sterna_sys::file::{self, HugePolicy, Kind, allocated_runs};
use sterna_sys::map::{Access, SharedMapping};
use sterna_sys::mount::{Tmpfs, mounted_at, unmount};
use sterna_sys::socket::{ReceiveError, SendError, receive_exact, send_all};

mod support;
use support::{Ram, ram_file, skip_or_own_mounts};

fn bytes(pages: Range<u64>) -> Range<u64> {
    pages.start * PAGE_BYTES..pages.end * PAGE_BYTES
}

/// First page and page behind the last of each run.
fn runs(file: &File, pages: Range<u64>) -> Vec<(u64, u64)> {
    let runs = allocated_runs(file, bytes(pages)).collect::<Result<Vec<_>, _>>().unwrap();
    runs.into_iter().map(|run| (run.start / PAGE_BYTES, run.end / PAGE_BYTES)).collect()
}

#[test]
fn allocated_runs_are_exact_and_stay_within_what_was_asked() {
    let file = ram_file(100);
    assert_eq!(runs(&file, 0..100), []);
    let ram = Ram::shared(&file, 100);
    [0, 10, 11, 12, 50, 99].into_iter().for_each(|page| ram.poke(page, 0, 1));
    assert_eq!(runs(&file, 0..100), [(0, 1), (10, 13), (50, 51), (99, 100)]);
    assert_eq!(runs(&file, 11..50), [(11, 13)]);
    assert_eq!(runs(&file, 13..50), []);
    assert_eq!(runs(&file, 99..200), [(99, 100)], "past the end of the file");
    assert_eq!(runs(&file, 20..20), []);
    file::allocate(&file, bytes(2..4)).unwrap();
    assert_eq!(file::allocated_bytes(&file).unwrap(), 8 * PAGE_BYTES);
    assert_eq!(runs(&file, 0..100), [(0, 1), (10, 13), (50, 51), (99, 100)], "allocated, but nobody has touched them");
    assert_eq!(ram.peek(2, 0), 0);
    assert_eq!(runs(&file, 0..10), [(0, 1), (2, 3)], "reading through a mapping is touching");
    file::punch(&file, bytes(11..60)).unwrap();
    assert_eq!(runs(&file, 0..100), [(0, 1), (2, 3), (10, 11), (99, 100)]);
    assert_eq!(file::allocated_bytes(&file).unwrap(), 5 * PAGE_BYTES);
    assert_eq!(file.metadata().unwrap().len(), 100 * PAGE_BYTES, "its length stays");
}

/// Nothing is swapped out here, so that all content is in memory.
#[test]
fn pages_in_memory_are_those_with_content_whoever_touched_them() {
    let file = ram_file(100);
    let (ram, mapping) = (Ram::shared(&file, 100), SharedMapping::new(&file, 100 * PAGE_BYTES, Access::Read).unwrap());
    let in_memory = |pages: Range<u64>| {
        let mut flags = vec![0; (pages.end - pages.start) as usize];
        mapping.in_memory(bytes(pages.clone()), &mut flags).unwrap();
        pages.zip(flags).filter(|(_, flag)| flag & 1 == 1).map(|(page, _)| page).collect::<Vec<_>>()
    };
    assert_eq!(in_memory(0..100), []);
    [0, 10, 11, 99].into_iter().for_each(|page| ram.poke(page, 0, 1));
    file::allocate(&file, bytes(2..4)).unwrap();
    assert_eq!(in_memory(0..100), [0, 10, 11, 99]);
    assert_eq!(in_memory(5..11), [10]);
    file::punch(&file, bytes(11..60)).unwrap();
    assert_eq!(in_memory(0..100), [0, 10, 99]);
    assert_eq!(file::allocated_bytes(&file).unwrap(), 5 * PAGE_BYTES, "nothing was allocated by looking");
}

#[test]
fn an_error_ends_the_runs() {
    let (reader, _writer) = std::io::pipe().unwrap();
    let reader = OwnedFd::from(reader);
    let mut runs = allocated_runs(&reader, 0..PAGE_BYTES);
    assert_eq!(runs.next().unwrap().unwrap_err().errno(), Some(libc::ESPIPE));
    assert!(runs.next().is_none());
}

#[test]
fn each_kind_of_backing_is_told_apart() {
    let memfd = rustix::fs::memfd_create("ram", MemfdFlags::CLOEXEC).unwrap();
    assert_eq!(file::backing(&memfd).unwrap(), file::Backing { kind: Kind::Memfd, page_bytes: PAGE_BYTES });
    let backing = file::backing(File::open("/proc/self/exe").unwrap()).unwrap();
    assert!(matches!(backing.kind, Kind::Other(_)) || matches!(backing.kind, Kind::Tmpfs(_)), "{backing:?}");
    assert!(matches!(file::backing(File::open("/proc/self/stat").unwrap()).unwrap().kind, Kind::Other(0x9FA0)));

    if skip_or_own_mounts() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    for (options, policy) in [
        (c"huge=never", HugePolicy::Never),
        (c"huge=always", HugePolicy::Always),
        (c"huge=within_size", HugePolicy::WithinSize),
        (c"huge=advise", HugePolicy::Advise),
    ] {
        let flags = rustix::mount::MountFlags::empty();
        if let Err(error) = rustix::mount::mount("tmpfs", directory.path(), "tmpfs", flags, options) {
            eprintln!("skipped {options:?}: {error}");
            continue;
        }
        let file = File::create_new(directory.path().join("ram")).unwrap();
        assert_eq!(file::backing(&file).unwrap(), file::Backing { kind: Kind::Tmpfs(policy), page_bytes: PAGE_BYTES });
        drop(file);
        unmount(directory.path()).unwrap();
    }
    // hugetlbfs needs no page in its pool to be told apart.
    for pool in sterna_sys::huge::pools().unwrap() {
        let options = std::ffi::CString::new(format!("pagesize={}", pool.page_bytes)).unwrap();
        let flags = rustix::mount::MountFlags::empty();
        rustix::mount::mount("hugetlbfs", directory.path(), "hugetlbfs", flags, options.as_c_str()).unwrap();
        let file = File::create_new(directory.path().join("ram")).unwrap();
        assert_eq!(file::backing(&file).unwrap(), file::Backing { kind: Kind::Hugetlbfs, page_bytes: pool.page_bytes });
        drop(file);
        unmount(directory.path()).unwrap();
    }
}

/// A file of 64 pages on a tmpfs that has room for 16.
fn small_tmpfs(directory: &Path) -> File {
    Tmpfs { size_bytes: Some(16 * PAGE_BYTES), mode: 0o700, huge: HugePolicy::Never }.mount(directory).unwrap();
    let mut options = File::options();
    let file = options.read(true).write(true).create_new(true).open(directory.join("ram")).unwrap();
    file.set_len(64 * PAGE_BYTES).unwrap();
    file
}

#[test]
fn a_tmpfs_is_mounted_found_and_unmounted() {
    use std::os::unix::fs::PermissionsExt;
    if skip_or_own_mounts() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    assert_eq!(mounted_at(directory.path()).unwrap(), None, "the file system above does not count");
    unmount(directory.path()).unwrap_err();
    let file = small_tmpfs(directory.path());
    let mount = mounted_at(directory.path()).unwrap().unwrap();
    assert_eq!((mount.kind.as_str(), mount.option("size").unwrap().to_str()), ("tmpfs", Some("64k")));
    assert_eq!(directory.path().metadata().unwrap().permissions().mode() & 0o7777, 0o700);
    assert_eq!(file::backing(&file).unwrap().kind, Kind::Tmpfs(HugePolicy::Never));
    assert_eq!(file::free_bytes(&file).unwrap(), Some(16 * PAGE_BYTES));
    file::allocate(&file, bytes(0..4)).unwrap();
    assert_eq!(file::free_bytes(&file).unwrap(), Some(12 * PAGE_BYTES));
    assert_eq!(unmount(directory.path()).unwrap_err().errno(), Some(libc::EBUSY));
    drop(file);
    unmount(directory.path()).unwrap();
    assert_eq!(mounted_at(directory.path()).unwrap(), None);
    Tmpfs { size_bytes: None, mode: 0o755, huge: HugePolicy::Never }
        .mount(&directory.path().join("absent"))
        .unwrap_err();
}

#[test]
fn running_out_of_memory_is_an_error_wherever_memory_is_asked_for() {
    if skip_or_own_mounts() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let file = small_tmpfs(directory.path());
    let mapping = SharedMapping::new(&file, 64 * PAGE_BYTES, Access::ReadWrite).unwrap();
    mapping.populate_write(bytes(0..16)).unwrap();
    assert_eq!(file::allocated_bytes(&file).unwrap(), 16 * PAGE_BYTES);
    assert_eq!(mapping.populate_write(bytes(15..17)).unwrap_err().errno(), Some(libc::EFAULT));
    assert_eq!(mapping.copy_in(20 * PAGE_BYTES, &[1; 4096]).unwrap_err().errno(), Some(libc::EFAULT));
    assert_eq!(file::write_at(&file, 20 * PAGE_BYTES, &[1; 4096]).unwrap_err().errno(), Some(libc::ENOSPC));
    assert_eq!(file::allocate(&file, bytes(16..17)).unwrap_err().errno(), Some(libc::ENOSPC));

    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let sender = std::thread::spawn({
        let mut theirs = theirs.try_clone().unwrap();
        // The receiver gives up half way.
        move || theirs.write_all(&vec![7; 4 << 20]).is_err()
    });
    let mut into = [mapping.incoming(bytes(0..8)), mapping.incoming(bytes(32..56))];
    let error = receive_exact(&ours, &mut into).unwrap_err();
    assert!(matches!(error, ReceiveError::Memory), "{error:?}");
    assert!(!mapping.is_zero(bytes(7..8)), "what came before it was written");
    let error = send_all(&ours, &mut [mapping.outgoing(bytes(40..41))]).unwrap_err();
    assert!(matches!(error, SendError::Memory), "{error:?}");
    drop(ours);
    assert!(sender.join().unwrap());
    assert_eq!(theirs.read(&mut [0; 8]).unwrap_or(0), 0, "nothing was sent of what cannot be read");

    // With room again the same succeeds.
    file::punch(&file, bytes(0..16)).unwrap();
    mapping.copy_in(20 * PAGE_BYTES, &[1; 4096]).unwrap();
}

#[test]
fn the_zero_test_finds_a_single_bit_anywhere() {
    let file = ram_file(3);
    let ram = Ram::shared(&file, 3);
    let mapping = SharedMapping::new(&file, 3 * PAGE_BYTES, Access::Read).unwrap();
    assert!(mapping.is_zero(bytes(0..3)));
    assert!(mapping.is_zero(bytes(1..1)), "of nothing, all is zero");
    for word in 0..512 {
        let bit = 1 << (word % 64);
        ram.poke(1, word, bit);
        assert!(!mapping.is_zero(bytes(1..2)), "word {word}");
        assert!(mapping.is_zero(bytes(0..1)) && mapping.is_zero(bytes(2..3)), "word {word}");
        ram.poke(1, word, 0);
    }
    assert!(mapping.is_zero(bytes(0..3)));
    ram.poke(1, 16, 1);
    assert!(mapping.is_zero(4096..4096 + 128));
    assert!(!mapping.is_zero(4096 + 128..4096 + 256));
}

#[test]
fn copies_out_and_in_carry_every_byte() {
    let file = ram_file(4);
    let mapping = SharedMapping::new(&file, 4 * PAGE_BYTES, Access::ReadWrite).unwrap();
    let body: Vec<u8> = (0..2 * 4096u32).map(|at| (at * 31 / 7) as u8).collect();
    // From and to places that are not aligned on this side.
    let mut shifted = vec![0];
    shifted.extend(&body);
    mapping.copy_in(PAGE_BYTES, &shifted[1..]).unwrap();
    let mut out = vec![0xFF; 2 * 4096 + 1];
    mapping.copy_out(bytes(1..3), &mut out[1..]);
    assert_eq!(out[1..], body);
    assert!(mapping.is_zero(bytes(0..1)) && mapping.is_zero(bytes(3..4)), "nothing was written beside it");
    let mut scratch = Vec::new();
    assert!(mapping.with_copy(bytes(2..3), &mut scratch, |page| page == &body[4096..]));
    assert!(mapping.with_copy(4096..4096 + 16, &mut scratch, |part| part == &body[..16]), "scratch is longer by now");
    mapping.dont_need(bytes(0..4)).unwrap();
    mapping.copy_out(bytes(1..3), &mut out[1..]);
    assert_eq!(out[1..], body, "the file kept it");
}

#[test]
#[should_panic(expected = "not within a mapping of 8192 bytes")]
fn a_range_outside_a_mapping_is_a_bug_like_an_index_outside_a_slice() {
    SharedMapping::new(ram_file(2), 2 * PAGE_BYTES, Access::Read).unwrap().outgoing(bytes(1..3));
}

#[test]
#[should_panic(expected = "for reading")]
fn nothing_is_received_into_a_mapping_for_reading() {
    SharedMapping::new(ram_file(2), 2 * PAGE_BYTES, Access::Read).unwrap().incoming(bytes(0..1));
}

#[test]
fn a_mapping_is_gone_once_dropped_and_never_made_of_nothing() {
    let file = ram_file(2);
    let id = file::id(&file).unwrap();
    let maps_it = || {
        let maps = sterna_sys::process::maps(std::process::id()).unwrap();
        maps.into_iter().find(|mapping| mapping.file == Some(id))
    };
    let mapping = SharedMapping::new(&file, 2 * PAGE_BYTES, Access::Read).unwrap();
    let found = maps_it().unwrap();
    assert_eq!(found.range, mapping.addresses());
    assert!(found.permissions.shared && found.permissions.read && !found.permissions.write && found.deleted);
    drop(mapping);
    assert_eq!(maps_it(), None);
    assert_eq!(SharedMapping::new(&file, 0, Access::Read).unwrap_err().errno(), Some(libc::EINVAL));
    let reader = File::open("/proc/self/exe").unwrap();
    assert_eq!(SharedMapping::new(&reader, 4096, Access::ReadWrite).unwrap_err().errno(), Some(libc::EACCES));
}

#[test]
fn a_file_has_no_writer_where_nobody_has_it_open_for_writing_or_mapped_shared() {
    let file = ram_file(2);
    let reader = file::reader(&file).unwrap();
    assert!(!file::nobody_writes(&reader).unwrap(), "it is open for writing");
    let ram = Ram::shared(&file, 2);
    drop(file);
    assert!(!file::nobody_writes(&reader).unwrap(), "it is mapped so that a write goes to it");
    drop(ram);
    assert!(file::nobody_writes(&reader).unwrap());
    assert!(file::nobody_writes(&reader).unwrap(), "what the question took it gave back");
}
