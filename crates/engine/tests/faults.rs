//! Those who want to know of accesses to a guest's RAM, beside each other: tracking, a fence, free memory taken, on
//! real mappings with writers that go on.

#[path = "support/copy.rs"]
mod copy;
#[path = "support/mounted.rs"]
mod mounted;
#[path = "support/pair/mod.rs"]
#[allow(dead_code, reason = "each test program uses its own part")]
mod pair;
#[path = "support/taking.rs"]
#[allow(dead_code, reason = "each test program uses its own part")]
mod taking;
#[path = "support/toy.rs"]
#[allow(dead_code, reason = "each test program uses its own part")]
mod toy;

use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use copy::Copy;
use mounted::Mount;
use pair::destination::Destination;
use pair::guest::{GuestRam, Writers};
use pair::inside::InsideSelf;
use pair::source::{Source, SourceVmm};
use pair::{outgoing, tracking_works};
use sterna_api::options::SkipFree;
use sterna_api::report::Status;
use sterna_api::{MigrateOptions, Mode, Reclaimed};
use sterna_engine::faults::fence::Fence;
use sterna_engine::faults::{GuestFaults, User};
use sterna_engine::memory::Memory;
use sterna_engine::memory::shared::{SharedMappings, SharedMemory};
use sterna_engine::monitor::Monitor;
use sterna_engine::reclaim::ReclaimError;
use sterna_engine::source::migrate;
use sterna_engine::source::observe::observe;
use sterna_engine::source::track::{Tracker, WriteProtect};
use sterna_introspect::Unfit;
use sterna_protocol::pages::PageMap;
use sterna_sys::file::HugePolicy;
use sterna_sys::map::Access;
use sterna_sys::pagemap::{Categories, Pagemap, Scan};
use taking::{Churn, Vmm, faults_of, take_beside};
use toy::{PAGES, ToyGuest};

const MIB: u64 = 1 << 20;
const FOR_EVER: Duration = Duration::from_secs(300);

fn wait_until(mut it: impl FnMut() -> bool) {
    let began = Instant::now();
    while !it() {
        assert!(began.elapsed() < FOR_EVER, "it never came");
        std::thread::sleep(Duration::from_micros(200));
    }
}

fn first_page(ram: &GuestRam) -> Vec<Range<u64>> {
    let start = ram.mapping.addresses().start;
    let page = start..start + 4096;
    vec![page]
}

fn faults_with(ram: &GuestRam) -> Arc<GuestFaults> {
    let inside = InsideSelf::default();
    inside.mappings.lock().unwrap().push(Arc::clone(&ram.mapping));
    GuestFaults::of(inside)
}

/// Fences some pages in, again and again, while all are written and tracked; how many are stale in the end.
fn fenced_while_tracked(arm_what_returns: bool, ram: &GuestRam) -> usize {
    const AT_ONCE: u64 = 64;
    // Some were never touched.
    (0..ram.bytes / 4096).filter(|page| page % 3 != 0).for_each(|page| ram.write_page(page, page as u8));
    let faults = faults_with(ram);
    let mut copy = Copy::begin(ram, &faults);
    let writers = Writers::start(ram, 0..ram.bytes / 4096, Duration::ZERO);
    copy.all(ram);
    let base = ram.mapping.addresses().start;
    let fence = Fence::new(Arc::clone(&faults), vec![ram.mapping.addresses()]).unwrap();
    if arm_what_returns {
        faults.arm_what_returns();
    }
    let (mut before, mut after, mut waits) = (vec![0; AT_ONCE as usize * 4096], vec![0; AT_ONCE as usize * 4096], 0);
    for step in 0..400_u64 {
        let first = step * 37 % (ram.bytes / 4096 - AT_ONCE) * 4096;
        let patience = fence.patience(FOR_EVER);
        // Two runs with a page between them that is not fenced in.
        let (half, end) = (first + AT_ONCE / 2 * 4096, first + AT_ONCE * 4096);
        let ranges = vec![base + half + 4096..base + end, base + first..base + half];
        let fenced = fence.close(ranges, &patience).unwrap().expect("patience enough");
        let mut differ = |at: u64, bytes: u64| {
            let (before, after) = (&mut before[..bytes as usize], &mut after[..bytes as usize]);
            ram.file.read_exact_at(before, at).unwrap();
            std::thread::sleep(Duration::from_micros(300));
            ram.file.read_exact_at(after, at).unwrap();
            before != after
        };
        assert!(
            !differ(first, half - first) && !differ(half + 4096, end - half - 4096),
            "somebody wrote what is fenced in"
        );
        fenced.open().unwrap();
        waits += fence.waits().unwrap();
        if step % 8 == 0 {
            copy.round(ram);
        }
    }
    drop(writers);
    // What was written last is read once more, and not written again.
    for first in (0..ram.bytes).step_by(AT_ONCE as usize * 4096) {
        let range = base + first..base + (first + AT_ONCE * 4096).min(ram.bytes);
        let patience = fence.patience(FOR_EVER);
        fence.close(vec![range], &patience).unwrap().expect("patience enough").open().unwrap();
        (first..(first + AT_ONCE * 4096).min(ram.bytes)).step_by(4096).for_each(|at| {
            ram.mapping.copy_out(at..at + 16, &mut [0; 16]);
        });
    }
    copy.round(ram);
    let stale = copy.stale(ram);
    println!("{} pages collected, {waits} waits, {stale} stale", copy.collected);
    assert!(waits > 0 && copy.collected > 0);
    stale
}

#[test]
fn pages_that_are_fenced_in_while_they_are_tracked_are_written_by_nobody_and_no_write_is_lost() {
    if tracking_works() {
        assert_eq!(fenced_while_tracked(false, &GuestRam::new(8 * MIB)), 0);
    }
}

#[test]
fn nor_is_one_lost_where_the_pages_are_in_huge_ones() {
    let directory = tempfile::tempdir().unwrap();
    let Some(_mount) = Mount::new(directory.path(), None, HugePolicy::Advise) else { return };
    if tracking_works() {
        assert_eq!(fenced_while_tracked(false, &GuestRam::huge(8 * MIB, directory.path())), 0);
    }
}

#[test]
fn pages_that_come_back_armed_hide_what_was_written_to_them() {
    // Shows that the test above can fail.
    if tracking_works() {
        assert!((0..5).any(|_| fenced_while_tracked(true, &GuestRam::new(8 * MIB)) > 0), "no write was lost");
    }
}

/// Takes memory of a guest under churn, again and again.
struct Taker {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Vec<Reclaimed>>,
}

impl Taker {
    fn start(guest: &Arc<ToyGuest>, faults: &Arc<GuestFaults>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (guest, faults, stopped) = (Arc::clone(guest), Arc::clone(faults), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            let mut accounts = Vec::new();
            while !stopped.load(Ordering::Acquire) {
                let (account, done) = take_beside(&faults, &mut Vmm::of(&guest), false, &Monitor::new("guest"));
                match done {
                    Ok(()) => accounts.push(account),
                    Err(ReclaimError::Leaving) => {
                        accounts.push(account);
                        return accounts;
                    }
                    // The toy frees and allocates much more of its memory meanwhile than a guest can.
                    Err(ReclaimError::Unfit(Unfit::CountersDisagree { .. })) => {}
                    Err(error) => panic!("{error:?}: {account:?}"),
                }
            }
            accounts
        });
        Self { stop, thread }
    }

    /// Waits until it is kept from taking; an account of each time.
    fn ended(self) -> Vec<Reclaimed> {
        wait_until(|| self.thread.is_finished());
        self.thread.join().unwrap()
    }

    /// Takes no more; an account of each time.
    fn end(self) -> Vec<Reclaimed> {
        self.stop.store(true, Ordering::Release);
        self.thread.join().unwrap()
    }
}

fn sum(accounts: &[Reclaimed], of: fn(&Reclaimed) -> u64) -> u64 {
    accounts.iter().map(of).sum()
}

fn say(what: &str, accounts: &[Reclaimed]) {
    let longest = accounts.iter().map(|account| account.longest_wait_ms).fold(0.0, f64::max);
    println!(
        "{what}: {} pages taken, {} put back, {} portions, {} waits, {} portions let go, longest wait {longest:.2} ms",
        sum(accounts, |account| account.reclaimed_pages),
        sum(accounts, |account| account.put_back_pages),
        sum(accounts, |account| account.portions),
        sum(accounts, |account| account.waits),
        sum(accounts, |account| account.gave_way),
    );
}

#[test]
fn free_memory_taken_from_a_guest_whose_writes_are_tracked_is_zeros_in_the_copy_and_nothing_is_lost() {
    if !tracking_works() {
        return;
    }
    let guest = ToyGuest::new();
    let (faults, kept) = faults_of(&guest);
    let churn = Churn::start(&guest);
    let mut copy = Copy::begin(&guest.ram, &faults);
    copy.all(&guest.ram);
    let taker = Taker::start(&guest, &faults);
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(4) || copy.discarded < 1000 {
        assert!(began.elapsed() < FOR_EVER, "nothing is taken");
        copy.round(&guest.ram);
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(kept.lock().unwrap().is_none(), "nobody keeps a duplicate");
    let accounts = taker.end();
    assert_eq!(churn.end(), 0, "the guest lost pages");
    copy.round(&guest.ram);
    say("tracked", &accounts);
    assert_eq!(copy.stale(&guest.ram), 0, "the copy is not what the guest has");
    // A page that is taken twice between two rounds counts once.
    assert!(copy.discarded <= sum(&accounts, |account| account.reclaimed_pages), "{} discarded", copy.discarded);
    assert!(sum(&accounts, |account| account.put_back_pages) > 0);
}

#[test]
fn a_fence_that_is_alone_steps_back_for_a_tracker_and_comes_back_after_it() {
    if !tracking_works() {
        return;
    }
    let guest = ToyGuest::new();
    let (faults, _) = faults_of(&guest);
    let churn = Churn::start(&guest);
    let taker = Taker::start(&guest, &faults);
    for _ in 0..20 {
        let mut copy = Copy::begin(&guest.ram, &faults);
        copy.all(&guest.ram);
        (0..5).for_each(|_| {
            copy.round(&guest.ram);
            std::thread::sleep(Duration::from_millis(5));
        });
        copy.tracker.disarm();
        std::thread::sleep(Duration::from_millis(20));
    }
    let accounts = taker.end();
    say("in turns", &accounts);
    assert_eq!(churn.end(), 0, "the guest lost pages");
    assert!(sum(&accounts, |account| account.reclaimed_pages) > 0);
}

/// Takes memory of a guest under churn for so long.
fn taken_for(time: Duration, tracked: bool) -> Vec<Reclaimed> {
    let guest = ToyGuest::new();
    let (faults, _) = faults_of(&guest);
    let churn = Churn::start(&guest);
    let copy = tracked.then(|| Copy::begin(&guest.ram, &faults));
    let taker = Taker::start(&guest, &faults);
    std::thread::sleep(time);
    let accounts = taker.end();
    assert_eq!(churn.end(), 0, "the guest lost pages");
    drop(copy);
    accounts
}

#[test]
#[ignore = "a measurement: it prints what either kind of fence costs a guest"]
fn what_either_kind_of_fence_costs() {
    if !tracking_works() {
        return;
    }
    let (mut alone, mut beside) = (Vec::new(), Vec::new());
    for _ in 0..5 {
        alone.append(&mut taken_for(Duration::from_secs(3), false));
        beside.append(&mut taken_for(Duration::from_secs(3), true));
    }
    say("write-protected", &alone);
    say("taken out", &beside);
}

#[test]
fn who_waits_to_track_ends_the_patience_with_a_portion_that_nobody_else_waits_for() {
    if !tracking_works() {
        return;
    }
    let ram = GuestRam::new(MIB);
    let faults = faults_with(&ram);
    let fence = Fence::new(Arc::clone(&faults), vec![ram.mapping.addresses()]).unwrap();
    let patience = fence.patience(Duration::ZERO);
    let fenced = fence.close(first_page(&ram), &patience).unwrap().expect("nobody waits");
    assert!(!patience.is_over());
    let (asking, spans) = (Arc::clone(&faults), vec![ram.mapping.addresses()]);
    let begun = std::thread::spawn(move || asking.begin(User::Tracking, spans, &SharedMappings).map(drop));
    wait_until(|| patience.is_over());
    assert!(!begun.is_finished(), "it waits for the portion");
    fenced.open().unwrap();
    begun.join().unwrap().unwrap();
    // The next portion stands beside it: reads wait as well.
    let patience = fence.patience(FOR_EVER);
    ram.write_page(0, 7);
    let fenced = fence.close(first_page(&ram), &patience).unwrap().expect("nobody waits");
    let mapping = Arc::clone(&ram.mapping);
    let looks = std::thread::spawn(move || {
        let mut found = [0; 16];
        mapping.copy_out(0..16, &mut found);
        found
    });
    wait_until(|| fence.waits().unwrap() == 1);
    // Whoever tracks ends: the portion stays fenced in.
    faults.end(User::Tracking);
    std::thread::sleep(Duration::from_millis(5));
    assert!(!looks.is_finished());
    fenced.open().unwrap();
    assert_eq!(looks.join().unwrap(), [7; 16]);
    // And it is alone again.
    let patience = fence.patience(FOR_EVER);
    let fenced = fence.close(first_page(&ram), &patience).unwrap().expect("nobody waits");
    let mut found = [0; 16];
    ram.mapping.copy_out(0..16, &mut found);
    assert_eq!(found, [7; 16], "who reads does not wait");
    fenced.open().unwrap();
}

#[test]
fn a_fence_beside_a_tracker_whose_daemon_dies_holds_nobody() {
    if !tracking_works() {
        return;
    }
    let ram = GuestRam::new(MIB);
    ram.write_page(0, 7);
    let faults = faults_with(&ram);
    let copy = Copy::begin(&ram, &faults);
    let fence = Fence::new(Arc::clone(&faults), vec![ram.mapping.addresses()]).unwrap();
    // Never let go: only the end of the descriptor does.
    std::mem::forget(fence.close(first_page(&ram), &fence.patience(FOR_EVER)).unwrap().expect("nobody waits"));
    let mapping = Arc::clone(&ram.mapping);
    let writes = std::thread::spawn(move || mapping.copy_in(0, &[9; 16]).unwrap());
    wait_until(|| fence.waits().unwrap() == 1);
    assert!(!writes.is_finished());
    fence.die();
    drop(copy);
    writes.join().unwrap();
    let mut found = [0; 17];
    ram.file.read_exact_at(&mut found, 0).unwrap();
    assert_eq!((found[..16].to_vec(), found[16]), (vec![9; 16], 7));
}

#[test]
fn a_guest_is_observed_while_its_free_memory_is_taken_and_nothing_stays_watched() {
    if !tracking_works() {
        return;
    }
    let guest = ToyGuest::new();
    let (faults, kept) = faults_of(&guest);
    let churn = Churn::start(&guest);
    let taker = Taker::start(&guest, &faults);
    let ram = SharedMemory::open(&[guest.block()], Access::Read).unwrap();
    let mut tracker = WriteProtect::of(std::process::id(), Arc::clone(&faults)).unwrap();
    for _ in 0..3 {
        let (nothing, monitor) = (PageMap::empty(ram.layout()), Monitor::new("guest"));
        let seen = observe(&ram, &mut tracker, &nothing, Duration::from_millis(600), &monitor).unwrap();
        assert!(seen.write_faults > 0 && seen.total_pages == PAGES, "{seen:?}");
    }
    let accounts = taker.end();
    say("observed", &accounts);
    assert_eq!(churn.end(), 0, "the guest lost pages");
    assert!(sum(&accounts, |account| account.reclaimed_pages) > 0);
    let mut watched = Vec::new();
    let pagemap = Pagemap::of_this_process().unwrap();
    pagemap.scan(guest.ram.mapping.addresses(), Scan::of(Categories::TRACKED), &mut watched).unwrap();
    assert!(watched.is_empty() && kept.lock().unwrap().is_none());
}

#[test]
fn once_a_guests_memory_is_sealed_nothing_is_taken_until_the_seal_is_lifted() {
    if !tracking_works() {
        return;
    }
    let guest = ToyGuest::new();
    let (faults, _) = faults_of(&guest);
    let churn = Churn::start(&guest);
    let mut copy = Copy::begin(&guest.ram, &faults);
    copy.all(&guest.ram);
    for _ in 0..3 {
        let before = copy.discarded;
        let taker = Taker::start(&guest, &faults);
        wait_until(|| {
            copy.round(&guest.ram);
            copy.discarded > before
        });
        let seal = faults.seal();
        copy.round(&guest.ram);
        let sealed = copy.discarded;
        let accounts = taker.ended();
        copy.round(&guest.ram);
        assert_eq!(copy.discarded, sealed, "taken beside the seal");
        assert!(sum(&accounts, |account| account.reclaimed_pages) > 0);
        drop(seal);
    }
    assert_eq!(churn.end(), 0, "the guest lost pages");
}

#[test]
fn a_guest_that_is_moved_while_its_free_memory_is_taken_arrives_whole() {
    if !tracking_works() {
        return;
    }
    for mode in [Mode::Precopy, Mode::Hybrid] {
        assert!((0..20).any(|_| moved_while_taken(mode)), "{mode:?}: none was taken that a look finds");
    }
}

/// Returns whether the migration saw that some was taken: a guest may have it all back before anybody looks.
fn moved_while_taken(mode: Mode) -> bool {
    let guest = ToyGuest::new();
    let (faults, _) = faults_of(&guest);
    let churn = Churn::start(&guest);
    let taker = Taker::start(&guest, &faults);
    let (say_it, said) = std::sync::mpsc::channel();
    let mut vmm = SourceVmm::new(None);
    vmm.faults.at_stop = Some(Box::new(move || {
        // Nobody tells it to end: what is punched after the last collection is in no map.
        say_it.send((taker.ended(), churn.end())).unwrap();
    }));
    let (host, peer) = Destination::serve();
    host.postcopy.store(true, Ordering::Release);
    let mut going = outgoing(&guest.ram, vmm, InsideSelf::default());
    going.tracker = Box::new(WriteProtect::of(std::process::id(), Arc::clone(&faults)).unwrap());
    let options = MigrateOptions {
        mode,
        skip_free: SkipFree::Off,
        verify: true,
        bandwidth_bytes_per_s: Some(40_000_000),
        downtime_limit_ms: 2000.0,
        precopy_rounds: (mode == Mode::Hybrid).then_some(4),
        ..MigrateOptions::default()
    };
    let outcome = migrate(going, &peer, &options, &Source::default(), &Monitor::new("guest"));
    let (accounts, bad) = said.recv_timeout(FOR_EVER).expect("the guest was stopped");
    say("moved", &accounts);
    let report = &outcome.report;
    assert_eq!(report.status, Status::Completed, "{mode:?}: {:?}", report.error);
    assert_eq!(bad, 0, "the guest lost pages");
    assert!(report.verify.checked && report.verify.mismatches == 0, "{mode:?}: {:?}", report.verify);
    host.assert_same(&guest.ram);
    sum(&accounts, |account| account.reclaimed_pages) > 0 && report.tracking.discarded_pages > 0
}
