//! Pages that come after the guest's start: faults on missing ones, arrivals, and the account of both.

/// Which pages are not here yet.
pub mod missing;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use self::missing::Missing;
use crate::error::MigrateError;
use crate::host::{BlockFile, PagingMeans};

/// Brings the pages of one guest that runs here before all of them are here.
pub struct Pager {
    missing: Mutex<Missing>,
}

impl Pager {
    /// Goes on with a guest that an earlier daemon let run. Faulting threads wait until a source is there again.
    ///
    /// # Errors
    /// What an earlier daemon left cannot be read, or the VMM keeps no userfaultfd: then pages are lost.
    pub fn recover(_blocks: &[BlockFile], _means: PagingMeans) -> Result<Arc<Self>, MigrateError> {
        Err(MigrateError::Reply("not here yet"))
    }

    /// Pages that are not here yet.
    #[must_use]
    pub fn missing(&self) -> u64 {
        self.lock().left()
    }

    /// For how long there has been no source to bring pages; `None` where there is one.
    #[must_use]
    pub fn alone(&self) -> Option<Duration> {
        None
    }

    fn lock(&self) -> MutexGuard<'_, Missing> {
        self.missing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
