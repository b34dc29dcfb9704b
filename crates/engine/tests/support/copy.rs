//! What a migration would have of a guest.

use std::os::unix::fs::FileExt;
use std::sync::Arc;

use sterna_engine::faults::GuestFaults;
use sterna_engine::memory::shared::SharedMemory;
use sterna_engine::memory::{BlockFile, Memory};
use sterna_engine::source::track::{Tracker, WriteProtect};
use sterna_protocol::pages::PageMap;
use sterna_sys::map::Access;

use super::pair::block;
use super::pair::guest::GuestRam;

/// The other side of a migration: what was collected is copied, and nothing else.
pub struct Copy {
    pub tracker: WriteProtect,
    ram: SharedMemory,
    bytes: Vec<u8>,
    pub collected: u64,
    pub discarded: u64,
}

impl Copy {
    /// Begins to track, and copies all there is.
    pub fn begin(ram: &GuestRam, faults: &Arc<GuestFaults>) -> Self {
        let address = ram.mapping.addresses().start;
        let file = BlockFile { spec: block(ram.bytes), file: ram.file.try_clone().unwrap(), address, process: None };
        let ram = SharedMemory::open(&[file], Access::Read).unwrap();
        let mut tracker = WriteProtect::of(std::process::id(), Arc::clone(faults)).unwrap();
        tracker.arm(&ram).unwrap();
        Self { tracker, ram, bytes: Vec::new(), collected: 0, discarded: 0 }
    }

    pub fn all(&mut self, of: &GuestRam) {
        self.bytes = vec![0; of.bytes as usize];
        of.file.read_exact_at(&mut self.bytes, 0).unwrap();
    }

    /// A round. Read through the file: a page that was taken stays a hole.
    pub fn round(&mut self, of: &GuestRam) {
        let layout = self.ram.layout();
        let (mut written, mut discarded) = (PageMap::empty(layout), PageMap::empty(layout));
        self.tracker.collect(&self.ram, &mut written, &mut discarded).unwrap();
        self.collected += written.len();
        self.discarded += discarded.len();
        for (chunk, pages) in written.iter() {
            for page in pages.iter() {
                let at = chunk.index() * 256 * 4096 + usize::from(page) * 4096;
                of.file.read_exact_at(&mut self.bytes[at..at + 4096], at as u64).unwrap();
            }
        }
    }

    /// Pages of which the copy is not what the guest has.
    pub fn stale(&self, of: &GuestRam) -> usize {
        let mut bytes = vec![0; of.bytes as usize];
        of.file.read_exact_at(&mut bytes, 0).unwrap();
        let pairs = self.bytes.chunks_exact(4096).zip(bytes.chunks_exact(4096));
        pairs.filter(|(ours, theirs)| ours != theirs).count()
    }
}
