//! A seal on a guest's RAM: no fence takes a portion of it, so that nothing is taken of what is collected for the last
//! time.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::GuestFaults;

/// No fence takes a portion of a guest's RAM until this is dropped.
#[must_use = "the seal is lifted when it is dropped"]
#[derive(Debug)]
pub struct Seal(Arc<GuestFaults>);

impl Drop for Seal {
    fn drop(&mut self) {
        self.0.seals.fetch_sub(1, Ordering::AcqRel);
    }
}

impl GuestFaults {
    /// Ends every fence, until the seal is dropped: none has a portion when this returns, and none takes another. A
    /// portion at hand is let go as for anybody who waits.
    ///
    /// What is taken of a guest after its writes were collected for the last time is in no map: a copy of it would keep
    /// what was there before. So a migration seals the guest's RAM before it stops the guest.
    pub fn seal(self: &Arc<Self>) -> Seal {
        // A fence looks for the seal once it has its portion. So either it sees it, or its portion is seen here.
        self.seals.fetch_add(1, Ordering::AcqRel);
        drop(self.owner_without_portion());
        Seal(Arc::clone(self))
    }
}
