//! A guest whose RAM is a mapping of this process, and its daemons, one after the other.

use super::*;

/// Epochs that outlive a daemon of the test.
#[derive(Clone, Default)]
pub struct Counter(pub Arc<AtomicU64>);

impl Epochs for Counter {
    fn raise(&self) -> std::io::Result<u64> {
        Ok(self.0.fetch_add(1, Ordering::AcqRel) + 1)
    }
}

/// The same for one daemon: once there is another one, threads that are left of this one raise none any more, as if it
/// had been killed.
pub struct OfDaemon {
    epochs: Counter,
    number: u64,
    last: Arc<Mutex<u64>>,
}

impl Epochs for OfDaemon {
    fn raise(&self) -> std::io::Result<u64> {
        match *self.last.lock().unwrap() {
            last if last == self.number => self.epochs.raise(),
            _ => Err(std::io::Error::other("this daemon is dead")),
        }
    }
}

/// A guest whose RAM is a mapping of this process, and what outlives its daemon.
pub struct Guest {
    pub ram: GuestRam,
    pub inside: Arc<Mutex<Vec<Arc<SharedMapping>>>>,
    pub kept: Arc<Mutex<Option<std::os::fd::OwnedFd>>>,
    pub under_way: Arc<Mutex<UnderWay>>,
    /// What it gives back, as the agent logs it.
    pub discards: Arc<Mutex<Vec<Discard>>>,
    pub record: File,
    pub epochs: Counter,
    /// The number of its last daemon.
    daemon: Arc<Mutex<u64>>,
}

impl Guest {
    /// Every page has a content of its own, but the last quarter of each chunk: of that every second page is zeros, and
    /// the others were never touched.
    pub fn new() -> Self {
        Self::in_ram(GuestRam::new(u64::from(CHUNKS) * CHUNK_BYTES as u64))
    }

    /// The same in this RAM.
    pub fn in_ram(ram: GuestRam) -> Self {
        let guest = Self::untouched_in(ram);
        for page in 0..PAGES {
            match page % 256 {
                0..192 => guest.ram.mapping.copy_in(page * 4096, &content(page).to_le_bytes().repeat(512)).unwrap(),
                other if other % 2 == 0 => guest.ram.mapping.copy_in(page * 4096, &[0; 4096]).unwrap(),
                _ => {}
            }
        }
        guest
    }

    /// No page was touched yet.
    pub fn untouched() -> Self {
        Self::untouched_in(GuestRam::new(u64::from(CHUNKS) * CHUNK_BYTES as u64))
    }

    fn untouched_in(ram: GuestRam) -> Self {
        Self {
            inside: Arc::new(Mutex::new(vec![Arc::clone(&ram.mapping)])),
            kept: Arc::default(),
            discards: Arc::default(),
            under_way: Arc::new(Mutex::new(UnderWay::Untold)),
            record: tempfile::tempfile_in("/dev/shm").unwrap(),
            epochs: Counter::default(),
            daemon: Arc::default(),
            ram,
        }
    }

    pub fn blocks(&self) -> Vec<BlockFile> {
        vec![BlockFile {
            spec: block(self.ram.bytes),
            file: self.ram.file.try_clone().unwrap(),
            address: self.ram.mapping.addresses().start,
            process: None,
        }]
    }

    pub fn means(&self) -> PagingMeans {
        let under_way = Arc::clone(&self.under_way);
        let inside = InsideSelf {
            mappings: Arc::clone(&self.inside),
            kept: Arc::clone(&self.kept),
            discards: Arc::clone(&self.discards),
            under_way: Some(Box::new(move || under_way.lock().unwrap().clone())),
            ..InsideSelf::default()
        };
        PagingMeans { inside: Box::new(inside), missing: self.record.try_clone().unwrap() }
    }

    pub fn ram(&self) -> Arc<dyn Memory> {
        kind::open(&self.blocks(), Access::ReadWrite).unwrap()
    }

    /// The epochs of its next daemon.
    pub fn epochs(&self) -> Box<OfDaemon> {
        let mut last = self.daemon.lock().unwrap();
        *last += 1;
        Box::new(OfDaemon { epochs: self.epochs.clone(), number: *last, last: Arc::clone(&self.daemon) })
    }

    pub fn split(&self, hosts: &[&LendingHost]) -> Arc<Split> {
        self.split_over(hosts.iter().map(|host| host.lender()).collect())
    }

    pub fn split_over(&self, lenders: Vec<Lender>) -> Arc<Split> {
        let claim = Claim { guest: GUEST.0, key: GUEST.1, epoch: self.epochs.raise().unwrap() };
        lenders.iter().flat_map(Lender::members).for_each(|lender| borrow(&lender, claim, CHUNKS).unwrap());
        let pager = Pager::open(self.ram(), self.means(), None).unwrap();
        Split::begin(pager, lenders, GUEST, self.epochs()).unwrap()
    }

    /// Another daemon goes on.
    pub fn recover(&self, hosts: &[&LendingHost]) -> Result<Arc<Split>, SplitError> {
        self.recover_over(hosts.iter().map(|host| host.lender()).collect())
    }

    pub fn recover_over(&self, lenders: Vec<Lender>) -> Result<Arc<Split>, SplitError> {
        let pager = Pager::recover(self.ram(), self.means()).unwrap();
        let recovered = Split::recover(Arc::clone(&pager), lenders, GUEST, self.epochs());
        recovered.inspect_err(|_| pager.die())
    }

    /// Reads the first word of a page, as the guest does: it waits where it has to.
    pub fn word(&self, page: u64) -> u64 {
        word(&self.ram.mapping, page)
    }

    pub fn reads(&self, page: u64) -> JoinHandle<u64> {
        let mapping = Arc::clone(&self.ram.mapping);
        std::thread::spawn(move || word(&mapping, page))
    }

    /// The pages for which this host has memory.
    pub fn pages_here(&self, split: &Split) -> u64 {
        split.pager().ram().allocated().unwrap().len()
    }

    pub fn writes(&self, page: u64) {
        self.ram.mapping.copy_in(page * 4096, &content(page).to_le_bytes().repeat(2)).unwrap();
    }

    pub fn is_as_it_was(&self) {
        for page in 0..PAGES {
            assert_eq!(self.word(page), expected(page), "page {page}");
        }
    }
}
