//! Devices that write the guest's memory past its page tables, and take their time over it.

use sterna_engine::agent::UnderWay;
use sterna_engine::split::SplitError;
use sterna_sys::file::HugePolicy;
use sterna_sys::userfaultfd::{self, Event, Features, Modes, Userfaultfd};

use super::*;

/// The page that a device writes.
const PAGE: u64 = 5;
/// What it writes.
const WORD: u64 = 0xd15c;

/// A read from a device into the guest's memory that is under way: the kernel holds the page itself, and writes it once
/// the device answers. The device is a page of this process that is missing: `process_vm_writev(2)` pins the pages that
/// it writes, and waits then for what it copies.
struct Device {
    answer: SharedMapping,
    waits: Userfaultfd,
    reading: JoinHandle<isize>,
}

impl Device {
    fn asked_for(guest: &Guest, page: u64) -> Self {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(4096).unwrap();
        let answer = SharedMapping::new(&file, 4096, Access::ReadWrite).unwrap();
        let waits = Userfaultfd::create(userfaultfd::open_device().unwrap()).unwrap();
        waits.enable(Features::empty()).unwrap();
        waits.register(answer.addresses(), Modes::MISSING).unwrap();
        let (from, to) = (answer.addresses().start, guest.at(page).start);
        let reading = std::thread::spawn(move || {
            let part = |address: u64| libc::iovec { iov_base: address as *mut _, iov_len: 4096 };
            let (local, remote) = (part(from), part(to));
            // SAFETY: both are mappings of this process that outlive the thread, which is joined; nobody takes what is
            // in the guest's for anything but bytes.
            unsafe { libc::process_vm_writev(std::process::id() as i32, &local, 1, &remote, 1, 0) }
        });
        let mut events: [Event; 1] = Default::default();
        while waits.read_events(&mut events).unwrap() == 0 {
            std::thread::yield_now();
        }
        Self { answer, waits, reading }
    }

    /// What was asked for lands.
    fn answers(self) {
        self.waits.copy(self.answer.addresses().start, &WORD.to_le_bytes().repeat(512), false).unwrap();
        assert_eq!(self.reading.join().unwrap(), 4096);
    }
}

impl Guest {
    /// The addresses of a page.
    fn at(&self, page: u64) -> std::ops::Range<u64> {
        let base = self.ram.mapping.addresses().start;
        base + page * 4096..base + (page + 1) * 4096
    }

    /// From now on its process tells this of reads into its memory.
    fn tells(&self, under_way: UnderWay) {
        *self.under_way.lock().unwrap() = under_way;
    }
}

fn is_away(split: &Split, page: u64) -> bool {
    split.pager().away_in(ChunkIndex(0)).contains(page as u8)
}

#[test]
fn a_page_stays_for_as_long_as_a_device_is_writing_it_and_what_it_wrote_goes_along() {
    if !tracking_works() {
        return;
    }
    let (guest, lending) = (Guest::new(), LendingHost::new());
    let device = Device::asked_for(&guest, PAGE);
    guest.tells(UnderWay::Ranges(vec![guest.at(PAGE)]));
    let split = guest.split(&[&lending]);
    for _ in 0..3 {
        send_all(&split, 0);
        assert!(!is_away(&split, PAGE) && is_away(&split, PAGE - 1) && is_away(&split, PAGE + 1));
    }
    device.answers();
    guest.tells(UnderWay::Ranges(Vec::new()));
    send_all(&split, 0);
    assert!(is_away(&split, PAGE));
    assert_eq!(guest.word(PAGE), WORD);
    guest.writes(PAGE);
    guest.is_as_it_was();
    leaves_nothing(&guest, split, &[&lending]);
}

/// Why that is needed: nobody else sees that write.
#[test]
fn what_a_device_writes_into_a_page_that_has_left_is_lost_where_nobody_tells_of_it() {
    if !tracking_works() {
        return;
    }
    let (guest, lending) = (Guest::new(), LendingHost::new());
    let device = Device::asked_for(&guest, PAGE);
    let split = guest.split(&[&lending]);
    send_all(&split, 0);
    assert!(is_away(&split, PAGE));
    device.answers();
    assert_eq!(guest.word(PAGE), content(PAGE), "it was written into a page that is nobody's");
    guest.is_as_it_was();
    leaves_nothing(&guest, split, &[&lending]);
}

/// What a device is writing is in one half of a huge page; the kernel cannot split that, and frees nothing of the other
/// half. Where nobody looks, that memory is taken for good: what is away never leaves again.
#[test]
fn memory_that_a_device_keeps_from_being_freed_is_given_back_once_it_can_be() {
    if !tracking_works() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let Some(_mount) = Mount::new(directory.path(), None, HugePolicy::Advise) else { return };
    let guest = Guest::in_ram(GuestRam::huge(PAGES * 4096, directory.path()));
    if guest.ram.mapped_huge() < guest.ram.bytes {
        println!("skipped: this host has no huge pages");
        return;
    }
    let lending = LendingHost::new();
    let device = Device::asked_for(&guest, PAGE);
    guest.tells(UnderWay::Ranges(vec![guest.at(PAGE)]));
    let split = guest.split(&[&lending]);
    let here = |chunk: u32| split.pager().ram().allocated_in(ChunkIndex(chunk)).unwrap().len();
    let freed = |chunk: u32| split.way_out().unwrap().send(ChunkIndex(chunk), 0).unwrap().freed.len();
    for _ in 0..2 {
        assert_eq!((freed(1), here(1)), (0, 256));
        assert_eq!(split.pager().away_in(ChunkIndex(1)).len(), 192, "it has left all the same");
    }
    assert_eq!((freed(2), here(2)), (256, 0));
    device.answers();
    guest.tells(UnderWay::Ranges(Vec::new()));
    // By itself, as whoever makes room comes by.
    split.keep_to(Room::of(0)).unwrap();
    until("the memory is given back", || (0..CHUNKS).all(|chunk| here(chunk) == 0));
    split.keep_to(Room::ALL).unwrap();
    assert_eq!(guest.word(PAGE), WORD);
    guest.writes(PAGE);
    guest.is_as_it_was();
    split.bring_back().unwrap();
    split.end();
}

#[test]
fn nothing_leaves_where_a_device_may_be_writing_any_page() {
    if !tracking_works() {
        return;
    }
    let (guest, lending) = (Guest::new(), LendingHost::new());
    let split = guest.split(&[&lending]);
    guest.tells(UnderWay::Anything);
    send_all(&split, 0);
    assert_eq!(split.pager().missing(), 0, "for a moment");
    guest.tells(UnderWay::Lost);
    let refused = split.way_out().unwrap().send(ChunkIndex(0), 0).unwrap_err();
    assert!(matches!(refused, SplitError::Here(_)), "{refused}");
    let problem = refused.problem();
    assert!(problem.code.as_str() == "direct-io" && problem.hint.unwrap().contains("aio=native"), "for good");
    assert_eq!(split.pager().missing(), 0);
    guest.is_as_it_was();
    leaves_nothing(&guest, split, &[&lending]);
}
