//! The RAM that pages are put into: that of a guest that does not run yet, or of one that does.

use super::arrival::{Arrival, Pooled};
use crate::error::MigrateError;
use crate::memory::Memory;
use crate::paging::Pager;
use crate::paging::supplier::Whose;

/// The RAM that pages are put into.
pub(super) enum Target<'a> {
    /// Into the RAM of a guest that does not run yet, and its pager, where it has one.
    Still(&'a dyn Memory, Option<&'a Pager>),
    /// Into the RAM of a guest that runs, by its pager.
    Running(&'a Pager),
}

impl<'a> Target<'a> {
    /// The machine's RAM as it is now: with a pager that has begun, the guest runs.
    pub(super) fn of(ram: &'a dyn Memory, pager: Option<&'a Pager>) -> Self {
        pager.filter(|pager| pager.begun()).map_or(Self::Still(ram, pager), Self::Running)
    }

    /// Puts pages into their places.
    ///
    /// # Errors
    /// What the kernel refused, or the VMM did not do.
    pub(super) fn put(&self, arrival: &Arrival) -> Result<(), MigrateError> {
        match self {
            Self::Running(pager) => {
                pager.wait_for_room(arrival.chunk, &arrival.pages());
                pager.place(Whose::Source, arrival)
            }
            Self::Still(ram, pager) => {
                let Arrival { chunk, bodies, zero, pooled, .. } = arrival;
                if !zero.is_empty() {
                    ram.clear(*chunk, zero).map_err(MigrateError::host("giving back pages of zeros"))?;
                }
                if let Some(Pooled { runs, pool }) = pooled {
                    ram.share(*chunk, runs, pool).map_err(MigrateError::host("mapping shared pages"))?;
                }
                bodies.iter().try_for_each(|(pages, bodies)| {
                    ram.write(*chunk, pages, bodies).map_err(MigrateError::host("writing the guest's RAM"))
                })?;
                if let Some(pager) = pager {
                    pager.placed(*chunk, &arrival.pages());
                }
                Ok(())
            }
        }
    }
}
