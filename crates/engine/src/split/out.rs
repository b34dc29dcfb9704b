//! Pages that leave for a memory host while their guest runs.

use std::sync::TryLockError;
use std::sync::atomic::Ordering;
use std::time::Duration;

use sterna_protocol::layout::{ChunkIndex, Layout, PAGE_BYTES};
use sterna_protocol::pages::PageSet;
use sterna_protocol::store::InventoryEntry;
use sterna_sys::iovec::Outgoing;

use super::lines::Lines;
use super::{Chunk, Split, SplitError};
use crate::error::MigrateError;
use crate::faults::fence::Fence;
use crate::memory::is_zero;
use crate::paging::depart::{Copy, Departed};
use crate::paging::whereabouts::Holder;
use crate::store::client::StoreError;

/// How long pages may be fenced in once somebody waits for one of them.
const GRACE: Duration = Duration::from_millis(2);

/// One thread's way out for pages: a fence, and connections.
pub struct WayOut<'a> {
    split: &'a Split,
    lines: Lines<'a>,
    fence: Fence,
}

impl Split {
    /// A way out. One at a time: two fences exclude each other.
    ///
    /// # Errors
    /// The VMM does not answer.
    pub fn way_out(&self) -> Result<WayOut<'_>, SplitError> {
        Ok(WayOut { split: self, lines: Lines::new(&self.lenders), fence: self.pager.fence()? })
    }

    /// Asks every memory host what it has, and does what follows from that. Before pages are brought.
    pub(super) fn take_stock(&self) -> Result<(), SplitError> {
        let mut lines = Lines::new(&self.lenders);
        let layout: &Layout = self.pager.ram().layout();
        if layout.iter().any(|chunk| self.pager.holder(chunk).is_some() && self.host_of(chunk).is_none()) {
            return Err(MigrateError::Bug("pages are at a memory host that is not named").into());
        }
        for number in 0..self.lenders.count() {
            let inventory = lines.ask(number, |host| host.inventory()).map_err(|error| self.failed(number, error))?;
            let mut entries = inventory.iter().peekable();
            for chunk in layout.iter() {
                let entry = entries.next_if(|entry| entry.chunk == chunk);
                let has = entry.map(|InventoryEntry { version, pages, .. }| (*version, PageSet::from_bytes(pages)));
                if has.is_some() || self.host_of(chunk) == Some(number) {
                    self.settle(&mut lines, number, chunk, &mut self.chunk(chunk), has)?;
                }
            }
        }
        Ok(())
    }
}

impl WayOut<'_> {
    /// Sends the pages of a chunk that have content to a memory host, where none of them is at another one already: to
    /// that one then. Returns what has left; nothing where the chunk is busy.
    ///
    /// # Errors
    /// [`SplitError`]; each page is here or away, and valid there.
    pub fn send(&mut self, chunk: ChunkIndex, number: usize) -> Result<Departed, SplitError> {
        let nothing = Departed { away: PageSet::EMPTY, zero: PageSet::EMPTY };
        let split = self.split;
        let mut state = match split.chunks[chunk.index()].try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(state)) => state.into_inner(),
            // Its pages are coming back.
            Err(TryLockError::WouldBlock) => return Ok(nothing),
        };
        let number = split.host_of(chunk).unwrap_or(number);
        let holder = Holder::host(number).ok_or(MigrateError::Bug("a memory host that is not known"))?;
        if state.unsure {
            split.make_sure(&mut self.lines, number, chunk, &mut state)?;
        }
        let copied = self.copy(chunk)?;
        if copied.full.is_empty() && copied.zero.is_empty() {
            return Ok(nothing);
        }
        let digests = self.put(chunk, number, &mut state, &copied)?;
        let copy =
            Copy { chunk, pages: copied.full, digests: &digests, digester: split.digester, holder, zero: copied.zero };
        let departed = split.pager.depart(&self.fence, &copy, &self.fence.patience(GRACE));
        // Whatever came of it: the record says what is away.
        let away = split.pager.away_in(chunk).and(&copied.full);
        state.at.goes(&away);
        let stayed = copied.full.without(&away);
        if !stayed.is_empty() {
            let version = state.at.held();
            let released = self.lines.ask(number, |host| host.release(chunk, version, &stayed));
            state.unsure |= released.is_err();
        }
        let departed = departed?;
        split.out.fetch_add(away.len() as u64, Ordering::Relaxed);
        split.zero.fetch_add(departed.zero.len() as u64, Ordering::Relaxed);
        split.kept.fetch_add(stayed.len() as u64, Ordering::Relaxed);
        Ok(departed)
    }

    /// The pages of a chunk that have content here, as the guest has them at some moment each.
    fn copy(&self, chunk: ChunkIndex) -> Result<Copied, SplitError> {
        let ram = self.split.pager.ram();
        let failed = MigrateError::host("reading pages that are about to leave");
        let there = ram.allocated_in(chunk).map_err(MigrateError::host("looking for holes in the guest's RAM"))?;
        let there = there.without(&self.split.pager.away_in(chunk));
        let mut bodies = vec![0; there.len() * PAGE_BYTES];
        ram.load(chunk, &there, &mut bodies).map_err(failed)?;
        let each = || there.iter().zip(bodies.as_chunks::<PAGE_BYTES>().0);
        let zero: PageSet = each().filter(|(_, body)| is_zero(body)).map(|(page, _)| page).collect();
        let bodies = match zero.is_empty() {
            true => bodies,
            false => each().filter(|(page, _)| !zero.contains(*page)).flat_map(|(_, body)| *body).collect(),
        };
        Ok(Copied { full: there.without(&zero), zero, bodies })
    }

    /// Has the memory host keep a copy; the digests of what it has.
    fn put(
        &mut self,
        chunk: ChunkIndex,
        number: usize,
        state: &mut Chunk,
        copied: &Copied,
    ) -> Result<Vec<u64>, SplitError> {
        if copied.full.is_empty() {
            return Ok(Vec::new());
        }
        let next = state.at.number();
        let bodies = [Outgoing::from(copied.bodies.as_slice())];
        let put = self
            .lines
            .ask(number, |host| host.put(chunk, (next.version, next.base), (copied.full, PageSet::EMPTY), &bodies));
        match put {
            Ok(digests) => {
                state.at.kept(next);
                Ok(digests)
            }
            Err(error) => {
                // A refusal says that nothing was done; but then both sides may not agree on what is there.
                state.unsure = !matches!(&error, StoreError::Refused(sterna_protocol::store::Refusal::Full { .. }));
                Err(self.split.failed(number, error))
            }
        }
    }
}

/// A chunk's pages, copied.
struct Copied {
    full: PageSet,
    zero: PageSet,
    /// The bodies of the full ones, in order.
    bodies: Vec<u8>,
}
