//! Comparison of both sides' pages after the last has come. Pages that the guest discarded until then may differ.
//!
//! Where no page follows the guest it is the same: every page is current, and none is mapped before its digest is
//! taken. A first access waits for one digest, and the rest is digested and mapped in the background.

use sterna_protocol::frame::Digester;
use sterna_protocol::layout::ChunkIndex;
use sterna_protocol::pages::PageMap;

use super::Pager;
use super::shown::Shown;
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

    /// Notes what the guest has not seen of a chunk, and looks. Every page is here; one that is a hole then and was
    /// never seen is zeros, and is noted as such if the guest sees it meanwhile.
    fn with_noted<T>(&self, chunk: ChunkIndex, look: impl FnOnce(&Shown) -> T) -> Result<T, MigrateError> {
        self.give_way();
        let there = self.ram.allocated_in(chunk);
        let there = there.map_err(MigrateError::host("reading the guest's RAM to compare it"))?;
        self.note_unseen(chunk, &there)?;
        let state = self.lock();
        state.shown.as_ref().map(look).ok_or(MigrateError::Request("digests that were not agreed on"))
    }
}
