//! Pages of a guest that go from its source straight to a memory host, past its next host.
//!
//! They are missing before and after; where they are to be asked for changes, and on record. Nobody here has had them,
//! so there is nothing to be fenced in or compared: the source's RAM stands still, and it has compared what the memory
//! host keeps with that.
//!
//! # Races
//! * **Somebody waits for such a page**: its source was asked for it, and sends it. It stays the source's.
//! * **It comes from the source at this moment**: whoever claims it first has it. A body that comes later is no answer
//!   to a page that is at a memory host, and is dropped.
//! * **The guest gives it back**: it is away, at whomever, so that is as with any page that is at a memory host.
//! * **This daemon is killed**: before it is on record the page is the source's, and what the memory host has counts
//!   no more; after that it is at the memory host, and the source keeps what it had until the end.

use std::sync::PoisonError;

use sterna_protocol::errand::Put;
use sterna_protocol::layout::ChunkIndex;
use sterna_protocol::pages::PageSet;

use super::Pager;
use super::claim::Claim;
use super::supplier::{Straight, Whose};
use super::whereabouts::Holder;
use crate::error::MigrateError;

impl Pager {
    /// The source has put so much at memory hosts; what is to go there next. Nothing where both sides are compared: of
    /// such pages nobody here knows what they were.
    ///
    /// # Errors
    /// [`MigrateError`]; what was not noted is the source's to send.
    pub(crate) fn straight(&self, put: &[Put]) -> Result<Straight, MigrateError> {
        let hosts = self.lock().suppliers.of(Whose::MemoryHosts).clone();
        match hosts {
            Some(hosts) => hosts.straight(put, self.digester().is_none()),
            None => Ok(Straight::nothing(put)),
        }
    }

    /// The source's session is over: what it was to put at memory hosts does not count, wherever it is.
    pub(crate) fn nothing_goes_straight(&self) {
        let hosts = self.lock().suppliers.of(Whose::MemoryHosts).clone();
        hosts.iter().for_each(|hosts| hosts.nothing_goes_straight());
    }

    /// Those of these pages that are at the source and that nobody waits for are at a memory host from now on, which
    /// has them as the source does. Returns them.
    ///
    /// # Errors
    /// The map cannot be written: they are the source's then. The file system refuses.
    pub(crate) fn went_straight(
        &self,
        chunk: ChunkIndex,
        pages: &PageSet,
        holder: Holder,
    ) -> Result<PageSet, MigrateError> {
        // Nobody begins to wait for one meanwhile.
        let _settling = self.settling.lock().unwrap_or_else(PoisonError::into_inner);
        let claim = Claim::of_missing(self, Whose::Source, chunk, &pages.without(&self.waited_for_in(chunk)));
        let went = claim.pages;
        claim.left_source(holder)?;
        // What a round has brought of them.
        self.punch(chunk, &went)?;
        Ok(went)
    }
}
