//! Pages that are too many for the guest's next host go past it, straight to the memory hosts of a split guest.
//!
//! The guest's next host is its owner and says which chunks, to whom and in which version and epoch; this host puts
//! them there in its name (`split/straight.rs` is the other side). The RAM stands still, so what a memory host keeps is
//! compared with that and with nothing else. Pages of zeros follow the guest as ever: they cost nothing.
//!
//! A page counts as gone only once the guest's owner has said that it takes it from there. Until then a fault may ask
//! for it, and what came to nothing is pushed.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sterna_protocol::errand::{Errand, MAX_ERRANDS, Put};
use sterna_protocol::hello::Features;
use sterna_protocol::layout::PAGE_BYTES;
use sterna_protocol::message::{Reply, Request};
use sterna_protocol::pages::PageSet;
use sterna_sys::iovec::Outgoing;

use super::ends::Ends;
use super::pending::Pending;
use super::work::Work;
use crate::error::MigrateError;
use crate::memory::{for_each_body, is_zero};
use crate::source::encode::compress::Did;
use crate::source::link::Link;
use crate::split::Split;
use crate::store::client::{MemoryHost, StoreError};
use crate::transport::control::REPLY_TIMEOUT;

/// How long a memory host may say nothing.
const PATIENCE: Duration = Duration::from_secs(1);
/// How often the destination is asked that has no errand.
const AGAIN: Duration = Duration::from_millis(100);

/// What is to be put at memory hosts, and what was.
#[derive(Debug, Default)]
pub struct Errands {
    state: Mutex<State>,
    /// One has come, or the end.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    due: VecDeque<Due>,
    /// Those that the destination knows of, and has not heard of since.
    known: Vec<Errand>,
    done: Vec<Put>,
    /// When the destination was last asked.
    asked: Option<Instant>,
    over: bool,
}

/// An errand that is to be done.
#[derive(Debug)]
struct Due {
    errand: Errand,
    /// In which epoch.
    epoch: u64,
    /// What was set aside for it.
    pages: PageSet,
}

impl Errands {
    /// Whether the destination is to be asked: something is done, or nothing is to be done.
    #[must_use]
    pub fn has_news(&self) -> bool {
        let state = self.lock();
        let is_idle = state.known.is_empty() && state.asked.is_none_or(|asked| asked.elapsed() >= AGAIN);
        is_idle || !state.done.is_empty()
    }

    /// No more are done.
    pub fn end(&self) {
        self.lock().over = true;
        self.changed.notify_all();
    }

    /// Tells the destination what is done, and asks it what is next, for so many memory hosts.
    ///
    /// # Errors
    /// The link broke, or the destination says what makes no sense.
    pub fn ask(&self, link: &mut Link, hosts: usize, pending: &Pending, work: &Work) -> Result<(), MigrateError> {
        let put = std::mem::take(&mut self.lock().done);
        let request = Request::Straight { put: put.clone() };
        let Reply::Straight { taken, epoch, errands } = link.control.ask(&request, REPLY_TIMEOUT)? else {
            return Err(MigrateError::Reply("another reply than what goes straight to memory hosts"));
        };
        let is_known =
            |errand: &Errand| errand.chunk.0 < work.ram.layout().chunks() && usize::from(errand.host) < hosts;
        if taken.len() != put.len() || errands.len() > MAX_ERRANDS || !errands.iter().all(is_known) {
            return Err(MigrateError::Reply("an account of other pages than can go to memory hosts"));
        }
        let mut state = self.lock();
        for (Put { chunk, pages, .. }, taken) in put.iter().zip(taken) {
            state.known.retain(|errand| errand.chunk != *chunk);
            let pages = PageSet::from_bytes(pages);
            let taken = PageSet::from_bytes(&taken).and(&pages);
            pending.went(*chunk, &taken);
            pending.put_back(*chunk, &pages);
            work.tally.went_straight(taken.len() as u64);
        }
        state.asked = Some(Instant::now());
        for errand in errands {
            if !state.known.contains(&errand) {
                state.known.push(errand);
                let pages = pending.set_aside(errand.chunk);
                state.due.push_back(Due { errand, epoch, pages });
            }
        }
        self.changed.notify_all();
        Ok(())
    }

    /// Waits for the next one for a memory host; `None` at the end.
    fn next(&self, host: u8) -> Option<Due> {
        let is_due = |due: &Due| due.errand.host == host;
        let idle = |state: &mut State| !state.over && !state.due.iter().any(is_due);
        let mut state = self.changed.wait_while(self.lock(), idle).unwrap_or_else(PoisonError::into_inner);
        let at = state.due.iter().position(is_due).filter(|_| !state.over)?;
        state.due.remove(at)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The memory hosts of a split guest that pages can go straight to: none where its next host does not know of that.
#[must_use]
pub fn possible<'a>(split: Option<&'a Split>, link: &Link) -> Vec<(&'a Split, u8)> {
    let split = split.filter(|_| link.control.features().contains(Features::STRAIGHT));
    split.map_or_else(Vec::new, |split| (0..split.memory_hosts()).map(|number| (split, number as u8)).collect())
}

/// Does errands for one of the memory hosts until they are over, as they are where the session ends.
pub fn run((split, host): (&Split, u8), errands: &Errands, pending: &Pending, work: &Work, ends: &Ends) {
    let mut way = Way { split, number: host, pending, work, line: None };
    while let Some(due) = errands.next(host) {
        let put = way.carry_out(&due, ends);
        errands.lock().done.push(put);
        ends.wake();
    }
    work.tally.thread_ends(Did::default());
}

struct Way<'a> {
    split: &'a Split,
    number: u8,
    pending: &'a Pending,
    work: &'a Work,
    /// To the memory host, in this epoch.
    line: Option<(u64, MemoryHost)>,
}

impl Way<'_> {
    /// What came of an errand. What is not at the memory host as it is here is pushed.
    fn carry_out(&mut self, due: &Due, ends: &Ends) -> Put {
        let put = self.put(due, ends).unwrap_or_else(|error| {
            tracing::debug!(%error, "pages do not go straight to a memory host");
            self.line = None;
            None
        });
        let pages = put.unwrap_or(PageSet::EMPTY);
        self.pending.put_back(due.errand.chunk, &due.pages.without(&pages));
        Put { chunk: due.errand.chunk, pages: pages.to_bytes(), failed: put.is_none() }
    }

    /// The pages that the memory host keeps; `None` where it keeps others than are here.
    fn put(&mut self, due: &Due, ends: &Ends) -> Result<Option<PageSet>, StoreError> {
        let Due { errand, epoch, ref pages } = *due;
        let (chunk, mut full, mut bodies) = (errand.chunk, PageSet::EMPTY, Vec::new());
        let free = self.work.free_in(chunk);
        let read = for_each_body(
            &pages.without(&free),
            |batch, bodies| self.work.ram.load(chunk, batch, bodies),
            |page, body| {
                if !is_zero(body) {
                    full.insert(page);
                    bodies.extend_from_slice(body);
                }
            },
        );
        read.map_err(MigrateError::host("reading the guest's RAM"))?;
        let goes_on = || if ends.has_ended() { Err(()) } else { Ok(()) };
        if full.is_empty() || self.work.pacer.ready(goes_on).is_err() {
            return Ok(Some(PageSet::EMPTY));
        }
        let Ok(turn) = self.work.pacer.pass(bodies.len() as u64, goes_on) else { return Ok(Some(PageSet::EMPTY)) };
        let host = self.host(epoch)?;
        let digester = host.digester();
        let parts: Vec<_> = bodies.as_chunks::<PAGE_BYTES>().0.iter().map(|body| Outgoing::from(&body[..])).collect();
        let kept = host.put(chunk, (errand.version, None), (full, PageSet::EMPTY), &parts)?;
        drop(turn);
        self.work.tally.put(bodies.len() as u64);
        let is_kept = bodies.as_chunks::<PAGE_BYTES>().0.iter().map(|body| digester.page(body)).eq(kept);
        Ok(is_kept.then_some(full))
    }

    fn host(&mut self, epoch: u64) -> Result<&mut MemoryHost, StoreError> {
        if self.line.as_ref().is_none_or(|(of, _)| *of != epoch) {
            let mut host = self.split.reach_in_the_name_of_its_owner(usize::from(self.number), epoch)?;
            host.wait_for(PATIENCE);
            self.line = Some((epoch, host));
        }
        Ok(&mut self.line.as_mut().expect("it was made").1)
    }
}
