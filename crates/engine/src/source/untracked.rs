//! Writes past the VMM's page tables, where tracking does not see them: who does them, and which pages they may reach.
//!
//! Where the VMM tells of its reads, those that were under way when their pages were watched anew may reach these pages
//! later; a read that begins later is a write that is seen. Where somebody writes of whom nothing is told, it may be
//! any page.

use sterna_protocol::layout::Layout;
use sterna_protocol::pages::PageMap;

use super::track::Tracker;
use crate::error::MigrateError;
use crate::memory::Memory;
use crate::vmm::{self, Untracked, VmmError};

/// What is known of writes past the page tables.
pub struct UntrackedWrites {
    who: Untracked,
    /// Pages that something was being read into when they were last watched anew.
    reading: PageMap,
    /// Whether all such reads were told of so far.
    told: bool,
}

impl UntrackedWrites {
    /// These are known to write so.
    #[must_use]
    pub fn by(who: Untracked, layout: &Layout) -> Self {
        Self { who, reading: PageMap::empty(layout), told: true }
    }

    /// Asks whether somebody writes RAM past the page tables, as long as nobody is known to whose writes may be
    /// anywhere. Ask before each round, because a medium can be changed, or the guest can start guests of its own,
    /// while pages go; and between a collection and the reading of the pages that it yielded.
    ///
    /// At that moment every writer that matters is there, and the pause need not wait for an answer. A write is missed
    /// where its page was mapped or pinned before a collection (which is a write that is seen) and the write lands
    /// after the page was read in the following round. So its writer is there during the time in between. A writer that
    /// comes after the last round's look pins pages that the last collection yields, and its writes land before they
    /// are read: with the guest stopped and its I/O drained.
    ///
    /// # Errors
    /// As [`writes_untracked`](vmm::Source::writes_untracked).
    pub fn ask(&mut self, vmm: &mut dyn vmm::Source) -> Result<(), MigrateError> {
        if self.who < Untracked::Others {
            let told = match vmm.writes_untracked() {
                // For example its main loop waits for a disk. That is no reason to end: the answer counts as "may be".
                Err(VmmError::Silent { .. }) => Untracked::Others,
                told => told?,
            };
            self.who = self.who.max(told);
        }
        Ok(())
    }

    /// The pages that reads may have reached unseen which were under way at the last call. Call it whenever pages were
    /// watched anew, and before the first is read. What is still under way is among the next call's, too.
    ///
    /// # Errors
    /// As [`Tracker::reads`].
    pub fn landed(&mut self, ram: &dyn Memory, tracker: &mut dyn Tracker) -> Result<PageMap, MigrateError> {
        let mut now = PageMap::empty(ram.layout());
        self.told &= tracker.reads(ram, &mut now)?;
        Ok(std::mem::replace(&mut self.reading, now))
    }

    /// Whether [`landed`](Self::landed) has told of every page that was written so. The guest stands still, its I/O is
    /// drained, and `landed` was called since.
    #[must_use]
    pub fn all_told(&self) -> bool {
        match self.who {
            Untracked::Nobody => true,
            // What is under way although the guest stands still is nothing that anybody has drained.
            Untracked::Reads => self.told && self.reading.is_empty(),
            Untracked::Others => false,
        }
    }
}
