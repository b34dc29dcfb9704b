//! Faults while a gang moves: every guest goes on whole on one host, and a second attempt brings the others after it.

use sterna_bench::ksm::Ksm;
use sterna_system_tests::gang::{GangSite, statuses};
use sterna_system_tests::needs::left_to_the_proofs;
use sterna_system_tests::{Point, Proxy, needs, skip_without, turn};

const ALL: [&str; 3] = ["g0", "g1", "g2"];
/// None of its pages is ever equal to another guest's.
const JOBS: &str = "checker:--mib,8,--rate,2,--seed,1{number}";
/// Pages are missing for seconds.
const SLOW: [&str; 4] = ["--mode", "postcopy", "--postcopy-bandwidth", "24MB"];

/// Whose daemon is killed.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Daemon {
    Source,
    Destination,
}

/// When.
#[derive(Debug, Clone, Copy)]
enum Moment {
    /// Every member's pages are on their way, and no guest has stopped.
    Precopy,
    /// The first member's message is on its way; the others are where they are.
    At(Point, &'static [&'static str]),
    /// Every guest runs there, and pages are missing.
    Postcopy,
}

/// Guests that share pages, on host `a`.
fn with_gang(test: impl FnOnce(GangSite)) {
    let _turn = turn();
    if skip_without(&needs::GUEST) {
        return;
    }
    let Ok(ksm) = Ksm::take() else {
        return println!("skipped: this kernel does not merge equal pages, or does not let this user ask for it");
    };
    let site = GangSite::start(3, JOBS);
    ksm.settle(std::time::Duration::from_secs(600), || Ok(site.footprint().frames)).expect("merged");
    test(site);
}

/// Kills a daemon with -9 while all move from one host to the other, starts it again, and brings all of them there.
fn killed(site: &mut GangSite, daemon: Daemon, moment: Moment, hosts: [&str; 2]) {
    println!("{daemon:?} killed, {moment:?}");
    let [from, to] = hosts;
    let victim = if daemon == Daemon::Source { from } else { to };
    let host = |name: &str| site.lab.host(name).expect("a host");
    let proxy = Proxy::start(host(from), host(to));
    let options: &[&str] = match moment {
        Moment::Precopy => &["--mode", "precopy", "--bandwidth", "2MB"],
        Moment::At(point, options) => {
            proxy.hold(point);
            options
        }
        Moment::Postcopy => &SLOW,
    };
    let attempt = site.begin(&ALL, from, &proxy.address, options);
    match moment {
        Moment::Precopy => site.all_are_in("precopy", &ALL, from),
        Moment::At(..) => proxy.wait_until_held(),
        Moment::Postcopy => site.all_are_in("postcopy", &ALL, from),
    }
    site.lab.kill_daemon(victim);
    proxy.cut();
    site.lab.start_daemon(victim).expect("it comes back");
    // How it ends depends on who was how far; where the guests are is what counts.
    println!("{}", attempt.end().stderr);
    site.gather(&ALL, hosts);
}

#[test]
fn a_daemon_killed_while_a_gang_moves_costs_no_guest_anything() {
    with_gang(|mut site| {
        killed(&mut site, Daemon::Destination, Moment::Precopy, ["a", "b"]);
        killed(&mut site, Daemon::Source, Moment::At(Point::Request("commit"), &["--mode", "precopy"]), ["b", "a"]);
        killed(&mut site, Daemon::Destination, Moment::Postcopy, ["a", "b"]);
    });
}

#[test]
fn whichever_daemon_is_killed_in_whichever_phase_a_gang_arrives_in_the_end() {
    if left_to_the_proofs() {
        return;
    }
    let points = [
        Moment::Precopy,
        Moment::At(Point::Request("join"), &["--mode", "precopy"]),
        Moment::At(Point::Reply("propose"), &["--mode", "hybrid"]),
        Moment::At(Point::Request("round-end"), &["--mode", "hybrid"]),
        Moment::At(Point::Request("final-round-end"), &["--mode", "precopy"]),
        Moment::At(Point::Reply("load"), &["--mode", "precopy"]),
        Moment::At(Point::Reply("load-postcopy"), &["--mode", "hybrid"]),
        Moment::At(Point::Request("commit"), &["--mode", "hybrid"]),
        Moment::At(Point::Reply("commit"), &["--mode", "precopy"]),
        Moment::At(Point::Reply("commit"), &SLOW),
        Moment::Postcopy,
        Moment::At(Point::Request("complete"), &["--mode", "postcopy"]),
    ];
    with_gang(|mut site| {
        let mut hosts = ["a", "b"];
        for moment in points {
            for daemon in [Daemon::Source, Daemon::Destination] {
                killed(&mut site, daemon, moment, hosts);
                hosts.reverse();
            }
        }
    });
}

/// Kills the QEMU of a guest on a host.
fn kill_qemu(site: &GangSite, name: &str, host: &str) {
    let pid = site.shown(name, host)["pid"].as_u64().and_then(|pid| i32::try_from(pid).ok()).expect("its process");
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL).expect("it runs");
}

/// The pages of a guest in private memory end with the QEMU that it left, and the guest with the QEMU that runs it:
/// what a gang shares is in its pool, and lives on.
#[test]
fn a_qemu_that_ends_while_pages_are_missing_costs_its_own_guest_alone() {
    if left_to_the_proofs() {
        return;
    }
    for victim in ["a", "b"] {
        with_gang(|site| {
            let attempt = site.begin(&ALL, "a", &site.lab.host("b").expect("a host").listen(), &SLOW);
            site.all_are_in("postcopy", &ALL, "a");
            kill_qemu(&site, "g1", victim);
            let ended = statuses(&attempt.end());
            assert_eq!((ended[0].as_str(), ended[2].as_str()), ("completed", "completed"), "{ended:?}");
            assert_ne!(ended[1], "completed");
            site.are_well(&["g0", "g2"]);
        });
    }
}
