use std::collections::HashSet;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::Value;
use sterna_api::{TemplateState, Vm, VmState};
use sterna_system_tests::census::{Census, ram_bytes};
use sterna_system_tests::member::Member;
use sterna_system_tests::needs::times;
use sterna_system_tests::random::Random;
use sterna_system_tests::site::files;
use sterna_system_tests::{Answer, Attempt, Site, cli};

use super::faults::{qemus, stop};
use super::overlays::{read_what_they_wrote, top, used, with_disks};
use super::{are_well, fork, forked, machines, with_origin};

/// The longest delay of a blow, microseconds: about what a taking and what fills the pool up again take.
const LATEST_US: u64 = 400_000;

fn template(site: &Site, words: &[&str]) -> TemplateState {
    let answer = cli::ask(site.host("a"), &[&["template", "origin", "--json"], words].concat());
    serde_json::from_str(&answer.expect(0, &[]).stdout).unwrap_or_else(|error| panic!("{error}: {answer:#?}"))
}

fn take(site: &Site, name: &str) -> Answer {
    cli::ask(site.host("a"), &["run", name, "--from-template", "origin", "--detach"])
}

/// Checks that it was done, and that its standard output has all of `words`.
fn says(answer: &Answer, words: &[&str]) {
    answer.expect(0, &[]);
    words.iter().for_each(|word| assert!(answer.stdout.contains(word), "'{word}' is not said: {answer:#?}"));
}

fn is_full(site: &Site, ready: u32) {
    site.eventually("the pool is full", || template(site, &[]).ready == ready);
}

/// The machines that somebody has named.
fn named(site: &Site) -> Vec<Vm> {
    machines(site).into_iter().filter(|vm| vm.held_for.is_none()).collect()
}

fn generation(site: &Site, name: &str) -> String {
    let words = Member::new(site, name).shown("a").arguments;
    words.iter().find(|word| word.starts_with("vmgenid,guid=")).expect("it has a generation ID").clone()
}

#[test]
fn clones_that_were_held_go_on_from_the_fork_each_by_itself_whoever_has_ended_since() {
    with_origin("shared", |site| {
        let report = forked(&fork(site, "origin", &["--hold", "2"]));
        let made = report.template.expect("a template");
        assert_eq!((made.ready, made.hold, report.clones.len()), (2, 2, 0));
        assert!(made.shared_bytes > 2 * (8 << 20), "what each may have to pay for is shown: {made:#?}");
        are_well(site, &["origin"]);
        // What the source writes is not in what is taken later.
        says(&take(site, "one"), &["held ready"]);
        are_well(site, &["origin", "one"]);
        is_full(site, 2);
        site.kill_daemon("a");
        site.start_daemon("a");
        assert_eq!(template(site, &[]).ready, 2, "they are held on");
        stop(site, "origin");
        let names = ["two", "three", "four", "five"];
        names.iter().for_each(|name| {
            take(site, name).expect(0, &[]);
        });
        are_well(site, &["one", "two", "three", "four", "five"]);
        let numbers: HashSet<String> = ["one", "two", "three", "four"].map(|name| generation(site, name)).into();
        assert_eq!(numbers.len(), 4, "each has its own: {numbers:?}");
        // Each is a machine as any other: it can be forked, and moved.
        forked(&fork(site, "two", &["six"]));
        Member::new(site, "three").migrate(&["--verify"]).expect(0, &[]);
        are_well(site, &["one", "two", "six"]);
        says(&cli::ask(site.host("a"), &["ps"]), &["TEMPLATE", "FAMILY", "2 of 2"]);
        assert_eq!(template(site, &["--hold", "0"]).ready, 0);
        assert_eq!(qemus(site).len(), named(site).len());
        cli::ask(site.host("a"), &["template", "origin", "--remove"]).expect(0, &[]);
        are_well(site, &["one", "two", "four", "five", "six"]);
        ["one", "two", "four", "five", "six"].iter().for_each(|name| stop(site, name));
        site.eventually("nothing is left of any", || files(site.host("a")).is_empty());
    });
}

#[test]
fn machines_of_one_family_move_together_as_a_gang_and_what_is_held_stays() {
    with_origin("private", |site| {
        forked(&fork(site, "origin", &["one", "two", "--hold", "1"]));
        let origin = Member::new(site, "origin").shown("a");
        let family = origin.family.expect("a family");
        assert_eq!(Member::new(site, "two").shown("a").family.as_ref(), Some(&family));
        let to = site.host("b").listen();
        cli::ask(site.host("a"), &["migrate", "--family", "nobody", "--to", &to]).expect(1, &["no family"]);
        cli::ask(site.host("a"), &["migrate", "--family", "two", "--to", &to, "--verify"]).expect(0, &[]);
        ["origin", "one", "two"].iter().for_each(|name| Member::new(site, name).is_well());
        assert!(named(site).is_empty() && template(site, &[]).ready == 1, "what is held stays");
        for name in ["origin", "one", "two"] {
            let vm = Member::new(site, name).shown("b");
            assert_eq!(vm.family.as_ref(), Some(&family), "{name}");
            assert_eq!(vm.forked_from.as_deref(), (name != "origin").then_some("origin"));
            // Nobody has said that they may share anything; but they did.
            assert!(vm.shared_bytes > origin.shared_bytes / 2, "{vm:?}");
        }
    });
}

/// What of a pool's life the daemon dies in.
const STEPS: [&str; 5] = ["make", "take", "fill", "shrink", "remove"];

#[test]
fn whenever_the_daemon_is_killed_the_pool_comes_back_to_its_number_and_no_clone_is_half_there() {
    with_origin("shared", |site| {
        daemons_die(site, &[], |_| {}, stop);
        stop(site, "origin");
        site.eventually("nothing is left of any", || files(site.host("a")).is_empty());
    });
}

/// The same where each clone has an overlay of the disk as it was at the fork: none is left that nobody uses.
#[test]
fn whenever_the_daemon_is_killed_each_clone_of_the_pool_has_a_disk_of_its_own_and_no_overlay_is_left() {
    with_disks(false, &[], |site, images| {
        let is_right = |site: &Site| {
            let all = machines(site);
            let in_use = || all.iter().flat_map(|vm| used(site, "a", &vm.name)).chain(of_the_template(site));
            site.eventually("every overlay has its user", || images.overlays().is_subset(&in_use().collect()));
            let names: Vec<&str> = all.iter().filter(|vm| vm.held_for.is_none()).map(|vm| vm.name.as_str()).collect();
            read_what_they_wrote(site, &names);
        };
        let ends = |site: &Site, name: &str| {
            let own = top(site, name);
            stop(site, name);
            std::fs::remove_file(own).expect("its overlay");
        };
        daemons_die(site, &["--overlay-disks"], is_right, ends);
        // Nobody else wants its images any more, so it is on its own disk again, soon; and beside it has the script.
        site.eventually("its disk is one image", || used(site, "a", "origin").len() == 2);
        assert_eq!(images.overlays(), HashSet::new());
        read_what_they_wrote(site, &["origin"]);
    });
}

/// The overlays that clones of the template get copies of.
fn of_the_template(site: &Site) -> Vec<PathBuf> {
    let record = site.host("a").directory.join("state/templates/origin.json");
    let Ok(text) = std::fs::read_to_string(record) else { return Vec::new() };
    let record: Value = serde_json::from_str(&text).expect("a record");
    let own = record["overlays"].as_array().expect("overlays").iter().filter(|overlay| overlay["of"] == "");
    own.map(|overlay| overlay["path"].as_str().expect("a path").into()).collect()
}

/// The daemon dies in each step of a pool's life, which a fork with these words begins. After each all `is_right`, and
/// those that were taken end.
fn daemons_die(site: &mut Site, words: &[&str], is_right: impl Fn(&Site), ends: impl Fn(&Site, &str)) {
    let mut random = Random(11);
    let mut is_there = false;
    let make = [&["fork", "origin", "--hold", "2"], words].concat();
    for number in 0..times(1, 20) * STEPS.len() {
        let step = STEPS[number % STEPS.len()];
        if step != "make" && !is_there {
            cli::ask(site.host("a"), &make).expect(0, &[]);
        }
        let name = format!("n{number}");
        let words: &[&str] = match step {
            "make" => &make,
            "shrink" => &["template", "origin", "--hold", "1"],
            "remove" => &["template", "origin", "--remove"],
            _ => &["run", &name, "--from-template", "origin", "--detach"],
        };
        let attempt = Attempt::run(site.host("a"), words);
        // A taking is over at once; what fills the pool up again is not.
        let latest = if step == "take" { 20_000 } else { LATEST_US };
        let delay = Duration::from_micros(random.below(latest));
        std::thread::sleep(delay);
        super::daemon_dies_in(site, attempt);
        let there = cli::ask(site.host("a"), &["template", "--json"]);
        is_there = there.stdout.contains("\"origin\"");
        println!("{number}: killed after {delay:?} in '{step}', the template is there: {is_there}");
        if is_there {
            let hold = template(site, &[]).hold;
            is_full(site, hold);
        }
        for vm in named(site) {
            assert_eq!(vm.state, VmState::Running, "{vm:#?}");
            Member::new(site, &vm.name).is_well();
        }
        let held = machines(site).iter().filter(|vm| vm.held_for.is_some()).count();
        site.eventually("no other QEMU is left", || qemus(site).len() == named(site).len() + held);
        if is_there && template(site, &[]).hold != 2 {
            assert_eq!(template(site, &["--hold", "2"]).ready, 2);
        }
        is_right(site);
        named(site).iter().filter(|vm| vm.name != "origin").for_each(|vm| ends(site, &vm.name));
    }
    if is_there {
        cli::ask(site.host("a"), &["template", "origin", "--remove"]).expect(0, &[]);
    }
}

/// How many mappings a process has.
fn mappings(pid: u32) -> usize {
    std::fs::read_to_string(format!("/proc/{pid}/maps")).expect("it runs").lines().count()
}

/// A QEMU has some hundred mappings beside its guest's RAM, and what the guest discards may cut that up further.
const BESIDE: usize = 4096;

#[test]
fn a_thousand_forks_in_a_row_leave_nothing_and_ram_stays_in_few_pieces() {
    with_origin("shared", |site| {
        let origin = Member::new(site, "origin");
        let pid = origin.shown("a").pid;
        let round = |site: &Site, number: usize| {
            let held = number.is_multiple_of(2);
            if held {
                forked(&fork(site, "origin", &["--hold", "1"]));
                says(&take(site, "clone"), &["held ready"]);
            } else {
                let pieces = forked(&fork(site, "origin", &["clone"])).pieces;
                assert!(pieces <= 8192, "{pieces}");
            }
            let clone = Member::new(site, "clone").shown("a").pid;
            for of in [pid, clone] {
                let mappings = mappings(of);
                assert!(mappings < 8192 + BESIDE, "{mappings}");
            }
            if number.is_multiple_of(50) {
                are_well(site, &["origin", "clone"]);
            }
            stop(site, "clone");
            if held {
                cli::ask(site.host("a"), &["template", "origin", "--remove"]).expect(0, &[]);
            }
        };
        // From the second on its RAM is private, and all that begins once has begun.
        (0..2).for_each(|number| round(site, number));
        let alone = |site: &Site| files(site.host("a")).len();
        let settled = |site: &Site| {
            // Names of files that nobody maps any more go within seconds.
            let (mut before, mut since) = (alone(site), Instant::now());
            site.eventually("names have gone", || {
                let now = alone(site);
                if now != before {
                    (before, since) = (now, Instant::now());
                }
                since.elapsed() > Duration::from_secs(6)
            });
            // Whoever looks for what nobody needs has files open meanwhile.
            Census::settled(site, "a")
        };
        let before = settled(site);
        let rounds = times(6, 1000);
        let began = Instant::now();
        for number in 0..rounds {
            round(site, number);
            if number % 100 == 99 {
                println!("{number}: {} mappings, {} files after {:?}", mappings(pid), alone(site), began.elapsed());
            }
        }
        let after = settled(site);
        println!("{rounds} forks in {:?}: {} mappings, {after:?}", began.elapsed(), mappings(pid));
        assert_eq!((after.programs, after.threads, after.mounts), (before.programs, before.threads, before.mounts));
        let few = |census: &std::collections::BTreeMap<String, usize>| census.values().sum::<usize>();
        assert!(few(&after.descriptors) <= few(&before.descriptors) + 4, "{:?}", after.descriptors);
        // The layers that its own RAM is in, and nothing that only clones had: it has one copy again.
        let ram = || sterna_bench::footprint::Ram::of(pid, super::plan().memory_bytes).expect("its RAM");
        let own = sterna_bench::footprint::of(&[ram()]).expect("its frames").frames * 4096;
        site.eventually("the host holds no more than the guest has", || {
            ram_bytes(site.host("a")) + origin.shown("a").allocated_bytes < own + own / 4
        });
        origin.is_well();
        // The name of an image that nobody maps goes within seconds, on a busy host within more.
        site.eventually("every image is somebody's", || {
            // By number: a mapping's own name is the one that its file had when it was opened.
            let text = std::fs::read_to_string(format!("/proc/{pid}/maps")).expect("it runs");
            let mapped: HashSet<u64> =
                text.lines().filter_map(|line| line.split_whitespace().nth(4)?.parse().ok()).collect();
            let images = files(site.host("a")).into_iter().filter(|path| path.to_string_lossy().contains("image@"));
            images.filter_map(|path| std::fs::metadata(path).ok()).all(|image| mapped.contains(&image.ino()))
        });
    });
}
