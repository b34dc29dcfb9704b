//! What all threads of a migration share after the switchover, over all its sessions.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};

use sterna_api::MigrateOptions;
use sterna_api::options::{Compress, Prepaging, SkipFree};
use sterna_protocol::layout::ChunkIndex;
use sterna_protocol::pages::{PageMap, PageSet};

use super::pending::Pending;
use super::tally::Tally;
use crate::error::MigrateError;
use crate::host::{DaemonId, MigrationId, SourceHost};
use crate::memory::Memory;
use crate::monitor::Monitor;
use crate::source::encode::Meter;
use crate::transport::pacer::Pacer;
use crate::transport::share::Share;

/// What all threads of a migration's post-copy share, over all its sessions.
pub struct Work {
    /// The guest's RAM, which stands still from the switchover on.
    pub ram: Arc<dyn Memory>,
    /// The order of the push.
    pub prepaging: Prepaging,
    /// The number that frames carry as their round.
    pub round: u32,
    /// The limits that were asked for.
    pub pacer: Pacer,
    /// The lowest of them, bytes per second.
    pub limit: Option<u64>,
    /// How hard pushed pages are compressed, where they are.
    pub compression: Option<Meter>,
    /// What the push leaves of the link for faults, bytes per second.
    pub spare: AtomicU64,
    /// Pages that the guest held free when it stopped: they are zeros there, whatever they hold here. `None` where that
    /// is not known, because an earlier daemon looked: then they go as they are, which is as right.
    free: Mutex<Option<Arc<PageMap>>>,
    /// What was done.
    pub tally: Tally,
}

impl Work {
    /// Nothing done yet.
    #[must_use]
    pub fn new(ram: Arc<dyn Memory>, options: &MigrateOptions, bandwidth: &Arc<Share>, round: u32) -> Arc<Self> {
        let limits = [options.bandwidth_bytes_per_s, options.postcopy_bandwidth_bytes_per_s];
        let limit = limits.into_iter().flatten().min();
        let compress = options.compress != Compress::Off;
        let nothing = (options.skip_free == SkipFree::Off).then(|| Arc::new(PageMap::empty(ram.layout())));
        Arc::new(Self {
            prepaging: options.prepaging,
            round,
            pacer: Pacer::new(limit, bandwidth),
            limit,
            free: Mutex::new(nothing),
            ram,
            compression: compress.then(|| Meter::new(options.compress, options.compress_level)),
            spare: AtomicU64::new(0),
            tally: Tally::default(),
        })
    }

    /// Says which pages the guest held free: before any of them can be asked for, and again where the VMM wrote some of
    /// them while it saved its devices. What was taken to be sent in between went as was said before: whoever says it
    /// again looks which pages those are.
    pub fn set_free(&self, free: PageMap) {
        *self.free.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(free));
    }

    /// Those of a chunk, as far as it is known.
    #[must_use]
    pub fn free_in(&self, chunk: ChunkIndex) -> PageSet {
        self.free().map_or(PageSet::EMPTY, |free| *free.chunk(chunk))
    }

    /// All of them; `None` where they are not known.
    #[must_use]
    pub fn free(&self) -> Option<Arc<PageMap>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// A set of pending pages in the order that was asked for, with none in it.
    #[must_use]
    pub fn nothing_pending(&self) -> Arc<Pending> {
        Arc::new(Pending::new(self.ram.layout(), self.prepaging))
    }
}

/// A migration whose guest runs at the destination.
pub struct Context<'a> {
    /// Which.
    pub id: MigrationId,
    /// Where the destination was when it began.
    pub peer: &'a str,
    /// Which daemon took the guest, where that is known: the pages go to no other.
    pub daemon: Option<DaemonId>,
    /// How it is to be done.
    pub options: &'a MigrateOptions,
    /// The daemon.
    pub host: &'a dyn SourceHost,
    /// Progress.
    pub monitor: &'a Monitor,
    /// What the threads share.
    pub work: Arc<Work>,
}

/// A thread of a post-copy session.
pub(super) fn no_thread() -> impl FnOnce(std::io::Error) -> MigrateError {
    MigrateError::host("starting a thread that sends pages")
}
