//! A Linux guest that writes all the time, a part of whose memory is at memory hosts.

/// Daemons are killed at each step.
mod killed;
/// It moves.
mod onward;
/// Another redundancy.
mod redundancy;

use std::time::Duration;

use serde_json::Value;
use sterna_api::{Reclaimed, SplitReport, Status};
use sterna_system_tests::cli::{self, Answer, Attempt};
use sterna_system_tests::needs::{left_to_another_day, times};
use sterna_system_tests::random::Random;
use sterna_system_tests::site::files;
use sterna_system_tests::{Plan, Site, needs, skip_without, turn};

const MIB: u64 = 1 << 20;
/// How much of the guest stays here, MiB of 256.
const HERE: u64 = 96;

/// A guest on `a`, and two hosts that lend.
fn site() -> Site {
    lending(Site::start(&Plan { hosts: ["a", "b", "c"].map(str::to_owned).into(), ..Plan::small() }))
}

/// `b` and `c` lend.
fn lending(site: Site) -> Site {
    lending_by(site, &["b", "c"])
}

/// These hosts lend.
fn lending_by(mut site: Site, hosts: &[&str]) -> Site {
    hosts.iter().for_each(|host| site.configure(host, "lend_memory = \"400M\""));
    site
}

/// The words of `sterna split`.
fn words(site: &Site, here_mib: u64) -> Vec<String> {
    words_over(site, here_mib, &[("b", 120), ("c", 120)])
}

/// The same over these hosts, with so many MiB each.
fn words_over(site: &Site, here_mib: u64, hosts: &[(&str, u64)]) -> Vec<String> {
    let memory = |(host, mib): &(&str, u64)| ["--memory".into(), format!("{}={mib}M", site.host(host).listen())];
    let words = ["split", &site.guest.name, "--json", "-", "--main", &format!("here={here_mib}M")];
    words.map(str::to_owned).into_iter().chain(hosts.iter().flat_map(memory)).collect()
}

fn ask(site: &Site, words: &[String]) -> Answer {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    cli::ask(site.here(), &words)
}

fn split(site: &Site, here_mib: u64) -> SplitReport {
    ask(site, &words(site, here_mib)).completed_split()
}

fn merge_words(site: &Site) -> Vec<String> {
    ["merge", &site.guest.name, "--json", "-"].map(str::to_owned).into()
}

fn merge(site: &Site) -> SplitReport {
    ask(site, &merge_words(site)).completed_split()
}

/// What is elsewhere of the guest; `None` where it is not split.
fn away(site: &Site) -> Option<u64> {
    let answer = cli::ask(site.here(), &["show", &site.guest.name, "--json"]);
    let vm: Value = serde_json::from_str(&answer.stdout).unwrap_or_default();
    vm["split"]["away_pages"].as_u64()
}

/// Both memory hosts have all of their memory back.
fn all_is_given_back(site: &Site) {
    given_back_at(site, &["b", "c"]);
}

/// These have all of their memory back.
fn given_back_at(site: &Site, hosts: &[&str]) {
    let used = |host: &str| -> u64 {
        let answer = cli::ask(site.host(host), &["lent", "--json"]);
        let lent: Value = serde_json::from_str(&answer.stdout).unwrap_or_default();
        lent["granted_bytes"].as_u64().unwrap_or(1)
    };
    site.eventually("memory hosts have all of their memory back", || hosts.iter().all(|host| used(host) == 0));
}

#[test]
fn a_guest_runs_on_while_a_part_of_it_leaves_whoever_dies_and_comes_back_whole() {
    let _turn = turn();
    if skip_without(&needs::GUEST) {
        return;
    }
    let mut site = site();
    site.checker_is_well();
    let report = split(&site, HERE);
    println!("{report:?}");
    assert!(report.allocated_after_bytes <= HERE * MIB && report.away_pages > 0, "{report:?}");
    site.checker_is_well();
    let told = site.told_at("a");
    assert!(told.contains("at memory hosts") && told.contains(&site.host("c").listen()), "{told}");
    let there = site.host("b").listen();
    cli::ask(site.here(), &["migrate", &site.guest.name, "--to", &there])
        .expect(1, &["memory hosts", "is one of these"]);

    // Each daemon dies once. Where it is the guest's own, whoever needs a page waits for the next.
    for host in ["b", "a", "c", "a"] {
        site.kill_daemon(host);
        std::thread::sleep(Duration::from_millis(300));
        site.start_daemon(host);
        site.checker_is_well();
        site.eventually("it is split still, and its hosts answer", || {
            let told = site.told_at("a");
            told.contains("at memory hosts") && !told.contains("waiting for")
        });
    }
    // More of it, and less.
    split(&site, 2 * HERE);
    let report = split(&site, HERE / 2);
    assert!(report.allocated_after_bytes <= HERE / 2 * MIB, "{report:?}");
    site.checker_is_well();

    let report = merge(&site);
    println!("{report:?}");
    assert!(report.away_pages == 0 && report.in_pages > 0, "{report:?}");
    all_is_given_back(&site);
    site.checker_is_well();
    // It is a guest as any other.
    site.migrate(&[]);
    site.checker_is_well();
    site.ran_on_one_host_at_a_time();
}

/// Ctrl-C at a split leaves the machine as it was; at a merge, split.
#[test]
fn what_is_called_off_is_as_it_was_before() {
    let _turn = turn();
    if left_to_another_day(9) || skip_without(&needs::GUEST) {
        return;
    }
    let mut site = site();
    // One memory host is not there, so it does not end.
    let hang = |site: &mut Site, words: &[String]| {
        site.kill_daemon("c");
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        Attempt::run(site.here(), &words)
    };
    split(&site, HERE);
    let words = merge_words(&site);
    let running = hang(&mut site, &words);
    site.eventually("its memory comes back", || away(&site).is_some_and(|pages| pages > 0));
    std::thread::sleep(Duration::from_millis(500));
    running.interrupt();
    let answer = running.end();
    answer.expect(3, &["cancel"]);
    assert_eq!(answer.split_report().status, Status::Cancelled);
    assert!(away(&site).is_some(), "it is split still");
    site.start_daemon("c");
    site.checker_is_well();
    merge(&site);
    all_is_given_back(&site);

    // Many a page leaves before nothing is left that may: the guest itself uses more than that.
    let words = super_small(&site);
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let mut running = Attempt::run(site.here(), &words);
    site.eventually("pages leave", || away(&site).is_some_and(|pages| pages > 1000) || running.has_ended());
    if !running.has_ended() {
        running.interrupt();
        let answer = running.end();
        println!("{answer:?}");
        if answer.code != 0 {
            answer.expect(3, &["cancel"]);
            assert_eq!(away(&site), None, "it is not split any more");
            all_is_given_back(&site);
        }
    }
    site.checker_is_well();
}

/// As little as may stay: QEMU, the guest's kernel and its checker use more.
fn super_small(site: &Site) -> Vec<String> {
    words(site, 16).iter().map(|word| word.replace("=120M", "=250M")).collect()
}

#[test]
fn a_daemon_that_is_killed_at_any_moment_leaves_a_guest_that_can_be_merged() {
    let _turn = turn();
    if left_to_another_day(9) || skip_without(&needs::GUEST) {
        return;
    }
    let mut site = site();
    let mut random = Random::seeded();
    let (mut round, mut cut_off) = (0, 0);
    // At least twice in the middle of something.
    while round < times(6, 60) || cut_off < 2 {
        round += 1;
        assert!(round < 200, "no daemon was ever killed in the middle");
        let words = match (away(&site), random.below(2)) {
            (None, _) => words(&site, HERE),
            (Some(_), 0) => words(&site, HERE / 2 + random.below(HERE)),
            (Some(_), _) => merge_words(&site),
        };
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let running = Attempt::run(site.here(), &words);
        std::thread::sleep(Duration::from_millis(random.below(400)));
        let host = ["a", "a", "b", "c"][random.below(4) as usize];
        site.kill_daemon(host);
        if host != "a" {
            std::thread::sleep(Duration::from_millis(random.below(500)));
            site.start_daemon(host);
        }
        let answer = running.end();
        println!("round {round}: {}, daemon of {host} killed: exit status {}", words[0], answer.code);
        cut_off += u32::from(answer.code == 5);
        if host == "a" {
            assert!([0, 5].contains(&answer.code) || is_to_ask_again(&answer), "{answer:#?}");
            site.start_daemon(host);
        }
        site.checker_is_well();
    }
    println!("{cut_off} were cut off");
    site.eventually("it is merged", || match away(&site) {
        None => true,
        Some(_) => ask(&site, &merge_words(&site)).code == 0,
    });
    all_is_given_back(&site);
    site.checker_is_well();
    site.migrate(&[]);
}

/// Whether a request came so soon after a daemon's start that a memory host had not been asked, or told, by then.
fn is_to_ask_again(answer: &Answer) -> bool {
    ["have answered since the daemon was started", "has not been told yet"]
        .iter()
        .any(|words| answer.stderr.contains(words))
}

/// Memory hosts are exchanged by these words, and the daemon of one of `hosts` dies within so many milliseconds, and is
/// back. Returns which it was, and how the work ended.
fn a_daemon_dies_meanwhile(
    site: &mut Site,
    random: &mut Random,
    words: &[String],
    hosts: &[&str],
    within_ms: u64,
) -> String {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let running = Attempt::run(site.here(), &words);
    std::thread::sleep(Duration::from_millis(random.below(within_ms)));
    let host = hosts[random.below(hosts.len() as u64) as usize];
    site.kill_daemon(host);
    if host != "a" {
        std::thread::sleep(Duration::from_millis(random.below(500)));
        site.start_daemon(host);
    }
    let answer = running.end();
    if host == "a" {
        assert!([0, 5].contains(&answer.code) || is_to_ask_again(&answer), "{answer:#?}");
        site.start_daemon(host);
    }
    site.checker_is_well();
    format!("{host} killed: exit status {}", answer.code)
}

/// The guest writes on, and each of its daemons dies at any moment.
#[test]
fn memory_hosts_are_exchanged_under_a_guest_that_writes_whoever_dies() {
    let _turn = turn();
    if left_to_another_day(9) || skip_without(&needs::GUEST) {
        return;
    }
    let mut site = site();
    let mut random = Random::seeded();
    // One takes all that leaves, and then the other one does; or both share it.
    let ways: [&[(&str, u64)]; 3] = [&[("b", 200)], &[("c", 200)], &[("b", 200), ("c", 200)]];
    ask(&site, &words_over(&site, HERE, ways[0])).completed_split();
    let mut turn = 0;
    for round in 0..times(5, 60) {
        turn = (turn + 1 + random.below(2) as usize) % ways.len();
        let words = words_over(&site, HERE, ways[turn]);
        let died = a_daemon_dies_meanwhile(&mut site, &mut random, &words, &["a", "a", "b", "c"], 600);
        println!("round {round}: {:?}, daemon of {died}", ways[turn]);
    }
    // Whatever state that is: all of them are told what is to be.
    for way in ways {
        site.eventually("memory hosts are exchanged", || ask(&site, &words_over(&site, HERE, way)).code == 0);
        site.checker_is_well();
    }
    site.eventually("it is merged", || ask(&site, &merge_words(&site)).code == 0);
    all_is_given_back(&site);
    site.checker_is_well();
    site.migrate(&[]);
}

/// Each page is at two memory hosts. One goes down for good while the guest writes, then two others take the place of
/// both, and one of these goes as well.
#[test]
fn a_guest_whose_pages_are_mirrored_loses_none_with_a_memory_host() {
    let _turn = turn();
    if left_to_another_day(9) || skip_without(&needs::GUEST) {
        return;
    }
    let hosts = ["a", "b", "c", "d", "e"].map(str::to_owned).into();
    let mut site = lending_by(Site::start(&Plan { hosts, ..Plan::small() }), &["b", "c", "d", "e"]);
    let twice = |words: Vec<String>| [words, vec!["--redundancy".into(), "copies=2".into()]].concat();
    ask(&site, &twice(words_over(&site, HERE, &[("b", 200), ("c", 200)]))).completed_split();
    site.checker_is_well();
    site.kill_daemon("b");
    site.checker_is_well();
    // What the guest wants and is away comes from the other one.
    ask(&site, &words_over(&site, HERE + 20, &[])).completed_split();
    site.checker_is_well();
    ask(&site, &words_over(&site, HERE, &[("d", 200), ("e", 200)])).completed_split();
    site.checker_is_well();
    let told = site.told_at("a");
    assert!(told.contains(&site.host("d").listen()) && !told.contains(&site.host("b").listen()), "{told}");
    site.kill_daemon("e");
    site.checker_is_well();
    merge(&site);
    site.checker_is_well();
    site.start_daemon("b");
    site.start_daemon("e");
    given_back_at(&site, &["b", "c", "d", "e"]);
    site.ran_on_one_host_at_a_time();
}

/// There is parity. One goes down for good while the guest writes, another takes its place, and one of the others goes
/// as well.
#[test]
fn a_guest_with_parity_loses_no_page_with_any_one_memory_host() {
    let _turn = turn();
    if left_to_another_day(9) || skip_without(&needs::GUEST) {
        return;
    }
    let hosts = ["a", "b", "c", "d", "e"].map(str::to_owned).into();
    let mut site = lending_by(Site::start(&Plan { hosts, ..Plan::small() }), &["b", "c", "d", "e"]);
    let with_parity = |words: Vec<String>| [words, vec!["--redundancy".into(), "parity".into()]].concat();
    ask(&site, &with_parity(words_over(&site, HERE, &[("b", 150), ("c", 150), ("d", 150)]))).completed_split();
    site.checker_is_well();
    site.kill_daemon("b");
    site.checker_is_well();
    // What the guest wants and is away is put together from the others.
    ask(&site, &words_over(&site, HERE + 20, &[])).completed_split();
    site.checker_is_well();
    ask(&site, &words_over(&site, HERE, &[("c", 150), ("d", 150), ("e", 150)])).completed_split();
    site.eventually("what it had is made anew", || !site.told_at("a").contains("without parity"));
    site.checker_is_well();
    site.kill_daemon("d");
    site.checker_is_well();
    merge(&site);
    site.checker_is_well();
    site.start_daemon("b");
    site.start_daemon("d");
    given_back_at(&site, &["b", "c", "d", "e"]);
    site.ran_on_one_host_at_a_time();
}

#[test]
fn a_split_guest_that_ends_leaves_nothing_behind_anywhere() {
    let _turn = turn();
    if left_to_another_day(9) || skip_without(&needs::GUEST) {
        return;
    }
    let mut site = site();
    split(&site, HERE);
    // While one of its hosts is away: nobody waits for it.
    site.kill_daemon("b");
    cli::ask(site.here(), &["stop", &site.guest.name, "--force"]).expect(0, &[]);
    assert!(files(site.here()).is_empty(), "{:?}", files(site.here()));
    site.start_daemon("b");
    all_is_given_back(&site);
}

/// What its guest holds free is taken wherever it is, while it allocates and frees all the time.
#[test]
fn a_split_guest_under_churn_loses_no_page_while_its_free_memory_is_taken() {
    let _turn = turn();
    if left_to_another_day(9) || skip_without(&needs::GUEST) {
        return;
    }
    let plan = Plan { hosts: ["a", "b", "c"].map(str::to_owned).into(), ..Plan::churning() };
    let site = lending(Site::start(&plan));
    site.churn_is_well();
    let report = ask(&site, &words_over(&site, 192, &[("b", 240), ("c", 240)])).completed_split();
    println!("{report:?}");
    let (mut elsewhere, mut taken) = (0, 0);
    site.eventually("enough of what was taken was at memory hosts", || {
        let answer = cli::ask(site.here(), &["reclaim", &site.guest.name, "--json", "-"]);
        // A guest that is too busy to be counted is left alone, and says so.
        if answer.code == 1 && answer.stderr.contains("guest-unfit") {
            return false;
        }
        answer.expect(0, &[]);
        let done: Reclaimed = serde_json::from_str(&answer.stdout).expect("a report");
        (elsewhere, taken) = (elsewhere + done.elsewhere_pages, taken + done.reclaimed_pages);
        elsewhere > times(500, 20_000) as u64
    });
    println!("{taken} pages taken, {elsewhere} of them at memory hosts");
    site.churn_is_well();
    site.checker_is_well();
    merge(&site);
    all_is_given_back(&site);
    site.churn_is_well();
    site.checker_is_well();
}

/// Its balloon takes what it holds free, wherever that is, and returns it, while its pages leave and come. It moves.
#[test]
fn a_split_guest_under_churn_loses_no_page_while_its_balloon_grows_and_shrinks_and_it_moves() {
    let _turn = turn();
    if left_to_another_day(9) || skip_without(&needs::GUEST) {
        return;
    }
    let plan = Plan {
        hosts: ["a", "b", "c", "d"].map(str::to_owned).into(),
        more: ["-device", "virtio-balloon-pci,deflate-on-oom=on"].map(str::to_owned).to_vec(),
        ..Plan::churning()
    };
    let mut site = lending_by(Site::start(&plan), &["c", "d"]);
    site.churn_is_well();
    cli::ask(site.here(), &["balloon", &site.guest.name, "--auto", "--interval", "1s"]).expect(0, &[]);
    ask(&site, &words_over(&site, 192, &[("c", 240), ("d", 240)])).completed_split();
    let size = |site: &Site| -> u64 {
        let answer = cli::ask(site.here(), &["show", &site.guest.name, "--json"]);
        let vm: Value = serde_json::from_str(&answer.stdout).unwrap_or_default();
        vm["balloon"]["size_bytes"].as_u64().unwrap_or_default()
    };
    for _ in 0..times(2, 20) {
        let former = size(&site);
        site.eventually("the balloon is another size", || size(&site).abs_diff(former) >= 4 * MIB);
        let report = site.migrate(&["--mode", "precopy"]);
        println!("a balloon of {} MiB: {:?}", size(&site) / MIB, report.verify);
        assert!(report.verify.away_pages > 0, "nothing of it was away");
        site.churn_is_well();
        site.checker_is_well();
    }
    site.eventually("it is merged", || ask(&site, &merge_words(&site)).code == 0);
    given_back_at(&site, &["c", "d"]);
    site.churn_is_well();
    site.checker_is_well();
}
