//! Comparison of both sides' pages after the last has come. Pages that the guest discarded until then may differ.
//!
//! Where no page follows the guest it is the same: every page is current, and none is mapped before its digest is
//! taken. A first access waits for one digest, and the rest is digested and mapped in the background.
//!
//! Of a split guest that came here, what was at memory hosts when it stopped is not compared, and pages of the rest go
//! there and come back meanwhile.
//!
//! # Races
//! * **A page leaves that the guest has not seen**: it is noted before it is away (`depart.rs`). Whoever was about to
//!   note it, and finds the hole, is too late: the first note counts.
//! * **It comes back, and the guest writes it**: it is noted already, and so is a page that was left out.
//! * **The guest has used a page of zeros ahead of its touch** (`touched_next`): it is noted before it is mapped.
//! * **All of the guest has come together, and the pager ends**: what was not seen is noted before, because the guest
//!   writes what it likes afterwards.
//! * **The guest gave a page back, and has used it again when it leaves**: it is not given back any more then, and that
//!   it was is remembered (`given_back.rs`).

use sterna_protocol::frame::Digester;
use sterna_protocol::layout::ChunkIndex;
use sterna_protocol::pages::PageMap;

use super::shown::Shown;
use super::{LOGGED, Pager};
use crate::error::MigrateError;

impl Pager {
    /// From now on every page is here, and the guest's first sight of each is noted. The devices are not loaded yet.
    /// The VMM's process keeps no duplicate of the userfaultfd any more: nothing would be lost with this daemon but the
    /// comparison, so a guest whose daemon dies goes on at once.
    ///
    /// # Errors
    /// As [`begin`](Self::begin); or the VMM's process does not answer.
    pub(crate) fn begin_whole(&self) -> Result<(), MigrateError> {
        self.begin(PageMap::empty(self.ram.layout()))?;
        self.faults.inside().lend()
    }

    /// The digester of the pages as the guest first saw them; `None` where that was not recorded.
    #[must_use]
    pub fn digester(&self) -> Option<Digester> {
        self.lock().shown.as_ref().map(|shown| shown.digester)
    }

    /// The digest of a chunk as the guest first saw its pages, as
    /// [`Memory::chunk_digest`](crate::memory::Memory::chunk_digest).
    ///
    /// # Errors
    /// The guest's first sight was not recorded, or RAM cannot be read.
    pub fn chunk_digest(&self, chunk: ChunkIndex) -> Result<u64, MigrateError> {
        self.with_noted(chunk, |shown| shown.chunk_digest(self.ram.layout(), chunk))
    }

    /// The digests of a chunk's pages as the guest first saw them, as
    /// [`Memory::page_digests`](crate::memory::Memory::page_digests).
    ///
    /// # Errors
    /// As [`Self::chunk_digest`].
    pub fn page_digests(&self, chunk: ChunkIndex) -> Result<Vec<u64>, MigrateError> {
        self.with_noted(chunk, |shown| shown.page_digests(self.ram.layout(), chunk))
    }

    /// Nothing is compared any more, and no page is noted.
    pub(crate) fn nothing_is_compared(&self) {
        self.lock().shown = None;
    }

    /// Notes all that the guest has not seen, because nobody looks after its pages any more. Every page is here, or the
    /// guest has ended. Both sides can be compared afterwards as before.
    pub(crate) fn note_all(&self) {
        if self.digester().is_none() {
            return;
        }
        let noted = self.ram.layout().iter().try_for_each(|chunk| self.note_what_is_here(chunk));
        if let Err(error) = &noted {
            tracing::warn!(%error, "both sides cannot be compared any more");
        }
        {
            let mut state = self.lock();
            // Without the digests the comparison breaks off.
            state.shown = state.shown.take().filter(|_| noted.is_ok());
            state.shown.iter_mut().for_each(|shown| shown.note_rest(self.ram.layout()));
        }
        // The log says why some are zeros, and is read for the last time.
        std::thread::sleep(LOGGED);
        self.with_inside(|given_back, inside| self.look(given_back, inside));
    }

    /// Notes what the guest has not seen of a chunk, and looks. What is not here was noted when it left, or is left
    /// out. A page that is a hole for another reason and was never seen is zeros, and is noted as such if the guest
    /// sees it meanwhile.
    fn with_noted<T>(&self, chunk: ChunkIndex, look: impl FnOnce(&Shown) -> T) -> Result<T, MigrateError> {
        self.note_what_is_here(chunk)?;
        let state = self.lock();
        state.shown.as_ref().map(look).ok_or(MigrateError::Request("digests that were not agreed on"))
    }

    /// Notes the pages of a chunk that have memory here and that the guest has not seen. It gives memory to none.
    fn note_what_is_here(&self, chunk: ChunkIndex) -> Result<(), MigrateError> {
        self.give_way();
        let there = self.allocated_in(chunk)?;
        self.note_unseen(chunk, &there)
    }
}
