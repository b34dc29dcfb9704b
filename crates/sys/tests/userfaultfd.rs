//! Faults on missing, stale and protected pages, settled from outside the process that waits.

use std::time::{Duration, Instant};

use sterna_sys::PAGE_BYTES;
use sterna_sys::file::write_at;
use sterna_sys::pagemap::Pagemap;
use sterna_sys::userfaultfd::{Event, Fault, Features, Filled, Ioctls, Modes, Stopped, Userfaultfd};

mod support;
use support::vmm::Vmm;
use support::{PATIENCE, Ram, ram_file, skip, userfaultfd};

const PAGES: u64 = 16;

/// A VMM whose RAM is `file`, registered for `modes`.
fn start(file: &std::fs::File, private: bool, modes: Modes) -> (Vmm, Userfaultfd) {
    let (vmm, uffd) = Vmm::start(|| if private { Ram::private(file, PAGES) } else { Ram::shared(file, PAGES) });
    let minor = if modes.contains(Modes::MINOR) { Features::MINOR_SHMEM } else { Features::empty() };
    uffd.enable(Features::MISSING_SHMEM | Features::THREAD_ID | minor).unwrap();
    let ioctls = uffd.register(vmm.addresses.clone(), modes).unwrap();
    assert!(ioctls.contains(Ioctls::WAKE | Ioctls::COPY));
    (vmm, uffd)
}

fn next_fault(uffd: &Userfaultfd) -> Fault {
    let mut events = [const { Event::Unknown }; 4];
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        match uffd.read_events(&mut events).unwrap() {
            0 => std::thread::sleep(Duration::from_millis(1)),
            1 => match events[0] {
                Event::Fault(fault) => return fault,
                ref other => panic!("a fault, not {other:?}"),
            },
            more => panic!("{more} events of one thread that waits"),
        }
    }
    panic!("no fault came");
}

/// Does `access` in the VMM while `settle` looks after the fault that it raises.
fn during<T: Send>(access: impl FnOnce() -> T + Send, settle: impl FnOnce()) -> T {
    std::thread::scope(|scope| {
        let access = scope.spawn(access);
        settle();
        access.join().expect("the access succeeds")
    })
}

#[test]
fn an_access_to_a_missing_page_waits_until_it_is_copied() {
    if skip() {
        return;
    }
    for private in [false, true] {
        let file = ram_file(PAGES);
        let (mut vmm, uffd) = start(&file, private, Modes::MISSING);
        let (pid, base) = (vmm.pid, vmm.addresses.start);
        let value = during(
            || vmm.peek(3),
            || {
                let fault = next_fault(&uffd);
                let address = base + 3 * PAGE_BYTES;
                assert_eq!(fault, Fault { address, thread: pid, write: false, protected: false, minor: false });
                let filled = uffd.copy(address, &[9; PAGE_BYTES as usize], false).unwrap();
                assert_eq!(filled, Filled { bytes: PAGE_BYTES, stopped: None });
            },
        );
        assert_eq!(value, u64::from_ne_bytes([9; 8]));
        let value = during(
            || vmm.peek(4),
            || {
                let fault = next_fault(&uffd);
                uffd.zeropage(fault.address..fault.address + PAGE_BYTES).unwrap();
            },
        );
        assert_eq!(value, 0);
        during(
            || vmm.poke(5, 1),
            || {
                let fault = next_fault(&uffd);
                assert!(fault.write);
                uffd.copy(fault.address, &[0; PAGE_BYTES as usize], false).unwrap();
            },
        );
        assert_eq!(vmm.peek(5), 1);
    }
}

#[test]
fn a_batch_stops_at_a_page_that_is_there_and_leaves_it_alone() {
    if skip() {
        return;
    }
    for private in [false, true] {
        let file = ram_file(PAGES);
        let (mut vmm, uffd) = start(&file, private, Modes::MISSING);
        let base = vmm.addresses.start;
        uffd.copy(base + 4 * PAGE_BYTES, &[1; PAGE_BYTES as usize], false).unwrap();
        let body = vec![2; (8 * PAGE_BYTES) as usize];
        let filled = uffd.copy(base, &body, false).unwrap();
        assert_eq!(filled, Filled { bytes: 4 * PAGE_BYTES, stopped: Some(Stopped::AlreadyThere) });
        let filled = uffd.copy(base + 5 * PAGE_BYTES, &body[..3 * PAGE_BYTES as usize], false).unwrap();
        assert_eq!(filled, Filled { bytes: 3 * PAGE_BYTES, stopped: None });
        let values: Vec<u64> = (0..8).map(|page| vmm.peek(page) & 0xFF).collect();
        assert_eq!(values, [2, 2, 2, 2, 1, 2, 2, 2]);
    }
}

#[test]
fn a_page_in_the_file_is_held_back_until_it_is_known_to_be_current() {
    if skip() {
        return;
    }
    let file = ram_file(PAGES);
    write_at(&file, 2 * PAGE_BYTES, &[1; 2 * PAGE_BYTES as usize]).unwrap();
    let (mut vmm, uffd) = start(&file, false, Modes::MINOR | Modes::MISSING);
    let base = vmm.addresses.start;
    let value = during(
        || vmm.peek(2),
        || {
            let fault = next_fault(&uffd);
            assert!(fault.minor);
            // It was stale: the current page is put into the file before anybody sees the old one.
            write_at(&file, 2 * PAGE_BYTES, &[8; PAGE_BYTES as usize]).unwrap();
            let filled = uffd.continue_(fault.address..fault.address + PAGE_BYTES).unwrap();
            assert_eq!(filled, Filled { bytes: PAGE_BYTES, stopped: None });
        },
    );
    assert_eq!(value, u64::from_ne_bytes([8; 8]));
    // In bulk, over a page that is mapped already and up to a hole.
    let filled = uffd.continue_(base + 2 * PAGE_BYTES..base + 4 * PAGE_BYTES).unwrap();
    assert_eq!(filled, Filled { bytes: 0, stopped: Some(Stopped::AlreadyThere) });
    uffd.continue_(base + 3 * PAGE_BYTES..base + 4 * PAGE_BYTES).unwrap();
    assert_eq!(vmm.peek(3), u64::from_ne_bytes([1; 8]));
    let error = uffd.continue_(base + 4 * PAGE_BYTES..base + 5 * PAGE_BYTES).unwrap_err();
    assert_eq!(error.errno(), Some(libc::EFAULT), "a hole");
}

#[test]
fn a_write_to_a_protected_page_waits_until_the_protection_is_lifted() {
    if skip() {
        return;
    }
    let file = ram_file(PAGES);
    let (mut vmm, uffd) = Vmm::start(|| Ram::shared(&file, PAGES));
    uffd.enable(Features::PAGEFAULT_FLAG_WP | Features::WP_HUGETLBFS_SHMEM | Features::WP_UNPOPULATED).unwrap();
    uffd.register(vmm.addresses.clone(), Modes::WP).unwrap();
    vmm.poke(1, 1);
    uffd.write_protect(vmm.addresses.clone(), true).unwrap();
    assert_eq!(vmm.peek(1), 1, "reading goes on");
    let mut entries = Vec::new();
    Pagemap::open(vmm.pid).unwrap().entries(vmm.addresses.clone(), &mut entries).unwrap();
    assert_eq!(entries.len() as u64, PAGES);
    assert!(entries[1].present() && entries[1].protected() && entries[1].file());
    assert!(!entries[0].present() && entries[0].frame().is_none());
    during(
        || vmm.poke(1, 2),
        || {
            let fault = next_fault(&uffd);
            assert!(fault.write && fault.protected && fault.thread == 0);
            uffd.write_protect(fault.address..fault.address + PAGE_BYTES, false).unwrap();
        },
    );
    assert_eq!(vmm.peek(1), 2);
}

#[test]
fn waking_without_a_page_raises_the_fault_again() {
    if skip() {
        return;
    }
    let file = ram_file(PAGES);
    let (mut vmm, uffd) = start(&file, false, Modes::MISSING);
    let addresses = vmm.addresses.clone();
    during(
        || vmm.peek(0),
        || {
            // As after a restart of the daemon: the first reader is gone with the event.
            let lost = next_fault(&uffd);
            uffd.wake(addresses).unwrap();
            let again = next_fault(&uffd);
            assert_eq!(lost, again);
            uffd.zeropage(again.address..again.address + PAGE_BYTES).unwrap();
        },
    );
}

#[test]
fn frames_show_which_pages_are_shared() {
    if skip() {
        return;
    }
    let file = ram_file(PAGES);
    let (one, two) = (Ram::shared(&file, PAGES), Ram::shared(&file, PAGES));
    one.poke(0, 0, 1);
    one.poke(1, 0, 1);
    assert_eq!(two.peek(1, 0), 1);
    let pagemap = Pagemap::of_this_process().unwrap();
    let (mut first, mut second) = (Vec::new(), Vec::new());
    pagemap.entries(one.pages(0..2), &mut first).unwrap();
    pagemap.entries(two.pages(1..2), &mut second).unwrap();
    if first[0].frame().is_none() {
        return eprintln!("skipped: this process may not see frame numbers");
    }
    assert!(first[0].frame() != first[1].frame());
    assert_eq!(first[1].frame(), second[0].frame());
    assert!(!first[1].exclusive());
}

#[test]
fn misuse_is_an_error_that_says_what_failed() {
    if skip() {
        return;
    }
    let ram = Ram::shared(ram_file(PAGES), PAGES);
    let uffd = userfaultfd(Features::TRACKING);
    uffd.register(ram.addresses(), Modes::WP).unwrap();
    let other = userfaultfd(Features::TRACKING);
    let error = other.register(ram.addresses(), Modes::WP).unwrap_err();
    assert_eq!(
        (error.errno(), error.to_string().as_str()),
        (Some(libc::EBUSY), "cannot register memory with a userfaultfd")
    );
    let error = uffd.enable(Features::TRACKING).unwrap_err();
    assert_eq!(error.errno(), Some(libc::EINVAL), "the handshake is done once");
    let no_uffd = Userfaultfd::from(std::os::fd::OwnedFd::from(ram_file(1)));
    assert_eq!(no_uffd.enable(Features::empty()).unwrap_err().errno(), Some(libc::ENOTTY));
    assert!(Userfaultfd::create(ram_file(1)).is_err(), "a userfaultfd comes from its device only");
}
