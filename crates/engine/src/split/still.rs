//! Whether a split stands still, because its guest is being handed on to another host, or to this one.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};
use std::time::{Duration, Instant};

use super::room::Room;

/// How often it is looked whether what is on its way has come.
const LOOK: Duration = Duration::from_micros(100);

/// While it stands still nothing comes but what the VMM waits for, and nothing is changed at memory hosts.
#[derive(Debug, Default)]
pub(super) struct Still {
    on: AtomicBool,
    /// Held for reading by whoever brings pages.
    coming: RwLock<()>,
    /// How much of the guest may be here, once it goes on.
    room: Mutex<Option<Room>>,
}

impl Still {
    /// Whether it stands still.
    pub fn is_on(&self) -> bool {
        self.on.load(Ordering::Acquire)
    }

    /// It does from now on.
    pub fn begin(&self) {
        self.on.store(true, Ordering::Release);
    }

    /// The same, and what is on its way has come: for as long as this is kept nothing comes at all. `None` where that
    /// takes longer than `patience`.
    pub fn stand(&self, patience: Duration) -> Option<RwLockWriteGuard<'_, ()>> {
        self.begin();
        let deadline = Instant::now() + patience;
        loop {
            match self.coming.try_write() {
                Ok(nobody) => return Some(nobody),
                Err(TryLockError::Poisoned(nobody)) => return Some(nobody.into_inner()),
                Err(TryLockError::WouldBlock) if Instant::now() < deadline => std::thread::sleep(LOOK),
                Err(TryLockError::WouldBlock) => return None,
            }
        }
    }

    /// Pages are on their way here until this is dropped.
    pub fn coming(&self) -> RwLockReadGuard<'_, ()> {
        self.coming.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// How much of the guest may be here, once it [goes on](Self::end): the first that is said counts.
    pub fn before(&self, room: Room) {
        self.room().get_or_insert(room);
    }

    /// It goes on. Returns how much of the guest may be here, where that was said.
    pub fn end(&self) -> Option<Room> {
        self.on.store(false, Ordering::Release);
        self.room().take()
    }

    fn room(&self) -> std::sync::MutexGuard<'_, Option<Room>> {
        self.room.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
