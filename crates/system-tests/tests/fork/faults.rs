use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sterna_api::VmState;
use sterna_system_tests::member::Member;
use sterna_system_tests::needs::times;
use sterna_system_tests::random::Random;
use sterna_system_tests::{Attempt, Site, cli};

use super::overlays::wait_until_forking;
use super::{are_well, daemon_dies_in, fork, forked, machines, with_origin};

/// The longest delay of a blow, microseconds: about what a fork takes on a machine that is not in a hurry.
const LATEST_US: u64 = 250_000;
/// The longest delay of one that is to meet the pause.
const PAUSE_US: u64 = 20_000;

pub fn stop(site: &Site, name: &str) {
    cli::ask(site.host("a"), &["stop", name, "--force"]).expect(0, &[]);
}

/// The daemon dies at a moment of chance: before, in and after the guest's pause.
#[test]
fn whenever_the_daemon_is_killed_the_source_runs_on_and_clones_are_whole_or_gone() {
    for (mode, seed) in [("shared", 3), ("private", 4)].into_iter().take(times(1, 2)) {
        with_origin(mode, |site| {
            let mut random = Random(seed);
            for number in 0..times(2, 100) {
                let names = [format!("x{number}"), format!("y{number}")];
                let attempt = Attempt::run(site.host("a"), &["fork", "origin", &names[0], &names[1], "--json", "-"]);
                // Every other time in the pause, or soon after.
                let in_pause = number % 2 == 1;
                if in_pause {
                    wait_until_forking(site);
                }
                let delay = Duration::from_micros(random.below(if in_pause { PAUSE_US } else { LATEST_US }));
                std::thread::sleep(delay);
                daemon_dies_in(site, attempt);
                let there = machines(site);
                let when = if in_pause { "after its pause had begun" } else { "after the request" };
                println!("{mode} {number}: the daemon killed {delay:?} {when}, {} clones", there.len() - 1);
                for vm in &there {
                    assert_eq!(vm.state, VmState::Running, "{vm:#?}");
                    Member::new(site, &vm.name).is_well();
                }
                there.iter().filter(|vm| vm.name != "origin").for_each(|vm| stop(site, &vm.name));
                site.eventually("no other QEMU is left", || qemus(site).len() == 1);
            }
            forked(&fork(site, "origin", &["after"]));
            are_well(site, &["origin", "after"]);
        });
    }
}

/// The source's QEMU dies at a moment of chance while its guest is forked: the answer says that it is gone, and its
/// clones are whole or gone, too.
#[test]
fn a_source_whose_qemu_is_killed_while_it_is_forked_is_said_to_be_gone() {
    let mut random = Random(7);
    for number in 0..times(3, 40) {
        with_origin("shared", |site| {
            let origin = Member::new(site, "origin").shown("a").pid;
            let attempt = Attempt::run(site.host("a"), &["fork", "origin", "x", "y", "--json", "-"]);
            let in_pause = number % 2 == 0;
            if in_pause {
                wait_until_forking(site);
            }
            std::thread::sleep(Duration::from_micros(random.below(if in_pause { PAUSE_US } else { LATEST_US })));
            let _ = kill(Pid::from_raw(origin.cast_signed()), Signal::SIGKILL);
            let answer = attempt.end();
            println!("{number}: {}, {}", answer.code, answer.stderr.lines().next().unwrap_or_default());
            site.eventually("the source is gone", || !machines(site).iter().any(|vm| vm.name == "origin"));
            let there: Vec<String> = machines(site).into_iter().map(|vm| vm.name).collect();
            match answer.code {
                // Its guest was two others by then.
                0 => assert_eq!(there.len(), 2),
                // The request came later than the blow.
                _ if answer.stderr.contains("unknown-vm") => assert_eq!(there.len(), 0),
                code => assert_eq!((code, there.len()), (4, 0), "{}", answer.stderr),
            }
            are_well(site, &there.iter().map(String::as_str).collect::<Vec<_>>());
            site.eventually("no other QEMU is left", || qemus(site).len() == there.len());
        });
    }
}

/// A QEMU dies at a moment of chance: a clone's, or the source's after it.
#[test]
fn a_qemu_that_is_killed_while_a_guest_is_forked_takes_no_other_with_it() {
    with_origin("shared", |site| {
        let mut random = Random(5);
        for number in 0..times(2, 100) {
            let names = [format!("x{number}"), format!("y{number}")];
            let before: Vec<u32> = qemus(site);
            let attempt = Attempt::run(site.host("a"), &["fork", "origin", &names[0], &names[1], "--json", "-"]);
            let clone = sterna_bench::command::wait_for("a clone's QEMU", sterna_system_tests::PATIENCE, || {
                Ok(qemus(site).into_iter().find(|pid| !before.contains(pid)))
            });
            let clone = clone.expect("a clone's QEMU");
            std::thread::sleep(Duration::from_micros(random.below(LATEST_US)));
            let _ = kill(Pid::from_raw(clone.cast_signed()), Signal::SIGKILL);
            let answer = attempt.end();
            println!("{number}: {}", answer.stderr.lines().next().unwrap_or_default());
            site.eventually("who was killed is gone", || !machines(site).iter().any(|vm| vm.pid == clone));
            let there: Vec<String> = machines(site).into_iter().map(|vm| vm.name).collect();
            are_well(site, &there.iter().map(String::as_str).collect::<Vec<_>>());
            assert!(there.contains(&"origin".to_owned()));
            there.iter().filter(|name| *name != "origin").for_each(|name| stop(site, name));
        }
        forked(&fork(site, "origin", &["orphan"]));
        let origin = Member::new(site, "origin").shown("a").pid;
        let _ = kill(Pid::from_raw(origin.cast_signed()), Signal::SIGKILL);
        site.eventually("the source is gone", || machines(site).len() == 1);
        are_well(site, &["orphan"]);
    });
}

/// The QEMUs of host `a`.
pub fn qemus(site: &Site) -> Vec<u32> {
    let processes = site.host("a").group.processes();
    let name = |pid| std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    processes.into_iter().map(|process| process.pid).filter(|pid| name(*pid).starts_with("qemu")).collect()
}
