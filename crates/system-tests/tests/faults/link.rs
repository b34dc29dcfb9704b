use sterna_api::Phase;
use sterna_bench::command::run;
use sterna_bench::lab::net;
use sterna_system_tests::{Point, Proxy};

use crate::{SLOW, with_guest};

/// Cuts every connection while a message is held back: it is lost.
fn cut_at(point: Point) {
    with_guest(|site| {
        let proxy = Proxy::start(site.here(), site.there());
        proxy.hold(point);
        let attempt = site.begin(Some(&proxy.address), &[]);
        proxy.wait_until_held();
        proxy.cut();
        let answer = attempt.end();
        answer.expect(1, &["link", "the peer", "network"]);
        site.a_second_attempt_succeeds();
    });
}

#[test]
fn a_link_cut_in_prepare_leaves_the_guest() {
    cut_at(Point::Reply("propose"));
}

#[test]
fn a_link_cut_in_precopy_leaves_the_guest() {
    cut_at(Point::Request("round-end"));
}

#[test]
fn a_link_cut_in_the_pause_leaves_the_guest() {
    cut_at(Point::Request("final-round-end"));
}

#[test]
fn a_link_cut_with_the_devices_loaded_leaves_the_guest() {
    cut_at(Point::Reply("load"));
}

#[test]
fn a_link_cut_before_the_last_word_arrived_gives_the_guest_back() {
    cut_at(Point::Request("commit"));
}

#[test]
fn a_link_cut_after_the_last_word_arrived_leaves_the_guest_to_the_destination() {
    with_guest(|site| {
        let proxy = Proxy::start(site.here(), site.there());
        proxy.hold(Point::Reply("commit"));
        let attempt = site.begin(Some(&proxy.address), &[]);
        proxy.wait_until_held();
        proxy.cut();
        attempt.end().expect(0, &[]);
        site.moved();
        site.a_second_attempt_succeeds();
    });
}

#[test]
fn a_link_that_goes_dead_in_precopy_is_noticed_and_the_guest_runs_on() {
    with_guest(|site| {
        let switch = net::namespace(site.lab.name(), "switch");
        let (_, there) = site.names();
        let attempt = site.begin(None, &SLOW);
        site.wait_for_phase(Phase::Precopy, |progress| progress.bytes_on_wire > 1 << 18);
        run("ip", &format!("-n {switch} link set port-{there} down")).unwrap();
        // No connection ends: the peer has simply become silent.
        let answer = attempt.end();
        run("ip", &format!("-n {switch} link set port-{there} up")).unwrap();
        answer.expect(1, &["link", "the peer"]);
        site.a_second_attempt_succeeds();
    });
}
