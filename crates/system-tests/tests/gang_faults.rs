//! Faults while a gang moves: every guest goes on whole on one host, and a second attempt brings the others after it.

use nix::sys::signal::Signal;
use sterna_bench::ksm::Ksm;
use sterna_system_tests::gang::{GangSite, statuses};
use sterna_system_tests::needs::{left_to_another_day, left_to_the_proofs, times};
use sterna_system_tests::{Attempt, Point, Proxy, cli, needs, skip_without, turn};

const ALL: [&str; 6] = ["g0", "g1", "g2", "g3", "g4", "g5"];
/// None of its pages is ever equal to another guest's.
const JOBS: &str = "checker:--mib,8,--rate,2,--seed,1{number}";

const PRECOPY: &[&str] = &["--mode", "precopy"];
const HYBRID: &[&str] = &["--mode", "hybrid"];
const POSTCOPY: &[&str] = &["--mode", "postcopy"];
/// Pages are missing for seconds.
const SLOW: &[&str] = &["--mode", "postcopy", "--postcopy-bandwidth", "24MB"];

/// Whose daemon, or QEMU.
#[derive(Debug, Clone, Copy, PartialEq)]
enum End {
    Source,
    Destination,
}

impl End {
    /// The host, of those that guests leave and come to.
    fn of(self, [from, to]: [&str; 2]) -> &str {
        if self == Self::Source { from } else { to }
    }
}

/// When.
#[derive(Debug, Clone, Copy)]
enum Moment {
    /// Every member's pages are on their way, and no guest has stopped.
    Precopy,
    /// One member's message is on its way; the others are where they are.
    At(Point, &'static [&'static str]),
    /// Every guest runs there, and pages are missing.
    Postcopy,
}

/// Guests that share pages, on host `a`. Returns whether they can be had.
fn with_gang(guests: usize, test: impl FnOnce(GangSite)) -> bool {
    let _turn = turn();
    if skip_without(&needs::GUEST) {
        return false;
    }
    let Ok(ksm) = Ksm::take() else {
        println!("skipped: this kernel does not merge equal pages, or does not let this user ask for it");
        return false;
    };
    let site = GangSite::start(guests as u8, JOBS);
    ksm.settle(std::time::Duration::from_secs(600), || Ok(site.footprint().frames)).expect("merged");
    test(site);
    true
}

/// Begins to move guests from one host to the other, and waits for the moment: a message is that of `whose`, or the
/// first of any.
fn until(site: &GangSite, names: &[&str], hosts: [&str; 2], moment: Moment, whose: Option<&str>) -> (Proxy, Attempt) {
    let [from, to] = hosts.map(|name| site.lab.host(name).expect("a host"));
    let proxy = Proxy::start(from, to);
    let options = match moment {
        Moment::Precopy => &["--mode", "precopy", "--bandwidth", "2MB"],
        Moment::At(point, options) => {
            whose.map_or_else(|| proxy.hold(point), |name| proxy.hold_of(name, point));
            options
        }
        Moment::Postcopy => SLOW,
    };
    let attempt = site.begin(names, hosts[0], &proxy.address, options);
    match moment {
        Moment::Precopy => site.all_are_in("precopy", names, hosts[0]),
        Moment::At(..) => proxy.wait_until_held(),
        Moment::Postcopy => site.all_are_in("postcopy", names, hosts[0]),
    }
    (proxy, attempt)
}

/// Kills a daemon with -9 while all move from one host to the other, starts it again, and brings all of them there.
fn killed(site: &mut GangSite, daemon: End, moment: Moment, hosts: [&str; 2]) {
    println!("{daemon:?} killed, {moment:?}");
    let names = &ALL[..site.guests.len()];
    let (proxy, attempt) = until(site, names, hosts, moment, None);
    site.lab.kill_daemon(daemon.of(hosts));
    proxy.cut();
    site.lab.start_daemon(daemon.of(hosts)).expect("it comes back");
    // How it ends depends on who was how far; where the guests are is what counts.
    println!("{}", attempt.end().stderr);
    site.gather(names, hosts);
}

#[test]
fn a_daemon_killed_while_a_gang_moves_costs_no_guest_anything() {
    if left_to_another_day(3) {
        return;
    }
    with_gang(3, |mut site| {
        killed(&mut site, End::Destination, Moment::Precopy, ["a", "b"]);
        killed(&mut site, End::Source, Moment::At(Point::Request("commit"), PRECOPY), ["b", "a"]);
        killed(&mut site, End::Destination, Moment::Postcopy, ["a", "b"]);
    });
}

#[test]
fn whichever_daemon_is_killed_in_whichever_phase_a_gang_arrives_in_the_end() {
    if left_to_the_proofs() {
        return;
    }
    let points = [
        Moment::Precopy,
        Moment::At(Point::Request("join"), PRECOPY),
        Moment::At(Point::Reply("propose"), HYBRID),
        Moment::At(Point::Request("round-end"), HYBRID),
        Moment::At(Point::Request("final-round-end"), PRECOPY),
        Moment::At(Point::Reply("load"), PRECOPY),
        Moment::At(Point::Reply("load-postcopy"), HYBRID),
        Moment::At(Point::Request("commit"), HYBRID),
        Moment::At(Point::Reply("commit"), PRECOPY),
        Moment::At(Point::Reply("commit"), SLOW),
        Moment::Postcopy,
        Moment::At(Point::Request("complete"), POSTCOPY),
    ];
    with_gang(3, |mut site| {
        let mut hosts = ["a", "b"];
        for moment in points {
            for daemon in [End::Source, End::Destination] {
                killed(&mut site, daemon, moment, hosts);
                hosts.reverse();
            }
        }
    });
}

/// What happens to one member.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fault {
    Cancelled,
    /// Its QEMU is killed at one end.
    Killed(End),
    /// Its QEMU at the destination answers no more.
    Hangs,
}

/// What becomes of it.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Then {
    /// It goes on where it was.
    Stays,
    /// It goes on there, as the others do.
    Arrives,
    /// It ends with the QEMU that had it.
    Ends,
    /// Its last pages have ended with the QEMU that it left: it waits for them there, until somebody stops it.
    Waits,
}

/// Every phase, in each mode. The first ones have their turn without being asked for.
const MEMBER: &[(Fault, Moment, Then)] = {
    use End::{Destination, Source};
    use Fault::{Cancelled, Hangs, Killed};
    use Moment::{At, Postcopy};
    use Point::{Reply, Request};
    use Then::{Arrives, Ends, Stays, Waits};
    &[
        (Hangs, At(Reply("clock"), HYBRID), Stays),
        (Cancelled, At(Reply("load-postcopy"), HYBRID), Stays),
        (Killed(Destination), At(Request("round-end"), PRECOPY), Stays),
        (Killed(Source), At(Request("load-postcopy"), POSTCOPY), Ends),
        // Set-up.
        (Cancelled, At(Request("propose"), PRECOPY), Stays),
        (Cancelled, At(Reply("propose"), HYBRID), Stays),
        (Killed(Destination), At(Reply("propose"), POSTCOPY), Stays),
        (Killed(Source), At(Request("propose"), PRECOPY), Ends),
        (Killed(Source), At(Reply("propose"), POSTCOPY), Ends),
        // Rounds.
        (Cancelled, At(Request("round-end"), PRECOPY), Stays),
        (Cancelled, At(Reply("round-end"), HYBRID), Stays),
        (Killed(Destination), At(Reply("round-end"), HYBRID), Stays),
        (Hangs, At(Reply("clock"), PRECOPY), Stays),
        (Killed(Source), At(Request("round-end"), PRECOPY), Ends),
        (Killed(Source), At(Request("round-end"), HYBRID), Ends),
        // The pause.
        (Cancelled, At(Request("final-round-end"), PRECOPY), Stays),
        (Cancelled, At(Reply("load"), PRECOPY), Stays),
        (Cancelled, At(Request("load-postcopy"), POSTCOPY), Stays),
        (Killed(Destination), At(Request("final-round-end"), PRECOPY), Stays),
        (Killed(Destination), At(Request("load"), PRECOPY), Stays),
        (Killed(Destination), At(Request("load-postcopy"), HYBRID), Stays),
        (Killed(Destination), At(Request("load-postcopy"), POSTCOPY), Stays),
        (Killed(Source), At(Request("final-round-end"), PRECOPY), Ends),
        (Killed(Source), At(Request("load-postcopy"), HYBRID), Ends),
        // The guest is the destination's.
        (Cancelled, At(Reply("commit"), PRECOPY), Arrives),
        (Cancelled, At(Reply("commit"), HYBRID), Arrives),
        (Cancelled, Postcopy, Arrives),
        (Killed(Source), At(Reply("commit"), PRECOPY), Arrives),
        (Killed(Source), At(Reply("commit"), HYBRID), Waits),
        (Killed(Source), Postcopy, Waits),
        (Killed(Destination), At(Reply("commit"), PRECOPY), Ends),
        (Killed(Destination), At(Reply("commit"), HYBRID), Ends),
        (Killed(Destination), Postcopy, Ends),
    ]
};

/// Does that to the last of these guests while all move from one host to the other: the others arrive, and whatever
/// becomes of it nothing stays where it was. Returns whether it is still there.
fn disturbed(site: &GangSite, names: &[&str], (fault, moment, then): (Fault, Moment, Then), hosts: [&str; 2]) -> bool {
    println!("one of {} {fault:?}, {moment:?}", names.len());
    let (victim, others) = names.split_last().expect("a gang");
    let (proxy, attempt) = until(site, names, hosts, moment, Some(victim));
    let host = |name: &str| site.lab.host(name).expect("a host");
    match fault {
        Fault::Cancelled => {
            let (code, words): (_, &[&str]) =
                if then == Then::Stays { (0, &[]) } else { (1, &["cannot be cancelled"]) };
            cli::ask(host(hosts[0]), &["cancel", victim]).expect(code, words);
        }
        Fault::Killed(end) => site.signal_qemu(victim, end.of(hosts), Signal::SIGKILL),
        Fault::Hangs => site.signal_qemu(victim, hosts[1], Signal::SIGSTOP),
    }
    proxy.release();
    let answer = attempt.end();
    let mut ended = statuses(&answer);
    let how = ended.pop().expect("as many as guests");
    assert!(ended.iter().all(|status| status == "completed"), "{ended:?}: {}", answer.stderr);
    match (fault, then) {
        (Fault::Cancelled, Then::Stays) => assert_eq!(how, "cancelled"),
        (_, Then::Stays | Then::Waits) => assert_eq!(how, "failed"),
        (_, Then::Arrives) => assert_eq!(how, "completed"),
        // Whether it was there before it ended is for its report to say.
        (_, Then::Ends) => println!("{how}"),
    }
    if then == Then::Waits {
        cli::ask(host(hosts[1]), &["stop", victim, "--force"]).expect(0, &[]);
    }
    let is_there = matches!(then, Then::Stays | Then::Arrives);
    if !is_there {
        site.is_gone(victim);
    }
    site.gather(if is_there { names } else { others }, hosts);
    is_there
}

/// The pages of a guest in private memory end with the QEMU that it left, and the guest with the QEMU that runs it:
/// what a gang shares is in its pool, and lives on.
#[test]
fn whatever_becomes_of_a_member_in_whichever_phase_the_others_arrive_and_nothing_is_left() {
    if left_to_another_day(9) {
        return;
    }
    let mut cases = MEMBER.iter().take(times(4, MEMBER.len())).copied().peekable();
    while cases.peek().is_some() {
        let had = with_gang(times(3, ALL.len()), |site| {
            let (mut left, mut hosts) = (site.guests.len(), ["a", "b"]);
            // The others are a gang, too.
            while left > 2
                && let Some(case) = cases.next()
            {
                left -= usize::from(!disturbed(&site, &ALL[..left], case, hosts));
                hosts.reverse();
            }
        });
        if !had {
            return;
        }
    }
}
