//! Pages left out of rounds because the guest holds them free, from one look to the next ([`free`](crate::source::free)
//! says why no page is lost by it).
//!
//! A page that is left out is done: it does not come again unless it is written, or a later look finds it in use. So
//! this is no [`Skip`](crate::source::skip::Skip). Once all outstanding pages have gone, the destination holds zeros of
//! it.

use sterna_introspect::PageTables;
use sterna_protocol::layout::{ChunkIndex, Layout};
use sterna_protocol::pages::{PageMap, PageSet};
use sterna_protocol::throughput::Speed;

use super::free::{FreePages, Looked};
use super::sent::{Last, SentTable};
use crate::vmm;

/// The pages that are left out, and the looks that find them.
pub struct LeftOut {
    looks: FreePages,
    pages: PageMap,
}

/// The outstanding pages, and what is known of them.
pub struct Going<'a> {
    /// The pages outstanding.
    pub outstanding: &'a mut PageMap,
    /// Those of them that the guest discarded.
    pub discarded: &'a PageMap,
    /// What the destination holds of each page.
    pub sent: &'a SentTable,
    /// How the blocks lie.
    pub layout: &'a Layout,
    /// How quickly pages go.
    pub speed: Speed,
}

impl LeftOut {
    /// No page is left out yet.
    #[must_use]
    pub fn none(looks: FreePages, layout: &Layout) -> Self {
        Self { looks, pages: PageMap::empty(layout) }
    }

    /// Takes out the pages that a collection has just yielded: a page that was written since it was free is in use
    /// again.
    pub fn collected(&mut self, written: &PageMap) {
        if !self.looks.trusts_first_look() {
            self.pages.take_out(written);
        }
    }

    /// Looks for pages that the guest holds free, where that pays, and takes them out of the outstanding ones. Pages of
    /// which the destination holds something else than zeros stay outstanding, and go as a bit. Returns how many pages
    /// are done by that alone. The guest runs. Call it after tracking was armed, or right after a collection: only then
    /// may pages be left out that are not written afterwards.
    pub fn look(&mut self, vmm: &mut dyn vmm::Source, going: Going) -> u64 {
        match self.looks.look(vmm, going.layout, going.outstanding, &going.speed) {
            Looked::LeftOut => 0,
            Looked::Lost => self.nothing_is_free(going.outstanding),
            Looked::Found(found) => self.leave_out(&found, going),
        }
    }

    /// The VMM's answers that [`look_stopped`](Self::look_stopped) needs. Call it when the guest has stopped.
    pub fn processors(&self, vmm: &mut dyn vmm::Source) -> Vec<PageTables> {
        self.looks.processors(vmm)
    }

    /// Looks once more, with the guest stopped and everything collected: left-out pages that are not free are
    /// outstanding again, and pages that have become free are left out, too. Returns how many pages are done by that
    /// alone.
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

    /// Leaves out pages again that a collection has taken out without need.
    pub fn leave_out_again(&mut self, chunk: ChunkIndex, pages: &PageSet) {
        self.pages.insert_all(chunk, pages);
    }

    /// The account of the looks.
    #[must_use]
    pub fn looks(&self) -> &FreePages {
        &self.looks
    }

    /// Leaves out the pages of a look that began after the last collection.
    fn leave_out(&mut self, found: &PageMap, going: Going) -> u64 {
        let mut dealt_with = 0;
        for chunk in going.layout.iter() {
            let (outstanding, left_out) = (*going.outstanding.chunk(chunk), *self.pages.chunk(chunk));
            // A discarded page may be a hole, and counts as discarded.
            let free = found.chunk(chunk).without(going.discarded.chunk(chunk)).and(&outstanding.or(&left_out));
            let is_zero = |page: &u8| matches!(going.sent.last(chunk, *page), Last::Never | Last::Zero);
            let done: PageSet = free.and(&outstanding).iter().filter(is_zero).collect();
            dealt_with += done.len() as u64;
            // Pages that were left out before and are not free: their present owner has not written them, or the look
            // before was misled.
            *going.outstanding.chunk_mut(chunk) = outstanding.without(&done).or(&left_out.without(&free));
            *self.pages.chunk_mut(chunk) = free;
        }
        dealt_with
    }

    /// Makes all left-out pages outstanding again.
    fn nothing_is_free(&mut self, outstanding: &mut PageMap) -> u64 {
        outstanding.add(&self.pages);
        self.pages.clear();
        0
    }
}
