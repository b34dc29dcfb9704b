//! Disks that write guest RAM past the page tables, and take their time over it.

use sterna_system_tests::needs::{left_to_another_day, times};
use sterna_system_tests::slow_disk::{SlowDisk, said};
use sterna_system_tests::{Plan, Site, cli, needs, skip_without, turn};

/// Reads wait for long, their pages pinned and zeros, in a guest that has never used its memory: what lands after a
/// page went is found all the same, in every mode. While only pages that had been sent were compared, each of `auto`,
/// `precopy` and `hybrid` lost some 200 pages, every time.
#[test]
fn reads_that_stay_under_way_for_long_into_memory_never_used_arrive_in_every_mode() {
    let _turn = turn();
    if left_to_another_day(9) || skip_without(&needs::GUEST) {
        return;
    }
    // Before the site: what is in it ends with that.
    let disk = match SlowDisk::read_by("native") {
        Ok(disk) => disk,
        Err(why) => return println!("skipped: {why}"),
    };
    for number in 0..times(1, 4) {
        let plan = Plan { memory_bytes: 512 << 20, ..disk.plan() };
        let mut site = Site::without_guest(&plan);
        site.run(&plan);
        for mode in ["auto", "postcopy", "precopy", "hybrid", "stop-and-copy"].into_iter().take(times(2, 5)) {
            disk.is_read_slowly(&site);
            let report = site.migrate(&["--mode", mode]);
            let (total_ms, setup_ms, paused_ms) = (report.total_ms, report.setup_ms, report.downtime_ms);
            let found = report.tracking.untracked_writes;
            println!(
                "{number}, {mode}: {total_ms:.0} ms, set-up {setup_ms:.0}, paused {paused_ms:.0}, {found} found, {:?}",
                report.postcopy
            );
            site.checker_is_well();
        }
        if !said(&site, "DISK ").is_empty() {
            println!(
                "{number}: this machine is so slow that the guest's memory had all been used before the last of them"
            );
        }
        disk.is_right(&site);
    }
}

/// A part of the guest's memory is elsewhere, more and less of it in turn, and reads into what is here take a second: a
/// page that is being read into does not leave.
#[test]
fn what_a_slow_disk_reads_into_a_split_guest_past_its_page_tables_is_there_when_the_guest_looks() {
    let _turn = turn();
    if left_to_another_day(9) || skip_without(&needs::GUEST) {
        return;
    }
    for aio in ["native", "threads"].into_iter().take(times(1, 2)) {
        let disk = match SlowDisk::read_by(aio) {
            Ok(disk) => disk,
            Err(why) => return println!("skipped: {why}"),
        };
        let plan = Plan { hosts: ["a", "b", "c"].map(str::to_owned).into(), ..disk.plan() };
        let mut site = Site::without_guest(&plan);
        for host in ["b", "c"] {
            site.configure(host, "lend_memory = \"400M\"");
        }
        site.run(&plan);
        let split = |site: &Site, here: &str| {
            let memory = ["b", "c"].map(|host| format!("{}=120M", site.host(host).listen()));
            let main = format!("here={here}");
            let words = ["split", &site.guest.name, "--main", &main, "--memory", &memory[0], "--memory", &memory[1]];
            cli::ask(site.here(), &words).expect(0, &[]);
        };
        for here in ["96M", "64M", "128M", "64M"].into_iter().take(times(2, 4)) {
            disk.is_read_slowly(&site);
            split(&site, here);
            site.checker_is_well();
        }
        disk.is_right(&site);
        cli::ask(site.here(), &["merge", &site.guest.name]).expect(0, &[]);
        site.checker_is_well();
    }
}
