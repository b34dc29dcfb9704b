//! The state that all threads of a migration share after the switchover, over all its sessions.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use sterna_api::MigrateOptions;
use sterna_api::options::{Compress, Prepaging, SkipFree};
use sterna_protocol::layout::ChunkIndex;
use sterna_protocol::pages::{PageMap, PageSet};

use super::leaving::Leaving;
use super::pending::Pending;
use super::tally::Tally;
use crate::error::MigrateError;
use crate::host::{DaemonId, MigrationId, SourceHost};
use crate::memory::Memory;
use crate::monitor::Monitor;
use crate::source::encode::Meter;
use crate::split::Split;
use crate::transport::pacer::Pacer;
use crate::transport::share::Share;

/// The state that all threads of a migration's post-copy share, over all its sessions.
pub struct Work {
    /// The guest's RAM, which stands still from the switchover on.
    pub ram: Arc<dyn Memory>,
    /// The order of the push.
    pub prepaging: Prepaging,
    /// The number that frames carry as their round.
    pub round: u32,
    /// The pacer for the limits of the options.
    pub pacer: Pacer,
    /// The compression of pushed pages, if any.
    pub compression: Option<Meter>,
    /// The part of the link that the push leaves for faults, bytes per second.
    pub spare: AtomicU64,
    /// Pages that the guest held free when it stopped: they are zeros there, whatever they hold here. `None` where an
    /// earlier daemon looked, so that they are not known: then they go as they are, which is correct too.
    free: Mutex<Option<Arc<PageMap>>>,
    /// Pages of a split guest that are at memory hosts, as the destination was told: neither side compares them.
    pub away: OnceLock<PageMap>,
    /// What pages held that left before the commit.
    pub leaving: Leaving,
    /// The tally of what was done.
    pub tally: Tally,
}

impl Work {
    /// Begins, with nothing done yet.
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
            free: Mutex::new(nothing),
            ram,
            compression: compress.then(|| Meter::new(options.compress, options.compress_level)),
            spare: AtomicU64::new(0),
            away: OnceLock::new(),
            leaving: Leaving::default(),
            tally: Tally::default(),
        })
    }

    /// Sets the pages that the guest held free: before any of them can be requested, and again where the VMM wrote some
    /// of them while it saved its devices. Pages that were taken in between went by the earlier set: a caller that sets
    /// it again must check which pages those are.
    pub fn set_free(&self, free: PageMap) {
        *self.free.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(free));
    }

    /// The free pages of a chunk, as far as they are known.
    #[must_use]
    pub fn free_in(&self, chunk: ChunkIndex) -> PageSet {
        self.free().map_or(PageSet::EMPTY, |free| *free.chunk(chunk))
    }

    /// All free pages; `None` where they are not known.
    #[must_use]
    pub fn free(&self) -> Option<Arc<PageMap>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// An empty set of pending pages, with the order of the push that was asked for.
    #[must_use]
    pub fn nothing_pending(&self) -> Arc<Pending> {
        Arc::new(Pending::new(self.ram.layout(), self.prepaging))
    }
}

/// A migration whose guest runs at the destination.
pub struct Context<'a> {
    /// The migration's number.
    pub id: MigrationId,
    /// The destination's address when the migration began.
    pub peer: &'a str,
    /// The daemon that took the guest, where that is known: the pages go to no other.
    pub daemon: Option<DaemonId>,
    /// The migration's options.
    pub options: &'a MigrateOptions,
    /// The daemon here.
    pub host: &'a dyn SourceHost,
    /// Progress and cancelling.
    pub monitor: &'a Monitor,
    /// The state that the threads share.
    pub work: Arc<Work>,
    /// The memory hosts of a split guest, where this daemon knows them.
    pub split: Option<&'a Split>,
}

/// The error where a thread of post-copy could not be started.
pub(super) fn no_thread() -> impl FnOnce(std::io::Error) -> MigrateError {
    MigrateError::host("starting a thread that sends pages")
}
