//! Pages that arrive after the guest's start.

use std::time::Instant;

use sterna_protocol::layout::PAGE_BYTES;
use sterna_protocol::pages::PageSet;

use super::Pager;
use super::claim::Claim;
use super::supplier::Whose;
use crate::destination::arrival::{Arrival, Pooled};
use crate::error::MigrateError;
use crate::memory::PoolRun;

impl Pager {
    /// Puts bodies and zeros into their places, and lets the guest see them. Pages that have arrived before are left as
    /// the guest has them now; discarded pages become holes. What comes from one side is no answer to what is at the
    /// other: a page that came from the source, was written and has left since is not what its source had.
    ///
    /// # Errors
    /// No memory, or the VMM has ended. What was not placed is still missing.
    pub fn place(&self, whose: Whose, arrival: &Arrival) -> Result<(), MigrateError> {
        let Arrival { chunk, bodies, zero, pooled, .. } = *arrival;
        let claim = Claim::of_missing(self, whose, chunk, &arrival.pages());
        // The pages are missing, so the guest has not written them since the discard.
        let unwanted = self.unwanted(chunk);
        let zero = zero.or(&unwanted).and(&claim.pages);
        if !zero.is_empty() {
            // An earlier round may have left a body there. Nobody sees the hole before the page counts as arrived.
            self.ram.install_zeros(chunk, &zero).map_err(MigrateError::host("giving back pages of zeros"))?;
        }
        let mut shown = PageSet::EMPTY;
        for (set, bodies) in bodies {
            let own = set.and(&claim.pages).without(&unwanted);
            let write = |pages: &PageSet, bodies: &[u8]| {
                self.note_bodies(chunk, pages, bodies);
                self.ram.install(chunk, pages, bodies).map_err(MigrateError::host("writing the guest's RAM"))
            };
            if own == *set {
                write(set, bodies)?;
            } else {
                for (page, body) in
                    set.iter().zip(bodies.chunks_exact(PAGE_BYTES)).filter(|(page, _)| own.contains(*page))
                {
                    let mut only = PageSet::EMPTY;
                    only.insert(page);
                    write(&only, body)?;
                }
            }
            shown = shown.or(&own);
        }
        if let Some(Pooled { runs, pool }) = pooled {
            let wanted = claim.pages.without(&unwanted);
            let runs: Vec<_> = runs.iter().flat_map(|run| run.within(&wanted)).collect();
            self.note_pooled(chunk, &runs, pool)?;
            let installed = self.ram.install_shared(chunk, &runs, pool);
            installed.map_err(MigrateError::host("mapping shared pages"))?;
            shown = shown.or(&PoolRun::pages(&runs));
        }
        let waited = claim.arrived()?;
        self.show(chunk, &shown)?;
        for (page, _) in waited.iter().filter(|(page, _)| zero.contains(page.page)) {
            self.show_zero(*page)?;
        }
        if !waited.is_empty() {
            let (now, mut account) = (Instant::now(), self.account());
            for waiter in waited.iter().flat_map(|(_, waiters)| waiters) {
                account.came(waiter.thread, now.saturating_duration_since(waiter.since));
            }
        }
        Ok(())
    }
}
