//! A site that several tests use, one after the other.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::needs::turn;
use crate::plan::Plan;
use crate::site::Site;

static SHARED: Mutex<Option<Site>> = Mutex::new(None);
static WANTED: AtomicUsize = AtomicUsize::new(0);

/// Runs a test on a site that it shares with the tests that wait for it: a guest's start costs more than most tests.
/// The site goes with the last of them, and with a test that fails.
pub fn on_shared_site(test: impl FnOnce(&mut Site)) {
    struct Wanted;
    impl Drop for Wanted {
        fn drop(&mut self) {
            WANTED.fetch_sub(1, Ordering::AcqRel);
        }
    }
    WANTED.fetch_add(1, Ordering::AcqRel);
    let wanted = Wanted;
    let _turn = turn();
    let mut slot = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    let mut site = slot.take().unwrap_or_else(|| Site::start(&Plan::small()));
    test(&mut site);
    drop(wanted);
    if WANTED.load(Ordering::Acquire) > 0 {
        *slot = Some(site);
    }
}
