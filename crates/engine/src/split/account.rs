//! What of a guest has gone to memory hosts, and come back.

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
