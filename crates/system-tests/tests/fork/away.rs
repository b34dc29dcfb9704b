//! Clones on other hosts: they run there before their memory is there, and whatever is lost or ends meanwhile, each
//! gets every page as it was, or is gone.

use std::collections::HashSet;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sterna_api::{Vm, VmState};
use sterna_bench::footprint;
use sterna_system_tests::cli::limit_bandwidth;
use sterna_system_tests::member::Member;
use sterna_system_tests::needs::times;
use sterna_system_tests::random::Random;
use sterna_system_tests::site::files;
use sterna_system_tests::{Answer, Attempt, Plan, Proxy, Site, cli};

use super::{daemon_dies_in, forked, machines, plan, with_origin_of};

/// So slowly go pages that are to be missing for a while, bytes per second.
const SLOW: u64 = 4 << 20;
/// The longest delay of a blow, microseconds.
pub const LATEST_US: u64 = 500_000;

fn on_three_hosts() -> Plan {
    Plan { hosts: ["a", "b", "c"].map(str::to_owned).into(), ..plan() }
}

pub fn fork_to(site: &Site, name: &str, clones: &[&str], to: &[&str]) -> Answer {
    let to: Vec<&str> = to.iter().flat_map(|to| ["--to", to]).collect();
    cli::ask(site.host("a"), &[&["fork", name, "--json", "-"], clones, &to].concat())
}

fn at(site: &Site, host: &str) -> Vec<Vm> {
    let answer = cli::ask(site.host(host), &["ps", "--json"]);
    serde_json::from_str(&answer.stdout).unwrap_or_else(|error| panic!("{error}: {answer:#?}"))
}

pub fn stop_at(site: &Site, host: &str, name: &str) {
    cli::ask(site.host(host), &["stop", name, "--force"]).expect(0, &[]);
}

/// The source's host has nothing of these clones any more: all of their pages are where they are.
pub fn have_all(site: &Site, clones: &[&str]) {
    site.eventually("the clones have all of their pages", || {
        let left = machines(site);
        let named = |name: &str| {
            let path = |path: &std::path::PathBuf| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            files(site.host("a")).iter().map(path).any(|file| file == name || file.starts_with(&format!("{name}-")))
        };
        !clones.iter().any(|clone| named(clone) || left.iter().any(|vm| vm.name == *clone))
    });
}

/// A clone at host `b` runs, or is held, while pages of it are missing.
fn misses_pages(site: &Site, name: &str) {
    // It belongs there a moment after the fork's end, or after a daemon's start.
    site.eventually("it runs there while pages are missing", || {
        let there = at(site, "b").into_iter().find(|vm| vm.name == name);
        let there = there.unwrap_or_else(|| panic!("'{name}' is not there"));
        assert!(there.arriving.is_some() || there.state != VmState::Running, "its pages are there already: {there:#?}");
        there.arriving.is_some_and(|arriving| arriving.missing_pages > 0)
    });
}

pub fn are_well(site: &Site, names: &[&str]) {
    names.iter().for_each(|name| Member::new(site, name).is_well());
}

/// The map of a guest in shared memory goes, and then the copy of one in private memory that has been forked before.
#[test]
fn clones_on_two_other_hosts_go_on_each_for_itself_and_share_what_none_has_written() {
    with_origin_of(&["--memory-mode", "shared"], on_three_hosts, |site| {
        let (b, c) = (site.host("b").listen(), site.host("c").listen());
        let names = ["one", "two", "three", "four", "five", "six"];
        let report = forked(&fork_to(site, "origin", &names, &[&b, &c]));
        assert_eq!((report.clones.len(), report.failed.len(), report.copied_bytes), (6, 0, 0), "{report:#?}");
        let hosts: Vec<_> = report.clones.iter().map(|clone| (clone.vm.as_str(), clone.host.as_deref())).collect();
        for (number, name) in names.iter().enumerate() {
            let host = if number % 2 == 0 { &b } else { &c };
            assert!(hosts.contains(&(*name, Some(host.as_str()))), "{hosts:?}");
        }
        are_well(site, &["origin"]);
        are_well(site, &names);
        have_all(site, &names);
        for (host, on_it) in [("b", ["one", "three", "five"]), ("c", ["two", "four", "six"])] {
            let there = at(site, host);
            assert_eq!(there.iter().map(|vm| vm.name.as_str()).collect::<std::collections::HashSet<_>>(), on_it.into());
            assert!(there.iter().all(|vm| vm.state == VmState::Running && vm.arriving.is_none()), "{there:#?}");
            let ram = |vm: &Vm| footprint::Ram::of(vm.pid, plan().memory_bytes).expect("its RAM");
            let together = footprint::of(&there.iter().map(ram).collect::<Vec<_>>()).expect("their frames").frames;
            let alone = footprint::of(&[ram(&there[0])]).expect("its frames").frames;
            println!("{host}: three have {together} frames, one alone {alone}");
            assert!(together < 2 * alone, "three take as much as two would");
        }
        // What a clone there is, it can give on, and the source has written since.
        let report = forked(&fork_to(site, "origin", &["seven"], &[&b]));
        assert!(report.copied_bytes > 0, "{report:#?}");
        cli::ask(site.host("a"), &["fork", "origin", "eight"]).expect(0, &[]);
        are_well(site, &["origin", "one", "seven", "eight"]);
        have_all(site, &["seven"]);
        let sent = cli::ask(site.host("b"), &["fork", "one", "nine", "--to", &c]);
        sent.expect(0, &[]);
        are_well(site, &["one", "nine", "six"]);
        site.eventually("nine has all of its pages", || at(site, "b").iter().all(|vm| vm.name != "nine"));
        for (host, names) in [
            ("a", &["origin", "eight"][..]),
            ("b", &["one", "three", "five", "seven"]),
            ("c", &["two", "four", "six", "nine"]),
        ] {
            names.iter().for_each(|name| stop_at(site, host, name));
            site.eventually("nothing is left of any", || files(site.host(host)).is_empty());
        }
    });
}

/// Pages are missing while the link is lost and restored, each daemon killed and started again, and the source stopped.
#[test]
fn a_clone_gets_its_pages_whatever_is_lost_meanwhile() {
    for mode in ["shared", "private"] {
        with_origin_of(&["--memory-mode", mode], plan, |site| {
            let proxy = Proxy::start(site.host("a"), site.host("b"));
            limit_bandwidth(site.host("a"), Some(SLOW));
            forked(&fork_to(site, "origin", &["clone"], &[&proxy.address]));
            misses_pages(site, "clone");
            // It is no machine to be forked or moved until it is whole.
            cli::ask(site.host("b"), &["fork", "clone", "x"]).expect(1, &["pages"]);
            let back = site.host("a").listen();
            cli::ask(site.host("b"), &["migrate", "clone", "--to", &back]).expect(1, &["pages"]);
            proxy.down();
            site.eventually("both say what they wait for", || {
                let (here, there) = (Member::new(site, "clone").shown("a"), Member::new(site, "clone").shown("b"));
                here.migration.is_some_and(|migration| migration.waiting_for.is_some())
                    && there.arriving.is_some_and(|arriving| arriving.waiting_ms.is_some())
            });
            proxy.up();
            site.eventually("pages go on", || {
                let shown = Member::new(site, "clone").shown("b");
                shown.arriving.is_none_or(|arriving| arriving.waiting_ms.is_none())
            });
            misses_pages(site, "clone");
            site.kill_daemon("b");
            site.start_daemon("b");
            site.kill_daemon("a");
            site.start_daemon("a");
            limit_bandwidth(site.host("a"), Some(SLOW));
            misses_pages(site, "clone");
            stop_at(site, "a", "origin");
            limit_bandwidth(site.host("a"), None);
            have_all(site, &["clone"]);
            are_well(site, &["clone"]);
            site.eventually("nothing is left of any here", || files(site.host("a")).is_empty());
            stop_at(site, "b", "clone");
            site.eventually("nothing is left of any there", || files(site.host("b")).is_empty());
        });
    }
}

#[test]
fn a_clone_that_ends_while_pages_are_missing_is_forgotten_and_so_is_one_that_is_not_taken() {
    with_origin_of(&["--memory-mode", "shared"], plan, |site| {
        let b = site.host("b").listen();
        let before = files(site.host("a")).len();
        // Its name is taken there, or here; nobody answers; nobody may be named twice.
        Member::new(site, "origin").migrate(&[]).expect(0, &[]);
        cli::ask(site.host("b"), &["migrate", "origin", "--to", &site.host("a").listen()]).expect(0, &[]);
        let other = ["run", "other", "--memory", "32M", "--detach", "--", "-nodefaults", "-display", "none"];
        cli::ask(site.host("b"), &[&other[..], &["-accel", "tcg"]].concat()).expect(0, &[]);
        fork_to(site, "origin", &["x", "other"], &[&b]).expect(1, &["there already is"]);
        stop_at(site, "b", "other");
        fork_to(site, "origin", &["origin"], &[&b]).expect(1, &["there already is"]);
        fork_to(site, "origin", &["x", "y"], &[&b, "127.0.0.1:1"]).expect(1, &[]);
        fork_to(site, "origin", &["x", "y"], &[&b, &b]).expect(2, &["named twice"]);
        are_well(site, &["origin"]);
        assert_eq!(machines(site).len(), 1, "{:#?}", machines(site));
        assert_eq!(files(site.host("a")).len(), before);
        site.eventually("nothing of it is left there", || files(site.host("b")).is_empty());
        limit_bandwidth(site.host("a"), Some(SLOW));
        forked(&fork_to(site, "origin", &["ends", "held", "--paused"], &[&b]));
        ["ends", "held"].into_iter().for_each(|name| misses_pages(site, name));
        let (ends, held) = (Member::new(site, "ends").shown("b"), Member::new(site, "held").shown("b"));
        assert_eq!(held.state, VmState::Paused, "{held:#?}");
        kill(Pid::from_raw(ends.pid.cast_signed()), Signal::SIGKILL).expect("its QEMU ends");
        have_all(site, &["ends"]);
        limit_bandwidth(site.host("a"), None);
        Member::new(site, "held").tell(site.host("b"), "cont");
        are_well(site, &["held", "origin"]);
        have_all(site, &["held"]);
    });
}

/// Forks `origin` into two clones at `b`, with `more` of the command's words. Within `latest_us` the daemon of the
/// source or that of the clones' host dies, in turn. Then `is_whole` looks at each clone that has come, which ends.
/// Returns their names.
pub fn a_daemon_dies(
    site: &mut Site,
    (number, random, latest_us): (usize, &mut Random, u64),
    more: &[&str],
    is_whole: impl Fn(&Site, &str),
) -> HashSet<String> {
    let (b, names) = (site.host("b").listen(), [format!("x{number}"), format!("y{number}")]);
    let words = ["fork", "origin", &names[0], &names[1], "--to", &b, "--json", "-"];
    let attempt = Attempt::run(site.host("a"), &[&words[..], more].concat());
    let delay = Duration::from_micros(random.below(latest_us));
    std::thread::sleep(delay);
    if number % 2 == 0 {
        daemon_dies_in(site, attempt);
    } else {
        site.kill_daemon("b");
        site.start_daemon("b");
        drop(attempt.end());
    }
    have_all(site, &[&names[0], &names[1]]);
    // Whoever comes when its source is gone ends when that is noticed there, and may still be on its way now.
    let mut came = HashSet::new();
    site.eventually("each has come, and is whole, or is gone", || {
        let settled = |vm: &Vm| vm.state != VmState::MigratingIn && vm.arriving.is_none();
        for vm in at(site, "b").into_iter().filter(settled) {
            assert_eq!(vm.state, VmState::Running, "{vm:#?}");
            is_whole(site, &vm.name);
            stop_at(site, "b", &vm.name);
            came.insert(vm.name);
        }
        at(site, "b").is_empty() && files(site.host("b")).is_empty()
    });
    println!("{number}: a daemon killed after {delay:?}, {} clones", came.len());
    came
}

#[test]
fn whichever_daemon_is_killed_the_source_runs_on_and_clones_elsewhere_are_whole_or_gone() {
    with_origin_of(&["--memory-mode", "shared"], plan, |site| {
        let mut random = Random(11);
        for number in 0..times(4, 100) {
            a_daemon_dies(site, (number, &mut random, LATEST_US), &[], |site, name| are_well(site, &[name]));
            are_well(site, &["origin"]);
        }
        let b = site.host("b").listen();
        forked(&fork_to(site, "origin", &["after"], &[&b]));
        are_well(site, &["origin", "after"]);
    });
}
