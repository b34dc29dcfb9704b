//! Guest RAM that nobody can write for a moment: synchronous write protection by a userfaultfd of its own.
//!
//! A write to a fenced page waits in the kernel until the page is let go, whoever writes through the VMM's mapping: the guest's processors under TCG and KVM,
//! the VMM's device emulation, the kernel for it (vhost, `read(2)` into guest RAM, direct I/O that begins now). Reads do not wait. Not held up are
//! writes through other mappings of the file, of which the daemon refuses guests, and direct I/O that is under way: a page that it writes belongs to
//! somebody, so it is not free.
//!
//! **Whoever dies, nobody waits for ever.** No process but this holds the descriptor: when this one ends, however, the kernel closes it, lifts the
//! protection and wakes who waits. Post-copy wants the contrary, and there the agent keeps a duplicate.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::time::{Duration, Instant};

use sterna_sys::userfaultfd::{Event, Features, Modes, Userfaultfd};

use crate::error::MigrateError;
use crate::inside::Inside;

/// A machine's RAM, parts of which can be fenced in.
pub struct Fence {
    userfaultfd: Userfaultfd,
    spans: Vec<Range<u64>>,
    /// Where writes waited since something was last fenced in.
    waits: RefCell<Vec<u64>>,
}

impl Fence {
    /// For RAM at these addresses of the VMM's.
    ///
    /// # Errors
    /// The VMM's process cannot make a userfaultfd, or somebody else has registered its RAM. Nothing is fenced then.
    pub fn new(inside: &mut dyn Inside, spans: Vec<Range<u64>>) -> Result<Self, MigrateError> {
        let userfaultfd = inside.open_alone(Features::PAGEFAULT_FLAG_WP | Features::WP_HUGETLBFS_SHMEM)?;
        let fence = Self { userfaultfd, spans, waits: RefCell::default() };
        for span in &fence.spans {
            let registered = fence.userfaultfd.register(span.clone(), Modes::WP);
            registered.map_err(MigrateError::vmm_process("registering the guest's RAM"))?;
        }
        Ok(fence)
    }

    /// Fences these addresses in: once this returns, nobody writes there until they are let go. `None` where `patience` was over before all of them were.
    ///
    /// # Errors
    /// The VMM's process has ended, for one. Nothing is fenced then.
    pub fn close(&self, ranges: Vec<Range<u64>>, patience: &Patience<'_>) -> Result<Option<Fenced<'_>>, MigrateError> {
        // Before the first is fenced: dropped, it lets all of them go.
        let fenced = Fenced { fence: self, ranges };
        for range in &fenced.ranges {
            if patience.is_over() {
                return Ok(None);
            }
            let protected = self.userfaultfd.write_protect(range.clone(), true);
            protected.map_err(MigrateError::vmm_process("write-protecting guest RAM"))?;
        }
        Ok(Some(fenced))
    }

    /// Begins to count waits anew, with so much patience for them.
    pub fn patience(&self, grace: Duration) -> Patience<'_> {
        self.waits.borrow_mut().clear();
        Patience { fence: self, grace, since: Instant::now(), quiet: Cell::new(Instant::now()) }
    }

    /// How many writes have waited since [`patience`](Self::patience). One that was let go before this is asked may not have been seen.
    ///
    /// # Errors
    /// The descriptor cannot be read.
    pub fn waits(&self) -> Result<u64, MigrateError> {
        let mut events: [Event; 16] = Default::default();
        let mut waits = self.waits.borrow_mut();
        loop {
            let read = self.userfaultfd.read_events(&mut events).map_err(MigrateError::kernel("reading faults"))?;
            waits.extend(events[..read].iter().filter_map(|event| match event {
                Event::Fault(fault) => Some(fault.address),
                _ => None,
            }));
            if read < events.len() {
                return Ok(waits.len() as u64);
            }
        }
    }

    fn let_go(&self, range: Range<u64>) -> Result<(), MigrateError> {
        self.userfaultfd.write_protect(range, false).map_err(MigrateError::vmm_process("letting guest RAM go"))
    }
}

/// How long somebody may wait for a portion.
pub struct Patience<'a> {
    fence: &'a Fence,
    grace: Duration,
    since: Instant,
    /// When nobody was seen to wait last.
    quiet: Cell<Instant>,
}

impl Patience<'_> {
    /// Whether somebody waits, and the portion has had its time.
    pub fn is_over(&self) -> bool {
        let now = Instant::now();
        if self.fence.waits().is_ok_and(|waits| waits == 0) {
            self.quiet.set(now);
            return false;
        }
        now - self.since > self.grace
    }

    /// How long the longest wait can have been, where there was one.
    pub fn longest_wait(&self) -> Duration {
        self.quiet.get().elapsed()
    }
}

impl Fence {
    /// For tests, the end as it is when this process dies: the descriptor is closed, and nothing else is done.
    #[doc(hidden)]
    pub fn die(mut self) {
        self.spans.clear();
    }
}

impl Drop for Fence {
    fn drop(&mut self) {
        for span in &self.spans {
            // It clears every mark. It fails only where the process is gone, and where it was never registered.
            let _ = self.userfaultfd.unregister(span.clone());
        }
    }
}

/// Addresses that are fenced in: let go when this is dropped.
pub struct Fenced<'a> {
    fence: &'a Fence,
    ranges: Vec<Range<u64>>,
}

/// What lies so near to each other is let go by one call, bytes: what is in between is not fenced in, and stays as it is. Each call interrupts the
/// processors that run the VMM, which costs more than to pass over some page tables.
const NEAR: u64 = 4 << 20;

impl Fenced<'_> {
    /// Lets all of them go and wakes who waits, those first for which somebody does.
    ///
    /// # Errors
    /// Something may still be fenced in: the [`Fence`] must be dropped.
    pub fn open(mut self) -> Result<(), MigrateError> {
        self.let_go()
    }

    fn let_go(&mut self) -> Result<(), MigrateError> {
        let mut ranges = std::mem::take(&mut self.ranges);
        let waits = self.fence.waits.borrow();
        for range in ranges.iter().filter(|range| waits.iter().any(|address| range.contains(address))) {
            self.fence.let_go(range.clone())?;
        }
        ranges.sort_unstable_by_key(|range| range.start);
        // Never beyond what is registered.
        let together = |one: &Range<u64>, next: &Range<u64>| {
            next.start.saturating_sub(one.end) <= NEAR
                && self.fence.spans.iter().any(|span| span.start <= one.start && next.end <= span.end)
        };
        let near = ranges.chunk_by(together);
        let mut whole = near.filter_map(|ranges| Some(ranges.first()?.start..ranges.last()?.end));
        whole.try_for_each(|range| self.fence.let_go(range))
    }
}

impl Drop for Fenced<'_> {
    fn drop(&mut self) {
        // Where this fails the error that led here ends the work, and the fence with it.
        let _ = self.let_go();
    }
}
