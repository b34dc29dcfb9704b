use std::process::Command;

use sterna_system_tests::{Point, Proxy, Site, cli};

use crate::with_guest;

/// The policy of normal threads, and the real-time one of haste (`sched(7)`).
const NORMAL: u32 = 0;
const ROUND_ROBIN: u32 = 2;

/// The policies of a process's threads.
fn policies(process: u32) -> Vec<u32> {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    let policy = |task: std::fs::DirEntry| {
        let stat = std::fs::read_to_string(task.path().join("stat")).ok()?;
        // Field 41 (proc_pid_stat(5)); the name's end is the second.
        stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(38)?.parse().ok()
    };
    tasks.filter_map(policy).collect()
}

/// Both daemons' threads and those of every QEMU that is there.
fn all_are_normal(site: &Site) {
    site.eventually("no thread goes before others any more", || {
        let (here, there) = site.names();
        let qemus = [here, there].into_iter().filter_map(|host| site.qemu_at(host));
        let all = qemus.chain([site.daemon_at(here), site.daemon_at(there)]);
        all.flat_map(policies).all(|policy| policy == NORMAL)
    });
}

/// Whether a thread may go before others here. In version 1 of cgroups a group has no time for such threads unless it
/// was given some, where the kernel keeps account of that (`CONFIG_RT_GROUP_SCHED`).
fn may_haste() -> bool {
    let may = Command::new("chrt").args(["--rr", "1", "true"]).status().is_ok_and(|status| status.success());
    if !may {
        println!("skipped: no thread may go before others here");
    }
    may
}

/// Has the guest stop, does this meanwhile, and lets the migration end as it does.
fn in_the_pause(meanwhile: impl FnOnce(&mut Site, &Proxy)) {
    if !may_haste() {
        return;
    }
    with_guest(|site| {
        let there = site.names().1;
        let proxy = Proxy::start(site.here(), site.there());
        proxy.hold(Point::Request("stopped"));
        let attempt = site.begin(Some(&proxy.address), &[]);
        proxy.wait_until_held();
        let waiting = policies(site.qemu_at(there).expect("a QEMU that waits"));
        assert!(waiting.contains(&ROUND_ROBIN), "its threads go first once the guest stops: {waiting:?}");
        meanwhile(site, &proxy);
        drop(attempt.end());
        site.eventually("the guest runs on", || site.state_at(site.names().0) == "running");
        all_are_normal(site);
        site.a_second_attempt_succeeds();
        all_are_normal(site);
    });
}

#[test]
fn no_thread_goes_before_others_once_a_pause_was_cancelled() {
    in_the_pause(|site, proxy| {
        cli::ask(site.here(), &["cancel", &site.guest.name]).expect(0, &[]);
        proxy.release();
    });
}

#[test]
fn no_thread_goes_before_others_once_the_source_daemon_was_killed_in_a_pause_and_is_back() {
    in_the_pause(|site, proxy| {
        let here = site.names().0;
        site.kill_daemon(here);
        proxy.cut();
        site.start_daemon(here);
    });
}

#[test]
fn no_thread_goes_before_others_once_the_destination_daemon_was_killed_in_a_pause_and_is_back() {
    in_the_pause(|site, proxy| {
        let there = site.names().1;
        site.kill_daemon(there);
        proxy.cut();
        site.start_daemon(there);
    });
}
