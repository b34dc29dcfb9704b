use sterna_system_tests::{Point, Proxy, Site, cli};

use crate::{SLOW, arrives, lose_at, lost_its_daemon, says_that_it_waits, with_guest};

/// Whose daemon is killed.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Daemon {
    Source,
    Destination,
    Both,
}

/// Kills daemons with -9 at each of the points in turn, and starts them again. The guest waits meanwhile, and arrives
/// whole.
fn killed_at_each_of(daemon: Daemon, points: &[Point], options: &[&str]) {
    with_guest(|site| {
        let (here, there) = site.names();
        let victims = match daemon {
            Daemon::Source => vec![here],
            Daemon::Destination => vec![there],
            Daemon::Both => vec![there, here],
        };
        let proxy = Proxy::start(site.here(), site.there());
        let attempt = site.begin(Some(&proxy.address), options);
        for point in points {
            proxy.hold(*point);
            proxy.up();
            proxy.wait_until_held();
            victims.iter().for_each(|victim| site.kill_daemon(victim));
            proxy.down();
            println!("{daemon:?} killed at {point:?}");
            site.stands_still_at(here);
            victims.iter().for_each(|victim| site.start_daemon(victim));
            if *point == Point::Request("paging") {
                // Whether it was killed or not, it knows what it waits for.
                says_that_it_waits(site, here);
                says_that_it_waits(site, there);
            }
        }
        proxy.up();
        let answer = attempt.end();
        if daemon == Daemon::Destination {
            answer.expect(0, &[]);
        } else {
            lost_its_daemon(&answer);
        }
        arrives(site);
    });
}

#[test]
fn a_source_daemon_killed_while_pages_are_missing_sends_them_when_it_is_back() {
    killed_at_each_of(
        Daemon::Source,
        &[Point::Reply("commit"), Point::Reply("missing"), Point::Request("paging"), Point::Request("complete")],
        &SLOW,
    );
}

#[test]
fn a_destination_daemon_killed_while_pages_are_missing_lets_the_guest_wait_for_them() {
    killed_at_each_of(
        Daemon::Destination,
        &[Point::Reply("commit"), Point::Reply("missing"), Point::Request("paging"), Point::Request("complete")],
        &SLOW,
    );
}

#[test]
fn both_daemons_killed_while_pages_are_missing_find_each_other_again() {
    killed_at_each_of(
        Daemon::Both,
        &[Point::Reply("commit"), Point::Request("paging"), Point::Reply("complete")],
        &SLOW,
    );
}

#[test]
fn daemons_killed_at_the_very_end_leave_a_guest_that_is_whole_and_nothing_else() {
    killed_at_each_of(Daemon::Source, &[Point::Request("release"), Point::Request("resume")], &["--mode", "hybrid"]);
    killed_at_each_of(Daemon::Destination, &[Point::Reply("release")], &["--mode", "hybrid"]);
}

#[test]
fn a_guest_whose_pages_are_still_at_the_source_is_neither_moved_on_nor_taken_from_there() {
    with_guest(|site| {
        let (here, there) = site.names();
        let proxy = Proxy::start(site.here(), site.there());
        let attempt = site.begin(Some(&proxy.address), &SLOW);
        lose_at(site, &proxy, Point::Request("paging"));
        let (name, back) = (site.guest.name.clone(), site.host(here).listen());
        let again = |site: &Site| cli::ask(site.host(there), &["migrate", &name, "--to", &back, "--json", "-"]);
        let refused = again(site);
        refused.expect(1, &["pages"]);
        // What is left of it at the source is what the guest needs.
        cli::ask(site.host(here), &["stop", &name]).expect(1, &["--force", "missing pages"]);
        site.stands_still_at(here);
        proxy.up();
        crate::completes(site, &attempt.end());
    });
}
