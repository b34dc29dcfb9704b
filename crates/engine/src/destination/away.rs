//! The map of a split guest's pages that stay at its memory hosts, as its source names them.

use sterna_protocol::layout::Layout;
use sterna_protocol::message::ResiduePart;
use sterna_protocol::pages::PageMap;
use sterna_protocol::residue;

use crate::error::MigrateError;
use crate::paging::whereabouts::{Holder, map_of};
use crate::split::onward::Elsewhere;

/// What has been named so far.
#[derive(Debug, Default)]
pub(super) struct Away(Vec<(Holder, PageMap)>);

impl Away {
    /// Adds a part, which comes from the peer.
    ///
    /// # Errors
    /// It names pages that the machine does not have, or nobody who could have them.
    pub(super) fn note(&mut self, layout: &Layout, holder: u8, part: &ResiduePart) -> Result<(), MigrateError> {
        let holder = Holder::from_entry(holder).filter(|holder| holder.host_number().is_some());
        let holder = holder.ok_or(MigrateError::Request("pages at a memory host that there cannot be"))?;
        // There are no more holders than bytes name, so this is bounded.
        residue::add(part, layout, map_of(&mut self.0, holder, layout)).map_err(|error| {
            tracing::warn!(%error, "the map of pages at memory hosts is invalid");
            MigrateError::Request("a map of pages that this machine cannot have")
        })
    }

    /// All have been named: so many pages, which are asked for in this epoch.
    ///
    /// # Errors
    /// There are more, or fewer.
    pub(super) fn end(self, epoch: u64, pages: u64) -> Result<Elsewhere, MigrateError> {
        let named: u64 = self.0.iter().map(|(_, map)| map.len()).sum();
        if named != pages {
            return Err(MigrateError::Request("another number of pages at memory hosts than were named"));
        }
        Ok(Elsewhere { away: self.0, epoch })
    }
}
