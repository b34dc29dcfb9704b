//! Pages that leave while the guest runs: a memory host has a copy, and holds the only one from then on.
//!
//! The guest wrote on while its pages were copied. So they are fenced in, compared with what the holder has, noted as
//! away, taken out of the RAM file, and let go; an access faults then, and the page is asked for. Killed between any
//! two of these steps, a daemon leaves each page valid where the map says that it is (`sterna_protocol::split`).
//!
//! # Races
//! * **The guest writes a page after it was copied**: before it is fenced in its digest differs, and it stays; after
//!   that the write waits, and finds the page away or here.
//! * **Somebody waits for a page that is fenced in**: it is wanted, so it stays.
//! * **A fault was read before, and is settled now**: a page that is not away is mapped under the lock `settling`,
//!   which is held here while pages become away.
//! * **A page came back a moment ago, and is not mapped yet**: its claim is there until it is, and it stays.
//! * **A page is asked for again before it is taken out of the file**: it is claimed until then, so no body is put in
//!   its place that would be taken out, too.
//! * **The guest gave the page back, and took it again**: that was logged before the guest could write it, so it is
//!   forgotten here: what comes back is what the guest wrote since.
//! * **It gives the page back while it is fenced in**: what the holder has is as good as zeros until the guest writes
//!   the page.
//! * **It gives the page back while it is away**: it comes back as zeros (`given_back.rs`).
//! * **Both sides are compared, and the guest has not seen the page**: it is noted before it is away (`compare.rs`).
//! * **Direct I/O writes the page past the page tables**: what has begun before it was fenced in is under way still, by
//!   the VMM's own account, and it stays; or it has ended, and the comparison, which comes after that look, sees what
//!   was written. What begins later faults, and waits. Where the VMM gives no account, the caller has to know that
//!   there is none.

use std::sync::{Arc, PoisonError};

use sterna_protocol::frame::Digester;
use sterna_protocol::layout::ChunkIndex;
use sterna_protocol::pages::PageSet;

use super::Pager;
use super::claim::Claim;
use super::supplier::Whose;
use super::whereabouts::Holder;
use crate::agent::UnderWay;
use crate::error::MigrateError;
use crate::faults::User;
use crate::faults::fence::{Fence, Patience};
use crate::memory::{for_each_body, is_zero};

/// A copy of pages that somebody has.
#[derive(Debug, Clone, Copy)]
pub struct Copy<'a> {
    /// The chunk.
    pub chunk: ChunkIndex,
    /// Its pages.
    pub pages: PageSet,
    /// What they are there, in order.
    pub digests: &'a [u64],
    /// By this.
    pub digester: Digester,
    /// Who has them.
    pub holder: Holder,
    /// Other pages, of which nobody has a copy: as they were read, they were zeros.
    pub zero: PageSet,
}

/// Pages whose memory was given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Departed {
    /// Those that are away now.
    pub away: PageSet,
    /// Those that are zeros.
    pub zero: PageSet,
    /// Those of both whose memory the host has again: it was looked. A part of a huge page is freed where the kernel
    /// can split that, which it cannot while a device is reading into another part of it.
    pub freed: PageSet,
}

impl Departed {
    /// Nothing has left.
    pub const NOTHING: Self = Self { away: PageSet::EMPTY, zero: PageSet::EMPTY, freed: PageSet::EMPTY };
}

impl Pager {
    /// A fence for this guest's RAM.
    ///
    /// # Errors
    /// As [`Fence::new`].
    pub fn fence(&self) -> Result<Fence, MigrateError> {
        Fence::new(Arc::clone(&self.faults), self.userfault.spans().to_vec())
    }

    /// The pages of a chunk that are at memory hosts.
    #[must_use]
    pub fn away_in(&self, chunk: ChunkIndex) -> PageSet {
        self.lock().whereabouts.at_hosts_in(chunk)
    }

    /// Those that are at the guest's source.
    #[must_use]
    pub fn to_come_in(&self, chunk: ChunkIndex) -> PageSet {
        self.lock().whereabouts.at_source_in(chunk)
    }

    /// Both, and how often pages of the chunk have arrived.
    #[must_use]
    pub fn presence(&self, chunk: ChunkIndex) -> (PageSet, u32) {
        let state = self.lock();
        (*state.whereabouts.away_in(chunk), state.whereabouts.arrivals(chunk))
    }

    /// The pages of a chunk that somebody waits for.
    #[must_use]
    pub fn waited_for_in(&self, chunk: ChunkIndex) -> PageSet {
        self.lock().waiting.keys().filter(|page| page.chunk == chunk).map(|page| page.page).collect()
    }

    /// Who holds the pages of a chunk that are at memory hosts; `None` where none is.
    #[must_use]
    pub fn holder(&self, chunk: ChunkIndex) -> Option<Holder> {
        self.lock().whereabouts.holder(chunk)
    }

    /// How many chunks have pages that are at one of two hosts alone.
    #[must_use]
    pub fn alone_chunks(&self) -> usize {
        self.lock().whereabouts.alone()
    }

    /// Notes that of two hosts that had a chunk's pages this one alone is to be believed.
    ///
    /// # Errors
    /// The map cannot be written, or they have none.
    pub fn left_alone(&self, chunk: ChunkIndex, holder: Holder) -> Result<(), MigrateError> {
        let noted = self.lock().whereabouts.left_alone(chunk, holder);
        noted.map_err(MigrateError::host("writing down who has pages that are away"))
    }

    /// Notes that both of two hosts have a chunk's pages, of which one held them alone.
    ///
    /// # Errors
    /// The map cannot be written.
    pub fn mended(&self, chunk: ChunkIndex) -> Result<(), MigrateError> {
        let noted = self.lock().whereabouts.mended(chunk);
        noted.map_err(MigrateError::host("writing down who has pages that are away"))
    }

    /// Lets those pages of a copy go that are as the holder has them and that nobody waits for, and makes holes of
    /// those that are zeros. None where somebody waited longer than `patience`.
    ///
    /// # Errors
    /// The kernel or the VMM fails, or the map cannot be written. Each page is either here or
    /// [away](Self::away_in) then, and valid there.
    ///
    /// # Panics
    /// Where there are fewer digests than pages.
    pub fn depart(&self, fence: &Fence, copy: &Copy<'_>, patience: &Patience<'_>) -> Result<Departed, MigrateError> {
        assert_eq!(copy.pages.len(), copy.digests.len(), "a digest for each page");
        let chunk = copy.chunk;
        let runs = copy.pages.or(&copy.zero).runs().map(|(start, length)| self.addresses(chunk, start, length));
        let Some(fenced) = fence.close(runs.collect(), patience)? else {
            return Ok(Departed::NOTHING);
        };
        // Before they are compared: what has ended until now is in them.
        let read_into = self.read_into(chunk, &copy.pages.or(&copy.zero))?;
        let (away, zero) = self.unchanged(copy)?;
        let (away, zero) = (away.without(&read_into), zero.without(&read_into));
        let away = self.not_waited_for(fence, chunk, &away)?;
        self.with_inside(|given_back, inside| self.look(given_back, inside));
        // Whoever compares both sides finds a hole from now on. Nobody sees or changes what is fenced in.
        self.note_unseen(chunk, &away.or(&zero))?;
        let departed = {
            let _settling = self.settling.lock().unwrap_or_else(PoisonError::into_inner);
            let leaving = Claim::of_present(self, chunk, &away);
            // Whatever it gave back of these it has taken again.
            self.with_given_back(|given_back| given_back.rewritten(chunk, &leaving.pages));
            let noted = self.lock().whereabouts.departed(chunk, &leaving.pages, copy.holder);
            noted.map_err(MigrateError::host("writing down which pages have left"))?;
            let freed = self.take_out(chunk, &leaving.pages.or(&zero))?;
            Departed { away: leaving.pages, zero, freed }
        };
        fenced.open()?;
        Ok(departed)
    }

    /// Takes out of the RAM file what has left of a chunk and has memory all the same: it was a part of a huge page
    /// that could not be split. Returns those whose memory the host has now.
    ///
    /// # Errors
    /// The file system refuses.
    pub fn take_out_again(&self, chunk: ChunkIndex) -> Result<PageSet, MigrateError> {
        let away = self.away_in(chunk);
        if away.is_empty() {
            return Ok(away);
        }
        let there = self.allocated_in(chunk)?.and(&away);
        if there.is_empty() {
            return Ok(there);
        }
        // Nobody puts a body in their place meanwhile.
        let claim = Claim::of_missing(self, Whose::MemoryHosts, chunk, &there);
        self.take_out(chunk, &claim.pages)
    }

    /// Makes holes in the RAM file; those of them whose memory the host has again. Nobody else puts anything there.
    fn take_out(&self, chunk: ChunkIndex, pages: &PageSet) -> Result<PageSet, MigrateError> {
        self.punch(chunk, pages)?;
        Ok(pages.without(&self.allocated_in(chunk)?))
    }

    pub(super) fn punch(&self, chunk: ChunkIndex, pages: &PageSet) -> Result<(), MigrateError> {
        self.ram.discard(chunk, pages).map_err(MigrateError::host("taking pages out of the guest's RAM"))
    }

    /// Takes chunks out of the VMM's page tables: what is here of them stays, and the next access to it faults.
    ///
    /// # Errors
    /// The VMM does not answer.
    pub fn unmap(&self, chunks: &[ChunkIndex]) -> Result<(), MigrateError> {
        let layout = self.ram.layout();
        let pages = |chunk: ChunkIndex| layout.place(chunk).map_or(0, |place| place.pages);
        let ranges: Vec<_> = chunks.iter().map(|chunk| self.addresses(*chunk, 0, pages(*chunk))).collect();
        self.ram.mappings().drop_mappings(self.faults.inside().as_mut(), &ranges)
    }

    /// Whether the guest's writes are tracked.
    #[must_use]
    pub fn is_tracked(&self) -> bool {
        self.userfault.is_used_by(User::Tracking)
    }

    /// Takes what is at memory hosts out of the RAM file, where an earlier daemon was killed before it did. Before
    /// anybody brings pages from there.
    ///
    /// # Errors
    /// The file system refuses.
    pub fn take_out_what_is_away(&self) -> Result<(), MigrateError> {
        // The guest may stand still meanwhile: what is freed is looked at later.
        self.ram.layout().iter().try_for_each(|chunk| self.punch(chunk, &self.away_in(chunk)))
    }

    /// The pages of a copy that are as the holder has them, and those that are zeros still. They are fenced in.
    fn unchanged(&self, copy: &Copy<'_>) -> Result<(PageSet, PageSet), MigrateError> {
        let (mut away, mut zero, mut kept) = (PageSet::EMPTY, PageSet::EMPTY, copy.digests.iter());
        let read = |pages: &PageSet, bodies: &mut [u8]| self.ram.load(copy.chunk, pages, bodies);
        let compared = for_each_body(&copy.pages, read, |page, body| {
            if kept.next() == Some(&copy.digester.page(body)) {
                away.insert(page);
            }
        });
        let looked = compared.and_then(|()| {
            for_each_body(&copy.zero, read, |page, body| {
                if is_zero(body) {
                    zero.insert(page);
                }
            })
        });
        looked.map_err(MigrateError::host("reading pages that are about to leave"))?;
        Ok((away, zero))
    }

    /// Those of these pages that something may be read into past the page tables, from before they were fenced in.
    fn read_into(&self, chunk: ChunkIndex, pages: &PageSet) -> Result<PageSet, MigrateError> {
        let under_way = self.faults.inside().under_way()?;
        if under_way == UnderWay::Lost {
            return Err(MigrateError::UntoldReads);
        }
        let reached = |page: &u8| under_way.may_reach(&self.addresses(chunk, usize::from(*page), 1));
        Ok(pages.iter().filter(reached).collect())
    }

    fn not_waited_for(&self, fence: &Fence, chunk: ChunkIndex, pages: &PageSet) -> Result<PageSet, MigrateError> {
        if fence.waits()? == 0 {
            return Ok(*pages);
        }
        let address = |page: u8| self.addresses(chunk, usize::from(page), 1);
        let wanted = pages.iter().filter(|page| fence.is_waited_for(&address(*page)));
        Ok(pages.without(&wanted.collect()))
    }
}
