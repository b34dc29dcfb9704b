//! Guests that take and give back memory all the time are moved while what they hold free is left out.

use std::time::Duration;

use sterna_api::Report;
use sterna_system_tests::needs::{left_to_another_day, times};
use sterna_system_tests::{Plan, Site, needs, skip_without, turn};

fn show(number: usize, report: &Report) {
    let (pages, seen) = (&report.pages, &report.introspection);
    println!(
        "{number}: {}, {:.0} ms, paused {:.1} ms, {} rounds: {} sent, {} free of {} that it holds; {} looks in {:.1} ms, {:.1} of them at the stop, found in {:.1} ms; {} left out of the comparison",
        report.mode,
        report.total_ms,
        report.downtime_ms,
        report.rounds.len(),
        pages.sent,
        pages.free,
        seen.free_pages,
        seen.looks,
        seen.look_ms,
        seen.stop_look_ms,
        seen.find_ms,
        report.verify.excluded_free_pages
    );
}

#[test]
fn a_guest_under_churn_is_moved_in_every_mode_without_what_it_holds_free() {
    let _turn = turn();
    if left_to_another_day(5) || skip_without(&needs::GUEST) {
        return;
    }
    let mut site = Site::start(&Plan::churning());
    // Before a guest was full once most of its free pages are holes anyway.
    std::thread::sleep(Duration::from_secs(5));
    for number in 0..times(1, 50) {
        for mode in ["precopy", "hybrid", "postcopy", "stop-and-copy", "auto"] {
            let report = site.migrate(&["--mode", mode, "--bandwidth", "200MB"]);
            show(number, &report);
            let seen = &report.introspection;
            assert!(seen.used && seen.reason.is_none(), "{seen:?}");
            site.churn_is_well();
            site.checker_is_well();
        }
    }
}

#[test]
fn a_guest_under_churn_is_harmed_where_what_was_free_once_is_never_looked_at_again() {
    // Shows that the tests above can fail.
    let _turn = turn();
    if left_to_another_day(5) || skip_without(&needs::GUEST) {
        return;
    }
    let mut site = Site::without_guest(&Plan::churning());
    for host in ["a", "b"] {
        site.configure(host, "test_trust_first_look = true");
    }
    site.run(&Plan::churning());
    std::thread::sleep(Duration::from_secs(5));
    // What was freed last is used first: a migration in three or four meets a page that somebody has again and needs.
    for number in 0..100 {
        // So slow that the guest uses much of what was free before it is moved. It may be harmed so much that it stops
        // for good.
        let answer = site.attempt(None, &["--mode", "precopy", "--bandwidth", "50MB"]);
        let report = answer.report().unwrap_or_else(|| panic!("no report: {answer:#?}"));
        show(number, &report);
        site.moved();
        std::thread::sleep(Duration::from_secs(3));
        if let Some(harm) = site.harm() {
            println!("after {} migrations: {harm}", number + 1);
            return;
        }
    }
    panic!("no page was lost");
}
