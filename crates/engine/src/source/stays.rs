//! Pages of a split guest that do not travel, because they are at a memory host: where they are is told in the pause.
//!
//! # Races
//! * **A page leaves, or comes, while its chunk's turn comes**: nothing of the chunk does for as long as it is read. So
//!   no hole is read in the place of a page that is away, which would take memory for it.
//! * **The guest writes a page that was found to be as its copy**: its writes are watched since before it was read, so
//!   it is collected, and is looked at once more.
//! * **A copy is given up**: in the end only those count that are known to be there still; the others go in the pause.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sterna_protocol::layout::{ChunkIndex, Layout};
use sterna_protocol::pages::{PageMap, PageSet};

use crate::error::MigrateError;
use crate::split::Split;
use crate::split::holding::Holding;
use crate::split::onward::Elsewhere;

/// What stays of a guest.
pub struct Stays {
    split: Arc<Split>,
    /// Pages that are here and were as their copies when they were last looked at.
    copies: Mutex<PageMap>,
    /// All that stays, once the destination was told.
    told: Option<PageMap>,
}

/// What of a chunk stays, and what is to be done about the rest.
pub enum Turn<'a> {
    /// Pages of the chunk are on their way: its turn comes later.
    Later,
    /// These pages stay; nothing goes or comes until the rest was read.
    Now(PageSet, Holding<'a>),
}

impl Stays {
    /// Of this guest, with this layout.
    #[must_use]
    pub fn of(split: &Arc<Split>, layout: &Layout) -> Self {
        Self { split: Arc::clone(split), copies: Mutex::new(PageMap::empty(layout)), told: None }
    }

    /// The turn of a chunk's pages, while the guest runs.
    ///
    /// # Errors
    /// The guest's RAM cannot be read.
    pub fn turn(&self, chunk: ChunkIndex, pages: &PageSet) -> Result<Turn<'_>, MigrateError> {
        let Some(holding) = self.split.hold(chunk, false) else { return Ok(Turn::Later) };
        let away = holding.away();
        let unchanged = holding.unchanged(&pages.without(&away))?;
        let mut copies = self.copies();
        let known = copies.chunk_mut(chunk);
        *known = known.without(pages).or(&unchanged);
        Ok(Turn::Now(away.or(&unchanged), holding))
    }

    /// These pages are outstanding because they were `written`, or have come: those that stay are outstanding no more.
    ///
    /// # Errors
    /// The guest's RAM cannot be read.
    pub fn leave_out(&self, written: &PageMap, outstanding: &mut PageMap) -> Result<(), MigrateError> {
        for (chunk, pages) in written.iter().filter(|(_, pages)| !pages.is_empty()) {
            if let Turn::Now(stays, _) = self.turn(chunk, pages)? {
                let due = outstanding.chunk_mut(chunk);
                *due = due.without(&stays.and(pages));
            }
        }
        Ok(())
    }

    /// Adds the copies to what is told of the guest, which has stopped: it is collected what it has written. Pages of
    /// which there are copies are `outstanding` no more, and those are whose copies were given up. With `look` what is
    /// outstanding is compared with its copies; otherwise it goes, because to look takes longer than the guest is to
    /// stand still.
    ///
    /// # Errors
    /// The guest's RAM cannot be read.
    pub fn end(
        &mut self,
        elsewhere: &mut Elsewhere,
        outstanding: &mut PageMap,
        layout: &Layout,
        look: bool,
    ) -> Result<(), MigrateError> {
        for chunk in layout.iter() {
            let (due, known) = (*outstanding.chunk(chunk), *self.copies().chunk(chunk));
            if due.is_empty() && known.is_empty() {
                continue;
            }
            let Some(holding) = self.split.hold(chunk, true) else { continue };
            let told = elsewhere.away.iter().fold(PageSet::EMPTY, |pages, (_, map)| pages.or(map.chunk(chunk)));
            let unchanged = if look { holding.unchanged(&due.without(&told))? } else { PageSet::EMPTY };
            let known = known.without(&due).without(&told);
            let (there, copied) = holding.copies().unzip();
            let copied = copied.unwrap_or(PageSet::EMPTY);
            if let Some(holder) = there {
                elsewhere.add(holder, chunk, &known.and(&copied).or(&unchanged), layout);
            }
            *outstanding.chunk_mut(chunk) = due.without(&told).without(&unchanged).or(&known.without(&copied));
        }
        let told = self.told.insert(PageMap::empty(layout));
        elsewhere.away.iter().for_each(|(_, pages)| told.add(pages));
        Ok(())
    }

    /// The pages that stay, as they were told to the destination when the guest had stopped.
    #[must_use]
    pub fn told(&self) -> Option<&PageMap> {
        self.told.as_ref()
    }

    fn copies(&self) -> MutexGuard<'_, PageMap> {
        self.copies.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
