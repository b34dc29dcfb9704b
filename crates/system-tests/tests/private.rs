//! Guests in private memory: they move in every mode and with every technique, as guests in files do.

use std::fs;

use sterna_api::{Mode, Reclaimed, Report, Vm};
use sterna_system_tests::needs::times;
use sterna_system_tests::pairs::{Technique, pairwise};
use sterna_system_tests::{Plan, Point, Proxy, Site, cli, needs, skip_without, turn};

/// So slow that the guest's writes make rounds, and so quick that the day has room for all of them.
const RATE: [&str; 2] = ["--bandwidth", "60MB"];

/// The push lasts for seconds, and no page is copied before.
const SLOW: [&str; 4] = ["--mode", "postcopy", "--postcopy-bandwidth", "32MB"];

const TECHNIQUES: [Technique; 4] = [
    ("--mode", &["precopy", "hybrid", "postcopy", "stop-and-copy"]),
    ("--compress", &["off", "lz4"]),
    ("--streams", &["1", "3"]),
    ("--skip-free", &["vmi", "off"]),
];

/// The guest's QEMU has all of its RAM in memory of its own, and the file that it was given is empty.
fn is_private(site: &Site) {
    let pid = site.qemu_at(site.names().0).expect("its QEMU runs");
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("its mappings");
    let shared: Vec<_> = maps.lines().filter(|line| line.contains(" rw-s ") && line.contains("/ram/")).collect();
    assert_eq!(shared, [""; 0], "RAM is mapped shared");
    let told = site.told_at(site.names().0);
    assert!(told.contains("allocated), private"), "{told}");
}

fn private_site(plan: Plan) -> Site {
    let site = Site::start(&Plan { run: Plan::private().run, ..plan });
    is_private(&site);
    site
}

fn agrees(report: &Report) {
    assert_eq!(report.verify.mismatches, 0, "{:?}", report.verify);
    assert!(report.verify.pages > 0, "{:?}", report.verify);
}

#[test]
fn a_guest_in_private_memory_moves_in_every_mode_and_both_sides_agree() {
    let _turn = turn();
    if skip_without(&needs::GUEST) {
        return;
    }
    let mut site = private_site(Plan::small());
    for words in pairwise(&TECHNIQUES).into_iter().step_by(times(2, 1)) {
        let report = site.migrate(&[&RATE[..], &words].concat());
        println!(
            "{}: {:.0} ms, down {:.1} ms, {:?}",
            words.join(" "),
            report.total_ms,
            report.downtime_ms,
            report.pages
        );
        agrees(&report);
        assert_eq!(report.pages.duplicate, 0, "{:?}", report.pages);
        if matches!(report.options.mode, Mode::Postcopy | Mode::Hybrid) {
            assert!(report.faults.count > 0 && report.postcopy.residue_pages > 0, "{:?}", report.postcopy);
        }
        is_private(&site);
        site.checker_is_well();
    }
    site.ran_on_one_host_at_a_time();
}

#[test]
fn a_guest_in_private_memory_gets_all_its_pages_though_both_daemons_are_killed_meanwhile() {
    let _turn = turn();
    if skip_without(&needs::GUEST) {
        return;
    }
    let mut site = private_site(Plan::small());
    let (here, there) = site.names();
    let proxy = Proxy::start(site.here(), site.there());
    let attempt = site.begin(Some(&proxy.address), &SLOW);
    for point in [Point::Reply("commit"), Point::Request("paging"), Point::Reply("complete")] {
        proxy.hold(point);
        proxy.up();
        proxy.wait_until_held();
        [there, here].iter().for_each(|host| site.kill_daemon(host));
        proxy.down();
        println!("killed at {point:?}");
        site.stands_still_at(here);
        [there, here].iter().for_each(|host| site.start_daemon(host));
    }
    proxy.up();
    drop(attempt.end());
    site.moved();
    site.nothing_is_left_there();
    site.eventually("it runs there", || site.state_at(there) == "running");
    is_private(&site);
    site.checker_is_well();
    site.ran_on_one_host_at_a_time();
    site.migrate(&["--mode", "precopy"]);
    site.checker_is_well();
}

fn allocated_bytes(site: &Site) -> u64 {
    let answer = cli::ask(site.here(), &["show", &site.guest.name, "--json"]);
    let vm: Vm = serde_json::from_str(&answer.stdout).unwrap_or_else(|error| panic!("{error}: {answer:#?}"));
    vm.allocated_bytes
}

#[test]
fn free_memory_is_taken_from_private_memory_too() {
    let _turn = turn();
    if skip_without(&needs::GUEST) {
        return;
    }
    let mut site = private_site(Plan::small());
    let before = allocated_bytes(&site);
    let answer = cli::ask(site.here(), &["reclaim", &site.guest.name, "--json", "-"]);
    answer.expect(0, &[]);
    let done: Reclaimed = serde_json::from_str(&answer.stdout).expect("a report");
    println!("{} MiB before, {} after: {done:?}", before >> 20, allocated_bytes(&site) >> 20);
    assert!(done.reclaimed_pages > 0 && allocated_bytes(&site) < before, "{done:?}");
    site.checker_is_well();
    site.migrate(&[]);
    site.checker_is_well();
}
