//! The faults of one guest's RAM: the only place where its userfaultfd is made, registered, read and closed
//! (`docs/design/faults.md`).
//!
//! A mapping can be registered with one userfaultfd at a time, and a userfaultfd's features are chosen once. So
//! everybody who wants to know of accesses to a guest's RAM is a user of the same userfaultfd, and the first user opens
//! it:
//!
//! * `User::Tracking` wants the kernel to note writes, and nobody waits (`WP_ASYNC`). The agent keeps no duplicate.
//! * `User::Paging` wants accesses to unmapped pages to wait until the page is known to be current. The agent keeps a
//!   duplicate: without it such an access would find zeros when the daemon dies.
//! * `User::Fence`, beside one of them, wants accesses to some pages to wait for a moment. It leaves the duplicate to
//!   its neighbour.
//!
//! A fence that is alone has a userfaultfd of its own, for a write protection that holds writers up. One userfaultfd
//! cannot do that and track writes that go on. The fence steps back when a user comes.
//!
//! # Races
//! * A page is mapped while it is fenced in: the mapper looks for the mark and maps under a lock that the fence takes
//!   to set the mark. So the page is mapped before, and the fence takes it out, or it is not mapped at all.
//! * A fault is read before the fence and settled after the page was marked: the page is not mapped. The reader learns
//!   that, and notes the wait.
//! * The fence is opened while one of its faults is read: the thread is woken after the mark has gone, and faults
//!   again.
//! * A user ends while a portion is fenced in: the userfaultfd stays until the portion is let go.
//! * A user begins while a fence that is alone has a portion: the fence is told, lets it go, and the user registers
//!   then.
//! * Memory is taken while the last writes of a guest that is being moved are collected: the RAM is sealed before, and
//!   no fence has a portion then.
//! * Unregistering wakes who waits before it is done: who began to wait in between is woken afterwards.

/// Mapping of pages, and waking of the threads that wait for them.
mod install;

/// Reading of events, by one thread.
mod serve;

/// What is given back of the RAM, for each user that wants to know.
mod given_back;

/// What users have not been told of it.
mod backlog;

/// A tracker beside a pager.
mod beside;

/// The fence: pages that nobody can write for a moment.
pub mod fence;

/// A time in which no fence takes a portion.
pub mod seal;

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::EventfdFlags;
use sterna_sys::userfaultfd::{Fault, Features, Modes, Userfaultfd};

use self::backlog::Backlogs;
use crate::error::MigrateError;
use crate::haste::Crew;
use crate::inside::Inside;
use crate::memory::Mappings;

/// How long the reader may take to end.
const END: Duration = Duration::from_secs(5);

/// A user of the userfaultfd: one that wants to know of accesses to a guest's RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum User {
    /// The tracker: it wants to know which pages are written.
    Tracking,
    /// The pager: it holds pages back until they are here.
    Paging,
    /// The fence: it holds some pages for a moment.
    Fence,
}

impl User {
    /// The features that it needs of the kernel.
    fn features(self) -> Features {
        match self {
            Self::Tracking => Features::TRACKING,
            Self::Paging | Self::Fence => Features::PAGING,
        }
    }

    /// The modes that it needs, where pages of this kind come into the page tables so.
    fn modes(self, mappings: &dyn Mappings) -> Modes {
        match self {
            Self::Tracking => Modes::WP,
            Self::Paging | Self::Fence => mappings.modes(),
        }
    }
}

/// A settler of faults on pages that are not fenced in.
pub trait Settle: Send + Sync {
    /// Settles the fault of a VMM's thread that waits for the page at this address since `now`, or a moment before.
    /// Returns whether the thread does not wait any more.
    ///
    /// # Errors
    /// The thread still waits: it is woken after a while, and faults again.
    fn settle(&self, fault: &Fault, address: u64, now: Instant) -> Result<bool, MigrateError>;
}

/// The faults of one guest's RAM.
pub struct GuestFaults {
    inside: Mutex<Box<dyn Inside>>,
    owner: Mutex<Owner>,
    /// A fence has let its portion go.
    let_go: Condvar,
    /// The number of threads that wait for that.
    wanted: AtomicUsize,
    /// How many keep every fence from taking a portion: see [`GuestFaults::seal`].
    seals: AtomicUsize,
}

/// The owner of the registration of the RAM.
enum Owner {
    Nobody,
    /// A fence, alone: see [`fence`].
    Fence {
        userfaultfd: Userfaultfd,
        spans: Vec<Range<u64>>,
        /// A portion is fenced in.
        closed: bool,
    },
    Users(Arc<Userfault>),
}

impl GuestFaults {
    /// The faults of the guest whose VMM's process this is. Nothing is registered yet.
    #[must_use]
    pub fn of(inside: impl Inside + 'static) -> Arc<Self> {
        Self::boxed(Box::new(inside))
    }

    /// As [`of`](Self::of), for a process of any kind.
    #[must_use]
    pub fn boxed(inside: Box<dyn Inside>) -> Arc<Self> {
        let (inside, owner) = (Mutex::new(inside), Mutex::new(Owner::Nobody));
        let (wanted, seals) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Arc::new(Self { inside, owner, let_go: Condvar::new(), wanted, seals })
    }

    /// What only the VMM's own process can do. Its calls may wait for that process, with the lock held.
    pub fn inside(&self) -> MutexGuard<'_, Box<dyn Inside>> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers all RAM for a user, at these addresses of the VMM's, whose pages are mapped by `mappings`. The log of
    /// discards begins at the same time. A tracker may come to a pager, which has the RAM registered as long as pages
    /// are away, and goes before it.
    ///
    /// # Errors
    /// The kernel or the VMM fails; then nothing has changed for the other users.
    pub fn begin(
        &self,
        user: User,
        spans: Vec<Range<u64>>,
        mappings: &'static dyn Mappings,
    ) -> Result<Arc<Userfault>, MigrateError> {
        let mut owner = self.owner_without_portion();
        if let Owner::Users(userfault) = &*owner {
            userfault.track_beside_paging(user, &spans)?;
            return Ok(Arc::clone(userfault));
        }
        give_up(std::mem::replace(&mut *owner, Owner::Nobody));
        let descriptor = {
            let mut inside = self.inside();
            let features =
                user.features() | (Features::TRACKING | Features::PAGING) & sterna_sys::probe::kernel().userfaultfd;
            if user == User::Paging {
                inside.open(features)?
            } else {
                let descriptor = inside.open_alone(features)?;
                inside.log_discards()?;
                descriptor
            }
        };
        let begun = Userfault::new(descriptor, (spans, mappings), user, Modes::empty())
            .and_then(|userfault| userfault.widen(user, &userfault.spans).map(|()| userfault));
        match begun {
            Ok(userfault) => {
                let userfault = Arc::new(userfault);
                *owner = Owner::Users(Arc::clone(&userfault));
                Ok(userfault)
            }
            Err(error) => {
                self.inside().close();
                Err(error)
            }
        }
    }

    /// Takes over the userfaultfd by which an earlier daemon held pages back; `None` where the VMM's process keeps
    /// none.
    ///
    /// # Errors
    /// The VMM does not answer, or this daemon lacks what the work needs. The VMM's duplicate stays, so that another
    /// daemon can try.
    pub fn resume_paging(
        &self,
        spans: Vec<Range<u64>>,
        mappings: &'static dyn Mappings,
    ) -> Result<Option<Arc<Userfault>>, MigrateError> {
        let mut owner = self.owner_without_portion();
        if !matches!(&*owner, Owner::Nobody) {
            return Err(MigrateError::Bug("the guest's RAM is registered for something already"));
        }
        let Some(descriptor) = self.inside().reopen()? else { return Ok(None) };
        let userfault =
            Arc::new(Userfault::new(descriptor, (spans, mappings), User::Paging, User::Paging.modes(mappings))?);
        *owner = Owner::Users(Arc::clone(&userfault));
        Ok(Some(userfault))
    }

    /// Ends a user's part. After the last user's end, the RAM is as any process's, and the waiting threads go on. A
    /// second call does nothing.
    pub fn end(&self, user: User) {
        let mut owner = self.owner();
        let Owner::Users(userfault) = &*owner else { return };
        let last = {
            let mut users = userfault.users();
            users.present.retain(|present| *present != user);
            if user == User::Paging {
                users.settler = Settler::Nobody;
            }
            users.present.is_empty()
        };
        userfault.leaves(user, last);
        if last {
            let userfault = Arc::clone(userfault);
            *owner = Owner::Nobody;
            userfault.close_down();
            self.inside().close();
        }
        drop(owner);
        self.let_go.notify_all();
    }

    /// Arms pages that come back from now on, whatever was written to them before. Only for tests that show why pages
    /// must come back unarmed.
    #[doc(hidden)]
    pub fn arm_what_returns(&self) {
        if let Owner::Users(userfault) = &*self.owner() {
            userfault.arm_what_returns(true);
        }
    }

    fn owner(&self) -> MutexGuard<'_, Owner> {
        self.owner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The same once no fence has a portion.
    fn owner_without_portion(&self) -> MutexGuard<'_, Owner> {
        self.wanted.fetch_add(1, Ordering::AcqRel);
        let has_portion = |owner: &mut Owner| match owner {
            Owner::Nobody => false,
            Owner::Fence { closed, .. } => *closed,
            Owner::Users(userfault) => userfault.users().present.contains(&User::Fence),
        };
        let owner = self.let_go.wait_while(self.owner(), has_portion).unwrap_or_else(PoisonError::into_inner);
        self.wanted.fetch_sub(1, Ordering::AcqRel);
        owner
    }
}

/// Unregisters what a fence has for itself: that lifts every protection.
fn give_up(owner: Owner) {
    if let Owner::Fence { userfaultfd, spans, .. } = owner {
        for span in spans {
            // It fails only where the process is gone or the span was never registered.
            let _ = userfaultfd.unregister(span);
        }
    }
}

/// A guest's userfaultfd while it is open.
pub struct Userfault {
    descriptor: Userfaultfd,
    spans: Vec<Range<u64>>,
    mappings: &'static dyn Mappings,
    users: Mutex<Users>,
    /// The fenced pages. Mappers hold the lock for reading while they map a page.
    closed: RwLock<Closed>,
    /// What this daemon took of the guest's RAM, by addresses, since anybody last asked for that.
    holes: Mutex<Vec<Range<u64>>>,
    /// What each user that wants to know of what is given back has not been told yet.
    backlogs: Mutex<Backlogs<User>>,
    ended: AtomicBool,
    wake_up: OwnedFd,
    reader: Mutex<Option<JoinHandle<()>>>,
    /// The reader's thread, once it runs.
    crew: Crew,
    impatient: AtomicBool,
    /// See [`GuestFaults::arm_what_returns`].
    arm_what_returns: AtomicBool,
}

/// The users of the userfaultfd, and the modes that it is registered for so far.
struct Users {
    present: Vec<User>,
    /// The modes of each span.
    modes: Vec<Modes>,
    settler: Settler,
}

/// The settler of faults on pages that are not fenced in.
enum Settler {
    /// Every page is current: it is mapped as it is.
    Nobody,
    /// This settler. Where it does not exist yet, or is gone without having ended, the threads go on waiting.
    Somebody(Option<Weak<dyn Settle>>),
}

/// Pages that nobody may map.
#[derive(Debug, Default)]
struct Closed {
    /// Sorted, disjoint.
    ranges: Vec<Range<u64>>,
    /// The addresses of these pages that somebody waits for.
    waits: Mutex<Vec<u64>>,
}

impl Userfault {
    fn new(
        descriptor: Userfaultfd,
        (spans, mappings): (Vec<Range<u64>>, &'static dyn Mappings),
        user: User,
        modes: Modes,
    ) -> Result<Self, MigrateError> {
        let wake_up = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| MigrateError::host("making an event descriptor")(error.into()))?;
        let settler = if user == User::Paging { Settler::Somebody(None) } else { Settler::Nobody };
        let users = Users { present: vec![user], modes: vec![modes; spans.len()], settler };
        Ok(Self {
            descriptor,
            spans,
            mappings,
            users: Mutex::new(users),
            closed: RwLock::default(),
            holes: Mutex::default(),
            backlogs: Mutex::new(Backlogs::of(user)),
            ended: AtomicBool::new(false),
            wake_up,
            reader: Mutex::default(),
            crew: Crew::default(),
            impatient: AtomicBool::new(false),
            arm_what_returns: AtomicBool::new(false),
        })
    }

    /// Where the VMM has its guest's RAM.
    #[must_use]
    pub fn spans(&self) -> &[Range<u64>] {
        &self.spans
    }

    /// Registers those of these spans that are the guest's RAM for a user's modes too.
    fn widen(&self, user: User, spans: &[Range<u64>]) -> Result<(), MigrateError> {
        let mut users = self.users();
        for (span, registered) in self.spans.iter().zip(&mut users.modes).filter(|(span, _)| spans.contains(span)) {
            let wanted = *registered | user.modes(self.mappings);
            if wanted != *registered {
                // Where a span is registered already, the kernel adds the modes, and keeps every mark.
                let done = self.descriptor.register(span.clone(), wanted);
                done.map_err(MigrateError::vmm_process("registering the guest's RAM"))?;
                *registered = wanted;
            }
        }
        Ok(())
    }

    /// Begins to read faults, which this settler settles, including those that were read before.
    ///
    /// # Errors
    /// No thread left.
    pub fn settled_by(self: &Arc<Self>, settler: Weak<dyn Settle>) -> Result<(), MigrateError> {
        self.users().settler = Settler::Somebody(Some(settler));
        self.read()?;
        // Faults that were read for a fence before were settled by nobody: they are raised again.
        self.wake_all()
    }

    /// Ends as when this process dies, for tests: no event is read any more, and nothing else is done.
    #[doc(hidden)]
    pub fn die(&self) {
        self.end_reader();
    }

    fn close_down(&self) {
        self.end_reader();
        for span in &self.spans {
            // Unregistering clears every mark. It fails only where the process is gone, and the marks with it.
            let _ = self.descriptor.unregister(span.clone());
            // Unregistering wakes the waiting threads before it is done: a thread that began to wait in between would
            // wait for ever.
            let _ = self.descriptor.wake(span.clone());
        }
    }

    fn end_reader(&self) {
        self.ended.store(true, Ordering::Release);
        self.hurry();
        let _ = rustix::io::write(&self.wake_up, &1u64.to_ne_bytes());
        let thread = self.reader.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            join(thread);
        }
    }

    /// Whether this user is there.
    pub(crate) fn is_used_by(&self, user: User) -> bool {
        self.users().present.contains(&user)
    }

    fn users(&self) -> MutexGuard<'_, Users> {
        self.users.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn closed(&self) -> RwLockReadGuard<'_, Closed> {
        self.closed.read().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Waits for the end of a thread that serves a guest's faults. The VMM may keep that thread from ending.
pub(crate) fn join(thread: JoinHandle<()>) {
    let deadline = Instant::now() + END;
    // Before kernel 6.10 the VMM can make the thread wait in `read(2)`, again and again.
    while !thread.is_finished() && Instant::now() < deadline {
        sterna_sys::process::interrupt(&thread);
        std::thread::sleep(Duration::from_millis(1));
    }
    if thread.is_finished() {
        // A panic of the thread is a bug, and was reported; the guest needs the rest of this work all the more.
        let _ = thread.join();
    } else {
        tracing::error!(thread = thread.thread().name(), "does not end: QEMU keeps it waiting; it is left behind");
    }
}

impl Closed {
    fn contains(&self, address: u64) -> bool {
        let at = self.ranges.partition_point(|closed| closed.end <= address);
        self.ranges.get(at).is_some_and(|closed| closed.contains(&address))
    }

    /// The first run of a range that is not closed; an empty run at the range's end where all of it is closed.
    fn first_open(&self, range: &Range<u64>) -> Range<u64> {
        let mut start = range.start;
        for closed in &self.ranges[self.ranges.partition_point(|closed| closed.end <= start)..] {
            if closed.start > start {
                return start..range.end.min(closed.start);
            }
            start = closed.end.min(range.end);
            if start == range.end {
                break;
            }
        }
        start..range.end
    }

    /// Whether the page at this address is closed; if it is, the wait is noted.
    fn note(&self, address: u64) -> bool {
        let closed = self.contains(address);
        if closed {
            self.waits.lock().unwrap_or_else(PoisonError::into_inner).push(address);
        }
        closed
    }
}

impl std::fmt::Debug for GuestFaults {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GuestFaults").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_closed_is_left_out_of_every_run() {
        let closed = Closed { ranges: vec![10..20, 20..30, 50..60], waits: Mutex::default() };
        let open = |range: Range<u64>| closed.first_open(&range);
        assert_eq!((open(0..10), open(0..100), open(0..5)), (0..10, 0..10, 0..5));
        assert_eq!((open(10..100), open(15..25), open(10..30)), (30..50, 25..25, 30..30));
        assert_eq!((open(55..100), open(60..70), open(30..50)), (60..100, 60..70, 30..50));
        assert!(closed.contains(10) && closed.contains(29) && !closed.contains(30) && !closed.contains(9));
        assert!(closed.note(55) && !closed.note(60));
        assert_eq!(*closed.waits.lock().unwrap(), [55]);
    }
}
