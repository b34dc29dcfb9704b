//! What of a guest has gone to memory hosts, and come back.

use std::sync::atomic::{AtomicU64, Ordering};

use super::Split;
use super::pace::Paced;

/// What has gone and come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Account {
    /// Pages that were sent to memory hosts, and left.
    pub out_pages: u64,
    /// Pages that were zeros when they were to go: their memory was given back, and nothing was sent.
    pub zero_pages: u64,
    /// Pages that were sent and stayed, because the guest wrote them meanwhile or waited for them.
    pub kept_pages: u64,
    /// Pages that left without being sent: what the memory host had of them was right still.
    pub unsent_pages: u64,
    /// Pages that came back.
    pub in_pages: u64,
    /// Pages that waited for room here.
    pub paced: Paced,
}

impl Split {
    /// What has gone and come so far.
    #[must_use]
    pub fn account(&self) -> Account {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let (out_pages, zero_pages) = (load(&self.out), load(&self.zero));
        let (kept_pages, unsent_pages, in_pages) = (load(&self.kept), load(&self.unsent), load(&self.back));
        Account { out_pages, zero_pages, kept_pages, unsent_pages, in_pages, paced: self.pace.paced() }
    }
}
