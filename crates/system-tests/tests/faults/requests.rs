use sterna_api::Phase;
use sterna_system_tests::cli;

use crate::{SLOW, with_guest};

#[test]
fn an_unknown_machine_is_named() {
    with_guest(|site| {
        let to = site.there().listen();
        cli::ask(site.here(), &["migrate", "nobody", "--to", &to]).expect(1, &["nobody", "unknown-vm"]);
        cli::ask(site.here(), &["cancel", "nobody"]).expect(1, &["nobody"]);
        site.a_second_attempt_succeeds();
    });
}

#[test]
fn a_request_that_cannot_be_is_a_matter_of_usage() {
    with_guest(|site| {
        let name = site.guest.name.clone();
        let to = site.there().listen();
        cli::ask(site.here(), &["migrate", &name]).expect(2, &["--to"]);
        cli::ask(site.here(), &["migrate", &name, "--to", "nowhere"]).expect(2, &["HOST:PORT"]);
        cli::ask(site.here(), &["migrate", &name, "--to", &to, "--streams", "99"]).expect(2, &["streams"]);
        cli::ask(site.here(), &["migrate", &name, &name, "--to", &to]).expect(2, &["twice"]);
        site.a_second_attempt_succeeds();
    });
}

#[test]
fn a_daemon_that_is_not_there_is_told_from_one_that_refuses() {
    with_guest(|site| {
        let to = site.there().listen();
        let (here, _) = site.names();
        let name = site.guest.name.clone();
        site.kill_daemon(here);
        cli::ask(site.host(here), &["migrate", &name, "--to", &to]).expect(5, &["sternad"]);
        site.start_daemon(here);
        site.a_second_attempt_succeeds();
    });
}

#[test]
fn a_machine_that_is_on_its_way_cannot_be_moved_once_more() {
    with_guest(|site| {
        let first = site.begin(None, &SLOW);
        site.wait_for_phase(Phase::Precopy, |_| true);
        let second = site.attempt(None, &[]);
        second.expect(1, &[&site.guest.name, "moved"]);
        let name = site.guest.name.clone();
        cli::ask(site.here(), &["cancel", &name]).expect(0, &[]);
        first.end().expect(3, &[]);
        site.a_second_attempt_succeeds();
    });
}

#[test]
fn a_migration_to_where_the_machine_is_already_is_refused() {
    with_guest(|site| {
        let own = site.here().listen();
        let answer = site.attempt(Some(&own), &[]);
        answer.expect(1, &[&site.guest.name]);
        site.a_second_attempt_succeeds();
    });
}
