//! Memory hosts that are exchanged under a running guest.
//!
//! ```text
//! comes    borrow ─▶ Split::add: it has a number ─▶ it is given what leaves
//! leaves   Split::leave_out: it is given nothing more ─▶ Split::empty: chunk by chunk comes here, and leaves for the
//!          others as what is too much does ─▶ it has nothing of the guest ─▶ Split::see_off: its number is free, and
//!          it is given back what it lent
//! ```
//!
//! One of two that have the same pages may be gone for good. Another takes its place ([`Split::take_place`]): it is as
//! if that one had come back and had lost all that it had, which its mirror has still.
//!
//! What comes waits for room, so this host has no more of the guest meanwhile than it may. A page is valid at one place
//! at each moment, as ever: no step of this is a new one for a page.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_api::Problem;
use sterna_protocol::layout::ChunkIndex;

use super::fetch::Wanted;
use super::lender::{Lender, Member};
use super::lines::Lines;
use super::out::Copied;
use super::pace::STEP;
use super::{Chunk, Split, SplitError, lock};
use crate::error::MigrateError;
use crate::paging::whereabouts::Holder;

/// For how long what comes waits for room, where pages leave meanwhile.
const LONG: Duration = Duration::from_secs(1);
/// The same for what comes by itself, where nothing leaves.
const NOT_LONGER: Duration = Duration::from_secs(10);

impl Split {
    /// Pages may leave for this memory host, too, from now on. Its number, by which the map of missing pages knows it,
    /// is the next one, or that of a host which has left.
    ///
    /// # Errors
    /// More memory hosts than a guest may have, no thread is left, or the epoch cannot be written down.
    pub fn add(self: &Arc<Self>, number: usize, lender: Lender) -> Result<(), SplitError> {
        let is_free = number >= self.lenders.count() || self.lenders.is_leaving(number) && !self.has_part(number);
        if !is_free || number >= Holder::MAX_HOSTS {
            return Err(MigrateError::Bug("a memory host with a number that is not free").into());
        }
        if number == self.lenders.count() {
            self.serve_from(number)?;
        }
        Ok(self.lenders.put(number, lender)?)
    }

    /// From now on pages leave for the memory hosts that are not `leaving`, and for no other. Those of the others come
    /// when [`empty`](Self::empty) is called.
    pub fn leave_for(&self, leaving: impl Fn(usize) -> bool) {
        let (go, stay): (Vec<usize>, Vec<usize>) = (0..self.lenders.count()).partition(|number| leaving(*number));
        // At no moment does a chunk leave for one and is taken for another's: while nobody is given anything, what is
        // known of the copies of chunks that are all here is forgotten.
        let changes = go.iter().any(|number| !self.lenders.is_leaving(*number));
        go.into_iter().for_each(|number| self.leave_out(number, true));
        if changes && self.lenders.has_parity() {
            self.know_nothing_of_what_is_here();
            // They may have had pages before, and have rests of these in their parity.
            let members = stay.iter().flat_map(|number| self.lenders.members(*number));
            members.for_each(|member| self.lenders.note_return(member));
        }
        stay.into_iter().for_each(|number| self.leave_out(number, false));
    }

    /// Whoever is given a chunk next is asked before what it has of it.
    fn know_nothing_of_what_is_here(&self) {
        for chunk in self.pager.ram().layout().iter() {
            let mut state = self.chunk(chunk);
            if self.host_of(chunk).is_none() {
                state.forget_copies();
                state.members.iter_mut().for_each(|known| known.unasked = true);
            }
        }
    }

    /// Pages of a chunk have come from memory hosts with this number. Where these are leaving and it has all come, what
    /// they have of it is of no use any more. What their parity has and they have not goes before: others of the stripe
    /// could not be done without it.
    pub(super) fn has_come(&self, lines: &mut Lines<'_>, number: usize, chunk: ChunkIndex, state: &mut Chunk) {
        if !self.lenders.is_leaving(number) || self.host_of(chunk).is_some() {
            return;
        }
        if let Some(stripe) = self.lenders.parity_at(number) {
            let two = (Member { number: stripe.host_of(chunk), which: 0 }, stripe.parity_of(chunk));
            let orphans = state.members[1].at.copied().without(&state.members[0].at.copied());
            if let Err(error) = self.fold_out(lines, two, (chunk, &orphans), state, &Copied::NOTHING) {
                tracing::debug!(%error, "parity of memory hosts that are leaving stands for pages that they have not");
            }
        }
        state.forget_copies();
        // Those that pages leave for may have had some of it once.
        state.members.iter_mut().for_each(|known| known.unasked = true);
    }

    /// A memory host is given nothing more from now on (`leaving`), or is again.
    pub fn leave_out(&self, number: usize, leaving: bool) {
        self.lenders.set_leaving(number, leaving);
        // Whoever sends has chosen for whom under this lock.
        let _on_the_way = lock(&self.on_the_way);
        // There are others to be asked now.
        *lock(&self.stuck) = None;
    }

    /// Memory hosts with this number have nothing of the guest, and are about to be given back what they lent: nobody
    /// borrows it anew when this returns, nor later.
    pub fn see_off(&self, number: usize) {
        self.lenders.see_off(number);
    }

    /// The same of all.
    pub fn see_off_all(&self) {
        (0..self.lenders.count()).for_each(|number| self.see_off(number));
    }

    /// Has another memory host take the place of one of two that have the same pages, which does not answer: the one at
    /// the place `which`, 0 or 1. Nothing leaves for the two until `on_record` has written that down. The other one,
    /// `lender.members()[which]`, has granted what it was asked for, and has nothing of the guest; it is given all that
    /// its mirror has in the background.
    ///
    /// # Errors
    /// A [`Problem`]: it alone has pages of the guest; what `on_record` said. All is as it was then. The epoch cannot
    /// be written down.
    pub fn take_place(
        &self,
        (number, which): (usize, usize),
        lender: Lender,
        on_record: impl FnOnce() -> Result<(), Problem>,
    ) -> Result<(), Problem> {
        let leaving = self.lenders.is_leaving(number);
        // Whoever has pages has parity, too.
        let places = if lender.parity.is_some() { vec![0, 1] } else { vec![which] };
        let members: Vec<_> = places.into_iter().map(|which| Member { number, which }).collect();
        // What left for one alone while this is asked would be at one that goes.
        self.leave_out(number, true);
        let taken = members.iter().try_for_each(|member| self.check_not_alone(*member));
        let taken = taken.map_err(|error| error.problem()).and_then(|()| on_record());
        let taken = taken.and_then(|()| {
            self.lenders.take_place(&members, number, lender).map_err(|error| error.problem())?;
            members.iter().for_each(|member| self.ask_anew(*member));
            Ok(())
        });
        self.leave_out(number, leaving);
        taken
    }

    /// Has it asked what it has, before anything of it is relied on.
    fn ask_anew(&self, member: Member) {
        for chunk in self.pager.ram().layout().iter() {
            let mut state = self.chunk(chunk);
            let concerns = self.concerns(chunk, member) || self.has_copies(chunk, &state, member);
            state.members[member.which].unasked |= concerns;
        }
    }

    /// Whether no page is at this one of two alone.
    fn check_not_alone(&self, member: Member) -> Result<(), SplitError> {
        let alone = |chunk: &ChunkIndex| {
            let holder = self.pager.holder(*chunk).filter(|_| self.concerns(*chunk, member));
            holder.and_then(Holder::alone) == Some(member.which)
        };
        let layout = self.pager.ram().layout();
        let pages: u64 = layout.iter().filter(alone).map(|chunk| self.pager.away_in(chunk).len() as u64).sum();
        match pages {
            0 => Ok(()),
            _ => Err(SplitError::Alone { peer: self.lenders.peer(member), pages }),
        }
    }

    /// Whether a memory host has pages that are nowhere else, or the parity of such pages.
    pub(super) fn has_part(&self, number: usize) -> bool {
        let Some(parity) = self.lenders.parity_at(number) else { return self.has_pages(number) };
        // The number of one that has gone may be another's.
        let is_of_it = |number: &usize| self.lenders.parity_at(*number).is_some_and(|other| other.is(&parity));
        parity.numbers().filter(is_of_it).any(|number| self.has_pages(number))
    }

    /// Whether a memory host has pages that are nowhere else.
    #[must_use]
    pub fn has_pages(&self, number: usize) -> bool {
        self.pager.ram().layout().iter().any(|chunk| self.host_of(chunk) == Some(number))
    }

    /// Has all pages that a memory host has come here, as there is room, after it was [left out](Self::leave_out). The
    /// guest runs meanwhile. `check` is asked again and again whether to go on.
    ///
    /// # Errors
    /// [`SplitError`], or what `check` said. What has come is here or at the others, and another call goes on.
    pub fn empty(&self, number: usize, check: &dyn Fn() -> Result<(), MigrateError>) -> Result<(), SplitError> {
        let mut lines = Lines::new(&self.lenders);
        for chunk in self.pager.ram().layout().iter() {
            check()?;
            if self.host_of(chunk) == Some(number) {
                self.wait_for_room_for_a_chunk(check)?;
            }
            let mut state = self.chunk(chunk);
            if self.host_of(chunk) == Some(number) {
                let away = self.pager.away_in(chunk);
                self.bring_chunk(&mut lines, chunk, &mut state, &mut Wanted::all(away))?;
            }
            if state.copies_at() == Some(number) {
                state.forget_copies();
            }
        }
        Ok(())
    }

    /// Waits until so little is here that some may come: a chunk goes beyond that by less than the room has to spare.
    /// A guest that takes memory faster than it leaves would have this wait for ever; then a chunk comes every second.
    fn wait_for_room_for_a_chunk(&self, check: &dyn Fn() -> Result<(), MigrateError>) -> Result<(), SplitError> {
        let since = Instant::now();
        while self.is_to_wait(since)? {
            check()?;
            std::thread::sleep(STEP);
        }
        Ok(())
    }

    /// The same for pages that come from the guest's source by themselves. Not without end: who brings them may have
    /// gone meanwhile.
    pub(super) fn make_way_for_others(&self) {
        let since = Instant::now();
        while since.elapsed() < NOT_LONGER && self.is_to_wait(since).unwrap_or(false) {
            std::thread::sleep(STEP);
        }
    }

    /// Whether what has waited for room since then is to wait on: a while where pages leave, and as long as none does.
    fn is_to_wait(&self, since: Instant) -> Result<bool, MigrateError> {
        let patient = || since.elapsed() < LONG || lock(&self.stuck).is_some();
        Ok(self.has_too_much()? && patient() && !self.has_ended())
    }

    /// Whether pages must leave.
    fn has_too_much(&self) -> Result<bool, MigrateError> {
        let here = self.here_bytes()?;
        Ok(lock(&self.room).is_some_and(|room| here > room.high()))
    }
}
