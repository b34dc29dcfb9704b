//! The pager, and what is given back of the guest's memory (`given_back.rs`).

use std::sync::PoisonError;

use sterna_protocol::layout::ChunkIndex;
use sterna_protocol::pages::PageSet;

use super::Pager;
use super::given_back::GivenBack;
use super::supplier::Whose;
use crate::destination::arrival::Arrival;
use crate::error::MigrateError;
use crate::faults::User;
use crate::inside::Inside;

impl Pager {
    /// Pages of a chunk that the guest may have discarded since its start here: it may have seen zeros, whatever the
    /// source has.
    #[must_use]
    pub fn given_back(&self, chunk: ChunkIndex) -> PageSet {
        self.with_inside(|given_back, inside| {
            self.look(given_back, inside);
            given_back.possible(chunk, self.ram.layout())
        })
    }

    /// Pages of a chunk that are known to be discarded: nobody wants their bodies any more.
    pub(super) fn unwanted(&self, chunk: ChunkIndex) -> PageSet {
        let given_back = self.given_back.lock().unwrap_or_else(PoisonError::into_inner);
        if !given_back.is_due() {
            return *given_back.known(chunk);
        }
        drop(given_back);
        self.with_inside(|given_back, inside| {
            self.look(given_back, inside);
            *given_back.known(chunk)
        })
    }

    /// The chunks with pages that are at memory hosts and known to be given back.
    pub(crate) fn given_back_elsewhere(&self) -> Vec<ChunkIndex> {
        let known = |given_back: &mut GivenBack, inside: &mut dyn Inside| {
            self.look(given_back, inside);
            given_back.chunks()
        };
        let known = self.with_inside(known);
        let state = self.lock();
        let away =
            |(chunk, pages): &(ChunkIndex, PageSet)| !pages.and(&state.whereabouts.at_hosts_in(*chunk)).is_empty();
        known.into_iter().filter(away).map(|(chunk, _)| chunk).collect()
    }

    /// Of a chunk of which nothing comes or leaves meanwhile: what is at memory hosts and known to be given back
    /// is nowhere from now on, and reads as zeros. Returns these pages.
    ///
    /// # Errors
    /// The map cannot be written, or the VMM has ended.
    pub(crate) fn forget(&self, chunk: ChunkIndex) -> Result<PageSet, MigrateError> {
        let known = self.with_given_back(|given_back| *given_back.known(chunk));
        let gone = known.and(&self.lock().whereabouts.at_hosts_in(chunk));
        if gone.is_empty() {
            return Ok(gone);
        }
        self.place(
            Whose::MemoryHosts,
            &Arrival { chunk, bodies: &[], zero: gone, pooled: None, suspect: PageSet::EMPTY },
        )?;
        Ok(gone)
    }

    /// Forgets what was given back up to now.
    pub(super) fn forget_given_back(&self) {
        self.with_inside(|given_back, inside| {
            drop(self.userfault.given_back(User::Paging, inside));
            given_back.begin();
        });
    }

    pub(super) fn look(&self, given_back: &mut GivenBack, inside: &mut dyn Inside) {
        let (discards, holes) = self.userfault.given_back(User::Paging, inside);
        given_back.look(&discards, self.ram.layout());
        given_back.taken(holes, self.ram.layout());
    }

    pub(super) fn with_given_back<T>(&self, look: impl FnOnce(&mut GivenBack) -> T) -> T {
        look(&mut self.given_back.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn with_inside<T>(&self, look: impl FnOnce(&mut GivenBack, &mut dyn Inside) -> T) -> T {
        let mut given_back = self.given_back.lock().unwrap_or_else(PoisonError::into_inner);
        look(&mut given_back, self.faults.inside().as_mut())
    }
}
