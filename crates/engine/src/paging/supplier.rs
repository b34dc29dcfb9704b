//! Suppliers: who brings pages that are not here, when they are asked for.
//!
//! The pager knows where its pages are and who waits for them; how they are asked for, and how they come, is the
//! supplier's. In post-copy there is one supplier, the guest's source, which comes and goes with its connections and
//! ends with the last page. Pages wait for whoever comes next.

use std::time::Instant;

use sterna_protocol::layout::PageIndex;
use sterna_protocol::pages::PageSet;

/// Who brings pages that are not here.
pub trait Supplier: Send + Sync {
    /// Asks for a page that this thread of the VMM waits for. Where the way there is lost the page goes on waiting: the
    /// next supplier is asked for it.
    fn ask(&self, page: PageIndex, thread: u32);

    /// Whether a page that a thread of the guest touches for the first time may have memory now. Where not, the thread
    /// waits until the supplier lets the page in (`Pager::let_in`).
    fn admits(&self, _page: PageIndex) -> bool {
        true
    }

    /// Which of these pages of its chunk, that are not away, are to have memory with a page that was touched for the
    /// first time.
    fn touched_next(&self, _page: PageIndex, _here: &PageSet) -> PageSet {
        PageSet::EMPTY
    }

    /// When it said something last.
    fn heard(&self) -> Instant;

    /// Ends all its connections, from elsewhere: whoever waits for one of them wakes.
    fn hang_up(&self);

    /// Lets it know, without haste, that it is asked for nothing more.
    fn dismiss(&self);
}
