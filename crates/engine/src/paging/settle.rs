//! Settling of faults, one after the other: a page that is away is requested, a current page is mapped.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use sterna_protocol::pages::PageSet;
use sterna_sys::userfaultfd::Fault;

use super::supplier::Whose;
use super::{Pager, Waiter};
use crate::error::MigrateError;
use crate::faults::Settle;

/// How many neighbours of a current page are mapped with it.
const NEIGHBOURS: usize = 31;
/// How often work in the background looks whether faults are settled, and how long it lets them pass at most.
const SHORT_WAY: Duration = Duration::from_micros(50);
const LONGEST_WAY: Duration = Duration::from_millis(5);

impl Settle for Pager {
    fn settle(&self, fault: &Fault, address: u64, now: Instant) -> Result<bool, MigrateError> {
        self.faulting.fetch_add(1, Ordering::AcqRel);
        let settled = settle(self, fault, address, now);
        self.faulting.fetch_sub(1, Ordering::AcqRel);
        settled
    }
}

impl Pager {
    /// Lets faults pass before the lock is taken for work in the background. Whoever lets the lock go and takes it
    /// again at once would have it before a thread that sleeps until it is free.
    pub(super) fn give_way(&self) {
        let began = Instant::now();
        while self.faulting.load(Ordering::Acquire) > 0 && began.elapsed() < LONGEST_WAY {
            std::thread::sleep(SHORT_WAY);
        }
    }
}

fn settle(pager: &Pager, fault: &Fault, address: u64, now: Instant) -> Result<bool, MigrateError> {
    let Some(page) = pager.page_at(address) else {
        return pager.userfault.wake(address).map(|()| true);
    };
    let settling = pager.settling.lock().unwrap_or_else(PoisonError::into_inner);
    let (first, hosts) = {
        let mut state = pager.lock();
        let first = if !state.whereabouts.is_away(page.chunk, page.page) {
            None
        } else {
            let waiters = state.waiting.entry(page).or_default();
            let first = waiters.is_empty();
            // A thread whose wait a signal interrupted faults anew: it has waited since the first time.
            if waiters.iter().all(|waiter| waiter.thread != fault.thread) {
                waiters.push(Waiter { thread: fault.thread, since: now });
            }
            Some(first)
        };
        (first, state.suppliers.of(Whose::MemoryHosts).clone())
    };
    if first.is_some() {
        // The way to the supplier may be slow.
        drop(settling);
    }
    match first {
        Some(true) => {
            pager.ask(page, fault.thread);
            Ok(false)
        }
        Some(false) => Ok(false),
        None => {
            pager.account().local();
            if !fault.minor {
                let Some(hosts) = hosts else { return pager.show_zero(page) };
                if !hosts.admits(page) {
                    return Ok(false);
                }
                let shown = pager.show_zero(page)?;
                // The thread runs already.
                pager.show_zeros_ahead(hosts.as_ref(), page)?;
                return Ok(shown);
            }
            let mut only = PageSet::EMPTY;
            only.insert(page.page);
            let shown = pager.show(page.chunk, &only)?;
            // The thread runs already; the pages behind this one will be wanted next, or all of them.
            let behind = if hosts.is_some_and(|hosts| hosts.touched(page, fault.thread)) {
                PageSet::of_chunk(pager.ram.layout(), page.chunk).without(&only)
            } else {
                let mut behind = PageSet::EMPTY;
                behind.insert_run(usize::from(page.page) + 1, NEIGHBOURS);
                behind
            };
            let there = pager.allocated_in(page.chunk)?;
            let current = behind.and(&there).without(pager.lock().whereabouts.away_in(page.chunk));
            pager.show(page.chunk, &current)?;
            Ok(shown)
        }
    }
}
