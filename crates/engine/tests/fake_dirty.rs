//! What a migration leaves out of its rounds, and that nothing is lost by it: guests of threads that keep writing, with
//! every way to find fake dirty pages.

#[path = "support/pair/mod.rs"]
#[allow(dead_code, reason = "each test program uses its own part")]
mod pair;

use std::sync::Arc;
use std::time::Duration;

use pair::destination::Destination;
use pair::guest::{GuestRam, Writers};
use pair::inside::InsideSelf;
use pair::source::{Source, SourceVmm};
use pair::{outgoing, tracking_works};
use sterna_api::options::{ContentHash, FakeDirty, HotPages};
use sterna_api::report::Status;
use sterna_api::{MigrateOptions, Report};
use sterna_engine::monitor::Monitor;
use sterna_engine::source::{Fate, migrate};

const MIB: u64 = 1 << 20;
const PAGES: u64 = 24 * MIB / 4096;

/// A link on which the 24 MiB take a good part of a second, so that pages are written again before their turn.
fn slow() -> MigrateOptions {
    MigrateOptions { bandwidth_bytes_per_s: Some(48_000_000), verify: true, ..MigrateOptions::default() }
}

fn filled() -> GuestRam {
    let ram = GuestRam::new(24 * MIB);
    (0..PAGES).for_each(|page| ram.write_page(page, page as u8 | 1));
    ram
}

/// Moves a guest whose writers write `pages`, and asserts that all of it arrived.
fn moved(options: &MigrateOptions, pages: std::ops::Range<u64>, pause: Duration) -> Report {
    let (host, peer) = Destination::serve();
    let ram = filled();
    let writers = Writers::start(&ram, pages, pause);
    let vmm = SourceVmm::new(Some(writers));
    let outcome =
        migrate(outgoing(&ram, vmm, InsideSelf::default()), &peer, options, &Source::default(), &Monitor::new("guest"));
    let report = outcome.report;
    assert_eq!(report.status, Status::Completed, "{:?}", report.error);
    assert_eq!(outcome.fate, Fate::There);
    assert_eq!((report.verify.checked, report.verify.mismatches), (true, 0));
    host.assert_same(&ram);
    report
}

#[test]
fn a_guest_that_keeps_writing_arrives_whole_whatever_is_left_out() {
    if !tracking_works() {
        return;
    }
    let variants = [FakeDirty::Off, FakeDirty::DtrackV1, FakeDirty::DtrackV2, FakeDirty::Adaptive, FakeDirty::Exact];
    for fake_dirty in variants {
        for (streams, hot_pages) in [(1, HotPages::Hold), (3, HotPages::Send)] {
            let options = MigrateOptions {
                fake_dirty,
                fake_dirty_delay_ms: (fake_dirty == FakeDirty::DtrackV2).then_some(5.0),
                hot_pages,
                streams,
                ..slow()
            };
            let report = moved(&options, 0..PAGES / 4, Duration::from_micros(20));
            let last = report.rounds.last().unwrap();
            assert_eq!(last.hot_pages, 0, "with the guest stopped nothing is held back");
            let counted = report.pages.full
                + report.pages.zero
                + report.pages.fake_dirty_tracked
                + report.pages.fake_dirty_content
                + report.pages.unallocated;
            let total: u64 = report.rounds.iter().map(|round| round.dirty_pages).sum();
            assert_eq!(counted, total + report.ram.total_pages - report.ram.allocated_pages, "{fake_dirty:?}");
        }
    }
}

#[test]
fn pages_written_again_before_their_turn_wait_for_the_next_round() {
    if !tracking_works() {
        return;
    }
    // The last quarter is written all the time: when its turn comes in the first round, all of it is dirty already.
    let busy = PAGES * 3 / 4..PAGES;
    let off = moved(&MigrateOptions { fake_dirty: FakeDirty::Off, ..slow() }, busy.clone(), Duration::ZERO);
    let exact = moved(&slow(), busy.clone(), Duration::ZERO);
    let quarter = busy.end - busy.start;
    assert_eq!(off.pages.fake_dirty_tracked, 0);
    assert!(exact.pages.fake_dirty_tracked >= quarter * 9 / 10, "{:?}", exact.pages);
    assert!(exact.rounds[0].sent_pages <= PAGES - quarter * 9 / 10, "{:?}", exact.rounds[0]);
    assert!(exact.tracking.looks >= 24, "{:?}", exact.tracking);
}

#[test]
fn pages_written_with_what_was_there_are_not_sent_again() {
    if !tracking_works() {
        return;
    }
    let (host, peer) = Destination::serve();
    let ram = Arc::new(filled());
    for (content_hash, silent) in [(ContentHash::Xxh3, 500), (ContentHash::Off, 0)] {
        let mut vmm = SourceVmm::new(None);
        let writing = Arc::clone(&ram);
        vmm.faults.at_stop = Some(Box::new(move || {
            (0..500).for_each(|page| writing.write_page(page, page as u8 | 1));
            (500..510).for_each(|page| writing.write_page(page, 0xfe));
        }));
        let options = MigrateOptions { content_hash, ..slow() };
        let outcome = migrate(
            outgoing(&ram, vmm, InsideSelf::default()),
            &peer,
            &options,
            &Source::default(),
            &Monitor::new("g"),
        );
        assert_eq!(outcome.report.status, Status::Completed, "{:?}", outcome.report.error);
        assert_eq!(outcome.report.pages.fake_dirty_content, silent, "{content_hash:?}");
        assert_eq!(outcome.report.rounds.last().unwrap().sent_pages, 510 - silent);
        host.assert_same(&ram);
        (500..510).for_each(|page| ram.write_page(page, page as u8 | 1));
    }
}

#[test]
fn pages_written_in_every_round_are_held_back_to_the_end() {
    if !tracking_works() {
        return;
    }
    // 16 pages are written all the time; another 2,000 now and then, so that there are rounds.
    let mut options = MigrateOptions { fake_dirty: FakeDirty::Off, downtime_limit_ms: 8.0, ..slow() };
    options.timeout_ms = Some(3000.0);
    options.on_timeout = sterna_api::options::OnTimeout::Force;
    let held = moved(&options, 0..16, Duration::ZERO);
    let hot: u64 = held.rounds.iter().map(|round| round.hot_pages).sum();
    let sent = |report: &Report| report.rounds.iter().skip(1).map(|round| round.sent_pages).sum::<u64>();
    let rounds = held.rounds.len() as u64;
    assert!(rounds <= 4 || hot > 0, "{:?}", held.rounds);
    assert!(sent(&held) <= 16 * 5, "of {rounds} rounds only the first and the last carry them: {:?}", held.rounds);
}
