use sterna_system_tests::{Point, Proxy, Site, cli};

use crate::{SLOW, arrives, lose_at, says_that_it_waits, with_guest};

/// Kills the destination's daemon with -9 at each of the points in turn, and starts it again. The guest waits meanwhile, and arrives whole.
fn killed_at_each_of(points: &[Point], options: &[&str]) {
    with_guest(|site| {
        let (here, there) = site.names();
        let proxy = Proxy::start(site.here(), site.there());
        let attempt = site.begin(Some(&proxy.address), options);
        for point in points {
            proxy.hold(*point);
            proxy.up();
            proxy.wait_until_held();
            site.kill_daemon(there);
            proxy.down();
            println!("killed at {point:?}");
            site.stands_still_at(here);
            site.start_daemon(there);
            if *point == Point::Request("paging") {
                // Whether it was killed or not, it knows what it waits for.
                says_that_it_waits(site, here);
                says_that_it_waits(site, there);
            }
        }
        proxy.up();
        attempt.end().expect(0, &[]);
        arrives(site);
    });
}

#[test]
fn a_destination_daemon_killed_while_pages_are_missing_lets_the_guest_wait_for_them() {
    killed_at_each_of(
        &[Point::Reply("commit"), Point::Reply("missing"), Point::Request("paging"), Point::Request("complete")],
        &SLOW,
    );
}

#[test]
fn a_destination_daemon_killed_at_the_very_end_leaves_a_guest_that_is_whole_and_nothing_else() {
    killed_at_each_of(&[Point::Reply("release")], &["--mode", "hybrid"]);
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
        cli::ask(site.host(here), &["stop", &name]).expect(1, &["moved away"]);
        site.stands_still_at(here);
        proxy.up();
        crate::completes(site, &attempt.end());
    });
}
