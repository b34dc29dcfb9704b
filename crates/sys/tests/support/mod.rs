//! What the tests on real mappings share: guest RAM, and a process that plays the VMM.

#![allow(dead_code, reason = "each test program uses its own part")]

use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use rustix::mm::{Advice, MapFlags, ProtFlags};
use sterna_sys::PAGE_BYTES;
use sterna_sys::pagemap::{Categories, Pagemap, Region, Scan};
use sterna_sys::userfaultfd::{Features, Modes, Userfaultfd, open_device};

/// A process that plays the VMM.
pub mod vmm;

/// Ends a wait that is hopeless, and nothing else: no result depends on it, however slow the machine.
pub const PATIENCE: Duration = Duration::from_secs(300);

/// Prints why and returns `true` where this kernel cannot do what the tests are about.
pub fn skip() -> bool {
    let missing = sterna_sys::probe::missing();
    if !missing.is_empty() {
        eprintln!("skipped: {}", missing.join(" "));
    }
    !missing.is_empty()
}

/// As [`skip`], for tests that mount. Otherwise this thread has mounts of its own from now on, which end with it.
pub fn skip_or_own_mounts() -> bool {
    use rustix::mount::{MountPropagationFlags, mount_change};
    // SAFETY: a thread of its own runs each test; no descriptor or signal handler of others depends on its mounts.
    let own = unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNS) }
        .and_then(|()| mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC));
    if let Err(error) = own {
        eprintln!("skipped: this process may not mount: {error}");
    }
    own.is_err()
}

/// A RAM file on tmpfs, `pages` long, a hole all over.
pub fn ram_file(pages: u64) -> File {
    let file = tempfile::tempfile_in("/dev/shm").expect("a file on tmpfs");
    file.set_len(pages * PAGE_BYTES).expect("its length");
    file
}

/// Memory mapped as a VMM maps it.
pub struct Ram {
    base: *mut u8,
    pub pages: u64,
}

// SAFETY: accesses are volatile words; the mapping belongs to the value.
unsafe impl Send for Ram {}
// SAFETY: as above.
unsafe impl Sync for Ram {}

impl Ram {
    pub fn shared(file: impl AsFd, pages: u64) -> Self {
        Self::map(file.as_fd(), pages, MapFlags::SHARED)
    }

    pub fn private(file: impl AsFd, pages: u64) -> Self {
        Self::map(file.as_fd(), pages, MapFlags::PRIVATE)
    }

    fn map(file: BorrowedFd<'_>, pages: u64, flags: MapFlags) -> Self {
        let bytes = (pages * PAGE_BYTES) as usize;
        // SAFETY: the kernel chooses a free address.
        let base = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, flags, file, 0)
        };
        Self { base: base.expect("a mapping").cast(), pages }
    }

    pub fn addresses(&self) -> Range<u64> {
        self.pages(0..self.pages)
    }

    pub fn pages(&self, pages: Range<u64>) -> Range<u64> {
        assert!(pages.end <= self.pages);
        let base = self.base as u64;
        base + pages.start * PAGE_BYTES..base + pages.end * PAGE_BYTES
    }

    /// Writes `value` to word `word` of page `page`.
    pub fn poke(&self, page: u64, word: usize, value: u64) {
        // SAFETY: an aligned word of this mapping.
        unsafe { self.word(page, word).write_volatile(value) }
    }

    pub fn peek(&self, page: u64, word: usize) -> u64 {
        // SAFETY: an aligned word of this mapping.
        unsafe { self.word(page, word).read_volatile() }
    }

    pub fn advise(&self, pages: Range<u64>, advice: Advice) -> rustix::io::Result<()> {
        let range = self.pages(pages);
        // SAFETY: a part of this mapping, which nobody has references into.
        unsafe { rustix::mm::madvise(range.start as *mut _, (range.end - range.start) as usize, advice) }
    }

    fn word(&self, page: u64, word: usize) -> *mut u64 {
        assert!(page < self.pages && word < 512);
        self.base.wrapping_add((page * PAGE_BYTES) as usize + word * 8).cast()
    }
}

impl Drop for Ram {
    fn drop(&mut self) {
        // SAFETY: the whole of a mapping that nobody uses any more.
        unsafe { rustix::mm::munmap(self.base.cast(), (self.pages * PAGE_BYTES) as usize) }.expect("unmapping");
    }
}

/// A userfaultfd of this process with `features`.
pub fn userfaultfd(features: Features) -> Userfaultfd {
    let uffd = Userfaultfd::create(open_device().expect("the device")).expect("a userfaultfd");
    uffd.enable(features).expect("its features");
    uffd
}

/// Write tracking of `ram`, which lies in this process.
pub struct Tracker {
    /// Registered as long as this is open.
    pub uffd: Userfaultfd,
    pub pagemap: Pagemap,
    range: Range<u64>,
    regions: Vec<Region>,
}

impl Tracker {
    pub fn of(ram: &Ram) -> Self {
        let uffd = userfaultfd(Features::TRACKING);
        uffd.register(ram.addresses(), Modes::WP).expect("registered");
        let pagemap = Pagemap::of_this_process().expect("a page map");
        Self::with(uffd, pagemap, ram.addresses())
    }

    pub fn with(uffd: Userfaultfd, pagemap: Pagemap, range: Range<u64>) -> Self {
        Self { uffd, pagemap, range, regions: Vec::new() }
    }

    /// Pages written since the last call, armed again.
    pub fn written_and_arm(&mut self) -> Vec<u64> {
        self.pagemap.written_and_arm(self.range.clone(), &mut self.regions).expect("a scan");
        self.found()
    }

    /// Pages written since they were armed.
    pub fn written(&mut self) -> Vec<u64> {
        self.pagemap.written(self.range.clone(), &mut self.regions).expect("a scan");
        self.found()
    }

    /// Pages that match.
    pub fn scan(&mut self, scan: Scan) -> Vec<u64> {
        self.pagemap.scan(self.range.clone(), scan, &mut self.regions).expect("a scan");
        self.found()
    }

    /// Pages that are mapped.
    pub fn present(&mut self) -> Vec<u64> {
        self.scan(Scan::of(Categories::PRESENT))
    }

    fn found(&self) -> Vec<u64> {
        let page = |address: u64| (address - self.range.start) / PAGE_BYTES;
        self.regions.iter().flat_map(|region| page(region.start)..page(region.end)).collect()
    }
}
