//! A guest: RAM, and threads that write it.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use sterna_sys::map::{Access, SharedMapping};
use sterna_sys::pagemap::Pagemap;

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

    /// RAM on this file system, in huge pages as far as it has them.
    pub fn huge(bytes: u64, directory: &Path) -> Self {
        let file = tempfile::tempfile_in(directory).expect("a file on tmpfs");
        file.set_len(bytes).expect("room for the file");
        let mapping = Arc::new(SharedMapping::new(&file, bytes, Access::ReadWrite).expect("a mapping"));
        mapping.advise_huge(true).expect("huge pages");
        Self { file, mapping, bytes }
    }

    /// How much of it is mapped by huge pages, bytes.
    pub fn mapped_huge(&self) -> u64 {
        let mut regions = Vec::new();
        let pagemap = Pagemap::of_this_process().expect("the page map");
        pagemap.huge(self.mapping.addresses(), &mut regions).expect("a scan");
        regions.iter().map(|region| region.end - region.start).sum()
    }

    pub fn write_page(&self, page: u64, byte: u8) {
        self.mapping.copy_in(page * 4096, &[byte; 4096]).expect("inside the mapping");
    }
}

/// Threads that write the guest's RAM for ever: a page at a time, a random one, with ever new content.
pub struct Writers {
    count: Arc<Count>,
    threads: Vec<JoinHandle<()>>,
    /// The thread's number, as the kernel has it.
    pub id: u32,
}

/// What writers have done.
#[derive(Default)]
pub struct Count {
    writes: AtomicU64,
    stop: AtomicBool,
}

impl Count {
    /// Waits until so many more pages have been written, or the writers are to stop.
    pub fn wait_for(&self, more: u64) {
        let enough = self.writes.load(Ordering::Acquire) + more;
        while self.writes.load(Ordering::Acquire) < enough && !self.stop.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// The calling thread's number.
fn thread_id() -> u32 {
    let link = std::fs::read_link("/proc/thread-self").expect("proc is mounted");
    link.file_name().and_then(|name| name.to_str()?.parse().ok()).expect("PID/task/TID")
}

impl Writers {
    pub fn start(ram: &GuestRam, pages: std::ops::Range<u64>, pause: Duration) -> Self {
        let count = Arc::new(Count::default());
        let (mapping, done) = (Arc::clone(&ram.mapping), Arc::clone(&count));
        let (say, id) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            say.send(thread_id()).expect("somebody asks");
            let mut random = 0x9e37_79b9_7f4a_7c15_u64;
            while !done.stop.load(Ordering::Acquire) {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                let page = pages.start + random % (pages.end - pages.start);
                let content = u128::from(random) << 64 | 1;
                mapping
                    .copy_in(page * 4096 + (random >> 32) % 256 * 16, &content.to_le_bytes())
                    .expect("inside the mapping");
                done.writes.fetch_add(1, Ordering::Release);
                if !pause.is_zero() {
                    std::thread::sleep(pause);
                }
            }
        });
        Self { count, threads: vec![thread], id: id.recv().expect("a running thread") }
    }

    /// What they have done, for whoever waits for it.
    pub fn count(&self) -> Arc<Count> {
        Arc::clone(&self.count)
    }

    pub fn stop(&mut self) {
        self.count.stop.store(true, Ordering::Release);
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
