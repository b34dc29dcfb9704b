//! The destination of a migration: a VMM that loads the devices, and a daemon that keeps what it received.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use sterna_api::{Blame, Problem};
use sterna_engine::agent::Discard;
use sterna_engine::destination::offers::Offers;
use sterna_engine::destination::pool::Pool;
use sterna_engine::host::{self, DaemonId, DestinationHost, Incoming, MigrationId, Verdict};
use sterna_engine::memory::BlockFile;
use sterna_engine::memory::kept::Kept;
use sterna_engine::paging::{Pager, PagingMeans};
use sterna_engine::split::Split;
use sterna_engine::split::onward::Handed;
use sterna_engine::transport::clock::now_us;
use sterna_engine::transport::credentials::Credentials;
use sterna_engine::vmm::{self, EventTime, VmmError};
use sterna_protocol::spec::{GangSpec, Kin, Ticket, VmSpec};
use sterna_sys::map::{Access, SharedMapping};

use super::guest::GuestRam;
use super::inside::InsideSelf;
use super::source::DEVICE_BYTES;

struct DestinationVmm {
    /// The guest's RAM, and the pages that loading the devices reads.
    touched: (Arc<SharedMapping>, Vec<u64>),
    at_start: Option<GuestProgram>,
    refuse_state: bool,
    dies_when_loaded: bool,
    /// Loads the devices as their state comes, as QEMU does; the state.
    loading: Option<JoinHandle<Vec<u8>>>,
    loaded_from: Arc<Mutex<Vec<u8>>>,
    running: Arc<AtomicBool>,
}

impl vmm::Destination for DestinationVmm {
    fn prepare(&mut self) -> Result<UnixStream, VmmError> {
        let (mut ours, theirs) = UnixStream::pair().expect("a pair of sockets");
        let (mapping, pages) = (Arc::clone(&self.touched.0), self.touched.1.clone());
        let loaded_from = Arc::clone(&self.loaded_from);
        self.loading = Some(std::thread::spawn(move || {
            let mut state = Vec::new();
            // A session that ends early leaves it cut short.
            let _ = ours.read_to_end(&mut state);
            if state.len() == DEVICE_BYTES {
                for page in pages {
                    // Where it has not arrived this waits for it.
                    let mut bytes = [0; 16];
                    mapping.copy_out(page * 4096..page * 4096 + 16, &mut bytes);
                    loaded_from.lock().unwrap().push(bytes[0]);
                }
            }
            state
        }));
        Ok(theirs)
    }

    fn loaded(&mut self, _timeout: Duration) -> Result<(), VmmError> {
        let state = self.loading.take().expect("prepared").join().expect("the state arrives");
        if state != [7; DEVICE_BYTES] {
            return Err(VmmError::Migration { reason: "the state is cut short".into() });
        }
        if self.refuse_state {
            return Err(VmmError::Migration { reason: "unknown section".into() });
        }
        Ok(())
    }

    fn alive(&mut self) -> Result<(), VmmError> {
        if self.dies_when_loaded { Err(VmmError::Gone { guest_off: false }) } else { Ok(()) }
    }

    fn start(&mut self) -> Result<EventTime, VmmError> {
        if let Some(program) = self.at_start.take() {
            program(Arc::clone(&self.touched.0));
        }
        self.running.store(true, Ordering::Release);
        Ok(EventTime(now_us()))
    }

    fn quit(&mut self) {}
}

/// What a guest does at the destination.
pub type GuestProgram = Box<dyn FnOnce(Arc<SharedMapping>) + Send>;

/// What is done with a split guest that has come.
pub type SplitProgram = Box<dyn FnOnce(&Arc<Split>) + Send>;

/// A destination "daemon" that keeps what it received.
#[derive(Default)]
pub struct Destination {
    pub ram: Mutex<Option<File>>,
    /// Where its guests' RAM is, in huge pages; elsewhere it is in small ones.
    pub huge: Mutex<Option<PathBuf>>,
    /// Whether its guests may run before all their pages are there.
    pub postcopy: AtomicBool,
    /// What its guest does from its start on, with its RAM.
    pub guest: Mutex<Option<GuestProgram>>,
    /// What it does before anything else can be done with its pages.
    pub at_start: Mutex<Option<GuestProgram>>,
    /// Pages that loading the devices reads.
    pub touched: Mutex<Vec<u64>>,
    /// What it found in them, the first byte of each.
    pub loaded_from: Arc<Mutex<Vec<u8>>>,
    /// What its guest gave back, as the agent logs it.
    pub discards: Arc<Mutex<Vec<Discard>>>,
    /// Whether its log overflows.
    pub overflow: Arc<AtomicBool>,
    /// Whether the guest has ended there, whatever is missing.
    pub guest_gone: AtomicBool,
    /// The map of missing pages of the guest that came last.
    pub missing: Mutex<Option<File>>,
    /// The guest's own mapping of its RAM, of the guest that came last.
    pub mapping: Mutex<Option<Arc<SharedMapping>>>,
    /// The memory hosts of the guest that comes next, where it is split.
    pub handed: Mutex<Option<Handed>>,
    /// The split of the guest that came last.
    pub split: Mutex<Option<Arc<Split>>>,
    /// What is done with it before anything else is asked for.
    pub with_split: Mutex<Option<SplitProgram>>,
    /// The pagers of guests that were started; `None` where all pages are there.
    pagers: Mutex<HashMap<MigrationId, Option<Arc<Pager>>>>,
    pub running: Arc<AtomicBool>,
    pub aborted: AtomicBool,
    pub refuse: Mutex<Option<Problem>>,
    pub refuse_state: AtomicBool,
    pub dies_when_loaded: AtomicBool,
    pub fail_commit: AtomicBool,
    pub room_bytes: AtomicU64,
    pub credentials: Option<Arc<Credentials>>,
    /// What the machine that came last is, where it is a clone.
    pub clone: Mutex<Option<host::Clone>>,
    /// What the machine that came last is related to.
    pub kin: Mutex<Option<Kin>>,
    /// Whether the machine that came last is to be in small pages.
    pub small_pages: AtomicBool,
    /// Who it says it is.
    pub identity: AtomicU64,
    /// What it has kept of a guest that left, and the number of its ticket.
    pub kept: Mutex<Option<(u128, Kept)>>,
    /// What happens to it between the offer and the first reference.
    pub after_offer: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    /// The tickets that the guest took along.
    pub tickets: Mutex<Vec<Ticket>>,
    verdicts: Mutex<HashMap<MigrationId, Verdict>>,
}

impl Destination {
    pub fn serve() -> (Arc<Self>, String) {
        Self::serve_with(None)
    }

    /// Takes calls that are encrypted with these.
    pub fn serve_with(credentials: Option<Arc<Credentials>>) -> (Arc<Self>, String) {
        // Shown where a test fails.
        let _ = tracing_subscriber::fmt().with_test_writer().with_max_level(tracing::Level::DEBUG).try_init();
        let host = Arc::new(Self { room_bytes: AtomicU64::new(u64::MAX), credentials, ..Self::default() });
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("bound").to_string();
        let serving: Arc<dyn DestinationHost> = host.clone();
        std::thread::spawn(move || sterna_engine::destination::listen::serve(&listener, &serving));
        (host, address)
    }

    /// Asserts that the guest's RAM arrived.
    pub fn assert_same(&self, ram: &GuestRam) {
        let guard = self.ram.lock().unwrap();
        let theirs =
            SharedMapping::new(guard.as_ref().expect("a guest came"), ram.bytes, Access::Read).expect("a mapping");
        let (mut here, mut there) = ([0; 4096], [0; 4096]);
        for page in 0..ram.bytes / 4096 {
            let range = page * 4096..(page + 1) * 4096;
            ram.mapping.copy_out(range.clone(), &mut here);
            theirs.copy_out(range, &mut there);
            assert!(here == there, "page {page} differs");
        }
    }
}

impl DestinationHost for Destination {
    fn identity(&self) -> DaemonId {
        DaemonId(self.identity.load(Ordering::Acquire).into())
    }

    fn credentials(&self) -> Option<Arc<Credentials>> {
        self.credentials.clone()
    }

    fn pool(&self, gang: &GangSpec, _from: Option<&str>) -> Result<Arc<Pool>, Problem> {
        Ok(Pool::new(tempfile::tempfile_in("/dev/shm").expect("a file on tmpfs"), gang.members).expect("a pool"))
    }

    fn keeps(&self, shown: &[u128]) -> bool {
        self.kept.lock().unwrap().as_ref().is_some_and(|(number, _)| shown.contains(number))
    }

    fn offer(&self, _group: &str, shown: &[u128], pool: &Arc<Pool>) -> std::io::Result<()> {
        let kept = self.kept.lock().unwrap();
        let Some((_, kept)) = kept.as_ref().filter(|(number, _)| shown.contains(number)) else { return Ok(()) };
        if pool.offers().is_none() {
            pool.offer(Offers::new(&kept.files()?)?);
        }
        Ok(())
    }

    fn takes_along(&self, _id: MigrationId, tickets: &[Ticket]) {
        *self.tickets.lock().unwrap() = tickets.to_vec();
    }

    fn prepare(
        &self,
        _id: MigrationId,
        spec: &VmSpec,
        _from: Option<&str>,
        _pool: Option<&Arc<Pool>>,
        postcopy: bool,
        clone: Option<host::Clone>,
    ) -> Result<Incoming, Problem> {
        if let Some(problem) = self.refuse.lock().unwrap().clone() {
            return Err(problem);
        }
        if let Some(happens) = self.after_offer.lock().unwrap().take() {
            happens();
        }
        self.aborted.store(false, Ordering::Release);
        self.kin.lock().unwrap().clone_from(&spec.kin);
        self.small_pages.store(spec.small_pages, Ordering::Release);
        *self.clone.lock().unwrap() = clone;
        let huge = self.huge.lock().unwrap().clone();
        let directory = huge.as_deref().unwrap_or(Path::new("/dev/shm"));
        let file = tempfile::tempfile_in(directory).expect("a file on tmpfs");
        file.set_len(spec.blocks[0].bytes).expect("room for the file");
        *self.ram.lock().unwrap() = Some(file.try_clone().expect("a descriptor"));
        let mapping = SharedMapping::new(&file, spec.blocks[0].bytes, Access::ReadWrite).expect("a mapping");
        if huge.is_some() {
            mapping.advise_huge(true).expect("huge pages");
        }
        let mapping = Arc::new(mapping);
        *self.mapping.lock().unwrap() = Some(Arc::clone(&mapping));
        let address = mapping.addresses().start;
        let paging = postcopy.then(|| {
            if !self.postcopy.load(Ordering::Acquire) {
                return Err(Problem::new("no-postcopy".into(), Blame::Host, "this host cannot"));
            }
            let (discards, overflow) = (Arc::clone(&self.discards), Arc::clone(&self.overflow));
            let inside = InsideSelf { discards, overflow, ..InsideSelf::default() };
            inside.mappings.lock().unwrap().push(Arc::clone(&mapping));
            let missing = tempfile::tempfile_in("/dev/shm").expect("a file on tmpfs");
            *self.missing.lock().unwrap() = Some(missing.try_clone().expect("a descriptor"));
            Ok(PagingMeans { inside: Box::new(inside), missing })
        });
        let vmm = DestinationVmm {
            touched: (mapping, self.touched.lock().unwrap().clone()),
            at_start: self.at_start.lock().unwrap().take(),
            refuse_state: self.refuse_state.load(Ordering::Acquire),
            dies_when_loaded: self.dies_when_loaded.load(Ordering::Acquire),
            loading: None,
            loaded_from: Arc::clone(&self.loaded_from),
            running: Arc::clone(&self.running),
        };
        Ok(Incoming {
            vmm: Box::new(vmm),
            blocks: vec![BlockFile { spec: spec.blocks[0].clone(), file, address, process: None }],
            qemu_version: "none".into(),
            paging,
            split: self.handed.lock().unwrap().take(),
        })
    }

    fn room_bytes(&self) -> u64 {
        self.room_bytes.load(Ordering::Acquire)
    }

    fn commit(&self, id: MigrationId, _postcopy: bool) -> Result<(), Problem> {
        if self.fail_commit.load(Ordering::Acquire) {
            return Err(Problem::new("disk-full".into(), Blame::Host, "the record could not be written"));
        }
        match *self.verdicts.lock().unwrap().entry(id).or_insert(Verdict::Committed) {
            Verdict::Committed => Ok(()),
            Verdict::Aborted => Err(Problem::new("aborted".into(), Blame::Ours, "aborted before")),
        }
    }

    fn took_over(&self, _id: MigrationId, split: Arc<Split>) {
        if let Some(act) = self.with_split.lock().unwrap().take() {
            act(&split);
        }
        *self.split.lock().unwrap() = Some(split);
    }

    fn started(&self, id: MigrationId, _incoming: Incoming, pager: Option<Arc<Pager>>, _failed: Option<&Problem>) {
        self.pagers.lock().unwrap().insert(id, pager);
        if let Some(program) = self.guest.lock().unwrap().take() {
            let mapping = self.mapping.lock().unwrap().clone().expect("prepared");
            std::thread::spawn(move || program(mapping));
        }
    }

    fn pager(&self, id: MigrationId, _from: Option<&str>) -> Result<Arc<Pager>, Problem> {
        if self.guest_gone.load(Ordering::Acquire) {
            return Err(Problem::new("guest-gone".into(), Blame::Guest, "it switched itself off"));
        }
        match self.pagers.lock().unwrap().get(&id) {
            Some(Some(pager)) => Ok(Arc::clone(pager)),
            Some(None) => Err(Problem::new("paged".into(), Blame::Peer, "no page is still to come")),
            // The source is told that the guest runs before the pager is handed over: it may come back in between.
            None => Err(Problem::new("not-yet".into(), Blame::Peer, "the guest does not run here yet")),
        }
    }

    fn paged(&self, id: MigrationId) {
        self.pagers.lock().unwrap().insert(id, None);
    }

    fn abort(&self, id: MigrationId, _incoming: Option<Incoming>) {
        self.verdicts.lock().unwrap().insert(id, Verdict::Aborted);
        self.aborted.store(true, Ordering::Release);
    }

    fn verdict(&self, id: MigrationId, _from: Option<&str>) -> Result<Verdict, Problem> {
        Ok(*self.verdicts.lock().unwrap().entry(id).or_insert(Verdict::Aborted))
    }
}
