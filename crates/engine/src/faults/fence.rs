//! Guest RAM that nobody can write for a moment.
//!
//! A write to a fenced page waits in the kernel until the page is let go, whoever writes through the VMM's mapping: the
//! guest's processors under TCG and KVM, the VMM's device emulation, the kernel for it (vhost, `read(2)` into guest
//! RAM, direct I/O that begins now). There are two ways to fence, and for each portion the fence takes the one that is
//! possible:
//!
//! * **Protect**, where nobody else has the RAM registered: synchronous write protection, by a userfaultfd of its own.
//!   Reads do not wait. When this process dies, the kernel closes the descriptor, lifts the protection and wakes the
//!   threads that wait.
//! * **Take out**, where writes are tracked or pages are held back: the pages are dropped from the VMM's page tables,
//!   and nobody maps them. Reads wait as well. When this process dies while writes are tracked, it is the same as
//!   above; where pages are held back, the threads wait for the next daemon, which maps the pages.
//!
//! A fence does not hold up two kinds of writes. Writes through other mappings of the file: the daemon refuses guests
//! that have some. Direct I/O that is under way: a page that it writes belongs to somebody, so it is not free. Direct
//! I/O holds the page itself, not its mapping, so that neither way reaches it, and no page table shows it. Code that
//! takes pages that may be in use needs to know more (`docs/design/faults.md`).
//!
//! **One portion is fenced in at a time**, whoever wants another one meanwhile: that one waits, and the portion's
//! `Patience` knows of it.
//!
//! **A page that was taken out comes back unarmed**: where writes are tracked it counts as written, so that nothing
//! written to it before is lost.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use sterna_sys::userfaultfd::{Event, Features, Modes, Userfaultfd};

use super::{Closed, GuestFaults, Owner, User, Userfault, give_up};
use crate::error::MigrateError;

/// The most ranges that one request asks the agent to take out. Between two requests the fence checks whether somebody
/// waits.
const RANGES_PER_REQUEST: usize = 64;

/// A machine's RAM, parts of which can be fenced in, one portion at a time.
pub struct Fence {
    faults: Arc<GuestFaults>,
    spans: Vec<Range<u64>>,
    way: RefCell<Way>,
    /// The addresses where somebody has waited since the last portion was fenced in.
    waits: RefCell<Vec<u64>>,
}

/// How the present portion is fenced in.
enum Way {
    Protect,
    TakeOut(Arc<Userfault>),
}

impl Fence {
    /// A fence for RAM at these addresses of the VMM's.
    ///
    /// # Errors
    /// The VMM's process makes no userfaultfd, or somebody else has registered its RAM. Nothing is fenced then.
    pub fn new(faults: Arc<GuestFaults>, spans: Vec<Range<u64>>) -> Result<Self, MigrateError> {
        let way = find_way(&faults, &spans, false)?;
        Ok(Self { faults, spans, way: RefCell::new(way), waits: RefCell::default() })
    }

    /// Fences these addresses in: once this returns, nobody writes there until they are let go. `None` where `patience`
    /// was over before all of them were, or where the RAM [is sealed](Self::is_sealed).
    ///
    /// # Errors
    /// For example, the VMM's process has ended. Nothing is fenced then.
    pub fn close(&self, ranges: Vec<Range<u64>>, patience: &Patience<'_>) -> Result<Option<Fenced<'_>>, MigrateError> {
        *self.way.borrow_mut() = find_way(&self.faults, &self.spans, true)?;
        // This comes before the first range is fenced: when it is dropped, it lets all of them go.
        let fenced = Fenced { fence: self, ranges };
        if self.is_sealed() {
            return Ok(None);
        }
        match &*self.way.borrow() {
            Way::Protect => {
                for range in &fenced.ranges {
                    if patience.is_over() {
                        return Ok(None);
                    }
                    let protected = self.alone(|userfaultfd| userfaultfd.write_protect(range.clone(), true));
                    protected.map_err(MigrateError::vmm_process("write-protecting guest RAM"))?;
                }
            }
            Way::TakeOut(userfault) => {
                userfault.close(&fenced.ranges);
                for ranges in fenced.ranges.chunks(RANGES_PER_REQUEST) {
                    if patience.is_over() {
                        return Ok(None);
                    }
                    userfault.mappings.drop_mappings(self.faults.inside().as_mut(), ranges)?;
                }
            }
        }
        Ok(Some(fenced))
    }

    /// Whether nothing can be fenced in any more, for as long as somebody keeps the RAM
    /// [sealed](GuestFaults::seal).
    pub fn is_sealed(&self) -> bool {
        self.faults.seals.load(Ordering::Acquire) > 0
    }

    /// Does something to pages that are fenced in, at this address: makes holes of them. Where writes are tracked they
    /// count as given back from then on; a collection sees either none of it or all.
    ///
    /// # Errors
    /// The error of `take`; then the pages are as they were.
    pub fn taking<E>(&self, range: Range<u64>, take: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        let Way::TakeOut(userfault) = &*self.way.borrow() else { return take() };
        let mut holes = userfault.holes.lock().unwrap_or_else(PoisonError::into_inner);
        take()?;
        holes.push(range);
        Ok(())
    }

    /// Begins to count waits anew, with this much patience for them.
    pub fn patience(&self, grace: Duration) -> Patience<'_> {
        self.waits.borrow_mut().clear();
        Patience { fence: self, grace, since: Instant::now(), quiet: Cell::new(Instant::now()) }
    }

    /// How many accesses have waited since [`patience`](Self::patience). An access that was let go before this call may
    /// be missing.
    ///
    /// # Errors
    /// The descriptor cannot be read.
    pub fn waits(&self) -> Result<u64, MigrateError> {
        let mut waits = self.waits.borrow_mut();
        match &*self.way.borrow() {
            Way::Protect => self.read_waits(&mut waits)?,
            Way::TakeOut(userfault) => waits.append(&mut userfault.take_waits()),
        }
        Ok(waits.len() as u64)
    }

    /// Whether an access to these addresses is among those that [`waits`](Self::waits) has counted.
    pub fn is_waited_for(&self, addresses: &Range<u64>) -> bool {
        self.waits.borrow().iter().any(|address| addresses.contains(address))
    }

    fn read_waits(&self, waits: &mut Vec<u64>) -> Result<(), MigrateError> {
        let mut events: [Event; 16] = Default::default();
        loop {
            let mut read = 0;
            let done = self.alone(|userfaultfd| userfaultfd.read_events(&mut events).map(|events| read = events));
            done.map_err(MigrateError::kernel("reading faults"))?;
            waits.extend(events[..read].iter().filter_map(|event| match event {
                Event::Fault(fault) => Some(fault.address),
                _ => None,
            }));
            if read < events.len() {
                return Ok(());
            }
        }
    }

    /// Calls the fence's own userfaultfd; does nothing where the fence has stepped back.
    fn alone(&self, ask: impl FnOnce(&Userfaultfd) -> Result<(), sterna_sys::Error>) -> Result<(), sterna_sys::Error> {
        match &*self.faults.owner() {
            Owner::Fence { userfaultfd, .. } => ask(userfaultfd),
            _ => Ok(()),
        }
    }

    fn let_go(&self, range: Range<u64>) -> Result<(), MigrateError> {
        let open = self.alone(|userfaultfd| userfaultfd.write_protect(range, false));
        open.map_err(MigrateError::vmm_process("letting guest RAM go"))
    }

    /// Ends as when this process dies, for tests: descriptors are closed, and nothing else is done.
    #[doc(hidden)]
    pub fn die(self) {
        let owner = std::mem::replace(&mut *self.faults.owner(), Owner::Nobody);
        if let Owner::Users(userfault) = owner {
            userfault.die();
        }
    }
}

impl Drop for Fence {
    fn drop(&mut self) {
        let mut owner = self.faults.owner();
        if matches!(&*owner, Owner::Fence { .. }) {
            // Giving up clears every mark.
            give_up(std::mem::replace(&mut *owner, Owner::Nobody));
            self.faults.inside().close();
        }
    }
}

/// Chooses the way for the next portion; with `close` the portion is fenced in this way until [`Fenced`] is dropped.
fn find_way(faults: &GuestFaults, spans: &[Range<u64>], close: bool) -> Result<Way, MigrateError> {
    // Two that fence pages of one guest have turns: who has its pages leave, and who takes what is free of it.
    let mut owner = if close { faults.owner_without_portion() } else { faults.owner() };
    match &mut *owner {
        Owner::Users(userfault) => {
            userfault.join(spans, close)?;
            return Ok(Way::TakeOut(Arc::clone(userfault)));
        }
        Owner::Fence { closed, .. } if close && !*closed => *closed = true,
        Owner::Fence { .. } => return Err(MigrateError::Bug("the guest's RAM is fenced in by somebody else")),
        Owner::Nobody => {
            let features = Features::PAGEFAULT_FLAG_WP | Features::WP_HUGETLBFS_SHMEM;
            let userfaultfd = faults.inside().open_alone(features)?;
            let registered = spans.iter().try_for_each(|span| userfaultfd.register(span.clone(), Modes::WP).map(drop));
            *owner = Owner::Fence { userfaultfd, spans: spans.to_vec(), closed: close };
            if let Err(error) = registered {
                give_up(std::mem::replace(&mut *owner, Owner::Nobody));
                faults.inside().close();
                return Err(MigrateError::vmm_process("registering the guest's RAM")(error));
            }
        }
    }
    Ok(Way::Protect)
}

/// How long somebody may wait for a portion.
pub struct Patience<'a> {
    fence: &'a Fence,
    grace: Duration,
    since: Instant,
    /// The last moment when nobody was seen to wait.
    quiet: Cell<Instant>,
}

impl Patience<'_> {
    /// Whether somebody waits, for a page or to register the RAM, and the portion's time is over.
    pub fn is_over(&self) -> bool {
        let now = Instant::now();
        if self.fence.waits().is_ok_and(|waits| waits == 0) {
            self.quiet.set(now);
            if !self.fence.faults.is_wanted() {
                return false;
            }
        }
        now - self.since > self.grace
    }

    /// How long the longest wait can have been, if there was one.
    pub fn longest_wait(&self) -> Duration {
        self.quiet.get().elapsed()
    }
}

/// Addresses that are fenced in: let go when this is dropped.
pub struct Fenced<'a> {
    fence: &'a Fence,
    ranges: Vec<Range<u64>>,
}

/// The largest distance, bytes, between ranges that one call lets go: the pages between them are not fenced in, and
/// stay as they are. Each call interrupts the processors that run the VMM, which costs more than a walk over some page
/// tables.
const NEAR: u64 = 4 << 20;

impl Fenced<'_> {
    /// Lets all addresses go and wakes the threads that wait, beginning with the addresses that somebody waits for.
    ///
    /// # Errors
    /// Something may still be fenced in: the [`Fence`] must be dropped.
    pub fn open(mut self) -> Result<(), MigrateError> {
        self.let_go()
    }

    fn let_go(&mut self) -> Result<(), MigrateError> {
        let mut ranges = std::mem::take(&mut self.ranges);
        let waits = self.fence.waits.borrow();
        let (waited, rest): (Vec<_>, Vec<_>) =
            ranges.drain(..).partition(|range| waits.iter().any(|address| range.contains(address)));
        match &*self.fence.way.borrow() {
            Way::Protect => self.unprotect(&waited, rest),
            Way::TakeOut(userfault) => {
                userfault.open(waited.iter().chain(&rest));
                Ok(())
            }
        }
    }

    fn unprotect(&self, waited: &[Range<u64>], mut rest: Vec<Range<u64>>) -> Result<(), MigrateError> {
        waited.iter().try_for_each(|range| self.fence.let_go(range.clone()))?;
        rest.sort_unstable_by_key(|range| range.start);
        // One call never reaches beyond a registered span.
        let together = |one: &Range<u64>, next: &Range<u64>| {
            next.start.saturating_sub(one.end) <= NEAR
                && self.fence.spans.iter().any(|span| span.start <= one.start && next.end <= span.end)
        };
        let near = rest.chunk_by(together);
        let mut whole = near.filter_map(|ranges| Some(ranges.first()?.start..ranges.last()?.end));
        whole.try_for_each(|range| self.fence.let_go(range))
    }
}

impl Drop for Fenced<'_> {
    fn drop(&mut self) {
        // Where this fails, the error that led here ends the work, and the fence with it.
        let _ = self.let_go();
        match &*self.fence.way.borrow() {
            Way::Protect => self.fence.faults.portion_let_go(),
            // No lock of the userfaultfd is held here: the fence may be the last user.
            Way::TakeOut(_) => self.fence.faults.end(User::Fence),
        }
    }
}

impl GuestFaults {
    /// Whether somebody waits to register RAM that a fence has alone.
    fn is_wanted(&self) -> bool {
        self.wanted.load(Ordering::Acquire) > 0
    }

    fn portion_let_go(&self) {
        if let Owner::Fence { closed, .. } = &mut *self.owner() {
            *closed = false;
        }
        self.let_go.notify_all();
    }
}

impl Userfault {
    /// Adds a fence that takes out pages of these spans; with `close` the userfaultfd stays until the fence has let its
    /// portion go.
    fn join(self: &Arc<Self>, spans: &[Range<u64>], close: bool) -> Result<(), MigrateError> {
        if !sterna_sys::probe::kernel().userfaultfd.contains(User::Fence.features()) {
            let doing = "fencing guest RAM in while its writes are watched";
            return Err(MigrateError::Host { doing, source: std::io::ErrorKind::Unsupported.into() });
        }
        if !spans.iter().all(|span| self.spans.contains(span)) {
            return Err(MigrateError::Bug("RAM is to be fenced in that is not registered"));
        }
        self.widen(User::Fence, spans)?;
        self.read()?;
        if close {
            let mut users = self.users();
            if users.present.contains(&User::Fence) {
                return Err(MigrateError::Bug("a portion of the guest's RAM is fenced in already"));
            }
            users.present.push(User::Fence);
        }
        Ok(())
    }

    /// Marks these ranges: from now on nobody maps a page there. Mappings that are under way are done when this
    /// returns.
    fn close(&self, ranges: &[Range<u64>]) {
        let mut ranges = ranges.to_vec();
        ranges.sort_unstable_by_key(|range| range.start);
        let mut closed = self.closed.write().unwrap_or_else(PoisonError::into_inner);
        *closed = Closed { ranges, ..Closed::default() };
    }

    /// Removes every mark, so that all pages may be mapped again; then wakes the threads that wait in these ranges, in
    /// this order.
    fn open<'a>(&self, ranges: impl Iterator<Item = &'a Range<u64>>) {
        // The waits stay: the fence asks for them afterwards.
        self.closed.write().unwrap_or_else(PoisonError::into_inner).ranges.clear();
        // The thread's fault is raised again, and settled as any other.
        for range in ranges {
            let _ = self.descriptor.wake(range.clone());
        }
    }

    fn take_waits(&self) -> Vec<u64> {
        std::mem::take(&mut *self.closed().waits.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
