//! Guests in private memory: they move in every mode and with every technique, as guests in files do.

use std::fs;

use sterna_api::{Mode, Reclaimed, Report, Vm};
use sterna_bench::ksm::Ksm;
use sterna_system_tests::needs::{left_to_another_day, times};
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

fn private_site() -> Site {
    let site = Site::start(&Plan::private());
    is_private(&site);
    site
}

fn agrees(report: &Report) {
    assert_eq!(report.verify.mismatches, 0, "{:?}", report.verify);
    assert!(report.verify.pages > 0, "{:?}", report.verify);
}

#[test]
fn a_guest_in_private_memory_moves_in_every_mode_and_gives_its_free_memory_back() {
    let _turn = turn();
    if left_to_another_day(9) || skip_without(&needs::GUEST) {
        return;
    }
    let mut site = private_site();
    let before = allocated_bytes(&site);
    let answer = cli::ask(site.here(), &["reclaim", &site.guest.name, "--json", "-"]);
    answer.expect(0, &[]);
    let done: Reclaimed = serde_json::from_str(&answer.stdout).expect("a report");
    println!("{} MiB before, {} after: {done:?}", before >> 20, allocated_bytes(&site) >> 20);
    assert!(done.reclaimed_pages > 0 && allocated_bytes(&site) < before, "{done:?}");
    site.checker_is_well();
    for words in pairwise(&TECHNIQUES).into_iter().step_by(times(4, 1)) {
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

fn allocated_bytes(site: &Site) -> u64 {
    let answer = cli::ask(site.here(), &["show", &site.guest.name, "--json"]);
    let vm: Vm = serde_json::from_str(&answer.stdout).unwrap_or_else(|error| panic!("{error}: {answer:#?}"));
    vm.allocated_bytes
}

#[test]
fn a_guest_in_private_memory_gets_all_its_pages_though_both_daemons_are_killed_meanwhile() {
    let _turn = turn();
    if left_to_another_day(9) || skip_without(&needs::GUEST) {
        return;
    }
    let mut site = private_site();
    let (here, there) = site.names();
    let proxy = Proxy::start(site.here(), site.there());
    let attempt = site.begin(Some(&proxy.address), &SLOW);
    // Each comes once, in this order. Every day the one in the middle.
    let points = [Point::Reply("commit"), Point::Request("paging"), Point::Reply("complete")];
    for point in &points[times(1, 0)..times(2, 3)] {
        proxy.hold(*point);
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

/// What private memory cannot outlive: its pages end with QEMU, and the guest must never see anything in their place.
#[test]
fn a_guest_whose_last_pages_ended_with_the_qemu_that_it_left_stands_still_and_both_hosts_say_so() {
    let _turn = turn();
    if left_to_another_day(9) || skip_without(&needs::GUEST) {
        return;
    }
    let site = private_site();
    let (here, there) = site.names();
    let proxy = Proxy::start(site.here(), site.there());
    let attempt = site.begin(Some(&proxy.address), &SLOW);
    proxy.hold(Point::Request("paging"));
    proxy.up();
    proxy.wait_until_held();
    let pid = site.qemu_at(here).expect("it still has the pages").to_string();
    let killed = std::process::Command::new("kill").args(["-9", &pid]).status().expect("kill");
    assert!(killed.success());
    proxy.up();
    let answer = attempt.end();
    answer.expect(4, &["paging-lost", "stop it there"]);
    let report = answer.report().unwrap_or_else(|| panic!("no report: {answer:#?}"));
    let error = report.error.expect("it failed");
    assert_eq!(error.code, "paging-lost", "{error:?}");
    site.eventually("it waits there", || site.told_at(there).to_lowercase().contains("waiting for"));
    site.stands_still_at(there);
    cli::ask(site.there(), &["stop", &site.guest.name, "--force"]).expect(0, &[]);
    site.eventually("nothing is left", || site.state_at(here) == "none" && site.state_at(there) == "none");
}

/// The pages of the guest's QEMU that are merged with others now.
fn merged_pages(site: &Site) -> u64 {
    let pid = site.qemu_at(site.names().0).expect("its QEMU runs");
    let text = fs::read_to_string(format!("/proc/{pid}/ksm_merging_pages")).unwrap_or_default();
    text.trim().parse().unwrap_or(0)
}

/// Whether the kernel may merge pages of the guest's RAM, which may be in pieces: of most of it. Its QEMU has little
/// else.
fn may_be_merged(site: &Site) -> bool {
    let pid = site.qemu_at(site.names().0).expect("its QEMU runs");
    let smaps = fs::read_to_string(format!("/proc/{pid}/smaps")).expect("its mappings");
    let (mut size_kib, mut mergeable_kib) = (0, 0);
    for line in smaps.lines() {
        if let Some(size) = line.strip_prefix("Size:") {
            size_kib = size.trim().trim_end_matches(" kB").parse().expect("a number");
        } else if line.strip_prefix("VmFlags:").is_some_and(|flags| flags.split_whitespace().any(|flag| flag == "mg")) {
            mergeable_kib += size_kib;
        }
    }
    mergeable_kib > site.guest.memory_bytes / 1024 / 2
}

#[test]
fn pages_are_merged_in_the_hosts_trust_group_alone_and_a_guest_moves_while_they_are() {
    let _turn = turn();
    if left_to_another_day(9) || skip_without(&needs::GUEST) {
        return;
    }
    let group = |name: &str| ["--memory-mode", "private", "--trust-group", name].map(str::to_owned).to_vec();
    let plan = Plan { run: group("ours"), ..Plan::small() };
    let mut site = Site::without_guest(&plan);
    ["a", "b"].iter().for_each(|host| site.configure(host, "ksm_group = \"theirs\""));
    site.run(&plan);
    assert!(!may_be_merged(&site), "the kernel may merge pages of a group that the host does not name");
    cli::ask(site.here(), &["stop", &site.guest.name, "--force"]).expect(0, &[]);
    site.eventually("it is gone", || site.state_at("a") == "none");

    let plan = Plan { run: group("theirs"), ..plan };
    site.run(&plan);
    is_private(&site);
    assert!(may_be_merged(&site));
    let Ok(ksm) = Ksm::take() else {
        return println!("skipped: this kernel does not merge equal pages, or does not let this user ask for it");
    };
    ksm.scan().expect("KSM scans");
    for mode in ["hybrid", "precopy", "postcopy"].into_iter().take(times(1, 3)) {
        site.eventually("pages are merged", || merged_pages(&site) > 100);
        let report = site.migrate(&["--mode", mode, "--bandwidth", "60MB"]);
        println!("{mode}: {:?}", report.pages);
        assert_eq!(report.verify.mismatches, 0, "{:?}", report.verify);
        assert!(may_be_merged(&site), "its group goes with it");
        site.checker_is_well();
    }
}
