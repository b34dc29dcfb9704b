//! Chunks that the VMM's main thread uses: they stay here.
//!
//! That thread emulates devices and answers QMP. While it waits for a page, the guest's devices stand still and nobody
//! can talk to the VMM: where a memory host does not answer, for as long as that lasts. What it touches it touches
//! again, as the rings through which a guest talks to its devices. So what it has used last stays, a sixteenth of what
//! may be here at most. Threads that read from a disk into the guest's memory are others: what they fill is the
//! guest's, and the clock knows whether that is used.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use sterna_protocol::layout::{CHUNK_BYTES, ChunkIndex};

use super::room::Room;

/// The part of the room that is kept for it.
const PART: u64 = 16;

/// What the main thread of one VMM has used.
#[derive(Debug)]
pub(super) struct MainThread {
    /// Its number: that of the process.
    number: u32,
    /// The latest is the first.
    used: Mutex<VecDeque<ChunkIndex>>,
}

impl MainThread {
    /// Of this process, which has used nothing yet.
    pub fn of(process: u32) -> Self {
        Self { number: process, used: Mutex::default() }
    }

    /// A thread of the VMM's has touched what was not in its page tables, while there is so much room for the guest.
    pub fn touched(&self, thread: u32, chunk: ChunkIndex, room: Room) {
        if thread != self.number {
            return;
        }
        let mut used = self.used();
        used.retain(|other| *other != chunk);
        used.push_front(chunk);
        used.truncate(most(room));
    }

    fn used(&self) -> MutexGuard<'_, VecDeque<ChunkIndex>> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a chunk is to stay, with so much room.
    pub fn keeps(&self, chunk: ChunkIndex, room: Room) -> bool {
        self.used().iter().take(most(room)).any(|used| *used == chunk)
    }
}

/// How many chunks stay.
fn most(room: Room) -> usize {
    usize::try_from(room.most().div_ceil(PART * CHUNK_BYTES as u64)).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_it_has_used_last_stays_and_no_more_than_a_part_of_the_room() {
        let (main, room) = (MainThread::of(7), |chunks: u64| Room::of(chunks * CHUNK_BYTES as u64));
        let kept = |room: Room| (0..5).filter(|chunk| main.keeps(ChunkIndex(*chunk), room)).collect::<Vec<_>>();
        main.touched(8, ChunkIndex(0), Room::ALL);
        assert!(kept(Room::ALL).is_empty(), "another thread");
        for chunk in [1, 2, 1, 3] {
            main.touched(7, ChunkIndex(chunk), Room::ALL);
        }
        assert_eq!((kept(Room::ALL), kept(room(32))), (vec![1, 2, 3], vec![1, 3]));
        assert_eq!((kept(room(1)), kept(room(0))), (vec![3], vec![]));
        main.touched(7, ChunkIndex(4), room(15));
        assert_eq!(kept(Room::ALL), [4]);
    }
}
