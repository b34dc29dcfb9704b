//! Whether somebody may have guest RAM registered with a userfaultfd, and a lock that keeps the answer true.
//!
//! A mapping that is replaced is not registered any more: a tracker would miss the writes into the new one, and a page
//! that is to come would read as zeros. So no hook replaces a mapping while a userfaultfd is open. The server learns of
//! each: it makes it, keeps it, or lends it to a daemon that wants to be the only one to have it.
//!
//! # Races
//! * A hook sees that nobody watches, and maps. Meanwhile the server makes a userfaultfd, and the daemon registers RAM:
//!   the new mapping would be a hole in what is watched. The hook holds the lock until it has mapped, and the server
//!   makes a userfaultfd only with the lock. The daemon gets it, and registers, after the mapping.
//! * A hook takes the kept descriptor's number, and uses it. Meanwhile the server closes it, and the number becomes
//!   another file's. The hook holds the lock over the call, and the server closes only with the lock.
//! * A hook finds its block, and maps. Meanwhile another thread of QEMU's unmaps the block, and something else is put
//!   there. Who unmaps takes the block from the table first, and then waits for the lock (`remap.rs`).
//! * A daemon says that it is done, and a mapping is replaced before its descriptor is closed. Nobody relies on the
//!   registration any more: the daemon says so last.
//! * A daemon dies that was lent the userfaultfd, and nobody says that it is done. Discards go on taking the slower way
//!   until the next daemon opens or closes one. That is right, but a discarded page may keep memory.
//!
//! The lock is held over a few system calls of one hook, or of the server, and never while guest RAM is touched: a
//! touch may wait for the daemon, which may wait for the server.

use core::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use libc::c_int;

use crate::raw;

static LOCKED: AtomicBool = AtomicBool::new(false);

/// The number of the kept userfaultfd, or one of these two. Read and written with the lock only.
static STATE: AtomicI32 = AtomicI32::new(NOBODY);
const NOBODY: c_int = -1;
const LENT: c_int = -2;

/// What is known of userfaultfds of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Watch {
    /// None is open.
    Nobody,
    /// The server keeps this one.
    Kept(c_int),
    /// A daemon alone has one.
    Lent,
}

/// The lock, held until this is dropped.
pub struct Watched(());

/// Takes the lock. Its holders are quick, so it yields and does not sleep.
pub fn lock() -> Watched {
    while LOCKED.compare_exchange_weak(false, true, Ordering::Acquire, Ordering::Relaxed).is_err() {
        raw::yield_now();
    }
    Watched(())
}

impl Watched {
    /// What is known.
    pub fn state(&self) -> Watch {
        match STATE.load(Ordering::Relaxed) {
            NOBODY => Watch::Nobody,
            LENT => Watch::Lent,
            kept => Watch::Kept(kept),
        }
    }

    /// Changes it.
    pub fn set(&self, watch: Watch) {
        let state = match watch {
            Watch::Nobody => NOBODY,
            Watch::Lent => LENT,
            Watch::Kept(number) => number,
        };
        STATE.store(state, Ordering::Relaxed);
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        LOCKED.store(false, Ordering::Release);
    }
}

/// Waits until nobody holds the lock who held it at the call.
pub fn wait() {
    drop(lock());
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    #[test]
    fn one_thread_at_a_time_has_the_lock_and_finds_what_the_last_one_left() {
        let counted = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for number in 3..6 {
                let counted = &counted;
                scope.spawn(move || {
                    for _ in 0..2000 {
                        let watched = lock();
                        let before = counted.load(Ordering::Relaxed);
                        watched.set(Watch::Kept(number));
                        assert_eq!(watched.state(), Watch::Kept(number));
                        watched.set(Watch::Lent);
                        assert_eq!(watched.state(), Watch::Lent);
                        counted.store(before + 1, Ordering::Relaxed);
                    }
                });
            }
        });
        lock().set(Watch::Nobody);
        assert_eq!((lock().state(), counted.into_inner()), (Watch::Nobody, 6000));
    }
}
