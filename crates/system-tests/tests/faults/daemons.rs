use sterna_system_tests::{Point, Proxy, Site, cli};

use crate::with_guest;

/// What the fault hits.
#[derive(Clone, Copy)]
enum Daemon {
    Source,
    Destination,
}

/// Kills a daemon with -9 while a message is held back, which is then lost with the link. The guest must be on the
/// source's host afterwards, or on the destination's where `moves`.
fn killed_at(daemon: Daemon, point: Point, moves: bool) {
    with_guest(|site| {
        let (here, there) = site.names();
        let victim = if matches!(daemon, Daemon::Source) { here } else { there };
        let proxy = Proxy::start(site.here(), site.there());
        proxy.hold(point);
        let attempt = site.begin(Some(&proxy.address), &[]);
        proxy.wait_until_held();
        site.kill_daemon(victim);
        proxy.cut();
        match daemon {
            // The command line loses its daemon, and says so.
            Daemon::Source => drop(attempt.end().expect(5, &["daemon"])),
            Daemon::Destination if moves || point == Point::Request("commit") => {
                // The source cannot know who has the guest before the destination is back.
                site.start_daemon(there);
                attempt.end().expect(if moves { 0 } else { 1 }, &[]);
            }
            Daemon::Destination => {
                attempt.end().expect(1, &["link", "the peer"]);
                // It does not wait for anybody: the guest runs on though the other daemon is still down.
                site.checker_is_well();
            }
        }
        if site.lab.state().daemons.iter().all(|(name, _)| name != victim) {
            site.start_daemon(victim);
        }
        if moves {
            site.eventually("it belongs to the destination", || state_is(site, there, "running"));
            site.moved();
        }
        site.a_second_attempt_succeeds();
    });
}

fn state_is(site: &Site, host: &str, state: &str) -> bool {
    site.state_at(host) == state
}

#[test]
fn a_source_daemon_killed_in_prepare_leaves_the_guest() {
    killed_at(Daemon::Source, Point::Reply("propose"), false);
}

#[test]
fn a_source_daemon_killed_in_precopy_leaves_the_guest() {
    killed_at(Daemon::Source, Point::Request("round-end"), false);
}

#[test]
fn a_source_daemon_killed_as_the_guest_has_stopped_lets_it_run_on_when_it_is_back() {
    killed_at(Daemon::Source, Point::Request("stopped"), false);
}

#[test]
fn a_source_daemon_killed_while_the_devices_are_loaded_lets_the_guest_run_on_when_it_is_back() {
    killed_at(Daemon::Source, Point::Reply("load"), false);
}

#[test]
fn a_source_daemon_killed_before_its_last_word_arrived_asks_and_gets_the_guest_back() {
    killed_at(Daemon::Source, Point::Request("commit"), false);
}

#[test]
fn a_source_daemon_killed_after_its_last_word_arrived_asks_and_lets_the_guest_go() {
    killed_at(Daemon::Source, Point::Reply("commit"), true);
}

#[test]
fn a_destination_daemon_killed_in_prepare_leaves_the_guest() {
    killed_at(Daemon::Destination, Point::Reply("propose"), false);
}

#[test]
fn a_destination_daemon_killed_in_precopy_leaves_the_guest() {
    killed_at(Daemon::Destination, Point::Request("round-end"), false);
}

#[test]
fn a_destination_daemon_killed_in_the_pause_leaves_the_guest() {
    killed_at(Daemon::Destination, Point::Request("final-round-end"), false);
}

#[test]
fn a_destination_daemon_killed_before_the_last_word_arrived_gives_the_guest_back() {
    killed_at(Daemon::Destination, Point::Request("commit"), false);
}

#[test]
fn a_destination_daemon_killed_after_the_last_word_arrived_keeps_the_guest() {
    killed_at(Daemon::Destination, Point::Reply("commit"), true);
}

#[test]
fn a_guest_whose_fate_is_unknown_waits_stopped_and_says_for_whom() {
    with_guest(|site| {
        let (here, there) = site.names();
        let proxy = Proxy::start(site.here(), site.there());
        proxy.hold(Point::Request("commit"));
        let attempt = site.begin(Some(&proxy.address), &[]);
        proxy.wait_until_held();
        site.kill_daemon(there);
        proxy.cut();
        let answer = attempt.end();
        answer.expect(4, &["paused", &proxy.address, "daemon back"]);
        assert_eq!(site.state_at(here), "waiting-for-peer");
        cli::ask(site.here(), &["stop", &site.guest.name]).expect(1, &["--force"]);
        site.start_daemon(there);
        site.a_second_attempt_succeeds();
    });
}
