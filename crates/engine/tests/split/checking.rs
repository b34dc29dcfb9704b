//! A guest of threads that read and write all the time, and check what they read.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use sterna_sys::map::SharedMapping;

use super::{Guest, PAGES};

pub fn word(mapping: &SharedMapping, page: u64) -> u64 {
    let mut found = [0; 16];
    mapping.copy_out(page * 4096..page * 4096 + 16, &mut found);
    let [one, other] = [0, 8].map(|at| u64::from_le_bytes(*found[at..].first_chunk().unwrap()));
    assert_eq!(one, other, "half of one content and half of another");
    one
}

pub fn content(page: u64) -> u64 {
    0x5000_0000 + page
}

pub fn expected(page: u64) -> u64 {
    if page % 256 < 192 { content(page) } else { 0 }
}

/// Threads of a guest that read and write all the time, and know what each of their pages must hold.
pub struct Checking {
    stop: Arc<AtomicBool>,
    steps: Arc<AtomicU64>,
    mapping: Arc<SharedMapping>,
    threads: Vec<JoinHandle<Vec<u64>>>,
}

/// What each thread of a guest that stands still knows of its pages.
pub struct Knowing(Vec<Vec<u64>>);

impl Checking {
    /// In all of the guest's memory.
    pub fn start(guest: &Guest, count: u64) -> Self {
        Self::start_in(guest, count, PAGES)
    }

    /// In its first pages.
    pub fn start_in(guest: &Guest, count: u64, pages: u64) -> Self {
        let knowing = Knowing((0..count).map(|_| (0..PAGES).map(expected).collect()).collect());
        Self::go_on(&guest.ram.mapping, knowing, pages)
    }

    /// Where the guest is now, in its first pages.
    pub fn go_on(mapping: &Arc<SharedMapping>, Knowing(known): Knowing, pages: u64) -> Self {
        let (stop, steps) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let count = known.len() as u64;
        let threads = known.into_iter().zip(0..).map(|(mut known, own)| {
            let (stop, steps, mapping) = (Arc::clone(&stop), Arc::clone(&steps), Arc::clone(mapping));
            std::thread::spawn(move || {
                let mut random = (known[own as usize] ^ own) * 2 + 1;
                while !stop.load(Ordering::Acquire) {
                    random ^= random << 13;
                    random ^= random >> 7;
                    random ^= random << 17;
                    let page = random % pages / count * count + own;
                    if page >= pages {
                        continue;
                    }
                    assert_eq!(word(&mapping, page), known[page as usize], "page {page}");
                    if random >> 40 & 3 == 0 {
                        known[page as usize] = if random >> 50 & 7 == 0 { 0 } else { random | 1 };
                        mapping.copy_in(page * 4096, &known[page as usize].to_le_bytes().repeat(2)).unwrap();
                    }
                    steps.fetch_add(1, Ordering::Relaxed);
                }
                known
            })
        });
        let threads = threads.collect();
        Self { stop, steps, mapping: Arc::clone(mapping), threads }
    }

    pub fn steps(&self) -> u64 {
        self.steps.load(Ordering::Relaxed)
    }

    /// It has found nothing but what it wrote.
    pub fn is_well(&self) -> bool {
        self.threads.iter().all(|thread| !thread.is_finished())
    }

    /// It goes on for so many steps more.
    pub fn goes_on(&self, steps: u64) {
        let until = self.steps() + steps;
        while self.steps() < until {
            assert!(self.is_well(), "it found something else than it had written");
            std::thread::yield_now();
        }
    }

    /// It stands still.
    pub fn stop(self) -> Knowing {
        self.stop.store(true, Ordering::Release);
        let threads = self.threads.into_iter();
        Knowing(threads.map(|thread| thread.join().expect("it found what it wrote")).collect())
    }

    /// It ends, and has looked at all of its pages.
    pub fn end(self) {
        let mapping = Arc::clone(&self.mapping);
        self.stop().are_as_known(&mapping);
    }
}

impl Knowing {
    /// Asserts that each page holds what its thread knows of it.
    pub fn are_as_known(&self, mapping: &Arc<SharedMapping>) {
        let count = self.0.len();
        std::thread::scope(|scope| {
            for (known, own) in self.0.iter().zip(0..) {
                scope.spawn(move || {
                    for page in (own..PAGES).step_by(count) {
                        assert_eq!(word(mapping, page), known[page as usize], "page {page} in the end");
                    }
                });
            }
        });
    }
}
