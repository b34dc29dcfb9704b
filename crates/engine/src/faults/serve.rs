//! Reading of the events of a guest's userfaultfd, one after the other, by a thread of its own.
//!
//! Reading a fault late costs the guest: waking a sleeping thread takes longer than everything else here. Faults come
//! in bursts, so after a fault the thread keeps looking for a while before it sleeps. Meanwhile it takes a processor
//! that perhaps the guest needs: so each look has a limit, and so has their share of the time. Where they are in vain
//! they become rare: a guest with one thread has its next fault when the page has come for which it waits, long after.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use sterna_protocol::layout::PAGE_BYTES;
use sterna_sys::userfaultfd::{Event, Fault};

use super::{Settler, Userfault};
use crate::error::MigrateError;
use crate::haste::Crew;
use crate::vmm::VmmError;

/// The most events that are read at once.
const BATCH: usize = 64;
/// How long the thread keeps looking after a fault.
const KEEP_LOOKING: Duration = Duration::from_micros(50);
/// The largest share of the time that the thread may spend so.
const LOOKING_SHARE: f64 = 0.2;
/// After so many looks in vain, one after another, only one fault in so many, as a power of two, is looked after.
const MOST_IN_VAIN: u32 = 6;
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
            let spawned = self.crew.spawn("faults", move || serve(&this));
            *reader = Some(spawned.map_err(MigrateError::host("starting a thread for the guest's faults"))?);
        }
        Ok(())
    }

    /// The thread that reads events.
    pub fn crew(&self) -> &Crew {
        &self.crew
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
    let mut looking = Looking::begin(Instant::now());
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
            if looking.goes_on(Instant::now()) {
                std::hint::spin_loop();
            } else {
                sleep(userfault);
                looking.woken(Instant::now());
            }
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
        looking.found(Instant::now());
    }
}

/// Returns when there may be something to read.
fn sleep(userfault: &Userfault) {
    let mut ready = [
        PollFd::from_borrowed_fd(userfault.descriptor.as_fd(), PollFlags::IN),
        PollFd::from_borrowed_fd(userfault.wake_up.as_fd(), PollFlags::IN),
    ];
    // An interrupted wait looks once more.
    let _ = poll(&mut ready, None);
    if ready[0].revents().contains(PollFlags::ERR) {
        // QEMU shares the descriptor and has made it block, on which nobody can wait. It may do so again at once: it
        // costs no more than its own guest's faults some time.
        let _ = userfault.descriptor.unblock();
        std::thread::sleep(RETRY);
    }
}

/// How the thread waits for the next fault: whether it looks on or sleeps.
struct Looking {
    began: Instant,
    /// The time spent looking without finding an event.
    spent: Duration,
    last_fault: Instant,
    last_look: Instant,
    /// Whether it has looked since the last fault.
    looked: bool,
    /// Looks in vain since one that found a fault.
    in_vain: u32,
    /// Faults after which it does not look.
    left_alone: u32,
}

impl Looking {
    fn begin(now: Instant) -> Self {
        let (spent, looked) = (Duration::ZERO, false);
        Self { began: now, spent, last_fault: now, last_look: now, looked, in_vain: 0, left_alone: 0 }
    }

    /// There were faults to read.
    fn found(&mut self, now: Instant) {
        if std::mem::take(&mut self.looked) {
            (self.in_vain, self.left_alone) = (0, 0);
        }
        self.left_alone = self.left_alone.saturating_sub(1);
        self.last_fault = now;
        self.last_look = now;
    }

    /// It has slept, which cost nothing.
    fn woken(&mut self, now: Instant) {
        if std::mem::take(&mut self.looked) {
            self.in_vain = (self.in_vain + 1).min(MOST_IN_VAIN);
            self.left_alone = 1 << self.in_vain;
        }
        self.last_look = now;
    }

    /// Whether it looks once more, where there was nothing to read.
    fn goes_on(&mut self, now: Instant) -> bool {
        let since = |earlier: Instant| now.saturating_duration_since(earlier);
        let affordable = self.spent.as_secs_f64() <= LOOKING_SHARE * since(self.began).as_secs_f64();
        let goes_on = self.left_alone == 0 && since(self.last_fault) < KEEP_LOOKING && affordable;
        if goes_on {
            self.spent += since(self.last_look);
            self.last_look = now;
            self.looked = true;
        }
        goes_on
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: Duration = Duration::from_micros(1);

    /// A thread on a simulated clock, which looks every microsecond; each fault comes `apart` from the one before, for
    /// a second. What share of the time it spent looking, and what share of the faults came while it looked.
    fn simulate(apart: Duration) -> (f64, f64) {
        let start = Instant::now();
        let (mut now, mut looking) = (start, Looking::begin(start));
        let (mut next, mut looked, mut faults, mut at_once) = (start + apart, Duration::ZERO, 0, 0);
        let end = start + Duration::from_secs(1);
        while next < end {
            if looking.goes_on(now) {
                (now, looked) = (now + US, looked + US);
                at_once += u32::from(now >= next);
            } else {
                now = now.max(next);
                looking.woken(now);
            }
            if now >= next {
                looking.found(now);
                (next, faults) = (now + apart, faults + 1);
            }
        }
        (looked.as_secs_f64(), f64::from(at_once) / f64::from(faults))
    }

    #[test]
    fn faults_that_come_seldom_are_looked_for_now_and_then_only() {
        let (looked, at_once) = simulate(Duration::from_millis(2));
        assert!((0.0003..0.0008).contains(&looked), "{looked}: 50 us for each of some twelve faults in 500");
        assert!(at_once < 0.01, "{at_once}");
    }

    #[test]
    fn a_look_that_finds_a_fault_has_it_look_after_each_again() {
        let start = Instant::now();
        let (mut looking, mut now) = (Looking::begin(start), start + Duration::from_secs(1));
        let mut fault = |looking: &mut Looking, apart: Duration| {
            looking.found(now);
            let looks = looking.goes_on(now);
            now += apart;
            if !looking.goes_on(now) {
                looking.woken(now);
            }
            looks
        };
        let seldom = (0..1000).filter(|_| fault(&mut looking, KEEP_LOOKING * 2)).count();
        assert!((10..30).contains(&seldom), "{seldom} of a thousand");
        let often = (0..1000).filter(|_| fault(&mut looking, US * 10)).count();
        assert!(often > 900, "{often} of a thousand");
    }

    #[test]
    fn however_often_faults_come_no_more_than_a_share_of_the_time_is_spent_looking_in_vain() {
        for apart in [40, 60, 100, 200] {
            let (looked, _) = simulate(US * apart);
            // What was looked at last before a fault was not in vain.
            let share = LOOKING_SHARE + 1.0 / f64::from(apart) + 0.01;
            assert!(looked <= share, "{looked} of the time, {apart} us apart");
        }
    }

    #[test]
    fn faults_of_a_burst_are_seen_at_once_after_a_quiet_time() {
        let start = Instant::now();
        let mut looking = Looking::begin(start);
        let later = start + Duration::from_secs(1);
        looking.woken(later);
        for fault in 0..100 {
            let now = later + US * 20 * fault;
            looking.found(now);
            assert!((0..20).all(|us| looking.goes_on(now + US * us)), "fault {fault}");
        }
    }

    #[test]
    fn it_sleeps_when_its_time_is_over_and_where_the_clock_stands_still_looks_on() {
        let start = Instant::now();
        let (mut looking, later) = (Looking::begin(start), start + Duration::from_secs(1));
        looking.found(later);
        assert!((0..1000).all(|_| looking.goes_on(later)));
        assert!(looking.goes_on(later + KEEP_LOOKING - US));
        assert!(!looking.goes_on(later + KEEP_LOOKING), "the end in the same instant");
        assert!(!looking.goes_on(later + Duration::from_secs(3600)), "the clock has jumped");
    }
}
