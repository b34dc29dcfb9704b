//! Pages of a guest that are too many for this host go past it: its source puts them at memory hosts, in this host's
//! name, while they would follow the guest here and leave again.
//!
//! ```text
//! source         what is put, what next? ─▶            ◀─ errands: chunk, memory host, version; the epoch
//!                put, compare with its RAM ─▶ memory host
//! destination                 has the memory host asked ─▶ at the memory host, on record ─▶ taken
//! ```
//!
//! This host is the guest's owner: it chooses chunks of which nothing has come and that nobody waits for, and what
//! they are numbered. Until an errand is done nothing of its chunk leaves here, so no number is given twice. Where it
//! comes to nothing, the next request about the chunk is made in a higher epoch: a put that is late is refused then.
//! Only where each page is at one memory host alone: a mirror or parity would have to be given it as well.

use sterna_protocol::errand::{Errand, MAX_ERRANDS, Put};
use sterna_protocol::layout::{ChunkIndex, PAGE_BYTES};
use sterna_protocol::pages::PageSet;
use sterna_protocol::split::Number;

use super::errands::Errands;
use super::fetch::SOON;
use super::lender::Member;
use super::lines::Lines;
use super::{Split, SplitError, lock};
use crate::error::MigrateError;
use crate::paging::supplier::Straight;
use crate::paging::whereabouts::Holder;
use crate::store::client::MemoryHost;

impl Split {
    /// Notes what the source has put at memory hosts, and chooses what is to go there next, where anything `may`.
    ///
    /// # Errors
    /// This host's; what was not noted is the source's to send.
    pub(super) fn straight_to_hosts(&self, put: &[Put], may: bool) -> Result<Straight, MigrateError> {
        let (mut errands, mut lines) = (lock(&self.errands), Lines::new(&self.lenders));
        let mut taken = Vec::with_capacity(put.len());
        for put in put {
            let at = errands.under_way.iter().position(|errand| errand.chunk == put.chunk);
            let Some(errand) = at.map(|at| errands.under_way.swap_remove(at)) else {
                return Err(MigrateError::Request("pages at a memory host that were not to go there"));
            };
            let went = match self.is_put(&mut lines, errand, put) {
                Ok(went) => went,
                Err(SplitError::Here(error)) => return Err(error),
                Err(error) => {
                    tracing::debug!(%error, "pages follow their guest here after all");
                    None
                }
            };
            errands.failed |= u16::from(went.is_none()) << errand.host;
            taken.push(went.unwrap_or(PageSet::EMPTY));
        }
        if may {
            self.choose(&mut errands)?;
        }
        Ok(Straight { taken, epoch: self.lenders.epoch(), errands: errands.under_way.clone() })
    }

    /// What was under way does not count, wherever it is, and the source asks in this host's name no more.
    pub(super) fn nothing_is_put(&self) {
        let errands = std::mem::take(&mut *lock(&self.errands));
        if errands.looked_at > 0
            && let Err(error) = self.lenders.raise()
        {
            tracing::warn!(%error, "memory hosts are asked in an epoch that was lent to the guest's former host");
        }
        for errand in errands.under_way {
            let (mut state, member) = (self.chunk(errand.chunk), member(errand));
            (state.entrusted, state.members[member.which].unsure) = (false, true);
            self.note_rests(member);
        }
    }

    /// An errand is done: those of these pages that are at the memory host from now on. `None` where it has not what it
    /// was to have.
    fn is_put(&self, lines: &mut Lines<'_>, errand: Errand, put: &Put) -> Result<Option<PageSet>, SplitError> {
        let (chunk, pages, member) = (errand.chunk, PageSet::from_bytes(&put.pages), member(errand));
        let holder = Holder::host(member.number).ok_or(MigrateError::Bug("a memory host that is not known"))?;
        let mut state = self.chunk(chunk);
        state.entrusted = false;
        if pages.is_empty() && !put.failed {
            return Ok(Some(pages));
        }
        let there = match put.failed || self.lenders.is_silent(member) {
            true => Ok(PageSet::EMPTY),
            false => self.has_of(lines, errand),
        };
        if put.failed || !there.as_ref().is_ok_and(|there| pages.without(there).is_empty()) {
            state.members[member.which].unsure = true;
            self.note_rests(member);
            return there.map(|_| None);
        }
        let (there, known) = (there?, &mut state.members[member.which]);
        known.at.kept(Number { version: errand.version, base: None }, &there);
        let went = self.pager.went_straight(chunk, &pages, holder)?;
        known.at.goes(&went);
        self.release(lines, member, (chunk, &there.without(&went)), &mut state);
        Ok(Some(went))
    }

    /// What the memory host has of an errand's chunk in its version.
    fn has_of(&self, lines: &mut Lines<'_>, errand: Errand) -> Result<PageSet, SplitError> {
        let held = |host: &mut MemoryHost| {
            host.wait_for(SOON);
            host.held(errand.chunk)
        };
        let has = lines.ask(member(errand), held).map_err(|error| self.failed(member(errand), error))?;
        Ok(has.filter(|(version, _)| *version == errand.version).map_or(PageSet::EMPTY, |(_, pages)| pages))
    }

    /// Chooses chunks for as much as is too much for this host, and no more than may be under way.
    fn choose(&self, errands: &mut Errands) -> Result<(), MigrateError> {
        let all = || (0..self.lenders.count()).map(|number| Member { number, which: 0 });
        let takes = |member: &Member| {
            let is_there = !self.lenders.is_leaving(member.number) && !self.lenders.is_silent(*member);
            is_there && errands.failed >> member.number & 1 == 0
        };
        let hosts: Vec<usize> = all().filter(takes).map(|member| member.number).collect();
        if hosts.is_empty() || all().any(|member| self.lenders.has_other(member)) {
            return Ok(());
        }
        let room = self.room();
        let pages_of = |errand: &Errand| self.pager.to_come_in(errand.chunk).len() as u64;
        let to_come = self.pager.to_come() - errands.under_way.iter().map(pages_of).sum::<u64>();
        let here = self.here_bytes_of(room)?.saturating_add(to_come * PAGE_BYTES as u64);
        let mut too_many = here.saturating_sub(room.low()) / PAGE_BYTES as u64;
        let count = self.chunks.len() as u32;
        while too_many > 0 && errands.under_way.len() < MAX_ERRANDS && errands.looked_at < count {
            errands.looked_at += 1;
            let chunk = ChunkIndex(count - errands.looked_at);
            let number = hosts[errands.looked_at as usize % hosts.len()];
            if let Some(errand) = self.entrust(chunk, number) {
                too_many = too_many.saturating_sub(pages_of(&errand));
                errands.under_way.push(errand);
            }
        }
        Ok(())
    }

    /// Leaves a chunk to the source, where nothing of it has come, nobody waits for it and none of it is at a memory
    /// host.
    fn entrust(&self, chunk: ChunkIndex, number: usize) -> Option<Errand> {
        let mut state = self.free_chunk(chunk.index())?;
        let (to_come, arrivals) = (self.pager.to_come_in(chunk), self.pager.presence(chunk).1);
        let known = &state.members[0];
        let has_nothing = arrivals == 0 && self.pager.holder(chunk).is_none() && !known.unsure && !known.unasked;
        if to_come.is_empty() || !has_nothing || !self.pager.waited_for_in(chunk).is_empty() {
            return None;
        }
        let Number { version, base: None } = known.at.number() else { return None };
        state.entrusted = true;
        Some(Errand { chunk, host: number as u8, version })
    }
}

fn member(errand: Errand) -> Member {
    Member { number: usize::from(errand.host), which: 0 }
}
