use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sterna_system_tests::{Attempt, Kind, Point, Proxy, Site, cli};

use crate::Random;

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Every connection ends; new ones can be made.
    LinkCut,
    /// The same, and for a while none can be made.
    LinkDown,
    /// Nothing passes for a while.
    LinkSilent,
    /// Daemons are killed with -9, and started again.
    SourceKilled,
    /// As above.
    DestinationKilled,
    /// As above, in either order.
    BothKilled,
    /// The QEMU that waits there is killed with -9, before the point of no return.
    DestinationQemuKilled,
    /// Somebody cancels.
    Cancelled,
    /// A daemon stands still for a while.
    SourceStopped,
    /// As above.
    DestinationStopped,
    /// A QEMU stands still for a while.
    SourceQemuStopped,
    /// As above.
    DestinationQemuStopped,
}

/// As many as have no divisor in common with the modes: so each meets each.
pub const FAULTS: [Fault; 12] = [
    Fault::LinkCut,
    Fault::SourceKilled,
    Fault::DestinationQemuStopped,
    Fault::DestinationKilled,
    Fault::Cancelled,
    Fault::BothKilled,
    Fault::LinkSilent,
    Fault::DestinationQemuKilled,
    Fault::SourceStopped,
    Fault::LinkDown,
    Fault::SourceQemuStopped,
    Fault::DestinationStopped,
];

/// When it goes wrong. Of what has passed, not of the time: machines differ.
#[derive(Debug, Clone, Copy)]
pub enum Moment {
    /// So many bytes of pages have passed.
    Passed(u64),
    /// This message comes by, and waits until the fault has happened.
    Held(Point),
}

/// What was reached first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reached {
    /// The moment.
    Moment,
    /// The message that leads to the point of no return.
    Brink,
    /// The migration's end.
    TooLate,
}

/// Messages that every migration of these modes has.
const BEFORE: [Point; 3] = [Point::Reply("propose"), Point::Request("stopped"), Point::Reply("commit")];
const WITHOUT: [Point; 6] = [
    Point::Request("final-round-end"),
    Point::Reply("final-round-end"),
    Point::Request("load"),
    Point::Reply("load"),
    Point::Request("commit"),
    Point::Reply("commit"),
];
const WITH: [Point; 8] = [
    Point::Request("residue"),
    Point::Request("load-postcopy"),
    Point::Reply("load-postcopy"),
    Point::Request("commit"),
    Point::Reply("commit"),
    Point::Request("paging"),
    Point::Request("complete"),
    Point::Request("release"),
];

impl Moment {
    /// At random; three times of four after some of the bytes that it `usually` takes.
    pub fn throw(fault: Fault, mode: &str, usual: u64, random: &mut Random) -> Self {
        if random.below(4) < 3 || fault == Fault::DestinationQemuKilled {
            return Self::Passed(random.below(usual));
        }
        Self::Held(match mode {
            "precopy" | "stop-and-copy" => random.of(&WITHOUT),
            "postcopy" | "hybrid" => random.of(&WITH),
            _ => random.of(&BEFORE),
        })
    }

    /// Sets what must be set before the migration begins.
    pub fn prepare(self, proxy: &Proxy, fault: Fault, mode: &str) {
        if let Self::Held(point) = self {
            proxy.hold(point);
        } else if fault == Fault::DestinationQemuKilled {
            let with = ["postcopy", "hybrid"].contains(&mode);
            proxy.hold(Point::Reply(if with { "load-postcopy" } else { "load" }));
        }
    }

    /// Waits for it, or for the end of the migration.
    pub fn wait(self, proxy: &Proxy, attempt: &mut Attempt) -> Reached {
        loop {
            if attempt.has_ended() {
                return Reached::TooLate;
            }
            match self {
                Self::Held(_) if proxy.is_holding() => return Reached::Moment,
                Self::Passed(_) if proxy.is_holding() => return Reached::Brink,
                Self::Passed(bytes) if passed(proxy) >= bytes => return Reached::Moment,
                _ => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    }
}

/// Bytes of pages that have passed.
pub fn passed(proxy: &Proxy) -> u64 {
    proxy.passed(Kind::Pages) + proxy.passed(Kind::Urgent)
}

/// Seldom longer than anybody waits for an answer.
fn a_while(random: &mut Random) {
    let most_ms = random.of(&[50, 500, 2_000, 2_000, 14_000]);
    std::thread::sleep(Duration::from_millis(random.below(most_ms)));
}

/// A process stands still for a while.
fn stop(pid: u32, random: &mut Random) {
    let pid = Pid::from_raw(i32::try_from(pid).expect("a process id"));
    // It may end at any time.
    let _ = kill(pid, Signal::SIGSTOP);
    a_while(random);
    let _ = kill(pid, Signal::SIGCONT);
}

/// Makes it happen. Afterwards the link is to be [`up`](Proxy::up), and what is held released.
pub fn happen(fault: Fault, site: &mut Site, proxy: &Proxy, random: &mut Random) {
    let (here, there) = site.names();
    let daemons = |site: &mut Site, victims: &[&'static str], random: &mut Random| {
        for victim in victims {
            site.kill_daemon(victim);
            std::thread::sleep(Duration::from_millis(random.below(300)));
        }
        a_while(random);
        for victim in victims {
            site.start_daemon(victim);
            std::thread::sleep(Duration::from_millis(random.below(300)));
        }
    };
    match fault {
        Fault::LinkCut => proxy.cut(),
        Fault::LinkDown => {
            proxy.down();
            a_while(random);
        }
        Fault::LinkSilent => {
            proxy.stall();
            a_while(random);
        }
        Fault::SourceKilled => daemons(site, &[here], random),
        Fault::DestinationKilled => daemons(site, &[there], random),
        Fault::BothKilled => {
            let victims = random.of(&[[here, there], [there, here]]);
            daemons(site, &victims, random);
        }
        Fault::DestinationQemuKilled => {
            if let Some(pid) = site.qemu_at(there) {
                let _ = kill(Pid::from_raw(i32::try_from(pid).expect("a process id")), Signal::SIGKILL);
                std::thread::sleep(Duration::from_millis(random.below(50)));
            }
        }
        Fault::Cancelled => {
            // It may be too late, or over.
            let _ = cli::ask(site.here(), &["cancel", &site.guest.name]);
        }
        Fault::SourceStopped => stop(site.daemon_at(here), random),
        Fault::DestinationStopped => stop(site.daemon_at(there), random),
        Fault::SourceQemuStopped => site.qemu_at(here).into_iter().for_each(|pid| stop(pid, random)),
        Fault::DestinationQemuStopped => site.qemu_at(there).into_iter().for_each(|pid| stop(pid, random)),
    }
}
