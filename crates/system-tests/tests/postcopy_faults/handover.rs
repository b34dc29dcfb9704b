use sterna_system_tests::needs::left_to_the_proofs;
use sterna_system_tests::{Point, Proxy, Site};

use crate::{arrives, with_guest};

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fault {
    Link,
    Source,
    Destination,
}

/// Lets something go wrong at a point before the guest is handed over: it runs on where it was, and the other host has
/// nothing of it.
fn before(fault: Fault, point: Point) {
    with_guest(|site| {
        let (here, there) = site.names();
        let proxy = Proxy::start(site.here(), site.there());
        proxy.hold(point);
        let attempt = site.begin(Some(&proxy.address), &["--mode", "postcopy"]);
        proxy.wait_until_held();
        match fault {
            Fault::Link => {}
            Fault::Source => site.kill_daemon(here),
            Fault::Destination => site.kill_daemon(there),
        }
        proxy.cut();
        match fault {
            Fault::Link => drop(attempt.end().expect(1, &["link"])),
            Fault::Source => {
                // The command line loses its daemon, and says so.
                attempt.end().expect(5, &["daemon"]);
                site.start_daemon(here);
            }
            Fault::Destination => {
                // The source may have to ask whose the guest is.
                site.start_daemon(there);
                attempt.end().expect(1, &[]);
            }
        }
        // A daemon that does not know whose the guest is asks by the way that it knows.
        site.runs_on_here();
        site.ran_on_one_host_at_a_time();
    });
}

#[test]
fn a_link_lost_before_the_point_of_no_return_leaves_the_guest() {
    if left_to_the_proofs() {
        return;
    }
    before(Fault::Link, Point::Request("load-postcopy"));
    before(Fault::Link, Point::Reply("load-postcopy"));
    before(Fault::Link, Point::Request("commit"));
}

#[test]
fn a_source_daemon_killed_before_the_point_of_no_return_gets_the_guest_back() {
    if left_to_the_proofs() {
        return;
    }
    before(Fault::Source, Point::Reply("load-postcopy"));
    before(Fault::Source, Point::Request("commit"));
}

#[test]
fn a_destination_daemon_killed_before_the_point_of_no_return_leaves_the_guest() {
    before(Fault::Destination, Point::Reply("load-postcopy"));
    before(Fault::Destination, Point::Request("commit"));
}

#[test]
fn a_link_lost_while_the_devices_ask_for_pages_leaves_the_guest() {
    with_guest(|site| {
        let proxy = Proxy::start(site.here(), site.there());
        // The devices' rings are in pages that are not there: loading them waits for the source.
        proxy.down_after(sterna_system_tests::Kind::Urgent, 64);
        let answer = site.attempt(Some(&proxy.address), &["--mode", "postcopy"]);
        answer.expect(1, &["link"]);
        drop(proxy);
        site.runs_on_here();
        site.ran_on_one_host_at_a_time();
    });
}

#[test]
fn a_link_lost_after_the_point_of_no_return_leaves_the_guest_to_the_destination() {
    with_guest(|site: &mut Site| {
        let (here, _) = site.names();
        let proxy = Proxy::start(site.here(), site.there());
        proxy.hold(Point::Reply("commit"));
        let attempt = site.begin(Some(&proxy.address), &crate::SLOW);
        proxy.wait_until_held();
        proxy.cut();
        site.stands_still_at(here);
        attempt.end().expect(0, &[]);
        arrives(site);
    });
}
