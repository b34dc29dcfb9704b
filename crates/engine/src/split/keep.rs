//! No more of a guest is kept here than it may have: what is too much leaves ahead of need.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_protocol::layout::ChunkIndex;
use sterna_protocol::pages::PageSet;

use super::out::WayOut;
use super::room::Room;
use super::{Split, SplitError, lock};
use crate::error::MigrateError;

/// How often the guest's memory is looked at.
const LOOK: Duration = Duration::from_millis(5);
/// How long nothing is sent after it failed.
const RETRY: Duration = Duration::from_millis(200);

impl Split {
    /// From now on no more of the guest is here than there is room for, as far as its pages can leave as fast as it
    /// uses more. A second call changes the room. Until [`end`](Self::end).
    ///
    /// # Errors
    /// No thread left.
    pub fn keep_to(self: &Arc<Self>, room: Room) -> Result<(), SplitError> {
        if lock(&self.room).replace(room).is_some() {
            return Ok(());
        }
        let this = Arc::clone(self);
        let spawned = std::thread::Builder::new().name("page-out".into()).spawn(move || this.make_room());
        match spawned {
            Ok(thread) => lock(&self.threads).push(thread),
            Err(error) => {
                *lock(&self.room) = None;
                return Err(MigrateError::host("starting a thread for pages that leave")(error).into());
            }
        }
        Ok(())
    }

    /// From now on nothing leaves, as if there were room for all of it. What was on its way has left, or stays, when
    /// this returns.
    pub(super) fn keep_all(&self) {
        if let Some(room) = &mut *lock(&self.room) {
            *room = Room::ALL;
        }
        // Whoever sends has looked at the room under this lock.
        drop(lock(&self.on_the_way));
    }

    fn make_room(&self) {
        let mut failing = false;
        while !self.has_ended() {
            let done = self.way_out().and_then(|mut way| self.make_room_by(&mut way, &mut failing));
            let Err(error) = done else { return };
            if !failing {
                tracing::warn!(error = &error as &dyn std::error::Error, "the guest keeps more here than it may");
            }
            failing = true;
            *lock(&self.stuck) = Some(error.problem());
            self.rest(RETRY);
        }
    }

    /// Until the end, or an error.
    fn make_room_by(&self, way: &mut WayOut<'_>, failing: &mut bool) -> Result<(), SplitError> {
        let (mut turn, mut in_vain, mut leaving) = (0, 0, false);
        while !self.has_ended() {
            let here = self.pager.ram().allocated_bytes();
            let here = here.map_err(MigrateError::host("looking at the guest's memory"))?;
            let on_the_way = lock(&self.on_the_way);
            // Looked at each time: a person may give it more room, or less.
            leaving = lock(&self.room).is_some_and(|room| here > if leaving { room.low() } else { room.high() });
            if !leaving {
                *lock(&self.stuck) = None;
            }
            // A whole round in vain: all that could leave has left, or is in use.
            if !leaving || in_vain >= self.chunks.len() {
                in_vain = 0;
                drop(on_the_way);
                self.rest(LOOK);
                continue;
            }
            let Some(chunk) = self.clock.next() else { continue };
            let left = self.send_anywhere(way, chunk, turn)?;
            (turn, *failing) = (turn + 1, false);
            *lock(&self.stuck) = None;
            in_vain = if left.is_empty() { in_vain + 1 } else { 0 };
        }
        Ok(())
    }

    /// Sends a chunk to the first memory host that takes it: they have turns. Returns the pages that have left.
    fn send_anywhere(&self, way: &mut WayOut<'_>, chunk: ChunkIndex, turn: usize) -> Result<PageSet, SplitError> {
        let count = self.lenders.count();
        let mut sent = Err(MigrateError::Bug("a split guest without a memory host").into());
        for number in (0..count).map(|more| (turn + more) % count) {
            sent = way.send(chunk, number).map(|departed| departed.away.or(&departed.zero));
            if sent.is_ok() {
                break;
            }
        }
        sent
    }

    /// Does nothing for a while, or until the end.
    pub(super) fn rest(&self, time: Duration) {
        let until = Instant::now() + time;
        while !self.has_ended() && Instant::now() < until {
            std::thread::sleep((until - Instant::now().min(until)).min(Duration::from_millis(10)));
        }
    }
}
