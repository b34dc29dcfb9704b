//! A guard for a machine that has not run here yet: where the session ends early, the machine is given back.

use std::sync::Arc;

use sterna_api::Problem;
use sterna_protocol::frame::Digester;
use sterna_protocol::pages::PageMap;

use crate::error::MigrateError;
use crate::host::{DestinationHost, Incoming, MigrationId};
use crate::memory::Memory;
use crate::paging::Pager;
use crate::split::Split;
use crate::split::onward::{ArrivingSplit, Elsewhere};

/// A machine that is aborted when this guard is dropped before the machine is [kept](Self::keep).
pub(super) struct Guard<'a> {
    host: &'a dyn DestinationHost,
    id: MigrationId,
    incoming: Option<Incoming>,
    /// The pager, where pages may follow the guest.
    pub(super) pager: Option<Arc<Pager>>,
    /// The part of it that is at memory hosts, once that is known.
    pub(super) split: Option<ArrivingSplit>,
}

impl<'a> Guard<'a> {
    /// Guards a machine whose VMM waits for device state.
    pub(super) fn new(host: &'a dyn DestinationHost, id: MigrationId, incoming: Incoming) -> Self {
        Self { host, id, incoming: Some(incoming), pager: None, split: None }
    }

    /// The machine.
    pub(super) fn incoming(&mut self) -> &mut Incoming {
        self.incoming.as_mut().expect("kept only at the very end")
    }

    /// Takes the machine out of the guard: it is not given back any more.
    pub(super) fn keep(&mut self) -> Incoming {
        self.pager = None;
        self.incoming.take().expect("kept only once")
    }

    /// Makes ready for post-copy, where that was asked for. Returns the reason where it is impossible.
    pub(super) fn open_pager(&mut self, ram: &Arc<dyn Memory>, verify: Option<Digester>) -> Option<Problem> {
        let opened = match self.incoming().paging.take()? {
            Ok(means) => Pager::open(Arc::clone(ram), means, verify).map_err(|error| error.problem()),
            Err(problem) => Err(problem),
        };
        opened.map(|pager| self.pager = Some(pager)).err()
    }

    /// All pages have come but those that are at memory hosts and those that `follow`: both are held back from now on,
    /// and brought as the devices' loading needs them. Whether that is a machine that is split; of any other nothing is
    /// done.
    pub(super) fn begin_elsewhere(
        &mut self,
        elsewhere: Option<&Elsewhere>,
        follow: &PageMap,
    ) -> Result<bool, MigrateError> {
        let Some(handed) = self.incoming().split.take() else { return Ok(false) };
        let elsewhere = elsewhere.ok_or(MigrateError::Request("a machine that is split without its map"))?;
        let pager = self.pager.clone().ok_or(MigrateError::Bug("a machine that is split without a pager"))?;
        let split = Split::arriving(pager, handed, elsewhere, follow.clone());
        self.split = Some(split.map_err(|error| MigrateError::MemoryHost(error.problem()))?);
        Ok(true)
    }

    /// Ends the pager, because no page follows the guest: from now on its RAM is as any process's.
    pub(super) fn end_pager(&mut self) {
        if let Some(pager) = self.pager.take() {
            pager.end();
        }
    }

    /// Gives the machine back: it never runs here.
    pub(super) fn end(&mut self) {
        if let Some(split) = self.split.take() {
            split.give_up();
        }
        // The pager ends first: a VMM that waits for a page does not end by itself. What it reads now does no harm,
        // because its guest never runs.
        self.end_pager();
        if let Some(incoming) = self.incoming.take() {
            self.host.abort(self.id, Some(incoming));
        }
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        self.end();
    }
}
