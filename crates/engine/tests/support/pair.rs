//! Both ends of a migration in one process, with real sockets, real mappings, real write tracking, and a "guest" of
//! threads.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use sterna_api::{Blame, Problem};
use sterna_engine::agent::{Advice, Discard, Discards};
use sterna_engine::error::MigrateError;
use sterna_engine::host::{DaemonId, DestinationHost, Incoming, MigrationId, SourceHost, Verdict};
use sterna_engine::inside::Inside;
use sterna_engine::memory::BlockFile;
use sterna_engine::paging::{Pager, PagingMeans};
use sterna_engine::source::Outgoing;
use sterna_engine::source::throttle::ProcessThrottle;
use sterna_engine::source::track::WriteProtect;
use sterna_engine::transport::clock::now_us;
use sterna_engine::transport::credentials::Credentials;
use sterna_engine::vmm::{self, EventTime, MappedRam, Stopped, VmmError};
use sterna_introspect::PageTables;
use sterna_protocol::spec::{BlockSpec, VmSpec};
use sterna_sys::map::{Access, SharedMapping};
use sterna_sys::userfaultfd::{self, Features, Userfaultfd};

/// Skips, saying why, where this kernel or this user cannot track writes.
pub fn tracking_works() -> bool {
    let missing = sterna_sys::probe::missing();
    if !missing.is_empty() {
        println!("skipped: {}", missing.join("; "));
    }
    missing.is_empty()
}

/// RAM of the guest, as its "vCPUs" see it: a file of holes on tmpfs.
pub struct GuestRam {
    pub file: File,
    pub mapping: Arc<SharedMapping>,
    pub bytes: u64,
}

impl GuestRam {
    pub fn new(bytes: u64) -> Self {
        let file = tempfile::tempfile_in("/dev/shm").expect("a file on tmpfs");
        file.set_len(bytes).expect("room for the file");
        let mapping = Arc::new(SharedMapping::new(&file, bytes, Access::ReadWrite).expect("a mapping"));
        Self { file, mapping, bytes }
    }

    pub fn write_page(&self, page: u64, byte: u8) {
        self.mapping.copy_in(page * 4096, &[byte; 4096]).expect("inside the mapping");
    }
}

/// Threads that write the guest's RAM for ever: a page at a time, a random one, with ever new content.
pub struct Writers {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
    /// The thread's number, as the kernel has it.
    pub id: u32,
}

/// The calling thread's number.
fn thread_id() -> u32 {
    let link = std::fs::read_link("/proc/thread-self").expect("proc is mounted");
    link.file_name().and_then(|name| name.to_str()?.parse().ok()).expect("PID/task/TID")
}

impl Writers {
    pub fn start(ram: &GuestRam, pages: std::ops::Range<u64>, pause: Duration) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (mapping, stopped) = (Arc::clone(&ram.mapping), Arc::clone(&stop));
        let (say, id) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            say.send(thread_id()).expect("somebody asks");
            let mut random = 0x9e37_79b9_7f4a_7c15_u64;
            while !stopped.load(Ordering::Acquire) {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                let page = pages.start + random % (pages.end - pages.start);
                let content = u128::from(random) << 64 | 1;
                mapping
                    .copy_in(page * 4096 + (random >> 32) % 256 * 16, &content.to_le_bytes())
                    .expect("inside the mapping");
                if !pause.is_zero() {
                    std::thread::sleep(pause);
                }
            }
        });
        Self { stop, threads: vec![thread], id: id.recv().expect("a running thread") }
    }

    fn stop(&mut self) {
        self.stop.store(true, Ordering::Release);
        for thread in self.threads.drain(..) {
            assert!(thread.join().is_ok() || std::thread::panicking(), "a writer panicked");
        }
    }
}

impl Drop for Writers {
    fn drop(&mut self) {
        self.stop();
    }
}

/// What happens to a VMM on purpose.
#[derive(Default)]
pub struct Faults {
    pub at_stop: Option<Box<dyn FnOnce() + Send>>,
    pub while_saving: Option<Box<dyn FnOnce() + Send>>,
    /// Before it says that it has saved them.
    pub before_saved: Option<Box<dyn FnOnce() + Send>>,
    pub switched_off: Arc<AtomicBool>,
    /// Whether it says that somebody writes RAM past the page tables, when it is asked.
    pub writes_untracked: bool,
}

/// A source "VMM": its guest is the writers, its devices 300,000 bytes.
pub struct SourceVmm {
    pub writers: Option<Writers>,
    pub faults: Faults,
    pub rolled_back: Arc<AtomicBool>,
    /// How often it still refuses to be rolled back.
    pub refuse_rollback: Arc<AtomicU64>,
    pub quit: Arc<AtomicBool>,
    /// How large its RAM is, from address 0 on, and the page tables of its processors: what looks into a guest from
    /// outside asks for.
    pub kernel: Option<(u64, Vec<PageTables>)>,
    stream: Option<UnixStream>,
}

pub const DEVICE_BYTES: usize = 300_000;

impl SourceVmm {
    pub fn new(writers: Option<Writers>) -> Self {
        let (faults, rolled_back, quit) = (Faults::default(), Arc::default(), Arc::default());
        Self { writers, faults, rolled_back, refuse_rollback: Arc::default(), quit, kernel: None, stream: None }
    }
}

impl vmm::Source for SourceVmm {
    fn prepare(&mut self) -> Result<(), VmmError> {
        Ok(())
    }

    fn running(&mut self) -> Result<bool, VmmError> {
        Ok(true)
    }

    fn processor_threads(&mut self) -> Result<Vec<u32>, VmmError> {
        Ok(self.writers.iter().map(|writers| writers.id).collect())
    }

    fn memory_map(&mut self) -> Result<Vec<MappedRam>, VmmError> {
        let none = || VmmError::Refused { command: "memory map".into(), reason: "it has no kernel".into() };
        let (bytes, _) = self.kernel.as_ref().ok_or_else(none)?;
        Ok(vec![MappedRam { guest_physical: 0..*bytes, block: "ram".into(), offset: 0 }])
    }

    fn page_tables(&mut self) -> Result<Vec<PageTables>, VmmError> {
        Ok(self.kernel.as_ref().map(|(_, tables)| tables.clone()).unwrap_or_default())
    }

    fn writes_untracked(&mut self) -> Result<bool, VmmError> {
        Ok(self.faults.writes_untracked)
    }

    fn begin(&mut self) -> Result<UnixStream, VmmError> {
        let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
        self.stream = Some(ours);
        Ok(theirs)
    }

    fn stopped(&mut self, _timeout: Duration) -> Result<Option<Stopped>, VmmError> {
        let stop = EventTime(now_us());
        self.writers.iter_mut().for_each(Writers::stop);
        if let Some(act) = self.faults.at_stop.take() {
            act();
        }
        Ok(Some(Stopped { stop, ready: EventTime(now_us()) }))
    }

    fn save_devices(&mut self) -> Result<(), VmmError> {
        if let Some(act) = self.faults.while_saving.take() {
            act();
        }
        let mut stream = self.stream.take().expect("begun");
        std::thread::spawn(move || {
            let _ = stream.write_all(&[7; DEVICE_BYTES]);
        });
        Ok(())
    }

    fn saved(&mut self, _timeout: Duration) -> Result<(), VmmError> {
        if let Some(act) = self.faults.before_saved.take() {
            act();
        }
        Ok(())
    }

    fn rollback(&mut self) -> Result<(), VmmError> {
        let less = |times: u64| times.checked_sub(1);
        if self.refuse_rollback.fetch_update(Ordering::AcqRel, Ordering::Acquire, less).is_ok() {
            return Err(VmmError::Silent { waiting_for: "cont".into(), seconds: 1 });
        }
        self.stream = None;
        self.rolled_back.store(true, Ordering::Release);
        Ok(())
    }

    fn ended(&mut self) -> Option<VmmError> {
        self.faults.switched_off.load(Ordering::Acquire).then_some(VmmError::Gone { guest_off: true })
    }

    fn quit(&mut self) {
        self.quit.store(true, Ordering::Release);
    }
}

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

/// A destination "daemon" that keeps what it received.
#[derive(Default)]
pub struct Destination {
    pub ram: Mutex<Option<File>>,
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
    mapping: Mutex<Option<Arc<SharedMapping>>>,
    pagers: Mutex<HashMap<MigrationId, Arc<Pager>>>,
    pub running: Arc<AtomicBool>,
    pub aborted: AtomicBool,
    pub refuse: Mutex<Option<Problem>>,
    pub refuse_state: AtomicBool,
    pub dies_when_loaded: AtomicBool,
    pub fail_commit: AtomicBool,
    pub room_bytes: AtomicU64,
    pub credentials: Option<Arc<Credentials>>,
    /// Who it says it is.
    pub identity: AtomicU64,
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

    fn prepare(
        &self,
        _id: MigrationId,
        spec: &VmSpec,
        _from: Option<&str>,
        postcopy: bool,
    ) -> Result<Incoming, Problem> {
        if let Some(problem) = self.refuse.lock().unwrap().clone() {
            return Err(problem);
        }
        self.aborted.store(false, Ordering::Release);
        let file = tempfile::tempfile_in("/dev/shm").expect("a file on tmpfs");
        file.set_len(spec.blocks[0].bytes).expect("room for the file");
        *self.ram.lock().unwrap() = Some(file.try_clone().expect("a descriptor"));
        let mapping = SharedMapping::new(&file, spec.blocks[0].bytes, Access::ReadWrite).expect("a mapping");
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
            blocks: vec![BlockFile { spec: spec.blocks[0].clone(), file, address }],
            qemu_version: "none".into(),
            paging,
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

    fn started(&self, id: MigrationId, _incoming: Incoming, pager: Option<Arc<Pager>>, _failed: Option<&Problem>) {
        if let Some(pager) = pager {
            self.pagers.lock().unwrap().insert(id, pager);
        }
        if let Some(program) = self.guest.lock().unwrap().take() {
            let mapping = self.mapping.lock().unwrap().clone().expect("prepared");
            std::thread::spawn(move || program(mapping));
        }
    }

    fn pager(&self, id: MigrationId, _from: Option<&str>) -> Result<Arc<Pager>, Problem> {
        if self.guest_gone.load(Ordering::Acquire) {
            return Err(Problem::new("guest-gone".into(), Blame::Guest, "it switched itself off"));
        }
        let pager = self.pagers.lock().unwrap().get(&id).cloned();
        pager.ok_or_else(|| Problem::new("paged".into(), Blame::Peer, "no page is still to come"))
    }

    fn paged(&self, id: MigrationId) {
        self.pagers.lock().unwrap().remove(&id);
    }

    fn abort(&self, id: MigrationId, _incoming: Option<Incoming>) {
        self.verdicts.lock().unwrap().insert(id, Verdict::Aborted);
        self.aborted.store(true, Ordering::Release);
    }

    fn verdict(&self, id: MigrationId, _from: Option<&str>) -> Result<Verdict, Problem> {
        Ok(*self.verdicts.lock().unwrap().entry(id).or_insert(Verdict::Aborted))
    }
}

/// A source "daemon" that remembers whether it gave a guest away.
#[derive(Default)]
pub struct Source {
    pub handed_over: AtomicBool,
    /// To whom.
    pub handed_to: Mutex<Option<DaemonId>>,
    /// Where its user says that the destination is now.
    pub peer_now: Mutex<Option<String>>,
    pub credentials: Option<Arc<Credentials>>,
}

impl SourceHost for Source {
    fn credentials(&self) -> Option<Arc<Credentials>> {
        self.credentials.clone()
    }

    fn accepted(&self) {}

    fn peer_now(&self, _id: MigrationId) -> Option<String> {
        self.peer_now.lock().unwrap().clone()
    }

    fn handing_over(
        &self,
        _id: MigrationId,
        _peer: &str,
        daemon: Option<DaemonId>,
        _postcopy: bool,
    ) -> Result<(), Problem> {
        self.handed_over.store(true, Ordering::Release);
        *self.handed_to.lock().unwrap() = daemon;
        Ok(())
    }
}

/// A foot inside this very process, which keeps a duplicate of the userfaultfd as the agent does.
#[derive(Default)]
pub struct InsideSelf {
    /// The guest's own mappings of its RAM, where it is a destination.
    pub mappings: Arc<Mutex<Vec<Arc<SharedMapping>>>>,
    pub kept: Arc<Mutex<Option<OwnedFd>>>,
    pub discards: Arc<Mutex<Vec<Discard>>>,
    pub overflow: Arc<AtomicBool>,
}

impl Inside for InsideSelf {
    fn log_discards(&mut self) -> Result<(), MigrateError> {
        Ok(())
    }

    fn open_alone(&mut self, features: Features) -> Result<Userfaultfd, MigrateError> {
        let device = userfaultfd::open_device().map_err(MigrateError::kernel("opening /dev/userfaultfd"))?;
        let created = Userfaultfd::create(device).map_err(MigrateError::kernel("making a userfaultfd"))?;
        created.enable(features).map_err(MigrateError::kernel("enabling features"))?;
        Ok(created)
    }

    fn open(&mut self, features: Features) -> Result<Userfaultfd, MigrateError> {
        let created = self.open_alone(features)?;
        let duplicate = created.as_fd().try_clone_to_owned().map_err(MigrateError::host("keeping a duplicate"))?;
        *self.kept.lock().unwrap() = Some(duplicate);
        Ok(created)
    }

    fn reopen(&mut self) -> Result<Option<Userfaultfd>, MigrateError> {
        let kept = self.kept.lock().unwrap();
        let duplicate = kept.as_ref().map(OwnedFd::try_clone).transpose();
        Ok(duplicate.map_err(MigrateError::host("keeping a duplicate"))?.map(Userfaultfd::from))
    }

    fn advise(&mut self, _: Advice, ranges: &[Range<u64>]) -> Result<(), MigrateError> {
        let mappings = self.mappings.lock().unwrap();
        for range in ranges {
            let of_range = |mapping: &&Arc<SharedMapping>| mapping.addresses().contains(&range.start);
            let mapping = mappings.iter().find(of_range).expect("a guest's mapping");
            let base = mapping.addresses().start;
            let unmapped = mapping.dont_need(range.start - base..range.end - base);
            unmapped.map_err(MigrateError::kernel("unmapping guest RAM"))?;
        }
        Ok(())
    }

    fn pid(&self) -> u32 {
        std::process::id()
    }

    fn discards(&mut self) -> Discards {
        if self.overflow.swap(false, Ordering::AcqRel) {
            return Discards::Everything;
        }
        Discards::Ranges(std::mem::take(&mut *self.discards.lock().unwrap()))
    }

    fn close(&mut self) {
        *self.kept.lock().unwrap() = None;
    }
}

/// A block of so many bytes.
pub fn block(bytes: u64) -> BlockSpec {
    BlockSpec { id: "ram".into(), bytes, page_bytes: 4096, path: String::new() }
}

/// A machine of one block.
pub fn spec(block: BlockSpec) -> VmSpec {
    VmSpec {
        name: "guest".into(),
        memory_bytes: block.bytes,
        private: false,
        trust_group: None,
        qemu_version: (7, 2, 0),
        qemu_path: String::new(),
        machine: "none".into(),
        arguments: vec![],
        managed_ram: true,
        blocks: vec![block],
        cpu: None,
        allocated_bytes: 0,
        balloon: sterna_api::BalloonSetting::default(),
        running: true,
        from: "a".into(),
    }
}

/// A machine of one block, to be moved by `migrate`.
pub fn outgoing(ram: &GuestRam, vmm: SourceVmm, inside: InsideSelf) -> Outgoing {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    // The lower half seeds the digests, and is drawn at random in earnest. A small number is a weak seed: of some,
    // pages that were made to have one digest without a seed still have it.
    let seed = u64::from(std::process::id()).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let id = u128::from(NEXT.fetch_add(1, Ordering::Relaxed)) << 64 | u128::from(seed);
    let block = block(ram.bytes);
    Outgoing {
        id: MigrationId(id),
        spec: spec(block.clone()),
        vmm: Box::new(vmm),
        blocks: vec![BlockFile {
            spec: block,
            file: ram.file.try_clone().expect("a descriptor"),
            address: ram.mapping.addresses().start,
        }],
        throttle: Box::new(ProcessThrottle::new(std::process::id())),
        tracker: Box::new(WriteProtect::new(std::process::id(), inside).expect("our own page tables")),
        direct_io: false,
        trust_first_look: false,
        bandwidth: std::sync::Arc::default(),
        here: sterna_api::report::Host::default(),
    }
}
