//! Rewrites pages in random order, verifying each against what it wrote last, for ever.
//!
//! Beside that a sweep verifies every page in turn, all of them twice a second where the processor is fast enough
//! (`sweep_ms` says how long the last one took): a write that was lost anywhere shows within a sweep. The order is a
//! new one each second, and another in each clone of a guest: a write of one that is seen by another shows, too.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant, UNIX_EPOCH};

use sterna_guest_programs::arguments::Arguments;
use sterna_guest_programs::pace::{Every, Pace};
use sterna_guest_programs::page::{Fault, PAGE_BYTES, Page};
use sterna_guest_programs::random::Random;
use sterna_guest_programs::report::Report;

const USAGE: &str = "checker [--mib N] [--rate MIB-REWRITTEN-PER-SECOND, 0 = no limit] [--seed N]";

/// Pages rewritten between two looks at the clock.
const BATCH: usize = 32;
/// Pages that the sweep may verify in the same time: it must keep up, and must not starve the writing.
const SWEEP_BATCH: usize = 8 * BATCH;
/// How long one sweep over all pages is to take.
const SWEEP: Duration = Duration::from_millis(500);
/// Wrong pages that are reported singly, each second; the rest is only counted.
const REPORTED_EACH_SECOND: u64 = 16;

struct Checker {
    pages: Vec<Page>,
    /// What makes its pages differ from those of a checker with another seed.
    seed: u64,
    /// The sequence that each page must hold.
    expected: Vec<u64>,
    report: Report,
    bad: u64,
    /// Single reports still allowed in this second.
    to_report: u64,
}

impl Checker {
    fn new(count: usize, seed: u32) -> Self {
        let seed = u64::from(seed) << 32;
        let mut pages = Page::zeroed(count);
        for (number, page) in pages.iter_mut().enumerate() {
            page.write(seed | number as u64, 1);
        }
        let report = Report::from_environment();
        Self { pages, seed, expected: vec![1; count], report, bad: 0, to_report: REPORTED_EACH_SECOND }
    }

    fn verify(&mut self, number: usize) {
        let name = self.seed | number as u64;
        if let Err(fault) = self.pages[number].verify(name, self.expected[number]) {
            self.complain(number, fault);
            // Whole again, so that each loss is counted once.
            self.pages[number].write(name, self.expected[number]);
        }
    }

    fn rewrite(&mut self, number: usize) {
        self.expected[number] += 1;
        self.pages[number].write(self.seed | number as u64, self.expected[number]);
    }

    fn complain(&mut self, number: usize, fault: Fault) {
        self.bad += 1;
        if self.to_report > 0 {
            self.to_report -= 1;
            let frame = frame_of(&self.pages[number]).map_or_else(|| "unknown".to_owned(), |frame| frame.to_string());
            let expected = self.expected[number];
            self.report.line(format_args!("CHECKER BAD page={number} found={fault} expected={expected} frame={frame}"));
        }
    }
}

/// Where the page lies in the guest's physical memory, in pages: what one needs to look for it from outside.
fn frame_of(page: &Page) -> Option<u64> {
    let entry_at = std::ptr::from_ref(page) as u64 / PAGE_BYTES as u64 * 8;
    let mut entry = [0; 8];
    File::open("/proc/self/pagemap").ok()?.read_exact_at(&mut entry, entry_at).ok()?;
    let entry = u64::from_le_bytes(entry);
    // Bit 63: present; bits 0 to 54: the frame (Documentation/admin-guide/mm/pagemap.rst of Linux).
    (entry >> 63 == 1).then_some(entry & ((1 << 55) - 1))
}

/// Goes over all pages again and again, a little at a time.
struct Sweep {
    next: usize,
    started: Instant,
    last_took: Duration,
}

impl Sweep {
    /// Verifies what is due at `now`.
    fn step(&mut self, checker: &mut Checker, now: Instant) {
        let pages = checker.pages.len();
        let elapsed = now.saturating_duration_since(self.started);
        let due = (pages as f64 * elapsed.as_secs_f64() / SWEEP.as_secs_f64()) as usize;
        let end = due.min(pages).min(self.next + SWEEP_BATCH);
        for number in self.next..end {
            checker.verify(number);
        }
        self.next = self.next.max(end);
        if self.next == pages {
            *self = Self { next: 0, started: now, last_took: elapsed };
        }
    }
}

fn main() {
    let arguments = Arguments::from_process(USAGE);
    let count = arguments.get("mib", 64_usize) << 8;
    let rate_mib = arguments.get("rate", 0.0_f64);
    if count == 0 {
        arguments.reject("mib", "nothing to check");
    }
    let seed = arguments.get("seed", 0_u32);
    let mut checker = Checker::new(count, seed);
    checker.report.line(format_args!("CHECKER ready pages={count}"));

    let mut random = Random::new(1 + u64::from(seed));
    let mut pace = Pace::new(rate_mib * 256.0, Instant::now());
    let mut second = Every::new(Duration::from_secs(1), Instant::now());
    let mut sweep = Sweep { next: 0, started: Instant::now(), last_took: Duration::ZERO };
    let mut writes = 0_u64;
    loop {
        let now = Instant::now();
        let due = pace.due(now, BATCH);
        for _ in 0..due {
            let number = random.below(count);
            checker.verify(number);
            checker.rewrite(number);
            writes += 1;
        }
        sweep.step(&mut checker, now);
        if let Some(elapsed) = second.elapsed(now) {
            checker.report.line(format_args!(
                "CHECKER ok writes_per_s={:.0} bad={} sweep_ms={}",
                writes as f64 / elapsed.as_secs_f64(),
                checker.bad,
                sweep.last_took.as_millis()
            ));
            writes = 0;
            checker.to_report = REPORTED_EACH_SECOND;
            // Clones begin as one guest, and are told the time at different moments: each goes its own way soon. What
            // one writes, and another finds in its memory, is not what that one has written by then.
            let time = UNIX_EPOCH.elapsed().map_or(0, |since| since.as_nanos() as u64);
            random = Random::new(random.next_u64() ^ time);
        }
        if due == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
