//! A guest whose kernel is made for tests: nothing but a memory map that says which of its pages are free.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use sterna_engine::memory::BlockFile;
use sterna_introspect::PageTables;
use sterna_introspect::toy::Toy;

use crate::pair::block;
use crate::pair::guest::GuestRam;

/// RAM of the toy, pages; its kernel lies below the pages that tests use.
pub const PAGES: u64 = 72 << 8;
pub const USED: Range<u64> = 0x2000..0x3400;
/// Pages of a block of the highest order.
pub const BLOCK: u64 = 1024;

pub struct ToyGuest {
    pub ram: GuestRam,
    pub toy: Mutex<Toy>,
}

impl ToyGuest {
    /// `USED` is full, nothing is free.
    pub fn new() -> Arc<Self> {
        Self::on(GuestRam::new(PAGES * 4096))
    }

    /// The same, in this RAM of `PAGES`.
    pub fn on(ram: GuestRam) -> Arc<Self> {
        let guest = Self { ram, toy: Mutex::default() };
        guest.change(|_| {});
        guest.fill(USED, 7);
        Arc::new(guest)
    }

    /// Does something to the kernel; the pages that this changes are written.
    pub fn change(&self, change: impl FnOnce(&mut Toy)) {
        let mut toy = self.toy.lock().unwrap();
        change(&mut toy);
        let mut there = [0; 4096];
        for (frame, page) in toy.ram.written() {
            self.ram.mapping.copy_out(frame * 4096..(frame + 1) * 4096, &mut there);
            if there != *page {
                self.ram.mapping.copy_in(frame * 4096, page).expect("inside the mapping");
            }
        }
    }

    /// Frees whole blocks of the highest order.
    pub fn free(&self, frames: Range<u64>) {
        self.change(|toy| frames.step_by(BLOCK as usize).for_each(|frame| toy.free(frame, 10)));
    }

    pub fn fill(&self, pages: Range<u64>, byte: u8) {
        pages.for_each(|page| self.ram.write_page(page, byte));
    }

    /// The page tables of its processors.
    pub fn processors(&self) -> Vec<PageTables> {
        self.toy.lock().unwrap().processors().to_vec()
    }

    /// Its RAM as the engine takes it.
    pub fn block(&self) -> BlockFile {
        BlockFile {
            spec: block(self.ram.bytes),
            file: self.ram.file.try_clone().expect("a descriptor"),
            address: self.ram.mapping.addresses().start,
            process: None,
        }
    }
}
