use sterna_api::{Phase, Status};
use sterna_system_tests::{Point, Proxy, cli};

use crate::{SLOW, with_guest};

/// Cancels while a message is held back, then lets it go.
fn cancelled_at(point: Point) {
    with_guest(|site| {
        let proxy = Proxy::start(site.here(), site.there());
        proxy.hold(point);
        let attempt = site.begin(Some(&proxy.address), &[]);
        proxy.wait_until_held();
        cli::ask(site.here(), &["cancel", &site.guest.name]).expect(0, &[]);
        proxy.release();
        let answer = attempt.end();
        answer.expect(3, &["cancelled"]);
        assert_eq!(answer.report().expect("a report").status, Status::Cancelled);
        site.a_second_attempt_succeeds();
    });
}

#[test]
fn a_migration_cancelled_in_prepare_leaves_the_guest() {
    cancelled_at(Point::Request("propose"));
}

#[test]
fn a_migration_cancelled_between_rounds_leaves_the_guest() {
    cancelled_at(Point::Reply("round-end"));
}

#[test]
fn a_migration_cancelled_as_the_guest_has_stopped_leaves_the_guest() {
    cancelled_at(Point::Request("stopped"));
}

#[test]
fn a_migration_cancelled_while_the_last_pages_go_leaves_the_guest() {
    cancelled_at(Point::Request("final-round-end"));
}

#[test]
fn a_migration_cancelled_while_the_devices_are_loaded_leaves_the_guest() {
    cancelled_at(Point::Reply("load"));
}

#[test]
fn a_migration_cancelled_in_a_slow_round_ends_at_once() {
    with_guest(|site| {
        let attempt = site.begin(None, &SLOW);
        site.wait_for_phase(Phase::Precopy, |progress| progress.bytes_on_wire > 1 << 18);
        cli::ask(site.here(), &["cancel", &site.guest.name]).expect(0, &[]);
        let answer = attempt.end();
        answer.expect(3, &["cancelled"]);
        // It did not wait for the round to end.
        let report = answer.report().expect("a report");
        assert!(report.pages.sent < report.ram.allocated_pages / 2, "{report:#?}");
        site.a_second_attempt_succeeds();
    });
}

#[test]
fn ctrl_c_cancels_and_the_guest_stays() {
    with_guest(|site| {
        let attempt = site.begin(None, &SLOW);
        site.wait_for_phase(Phase::Precopy, |_| true);
        attempt.interrupt();
        attempt.end().expect(3, &["cancel", "stays"]);
        site.a_second_attempt_succeeds();
    });
}

#[test]
fn after_the_point_of_no_return_cancelling_is_refused() {
    with_guest(|site| {
        let proxy = Proxy::start(site.here(), site.there());
        proxy.hold(Point::Reply("commit"));
        let attempt = site.begin(Some(&proxy.address), &[]);
        proxy.wait_until_held();
        cli::ask(site.here(), &["cancel", &site.guest.name]).expect(1, &["handed over", "cannot be cancelled"]);
        proxy.release();
        attempt.end().expect(0, &[]);
        site.moved();
        site.a_second_attempt_succeeds();
    });
}
