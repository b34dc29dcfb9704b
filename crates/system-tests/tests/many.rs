//! Several guests at once: more than the hosts take at a time, all of them arrive whole, and whoever waits can be seen
//! and called off.

use sterna_api::{Status, Vm};
use sterna_system_tests::needs::left_to_another_day;
use sterna_system_tests::{Attempt, Plan, Site, cli, needs, skip_without, turn};

/// What the daemon where they began says of a guest.
fn seen(site: &Site, name: &str) -> Option<Vm> {
    serde_json::from_str(&cli::ask(site.host("a"), &["show", name, "--json"]).stdout).ok()
}

/// Whether the list for people says this of a guest.
fn listed(site: &Site, name: &str, words: &str) -> bool {
    let list = cli::ask(site.host("a"), &["ps"]).stdout;
    list.lines().any(|line| line.trim_start().starts_with(name) && line.contains(words))
}

#[test]
fn three_guests_go_to_a_host_that_takes_one_at_a_time() {
    let _turn = turn();
    if left_to_another_day(4) || skip_without(&needs::GUEST) {
        return;
    }
    let plan = Plan::small();
    let mut site = Site::without_guest(&plan);
    // A guest that writes as fast as it is sent is under way until it may go faster.
    for (host, limit) in [("a", "max_outgoing = 2\nbandwidth = '64Mbit'"), ("b", "max_incoming = 1")] {
        site.configure(host, limit);
    }
    site.run(&plan);
    let mut guests = vec![site.guest.clone()];
    for (name, number) in [("h", 8), ("i", 9)] {
        let mut guest = guests[0].clone();
        (guest.name, guest.number) = (name.into(), number);
        guest.console = guest.console.with_file_name(format!("{name}.console"));
        site.lab.create_tap(&guest.tap()).expect("a tap");
        guests.push(guest.clone());
        site.guest = guest;
        site.run(&plan);
    }
    let there = site.there().listen();
    let begin =
        |name: &str, options: &[&str]| Attempt::begin(site.host("a"), name, &there, &[&["--verify"], options].concat());
    let first = begin("g", &["--mode", "precopy"]);
    site.eventually("the first is on its way", || listed(&site, "g", "copying round"));
    let second = begin("h", &[]);
    site.eventually("the second waits for the other host", || listed(&site, "h", "it takes 1 at a time"));
    let third = begin("i", &[]);
    site.eventually("the third is behind it", || listed(&site, "i", "2nd of 2 waiting for"));
    let progress = seen(&site, "i").and_then(|vm| vm.migration).expect("it is to be moved");
    assert_eq!((progress.queue_place, progress.queue_length), (Some(2), Some(2)), "{progress:?}");
    cli::ask(site.host("a"), &["cancel", "i"]).expect(0, &[]);
    third.end().expect(3, &[]);
    assert!(listed(&site, "g", "copying"), "the first was still on its way");
    cli::limit_bandwidth(site.host("a"), None);
    for attempt in [first, second] {
        let report = attempt.end().expect(0, &[]).report().expect("a report");
        assert_eq!((report.status, report.verify.mismatches), (Status::Completed, 0), "{report:#?}");
    }
    begin("i", &[]).end().expect(0, &[]);
    for guest in guests {
        site.guest = guest;
        assert_eq!((site.state_at("a"), site.state_at("b")), ("none".into(), "running".into()));
        site.checker_is_well();
    }
    site.moved();
    site.nothing_is_left_there();
}
