//! Guests whose pages follow them: each mode with post-copy in it, on a real guest that checks each page it wrote, and
//! what the report says.

use sterna_api::Report;
use sterna_system_tests::needs::{left_to_another_day, times};
use sterna_system_tests::pairs::{Technique, pairwise};
use sterna_system_tests::{Plan, Site, needs, on_shared_site, skip_without, turn};

/// So slow that the guest asks for many of its pages, and so quick that the day has room for all of them.
const RATE: [&str; 2] = ["--bandwidth", "60MB"];

const TECHNIQUES: [Technique; 5] = [
    ("--mode", &["postcopy", "hybrid"]),
    ("--streams", &["1", "4"]),
    ("--compress", &["off", "lz4", "zstd"]),
    ("--prepaging", &["bubble", "linear", "off"]),
    ("--skip-free", &["vmi", "off"]),
];

/// What every report of a migration with post-copy says.
fn makes_sense(report: &Report) {
    let (pages, postcopy, faults) = (&report.pages, &report.postcopy, &report.faults);
    assert_eq!(pages.duplicate, 0, "every page goes at most once: {pages:?}");
    assert!(postcopy.residue_pages > 0 && postcopy.residue_bytes > 0, "{postcopy:?}");
    assert!(pages.faulted + pages.pushed <= postcopy.residue_pages, "{pages:?} {postcopy:?}");
    assert_eq!((postcopy.interruptions, postcopy.interrupted_ms), (0, 0.0), "{postcopy:?}");
    // A guest that never waits for a page has not been seen.
    assert!(faults.count > 0 && pages.faulted > 0, "{faults:?} {pages:?}");
    assert_eq!(faults.histogram_log2_us.iter().sum::<u64>(), faults.count, "{faults:?}");
    let latency = &faults.latency_us;
    assert!(0.0 < latency.p50 && latency.p50 <= latency.p99 && latency.p99 <= latency.max, "{latency:?}");
    let of_threads: f64 = faults.blocktime_by_thread.iter().map(|thread| thread.ms).sum();
    assert!(faults.blocktime_ms > 0.0 && of_threads <= faults.blocktime_ms * 1.01, "{faults:?}");
    // The guest did not wait for the pages that followed it.
    assert!(report.downtime_ms > 0.0 && report.downtime.final_pages_ms < postcopy.ms, "{report:#?}");
    // What comes after the last page, such as QEMU's end, is not in the total; on a slow machine it takes seconds.
    assert!(0.0 < postcopy.ms && postcopy.ms <= report.total_ms * 1.01 && report.resume_ms > 0.0, "{report:#?}");
    assert_eq!(pages.sent, pages.full + pages.delta);
    assert!(report.bytes_on_wire > 0);
}

fn line(words: &[&str], report: &Report) -> String {
    format!(
        "{}: {:.0} ms, down {:.1} ms, {} rounds, {} MiB; residue {} in {:.1} ms, faulted {}, pushed {}, zero {}; p50 {:.0} us, p99 {:.0}, max {:.0}",
        words.join(" "),
        report.total_ms,
        report.downtime_ms,
        report.rounds.len(),
        report.bytes_on_wire >> 20,
        report.postcopy.residue_pages,
        report.postcopy.residue_ms,
        report.pages.faulted,
        report.pages.pushed,
        report.pages.zero,
        report.faults.latency_us.p50,
        report.faults.latency_us.p99,
        report.faults.latency_us.max,
    )
}

#[test]
fn every_pair_of_techniques_of_postcopy_keeps_every_page() {
    if left_to_another_day(5) || skip_without(&needs::GUEST) {
        return;
    }
    on_shared_site(|site| {
        for words in pairwise(&TECHNIQUES).into_iter().step_by(times(3, 1)) {
            let report = site.migrate(&[&RATE[..], &words].concat());
            println!("{}", line(&words, &report));
            assert!(words.contains(&report.mode.as_str()), "{words:?}: {}", report.mode);
            makes_sense(&report);
            if report.mode == "postcopy" {
                assert!(report.rounds.is_empty(), "nothing goes before the switchover: {:?}", report.rounds);
                assert!(report.postcopy.residue_pages <= report.ram.allocated_pages, "{report:#?}");
            } else {
                assert!(
                    report.postcopy.residue_pages < report.ram.allocated_pages,
                    "the round was for nothing: {report:#?}"
                );
            }
            if words.contains(&"off") && words.windows(2).any(|pair| pair == ["--compress", "off"]) {
                assert_eq!(report.encoding.compression.pages, 0, "{:?}", report.encoding);
            } else {
                assert!(report.encoding.compression.pages > 0, "{:?}", report.encoding);
            }
            site.checker_is_well();
        }
    });
}

#[test]
fn every_round_of_a_hybrid_leaves_less_for_after_the_switchover() {
    if left_to_another_day(5) || skip_without(&needs::GUEST) {
        return;
    }
    on_shared_site(|site| {
        let report = site.migrate(&[&RATE[..], &["--mode", "hybrid", "--precopy-rounds", "3"]].concat());
        println!("{}", line(&["hybrid"], &report));
        let pages: Vec<u64> = report.rounds.iter().map(|round| round.dirty_pages).collect();
        // Three were asked for. More go only while a QEMU takes its time to stop the guest.
        assert!(pages.len() >= 3, "{:#?}", report.rounds);
        assert!(
            report.postcopy.residue_pages < pages[0] / 4 && pages[2] < pages[0] / 4,
            "{pages:?} {:?}",
            report.postcopy
        );
        assert_eq!(report.pages.duplicate, 0);
        site.checker_is_well();
    });
}

/// A guest that writes four times the rate of `LINK` over most of its RAM.
fn fast_writer() -> Plan {
    let jobs = "checker:--mib,8,--rate,4;dirtier:--mib,80,--rate,92,--bytes,256".into();
    Plan { jobs, ..Plan::small() }
}

/// 23 MiB/s.
const LINK: [&str; 2] = ["--bandwidth", "24MB"];

#[test]
fn a_guest_four_times_as_fast_as_the_link_is_moved_all_the_same() {
    let _turn = turn();
    if left_to_another_day(5) || skip_without(&needs::GUEST) {
        return;
    }
    let mut site = Site::start(&fast_writer());
    site.dirtier_writes(80);
    // By itself, because rounds would never do; and because time is up.
    let auto = site.migrate(&LINK);
    println!("{}", line(&["auto"], &auto));
    assert_eq!(auto.mode, "hybrid", "{auto:#?}");
    assert!(auto.postcopy.reason.is_some(), "{auto:#?}");
    let late = ["--mode", "precopy", "--timeout", "1s", "--on-timeout", "postcopy"];
    let late = site.migrate(&[&LINK[..], &late].concat());
    println!("{}", line(&["on-timeout"], &late));
    assert_eq!(late.mode, "hybrid", "{late:#?}");
    assert!(late.postcopy.reason.as_deref().is_some_and(|reason| !reason.is_empty()), "{late:#?}");
    for report in [&auto, &late] {
        makes_sense(report);
        // What the pause of pre-copy would have been: all that the guest had rewritten. How much that is depends on how
        // often it got a processor.
        let pages_ms = report.postcopy.residue_pages as f64 * 4096.0 / 24_000.0;
        assert!(report.downtime_ms < pages_ms, "{pages_ms:.0} ms: {report:#?}");
    }
}
