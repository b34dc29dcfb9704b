//! Pages left out of rounds because the guest holds them free, from one look to the next ([`free`](crate::source::free)
//! says why no page is lost by it).
//!
//! A page that is left out is dealt with: it does not come again unless it is written, or found in use by a later look.
//! So this is no [`Skip`](crate::source::skip::Skip). What the destination holds of it, once what is outstanding has
//! gone, is zeros.

use sterna_introspect::PageTables;
use sterna_protocol::layout::Layout;
use sterna_protocol::pages::{PageMap, PageSet};
use sterna_protocol::throughput::Speed;

use super::free::{FreePages, Looked};
use super::sent::{Last, SentTable};
use crate::vmm;

/// Which pages are left out, and the looks that find them.
pub struct LeftOut {
    looks: FreePages,
    pages: PageMap,
}

/// What is still to go, and what else is known of it.
pub struct Going<'a> {
    /// The pages outstanding.
    pub outstanding: &'a mut PageMap,
    /// Those of them that the guest gave back.
    pub discarded: &'a PageMap,
    /// What the destination holds of each page.
    pub sent: &'a SentTable,
    /// How the blocks lie.
    pub layout: &'a Layout,
    /// How quickly pages go.
    pub speed: Speed,
}

impl LeftOut {
    /// None yet.
    #[must_use]
    pub fn none(looks: FreePages, layout: &Layout) -> Self {
        Self { looks, pages: PageMap::empty(layout) }
    }

    /// A collection has just yielded these pages: what was written since it was free is somebody's again.
    pub fn collected(&mut self, written: &PageMap) {
        if !self.looks.trusts_first_look() {
            self.pages.take_out(written);
        }
    }

    /// Looks for pages that the guest holds free, where that pays, and takes them out of what is outstanding; those of
    /// which the destination holds something else than zeros stay in it, and go as a bit. How many were dealt with by
    /// that alone. The guest runs. Called after tracking was armed, or right after a collection: only then may what is
    /// not written afterwards be left out.
    pub fn look(&mut self, vmm: &mut dyn vmm::Source, going: Going) -> u64 {
        match self.looks.look(vmm, going.layout, going.outstanding, &going.speed) {
            Looked::LeftOut => 0,
            Looked::Lost => self.nothing_is_free(going.outstanding),
            Looked::Found(found) => self.leave_out(&found, going),
        }
    }

    /// What [`look_stopped`](Self::look_stopped) needs to know of the VMM, asked when the guest has stopped.
    pub fn processors(&self, vmm: &mut dyn vmm::Source) -> Vec<PageTables> {
        self.looks.processors(vmm)
    }

    /// Looks once more, with the guest stopped and everything collected: what was left out and is not free is
    /// outstanding again, and what has become free is left out, too. How many pages were dealt with by that alone.
    pub fn look_stopped(&mut self, processors: &[PageTables], going: Going) -> u64 {
        let Going { outstanding, layout, speed, .. } = &going;
        match self.looks.look_stopped(processors, layout, &self.pages, outstanding, speed) {
            Some(found) => self.leave_out(&found, going),
            None => self.nothing_is_free(going.outstanding),
        }
    }

    /// The pages that are left out.
    #[must_use]
    pub fn pages(&self) -> &PageMap {
        &self.pages
    }

    /// The looks.
    #[must_use]
    pub fn looks(&self) -> &FreePages {
        &self.looks
    }

    /// Takes in a look that began after the last collection.
    fn leave_out(&mut self, found: &PageMap, going: Going) -> u64 {
        let mut dealt_with = 0;
        for chunk in going.layout.iter() {
            let (outstanding, left_out) = (*going.outstanding.chunk(chunk), *self.pages.chunk(chunk));
            // What was given back may be a hole, and is counted as that.
            let free = found.chunk(chunk).without(going.discarded.chunk(chunk)).and(&outstanding.or(&left_out));
            let is_zero = |page: &u8| matches!(going.sent.last(chunk, *page), Last::Never | Last::Zero);
            let done: PageSet = free.and(&outstanding).iter().filter(is_zero).collect();
            dealt_with += done.len() as u64;
            // What was left out before and is not free: whoever has it now has not written it, or the look before was
            // misled.
            *going.outstanding.chunk_mut(chunk) = outstanding.without(&done).or(&left_out.without(&free));
            *self.pages.chunk_mut(chunk) = free;
        }
        dealt_with
    }

    /// Everything that was left out is outstanding again.
    fn nothing_is_free(&mut self, outstanding: &mut PageMap) -> u64 {
        outstanding.add(&self.pages);
        self.pages.clear();
        0
    }
}
