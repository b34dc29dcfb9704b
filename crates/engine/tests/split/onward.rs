//! A split guest moves to another host, and what is at its memory hosts stays there: whichever host has it in the end,
//! it finds what it wrote last.

use std::sync::Mutex;

use sterna_api::report::Status;
use sterna_api::{MigrateOptions, Mode, Report};
use sterna_engine::monitor::Monitor;
use sterna_engine::source::track::{Tracker, WriteProtect};
use sterna_engine::source::{Fate, Outgoing, migrate};
use sterna_engine::split::onward::Handed;
use sterna_protocol::pages::PageMap;
use sterna_protocol::spec::{SplitSpec, VmSpec};

use super::checking::Knowing;
use super::pair::destination::Destination;
use super::pair::inside::InsideSelf;
use super::pair::source::{Source, SourceVmm};
use super::pair::{block, outgoing, spec};
use super::parity::{three, with_parity};
use super::*;

/// The pages that the guest uses; it knows the others as well, and they stay away.
pub const IN_USE: u64 = PAGES / 4 * 3;
/// The step from one owner's epochs to the next one's.
pub const OWNERS: u64 = 1 << 40;

/// A split guest where it is now.
pub struct Here {
    pub file: File,
    pub mapping: Arc<SharedMapping>,
    pub split: Arc<Split>,
}

/// What is needed to move it.
pub struct Way {
    pub lenders: Vec<Lender>,
    /// The owner's epochs.
    pub epochs: Counter,
}

impl Here {
    pub fn of(guest: &Guest, split: &Arc<Split>) -> Self {
        let (file, mapping) = (guest.ram.file.try_clone().unwrap(), Arc::clone(&guest.ram.mapping));
        Self { file, mapping, split: Arc::clone(split) }
    }

    /// Brings what is away, and finds each page as the guest wrote it.
    pub fn is_whole(&self) {
        self.split.bring_back().unwrap();
        (0..PAGES).for_each(|page| assert_eq!(word(&self.mapping, page), expected(page), "page {page}"));
    }

    /// It has come to a host, and its guest goes on there; who had it before has ended. The next owner's epochs follow
    /// this one's, which is so far the last of so many.
    pub fn moved(&mut self, host: &Destination, moving: &Moving, way: &mut Way, owners: u64) -> Checking {
        let former = std::mem::replace(self, arrived(host));
        assert!(self.split.pager().missing() > 0, "there was nothing to stay");
        let checking = moving.goes_on(self);
        former.split.end();
        self.split.keep_to(room()).unwrap();
        way.epochs = Counter(Arc::new(AtomicU64::new(owners * OWNERS)));
        checking
    }

    pub fn outgoing(&self, vmm: SourceVmm) -> Outgoing {
        let ram = GuestRam {
            file: self.file.try_clone().unwrap(),
            mapping: Arc::clone(&self.mapping),
            bytes: u64::from(CHUNKS) * CHUNK_BYTES as u64,
        };
        let faults = Arc::clone(self.split.pager().guest_faults());
        // The engine of the other side is told by the daemon here: nothing of this is looked at.
        let (guest, key) = GUEST;
        let split = SplitSpec {
            guest,
            key,
            chunks: CHUNKS,
            hosts: vec![],
            here_bytes: 0,
            unused_counts: false,
            epoch: 0,
            own_epoch: 0,
            merge: false,
            parity: None,
        };
        Outgoing {
            spec: VmSpec { split: Some(split), ..spec(block(ram.bytes)) },
            tracker: Box::new(WriteProtect::of(std::process::id(), faults).unwrap()),
            split: Some(Arc::clone(&self.split)),
            ..outgoing(&ram, vmm, InsideSelf::default())
        }
    }
}

impl Way {
    pub fn of(guest: &Guest, hosts: &[LendingHost]) -> Self {
        Self::over(guest, hosts.iter().map(LendingHost::lender).collect())
    }

    pub fn over(guest: &Guest, lenders: Vec<Lender>) -> Self {
        Self { lenders, epochs: guest.epochs.clone() }
    }

    /// What the next owner is given.
    fn handed(&self) -> Handed {
        let next = Counter(Arc::new(AtomicU64::new(self.epochs.0.load(Ordering::Acquire) / OWNERS * OWNERS + OWNERS)));
        Handed { lenders: self.lenders.clone(), guest: GUEST, epochs: Box::new(next) }
    }
}

pub fn room() -> Room {
    Room::of(3 * CHUNK_BYTES as u64)
}

/// Rounds may leave as much as the guest has: whether they come to an end is not what is tried.
pub fn options() -> MigrateOptions {
    MigrateOptions { mode: Mode::Precopy, downtime_limit_ms: 60_000.0, ..MigrateOptions::default() }
}

/// A guest of threads on its way.
#[derive(Clone)]
pub struct Moving {
    state: Arc<Mutex<State>>,
    /// The pages that it goes on with.
    in_use: u64,
}

enum State {
    Runs(Checking),
    Stopped(Knowing),
    Ended,
}

impl Moving {
    pub fn new(checking: Checking) -> Self {
        Self::using(checking, IN_USE)
    }

    /// It goes on with so many pages.
    pub fn using(checking: Checking, in_use: u64) -> Self {
        Self { state: Arc::new(Mutex::new(State::Runs(checking))), in_use }
    }

    /// A VMM that stops it.
    pub fn vmm(&self) -> SourceVmm {
        let (mut vmm, moving) = (SourceVmm::new(None), self.clone());
        vmm.faults.at_stop = Some(Box::new(move || moving.stop()));
        vmm
    }

    fn stop(&self) {
        let mut state = self.state.lock().unwrap();
        *state = match std::mem::replace(&mut *state, State::Ended) {
            State::Runs(checking) => State::Stopped(checking.stop()),
            other => other,
        };
    }

    /// It goes on where it is now.
    fn goes_on(&self, here: &Here) -> Checking {
        self.starts_at(&here.mapping);
        self.runs()
    }

    /// The same, for others to look at.
    pub fn starts_at(&self, mapping: &Arc<SharedMapping>) {
        self.stop();
        let mut state = self.state.lock().unwrap();
        *state = match std::mem::replace(&mut *state, State::Ended) {
            State::Stopped(knowing) => State::Runs(Checking::go_on(mapping, knowing, self.in_use)),
            _ => unreachable!("it was stopped"),
        }
    }

    /// It runs, and does something meanwhile.
    pub fn while_it_runs(&self, act: impl FnOnce(&Checking)) {
        match &*self.state.lock().unwrap() {
            State::Runs(checking) => act(checking),
            _ => unreachable!("it runs"),
        }
    }

    /// It runs.
    pub fn runs(&self) -> Checking {
        match std::mem::replace(&mut *self.state.lock().unwrap(), State::Ended) {
            State::Runs(checking) => checking,
            _ => unreachable!("it runs"),
        }
    }
}

pub fn run(outgoing: Outgoing, peer: &str) -> (Fate, Report) {
    run_with(outgoing, peer, &options())
}

pub fn run_with(outgoing: Outgoing, peer: &str, options: &MigrateOptions) -> (Fate, Report) {
    let outcome = migrate(outgoing, peer, options, &Source::default(), &Monitor::new("guest"));
    (outcome.fate, outcome.report)
}

/// Where the guest is that has come to a host.
pub fn arrived(host: &Destination) -> Here {
    // The source is told first.
    let split = loop {
        match host.split.lock().unwrap().take() {
            Some(split) => break split,
            None => std::thread::yield_now(),
        }
    };
    let file = host.ram.lock().unwrap().take().expect("it came");
    Here { file, mapping: host.mapping.lock().unwrap().take().expect("it came"), split }
}

/// A host that a guest can come to.
pub fn next(way: &Way) -> (Arc<Destination>, String) {
    let (host, peer) = Destination::serve();
    host.postcopy.store(true, Ordering::Release);
    host.touched.lock().unwrap().extend([0, 1, 700, PAGES - 200]);
    *host.handed.lock().unwrap() = Some(way.handed());
    (host, peer)
}

#[test]
fn a_tracker_beside_a_pager_sees_what_is_written_given_back_and_comes_whatever_leaves_meanwhile() {
    if !tracking_works() {
        return;
    }
    let (guest, lending) = (Guest::new(), LendingHost::new());
    let split = guest.split(&[&lending]);
    let (ram, faults) = (guest.ram(), Arc::clone(split.pager().guest_faults()));
    let mut tracker = WriteProtect::of(std::process::id(), faults).unwrap();
    tracker.arm(ram.as_ref()).unwrap();
    let mut collect = || {
        let [mut written, mut discarded] = [(); 2].map(|()| PageMap::empty(ram.layout()));
        tracker.collect(ram.as_ref(), &mut written, &mut discarded).unwrap();
        let pages = |map: &PageMap| -> Vec<u64> {
            map.iter()
                .flat_map(|(chunk, set)| set.iter().map(move |page| u64::from(chunk.0) * 256 + u64::from(page)))
                .collect()
        };
        (pages(&written), pages(&discarded))
    };
    assert_eq!(collect(), (vec![], vec![]));
    let zeros = |page: u64| guest.ram.mapping.copy_in(page * 4096, &[0; 4096]).unwrap();
    // One leaves as it was written, one as zeros, one is written again where it is.
    guest.writes(3);
    zeros(4);
    send_all(&split, 0);
    guest.writes(270);
    let (written, _) = collect();
    assert!([4, 270].iter().all(|page| written.contains(page)), "{written:?}");
    // What comes has not been collected as it is; what only left need not be.
    assert_eq!(guest.word(600), content(600));
    let (written, _) = collect();
    assert!(written.contains(&600) && !written.contains(&900), "{written:?}");
    // Who brings pages is told of what the guest gives back, and so is who tracks it.
    let (device, inode) = ram.files().unwrap()[0];
    guest.discards.lock().unwrap().push(Discard { device, inode, offset: 1000 * 4096, length: 4096 });
    assert!(split.pager().given_back(ChunkIndex(3)).contains((1000 % 256) as u8));
    assert_eq!(collect().1, [1000]);
    drop(tracker);
    split.bring_back().unwrap();
    dies(split);
}

/// What was on its way is at its memory host, or has come back, many times.
pub fn pages_go_and_come(split: &Split, checking: &Checking) {
    let before = split.account();
    while split.account().out_pages < before.out_pages + PAGES || split.account().in_pages < before.in_pages + PAGES {
        checking.goes_on(20);
    }
}

#[test]
fn a_guest_that_goes_on_writing_moves_from_host_to_host_and_what_is_away_stays_there() {
    if !tracking_works() {
        return;
    }
    let (guest, lending) = (Guest::new(), [LendingHost::new(), LendingHost::new()]);
    let split = guest.split(&[&lending[0], &lending[1]]);
    split.keep_to(room()).unwrap();
    let (mut here, mut checking) = (Here::of(&guest, &split), Checking::start_in(&guest, 3, IN_USE));
    let mut way = Way::of(&guest, &lending);
    for turn in 1..=8 {
        pages_go_and_come(&here.split, &checking);
        let ((host, peer), moving) = (next(&way), Moving::new(checking));
        let (fate, report) = run(here.outgoing(moving.vmm()), &peer);
        assert_eq!((report.status, fate), (Status::Completed, Fate::There), "{:?}", report.error);
        let (stay, travel) = (here.split.pager().missing(), report.pages.full);
        println!("turn {turn}: {stay} pages stay, {travel} travel in {} rounds", report.rounds.len());
        checking = here.moved(&host, &moving, &mut way, turn);
    }
    here.split.merge(&|| Ok(())).unwrap();
    checking.end();
    assert_eq!(here.split.pager().missing(), 0);
    here.split.end();
}

#[test]
fn what_has_come_back_and_is_as_its_memory_host_has_it_does_not_travel() {
    if !tracking_works() {
        return;
    }
    for given_up in [false, true] {
        let (guest, lending) = (Guest::new(), [LendingHost::new()]);
        let split = guest.split(&[&lending[0]]);
        send_all(&split, 0);
        split.bring_back().unwrap();
        // What is written then, the same as before, too, and what is away again.
        let written: Vec<u64> = (0..PAGES).filter(|page| page % 256 < 192 && page % 7 == 0).collect();
        let other = |page: u64| content(page) ^ 0xff00_0000;
        written.iter().for_each(|page| {
            guest.ram.mapping.copy_in(page * 4096, &other(*page).to_le_bytes().repeat(512)).unwrap();
        });
        guest.ram.mapping.copy_in(5 * 4096, &content(5).to_le_bytes().repeat(512)).unwrap();
        split.way_out().unwrap().send(ChunkIndex(6), 0).unwrap();
        let way = Way::of(&guest, &lending);
        let (here, (host, peer)) = (Here::of(&guest, &split), next(&way));
        host.touched.lock().unwrap().clear();
        let mut vmm = SourceVmm::new(None);
        if given_up {
            // Once the rounds have left out what is there: the memory host has lost it, and this is known.
            let split = Arc::clone(&split);
            vmm.faults.at_stop = Some(Box::new(move || split.give_up_all_copies()));
        }
        let (fate, report) = run(here.outgoing(vmm), &peer);
        assert_eq!(fate, Fate::There, "{:?}", report.error);
        let there = arrived(&host);
        let there_now = there.split.pager().missing();
        println!("{} pages travelled, {there_now} stay", report.pages.full);
        let sent_again = written.iter().filter(|page| **page / 256 != 6).count() as u64;
        if given_up {
            assert!(report.pages.full > PAGES / 2, "they travel after all");
        } else {
            assert_eq!(report.pages.full, sent_again);
            assert_eq!(there_now, PAGES / 4 * 3 - sent_again);
        }
        there.split.bring_back().unwrap();
        for page in 0..PAGES {
            let is = if written.contains(&page) { other(page) } else { expected(page) };
            assert_eq!(word(&there.mapping, page), is, "page {page}");
        }
        dies(split);
        there.split.end();
    }
}

/// Whatever the former owner asks for once the guest is another host's is refused.
#[test]
fn whoever_has_given_a_guest_away_can_neither_read_nor_change_what_is_at_its_memory_hosts() {
    if !tracking_works() {
        return;
    }
    let (guest, lending) = (Guest::new(), [LendingHost::new()]);
    let split = guest.split(&[&lending[0]]);
    send_all(&split, 0);
    let way = Way::of(&guest, &lending);
    let (here, (host, peer)) = (Here::of(&guest, &split), next(&way));
    let (fate, report) = run(here.outgoing(SourceVmm::new(None)), &peer);
    assert_eq!(fate, Fate::There, "{:?}", report.error);
    let there = arrived(&host);
    there.split.ask_whether_there(0);
    // As a daemon does that believes, wrongly, that the guest is its own.
    assert!(matches!(split.bring_back(), Err(SplitError::Host { .. })));
    there.is_whole();
    dies(split);
    there.split.end();
}

#[test]
fn what_a_vmm_reads_of_what_is_away_while_it_saves_its_devices_keeps_nobody_here_and_what_it_writes_does() {
    if !tracking_works() {
        return;
    }
    let (guest, lending) = (Guest::new(), [LendingHost::new()]);
    let split = guest.split(&[&lending[0]]);
    let way = Way::of(&guest, &lending);
    for writes in [true, false] {
        send_all(&split, 0);
        let (here, (host, peer)) = (Here::of(&guest, &split), next(&way));
        let mut vmm = SourceVmm::new(None);
        let mapping = Arc::clone(&guest.ram.mapping);
        vmm.faults.while_saving = Some(Box::new(move || {
            assert_eq!(word(&mapping, 300), content(300));
            if writes {
                mapping.copy_in(300 * 4096, &content(300).to_le_bytes().repeat(2)).unwrap();
            }
        }));
        let (fate, report) = run(here.outgoing(vmm), &peer);
        let code = report.error.map(|problem| problem.code.to_string());
        let ended = if writes { (Fate::Here, Some("written-while-saving".into())) } else { (Fate::There, None) };
        assert_eq!((fate, code), ended);
        if writes {
            guest.is_as_it_was();
        } else {
            let there = arrived(&host);
            there.is_whole();
            there.split.end();
        }
    }
    dies(split);
}

#[test]
fn wherever_the_link_breaks_one_host_has_the_guest_and_it_finds_what_it_wrote() {
    if !tracking_works() {
        return;
    }
    let (guest, lending) = (Guest::new(), [LendingHost::new(), LendingHost::new()]);
    the_link_breaks_anywhere(&guest, Way::of(&guest, &lending));
}

#[test]
fn wherever_the_link_breaks_one_host_has_a_guest_with_parity_and_it_finds_what_it_wrote() {
    if !tracking_works() {
        return;
    }
    let (guest, lending) = (Guest::new(), three());
    the_link_breaks_anywhere(&guest, Way::over(&guest, with_parity(&lending)));
}

fn the_link_breaks_anywhere(guest: &Guest, mut way: Way) {
    let split = guest.split_over(way.lenders.clone());
    split.keep_to(room()).unwrap();
    let (mut here, mut checking) = (Here::of(guest, &split), Checking::start_in(guest, 3, IN_USE));
    let (mut stayed, mut gone, mut least, mut most) = (0, 0, 0, 16 << 20);
    // Nearer and nearer to the moment at which the guest changes hands.
    for turn in 1..=24u64 {
        checking.goes_on(200);
        let (host, peer) = next(&way);
        let relay = Relay::to(&peer, if turn % 6 == 0 { turn * 40_000 } else { (least + most) / 2 });
        let moving = Moving::new(checking);
        let (fate, report) = run(here.outgoing(moving.vmm()), &relay.address);
        if fate == Fate::There {
            gone += 1;
            let former = std::mem::replace(&mut here, arrived(&host));
            former.split.end();
            way.epochs = Counter(Arc::new(AtomicU64::new(turn * OWNERS)));
            most = (most * 3 / 4).max(least + 1000);
        } else {
            assert_eq!(fate, Fate::Here, "{:?}", report.error);
            stayed += 1;
            least = least.max(relay.carried().min(most) / 4 * 3);
        }
        checking = moving.goes_on(&here);
        here.split.keep_to(room()).unwrap();
    }
    println!("{stayed} attempts came to nothing, {gone} did not");
    here.split.merge(&|| Ok(())).unwrap();
    checking.end();
    here.split.end();
}

/// The destination asks them before the guest is its own.
#[test]
fn a_guest_stays_where_one_of_its_memory_hosts_does_not_answer_its_next_host_or_has_lost_its_pages() {
    if !tracking_works() {
        return;
    }
    let (guest, lending) = (Guest::new(), [LendingHost::new(), LendingHost::new()]);
    let split = guest.split(&[&lending[0], &lending[1]]);
    let (mut here, mut checking) = (Here::of(&guest, &split), Checking::start_in(&guest, 2, IN_USE));
    let way = Way::of(&guest, &lending);
    split.keep_to(room()).unwrap();
    for fault in ["silent", "refused", "none"] {
        pages_go_and_come(&split, &checking);
        let ((host, peer), moving) = (next(&way), Moving::new(checking));
        let mut vmm = moving.vmm();
        let relay = Arc::clone(&lending[1].relay);
        match fault {
            "silent" => vmm.faults.while_saving = Some(Box::new(move || relay.cut())),
            "refused" => host.refuse_state.store(true, Ordering::Release),
            _ => {}
        }
        let (fate, report) = run(here.outgoing(vmm), &peer);
        lending[1].relay.restore();
        let here_still = fault != "none";
        assert_eq!(fate, if here_still { Fate::Here } else { Fate::There }, "{fault}: {:?}", report.error);
        println!("{fault}: {:?}", report.error.map(|problem| problem.with_causes()));
        if !here_still {
            here = arrived(&host);
            split.end();
            here.split.keep_to(room()).unwrap();
        }
        checking = moving.goes_on(&here);
    }
    pages_go_and_come(&here.split, &checking);
    here.split.merge(&|| Ok(())).unwrap();
    checking.end();
    here.split.end();
}
