//! Faults, one after the other, on a thread of their own.
//!
//! Reading a fault late costs the guest: waking a sleeping thread takes longer than everything else here. So after a fault the thread keeps looking
//! for a while before it sleeps, as faults come in bursts; and as it takes a processor meanwhile, that perhaps the guest needs, only for
//! so long, and only a share of the time.

use std::os::fd::AsFd;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use sterna_protocol::message::PageRequest;
use sterna_protocol::pages::PageSet;
use sterna_sys::userfaultfd::{Event, Fault};

use super::{Pager, Waiter, ask};
use crate::error::MigrateError;
use crate::vmm::VmmError;

/// Events read at once.
const BATCH: usize = 64;
/// How long it keeps looking after a fault.
const KEEP_LOOKING: Duration = Duration::from_micros(50);
/// The share of the time that it may spend so.
const LOOKING_SHARE: f64 = 0.2;
/// Neighbours of a current page that are mapped with it.
const NEIGHBOURS: usize = 31;
/// How long the guest waits before it tries again what could not be done for it.
const RETRY: Duration = Duration::from_millis(10);

/// Serves faults until the pager ends.
pub(super) fn serve(pager: &Pager) {
    let mut events: Vec<Event> = std::iter::repeat_with(Event::default).take(BATCH).collect();
    let mut looking = Looking::begin();
    let mut failing = false;
    while !pager.ended.load(Ordering::Acquire) {
        let read = match pager.userfaultfd.read_events(&mut events) {
            Ok(read) => read,
            Err(error) => {
                if !failing {
                    tracing::error!(%error, "cannot read the guest's faults");
                }
                failing = true;
                std::thread::sleep(RETRY);
                continue;
            }
        };
        failing = false;
        if read == 0 {
            looking.wait(pager);
            continue;
        }
        let now = Instant::now();
        for event in &events[..read] {
            let Event::Fault(fault) = event else { continue };
            if let Err(error) = take(pager, fault, now) {
                if matches!(error, MigrateError::Vmm(VmmError::Gone { .. })) {
                    continue;
                }
                // No memory, most likely. Its thread is woken and faults again: so it is tried until it can be done.
                tracing::warn!(%error, "a page cannot be given to the guest: trying again");
                std::thread::sleep(RETRY);
                let _ = pager.wake(fault.address & !0xfff);
            }
        }
        looking.found();
    }
}

fn take(pager: &Pager, fault: &Fault, now: Instant) -> Result<(), MigrateError> {
    let address = fault.address & !0xfff;
    let Some(page) = pager.page_at(address) else { return pager.wake(address) };
    let settling = pager.settling.lock().unwrap_or_else(PoisonError::into_inner);
    let first = {
        let mut state = pager.lock();
        if !state.missing.contains(page.chunk, page.page) {
            None
        } else {
            let waiters = state.waiting.entry(page).or_default();
            let first = waiters.is_empty();
            // A thread that a signal took out of its waiting faults anew: it has waited since the first time.
            if waiters.iter().all(|waiter| waiter.thread != fault.thread) {
                waiters.push(Waiter { thread: fault.thread, since: now });
            }
            Some(first)
        }
    };
    if first.is_some() {
        // The way to the source may be slow.
        drop(settling);
    }
    match first {
        Some(true) => {
            let mut source = pager.source.lock().unwrap_or_else(PoisonError::into_inner);
            ask(&mut source, PageRequest { page, thread: fault.thread });
            Ok(())
        }
        Some(false) => Ok(()),
        None => {
            pager.account().local();
            if !fault.minor {
                return pager.show_zero(page);
            }
            let mut only = PageSet::EMPTY;
            only.insert(page.page);
            pager.show(page.chunk, &only)?;
            // The thread runs already; what lies behind it will be wanted next.
            let mut behind = PageSet::EMPTY;
            behind.insert_run(usize::from(page.page) + 1, NEIGHBOURS);
            let there = pager
                .ram
                .allocated_in(page.chunk)
                .map_err(MigrateError::host("looking for holes in the guest's RAM"))?;
            let current = behind.and(&there).without(pager.lock().missing.chunk(page.chunk));
            pager.show(page.chunk, &current)
        }
    }
}

/// How the thread waits for the next fault.
struct Looking {
    began: Instant,
    /// Time spent looking without finding.
    spent: Duration,
    last_fault: Instant,
    last_look: Instant,
}

impl Looking {
    fn begin() -> Self {
        let now = Instant::now();
        Self { began: now, spent: Duration::ZERO, last_fault: now, last_look: now }
    }

    fn found(&mut self) {
        self.last_fault = Instant::now();
        self.last_look = self.last_fault;
    }

    /// Returns when there may be something to read.
    fn wait(&mut self, pager: &Pager) {
        let now = Instant::now();
        let affordable = self.spent.as_secs_f64() <= LOOKING_SHARE * (now - self.began).as_secs_f64();
        if now - self.last_fault < KEEP_LOOKING && affordable {
            self.spent += now - self.last_look;
            self.last_look = now;
            return std::hint::spin_loop();
        }
        let mut ready = [
            PollFd::from_borrowed_fd(pager.userfaultfd.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(pager.wake_up.as_fd(), PollFlags::IN),
        ];
        // An interrupted wait looks once more.
        let _ = poll(&mut ready, None);
        if ready[0].revents().contains(PollFlags::ERR) {
            // QEMU shares the descriptor and has made it block, on which nobody can wait. It may do so again at once: it costs no more than its own guest's
            // faults some time.
            let _ = pager.userfaultfd.unblock();
            std::thread::sleep(RETRY);
        }
        self.last_look = Instant::now();
    }
}
