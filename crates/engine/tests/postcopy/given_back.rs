//! Pages that the guest gives back, and pages that vanish.

use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use sterna_api::problem::Whereabouts;
use sterna_api::report::Status;
use sterna_api::{MigrateOptions, Mode};
use sterna_engine::agent::Discard;
use sterna_sys::map::{Access, SharedMapping};

use crate::fixture::{MIB, PAGES, PATIENCE, byte, filled_ram, options, run};
use crate::pair::destination::Destination;
use crate::pair::guest::Writers;
use crate::pair::source::SourceVmm;
use crate::pair::tracking_works;

/// The guest gives back every other page as soon as it runs, and takes a part of them again.
fn gives_back(host: &Arc<Destination>, overflows: bool) -> Receiver<Vec<u64>> {
    let at = Arc::clone(host);
    *host.at_start.lock().unwrap() = Some(Box::new(move |there| {
        at.overflow.store(overflows, Ordering::Release);
        let file = at.ram.lock().unwrap().as_ref().unwrap().try_clone().unwrap();
        let about = file.metadata().unwrap();
        for page in (0..PAGES).step_by(2) {
            let range = page * 4096..(page + 1) * 4096;
            sterna_sys::file::punch(&file, range.clone()).unwrap();
            there.dont_need(range.clone()).unwrap();
            let discard = Discard { device: about.dev(), inode: about.ino(), offset: range.start, length: 4096 };
            at.discards.lock().unwrap().push(discard);
        }
    }));
    let (say, seen) = mpsc::channel();
    *host.guest.lock().unwrap() = Some(Box::new(move |there| {
        let (mut wrong, mut found) = (Vec::new(), [0; 16]);
        for page in (0..PAGES).step_by(4) {
            there.copy_out(page * 4096..page * 4096 + 16, &mut found);
            if found != [0; 16] && found != [byte(page); 16] {
                wrong.push(page);
            }
            there.copy_in(page * 4096, &[0xfe; 16]).unwrap();
        }
        let _ = say.send(wrong);
    }));
    seen
}

#[test]
fn pages_that_the_guest_gives_back_on_arrival_are_left_out_of_the_comparison_and_no_others() {
    if !tracking_works() {
        return;
    }
    for (mode, overflows) in [(Mode::Hybrid, false), (Mode::Postcopy, false), (Mode::Hybrid, true)] {
        let ram = filled_ram();
        let (host, peer) = Destination::serve();
        host.postcopy.store(true, Ordering::Release);
        let seen = gives_back(&host, overflows);
        let options = MigrateOptions { postcopy_bandwidth_bytes_per_s: Some(16 * MIB), ..options(mode) };
        // Some pages follow, whatever the mode.
        let writers = Writers::start(&ram, PAGES / 2..PAGES, Duration::ZERO);
        let outcome = run(&ram, SourceVmm::new(Some(writers)), &peer, &options);
        let report = &outcome.report;
        assert_eq!((report.status, &report.error), (Status::Completed, &None), "{mode:?}");
        let verify = &report.verify;
        println!("{mode:?}: {verify:?}, {:?}", report.postcopy);
        assert!(verify.checked && verify.mismatches == 0, "{verify:?}");
        assert!((PAGES / 4..=PAGES / 2).contains(&verify.excluded_free_pages), "{verify:?}");
        assert_eq!(verify.pages + verify.excluded_free_pages, PAGES);
        let wrong = seen.recv_timeout(PATIENCE).expect("the guest went through its pages");
        assert!(wrong.iter().all(|page| *page >= PAGES / 2), "{wrong:?}");
        let mut found = [0; 16];
        let guard = host.ram.lock().unwrap();
        let there = SharedMapping::new(guard.as_ref().unwrap(), ram.bytes, Access::Read).unwrap();
        for page in (0..PAGES).step_by(4) {
            there.copy_out(page * 4096..page * 4096 + 16, &mut found);
            assert_eq!(found, [0xfe; 16], "what the guest wrote anew, page {page}");
        }
    }
}

#[test]
fn zeros_that_the_guest_did_not_make_are_found_by_the_comparison() {
    if !tracking_works() {
        return;
    }
    let ram = filled_ram();
    let (host, peer) = Destination::serve();
    host.postcopy.store(true, Ordering::Release);
    // A page vanishes, and no log says that the guest gave it back.
    let lost = Arc::clone(&host);
    *host.at_start.lock().unwrap() = Some(Box::new(move |_| {
        let file = lost.ram.lock().unwrap().as_ref().unwrap().try_clone().unwrap();
        sterna_sys::file::punch(&file, (PAGES - 2) * 4096..(PAGES - 1) * 4096).unwrap();
    }));
    let outcome = run(&ram, SourceVmm::new(None), &peer, &options(Mode::Hybrid));
    let verify = &outcome.report.verify;
    assert_eq!((verify.mismatches, verify.excluded_free_pages), (1, 0), "{verify:?}");
    let problem = outcome.report.error.expect("a page is lost");
    assert_eq!((problem.code.as_str(), problem.guest), ("verify-mismatch", Whereabouts::Destination));
}
