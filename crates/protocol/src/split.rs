//! Where the pages of a split guest are: on the host that runs it, or at a memory host.
//!
//! One record for each chunk, in a file that outlives the daemon, says which of its pages are *away*: the only valid
//! copy is at the memory host. All others are here. The order of steps keeps every page valid in one place at least,
//! whenever the daemon is killed:
//!
//! ```text
//! out   put ─▶ fence ─▶ compare ─▶ away, on record ─▶ punch
//! in    get ─▶ write ─▶ here, on record ─▶ map ─▶ release, or leave it there as a copy
//! ```
//!
//! A copy is what a page was when it came back. It is not on record: where the daemon dies, it is released. Where the
//! page leaves again and is still that, nothing needs to be sent; the comparison behind the fence is the same.
//!
//! The guest runs on until its pages are fenced, and what it wrote since the put shows by the digests. The fence
//! outlives the daemon: the guest's accesses wait until a page is mapped.
//!
//! A chunk's requests go one at a time. A daemon that comes back, or has lost an answer, first opens the memory host
//! with a higher epoch, so that nothing which was sent before arrives from then on. Then it asks what is there, and
//! does for each chunk what [`Whereabouts::restart`](crate::split::Whereabouts::restart) says.

use crate::pages::PageSet;

/// What is on record of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Whereabouts {
    /// The version that the memory host had last, as far as it has answered; 0 for none.
    held: u64,
    /// Pages that are at the memory host alone.
    away: PageSet,
    /// Pages that are here, and at the memory host as they came back.
    copied: PageSet,
}

/// What a put is to say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Number {
    /// The version that the memory host has afterwards.
    pub version: u64,
    /// The version that it adds to, where pages of the chunk are there already.
    pub base: Option<u64>,
}

/// What is to be done for a chunk when the daemon is back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Restart {
    /// What is on record from now on.
    pub now: Whereabouts,
    /// Pages to be punched again: what the file has of them is nothing, or no longer valid, or not valid yet.
    pub punch: PageSet,
    /// Pages at the memory host, with their version, that are valid here and are released there.
    pub release: Option<(u64, PageSet)>,
    /// Pages that nobody has: the memory host has lost them.
    pub lost: PageSet,
}

impl Whereabouts {
    /// What the record has of a chunk: these pages are away. In which version the memory host says:
    /// [`restart`](Self::restart).
    #[must_use]
    pub fn recorded(away: PageSet) -> Self {
        Self { held: 0, away, copied: PageSet::EMPTY }
    }

    /// Notes the version of the chunk that another memory host has, which holds nothing of it any more: numbers go on
    /// from there.
    pub fn seen(&mut self, version: u64) {
        self.held = self.held.max(version);
    }

    /// The pages that are at the memory host alone.
    #[must_use]
    pub fn away(&self) -> PageSet {
        self.away
    }

    /// The pages that are here, and at the memory host as they came back.
    #[must_use]
    pub fn copied(&self) -> PageSet {
        self.copied
    }

    /// The version in which the memory host has them.
    #[must_use]
    pub fn held(&self) -> u64 {
        self.held
    }

    /// Numbers a put.
    #[must_use]
    pub fn number(&self) -> Number {
        Number { version: self.held + 1, base: (!self.away.or(&self.copied).is_empty()).then_some(self.held) }
    }

    /// Notes that a put of this number, with these pages, was answered.
    pub fn kept(&mut self, number: Number, pages: &PageSet) {
        self.held = number.version;
        self.copied = if number.base.is_some() { self.copied.without(pages) } else { PageSet::EMPTY };
    }

    /// Pages of an answered put, or copies, are fenced, and are what the memory host has: the valid ones are away from
    /// now on. Once that is on record they are punched.
    pub fn goes(&mut self, pages: &PageSet) {
        (self.away, self.copied) = (self.away.or(pages), self.copied.without(pages));
    }

    /// Pages came back and are in the file: the valid ones are here from now on, and what the memory host has are
    /// copies. Once that is on record they are mapped.
    pub fn comes(&mut self, pages: &PageSet) {
        (self.away, self.copied) = (self.away.without(pages), self.copied.or(pages));
    }

    /// The memory host has no copies of these pages any more, as far as is known.
    pub fn released(&mut self, pages: &PageSet) {
        self.copied = self.copied.without(pages);
    }

    /// What is to be done when the daemon is back; `has` is the version that the memory host has of the chunk and its
    /// pages, if any. That version may be newer than what is on record, from a put whose answer was not noted: to what
    /// is away it only added, so that is there as it was.
    #[must_use]
    pub fn restart(&self, has: Option<(u64, PageSet)>) -> Restart {
        let (version, there) = has.unwrap_or((0, PageSet::EMPTY));
        let (away, stale) = (self.away.and(&there), there.without(&self.away));
        Restart {
            now: Self { held: version, away, copied: PageSet::EMPTY },
            punch: away,
            release: (!stale.is_empty()).then_some((version, stale)),
            lost: self.away.without(&there),
        }
    }
}

#[cfg(test)]
#[path = "split_tests.rs"]
mod tests;
