//! Guests in huge pages: huge at rest, exact to the small page while they move, huge again after a cancel and where
//! they have come to.

use sterna_api::{MemoryMode, Vm};
use sterna_bench::tools;
use sterna_system_tests::member::Member;
use sterna_system_tests::needs::left_to_another_day;
use sterna_system_tests::{Plan, Site, cli, needs, skip_without, turn};

const MIB: u64 = 1 << 20;

fn shown(site: &Site) -> Vm {
    let answer = cli::ask(site.here(), &["show", &site.guest.name, "--json"]);
    serde_json::from_str(&answer.stdout).unwrap_or_else(|error| panic!("{error}: {answer:#?}"))
}

/// Waits until so much of the guest is in huge pages, percent of what it has; how much that is, bytes.
fn wait_until_huge(site: &Site, percent: u64) -> u64 {
    site.eventually("the guest is in huge pages", || {
        let vm = shown(site);
        vm.huge_bytes * 100 >= vm.allocated_bytes * percent
    });
    let vm = shown(site);
    println!("{} MiB of {} MiB are in huge pages", vm.huge_bytes / MIB, vm.allocated_bytes / MIB);
    vm.huge_bytes
}

fn has_huge_pages() -> bool {
    let has = std::path::Path::new("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").exists();
    if !has {
        println!("skipped: this kernel has no huge pages");
    }
    has
}

#[test]
fn a_guest_is_in_huge_pages_at_rest_and_again_after_a_cancel_an_estimate_and_a_migration_in_each_mode() {
    let _turn = turn();
    if left_to_another_day(5) || skip_without(&needs::GUEST) || !has_huge_pages() {
        return;
    }
    let jobs = "checker:--mib,24,--rate,8;dirtier:--mib,48,--rate,24".into();
    let plan = Plan { jobs, run: Vec::new(), ..Plan::small() };
    let mut site = Site::without_guest(&plan);
    site.run(&plan);
    let at_rest = wait_until_huge(&site, 95);
    assert!(at_rest > 64 * MIB, "the guest has all of its memory in huge pages: {at_rest}");
    let estimate = cli::ask(site.here(), &["estimate", &site.guest.name, "--bandwidth", "100MB"]);
    estimate.expect(0, &[]);
    wait_until_huge(&site, 95);
    let attempt = site.begin(None, &["--mode", "precopy", "--bandwidth", "4MB"]);
    site.eventually("pages are watched one by one", || shown(&site).huge_bytes == 0);
    cli::ask(site.here(), &["cancel", &site.guest.name]).expect(0, &[]);
    assert_eq!(attempt.end().code, 3);
    wait_until_huge(&site, 95);
    site.checker_is_well();
    for mode in ["precopy", "postcopy", "hybrid", "auto"] {
        site.migrate(&["--mode", mode]);
        site.checker_is_well();
        let there = wait_until_huge(&site, 50);
        println!("{mode}: {} MiB in huge pages, {} at rest before", there / MIB, at_rest / MIB);
    }
}

#[test]
fn a_guest_that_is_to_have_small_pages_has_no_others_wherever_it_goes() {
    let _turn = turn();
    if left_to_another_day(5) || skip_without(&needs::GUEST) {
        return;
    }
    let plan = Plan { run: vec!["--huge-pages".into(), "off".into()], ..Plan::small() };
    let mut site = Site::without_guest(&plan);
    site.run(&plan);
    // Longer than it takes until a machine at rest is looked at.
    std::thread::sleep(std::time::Duration::from_secs(3));
    assert_eq!(shown(&site).huge_bytes, 0);
    site.migrate(&[]);
    std::thread::sleep(std::time::Duration::from_secs(3));
    assert_eq!(shown(&site).huge_bytes, 0, "nor where it has gone");
}

/// Another QEMU on the same file finds it as huge as it was. A fork makes private memory of it, which is in small pages
/// from then on, the source's as its clones': what they have in common is the file, in huge pages, that nobody writes.
#[test]
fn a_guest_in_huge_pages_gets_another_qemu_and_its_clones_begin_with_what_it_has_in_them() {
    let _turn = turn();
    if left_to_another_day(5) || skip_without(&[&needs::GUEST[..], &[tools::qemu_10_0]].concat()) || !has_huge_pages() {
        return;
    }
    let plan = Plan { jobs: "checker:--mib,24,--rate,8;dirtier:--mib,48,--rate,24".into(), ..Plan::small() };
    let site = Site::without_guest(&plan);
    let origin = Member::new(&site, "origin");
    origin.run(&plan, &[], &[]);
    let is_huge = |name: &str| {
        let vm = Member::new(&site, name).shown("a");
        vm.huge_bytes * 100 >= vm.allocated_bytes * 95 && vm.huge_bytes > 64 * MIB
    };
    let ask = |words: &[&str]| cli::ask(site.host("a"), words).expect(0, &[]).stdout.clone();
    for qemu in [tools::qemu_10_0(), tools::qemu_7_2()] {
        site.eventually("it is in huge pages", || is_huge("origin"));
        let qemu = qemu.expect("looked for before").display().to_string();
        ask(&["replace", "origin", "--verify", "--qemu", &qemu]);
        origin.is_well();
    }
    site.eventually("it is in huge pages again", || is_huge("origin"));
    ask(&["fork", "origin", "one", "two", "--hold", "1"]);
    // What each has written since is copied, and common to its clones.
    ask(&["fork", "one", "three"]);
    ask(&["run", "four", "--from-template", "origin", "--detach"]);
    let all = ["origin", "one", "two", "three", "four"];
    for name in all {
        let member = Member::new(&site, name);
        member.is_well();
        assert_eq!(member.shown("a").memory_mode, MemoryMode::Private, "{name}");
    }
    ask(&["replace", "two", "--verify"]);
    for name in ["two", "four"] {
        Member::new(&site, name).migrate(&["--verify"]).expect(0, &[]);
    }
    ask(&["stop", "origin", "--force"]);
    all[1..].iter().for_each(|name| Member::new(&site, name).is_well());
}
