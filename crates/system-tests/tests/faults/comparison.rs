//! Both sides are compared while the guest runs at the destination already, and what does it is lost.

use sterna_api::{Report, Status};
use sterna_system_tests::{Attempt, Point, Proxy, Site};

use crate::with_guest;

/// Rounds, and every page before the guest's start.
const COMPARED: [&str; 3] = ["--mode", "precopy", "--verify"];

/// Begins to move the guest, and returns when it runs at the destination and a message of the comparison is held back.
fn compared_until(site: &mut Site, point: Point) -> (Proxy, Attempt) {
    let proxy = Proxy::start(site.here(), site.there());
    proxy.hold(point);
    let attempt = site.begin(Some(&proxy.address), &COMPARED);
    proxy.wait_until_held();
    site.moved();
    (proxy, attempt)
}

/// The guest is wholly at the destination, and can leave it again.
fn is_whole(site: &mut Site) {
    let (here, _) = site.names();
    site.eventually("it runs there", || site.state_at(here) == "running");
    site.nothing_is_left_there();
    site.a_second_attempt_succeeds();
}

fn not_compared(report: &Report) {
    assert_eq!(report.status, Status::Completed, "{report:#?}");
    let verify = &report.verify;
    assert!(!verify.checked && verify.reason.is_some(), "{verify:?}");
    assert_eq!(report.downtime.verify_ms, 0.0);
}

#[test]
fn a_link_lost_in_a_comparison_costs_the_comparison_and_nothing_else() {
    with_guest(|site| {
        for point in [Point::Request("chunk-digests"), Point::Reply("chunk-digests"), Point::Request("release")] {
            let (proxy, attempt) = compared_until(site, point);
            // Whatever becomes of the comparison, it waits for nobody.
            site.is_heard_of();
            proxy.cut();
            let answer = attempt.end();
            answer.expect(0, &[]);
            let report = answer.report().expect("a report");
            println!("{point:?}: {:?}", report.verify);
            if point == Point::Request("release") {
                assert!(report.verify.checked && report.verify.mismatches == 0, "{:?}", report.verify);
            } else {
                not_compared(&report);
            }
            is_whole(site);
        }
    });
}

#[test]
fn a_destination_daemon_killed_in_a_comparison_is_not_missed_by_the_guest() {
    with_guest(|site| {
        let (proxy, attempt) = compared_until(site, Point::Request("chunk-digests"));
        let (here, _) = site.names();
        // At once: most of the guest's pages are not mapped yet.
        site.kill_daemon(here);
        proxy.cut();
        let answer = attempt.end();
        answer.expect(0, &[]);
        not_compared(&answer.report().expect("a report"));
        // Its daemon is still down: nothing holds a page back.
        site.checker_is_well();
        site.start_daemon(here);
        is_whole(site);
    });
}

#[test]
fn a_source_daemon_killed_in_a_comparison_lets_the_guest_go_when_it_is_back() {
    with_guest(|site| {
        let (proxy, attempt) = compared_until(site, Point::Reply("chunk-digests"));
        let (_, there) = site.names();
        site.kill_daemon(there);
        proxy.cut();
        attempt.end().expect(5, &["daemon"]);
        site.start_daemon(there);
        is_whole(site);
    });
}
