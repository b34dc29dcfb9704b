//! Faults while a guest's pages follow it. Up to the point of no return the guest runs on at the source; from then on
//! it runs at the destination, waits where it touches a page that is not there, and every page arrives, however often
//! hosts lose each other (`docs/failure.md`).
//!
//! All tests of this program share one guest, one after the other: each leaves it at work, wherever it then is.

/// Daemons that are killed and started again.
mod daemons;
/// Faults around the point of no return.
mod handover;
/// The link is lost and restored.
mod link;

use serde_json::Value;
use sterna_api::{Report, Status};
use sterna_system_tests::needs::left_to_another_day;
use sterna_system_tests::{Answer, Point, Proxy, Site, cli, needs, on_shared_site, skip_without};

/// The push lasts for seconds, and no page is copied before.
pub const SLOW: [&str; 4] = ["--mode", "postcopy", "--postcopy-bandwidth", "32MB"];

/// Runs a test with the guest that all of them share, where that can be had.
pub fn with_guest(test: impl FnOnce(&mut Site)) {
    if !left_to_another_day(9) && !skip_without(&needs::GUEST) {
        on_shared_site(test);
    }
}

/// The link is lost when the migration has come to a point, and stays so. The guest is the destination's by then.
pub fn lose_at(site: &Site, proxy: &Proxy, point: Point) {
    proxy.hold(point);
    proxy.up();
    proxy.wait_until_held();
    proxy.down();
    println!("lost at {point:?}");
    site.stands_still_at(site.names().0);
}

/// The daemon of a host says that it waits, and how long it has: in words, and where a program reads it.
pub fn says_that_it_waits(site: &Site, host: &str) {
    site.eventually("it says what it waits for", || {
        let answer = cli::ask(site.host(host), &["show", &site.guest.name, "--json"]);
        let vm: Value = serde_json::from_str(&answer.stdout).unwrap_or_default();
        let (leaving, arriving) = (&vm["migration"], &vm["arriving"]);
        let source = leaving["waiting_for"].is_string() && leaving["waiting_ms"].is_number();
        // A source that was started again has first to hear whose the guest is.
        let asks = vm["state"] == "waiting-for-peer";
        source || asks || (arriving["waiting_ms"].is_number() && arriving["missing_pages"].as_u64() > Some(0))
    });
    let told = site.told_at(host).to_lowercase();
    assert!(told.contains("waiting for"), "{told}");
}

/// The guest belongs to the other host, wholly: it runs there with all of its pages, and the host that it left has
/// nothing of it.
pub fn arrives(site: &mut Site) {
    site.moved();
    site.nothing_is_left_there();
    let (here, _) = site.names();
    site.eventually("it runs there", || site.state_at(here) == "running");
    site.checker_is_well();
    site.ran_on_one_host_at_a_time();
}

/// A migration that was interrupted and ended as it should: its report.
pub fn completes(site: &mut Site, answer: &Answer) -> Report {
    answer.expect(0, &[]);
    let report = answer.report().unwrap_or_else(|| panic!("no report: {answer:#?}"));
    assert_eq!(report.status, Status::Completed, "{report:#?}");
    assert_eq!(report.verify.mismatches, 0, "{:?}", report.verify);
    let postcopy = &report.postcopy;
    assert!(postcopy.interruptions > 0 && postcopy.interrupted_ms > 0.0, "{postcopy:?}");
    assert!(postcopy.interrupted_ms <= report.total_ms, "{postcopy:?}");
    arrives(site);
    report
}

/// The command line lost its daemon, or found one that was started since; the pages are not its business.
pub fn lost_its_daemon(answer: &Answer) {
    if answer.code == 1 {
        answer.expect(1, &["there is no migration", "until the daemon restarts"]);
    } else {
        answer.expect(5, &["daemon"]);
    }
}
