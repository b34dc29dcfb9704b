//! Pages that the guest discards (balloon, free-page reporting, virtio-mem) while others are missing.
//!
//! QEMU punches such a page out of its file and out of its page tables; the agent logs it afterwards. The guest has
//! promised not to need the page's content, so its next access may find zeros or the old content, as if the host had
//! left the page alone (virtio 1.2, 5.5.6). It must not find anything else, and once it has written the page anew,
//! nothing may undo that.
//!
//! What happens to a discarded page:
//!
//! * **while it is missing**: it stays missing: a page that was never mapped here was never written here. A body that
//!   comes after the log was read is dropped, and the page is a hole that has arrived; otherwise the host would give
//!   memory for content that nobody wants
//! * **while its body is written, or before that is mapped**: the body stays, or there is a hole: then
//!   `UFFDIO_CONTINUE` finds no page, and the thread that waits is woken, faults again, and gets zeros
//! * **and touched again while it is missing**: the access waits, and the page is requested as any other; the guest's
//!   write comes after the body
//! * **and rewritten, then its body comes (once more)**: the guest could write it only after it had arrived. It is not
//!   missing any more, so the body gets no claim
//! * **while it is current and not mapped yet**: the file has a hole. The guest gets zeros, which differ from the
//!   source's page: the comparison leaves it out
//!
//! The same holds for what this daemon takes of a guest's free memory while pages are to come. Of a guest that runs
//! before all of its pages are here it takes none that are away. Of a split guest it does: there pages stay away for
//! long, and whoever has them is told (`split/forget.rs`).
//!
//! Only whole pages count, and only what was logged after the residue was known: a discard of before then says nothing
//! of a page that is to come. Where the log overflowed nothing is dropped.

use std::ops::Range;
use std::time::{Duration, Instant};

use sterna_protocol::layout::{ChunkIndex, Layout, PAGE_BYTES};
use sterna_protocol::pages::{PageMap, PageSet};

use crate::agent::{Discard, Discards};
use crate::memory::add_run;

/// How often the log is read while pages arrive: late enough to cost nothing beside them, early enough that it does not
/// overflow.
const LOOK: Duration = Duration::from_millis(5);

/// How long the VMM may take to log a page after discarding it: the discarding thread may be between the two.
pub(crate) const LOGGED: Duration = Duration::from_millis(100);

/// The pages that were discarded since the guest's start here.
#[derive(Debug)]
pub(super) struct GivenBack {
    /// Device and inode of the blocks' files, in the layout's order.
    files: Vec<(u64, u64)>,
    pages: PageMap,
    /// Pages that were discarded once and are not any more: the guest used them again before they left.
    rewritten: PageMap,
    /// Whether the log was incomplete, so that any page may have been discarded.
    any: bool,
    looked: Instant,
}

impl GivenBack {
    /// No page has been discarded.
    pub(super) fn nothing(files: Vec<(u64, u64)>, layout: &Layout) -> Self {
        let [pages, rewritten] = std::array::from_fn(|_| PageMap::empty(layout));
        Self { files, pages, rewritten, any: false, looked: Instant::now() }
    }

    /// What was logged up to now was asked for, and is forgotten.
    pub(super) fn begin(&mut self) {
        self.looked = Instant::now();
    }

    /// Whether the log is due to be read.
    pub(super) fn is_due(&self) -> bool {
        self.looked.elapsed() >= LOOK
    }

    /// Notes what the log has.
    pub(super) fn look(&mut self, discards: &Discards, layout: &Layout) {
        match discards {
            Discards::Ranges(ranges) => ranges.iter().for_each(|range| self.add(range, layout)),
            Discards::Everything => self.any = true,
        }
        self.looked = Instant::now();
    }

    /// Notes what this daemon took itself, which is in no log: the guest held it free.
    pub(super) fn taken(&mut self, holes: Vec<(usize, Range<u64>)>, layout: &Layout) {
        holes.into_iter().for_each(|(block, bytes)| add_run(&mut self.pages, layout, block, bytes));
    }

    /// Notes that these pages are the guest's, whatever it gave back before.
    pub(super) fn rewritten(&mut self, chunk: ChunkIndex, pages: &PageSet) {
        let known = self.pages.chunk_mut(chunk);
        self.rewritten.insert_all(chunk, &known.and(pages));
        *known = known.without(pages);
    }

    fn add(&mut self, range: &Discard, layout: &Layout) {
        let Some(block) = self.files.iter().position(|file| *file == (range.device, range.inode)) else { return };
        let page = PAGE_BYTES as u64;
        // Bounds are rounded inwards: the rest of a page that was discarded in part is the guest's.
        let start = range.offset.checked_next_multiple_of(page).unwrap_or(u64::MAX);
        let end = range.offset.saturating_add(range.length) / page * page;
        if start < end {
            add_run(&mut self.pages, layout, block, start..end);
        }
    }

    /// All that are known to have been discarded.
    pub(super) fn chunks(&self) -> Vec<(ChunkIndex, PageSet)> {
        let known = self.pages.iter().filter(|(_, pages)| !pages.is_empty());
        known.map(|(chunk, pages)| (chunk, *pages)).collect()
    }

    /// Pages of a chunk that are known to have been discarded.
    pub(super) fn known(&self, chunk: ChunkIndex) -> &PageSet {
        self.pages.chunk(chunk)
    }

    /// Pages of a chunk that may have been discarded at any time.
    pub(super) fn possible(&self, chunk: ChunkIndex, layout: &Layout) -> PageSet {
        if self.any { PageSet::of_chunk(layout, chunk) } else { self.known(chunk).or(self.rewritten.chunk(chunk)) }
    }
}
