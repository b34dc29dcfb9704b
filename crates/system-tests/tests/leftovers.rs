//! What stays behind: nothing.

use sterna_api::Phase;
use sterna_system_tests::census::{left_of_lab, ram_bytes};
use sterna_system_tests::needs::{left_to_another_day, left_to_the_proofs};
use sterna_system_tests::{Census, Plan, Point, Proxy, Site, cli, needs, on_shared_site, skip_without, turn};

/// Both hosts before and after `work`, whatever it does.
fn leaves_nothing(work: impl Fn(&mut Site)) {
    if left_to_another_day(9) || skip_without(&needs::GUEST) {
        return;
    }
    on_shared_site(|site| {
        // The first time brings what stays on purpose.
        work(site);
        let before = ["a", "b"].map(|host| (host, Census::settled(site, host)));
        for _ in 0..3 {
            work(site);
        }
        for (host, before) in before {
            before.is_all_of(site, host);
        }
        assert_eq!(ram_bytes(site.there()), 0);
        site.checker_is_well();
    });
}

#[test]
fn cancelled_migrations_leave_nothing() {
    if left_to_the_proofs() {
        return;
    }
    leaves_nothing(|site| {
        let attempt = site.begin(None, &["--mode", "precopy", "--bandwidth", "1MB"]);
        site.wait_for_phase(Phase::Precopy, |_| true);
        let name = site.guest.name.clone();
        cli::ask(site.here(), &["cancel", &name]).expect(0, &[]);
        attempt.end().expect(3, &[]);
        site.nothing_is_left_there();
    });
}

#[test]
fn migrations_whose_link_was_cut_leave_nothing() {
    leaves_nothing(|site| {
        let proxy = Proxy::start(site.here(), site.there());
        proxy.hold(Point::Request("final-round-end"));
        let attempt = site.begin(Some(&proxy.address), &["--streams", "4"]);
        proxy.wait_until_held();
        proxy.cut();
        attempt.end().expect(1, &[]);
        site.nothing_is_left_there();
    });
}

#[test]
fn migrations_whose_pages_follow_leave_nothing() {
    leaves_nothing(|site| {
        // There and back: the site is as it was.
        site.migrate(&["--mode", "postcopy", "--streams", "4"]);
        let proxy = Proxy::start(site.here(), site.there());
        proxy.hold(Point::Request("complete"));
        let attempt = site.begin(Some(&proxy.address), &["--mode", "hybrid"]);
        proxy.wait_until_held();
        proxy.cut();
        attempt.end().expect(0, &[]);
        site.moved();
        site.nothing_is_left_there();
    });
}

#[test]
fn refused_migrations_leave_nothing() {
    if left_to_the_proofs() {
        return;
    }
    leaves_nothing(|site| {
        let own = site.here().listen();
        site.attempt(Some(&own), &[]).expect(1, &[]);
        site.attempt(Some("127.0.0.1:9"), &[]).expect(1, &[]);
    });
}

#[test]
fn a_machine_that_is_stopped_leaves_nothing_on_any_host_it_was_on() {
    let _turn = turn();
    if skip_without(&needs::GUEST) {
        return;
    }
    let mut site = Site::start(&Plan::small());
    let name = site.guest.name.clone();
    site.migrate(&[]);
    site.checker_is_well();
    // The guest switches itself off when asked. On a busy machine that takes longer than a daemon waits.
    site.eventually("it is switched off", || {
        let answer = cli::ask(site.here(), &["stop", &name]);
        print!("{}", answer.stderr);
        answer.code == 0 || site.state_at(site.names().0) == "none"
    });
    for host in ["a", "b"] {
        site.eventually("it is gone", || site.qemu_at(host).is_none() && site.state_at(host) == "none");
        // What ended a moment ago may take another to go.
        let only_the_daemon = std::collections::BTreeMap::from([("sternad".to_owned(), 1)]);
        let left = || {
            let census = Census::of(&site, host);
            (census.files, ram_bytes(site.host(host)), census.programs)
        };
        site.eventually("nothing of it is left", || left() == (0, 0, only_the_daemon.clone()));
    }
}

#[test]
fn a_lab_taken_down_in_mid_migration_leaves_nothing() {
    let _turn = turn();
    if skip_without(&needs::GUEST) {
        return;
    }
    let mut site = Site::start(&Plan::small());
    let name = site.lab.name().to_owned();
    let attempt = site.begin(None, &["--mode", "precopy", "--bandwidth", "1MB"]);
    site.wait_for_phase(Phase::Precopy, |_| true);
    drop(site);
    attempt.end().expect(5, &[]);
    assert_eq!(left_of_lab(&name), Vec::<String>::new());
}
