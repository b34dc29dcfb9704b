use std::time::Duration;

use sterna_api::Phase;
use sterna_bench::command::run;
use sterna_bench::lab::net;
use sterna_system_tests::needs::left_to_the_proofs;
use sterna_system_tests::{Kind, Point, Proxy, cli};

use crate::{SLOW, arrives, completes, lose_at, says_that_it_waits, with_guest};

/// Every step from the point of no return to the last page, in the order in which they come where each is lost once.
const STEPS: [Point; 8] = [
    Point::Reply("commit"),
    Point::Request("resume"),
    Point::Reply("resume"),
    Point::Request("missing"),
    Point::Reply("missing"),
    Point::Request("paging"),
    Point::Reply("paging"),
    Point::Request("complete"),
];

#[test]
fn a_link_lost_and_restored_at_every_step_only_delays_the_pages() {
    with_guest(|site| {
        let proxy = Proxy::start(site.here(), site.there());
        let attempt = site.begin(Some(&proxy.address), &[&SLOW[..], &["--streams", "4"]].concat());
        for step in STEPS {
            lose_at(site, &proxy, step);
        }
        proxy.up();
        let report = completes(site, &attempt.end());
        println!("{:?}", report.postcopy);
        // Where every page was there before `complete` was lost, it has not been said again: its answer is lost in a
        // migration of its own.
        let proxy = Proxy::start(site.here(), site.there());
        let attempt = site.begin(Some(&proxy.address), &["--mode", "postcopy"]);
        lose_at(site, &proxy, Point::Reply("complete"));
        proxy.up();
        completes(site, &attempt.end());
    });
}

#[test]
fn a_link_lost_as_the_last_words_are_said_leaves_a_guest_that_is_whole() {
    if left_to_the_proofs() {
        return;
    }
    with_guest(|site| {
        for (last, more) in [(Point::Request("release"), "--verify"), (Point::Reply("release"), "--streams=1")] {
            let proxy = Proxy::start(site.here(), site.there());
            let attempt = site.begin(Some(&proxy.address), &["--mode", "hybrid", more]);
            lose_at(site, &proxy, last);
            proxy.up();
            attempt.end().expect(0, &[]);
            arrives(site);
        }
    });
}

#[test]
fn a_link_lost_in_the_middle_of_a_page_or_of_a_request_loses_and_doubles_none() {
    if left_to_the_proofs() {
        return;
    }
    with_guest(|site| {
        let proxy = Proxy::start(site.here(), site.there());
        // Held back, so that there is more to come than will be lost.
        cli::limit_bandwidth(site.here(), Some(4 << 20));
        let attempt = site.begin(Some(&proxy.address), &["--mode", "postcopy", "--verify", "--streams", "4"]);
        site.wait_for_phase(Phase::Postcopy, |_| true);
        // Not at the end of anything: odd numbers of bytes, in either direction, while devices begin to work and later.
        for (kind, bytes) in
            [(Kind::Urgent, 20_011), (Kind::Pages, 500_009), (Kind::Faults, 333), (Kind::Pages, 2_000_003)]
        {
            proxy.down_after(kind, bytes);
            proxy.wait_until_down();
            println!("lost in the middle of {kind:?}");
            std::thread::sleep(Duration::from_millis(200));
            proxy.up();
        }
        cli::limit_bandwidth(site.here(), None);
        let report = completes(site, &attempt.end());
        assert!(report.verify.checked, "both daemons lived: {:?}", report.verify);
        assert!(report.postcopy.interruptions >= 4, "{:?}", report.postcopy);
    });
}

#[test]
fn a_link_that_goes_dead_is_noticed_and_both_sides_say_that_they_wait() {
    with_guest(|site| {
        let (here, there) = site.names();
        let switch = net::namespace(site.lab.name(), "switch");
        cli::limit_bandwidth(site.here(), Some(4 << 20));
        let attempt = site.begin(None, &["--mode", "postcopy"]);
        site.wait_for_phase(Phase::Postcopy, |progress| progress.bytes_on_wire > 1 << 20);
        // No connection ends: the peer has simply become silent.
        run("ip", &format!("-n {switch} link set port-{here} down")).unwrap();
        says_that_it_waits(site, here);
        says_that_it_waits(site, there);
        run("ip", &format!("-n {switch} link set port-{here} up")).unwrap();
        cli::limit_bandwidth(site.here(), None);
        completes(site, &attempt.end());
    });
}
#[test]
fn a_destination_that_has_another_address_now_is_found_when_its_source_is_told() {
    with_guest(|site| {
        let (here, there) = site.names();
        let proxy = Proxy::start(site.here(), site.there());
        let attempt = site.begin(Some(&proxy.address), &SLOW);
        lose_at(site, &proxy, Point::Request("paging"));
        says_that_it_waits(site, here);
        let (name, address) = (site.guest.name.clone(), site.host(there).listen());
        cli::ask(site.here(), &["cancel", &name]).expect(1, &["cannot be cancelled"]);
        // Nobody is there; then somebody who is not the one.
        let _ = cli::ask(site.here(), &["resume", &name, "--to", "127.0.0.1:9"]);
        cli::ask(site.here(), &["resume", &name, "--to", &address]).expect(0, &[]);
        completes(site, &attempt.end());
    });
}
