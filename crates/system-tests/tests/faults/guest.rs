use std::io::Write;
use std::os::unix::net::UnixStream;

use sterna_api::Phase;
use sterna_bench::process::ProcessId;
use sterna_system_tests::{Plan, Site, needs, skip_without, turn};

use crate::SLOW;

/// Ends the guest while it is on its way: a guest of its own, as it does not come back. Then another of its name takes
/// its place.
fn ended_on_the_way(end: impl FnOnce(&Site, &mut UnixStream), words: &[&str]) {
    if skip_without(&needs::GUEST) {
        return;
    }
    let _turn = turn();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("monitor");
    let more = vec!["-monitor".into(), format!("unix:{},server=on,wait=off", path.display())];
    let plan = Plan { more, ..Plan::small() };
    let mut site = Site::start(&plan);
    // Before the destination's QEMU listens at the same path.
    let mut monitor = UnixStream::connect(&path).unwrap();
    // So slow that the guest ends in the first round, however long it takes.
    let attempt = site.begin(None, &SLOW);
    site.wait_for_phase(Phase::Precopy, |progress| progress.bytes_on_wire > 1 << 18);
    end(&site, &mut monitor);
    attempt.end().expect(4, words);
    site.eventually("no host has anything of it", || {
        ["a", "b"].iter().all(|host| site.qemu_at(host).is_none() && site.state_at(host) == "none")
    });
    site.nothing_is_left_there();

    std::fs::remove_file(&site.guest.console).unwrap();
    site.run(&plan);
    site.migrate(&[]);
    site.checker_is_well();
}

#[test]
fn a_guest_that_switches_itself_off_on_the_way_is_gone_and_said_to_be() {
    ended_on_the_way(|_, monitor| monitor.write_all(b"system_powerdown\n").unwrap(), &["switched itself off", "gone"]);
}

#[test]
fn a_guest_whose_qemu_dies_on_the_way_is_gone_and_said_to_be() {
    let kill = |site: &Site| ProcessId::of(site.qemu_at("a").unwrap()).unwrap().kill();
    ended_on_the_way(|site, _| kill(site), &["qemu", "gone"]);
}
