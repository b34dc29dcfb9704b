//! Pages that come back: the one that somebody waits for, then the rest of its chunk.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use sterna_protocol::layout::{ChunkIndex, PageIndex};
use sterna_protocol::pages::PageSet;

use super::lender::Member;
use super::lines::Lines;
use super::outage::Outage;
use super::{Chunk, Split, SplitError, lock};
use crate::destination::arrival::Arrival;
use crate::error::MigrateError;
use crate::paging::supplier::{Supplier, Whose};
use crate::store::client::{ANSWER_TIMEOUT, Pages, StoreError};

/// How many threads bring pages from one memory host.
const FETCHERS: usize = 2;
/// How often it is looked whether the last pages have come.
const LOOK: Duration = Duration::from_millis(5);
/// How long a memory host may say nothing where another one can be asked. One that has just gone down costs this once.
pub(super) const SOON: Duration = Duration::from_millis(300);
/// How many pages come together that nobody waits for: a quarter of a chunk, 2 ms on a link of 1 Gbit/s. So long those
/// may have to wait that are touched next.
pub(super) const TOGETHER: usize = 64;

impl Split {
    /// Starts the threads that bring pages, and asks for those that somebody waits for already.
    pub(super) fn serve(split: &Arc<Self>) -> Result<(), SplitError> {
        let started = (0..split.lenders.count()).try_for_each(|number| split.serve_from(number));
        if let Err(error) = started.and_then(|()| split.look_for_silent_ones()) {
            split.stop();
            return Err(error);
        }
        let supplier: Arc<dyn Supplier> = Arc::<Self>::clone(split);
        split.pager.attach(Whose::MemoryHosts, &supplier);
        Ok(())
    }

    /// Starts the threads that bring pages from one memory host, or from another one with its number.
    pub(super) fn serve_from(self: &Arc<Self>, number: usize) -> Result<(), SplitError> {
        (0..FETCHERS).try_for_each(|_| self.spawn("fetch", move |split| split.fetch(number)))
    }

    /// Brings all of the guest together: from now on nothing leaves, and everything is here when this returns. The
    /// guest runs meanwhile. `check` is asked again and again whether to go on.
    ///
    /// # Errors
    /// [`SplitError`], or what `check` said; as [`bring_back`](Self::bring_back). Nothing leaves until a room is set
    /// again ([`keep_to`](Self::keep_to)).
    pub fn merge(&self, check: &dyn Fn() -> Result<(), MigrateError>) -> Result<(), SplitError> {
        self.keep_all();
        self.bring(check)?;
        // What follows it from its source comes by itself.
        while self.pager.missing() > 0 {
            check()?;
            std::thread::sleep(LOOK);
        }
        Ok(())
    }

    /// Brings everything back that is away. The guest runs meanwhile.
    ///
    /// # Errors
    /// [`SplitError`]; what has come is here, and the rest can be brought by another call.
    pub fn bring_back(&self) -> Result<(), SplitError> {
        self.bring(&|| Ok(()))
    }

    fn bring(&self, check: &dyn Fn() -> Result<(), MigrateError>) -> Result<(), SplitError> {
        let mut lines = Lines::new(&self.lenders);
        for chunk in self.pager.ram().layout().iter() {
            check()?;
            let mut state = self.chunk(chunk);
            let away = self.pager.away_in(chunk);
            self.bring_chunk(&mut lines, chunk, &mut state, &mut Wanted::all(away))?;
        }
        Ok(())
    }

    fn fetch(&self, number: usize) {
        let mut lines = Lines::new(&self.lenders);
        let mut outage = Outage::default();
        // Whoever waits for a page is not to wait for a connection, too; least of all to one that has gone down since.
        for member in self.lenders.members(number).into_iter().filter(|member| !self.lenders.is_silent(*member)) {
            lines.connect(member);
        }
        while let Some(page) = self.next_wanted(number) {
            let began = Instant::now();
            match self.bring_around(&mut lines, page) {
                Ok(()) => {
                    // Another thread may have noted why, and not be asked again.
                    outage.over();
                    *lock(&self.failing[number]) = None;
                }
                Err(error) => {
                    if !outage.is_on() {
                        tracing::warn!(error = &error as &dyn std::error::Error, "pages wait for a memory host");
                    }
                    *lock(&self.failing[number]) = Some(error.problem());
                    // Others that wait for it are asked for first, and most likely wait as well.
                    lock(&self.wanted[number]).push_back(page);
                    self.rest(outage.failed(began, Instant::now(), false));
                }
            }
        }
    }

    /// Waits for a page to be wanted; `None` at the end.
    fn next_wanted(&self, number: usize) -> Option<PageIndex> {
        let idle = |wanted: &mut VecDeque<PageIndex>| wanted.is_empty() && !self.has_ended();
        let waited = self.called[number].wait_while(lock(&self.wanted[number]), idle);
        let mut wanted = waited.unwrap_or_else(PoisonError::into_inner);
        if self.has_ended() { None } else { wanted.pop_front() }
    }

    /// Brings a page, and after it those of its chunk that are wanted next, as far as there is room.
    fn bring_around(&self, lines: &mut Lines<'_>, page: PageIndex) -> Result<(), SplitError> {
        if self.pager.away_in(page.chunk).contains(page.page) {
            self.wait_for_room();
        }
        let _coming = self.still.coming();
        let mut state = self.chunk(page.chunk);
        let away = self.pager.away_in(page.chunk);
        if !away.contains(page.page) {
            // It came with another one.
            return Ok(());
        }
        self.clock.came(page.chunk);
        let mut wanted = Wanted::one(page.page);
        if self.still.is_on() {
            return self.bring_chunk(
                lines,
                page.chunk,
                &mut state,
                &mut Wanted::all([page.page].into_iter().collect()),
            );
        }
        wanted.ahead = lock(&self.ahead).wanted(page, &away);
        self.bring_chunk(lines, page.chunk, &mut state, &mut wanted)
    }

    /// Brings pages of a chunk that are away. Nothing else is done with the chunk meanwhile; pages that somebody waits
    /// for go before the others.
    pub(super) fn bring_chunk(
        &self,
        lines: &mut Lines<'_>,
        chunk: ChunkIndex,
        state: &mut Chunk,
        wanted: &mut Wanted,
    ) -> Result<(), SplitError> {
        let Some(number) = self.host_of(chunk) else { return Ok(()) };
        let mut why = None;
        // Where one fails, its mirror goes on.
        let members = self.members(chunk, number);
        for member in &members {
            let may_do = |other: &Member| !self.lenders.is_silent(*other) && !self.is_behind(chunk, *other);
            let others = members.iter().any(|other| other != member && may_do(other));
            let patience = if others { SOON } else { ANSWER_TIMEOUT };
            match self.bring_from(lines, (*member, number, patience), (chunk, wanted), state) {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(SplitError::Here(error)) => return Err(error.into()),
                Err(error) => why = Some(error),
            }
        }
        let pages = self.pager.away_in(chunk).len() as u64;
        let lost = || SplitError::Lost { peer: self.lenders.peer(Member { number, which: 0 }), pages };
        Err(why.unwrap_or_else(lost))
    }

    /// Gets pages of a chunk from one that has them, or by the parity.
    pub(super) fn get(
        &self,
        lines: &mut Lines<'_>,
        member: Member,
        (chunk, pages): (ChunkIndex, &PageSet),
        state: &mut Chunk,
        patience: Duration,
    ) -> Result<Pages, SplitError> {
        if self.is_parity(member) {
            return self.get_by_parity(lines, member, (chunk, pages), patience);
        }
        let version = state.members[member.which].at.held();
        let got = lines.ask(member, |host| host.get_within(patience, chunk, version, pages));
        // A memory host that answers and does not have them is asked what it has.
        state.members[member.which].unsure |= matches!(&got, Err(StoreError::Refused(_)));
        got.map_err(|error| self.failed(member, error))
    }

    /// From one of the memory hosts of a number, which is given so much time to answer; whether it has them.
    fn bring_from(
        &self,
        lines: &mut Lines<'_>,
        (member, number, patience): (Member, usize, Duration),
        (chunk, wanted): (ChunkIndex, &mut Wanted),
        state: &mut Chunk,
    ) -> Result<bool, SplitError> {
        self.make_sure(lines, member, chunk, state)?;
        if self.is_behind(chunk, member) {
            return Ok(false);
        }
        let count = self.members(chunk, number).len();
        while !wanted.now.is_empty() {
            let got = self.get(lines, member, (chunk, &wanted.now), state, patience)?;
            *lock(&self.heard) = Instant::now();
            let bodies = [(got.full, got.bodies.as_slice())];
            let arrival = Arrival { chunk, bodies: &bodies, zero: got.zero, pooled: None, suspect: PageSet::EMPTY };
            self.pager.place(Whose::MemoryHosts, &arrival)?;
            state.came((number, count), (&got.full, &got.zero), &got.digests);
            self.back.fetch_add(wanted.now.len() as u64, Ordering::Relaxed);
            let left = self.pager.away_in(chunk);
            let waited = self.pager.waited_for_in(chunk).and(&left);
            for page in waited.iter().filter(|_| wanted.with_room) {
                let ahead = lock(&self.ahead).wanted(PageIndex { chunk, page }, &left);
                wanted.ahead = wanted.ahead.or(&ahead);
            }
            wanted.next(&left, &waited, || self.has_room(TOGETHER));
        }
        self.has_come(lines, number, chunk, state);
        Ok(true)
    }
}

/// Pages of a chunk that are to come.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wanted {
    /// Those that are asked for now.
    now: PageSet,
    /// Those that come after them, although nobody waits for them.
    ahead: PageSet,
    /// These come only where there is room.
    with_room: bool,
}

impl Wanted {
    /// All of these.
    pub fn all(pages: PageSet) -> Self {
        Self { now: pages, ahead: pages, with_room: false }
    }

    /// One that somebody waits for.
    fn one(page: u8) -> Self {
        Self { now: [page].into_iter().collect(), ahead: PageSet::EMPTY, with_room: true }
    }

    /// Goes on to what comes next, where these are `left` and those `waited` for.
    fn next(&mut self, left: &PageSet, waited: &PageSet, has_room: impl FnOnce() -> bool) {
        let ahead = self.ahead.and(left);
        self.now = match waited.is_empty() {
            false => *waited,
            true if ahead.is_empty() || self.with_room && !has_room() => PageSet::EMPTY,
            true => behind(&ahead, &self.now),
        };
    }
}

/// Some of the pages that are left: those behind the last of `before`, or else the first.
fn behind(left: &PageSet, before: &PageSet) -> PageSet {
    let last = before.iter().last().unwrap_or_default();
    let behind: PageSet = left.iter().filter(|page| *page > last).take(TOGETHER).collect();
    if behind.is_empty() { some_of(left, TOGETHER) } else { behind }
}

/// The first of these pages.
pub(super) fn some_of(pages: &PageSet, count: usize) -> PageSet {
    pages.iter().take(count).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_waited_for_comes_first_and_what_nobody_waits_for_where_there_is_room() {
        let of = |pages: &[u8]| pages.iter().copied().collect::<PageSet>();
        let mut wanted = Wanted { ahead: of(&[11, 12]), ..Wanted::one(10) };
        wanted.next(&of(&[11, 12, 13]), &of(&[13]), || false);
        assert_eq!(wanted.now, of(&[13]));
        wanted.next(&of(&[12, 14]), &PageSet::EMPTY, || true);
        assert_eq!(wanted.now, of(&[12]));
        wanted.next(&of(&[12, 14]), &PageSet::EMPTY, || false);
        assert!(wanted.now.is_empty());
        let mut all = Wanted::all(of(&[1, 2, 3]));
        all.next(&of(&[3]), &PageSet::EMPTY, || false);
        assert_eq!(all.now, of(&[3]));
    }

    #[test]
    fn the_pages_behind_one_come_next_and_then_those_before_it() {
        let left = PageSet::first(200);
        let of = |pages: std::ops::Range<u8>| pages.collect::<PageSet>();
        assert_eq!(behind(&left, &of(10..11)), of(11..11 + TOGETHER as u8));
        assert_eq!(behind(&left, &of(190..191)), of(191..200));
        assert_eq!(behind(&left, &of(199..200)), of(0..TOGETHER as u8));
        assert!(behind(&PageSet::EMPTY, &of(1..2)).is_empty());
    }
}
