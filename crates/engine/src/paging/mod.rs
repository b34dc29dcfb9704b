//! Pages that come after the guest's start: what its faults find, what arrives, and the account of both.
//!
//! One mechanism for pages that are not here and for those that are stale. The guest's RAM is registered for missing
//! and minor faults before the VMM first touches it, so nothing is mapped that was not mapped here. A body that arrives
//! is written into the RAM *file*, and only then mapped (`UFFDIO_CONTINUE`), which wakes who waits for it. So a guest
//! never sees half a page, a page of an earlier round, or zeros in place of a page that is still to come:
//!
//! | the page | the guest's access | what happens |
//! | --- | --- | --- |
//! | missing (of the residue, not arrived) | waits | asked for, once; mapped when it is in the file |
//! | current, in the file | a minor fault | mapped at once, with its neighbours |
//! | current, a hole | a missing fault | a page of zeros |
//!
//! Two threads may work on the same page: the fault thread and those that receive. Which of them maps a page does not
//! matter, as it is mapped only when it is not missing, and it is missing until its content is in the file; the second
//! finds it there (`EEXIST`) and wakes who waits. Two connections that carry the same page are told apart by a claim,
//! under the lock: the second body is dropped, as the guest may have written the page since the first.
//!
//! Kernel's documentation: `Documentation/admin-guide/mm/userfaultfd.rst`.

/// Whereabouts: which pages are here, and who holds the others.
pub mod whereabouts;

/// Holders, as the map of them names them.
mod holder;

/// Suppliers: who brings the others.
pub mod supplier;

/// Who is asked for which page.
mod asking;

/// What faults cost the guest.
pub mod account;

/// Faults, one after the other.
mod settle;

/// Pages that one thread alone writes.
mod claim;

/// Pages that arrive.
mod arrive;

/// Pages that leave.
pub mod depart;

/// Pages that go past this host.
mod straight;

/// Pages that stay where they are while their guest moves.
mod handed_on;

/// Pages as they are mapped into the guest.
mod map;

/// Pages as the guest first saw them.
mod shown;

/// Pages that came last.
mod recency;

/// Comparison with the source's.
mod compare;

/// Pages that the guest gives back meanwhile.
mod given_back;

/// What becomes of them.
mod discarded;

use std::collections::HashMap;
use std::fs::File;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use sterna_api::report::Faults;
use sterna_protocol::frame::Digester;
use sterna_protocol::layout::{ChunkIndex, PageIndex};
use sterna_protocol::pages::{PageMap, PageSet};
use sterna_sys::pagemap::Pagemap;

use self::account::Account;
use self::given_back::GivenBack;
pub(crate) use self::given_back::LOGGED;
use self::recency::Recency;
use self::shown::Shown;
use self::supplier::Suppliers;
use self::whereabouts::Whereabouts;
use crate::error::MigrateError;
use crate::faults::{self, GuestFaults, User, Userfault};
use crate::haste::Crew;
use crate::inside::Inside;
use crate::memory::Memory;

/// What it takes to let a guest run before all its pages are there.
pub struct PagingMeans {
    /// A foot inside the VMM's process.
    pub inside: Box<dyn Inside>,
    /// A file in memory, empty, or as an earlier daemon left it: the map of the pages that are not here. It outlives
    /// this daemon, so that another can go on with the guest.
    pub missing: File,
}

/// Brings the pages of one guest that runs here before all of them are here. It has threads of its own until
/// [`end`](Self::end).
pub struct Pager {
    ram: Arc<dyn Memory>,
    faults: Arc<GuestFaults>,
    userfault: Arc<Userfault>,
    /// Locked before what is inside the VMM's process.
    given_back: Mutex<GivenBack>,
    pagemap: Pagemap,
    state: Mutex<State>,
    changed: Condvar,
    /// One at a time asks each supplier: nobody who needs one waits for the other. Locked before `state`.
    asking: [Mutex<()>; 2],
    account: Mutex<Account>,
    /// Held while a page that is not missing is mapped for a fault, and while pages become missing: what was current
    /// when it was looked at is not mapped once it is stale.
    settling: Mutex<()>,
    /// Faults that are being settled: a thread of the guest waits for each.
    faulting: AtomicUsize,
    ended: AtomicBool,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

struct State {
    whereabouts: Whereabouts,
    begun: bool,
    begun_at: Option<Instant>,
    /// When the last page arrived.
    last: Option<Instant>,
    /// Missing pages whose bodies are being written.
    claimed: PageMap,
    /// Missing pages that somebody waits for.
    waiting: HashMap<PageIndex, Vec<Waiter>>,
    duplicate: u64,
    /// Pages as the guest first saw them, where both sides are to be compared.
    shown: Option<Shown>,
    recency: Recency,
    /// Who brings the pages that are away.
    suppliers: Suppliers,
    /// Pages leave and come here, also once all have come from the source.
    is_split: bool,
}

impl State {
    /// The guest was let run, or is about to be.
    fn begin(&mut self) {
        (self.begun, self.begun_at) = (true, Some(Instant::now()));
        self.suppliers.begin();
    }
}

/// A thread of the VMM that waits for a page.
#[derive(Debug, Clone, Copy)]
struct Waiter {
    thread: u32,
    since: Instant,
}

impl Pager {
    /// Makes ready: from now on the VMM maps no page of its guest's RAM but here. Nothing is missing yet. With `verify`
    /// the guest's first sight of each page is noted, digested so.
    ///
    /// # Errors
    /// The kernel or the VMM cannot do it: then nothing is registered.
    pub fn open(ram: Arc<dyn Memory>, means: PagingMeans, verify: Option<Digester>) -> Result<Arc<Self>, MigrateError> {
        let faults = GuestFaults::boxed(means.inside);
        let userfault = faults.begin(User::Paging, ram.spans(), ram.mappings())?;
        let whereabouts = Whereabouts::all_here(means.missing, ram.layout());
        let shown = verify.map(|digester| Shown::nothing(ram.layout(), digester));
        let pager = Self::start(ram, faults, userfault, whereabouts, shown)?;
        if verify.is_some() && pager.ram.mappings().maps_on_arrival() {
            // Where it cannot be started, all is noted in the pause.
            let _ = pager.spawn("note-rounds", Self::note_rounds);
        }
        Ok(pager)
    }

    /// Goes on with a guest that an earlier daemon let run. Faulting threads wait until a source is there again.
    ///
    /// # Errors
    /// What an earlier daemon left cannot be read, or the VMM keeps no userfaultfd. Then the guest's pages cannot be
    /// brought, and it must not be let run on.
    pub fn recover(ram: Arc<dyn Memory>, means: PagingMeans) -> Result<Arc<Self>, MigrateError> {
        let PagingMeans { inside, missing } = means;
        let lost = |what: &'static str| {
            move || MigrateError::Host { doing: what, source: std::io::ErrorKind::NotFound.into() }
        };
        let whereabouts = Whereabouts::recover(missing, ram.layout())
            .map_err(MigrateError::host("reading which of the guest's pages are not here"))?
            .ok_or_else(lost("reading which of the guest's pages are not here"))?;
        let faults = GuestFaults::boxed(inside);
        let userfault = faults.resume_paging(ram.spans(), ram.mappings())?;
        let userfault = userfault.ok_or_else(lost("taking the userfaultfd that QEMU keeps"))?;
        let pager = Self::start(ram, faults, userfault, whereabouts, None)?;
        pager.lock().begin();
        // Their faults were read by the daemon that is no more: they are raised again.
        pager.userfault.wake_all()?;
        Ok(pager)
    }

    fn start(
        ram: Arc<dyn Memory>,
        faults: Arc<GuestFaults>,
        userfault: Arc<Userfault>,
        whereabouts: Whereabouts,
        shown: Option<Shown>,
    ) -> Result<Arc<Self>, MigrateError> {
        let waited = ram.wait_for(userfault.descriptor());
        let files = waited.and_then(|()| ram.files()).map_err(MigrateError::host("looking at the guest's RAM files"));
        let made = Pagemap::open(faults.inside().pid());
        let made = made.map_err(MigrateError::vmm_process("opening QEMU's page tables"));
        let (files, pagemap) = match (files, made) {
            (Ok(files), Ok(pagemap)) => (files, pagemap),
            (Err(error), _) | (_, Err(error)) => {
                // With pages missing the descriptor must outlive this: another daemon may have more luck.
                if whereabouts.away() == 0 {
                    faults.end(User::Paging);
                }
                return Err(error);
            }
        };
        let state = State {
            begun: false,
            begun_at: None,
            last: None,
            claimed: PageMap::empty(ram.layout()),
            waiting: HashMap::new(),
            duplicate: 0,
            shown,
            recency: Recency::nothing(ram.layout()),
            suppliers: Suppliers::none(),
            is_split: whereabouts.has_both(),
            whereabouts,
        };
        let given_back = Mutex::new(GivenBack::nothing(files, ram.layout()));
        let pager = Arc::new(Self {
            ram,
            faults,
            userfault,
            given_back,
            pagemap,
            state: Mutex::new(state),
            changed: Condvar::new(),
            asking: Default::default(),
            account: Mutex::default(),
            settling: Mutex::default(),
            faulting: AtomicUsize::new(0),
            ended: AtomicBool::new(false),
            threads: Mutex::default(),
        });
        let settler: Weak<Self> = Arc::downgrade(&pager);
        pager.userfault.settled_by(settler)?;
        Ok(pager)
    }

    fn spawn(self: &Arc<Self>, name: &str, work: impl FnOnce(&Self) + Send + 'static) -> Result<(), MigrateError> {
        let pager = Arc::clone(self);
        let spawned = std::thread::Builder::new().name(name.into()).spawn(move || work(&pager));
        let thread = spawned.map_err(MigrateError::host("starting a thread for the guest's faults"))?;
        self.threads.lock().unwrap_or_else(PoisonError::into_inner).push(thread);
        Ok(())
    }

    /// The thread that reads its faults, once it runs.
    #[must_use]
    pub fn crew(&self) -> &Crew {
        self.userfault.crew()
    }

    /// From now on these pages are missing, and all others current. The devices are not loaded yet.
    ///
    /// # Errors
    /// No memory for the map, or the VMM has mapped pages meanwhile and does not let them go.
    pub fn begin(&self, residue: PageMap) -> Result<(), MigrateError> {
        let _settling = self.settling.lock().unwrap_or_else(PoisonError::into_inner);
        self.hold_back(&residue)?;
        // Before anything is missing: whatever was given back so far says nothing of what is to come.
        self.forget_given_back();
        let mut state = self.lock();
        state
            .whereabouts
            .begin(residue, self.ram.layout())
            .map_err(MigrateError::host("writing down which pages are missing"))?;
        state.begin();
        state.shown.iter_mut().for_each(Shown::nothing_is_due);
        self.changed.notify_all();
        Ok(())
    }

    /// From now on pages of a guest that runs here may [leave](Self::depart); all are here.
    ///
    /// # Errors
    /// No memory for the map.
    pub fn begin_split(&self) -> Result<(), MigrateError> {
        self.forget_given_back();
        let mut state = self.lock();
        let begun = state.whereabouts.begin(PageMap::empty(self.ram.layout()), self.ram.layout());
        begun.map_err(MigrateError::host("writing down which pages are missing"))?;
        state.is_split = true;
        state.begin();
        Ok(())
    }

    /// Whether the guest was let run, or is about to be, with pages missing.
    #[must_use]
    pub fn begun(&self) -> bool {
        self.lock().begun
    }

    /// How many pages are not here yet.
    #[must_use]
    pub fn missing(&self) -> u64 {
        self.lock().whereabouts.away()
    }

    /// The pages that are not here yet.
    #[must_use]
    pub fn missing_pages(&self) -> PageMap {
        self.lock().whereabouts.pages_away().clone()
    }

    /// How many of them are at memory hosts.
    #[must_use]
    pub fn away(&self) -> u64 {
        let state = self.lock();
        state.whereabouts.away() - state.whereabouts.to_come()
    }

    /// How many of them are at the guest's source.
    #[must_use]
    pub fn to_come(&self) -> u64 {
        self.lock().whereabouts.to_come()
    }

    /// The pages that are at the guest's source.
    #[must_use]
    pub fn pages_to_come(&self) -> PageMap {
        self.lock().whereabouts.pages_at_source(self.ram.layout())
    }

    /// Whether pages leave for memory hosts, and come back: then this goes on once all have come from the source.
    #[must_use]
    pub fn is_split(&self) -> bool {
        self.lock().is_split
    }

    /// The owner of the guest's userfaultfd, for whoever else wants to know of accesses to its RAM.
    #[must_use]
    pub fn guest_faults(&self) -> &Arc<GuestFaults> {
        &self.faults
    }

    /// Faults that asked for pages and got them, those that were settled here, and what they took.
    #[must_use]
    pub fn faults(&self) -> Faults {
        self.account().report()
    }

    /// Faults that asked for pages and got them, or wait.
    #[must_use]
    pub fn fault_count(&self) -> u64 {
        let waiting: usize = self.lock().waiting.values().map(Vec::len).sum();
        self.account().count() + waiting as u64
    }

    /// Bodies that were dropped because their page had arrived before.
    #[must_use]
    pub fn duplicate(&self) -> u64 {
        self.lock().duplicate
    }

    /// From the guest's start to the last page, or to now.
    #[must_use]
    pub fn took(&self) -> Duration {
        let state = self.lock();
        state.begun_at.map_or(Duration::ZERO, |began| state.last.unwrap_or_else(Instant::now) - began)
    }

    /// The RAM that pages come into.
    #[must_use]
    pub fn ram(&self) -> &Arc<dyn Memory> {
        &self.ram
    }

    /// The pages of a chunk that have memory here.
    fn allocated_in(&self, chunk: ChunkIndex) -> Result<PageSet, MigrateError> {
        self.ram.allocated_in(chunk).map_err(MigrateError::host("looking for holes in the guest's RAM"))
    }

    /// Ends it: threads end, the RAM is as any process's. Only where every page is here, the guest has ended, or it
    /// never ran: what is missing reads as zeros or as an earlier round's content from now on. More than once does
    /// nothing.
    pub fn end(&self) {
        if self.ended.swap(true, Ordering::AcqRel) {
            return;
        }
        self.userfault.hurry();
        {
            let _state = self.lock();
            self.changed.notify_all();
        }
        for thread in std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner)) {
            faults::join(thread);
        }
        let suppliers = self.lock().suppliers.take();
        suppliers.into_iter().for_each(|supplier| supplier.dismiss());
        self.faults.end(User::Paging);
    }

    /// Ends as when this process dies, for tests: no fault is read any more, and nothing is unregistered.
    #[doc(hidden)]
    pub fn die(&self) {
        self.userfault.die();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn account(&self) -> MutexGuard<'_, Account> {
        self.account.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Pager {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pager").field("missing", &self.missing()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
