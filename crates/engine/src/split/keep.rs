//! No more of a guest is kept here than it may have: what is too much leaves ahead of need.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_api::{Problem, Unused};
use sterna_protocol::layout::{ChunkIndex, PAGE_BYTES};
use sterna_protocol::pages::PageSet;

use super::hotness::Worth;
use super::out::WayOut;
use super::outage::Outage;
use super::room::Room;
use super::{Split, SplitError, lock};
use crate::error::MigrateError;
use crate::paging::whereabouts::Holder;

/// How often the guest's memory is looked at.
const LOOK: Duration = Duration::from_millis(5);
/// How often it is looked what the guest has given back that is away, and what memory hosts have that counts no more.
const FORGET: Duration = Duration::from_millis(250);

impl Split {
    /// From now on no more of the guest is here than there is room for, as far as its pages can leave as fast as it
    /// uses more. A second call changes the room. Until [`end`](Self::end).
    ///
    /// # Errors
    /// No thread left.
    pub fn keep_to(self: &Arc<Self>, room: Room) -> Result<(), SplitError> {
        let here = self.here_bytes_of(room)?;
        if self.set_room(Some(room), here).is_some() {
            return Ok(());
        }
        let started = self.spawn("pace", Self::pace_touches).and_then(|()| self.spawn("page-out", Self::make_room));
        if started.is_err() {
            self.set_room(None, 0);
        }
        started
    }

    /// Watches whether the guest uses this chunk; whether it has since the last call. For tests.
    ///
    /// # Errors
    /// The VMM does not answer.
    #[doc(hidden)]
    pub fn was_used(&self, chunk: ChunkIndex) -> Result<bool, MigrateError> {
        let used = self.hotness.was_used(chunk);
        self.hotness.watch(&[chunk]).map(|()| used == Some(true))
    }

    /// How much of the guest is here, bytes.
    ///
    /// # Errors
    /// The file system's.
    pub fn here_bytes(&self) -> Result<u64, MigrateError> {
        self.here_bytes_of(self.room())
    }

    pub(super) fn here_bytes_of(&self, room: Room) -> Result<u64, MigrateError> {
        let ram = self.pager.ram();
        match room.unused() {
            Unused::Track => ram.allocated_bytes().map_err(MigrateError::host("looking at the guest's memory")),
            Unused::Ignore => Ok((ram.layout().pages() - self.pager.missing()) * PAGE_BYTES as u64),
        }
    }

    /// How much of the guest may be here.
    pub(super) fn room(&self) -> Room {
        lock(&self.room).unwrap_or(Room::ALL)
    }

    /// Sets the room, where so much is here; what it was.
    pub(super) fn set_room(&self, room: Option<Room>, here: u64) -> Option<Room> {
        let mut known = lock(&self.room);
        self.pace.bound(room.unwrap_or(Room::ALL), here);
        std::mem::replace(&mut known, room)
    }

    /// From now on nothing leaves, as if there were room for all of it. What was on its way has left, or stays, when
    /// this returns.
    pub(super) fn keep_all(&self) {
        if lock(&self.room).is_some() {
            self.set_room(Some(Room::ALL), 0);
        }
        // Whoever sends has looked at the room under this lock.
        drop(lock(&self.on_the_way));
    }

    fn make_room(&self) {
        let mut outage = Outage::default();
        while !self.has_ended() {
            let began = Instant::now();
            let done = self.way_out().and_then(|mut way| self.make_room_by(&mut way, &mut outage));
            let Err(error) = done else { return };
            if !outage.is_on() {
                tracing::warn!(error = &error as &dyn std::error::Error, "pages of a guest do not leave");
            }
            *lock(&self.stuck) = Some(error.problem());
            self.rest(outage.failed(began, Instant::now(), false));
        }
    }

    /// Until the end, or an error of this host's, which has an `outage` then.
    fn make_room_by(&self, way: &mut WayOut<'_>, outage: &mut Outage) -> Result<(), SplitError> {
        let (mut turns, mut in_vain, mut leaving, mut forgotten) = (Turns::new(), 0, false, Instant::now());
        let (mut spared, mut worth) = (0, Worth::of(self.chunks.len() as u32));
        while !self.has_ended() {
            if self.still.is_on() {
                self.rest(LOOK);
                continue;
            }
            turns.among((0..self.lenders.count()).filter(|number| !self.lenders.is_leaving(*number)).collect());
            if forgotten.elapsed() >= FORGET {
                self.tell_what_was_given_back(&mut way.lines)?;
                self.go_through_rests(way, &mut turns)?;
                forgotten = Instant::now();
            }
            let here = self.here_bytes()?;
            let on_the_way = lock(&self.on_the_way);
            // Looked at each time: a person may give it more room, or less.
            leaving = lock(&self.room).is_some_and(|room| here > if leaving { room.low() } else { room.high() });
            if !leaving {
                *lock(&self.stuck) = None;
            }
            // A whole round in vain: all that could leave has left, or is in use.
            if !leaving || in_vain >= self.chunks.len() || turns.nobody(Instant::now()) {
                if leaving && let Some(why) = turns.why() {
                    *lock(&self.stuck) = Some(why.clone());
                }
                in_vain = 0;
                drop(on_the_way);
                self.rest(LOOK);
                continue;
            }
            if worth.turn() {
                self.hotness.watch(&self.clock.ahead())?;
            }
            let Some(chunk) = self.clock.next() else { continue };
            let used = self.hotness.was_used(chunk);
            if let Some(used) = used {
                worth.note(used);
            }
            if self.main_thread.keeps(chunk, self.room()) {
                in_vain += 1;
                continue;
            }
            // It stays for this round; where all are in use one must go.
            if used == Some(true) && spared < self.chunks.len() / 4 {
                spared += 1;
                continue;
            }
            let freed = self.send_anywhere(way, chunk, &mut turns)?;
            outage.over();
            if freed.is_empty() {
                in_vain += 1;
            } else {
                (in_vain, spared, *lock(&self.stuck)) = (0, 0, None);
                // Under the lock, so that it is this room's ceiling that comes down.
                lock(&self.room).inspect(|room| self.pace.left(*room, (freed.len() * PAGE_BYTES) as u64));
            }
        }
        Ok(())
    }

    /// Goes through what memory hosts have that did not answer once, where they do again.
    fn go_through_rests(&self, way: &mut WayOut<'_>, turns: &mut Turns) -> Result<(), SplitError> {
        for member in turns.hosts.clone().into_iter().flat_map(|number| self.lenders.members(number)) {
            let (began, number) = (Instant::now(), member.number);
            if !self.has_rests(member) || turns.outages[number].rests(began) || self.is_silent_of_two(member) {
                continue;
            }
            match self.go_through(&mut way.lines, member) {
                Ok(()) => drop(turns.outages[number].over()),
                Err(SplitError::Here(error)) => return Err(error.into()),
                Err(error) => turns.failed(number, began, &error),
            }
        }
        Ok(())
    }

    /// Sends a chunk to the first memory host that takes it: they have turns. One that has copies of it comes first,
    /// and one that has pages of it already is the only one. Returns the pages whose memory is free.
    fn send_anywhere(&self, way: &mut WayOut<'_>, chunk: ChunkIndex, turns: &mut Turns) -> Result<PageSet, SplitError> {
        let asked: Vec<usize> = match self.host_of(chunk).or_else(|| self.host_by_parity(chunk)) {
            Some(only) => vec![only],
            None => {
                let copies = self.copies_of(chunk).filter(|number| turns.hosts.contains(number));
                copies.into_iter().chain(turns.next()).collect()
            }
        };
        for number in asked {
            let began = Instant::now();
            if turns.outages[number].rests(began) {
                continue;
            }
            match way.send(chunk, number) {
                Ok(departed) => {
                    // Of a chunk that is busy, or has nothing to send, nobody was told.
                    if !departed.away.is_empty() {
                        turns.outages[number].over();
                    }
                    return Ok(departed.freed);
                }
                Err(SplitError::Here(error)) => return Err(error.into()),
                Err(error) => turns.failed(number, began, &error),
            }
        }
        Ok(PageSet::EMPTY)
    }

    /// Does nothing for a while, or until the end.
    pub(super) fn rest(&self, time: Duration) {
        let until = Instant::now() + time;
        while !self.has_ended() && Instant::now() < until {
            std::thread::sleep((until - Instant::now().min(until)).min(Duration::from_millis(10)));
        }
    }
}

/// The memory hosts, as who sends finds them.
struct Turns {
    /// Those that are given something.
    hosts: Vec<usize>,
    /// By their numbers.
    outages: [Outage; Holder::MAX_HOSTS],
    turn: usize,
    /// What failed last.
    why: Option<Problem>,
}

impl Turns {
    fn new() -> Self {
        Self { hosts: Vec::new(), outages: Default::default(), turn: 0, why: None }
    }

    /// From now on among these. What was found out of another one is forgotten: its number may be someone else's next.
    fn among(&mut self, hosts: Vec<usize>) {
        for (number, outage) in self.outages.iter_mut().enumerate() {
            if !hosts.contains(&number) {
                *outage = Outage::default();
            }
        }
        self.hosts = hosts;
    }

    /// All, in the order in which they are asked next.
    fn next(&mut self) -> Vec<usize> {
        let count = self.hosts.len();
        self.turn += 1;
        (0..count).map(|more| self.hosts[(self.turn + more) % count]).collect()
    }

    /// One has failed, asked since `began`.
    fn failed(&mut self, number: usize, began: Instant, error: &SplitError) {
        if !self.outages[number].is_on() {
            tracing::warn!(error = error as &dyn std::error::Error, "pages of a guest do not leave");
        }
        let others = self.hosts.iter().any(|other| *other != number && !self.outages[*other].is_on());
        self.outages[number].failed(began, Instant::now(), others);
        self.why = Some(error.problem());
    }

    /// Why pages do not leave, where one fails at present.
    fn why(&self) -> Option<&Problem> {
        self.why.as_ref().filter(|_| self.outages.iter().any(Outage::is_on))
    }

    /// Whether all are left alone now.
    fn nobody(&self, now: Instant) -> bool {
        self.hosts.iter().all(|number| self.outages[*number].rests(now))
    }
}
