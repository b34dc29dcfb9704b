//! A tracker beside a pager: a guest whose pages are spread over hosts is moved on, so its writes are tracked while its
//! pages go and come.
//!
//! The pager has opened the userfaultfd, and the VMM's process keeps a duplicate: should this daemon die, who touches a
//! page that is away waits for the next one, and writes go on (`WP_ASYNC`).
//!
//! **What comes back is unarmed**, so it counts as written: whoever collects has not got it yet. **What leaves** is
//! nobody's to send. **What leaves as zeros** was written since it was collected last, or is zeros there as well: its
//! entry in the page tables is gone, without a mark, and counts as written.

use std::ops::Range;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use super::{User, Userfault};
use crate::error::MigrateError;

impl Userfault {
    /// Registers all RAM for a tracker, too.
    pub(super) fn track_beside_paging(&self, user: User, spans: &[Range<u64>]) -> Result<(), MigrateError> {
        if user != User::Tracking || self.users().present != [User::Paging] {
            return Err(MigrateError::Bug("the guest's RAM is registered for something else already"));
        }
        if spans != self.spans {
            return Err(MigrateError::Bug("RAM is to be tracked that is not registered"));
        }
        self.widen(user, spans)?;
        self.backlogs.lock().unwrap_or_else(PoisonError::into_inner).add_user(user);
        self.users().present.push(user);
        Ok(())
    }

    /// A user has gone, perhaps the `last`. Where the tracker has and others have not, no write costs anything more.
    pub(super) fn leaves(&self, user: User, last: bool) {
        self.backlogs.lock().unwrap_or_else(PoisonError::into_inner).remove_user(&user);
        if user != User::Tracking || last {
            return;
        }
        self.arm_what_returns(false);
        for span in &self.spans {
            // What stays armed costs a write a moment of the kernel's, once.
            let _ = self.descriptor.write_protect(span.clone(), false);
        }
    }

    /// Whether pages that come back from now on are armed: a write to them is noted, and that they came is not. Only
    /// where whoever collects need not have them.
    pub(crate) fn arm_what_returns(&self, armed: bool) {
        self.arm_what_returns.store(armed, Ordering::Release);
    }
}
