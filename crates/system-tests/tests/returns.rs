//! Guests that come back to a host which has kept what their memory was.

use serde_json::Value;
use sterna_system_tests::census::ram_bytes;
use sterna_system_tests::gang::GangSite;
use sterna_system_tests::needs::{left_to_another_day, left_to_the_proofs};
use sterna_system_tests::{Plan, Point, Proxy, Site, cli, needs, skip_without, turn};

const KEEP: &str = "keep_departed = \"1h\"";

/// Two hosts that keep what leaves them, and a guest.
fn site(plan: &Plan) -> Site {
    let mut site = Site::start(plan);
    ["a", "b"].iter().for_each(|host| site.configure(host, KEEP));
    site
}

/// A site for a test of one guest; `None` where it is skipped.
fn with_guest(test: impl FnOnce(&mut Site)) {
    let _turn = turn();
    if !left_to_another_day(12) && !skip_without(&needs::GUEST) {
        test(&mut site(&Plan::small()));
    }
}

/// The machines of which a host keeps something.
fn kept_at(site: &Site, host: &str) -> String {
    let shown = cli::ask(site.host(host), &["ps"]).stdout;
    shown.lines().find(|line| line.starts_with("kept of")).unwrap_or_default().to_owned()
}

/// Goes to and fro in these modes. On the way back, and every way after it, most pages are not sent. How many bytes
/// that saves depends on the machine: the slower a migration is, the more the guest writes meanwhile.
fn goes_to_and_fro(plan: &Plan) {
    let _turn = turn();
    if left_to_another_day(12) || skip_without(&needs::GUEST) {
        return;
    }
    let mut site = site(plan);
    let first = site.migrate(&[]);
    assert_eq!(first.pages.shared_reference, 0, "{first:#?}");
    assert!(kept_at(&site, "a").contains(&site.guest.name), "{}", kept_at(&site, "a"));
    let ways: [&[&str]; 5] = [
        &["--mode", "precopy"],
        &["--mode", "postcopy"],
        &["--mode", "hybrid", "--streams", "2"],
        &["--compress", "lz4", "--streams", "2"],
        &["--delta", "xbzrle", "--mode", "precopy"],
    ];
    for way in ways {
        let report = site.migrate(way);
        site.checker_is_well();
        let share = report.bytes_on_wire as f64 / first.bytes_on_wire as f64;
        let (references, pages) = (report.pages.shared_reference, report.ram.allocated_pages);
        println!("{way:?}: {share:.3} of the bytes, {references} of {pages} pages, set-up {:.0} ms", report.setup_ms);
        assert!(references > pages / 2, "{share}: {report:#?}");
        // What was kept of it is dropped where it is again.
        let (here, there) = site.names();
        assert_eq!(kept_at(&site, here), "");
        assert!(kept_at(&site, there).contains(&site.guest.name));
    }
    // Without sharing, it all goes.
    let all = site.migrate(&["--preserve-sharing", "off"]);
    assert_eq!(all.pages.shared_reference, 0, "{all:#?}");
}

#[test]
fn a_guest_in_shared_memory_that_goes_to_and_fro_is_sent_what_it_has_changed() {
    goes_to_and_fro(&Plan::small());
}

#[test]
fn a_guest_in_private_memory_that_goes_to_and_fro_is_sent_what_it_has_changed() {
    goes_to_and_fro(&Plan::private());
}

#[test]
fn what_is_kept_goes_on_demand_with_its_time_and_before_memory_gets_short() {
    with_guest(|site| {
        let kept = |site: &Site, host| (kept_at(site, host).is_empty(), ram_bytes(site.host(host)) == 0);
        site.migrate(&[]);
        assert_eq!(kept(site, "a"), (false, false));
        let answer = cli::ask(site.host("a"), &["forget"]);
        answer.expect(0, &[]);
        assert!(answer.stdout.contains(&site.guest.name), "{answer:?}");
        assert_eq!(kept(site, "a"), (true, true));
        // It comes back as if it had never been here.
        let report = site.migrate(&[]);
        assert_eq!(report.pages.shared_reference, 0, "{report:#?}");
        site.configure("a", "keep_departed = \"2s\"");
        site.migrate(&[]);
        site.eventually("its time is over", || kept(site, "a") == (true, true));
        // A floor that no host has: there is always too little.
        site.configure("b", "keep_departed = \"1h\"\nmemory_floor = \"1T\"");
        site.migrate(&[]);
        site.eventually("memory is short", || kept(site, "b") == (true, true));
        site.checker_is_well();
    });
}

/// Whoever has no ticket gets nothing, whatever it calls itself, and a ticket is good for one return.
#[test]
fn another_machine_of_the_same_name_is_offered_nothing() {
    with_guest(|site| {
        site.migrate(&[]);
        cli::ask(site.here(), &["stop", &site.guest.name, "--force"]).expect(0, &[]);
        site.run(&Plan::small());
        let report = site.migrate(&[]);
        assert_eq!(report.pages.shared_reference, 0, "{report:#?}");
        site.checker_is_well();
    });
}

/// Kills a host's daemon with -9 while a message of a return is held, and starts it again.
fn killed_at(site: &mut Site, source: bool, point: Point, options: &[&str]) {
    println!("{} killed at {point:?}", if source { "source" } else { "destination" });
    let (here, there) = site.names();
    let victim = if source { here } else { there };
    let proxy = Proxy::start(site.here(), site.there());
    proxy.hold(point);
    let attempt = site.begin(Some(&proxy.address), options);
    proxy.wait_until_held();
    site.kill_daemon(victim);
    proxy.cut();
    site.start_daemon(victim);
    println!("{}", attempt.end().stderr);
    // Which of them has it now depends on who was how far.
    let on = |site: &Site, host: &str, other: &str| site.state_at(host) == "running" && site.state_at(other) == "none";
    site.eventually("it runs on one host", || on(site, here, there) || on(site, there, here));
    if on(site, there, here) {
        site.moved();
    }
    site.nothing_is_left_there();
    site.checker_is_well();
    // Both keep again, and it goes on to and fro.
    site.migrate(&[]);
    let report = site.migrate(&[]);
    assert!(report.pages.shared_reference > 1000, "{report:#?}");
    site.checker_is_well();
}

#[test]
fn a_daemon_killed_while_a_guest_returns_costs_the_guest_nothing() {
    with_guest(|site| {
        site.migrate(&[]);
        killed_at(site, false, Point::Request("propose"), &[]);
        killed_at(site, true, Point::Request("commit"), &["--mode", "precopy"]);
        killed_at(site, false, Point::Request("round-end"), &["--mode", "hybrid"]);
    });
}

#[test]
fn whichever_daemon_is_killed_in_whichever_phase_a_guest_that_returns_goes_on() {
    if left_to_the_proofs() {
        return;
    }
    let points: [(Point, &[&str]); 8] = [
        (Point::Request("tickets"), &[]),
        (Point::Reply("tickets"), &[]),
        (Point::Request("offers"), &[]),
        (Point::Reply("propose"), &[]),
        (Point::Request("final-round-end"), &["--mode", "precopy"]),
        (Point::Reply("load-postcopy"), &["--mode", "postcopy"]),
        (Point::Reply("commit"), &["--mode", "hybrid"]),
        (Point::Request("complete"), &["--mode", "postcopy"]),
    ];
    with_guest(|site| {
        site.migrate(&[]);
        for (point, options) in points {
            killed_at(site, true, point, options);
            killed_at(site, false, point, options);
        }
    });
}

#[test]
fn a_gang_that_returns_three_times_is_sent_what_it_has_changed_and_shares_as_before() {
    let _turn = turn();
    if left_to_another_day(12) || skip_without(&needs::GUEST) {
        return;
    }
    let mut site = GangSite::that_keeps(3, "checker:--mib,16,--rate,2,--seed,1{number}");
    let mut first = None;
    for mode in ["--mode precopy", "--mode precopy", "--mode postcopy", "--mode hybrid"] {
        let before = site.footprint();
        let moved = site.migrate(mode, true);
        site.checkers_are_well();
        let sum = |of: fn(&Value) -> &Value| moved.iter().filter_map(|one| of(&one.report).as_u64()).sum::<u64>();
        let bytes = sum(|report| &report["bytes_on_wire"]);
        let references = sum(|report| &report["pages"]["shared_reference"]);
        // However often they went.
        let sent = sum(|report| &report["ram"]["allocated_pages"]).saturating_sub(references);
        let (first_bytes, first_sent) = *first.get_or_insert((bytes, sent));
        let share = bytes as f64 / first_bytes as f64;
        println!("{mode}: {before:?} -> {:?}, {share:.3} of the bytes, {sent} pages sent", site.footprint());
        assert!(sent == first_sent || sent <= first_sent / 2, "{mode}: {sent} pages, {first_sent} before");
    }
}
