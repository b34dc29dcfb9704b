//! Mapped files that lack content or memory for a page. Before there was a handler each of these tests ended with
//! "signal: 7, SIGBUS".

use std::fs::File;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output};

use sterna_sys::PAGE_BYTES;
use sterna_sys::file::HugePolicy;
use sterna_sys::iovec::copy_out;
use sterna_sys::map::{Access, SharedMapping};
use sterna_sys::mount::Tmpfs;

mod support;
use support::{Ram, ram_file, skip_or_own_mounts};

const PAGES: u64 = 64;
const BYTES: u64 = PAGES * PAGE_BYTES;

/// A file of ones, mapped.
fn mapped(access: Access) -> (File, SharedMapping) {
    let file = ram_file(PAGES);
    std::os::unix::fs::FileExt::write_all_at(&file, &vec![1; BYTES as usize], 0).unwrap();
    let mapping = SharedMapping::new(&file, BYTES, access).unwrap();
    (file, mapping)
}

/// Sixteen bytes of a page.
fn word(mapping: &SharedMapping, page: u64) -> [u8; 16] {
    let mut word = [9; 16];
    mapping.copy_out(page * PAGE_BYTES..page * PAGE_BYTES + 16, &mut word);
    word
}

#[test]
fn a_file_that_is_cut_short_breaks_its_mappings_and_no_other() {
    let (file, mapping) = mapped(Access::Read);
    let same = SharedMapping::new(&file, BYTES, Access::Read).unwrap();
    let (_other_file, other) = mapped(Access::Read);
    file.set_len(8 * PAGE_BYTES).unwrap();
    assert_eq!((word(&mapping, 7), mapping.is_broken()), ([1; 16], false), "what is left can be read");
    assert_eq!((word(&mapping, 8), mapping.is_broken()), ([0; 16], true));
    assert_eq!(word(&mapping, 7), [0; 16], "it is of no use any more");
    assert!(mapping.is_zero(0..BYTES));
    assert!(!same.is_broken(), "nobody has looked there");
    assert!(same.is_zero(8 * PAGE_BYTES..BYTES) && same.is_broken());
    assert_eq!((word(&other, 8), other.is_broken()), ([1; 16], false));
    // The row of the table is free again: what comes next is whole.
    drop((mapping, same));
    let (_file, next) = mapped(Access::Read);
    assert_eq!((word(&next, 63), next.is_broken()), ([1; 16], false));
}

#[test]
fn what_is_copied_for_a_socket_breaks_the_mapping_too() {
    let (file, mapping) = mapped(Access::Read);
    file.set_len(PAGE_BYTES).unwrap();
    let mut out = vec![9; 4 * PAGE_BYTES as usize];
    let mut vectors = [mapping.outgoing(0..2 * PAGE_BYTES), mapping.outgoing(10 * PAGE_BYTES..12 * PAGE_BYTES)];
    assert_eq!(copy_out(&mut vectors, &mut out).1, out.len());
    assert!(mapping.is_broken());
}

#[test]
fn writing_behind_the_end_is_an_error() {
    let (file, mapping) = mapped(Access::ReadWrite);
    file.set_len(PAGE_BYTES).unwrap();
    mapping.copy_in(0, &[2; 16]).unwrap();
    mapping.copy_in(PAGE_BYTES, &[2; 16]).unwrap_err();
    assert_eq!(file.metadata().unwrap().len(), PAGE_BYTES);
    // Between the allocation and the writing: until one of the writers has met the end.
    let (file, mapping) = mapped(Access::ReadWrite);
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..4)
            .map(|_| scope.spawn(|| while mapping.copy_in(9 * PAGE_BYTES, &[3; PAGE_BYTES as usize]).is_ok() {}))
            .collect();
        while writers.iter().any(|writer| !writer.is_finished()) {
            file.set_len(PAGE_BYTES).unwrap();
        }
    });
}

#[test]
fn many_threads_may_meet_the_end_at_once() {
    for _ in 0..50 {
        let (file, mapping) = mapped(Access::Read);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let mapping = &mapping;
                scope.spawn(move || {
                    while !mapping.is_broken() {
                        for page in 0..PAGES {
                            let word = word(mapping, (page + thread * 16) % PAGES);
                            assert!(word == [1; 16] || (word == [0; 16] && mapping.is_broken()), "zeros, unsaid");
                        }
                    }
                });
            }
            // Other mappings come and go meanwhile.
            scope.spawn(|| (0..20).for_each(|_| assert_eq!(word(&mapped(Access::Read).1, 63), [1; 16])));
            scope.spawn(|| file.set_len(PAGE_BYTES).unwrap());
        });
    }
}

#[test]
fn a_hole_that_cannot_be_filled_breaks_the_mapping() {
    if skip_or_own_mounts() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    Tmpfs { size_bytes: Some(16 * PAGE_BYTES), mode: 0o700, huge: HugePolicy::Never }.mount(directory.path()).unwrap();
    let mut options = File::options();
    let file = options.read(true).write(true).create_new(true).open(directory.path().join("ram")).unwrap();
    file.set_len(BYTES).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[1; 16 * PAGE_BYTES as usize], 0).unwrap();
    let mapping = SharedMapping::new(&file, BYTES, Access::Read).unwrap();
    assert_eq!((word(&mapping, 15), mapping.is_broken()), ([1; 16], false));
    assert_eq!((word(&mapping, 16), mapping.is_broken()), ([0; 16], true));
    // A process that another test has just begun may hold the file until it becomes its program.
    rustix::mount::unmount(directory.path(), rustix::mount::UnmountFlags::DETACH).unwrap();
}

#[test]
fn huge_pages_are_replaced_as_a_whole() {
    const HUGE: u64 = 2 << 20;
    let pools = sterna_sys::huge::pools().unwrap();
    if !pools.iter().any(|pool| pool.page_bytes == HUGE && pool.available_bytes() >= 2 * HUGE) {
        return eprintln!("skipped: this host's pool has no two free huge pages (vm.nr_hugepages)");
    }
    let flags = rustix::fs::MemfdFlags::HUGETLB | rustix::fs::MemfdFlags::HUGE_2MB;
    let file = File::from(rustix::fs::memfd_create("ram", flags).unwrap());
    file.set_len(2 * HUGE).unwrap();
    let mapping = SharedMapping::new(&file, 2 * HUGE, Access::ReadWrite).unwrap();
    mapping.copy_in(HUGE + 7 * PAGE_BYTES, &[1; 16]).unwrap();
    file.set_len(HUGE).unwrap();
    assert_eq!(word(&mapping, (HUGE / PAGE_BYTES) + 7), [0; 16]);
    assert!(mapping.is_broken());
}

/// Runs one of the tests below in a process of its own, for real.
fn run_alone(test: &str) -> Output {
    let program = std::env::current_exe().unwrap();
    Command::new(program)
        .args(["--ignored", "--exact", test, "--nocapture"])
        .env("RUST_MIN_STACK", "262144")
        .output()
        .unwrap()
}

#[test]
fn other_memory_that_cannot_be_had_ends_the_process_as_ever() {
    assert_eq!(run_alone("a_stranger_to_the_table").status.signal(), Some(libc::SIGBUS));
}

#[test]
#[ignore = "ends its process: another test runs it"]
fn a_stranger_to_the_table() {
    let (_file, _installed) = mapped(Access::Read);
    let file = ram_file(4);
    let ram = Ram::shared(&file, 4);
    file.set_len(PAGE_BYTES).unwrap();
    ram.peek(2, 0);
}

#[test]
fn an_overflow_of_the_stack_is_still_said_to_be_one() {
    let output = run_alone("a_stack_overflows");
    assert_eq!(output.status.signal(), Some(libc::SIGABRT));
    assert!(String::from_utf8_lossy(&output.stderr).contains("overflowed its stack"), "{output:?}");
}

#[test]
#[ignore = "ends its process: another test runs it"]
fn a_stack_overflows() {
    fn deeper(depth: u64) -> u64 {
        let here = std::hint::black_box([depth; 64]);
        if depth == u64::MAX { 0 } else { deeper(depth + 1) + std::hint::black_box(here)[3] }
    }
    let (_file, _installed) = mapped(Access::Read);
    assert!(Path::new("/").exists() && deeper(0) > 0);
}
