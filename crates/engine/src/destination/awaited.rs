//! Pages of one machine whose bodies are another page's, and still to come.
//!
//! A reference can arrive before its body, which travels on another machine's connection. The page waits here, and
//! nobody waits with it: whoever brings the body into the pool puts the page into its place. At a round's end those
//! that are left are waited for, as long as bodies keep coming; then their source is asked for them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sterna_protocol::frame::shared::References;
use sterna_protocol::layout::{CHUNK_PAGES, ChunkIndex};
use sterna_protocol::pages::{PageMap, PageSet};
use sterna_protocol::standstill::Standstill;

use super::arrival::{Arrival, Pooled};
use super::pool::{Found, Pool, PoolError, Waits};
use super::target::Target;
use crate::memory::{Memory, PoolRun};
use crate::paging::Pager;

/// How long no body may come into the gang's pool before the pages that wait for one are asked for. Their bodies were
/// on their way when they were referred to.
const STANDSTILL: Duration = Duration::from_secs(3);
/// How long a wait may take in all: the source waits, too.
const LONGEST: Duration = Duration::from_secs(15);
/// How often a page can refer to bodies that have not come, on the average, before a wait is over: once in a round, and
/// once more while the guest runs, because it was asked for.
const REFERENCES_PER_PAGE: u64 = 4;
/// How often a wait looks for new bodies.
const LOOK: Duration = Duration::from_millis(100);

/// The pages of one machine that wait for bodies.
#[derive(Debug)]
pub struct Awaited {
    ram: Arc<dyn Memory>,
    pager: Option<Arc<Pager>>,
    /// Held while a page is put into its place: a page that is not waited for any more is never written.
    pages: Mutex<PageMap>,
    /// References to bodies that had not come, since nothing was awaited.
    references: AtomicU64,
    changed: Condvar,
}

impl Awaited {
    /// Nothing is awaited.
    #[must_use]
    pub fn nothing(ram: Arc<dyn Memory>, pager: Option<Arc<Pager>>) -> Arc<Self> {
        let pages = Mutex::new(PageMap::empty(ram.layout()));
        Arc::new(Self { ram, pager, pages, references: AtomicU64::new(0), changed: Condvar::new() })
    }

    /// Waits until nothing is awaited, for as long as bodies come into the pool. Returns the pages that nobody brings;
    /// they are not waited for any more.
    pub(super) fn wait(self: &Arc<Self>, pool: &Pool) -> PageMap {
        let began = Instant::now();
        let mut standstill = Standstill::new(1, STANDSTILL, pool.bodies(), Duration::ZERO);
        let mut awaited = self.lock();
        let over = |standstill: &mut Standstill| {
            began.elapsed() > LONGEST || standstill.is_over(pool.bodies(), began.elapsed())
        };
        while !awaited.is_empty() && !over(&mut standstill) {
            awaited = self.changed.wait_timeout(awaited, LOOK).unwrap_or_else(PoisonError::into_inner).0;
        }
        let left = awaited.clone();
        awaited.clear();
        drop(awaited);
        if !left.is_empty() {
            tracing::info!(pages = left.len(), "shared bodies have not come: their pages are asked for");
        }
        if self.references.swap(0, Ordering::Relaxed) > 0 {
            pool.forget(self.as_ref());
        }
        left
    }

    fn lock(&self) -> MutexGuard<'_, PageMap> {
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waits for Awaited {
    fn expect(&self, chunk: ChunkIndex, pages: &PageSet) -> bool {
        let pages_in_all = u64::from(self.ram.layout().chunks()) * CHUNK_PAGES as u64;
        let before = self.references.fetch_add(pages.len() as u64, Ordering::Relaxed);
        let bounded = before + pages.len() as u64 <= REFERENCES_PER_PAGE * pages_in_all;
        if bounded {
            self.lock().insert_all(chunk, pages);
        }
        bounded
    }

    /// The pages that still wait get into their places. Where that fails they go on waiting, until they are asked for.
    fn came(&self, pool: &Pool, chunk: ChunkIndex, runs: Vec<PoolRun>) {
        let mut awaited = self.lock();
        let runs: Vec<_> = runs.iter().flat_map(|run| run.within(awaited.chunk(chunk))).collect();
        if runs.is_empty() {
            return;
        }
        let target = Target::of(self.ram.as_ref(), self.pager.as_deref());
        match target.put(&Arrival::pooled(chunk, Pooled { runs: &runs, pool: pool.reader() })) {
            Ok(()) => {
                let waits = awaited.chunk_mut(chunk);
                *waits = waits.without(&PoolRun::pages(&runs));
                self.changed.notify_all();
            }
            Err(error) => tracing::warn!(%error, "cannot map pages that have waited for their bodies"),
        }
    }
}

/// A machine's membership of a gang whose pages arrive here.
#[derive(Debug)]
pub struct Membership {
    /// The gang's pool.
    pub pool: Arc<Pool>,
    /// Which member it is.
    pub member: u16,
    awaited: Arc<Awaited>,
    /// The same, as the pool knows it.
    waits: Arc<dyn Waits>,
}

impl Membership {
    /// The membership of a machine with this RAM, which waits for nothing yet.
    #[must_use]
    pub fn new(pool: Arc<Pool>, member: u16, ram: Arc<dyn Memory>, pager: Option<Arc<Pager>>) -> Self {
        let awaited = Awaited::nothing(ram, pager);
        let waits: Arc<dyn Waits> = Arc::<Awaited>::clone(&awaited);
        Self { pool, member, awaited, waits }
    }

    /// As [`Pool::find`].
    ///
    /// # Errors
    /// As [`Pool::find`].
    pub fn find(&self, chunk: ChunkIndex, references: &[References]) -> Result<Vec<Found<'_>>, PoolError> {
        self.pool.find(&self.waits, chunk, references)
    }

    /// Waits until nothing is awaited, for as long as bodies come into the pool. Returns the pages that nobody brings;
    /// they are not waited for any more.
    #[must_use]
    pub fn settle(&self) -> PageMap {
        self.awaited.wait(&self.pool)
    }
}

impl Drop for Membership {
    /// A machine that does not come any more waits for nothing.
    fn drop(&mut self) {
        self.pool.forget(self.awaited.as_ref());
    }
}
