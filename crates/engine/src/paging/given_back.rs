//! Pages that the guest gives back (balloon, free-page reporting, virtio-mem) while others are still to come.
//!
//! QEMU punches such a page out of its file and out of its page tables; the agent logs it afterwards. The guest has
//! promised not to need what it held, so at its next access it may find zeros or what it held before, as it would where
//! the host had left the page alone (virtio 1.2, 5.5.6). What it may not find is anything else, and once it has written
//! the page anew nothing may undo that:
//!
//! What happens to a page that is given back:
//!
//! * **while it is missing**: it stays missing: no page that was not mapped here was ever written here. A body that
//!   comes after the log was read is dropped, and the page is a hole that has arrived; without that the host would give
//!   memory for content that nobody wants
//! * **while its body is written, or before that is mapped**: the body stays, or there is a hole: `UFFDIO_CONTINUE`
//!   finds none, who waits is woken, faults again, and gets zeros
//! * **and touched again while it is missing**: the access waits and is asked for as any other; what the guest writes
//!   then comes after the body
//! * **and rewritten, then its body comes (once more)**: it could be written only after it had arrived, and what has
//!   arrived is missing no more: the body finds no claim
//! * **while it is current and not mapped yet**: a hole: the guest gets zeros, which differ from what the source has:
//!   the comparison leaves it out
//!
//! The same holds for what this daemon takes of a guest's free memory while pages are to come; of pages that are away
//! it takes none.
//!
//! Only whole pages count, and only what was logged after the residue was known: a discard of before then says nothing
//! of a page that is to come. Where the log overflowed nothing is dropped.

use std::ops::Range;
use std::time::{Duration, Instant};

use sterna_protocol::layout::{ChunkIndex, Layout, PAGE_BYTES};
use sterna_protocol::pages::{PageMap, PageSet};

use crate::agent::{Discard, Discards};
use crate::inside::Inside;
use crate::memory::add_run;

/// How often the log is read while pages arrive: late enough to cost nothing beside them, early enough that it does not
/// overflow.
const LOOK: Duration = Duration::from_millis(5);

/// What has been given back since the guest's start here.
#[derive(Debug)]
pub(super) struct GivenBack {
    /// Device and inode of the blocks' files, in the layout's order.
    files: Vec<(u64, u64)>,
    pages: PageMap,
    /// The log did not say everything: any page may have been given back.
    any: bool,
    looked: Instant,
}

impl GivenBack {
    /// Nothing has.
    pub(super) fn nothing(files: Vec<(u64, u64)>, layout: &Layout) -> Self {
        Self { files, pages: PageMap::empty(layout), any: false, looked: Instant::now() }
    }

    /// Forgets what was logged up to now.
    pub(super) fn begin(&mut self, inside: &mut dyn Inside) {
        let _ = inside.discards();
        self.looked = Instant::now();
    }

    /// Whether the log is due to be read.
    pub(super) fn is_due(&self) -> bool {
        self.looked.elapsed() >= LOOK
    }

    /// Reads the log.
    pub(super) fn look(&mut self, inside: &mut dyn Inside, layout: &Layout) {
        match inside.discards() {
            Discards::Ranges(ranges) => ranges.iter().for_each(|range| self.add(range, layout)),
            Discards::Everything => self.any = true,
        }
        self.looked = Instant::now();
    }

    /// Notes what this daemon took itself, which is in no log: the guest held it free.
    pub(super) fn taken(&mut self, holes: Vec<(usize, Range<u64>)>, layout: &Layout) {
        holes.into_iter().for_each(|(block, bytes)| add_run(&mut self.pages, layout, block, bytes));
    }

    fn add(&mut self, range: &Discard, layout: &Layout) {
        let Some(block) = self.files.iter().position(|file| *file == (range.device, range.inode)) else { return };
        let page = PAGE_BYTES as u64;
        // Inwards: the rest of a page that was given back in part is the guest's.
        let start = range.offset.checked_next_multiple_of(page).unwrap_or(u64::MAX);
        let end = range.offset.saturating_add(range.length) / page * page;
        if start < end {
            add_run(&mut self.pages, layout, block, start..end);
        }
    }

    /// Pages of a chunk that are known to have been given back.
    pub(super) fn known(&self, chunk: ChunkIndex) -> &PageSet {
        self.pages.chunk(chunk)
    }

    /// Pages of a chunk that may have been given back.
    pub(super) fn possible(&self, chunk: ChunkIndex, layout: &Layout) -> PageSet {
        if self.any { PageSet::first(layout.place(chunk).map_or(0, |place| place.pages)) } else { *self.known(chunk) }
    }
}
