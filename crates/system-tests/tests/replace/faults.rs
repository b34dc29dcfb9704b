use std::time::Duration;

use sterna_bench::command::{PATIENCE, wait_for};
use sterna_system_tests::needs::times;
use sterna_system_tests::random::Random;
use sterna_system_tests::{Attempt, Site, turn};

use super::{Disks, is_well, left_out, plan, processes, qemus, record, replace, replaced, with_guest, with_guest_in};

/// The longest delay of a blow, microseconds: about what a replacement takes on a machine that is not in a hurry.
const LATEST_US: u64 = 400_000;

fn signal(pid: u32, signal: nix::sys::signal::Signal) {
    let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid.cast_signed()), signal);
}

/// Begins to replace the guest's QEMU.
fn begin(site: &Site, qemu: &std::path::Path) -> Attempt {
    Attempt::run(site.here(), &["replace", &site.guest.name, "--json", "-", "--qemu", &qemu.display().to_string()])
}

/// Which QEMU the record says that the guest may be in next.
fn successor(site: &Site) -> Option<u32> {
    record(site)["succession"]["begun"]["successor"]["pid"].as_u64().map(|pid| pid as u32)
}

/// Begins to replace the guest's QEMU, and stops the new one before it has the guest: it is held there.
fn held(site: &Site, qemu: &std::path::Path) -> (Attempt, u32) {
    loop {
        let mut attempt = begin(site, qemu);
        let seen = wait_for("a new QEMU on record", PATIENCE, || {
            let ended = attempt.has_ended();
            Ok(successor(site).map(Some).or(ended.then_some(None)))
        });
        let Some(found) = seen.expect("a new QEMU") else {
            println!("it has the guest already: nobody looked in time");
            replaced(&attempt.end());
            continue;
        };
        signal(found, nix::sys::signal::Signal::SIGSTOP);
        // What it said before it was stopped may still be on its way.
        std::thread::sleep(Duration::from_millis(200));
        if successor(site) == Some(found) {
            return (attempt, found);
        }
        // It was faster, and has the guest: the next one may not be.
        signal(found, nix::sys::signal::Signal::SIGCONT);
        let _ = attempt.end();
    }
}

#[test]
fn a_new_qemu_that_is_killed_before_it_has_the_guest_leaves_it() {
    new_qemu_dies("shared");
}

/// The new QEMU of a guest with its memory in this mode is killed before it has the guest.
pub fn new_qemu_dies(mode: &str) {
    with_guest_in(mode, |site, disks| {
        let [_, ten] = qemus();
        let former = processes(&site);
        let (attempt, new) = held(&site, &ten);
        signal(new, nix::sys::signal::Signal::SIGKILL);
        attempt.end().expect(1, &["qemu"]);
        if former != processes(&site) {
            println!("it was replaced before one was held");
        }
        is_well(&site, disks);
        let report = replaced(&replace(&site, &["--qemu", &ten.display().to_string(), "--verify"]));
        assert!(report.verify.checked, "{report:#?}");
        is_well(&site, disks);
    });
}

#[test]
fn a_daemon_that_is_killed_while_a_new_qemu_waits_leaves_the_guest_in_its_own() {
    with_guest(|mut site, disks| {
        let [_, ten] = qemus();
        let (attempt, new) = held(&site, &ten);
        let own = record(&site)["process"]["pid"].clone();
        site.kill_daemon("a");
        drop(attempt.end());
        site.start_daemon("a");
        is_well(&site, disks);
        assert_eq!(record(&site)["process"]["pid"], own, "it is in its own QEMU");
        assert!(!processes(&site).contains(&new), "the other one is gone");
        replaced(&replace(&site, &["--qemu", &ten.display().to_string()]));
        is_well(&site, disks);
    });
}

/// The daemon dies at a moment of chance: before, in and after the guest's pause, which is a small part of it all.
#[test]
fn whenever_the_daemon_is_killed_the_guest_is_whole_and_in_one_qemu() {
    daemons_die("shared", 7);
}

/// Daemons die at moments of chance while a guest with its memory in this mode is given another QEMU.
pub fn daemons_die(mode: &str, seed: u64) {
    with_guest_in(mode, |mut site, disks| {
        let qemus = qemus();
        let mut random = Random(seed);
        for number in 0..times(4, 200) {
            let attempt = begin(&site, &qemus[number % 2]);
            let delay = Duration::from_micros(random.below(LATEST_US));
            std::thread::sleep(delay);
            site.kill_daemon("a");
            let met = record(&site)["succession"].as_object().and_then(|met| met.keys().next().cloned());
            drop(attempt.end());
            site.start_daemon("a");
            is_well(&site, disks);
            println!("{number}: the daemon killed after {delay:?}, the record said {met:?}");
        }
    });
}

#[test]
fn a_guest_whose_own_qemu_is_killed_meanwhile_is_gone_and_nothing_of_it_stays() {
    with_guest(|site, _disks| {
        let [_, ten] = qemus();
        let (attempt, new) = held(&site, &ten);
        let own = record(&site)["process"]["pid"].as_u64().expect("its process") as u32;
        signal(own, nix::sys::signal::Signal::SIGKILL);
        signal(new, nix::sys::signal::Signal::SIGCONT);
        attempt.end().expect(4, &["qemu"]);
        is_gone(&site);
    });
}

/// Nothing is left of the guest, which has ended.
fn is_gone(site: &Site) {
    site.eventually("nothing is left of the guest", || {
        processes(site).is_empty()
            && sterna_system_tests::site::files(site.here()).is_empty()
            && site.state_at("a") == "none"
    });
}

/// Either QEMU dies at a moment of chance: before, in and after the pause, in which the guest changes from the one to
/// the other. It ends with the one that has it, and with no other.
#[test]
fn whichever_qemu_is_killed_and_whenever_the_guest_is_whole_in_the_other_or_ended_with_its_own() {
    qemus_die("shared", 13);
}

/// QEMUs die at moments of chance while a guest with its memory in this mode is given another one.
pub fn qemus_die(mode: &str, seed: u64) {
    let _turn = turn();
    if left_out() {
        return;
    }
    let (disks, qemus, mut random) = (Disks::make(), qemus(), Random(seed));
    let mut site = None;
    for number in 0..times(4, 100) {
        let now = site.take().unwrap_or_else(|| Site::start(&plan(&disks, mode)));
        let own = processes(&now)[0];
        let mut attempt = begin(&now, &qemus[number % 2]);
        let kills_own = random.below(2) == 0;
        // The new one has the guest soon after it is on record.
        let (victim, latest) = if kills_own {
            (own, LATEST_US)
        } else {
            let seen = wait_for("a new QEMU on record", PATIENCE, || {
                let ended = attempt.has_ended();
                Ok(successor(&now).or_else(|| ended.then(|| processes(&now)[0])))
            });
            (seen.expect("a new QEMU"), LATEST_US / 8)
        };
        let delay = Duration::from_micros(random.below(latest));
        std::thread::sleep(delay);
        signal(victim, nix::sys::signal::Signal::SIGKILL);
        let answer = attempt.end();
        let which = if kills_own { "its own" } else { "the new" };
        println!("{number}, {mode}: {which} QEMU killed after {delay:?}: {} {}", answer.code, answer.stderr.trim());
        let lives = match (answer.code, kills_own) {
            // It had changed over, or not yet.
            (0, true) | (1, false) => true,
            (0, false) | (4, _) => false,
            _ => panic!("{answer:#?}"),
        };
        if lives {
            is_well(&now, &disks);
            site = Some(now);
        } else {
            is_gone(&now);
        }
    }
}
