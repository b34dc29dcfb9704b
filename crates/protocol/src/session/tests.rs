//! Both sessions in one process over a link that delivers late, or is cut at any message.

use std::collections::{BTreeSet, VecDeque};

use proptest::prelude::*;

use super::*;
use crate::layout::ChunkIndex;
use crate::message::ResiduePart;
use crate::spec::{GangSpec, Kin, SharedPages, SplitParity, SplitSpec, VmSpec};

/// A machine that has one life: whoever lets it run says so here.
#[derive(Debug, Default)]
struct Guest {
    runs_at_source: bool,
    runs_at_destination: bool,
}

impl Guest {
    fn check(&self) {
        assert!(!(self.runs_at_source && self.runs_at_destination), "the guest runs on two hosts");
    }
}

/// A link with a delay per message; what is under way when it is cut is lost or arrives, as `tail` says.
#[derive(Debug)]
struct Link<M> {
    queue: VecDeque<(u64, M)>,
    cut_at: u64,
}

impl<M> Link<M> {
    fn send(&mut self, now: u64, delay: u64, message: M) {
        if now < self.cut_at {
            self.queue.push_back((now + delay, message));
        }
    }

    fn receive(&mut self, now: u64) -> Option<M> {
        // A message sent before the cut may still arrive after it: the sender cannot tell.
        self.queue.front().is_some_and(|(due, _)| *due <= now).then(|| self.queue.pop_front().unwrap().1)
    }
}

fn spec() -> VmSpec {
    VmSpec {
        name: "vm".into(),
        memory_bytes: 1 << 20,
        private: false,
        trust_group: None,
        qemu_version: (7, 2, 0),
        qemu_path: String::new(),
        machine: "pc-q35-7.2".into(),
        arguments: vec![],
        managed_ram: true,
        blocks: vec![],
        cpu: None,
        allocated_bytes: 0,
        balloon: sterna_api::BalloonSetting::default(),
        running: true,
        from: "a".into(),
        kin: None,
        split: None,
        small_pages: false,
    }
}

fn gang() -> GangSpec {
    let shared = Vec::from([SharedPages { pages: 300, mappings: 4 }; 2]);
    GangSpec { id: 1, group: "g".into(), members: 2, bytes: 1 << 20, shared }
}

fn split() -> SplitSpec {
    SplitSpec {
        guest: 1,
        key: 2,
        chunks: 1,
        hosts: vec![],
        here_bytes: 1 << 20,
        unused_counts: false,
        epoch: 1,
        own_epoch: 2,
        merge: false,
        parity: None,
    }
}

/// What a source says from beginning to end, with some suspect pages on the way.
fn script(rounds: u32, suspect_rounds: u32) -> Vec<Request> {
    let mut script = vec![
        Request::Identify,
        Request::Clone { connected: false },
        Request::Join { gang: Box::new(gang()), member: 0 },
        Request::Offers { key: [0; 32], first: 0 },
        Request::Tickets { given: vec![], shown: vec![] },
        Request::Kin(Kin { family: "f".into(), forked_from: None }),
        Request::Split(Box::new(split())),
        Request::SplitParity(SplitParity { stripe: 2, hosts: 3, over: 7, turn: 1, bytes: 1 }),
        Request::SmallPages,
        Request::Propose { id: 1, spec: Box::new(spec()), streams: 1, postcopy: false, verify: false },
        Request::Clock,
    ];
    script.extend((0..rounds).map(|round| Request::RoundEnd { round }));
    script.push(Request::Stopped);
    script.push(Request::Away { holder: 2, part: ResiduePart { first: ChunkIndex(0), chunks: 0, bits: vec![] } });
    script.push(Request::AwayEnd { epoch: 1, pages: 0 });
    script.extend((0..=suspect_rounds).map(|round| Request::FinalRoundEnd { round: rounds + round }));
    script.extend([
        Request::ChunkDigests { first: ChunkIndex(0), count: 1 },
        Request::Load,
        Request::FinalRoundEnd { round: 99 },
        Request::Commit,
        Request::ChunkDigests { first: ChunkIndex(0), count: 1 },
        Request::PageDigests { chunk: ChunkIndex(0) },
        Request::GivenBack { chunk: ChunkIndex(0) },
        Request::Release,
    ]);
    script
}

fn answer(request: &Request, suspects: &mut u32) -> Reply {
    match request {
        Request::Propose { .. } => Reply::Accepted {
            host: String::new(),
            qemu: String::new(),
            sterna: String::new(),
            layout: 0,
            no_postcopy: None,
        },
        Request::Identify => Reply::Identity { identity: 1 },
        Request::Join { .. } => Reply::Joined,
        Request::Offers { .. } => Reply::Offered(vec![]),
        Request::Tickets { .. } => Reply::Ticketed { kept: false },
        Request::Clock => Reply::Clock { now_us: 0 },
        Request::Stopped => Reply::Holding,
        Request::RoundEnd { .. } => Reply::Arrived { suspects: vec![] },
        Request::FinalRoundEnd { .. } if *suspects > 0 => {
            *suspects -= 1;
            Reply::Arrived { suspects: vec![crate::layout::PageIndex { chunk: ChunkIndex(0), page: 0 }] }
        }
        Request::FinalRoundEnd { .. } => Reply::Arrived { suspects: vec![] },
        Request::ChunkDigests { .. } | Request::PageDigests { .. } => Reply::Digests(vec![0]),
        Request::GivenBack { .. } => Reply::GivenBack([0; 32]),
        Request::Load => Reply::Loaded,
        Request::Commit => Reply::Running { start_us: 0, cpu_us: 0 },
        Request::Abort => Reply::Aborted { problem: None },
        Request::Residue(_) | Request::Kin(_) | Request::Clone { .. } | Request::SmallPages => Reply::Noted,
        Request::Split(_) | Request::SplitParity(_) | Request::Away { .. } | Request::AwayEnd { .. } => Reply::Noted,
        Request::LoadPostcopy(_) => Reply::Loaded,
        Request::Paging => Reply::Paging { missing: 0, faults: 0 },
        Request::Straight { .. } => Reply::Straight { taken: vec![], epoch: 0, errands: vec![] },
        Request::Complete { .. } => Reply::Completed(Box::default()),
        Request::Release => Reply::Released,
        Request::Resume { .. } => Reply::Resumed { layout: 0 },
        Request::Missing { first } => Reply::Missing(ResiduePart { first: *first, chunks: 0, bits: vec![] }),
        Request::Verdict { .. } => Reply::Verdict { committed: false },
    }
}

/// Runs a migration over a link that is cut at `cut_at`; the destination's disk fails at the commit where `disk_fails`.
/// Returns the guest, after the source has asked for the verdict where it had to.
fn migrate(rounds: u32, suspects: u32, delays: &[u64], cut_at: u64, disk_fails: bool) -> Guest {
    let mut guest = Guest { runs_at_source: true, runs_at_destination: false };
    let mut requests = Link { queue: VecDeque::new(), cut_at };
    let mut replies = Link { queue: VecDeque::new(), cut_at };
    let (mut source, mut destination, mut committed) = (State::Begun, State::Begun, false);
    let mut script = script(rounds, suspects).into_iter();
    let mut waiting: Option<Request> = None;
    let mut suspects_left = suspects;
    let mut delay = delays.iter().copied().cycle();
    for now in 0..100_000u64 {
        if waiting.is_none() {
            let Some(next) = script.next() else { break };
            source = request(source, &next).expect("the script is in order");
            if next == Request::Stopped {
                guest.runs_at_source = false;
            }
            requests.send(now, delay.next().unwrap(), next.clone());
            waiting = Some(next);
        }
        if let Some(got) = requests.receive(now) {
            destination = request(destination, &got).expect("the destination understands the script");
            let mut said = answer(&got, &mut suspects_left);
            if got == Request::Commit {
                if disk_fails {
                    said = Reply::Failed(sterna_api::Problem::new(
                        "disk".into(),
                        sterna_api::Blame::Host,
                        "the disk is full",
                    ));
                } else {
                    committed = true;
                    guest.runs_at_destination = true;
                    guest.check();
                }
            }
            destination = reply(destination, &got, &said).expect("the reply fits");
            replies.send(now, delay.next().unwrap(), (got, said));
        }
        if let Some((asked, said)) = replies.receive(now) {
            assert_eq!(waiting.take().as_ref(), Some(&asked));
            source = reply(source, &asked, &said).expect("the source understands the reply");
            if matches!(said, Reply::Failed(_)) {
                break;
            }
        }
        if now > cut_at + 200 {
            break;
        }
    }
    // Both ends see the link gone.
    if owner_at_destination(destination, committed) == Owner::Source {
        assert!(!guest.runs_at_destination);
    }
    match owner_at_source(source) {
        Owner::Source => guest.runs_at_source = true,
        Owner::Destination => {}
        Owner::AskDestination => guest.runs_at_source = !committed,
    }
    guest.check();
    guest
}

proptest! {
    #[test]
    fn wherever_the_link_is_cut_the_guest_runs_on_exactly_one_host(
        rounds in 0u32..5,
        suspects in 0u32..3,
        delays in prop::collection::vec(0u64..5, 1..8),
        cut_at in 0u64..200,
        disk_fails: bool,
    ) {
        let guest = migrate(rounds, suspects, &delays, cut_at, disk_fails);
        prop_assert!(guest.runs_at_source != guest.runs_at_destination, "{guest:?}");
    }
}

#[test]
fn a_whole_link_hands_the_guest_over() {
    let guest = migrate(3, 1, &[1], u64::MAX / 2, false);
    assert!(guest.runs_at_destination && !guest.runs_at_source);
}

#[test]
fn a_commit_that_could_not_be_recorded_gives_the_guest_back() {
    let guest = migrate(1, 0, &[1], u64::MAX / 2, true);
    assert!(guest.runs_at_source && !guest.runs_at_destination);
}

#[test]
fn nothing_can_be_committed_before_the_devices_are_loaded() {
    for state in [
        State::Begun,
        State::Copying,
        State::Stopped,
        State::Placed,
        State::Committing,
        State::HandedOver,
        State::Aborted,
    ] {
        assert!(request(state, &Request::Commit).is_err(), "{state:?}");
    }
}

#[test]
fn nothing_can_be_aborted_after_the_commit() {
    assert!(request(State::Committing, &Request::Abort).is_err());
    assert!(request(State::HandedOver, &Request::Abort).is_err());
}

#[test]
fn suspect_pages_keep_the_devices_from_being_loaded() {
    let end = Request::FinalRoundEnd { round: 1 };
    let suspects = vec![crate::layout::PageIndex { chunk: ChunkIndex(0), page: 0 }];
    let state = reply(State::Stopped, &end, &Reply::Arrived { suspects }).unwrap();
    assert_eq!(state, State::Stopped);
    assert!(request(state, &Request::Load).is_err());
}

/// A guest whose pages follow it, and what holds them.
#[derive(Debug)]
struct Followed {
    guest: Guest,
    committed: bool,
    /// Pages that are not at the destination as they are at the source, once it knows which.
    missing: Option<BTreeSet<u32>>,
    /// Whether the source still keeps its RAM.
    kept: bool,
    arrived: Vec<u32>,
    sessions: u32,
}

const RESIDUE: u32 = 20;

impl Followed {
    fn new() -> Self {
        let guest = Guest { runs_at_source: true, runs_at_destination: false };
        Self { guest, committed: false, missing: None, kept: true, arrived: vec![], sessions: 0 }
    }

    /// The destination's half: what it does on a request, and its reply.
    fn answer(&mut self, request: &Request) -> Reply {
        match request {
            Request::LoadPostcopy(_) => self.missing = Some((0..RESIDUE).collect()),
            Request::Commit => {
                self.committed = true;
                self.guest.runs_at_destination = true;
                self.guest.check();
            }
            _ => {}
        }
        answer(request, &mut 0)
    }

    /// One session, from its first request to its last or to its cut; whether it came to its last.
    fn session(&mut self, delays: &[u64], cut_at: u64) -> (State, bool) {
        let part = || ResiduePart { first: ChunkIndex(0), chunks: 1, bits: vec![] };
        let first = self.sessions == 0;
        self.sessions += 1;
        let mut script: VecDeque<Request> = if first {
            let propose = Request::Propose { id: 1, spec: Box::new(spec()), streams: 1, postcopy: true, verify: false };
            let rounds = [Request::RoundEnd { round: 0 }, Request::Stopped, Request::Residue(part())];
            [propose].into_iter().chain(rounds).chain([Request::LoadPostcopy(part()), Request::Commit]).collect()
        } else {
            [Request::Resume { id: 1, streams: 1 }, Request::Missing { first: ChunkIndex(0) }].into()
        };
        let (mut requests, mut replies) =
            (Link { queue: VecDeque::new(), cut_at }, Link { queue: VecDeque::new(), cut_at });
        let mut pages = Link { queue: VecDeque::new(), cut_at };
        let (mut source, mut destination) = (State::Begun, State::Begun);
        // What the source knows to be missing: each page is taken out when it is sent.
        let mut pending: Option<BTreeSet<u32>> = None;
        let (mut waiting, mut delay) = (None::<Request>, delays.iter().copied().cycle());
        for now in 0..10_000u64 {
            if waiting.is_none() {
                let next = script.pop_front().or(match (source, &pending) {
                    (State::Paging, Some(left)) if left.is_empty() => Some(Request::Complete { verify: false }),
                    (State::Paging, _) => Some(Request::Paging),
                    (State::Completed, _) => Some(Request::Release),
                    _ => None,
                });
                let Some(next) = next else { return (source, true) };
                source = request(source, &next).expect("the script is in order");
                if next == Request::Stopped {
                    self.guest.runs_at_source = false;
                }
                if matches!(next, Request::LoadPostcopy(_)) {
                    pending = Some((0..RESIDUE).collect());
                }
                requests.send(now, delay.next().unwrap(), next.clone());
                waiting = Some(next);
            }
            // A page may overtake every request, and every request a page.
            if source == State::Paging
                && let Some(page) = pending.as_mut().and_then(BTreeSet::pop_first)
            {
                pages.send(now, delay.next().unwrap(), page);
            }
            if now < cut_at
                && let Some(page) = pages.receive(now)
            {
                let missing = self.missing.as_mut().expect("no page comes before the residue");
                assert!(missing.remove(&page), "page {page} arrived twice");
                self.arrived.push(page);
            }
            // `Complete` is answered when everything is there.
            let completes = requests.queue.front().is_some_and(|(_, next)| matches!(next, Request::Complete { .. }));
            let ready = !completes || self.missing.as_ref().is_some_and(BTreeSet::is_empty);
            if ready && let Some(got) = requests.receive(now) {
                destination = request(destination, &got).expect("the destination understands the script");
                if matches!(got, Request::LoadPostcopy(_)) {
                    // Loading the devices wants a page: it is served before the answer.
                    let asked = pending.as_mut().and_then(BTreeSet::pop_last).expect("all are pending");
                    pages.send(now, delay.next().unwrap(), asked);
                }
                let said = self.answer(&got);
                destination = reply(destination, &got, &said).expect("the reply fits");
                replies.send(now, delay.next().unwrap(), (got, said));
            }
            if let Some((asked, said)) = replies.receive(now) {
                assert_eq!(waiting.take().as_ref(), Some(&asked));
                source = reply(source, &asked, &said).expect("the source understands the reply");
                match asked {
                    Request::Missing { .. } => pending = Some(self.missing.clone().expect("it runs there")),
                    Request::Release => self.kept = false,
                    _ => {}
                }
            }
            if now > cut_at + 30 {
                return (source, false);
            }
        }
        panic!("a session that does not end: {source:?}, {self:?}");
    }
}

proptest! {
    #[test]
    fn however_often_the_link_is_cut_a_guest_whose_pages_follow_runs_on_one_host_and_gets_each_page_once(
        delays in prop::collection::vec(0u64..5, 1..8),
        cuts in prop::collection::vec(0u64..120, 0..6),
    ) {
        let mut followed = Followed::new();
        for cut_at in cuts.into_iter().chain([u64::MAX / 2]) {
            let (state, done) = followed.session(&delays, cut_at);
            // What a session that was begun to go on says of nobody's guest: that was settled before it.
            let owner = if followed.sessions == 1 { owner_at_source(state) } else { Owner::Destination };
            match owner {
                Owner::Source => {
                    prop_assert!(!followed.committed);
                    followed.guest.runs_at_source = true;
                    break;
                }
                Owner::AskDestination if !followed.committed => {
                    followed.guest.runs_at_source = true;
                    break;
                }
                // It goes on, in a session of its own.
                Owner::AskDestination | Owner::Destination => prop_assert!(followed.kept || done),
            }
            if done {
                break;
            }
        }
        followed.guest.check();
        prop_assert!(followed.guest.runs_at_source != followed.guest.runs_at_destination, "{followed:?}");
        if followed.guest.runs_at_destination {
            prop_assert_eq!(followed.missing.as_ref().map(BTreeSet::len), Some(0));
            followed.arrived.sort_unstable();
            prop_assert_eq!(followed.arrived, (0..RESIDUE).collect::<Vec<_>>());
        }
    }
}

#[test]
fn a_source_never_owns_a_guest_again_that_pages_follow() {
    for state in [State::Paging, State::Completed, State::Finished] {
        assert_eq!(owner_at_source(state), Owner::Destination);
        assert!(request(state, &Request::Abort).is_err() && request(state, &Request::Commit).is_err(), "{state:?}");
        let failed = Reply::Failed(sterna_api::Problem::new("disk".into(), sterna_api::Blame::Host, "full"));
        if let Ok(after) = reply(state, &Request::Paging, &failed) {
            assert_eq!(after, state, "whatever fails, its pages stay at the source");
        }
    }
    assert!(request(State::Paging, &Request::Release).is_err(), "not before every page is there");
    let given_back = Request::GivenBack { chunk: ChunkIndex(0) };
    assert!(request(State::Placed, &given_back).is_err(), "no guest runs there");
    assert_eq!(reply(State::Completed, &given_back, &Reply::GivenBack([0; 32])), Ok(State::Completed));
    assert!(request(State::Copying, &Request::Resume { id: 1, streams: 1 }).is_err());
    assert!(request(State::Begun, &Request::Missing { first: ChunkIndex(0) }).is_err());
}

#[test]
fn pages_cannot_follow_before_the_residue_is_known() {
    assert!(request(State::Stopped, &Request::Commit).is_err());
    assert!(
        request(State::Copying, &Request::Residue(ResiduePart { first: ChunkIndex(0), chunks: 1, bits: vec![] }))
            .is_err()
    );
    assert!(request(State::LoadedPostcopy, &Request::Load).is_err());
}

#[test]
fn a_gang_is_told_the_number_of_its_pool_or_not() {
    let join = Request::Join { gang: Box::new(gang()), member: 0 };
    for joined in [Reply::Joined, Reply::JoinedPool { pool: 1 }] {
        assert_eq!(reply(State::Begun, &join, &joined), Ok(State::Begun));
    }
    assert!(reply(State::Begun, &Request::Identify, &Reply::JoinedPool { pool: 1 }).is_err());
}
