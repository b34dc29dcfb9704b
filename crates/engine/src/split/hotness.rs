//! Which chunks the guest uses, of those that are about to leave.
//!
//! The clock's hand goes round the chunks, and takes those that did not come back since it passed by. Of a chunk that
//! has never left that says nothing. So some way ahead of the hand it is watched whether the guest uses a chunk, and by
//! the time that the hand is there, this is known. Nothing is watched while nothing leaves.
//!
//! To watch costs a fault for each chunk in use. Where nearly all are, as of a guest that reads here and there, it
//! tells none from another: then nothing is watched for a while, and longer each time that it is found to be so still.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use sterna_protocol::layout::{ChunkIndex, PageIndex};

use crate::error::MigrateError;
use crate::paging::Pager;

/// Tells which chunks a guest uses. The kernel's own accounts (DAMON, idle-page tracking) may stand in where there are
/// some.
pub(super) trait Hotness: Send + Sync {
    /// From now on it is noted which of these chunks the guest uses.
    ///
    /// # Errors
    /// The VMM does not answer.
    fn watch(&self, chunks: &[ChunkIndex]) -> Result<(), MigrateError>;

    /// Whether the guest has used a chunk since it was watched last; `None` of one that was not watched. It is not
    /// watched any more.
    fn was_used(&self, chunk: ChunkIndex) -> Option<bool>;

    /// A thread of the VMM's has touched a page that is here and was not in its page tables. Returns whether the rest
    /// of its chunk is to be mapped at once: it costs no more faults then.
    fn touched(&self, page: PageIndex) -> bool;
}

/// Takes chunks out of the VMM's page tables: the next access to one faults, which is the signal, and all of the chunk
/// is mapped again. What is in the page tables is no matter of the guest's: nothing is lost, and the agent does it for
/// many chunks in one request.
pub(super) struct DroppedMappings {
    pager: Arc<Pager>,
    /// What is known of each chunk.
    chunks: Vec<AtomicU8>,
}

/// Not watched.
const NOTHING: u8 = 0;
/// Watched, and not used since.
const WATCHED: u8 = 1;
/// Used since.
const USED: u8 = 2;

impl DroppedMappings {
    /// Of this guest, none of whose chunks is watched.
    pub fn of(pager: &Arc<Pager>) -> Self {
        let chunks = pager.ram().layout().iter().map(|_| AtomicU8::new(NOTHING)).collect();
        Self { pager: Arc::clone(pager), chunks }
    }
}

impl Hotness for DroppedMappings {
    /// Not while the guest's writes are tracked: what comes back into the page tables counts as written.
    fn watch(&self, chunks: &[ChunkIndex]) -> Result<(), MigrateError> {
        if chunks.is_empty() || self.pager.is_tracked() {
            return Ok(());
        }
        // Before they are taken out: the first access after that is seen.
        chunks.iter().for_each(|chunk| self.chunks[chunk.index()].store(WATCHED, Ordering::Release));
        self.pager.unmap(chunks)
    }

    fn was_used(&self, chunk: ChunkIndex) -> Option<bool> {
        match self.chunks[chunk.index()].swap(NOTHING, Ordering::AcqRel) {
            NOTHING => None,
            known => Some(known == USED),
        }
    }

    fn touched(&self, page: PageIndex) -> bool {
        let known = &self.chunks[page.chunk.index()];
        known.compare_exchange(WATCHED, USED, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
}

/// How many chunks show whether it is worth while to watch.
const SAMPLE: u32 = 32;

/// Whether it is worth while to watch: where more than three quarters of the chunks are in use, it is not.
#[derive(Debug)]
pub(super) struct Worth {
    /// Of so many chunks so many were used.
    of: u32,
    used: u32,
    /// For so many turns of the hand nothing is watched.
    rest: u32,
    /// How long the last rest was.
    last: u32,
    chunks: u32,
}

impl Worth {
    /// Of a guest of so many chunks, of which nothing is known.
    pub fn of(chunks: u32) -> Self {
        Self { of: 0, used: 0, rest: 0, last: 0, chunks }
    }

    /// Whether chunks are to be watched, as the hand turns.
    pub fn turn(&mut self) -> bool {
        self.rest = self.rest.saturating_sub(1);
        self.rest == 0
    }

    /// A chunk that was watched was used, or not.
    pub fn note(&mut self, used: bool) {
        if self.rest > 0 {
            return;
        }
        (self.of, self.used) = (self.of + 1, self.used + u32::from(used));
        if self.of < SAMPLE.min(self.chunks) {
            return;
        }
        let in_vain = self.used * 4 > self.of * 3;
        // A quarter of a round, and twice as long each time, up to four rounds.
        self.last = if in_vain { (self.last * 2).clamp(self.chunks / 4, self.chunks * 4) } else { 0 };
        (self.rest, self.of, self.used) = (self.last, 0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many of so many turns are watched, where these are used of a hundred.
    fn watched(worth: &mut Worth, turns: u32, percent: u32) -> u32 {
        let turn = |turn: u32| {
            let watches = worth.turn();
            if watches {
                worth.note(turn * 37 % 100 < percent);
            }
            u32::from(watches)
        };
        (0..turns).map(turn).sum()
    }

    #[test]
    fn a_guest_that_uses_nearly_all_is_watched_seldom_and_any_other_always() {
        let mut worth = Worth::of(400);
        assert_eq!(watched(&mut worth, 4000, 60), 4000);
        let seldom = watched(&mut worth, 40_000, 95);
        assert!(seldom < 1500, "{seldom}");
        // It is found out that it uses less again.
        watched(&mut worth, 2000, 40);
        assert_eq!(watched(&mut worth, 4000, 40), 4000);
    }
}
