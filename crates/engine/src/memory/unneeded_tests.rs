//! When a page of a pool is given back. This process is a VMM, and the other is one that nobody knows.

use std::io::{BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::process::{Child, Command, Stdio};

use sterna_protocol::layout::PAGE_BYTES;
use sterna_sys::map::PrivateMapping;
use sterna_sys::userfaultfd::{self, Features, Modes, Userfaultfd};

use super::*;
use crate::memory::common::{self, Guest, common_bytes};

const PAGE: u64 = PAGE_BYTES as u64;
const PAGES: u64 = 16;

/// The environment variable that tells the other process what to map.
const OTHERS_POOL: &str = "STERNA_TEST_POOL";

/// A file on tmpfs without a name, whose page `n` holds the byte `1 + n`.
fn unnamed() -> File {
    let file = tempfile::tempfile_in("/dev/shm").expect("a file");
    (0..PAGES).for_each(|page| file.write_all_at(&[1 + page as u8; PAGE_BYTES], page * PAGE).unwrap());
    file
}

fn pool() -> File {
    let file = unnamed();
    mark_as_pool(&file).unwrap();
    file
}

/// A guest whose RAM is the first pages of this file.
fn guest(file: &File, pages: u64) -> PrivateMapping {
    let ram = PrivateMapping::new(PAGES * PAGE).expect("a mapping");
    ram.lay(0, file, 0..pages * PAGE).expect("laid");
    ram
}

fn write(guest: &PrivateMapping, pages: Range<u64>) {
    pages.for_each(|page| guest.write(page * PAGE, &[200; PAGE_BYTES]));
}

fn reads(guest: &PrivateMapping, page: u64) -> u8 {
    let mut bytes = [0; PAGE_BYTES];
    guest.read(page * PAGE, &mut bytes);
    assert!(bytes.iter().all(|byte| *byte == bytes[0]), "half a page");
    bytes[0]
}

/// The number of pages of the file that are given back where none of its machines is on its way, and which are left:
/// the first of each run and the one behind its last.
fn swept(file: &File) -> (u64, Vec<(u64, u64)>) {
    let own = file::id(file).unwrap();
    // Other tests of this process have pools of their own.
    let given = give_back(&[std::process::id()], own.device, |id| id != own).unwrap();
    let left = allocated_runs(file, 0..PAGES * PAGE).map(|run| run.unwrap());
    (given / PAGE, left.map(|run| (run.start / PAGE, run.end / PAGE)).collect())
}

#[test]
fn a_page_is_given_back_once_everybody_who_maps_it_has_something_in_its_place() {
    let pool = pool();
    let (one, other) = (guest(&pool, 12), guest(&pool, 8));
    // Four pages are mapped by nobody; the others are in no page table yet.
    assert_eq!(swept(&pool), (4, vec![(0, 12)]));
    assert_eq!(reads(&one, 11), 12);
    write(&one, 0..10);
    assert_eq!(swept(&pool), (2, vec![(0, 8), (10, 12)]), "the other guest has pages 0 to 7 still");
    write(&other, 0..2);
    other.renew(2 * PAGE..3 * PAGE).expect("discarded");
    assert_eq!(swept(&pool), (3, vec![(3, 8), (10, 12)]));
    assert_eq!(swept(&pool), (0, vec![(3, 8), (10, 12)]));
    assert_eq!([0, 2, 3, 7].map(|page| reads(&other, page)), [200, 0, 4, 8]);
    assert_eq!([0, 9, 10, 11, 12].map(|page| reads(&one, page)), [200, 200, 11, 12, 0]);
    drop(other);
    assert_eq!(swept(&pool), (5, vec![(10, 12)]));
    assert_eq!([9, 10, 11].map(|page| reads(&one, page)), [200, 11, 12]);
}

#[test]
fn what_is_common_counts_for_each_guest_and_once_for_all() {
    let pool = pool();
    let (one, other) = (guest(&pool, 12), guest(&pool, 8));
    let ram = |guest: &PrivateMapping| Guest { pid: std::process::id(), addresses: Vec::from([guest.addresses()]) };
    let common = |guest| common_bytes(&ram(guest)).unwrap() / PAGE;
    let together = || common::together(&[ram(&one), ram(&other)]).bytes / PAGE;
    assert_eq!((common(&one), common(&other), together()), (12, 8, 12));
    reads(&one, 3);
    write(&one, 5..7);
    one.renew(8 * PAGE..9 * PAGE).unwrap();
    assert_eq!((common(&one), common(&other)), (9, 8));
    assert_eq!(together(), 2 + 11, "two of its own, and all of the pool but the page that neither has");
    write(&one, 12..15);
    assert_eq!((common(&one), together()), (9, 5 + 11));
}

#[test]
fn a_pool_with_machines_on_their_way_is_left_alone() {
    let pool = pool();
    let _guest = guest(&pool, 4);
    let own = file::id(&pool).unwrap();
    assert_eq!(give_back(&[std::process::id()], own.device, |_| true).unwrap(), 0);
    assert_eq!(file::allocated_bytes(&pool).unwrap(), PAGES * PAGE);
}

#[test]
fn a_file_that_is_no_pool_is_left_alone() {
    let file = unnamed();
    let ram = guest(&file, 4);
    write(&ram, 0..4);
    assert_eq!(swept(&file), (0, vec![(0, PAGES)]));
}

/// Fails where whatever looks swapped out counts as a page of the guest's own: a page that is armed and not mapped
/// looks so.
#[test]
fn a_page_that_is_armed_and_was_never_read_is_needed() {
    if !sterna_sys::probe::missing().is_empty() {
        println!("skipped: {}", sterna_sys::probe::missing().join("; "));
        return;
    }
    let pool = pool();
    let guest = guest(&pool, PAGES);
    let faults = Userfaultfd::create(userfaultfd::open_device().expect("the device")).expect("a userfaultfd");
    faults.enable(Features::TRACKING).expect("the features");
    faults.register(guest.addresses(), Modes::WP).expect("registered");
    Pagemap::of_this_process().unwrap().written_and_arm(guest.addresses(), &mut Vec::new()).unwrap();
    write(&guest, 3..4);
    assert_eq!(swept(&pool), (1, vec![(0, 3), (4, PAGES)]));
    assert_eq!([2, 3, 4].map(|page| reads(&guest, page)), [3, 200, 5]);
}

/// Fails where only the known processes are asked.
#[test]
fn a_page_that_a_process_needs_which_nobody_knows_is_kept() {
    let pool = pool();
    let guest = guest(&pool, PAGES);
    let other = begin_other(&pool);
    write(&guest, 0..8);
    assert_eq!(swept(&pool), (4, vec![(4, PAGES)]), "the other process maps all but the first four");
    end_other(other);
    assert_eq!(swept(&pool), (4, vec![(8, PAGES)]));
}

#[test]
fn what_a_process_maps_is_a_pool_once_that_is_said_of_all_of_it() {
    let file = unnamed();
    let guest = guest(&file, PAGES);
    let other = begin_other(&file);
    write(&guest, 0..8);
    assert_eq!(swept(&file), (0, vec![(0, PAGES)]), "it is no pool yet");
    mark_mapped(other.id(), file::id(&file).unwrap().device).unwrap();
    assert_eq!(swept(&file), (4, vec![(4, PAGES)]));
    end_other(other);
    mark_mapped(u32::MAX >> 1, file::id(&file).unwrap().device).expect("nobody maps nothing");
}

/// A process that maps all pages of a file but the first four.
fn begin_other(file: &File) -> Child {
    let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
    let mut other = Command::new(std::env::current_exe().expect("this program has a path"))
        .args(["--exact", "--ignored", "--nocapture", "memory::unneeded::tests::another_process_maps_a_pool"])
        .env(OTHERS_POOL, path)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("this program starts");
    let mut lines = BufReader::new(other.stdout.as_mut().expect("its output")).lines().map_while(Result::ok);
    assert!(lines.any(|line| line.ends_with("mapped")), "it maps the file");
    other
}

fn end_other(mut other: Child) {
    drop(other.stdin.take());
    assert!(other.wait().expect("it ends").success());
}

#[test]
#[ignore = "another test runs it"]
fn another_process_maps_a_pool() {
    let path = std::env::var(OTHERS_POOL).expect("the test that runs this says which");
    let pool = File::open(path).expect("the pool");
    let ram = PrivateMapping::new(PAGES * PAGE).expect("a mapping");
    ram.lay(4 * PAGE, &pool, 4 * PAGE..PAGES * PAGE).expect("laid");
    println!("mapped");
    std::io::stdin().read_line(&mut String::new()).expect("the end");
}
