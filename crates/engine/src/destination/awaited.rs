//! Pages of one machine whose bodies are another page's, and still to come.
//!
//! A reference can arrive before its body, which travels on another machine's connection. The page waits here, and
//! nobody waits with it: whoever brings the body into the pool says so, and a thread of the page's own machine puts the
//! page into its place. So a VMM that does not answer holds up its own machine and no other. At a round's end those
//! that are left are waited for, as long as bodies keep coming; then their source is asked for them.
//!
//! # A page that is not waited for any more is never written
//! When a wait is over, its pages may come again with other content. Whoever has found a body for one of them before
//! may be late:
//! * bodies that had come and were not in their places are forgotten, and what the thread has in hand is waited for
//! * who says only then that a body is there names a turn that is over, also where the page waits for another body now

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use sterna_protocol::frame::shared::References;
use sterna_protocol::layout::{CHUNK_PAGES, ChunkIndex};
use sterna_protocol::pages::{PageMap, PageSet};
use sterna_protocol::standstill::Standstill;

use super::arrival::{Arrival, Pooled};
use super::pool::{Found, Pool, PoolError, Waits};
use super::target::Target;
use crate::error::MigrateError;
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
    /// Never held while the VMM is asked for something: others of the gang lock it.
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    /// The pages that wait.
    pages: PageMap,
    /// The number of waits that are over.
    turn: u64,
    /// Pages that have waited for bodies that are there now, and where those lie, in the order in which they came.
    come: VecDeque<(ChunkIndex, Vec<PoolRun>)>,
    /// Some are being put into their places.
    in_hand: bool,
    /// How many times some were: progress.
    put: u64,
    /// References to bodies that had not come, since the last wait.
    references: u64,
    /// The machine waits for nothing any more.
    ended: bool,
}

impl Awaited {
    /// Nothing is awaited.
    pub(super) fn nothing(ram: Arc<dyn Memory>, pager: Option<Arc<Pager>>) -> Arc<Self> {
        let pages = PageMap::empty(ram.layout());
        let (come, in_hand, ended) = (VecDeque::new(), false, false);
        let state = Mutex::new(State { pages, turn: 0, come, in_hand, put: 0, references: 0, ended });
        Arc::new(Self { ram, pager, state, changed: Condvar::new() })
    }

    /// Waits until nothing is awaited, for as long as bodies come into the pool. Returns the pages that nobody brings;
    /// they are not waited for any more.
    pub(super) fn wait(&self, pool: &Pool) -> PageMap {
        let began = Instant::now();
        let mut state = self.lock();
        let mut standstill = Standstill::new(1, STANDSTILL, pool.bodies() + state.put, Duration::ZERO);
        let mut over =
            |state: &State| began.elapsed() > LONGEST || standstill.is_over(pool.bodies() + state.put, began.elapsed());
        while !state.pages.is_empty() && !over(&state) {
            state = self.wait_a_moment(state);
        }
        let left = std::mem::replace(&mut state.pages, PageMap::empty(self.ram.layout()));
        state.come.clear();
        state.turn += 1;
        let references = std::mem::take(&mut state.references);
        // It may be in its place then, and comes once more for nothing.
        while state.in_hand {
            state = self.wait_a_moment(state);
        }
        drop(state);
        if !left.is_empty() {
            tracing::info!(pages = left.len(), "shared bodies have not come: their pages are asked for");
        }
        if references > 0 {
            pool.forget(self);
        }
        left
    }

    fn wait_a_moment<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait_timeout(state, LOOK).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Puts pages into their places whose bodies have come, until the end. Where that fails they go on waiting, until
    /// they are asked for.
    pub(super) fn put_what_comes(&self, pool: &Pool) {
        let mut state = self.lock();
        while !state.ended {
            let Some((chunk, runs)) = state.come.pop_front() else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let runs: Vec<_> = runs.iter().flat_map(|run| run.within(state.pages.chunk(chunk))).collect();
            if runs.is_empty() {
                continue;
            }
            state.in_hand = true;
            drop(state);
            let target = Target::of(self.ram.as_ref(), self.pager.as_deref());
            let put = target.put(&Arrival::pooled(chunk, Pooled { runs: &runs, pool: pool.reader() }));
            state = self.lock();
            state.in_hand = false;
            match put {
                Ok(()) => {
                    let waits = state.pages.chunk_mut(chunk);
                    *waits = waits.without(&PoolRun::pages(&runs));
                    state.put += 1;
                }
                Err(error) => tracing::warn!(%error, "cannot map pages that have waited for their bodies"),
            }
            self.changed.notify_all();
        }
    }

    pub(super) fn end(&self) {
        self.lock().ended = true;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waits for Awaited {
    fn expect(&self, chunk: ChunkIndex, pages: &PageSet) -> Option<u64> {
        let pages_in_all = u64::from(self.ram.layout().chunks()) * CHUNK_PAGES as u64;
        let mut state = self.lock();
        let references = state.references + pages.len() as u64;
        let bounded = references <= REFERENCES_PER_PAGE * pages_in_all;
        bounded.then(|| {
            state.references = references;
            state.pages.insert_all(chunk, pages);
            state.turn
        })
    }

    fn came(&self, turn: u64, chunk: ChunkIndex, runs: Vec<PoolRun>) {
        let mut state = self.lock();
        if state.turn == turn {
            state.come.push_back((chunk, runs));
            self.changed.notify_all();
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
    /// The thread that puts pages into their places which have waited for their bodies.
    thread: Option<JoinHandle<()>>,
}

impl Membership {
    /// The membership of a machine with this RAM, which waits for nothing yet.
    ///
    /// # Errors
    /// Its thread cannot be started.
    pub fn new(
        pool: Arc<Pool>,
        member: u16,
        ram: Arc<dyn Memory>,
        pager: Option<Arc<Pager>>,
    ) -> Result<Self, MigrateError> {
        let awaited = Awaited::nothing(ram, pager);
        let (of_thread, its_pool) = (Arc::clone(&awaited), Arc::clone(&pool));
        let put = move || of_thread.put_what_comes(&its_pool);
        let thread = std::thread::Builder::new().name("pooled".into()).spawn(put);
        let thread = thread.map_err(MigrateError::host("starting a thread for pages that wait for their bodies"))?;
        let waits: Arc<dyn Waits> = Arc::<Awaited>::clone(&awaited);
        Ok(Self { pool, member, awaited, waits, thread: Some(thread) })
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
    /// A machine that does not come any more waits for nothing. The pool is held until nothing is mapped from it any
    /// more.
    fn drop(&mut self) {
        self.awaited.end();
        self.pool.forget(self.awaited.as_ref());
        if let Some(thread) = self.thread.take() {
            // A panic of the thread is a bug, and was reported.
            let _ = thread.join();
        }
    }
}
