//! Phase *postcopy*: the guest runs at the destination, and the rest of its pages follow.
//!
//! ```text
//!   faults connection  ──▶ urgent: asked for ─┐
//!                                             ├─ pending: each page is taken once ── frames ──▶ urgent, pages(i) connections
//!   pacing ──▶ push, one per connection ──────┘
//!   control            ◀─▶ drive: heartbeat, Complete, verify, Release
//!   whatever breaks    ──▶ everything is hung up; resume: connect anew, ask what is missing, go on
//! ```
//!
//! The source's guest never runs again, and its RAM stands still: what is read here is what the guest wrote last. So a page needs no second
//! look, only to arrive; and where a link or a daemon fails nothing is lost but time, as long as this RAM and the destination live.

/// Which pages are still here and not there.
pub mod pending;

/// What faults ask for.
pub mod requests;

/// Pages as they travel.
pub mod bodies;

/// What they ask for, sent at once.
pub mod urgent;

/// The rest, beside it.
pub mod push;

/// How fast the rest goes.
pub mod pacing;

/// What ends all of it together.
pub mod ends;

/// One session from its first page to its last.
pub mod drive;

/// Over lost links and restarts.
pub mod resume;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use sterna_api::options::{Compress, Prepaging, SkipFree};
use sterna_api::report::Report;
use sterna_api::{MigrateOptions, Phase};
use sterna_protocol::layout::{ChunkIndex, PAGE_BYTES};
use sterna_protocol::pages::{PageMap, PageSet};

use self::drive::Begun;
use self::pending::Pending;
use super::account::Account;
use super::departure::Departure;
use super::encode::Meter;
use super::encode::compress::Did;
use super::link::Link;
use super::prepare::Prepared;
use super::select::Counts;
use super::stream::Stream;
use crate::error::MigrateError;
use crate::host::{DaemonId, MigrationId, SourceHost};
use crate::memory::Memory;
use crate::monitor::Monitor;
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
    /// Pages that the guest held free when it stopped: they are zeros there, whatever they hold here. `None` where that is not known, because an earlier
    /// daemon looked: then they go as they are, which is as right.
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

    /// Says which pages the guest held free: before any of them can be asked for, and again where the VMM wrote some of them while it saved its
    /// devices. What was taken to be sent in between went as was said before: whoever says it again looks which pages those are.
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

/// What was done, by all threads.
#[derive(Debug, Default)]
pub struct Tally {
    full: AtomicU64,
    zero: AtomicU64,
    free: AtomicU64,
    faulted: AtomicU64,
    pushed: AtomicU64,
    bytes: AtomicU64,
    /// Of them, those that went because of faults, neighbours among them.
    asked_bytes: AtomicU64,
    cpu_us: AtomicU64,
    compressed: Mutex<Did>,
}

impl Tally {
    /// A frame went: where its pages went, its bytes, and whether a fault asked for it.
    fn sent(&self, counts: &Counts, bytes: u64, asked: bool) {
        self.full.fetch_add(counts.full, Ordering::Relaxed);
        self.zero.fetch_add(counts.zero, Ordering::Relaxed);
        self.free.fetch_add(counts.free, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        let pages = if asked { &self.faulted } else { &self.pushed };
        pages.fetch_add(counts.pages(), Ordering::Relaxed);
    }

    /// A thread of its own ends, this one: its processor time, and what it compressed.
    fn thread_ends(&self, did: Did) {
        self.cpu_us.fetch_add(sterna_sys::process::thread_cpu_time().as_micros() as u64, Ordering::Relaxed);
        *self.compressed.lock().unwrap_or_else(PoisonError::into_inner) += did;
    }

    /// So many of the bytes went because of a fault.
    fn because_of_a_fault(&self, bytes: u64) {
        self.asked_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Bytes that went because of faults so far.
    #[must_use]
    pub fn asked(&self) -> u64 {
        self.asked_bytes.load(Ordering::Relaxed)
    }

    /// Pages and bytes so far.
    #[must_use]
    pub fn so_far(&self) -> (u64, u64) {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        (get(&self.faulted) + get(&self.pushed), get(&self.bytes))
    }

    /// Adds it to a report.
    pub(super) fn write(&self, report: &mut Report) {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let full = get(&self.full);
        report.pages.full += full;
        report.pages.sent += full;
        report.pages.zero += get(&self.zero);
        report.pages.free += get(&self.free);
        report.pages.faulted += get(&self.faulted);
        report.pages.pushed += get(&self.pushed);
        report.bytes_on_wire += get(&self.bytes);
        report.bytes_raw += full * PAGE_BYTES as u64;
        report.source.cpu_s += Duration::from_micros(get(&self.cpu_us)).as_secs_f64();
        let did = *self.compressed.lock().unwrap_or_else(PoisonError::into_inner);
        report.encoding.compression.pages += did.pages;
        report.encoding.compression.bytes += did.bytes;
        report.encoding.compression.plain_pages += did.plain_pages;
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

/// What the switchover leaves to post-copy.
pub struct Handed {
    work: Arc<Work>,
    /// The connections that stand, with what serves faults on one of them.
    standing: Option<Standing>,
}

struct Standing {
    begun: Begun,
    streams: Vec<Stream>,
    /// What the link carried before, bytes per second, where that is known.
    known: Option<u64>,
}

impl Handed {
    /// From a machine whose guest has gone; `stands` is whether the session's connections still do.
    ///
    /// # Panics
    /// It was not agreed that pages follow the guest. No error: an error would let the guest run on here.
    pub fn new(prepared: Prepared, stands: bool) -> Self {
        let Prepared { mut rounds, begun, .. } = prepared;
        let begun = begun.expect("pages follow only where that was agreed");
        let (work, known) = (Arc::clone(&begun.work), rounds.fastest());
        let streams = std::mem::take(&mut rounds.streams);
        Self { work, standing: stands.then_some(Standing { begun, streams, known }) }
    }
}

/// Sends the rest of the pages after the guest, over the connections that stand, and where they do not, or not any more, over new
/// ones, until all are there.
pub fn postcopy(departure: &mut Departure, link: Link, handed: Handed) {
    let Handed { work, standing } = handed;
    let session = standing.and_then(|Standing { begun, streams, known }| begun.session(link, streams, known).ok());
    let Departure { id, peer, daemon, options, host, monitor, .. } = *departure;
    see_through(&Context { id, peer, daemon, options, host, monitor, work }, session, &mut departure.account);
}

/// Sees it through, from a session that stands or from none, and writes into the report what became of it.
pub fn see_through(context: &Context, first: Option<drive::Session>, account: &mut Account) {
    context.monitor.enter(Phase::Postcopy);
    resume::Journey::new(context).go(first, account);
    account.pages_after_switchover(&context.work.tally);
}

/// A thread of a post-copy session.
fn no_thread() -> impl FnOnce(std::io::Error) -> MigrateError {
    MigrateError::host("starting a thread that sends pages")
}
