//! What the guest's source is doing for its owner (`straight.rs`).

use sterna_protocol::errand::Errand;

/// What the source is to put at memory hosts.
#[derive(Debug, Default)]
pub(super) struct Errands {
    /// Under way.
    pub under_way: Vec<Errand>,
    /// How many chunks were looked at, from the last one on.
    pub looked_at: u32,
    /// Memory hosts that did not take what they were to: a bit for each.
    pub failed: u16,
}
