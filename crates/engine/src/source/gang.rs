//! Gangs: machines that leave together, and the bodies that they share. A shared body is sent once, and its other pages
//! as references to it (`docs/design/sharing.md`).
//!
//! A body is known by a digest of its content, under a key that no guest knows. Page frames only say where to look
//! ([`shared_in`](crate::memory::Memory::shared_in)): the paper that this follows (SLM) names bodies by their frame,
//! but a frame may be merged, split, or used for something else between two looks, and then the second page would get
//! the first one's content.
//!
//! # Races with a running guest
//! * The page is written after its body was read: the body that was digested is the one that is sent or referred to,
//!   and the write makes the page dirty. It goes again, as any page.
//! * Its frame is merged with another, unmerged, freed, or used again for other content while we look: frames only say
//!   which pages are worth a digest. A page that looks exclusive goes as a body of its own, and one that looks shared
//!   and is not costs a digest.
//! * The first sight of a body fails on its way: its member has failed, and takes its names back
//!   ([`give_up`](crate::source::gang::Member::give_up)). References to it that were sent before find no body at the
//!   destination, which asks for those pages again.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sterna_protocol::frame::shared::{MAX_MEMBERS, Origin, References, SharedFrame};
use sterna_protocol::layout::{ChunkIndex, Layout, PAGE_BYTES, PageIndex};
use sterna_protocol::pages::{PageMap, PageSet};
use sterna_protocol::spec::GangSpec;

use sterna_sys::host::random_u128;

use super::copies::Copies;
use super::select::Selected;
use super::sent::Last;
use crate::memory::Memory;
use crate::memory::common::Together;
use crate::name::{Key, Name, name, random_key};

/// The most offered pages that a gang takes note of.
const MAX_OFFERED: usize = 1 << 21;

/// What a gang knows a body by.
#[derive(Debug)]
enum Naming {
    /// What it holds.
    Content,
    /// Where it lies in its machine's RAM: all members are clones of one machine, whose RAM does not change. A page of
    /// one is that page of each.
    Place,
    /// The frame that it lies in: SLM's way, which takes one content for another. A test switches digests off so.
    #[cfg(test)]
    Frame(tests::FrameOf),
}

/// Machines of one trust group that leave for one destination together, and what they have sent of what they share.
#[derive(Debug)]
pub struct Gang {
    /// What the destination must know of it.
    pub spec: GangSpec,
    /// The key of its names, drawn at random: no guest knows it, and no other gang has it.
    key: Key,
    naming: Naming,
    names: Mutex<HashMap<Name, Origin>>,
    /// The number of pages that the destination has offered, once it was asked.
    offered: Mutex<Option<usize>>,
    /// The number of the destination's pool, once a member has joined.
    pool: Mutex<Option<u64>>,
}

impl Gang {
    /// A gang of so many members that has sent nothing, and what they have together.
    ///
    /// # Panics
    /// Where it has more than [`MAX_MEMBERS`].
    #[must_use]
    pub fn new(group: &str, members: u16, together: Together) -> Arc<Self> {
        Self::of(group, members, together, Naming::Content)
    }

    /// A gang of clones of one machine whose RAM does not change any more once the first page of it goes. A page of
    /// one is that page of each, so nobody asks the kernel for frames, nor looks at content.
    ///
    /// # Panics
    /// As [`new`](Self::new).
    #[must_use]
    pub fn alike(group: &str, members: u16, together: Together) -> Arc<Self> {
        Self::of(group, members, together, Naming::Place)
    }

    fn of(group: &str, members: u16, together: Together, naming: Naming) -> Arc<Self> {
        assert!(usize::from(members) <= MAX_MEMBERS, "a gang of {members}");
        let spec = GangSpec {
            id: random_u128(),
            group: group.into(),
            members,
            bytes: together.bytes,
            shared: together.shared,
        };
        let (names, offered, pool) = (Mutex::default(), Mutex::default(), Mutex::default());
        Arc::new(Self { spec, key: random_key(), naming, names, offered, pool })
    }

    /// The gang of a machine that shares with nobody and has so much memory, bytes.
    #[must_use]
    pub fn alone(bytes: u64) -> Arc<Self> {
        Self::new("", 1, Together { bytes, shared: Vec::new() })
    }

    /// Takes note of the destination's pool. Where it is another one than earlier members had, which have all arrived
    /// or failed, nothing that they sent is in it, and nothing is offered yet: a destination that was started again has
    /// a new one, and so has one that nobody of the gang came to for a while.
    pub fn joined(&self, pool: u64) {
        let mut known = self.pool.lock().unwrap_or_else(PoisonError::into_inner);
        if known.replace(pool).is_some_and(|before| before != pool) {
            tracing::info!(group = self.spec.group, "the destination has another pool for the gang: it begins anew");
            *self.offered.lock().unwrap_or_else(PoisonError::into_inner) = None;
            self.names().clear();
        }
    }

    /// Asks the destination, where no member has yet, which bodies the gang can refer to without sending them. `ask`
    /// asks for the names from a number on, and gets none where there are no more.
    ///
    /// The destination is asked once for each [pool](Self::joined). One that does not tell its pool and was started
    /// again offers nothing: pages that refer to offers of the one before are asked for, and go with their bodies.
    ///
    /// # Errors
    /// That of `ask`: then nothing is known to be offered.
    pub fn take_offers<E>(&self, mut ask: impl FnMut(&Key, u32) -> Result<Vec<Name>, E>) -> Result<(), E> {
        let mut offered = self.offered.lock().unwrap_or_else(PoisonError::into_inner);
        // Where content is not looked at, none is found again.
        if matches!(self.naming, Naming::Place) || offered.is_some() {
            return Ok(());
        }
        let mut names: Vec<Name> = Vec::new();
        while names.len() < MAX_OFFERED {
            let more = ask(&self.key, names.len() as u32)?;
            if more.is_empty() {
                break;
            }
            names.extend(more);
        }
        *offered = Some(names.len());
        self.names().extend(names.into_iter().zip(0..).map(|(name, number)| (name, Origin::offered(number))));
        Ok(())
    }

    /// Whether the destination has offered anything.
    fn has_offers(&self) -> bool {
        self.offered.lock().unwrap_or_else(PoisonError::into_inner).is_some_and(|pages| pages > 0)
    }

    fn names(&self) -> MutexGuard<'_, HashMap<Name, Origin>> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One machine of a gang.
#[derive(Debug)]
pub struct Member {
    gang: Arc<Gang>,
    index: u16,
    /// Pages that are the origin of a body. Once is all: what the pool has under a name never changes.
    origins: Mutex<PageMap>,
}

/// What a gang knows of a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sight {
    /// Nobody has sent it. This page is its origin from now on.
    First,
    /// It was sent as this page, or the destination has offered it.
    Again(Origin),
    /// Nobody has sent it, and it goes as a page that nobody shares: this page is another body's origin, or does not
    /// look shared.
    Unnamed,
}

impl Member {
    /// The member with this number, which has sent nothing.
    ///
    /// # Panics
    /// Where the gang has no such member.
    #[must_use]
    pub fn new(gang: &Arc<Gang>, index: u16, layout: &Layout) -> Self {
        assert!(index < gang.spec.members, "member {index} of {}", gang.spec.members);
        Self { gang: Arc::clone(gang), index, origins: Mutex::new(PageMap::empty(layout)) }
    }

    /// Its gang.
    #[must_use]
    pub fn gang(&self) -> &Gang {
        &self.gang
    }

    /// Whether the destination has offered its gang anything.
    #[must_use]
    pub fn has_offers(&self) -> bool {
        self.gang.has_offers()
    }

    /// Its number.
    #[must_use]
    pub fn index(&self) -> u16 {
        self.index
    }

    /// Finds what the gang shares among the pages that are selected. Pages whose body the gang has sent leave the
    /// selection, and their bodies the copies; they go as references. First sights of shared bodies stay, to be pooled.
    /// `None` where the gang shares nothing of the chunk.
    ///
    /// `copies` holds the bodies of the selection's full pages, in order.
    ///
    /// # Errors
    /// The kernel does not tell which pages are shared.
    pub fn share(
        &self,
        ram: &dyn Memory,
        (round, chunk): (u32, ChunkIndex),
        selected: &mut Selected,
        copies: &mut Copies,
    ) -> io::Result<Option<SharedFrame>> {
        if selected.full.is_empty() {
            return Ok(None);
        }
        let shared = match self.gang.naming {
            Naming::Place => selected.full,
            _ => ram.shared_in(chunk)?.and(&selected.full),
        };
        // What was offered may be what this machine alone has here.
        let offers = self.gang.has_offers();
        if shared.is_empty() && !offers {
            return Ok(None);
        }
        let (mut pooled, mut references) = (PageSet::EMPTY, Vec::new());
        let Selected { full, digests, held, .. } = selected;
        let pages: Vec<u8> = full.iter().collect();
        let mut stay = Vec::with_capacity(pages.len());
        copies.take_out(|at, body| {
            let page = pages[at];
            // What the destination has missed once goes with its body.
            let looks_shared = shared.contains(page);
            let named = (looks_shared || offers) && held[at] != Last::Unknown;
            match named.then(|| self.sight(PageIndex { chunk, page }, body, looks_shared)) {
                Some(Sight::Again(origin)) => {
                    references.push((page, origin));
                    return true;
                }
                Some(Sight::First) => {
                    pooled.insert(page);
                    // A pooled body goes whole, and not as a difference to what was there.
                    held[at] = Last::Never;
                }
                Some(Sight::Unnamed) | None => {}
            }
            stay.push(at);
            false
        });
        if pooled.is_empty() && references.is_empty() {
            return Ok(None);
        }
        *digests = stay.iter().map(|at| digests[*at]).collect();
        *held = stay.iter().map(|at| held[*at]).collect();
        references.iter().for_each(|(page, _)| full.remove(*page));
        selected.counts.full -= references.len() as u64;
        selected.counts.reference += references.len() as u64;
        Ok(Some(SharedFrame { round, chunk, pooled, references: References::runs(references) }))
    }

    /// Takes back the names of this member's bodies, because some may never arrive.
    pub fn give_up(&self) {
        self.gang.names().retain(|_, origin| origin.member != self.index);
    }

    fn sight(&self, page: PageIndex, body: &[u8; PAGE_BYTES], looks_shared: bool) -> Sight {
        let name = match &self.gang.naming {
            Naming::Content => name(&self.gang.key, body),
            Naming::Place => name_of(page),
            #[cfg(test)]
            Naming::Frame(frame_of) => frame_of.name(self.index, page.page),
        };
        let mut names = self.gang.names();
        if let Some(origin) = names.get(&name) {
            return Sight::Again(*origin);
        }
        if !looks_shared {
            return Sight::Unnamed;
        }
        let mut origins = self.origins.lock().unwrap_or_else(PoisonError::into_inner);
        if origins.chunk(page.chunk).contains(page.page) {
            return Sight::Unnamed;
        }
        origins.insert(page);
        names.insert(name, Origin { member: self.index, page });
        Sight::First
    }
}

/// The name of a page's body where each member has the same in it.
fn name_of(page: PageIndex) -> Name {
    let mut name = Name::default();
    name[..4].copy_from_slice(&page.chunk.0.to_le_bytes());
    name[4] = page.page;
    name
}

#[cfg(test)]
#[path = "gang_tests.rs"]
mod tests;
