//! Migrations in every mode, each with a fault of a random kind at a random moment, of a guest that checks its own
//! memory and reads a disk by direct I/O all the time. Whatever happens, the guest ends up on exactly one host with
//! every page, reads what its disk holds, and leaves nothing on the other.

/// What goes wrong, and when.
mod fault;

use sterna_api::Status;
use sterna_system_tests::census::ram_bytes;
use sterna_system_tests::disk::Disk;
use sterna_system_tests::needs::{left_to_another_day, times};
use sterna_system_tests::plan::JOBS;
use sterna_system_tests::random::Random;
use sterna_system_tests::{Census, Plan, Proxy, Site, needs, skip_without, turn};

use fault::{FAULTS, Fault, Moment, Reached};

fn number_in(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

const MODES: [&str; 5] = ["precopy", "postcopy", "hybrid", "stop-and-copy", "auto"];

/// One migration as the dice have it.
struct Dice {
    fault: Fault,
    mode: &'static str,
    words: Vec<&'static str>,
    moment: Moment,
}

impl Dice {
    /// Each fault meets each mode where there are runs enough. `usual` is how many bytes a migration in a mode carries.
    fn throw(number: u64, usual: impl Fn(&str) -> u64, random: &mut Random) -> Self {
        let fault = FAULTS[number as usize % FAULTS.len()];
        let mode = MODES[(number as usize + number as usize / FAULTS.len()) % MODES.len()];
        let mut words = vec!["--mode", mode];
        words.extend(["--streams", random.of(&["1", "4"])]);
        words.extend(["--compress", random.of(&["off", "off", "lz4", "zstd"])]);
        // So slow that the fault finds it under way, so quick that rounds get somewhere.
        words.extend(["--bandwidth", "100MB"]);
        if fault == Fault::DestinationQemuKilled && mode == "auto" {
            // Where it is killed must be before the point of no return: that is another message in post-copy.
            words.push("--no-postcopy");
        } else if ["postcopy", "hybrid", "auto"].contains(&mode) {
            words.extend(["--postcopy-bandwidth", random.of(&["24MB", "60MB"])]);
        }
        if mode == "precopy" {
            words.extend(["--timeout", "20s", "--on-timeout", "force"]);
        }
        if random.below(2) == 0 {
            words.push("--verify");
        }
        let moment = Moment::throw(fault, mode, usual(mode), random);
        Self { fault, mode, words, moment }
    }
}

/// Both daemons say where the guest is: on one host, wholly. `true` where it has moved.
fn settles(site: &Site) -> bool {
    let (here, there) = site.names();
    let mut states = (String::new(), String::new());
    let settled = || {
        states = (site.state_at(here), site.state_at(there));
        let running = [&states.0, &states.1].map(|state| state == "running");
        assert!(running != [true, true], "both hosts say that the guest runs there");
        running == [true, false] && states.1 == "none" || running == [false, true] && states.0 == "none"
    };
    site.eventually("the guest belongs to one host", settled);
    states.1 == "running"
}

/// Nothing but a daemon on the host without the guest, and no page watched or awaited on the other.
fn hosts_are_clean(site: &Site) {
    let (here, there) = site.names();
    site.nothing_is_left_there();
    site.eventually("a daemon and nothing else on the other host", || {
        let census = Census::of(site, there);
        census.userfaultfds == 0
            && census.programs.iter().map(|(name, count)| (name.as_str(), *count)).eq([("sternad", 1)])
            && ram_bytes(site.host(there)) == 0
    });
    site.eventually("no userfaultfd is open any more", || Census::of(site, here).userfaultfds == 0);
}

/// What became of one migration.
#[derive(Debug)]
struct Ended {
    moved: bool,
    reached: Reached,
    code: i32,
    bytes: u64,
}

fn run(site: &mut Site, disk: &Disk, dice: &Dice, random: &mut Random) -> Ended {
    let (here, there) = site.names();
    let proxy = Proxy::start(site.here(), site.there());
    dice.moment.prepare(&proxy, dice.fault, dice.mode);
    let mut attempt = site.begin(Some(&proxy.address), &dice.words);
    let reached = dice.moment.wait(&proxy, &mut attempt);
    fault::happen(dice.fault, site, &proxy, random);
    proxy.release();
    proxy.up();
    let answer = attempt.end();
    let moved = settles(site);
    let bytes = fault::passed(&proxy);
    println!("    {reached:?}, exit status {}, {} MiB, {}", answer.code, bytes >> 20, if moved { there } else { here });
    match answer.code {
        0 => assert!(moved, "it is said to have moved: {answer:#?}"),
        3 => assert!(!moved, "it is said to have stayed: {answer:#?}"),
        // A failure; or nobody knows yet whose the guest is; or the daemon that was asked is another one now.
        1 | 4 | 5 => {}
        code => panic!("exit status {code}: {answer:#?}"),
    }
    if let Some(report) = answer.report() {
        assert_eq!(report.verify.mismatches, 0, "{:?}", report.verify);
        assert!(report.status != Status::Completed || moved, "{report:#?}");
    }
    if dice.fault == Fault::DestinationQemuKilled && reached != Reached::TooLate {
        assert!(!moved, "its QEMU there was dead: {answer:#?}");
    }
    if moved {
        site.moved();
    }
    drop(proxy);
    hosts_are_clean(site);
    site.checker_is_well();
    site.ran_on_one_host_at_a_time();
    disk.is_read_as_it_is(site);
    Ended { moved, reached, code: answer.code, bytes }
}

#[test]
fn whatever_happens_at_any_moment_the_guest_is_whole_on_one_host_and_reads_what_its_disk_holds() {
    let _turn = turn();
    if left_to_another_day(5) || skip_without(&needs::GUEST) {
        return;
    }
    let clock = || std::time::UNIX_EPOCH.elapsed().map_or(1, |since| since.as_nanos() as u64 >> 10);
    let seed = number_in("STERNA_SEED").unwrap_or_else(clock);
    let runs = number_in("STERNA_RANDOM").unwrap_or(times(3, 300) as u64);
    // Where there are fewer runs than faults and modes it is chance which of them have their turn.
    let first = number_in("STERNA_RANDOM_FIRST").unwrap_or(Random(seed).below((FAULTS.len() * MODES.len()) as u64));
    println!("STERNA_SEED={seed} STERNA_RANDOM={runs} STERNA_RANDOM_FIRST={first}");
    let disk = Disk::make();
    // The last word is the kernel's: it clears what is freed, so that a page which the disk is read into was zeros a
    // moment ago.
    let jobs = format!("{JOBS};{} init_on_free=1", disk.job());
    let mut site = Site::start(&Plan { jobs, more: disk.arguments(), memory_bytes: 320 << 20, ..Plan::small() });
    disk.is_read_as_it_is(&site);
    let mut usual = std::collections::BTreeMap::<&str, u64>::new();
    let (mut hit, mut moves) = (0, 0);
    for number in first..first + runs {
        // A number's dice do not depend on how many were thrown before.
        let mut random = Random(seed ^ number.wrapping_mul(0x2545_f491_4f6c_dd1d));
        let dice = Dice::throw(number, |mode| usual.get(mode).copied().unwrap_or(96 << 20), &mut random);
        println!("{number}: {:?} at {:?}, {}", dice.fault, dice.moment, dice.words.join(" "));
        let ended = run(&mut site, &disk, &dice, &mut random);
        if ended.code == 0 {
            usual.insert(dice.mode, ended.bytes);
        }
        hit += u64::from(ended.reached != Reached::TooLate);
        moves += u64::from(ended.moved);
    }
    println!("{hit} of {runs} were hit, {moves} moved");
    // A handful can all be over before their fault.
    assert!(runs < 20 || hit * 2 >= runs, "too many were over before the fault");
    // What was given up as well as what went on: the guest can still be moved.
    site.migrate(&[]);
    site.checker_is_well();
    disk.is_read_as_it_is(&site);
}
