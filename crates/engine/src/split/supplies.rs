//! What the pager asks of memory hosts.

use std::time::Instant;

use sterna_protocol::errand::Put;
use sterna_protocol::layout::PageIndex;
use sterna_protocol::pages::PageSet;

use super::{Split, lock};
use crate::error::MigrateError;
use crate::paging::supplier::{Straight, Supplier};

impl Supplier for Split {
    fn ask(&self, page: PageIndex, thread: u32) {
        self.main_thread.touched(thread, page.chunk, self.room());
        // Where it came back meanwhile, nobody waits for it.
        let Some(number) = self.host_of(page.chunk) else { return };
        lock(&self.wanted[number]).push_back(page);
        self.called[number].notify_one();
    }

    fn admits(&self, page: PageIndex) -> bool {
        self.admits_touch(page)
    }

    fn touched(&self, page: PageIndex, thread: u32) -> bool {
        self.main_thread.touched(thread, page.chunk, self.room());
        self.hotness.touched(page)
    }

    fn touched_next(&self, page: PageIndex, here: &PageSet) -> PageSet {
        self.touched_ahead(page, here)
    }

    fn make_way(&self) {
        self.make_way_for_others();
    }

    fn straight(&self, put: &[Put], may: bool) -> Result<Straight, MigrateError> {
        self.straight_to_hosts(put, may)
    }

    fn nothing_goes_straight(&self) {
        self.nothing_is_put();
    }

    fn heard(&self) -> Instant {
        *lock(&self.heard)
    }

    fn hang_up(&self) {}

    fn dismiss(&self) {}
}
