//! Pages that stay where they are while their guest moves: they are at memory hosts, and only the map of them travels.

use std::sync::PoisonError;

use sterna_protocol::pages::PageMap;

use super::Pager;
use super::whereabouts::Holder;
use crate::error::MigrateError;

impl Pager {
    /// From now on these pages are at memory hosts, those that follow are at the source, and all others are here: the
    /// guest was split where it comes from. What rounds have brought of both counts no more. What is at memory hosts is
    /// not compared. The devices are not loaded yet.
    ///
    /// # Errors
    /// As [`begin`](Self::begin).
    pub(crate) fn begin_elsewhere(&self, away: &[(Holder, PageMap)], follow: PageMap) -> Result<(), MigrateError> {
        let _settling = self.settling.lock().unwrap_or_else(PoisonError::into_inner);
        let mut all = follow.clone();
        away.iter().for_each(|(_, pages)| all.add(pages));
        self.hold_back(&all)?;
        self.forget_given_back();
        let mut state = self.lock();
        let begun = state.whereabouts.begin_elsewhere(away, follow, self.ram.layout());
        begun.map_err(MigrateError::host("writing down which pages are missing"))?;
        state.is_split = true;
        state.begin();
        if let Some(shown) = &mut state.shown {
            shown.nothing_is_due();
            away.iter().for_each(|(_, pages)| shown.leave_out(pages));
        }
        drop(state);
        self.take_out_what_is_away()
    }

    /// All pages that are at memory hosts, by who holds them; from now on those that come back are armed, where writes
    /// are tracked. Nobody brings any at this moment.
    pub(crate) fn hand_on(&self) -> Vec<(Holder, PageMap)> {
        self.userfault.arm_what_returns(true);
        self.lock().whereabouts.by_holder(self.ram.layout())
    }

    /// The guest stays: pages that come back count as written again, where writes are tracked.
    pub(crate) fn is_not_handed_on(&self) {
        self.userfault.arm_what_returns(false);
    }
}
