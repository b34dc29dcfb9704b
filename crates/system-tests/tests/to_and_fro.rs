//! A guest that checks its own memory is moved to and fro many times in a row, and nothing adds up on the hosts.

use sterna_bench::tools;
use sterna_system_tests::census::{left_of_lab, ram_bytes};
use sterna_system_tests::needs::{left_to_another_day, times};
use sterna_system_tests::{Census, Plan, Site, needs, skip_without, turn};

/// How many migrations in a row: from the environment, else few enough for every day.
fn migrations() -> usize {
    std::env::var("STERNA_ROUND_TRIPS").ok().and_then(|text| text.parse().ok()).unwrap_or(10)
}

/// Moves the guest `count` times (an even number: it ends where it began), alternating one and four streams.
fn to_and_fro(plan: &Plan, mode: &str, count: usize) {
    let count = count.next_multiple_of(2);
    let mut site = Site::start(plan);
    // The first trip there and back brings what stays on purpose: caches, threads of the daemon's pool.
    site.migrate(&["--mode", mode]);
    site.migrate(&["--mode", mode, "--streams", "4"]);
    let before = ["a", "b"].map(|host| (host, Census::settled(&site, host)));
    for number in 0..count {
        // Both numbers of streams in both directions.
        let streams = if (number + number / 2) % 2 == 0 { "1" } else { "4" };
        let report = site.migrate(&["--mode", mode, "--streams", streams]);
        assert_eq!((report.mode.as_str(), report.pages.duplicate), (mode, 0), "{report:#?}");
        site.checker_is_well();
        println!(
            "{number}: {} {} to {}, {streams} streams: {:.0} ms, paused {:.1} ms (comparing {:.1} ms), {} pages faulted",
            site.names().1,
            report.source.qemu,
            report.destination.qemu,
            report.total_ms,
            report.downtime_ms,
            report.downtime.verify_ms,
            report.pages.faulted
        );
    }
    for (host, before) in before {
        before.is_all_of(&site, host);
    }
    assert_eq!(ram_bytes(site.there()), 0, "no page is left on the host that the guest is not on");
    let name = site.lab.name().to_owned();
    drop(site);
    assert_eq!(left_of_lab(&name), Vec::<String>::new());
}

#[test]
fn a_guest_survives_many_migrations_in_a_row_and_nothing_is_left_over() {
    let _turn = turn();
    if !skip_without(&needs::GUEST) {
        to_and_fro(&Plan::small(), "precopy", migrations());
    }
}

#[test]
fn a_versioned_machine_goes_to_and_fro_between_qemu_7_2_and_10_0() {
    let _turn = turn();
    if left_to_another_day(9) || skip_without(&[&needs::GUEST[..], &[tools::qemu_10_0]].concat()) {
        return;
    }
    let qemu = [tools::qemu_7_2().unwrap(), tools::qemu_10_0().unwrap()];
    // A model that is the same in both: `max` means what each version can do.
    to_and_fro(&Plan { qemu, cpu: Some("qemu64".into()), ..Plan::small() }, "precopy", migrations());
}

#[test]
fn a_guest_under_load_survives_many_hybrid_migrations_in_a_row_and_nothing_is_left_over() {
    let _turn = turn();
    if !left_to_another_day(9) && !skip_without(&needs::GUEST) {
        let jobs = "checker:--mib,24,--rate,8;dirtier:--mib,48,--rate,24".into();
        to_and_fro(&Plan { jobs, ..Plan::small() }, "hybrid", times(4, 100));
    }
}
