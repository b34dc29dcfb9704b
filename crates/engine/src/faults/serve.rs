//! Reading of the events of a guest's userfaultfd, one after the other, by a thread of its own.
//!
//! Reading a fault late costs the guest: waking a sleeping thread takes longer than everything else here. Faults come
//! in bursts, so after a fault the thread keeps looking for a while before it sleeps. Meanwhile it takes a processor
//! that perhaps the guest needs: so each look has a limit, and so has their share of the time.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use sterna_protocol::layout::PAGE_BYTES;
use sterna_sys::userfaultfd::{Event, Fault};

use super::{Settler, Userfault};
use crate::error::MigrateError;
use crate::vmm::VmmError;

/// The most events that are read at once.
const BATCH: usize = 64;
/// How long the thread keeps looking after a fault.
const KEEP_LOOKING: Duration = Duration::from_micros(50);
/// The largest share of the time that the thread may spend so.
const LOOKING_SHARE: f64 = 0.2;
/// How long a thread of the guest waits before its fault is raised again, where the fault could not be settled.
const RETRY: Duration = Duration::from_millis(10);

impl Userfault {
    /// Starts the thread that reads events, unless it runs already.
    ///
    /// # Errors
    /// No thread left.
    pub(super) fn read(self: &Arc<Self>) -> Result<(), MigrateError> {
        let mut reader = self.reader.lock().unwrap_or_else(PoisonError::into_inner);
        if reader.is_none() && !self.ended.load(Ordering::Acquire) {
            let this = Arc::clone(self);
            let spawned = std::thread::Builder::new().name("faults".into()).spawn(move || serve(&this));
            *reader = Some(spawned.map_err(MigrateError::host("starting a thread for the guest's faults"))?);
        }
        Ok(())
    }

    fn take(&self, fault: &Fault, now: Instant) -> Result<(), MigrateError> {
        let address = page_of(fault);
        if !self.spans.iter().any(|span| span.contains(&address)) {
            return self.wake(address);
        }
        if self.closed().note(address) {
            return Ok(());
        }
        let settler = match &self.users().settler {
            Settler::Nobody => None,
            Settler::Somebody(settler) => Some(settler.as_ref().and_then(Weak::upgrade)),
        };
        let settled = match settler {
            Some(Some(settler)) => settler.settle(fault, address, now)?,
            // Only the settler knows whether the page is current.
            Some(None) => return Ok(()),
            // This page alone is mapped: pages behind it would count as written as well.
            None if fault.minor => self.show(address..address + PAGE_BYTES as u64)?,
            None => self.show_zero(address)?,
        };
        if !settled {
            // The page was fenced in meanwhile: the fence must know that somebody waits.
            self.closed().note(address);
        }
        Ok(())
    }
}

fn page_of(fault: &Fault) -> u64 {
    fault.address / PAGE_BYTES as u64 * PAGE_BYTES as u64
}

/// Serves faults until the userfaultfd ends.
fn serve(userfault: &Userfault) {
    let mut events: Vec<Event> = std::iter::repeat_with(Event::default).take(BATCH).collect();
    let mut looking = Looking::begin();
    let mut failing = false;
    while !userfault.ended.load(Ordering::Acquire) {
        let read = match userfault.descriptor.read_events(&mut events) {
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
            looking.wait(userfault);
            continue;
        }
        let now = Instant::now();
        for event in &events[..read] {
            let Event::Fault(fault) = event else { continue };
            if let Err(error) = userfault.take(fault, now) {
                if matches!(error, MigrateError::Vmm(VmmError::Gone { .. })) {
                    continue;
                }
                // Most likely no memory is left. The thread is woken and faults again, until the page can be mapped.
                tracing::warn!(%error, "a page cannot be given to the guest: trying again");
                std::thread::sleep(RETRY);
                let _ = userfault.wake(page_of(fault));
            }
        }
        looking.found();
    }
}

/// How the thread waits for the next fault.
struct Looking {
    began: Instant,
    /// The time spent looking without finding an event.
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
    fn wait(&mut self, userfault: &Userfault) {
        let now = Instant::now();
        let affordable = self.spent.as_secs_f64() <= LOOKING_SHARE * (now - self.began).as_secs_f64();
        if now - self.last_fault < KEEP_LOOKING && affordable {
            self.spent += now - self.last_look;
            self.last_look = now;
            return std::hint::spin_loop();
        }
        let mut ready = [
            PollFd::from_borrowed_fd(userfault.descriptor.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(userfault.wake_up.as_fd(), PollFlags::IN),
        ];
        // An interrupted wait looks once more.
        let _ = poll(&mut ready, None);
        if ready[0].revents().contains(PollFlags::ERR) {
            // QEMU shares the descriptor and has made it blocking, so that it cannot be waited for. QEMU may do so
            // again at once: that only delays the faults of its own guest.
            let _ = userfault.descriptor.unblock();
            std::thread::sleep(RETRY);
        }
        self.last_look = Instant::now();
    }
}
