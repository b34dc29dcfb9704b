//! A split guest moves to another host, and what is at its memory hosts stays there.
//!
//! ```text
//! source       stay: nothing leaves ─▶ the guest stops ─▶ stand_still: the map of what is away, and the epoch
//! destination  arriving: the map, in that epoch ─▶ each memory host has what is away ─▶ devices are loaded
//!              ─▶ commit ─▶ take_over: in an epoch of its own
//! source       where the guest stays: go_on, in a higher epoch than it lent
//! ```
//!
//! Until the commit both hosts ask in the source's epoch, and neither changes anything: pages are only read. So whoever
//! has the guest in the end finds at the memory hosts what the map says, and what the other one still asks after that
//! is refused (`docs/design/memory-hosts.md`).
//!
//! # Races
//! * **A page is on its way here when the guest stops**: it has come when [`stand_still`](Split::stand_still) looks at
//!   the map, and is collected as any page that was written.
//! * **The VMM touches a page that is away while it saves its devices**: it comes, armed, so it does not count as
//!   written; the destination has it as it is at the memory host. Where the VMM writes it, it is collected, too late,
//!   as every such page, and the guest stays.
//! * **A put of the source's whose answer was lost arrives late**: it adds to what is away, and changes none of it. The
//!   version is another one than the destination knows, which asks again then.
//! * **The source's daemon dies before the commit**: the guest is its own, and its next daemon asks in a higher epoch.

use std::sync::Arc;
use std::time::Duration;

use sterna_api::{Blame, Code, Problem};
use sterna_protocol::layout::{ChunkIndex, Layout};
use sterna_protocol::pages::{PageMap, PageSet};

use super::{Epochs, Lender, Split, SplitError, lock};
use crate::error::MigrateError;
use crate::paging::Pager;
use crate::paging::whereabouts::{Holder, map_of};
use crate::store::client::{MemoryHost, StoreError};

/// How long pages that are on their way may take once the guest has stopped.
const ON_THE_WAY: Duration = Duration::from_secs(1);

/// A split guest as its source leaves it.
#[derive(Debug)]
pub struct Elsewhere {
    /// Which pages are at memory hosts, by who holds them.
    pub away: Vec<(Holder, PageMap)>,
    /// The epoch in which they are asked until the guest belongs to its next host.
    pub epoch: u64,
}

impl Elsewhere {
    /// Adds pages of a chunk at a holder, which has all others of the chunk.
    pub fn add(&mut self, holder: Holder, chunk: ChunkIndex, pages: &PageSet, layout: &Layout) {
        if pages.is_empty() {
            return;
        }
        map_of(&mut self.away, holder, layout).insert_all(chunk, pages);
    }
}

/// The memory hosts of a guest that comes here, and what this host needs to ask them.
pub struct Handed {
    /// By their numbers in the map of missing pages.
    pub lenders: Vec<Lender>,
    /// The guest's number there, and the key of its owners.
    pub guest: (u128, u128),
    /// This host's own epochs, all higher than any of the source's.
    pub epochs: Box<dyn Epochs>,
}

/// An epoch of somebody else's, who does not use another one meanwhile.
struct Lent(u64);

impl Epochs for Lent {
    fn raise(&self) -> std::io::Result<u64> {
        Ok(self.0)
    }
}

impl Split {
    /// From now on nothing leaves, until the guest [goes on](Self::go_on) here. What was on its way has left, or stays,
    /// when this returns. The guest runs still.
    pub fn stay(&self) {
        self.still.before(self.room());
        self.keep_all();
    }

    /// The guest has stopped: nothing comes any more but what the VMM waits for, and where all pages are does not
    /// change for its next host, until it [goes on](Self::go_on) here.
    ///
    /// # Errors
    /// A memory host does not answer that was asked for pages before. The guest goes on here then.
    pub fn stand_still(&self) -> Result<Elsewhere, MigrateError> {
        let _nobody = self.still.stand(ON_THE_WAY).ok_or_else(|| self.still_coming())?;
        Ok(Elsewhere { away: self.pager.hand_on(), epoch: self.lenders.epoch() })
    }

    /// How many memory hosts it has: their numbers are below that.
    #[must_use]
    pub fn memory_hosts(&self) -> usize {
        self.lenders.count()
    }

    /// Calls a memory host for the guest's next host, which is its owner by now, in the epoch that it has named.
    ///
    /// # Errors
    /// [`StoreError`]; also where there is none of this number.
    pub fn reach_in_the_name_of_its_owner(&self, number: usize, epoch: u64) -> Result<MemoryHost, StoreError> {
        self.lenders.reach_for_owner(number, epoch)
    }

    fn still_coming(&self) -> MigrateError {
        let failing = (0..self.lenders.count()).find_map(|number| self.failing(number));
        let message = "the guest's pages are on their way here from a memory host that does not answer";
        let mut problem = Problem::new(Code::PeerUnreachable, Blame::Peer, message);
        problem.cause.extend(failing.as_ref().map(Problem::with_causes));
        MigrateError::MemoryHost(problem)
    }

    /// The guest belongs here and goes on here, after all: pages come and leave as before.
    pub fn go_on(&self) {
        if self.still.is_on() {
            self.pager.is_not_handed_on();
            // What the other host has asked for and not heard of yet is refused from now on.
            if let Err(error) = self.lenders.raise() {
                tracing::warn!(%error, "memory hosts are asked in the epoch that was lent to another host");
            }
        }
        let Some(room) = self.still.end() else { return };
        let here = self.here_bytes_of(room).unwrap_or(0);
        if lock(&self.room).is_some() {
            self.set_room(Some(room), here);
        }
    }

    /// Begins with a guest that comes here, of which these pages stay where they are, and others `follow` it. Its
    /// devices are not loaded yet, and it belongs to its source until [`ArrivingSplit::take_over`].
    ///
    /// # Errors
    /// A memory host does not answer, or does not have what it should; the map cannot be written.
    pub fn arriving(
        pager: Arc<Pager>,
        handed: Handed,
        elsewhere: &Elsewhere,
        follow: PageMap,
    ) -> Result<ArrivingSplit, SplitError> {
        let Handed { lenders, guest, epochs } = handed;
        let is_named = |holder: &Holder| holder.host_number().is_some_and(|number| number < lenders.len());
        if !elsewhere.away.iter().all(|(holder, _)| is_named(holder)) {
            return Err(MigrateError::Request("pages at a memory host that was not named").into());
        }
        pager.begin_elsewhere(&elsewhere.away, follow)?;
        let split = Self::new(pager, lenders, guest, Box::new(Lent(elsewhere.epoch)))?;
        split.still.begin();
        split.take_stock()?;
        Self::serve(&split)?;
        Ok(ArrivingSplit { split, epochs })
    }
}

/// A split guest that is on its way here.
pub struct ArrivingSplit {
    split: Arc<Split>,
    epochs: Box<dyn Epochs>,
}

impl ArrivingSplit {
    /// The guest belongs here from now on, on record. Nothing leaves yet ([`Split::keep_to`]).
    ///
    /// # Errors
    /// The epoch cannot be written down; memory hosts are asked in the source's meanwhile, which asks them no more.
    pub fn take_over(self) -> (Arc<Split>, Result<(), MigrateError>) {
        let Self { split, epochs } = self;
        let raised = split.lenders.raise_by(epochs);
        let members = (0..split.lenders.count()).flat_map(|number| split.lenders.members(number));
        members.for_each(|member| split.note_rests(member));
        split.still.end();
        (split, raised)
    }

    /// The guest never runs here.
    pub fn give_up(self) {
        self.split.stop();
    }
}
