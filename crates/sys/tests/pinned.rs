//! Direct I/O into guest RAM: seen while a page is pinned by the transfer itself, not seen where it was pinned before
//! arming.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

use io_uring::{IoUring, opcode, types};
use sterna_sys::PAGE_BYTES;

mod support;
use support::{Ram, Tracker, ram_file, skip};

const PAGES: u64 = 8;
const CONTENT: u8 = 0xA5;

/// A disk's file opened for direct I/O, or why there is none.
fn disk() -> Option<File> {
    let directory = env!("CARGO_TARGET_TMPDIR");
    let content = vec![CONTENT; (PAGES * PAGE_BYTES) as usize];
    let file = tempfile::NamedTempFile::new_in(directory).expect("a file");
    file.as_file().write_all_at(&content, 0).expect("its content");
    file.as_file().sync_all().expect("its content on the disk");
    match File::options().read(true).custom_flags(libc::O_DIRECT).open(file.path()) {
        Ok(direct) => Some(direct),
        Err(error) => {
            eprintln!("skipped: the file system of {directory} has no direct I/O: {error}");
            None
        }
    }
}

#[test]
fn direct_io_that_starts_after_arming_is_seen() {
    if skip() {
        return;
    }
    let Some(disk) = disk() else { return };
    let ram = Ram::shared(ram_file(PAGES), PAGES);
    let mut tracker = Tracker::of(&ram);
    tracker.written_and_arm();
    let target = ram.pages(2..4);
    let length = (target.end - target.start) as usize;
    // SAFETY: the kernel writes into two pages of `ram`, which nobody has references into.
    let read = unsafe { libc::pread(disk.as_raw_fd(), target.start as *mut _, length, 0) };
    assert_eq!(read, length as isize, "{}", std::io::Error::last_os_error());
    assert_eq!(tracker.written_and_arm(), [2, 3]);
    assert_eq!(ram.peek(3, 0), u64::from_ne_bytes([CONTENT; 8]));
}

/// Why a page that was flagged once stays under watch by its content until no such I/O can be left.
#[test]
fn a_write_into_a_page_pinned_before_arming_is_not_seen() {
    if skip() {
        return;
    }
    let Some(disk) = disk() else { return };
    let mut ring = match IoUring::new(4) {
        Ok(ring) => ring,
        Err(error) => return eprintln!("skipped: this kernel gives no io_uring: {error}"),
    };
    let ram = Ram::shared(ram_file(PAGES), PAGES);
    let target = ram.pages(2..4);
    let length = (target.end - target.start) as usize;
    let buffer = libc::iovec { iov_base: target.start as *mut _, iov_len: length };
    // SAFETY: the pages, which this pins, are of `ram`; it outlives what is done with the ring below.
    if let Err(error) = unsafe { ring.submitter().register_buffers(&[buffer]) } {
        return eprintln!("skipped: io_uring does not pin shared memory here: {error}");
    }

    let mut tracker = Tracker::of(&ram);
    tracker.written_and_arm();
    let read = opcode::ReadFixed::new(types::Fd(disk.as_raw_fd()), target.start as *mut u8, length as u32, 0).build();
    // SAFETY: descriptor and buffer live until the completion is there.
    unsafe { ring.submission().push(&read) }.expect("room in the ring");
    ring.submit_and_wait(1).expect("submitted");
    let completion = ring.completion().next().expect("a completion");
    assert_eq!(completion.result(), length as i32);

    assert_eq!(tracker.written_and_arm(), [], "the pinned pages changed without a fault");
    assert_eq!(ram.peek(2, 0), u64::from_ne_bytes([CONTENT; 8]), "but changed they have");
}
