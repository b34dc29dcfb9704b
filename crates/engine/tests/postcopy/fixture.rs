//! A guest that looks at all its pages, and what a report says of them.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use sterna_api::report::Status;
use sterna_api::{MigrateOptions, Mode, Report};
use sterna_engine::host::SourceHost;
use sterna_engine::monitor::Monitor;
use sterna_engine::source::{Outcome, migrate};

use crate::pair::destination::Destination;
use crate::pair::guest::GuestRam;
use crate::pair::inside::InsideSelf;
use crate::pair::outgoing;
use crate::pair::source::{Source, SourceVmm};

/// Ends a hopeless wait, and nothing else: no result depends on it.
pub const PATIENCE: Duration = Duration::from_secs(300);
pub const MIB: u64 = 1 << 20;
pub const PAGES: u64 = 4096;
/// Every so many pages is one of zeros, and one that was never touched.
pub const SPARSE: u64 = 16;

pub fn byte(page: u64) -> u8 {
    (page % 251) as u8 + 1
}

/// Full but for a page of zeros and a hole here and there.
pub fn filled_ram() -> GuestRam {
    let ram = GuestRam::new(PAGES * 4096);
    for page in 0..PAGES {
        match page % SPARSE {
            3 => ram.write_page(page, 0),
            5 => {}
            _ => ram.write_page(page, byte(page)),
        }
    }
    ram
}

pub fn options(mode: Mode) -> MigrateOptions {
    MigrateOptions { mode, verify: true, ..MigrateOptions::default() }
}

/// A destination that can, whose guest looks at every page of its RAM, in an order of its own, and says what it found
/// wrong.
pub fn destination(ram: &GuestRam, program: Program) -> (Arc<Destination>, String, Receiver<Vec<u64>>) {
    let (host, peer) = Destination::serve();
    host.postcopy.store(true, Ordering::Release);
    let seen = reader(&host, ram, program);
    (host, peer, seen)
}

#[derive(Clone, Copy)]
pub enum Program {
    Ascending,
    Scattered,
}

pub fn reader(host: &Destination, ram: &GuestRam, program: Program) -> Receiver<Vec<u64>> {
    let (say, seen) = mpsc::channel();
    let here = Arc::clone(&ram.mapping);
    *host.guest.lock().unwrap() = Some(Box::new(move |there| {
        let mut wrong = Vec::new();
        let (mut ours, mut theirs) = ([0; 4096], [0; 4096]);
        for step in 0..PAGES {
            let page = match program {
                Program::Ascending => step,
                Program::Scattered => step * 1237 % PAGES,
            };
            there.copy_out(page * 4096..(page + 1) * 4096, &mut theirs);
            here.copy_out(page * 4096..(page + 1) * 4096, &mut ours);
            if ours != theirs {
                wrong.push(page);
            }
        }
        let _ = say.send(wrong);
    }));
    seen
}

pub fn run(ram: &GuestRam, vmm: SourceVmm, peer: &str, options: &MigrateOptions) -> Outcome {
    run_with(ram, vmm, peer, options, &Source::default(), &Monitor::new("guest"))
}

pub fn run_with(
    ram: &GuestRam,
    vmm: SourceVmm,
    peer: &str,
    options: &MigrateOptions,
    host: &dyn SourceHost,
    monitor: &Monitor,
) -> Outcome {
    migrate(outgoing(ram, vmm, InsideSelf::default()), peer, options, host, monitor)
}

pub fn nothing_wrong(seen: &Receiver<Vec<u64>>) {
    let wrong = seen.recv_timeout(PATIENCE).expect("the guest looked at all its pages");
    assert!(wrong.is_empty(), "{} pages are wrong: {wrong:?}", wrong.len());
}

/// Over a link that did not break: each page went once, and what the report says of them fits.
pub fn adds_up(report: &Report) {
    assert_eq!(report.status, Status::Completed, "{:?}", report.error);
    let pages = &report.pages;
    assert_eq!(pages.faulted + pages.pushed, report.postcopy.residue_pages, "{pages:?}");
    assert_eq!((pages.duplicate, report.postcopy.interruptions), (0, 0));
    assert_eq!(pages.sent, pages.full + pages.delta);
    assert!(report.faults.count >= pages.faulted, "{:?}, {pages:?}", report.faults);
    assert!(report.postcopy.residue_bytes > 0 && report.postcopy.ms > 0.0, "{:?}", report.postcopy);
    assert!(report.total_ms >= report.postcopy.ms && report.resume_ms > 0.0, "{report:?}");
    assert_eq!((report.verify.mismatches, report.verify.checked), (0, report.options.verify));
}

/// Waits until something is so.
pub fn until(what: &str, so: impl Fn() -> bool) {
    let began = Instant::now();
    while !so() {
        assert!(began.elapsed() < PATIENCE, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
