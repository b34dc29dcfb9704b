//! What a VMM that a hostile guest controls can do to the pager.

use std::sync::mpsc;

use super::*;

/// A time longer than anything here takes on any machine. Without the handling the tests would wait for ever.
const FOR_EVER: Duration = Duration::from_secs(120);

/// Makes the userfaultfd block as often as it can, until it is dropped: the open file is the VMM's as well.
struct MakesItBlock {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl MakesItBlock {
    fn begin(guest: &Guest) -> Self {
        let descriptor = guest.here.kept.lock().unwrap().as_ref().unwrap().try_clone().unwrap();
        let (stop, stopped) = (Arc::new(AtomicBool::new(false)), Arc::default());
        let stopping: Arc<AtomicBool> = Arc::clone(&stop);
        let first: Arc<AtomicBool> = Arc::clone(&stopped);
        let thread = std::thread::spawn(move || {
            while !stopping.load(Ordering::Acquire) {
                rustix::io::ioctl_fionbio(&descriptor, false).unwrap();
                first.store(true, Ordering::Release);
            }
        });
        while !stopped.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        Self { stop, thread: Some(thread) }
    }
}

impl Drop for MakesItBlock {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Seen to fail with a plain `read`: the fault thread waited in it, and so did `end`, for ever.
#[test]
fn a_vmm_that_makes_its_userfaultfd_block_keeps_nobody_waiting() {
    if !works() {
        return;
    }
    let guest = Guest::new();
    let pager = guest.pager(false);
    let hostile = MakesItBlock::begin(&guest);
    pager.begin(residue(&pager, [1, 2])).unwrap();
    // Its own faults are served all the same.
    let looks = guest.looks(1);
    waits_for(&pager, 1);
    arrives(&pager, 1, 7);
    assert_eq!(looks.join().unwrap(), [7; 16]);
    arrives(&pager, 2, 7);
    let (say, ended) = mpsc::channel();
    let ending = Arc::clone(&pager);
    std::thread::spawn(move || {
        ending.end();
        say.send(()).unwrap();
    });
    ended.recv_timeout(FOR_EVER).expect("the end waits for a thread that waits for the VMM");
    drop(hostile);
}

/// The fault thread has found a page current when the residue comes and says that it is missing. Seen to fail without
/// the lock, in most of these rounds: the page of the earlier round was mapped after `begin`, and the guest read it.
#[test]
fn a_page_that_becomes_missing_while_it_is_mapped_for_a_fault_is_not_seen_stale() {
    if !works() {
        return;
    }
    for _ in 0..20 {
        let guest = Guest::new();
        guest.round(5, 1);
        let pager = guest.pager(false);
        // The account's lock stops the thread between its decision and the mapping.
        let held = pager.account();
        let early = guest.looks(5);
        std::thread::sleep(Duration::from_millis(5));
        let beginning = Arc::clone(&pager);
        let begun = std::thread::spawn(move || beginning.begin(residue(&beginning, [5])).unwrap());
        std::thread::sleep(Duration::from_millis(5));
        drop(held);
        begun.join().unwrap();
        let late = guest.looks(5);
        // The guest waits for as long as this takes; a stale page would be there at once.
        std::thread::sleep(Duration::from_millis(2));
        arrives(&pager, 5, 9);
        assert_eq!(late.join().unwrap(), [9; 16]);
        early.join().unwrap();
        pager.end();
    }
}
