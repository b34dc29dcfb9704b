//! Pages that come after the guest's start: what its faults find, what arrives, and the account of both.
//!
//! One mechanism for pages that are not here and for those that are stale. The guest's RAM is registered for missing and minor faults
//! before the VMM first touches it, so nothing is mapped that was not mapped here. A body that arrives is written into the RAM *file*, and
//! only then mapped (`UFFDIO_CONTINUE`), which wakes who waits for it. So a guest never sees half a page, a page of an earlier round, or
//! zeros in place of a page that is still to come:
//!
//! | the page | the guest's access | what happens |
//! | --- | --- | --- |
//! | missing (of the residue, not arrived) | waits | asked for, once; mapped when it is in the file |
//! | current, in the file | a minor fault | mapped at once, with its neighbours |
//! | current, a hole | a missing fault | a page of zeros |
//!
//! Two threads may work on the same page: the fault thread and those that receive. Which of them maps a page does not matter, as it is
//! mapped only when it is not missing, and it is missing until its content is in the file; the second finds it there (`EEXIST`) and wakes
//! who waits. Two connections that carry the same page are told apart by a claim, under the lock: the second body is dropped, as the
//! guest may have written the page since the first.
//!
//! Kernel's documentation: `Documentation/admin-guide/mm/userfaultfd.rst`.

/// Which pages are not here yet.
pub mod missing;

/// What faults cost the guest.
pub mod account;

/// Faults, one after the other.
mod faults;

/// Pages that arrive.
mod arrive;

/// Pages as they are mapped into the guest.
mod map;

/// Pages as the guest first saw them.
mod shown;

/// Pages that the guest gives back meanwhile.
mod given_back;

use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::EventfdFlags;
use sterna_api::report::Faults;
use sterna_protocol::frame::Digester;
use sterna_protocol::layout::{ChunkIndex, PageIndex};
use sterna_protocol::message::{self, PageRequest};
use sterna_protocol::pages::{PageMap, PageSet};
use sterna_sys::map::Access;
use sterna_sys::pagemap::Pagemap;
use sterna_sys::userfaultfd::{Features, Modes, Userfaultfd};

use self::account::Account;
use self::given_back::GivenBack;
use self::missing::Missing;
use self::shown::Shown;
use crate::error::MigrateError;
use crate::inside::Inside;
use crate::memory::shared::SharedMemory;
use crate::memory::{BlockFile, Memory};
use crate::transport::connection::{Connection, HangUp};

/// What post-copy needs of the kernel.
const FEATURES: Features = Features::MISSING_SHMEM.union(Features::MINOR_SHMEM).union(Features::THREAD_ID);
/// A source that has said nothing for so long is not there: it says something twice a second.
const SILENCE: Duration = Duration::from_secs(3);
/// How long the threads here have to end.
const END: Duration = Duration::from_secs(5);

/// What it takes to let a guest run before all its pages are there.
pub struct PagingMeans {
    /// A foot inside the VMM's process.
    pub inside: Box<dyn Inside>,
    /// A file in memory, empty, or as an earlier daemon left it: the map of the pages that are not here. It outlives this daemon, so that
    /// another can go on with the guest.
    pub missing: File,
}

/// Brings the pages of one guest that runs here before all of them are here. It has threads of its own until [`end`](Self::end).
pub struct Pager {
    ram: Arc<dyn Memory>,
    spans: Vec<Range<u64>>,
    userfaultfd: Userfaultfd,
    inside: Mutex<Box<dyn Inside>>,
    /// Locked before `inside`.
    given_back: Mutex<GivenBack>,
    pagemap: Pagemap,
    state: Mutex<State>,
    changed: Condvar,
    source: Mutex<Option<Source>>,
    account: Mutex<Account>,
    /// Held while a page that is not missing is mapped for a fault, and while pages become missing: what was current when it was looked at is not
    /// mapped once it is stale.
    settling: Mutex<()>,
    ended: AtomicBool,
    wake_up: OwnedFd,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

struct State {
    missing: Missing,
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
    heard: Instant,
    attachments: u64,
    attached: bool,
}

/// A thread of the VMM that waits for a page.
#[derive(Debug, Clone, Copy)]
struct Waiter {
    thread: u32,
    since: Instant,
}

/// The way to the source, for requests.
struct Source {
    number: u64,
    requests: Connection,
    key: u64,
    /// All connections of the session, this one among them.
    hang_up: Vec<HangUp>,
}

impl Pager {
    /// Makes ready: from now on the VMM maps no page of its guest's RAM but here. Nothing is missing yet. With `verify` the guest's first sight of
    /// each page is noted, digested so.
    ///
    /// # Errors
    /// The kernel or the VMM cannot do it: then nothing is registered.
    pub fn open(ram: Arc<dyn Memory>, means: PagingMeans, verify: Option<Digester>) -> Result<Arc<Self>, MigrateError> {
        let PagingMeans { mut inside, missing } = means;
        let userfaultfd = inside.open(FEATURES)?;
        let spans = ram.spans();
        for span in &spans {
            let registered = userfaultfd.register(span.clone(), Modes::MISSING | Modes::MINOR);
            if let Err(error) = registered {
                inside.close();
                return Err(MigrateError::vmm_process("registering the guest's RAM for faults")(error));
            }
        }
        let missing = Missing::none(missing, ram.layout());
        let shown = verify.map(|digester| Shown::nothing(ram.layout(), digester));
        Self::start(ram, spans, userfaultfd, inside, missing, shown)
    }

    /// Goes on with a guest that an earlier daemon let run. Faulting threads wait until a source is there again.
    ///
    /// # Errors
    /// What an earlier daemon left cannot be read, or the VMM keeps no userfaultfd. Then the guest's pages cannot be brought, and it must not be
    /// let run on.
    pub fn recover(blocks: &[BlockFile], means: PagingMeans) -> Result<Arc<Self>, MigrateError> {
        let PagingMeans { mut inside, missing } = means;
        let lost = |what: &'static str| {
            move || MigrateError::Host { doing: what, source: std::io::ErrorKind::NotFound.into() }
        };
        let ram = Arc::new(SharedMemory::open(blocks, Access::ReadWrite)?);
        let missing = Missing::recover(missing, ram.layout())
            .map_err(MigrateError::host("reading which of the guest's pages are not here"))?
            .ok_or_else(lost("reading which of the guest's pages are not here"))?;
        let userfaultfd = inside.reopen()?.ok_or_else(lost("taking the userfaultfd that QEMU keeps"))?;
        let spans = ram.spans();
        let pager = Self::start(ram, spans, userfaultfd, inside, missing, None)?;
        {
            let mut state = pager.lock();
            (state.begun, state.begun_at) = (true, Some(Instant::now()));
        }
        // Their faults were read by the daemon that is no more: they are raised again.
        for span in &pager.spans {
            pager
                .userfaultfd
                .wake(span.clone())
                .map_err(MigrateError::vmm_process("waking the guest's waiting threads"))?;
        }
        Ok(pager)
    }

    fn start(
        ram: Arc<dyn Memory>,
        spans: Vec<Range<u64>>,
        userfaultfd: Userfaultfd,
        mut inside: Box<dyn Inside>,
        missing: Missing,
        shown: Option<Shown>,
    ) -> Result<Arc<Self>, MigrateError> {
        let files = ram.files().map_err(MigrateError::host("looking at the guest's RAM files"));
        let made = Pagemap::open(inside.pid()).map_err(MigrateError::vmm_process("opening QEMU's page tables"));
        let wake_up = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| MigrateError::host("making an event descriptor")(error.into()));
        let (files, pagemap, wake_up) = match (files, made, wake_up) {
            (Ok(files), Ok(pagemap), Ok(wake_up)) => (files, pagemap, wake_up),
            (Err(error), ..) | (_, Err(error), _) | (.., Err(error)) => {
                // With pages missing the descriptor must outlive this: another daemon may have more luck.
                if missing.left() == 0 {
                    inside.close();
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
            heard: Instant::now(),
            attachments: 0,
            attached: false,
            missing,
        };
        let given_back = Mutex::new(GivenBack::nothing(files, ram.layout()));
        let pager = Arc::new(Self {
            ram,
            spans,
            userfaultfd,
            inside: Mutex::new(inside),
            given_back,
            pagemap,
            state: Mutex::new(state),
            changed: Condvar::new(),
            source: Mutex::new(None),
            account: Mutex::default(),
            settling: Mutex::default(),
            ended: AtomicBool::new(false),
            wake_up,
            threads: Mutex::default(),
        });
        pager.spawn("faults", faults::serve)?;
        Ok(pager)
    }

    fn spawn(self: &Arc<Self>, name: &str, work: fn(&Self)) -> Result<(), MigrateError> {
        let pager = Arc::clone(self);
        let spawned = std::thread::Builder::new().name(name.into()).spawn(move || work(&pager));
        let thread = spawned.map_err(MigrateError::host("starting a thread for the guest's faults"))?;
        self.threads.lock().unwrap_or_else(PoisonError::into_inner).push(thread);
        Ok(())
    }

    /// From now on these pages are missing, and all others current. The devices are not loaded yet.
    ///
    /// # Errors
    /// No memory for the map, or the VMM has mapped pages meanwhile and does not let them go.
    pub fn begin(&self, residue: PageMap) -> Result<(), MigrateError> {
        let _settling = self.settling.lock().unwrap_or_else(PoisonError::into_inner);
        self.unmap_early()?;
        // Before anything is missing: whatever was given back so far says nothing of what is to come.
        self.with_inside(|given_back, inside| given_back.begin(inside));
        let mut state = self.lock();
        state
            .missing
            .begin(residue, self.ram.layout())
            .map_err(MigrateError::host("writing down which pages are missing"))?;
        (state.begun, state.begun_at, state.heard) = (true, Some(Instant::now()), Instant::now());
        Ok(())
    }

    /// Whether the guest was let run, or is about to be, with pages missing.
    #[must_use]
    pub fn begun(&self) -> bool {
        self.lock().begun
    }

    /// Pages that are not here yet.
    #[must_use]
    pub fn missing(&self) -> u64 {
        self.lock().missing.left()
    }

    /// All of them.
    #[must_use]
    pub fn missing_pages(&self) -> PageMap {
        self.lock().missing.pages().clone()
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

    /// For how long there has been no source to bring pages; `None` where there is one, or nothing is missing.
    #[must_use]
    pub fn alone(&self) -> Option<Duration> {
        let state = self.lock();
        let silent = state.heard.elapsed();
        (state.begun && state.missing.left() > 0 && (!state.attached || silent > SILENCE)).then_some(silent)
    }

    /// From the guest's start to the last page, or to now.
    #[must_use]
    pub fn took(&self) -> Duration {
        let state = self.lock();
        state.begun_at.map_or(Duration::ZERO, |began| state.last.unwrap_or_else(Instant::now) - began)
    }

    /// How the guest's first sight of every page was digested; `None` where it is not known.
    #[must_use]
    pub fn digester(&self) -> Option<Digester> {
        self.lock().shown.as_ref().map(|shown| shown.digester)
    }

    /// The digest of a chunk as the guest first saw its pages, as [`Memory::chunk_digest`].
    ///
    /// # Errors
    /// That is not known, or RAM cannot be read.
    pub fn chunk_digest(&self, chunk: ChunkIndex) -> Result<u64, MigrateError> {
        self.with_shown(|shown| shown.chunk_digest(self.ram.as_ref(), chunk))
    }

    /// The digests of a chunk's pages as the guest first saw them, as [`Memory::page_digests`].
    ///
    /// # Errors
    /// As [`Self::chunk_digest`].
    pub fn page_digests(&self, chunk: ChunkIndex) -> Result<Vec<u64>, MigrateError> {
        self.with_shown(|shown| shown.page_digests(self.ram.as_ref(), chunk))
    }

    /// Pages of a chunk that the guest may have given back since its start here: what it saw of them may be zeros whatever the source has.
    #[must_use]
    pub fn given_back(&self, chunk: ChunkIndex) -> PageSet {
        self.with_inside(|given_back, inside| {
            given_back.look(inside, self.ram.layout());
            given_back.possible(chunk, self.ram.layout())
        })
    }

    /// Those of a chunk that are known to be given back, so that what was in them is wanted no more.
    fn unwanted(&self, chunk: ChunkIndex) -> PageSet {
        let given_back = self.given_back.lock().unwrap_or_else(PoisonError::into_inner);
        if !given_back.is_due() {
            return *given_back.known(chunk);
        }
        drop(given_back);
        self.with_inside(|given_back, inside| {
            given_back.look(inside, self.ram.layout());
            *given_back.known(chunk)
        })
    }

    fn with_inside<T>(&self, look: impl FnOnce(&mut GivenBack, &mut dyn Inside) -> T) -> T {
        let mut given_back = self.given_back.lock().unwrap_or_else(PoisonError::into_inner);
        let mut inside = self.inside.lock().unwrap_or_else(PoisonError::into_inner);
        look(&mut given_back, inside.as_mut())
    }

    fn with_shown<T>(&self, look: impl FnOnce(&mut Shown) -> std::io::Result<T>) -> Result<T, MigrateError> {
        let mut state = self.lock();
        let shown = state.shown.as_mut().ok_or(MigrateError::Request("digests that were not agreed on"))?;
        look(shown).map_err(MigrateError::host("reading the guest's RAM to compare it"))
    }

    /// The RAM that pages come into.
    #[must_use]
    pub fn ram(&self) -> &Arc<dyn Memory> {
        &self.ram
    }

    /// A source is there: what is waited for is asked for on `requests`, and whoever was there before is hung up on. The number of the
    /// attachment.
    pub(crate) fn attach(&self, requests: Connection, key: u64, hang_up: Vec<HangUp>) -> u64 {
        let mut source = self.source.lock().unwrap_or_else(PoisonError::into_inner);
        // Asked for under the lock of the way there: a fault that comes meanwhile either is among those that wait, or asks afterwards.
        let (number, waiting) = {
            let mut state = self.lock();
            (state.attachments, state.attached, state.heard) = (state.attachments + 1, true, Instant::now());
            let pages = state.waiting.iter().filter_map(|(page, waiters)| Some((*page, waiters.first()?.thread)));
            (state.attachments, pages.collect::<Vec<_>>())
        };
        if let Some(before) = source.replace(Source { number, requests, key, hang_up }) {
            before.hang_up.iter().for_each(HangUp::now);
        }
        for (page, thread) in waiting {
            ask(&mut source, PageRequest { page, thread });
        }
        number
    }

    /// The source of that number has gone, if it is still the one.
    pub(crate) fn detach(&self, number: u64) {
        let mut source = self.source.lock().unwrap_or_else(PoisonError::into_inner);
        if source.as_ref().is_some_and(|source| source.number == number) {
            *source = None;
        }
        let mut state = self.lock();
        if state.attachments == number {
            state.attached = false;
        }
    }

    /// The source has said something.
    pub(crate) fn heard(&self) {
        self.lock().heard = Instant::now();
    }

    /// Waits until nothing is missing, at most so long. Whether nothing is.
    pub(crate) fn wait(&self, timeout: Duration) -> bool {
        let waited = self.changed.wait_timeout_while(self.lock(), timeout, |state| state.missing.left() > 0);
        waited.unwrap_or_else(PoisonError::into_inner).0.missing.left() == 0
    }

    /// Ends it: threads end, the RAM is as any process's. Only where every page is here, the guest has ended, or it never ran: what is missing
    /// reads as zeros or as an earlier round's content from now on. More than once does nothing.
    pub fn end(&self) {
        if self.ended.swap(true, Ordering::AcqRel) {
            return;
        }
        let _ = rustix::io::write(&self.wake_up, &1u64.to_ne_bytes());
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        let deadline = Instant::now() + END;
        for thread in threads {
            // With a kernel older than 6.10 the VMM can make it wait in `read(2)`, again and again.
            while !thread.is_finished() && Instant::now() < deadline {
                sterna_sys::process::interrupt(&thread);
                std::thread::sleep(Duration::from_millis(1));
            }
            if thread.is_finished() {
                // A panic in one of them is a bug, and was reported; the guest needs the rest of this all the more.
                let _ = thread.join();
            } else {
                tracing::error!(
                    thread = thread.thread().name(),
                    "does not end: QEMU keeps it waiting; it is left behind"
                );
            }
        }
        *self.source.lock().unwrap_or_else(PoisonError::into_inner) = None;
        for span in &self.spans {
            // It fails only where the process is gone.
            let _ = self.userfaultfd.unregister(span.clone());
            // Unregistering wakes who waits before it is done: a thread that began to wait in between would wait for ever.
            let _ = self.userfaultfd.wake(span.clone());
        }
        self.inside.lock().unwrap_or_else(PoisonError::into_inner).close();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn account(&self) -> MutexGuard<'_, Account> {
        self.account.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Asks the source for a page. Where there is none, or the way there breaks, the page is among those that wait, and asked for when a source is there
/// again.
fn ask(source: &mut Option<Source>, request: PageRequest) {
    let Some(there) = source else { return };
    let Ok(bytes) = message::encode(&request, there.key) else { return };
    if let Err(error) = std::io::Write::write_all(&mut there.requests, &bytes) {
        tracing::info!(%error, "the way to the source is lost: pages wait until it is there again");
        *source = None;
    }
}

impl std::fmt::Debug for Pager {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pager").field("missing", &self.missing()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
